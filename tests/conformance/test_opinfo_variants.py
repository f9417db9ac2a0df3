"""OpInfo: methods, operators and in-place variants do what eager mode does, with gradients, and return what they wrote to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.testing._internal.common_device_type import instantiate_device_type_tests, ops
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils import _pytree as pytree

from tests.conformance import selection
from tests.conformance.judge import DTYPES, UNWRITTEN, Judge, as_physical, differentiable


def everyday(name: str) -> bool:
    return selection.one_in(name, 3 if selection.dtype_of(name) == "float32" else 40)


def variants(op: Any) -> tuple[list[Any], list[Any]]:
    """Those that give a new tensor, and those that write."""
    pure, writing = (op.method_variant, op.operator_variant), (op.inplace_variant, op.inplace_operator_variant)
    return [one for one in pure if one], [one for one in writing if one]


class TestVariants(Judge):
    @ops([op for op in as_physical(op_db) if any(variants(op))], allowed_dtypes=DTYPES)
    def test_variants(self, device: str, dtype: torch.dtype, op: Any) -> None:
        grad, written = differentiable(op, dtype), op.name not in UNWRITTEN
        pure, writing = variants(op)
        for index, sample in enumerate(selection.few(op.sample_inputs(device, dtype, requires_grad=grad))):
            given, process = (sample.input, sample.args, sample.kwargs), sample.output_process_fn_grad
            for one in pure:
                self.agree(device, splat(one), given, f"sample {index}: {name(one)}", process, grad, written)
            for one in writing:
                self.agree(device, in_place(one), given, f"sample {index}: {name(one)}", lambda both, p=process: p(both[0]), grad,
                           written)


def name(variant: Callable[..., Any]) -> str:
    return getattr(variant, "__name__", repr(variant))


def splat(variant: Callable[..., Any]) -> Callable[..., Any]:
    return lambda first, args, kwargs: variant(first, *args, **kwargs)


def in_place(variant: Callable[..., Any]) -> Callable[..., Any]:
    """Gives what the variant returns and the copy of its input that it wrote to."""

    def call(first: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        target = pytree.tree_map_only(torch.Tensor, torch.clone, first)
        return variant(target, *args, **kwargs), target

    return call


instantiate_device_type_tests(TestVariants, globals(), only_for="privateuse1")
