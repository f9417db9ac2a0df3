"""What cuBLASLt is asked for is the product that was meant, in every layout; on a GPU its own numbers are judged."""

from __future__ import annotations

import gc
import itertools
from pathlib import Path

import pytest
import torch
from cublaslt import FakeCublasLt, launch

from codegen import cublaslt, product_bench, products
from codegen.cublaslt import Library, LibraryError, Multiplier, mapped
from codegen.kernel import MatMul
from codegen.product_bench import ATEN, matrices, prepare, sizes_of
from tests.device import ON_GPU

BF16, HALF = torch.bfloat16, torch.float16
ROWS, COLUMNS, INNER = 48, 40, 24
ADDED = [(False, False), (True, False), (True, True), (False, False, True)]
"""A bias, a ReLU, what is there."""
LAYOUTS = list(itertools.product((False, True), (False, True), (0, 8), ADDED, (BF16, HALF)))
needs_gpu = pytest.mark.skipif(not ON_GPU, reason="needs a GPU: the library itself multiplies")


def product(left_over: bool, right_over: bool, pad: int, added: tuple[bool, ...], dtype: torch.dtype, scale: int = 1) -> MatMul:
    rows, columns, inner = ROWS * scale, COLUMNS * scale, INNER * scale
    return MatMul(dtype, rows, columns, inner, (left_over, (rows if left_over else inner) + pad),
                  (right_over, (inner if right_over else columns) + pad), columns + pad, *added)


def operands(wanted: MatMul, device: str = "cpu") -> list[torch.Tensor]:
    """Left, right, result and bias."""
    sizes = sizes_of(wanted, ())[:-1]
    left, right, made, _, bias = matrices(wanted, [torch.zeros(size, dtype=torch.uint8, device=device) for size in sizes])
    return [left, right, made, bias]


def reference(wanted: MatMul, left: torch.Tensor, right: torch.Tensor, bias: torch.Tensor, alpha: float,
              there: torch.Tensor) -> torch.Tensor:
    made = alpha * (left.float() @ right.float()) + (bias.float() if wanted.bias else there.float() if wanted.onto else 0.0)
    return (made.relu() if wanted.relu else made).to(wanted.dtype)


