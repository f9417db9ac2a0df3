"""OpInfo: every op of `op_db` gives the values, layouts, views and gradients that eager mode gives on the same samples."""

from __future__ import annotations

from typing import Any

import torch
from torch.testing._internal.common_device_type import instantiate_device_type_tests, ops
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils import _pytree as pytree

from tests.conformance import selection
from tests.conformance.judge import DTYPES, PHYSICAL, Judge, as_physical, attempt, pair
from tests.conformance.mirror import Mirror, tensors

# Their results are memory that nothing wrote.
UNWRITTEN = ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided", "resize_", "resize_as_")


def everyday(name: str) -> bool:
    return selection.dtype_of(name) == "float32"


class TestValues(Judge):
    @ops(as_physical(op_db), allowed_dtypes=DTYPES)
    def test_values(self, device: str, dtype: torch.dtype, op: Any) -> None:
        grad = op.supports_autograd and dtype in op.supported_backward_dtypes(PHYSICAL)
        for index, sample in enumerate(selection.few(op.sample_inputs(device, dtype, requires_grad=grad))):
            self.judge(op, device, sample, grad, f"sample {index}")

    def judge(self, op: Any, device: str, sample: Any, grad: bool, what: str) -> None:
        ours, theirs = pair(device, (sample.input, sample.args, sample.kwargs))
        ran = [attempt(lambda given=given: op(given[0], *given[1], **given[2])) for given in (ours, theirs)]
        if not self.same_outcome(*ran, what):
            return
        written = op.name not in UNWRITTEN
        results = [run.result for run in ran]
        self.same_value(*results, what, written)
        self.same_value(tensors(ours), tensors(theirs), f"{what}: inputs afterwards")
        self.same_sharing(results[0], ours, results[1], theirs, what)
        if written:
            self.write(op, device, sample, what)
        if grad:
            self.backward(sample, ours, theirs, results, what)

    def write(self, op: Any, device: str, sample: Any, what: str) -> None:
        """What is written to a view of an input arrives in the input."""
        runs = []
        for given in pair(device, (sample.input, sample.args, sample.kwargs)):
            given = pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, given)
            result = op(given[0], *given[1], **given[2])
            views = [out for out in tensors(result) if out._is_view()]
            if not views:
                return
            runs.append((attempt(lambda views=views: [view.fill_(1) for view in views]), given))
        (our_run, ours), (their_run, theirs) = runs
        if self.same_outcome(our_run, their_run, f"{what}: a write to a view"):
            self.same_value(tensors(ours), tensors(theirs), f"{what}: after a write to a view")

    def backward(self, sample: Any, ours: Any, theirs: Any, results: list[Any], what: str) -> None:
        lists = [[out for out in tensors(sample.output_process_fn_grad(result)) if out.requires_grad] for result in results]
        if not lists[1]:
            return
        seeds = [torch.randn_like(out.detach()) if out.is_floating_point() or out.is_complex() else None for out in lists[1]]
        runs = []
        for outs, given in zip(lists, (ours, theirs)):
            leaves = [t for t in tensors(given) if t.requires_grad]
            mirror = Mirror(PHYSICAL, outs[0].device)
            cotangents = [mirror.tensor(seed) for seed in seeds]
            runs.append(attempt(lambda o=outs, i=leaves, c=cotangents: torch.autograd.grad(o, i, c, allow_unused=True)))
        if self.same_outcome(*runs, f"{what}: backward"):
            for index, (mine, yours) in enumerate(zip(runs[0].result, runs[1].result)):
                self.same(mine is None, yours is None, f"{what}: gradient {index} is missing")
                if yours is not None:
                    self.assertEqual(mine, yours, exact_device=False, msg=lambda text, i=index: f"{what}: gradient {i}\n{text}")


instantiate_device_type_tests(TestValues, globals(), only_for="privateuse1")
