"""Sparse, quantized and nested tensors of the device: their parts are lazy tensors, their ops run at once on the physical one.

PyTorch keeps such tensors under dispatch keys of their own, where nothing is recorded. What only reads or assembles parts is
PyTorch's own CPU kernel, which knows no device; every other op takes its arguments to the physical device and its results back.
What the physical device refuses is refused in its words. Imports torch and `lazy_backend.core`.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any, Callable, Iterator

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lazy_backend import core

Tensor = torch.Tensor
_LAZY = "lazysched"
_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
_BYTES = {torch.qint8: torch.int8, torch.quint8: torch.uint8, torch.qint32: torch.int32}

# Ops that only read or assemble parts, by key, and the key whose kernels do that on any device.
_STRUCTURE = (
    ("SparsePrivateUse1", "SparseCPU",
     "_sparse_coo_tensor_with_dims _sparse_coo_tensor_with_dims_and_tensors empty.memory_format _indices _values indices values "
     "_nnz sparse_dim dense_dim _dimI _dimV is_coalesced _coalesced_ sparse_resize_ sparse_resize_and_clear_ "
     "copy_sparse_to_sparse_ clone empty_like copy_"),
    ("SparseCsrPrivateUse1", "SparseCsrCPU",
     "_nnz sparse_dim dense_dim crow_indices col_indices ccol_indices row_indices values clone copy_ empty_like "
     "empty.memory_format resize_as_sparse_"),
    ("QuantizedPrivateUse1", "QuantizedCPU",
     "q_scale q_zero_point qscheme q_per_channel_scales q_per_channel_zero_points q_per_channel_axis _empty_affine_quantized "
     "_empty_per_channel_affine_quantized as_strided view set_.source_Storage_storage_offset"),
    ("NestedTensorPrivateUse1", "NestedTensorCPU",
     "_nested_tensor_size _nested_tensor_strides _nested_tensor_storage_offsets values unbind.int detach alias _to_copy "
     "transpose.int select.int squeeze squeeze.dim unsqueeze view copy_ clone"),
    ("PrivateUse1", "CPU", "_nested_view_from_buffer _embedding_bag_backward"),
)  # fmt: skip
_PARTED = {"SparsePrivateUse1": "SparseCPU", "SparseCsrPrivateUse1": "SparseCsrCPU", "QuantizedPrivateUse1": "QuantizedCPU",
           "NestedTensorPrivateUse1": "NestedTensorCPU"}  # fmt: skip
# Strided in, another layout out; or kernels that PyTorch has for devices that it knows by name.
_MAKERS = (
    "_to_sparse _to_sparse.sparse_dim _to_sparse_csr _to_sparse_csc _to_sparse_bsr _to_sparse_bsc quantize_per_tensor "
    "quantize_per_tensor.tensor_qparams quantize_per_tensor.tensors quantize_per_tensor_dynamic quantize_per_channel "
    "_make_per_tensor_quantized_tensor _make_per_channel_quantized_tensor _nested_tensor_from_mask _nested_from_padded to_mkldnn "
    "_spdiags _batch_norm_no_update kaiser_window kaiser_window.periodic kaiser_window.beta"
)


def run_at_once(op: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> Any:
    """``op`` on the physical device. Raises what it raises there, and RuntimeError where the arguments' devices differ."""
    core.get().count(f"aten::{op._opname}")
    twins: list[tuple[Tensor, Tensor]] = []
    with torch._C._AutoDispatchBelowAutograd():
        below, named = pytree.tree_map(functools.partial(_lower, twins), (args, kwargs))
        given = [leaf for leaf in pytree.tree_leaves((below, named)) if isinstance(leaf, Tensor)]
        if not any(word in op._opname for word in ("copy", "nested", "quantize")):  # a nested tensor keeps its sizes on the CPU
            _check_devices(pytree.tree_leaves((args, kwargs)))
        result = op(*below, **named)
        for index, argument in enumerate(op._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                written = args[index] if index < len(args) else kwargs.get(argument.name)
                _write_back(twins, pytree.tree_leaves(written))
        leaves = kwargs.get("device") is not None and torch.device(kwargs["device"]).type != _LAZY
        return result if leaves else pytree.tree_map(functools.partial(_lift, twins, given), result)


def _check_devices(leaves: list[Any]) -> None:
    devices = {leaf.device for leaf in leaves if isinstance(leaf, Tensor) and (leaf.dim() or leaf.device.type != "cpu")}
    if len(devices) > 1:
        one, other = sorted(map(str, devices))[:2]
        raise RuntimeError(f"Expected all tensors to be on the same device, but found at least two devices, {one} and {other}!")


def _physical(device: torch.device) -> torch.device:
    return core.physical_device(core.get().current_device() if device.index is None else device.index)


def _lower(twins: list[tuple[Tensor, Tensor]], value: Any) -> Any:
    """A copy of a lazy tensor on the physical device; anything else as it is."""
    if isinstance(value, torch.device) and value.type == _LAZY:
        return _physical(value)
    if not isinstance(value, Tensor) or value.device.type != _LAZY:
        return value
    for lazy, twin in twins:
        if lazy is value:
            return twin
    twin = moved(value, _physical(value.device))
    if value.requires_grad:  # some kernels leave results out that only a backward reads
        twin.requires_grad_()
    twins.append((value, twin))
    return twins[-1][1]


def _lift(twins: list[tuple[Tensor, Tensor]], given: list[Tensor], value: Any) -> Any:
    """A result on the device; an argument that is handed back is the one that was given."""
    if not isinstance(value, Tensor):
        return value
    for lazy, twin in twins:
        if twin is value:
            return lazy
    return value if any(value is one for one in given) else moved(value, torch.device(_LAZY, value.device.index))


def _write_back(twins: list[tuple[Tensor, Tensor]], written: list[Any]) -> None:
    for lazy, twin in twins:
        if not any(lazy is one for one in written):
            continue
        if lazy.is_quantized:
            _raw(lazy).copy_(_raw(twin))
        elif lazy.is_nested:
            lazy.values().copy_(twin.values())
        else:
            if lazy.layout is torch.strided and lazy.shape != twin.shape:
                lazy.resize_(twin.shape)
            if lazy.layout in _COMPRESSED and lazy._nnz() != twin._nnz():
                lazy.resize_as_sparse_(moved(twin, lazy.device))
            lazy.copy_(moved(twin, lazy.device))


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy of ``tensor`` on ``device``, part by part. Raises NotImplementedError for a layout whose parts can't be had."""
    if tensor.is_quantized:
        return _moved_quantized(tensor, device)
    if tensor.is_nested:
        buffer = tensor.values().to(device)
        return torch.ops.aten._nested_view_from_buffer(buffer, tensor._nested_tensor_size(), tensor._nested_tensor_strides(),
                                              tensor._nested_tensor_storage_offsets())
    if tensor.layout is torch.strided:
        return tensor.to(device)
    if tensor.layout is torch.sparse_coo:
        return torch.ops.aten._sparse_coo_tensor_unsafe(tensor._indices().to(device), tensor._values().to(device), tensor.shape,
                                               is_coalesced=tensor.is_coalesced())
    if tensor.layout in _COMPRESSED:
        return torch.ops.aten._sparse_compressed_tensor_unsafe(
            *(part.to(device) for part in parts(tensor)), tensor.shape, dtype=tensor.dtype, layout=tensor.layout, device=device)
    raise NotImplementedError(f"lazysched holds no tensors of layout {tensor.layout}; call .cpu() on the arguments first")


def _raw(tensor: Tensor) -> Tensor:
    """The integers that a quantized tensor stores, sharing its memory."""
    whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
    return whole.view(_BYTES[tensor.dtype]).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _moved_quantized(tensor: Tensor, device: torch.device) -> Tensor:
    if tensor.dtype not in _BYTES:
        raise NotImplementedError(f"lazysched holds no tensors of {tensor.dtype}; call .cpu() on the arguments first")
    try:
        scheme = tensor.qscheme()
    except RuntimeError as error:  # made for the result of an op that has no quantized kernel
        raise NotImplementedError(f"no kernel for {tensor.dtype}; call .dequantize() on the arguments first") from error
    try:
        made = _empty_quantized(tensor, scheme in (torch.per_tensor_affine, torch.per_tensor_symmetric), device)
    except RuntimeError as error:
        if "unrecognized device" not in str(error):
            raise
        raise NotImplementedError(f"PyTorch {torch.__version__} makes quantized tensors on devices that it knows by name only, "
                                  "later versions here, too; call .cpu() on the arguments first") from None
    _raw(made).copy_(_raw(tensor))
    return made


def _empty_quantized(like: Tensor, whole: bool, device: torch.device) -> Tensor:
    """``whole``: it has one scale for all."""
    if whole:
        return torch._empty_affine_quantized(like.shape, scale=like.q_scale(), zero_point=like.q_zero_point(), dtype=like.dtype,
                                             device=device)
    return torch._empty_per_channel_affine_quantized(
        like.shape, scales=like.q_per_channel_scales().to(device), zero_points=like.q_per_channel_zero_points().to(device),
        axis=like.q_per_channel_axis(), dtype=like.dtype, device=device)  # fmt: skip


def copy_quantized(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    """`_copy_from` where one or both are quantized; copy_ has given the target its scale already where both are."""
    if not source.is_quantized:
        source = torch.quantize_per_tensor(source, target.q_scale(), target.q_zero_point(), target.dtype)
    _raw(target).copy_(_raw(source), non_blocking)
    return target


# ---- registering -------------------------------------------------------------------------------------------------------


def _op(name: str) -> torch._ops.OpOverload:
    base, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, base), overload or "default")


