"""Sums of rows with one element that is not zero, without walking the rows. Imports codegen's leaf modules and `ir_nodes`.

The gradient of a negative log likelihood is such a row, and the gradient of log-softmax sums it. Where what decides on that
element is still there, the part that sums is rewritten before anything is fused: it then reduces nothing, and may share a kernel
with sums of columns. Otherwise the kernel's body is rewritten.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Iterable, Mapping

import torch

from codegen import forms
from codegen.body import Body, Step
from codegen.inline import COPIES
from codegen.instructions import FULL, KEPT, UNIFORM, Instr, MemAccess, Part
from codegen.promotion import HALF, TRITON_TYPES
from ir_nodes.graph import Graph
from ir_nodes.node import Node, Operand, Value

ONE_HOT = "tl.where({0} == {1}, -{2}, 0.0)"
"""(position in the row, the position that counts or -1, value)"""

_ALONE = "tl.where(({0} >= 0) & ({0} < {2}), -{1}, 0.0)"
"""The same of a whole row: (the position that counts or -1, value, elements in the row)"""


@dataclass(frozen=True, slots=True)
class Hot:
    """A value whose rows of ``extent`` elements hold one that is not zero. ``instrs`` make ``args``, the last two of `ONE_HOT`,
    from what nobody overwrites; ``rounding`` is what copies do to the number; ``store`` is how the value is walked."""

    instrs: tuple[Instr, ...]
    args: tuple[Instr, ...]
    rounding: str
    extent: int
    store: MemAccess


Hots = dict[Value, Hot]


def remember_hot(graph: Graph, node: Node, parts: list[Part], hots: Hots) -> None:
    """Note what ``node`` writes, where that is one number in each row, or a copy of such a value."""
    if len(parts) != 1 or parts[0].reduced is not None or len(node.writes) != 1:
        return
    stores = [instr for instr in parts[0].instrs if instr.kind == "store" and instr.access is not None]
    if len(stores) != 1:
        return
    (store,), (write,) = stores, node.writes
    assert store.access is not None
    if node.name in COPIES:
        source = next((hots.get(arg.value) for arg in node.args if isinstance(arg, Operand)), None)
        read = [access for mode, access in parts[0].accesses() if mode == "r"]
        if source is not None and len(read) == 1 and read[0].form == source.store.form and write.layout.dtype.is_floating_point:
            hots[write.value] = replace(source, rounding=_rounded(source.rounding, write.layout.dtype), store=store.access)
        return
    hot = store.args[0]
    if hot.text != ONE_HOT or hot.args[0].kind != "coord":
        return
    position, *args = hot.args
    needed = _behind(args)
    loads = [instr.access for instr in needed if instr.access is not None]
    if any(instr.kind not in ("load", "expr", "scalar", "size") for instr in needed) or any(
            graph.last(access.value.buffer) is not access.value for access in loads):
        return
    extent = write.layout.size[-1]
    if any(access.level == FULL and access.form and (access.form[-1][1] or access.form[-1][0] % extent) for access in loads):
        return  # not one number for a row
    if position.payload == forms.collapse((parts[0].numel // extent, extent), (0, 1)):
        instrs = tuple(instr for instr in parts[0].instrs if instr in needed)
        hots[write.value] = Hot(instrs, tuple(args), _rounded("{0}", write.layout.dtype), extent, store.access)


def _rounded(text: str, dtype: torch.dtype) -> str:
    return f"({text}).to({TRITON_TYPES[dtype]}).to(tl.float32)" if dtype in HALF else text


def _behind(instrs: list[Instr]) -> dict[Instr, None]:
    """These and all that they are made of."""
    found: dict[Instr, None] = {}
    waiting = list(instrs)
    while waiting:
        instr = waiting.pop()
        if instr not in found:
            found[instr] = None
            waiting += instr.args
    return found


def known_sums(part: Part, hots: Hots) -> Part:
    """The part with sums of rows that ``hots`` knows replaced by the one number; the same part where others are left."""
    reduces = {instr: hots.get(_loaded(instr)) for instr in part.instrs if instr.kind == "reduce"} if hots else {}
    if not reduces or not all(hot is not None and _sums(part, instr, hot) for instr, hot in reduces.items()):
        return part
    kinds = {instr.kind for instr in part.instrs if instr.level == KEPT}
    if kinds <= {"expr", "reduce"}:
        return Part(part.node, part.numel, None, _with_numbers(part.instrs, reduces), False, part.after, part.later)
    stored = any(instr.kind == "store" and instr.level != KEPT for instr in part.instrs)
    if stored or not kinds <= {"expr", "reduce", "store"}:
        return part
    made = _with_numbers(part.instrs, reduces)
    needed = _behind([instr for instr in made if instr.kind == "store"])
    rows = _of_rows([instr for instr in made if instr in needed], part.numel // part.kept)
    return Part(part.node, part.kept, None, rows, False, part.after, part.later)


def _with_numbers(instrs: Iterable[Instr], reduces: Mapping[Instr, Hot | None]) -> list[Instr]:
    """The instructions with each of ``reduces`` replaced."""
    made: dict[Instr, Instr] = {}
    out: list[Instr] = []
    for instr in instrs:
        hot = reduces.get(instr)
        if hot is None:
            new = replace(instr, args=tuple(made[arg] for arg in instr.args), level=FULL if instr.level == KEPT else instr.level)
            out.append(new)
        else:
            for one in hot.instrs:
                made[one] = replace(one, args=tuple(made[arg] for arg in one.args))
                out.append(made[one])
            index, value = (made[arg] for arg in hot.args)
            count = Instr("size", index.dtype, UNIFORM, payload=hot.extent)
            out += [count, Instr("expr", instr.dtype, FULL, (index, value, count), hot.rounding.replace("{0}", _ALONE))]
        made[instr] = out[-1]
    return out


def _of_rows(instrs: Iterable[Instr], extent: int) -> list[Instr]:
    """The same for each row of ``extent`` elements, of which they have one number for all, not for each element."""
    made: dict[Instr, Instr] = {}
    for instr in instrs:
        access = instr.access
        if access is not None and instr.kind == "load" and access.form:
            *form, (size, _) = access.form
            access = replace(access, form=(*form, (size // extent, 0)) if size > extent else tuple(form))
        elif access is not None:
            access = replace(access, level=FULL)
        made[instr] = replace(instr, args=tuple(made[arg] for arg in instr.args), access=access)
    return list(made.values())


def _loaded(instr: Instr) -> Value | None:
    """What a reduction sums as it is loaded."""
    summed = instr.args[0]
    return summed.access.value if summed.kind == "load" and not summed.args and summed.access is not None else None


def _sums(part: Part, instr: Instr, hot: Hot) -> bool:
    access = instr.args[0].access
    same = access is not None and (access.form, access.byte_offset, access.dtype) == (
        hot.store.form, hot.store.byte_offset, hot.store.dtype)
    return instr.text == "add" and same and part.reduced == ((1, hot.extent),)


def sum_one_hots(body: Body) -> None:
    """Turn every sum of a `ONE_HOT` along its row into the element that is not zero. A body left without reductions becomes one
    over the whole space."""
    for step in list(body.steps):
        if step.stage == "reduce" and step.text == "add" and not step.across:
            rounding, hot = _unrounded(step.args[0])
            if hot.text == ONE_HOT and along(body, hot.args[0]) and all(arg.level != FULL for arg in hot.args[1:]):
                _pick(body, step, rounding, hot)
    for step in body.steps:
        if step.args:
            step.phase = max(arg.phase for arg in step.args) + (step.stage == "reduce")
    body.drop_unused()
    kept = any(step.stage == "store" and step.level == KEPT for step in body.steps)
    if body.reduced and not kept and not any(step.stage in ("reduce", "gather", "scan") for step in body.steps):
        body.reduced, body.column = None, False


def _unrounded(step: Step) -> tuple[str, Step]:
    """(text that rounds to 16 bits or "{0}", what is rounded)."""
    if len(step.args) == 1 and step.text.startswith("{0}.to(tl.") and step.text.endswith("float16).to(tl.float32)"):
        return step.text, step.args[0]
    return "{0}", step


def along(body: Body, position: Step) -> bool:
    """True where the position counts from the row's first element to its last."""
    return position.stage == "coord" and body.reduced == ((1, body.extent),) and position.form == forms.collapse(
        (body.kept, body.extent), (0, 1))


def _pick(body: Body, total: Step, rounding: str, hot: Step) -> None:
    _, index, value = hot.args
    count = Step("size", index.dtype, UNIFORM, payload=body.extent)
    body.steps.insert(body.steps.index(total), count)
    total.stage, total.level, total.args = "expr", KEPT, (index, value, count)
    total.text = rounding.replace("{0}", _ALONE)
