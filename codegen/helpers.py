"""Functions that a generated kernel's file defines where its text calls them. Imports `codegen.eighths`."""

from __future__ import annotations

from codegen.eighths import E4M3, E5M2, source_for


def _power(name: str, general: str) -> str:
    return f'''
@triton.jit
def {name}(x, exponent, kind: tl.constexpr):
    if exponent == 2.0:
        y = x * x
    elif exponent == 3.0:
        y = (x * x).to(kind).to(x.dtype) * x
    elif exponent == 1.0:
        y = x
    elif exponent == 4.0:
        y = (x * x) * (x * x)
    else:
        y = {general}(x, exponent)
    return y


'''


POW, NUMBER_POW_16 = _power("_pow", "libdevice.pow"), _power("_number_pow_16", "_pow_16")
"""``x ** exponent`` for a number that is known when the kernel runs; small powers are products, as in ATen's kernels; so is the
fourth, which there calls a function that is no nearer.
``kind``: the type that a product is rounded to. The second one is for results of 16 bits, see `POW_16`."""

POW_16 = '''
@triton.jit
def _pow_16(x, y):
    size = tl.abs(x)
    whole = tl.floor(y) == y
    z = tl.exp2(tl.where(size == 1.0, 0.0, y * libdevice.log2(size)))
    z = tl.where((x.to(tl.int32, bitcast=True) < 0) & whole & (tl.floor(y * 0.5) != y * 0.5), -z, z)
    z = tl.where((x < 0) & (x > float("-inf")) & (whole == 0), float("nan"), z)
    return tl.where(y == 0.0, 1.0, z)


'''
"""``x ** y`` for results that are rounded to 16 bits: a third of the general function's instructions, off by 1e-5 of the result
at the most."""

TANH = '''
@triton.jit
def _tanh(x):
    a = tl.abs(x)
    s = x * x
    near = x + x * (s * (-0.33333299 + s * (0.13331915 + s * (-0.053783293 + s * (0.020794617 + s * -0.0058939452)))))
    far = 1.0 - 2.0 * libdevice.fast_dividef(1.0, 1.0 + tl.exp2(a * 2.8853900817779268))
    return tl.where(a < 0.6, near, tl.where(x < 0, -far, far))


'''
"""Within 2.5 units in the last place, without libdevice's branch for each element."""

TANH_16 = '''
@triton.jit
def _tanh_16(x):
    far = 1.0 - 2.0 * libdevice.fast_dividef(1.0, 1.0 + tl.exp2(x * 2.8853900817779268))
    return tl.where(tl.abs(x) < 0.007, x, far)


'''
"""For results that are rounded to 16 bits, see `codegen.tangents`."""

NORMAL = '''
@triton.jit
def _normal(x):
    near = libdevice.fast_dividef(1.0, 1.0 + 0.2316418882663604 * tl.abs(x))
    series = near * (-0.142248368 + near * (0.7107068705 + near * (-0.7265760135 + near * 0.5307027145)))
    tail = near * (0.127414796 + series) * tl.exp2(x * x * -0.7213475204444817)
    return tl.where(x >= 0, 1.0 - tail, tail)


'''
"""The normal distribution, see `codegen.gelu`."""

LOGISTIC = '''
@triton.jit
def _logistic(x):
    return libdevice.fast_dividef(1.0, 1.0 + libdevice.fast_expf(-x))


'''

BF16 = '''
@triton.jit
def _bf16(x):
    return tl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $1, 0f00000000;", "=f,f", [x], tl.float32, True, 1)


'''
"""Rounds a float32 to the nearest bfloat16 in one instruction: the upper half of a pair whose lower half is zero."""

AS_LOADED = '''
@triton.jit
def _as_loaded(x):
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], x.dtype, False, 2)


'''
"""Elements of 16 bits as they are, two in a register: the compiler can't know, and hold them as float32 between two uses."""

WIDE = '''
@triton.jit
def _wide(x):
    return tl.inline_asm_elementwise("shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=r,=r,r", [x], tl.float32, True, 2)


'''
"""Two bfloat16 numbers of a register as float32, in two instructions. The compiler takes three: it moves the upper one down, then
up. (Elementwise kernels that way take 7 % longer on an H200, though: in them it has more freedom without.)"""

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