def _native(name: str, source: str) -> Callable[..., Any]:
    """The kernel that ``source`` has, called on our tensors."""
    key = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, source))
    return functools.partial(_op(name).redispatch, key)


def _composite(source: str) -> list[str]:
    """Ops that fall apart by default but have a kernel of their own for ``source``."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    defaults = ("CompositeImplicitAutograd", "CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional")
    return [name.removeprefix("aten::") for name in torch._C._dispatch_get_all_op_names()
            if name.startswith("aten::") and has(name, source) and any(has(name, key) for key in defaults)]


_libraries: list[torch.library.Library] = []  # a registration lasts as long as its library


def parts(tensor: Tensor) -> Iterator[Tensor]:
    """The tensors with memory of their own that one is made of: itself, a nested one's values, a sparse one's indices and values,
    what a subclass wraps."""
    if is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:  # type: ignore[attr-defined]
            yield from parts(getattr(tensor, name))
    elif tensor.is_nested:
        yield tensor.values()
    elif tensor.layout is torch.sparse_coo:
        yield from (tensor._indices(), tensor._values())
    elif tensor.layout in _COMPRESSED:
        by_row = tensor.layout in (torch.sparse_csr, torch.sparse_bsr)
        yield from (tensor.crow_indices(), tensor.col_indices()) if by_row else (tensor.ccol_indices(), tensor.row_indices())
        yield tensor.values()
    else:
        yield tensor


def install(_: ModuleType) -> None:
    ours = torch.library.Library("aten", "IMPL")
    anything = torch.library.Library("_", "IMPL")
    _libraries.extend((ours, anything))
    native = [(key, source, name) for key, source, names in _STRUCTURE for name in names.split()]
    for key, source, name in native:
        ours.impl(name, _native(name, source), key)
    for key, source in _PARTED.items():
        for name in _composite(source):
            if (key, source, name) not in native:
                ours.impl(name, functools.partial(run_at_once, _op(name)), key)
        anything.fallback(run_at_once, key)
    ours.impl("_copy_from", copy_quantized, "QuantizedPrivateUse1")
    for name in _MAKERS.split():
        ours.impl(name, functools.partial(run_at_once, _op(name)), "PrivateUse1")


core.at_start(install)
