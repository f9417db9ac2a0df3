"""Chooses how a node is lowered. Imports torch, `ir_nodes` and codegen's lowering modules."""

from __future__ import annotations

from typing import Callable

from codegen import cross_entropy, draws, forms, joining, normalisation, optimizers, reductions
from codegen.expressions import Unsupported
from codegen.foreach import PREFIX, lower_foreach
from codegen.group import MAX_DIMS
from codegen.instructions import KEPT, Part
from codegen.lowering import argument_names
from codegen.pointwise import lower_pointwise
from codegen.pulled import Known, nothing_known
from codegen.reductions import Lowered
from codegen.tuning import HOPPER, Tuning
from ir_nodes import settings
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


OPTIMIZERS: dict[str, Callable[[Node], list[Part]]] = {
    "_fused_adam_": optimizers.lower_adam, "_fused_adamw_": optimizers.lower_adam, "_fused_sgd_": optimizers.lower_sgd,
}
"""Ops that update a list of parameters."""


DRAWS: dict[str, Callable[[Node, Tuning], list[Part]]] = {"native_dropout": draws.lower_dropout}
"""Ops that take numbers from a generator."""


JOINS: dict[str, Callable[[Node, Known], list[Part]]] = {
    "cat": joining.lower_cat,
    "stack": joining.lower_cat,
    **dict.fromkeys(("constant_pad_nd", "slice_backward", "select_backward"), joining.lower_padding),
}
"""Ops that choose by index between what they read."""


def lower(node: Node, scratch: int, tuning: Tuning = HOPPER, known: Known | None = None) -> list[Part]:
    """The node's parts. ``scratch`` numbers the next scratch value. Raises Unsupported with a readable reason."""
    known = known or nothing_known()
    if not node.target.startswith("aten::"):
        raise Unsupported(f"{node.target} is not an ATen op")
    if not node.writes or node.effects and node.name not in DRAWS:
        raise Unsupported("it has effects beyond its results")
    if node.name in ("max", "min"):
        names = argument_names(node.target)
        if "dim" in names:
            raise Unsupported(f"no kernel for {node.target}")
    if node.name in OPTIMIZERS:
        parts = OPTIMIZERS[node.name](node)
    elif node.name.startswith(PREFIX):
        parts = lower_foreach(node)
    else:
        parts = _lower_named(node, scratch, tuning, known)
    for part in parts:
        _check(part)
    return parts


def _lower_named(node: Node, scratch: int, tuning: Tuning, known: Known) -> list[Part]:
    if node.name in REDUCTIONS:
        return REDUCTIONS[node.name](node, scratch)
    if node.name in DRAWS:
        return DRAWS[node.name](node, tuning)
    if node.name in JOINS:
        if not settings.enabled("windows"):
            raise Unsupported("windows is switched off")
        return JOINS[node.name](node, known)
    part = lower_pointwise(node)
    return [joining.over_filled(part, known) if settings.enabled("windows") else part]


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
