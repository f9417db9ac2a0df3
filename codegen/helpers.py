"""Functions that a generated kernel's file defines where its text calls them. Imports nothing of ours."""

from __future__ import annotations

POW = '''
@triton.jit
def _pow(x, exponent, kind: tl.constexpr):
    if exponent == 2.0:
        y = x * x
    elif exponent == 3.0:
        y = (x * x).to(kind).to(x.dtype) * x
    elif exponent == 1.0:
        y = x
    else:
        y = libdevice.pow(x, exponent)
    return y


'''
"""``x ** exponent`` for a number that is known when the kernel runs; small powers are products, as in ATen's kernels.
``kind``: the type that a product is rounded to."""

MUL = '''
@triton.jit
def _mul(a, b):
    return a * b


'''

LOGADDEXP = '''
@triton.jit
def _logaddexp(a, b):
    high = tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
    low = tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)
    same = (high == low) & (tl.abs(high) == float("inf"))
    return tl.where(same, high, high + libdevice.log1p(libdevice.exp(low - high)))


'''
"""What scans combine with, beside sums and extremes; infinities of one sign are their own."""

HELPERS = {"_pow(": POW, ", _mul)": MUL, "_logaddexp": LOGADDEXP}


def used(text: str) -> str:
    """The helpers that ``text`` calls or passes on."""
    return "".join(source.lstrip("\n") for call, source in HELPERS.items() if call in text)
