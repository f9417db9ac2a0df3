"""Lowers ops that take their addresses from index tensors: gathers, embeddings and their gradients, scatters. Imports torch,
`ir_nodes` and codegen's lowering modules.

Kernels stop at an index out of range, as ATen's CUDA kernels do. Without LAZYSCHED_CHECK_INDICES it reads zeros and writes
nothing, as it does in gradients, whose forward has looked.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Collection, Sequence

import torch

from codegen.expressions import Unsupported
from codegen.instructions import Instr, Part
from codegen.lowering import Lowering, arguments
from codegen.promotion import HALF, compute_dtype
from codegen.reductions import operand_of, reduction
from codegen.widened import WIDENED, Place, Sums, in_place, sums_for, tables_for, with_memory
from ir_nodes.layout import Layout
from ir_nodes.node import BufferKind, Node, Operand

FEW_ROWS = 4
"""Gradients of tables with so few rows are sums over the rows that ask for each: atomics would all meet on a few addresses."""

Size = tuple[int, ...]


def index_of(lowering: Lowering, operand: Operand, layout: Layout, count: int, wraps: bool = False, check: bool = True) -> Instr:
    """An index tensor's elements, seen through ``layout``; ``wraps``: negative ones count from the end."""
    if layout.dtype not in (torch.int64, torch.int32):
        raise Unsupported(f"indices of dtype {str(layout.dtype).removeprefix('torch.')}")
    index = lowering.load(Operand(operand.value, layout))
    if wraps:
        index = lowering.expr("tl.where({0} < 0, {0} + {1}, {0})", index, lowering.size(count, index.dtype), dtype=index.dtype)
    return lowering.check(index, count) if check else index


def spread(layout: Layout, before: int, after: int) -> Layout:
    """``layout`` with dimensions of size 1 around it."""
    return replace(layout, size=(1,) * before + layout.size + (1,) * after, stride=(0,) * before + layout.stride + (0,) * after)


def without(layout: Layout, dims: Sequence[int]) -> Layout:
    """``layout`` of the elements with index 0 along ``dims``."""
    size = tuple(1 if dim in dims else extent for dim, extent in enumerate(layout.size))
    return replace(layout, size=size, stride=tuple(0 if dim in dims else step for dim, step in enumerate(layout.stride)))


def lower_index_select(node: Node) -> list[Part]:
    """index_select(self, dim, index), and embedding(weight, indices)."""
    args = arguments(node)
    lowering = Lowering(node, node.writes[0].layout.size)
    if node.name == "embedding":
        source, index = operand_of(args["weight"]), operand_of(args["indices"])
        dim, layout, rest = 0, spread(index.layout, 0, 1), without(operand_of(args["weight"]).layout, (0,))
    else:
        source, index = operand_of(args["self"]), operand_of(args["index"])
        rank = len(source.layout.size)
        if rank == 0 or len(index.layout.size) != 1:
            raise Unsupported("an index of no dimension")
        dim = args["dim"] % rank
        layout, rest = spread(index.layout, 0, rank - dim - 1), without(source.layout, (dim,))
    count, stride = source.layout.size[dim], source.layout.stride[dim]
    at = index_of(lowering, index, layout, count)
    lowering.write(0, lowering.take(source, rest, [(at, stride, count)]))
    return [lowering.part]


def lower_gather(node: Node) -> list[Part]:
    """gather(self, dim, index)."""
    args = arguments(node)
    source, index = operand_of(args["self"]), operand_of(args["index"])
    if not source.layout.size or len(index.layout.size) != len(source.layout.size):
        raise Unsupported("a gather without dimensions")
    dim = args["dim"] % len(source.layout.size)
    lowering = Lowering(node, index.layout.size)
    at = index_of(lowering, index, index.layout, source.layout.size[dim])
    near = replace(source.layout, size=index.layout.size)  # elements beyond the index's extent are not looked at
    lowering.write(0, lowering.take(source, without(near, (dim,)), [(at, source.layout.stride[dim], source.layout.size[dim])]))
    return [lowering.part]


def lower_take(node: Node) -> list[Part]:
    """take: elements by their numbers in the whole, from the end where these are negative."""
    args = arguments(node)
    source, index = operand_of(args["self"]), operand_of(args["index"])
    if not source.layout.is_contiguous:
        raise Unsupported("a look into what does not lie in rows")
    lowering = Lowering(node, index.layout.size)
    at = index_of(lowering, index, index.layout, source.layout.numel, wraps=True)
    rest = replace(source.layout, size=(1,) * len(index.layout.size), stride=(0,) * len(index.layout.size))
    lowering.write(0, lowering.take(source, rest, [(at, 1, source.layout.numel)]))
    return [lowering.part]


