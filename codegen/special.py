"""The table's rows for functions that programs rarely call. Imports torch,
`codegen.expressions` and `codegen.promotion` only."""

from __future__ import annotations

import torch

from codegen.expressions import Case, Row, Unsupported, choose, largest
from codegen.promotion import HALF, TRITON_TYPES


def _shift(case: Case, operator: str, beyond: str) -> str:
    """Bits moved by more places than there are are gone, as in ATen's kernels."""
    if case.is_float or case.is_bool:
        raise Unsupported(f"a shift of {str(case.dtype).removeprefix('torch.')}")
    bits = torch.iinfo(case.dtype).bits
    outside = f"({{other}} < 0) | ({{other}} >= {bits})"
    return f"tl.where({outside}, {beyond.format(last=bits - 1)}, {{self}} {operator} {{other}})"


def _left(case: Case) -> str:
    return _shift(case, "<<", "{{self}} * 0")


def _right(case: Case) -> str:
    return _shift(case, ">>", "{{self}} >> {last}")


def _number(case: Case) -> str:
    if not case.is_float:
        return "{self}"
    kind = torch.finfo(next((half for half in HALF if TRITON_TYPES[half] == case.half), case.dtype))
    none, high, low = (f"{{{name}}}" if case.given(name) else text for name, text in (
        ("nan", "0.0"), ("posinf", repr(kind.max)), ("neginf", repr(kind.min))))
    text = f'tl.where({{self}} == float("-inf"), {low}, {{self}})'
    return f'tl.where({{self}} != {{self}}, {none}, tl.where({{self}} == float("inf"), {high}, {text}))'


def _log_sum(how: str, factor: str = "") -> str:
    """The logarithm of two powers' sum; of two equal infinities it is that infinity."""
    apart = "tl.where({self} == {other}, 0.0, {self} - {other})"
    return f"{largest('{self}', '{other}')} + @log1p(@{how}(-tl.abs({apart}))){factor}"


def _times(logarithm: str) -> Row:
    """xlogy and its like: zero times the logarithm of zero is zero."""
    text = f"tl.where({{self}} == 0, {{self}} * 0, {{self}} * @{logarithm}({{other}}))"
    return Row(f"tl.where({{other}} != {{other}}, {{other}}, {text})", "float")


_PI = "(3.141592653589793 * {self})"

SPECIAL: dict[str, Row] = {
    "xlogy": _times("log"),
    "special_xlog1py": _times("log1p"),
    "special_entr": Row('tl.where({self} > 0, -{self} * @log({self}), tl.where({self} < 0, float("-inf"), {self} * 1))', "float"),
    "logaddexp": Row(_log_sum("exp"), "float"),
    "logaddexp2": Row(_log_sum("exp2", " * 1.4426950408889634"), "float"),
    "sinc": Row(f"tl.where({{self}} == 0, 1.0, @div(@sin{_PI}, {_PI}))", "float"),
    "hypot": Row(choose("@hypot({self}, {other})")),
    "copysign": Row("@copysign({self}, {other})", "float"),
    "heaviside": Row(choose("tl.where({self} == 0, {values}, tl.where({self} > 0, 1.0, 0.0))")),
    "erfinv": Row("@erfinv({self})", "float"),
    "lgamma": Row("@lgamma({self})", "float"),
    "nan_to_num": Row(_number),
    **dict.fromkeys(("bitwise_left_shift", "__lshift__"), Row(_left)),
    **dict.fromkeys(("bitwise_right_shift", "__rshift__"), Row(_right)),
}
"""Keyed as `codegen.expressions.ROWS`."""
