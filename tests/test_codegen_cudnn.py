"""Where cuDNN has no engine for a fused convolution, its parts run one after the other."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import pytest
import torch

from codegen import cudnn
from codegen.extern import needs_python
from ir_nodes import BufferKind, Layout, Node, Operand, Value
from ir_nodes.node import Buffer
from lazy_backend import core
from tests.cudnn_ops import with_relu, with_sum

SIZES: tuple[Any, ...] = ([1, 1], [1, 1], [1, 1], 1)


def test_parts_give_what_the_whole_gives() -> None:
    x, weight, bias, other = torch.randn(2, 3, 5, 5), torch.randn(4, 3, 3, 3), torch.randn(4), torch.randn(2, 4, 5, 5)
    torch.testing.assert_close(cudnn.relu_apart(x, weight, bias, *SIZES), with_relu(x, weight, bias, *SIZES))
    wanted = with_sum(x, weight, other, 2.0, None, *SIZES)
    torch.testing.assert_close(cudnn.sum_apart(x, weight, other, 2.0, None, *SIZES), wanted)


def test_what_has_no_engine_is_asked_once() -> None:
    asked = []

    def refuses(*args: Any) -> torch.Tensor:
        asked.append(args)
        raise RuntimeError("GET was unable to find an engine to execute this computation")

    x, weight = torch.randn(1, 2, 4, 4), torch.randn(2, 2, 3, 3)
    run = cudnn.or_apart("aten::cudnn_convolution_relu", refuses)
    for _ in range(3):
        torch.testing.assert_close(run(x, weight, None, *SIZES), with_relu(x, weight, None, *SIZES))
    assert len(asked) == 1


def test_other_errors_and_other_ops_stay_as_they_are() -> None:
    def fails(*args: Any) -> torch.Tensor:
        raise RuntimeError("an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="illegal memory"):
        cudnn.or_apart("aten::cudnn_convolution_relu", fails)()
    assert cudnn.or_apart("aten::zeros", fails) is fails


X, WEIGHT, BIAS = (Operand(Value(Buffer(index, 1024, BufferKind.FRESH, False), 1), Layout.contiguous(torch.float32, size))
                   for index, size in enumerate([(2, 4, 8, 8), (4, 4, 3, 3), (4,)]))  # fmt: skip
CALL = Node(0, "aten::cudnn_convolution_relu", (X, WEIGHT, BIAS, (1, 1), (1, 1), (1, 1), 1), (X, WEIGHT, BIAS), (), changed=True)


@pytest.mark.parametrize("answer", [True, False])
def test_a_gpu_is_asked_once_for_each_shape_whether_it_is_one_call(answer: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Node] = []
    monkeypatch.setattr(cudnn, "_whole", {})
    monkeypatch.setattr(cudnn, "runs", lambda node: asked.append(node) or answer)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    wider = replace(X, layout=Layout.contiguous(torch.float32, (2, 4, 8, 9)))
    for args in (CALL.args, CALL.args, (wider, *CALL.args[1:]), (*CALL.args[:4], (0, 0), *CALL.args[5:])):
        assert needs_python(replace(CALL, args=args)) is not answer
    assert len(asked) == 3


def test_who_only_explains_asks_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cudnn, "_whole", {})
    monkeypatch.setattr(cudnn, "runs", lambda node: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert needs_python(CALL, ask=False) and not needs_python(CALL) and not needs_python(CALL, ask=False)


def test_the_gpu_that_is_asked_is_the_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    current: list[int] = []
    monkeypatch.setattr(core, "on_physical", lambda index: current.append(index) or contextlib.nullcontext())
    x = torch.arange(17.0, device="lazysched")
    assert (x * 3 - 1).sum().item() == 391 and current and set(current) == {0}


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks a machine without a GPU")
def test_without_a_gpu_it_may_be_several() -> None:
    assert needs_python(CALL)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="asks cuDNN")
def test_cudnn_says_what_it_can() -> None:
    def laid(operand: Operand, dtype: torch.dtype = torch.bfloat16) -> Operand:
        stride = torch.empty(operand.layout.size).to(memory_format=torch.channels_last).stride()
        return replace(operand, layout=replace(operand.layout, dtype=dtype, stride=stride))

    row = replace(BIAS, layout=replace(BIAS.layout, dtype=torch.bfloat16))
    x, weight = (replace(one, layout=Layout.contiguous(torch.bfloat16, (size[0], 16, *size[2:])))
                 for one, size in ((X, (2, 4, 8, 8)), (WEIGHT, (4, 4, 3, 3))))  # fmt: skip
    assert not needs_python(replace(CALL, args=(laid(x), laid(weight), row, *CALL.args[3:])))
    assert needs_python(replace(CALL, args=(laid(x), laid(x), row, *CALL.args[3:])))  # an error is a no
