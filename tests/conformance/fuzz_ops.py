"""The ops that the fuzzer draws from: op_db, its samples and its mistakes. Imports torch and `fuzz_tensors` only."""

from __future__ import annotations

import functools
import itertools
import random
from typing import Any

import torch
from torch.testing._internal.common_methods_invocations import op_db

from tests.conformance.fuzz_tensors import REFERENCE

_SAMPLES = 24
_DTYPES = (torch.float32,) * 4 + (torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int64, torch.bool,
                                  torch.complex64)  # fmt: skip
# Never drawn, and why.
LEFT_OUT = {
    "empty": "uninitialised", "empty_like": "uninitialised", "empty_permuted": "uninitialised", "new_empty": "uninitialised",
    "empty_strided": "uninitialised", "new_empty_strided": "uninitialised", "resize_": "uninitialised where it grows",
    "resize_as_": "uninitialised where it grows", "native_group_norm": "eager mode reads outside of strided weights",
    "_batch_norm_with_update": "eager mode reads outside of strided weights",
    "nn.functional.linear_cross_entropy": "it chooses how it rounds by the device's name",
}  # fmt: skip
OPS = [op for op in op_db if op.name not in LEFT_OUT]
# Never given an `out`, and why.
NO_OUT = {
    **dict.fromkeys(("triu", "tril", "lu_unpack", "linalg.lu"), "eager mode writes outside of a strided batch"),
    **dict.fromkeys(("native_batch_norm", "_native_batch_norm_legit", "_batch_norm_with_update"),
                    "without training they resize the statistics, and leave them unwritten"),
}  # fmt: skip
ALIGNED = ("linalg.lstsq",)  # the last bits of LAPACK's results depend on how its arguments are aligned in memory
ON_HOST = ("tensor_split",)  # the op wants its further tensors on the CPU, whatever the device


@functools.lru_cache(maxsize=4096)
def samples(place: int, dtype: torch.dtype, grad: bool) -> list[Any]:
    """Some of the inputs that op_db has for the op, made on the CPU, the same in every process."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(place)
        return list(itertools.islice(OPS[place].sample_inputs("cpu", dtype, requires_grad=grad), _SAMPLES))


@functools.lru_cache(maxsize=1024)
def mistakes(place: int) -> list[Any]:
    """Calls of the op that must raise."""
    op = OPS[place]
    if op.error_inputs_func is None:
        return []
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(place)
        return [item.sample_input for item in itertools.islice(op.error_inputs("cpu"), _SAMPLES)]


def draw(rng: random.Random, with_grad: bool) -> tuple[Any, Any, str]:
    """An op, one of its samples (None: it has none) and a description of both."""
    place = rng.randrange(len(OPS))
    op = OPS[place]
    dtypes = op.supported_dtypes(REFERENCE)
    dtype = rng.choice([dtype for dtype in _DTYPES if dtype in dtypes] or [torch.float32])
    grad = with_grad and rng.random() < 0.5 and op.supports_autograd and dtype in op.supported_backward_dtypes(REFERENCE)
    wrong = mistakes(place) if rng.random() < 0.05 else []
    given = wrong or samples(place, dtype, grad)
    name = f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name
    return op, rng.choice(given) if given else None, f"{name} {dtype}{' grad' if grad else ''}"
