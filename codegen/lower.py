"""Chooses how a node is lowered. Imports torch, `ir_nodes` and codegen's lowering modules."""

from __future__ import annotations

from typing import Callable

from codegen import cross_entropy, draws, forms, normalisation, reductions
from codegen.expressions import Unsupported
from codegen.foreach import PREFIX, lower_foreach
from codegen.group import MAX_DIMS
from codegen.instructions import KEPT, Part
from codegen.lowering import argument_names
from codegen.pointwise import lower_pointwise
from codegen.reductions import Lowered
from codegen.tuning import HOPPER, Tuning
from ir_nodes.node import Node

FEW_ROWS, LONG_ROW = 16, 1 << 16

REDUCTIONS: dict[str, Lowered] = {
    "sum": reductions.lower_sum,
    "mean": reductions.lower_mean,
    "amax": reductions.lower_extreme("max"),
    "amin": reductions.lower_extreme("min"),
    "max": reductions.lower_extreme("max"),
    "min": reductions.lower_extreme("min"),
    "any": reductions.lower_truth("max"),
    "all": reductions.lower_truth("min"),
    "linalg_vector_norm": reductions.lower_norm,
    "_softmax": normalisation.lower_softmax,
    "_log_softmax": normalisation.lower_softmax,
    "_softmax_backward_data": normalisation.lower_softmax_backward,
    "_log_softmax_backward_data": normalisation.lower_softmax_backward,
    "native_layer_norm": normalisation.lower_layer_norm,
    "native_layer_norm_backward": normalisation.lower_layer_norm_backward,
    "nll_loss_forward": cross_entropy.lower_nll_forward,
    "nll_loss_backward": cross_entropy.lower_nll_backward,
}
"""Keyed by `ir_nodes.node.Node.name`."""


DRAWS: dict[str, Callable[[Node, Tuning], list[Part]]] = {"native_dropout": draws.lower_dropout}
"""Ops that take numbers from a generator."""


def lower(node: Node, scratch: int, tuning: Tuning = HOPPER) -> list[Part]:
    """The node's parts. ``scratch`` numbers the next scratch value. Raises Unsupported with a readable reason."""
    if not node.target.startswith("aten::"):
        raise Unsupported(f"{node.target} is not an ATen op")
    if not node.writes or node.effects and node.name not in DRAWS:
        raise Unsupported("it has effects beyond its results")
    how = REDUCTIONS.get(node.name)
    if node.name in ("max", "min"):
        names = argument_names(node.target)
        if "dim" in names:
            raise Unsupported(f"no kernel for {node.target}")
    if node.name.startswith(PREFIX):
        parts = lower_foreach(node)
    else:
        drawn = DRAWS.get(node.name)
        parts = drawn(node, tuning) if drawn else how(node, scratch) if how else [lower_pointwise(node)]
    for part in parts:
        _check(part)
    return parts


def _check(part: Part) -> None:
    cuts: tuple[int, ...] | None = forms.reduced_cuts(part.reduced or (), part.numel)
    seen = part.patterns()
    for _, access in part.accesses():
        seen.append((access.form, access.level))
    for pattern, level in seen:
        form = forms.embed(pattern, part.reduced or (), part.numel) if level == KEPT else pattern
        cuts = None if form is None or cuts is None else forms.merge_cuts(cuts, forms.cuts(form))
    if cuts is None:
        raise Unsupported("its operands' dimensions do not nest")
    if len(cuts) + 1 > MAX_DIMS:
        raise Unsupported(f"more than {MAX_DIMS} dimensions that do not merge")
    if part.reduced is not None and part.waits and part.kept < FEW_ROWS and part.numel // part.kept > LONG_ROW:
        raise Unsupported("a few long rows, each reduced more than once")
