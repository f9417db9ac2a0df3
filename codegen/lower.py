"""Chooses how a node is lowered. Imports torch, `ir_nodes` and codegen's lowering modules."""

from __future__ import annotations

from typing import Callable

from codegen import (
    average_pooling,
    batch_norm,
    cross_entropy,
    draws,
    few_summands,
    group_norm,
    halves,
    indexing,
    interpolation,
    joining,
    linear_resizing,
    losses,
    narrow_products,
    normalisation,
    one_of_each,
    optimizers,
    overwriting,
    packing,
    pooling,
    positions,
    reductions,
    reflections,
    scans,
    scattering,
    small_products,
    softmax,
    statistics,
    unfolding,
)
from codegen.expressions import Unsupported
from codegen.foreach import PREFIX, lower_foreach
from codegen.instructions import Part
from codegen.limits import check_part
from codegen.lowering import argument_names
from codegen.pointwise import lower_pointwise
from codegen.pulled import Known, nothing_known
from codegen.reductions import Lowered
from codegen.tuning import HOPPER, Tuning
from ir_nodes import settings
from ir_nodes.node import Node
from ir_nodes.own import DROPPED, PACKED, UNPACKED

REDUCTIONS: dict[str, Lowered] = {
    "sum": reductions.lower_total("add"),
    "prod": reductions.lower_total("mul"),
    "nansum": reductions.lower_total("add", nans=False),
    "mean": reductions.lower_mean,
    "amax": reductions.lower_extreme("max"),
    "amin": reductions.lower_extreme("min"),
    "max": reductions.lower_extreme("max"),
    "min": reductions.lower_extreme("min"),
    "count_nonzero": reductions.lower_count,
    "any": reductions.lower_truth("max"),
    "all": reductions.lower_truth("min"),
    **dict.fromkeys(("linalg_vector_norm", "norm"), reductions.lower_norm),
    "_amp_foreach_non_finite_check_and_unscale_": optimizers.lower_unscale,
    "_softmax": softmax.lower_softmax,
    "_log_softmax": softmax.lower_softmax,
    "_softmax_backward_data": softmax.lower_softmax_backward,
    "_log_softmax_backward_data": softmax.lower_softmax_backward,
    "native_layer_norm": normalisation.lower_layer_norm,
    "native_layer_norm_backward": normalisation.lower_layer_norm_backward,
    "native_batch_norm": batch_norm.lower_batch_norm,
    "_native_batch_norm_legit": batch_norm.lower_batch_norm,
    "_native_batch_norm_legit_no_training": batch_norm.lower_batch_norm,
    "var": statistics.lower_variance(False, False),
    "std": statistics.lower_variance(True, False),
    "var_mean": statistics.lower_variance(False, True),
    "std_mean": statistics.lower_variance(True, True),
    "logsumexp": statistics.lower_log_sum_exp,
    "argmax": statistics.lower_place("max"),
    "argmin": statistics.lower_place("min"),
    "nll_loss_forward": cross_entropy.lower_nll_forward,
    "nll_loss_backward": cross_entropy.lower_nll_backward,
    "nll_loss2d_forward": cross_entropy.lower_nll_forward,
    "nll_loss2d_backward": cross_entropy.lower_nll_backward,
    "embedding_dense_backward": indexing.lower_embedding_backward,
    **losses.LOWERED,
    **scans.SCANS,
}
"""Keyed by `ir_nodes.node.Node.name`."""


OPTIMIZERS: dict[str, Callable[[Node, int], list[Part]]] = {
    "_fused_adam_": optimizers.lower_adam, "_fused_adamw_": optimizers.lower_adam, "_fused_sgd_": optimizers.lower_sgd,
}
"""Ops that update a list of parameters."""


DRAWS: dict[str, Callable[[Node, Tuning], list[Part]]] = {
    "native_dropout": draws.lower_dropout, "native_dropout_dropped": draws.lower_dropped,
}
"""Ops that take numbers from a generator, or took them before."""


JOINS: dict[str, Callable[[Node, Known], list[Part]]] = {
    "cat": joining.lower_cat,
    "stack": joining.lower_cat,
    **dict.fromkeys(("constant_pad_nd", "slice_backward", "select_backward"), joining.lower_padding),
}
"""Ops that choose by index between what they read."""


THROUGH: dict[str, Callable[[Node, Known], list[Part]]] = {
    "flip": scans.lower_flip,
    **average_pooling.POOLS,
    **interpolation.GRADIENTS,
}
"""Ops for which it matters what makes their operands."""


def _lower_product(node: Node, known: Known) -> list[Part]:
    narrow = narrow_products.narrow_product(node)
    if narrow is None or node.name in small_products.NAMES and narrow.wide.layout.size[-1] <= small_products.FEW:
        return small_products.lower_small_product(node)
    return narrow_products.lower_narrow_product(node, narrow, known)


PRODUCTS: dict[str, Callable[[Node, Known], list[Part]]] = dict.fromkeys(narrow_products.NAMES, _lower_product)
"""Products of matrices and vectors, of which those of a few summands are elementwise and those of a few results are sums."""


