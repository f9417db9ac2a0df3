"""Ops that the compiler chose are called by the native core, as recorded ones are; what it can't call, Python does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from codegen import extern
from codegen.extern import as_promised, given_arguments, needs_python
from ir_nodes import BufferKind, Layout, Node, Operand, Value, Write, settings
from ir_nodes.node import Buffer, ScalarInput, Target
from lazy_backend import core, flush


def value(index: int) -> Value:
    return Value(Buffer(index, 1024, BufferKind.FRESH, False), 1)


ROWS, SQUARE = Layout.contiguous(torch.float32, (4,)), Layout.contiguous(torch.float32, (4, 4))
BIAS, LEFT, RIGHT = Operand(value(0), ROWS), Operand(value(1), SQUARE), Operand(value(2), SQUARE)
RELU = Node(0, "aten::_addmm_activation.out", (BIAS, LEFT, RIGHT, 1, 1, False, Target(0)), (BIAS, LEFT, RIGHT),
            (Write(value(3), SQUARE, None, False),), instr=7, changed=True)


def test_the_native_core_is_told_how_many_slots_tensors_take_and_the_constants() -> None:
    assert given_arguments(RELU) == [1, 1, 1, 1, 1, False, 1]
    cat = replace(RELU, target="aten::cat.out", args=((LEFT, RIGHT), 1, Target(0)), reads=(LEFT, RIGHT))
    assert given_arguments(cat) == [2, 1, 1]
    assert given_arguments(replace(RELU, target="aten::clamp", args=(LEFT, None, 3.5), reads=(LEFT,))) == [1, None, 3.5]
    bare = replace(RELU, target="aten::convolution", args=(LEFT, RIGHT, None, (1,), (0,), (1,), False, (0,), 1))
    assert given_arguments(bare)[2:4] == [None, [1]] and given_arguments(replace(bare, left_out=(2,)))[2] == 1


@pytest.mark.parametrize("change", [
    dict(target="aten::cudnn_convolution_relu", args=(LEFT, RIGHT, BIAS, (1,), (0,), (1,), 1)),  # or several ops
    dict(target="prims::copy_to"),
    dict(args=(BIAS, LEFT, RIGHT, ScalarInput(0, "float"), 1, False, Target(0))),
    dict(reads=(replace(BIAS, layout=replace(ROWS, flipped=True)), LEFT, RIGHT)),
], ids=["cudnn", "another_library", "a_number", "conjugated"])  # fmt: skip
def test_what_only_python_can_call(change: dict[str, Any]) -> None:
    assert needs_python(replace(RELU, **change)) and not needs_python(RELU)


def test_a_recorded_op_needs_no_python() -> None:
    assert not needs_python(replace(RELU, target="aten::cudnn_convolution_relu", changed=False))


def layers() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8))


def images() -> nn.Module:
    torch.manual_seed(3)
    convolutions = [nn.Conv2d(4, 4, 3, padding=1) for _ in range(2)]
    return nn.Sequential(nn.Unflatten(1, (4, 2, 2)), convolutions[0], nn.GELU(), convolutions[1], nn.Flatten())


@pytest.fixture
def as_where_graphs_replay(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Passes choose what they choose for CUDA graphs. Gives the ops that were called without having been recorded."""
    called: list[str] = []

    def emit(node: Node) -> Any:
        called.append(node.target)
        return own(node)

    def refuse(node: Node, function: Callable[..., Any]) -> Any:
        raise AssertionError(f"Python would call {node}")

    own = extern.emit_own
    monkeypatch.setattr(extern, "emit_own", emit)
    monkeypatch.setattr(extern, "emit_python", refuse)
    monkeypatch.setattr(flush, "facts", lambda: (True, False, True))
    with settings.override(engine="triton"):
        yield called


@pytest.mark.parametrize("model, target", [(layers, "aten::_addmm_activation.out"), (images, "aten::convolution_backward")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_native_core_calls_them(model: Callable[[], nn.Module], target: str, dtype: torch.dtype,
                                    as_where_graphs_replay: list[str]) -> None:
    def losses(device: str) -> list[float]:
        net = model().to(device, dtype)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        read = []
        for step in range(4):
            x = torch.randn(8, 16, generator=torch.Generator().manual_seed(step)).to(device, dtype)
            loss = net(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            read.append(loss.item())
        return read

    torch.testing.assert_close(losses("lazysched"), losses("cpu"), rtol=2e-2 if dtype is torch.bfloat16 else 1e-4, atol=1e-4)
    assert target in as_where_graphs_replay


def test_a_call_that_fails_names_the_line_of_the_op_that_it_stands_for(
    as_where_graphs_replay: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def narrower(node: Node) -> Any:
        slots, found = slots_of(node)
        return slots, [(dtype, (size[0], 5), stride, offset) if node.changed and place == 1 else (dtype, size, stride, offset)
                       for place, (dtype, size, stride, offset) in enumerate(found)]

    slots_of = extern.operand_slots
    monkeypatch.setattr(extern, "operand_slots", narrower)
    net = layers().to("lazysched")
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"(?s)cannot be multiplied.*raised by aten::addmm.out, recorded at "):
        net(torch.randn(8, 16, device="lazysched")).cpu()


@pytest.mark.parametrize("target, args", [
    ("aten::sum.IntList_out", (LEFT, (0,), False, torch.float64, Target(0))),
    ("aten::div.out_mode", (LEFT, RIGHT, "floor", Target(0))),
    ("aten::gelu", (LEFT, "tanh")),
    ("aten::full_like", (LEFT, 2.5, torch.bfloat16, torch.strided, torch.device("cpu"), None, torch.contiguous_format)),
    ("aten::clamp.Tensor", (LEFT, None, RIGHT)),
    ("aten::index_put_", (Target(0), (None, LEFT), RIGHT, True)),
    ("aten::convolution_backward", (LEFT, RIGHT, LEFT, None, (1, 2), (0, 0), (1, 1), False, (0, 0), 1, (True, False, False))),
    ("aten::linspace.out", (0, 1.5, 7, Target(0))),
    ("aten::mul.Scalar", (LEFT, 2 + 3j)),
], ids=lambda one: one if isinstance(one, str) else "")  # fmt: skip
def test_the_native_core_takes_constants_of_every_kind(target: str, args: tuple[Any, ...]) -> None:
    node = replace(RELU, target=target, args=args)
    given = given_arguments(node)
    assert given is not None and not needs_python(node)
    program = core.get().Program()
    program.own((target, given, 0), *extern.operand_slots(node), False, 7)
    with pytest.raises((RuntimeError, TypeError)):
        program.own((target, ["no such thing"] * len(given), 0), *extern.operand_slots(node), False, 7)


def test_a_result_that_lies_otherwise_is_copied() -> None:
    given = torch.randn(2, 3, 4, 5)
    assert as_promised(given, Layout.contiguous(torch.float32, (2, 3, 4, 5))) is given
    assert as_promised(given, Layout.contiguous(torch.float32, (120,))) is given
    copied = as_promised(given, Layout(torch.float32, given.shape, given.to(memory_format=torch.channels_last).stride()))
    assert copied.is_contiguous(memory_format=torch.channels_last) and torch.equal(copied, given)
