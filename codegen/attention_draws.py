"""The kernel that draws what drops in attention, as Triton source. Imports `codegen.kernel` and `codegen.random_source` only.

Bits lie in words of 32 keys, [batch * heads, keys / 32, queries], so that both passes load words of neighbouring queries.
"""

from __future__ import annotations

from codegen.kernel import WAIT
from codegen.random_source import PHILOX

PRECISION, ROUNDS = 12, 7
"""Binary digits of the share that is kept, and of Philox: the fewest rounds that pass BigCrush (Salmon et al. 2011)."""

HEAD = '''"""{title}"""

import triton
import triton.language as tl
from triton.language.extra import cuda


'''

_PHILOX = PHILOX.replace("_philox", "_philox_short").replace("static_range(10)", f"static_range({ROUNDS})")

SHARED = 4
"""Neighbouring queries whose last four digits are the same. These count where all before them are equal: for both of two elements
once in 65,536 times."""

_DIGITS = """@triton.jit
def _digits(bits, kept, number: tl.constexpr, seed, place, head, call, drawn):
    zero = (place * 0).to(tl.uint32)
    x, y, z, w = _philox_short(seed, place.to(tl.uint32), zero + head, zero + (call + number), zero + (drawn >> 2).to(tl.uint32))
    digit = kept >> (4 * number)
    bits = (x & bits) | ((x | bits) & (0 - (digit & 1)).to(tl.uint32))
    bits = (y & bits) | ((y | bits) & (0 - ((digit >> 1) & 1)).to(tl.uint32))
    bits = (z & bits) | ((z | bits) & (0 - ((digit >> 2) & 1)).to(tl.uint32))
    return (w & bits) | ((w | bits) & (0 - ((digit >> 3) & 1)).to(tl.uint32))


"""

DRAW = HEAD + _PHILOX + _DIGITS + f'''@triton.jit
def {{name}}({{parameters}}, B0: tl.constexpr, B1: tl.constexpr, CAUSAL: tl.constexpr):
    {WAIT}
    row = tl.program_id(0) * B0
    word = tl.program_id(1) * B1
    head = tl.program_id(2)
    if CAUSAL and word * 32 > row + B0 - 1:
        return
    n = (word + tl.arange(0, B1))[:, None]
    kept = ((1.0 - p) * {1 << PRECISION}.0 + 0.5).to(tl.int32)
    call = (drawn >> 34).to(tl.uint32) * {PRECISION // 4}
    some = n * (queries // {SHARED}) + (row // {SHARED} + tl.arange(0, B0 // {SHARED}))[None, :]
    bits = _digits((some * 0).to(tl.uint32), kept, 0, seed, some, head, call, drawn)
    bits = tl.reshape(tl.broadcast_to(bits[:, :, None], (B1, B0 // {SHARED}, {SHARED})), (B1, B0))
    place = n * queries + (row + tl.arange(0, B0))[None, :]
    for number in tl.static_range(1, {PRECISION // 4}):
        bits = _digits(bits, kept, number, seed, place, head, call, drawn)
    bits = bits | (0 - (kept >> {PRECISION})).to(tl.uint32)
    tl.store(words + head.to(tl.int64) * (queries * (keys // 32)) + place, bits.to(tl.int32, bitcast=True))
'''
"""Bits that are 1 with probability 1 - p: random binary numbers below its digits, for 32 keys at a time and from the last digit
on: where the digit is 1, a random 0 makes the number smaller, where it is 0, a random 1 makes it larger."""