BITWISE: dict[str, Callable[[Node], list[Part]]] = {"pack_bits": packing.lower_pack, "unpack_bits": packing.lower_unpack}
"""Ops on masks that are kept as bits."""


INDEXED: dict[str, Callable[[Node], list[Part]]] = {
    "index_select": indexing.lower_index_select,
    "embedding": indexing.lower_index_select,
    "index": indexing.lower_index,
    **dict.fromkeys(("index_copy", "index_copy_"), indexing.lower_index_copy),
    "gather": one_of_each.lower_one_gathered,
    "take": indexing.lower_take,
}
"""Ops that read where index tensors say."""


PUT: dict[str, Callable[[Node, int], list[Part]]] = {
    **dict.fromkeys(("index_put", "index_put_", "_index_put_impl_"), indexing.lower_index_put),
    **dict.fromkeys(("scatter", "scatter_", "scatter_add", "scatter_add_", "scatter_reduce", "scatter_reduce_"),
                    one_of_each.lower_one_scattered),
    **dict.fromkeys(("index_fill", "index_fill_"), scattering.lower_index_fill),
    **dict.fromkeys(("index_add", "index_add_"), scattering.lower_index_add),
}
"""Ops that write where index tensors say."""


PLACED: dict[str, Callable[[Node], list[Part]]] = {
    **dict.fromkeys(("tril", "tril_", "triu", "triu_"), positions.lower_triangle),
    "arange": positions.lower_arange,
    "linspace": positions.lower_linspace,
    "roll": positions.lower_roll,
    "channel_shuffle": positions.lower_channel_shuffle,
    "linalg_cross": positions.lower_cross,
    "pixel_shuffle": positions.lower_pixel_shuffle,
    "pixel_unshuffle": positions.lower_pixel_unshuffle,
    **average_pooling.GRADIENTS,
    **interpolation.RESIZES,
    **linear_resizing.RESIZES,
    **reflections.PADS,
    **unfolding.LOWERED,
}
"""Ops whose elements depend on where they stand."""


RESULTS: dict[str, Callable[[Node], list[Part]]] = {
    "log_sigmoid_forward": halves.lower_log_sigmoid,
    "_prelu_kernel_backward": halves.lower_prelu_backward,
    "glu": halves.lower_glu,
    "glu_backward": halves.lower_glu_backward,
}
"""Elementwise ops with several results, or several operands in one."""


PAIRED: dict[str, Callable[[Node, int, Known], list[Part]]] = {
    "native_batch_norm_backward": batch_norm.lower_batch_norm_backward,
    "native_group_norm": group_norm.lower_group_norm,
    "native_group_norm_backward": group_norm.lower_group_norm_backward,
    **pooling.POOLS,
    **linear_resizing.GRADIENTS,
}
"""Ops of forward and backward that know of each other, and such as take several parts."""


def lower(node: Node, scratch: int, tuning: Tuning = HOPPER, known: Known | None = None) -> list[Part]:
    """The node's parts. ``scratch`` numbers the next scratch value. Raises Unsupported with a readable reason."""
    known = known or nothing_known()
    if not node.target.startswith("aten::") and node.target not in (DROPPED, PACKED, UNPACKED):
        raise Unsupported(f"{node.target} is not an ATen op")
    if not node.writes or node.effects and node.name not in DRAWS:
        raise Unsupported("it has effects beyond its results")
    if node.name in OPTIMIZERS:
        parts = OPTIMIZERS[node.name](node, scratch)
    elif node.name.startswith(PREFIX):
        parts = lower_foreach(node)
    else:
        parts = _lower_named(node, scratch, tuning, known)
    for part in parts if len(parts) == 1 else {id(part.structure[0]): part for part in parts}.values():  # a list's are alike
        check_part(part)
    return parts


def _lower_named(node: Node, scratch: int, tuning: Tuning, known: Known) -> list[Part]:
    if node.name in ("max", "min") and "dim" in argument_names(node.target):
        return statistics.lower_extreme_along(node.name)(node, scratch)
    if node.name in REDUCTIONS:
        few = few_summands.lower_few(node, known) if node.name == "sum" else []
        return few or REDUCTIONS[node.name](node, scratch)
    if node.name in PUT:
        return PUT[node.name](node, scratch)
    if node.name in PAIRED:
        return PAIRED[node.name](node, scratch, known)
    if node.name in DRAWS:
        return DRAWS[node.name](node, tuning)
    if node.name in JOINS:
        if not settings.enabled("windows"):
            raise Unsupported("windows is switched off")
        return JOINS[node.name](node, known)
    for through in (THROUGH, PRODUCTS):
        if node.name in through:
            return through[node.name](node, known)
    for table in (INDEXED, PLACED, RESULTS, BITWISE):
        if node.name in table:
            return table[node.name](node)
    part = lower_pointwise(node)
    return [overwriting.over_whole(part, known) if settings.enabled("windows") else part]