def assert_near(made: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(made.float(), wanted.float(), rtol=2e-2, atol=2e-2 * float(wanted.float().abs().max()))
    assert float((made.float() - wanted.float()).norm() / wanted.float().norm()) < 5e-3


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_layout_is_the_product_that_was_meant(layout: tuple[bool, bool, int, tuple[bool, ...], torch.dtype]) -> None:
    wanted = product(*layout)
    multiplier = Multiplier(Library(FakeCublasLt()), wanted)
    left, right, made, bias = operands(wanted)
    for alpha, algorithm in zip((1.0, 0.5, -2.0), multiplier.suggestions(cublaslt.ANY_REDUCTION)):
        prepare(wanted, made)
        there = made.clone()
        launch(multiplier, algorithm, (left, right, made, *([bias] if wanted.bias else [])), alpha)
        assert_near(made, reference(wanted, left, right, bias, alpha, there))


def test_the_transposed_result_is_asked_for() -> None:
    functions = FakeCublasLt()
    wanted = product(True, False, 8, (True, False), BF16)
    multiplier = Multiplier(Library(functions), wanted)
    left, right, made, bias = operands(wanted)
    *_, last = multiplier.suggestions(cublaslt.ANY_REDUCTION)
    multiplier.run(last, left.data_ptr(), right.data_ptr(), made.data_ptr(), bias.data_ptr(), 0.5, 4096, 77)
    (call,) = functions.calls
    result = (14, COLUMNS, ROWS, COLUMNS + 8)
    assert call.layouts == ((14, COLUMNS, INNER, COLUMNS + 8), (14, ROWS, INNER, ROWS + 8), result, result)
    assert call.transposed == (0, 1) and (call.alpha, call.beta) == (0.5, 0.0) and call.bias == bias.data_ptr()
    assert call.words == (3, *[0] * 7) and call.workspace == (4096, 512) and call.stream == 77


@pytest.mark.parametrize("reductions", [cublaslt.ANY_REDUCTION, cublaslt.IN_FLOAT32, cublaslt.NO_SPLIT])
def test_suggestions_are_for_aligned_memory_a_workspace_and_pytorchs_precision(reductions: int) -> None:
    functions = FakeCublasLt(count=20, unable=[2])
    found = Multiplier(Library(functions), product(False, False, 0, (False, False), BF16)).suggestions(reductions)
    assert [one.words[0] for one in found] == [1, 3, 4, 5, 6, 7, 8] and [one.number for one in found] == list(range(1, 8))
    (wishes,) = functions.wishes
    assert {attribute: wishes.number(attribute) for attribute in wishes.attributes} == {
        1: cublaslt.WORKSPACE, 3: reductions, 5: 16, 6: 16, 7: 16, 8: 16}


def test_what_was_created_is_destroyed() -> None:
    functions = FakeCublasLt()
    multiplier = Multiplier(Library(functions), product(False, False, 0, (True, False), BF16))
    multiplier.suggestions(cublaslt.ANY_REDUCTION)
    assert len(functions.handles) == 5  # the library, the product and three layouts
    del multiplier
    gc.collect()
    assert [handle.kind for handle in functions.handles.values()] == ["cublasLtCreate"]


def test_what_the_library_refuses_is_told() -> None:
    multiplier = Multiplier(Library(FakeCublasLt(refused=[1])), product(False, False, 0, (False, False), BF16))
    with pytest.raises(LibraryError, match=r"cublasLtMatmul: not supported \(15\)"):
        multiplier.run(multiplier.suggestions(cublaslt.ANY_REDUCTION)[0], 16, 16, 16, 0, 1.0, 0, 0)


def test_the_loaded_library_is_found_by_its_file(tmp_path: Path) -> None:
    maps = tmp_path / "maps"
    line = "7f00-7f01 r--p 00000000 08:01 123        /a place/lib/libcublasLt.so.13.1\n"
    maps.write_text(f"7f00-7f01 rw-p 00000000 00:00 0\n{line}{line}7f00 r--p 0 08:01 1 /a/libcublas.so.13\n")
    assert mapped(maps) == ["/a place/lib/libcublasLt.so.13.1"] and mapped(tmp_path / "none") == []


@pytest.mark.skipif(ON_GPU, reason="PyTorch has loaded it here")
def test_no_library_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch for CUDA loads it on machines without a GPU, too."""
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(cublaslt, "mapped", lambda maps: [])
    with pytest.raises(LibraryError, match="loaded no cuBLASLt"):
        cublaslt.loaded()


@needs_gpu
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_library_gives_the_products_numbers(layout: tuple[bool, bool, int, tuple[bool, ...], torch.dtype]) -> None:
    wanted = product(*layout, scale=16)
    multiplier = Multiplier(cublaslt.library(0), wanted)
    left, right, made, bias = operands(wanted, "cuda")
    found = multiplier.suggestions(products.reductions_of(wanted.dtype))
    assert found
    for alpha, algorithm in zip(itertools.cycle((1.0, 0.5)), found):
        prepare(wanted, made)
        there = made.clone()
        products.launch(multiplier, algorithm, (left, right, made, *([bias] if wanted.bias else [])), alpha)
        assert_near(made, reference(wanted, left, right, bias, alpha, there))


@needs_gpu
@pytest.mark.parametrize("added", ADDED, ids=["mm", "bias", "relu", "onto"])
def test_a_measurement_times_aten_and_suggestions_and_leaves_no_memory(added: tuple[bool, ...]) -> None:
    wanted = product(False, True, 0, added, BF16, scale=128)
    multiplier = Multiplier(cublaslt.library(0), wanted)
    torch.cuda.reset_peak_memory_stats()
    before, state = torch.cuda.memory_allocated(), torch.cuda.get_rng_state()
    outcome = product_bench.on_gpu(0)(wanted, multiplier.suggestions(cublaslt.ANY_REDUCTION), multiplier)
    ran = [name for name, seconds in outcome.seconds.items() if seconds is not None and 0 < seconds < 1]
    assert outcome.why == "" and ran[0] == ATEN and len(ran) > 1, outcome
    assert torch.equal(state, torch.cuda.get_rng_state())
    assert torch.cuda.max_memory_allocated() - before < sum(sizes_of(wanted, ())) / 2, "cuBLAS's workspaces are all"
