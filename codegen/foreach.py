"""Lowers ops over lists of tensors, element by element, by the pointwise table. Imports `ir_nodes` and codegen's leaf modules.

An optimizer's `_foreach_` ops then meet again per parameter: its whole update is one kernel.
"""

from __future__ import annotations

from typing import Any, Hashable, Sequence

from codegen.expressions import ROWS, Row, Unsupported
from codegen.instructions import Named, Part
from codegen.lowering import arguments, fill_of
from codegen.pointwise import base_name, lower_row
from codegen.reductions import lower_norm_of
from ir_nodes.node import Node, Operand, ScalarInput, Target

PREFIX = "_foreach_"
_NUMBER = {"addcmul": "value", "addcdiv": "value", "lerp": "weight", "pow": "exponent", "clamp_max": "max", "clamp_min": "min"}
_RENAMED = {"tensors1": "end", "weights": "weight"}


def lower_foreach(node: Node) -> list[Part]:
    """One part per element of the list that is not empty. Raises Unsupported where the table has no row for the op."""
    name = base_name(node).removeprefix(PREFIX)
    if name == "norm":
        return _norms(node)
    row = ROWS.get(name)
    if row is None:
        raise Unsupported(f"no kernel for {node.target}")
    refuse_aliases(node)
    lists = arguments(node)
    elements = {index: _element(name, lists, index) for index, write in enumerate(node.writes) if all(write.layout.size)}
    made: dict[Hashable, tuple[Sequence[Named], Part]] = {}
    return [_like(made, node, row, args, index) for index, args in elements.items()]


def _like(made: dict[Hashable, tuple[Sequence[Named], Part]], node: Node, row: Row, args: dict[str, Any], index: int) -> Part:
    """An element's part: that of an element like it with other values, or a new one. ``made``: by what they are like."""
    written = node.writes[index]
    known: dict[Named, int] = {}
    key: list[Hashable] = [written.layout, known.setdefault(written.value, 0)]
    for arg in args.values():
        if isinstance(arg, Operand):
            if fill_of(arg) is not None:
                return lower_row(node, row, args, index)
            key += [arg.layout, known.setdefault(arg.value, len(known))]
        elif isinstance(arg, ScalarInput):
            key += [arg.kind, known.setdefault(arg.index, len(known))]
        else:
            key.append(None if isinstance(arg, Target) else (type(arg), arg))
    alike, names = tuple(key), tuple(known)
    if alike in made:
        first, part = made[alike]
        return part.renamed(dict(zip(first, names)))
    part = lower_row(node, row, args, index)
    made[alike] = names, part
    return part


def _norms(node: Node) -> list[Part]:
    args = arguments(node)
    order = args.get("ord", 2)
    return [lower_norm_of(node, source, order, None, index) for index, source in enumerate(args["self"])]


def _element(name: str, lists: dict[str, Any], index: int) -> dict[str, Any]:
    """The arguments for one element, named as the single-tensor op names them."""
    out: dict[str, Any] = {}
    number = _NUMBER.get(name, "other")
    for given, arg in lists.items():
        if given == "scalars" and not isinstance(arg, tuple):
            raise Unsupported("numbers in a tensor")
        renamed = number if given in ("scalar", "scalars") or name.startswith("clamp") and given == "other" else given
        out[_RENAMED.get(renamed, renamed)] = arg[index] if isinstance(arg, tuple) else arg
    if name in ("add", "sub"):
        out.setdefault("alpha", 1)
    return out


def refuse_aliases(node: Node) -> None:
    """Raises Unsupported where an element's result could lie in what another element reads or writes."""
    written = [write.value.buffer for write in node.writes]
    read = {operand.value.buffer for operand in node.reads}
    if len(set(written)) != len(written) or any(buffer in read for buffer in written):
        raise Unsupported("a list whose tensors share memory")
