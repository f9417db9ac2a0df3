"""Estimates: torch's formulas for arithmetic, bytes for the rest, links for collectives."""

from __future__ import annotations

import pytest
import torch

from ir_nodes import Access, BufferKind, Graph, Layout, Node
from ir_nodes.estimate import CPU, CUDA, cost, operations, traffic
from ir_nodes.node import Arg


def node(target: str, *args: Arg, outs: list[tuple[int, ...]] | None = None, dtype: torch.dtype = torch.float32) -> Node:
    """One op; a tuple of ints after "r" stands for a tensor of that shape: ("r", 3, 4)."""
    graph = Graph()

    def access(shape: tuple[int, ...], mode: str) -> Access:
        layout = Layout.contiguous(dtype, shape)
        return Access(graph.add_buffer(layout.nbytes, BufferKind.INPUT if mode == "r" else BufferKind.FRESH), layout, mode)

    given = [access(arg[1:], "r") if isinstance(arg, tuple) and arg[:1] == ("r",) else arg for arg in args]
    return graph.record(target, given, [access(shape, "w") for shape in outs or []])


FLOPS: dict[str, tuple[Node, int]] = {
    "mm": (node("aten::mm", ("r", 8, 16), ("r", 16, 4), outs=[(8, 4)]), 2 * 8 * 16 * 4),
    "addmm": (node("aten::addmm", ("r", 4), ("r", 8, 16), ("r", 16, 4), 1, 1, outs=[(8, 4)]), 2 * 8 * 16 * 4),
    "bmm": (node("aten::bmm", ("r", 3, 8, 16), ("r", 3, 16, 4), outs=[(3, 8, 4)]), 3 * 2 * 8 * 16 * 4),
    "linear": (node("aten::linear", ("r", 5, 16), ("r", 4, 16), None, outs=[(5, 4)]), 2 * 5 * 16 * 4),
    "convolution": (node("aten::convolution", ("r", 2, 3, 8, 8), ("r", 4, 3, 3, 3), None, (1, 1), (1, 1), (1, 1), False, (0, 0),
                         1, outs=[(2, 4, 8, 8)]), 2 * 2 * 4 * 8 * 8 * 3 * 3 * 3),
    "gradients of a convolution of groups": (
        node("aten::convolution_backward", ("r", 2, 6, 8, 8), ("r", 2, 6, 8, 8), ("r", 6, 1, 3, 3), None, (1, 1), (1, 1),
             (1, 1), False, (0, 0), 6, (True, True, False), outs=[(2, 6, 8, 8), (6, 1, 3, 3)]), 2 * 2 * 2 * 6 * 8 * 8 * 3 * 3),
    "the weight's of a transposed one": (
        node("aten::convolution_backward", ("r", 2, 4, 16, 16), ("r", 2, 6, 8, 8), ("r", 6, 4, 2, 2), None, (2, 2), (0, 0),
             (1, 1), True, (0, 0), 1, (False, True, False), outs=[(6, 4, 2, 2)]), 2 * 2 * 6 * 8 * 8 * 4 * 2 * 2),
    "attention": (node("aten::_scaled_dot_product_flash_attention_for_cpu", ("r", 2, 4, 8, 16), ("r", 2, 4, 8, 16),
                       ("r", 2, 4, 8, 16), outs=[(2, 4, 8, 16), (2, 4, 8)]), 2 * 2 * 4 * 8 * 8 * 16 * 2),
    "add": (node("aten::add.Tensor", ("r", 8), ("r", 8), 1, outs=[(8,)]), 0),
    "a shape that the formula does not know": (node("aten::mv", ("r", 8, 16), ("r", 16), outs=[(8,)]), 0),
}


@pytest.mark.parametrize("case", FLOPS)
def test_arithmetic_is_counted_as_torch_counts_it(case: str) -> None:
    op, wanted = FLOPS[case]
    assert operations(op) == wanted


def test_what_moves_memory_is_counted_in_bytes() -> None:
    add = node("aten::add.Tensor", ("r", 1000), ("r", 1000), 1, outs=[(1000,)])
    assert traffic(add) == 12_000
    assert cost(add, CPU).seconds == pytest.approx(CPU.launch + 12_000 / CPU.memory)
    rows = node("aten::embedding", ("r", 100_000, 8), ("r", 4), outs=[(4, 8)])
    assert traffic(rows) == 2 * 4 * 8 * 4, "a lookup does not read the whole table"


def test_the_roofline_takes_the_larger_of_both() -> None:
    large = node("aten::mm", ("r", 4096, 4096), ("r", 4096, 4096), outs=[(4096, 4096)])
    half = node("aten::mm", ("r", 4096, 4096), ("r", 4096, 4096), outs=[(4096, 4096)], dtype=torch.bfloat16)
    assert cost(large, CUDA).seconds == pytest.approx(2 * 4096**3 / CUDA.flops, rel=0.01)
    assert cost(half, CUDA).seconds < cost(large, CUDA).seconds / 5


def test_a_collective_takes_the_link() -> None:
    talk = node("_c10d_functional::all_reduce", ("r", 1000), "sum", "0", outs=[(1000,)])
    assert cost(talk, CPU).collective
    assert cost(talk, CPU).seconds == pytest.approx(CPU.start + 8000 / CPU.link)
    wait = cost(node("_c10d_functional::wait_tensor", ("r", 4), outs=[(4,)]), CPU)
    assert wait.waits and not wait.collective and wait.seconds == 0
