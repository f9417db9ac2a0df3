"""What a fused kernel is and what launching it takes: plain descriptions, no behaviour. Imports torch and `ir_nodes`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Callable

import torch

from ir_nodes.node import Buffer, Node, Value


@dataclass(frozen=True, slots=True)
class Temporary:
    """Scratch memory that one step of the plan writes and a later one reads; no storage owns it."""

    id: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Pointer:
    """The address of ``source``'s buffer plus ``byte_offset``; buffers start on 16-byte boundaries."""

    source: Value | Temporary
    byte_offset: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Scalar:
    """The graph's number input ``index``, converted to ``dtype`` (float32, float64 or int64)."""

    index: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Size:
    """A size, stride or count known when the kernel is planned; passed by value so that it is not compiled in."""

    value: int


@dataclass(frozen=True, slots=True)
class Seed:
    """The seed of the Philox generator whose state is ``generator``, read at the launch (int64)."""

    generator: Buffer


@dataclass(frozen=True, slots=True)
class Offset:
    """The generator's offset at the launch (int64, a multiple of 4), which the launch moves on by ``increment``."""

    generator: Buffer
    increment: int


WAIT = "cuda.gdc_wait()"
"""What a kernel begins with whose programs may be placed before the kernel before it has ended."""

KernelArg = Pointer | Scalar | Size | Seed | Offset


@dataclass(frozen=True, slots=True)
class Kernel:
    """Source of one Triton kernel with everything that selects its binary; equal kernels share one compilation.

    ``source`` is a whole Python file that defines ``name``. ``signature`` gives each run-time argument its Triton type in
    order ("*bf16", "i32", "i64", "fp32", "fp64"); ``constexprs`` follow them in the function's parameters. ``divisible``
    names the arguments that are multiples of 16. ``registers``: how many a thread may have, 0 where the compiler chooses.
    ``cluster``: so many programs, which follow one another, run at the same time and reach each other's shared memory.
    """

    name: str
    source: str
    signature: tuple[tuple[str, str], ...]
    constexprs: tuple[tuple[str, int], ...]
    divisible: tuple[str, ...]
    num_warps: int
    registers: int = 0
    cluster: int = 1

    @property
    def waits(self) -> bool:
        """Does it wait for the kernel before it by itself, and may be launched while that still runs?"""
        return WAIT in self.source


@dataclass(frozen=True, slots=True, eq=False)
class KernelStep:
    """One launch. ``args`` match ``kernel.signature``; ``elided`` are values that live in registers only.

    ``reads`` and ``writes`` are the values (and temporaries) whose memory the kernel loads and stores. ``retile`` makes the same
    launch under a tuning with such changes ("lane=8"), or None where these change nothing; it is None where there is no choice.
    ``flat``: the elements that programs walk by one index, block by block; 0 where they do not. ``reuses``: (written, read) where
    each program reads all that it needs of the one's elements before it writes the same elements of the other, and nobody else
    touches them: both may share memory. ``picks``: bytes of values that are touched only where index tensors say.
    """

    kernel: Kernel
    grid: tuple[int, int, int]
    args: tuple[KernelArg, ...]
    nodes: tuple[Node, ...]
    elided: tuple[Value, ...]
    reads: tuple[Value | Temporary, ...]
    writes: tuple[Value | Temporary, ...]
    retile: Callable[[str], KernelStep | None] | None = None
    flat: int = 0
    reuses: tuple[tuple[Value, Value], ...] = ()
    picks: tuple[tuple[Value, int], ...] = ()

    def bytes_of(self, item: Value | Temporary) -> int:
        """Bytes of ``item`` that a launch moves, at most."""
        if isinstance(item, Temporary):
            return item.nbytes
        return dict(self.picks).get(item, item.buffer.nbytes)


@dataclass(frozen=True, slots=True)
class MatMul:
    """A product as a library is asked for it: (rows, inner) times (inner, columns), plus a ``bias`` for each column, of which
    ``relu`` leaves only what is positive. ``left``, ``right``: whether what lies in memory row by row is the transposed factor,
    and the elements from one such row to the next; ``apart``: the same of the result, which is never transposed. ``onto``: the
    product, without a bias, is added to what lies there."""

    dtype: torch.dtype
    rows: int
    columns: int
    inner: int
    left: tuple[bool, int]
    right: tuple[bool, int]
    apart: int
    bias: bool = False
    relu: bool = False
    onto: bool = False

    @property
    def flops(self) -> int:
        return 2 * self.rows * self.columns * self.inner

    def __str__(self) -> str:
        return f"{self.rows} x {self.columns} x {self.inner}" + (" onto what is there" if self.onto else "")


@dataclass(frozen=True, slots=True)
class Algorithm:
    """The ``number``-th way, from 1, that cuBLASLt suggested for ``product``. ``words``: the algorithm, which only the same
    version of the library understands; ``workspace``: bytes that it needs."""

    product: MatMul
    number: int
    words: tuple[int, ...]
    workspace: int


@dataclass(frozen=True, slots=True, eq=False)
class ExternStep:
    """One node that ATen runs; ``reason`` says why no kernel was made of it. ``algorithm``: the library's way to do it that was
    measured to be faster than ATen's."""

    node: Node
    reason: str
    algorithm: Algorithm | None = None


@dataclass(frozen=True, slots=True)
class Refusal:
    """Two nodes that could not share a kernel, and why."""

    first: Node
    second: Node
    reason: str

    def __str__(self) -> str:
        return f"{self.first.target} (#{self.first.index}) and {self.second.target} (#{self.second.index}): {self.reason}"


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """Steps in an order that keeps every dependency, with the scratch memory they share and what was not fused.

    ``needs``: for each step the positions of steps that have to run before it; others follow from these.
    """

    steps: tuple[KernelStep | ExternStep, ...]
    temporaries: tuple[Temporary, ...]
    refusals: tuple[Refusal, ...]
    needs: tuple[tuple[int, ...], ...] = ()
