"""What runs where the triton engine fails: ATen, for the nodes of a kernel that can't be made, else for the graph."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any, Callable

import children
import pytest
import torch

import lazy_backend
from codegen import triton_engine
from codegen.alike import Emitter
from codegen.triton_compile import KernelCompileError
from ir_nodes import settings
from tests.device import DEVICE

needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter runs kernels where there is no GPU")


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    """The native core is there before a child looks for it, so that no child says that it builds one."""
    torch.ones(1, device=DEVICE)


def fusible(x: torch.Tensor, number: float = 0.5) -> torch.Tensor:
    """One pointwise kernel and one reduction."""
    return ((x * number).tanh() + 1).softmax(-1)


def run(program: Callable[..., torch.Tensor], *args: Any) -> torch.Tensor:
    """``program`` as one recording."""
    result = program(*args)
    lazy_backend.mark_step()
    return result


def caught(action: Callable[[], Any]) -> list[str]:
    """Texts of the RuntimeWarnings that ``action`` causes."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        action()
    return [str(warning.message) for warning in seen if warning.category is RuntimeWarning]


def refusing(name: str, refused: list[str]) -> None:
    """Kernels called ``name`` do not compile from now on."""
    original = triton_engine.interpret

    def interpret(kernel: Any, folder: Path) -> Any:
        if kernel.name.startswith(name):
            refused.append(kernel.name)
            raise KernelCompileError(kernel, folder / "broken.py", ValueError("made to fail"))
        return original(kernel, folder)

    triton_engine.interpret = interpret


def a_broken_kernel() -> None:
    refused: list[str] = []
    refusing("reduce", refused)
    x = torch.linspace(-1, 1, 12).reshape(3, 4)
    mine = x.to(DEVICE)
    lazy_backend.mark_step()
    results: list[torch.Tensor] = []
    (text,) = caught(lambda: results.append(run(fusible, mine)))
    assert refused and refused[0] in text and "broken.py" in text and "made to fail" in text and "ATen runs" in text
    torch.testing.assert_close(results[0].cpu(), fusible(x))
    assert caught(lambda: results.append(run(fusible, mine, 0.25))) == [], "the graph is cached with what runs it"
    torch.testing.assert_close(results[1].cpu(), fusible(x, 0.25))
    before = len(triton_engine._interpreted)
    assert caught(lambda: results.append(run(lambda t: t.tanh() * 2, mine))) == []
    assert len(triton_engine._interpreted) == before + 1, "other graphs keep the triton engine"
    torch.testing.assert_close(results[2].cpu(), x.tanh() * 2)


@needs_no_gpu
def test_a_kernel_that_does_not_compile_is_named_and_aten_takes_over() -> None:
    children.call(a_broken_kernel, engine="triton")


def two_of_one_graph(x: torch.Tensor) -> torch.Tensor:
    """A reduction that is made by ATen, between pointwise kernels: products with a matrix keep them apart."""
    return ((((x * 0.5).tanh() @ x.T).softmax(-1) @ x) * 3).exp()


def one_broken_of_three() -> None:
    refused: list[str] = []
    refusing("reduce", refused)
    x = torch.linspace(-1, 1, 12).reshape(3, 4)
    mine = x.to(DEVICE)
    lazy_backend.mark_step()
    results: list[torch.Tensor] = []
    (text,) = caught(lambda: results.append(run(two_of_one_graph, mine)))
    assert len(refused) == 1 and re.search("ATen runs 1 of \\d+ nodes", text)
    assert len(triton_engine._interpreted) == 2, "the kernels before and after it are launched"
    torch.testing.assert_close(results[0].cpu(), two_of_one_graph(x))


@needs_no_gpu
def test_a_kernel_that_does_not_compile_costs_its_own_nodes_only() -> None:
    children.call(one_broken_of_three, engine="triton")


def a_kernel_that_cannot_be_written() -> None:
    original = Emitter.emit

    def emit(self: Emitter, group: Any, outside: Any) -> Any:
        if group.reduced is not None:
            raise AssertionError("made to fail")
        return original(self, group, outside)

    Emitter.emit = emit
    x = torch.linspace(-1, 1, 12).reshape(3, 4)
    mine = x.to(DEVICE)
    lazy_backend.mark_step()
    results: list[torch.Tensor] = []
    (text,) = caught(lambda: results.append(run(two_of_one_graph, mine)))
    assert "a kernel of _softmax: AssertionError: made to fail" in text and "ATen runs 1 of" in text
    torch.testing.assert_close(results[0].cpu(), two_of_one_graph(x))


def test_a_fault_in_writing_a_kernel_costs_its_own_nodes_only() -> None:
    children.call(a_kernel_that_cannot_be_written, engine="triton")


def a_file_for_a_folder() -> None:
    x = torch.linspace(-1, 1, 12).reshape(3, 4)
    mine = x.to(DEVICE)
    lazy_backend.mark_step()
    with settings.override(cache_dir=__file__):  # now, because building the native core in another folder takes a minute
        results: list[torch.Tensor] = []
        (text,) = caught(lambda: results.append(run(fusible, mine)))
    assert f"{__file__}/kernels" in text and "aten engine" in text
    torch.testing.assert_close(results[0].cpu(), fusible(x))


def test_a_cache_folder_that_cannot_be_written_is_named_and_aten_takes_over() -> None:
    children.call(a_file_for_a_folder, engine="triton")
