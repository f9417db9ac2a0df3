"""Lets parts compute cheap values again instead of reading them from memory. Imports torch, `ir_nodes` and codegen's leaves.

Two kinds of values are cheap: a 16-bit tensor widened, which is read in its narrow form; and log-softmax, which is what it was
made of less two numbers per row. So a loss over a large vocabulary keeps no float32 logits: its forward pass leaves a row's
maximum and the logarithm of its sum, its gradient reads the logits again. The numbers are the same, bit by bit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from codegen import forms
from codegen.forms import Form, Reduced
from codegen.instructions import FULL, KEPT, Instr, MemAccess, Part, rewritten
from codegen.promotion import HALF, TRITON_TYPES, compute_dtype
from ir_nodes.graph import Graph
from ir_nodes.node import Node, Operand, Value

COPIES = ("_to_copy", "copy", "copy_")


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to make ``value``, whose elements lie at the same places of their buffer as ``source``'s.

    ``rows``: values with one number per row to subtract, in order; a row is what ``reduced`` intervals of the space of ``numel``
    elements, walked as ``form``, leave. ``row_form`` walks one of them over that space.
    """

    source: Operand
    dtype: torch.dtype
    rows: tuple[Value, ...] = ()
    form: Form = ()
    row_form: Form = ()
    reduced: Reduced = ()
    numel: int = 0


Recipes = dict[Value, Recipe]


def remember(graph: Graph, node: Node, parts: list[Part], recipes: Recipes) -> None:
    """Note how to compute what ``node`` writes, where that is cheap and what it takes is not overwritten later."""
    if len(node.writes) != 1 or node.name not in (*COPIES, "_log_softmax"):
        return
    write, source = node.writes[0], next((arg for arg in node.args if isinstance(arg, Operand)), None)
    if source is None or graph.last(source.value.buffer) is not source.value:
        return
    padded = node.relaid and write.base is None  # rows end in memory that means nothing, see `codegen.pad_rows`
    if not padded and not write.layout.covers(write.value.buffer.nbytes):
        return
    if _spots(source) != _spots(Operand(write.value, write.layout)) or source.layout.flipped:
        return
    if node.name in COPIES:
        if source.layout.dtype in HALF and write.layout.dtype is torch.float32:
            recipes[write.value] = Recipe(source, torch.float32)
    elif source.layout.itemsize <= write.layout.itemsize and parts[0].reduced:
        size, part = write.layout.size, parts[0]
        rows = tuple(access.value for one in parts for mode, access in one.accesses()
                     if mode == "w" and access.value.buffer.index < 0)
        embedded = forms.embed(forms.collapse((part.kept,), (1,)), part.reduced or (), part.numel)
        if embedded is not None:
            recipes[write.value] = Recipe(source, write.layout.dtype, rows, forms.collapse(size, write.layout.stride), embedded,
                                          part.reduced or (), part.numel)


def _spots(operand: Operand) -> list[tuple[int, int]]:
    return [(n, s) for n, s in zip(operand.layout.size, operand.layout.stride) if n > 1]


def inline(part: Part, recipes: Recipes) -> Part:
    """The part with reads of values that ``recipes`` knows replaced; the same part where there are none."""
    if not any(access.value in recipes for _, access in part.accesses()):
        return part

    def made_again(instr: Instr) -> list[Instr] | None:
        recipe = recipes.get(instr.access.value) if instr.access is not None and instr.kind in ("load", "gather") else None
        if recipe is None or instr.access is None or not _fits(part, instr, instr.access, recipe):
            return None
        return _again(part, instr, instr.access, recipe, recipes)

    return rewritten(part, made_again)


def _fits(part: Part, instr: Instr, access: MemAccess, recipe: Recipe) -> bool:
    """True where the access runs through the value as its recipe does; one without numbers per row fits always."""
    if access.dtype is not recipe.dtype or access.shift or instr.kind == "load" and instr.args:
        return False
    if not recipe.rows:
        return True
    whole = access.form == recipe.form and access.byte_offset == 0 and part.numel == recipe.numel and access.level == FULL
    return whole and (instr.kind == "load" or part.reduced == recipe.reduced)


def _again(part: Part, instr: Instr, access: MemAccess, recipe: Recipe, recipes: Recipes) -> list[Instr]:
    """Instructions that make what ``instr`` read, the last of them in its place."""
    taken = replace(instr, access=_moved(access, recipe), dtype=compute_dtype(recipe.source.layout.dtype),
                    rounded=recipe.source.layout.dtype if recipe.source.layout.dtype in HALF else None)
    deeper = recipes.get(recipe.source.value)
    made = _again(part, taken, taken.access, deeper, recipes) if deeper is not None and taken.access is not None and _fits(
        part, taken, taken.access, deeper) else [taken]
    rows = [_row(value, instr, recipe) for value in recipe.rows]
    text = " - ".join(f"{{{index}}}" for index in range(len(rows) + 1))
    if not rows:
        text = "{0}"
    last = replace(instr, kind="expr", text=text, args=(made[-1], *rows), access=None, payload=None)
    if recipe.dtype not in HALF:
        return [*made, *rows, last]
    exact = replace(last, rounded=None)
    return [*made, *rows, exact, replace(last, text=f"{{0}}.to({TRITON_TYPES[recipe.dtype]}).to(tl.float32)", args=(exact,))]


def _moved(access: MemAccess, recipe: Recipe) -> MemAccess:
    """The same elements of the recipe's source."""
    wide, layout = access.dtype.itemsize, recipe.source.layout

    def scaled(byte: int) -> int:
        return (byte // wide + layout.offset) * layout.itemsize

    return replace(access, value=recipe.source.value, dtype=layout.dtype, byte_offset=scaled(access.byte_offset),
                   low=scaled(access.low), high=scaled(access.high))


def _row(value: Value, instr: Instr, recipe: Recipe) -> Instr:
    dtype = compute_dtype(recipe.source.layout.dtype)
    kept = recipe.numel // forms.reduced_extent(recipe.reduced)
    level = KEPT if instr.kind == "gather" else FULL
    form = forms.collapse((kept,), (1,)) if level == KEPT else recipe.row_form
    return Instr("load", dtype, level, access=MemAccess(value, form, dtype, 0, level, 0, math.prod((kept, dtype.itemsize))))
