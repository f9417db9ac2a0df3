"""Lowers elementwise nodes by the table in `codegen.expressions`. Imports torch, `ir_nodes` and codegen's leaf modules."""

from __future__ import annotations

import re
import string
from functools import lru_cache
from typing import Any, Mapping

import torch

from codegen.activations import ACTIVATIONS
from codegen.eighths import FLOAT8
from codegen.expressions import ROWS, Case, Row, Unsupported, function
from codegen.instructions import Instr, Part
from codegen.lowering import Lowering, arguments
from codegen.predicates import PREDICATES
from codegen.promotion import HALF, TRITON_TYPES, category, common_dtype, compute_dtype
from codegen.special import SPECIAL
from ir_nodes.node import Node, Operand, ScalarInput

_PROMOTING_NUMBERS = frozenset(("self", "other", "exponent", "min", "max", "min_val", "max_val"))
_TABLE = {**ROWS, **PREDICATES, **ACTIVATIONS, **SPECIAL}
_CALL = re.compile(r"@(\w+)")


@lru_cache(maxsize=4096)
def fields(text: str) -> tuple[str, ...]:
    """The argument names in a row's text, each once, in order."""
    return tuple(dict.fromkeys(name for _, name, _, _ in string.Formatter().parse(text) if name is not None))


def base_name(node: Node) -> str:
    """The op's name with the mark of an in-place op removed."""
    name = node.name
    return name[:-1] if name.endswith("_") and not name.endswith("__") else name


def row_of(node: Node) -> Row | None:
    return _TABLE.get(base_name(node))


def lower_pointwise(node: Node) -> Part:
    """The part of an elementwise node. Raises Unsupported with the reason where the table has no row for it."""
    row = row_of(node)
    if row is None or len(node.writes) != 1:
        raise Unsupported(f"no kernel for {node.target}")
    return lower_row(node, row, arguments(node), 0)


def lower_row(node: Node, row: Row, args: Mapping[str, Any], index: int) -> Part:
    """The part that computes ``node.writes[index]`` by ``row`` from ``args``, which are named as in the row's text."""
    out = node.writes[index].layout
    lowering = Lowering(node, out.size)
    lowering.write(index, element(lowering, row, args, out.dtype))
    return lowering.part


def element(lowering: Lowering, row: Row, args: Mapping[str, Any], out: torch.dtype) -> Instr:
    """``row`` computed from ``args``, which may be instructions, for a result that is held as ``out``."""
    dtype = _dtype(row, args, out)
    if dtype in HALF and out not in (*HALF, torch.bool) and row.promote not in ("cast", "result"):
        raise Unsupported("its result is rounded to 16 bits before it is widened")
    if dtype in FLOAT8 and row.promote != "cast":
        raise Unsupported("PyTorch computes nothing with 8-bit floats")
    constants = {name: arg for name, arg in args.items() if not isinstance(arg, (Operand, ScalarInput, Instr))}
    half = TRITON_TYPES[dtype] if dtype in HALF and not lowering.part.node.name.startswith("_foreach_") else ""
    if row is ROWS["div"] and _by_number(lowering.part.node, args):
        return _evaluate(lowering, row, "{self} * {other}", {**args, "other": _reciprocal(lowering, args, dtype)}, dtype, out)
    numbers = frozenset(name for name, arg in args.items() if isinstance(arg, ScalarInput))
    text = row.text(Case(compute_dtype(dtype), constants, half, numbers)) if callable(row.text) else row.text
    return _evaluate(lowering, row, text, args, dtype, out)


def _by_number(node: Node, args: Mapping[str, Any]) -> bool:
    """Does ATen's CUDA kernel multiply by the reciprocal of a number of the host? So do we then, to the same bits: a division is
    ten instructions for each element, and a branch. ATen's kernels for lists of tensors divide."""
    number = isinstance(args.get("other"), (ScalarInput, int, float))
    return number and args.get("rounding_mode") is None and not node.name.startswith("_foreach_")


def _reciprocal(lowering: Lowering, args: Mapping[str, Any], dtype: torch.dtype) -> Instr:
    number = lowering.read(args["other"], compute_dtype(dtype))
    text = "1.0 / {0}" if number.dtype is torch.float64 else "tl.math.div_rn(1.0, {0})"
    return lowering.expr(text, number, dtype=number.dtype)


def _evaluate(lowering: Lowering, row: Row, text: str, args: Mapping[str, Any], dtype: torch.dtype, out: torch.dtype) -> Instr:
    names = fields(text)
    typed = dict(entry.split(":") for entry in row.typed)
    values = [_read(lowering, args, name, row, getattr(torch, typed[name]) if name in typed else dtype) for name in names]
    held = torch.bool if row.promote in ("compare", "truth") else compute_dtype(dtype)
    if text == f"{{{names[0] if names else ''}}}":
        return values[0]
    called = _CALL.sub(lambda match: function(match[1], held, out in HALF), text)
    positions = {name: f"{{{index}}}" for index, name in enumerate(names)}
    return lowering.expr(called.format(**positions), *values, dtype=held)


def _read(lowering: Lowering, args: Mapping[str, Any], name: str, row: Row, dtype: torch.dtype) -> Instr:
    if name not in args:
        raise Unsupported(f"argument {name} is missing")
    arg = args[name]
    if isinstance(arg, Instr):
        return lowering.cast(arg, compute_dtype(dtype))
    exact = row.promote == "compare"  # ATen compares in the common dtype, but computes with numbers unrounded
    return lowering.read(arg, dtype if exact or isinstance(arg, Operand) else compute_dtype(dtype))


def _dtype(row: Row, args: Mapping[str, Any], out: torch.dtype) -> torch.dtype:
    """The dtype (16-bit floats by name) that the row's operands are converted to."""
    if row.promote == "result":
        return out
    if row.promote == "truth":
        return torch.bool
    if row.promote == "cast":
        return _source_dtype(row, args, out)
    common = _common(row, args)
    floats = row.promote == "float" or (row.promote == "division" and args.get("rounding_mode") is None)
    return torch.get_default_dtype() if floats and not common.is_floating_point else common


def _source_dtype(row: Row, args: Mapping[str, Any], out: torch.dtype) -> torch.dtype:
    operand = args.get(fields(row.text)[0]) if isinstance(row.text, str) else None
    return operand.layout.dtype if isinstance(operand, Operand) else out


def _common(row: Row, args: Mapping[str, Any]) -> torch.dtype:
    typed = {entry.split(":")[0] for entry in row.typed}
    tensors, scalars, numbers = [], [], []
    for name, arg in args.items():
        if name in typed or name == "out":
            continue
        if isinstance(arg, Operand):
            (tensors if arg.layout.size else scalars).append(arg.layout.dtype)
        elif name in _PROMOTING_NUMBERS and isinstance(arg, (ScalarInput, bool, int, float)):
            numbers.append(arg.kind if isinstance(arg, ScalarInput) else type(arg).__name__)
    if "complex" in numbers:
        raise Unsupported("a complex number")
    common = common_dtype(tensors, scalars, numbers)
    if category(common) > 1 and not common.is_floating_point:
        raise Unsupported(f"dtype {common}")
    return common
