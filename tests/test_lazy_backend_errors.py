"""Mistakes fail where eager fails, with eager's exception type, and leave what was recorded before intact."""

from __future__ import annotations

import os
import re
import sys
import traceback
from typing import Any, Callable, Iterator

import pytest
import torch
from torch import nn

import lazy_backend
from tests.children import call
from tests.device import DEVICE, needs_host_errors

F = nn.functional


@pytest.fixture(autouse=True)
def nothing_pending() -> Iterator[None]:
    lazy_backend.mark_step()
    yield
    lazy_backend.mark_step()


def t(device: str, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype, device=device)


MISTAKES: dict[str, Callable[[str], Any]] = {
    "add shapes": lambda d: t(d, 3) + t(d, 4),
    "matmul shapes": lambda d: t(d, 2, 3) @ t(d, 2, 3),
    "matmul dtypes": lambda d: t(d, 2, 2) @ t(d, 2, 2, dtype=torch.float64),
    "addmm shapes": lambda d: torch.addmm(t(d, 5), t(d, 2, 3), t(d, 3, 4)),
    "cat shapes": lambda d: torch.cat([t(d, 2, 3), t(d, 2, 4)]),
    "cat nothing": lambda d: torch.cat([]),
    "stack shapes": lambda d: torch.stack([t(d, 2), t(d, 3)]),
    "view": lambda d: t(d, 6).view(4),
    "view strides": lambda d: t(d, 2, 3).t().view(6),
    "reshape": lambda d: t(d, 6).reshape(4, -1),
    "expand": lambda d: t(d, 3).expand(2, 4),
    "dim": lambda d: t(d, 3).sum(2),
    "squeeze dim": lambda d: t(d, 3).unsqueeze(4),
    "index": lambda d: t(d, 3)[5],
    "narrow": lambda d: t(d, 3).narrow(0, 2, 4),
    "too many indices": lambda d: t(d, 3)[0, 0],
    "in-place shape": lambda d: t(d, 3).add_(t(d, 2, 3)),
    "in-place cast": lambda d: t(d, 3, dtype=torch.int64).add_(t(d, 3)),
    "in-place overlap": lambda d: t(d, 1).expand(3).add_(1),
    "out dtype": lambda d: torch.add(t(d, 3), t(d, 3), out=t(d, 3, dtype=torch.int32)),
    "bitwise of float": lambda d: t(d, 3) & t(d, 3),
    "subtract bool": lambda d: t(d, 3, dtype=torch.bool) - t(d, 3, dtype=torch.bool),
    "mean of int": lambda d: t(d, 3, dtype=torch.int64).mean(),
    "softmax of int": lambda d: t(d, 3, dtype=torch.int64).softmax(0),
    "embedding index dtype": lambda d: F.embedding(t(d, 2), t(d, 4, 3)),
    "linear": lambda d: F.linear(t(d, 2, 3), t(d, 4, 5)),
    "convolution channels": lambda d: F.conv2d(t(d, 1, 3, 5, 5), t(d, 2, 4, 3, 3)),
    "layer norm": lambda d: F.layer_norm(t(d, 2, 3), (4,)),
    "cross entropy shape": lambda d: F.cross_entropy(t(d, 4, 3), t(d, 5, dtype=torch.int64)),
    "gather index shape": lambda d: t(d, 2, 2).gather(0, t(d, 3, 3, dtype=torch.int64)),
    "copy shape": lambda d: t(d, 3).copy_(t(d, 4)),
    "item of many": lambda d: t(d, 3).item(),
    "bool of many": lambda d: bool(t(d, 3)),
    "where": lambda d: torch.where(t(d, 3, dtype=torch.bool), t(d, 3), t(d, 4)),
    "requires grad of int": lambda d: t(d, 3, dtype=torch.int64).requires_grad_(),
    "negative size": lambda d: torch.empty(-1, device=d),
    "linspace steps": lambda d: torch.linspace(0, 1, -3, device=d),
    "cholesky shape": lambda d: torch.linalg.cholesky(t(d, 2, 3)),
    "no such dtype view": lambda d: t(d, 3).view(torch.float64),
    "topk": lambda d: t(d, 3).topk(5),
    "dropout probability": lambda d: F.dropout(t(d, 3), 1.5),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_raises_what_eager_raises_at_its_line_and_leaves_the_recording(name: str) -> None:
    with pytest.raises(Exception) as wanted:
        MISTAKES[name]("cpu")
    x = torch.arange(4.0).to(DEVICE)
    before = x * 2
    x.add_(1)
    with pytest.raises(type(wanted.value)) as got:
        MISTAKES[name](DEVICE)
    assert type(got.value) is type(wanted.value)
    lines = [frame.lineno for frame in traceback.extract_tb(got.tb) if frame.filename == __file__]
    assert len(lines) >= 2, "the traceback passes through the line that made the mistake"
    after = before + x
    x.mul_(2)
    assert (before.tolist(), after.tolist(), x.tolist()) == ([0, 2, 4, 6], [1, 4, 7, 10], [2, 4, 6, 8])


SAME_WORDS = ["add shapes", "matmul shapes", "view", "dim", "index", "in-place cast", "in-place shape", "linear", "item of many"]


@pytest.mark.parametrize("name", SAME_WORDS)
def test_common_mistakes_are_explained_in_eagers_words(name: str) -> None:
    with pytest.raises(Exception) as wanted:
        MISTAKES[name]("cpu")
    with pytest.raises(Exception) as got:
        MISTAKES[name](DEVICE)
    words = [re.sub(r"\s+", " ", str(error.value))[:40] for error in (wanted, got)]
    assert words[0] == words[1]


MIXES: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "add": lambda lazy, cpu: lazy + cpu,
    "add reversed": lambda lazy, cpu: cpu + lazy,
    "matmul": lambda lazy, cpu: lazy @ cpu,
    "in-place": lambda lazy, cpu: lazy.mul_(cpu),
    "in-place reversed": lambda lazy, cpu: cpu.mul_(lazy),
    "out": lambda lazy, cpu: torch.add(lazy, lazy, out=torch.empty(3, 3)),
    "cat": lambda lazy, cpu: torch.cat([lazy, cpu]),
    "linear": lambda lazy, cpu: F.linear(lazy, cpu),
    "where": lambda lazy, cpu: torch.where(lazy > 0, lazy, cpu),
    "embedding": lambda lazy, cpu: F.embedding(torch.tensor([0, 1]), lazy),
    "layer norm": lambda lazy, cpu: F.layer_norm(lazy, (3,), cpu[0]),
    "gather": lambda lazy, cpu: lazy.gather(0, torch.zeros(3, 3, dtype=torch.int64)),
    "set data": lambda lazy, cpu: lazy.set_(cpu),
}


