"""OpInfo: what eager mode refuses (`error_inputs`, dtypes that an op does not take) the device refuses with the same error."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch.testing._internal.common_device_type import OpDTypes, instantiate_device_type_tests, ops
from torch.testing._internal.common_methods_invocations import op_db

from tests.conformance import selection
from tests.conformance.judge import DTYPES, UNWRITTEN, Judge, Outcome, as_physical, attempt, pair


def everyday(name: str) -> bool:
    return selection.one_in(name, 20 if name.startswith("test_dtypes") else 2)


class TestErrors(Judge):
    @ops([op for op in as_physical(op_db) if op.error_inputs_func is not None], dtypes=OpDTypes.none)
    def test_errors(self, device: str, op: Any) -> None:
        for index, wrong in enumerate(op.error_inputs(device)):
            sample = wrong.sample_input
            ours, theirs = (attempt(lambda all=all: op(all[0], *all[1], **all[2]))
                            for all in pair(device, (sample.input, sample.args, sample.kwargs)))
            if theirs.error is None and self.as_told(wrong, ours):  # a CPU tensor among the device's
                continue
            if self.same_outcome(ours, theirs, f"error input {index}"):
                continue
            if self.as_told(wrong, theirs) and not self.as_told(wrong, ours):
                raise AssertionError(f"error input {index}: eager mode says {theirs.error}") from ours.error

    def as_told(self, wrong: Any, run: Outcome) -> bool:
        return isinstance(run.error, wrong.error_type) and re.search(wrong.error_regex, str(run.error)) is not None

    @ops(as_physical(op_db), dtypes=OpDTypes.unsupported, allowed_dtypes=DTYPES)
    def test_dtypes(self, device: str, dtype: torch.dtype, op: Any) -> None:
        """Dtypes that the op does not take, or not always."""
        try:
            samples = list(selection.few(op.sample_inputs(device, dtype), 1))
        except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
            self.skipTest(f"no samples of this dtype: {error}")
        for index, sample in enumerate(samples):
            self.agree(device, lambda first, args, kwargs: op(first, *args, **kwargs), (sample.input, sample.args, sample.kwargs),
                       f"sample {index}", written=op.name not in UNWRITTEN)


instantiate_device_type_tests(TestErrors, globals(), only_for="privateuse1")
