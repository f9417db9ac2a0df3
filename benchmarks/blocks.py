"""Parts of well-known models and losses, with their gradients, beside torch.compile. Imports torch, `benchmarks.common`,
`.contest`, `.drawn`, `.shapes` and the blocks.

    python -m benchmarks.blocks --seconds 450

What stands between the products of models that people train (`benchmarks.transformer_blocks`, `.image_blocks`, `.loss_blocks`,
`.sequence_blocks`, `.field_blocks`, `.update_blocks`, `.language_blocks`, `.picture_blocks`, `.science_blocks`,
`.number_blocks`, `.window_blocks`): microseconds on the GPU alone, launches queued, contestants in turns. Both
compile in ``--workers`` processes first. Results are compared with float64's, from which eager mode's may be as far.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from benchmarks.common import table
from benchmarks.contest import Contest, ratio
from benchmarks.drawn import options, rows_of, summary, told
from benchmarks.field_blocks import FIELDS
from benchmarks.image_blocks import IMAGES
from benchmarks.language_blocks import LANGUAGE
from benchmarks.loss_blocks import LOSSES
from benchmarks.model_blocks import Block, Input
from benchmarks.number_blocks import NUMBERS
from benchmarks.picture_blocks import PICTURES
from benchmarks.science_blocks import SCIENCES
from benchmarks.sequence_blocks import SEQUENCES
from benchmarks.shapes import DEVICE, wrong
from benchmarks.transformer_blocks import TRANSFORMERS
from benchmarks.update_blocks import UPDATES
from benchmarks.window_blocks import WINDOWS

BLOCKS = [*TRANSFORMERS, *IMAGES, *LOSSES, *SEQUENCES, *FIELDS, *UPDATES, *LANGUAGE, *PICTURES, *SCIENCES, *NUMBERS, *WINDOWS]
FLOATS = (torch.bfloat16, torch.float16, torch.float32)


class Exact(TorchFunctionMode):
    """Computes in float64 whatever precision the program asks for."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.Tensor.float:
            return args[0].double()
        args = [torch.float64 if one in FLOATS else one for one in args] if function is torch.Tensor.to else args
        named = {key: torch.float64 if key == "dtype" and one in FLOATS else one for key, one in (kwargs or {}).items()}
        return function(*args, **named)


def made(given: Input, generator: torch.Generator, device: str = "cpu") -> Tensor:
    if device == "meta":
        return torch.empty(given.shape, dtype=given.dtype, device=device)
    if given.kind == "below":
        return torch.randint(given.bound, given.shape, generator=generator)
    if given.kind == "mask":
        return torch.rand(given.shape, generator=generator) < 0.7
    if given.kind == "uniform":
        return torch.rand(given.shape, generator=generator).clamp(1e-3, 1 - 1e-3).to(given.dtype)
    return torch.randn(given.shape, generator=generator).to(given.dtype)


class Trained:
    """The block and the gradients of all inputs that are ``normal``: what `Contest` runs. Inputs are its own, then tangents."""

    def __init__(self, block: Block) -> None:
        self._block = block

    def inputs(self, device: str) -> list[Tensor]:
        generator = torch.Generator().manual_seed(0)
        given = [made(one, generator, device).to(device) for one in self._block.inputs]
        like = [Input(tuple(one.shape), one.dtype) for one in self._results(self._leaves(given)) if one.requires_grad]
        return [*given, *(made(one, generator, device).to(device) for one in like)]

    def _leaves(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        return [one.detach().requires_grad_(spec.kind == "normal") for one, spec in zip(inputs, self._block.inputs)]

    def _results(self, given: Sequence[Tensor]) -> list[Tensor]:
        results = self._block.program(*given)
        return list(results) if isinstance(results, tuple) else [results]

    def __call__(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        given = self._leaves(inputs)
        results = self._results(given)
        trained, wanted = ([one for one in some if one.requires_grad] for some in (results, given))
        gradients = torch.autograd.grad(trained, wanted, inputs[len(given) :], allow_unused=True) if trained else ()
        return [one.detach() for one in (*results, *gradients) if one is not None]


def contest(block: Block) -> Contest:
    run = Trained(block)
    return Contest(run, run.inputs(DEVICE))


def compiled(block: Block) -> None:
    contest(block).first()


def exact(block: Block, device: str = DEVICE) -> list[Tensor]:
    run = Trained(block)
    inputs = [one.double() if one.is_floating_point() else one for one in run.inputs(device)]
    with Exact():
        return run(inputs)


def measured(block: Block) -> dict[str, Any] | None:
    both = contest(block)
    return None if both.left_out(block.name) else {"block": block.name, **both.row(exact(block))}


def report(rows: Sequence[dict[str, Any]]) -> None:
    if not rows:
        print("No block was measured: --seconds is too short for the first.")
        return
    print(table(["block", "lazysched, us", "torch.compile, us", "ratio", "apart", ""],
                [(row["block"], f"{row['lazysched']:.1f}", f"{row['compile']:.1f}", f"{ratio(row):.2f}", f"{row['apart']:.1e}",
                  "WRONG" if wrong(row) else "") for row in sorted(rows, key=ratio)]))  # fmt: skip
    print(summary(rows, ratio, "block", "torch.compile"))


def main(words: Sequence[str] | None = None) -> int:
    asked = options(__doc__, words, "block", 200.0, len(BLOCKS))
    rows = rows_of("benchmarks.blocks", "block", asked, BLOCKS[asked.seed : asked.seed + asked.count], compiled, measured)
    return told("blocks", "blocks", rows, report, wrong, asked.output)


if __name__ == "__main__":
    sys.exit(main())
