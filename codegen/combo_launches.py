"""As which launches steps run that share one. Imports codegen's kernel modules.

Steps of one kernel are a lane of it each; lanes share a launch as far as its arguments have room.
"""

from __future__ import annotations

from typing import Hashable, Sequence

from codegen.combo_source import MAX_BYTES, MAX_LANES, MOST_LARGE, ComboWriter, Lane, is_large, lanes_of, pieces
from codegen.kernel import ExternStep, KernelStep, Offset, Seed

Step = KernelStep | ExternStep
KernelKey = tuple[str, str, Hashable, Hashable, Hashable]
"""Name, source, signature, what is divisible by 16, blocks and warps."""


def kernel_key(step: Step) -> KernelKey | None:
    """Equal for steps that one lane can run; None for those that no combo can."""
    if isinstance(step, ExternStep) or step.grid[1:] != (1, 1) or 8 * len(step.args) + 16 > MAX_BYTES:
        return None
    kernel = step.kernel
    if kernel.cluster > 1:
        return None
    draws = any(isinstance(arg, (Seed, Offset)) for arg in step.args)  # a generator moves on by one launch at a time
    if draws or pieces(kernel.source, kernel.name) is None:
        return None
    blocks = None if step.flat else (kernel.constexprs, kernel.num_warps)
    return (kernel.name, kernel.source, kernel.signature, kernel.divisible, blocks)


def launches(steps: Sequence[Step]) -> list[Step]:
    """Steps that run together in as few launches as arguments allow."""
    if len(steps) == 1:
        return list(steps)
    by_kernel: dict[KernelKey | None, list[KernelStep]] = {}
    for step in steps:
        assert isinstance(step, KernelStep)
        by_kernel.setdefault(kernel_key(step), []).append(step)
    lanes = [lane for same in by_kernel.values() for lane in lanes_of(same)]
    return [packed[0].steps[0] if len(packed) == len(packed[0].steps) == 1 else ComboWriter(packed).step()
            for packed in pack(lanes)]


def pack(lanes: Sequence[Lane]) -> list[list[Lane]]:
    """The lanes, in order, by launch."""
    packed: list[list[Lane]] = []
    for lane in lanes:
        together = [*(packed[-1] if packed else []), lane]
        many = any(is_large(one.steps[0]) for one in together) and sum(len(one.steps) for one in together) > MOST_LARGE
        if packed and not many and len(together) <= MAX_LANES and sum(one.nbytes for one in together) <= MAX_BYTES:
            packed[-1] = together
        else:
            packed.append([lane])
    return packed
