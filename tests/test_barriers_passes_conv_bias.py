"""cuDNN does what follows a convolution where nobody could tell; elsewhere a kernel adds the bias, together with what follows."""

from __future__ import annotations

from typing import Any, Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from cudnn_ops import flag, on_cpu
from graphs import execute, kernels, record
from optimised import assert_equals_eager
from recording import Recording
from torch import Tensor

from barriers.passes.conv_bias import BIAS, CONVOLUTION, WITH_RELU, WITH_SUM, add_biases
from codegen.cuda_graph import blocked_call, scalars
from codegen.cudnn import is_one_call
from codegen.extern import emit_call, operand_slots
from codegen.fuse import plan
from ir_nodes.estimate import operations
from ir_nodes.remarks import Remarks
from ir_nodes.verify import verify

LAST = torch.channels_last


@pytest.fixture(autouse=True)
def reference_kernels() -> Iterator[None]:
    with on_cpu():
        yield


def drawn(*size: int, dtype: torch.dtype = torch.float32, layout: Any = LAST) -> Tensor:
    return torch.randn(size, dtype=dtype).to(memory_format=layout)


def operands(dtype: torch.dtype = torch.float32, layout: torch.memory_format = LAST, channels: int = 8) -> tuple[Tensor, ...]:
    """Of a convolution that keeps the size: input, weight, bias, and another summand."""
    made = [drawn(2, channels, 5, 6, dtype=dtype, layout=layout), drawn(channels, channels, 3, 3, dtype=dtype, layout=layout)]
    return (*made, torch.randn(channels, dtype=dtype), drawn(2, channels, 5, 6, dtype=dtype, layout=layout))


def changed(program: Callable[..., Any], *inputs: Tensor) -> tuple[Recording, str]:
    """The graph after the pass, with what the program gave, and what was told."""
    recording, remarks = record(program, *inputs)[0], Remarks()
    add_biases(recording.graph, remarks)
    verify(recording.graph)
    return recording, "\n".join(str(remark) for remark, _ in remarks.all())


def targets(recording: Recording) -> list[str]:
    return [node.target for node in recording.graph.nodes]


def layer(x: Tensor, w: Tensor, b: Tensor, z: Tensor) -> Tensor:
    return F.conv2d(x, w, b, padding=1).relu()


def in_place(x: Tensor, w: Tensor, b: Tensor, z: Tensor) -> Tensor:
    return F.conv2d(x, w, b, padding=1).relu_()


def no_bias(x: Tensor, w: Tensor, b: Tensor, z: Tensor) -> Tensor:
    return F.conv2d(x, w, padding=1).relu().neg()


def strided(x: Tensor, w: Tensor, b: Tensor, z: Tensor) -> Tensor:
    return torch.convolution(x, w, b, [2], [2, 1], [1, 2], False, [0, 0], 1).relu()


def single(x: Tensor, w: Tensor, b: Tensor, z: Tensor) -> Tensor:
    return F.conv2d(x, w[:, :, 1, 1].contiguous()[:, :, None, None], b).relu()


def to_a_pixel(x: Tensor, w: Tensor, b: Tensor, z: Tensor) -> Tensor:
    return F.conv2d(x[:, :, 1:4, 2:5].contiguous(memory_format=LAST), w, b).relu()


def residual(x: Tensor, w: Tensor, b: Tensor, z: Tensor) -> Tensor:
    return (F.conv2d(x, w, b, padding=1) + z).relu()


def residual_first(x: Tensor, w: Tensor, b: Tensor, z: Tensor) -> Tensor:
    return F.relu(z + F.conv2d(x, w, padding=1), inplace=True)


def residual_in_place(x: Tensor, w: Tensor, b: Tensor, z: Tensor) -> Tensor:
    made = F.conv2d(x, w, b, padding=1)
    made += z
    return made.relu_()


def scaled(x: Tensor, w: Tensor, b: Tensor, z: Tensor) -> Tensor:
    return torch.add(F.conv2d(x, w, b, padding=1), z, alpha=0.25).relu()


def made_later(x: Tensor, w: Tensor, b: Tensor, z: Tensor) -> Tensor:
    made = F.conv2d(x, w, b, padding=1)
    return (made + z.sigmoid()).relu()


def blocks(x: Tensor, w: Tensor, b: Tensor, z: Tensor) -> Tensor:
    """The shortcut is a convolution, too, and comes behind the other path."""
    for _ in range(2):
        first = F.conv2d(F.conv2d(x, w, b, padding=1).relu(), w, b, padding=1)
        x = (first + F.conv2d(x, w[:, :, 1:2, 1:2], padding=0)).relu()
    return x


