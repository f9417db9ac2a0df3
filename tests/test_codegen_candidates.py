"""Algorithms that cuBLASLt suggests for products like the one in question: which are asked for, checked and measured."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from cublaslt import FakeCublasLt

from codegen import cublaslt, product_bench
from codegen.candidates import candidates, neighbours, resized
from codegen.cublaslt import Library, Multiplier
from codegen.kernel import MatMul

PRODUCT = MatMul(torch.bfloat16, 128, 256, 512, (False, 520), (True, 512), 264, bias=True)


class Richer(FakeCublasLt):
    """Suggests something new for each question, which it says that it can run unless the number is in ``unable``."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.checked: list[int] = []

    def cublasLtMatmulAlgoGetHeuristic(self, *arguments: Any) -> int:
        status = super().cublasLtMatmulAlgoGetHeuristic(*arguments)
        *_, found, count = arguments
        found[0].words[0] = 100 * len(self.wishes)
        return status

    def cublasLtMatmulAlgoCheck(self, *arguments: Any) -> int:
        *_, words, found = arguments
        self.checked.append(words[0])
        found._obj.state, found._obj.workspace = 0, 4096 if words[0] < 500 else cublaslt.WORKSPACE + 1
        return 15 if words[0] == 300 else 0


def test_neighbours_are_larger_and_smaller_with_the_same_gaps_between_rows() -> None:
    found = list(neighbours(PRODUCT))
    assert found[0] == replace(PRODUCT, bias=False) and len(found) == 1 + 4 * 3 - 1, "a quarter of 128 rows is too few"
    assert resized(PRODUCT, "inner", 1024) == replace(PRODUCT, inner=1024, left=(False, 1032), right=(True, 1024))
    assert resized(PRODUCT, "columns", 128) == replace(PRODUCT, columns=128, apart=136)
    turned = replace(PRODUCT, left=(True, 128), right=(False, 256))
    assert resized(turned, "rows", 64) == replace(turned, rows=64, left=(True, 64))
    assert resized(turned, "columns", 512) == replace(turned, columns=512, right=(False, 512), apart=520)


def test_what_can_run_the_product_comes_behind_its_own_suggestions() -> None:
    functions = Richer(count=2)
    library = Library(functions)
    found = candidates(library, Multiplier(library, PRODUCT), cublaslt.ANY_REDUCTION)
    assert [one.words[0] for one in found] == [100, 2, 200, 400], "300 is refused, those from 500 on want too much memory"
    assert [one.number for one in found] == [1, 2, 3, 4] and [one.workspace for one in found[2:]] == [4096, 4096]
    assert all(one.product == PRODUCT for one in found) and functions.checked[:3] == [200, 300, 400]


@pytest.mark.parametrize(("count", "left"), [(9, 9), (14, 2 + product_bench.FINALISTS)])
def test_the_slow_ones_of_many_are_measured_once(count: int, left: int) -> None:
    contest: dict[str, Any] = {str(number): number for number in range(count)}
    slow = product_bench.slow(contest, lambda ready, rounds: [float(count - calls[0]) for calls in ready], 1)
    assert len(contest) - len(slow) == left and not {"0", "1"} & set(slow)
    assert slow == [str(number) for number in range(count - 1, 1, -1)][product_bench.FINALISTS :] * (left < count)