def _indexed(lowering: Lowering, layout: Layout, indices: Sequence[Operand | None]) -> tuple[Layout, list[Place]]:
    """Of x[indices]: the layout of what is not indexed, over the result's shape, and a place for each index."""
    dims = [dim for dim, index in enumerate(indices) if index is not None]
    given = [index for index in indices if index is not None]
    shape = torch.broadcast_shapes(*(index.layout.size for index in given))
    adjacent = dims == list(range(dims[0], dims[0] + len(dims)))
    front = dims[0] if adjacent else 0
    others = [dim for dim in range(len(layout.size)) if dim not in dims]
    ordered = [*others[:front], *(None for _ in shape), *others[front:]]
    rest = replace(layout, size=tuple(1 if dim is None else layout.size[dim] for dim in ordered),
                   stride=tuple(0 if dim is None else layout.stride[dim] for dim in ordered))
    places = []
    for dim, index in zip(dims, given):
        at = index_of(lowering, index, spread(index.layout, 0, len(others) - front), layout.size[dim], wraps=True)
        places.append((at, layout.stride[dim], layout.size[dim]))
    return rest, places


def lower_index(node: Node) -> list[Part]:
    """index.Tensor: x[i, :, j] with tensors of integers."""
    args = arguments(node)
    source = operand_of(args["self"])
    lowering = Lowering(node, node.writes[0].layout.size)
    rest, places = _indexed(lowering, source.layout, args["indices"])
    lowering.write(0, lowering.take(source, rest, places))
    return [lowering.part]


def lower_index_put(node: Node, scratch: int) -> list[Part]:
    """index_put_ and its like, with tensors of integers: stores, or float32 sums in an order that differs from run to run, unless
    each place gets one number; with a mask: see `lower_masked_put`."""
    args, write = arguments(node), node.writes[0]
    if [index.layout.dtype for index in args["indices"] if index is not None] == [torch.bool]:
        return lower_masked_put(node, args)
    source, values = operand_of(args["self"]), operand_of(args["values"])
    if len(node.writes) != 1 or source.layout != write.layout or write.base is None:
        raise Unsupported(f"no kernel for {node.target}")
    given = [index.layout.size for index in args["indices"] if index is not None]
    others = [n for n, index in zip(write.layout.size, [*args["indices"], *[None] * len(write.layout.size)]) if index is None]
    once = write.layout.dtype is not torch.bool and all(math.prod(size) == 1 for size in given)  # no place comes twice
    adds = args["accumulate"] and not once
    if adds:
        check_order(compute_dtype(write.layout.dtype))
    shape, front = _put_shape(args["indices"], given, others)
    apart = sums_for(node, source, scratch, math.prod(shape)) if adds else None
    into = apart or Sums(write.value, write.layout, write.base)
    lowering = Lowering(node, shape)
    rest, places = _indexed(lowering, into.layout, args["indices"])
    value = lowering.cast(lowering.load(values), write.layout.dtype)
    if args["accumulate"] and once:
        old = lowering.take(source, rest, places)
        value = lowering.cast(lowering.expr("{0} + {1}", old, value, dtype=old.dtype), write.layout.dtype)
    turns = into.turns(lowering, spread(_every(torch.broadcast_shapes(*given)), front, len(others) - front))
    lowering.put(into.target, rest, [*turns, *places], value, "add" if adds else "set")
    return into.around(lowering.part)


def lower_masked_put(node: Node, args: dict[str, Any]) -> list[Part]:
    """x[:, mask] = values that are the same for all that the mask chooses: elementwise, where ATen waits for the GPU to tell how
    many those are."""
    source, values, layout = operand_of(args["self"]), operand_of(args["values"]), node.writes[0].layout
    before, mask = next((dim, index) for dim, index in enumerate(args["indices"]) if index is not None)
    covered, rank = len(mask.layout.size), len(layout.size)
    behind = rank - before - covered
    through = len(values.layout.size) - behind - 1  # the dimension of values that runs through the elements chosen
    if len(node.writes) != 1 or layout.size[before : rank - behind] != mask.layout.size or not covered:
        raise Unsupported(f"no kernel for {node.target}")
    if through >= 0 and values.layout.size[through] != 1:
        raise Unsupported("as many values as the mask chooses elements")
    if args["accumulate"] and layout.dtype is torch.bool:
        raise Unsupported("sums of bool")
    lowering = Lowering(node, layout.size)
    one = values.layout
    if through >= 0:
        size, stride = ((*of[:through], *(fill,) * covered, *of[through + 1 :]) for of, fill in ((one.size, 1), (one.stride, 0)))
        one = replace(one, size=size, stride=stride)
    chosen = lowering.load(Operand(mask.value, spread(mask.layout, 0, behind)))
    old, new = lowering.load(source), lowering.cast(lowering.load(Operand(values.value, one)), layout.dtype)
    if args["accumulate"]:
        new = lowering.cast(lowering.expr("{0} + {1}", old, new, dtype=old.dtype), layout.dtype)
    lowering.write(0, lowering.expr("tl.where({0}, {1}, {2})", chosen, new, old, dtype=old.dtype))
    return [lowering.part]


