"""Windows that lie side by side and fill a dimension, as strides alone: no conditions, no indices. Imports `ir_nodes` and
codegen's lowering modules."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from codegen.instructions import Instr, Part
from codegen.lowering import Lowering
from codegen.pulled import Known, sum_through
from codegen.reductions import reduction, write_kept
from ir_nodes.layout import Layout
from ir_nodes.node import Node, Operand


def in_runs(layout: Layout, times: Sequence[int]) -> Layout:
    """The last dimensions each in two, the inner ones of so many elements."""
    for dim, run in zip(reversed(range(len(layout.size))), reversed(times)):
        layout = layout.in_runs(dim, run)
    return layout


def sums_of_runs(node: Node, known: Known, source: Operand, times: Sequence[int], most: int,
                 finished: Callable[[Lowering, Instr], Instr] = lambda _, total: total) -> list[Part]:
    """The op whose results are sums of runs of so many elements along the last dimensions, ``finished``: up to ``most`` one by
    one, more as a reduction."""
    write = node.writes[0]
    if math.prod(times) <= most:
        lowering = Lowering(node, write.layout.size)
        lowering.write(0, finished(lowering, run_sums(lowering, known, source, times)))
        return [lowering.part]
    count = len(times)
    within = (*source.layout.size[:-count], *map(math.prod, zip(times, write.layout.size[-count:])))
    layout, rank = in_runs(replace(source.layout, size=within), times), len(within) + count
    lowering, dims = reduction(node, Operand(source.value, layout), tuple(range(rank - 2 * count + 1, rank, 2)))
    total = lowering.reduce("add", lowering.load(Operand(source.value, layout)))
    write_kept(lowering, 0, finished(lowering, total), dims)
    return [lowering.part]


def run_sums(lowering: Lowering, known: Known, source: Operand, times: Sequence[int]) -> Instr:
    """The sums over runs of so many elements along the last dimensions, of whole runs only, in ATen's order. Each element is read
    once, so that what makes it cheaply need not store it."""
    layout, outer = source.layout, len(source.layout.size) - len(times)
    size = (*layout.size[:outer], *(extent // run for extent, run in zip(layout.size[outer:], times)))
    stride = (*layout.stride[:outer], *(step * run for step, run in zip(layout.stride[outer:], times)))
    starts = (layout.offset + sum(number * step for number, step in zip(numbers, layout.stride[outer:]))
              for numbers in itertools.product(*map(range, times)))
    run = replace(layout, size=size, stride=stride)
    return sum_through(lowering, known, (Operand(source.value, replace(run, offset=start)) for start in starts))
