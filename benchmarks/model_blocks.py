"""How the programs of `benchmarks.blocks` are described. Imports torch only.

Each is a function of tensors; its gradients are asked for with respect to every input that is ``normal``, with random tangents.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Program = Callable[..., "Tensor | tuple[Tensor, ...]"]
HALF, FULL = torch.bfloat16, torch.float32


@dataclass(frozen=True)
class Input:
    """``kind``: ``normal`` random numbers; ``given`` the same without a gradient; ``uniform`` those of (0, 1), without one;
    ``mask`` booleans; ``below`` indices below ``bound``."""

    shape: tuple[int, ...]
    dtype: torch.dtype = HALF
    kind: str = "normal"
    bound: int = 0


@dataclass(frozen=True)
class Block:
    name: str
    program: Program
    inputs: tuple[Input, ...]


Named = Callable[[Program], Program]


def several() -> tuple[list[Block], Callable[..., Named]]:
    """A list of blocks, and what a program is decorated with, its inputs given, to be one of them by its name."""
    found: list[Block] = []

    def block(*inputs: Input) -> Named:
        def named(program: Program) -> Program:
            found.append(Block(program.__name__, program, inputs))
            return program

        return named

    return found, block


def half(*shape: int) -> Input:
    return Input(shape)


def full(*shape: int) -> Input:
    return Input(shape, FULL)


def given(*shape: int, dtype: torch.dtype = HALF) -> Input:
    return Input(shape, dtype, "given")


def uniform(*shape: int, dtype: torch.dtype = FULL) -> Input:
    return Input(shape, dtype, "uniform")


def mask(*shape: int) -> Input:
    return Input(shape, torch.bool, "mask")


def below(bound: int, *shape: int) -> Input:
    return Input(shape, torch.int64, "below", bound)
