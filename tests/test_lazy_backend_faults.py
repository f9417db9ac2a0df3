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


pytestmark = pytest.mark.usefixtures("built")


def three_kernels(x: torch.Tensor, number: float = 0.5) -> torch.Tensor:
    """A reduction between pointwise kernels: products with a matrix keep them apart."""
    return ((((x * number).tanh() @ x.T).softmax(-1) @ x) * 3).exp()


def warned(program: Callable[..., torch.Tensor], *numbers: float) -> list[str]:
    """Texts of the RuntimeWarnings of ``program`` as one recording, whose result is checked."""
    x = torch.linspace(-1, 1, 12).reshape(3, 4)
    mine = x.to(DEVICE)
    lazy_backend.mark_step()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        result = program(mine, *numbers)
        lazy_backend.mark_step()
    torch.testing.assert_close(result.cpu(), program(x, *numbers))
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
    (text,) = warned(three_kernels)
    assert len(refused) == 1 and refused[0] in text and "broken.py" in text and "made to fail" in text
    assert re.search("ATen runs 1 of \\d+ nodes", text)
    assert len(triton_engine._interpreted) == 2, "the kernels before and after it are launched"
    assert warned(three_kernels, 0.25) == [], "the graph is cached with what runs it"
    assert warned(lambda t: t.tanh() * 2) == []
    assert len(triton_engine._interpreted) == 3, "other graphs keep the triton engine"


@needs_no_gpu
def test_a_kernel_that_does_not_compile_is_named_and_costs_its_own_nodes_only() -> None:
    children.call(a_broken_kernel, engine="triton")


def a_kernel_that_cannot_be_written() -> None:
    original = Emitter.emit

    def emit(self: Emitter, group: Any, outside: Any) -> Any:
        if group.reduced is not None:
            raise AssertionError("made to fail")
        return original(self, group, outside)

    Emitter.emit = emit
    (text,) = warned(three_kernels)
    assert "a kernel of _softmax: AssertionError: made to fail" in text and "ATen runs 1 of" in text
    told: list[str] = []
    (again,) = warned(lambda x: told.append(str(lazy_backend.explain(three_kernels, x))) or x)
    assert again == text and "its kernel can't be made" in told[0]


def test_a_fault_in_writing_a_kernel_costs_its_own_nodes_only_and_is_explained() -> None:
    children.call(a_kernel_that_cannot_be_written, engine="triton")


def a_file_for_a_folder() -> None:
    torch.ones(1, device=DEVICE)  # building the native core in another folder takes a minute
    with settings.override(cache_dir=__file__):
        (text,) = warned(three_kernels)
    assert f"{__file__}/kernels" in text and "aten engine" in text


def test_a_cache_folder_that_cannot_be_written_is_named_and_aten_takes_over() -> None:
    children.call(a_file_for_a_folder, engine="triton")
