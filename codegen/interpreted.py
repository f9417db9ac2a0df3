"""Runs a plan's kernels on CPU memory. Imports torch, `ir_nodes` and codegen's kernel modules."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Callable, Mapping, MutableMapping, Sequence

import torch

from codegen.kernel import ExternStep, KernelArg, KernelStep, Offset, Plan, Pointer, Scalar, Seed, Size, Temporary
from codegen.triton_compile import interpret

Interpreted = Callable[[tuple[int, int, int], Sequence[Any]], None]
Memory = Mapping[int, torch.Tensor]
"""Storage bytes (uint8[nbytes]) by buffer index."""


def resolve(arg: KernelArg, memory: Memory, scratch: MutableMapping[int, torch.Tensor], scalars: Sequence[Any]) -> Any:
    """What the interpreter takes for ``arg``: a tensor whose first element is the one addressed, or a number."""
    if isinstance(arg, Pointer):
        if isinstance(arg.source, Temporary):
            made = scratch.setdefault(arg.source.id, torch.empty(max(arg.source.nbytes, 1), dtype=torch.uint8))
            return made[arg.byte_offset :]
        return memory[arg.source.buffer.index][arg.byte_offset :]
    if isinstance(arg, Scalar):
        return float(scalars[arg.index]) if arg.dtype.is_floating_point else int(scalars[arg.index])
    if isinstance(arg, Size):
        return arg.value
    return draw(arg, memory[arg.generator.index].view(torch.int64))


def draw(arg: Seed | Offset, state: torch.Tensor) -> int:
    """The seed, or the offset, which moves on; ``state`` is int64[2] as in `torch.cuda.get_rng_state`: seed and offset."""
    if isinstance(arg, Seed):
        return int(state[0])
    before = int(state[1])
    state[1] += arg.increment
    return before


def launch(step: KernelStep, kernel: Interpreted, memory: Memory, scratch: MutableMapping[int, torch.Tensor],
           scalars: Sequence[Any]) -> None:
    """Run ``step``, whose kernel has been loaded as ``kernel``."""
    kernel(step.grid, [resolve(arg, memory, scratch, scalars) for arg in step.args])


def run_kernel(step: KernelStep, memory: Memory, scratch: MutableMapping[int, torch.Tensor], scalars: Sequence[Any],
               cache_dir: Path) -> None:
    """Load and run one launch. Raises KernelCompileError."""
    launch(step, interpret(step.kernel, cache_dir), memory, scratch, scalars)


def run_plan_interpreted(plan: Plan, memory: Memory, scalars: Sequence[Any], cache_dir: Path,
                         run_extern: Callable[[ExternStep], None]) -> None:
    """Run every step in order; ``run_extern`` executes the nodes that ATen runs, on the same memory."""
    scratch: dict[int, torch.Tensor] = {}
    for step in plan.steps:
        if isinstance(step, KernelStep):
            run_kernel(step, memory, scratch, scalars, cache_dir)
        else:
            run_extern(step)
