"""The kernel that makes what a convolution's bias gradient sums, sums it; numbers are those of one recorded op."""

from __future__ import annotations

from typing import Any, Callable

import pytest
import torch
from graphs import execute, kernels, record
from recording import Recording
from torch import Tensor

from barriers.passes import conv_gradients
from barriers.passes.conv_gradients import BACKWARD, SUM, sum_gradients
from codegen.extern import emit_call
from codegen.fuse import plan
from ir_nodes.estimate import operations
from ir_nodes.remarks import Remarks
from ir_nodes.verify import verify

LAST, FIRST = torch.channels_last, torch.contiguous_format
aten = torch.ops.aten


def operands(layout: Any = LAST) -> list[Tensor]:
    """A gradient, what the activation left, the convolution's input and weight."""
    sizes = ((2, 8, 5, 6), (2, 8, 5, 6), (2, 4, 5, 6), (8, 4, 3, 3))
    return [torch.randn(size).to(memory_format=layout) for size in sizes]


def backward(g: Tensor, x: Tensor, w: Tensor, mask: tuple[bool, ...] = (True, True, True), groups: int = 1) -> list[Tensor]:
    pads = [1] * (g.dim() - 2)
    found = aten.convolution_backward(g, x, w, [w.shape[0]], pads, pads, pads, False, [0] * len(pads), groups, mask)
    return [one for one in found if one is not None]


def after_relu(g: Tensor, y: Tensor, x: Tensor, w: Tensor) -> list[Tensor]:
    return backward(aten.threshold_backward(g, y, 0), x, w)


def first_layer(g: Tensor, y: Tensor, x: Tensor, w: Tensor) -> list[Tensor]:
    return backward(aten.silu_backward(g, y), x, w, (False, True, True))


def in_a_row(g: Tensor, y: Tensor, x: Tensor, w: Tensor) -> list[Tensor]:
    parts = [one[:, :, 0].contiguous() for one in (g, y, x, w)]
    return backward(parts[0] * parts[1], *parts[2:])


def changed(program: Callable[..., Any], *inputs: Tensor) -> tuple[Recording, str]:
    recording, remarks = record(program, *inputs)[0], Remarks()
    sum_gradients(recording.graph, remarks)
    verify(recording.graph)
    return recording, "\n".join(str(remark) for remark, _ in remarks.all())


@pytest.mark.parametrize("layout", [LAST, FIRST], ids=str)
@pytest.mark.parametrize("program, calls", [(after_relu, 2), (first_layer, 1), (in_a_row, 2)])
def test_the_sum_joins_the_kernel_before(program: Callable[..., Any], calls: int, layout: Any) -> None:
    before = record(program, *operands(layout))[0].graph
    recording, told = changed(program, *operands(layout))
    nodes = recording.graph.nodes
    assert "summed in the kernel" in told and sum(node.target == BACKWARD for node in nodes) == calls
    assert sum(map(operations, nodes)) == sum(map(operations, before.nodes))
    for node in nodes:
        step = emit_call(node)
        assert node.target != BACKWARD or sum(node.args[-1]) == 1 and not step.blocked and step.early and not step.python
    made = plan(recording.graph)
    (summing,) = [step.nodes for step in kernels(made) if any(node.target == SUM for node in step.nodes)]
    assert len(summing) > 1 and summing[-1].target == SUM
    memory = execute(recording, made)
    for index, data in recording.expected.items():
        torch.testing.assert_close(memory[index].view(torch.float32), data.view(torch.float32), rtol=1e-4, atol=1e-4)


def after_a_cast(g: Tensor, y: Tensor, x: Tensor, w: Tensor) -> list[Tensor]:
    return backward((g.double() * y).float(), x, w)


def test_a_cast_sums_too() -> None:
    recording, told = changed(after_a_cast, *operands())
    assert "summed in the kernel" in told and sum(node.target == SUM for node in recording.graph.nodes) == 1


def test_many_elements_that_aten_made_are_summed_by_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conv_gradients, "WORTH", 1)
    recording, told = changed(by_aten, *operands())
    assert "summed in a generated kernel" in told
    assert [node.name for node in recording.graph.nodes] == ["sum", "convolution_backward", "convolution_backward"]
    memory = execute(recording, plan(recording.graph))
    for index, data in recording.expected.items():
        torch.testing.assert_close(memory[index].view(torch.float32), data.view(torch.float32), rtol=1e-4, atol=1e-4)


def by_aten(g: Tensor, y: Tensor, x: Tensor, w: Tensor) -> list[Tensor]:
    return backward(g, x, w)


def other_layouts(g: Tensor, y: Tensor, x: Tensor, w: Tensor) -> list[Tensor]:
    return backward(g * y, x.contiguous(), w)


def depthwise(g: Tensor, y: Tensor, x: Tensor, w: Tensor) -> list[Tensor]:
    return backward(g * y, torch.cat((x, x), 1), w[:, :1].contiguous(), groups=8)


def exact(g: Tensor, y: Tensor, x: Tensor, w: Tensor) -> list[Tensor]:
    return backward(g.double() * y, x.double(), w.double())


def test_the_bias_of_a_depthwise_convolution_of_channels_last() -> None:
    recording, told = changed(depthwise, *operands())
    assert "summed in the kernel" in told
    memory = execute(recording, plan(recording.graph))
    for index, data in recording.expected.items():
        torch.testing.assert_close(memory[index].view(torch.float32), data.view(torch.float32), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("program, layout, reason", [
    (by_aten, LAST, "not made by a kernel"), (other_layouts, LAST, "differ in layout"),
    (depthwise, torch.contiguous_format, "depthwise"), (exact, LAST, "dtypes")])
def test_refusals(program: Callable[..., Any], layout: torch.memory_format, reason: str) -> None:
    recording, told = changed(program, *operands(layout))
    assert reason in told and not any(node.changed for node in recording.graph.nodes)


def test_a_bias_without_a_gradient_has_no_sum() -> None:
    recording, told = changed(lambda g, y, x, w: backward(g * y, x, w, (True, True, False)), *operands())
    assert not told and [node.name for node in recording.graph.nodes] == ["mul", "convolution_backward"]
