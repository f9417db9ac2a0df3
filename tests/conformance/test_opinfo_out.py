"""OpInfo: `out=` takes right, strided, empty, too large and wrongly typed tensors as eager mode does, warnings and errors too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.testing._internal.common_device_type import instantiate_device_type_tests, ops
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils import _pytree as pytree

from tests.conformance import selection
from tests.conformance.judge import DTYPES, PHYSICAL, UNWRITTEN, Judge, as_physical, attempt, pair, sharing, wide_run
from tests.conformance.mirror import Mirror, tensors
from tests.conformance.truth import Truth


def everyday(name: str) -> bool:
    return selection.one_in(name, 4 if selection.dtype_of(name) == "float32" else 40)


def strided(t: torch.Tensor) -> torch.Tensor:
    """Every second place of a larger tensor."""
    twice = torch.full([2 * size for size in t.shape], 1, dtype=t.dtype, device=t.device)
    return twice[tuple(slice(None, None, 2) for _ in t.shape)]


def transposed(t: torch.Tensor) -> torch.Tensor:
    return torch.full(t.shape[::-1], 1, dtype=t.dtype, device=t.device).permute(tuple(range(t.dim() - 1, -1, -1)))


CASES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "right": lambda t: torch.full(t.shape, 1, dtype=t.dtype, device=t.device),
    "strided": strided,
    "transposed": transposed,
    "empty": lambda t: torch.empty(0, dtype=t.dtype, device=t.device),
    "too large": lambda t: torch.full([*t.shape[:-1], t.shape[-1] + 1] if t.dim() else [2], 1, dtype=t.dtype, device=t.device),
    "int64": lambda t: torch.full(t.shape, 1, dtype=torch.int64, device=t.device),
    "float64": lambda t: torch.full(t.shape, 1, dtype=torch.float64, device=t.device),
}

# Outputs that eager mode itself gets wrong: ops, physical device, cases, and how many dimensions the output has at least.
ASTRAY = (
    # Their kernel for the CPU takes a batch of batches for evenly spread, and writes outside of it: memory is corrupt afterwards.
    # torch.triu(torch.ones(3, 3, 5, 5), out=torch.empty(5, 5, 3, 3).permute(3, 2, 1, 0))
    # https://github.com/pytorch/pytorch/blob/v2.11.0/aten/src/ATen/native/TriangularOps.cpp
    (("triu", "tril", "lu_unpack", "linalg.lu"), "cpu", ("strided", "transposed"), 4),
    # CUDA's takes dense outputs for contiguous ones, and mixes their elements up.
    # https://github.com/pytorch/pytorch/blob/v2.11.0/aten/src/ATen/native/cuda/TensorShape.cu
    (("split_with_sizes_copy", "_chunk_cat"), "cuda", ("transposed",), 2),
    (("native_batch_norm", "_native_batch_norm_legit"), "cuda", ("strided",), 1),  # ends at an INTERNAL ASSERT
)


def astray(op: Any, case: str, expected: torch.Tensor) -> bool:
    return any(op.name in ops and device == PHYSICAL and case in cases and expected.dim() >= dims
               for ops, device, cases, dims in ASTRAY)


# Written in Python, they copy what they computed into `out`, wherever that is.
COPIES = ("lu",)


class TestOut(Judge):
    @ops([op for op in as_physical(op_db) if op.supports_out], allowed_dtypes=DTYPES)
    def test_out(self, device: str, dtype: torch.dtype, op: Any) -> None:
        for index, sample in enumerate(selection.few(op.sample_inputs(device, dtype))):
            given = (sample.input, sample.args, sample.kwargs)
            _, theirs = pair(device, given)
            expected = attempt(lambda theirs=theirs: op(theirs[0], *theirs[1], **theirs[2])).result
            if not tensors(expected):
                continue
            for case, change in CASES.items():
                if not astray(op, case, tensors(expected)[-1]):
                    self.check(op, device, dtype, given, pytree.tree_map_only(torch.Tensor, change, expected),
                               f"sample {index}: {case} out")
            self.refuses_another_device(op, device, given, expected, f"sample {index}")

    def check(self, op: Any, device: str, dtype: torch.dtype, given: Any, outs: Any, what: str) -> None:
        def call(first: Any, args: Any, kwargs: Any, out: Any) -> Any:
            return op(first, *args, **kwargs, out=out)

        ours, theirs = (Mirror(PHYSICAL, place).all(plain(outs)) for place in (device, PHYSICAL))
        mine, yours = pair(device, given)
        ran = [attempt(lambda all=all: call(*all)) for all in ((*mine, ours), (*yours, theirs))]
        if self.same_outcome(*ran, what):
            truth = Truth(lambda: wide_run(device, lambda first, args, kwargs: op(first, *args, **kwargs), given))
            computed = dtype if dtype.is_floating_point else None
            self.same_value(ran[0].result, ran[1].result, what, op.name not in UNWRITTEN, truth, computed)
            self.same_value(ours, theirs, f"{what}: out", op.name not in UNWRITTEN, truth, computed)
            self.same(sharing(ran[0].result, ours), sharing(ran[1].result, theirs), f"{what}: shared memory")

    def refuses_another_device(self, op: Any, device: str, given: Any, expected: Any, what: str) -> None:
        if op.name in COPIES or (op.is_factory_function and given[2].get("device") is None):
            return
        outs = Mirror(PHYSICAL, "cpu").all(plain(expected))
        mine = pair(device, given)[0]
        error = attempt(lambda: op(mine[0], *mine[1], **mine[2], out=outs)).error
        self.assertIsInstance(error, (RuntimeError, TypeError), f"{what}: out on another device")
        self.assertNotIn("INTERNAL ASSERT", str(error))


def plain(outs: Any) -> Any:
    """A named tuple cannot be given as out."""
    return outs if isinstance(outs, (torch.Tensor, list)) else tuple(outs)


instantiate_device_type_tests(TestOut, globals(), only_for="privateuse1")
