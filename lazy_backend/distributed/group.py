"""The process group of the device: records collectives on lazy tensors, passes those on other tensors on.

Imports torch and `lazy_backend` parts below. torch.distributed calls the methods by these names, and so do its C++ parts (DDP's
reducer, functional collectives) through PyTorch's own trampoline; names differ between versions, so some have two.
"""

from __future__ import annotations

import functools
from datetime import timedelta
from typing import Any, Callable, Sequence

import torch
import torch.distributed as dist

from lazy_backend import core
from lazy_backend.distributed import agreement, collectives, parallel
from lazy_backend.distributed.collectives import reduction_name
from lazy_backend.distributed.inboxes import Inboxes
from lazy_backend.distributed.work import Received, Recorded, run_recorded

Tensor = torch.Tensor
Tensors = Sequence[Tensor]


class LazyGroup(dist.ProcessGroup):
    """Runs NCCL where the device runs on CUDA and gloo where it runs on a CPU. Tensors on the CPU have a gloo group of their own,
    since what is recorded runs later than what is not."""

    supports_splitting = supports_coalescing = False

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta, name: str, options: Any = None) -> None:
        """``options``: `ProcessGroupNCCL.Options` for the group underneath, where the device runs on CUDA."""
        super().__init__(rank, size)
        self._made = (store, rank, size, timeout)
        self._options = options
        self._label, self._description = name, ""
        self.inner = self._plain("device", core.physical_is_cuda())
        self.inboxes = Inboxes(self.inner, dist.PrefixStore("inboxes/", store), rank, size, timeout, name)
        self.queue: list[Callable[[], collectives.Flight]] = []
        self._host: dist.ProcessGroup | None = None
        self.agreement = agreement.Agreement(dist.PrefixStore("order/", store), name, rank, size, timeout)
        collectives.groups[name] = self

    def _plain(self, name: str, cuda: bool) -> dist.ProcessGroup:
        store, rank, size, timeout = self._made
        made = dist.ProcessGroup(dist.PrefixStore(f"{name}/", store), rank, size)
        kind = dist.ProcessGroup.BackendType.NCCL if cuda else dist.ProcessGroup.BackendType.GLOO
        made._set_default_backend(kind)
        made._register_backend(torch.device("cuda" if cuda else "cpu"), kind, self._backend(made.get_group_store(), cuda))
        return made

    def _backend(self, store: dist.Store, cuda: bool) -> Any:
        _, rank, size, timeout = self._made
        if not cuda:
            return dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
        options = self._options or dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(store, rank, size, options)

    @property
    def host(self) -> dist.ProcessGroup:
        """For tensors on the CPU, objects and barriers. Made at its first use, which is every rank's."""
        if self._host is None:
            self._host = self._plain("host", False)
        return self._host

    def _record(self, name: str, outs: Tensors, ins: Tensors, *numbers: int, reduce: Any = None) -> Recorded:
        for tensor in (*outs, *ins):
            check(tensor, dense=name[-1] == "_")
        collectives.record(name, outs, ins, numbers, "" if reduce is None else reduction_name(reduce), self._label)
        return Recorded(outs, ins)

    def _direct(self, name: str, tensor: Tensor | None, *args: Any) -> Any:
        """A collective on tensors that are not lazy: now, after what is recorded, or a rank may wait for what another holds."""
        run_recorded(f"{name} on tensors that are not lazy")
        group = self.host if tensor is None or tensor.device.type == "cpu" else self.inner
        return getattr(group, name)(*args)

    # ---- the collectives -------------------------------------------------------------------------------------------------

    def allreduce(self, tensors: Tensors, opts: Any) -> Any:
        if not is_lazy(tensors):
            return self._direct("allreduce", tensors[0], tensors, opts)
        return self._record("all_reduce_", tensors, [], reduce=opts.reduceOp)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any) -> Any:
        if not is_lazy(tensors):
            return self._direct("allreduce_coalesced", tensors[0], tensors, opts)
        return self._record("all_reduce_", tensors, [], reduce=opts.reduceOp)

    def broadcast(self, tensors: Tensors, opts: Any) -> Any:
        if not is_lazy(tensors):
            return self._direct("broadcast", tensors[0], tensors, opts)
        return self._record("broadcast_", tensors, [], opts.rootRank)

    def reduce(self, tensors: Tensors, opts: Any) -> Any:
        if not is_lazy(tensors):
            return self._direct("reduce", tensors[0], tensors, opts)
        return self._record("reduce_", tensors, [], opts.rootRank, reduce=opts.reduceOp)

    def allgather(self, outs: Sequence[Tensors], ins: Tensors, opts: Any = None) -> Any:
        if not is_lazy(ins):
            return self._direct("allgather", ins[0], outs, ins, *given(opts))
        return self._record("all_gather", outs[0], ins)

    def allgather_coalesced(self, outs: Sequence[Tensors], ins: Tensors, opts: Any = None) -> Any:
        if not is_lazy(ins):
            return self._direct("allgather_coalesced", ins[0], outs, ins, *given(opts))
        return Recorded([], parts=[self._record("all_gather", [parts[position] for parts in outs], [one])
                                   for position, one in enumerate(ins)])

    def all_gather_single(self, out: Tensor, input: Tensor, opts: Any = None) -> Any:
        if not is_lazy([input]):
            return self._direct("_allgather_base", input, out, input, *given(opts))
        return self._record("all_gather_single", [out], [input])

    def all_gather_single_coalesced(self, outs: Tensors, ins: Tensors, opts: Any = None) -> Any:
        if not is_lazy(ins):
            return self._direct("allgather_into_tensor_coalesced", ins[0], outs, ins, *given(opts))
        return self._record("all_gather_single", outs, ins)

    def reduce_scatter(self, outs: Tensors, ins: Sequence[Tensors], opts: Any) -> Any:
        if not is_lazy(outs):
            return self._direct("reduce_scatter", outs[0], outs, ins, opts)
        return self._record("reduce_scatter", outs, ins[0], reduce=opts.reduceOp)

    def reduce_scatter_single(self, out: Tensor, input: Tensor, opts: Any) -> Any:
        if not is_lazy([out]):
            return self._direct("_reduce_scatter_base", out, out, input, opts)
        return self._record("reduce_scatter_single", [out], [input], reduce=opts.reduceOp)

    def reduce_scatter_single_coalesced(self, outs: Tensors, ins: Tensors, opts: Any) -> Any:
        if not is_lazy(outs):
            return self._direct("reduce_scatter_tensor_coalesced", outs[0], outs, ins, opts)
        return self._record("reduce_scatter_single", outs, ins, reduce=opts.reduceOp)

    def all_to_all_single(self, out: Tensor, input: Tensor, out_sizes: list[int], in_sizes: list[int], opts: Any = None) -> Any:
        if not is_lazy([out]):
            return self._direct("alltoall_base", out, out, input, out_sizes, in_sizes, *given(opts))
        return self._record("all_to_all_single", [out], [input], *self._made[1:3], len(out_sizes), *out_sizes, *in_sizes)

    def alltoall(self, outs: Tensors, ins: Tensors, opts: Any = None) -> Any:
        if not is_lazy(outs):
            return self._direct("alltoall", outs[0], outs, ins, *given(opts))
        return self._record("all_to_all", outs, ins)

    def gather(self, outs: Sequence[Tensors], ins: Tensors, opts: Any) -> Any:
        if not is_lazy(ins):
            return self._direct("gather", ins[0], outs, ins, opts)
        return self._record("gather", outs[0] if outs else [], ins, opts.rootRank)

    def scatter(self, outs: Tensors, ins: Sequence[Tensors], opts: Any) -> Any:
        if not is_lazy(outs):
            return self._direct("scatter", outs[0], outs, ins, opts)
        return self._record("scatter", outs, ins[0] if ins else [], opts.rootRank)

    def send(self, tensors: Tensors, peer: int, tag: int = 0) -> Any:
        if not is_lazy(tensors):
            return self._direct("send", tensors[0], tensors, peer, tag)
        return self._record("send", [], tensors, peer, tag)

    def recv(self, tensors: Tensors, peer: int, tag: int = 0) -> Any:
        if not is_lazy(tensors):
            return self._direct("recv", tensors[0], tensors, peer, tag)
        return self._record("recv", tensors, [], peer, tag)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> Any:
        """Whoever calls this wants to know who sent, so it runs at once."""
        if not is_lazy(tensors):
            return self._direct("recv_anysource", tensors[0], tensors, tag)
        run_recorded("recv from any rank")
        arrived = [torch.empty(t.shape, dtype=t.dtype, device=core.physical_device(t.device.index)) for t in tensors]
        work = self.inner.recv_anysource(arrived, tag)
        work.wait()
        for tensor, bytes_ in zip(tensors, arrived):
            tensor.copy_(bytes_)
        return Received(tensors, work._source_rank())

    def barrier(self, opts: Any = None) -> Any:
        """Runs what is recorded, waits for it, then for every rank."""
        run_recorded("torch.distributed.barrier()")
        if core.physical_is_cuda():
            torch.cuda.synchronize()
        return self.host.barrier()

    # what 2.11 calls them
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # ---- what torch.distributed asks of a group -----------------------------------------------------------------------------

    def _start_coalescing(self, device: torch.device) -> None:
        """Recorded collectives need no coalescing: they are launched together anyway."""

    def _end_coalescing(self, device: torch.device) -> Any:
        return Recorded([])

    start_coalescing, end_coalescing = _start_coalescing, _end_coalescing

    def get_group_store(self) -> dist.Store:
        return self._made[0]

    def _get_backend(self, device: torch.device) -> Any:
        return self

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(one) for one in ("cpu", *(["cuda"] if core.physical_is_cuda() else []), "lazysched")]

    def getBackendName(self) -> str:  # noqa: N802  (PyTorch's name)
        return "lazysched"

    def getGroupName(self) -> str:  # noqa: N802
        return self._label

    def setGroupName(self, name: str) -> None:  # noqa: N802
        """It was given at its creation."""

    def getGroupDesc(self) -> str:  # noqa: N802
        return self._description

    def setGroupDesc(self, text: str) -> None:  # noqa: N802
        self._description = text

    name = _get_backend_name = getBackendName
    group_name, group_desc = property(getGroupName), property(getGroupDesc)

    def shutdown(self) -> None:
        """Run what is recorded and close the groups underneath."""
        run_recorded("destroy_process_group()")
        self.agreement.stop()
        collectives.groups.pop(self._label, None)
        self.inboxes.close()
        self.inner.shutdown()
        if self._host is not None:
            self._host.shutdown()

    def abort(self) -> None:
        self.agreement.stop()
        self.inner.abort()


