"""Tests of TorchCTS that do not pass, and why. Strict: where no test of a suite that ran fails by a row, that is reported.

Imports nothing of ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase


@dataclass(frozen=True, slots=True)
class Row:
    """``suite``: its name. ``pattern``: a shell pattern for the test's name or for the first line of its error."""

    suite: str
    pattern: str
    reason: str

    def matches(self, suite: str, test: str, message: str) -> bool:
        return suite == self.suite and (fnmatchcase(test, self.pattern) or fnmatchcase(message, self.pattern))


# Tests that must not run: one that may crash takes its suite with it.
CRASHING = {
    "test_sparse_low_level_compressed_generic_helpers": "it reads indices of a tensor that `_sparse_compressed_tensor_with_dims` "
                                                        "left unwritten, also on the CPU",
}  # fmt: skip

ROWS: tuple[Row, ...] = (
    Row("compiler", "*", "torch.compile has no inductor backend for the device"),
    Row("rng", "*named*", "torch 2.13 has no named tensors any more"),
    Row("rng", "test_rrelu_train_false_variants*", "the test compares memory of torch.empty"),
    Row("autograd", "test_embedding_bag_scale_grad*", "lazysched gives what the CPU's kernel gives, which counts otherwise"),
    Row("dtypes", "*Expected out tensor to have device*", "torch.empty_quantized without a device makes a tensor on the CPU, "
        "which the test then hands over as out"),
    Row("operators", "test_sparse_low_level_constructor_overloads", "without a device the op makes a tensor on the CPU, "
        "and refuses values from any other"),
    Row("memory", "*Caching allocator*", "memory is reused by a plan of the whole recording, not through an allocator's cache"),
    Row("workloads", "test_sdpa_nested*", "the test wants another layout than the CPU's kernels have; the numbers are the CPU's"),
    Row("strides", "test_stride_and_storage_offset_metadata*",
        "the test wants .cpu() to keep the gaps of a view, which no device does"),
    Row("training", "test_fused_optimizer_pipelines[[]SGD*",
        "compared with the for-loop; lazysched gives what the CPU's fused SGD gives"),
    Row("training", "test_dataloader_pin_memory*", "there is no pinned memory without a GPU"),
    Row("generated", "*from the 'CPU' backend*", "a CPU has no such kernel"),
    Row("generated", "*can be pinned*", "only memory of the host is pinned"),
    Row("generated", "*_fused_attention_overrideable*", "an op for devices that bring a kernel of their own for it"),
    Row("generated", "*object has no attribute 'shape'*", "the CPU's recurrent cells leave no workspace"),
    Row("generated", "*neg_cpu*", "the CPU's kernel does not negate unsigned integers"),
    Row("generated", "*are not close*", "the test wants other numbers than the CPU's kernels give, mostly beside NaN and "
        "infinity; lazysched gives theirs in the 17 kinds that were compared"),
)


def reason(suite: str, test: str, message: str) -> str:
    """Why the test fails; "" where no row says it."""
    return next((row.reason for row in ROWS if row.matches(suite, test, message)), "")


def idle(failures: dict[str, dict[str, str]]) -> list[Row]:
    """Rows about suites that ran, by which no test failed. ``failures``: by suite, failed tests and their errors' first lines."""
    return [row for row in ROWS if row.suite in failures
            and not any(row.matches(row.suite, *failure) for failure in failures[row.suite].items())]