def lower_index_copy(node: Node) -> list[Part]:
    """index_copy into its own memory, such as a token's keys into a cache: stores, where ATen walks the whole."""
    args, write = arguments(node), node.writes[0]
    into, index, source = (operand_of(args[name]) for name in ("self", "index", "source"))
    rank = len(write.layout.size)
    if into.value.buffer is not write.value.buffer or into.layout != write.layout:
        raise Unsupported("a copy beside what it copies into")
    if rank == 0 or len(index.layout.size) != 1:
        raise Unsupported("an index of no dimension")
    dim = args["dim"] % rank
    lowering = Lowering(node, source.layout.size)
    at = index_of(lowering, index, spread(index.layout, 0, rank - dim - 1), write.layout.size[dim])
    value = lowering.cast(lowering.load(source), write.layout.dtype)
    place = (at, write.layout.stride[dim], write.layout.size[dim])
    lowering.put(write.value, without(write.layout, (dim,)), [place], value, "set")
    lowering.part.after = (into.value,)
    return [lowering.part]


def _put_shape(indices: Sequence[Operand | None], given: Sequence[Size], others: Sequence[int]) -> tuple[Size, int]:
    """The shape of what is put, and how many of its dimensions come before the indices'."""
    dims = [dim for dim, index in enumerate(indices) if index is not None]
    front = dims[0] if dims == list(range(dims[0], dims[0] + len(dims))) else 0
    return (*others[:front], *torch.broadcast_shapes(*given), *others[front:]), front


def check_order(dtype: torch.dtype, allowed: Collection[torch.dtype] = (torch.float32,)) -> None:
    """Raises Unsupported where sums by atomics would not do: their order, and so the last bits, differ from run to run."""
    if torch.are_deterministic_algorithms_enabled():
        raise Unsupported("deterministic algorithms are asked for, and atomics add in any order")
    if dtype not in allowed:
        raise Unsupported(f"atomic sums of {str(dtype).removeprefix('torch.')}")


def lower_embedding_backward(node: Node, scratch: int) -> list[Part]:
    """embedding_dense_backward: the sum of each row's gradients, float32 inside as ATen's, whose order it does not keep."""
    args, write = arguments(node), node.writes[0]
    grad, index = operand_of(args["grad_output"]), operand_of(args["indices"])
    if args["scale_grad_by_freq"]:
        raise Unsupported("gradients scaled by how often a row was used")
    if write.value.buffer.kind is not BufferKind.FRESH or write.base is not None or not write.layout.is_contiguous:
        raise Unsupported("into memory that is in use")
    rows, width = write.layout.size
    flat = math.prod(index.layout.size)
    if rows <= FEW_ROWS:
        return [_row_sums(node, args, grad, index)]
    half = write.layout.dtype in HALF
    if half and rows * width > WIDENED:
        raise Unsupported("a large table in 16 bits")
    check_order(compute_dtype(write.layout.dtype))
    assert flat
    tables = tables_for(rows * width, flat * width)
    into = with_memory(node, None, scratch, tables) if half or tables > 1 else in_place(node, None)
    add = Lowering(node, (*index.layout.size, width))
    at = index_of(add, index, spread(index.layout, 0, 1), rows, check=False)
    if args["padding_idx"] >= 0:
        at = add.expr("tl.where({0} == {1}, -1, {0})", at, add.size(args["padding_idx"], at.dtype), dtype=at.dtype)
    places = [*into.turns(add, spread(_every(index.layout.size), 0, 1)), (at, width, rows)]
    add.put(into.target, Layout(into.layout.dtype, (1, width), (0, 1)), places, add.load(grad), "add")
    return into.around(add.part)


def _every(size: Size) -> Layout:
    """Lookups of ``size``, each for itself, also where one index stands for several."""
    return Layout.contiguous(torch.int64, size)


def _row_sums(node: Node, args: dict[str, Any], grad: Operand, index: Operand) -> Part:
    write = node.writes[0].layout
    lowering, _ = reduction(node, grad, tuple(range(len(grad.layout.size) - 1)))
    lowering.part.column = True
    at, value = index_of(lowering, index, spread(index.layout, 0, 1), write.size[0], check=False), lowering.load(grad)
    for row in range(write.size[0]):
        number = lowering.expr(str(row if row != args["padding_idx"] else -1), dtype=at.dtype)
        mine = lowering.expr("tl.where({0} == {1}, {2}, 0.0)", at, number, value, dtype=value.dtype)
        place = Layout(write.dtype, (write.size[1],), (write.stride[1],), write.offset + row * write.stride[0])
        lowering.store(node.writes[0].value, place, lowering.reduce("add", mine), 1)
    return lowering.part
