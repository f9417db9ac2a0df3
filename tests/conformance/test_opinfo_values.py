"""OpInfo: every op of `op_db` gives the values, layouts, views and gradients that eager mode gives on the same samples."""

from __future__ import annotations

from typing import Any

import torch
from torch.testing._internal.common_device_type import instantiate_device_type_tests, ops
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils import _pytree as pytree

from tests.conformance import selection
from tests.conformance.judge import DTYPES, UNWRITTEN, Judge, as_physical, attempt, differentiable, pair
from tests.conformance.mirror import tensors


def everyday(name: str) -> bool:
    return selection.dtype_of(name) == "float32" or selection.one_in(name, 8)


class TestValues(Judge):
    @ops(as_physical(op_db), allowed_dtypes=DTYPES)
    def test_values(self, device: str, dtype: torch.dtype, op: Any) -> None:
        grad = differentiable(op, dtype)
        written = op.name not in UNWRITTEN
        for index, sample in enumerate(selection.few(op.sample_inputs(device, dtype, requires_grad=grad))):
            given = (sample.input, sample.args, sample.kwargs)
            ran = self.agree(device, lambda first, args, kwargs: op(first, *args, **kwargs), given, f"sample {index}",
                             sample.output_process_fn_grad, grad, written)
            if ran and written:
                self.write(op, device, given, f"sample {index}: after a write to a view")

    def write(self, op: Any, device: str, given: Any, what: str) -> None:
        """What is written to a view of an input arrives in the input."""
        runs = []
        for mine in pair(device, given):
            mine = pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, mine)
            views = [out for out in tensors(op(mine[0], *mine[1], **mine[2])) if out._is_view()]
            if not views:
                return
            runs.append((attempt(lambda views=views: [view.fill_(1) for view in views]), mine))
        (our_run, ours), (their_run, theirs) = runs
        if self.same_outcome(our_run, their_run, what):
            self.same_value(tensors(ours), tensors(theirs), what)


instantiate_device_type_tests(TestValues, globals(), only_for="privateuse1")
