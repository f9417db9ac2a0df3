"""How each collective is started on the physical device. Imports torch only."""

from __future__ import annotations

from typing import Any, Callable, NamedTuple, Sequence

import torch
import torch.distributed as dist

Tensor = torch.Tensor
Tensors = Sequence[Tensor]


class Landing(NamedTuple):
    """What to wait for, and what is left to do then."""

    work: Any
    land: Callable[[], None]


def reduction(name: str) -> Any:
    return getattr(dist.ReduceOp, name)


def options(kind: str, **fields: Any) -> Any:
    """Options of a c10d call. ``asyncOp`` stays True, which gives NCCL a stream of its own."""
    made = getattr(dist.distributed_c10d, kind)()
    for name, value in fields.items():
        setattr(made, name, value)
    return made


# ---- (process group of the physical device, outs, ins, numbers, reduction) -> what to wait for ---------------------------------


def all_reduce_(pg: Any, outs: Tensors, ins: Tensors, numbers: list[int], reduce: str) -> Any:
    if len(outs) == 1:
        return pg.allreduce(outs, options("AllreduceOptions", reduceOp=reduction(reduce)))
    return pg.allreduce_coalesced(outs, options("AllreduceCoalescedOptions", reduceOp=reduction(reduce)))


def broadcast_(pg: Any, outs: Tensors, ins: Tensors, numbers: list[int], reduce: str) -> Any:
    return pg.broadcast(outs, options("BroadcastOptions", rootRank=numbers[0], rootTensor=0))


def reduce_(pg: Any, outs: Tensors, ins: Tensors, numbers: list[int], reduce: str) -> Any:
    return pg.reduce(outs, options("ReduceOptions", rootRank=numbers[0], rootTensor=0, reduceOp=reduction(reduce)))


def all_gather(pg: Any, outs: Tensors, ins: Tensors, numbers: list[int], reduce: str) -> Any:
    return pg.allgather([outs], ins, options("AllgatherOptions"))


def all_gather_single(pg: Any, outs: Tensors, ins: Tensors, numbers: list[int], reduce: str) -> Any:
    if len(outs) == 1:
        return pg._allgather_base(outs[0], ins[0], options("AllgatherOptions"))
    return pg.allgather_into_tensor_coalesced(outs, ins, options("AllgatherOptions"))


def reduce_scatter(pg: Any, outs: Tensors, ins: Tensors, numbers: list[int], reduce: str) -> Any:
    return pg.reduce_scatter(outs, [ins], options("ReduceScatterOptions", reduceOp=reduction(reduce)))


def reduce_scatter_single(pg: Any, outs: Tensors, ins: Tensors, numbers: list[int], reduce: str) -> Any:
    opts = options("ReduceScatterOptions", reduceOp=reduction(reduce))
    if len(outs) == 1:
        return pg._reduce_scatter_base(outs[0], ins[0], opts)
    return pg.reduce_scatter_tensor_coalesced(outs, ins, opts)


def all_to_all_single(pg: Any, outs: Tensors, ins: Tensors, numbers: list[int], reduce: str) -> Any:
    sizes = [sizes or like(one, numbers[1]) for one, sizes in zip((outs[0], ins[0]), splits(numbers))]
    return pg.alltoall_base(outs[0], ins[0], *sizes, options("AllToAllOptions"))


def all_to_all_others(pg: Any, outs: Tensors, ins: Tensors, numbers: list[int], reduce: str) -> Any:
    """An `all_to_all_single` but for what a rank sends to itself, which nobody reads where it would arrive. What gloo copies so
    on a CPU costs little beside what it sends."""
    if outs[0].device.type == "cpu":
        return all_to_all_single(pg, outs, ins, numbers, reduce)
    parts = [list(one.split(sizes or like(one, numbers[1]))) for one, sizes in zip((outs[0], ins[0]), splits(numbers))]
    for some in parts:
        some[numbers[0]] = some[numbers[0]][:0]
    return pg.alltoall(*parts, options("AllToAllOptions"))


def splits(numbers: list[int]) -> tuple[list[int], list[int]]:
    """The split sizes that an `all_to_all_single` was given, of the output and of the input."""
    _, _, count, *given = numbers
    return given[:count], given[count:]


def like(tensor: Tensor, ranks: int) -> list[int]:
    """Equal split sizes, said on CUDA: given none, NCCL may exchange by other means than sends and receives, and where one rank
    leaves its own part out, and another does not, they would not meet."""
    return [tensor.size(0) // ranks] * ranks if tensor.device.type != "cpu" else []


def all_to_all(pg: Any, outs: Tensors, ins: Tensors, numbers: list[int], reduce: str) -> Any:
    if outs[0].device.type != "cpu":
        return pg.alltoall(outs, ins, options("AllToAllOptions"))
    flat = outs[0].new_empty(sum(out.numel() for out in outs))  # gloo exchanges parts of one tensor only
    sizes = [[one.numel() for one in many] for many in (outs, ins)]
    work = pg.alltoall_base(flat, torch.cat([one.reshape(-1) for one in ins]), *sizes, options("AllToAllOptions"))

    def land() -> None:
        for out, part in zip(outs, flat.split(sizes[0])):
            out.copy_(part.view(out.shape))

    return Landing(work, land)


def gather(pg: Any, outs: Tensors, ins: Tensors, numbers: list[int], reduce: str) -> Any:
    return pg.gather([outs] if outs else [], ins, options("GatherOptions", rootRank=numbers[0]))


def scatter(pg: Any, outs: Tensors, ins: Tensors, numbers: list[int], reduce: str) -> Any:
    return pg.scatter(outs, [ins] if ins else [], options("ScatterOptions", rootRank=numbers[0]))


def send(pg: Any, outs: Tensors, ins: Tensors, numbers: list[int], reduce: str) -> Any:
    return pg.send(ins, numbers[0], numbers[1])


def recv(pg: Any, outs: Tensors, ins: Tensors, numbers: list[int], reduce: str) -> Any:
    return pg.recv(outs, numbers[0], numbers[1])


STARTS = (all_reduce_, broadcast_, reduce_, all_gather, all_gather_single, reduce_scatter, reduce_scatter_single,
          all_to_all_single, all_to_all_others, all_to_all, gather, scatter, send, recv)  # fmt: skip