def given(opts: Any) -> tuple[Any, ...]:
    return () if opts is None else (opts,)


def is_lazy(tensors: Tensors) -> bool:
    return tensors[0].device.type == "lazysched"


def check(tensor: Tensor, dense: bool) -> None:
    """Raises ValueError where gloo and NCCL would, at the user's line."""
    if tensor.layout is not torch.strided:
        raise ValueError(f"collectives of lazysched tensors take strided ones, got {tensor.layout}; send its parts")
    if not tensor.is_contiguous() and not (dense and is_dense(tensor)):
        raise ValueError("Tensors must be contiguous: call .contiguous() on it before the collective")


def is_dense(tensor: Tensor) -> bool:
    """Does every byte that it spans belong to one element? Only then a copy keeps its strides."""
    return torch.empty_like(tensor, device="meta", memory_format=torch.preserve_format).stride() == tensor.stride()


def create(options: Any, backend_options: Any = None) -> LazyGroup:
    """What torch.distributed calls for the backend "lazysched"."""
    agreement.install()
    place = options.store, options.group_rank, options.group_size
    return LazyGroup(*place, options.timeout, str(options.group_id), backend_options)


def install() -> None:
    """Make "lazysched" the backend of the device. Cheap: torch has imported torch.distributed already."""
    if not dist.is_available() or "LAZYSCHED" in dist.Backend._plugins:
        return
    c10d = dist.distributed_c10d
    dist.Backend.register_backend("lazysched", create, extended_api=True, devices=["lazysched"])
    # From PyTorch 2.15 on groups get a flight recorder of Python's, unless theirs record: gloo and NCCL underneath do.
    getattr(c10d, "_FR_SELF_RECORDING_BACKENDS", set()).add("lazysched")
    parallel.install()
    config = c10d.BackendConfig
    original = config.__init__

    @functools.wraps(original)
    def init(self: Any, backend: Any) -> None:
        """Beside CUDA, where PyTorch's default is NCCL, a program that uses the device already means this backend."""
        undefined = str(backend) == dist.Backend.UNDEFINED
        original(self, "lazysched" if undefined and core.is_started() else backend)

    config.__init__ = init
