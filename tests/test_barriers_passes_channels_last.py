"""Images between convolutions become channels_last where nobody could tell, and stay as they are, with a reason, elsewhere."""

from __future__ import annotations

from typing import Any, Callable

import pytest
import torch
import torch.nn.functional as F
from cudnn_ops import flag
from graphs import record
from optimised import assert_equals_near
from recording import Recording
from torch import Tensor

from barriers.passes import channels_last
from barriers.passes.bridges import back_to_rows
from barriers.passes.channels_last import permute_images
from barriers.passes.conv_bias import CONVOLUTION, is_channels_last
from barriers.passes.formats import left_in_rows
from barriers.passes.permuted import makes_last
from barriers.pipeline import ordered_passes, run_passes
from codegen.partition import partition
from ir_nodes import BufferKind, Node, settings
from ir_nodes.node import Buffer
from ir_nodes.remarks import Remarks

TWICE = "2 convolutions and gradients"


@pytest.fixture(autouse=True)
def small_ones_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels_last, "WORTH", 0)


def operands(channels: int = 8, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    return torch.randn(2, channels, 6, 5).to(dtype), torch.randn(channels, channels, 3, 3).to(dtype)


def changed(program: Callable[..., Any], *inputs: Tensor) -> tuple[Recording, str]:
    """The graph after the pass, and what was told."""
    recording, remarks = record(program, *inputs)[0], Remarks()
    permute_images(recording.graph, remarks)
    return recording, "\n".join(str(remark) for remark, _ in remarks.all())


def convolutions(recording: Recording) -> list[Node]:
    return [node for node in recording.graph.nodes if node.target == CONVOLUTION]


def conv(x: Tensor, w: Tensor) -> Tensor:
    return F.conv2d(x, w, padding=1)


def all_last(recording: Recording) -> bool:
    """Are all convolutions' images and weights channels_last?"""
    return all(is_channels_last(one.layout) for node in convolutions(recording) for one in (*node.reads, *node.writes)
               if len(one.layout.size) == 4)


def activated(x: Tensor, w: Tensor) -> Tensor:
    return conv(conv(x, w).relu(), w).neg()


def in_place(x: Tensor, w: Tensor) -> Tensor:
    made = conv(x, w)
    made.relu_()
    made[:, 2:4, ::2].mul_(2)
    made.flatten(2).add_(made.mean((2, 3))[:, :, None])
    return conv(made, w)


def parted(x: Tensor, w: Tensor) -> Tensor:
    first, second = conv(x, w).chunk(2, 1)
    return conv(torch.cat([second.sigmoid() * first, first], 1), w)


def shuffled(x: Tensor, w: Tensor) -> Tensor:
    made = conv(x, w)
    return conv(made.view(2, 2, 4, 6, 5).transpose(1, 2).contiguous().view(2, 8, 6, 5), w)


def pooled(x: Tensor, w: Tensor) -> Tensor:
    made = F.max_pool2d(conv(x, w), 2)
    made = F.avg_pool2d(F.interpolate(made, scale_factor=3), 2)
    return F.adaptive_avg_pool2d(conv(made, w), 1).flatten(1)


def turned(x: Tensor, w: Tensor) -> Tensor:
    """As ConvNeXt does."""
    made = F.gelu(F.layer_norm(conv(x, w).permute(0, 2, 3, 1), (8,))).permute(0, 3, 1, 2)
    return conv(made + x, w)


def norms(x: Tensor, w: Tensor) -> Tensor:
    made = F.batch_norm(conv(x, w), None, None, training=True).relu()
    return conv(made, w) + conv(made, w[:, :, 1:2, 1:2].contiguous())[:, :, :6, :5]


def in_groups(x: Tensor, w: Tensor) -> Tensor:
    return conv(F.silu(F.group_norm(conv(x, w) + 1, 2, w[0, :, 0, 0], w[1, :, 0, 0])), w)


IMAGES = [activated, in_place, parted, shuffled, pooled, turned, in_groups]


@pytest.mark.parametrize("program", IMAGES, ids=lambda one: one.__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_images_are_channels_last(program: Callable[..., Any], dtype: torch.dtype) -> None:
    recording, told = changed(program, *operands(dtype=torch.float32 if program is turned else dtype))  # CPUs norm otherwise
    assert all_last(recording) and f"{TWICE}: " in told and "channels_last in memory" in told, told
    assert_equals_near(recording.graph, recording)


def test_gradients_of_a_channel_each_do_not_outweigh_the_rest() -> None:
    """MobileNet's blocks: their convolutions of a channel each compute little, in their gradients, too."""
    def bottleneck(x: Tensor, wide: Tensor, each: Tensor, narrow: Tensor) -> tuple[Tensor, ...]:
        held = [one.detach().requires_grad_() for one in (x, wide, each, narrow)]
        made = F.conv2d(F.conv2d(held[0], held[1]).relu(), held[2], padding=1, groups=64).relu()
        return torch.autograd.grad(F.conv2d(made, held[3]).square().sum(), held)

    x = torch.randn(2, 16, 6, 5)
    recording, told = changed(bottleneck, x, torch.randn(64, 16, 1, 1), torch.randn(64, 1, 3, 3), torch.randn(16, 64, 1, 1))
    assert "6 convolutions and gradients" in told and "are channels_last in memory" in told
    assert_equals_near(recording.graph, recording)


def test_norms_over_groups_that_aten_has_to_run_have_rows() -> None:
    def program(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        held = [one.detach().requires_grad_() for one in (x, w)]
        return torch.autograd.grad(in_groups(*held).square().sum(), held)

    recording, _ = changed(program, *operands())
    graph = recording.graph
    norms = [node for node in graph.nodes if "group_norm" in node.name]
    images = [one.layout for node in norms for one in (*node.reads, *node.writes) if len(one.layout.size) == 4]
    assert len(norms) == 2 and len(images) == 5 and all(map(is_channels_last, images))
    count = len(graph.nodes)
    back_to_rows(graph, norms)
    images = [one.layout for node in norms for one in (*node.reads, *node.writes) if len(one.layout.size) == 4]
    assert all(layout.is_contiguous for layout in images) and len(graph.nodes) == count + 5
    back_to_rows(graph, norms)
    assert len(graph.nodes) == count + 5
    assert_equals_near(graph, recording)


def test_what_lies_between_ops_that_need_rows_has_rows() -> None:
    """A stream of images with convolutions beside it: only what these read and leave is channels_last."""
    def program(x: Tensor, w: Tensor) -> Tensor:
        for _ in range(3):
            x = x + F.channel_shuffle(x.sin(), 2) * 0.5
            x = x + conv(F.channel_shuffle(x, 4).cos(), w).relu()
        return conv(x.cos(), w).sum()

    recording, told = changed(program, *operands())
    assert "ops around it need rows" in told and all_last(recording)
    joined = [node for node in recording.graph.nodes if node.name == "add"]
    assert len(joined) == 6 and all(node.writes[0].layout.is_contiguous for node in joined[:5])
    assert_equals_near(recording.graph, recording)


def test_the_cut_goes_through_fewest_bytes() -> None:
    first, second, third, last = (Buffer(index, 64, BufferKind.FRESH, False) for index in range(4))
    chain = [[(first, 64), (None, 64)], [(second, 16), (first, 16)], [(third, 64), (second, 64)], [(last, 64), (third, 64)]]
    assert left_in_rows(chain, {last}) == {first}
    even = [[(one, 64), (other, 64)] for one, other in ((first, None), (second, first), (third, second), (last, third))]
    assert left_in_rows(even, {last}) == {first, second, third}
    assert left_in_rows(chain[1:], {last}) == left_in_rows([], set()) == set()
    assert left_in_rows([*chain, [(third, 32), (None, 32)]], {last}) == {first}
    assert left_in_rows([*chain, [(third, 96), (None, 96)]], {last}) == {first, second, third}


def test_weights_are_copied_once() -> None:
    recording, _ = changed(activated, *operands())
    made = [node for node in recording.graph.nodes if node.changed]
    assert [node.name for node in made] == ["copy_", "copy_"] and made[0].reads[0].value.producer is None
    first, second = convolutions(recording)
    assert first.args[1] == second.args[1] and first.relaid and second.relaid


def test_what_is_held_keeps_its_layout() -> None:
    def program(x: Tensor, w: Tensor) -> list[Tensor]:
        made = conv(x, w)
        return [made, conv(made.relu(), w)]

    recording, _ = changed(program, *operands())
    assert all_last(recording)
    for value in recording.graph.outputs():
        assert value.producer.name == "copy_" and all(write.layout.is_contiguous for write in value.producer.writes)
    assert_equals_near(recording.graph, recording)


def flat(x: Tensor, w: Tensor) -> Tensor:
    return conv(conv(conv(x, w), w).flatten(1).sin().view_as(x), w)


def grouped(x: Tensor, w: Tensor) -> Tensor:
    return F.conv2d(conv(x, w), w[:, :4].contiguous(), groups=2)


def thin(x: Tensor, w: Tensor) -> Tensor:
    return F.conv2d(F.conv2d(x, w[:3]), w[:, :3])


def exact(x: Tensor, w: Tensor) -> Tensor:
    return activated(x.double(), w.double())


def drawn(x: Tensor, w: Tensor) -> Tensor:
    return conv(conv(x, w).bernoulli_().add(1), w)


def single(x: Tensor, w: Tensor) -> Tensor:
    return F.conv1d(F.conv1d(x[:, :, 0], w[:, :, 0]), w[:, :, 0])


def interleaved(x: Tensor, w: Tensor) -> Tensor:
    return conv(F.channel_shuffle(conv(x, w), 2), w)


REASONS = {flat: "goes over from one channel into the next", grouped: "groups have several channels",
           thin: "no multiples of 16 bytes", exact: "only in 16 bits and in TF32", drawn: "draws random numbers",
           single: "not two-dimensional", interleaved: "may ask for rows"}


@pytest.mark.parametrize("program, reason", REASONS.items(), ids=lambda one: getattr(one, "__name__", ""))
def test_reasons(program: Callable[..., Any], reason: str) -> None:
    recording, told = changed(program, *operands())
    assert reason in told, told
    assert_equals_near(recording.graph, recording)


def test_little_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels_last, "WORTH", 1 << 20)
    recording, told = changed(activated, *operands())
    assert "next to nothing" in told and not any(node.relaid for node in recording.graph.nodes)


@pytest.mark.parametrize("switch", ["enabled", "allow_tf32"])
def test_switches_of_cudnn(switch: str) -> None:
    with flag(switch, False):
        recording, told = changed(activated, *operands())
    assert ("switched off" in told or "TF32" in told) and not any(node.relaid for node in recording.graph.nodes)


def test_what_is_channels_last_already_stays() -> None:
    recording, told = changed(activated, *(one.to(memory_format=torch.channels_last) for one in operands()))
    assert not any(node.relaid for node in recording.graph.nodes) and "channels_last in memory" not in told


def test_rows_between_images_that_the_program_has_in_channels_last() -> None:
    """Copies in rows are made for PyTorch's gradients of norms over groups."""
    last = torch.channels_last
    recording, _ = changed(lambda x, w: conv(conv(x, w).contiguous().relu().contiguous(memory_format=last), w),
                           *(one.contiguous(memory_format=last) for one in operands()))
    assert all(is_channels_last(layout) for node in recording.graph.nodes for _, layout in node.places())
    _, told = changed(lambda x, w: conv((x.permute(0, 2, 3, 1) * 2).permute(0, 3, 1, 2), w),
                      *(one.contiguous(memory_format=last) for one in operands()))
    assert "no image between them" in told, "channels last by name are no rows of images"


@pytest.mark.parametrize("held", ["indices", "values"])
def test_a_pool_whose_other_tensor_is_held_reads_rows(held: str) -> None:
    """Its kernel would write both in the format of its input."""
    def program(x: Tensor, w: Tensor) -> list[Tensor]:
        made, where = F.max_pool2d_with_indices(conv(x, w).relu(), 2)
        return [conv(made, w), where if held == "indices" else made]

    recording, told = changed(program, *operands())
    pool = next(node for node in recording.graph.nodes if "max_pool" in node.name)
    assert all(one.layout.is_contiguous for one in (*pool.reads, *pool.writes)), told
    assert all(is_channels_last(node.writes[0].layout) for node in convolutions(recording)) and "all in one format" in told
    assert_equals_near(recording.graph, recording)


@pytest.mark.parametrize("ours", [True, False], ids=["made here", "from outside"])
def test_strides_of_single_pixels_choose_what_interpolation_writes(ours: bool) -> None:
    def program(x: Tensor, w: Tensor, pixels: Tensor) -> Tensor:
        return conv(F.interpolate(pixels.mul(2) if ours else pixels, (6, 5)) + conv(x, w), w)

    recording, told = changed(program, *operands(), torch.randn(2, 8, 1, 1))
    up = next(node for node in recording.graph.nodes if node.name.startswith("upsample"))
    made = up.writes[0].layout
    assert is_channels_last(made) == makes_last(up.reads[0].layout) == ours, told
    assert_equals_near(recording.graph, recording)


def test_numbers_of_random_ops_stay_in_place() -> None:
    recording, _ = changed(drawn, *operands())
    random = [node for node in recording.graph.nodes if node.effects]
    assert random and not any(node.relaid for node in random)


def test_only_where_cudnn_convolves() -> None:
    for gpu in (True, False):
        graph = record(activated, *operands())[0].graph
        run_passes(graph, ordered_passes(partition, gpu=gpu))
        assert any(node.relaid for node in graph.nodes) == gpu
    with settings.override(disable=frozenset({"channels_last"})):
        assert "channels_last" not in [one.__name__ for one in ordered_passes(partition, gpu=True)]
