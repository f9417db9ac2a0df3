"""Makes trials of ops small: on few samples, on one thread. Imports torch and `ir_nodes.ops`.

An op on a large batch treats each sample alike, and its kernels choose the results' layouts without looking at how many there
are: what holds for a few samples holds for all.
"""

from __future__ import annotations

import contextlib
import threading
from typing import Any, Iterator

import torch

from ir_nodes import ops

Tensor = torch.Tensor

_EACH_SAMPLE = frozenset(
    "convolution _convolution convolution_backward native_batch_norm native_batch_norm_backward _native_batch_norm_legit "
    "_batch_norm_with_update batch_norm_backward _native_batch_norm_legit_no_training max_pool2d_with_indices "
    "max_pool3d_with_indices avg_pool2d avg_pool2d_backward avg_pool3d avg_pool3d_backward _adaptive_avg_pool2d "
    "_adaptive_avg_pool2d_backward _adaptive_avg_pool3d".split()
)
_CHANNELED = frozenset(
    "native_batch_norm native_batch_norm_backward _native_batch_norm_legit _batch_norm_with_update batch_norm_backward".split()
)
_BATCHED = frozenset(("input", "self", "grad_output", "grad_out"))
LEAST, ENOUGH = 2, 16
"""Of one sample a layout does not say where its dimension belongs; below 16 convolutions on a CPU may take another way."""


def fewer(target: str, args: tuple[Any, ...], most_bytes: int) -> tuple[Any, ...]:
    """``args``, where they take more than ``most_bytes``, with few samples: an eighth of that, if it will do."""
    held = sum(arg.numel() * arg.element_size() for arg in args if isinstance(arg, Tensor))
    base = ops.split(target)[1]
    if held <= most_bytes or base not in _EACH_SAMPLE and base not in _OTHERWISE:
        return args
    named = {spec.name: arg for spec, arg in zip(ops.schema(target).arguments, args)}
    if base in _OTHERWISE:
        return tuple((named | _OTHERWISE[base](named)).values())
    batched = [isinstance(arg, Tensor) and arg.dim() > 0 and name in _BATCHED for name, arg in named.items()]
    counts = {arg.shape[0] for arg, cut in zip(args, batched) if cut}
    if len(counts) != 1:
        return args
    (count,) = counts
    most = count * most_bytes // held
    kept = max(most // 8, min(most, ENOUGH), LEAST)
    if (kept >= count or kept > most) and base in _CHANNELED:
        return tuple((named | _pixels(named)).values())
    return args if kept >= count else tuple(arg.narrow(0, 0, kept) if cut else arg for arg, cut in zip(args, batched))


def tells_all(target: str) -> bool:
    """Are the results' shapes those that fewer samples give, too?"""
    return ops.split(target)[1] in _BAGS


def _rows(named: dict[str, Any]) -> dict[str, Any]:
    """Bags of a table's first rows, of which the results' shapes say nothing, but of whether a CPU's kernel is a fast one."""
    return {"weight": _corner(named["weight"], 1)}


def _layer_norm(named: dict[str, Any]) -> dict[str, Any]:
    """One of few rows, or, where all is one row, of few elements: it tells which dtype the statistics have."""
    shape = named["normalized_shape"]
    whole = len(shape) == named["input"].dim()
    parts = ("input", "grad_out", "mean", "rstd", *(("weight", "bias") if whole else ()))
    few = {name: _corner(named[name], 0 if whole else len(shape)) for name in parts if isinstance(named.get(name), Tensor)}
    return few | {"normalized_shape": [min(size, LEAST) for size in shape] if whole else shape}


def _group_norm(named: dict[str, Any]) -> dict[str, Any]:
    """One of few samples and pixels."""
    few = _pixels(named)
    few |= {name: named[name].narrow(0, 0, min(named["N"], LEAST)) for name in ("mean", "rstd") if name in named}
    return few | {"N": min(named["N"], LEAST), "HxW": few["input"][0, 0].numel()}


def _pixels(named: dict[str, Any]) -> dict[str, Any]:
    """Two samples' first pixels, with all their channels."""
    images = {name: named[name].movedim(1, -1) for name in ("input", "grad_out") if name in named}
    return {name: _corner(image, 1).movedim(-1, 1) for name, image in images.items()}


_BAGS = ("_embedding_bag", "_embedding_bag_forward_only")
_OTHERWISE = {"native_layer_norm": _layer_norm, "native_layer_norm_backward": _layer_norm, "native_group_norm": _group_norm,
              "native_group_norm_backward": _group_norm, **dict.fromkeys(_BAGS, _rows)}
"""Ops whose trials are not on fewer samples of all that they have."""


def _corner(tensor: Tensor, kept: int) -> Tensor:
    """At most two along each dimension but the last ``kept``, as close to each other as all of ``tensor`` lie: kernels of norms
    refuse gaps."""
    corner = tensor[tuple(slice(LEAST) for _ in range(tensor.dim() - kept))]
    dense = _packed(tensor) == tensor.stride()
    return corner.as_strided(corner.shape, _packed(corner)) if dense else corner


def _packed(tensor: Tensor) -> tuple[int, ...]:
    """The strides of a tensor without gaps whose dimensions have the order of ``tensor``'s."""
    return torch.empty_like(torch.empty_strided(tensor.shape, tensor.stride(), device="meta")).stride()


def as_many(found: Any, known: Any) -> Any:
    """``known``, a result on Meta, with the strides, or the order of dimensions, and the dtype that ``found``, the same of fewer
    samples, has in truth."""
    if not isinstance(found, Tensor) or not isinstance(known, Tensor):
        return known
    if found.shape[1:] != known.shape[1:]:
        outer = sorted(range(found.dim()), key=found.stride, reverse=True)
        return torch.empty_permuted(known.shape, outer, dtype=found.dtype, device="meta")
    # Where samples do not lie one after the other, strides depend on how many there are.
    outermost = all(found.stride(0) >= stride * size for size, stride in zip(found.shape[1:], found.stride()[1:]))
    if found.shape != known.shape and not outermost:
        return known
    return torch.empty_strided(known.shape, found.stride(), dtype=found.dtype, device="meta")


@contextlib.contextmanager
def without_a_team() -> Iterator[None]:
    """Outside the main thread, ops on the CPU run here without OpenMP's help.

    Each thread that asks for help once has helpers of its own for ever. As soon as there are more of them than cores, libgomp
    lets all of them sleep whenever they wait, and every op of the main thread that wants help pays for waking them: an MLP's
    step on two cores took five times as long when autograd's thread had tried one op with helpers.
    """
    own = torch.get_num_threads()
    if own == 1 or threading.current_thread() is threading.main_thread():
        yield
        return
    torch.set_num_threads(1)  # of this thread; of MKL for all, which the main thread misses for a moment at most
    try:
        yield
    finally:
        torch.set_num_threads(own)