OF_EIGHT = '''
@triton.jit
def _of_eight(x):
    for _ in tl.static_range(3):
        low, high = tl.split(x)
        x = low | high
    return x


'''
"""The bits of eight neighbours, the last three dimensions, in one number. A sum over them would let the compiler hand them round
between threads, for what stores a byte for each thread lies otherwise than what computes its elements."""

TO_EIGHT = '''
@triton.jit
def _to_eight(x):
    for _ in tl.static_range(3):
        x = tl.join(x, x)
    return x


'''
"""The same number for each of eight neighbours, in three dimensions more."""

SHARE = '''
@triton.jit
def _share(a, b, c):
    q = a * c
    return tl.fma(tl.fma(-q, b, a), c, q)


'''
"""``a / b`` as a division rounds it, where ``c`` is 1 / b and ``b`` lies from 1 to 2**64: in three instructions, without the
branch that a division takes wherever ``a`` is zero, as it is behind a mask. (The correction is that of Markstein, 1990, who
excepts divisors whose bits are all ones. Quotients below 2**-100 may be the next number.)"""

RATIO = '''
@triton.jit
def _ratio(a, b):
    size = tl.abs(b)
    small, large = size < 7.888609052210118e-31, size > 1.2676506002282294e30
    scale = tl.where(small, 1.8446744073709552e19, tl.where(large, 5.421010862427522e-20, 1.0))
    a = a * scale
    b = b * scale
    c = libdevice.fast_dividef(1.0, b)
    near = a * c
    c = tl.fma(c, tl.fma(-b, c, 1.0), c)
    q = a * c
    q = tl.fma(tl.fma(-b, q, a), c, q)
    return tl.where((q == q) & (near != 0.0), q, near)


'''
"""``a / b`` as a division rounds it, without the branch for extreme numbers and zeros, which a thread's other elements wait for:
the same steps (Markstein, 1990), for a divisor that is scaled where it is below 2**-100 or above 2**100. What they do not hold
for, zeros and infinities, are plain products. Where ``a`` or the quotient is below 2**-99, it may be the next number."""

ROOT = '''
@triton.jit
def _root(x):
    small = x < 1.2621774483536189e-29
    y = x * tl.where(small, 1.8446744073709552e19, 1.0)
    c = tl.rsqrt(y)
    near = y * c
    near = tl.fma(tl.fma(-near, near, y), 0.5 * c, near)
    return tl.where((x == 0.0) | (x == float("inf")), x, near * tl.where(small, 2.3283064365386963e-10, 1.0))


'''
"""A square root as the machine's exact one rounds it, likewise without a branch."""

QUOTIENT = '''
@triton.jit
def _quotient(index, factor, shift):
    return (tl.umulhi(index.to(tl.uint32), factor.to(tl.uint32)) >> shift.to(tl.uint32)).to(tl.int32)


'''
"""An index divided by an extent, of which `codegen.division` tells the factor and the shift."""

HELPERS = {"_quotient(": QUOTIENT, "_pow(": POW, "pow_16(": POW_16, "_number_pow_16(": NUMBER_POW_16, "_tanh(": TANH,
           "_tanh_16(": TANH_16,
           "_normal(": NORMAL, "_logistic(": LOGISTIC, "_bf16(": BF16, ", _mul": MUL, "_logaddexp": LOGADDEXP,
           "_as_loaded(": AS_LOADED, "_wide(": WIDE, "_ratio(": RATIO, "_root(": ROOT,
           "_share(": SHARE, "_of_eight(": OF_EIGHT, "_to_eight(": TO_EIGHT, "e4m3": E4M3, "e5m2": E5M2}


def used(text: str, recent: bool = False) -> str:
    """The helpers that ``text`` calls or passes on. ``recent``: for a GPU that has instructions for 8-bit floats."""
    found = [source for call, source in HELPERS.items() if call in text]
    return "".join((source_for(source, text) if recent and source in (E4M3, E5M2) else source).lstrip("\n") for source in found)
