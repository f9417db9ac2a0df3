"""Many ops over many shapes, one after the other: which take longer than eager mode's kernels? Imports torch, lazy_backend,
`benchmarks.common`, `.drawn`, `.timing`.

    python -m benchmarks.shapes --seconds 100

Cases are drawn at random (``--seed``), in float32 and bfloat16: sums, norms, softmax, extremes, scans, images, copies and
gradients, of matrices and images of usual, odd and extreme shapes. Microseconds on the GPU alone, launches queued. Kernels
compile in ``--workers`` processes first. Results are compared with eager mode's; where they are apart, both with float64's.
"""

from __future__ import annotations

import functools
import itertools
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import lazy_backend
from benchmarks.common import table
from benchmarks.drawn import options, rows_of, slower_or_wrong, summary, told
from benchmarks.timing import gpu_seconds

Op = Callable[[Tensor], Tensor]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
APART, LONGEST = 2e-2, 0.03

MATRICES = [(64, 1 << 20), (1, 1 << 25), (1 << 25, 1), (1 << 22, 8), (8, 1 << 22), (1 << 20, 33), (3, 1 << 23), (300, 100_003),
            (16_384, 768), (2048, 16_384)]
SHAPES = [*MATRICES, (255, 255, 255), (512, 4, 4096), (64, 128, 56, 56), (8, 64, 300, 300)]

ANY: dict[str, Op] = {
    "sum(0)": lambda x: x.sum(0), "sum(-1)": lambda x: x.sum(-1), "sum": lambda x: x.sum(), "sum(1)": lambda x: x.sum(1),
    "sum(ends)": lambda x: x.sum((0, -1)), "mean(-2, -1)": lambda x: x.mean((-2, -1)), "amax(0)": lambda x: x.amax(0),
    "amax(-1)": lambda x: x.amax(-1), "argmax(0)": lambda x: x.argmax(0), "argmax(-1)": lambda x: x.argmax(-1),
    "max": lambda x: x.max(), "std(-1)": lambda x: x.std(-1), "var(0)": lambda x: x.var(0), "std": lambda x: x.std(),
    "norm": lambda x: x.norm(), "norm(-1)": lambda x: x.norm(dim=-1), "norm(0)": lambda x: x.norm(dim=0),
    "any(-1)": lambda x: (x > 3).any(-1), "logsumexp(-1)": lambda x: x.logsumexp(-1), "logsumexp(0)": lambda x: x.logsumexp(0),
    "softmax(-1)": lambda x: x.softmax(-1), "softmax(0)": lambda x: x.softmax(0), "softmax(1)": lambda x: x.softmax(1),
    "log_softmax(-1)": lambda x: x.log_softmax(-1), "cumsum(-1)": lambda x: x.cumsum(-1), "cumsum(0)": lambda x: x.cumsum(0),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]), "layer_norm of samples": lambda x: F.layer_norm(x, x.shape[1:]),
    "rms_norm": lambda x: F.rms_norm(x, x.shape[-1:]), "normalize(-1)": lambda x: F.normalize(x, dim=-1),
    "normalize(0)": lambda x: F.normalize(x, dim=0), "standardise": lambda x: (x - x.mean(0)) / (x.std(0) + 1e-5),
    "gelu": F.gelu, "transpose": lambda x: x.transpose(0, -1).contiguous(), "slice": lambda x: x[..., 1:] * 2,
    "cat(0)": lambda x: torch.cat([x, x * 2]), "cat(-1)": lambda x: torch.cat([x, x * 2], -1),
    "stack(-1)": lambda x: torch.stack([x, x + 1], -1), "roll": lambda x: x.roll(1, -1), "flip(0)": lambda x: x.flip(0),
    "flip(-1)": lambda x: x.flip(-1), "where": lambda x: torch.where(x > 0, x, x * 0.1),
    "times a column": lambda x: x * x[..., :1], "times a row": lambda x: x * x[:1],
    "cast": lambda x: x.half() if x.dtype == torch.float32 else x.float(),
    "pad": lambda x: F.pad(x, (1, 1)),
}  # fmt: skip
OF_MATRICES: dict[str, Op] = {
    "cross_entropy": lambda x: F.cross_entropy(x, torch.zeros(len(x), dtype=torch.int64, device=x.device)),
}
OF_IMAGES: dict[str, Op] = {
    "group_norm": lambda x: F.group_norm(x, 8), "instance_norm": F.instance_norm, "avg_pool": lambda x: F.avg_pool2d(x, 2),
    "max_pool": lambda x: F.max_pool2d(x, 3, 2, 1), "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
    "global pool": lambda x: F.adaptive_avg_pool2d(x, 1), "nearest": lambda x: F.interpolate(x, scale_factor=2.0),
    "bilinear": lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear"), "pixel_shuffle": lambda x: F.pixel_shuffle(x, 2),
}  # fmt: skip
TRAINED = ("softmax(-1)", "layer_norm", "layer_norm of samples", "std(-1)", "normalize(-1)", "logsumexp(-1)", "amax(-1)",
           "cumsum(-1)", "cat(-1)", "norm", "log_softmax(-1)", "rms_norm", "cross_entropy", "sum(0)", *OF_IMAGES)  # fmt: skip