JOINED = {layer: 1, in_place: 1, no_bias: 1, strided: 1, single: 1, to_a_pixel: 1, residual: 1, residual_first: 1,
          residual_in_place: 1, scaled: 1, made_later: 1, blocks: 4}  # fmt: skip


@pytest.mark.parametrize("program, count", JOINED.items())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_cudnn_does_what_follows(program: Callable[..., Any], count: int, dtype: torch.dtype) -> None:
    recording, told = changed(program, *operands(dtype))
    joined = [node for node in recording.graph.nodes if node.target in (WITH_RELU, WITH_SUM)]
    assert len(joined) == count and "cuDNN does the rest" in told
    assert not {"relu", "relu_", "add", "add_"} & {node.name for node in recording.graph.nodes}
    assert_equals_eager(recording.graph, recording)
    for node in joined:
        step = emit_call(node)
        assert not step.blocked and not blocked_call(node), "where Python has to call it, that is once, while a graph is captured"
        assert step.early == (is_one_call(node) and not tuple(scalars([node]))), "cuDNN has an engine, and no number is recorded"


@pytest.mark.parametrize("program", [layer, residual])
def test_an_estimate_knows_what_cudnn_computes(program: Callable[..., Any]) -> None:
    before, after = record(program, *operands())[0].graph, changed(program, *operands())[0].graph
    assert operations(after.nodes[0]) == operations(before.nodes[0]) > 0


