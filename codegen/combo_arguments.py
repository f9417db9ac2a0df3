"""How a combo's program finds the arguments of its step among those of all steps. Imports `codegen.promotion` and
`ir_nodes.settings`.

A launch's arguments lie behind one another in constant memory, where one instruction loads the one with a certain number. Triton
has no words for that, but passes PTX through. Where branches choose instead, all arguments are held in registers before the first
branch: 102 for 16 tensors of an AdamW kernel that takes 40 for itself, 198 for 32.
"""

from __future__ import annotations

from typing import Sequence

from codegen.promotion import TRITON_TYPES
from ir_nodes import settings

_ARGUMENT = '''@triton.jit
def _argument%d(at, first: tl.constexpr):
    text: tl.constexpr = "{ .reg .u64 a; mov.u64 a, " + first + "; add.u64 a, a, $1; ld.param.u%d $0, [a]; }"
    return tl.inline_asm_elementwise(text, "=%s,l", [at * %d], tl.int%d, True, 1)'''

HELPERS = (_ARGUMENT % (32, 32, "r", 4, 32), _ARGUMENT % (64, 64, "l", 8, 64), '''@triton.jit
def _range_of(pid, first: tl.constexpr, count: tl.constexpr, levels: tl.constexpr):
    at = tl.full([], 0, tl.int64)
    for level in tl.static_range(levels):
        further = tl.minimum(at + (1 << (levels - 1 - level)), count - 1)
        at = tl.where(pid >= _argument32(further, first), further, at)
    return at''')
"""An argument by its place behind the ``first`` of its kind, and the last of the ranges that starts at ``pid`` or before."""

_TYPES = {text.removeprefix("tl.").replace("bfloat", "bf").replace("float", "fp").replace("uint", "u").replace("int", "i"): text
          for text in TRITON_TYPES.values()}


def finds_by_number(count: int) -> bool:
    """Are so many steps told apart by more than one branch?"""
    return count > 2 and settings.enabled("numbered_arguments")


def symbol(kernel: str, position: int) -> str:
    """What PTX calls an argument of the kernel."""
    return f"{kernel}_param_{position}"


def width(kind: str) -> int:
    """Bytes of an argument of Triton type ``kind``."""
    return 8 if kind[0] == "*" or kind.endswith("64") else 4


def range_lines(mark: str, first: str, count: int) -> list[str]:
    """Lines that find which of ``count`` ranges ``pid`` lies in, and where that starts."""
    return [f'{mark}at = _range_of(pid, "{first}", {count}, {(count - 1).bit_length()})',
            f'{mark}first = _argument32({mark}at, "{first}")']


def argument_line(mark: str, name: str, kind: str, first: str, divisible: bool) -> str:
    """A line that picks the step's own argument of Triton type ``kind``."""
    text = f'_argument{8 * width(kind)}({mark}at, "{first}")'
    if kind[0] == "*":
        text += f".to(tl.pointer_type({_TYPES[kind[1:]]}))"
    elif kind[0] == "f":
        text += f".to({_TYPES[kind]}, bitcast=True)"
    if divisible:  # Triton 3.6 believes it of pointers only
        text = f"tl.multiple_of({text}, 16)" if kind[0] == "*" else f"{text} // 16 * 16"
    return f"{mark}{name} = {text}"


def branch_lines(mark: str, names: Sequence[str], start: str, high: int, low: int = 0) -> list[str]:
    """Lines that do both in branches, for the ranges from ``low`` to below ``high``; the first of all starts at ``start``."""
    if high - low == 1:
        begin = f"{mark}from{low}" if low else start
        return [f"{mark}first = {begin}", *(f"{mark}{name} = {mark}{name}_{low}" for name in names)]
    middle = (low + high) // 2
    sides = [branch_lines(mark, names, start, *ends) for ends in ((middle, low), (high, middle))]
    below, above = (["    " + line for line in lines] for lines in sides)
    return [f"if pid < {mark}from{middle}:", *below, "else:", *above]