def gradient(op: Op) -> Op:
    """The gradient of the sum of an op's squared results."""
    def run(x: Tensor) -> Tensor:
        leaf = x.detach().requires_grad_()
        out = op(leaf)
        return torch.autograd.grad(out.float().square().sum() if out.numel() > 1 else out, leaf)[0]

    return run


@functools.cache
def ops(rank: int) -> dict[str, Op]:
    """What is done to tensors of so many dimensions."""
    found = ANY | (OF_MATRICES if rank == 2 else {}) | (OF_IMAGES if rank == 4 else {})
    return found | {f"gradient of {name}": gradient(found[name]) for name in TRAINED if name in found}


@dataclass(frozen=True, slots=True)
class Case:
    op: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    def data(self) -> Tensor:
        return torch.randn(self.shape, device=DEVICE).to(self.dtype)

    def run(self, x: Tensor) -> Tensor:
        return ops(len(self.shape))[self.op](x)


def cases(seed: int, count: int, tiny: bool) -> list[Case]:
    """``count`` cases in an order that ``seed`` decides; ``tiny``: of shapes that a CPU gets through."""
    shapes = [tuple(min(size, 16) for size in shape) for shape in SHAPES] if tiny else SHAPES
    found = [Case(op, shape, dtype) for shape, dtype in itertools.product(shapes, (torch.float32, torch.bfloat16))
             for op in ops(len(shape))]  # fmt: skip
    return random.Random(seed).sample(found, min(count, len(found)))


def compiled(case: Case) -> None:
    """Runs the case once, so that its kernels are on disk."""
    x = case.data().to("lazysched")
    lazy_backend.mark_step()
    case.run(x)
    lazy_backend.mark_step(wait=True)


def measured(case: Case) -> dict[str, Any] | None:
    """Microseconds of both, and how far they are apart; None where eager mode takes longer than anybody would wait."""
    given = case.data()
    mine = given.to("lazysched")
    want = case.run(given)
    eager = min(gpu_seconds(lambda _: case.run(given), 3) for _ in range(2))
    if eager > LONGEST:
        return None

    def lazy(_: int) -> Tensor:
        result = case.run(mine)
        lazy_backend.mark_step()
        return result

    got = lazy(0).to(DEVICE)
    lazy(1)
    ours = min(gpu_seconds(lazy, 3, 3e-4) for _ in range(2))
    row = {"op": case.op, "shape": case.shape, "dtype": str(case.dtype)[6:], "eager": eager * 1e6, "ours": ours * 1e6,
           "apart": distance(got, want)}  # fmt: skip
    if not row["apart"] <= APART:
        exact = case.run(given.double())
        row["ours from float64"], row["eager from float64"] = distance(got, exact), distance(want, exact)
    return row


def distance(one: Tensor, other: Tensor) -> float:
    """Relative to the other's norm. Where both are the same infinity or no number, they agree."""
    alike = (one == other) | (one.isnan() & other.isnan())
    apart = (one.double() - other.double()).masked_fill(alike, 0.0)
    return float(apart.norm() / (other.double().nan_to_num(0.0, 0.0, 0.0).norm() + 1e-30))


def wrong(row: dict[str, Any]) -> bool:
    """Is ours further from float64 than rounding in another order explains?"""
    return "ours from float64" in row and not row["ours from float64"] <= max(3 * row["eager from float64"], APART)


def report(rows: Sequence[dict[str, Any]]) -> None:
    if not rows:
        print("No case was measured: --seconds is too short for the first, or eager mode is too slow at those chosen.")
        return
    shown = slower_or_wrong(rows, _ratio, wrong)
    header = ["op", "shape", "dtype", "eager, us", "lazysched, us", "ratio", "apart", ""]
    print(table(header, [(row["op"], "x".join(map(str, row["shape"])), row["dtype"], f"{row['eager']:.1f}", f"{row['ours']:.1f}",
                          f"{_ratio(row):.2f}", f"{row['apart']:.1e}", "WRONG" if wrong(row) else "")
                         for row in shown]))  # fmt: skip
    print(summary(rows, _ratio, "case", "eager mode", len(shown)))


def _ratio(row: dict[str, Any]) -> float:
    return row["ours"] / row["eager"]


def main(words: Sequence[str] | None = None) -> int:
    asked = options(__doc__, words, "case", 120.0, 400)
    chosen = cases(asked.seed, asked.count, asked.tiny)
    rows = rows_of("benchmarks.shapes", "case", asked, chosen, compiled, measured)
    return told("shapes", "cases", rows, report, wrong, asked.output)


if __name__ == "__main__":
    sys.exit(main())
