"""What each op is: one table by base name, completed by the op's own schema. Imports torch only."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

# A kind's words are base names: "add" stands for add, add_, add.out and every other overload.
_KINDS: dict[str, str] = {
    # every output element is computed from the elements at its own (broadcast) position
    "pointwise": """
        abs acos acosh add addcdiv addcmul angle asin asinh atan atan2 atanh binary_cross_entropy_backward
        bitwise_and bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift bitwise_xor ceil celu clamp clamp_max clamp_min
        conj_physical copysign cos cosh deg2rad digamma div elu elu_backward eq erf erfc erfinv exp exp2 expm1
        floor floor_divide fmax fmin fmod frac gcd ge gelu gelu_backward gt hardshrink hardshrink_backward hardsigmoid
        hardsigmoid_backward hardswish hardswish_backward hardtanh hardtanh_backward heaviside huber_loss_backward hypot i0
        igamma igammac isfinite isinf isnan isneginf isposinf lcm ldexp le leaky_relu leaky_relu_backward lerp lgamma log
        log10 log1p log2 log_sigmoid_backward logaddexp logaddexp2 logical_and logical_not logical_or logical_xor logit
        logit_backward lt masked_fill maximum minimum mish mish_backward mse_loss_backward mul nan_to_num
        native_dropout_backward ne neg nextafter polygamma pow rad2deg reciprocal relu relu6 remainder round rsqrt rsub selu
        sgn sigmoid sigmoid_backward sign signbit silu silu_backward sin sinc sinh smooth_l1_loss_backward softplus
        softplus_backward softshrink softshrink_backward sqrt square sub tan tanh tanh_backward threshold threshold_backward
        trunc where xlogy
        """,
    "reduction": """
        all amax amin aminmax any argmax argmin count_nonzero linalg_vector_norm logsumexp max mean median min mode nanmedian
        nansum norm prod std std_mean sum trace var var_mean
        """,
    "scan": "cummax cummin cumprod cumsum logcumsumexp",
    "sort": "argsort kthvalue msort searchsorted sort topk",
    "matmul": "_addmm_activation addbmm addmm addmv addr baddbmm bmm dot linear matmul mm mv outer vdot",
    "convolution": """
        _convolution conv_tbc convolution convolution_backward convolution_backward_overrideable convolution_overrideable
        cudnn_convolution_add_relu cudnn_convolution_relu
        """,
    "attention": """
        _cudnn_attention_backward _cudnn_attention_forward _efficient_attention_backward _efficient_attention_forward
        _flash_attention_backward _flash_attention_forward _scaled_dot_product_cudnn_attention
        _scaled_dot_product_cudnn_attention_backward _scaled_dot_product_efficient_attention
        _scaled_dot_product_efficient_attention_backward _scaled_dot_product_flash_attention
        _scaled_dot_product_flash_attention_backward _scaled_dot_product_flash_attention_for_cpu
        _scaled_dot_product_flash_attention_for_cpu_backward _scaled_dot_product_fused_attention_overrideable
        _scaled_dot_product_fused_attention_overrideable_backward scaled_dot_product_attention
        """,
    "normalization": """
        _batch_norm_with_update _fused_rms_norm _fused_rms_norm_backward _native_batch_norm_legit
        _native_batch_norm_legit_no_training batch_norm_backward batch_norm_gather_stats batch_norm_gather_stats_with_counts
        batch_norm_stats batch_norm_update_stats cudnn_batch_norm cudnn_batch_norm_backward miopen_batch_norm native_batch_norm
        native_batch_norm_backward native_group_norm native_group_norm_backward native_layer_norm native_layer_norm_backward
        """,
    "softmax": "_log_softmax _log_softmax_backward_data _masked_softmax _safe_softmax _softmax _softmax_backward_data",
    "loss": """
        _ctc_loss _ctc_loss_backward binary_cross_entropy binary_cross_entropy_with_logits huber_loss mse_loss
        nll_loss2d_backward nll_loss2d_forward nll_loss_backward nll_loss_forward smooth_l1_loss
        """,
    "pool": """
        _adaptive_avg_pool2d _adaptive_avg_pool2d_backward _adaptive_avg_pool3d _adaptive_avg_pool3d_backward
        adaptive_max_pool2d adaptive_max_pool2d_backward avg_pool2d avg_pool2d_backward avg_pool3d avg_pool3d_backward col2im
        im2col max_pool2d_with_indices max_pool2d_with_indices_backward max_pool3d_with_indices
        max_pool3d_with_indices_backward unfold_backward
        """,
    "gather": "embedding gather index index_select take",
    "scatter": """
        _index_put_impl embedding_dense_backward index_add index_copy index_fill index_put index_reduce masked_scatter put
        scatter scatter_add scatter_reduce
        """,
    "random": """
        _fused_dropout _philox_normal _philox_uniform bernoulli binomial cauchy exponential geometric log_normal multinomial
        native_dropout normal poisson rand rand_like randint randint_like randn randn_like random randperm rrelu_with_noise
        uniform
        """,
    "copy": "_copy_from _to_copy cat clone contiguous copy flip repeat roll stack tril triu",
    "fill": """
        arange empty_like eye fill full full_like linspace logspace new_full new_ones new_zeros ones ones_like scalar_tensor
        tril_indices triu_indices zero zeros zeros_like
        """,
    "optimizer": """
        _amp_foreach_non_finite_check_and_unscale _amp_update_scale _fused_adagrad _fused_adam _fused_adamw _fused_sgd
        """,
    # the output's shape depends on what the input holds
    "data_dependent": """
        _unique _unique2 argwhere bincount masked_select nonzero repeat_interleave unique_consecutive unique_dim
        unique_dim_consecutive
        """,
    # the answer is a number for the host
    "value_access": "_linalg_check_errors _local_scalar_dense allclose equal is_nonzero item",
}

# Ops of these namespaces exchange data between ranks; the device's own are defined in lazy_backend/distributed.
_BETWEEN_RANKS = ("lazysched", "c10d", "_c10d_functional", "c10d_functional")

OWN = "lazysched_own"
"""Of ops that are none of PyTorch's. Of those that codegen makes of several, "_joined" or "_sums" or both follow the name of the
first, whose kind they are."""

_OWN_KINDS = {
    "native_dropout_dropped": "pointwise", "pack_bits": "copy", "unpack_bits": "copy",
    "rng_state": "random", "set_rng_state": "random",
}
"""Of ops that stand by themselves, see `ir_nodes.own`."""

# In-place ops that never read the old elements of what they write.
_WRITE_ONLY = frozenset(
    """
    _fill_mem_eff_dropout_mask_ _foreach_copy_ _foreach_zero_ _philox_normal_ _philox_uniform_ bernoulli_ cauchy_ copy_
    exponential_ fill_ geometric_ log_normal_ normal_ random_ uniform_ zero_
    """.split()
)

# Arguments that an op updates though its schema does not say so.
_HIDDEN_WRITES: dict[str, tuple[str, ...]] = {
    "batch_norm_gather_stats": ("running_mean", "running_var"),
    "batch_norm_gather_stats_with_counts": ("running_mean", "running_var"),
    "batch_norm_update_stats": ("running_mean", "running_var"),
    "_cudnn_rnn": ("dropout_state",),
    "_cudnn_rnn_backward": ("reserve",),
    "cudnn_batch_norm": ("running_mean", "running_var"),
    "miopen_batch_norm": ("running_mean", "running_var"),
    "native_batch_norm": ("running_mean", "running_var"),
}

# Tagged as drawing from a generator, but they refuse all that would draw, draw again what their forward drew, or draw from a
# state that they are given.
NEVER_DRAWS = (
    "aten::_cudnn_rnn", "aten::_cudnn_rnn_backward",
    "aten::_scaled_dot_product_flash_attention_for_cpu", "aten::_scaled_dot_product_cudnn_attention_backward",
    "aten::_scaled_dot_product_efficient_attention_backward",
)

COLLECTIVE = ("collective", "wait")
"""The kinds of op that other ranks take part in."""


@dataclass(frozen=True, slots=True)
class OpInfo:
    """One op.

    ``kind``: a word of the table, "foreach" for every op of that prefix, "collective" for what starts to exchange data between
    ranks and "wait" for the end of that (neither may be dropped: other ranks take part), or "extern" for all the rest.
    ``write_only``: in place, and the old elements are never read. ``data_dependent``: output shapes depend on data.
    ``value_access``: the answer is a number that the host waits for. ``random``: may draw from a generator.
    ``hidden_writes``: arguments updated without the schema saying so.
    """

    name: str
    kind: str
    write_only: bool = False
    data_dependent: bool = False
    value_access: bool = False
    random: bool = False
    hidden_writes: tuple[str, ...] = ()


_TABLE: dict[str, str] = {name: kind for kind, names in _KINDS.items() for name in names.split()}


def split(target: str) -> tuple[str, str, str]:
    """Namespace, name and overload of a target: ("aten", "add", "out") of "aten::add.out"; no namespace means aten."""
    qualified, _, over = target.partition(".")
    space, _, name = qualified.rpartition("::")
    return space or "aten", name, over


@functools.cache
def schema(target: str) -> torch._C.FunctionSchema:
    """The schema of ``target`` ("aten::add.out"). Raises KeyError for an op that torch does not know."""
    space, name, over = split(target)
    try:
        return torch._C._get_schema(f"{space}::{name}", "" if over == "default" else over)
    except RuntimeError as error:
        raise KeyError(f"torch has no op {target!r}; is the library that defines it imported?") from error


@functools.cache
def overload(target: str) -> torch._ops.OpOverload:
    """The callable of ``target``. Raises KeyError for an op that torch does not know."""
    space, name, over = split(target)
    schema(target)
    return getattr(getattr(getattr(torch.ops, space), name), over or "default")


@functools.cache
def info(target: str) -> OpInfo:
    """The table's row for ``target``; for an op outside of it, an "extern" row with what torch's own tags say."""
    space, name, _ = split(target)
    tags = _tags(target)
    kind = _kind(first_of(name)) if space in ("aten", OWN) else "extern"
    if space in _BETWEEN_RANKS:
        kind = "wait" if "wait" in name else "collective"
    known = kind not in ("extern", *COLLECTIVE)
    return OpInfo(
        name,
        kind,
        write_only=space == "aten" and name in _WRITE_ONLY or space == "lazysched" and kind == "collective" and name[-1] != "_",
        # torch tags `index` too, whose masks become `nonzero` before it is recorded: the table wins
        data_dependent=kind == "data_dependent" or not known and torch.Tag.dynamic_output_shape in tags,
        value_access=kind == "value_access" or not known and torch.Tag.data_dependent_output in tags,
        random=kind == "random" or torch.Tag.nondeterministic_seeded in tags and target not in NEVER_DRAWS,
        hidden_writes=_HIDDEN_WRITES.get(name, ()) if space == "aten" else (),
    )


@functools.cache
def written_mode(target: str, arg_index: int) -> str:
    """How ``target`` touches its ``arg_index``-th argument: "r", "w" (old elements unused) or "rw".

    An ``out=`` argument is "w" even where it is also an input: that read is an operand of its own. Raises KeyError for an
    unknown op and IndexError for an argument that it has not.
    """
    arg = schema(target).arguments[arg_index]
    row = info(target)
    if arg.name in row.hidden_writes:
        return "rw"
    if arg.alias_info is None or not arg.alias_info.is_write:
        return "r"
    return "w" if arg.kwarg_only or row.write_only and arg_index == 0 else "rw"


_READ_UNLESS = {
    **dict.fromkeys(("native_batch_norm", "_native_batch_norm_legit"), ("training", False, ("running_mean", "running_var"))),
    **dict.fromkeys(("_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_"), ("grad_scale", None, ("grads",))),
}
"""Which argument must have which value for which others to be only read, though the schema writes them: running statistics in
evaluation, gradients that no scale is taken off."""


def reads_only(target: str, args: Sequence[object]) -> frozenset[int]:
    """Positions of what the op, given ``args``, leaves as it is, though with others it may write it."""
    found = _READ_UNLESS.get(split(target)[1])
    if found is None:
        return frozenset()
    condition, value, kept = found
    names = [spec.name for spec in schema(target).arguments]
    given = dict(zip(names, args))
    return frozenset(names.index(name) for name in kept if name in names) if given.get(condition) is value else frozenset()


def first_of(name: str) -> str:
    """The op that stands first in one of codegen's own, by its name; other names are their own."""
    return name.removesuffix("_sums").removesuffix("_joined")


def _kind(name: str) -> str:
    if name in _OWN_KINDS:
        return _OWN_KINDS[name]
    for base in (name, name.removesuffix("_")):
        if base in _TABLE:
            return _TABLE[base]
    return "foreach" if name.startswith("_foreach_") else "extern"


def _tags(target: str) -> list[torch.Tag]:
    try:
        return overload(target).tags
    except KeyError:
        return []
