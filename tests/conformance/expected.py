"""Tests of this folder that do not pass, each with its reason. Strict: a test with a row must fail. Imports nothing of ours.

A row is a shell pattern for the end of a test's id (file::class::test), a reason, and where upstream lacks something, a link.
``device``: the physical device that the row is about, or None for any.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase


@dataclass(frozen=True, slots=True)
class Row:
    pattern: str
    reason: str
    link: str = ""
    device: str | None = None
    skip: bool = False  # it must not even run

    def text(self) -> str:
        return f"{self.reason} ({self.link})" if self.link else self.reason


ROWS: tuple[Row, ...] = (
    Row("_fft_*_lazysched_float16", "torch.fft takes half precision on CUDA, XPU and Meta by name only",
        "https://github.com/pytorch/pytorch/blob/v2.11.0/aten/src/ATen/native/SpectralOps.cpp", device="cuda", skip=True),
    Row("::test_values_torch_ops_aten__efficient_attention_forward_lazysched_*", "eager mode leaves the seed of its "
        "dropout on the CPU, here every result is a tensor of the device", device="cuda"),
    Row("test_values_nn_functional_linear_cross_entropy_chunked*_lazysched_*float16",
        "the function chooses how it accumulates by the device's name, and knows cpu and cuda",
        "https://github.com/pytorch/pytorch/blob/main/torch/nn/modules/linear_cross_entropy_options.py", device="cpu"),
    Row("test_dtypes_histc_lazysched_int64", "libraries count integers with histc on any device but the CPU, so ours does it "
        "where eager mode on the CPU refuses", device="cpu"),
    Row("test_dtypes_nn_functional_max_pool1d_lazysched_int64", "the CPU alone has a kernel of its own for max_pool1d, "
        "which takes no integers; every other device calls max_pool2d, and that takes them",
        "https://github.com/pytorch/pytorch/blob/v2.11.0/aten/src/ATen/native/MaxPooling.cpp", device="cpu"),
    Row("_renorm_lazysched_complex64", "its backward accumulates in what the device's name says: in complex128 off CUDA, where "
        "no element equals the largest any more", "https://github.com/pytorch/pytorch/blob/v2.11.0/torch/csrc/autograd/"
        "FunctionsManual.cpp", device="cuda"),
    Row("test_values_linalg_vector_norm_lazysched_float16", "a float exponent is an input here, so that x ** 3.0 rounds once "
        "where eager mode rounds after each product", device="cuda"),
    Row("test_out_multinomial_lazysched_*", "eager mode gives `out` other strides than it has", device="cuda", skip=True),
    Row("_*__rmod___lazysched_int64", "a sample divides by zero, which gives nothing certain on CUDA", device="cuda"),
    Row("test_dtypes_nn_functional_rms_norm_lazysched_*", "eager mode has a fused kernel for CUDA that takes integers",
        device="cuda", skip=True),
    Row("test_values_torch_ops_aten__flash_attention_forward_lazysched_*", "without dropout its seed is memory that nothing "
        "wrote", device="cuda", skip=True),
)


def row(test: str, device: str) -> Row | None:
    """The row about ``test`` on the physical ``device``."""
    return next((r for r in ROWS if r.device in (None, device) and fnmatchcase(test, "*" + r.pattern)), None)