@pytest.mark.parametrize("name", MIXES)
def test_tensors_of_two_devices_are_refused_with_both_named(name: str) -> None:
    lazy, cpu = torch.ones(3, 3, device=DEVICE), torch.ones(3, 3)
    y = lazy + 1
    with pytest.raises(RuntimeError, match="cpu") as caught:
        MIXES[name](lazy, cpu)
    assert DEVICE in str(caught.value)
    assert y.sum().item() == 18.0 and lazy.sum().item() == 9.0 and cpu.sum().item() == 9.0


def test_a_0d_cpu_tensor_mixes_as_in_eager() -> None:
    x = torch.ones(3, device=DEVICE)
    assert (x * torch.tensor(3.0)).tolist() == [3.0] * 3
    assert (torch.tensor(2.0, dtype=torch.float64) - x).dtype is torch.float32


def test_a_cpu_index_picks_rows_of_a_device_tensor() -> None:
    x = torch.arange(6.0).reshape(3, 2).to(DEVICE)
    assert x[torch.tensor([2, 0])].tolist() == [[4, 5], [0, 1]]


# ---- what only shows when it runs ------------------------------------------------------------------------------------------


def embedding_out_of_range() -> tuple[torch.Tensor, int]:
    table = torch.ones(4, 2, device=DEVICE)
    places = torch.tensor([0, 9]).to(DEVICE)
    return F.embedding(places, table), sys._getframe().f_lineno


@needs_host_errors
def test_an_op_that_fails_when_it_runs_names_the_line_that_recorded_it() -> None:
    with pytest.raises(IndexError) as wanted:
        F.embedding(torch.tensor([0, 9]), torch.ones(4, 2))
    result, line = embedding_out_of_range()
    with pytest.raises(type(wanted.value)) as got:
        result.tolist()
    message = str(got.value)
    assert str(wanted.value).splitlines()[0] in message
    assert f"test_lazy_backend_errors.py:{line} in embedding_out_of_range" in message
    assert "aten::" in message


def kernel_out_of_range() -> None:
    result, line = embedding_out_of_range()
    with pytest.raises(IndexError) as got:
        result.tolist()
    place = f"{__file__}:{line} in embedding_out_of_range"
    assert f"aten::index_select: an index is out of range (recorded at {place})" in str(got.value)
    assert (torch.ones(2, device=DEVICE) + 1).tolist() == [2, 2]


@needs_host_errors
def test_a_kernel_that_finds_an_index_out_of_range_names_op_and_line() -> None:
    call(kernel_out_of_range, engine="triton")


@needs_host_errors
def test_a_failure_in_backward_names_the_forward_line() -> None:
    x = torch.ones(3, 3, device=DEVICE, requires_grad=True)
    places = torch.tensor([0, 7]).to(DEVICE)
    picked = x.index_select(0, places)
    with pytest.raises((IndexError, RuntimeError), match=r"test_lazy_backend_errors.py:\d+ in test_a_failure_in_backward"):
        picked.sum().backward()
        x.grad.tolist()
        picked.tolist()


@needs_host_errors
def test_after_a_failure_old_tensors_are_intact_and_new_ones_work() -> None:
    x = torch.arange(3.0).to(DEVICE)
    kept = x * 2
    lazy_backend.mark_step()
    bad, _ = embedding_out_of_range()
    with pytest.raises(IndexError):
        lazy_backend.mark_step()
    assert kept.tolist() == [0, 2, 4] and x.tolist() == [0, 1, 2]
    assert (x + kept).tolist() == [0, 3, 6]
    with pytest.raises(RuntimeError, match="never computed, because an earlier op failed"):
        bad.tolist()


def test_a_singular_matrix() -> None:
    singular = torch.zeros(3, 3, device=DEVICE)
    with pytest.raises(torch.linalg.LinAlgError):
        torch.linalg.inv(singular).tolist()


WISHES: dict[str, Callable[[], Any]] = {
    "a device index that does not exist": lambda: torch.ones(3, device="lazysched:99"),
    "the CPU's generator": lambda: torch.randn(3, device=DEVICE, generator=torch.Generator()),
    "the device's generator on the CPU": lambda: torch.randn(3, generator=torch.Generator(device=DEVICE)),
    "to_mkldnn": lambda: torch.ones(3, device=DEVICE).to_mkldnn(),
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA does not survive fork")
@pytest.mark.parametrize("name", WISHES)
def test_what_the_device_cannot_do_is_an_error_not_a_crash(name: str) -> None:
    """In a forked child, because the mistake under test ends the process."""
    torch.ones(1, device=DEVICE).item()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            WISHES[name]()
        except (RuntimeError, NotImplementedError) as error:
            status = 0 if str(error) else 1
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
