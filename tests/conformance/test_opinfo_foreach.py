"""OpInfo: the `torch._foreach_*` ops, new and in place, give eager mode's values, gradients and errors."""

from __future__ import annotations

from typing import Any

import torch
from torch.testing._internal import common_methods_invocations as infos
from torch.testing._internal.common_device_type import instantiate_device_type_tests, ops

from tests.conformance import selection
from tests.conformance.judge import DTYPES, Judge, as_physical

FOREACH = [op for kind in ("unary", "binary", "pointwise", "reduce", "other") for op in getattr(infos, f"foreach_{kind}_op_db")]


def everyday(name: str) -> bool:
    return selection.one_in(name, 2 if selection.dtype_of(name) == "float32" else 10)


class TestForeach(Judge):
    @ops(as_physical(FOREACH), allowed_dtypes=DTYPES)
    def test_foreach(self, device: str, dtype: torch.dtype, op: Any) -> None:
        grad = dtype.is_floating_point or dtype.is_complex
        for index, sample in enumerate(selection.few(op.sample_inputs(device, dtype, requires_grad=grad), 6)):
            given, what = (sample.input, sample.args, sample.kwargs), f"sample {index}"
            if op.method_variant is not None:
                self.agree(device, lambda first, args, kwargs: op.method_variant(first, *args, **kwargs), given, what, grad=grad)
            if op.inplace_variant is not None:
                self.agree(device, in_place(op), given, f"{what}: in place", lambda both: both[1], grad)


def in_place(op: Any) -> Any:
    def call(first: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        target = [tensor.clone() for tensor in first]
        return op.inplace_variant(target, *args, **kwargs), target

    return call


instantiate_device_type_tests(TestForeach, globals(), only_for="privateuse1")
