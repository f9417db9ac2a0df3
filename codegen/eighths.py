"""8-bit floats in memory: what makes float32 of their bytes, rounds to them and makes bytes of that. Imports torch only.

Kernels load and store bytes and compute with float32. From Hopper on the GPU writes two numbers at a time, elsewhere integer
arithmetic does, which takes twice the time of the memory. ATen computes nothing with such numbers, it only copies and casts.
"""

from __future__ import annotations

import torch

FLOAT8 = frozenset((torch.float8_e4m3fn, torch.float8_e5m2))
_NAMES = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}

BEYOND = 'float("nan")' if torch.tensor(1e9).to(torch.float8_e4m3fn).isnan() else "448.0"
"""What a number too large for e4m3 becomes: PyTorch's versions differ."""


def of_bytes(dtype: torch.dtype) -> str:
    """The float32 that a byte {0} stands for."""
    return f"_of_{_NAMES[dtype]}({{0}})"


def to_bytes(dtype: torch.dtype) -> str:
    """The byte of a float32 {0}, rounded to nearest, ties to even, as ATen does."""
    return f"_{_NAMES[dtype]}_bytes({{0}}{_beyond(dtype)})"


def rounding(dtype: torch.dtype) -> str:
    """A float32 {0}, rounded likewise."""
    return f"_to_{_NAMES[dtype]}({{0}}{_beyond(dtype)})"


def _beyond(dtype: torch.dtype) -> str:
    return f", {BEYOND}" if dtype is torch.float8_e4m3fn else ""


_READ_4 = '''
@triton.jit
def _of_e4m3(x):
    size = x.to(tl.int32) & 127
    y = ((size << 20) + 0x3C000000).to(tl.float32, bitcast=True)
    y = tl.where(size < 8, size.to(tl.float32) * 0.001953125, y)
    y = tl.where(size == 127, float("nan"), y)
    sign = (x.to(tl.int32) & 128) << 24
    return (y.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)


'''

_ROUND_4 = '''@triton.jit
def _to_e4m3(x, beyond):
    size = tl.abs(x)
    bits = size.to(tl.int32, bitcast=True)
    y = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
    y = tl.where(size < 0.015625, (size + 16384.0) - 16384.0, y)
    y = tl.where(size <= 464.0, y, tl.where(size == size, beyond, size))
    sign = x.to(tl.int32, bitcast=True) & -0x80000000
    return (y.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)


'''

E4M3 = f'''{_READ_4}{_ROUND_4}@triton.jit
def _e4m3_bytes(x, beyond):
    x = _to_e4m3(x, beyond)
    size = tl.abs(x)
    bits = (size.to(tl.int32, bitcast=True) - 0x3C000000) >> 20
    bits = tl.where(size < 0.015625, (size * 512.0).to(tl.int32), bits)
    bits = tl.where(size == size, bits, 127)
    return tl.where(x.to(tl.int32, bitcast=True) < 0, bits + 128, bits).to(tl.uint8)


'''
"""Signs are bits, as Triton's minus makes 0 of 0. The exponent's bias differs by 120; numbers below the smallest normal one are
multiples of 2^-9."""

_READ_5 = '''
@triton.jit
def _of_e5m2(x):
    return (x.to(tl.int16) << 8).to(tl.float16, bitcast=True).to(tl.float32)


'''

E5M2 = f'''{_READ_5}@triton.jit
def _to_e5m2(x):
    size = tl.abs(x)
    bits = size.to(tl.int32, bitcast=True)
    y = ((bits + 0xFFFFF + ((bits >> 21) & 1)) & -0x200000).to(tl.float32, bitcast=True)
    y = tl.where(size < 0.00006103515625, (size + 128.0) - 128.0, y)
    y = tl.where(size < 61440.0, y, tl.where(size == size, float("inf"), size))
    sign = x.to(tl.int32, bitcast=True) & -0x80000000
    return (y.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@triton.jit
def _e5m2_bytes(x):
    return (_to_e5m2(x).to(tl.float16).to(tl.int16, bitcast=True) >> 8).to(tl.uint8)


'''
"""The upper bytes of float16."""

E4M3_ON_HOPPER = f'''{_READ_4}{_ROUND_4}@triton.jit
def _e4m3_bytes(x, beyond):
    if beyond != 448.0:
        x = tl.where(tl.abs(x) > 464.0, beyond, x)
    return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)


'''
"""The instruction gives what is too large, infinity too, the largest number. See `source_for`."""

E5M2_ON_HOPPER = f'''{_READ_5}@triton.jit
def _e5m2_bytes(x):
    infinite = tl.where(x < 0, 252, 124).to(tl.uint8)
    return tl.where(tl.abs(x) >= 61440.0, infinite, x.to(tl.float8e5).to(tl.uint8, bitcast=True))


@triton.jit
def _to_e5m2(x):
    return _of_e5m2(_e5m2_bytes(x))


'''

def source_for(source: str, text: str) -> str:
    """``source``, `E4M3` or `E5M2`, for a kernel of this ``text`` on a GPU that has the instruction.

    Arithmetic stays where a kernel computes with bytes of e4m3 and makes some, maybe the same: ptxas (of Triton 3.6) makes one
    word of two of the instruction's results where four bytes are stored side by side, and reads a register of something else
    where the first of them is computed with, too: wrong numbers on an H200 beside right bytes."""
    if source is E5M2:
        return E5M2_ON_HOPPER
    return E4M3 if "_of_e4m3(" in text and "_e4m3_bytes(" in text else E4M3_ON_HOPPER