def held(x: Tensor, w: Tensor, b: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    made = F.conv2d(x, w, b, padding=1)
    return made, made.relu()


def sum_held(x: Tensor, w: Tensor, b: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    made = F.conv2d(x, w, b, padding=1) + z
    return made, made.relu()


def a_part(x: Tensor, w: Tensor, b: Tensor, z: Tensor) -> Tensor:
    return F.conv2d(x, w, b, padding=1)[:1].relu()


def broadcast(x: Tensor, w: Tensor, b: Tensor, z: Tensor) -> Tensor:
    return (F.conv2d(x, w, b, padding=1) + z[:1]).relu()


def other_layout(x: Tensor, w: Tensor, b: Tensor, z: Tensor) -> Tensor:
    return (F.conv2d(x, w, b, padding=1) + z.contiguous()).relu()


def other_start(x: Tensor, w: Tensor, b: Tensor, z: Tensor) -> Tensor:
    moved = torch.cat((z.permute(0, 2, 3, 1).reshape(-1), z.new_zeros(1)))[1:].view(2, 5, 6, 8).permute(0, 3, 1, 2)
    return (F.conv2d(x, w, b, padding=1) + moved).relu()


def into_the_other(x: Tensor, w: Tensor, b: Tensor, z: Tensor) -> Tensor:
    return z.add_(F.conv2d(x, w, b, padding=1)).relu_()


def scaled_itself(x: Tensor, w: Tensor, b: Tensor, z: Tensor) -> Tensor:
    return torch.add(z, F.conv2d(x, w, b, padding=1), alpha=0.25).relu()


def twice_itself(x: Tensor, w: Tensor, b: Tensor, z: Tensor) -> Tensor:
    made = F.conv2d(x, w, b, padding=1)
    return (made + made).relu()


def overwritten(x: Tensor, w: Tensor, b: Tensor, z: Tensor) -> Tensor:
    made = F.conv2d(x, w, b, padding=1)
    x.mul_(2)
    return (made + x.sigmoid()).relu()


def in_groups(x: Tensor, w: Tensor, b: Tensor, z: Tensor) -> Tensor:
    return F.conv2d(x, w[:, :4].contiguous(memory_format=LAST), b, padding=1, groups=2).relu()


def transposed(x: Tensor, w: Tensor, b: Tensor, z: Tensor) -> Tensor:
    return F.conv_transpose2d(x, w, b).relu()


@pytest.mark.parametrize("program, reason", [
    (held, "what convolution leaves is held"), (sum_held, "what add leaves is held"), (a_part, "another part or layout"),
    (broadcast, "another size, dtype or layout"), (other_layout, "another size, dtype or layout"),
    (other_start, "start on a 16-byte boundary"), (into_the_other, "goes into the memory of the other summand"),
    (scaled_itself, "the summand that a number scales"), (twice_itself, "the summand that a number scales"),
    (overwritten, "what the convolution reads is overwritten"), (in_groups, "plain two-dimensional convolutions"),
    (transposed, "plain two-dimensional convolutions")])  # fmt: skip
def test_what_cudnn_may_not_do(program: Callable[..., Any], reason: str) -> None:
    recording, told = changed(program, *operands())
    assert reason in told and not {WITH_RELU, WITH_SUM} & set(targets(recording))
    assert_parted(recording)


@pytest.mark.parametrize("layout, channels, reason", [
    (torch.contiguous_format, 8, "not channels_last"), (LAST, 6, "no multiple of 16 bytes")])  # fmt: skip
def test_what_cudnn_is_slow_at(layout: torch.memory_format, channels: int, reason: str) -> None:
    recording, told = changed(layer, *operands(layout=layout, channels=channels))
    assert reason in told
    assert_parted(recording)


@pytest.mark.parametrize("name, value, reason", [("deterministic", True, "deterministic"), ("allow_tf32", False, "TF32")])
def test_switches(name: str, value: bool, reason: str) -> None:
    with flag(name, value):
        recording, told = changed(layer, *operands())
    assert reason in told
    assert_parted(recording)


def sigmoid(x: Tensor, w: Tensor, b: Tensor, z: Tensor) -> Tensor:
    return F.conv2d(x, w, b, padding=1).sigmoid()


def alone(x: Tensor, w: Tensor, b: Tensor, z: Tensor) -> Tensor:
    return F.conv2d(x, w, b, padding=1)


def read_twice(x: Tensor, w: Tensor, b: Tensor, z: Tensor) -> Tensor:
    made = F.conv2d(x, w, b, padding=1)
    return made.relu() + made.sigmoid()


def part_of_a_bias(x: Tensor, w: Tensor, b: Tensor, z: Tensor) -> Tensor:
    return F.silu(F.conv2d(x, w[:4], torch.cat((b, b))[3:11:2], padding=1))


def in_a_row(x: Tensor, w: Tensor, b: Tensor, z: Tensor) -> Tensor:
    return F.silu(F.conv1d(x[:, :, 0], w[:, :, 0], b))


def in_space(x: Tensor, w: Tensor, b: Tensor, z: Tensor) -> Tensor:
    return F.silu(F.conv3d(x[:, :, None], w[:, :, None], b))


def turned(x: Tensor, w: Tensor, b: Tensor, z: Tensor) -> Tensor:
    return F.silu(F.conv_transpose2d(x, w, b, stride=2))


def depthwise(x: Tensor, w: Tensor, b: Tensor, z: Tensor) -> Tensor:
    return F.conv2d(x, w[:, :1], b, groups=8).sigmoid()


def assert_parted(recording: Recording) -> None:  # and gives eager mode's numbers
    convolutions = [node for node in recording.graph.nodes if node.target == CONVOLUTION]
    assert convolutions and all(node.args[BIAS] is None and node.left_out == (BIAS,) for node in convolutions)
    made = plan(recording.graph)  # its kernels add biases, be it for a part that they read
    assert len(convolutions) == sum(any(node.changed for node in step.nodes) for step in kernels(made)) or len(kernels(made)) == 1
    memory = execute(recording, made)
    for index, data in recording.expected.items():
        torch.testing.assert_close(memory[index].view(torch.float32), data.view(torch.float32), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("program, layout", [(one, layout) for one in (
    sigmoid, alone, read_twice, part_of_a_bias, in_a_row, in_space, turned, depthwise)
    for layout in (torch.contiguous_format, LAST)[one is depthwise :]])  # in rows that is a kernel of PyTorch's own
def test_a_kernel_adds_the_bias(program: Callable[..., Any], layout: torch.memory_format) -> None:
    recording, told = changed(program, *operands(layout=layout))
    assert "its bias is added in the kernel" in told
    assert_parted(recording)
    assert len(kernels(plan(recording.graph))) == (2 if program is part_of_a_bias else 1)


def exact(x: Tensor, w: Tensor, b: Tensor, z: Tensor) -> Tensor:
    return F.conv2d(x.double(), w.double(), b.double()).relu()


@pytest.mark.parametrize("program, reason", [(depthwise, "depthwise"), (exact, "dtypes"), (no_bias, "not channels_last")])
def test_who_keeps_the_bias(program: Callable[..., Any], reason: str) -> None:
    recording, told = changed(program, *operands(layout=torch.contiguous_format))
    assert reason in told and targets(recording).count(CONVOLUTION) == 1
    assert not any(node.left_out for node in recording.graph.nodes)


def test_nothing_happens_without_cudnn() -> None:
    with flag("enabled", False):
        recording, told = changed(layer, *operands())
    assert "cuDNN is switched off" in told and targets(recording) == [CONVOLUTION, "aten::relu"]


def test_the_recorded_call_gets_no_bias() -> None:
    (node,) = [node for node in changed(sigmoid, *operands())[0].graph.nodes if node.target == CONVOLUTION]
    slots, layouts = operand_slots(node)
    assert slots[2] == -1 and len(slots) == len(layouts) == 4 and -1 not in (*slots[:2], slots[3])
    node.instr = 0
    assert emit_call(node).early
