"""Times a library's algorithms for one matrix product against ATen's own call, and checks their results. Imports torch,
`ir_nodes.ops` and codegen's `bench` and library.

Operands are random, for a GPU that multiplies zeros takes less power and runs faster. They lie in scratch of the product's own
sizes, which PyTorch does not count and which is given back at the end. A product that is added to what is there would grow from
call to call, until float16 overflows or bfloat16 rounds it away: while it is timed, every other call subtracts it.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass, field
from typing import Any, Callable, Mapping, Sequence

import torch

from codegen import bench
from codegen.bench import Bench
from codegen.contest import ROUNDS
from codegen.cublaslt import LibraryError, Multiplier
from codegen.cuda_driver import DriverError
from codegen.kernel import Algorithm, MatMul
from ir_nodes import ops

ATEN = "ATen"
WRONG = 1e-2
"""How far a result may be from ATen's, as a part of its norm: several times what rounding to bfloat16 makes."""
BURST = 5e-4  # seconds; so long a row of calls hides what launching one takes
MOST = 16  # calls in one
FINALISTS = 8  # algorithms that are measured several times

Times = Callable[[Sequence[Sequence[Callable[[], Any]]], int], list[float]]


@dataclass(frozen=True, slots=True)
class Outcome:
    """Median ``seconds`` by name, of ATen's call first, None for an algorithm that was ``dropped``, and why; without any ``why``
    tells why nothing was measured."""

    algorithms: Sequence[Algorithm] = ()
    seconds: dict[str, float | None] = field(default_factory=dict)
    dropped: dict[str, str] = field(default_factory=dict)
    why: str = ""


def on_gpu(device: int) -> Callable[[MatMul, Sequence[Algorithm], Multiplier], Outcome]:
    """What measures on CUDA device ``device``."""

    def measure(product: MatMul, algorithms: Sequence[Algorithm], multiplier: Multiplier) -> Outcome:
        sizes = sizes_of(product, algorithms)
        nbytes = bench.pieces_bytes(sizes)
        if not algorithms:
            return Outcome(why="cuBLASLt suggests nothing for it")
        if torch.cuda.is_current_stream_capturing() or nbytes > bench.room(device):
            return Outcome(why="there is no room to measure it now")
        try:
            with Bench(device, nbytes) as timed:
                stream = torch.cuda.current_stream().cuda_stream
                return compared(product, algorithms, multiplier, timed.pieces(sizes), timed.times, stream)
        except DriverError as error:
            return Outcome(why=f"it could not be measured: {error}")

    return measure


def sizes_of(product: MatMul, algorithms: Sequence[Algorithm]) -> list[int]:
    """Bytes of both factors, two results, a bias and a workspace."""
    rows, columns, inner, item = product.rows, product.columns, product.inner, product.dtype.itemsize
    (left_over, left_apart), (right_over, right_apart) = product.left, product.right
    elements = ((inner if left_over else rows) * left_apart, (columns if right_over else inner) * right_apart,
                rows * product.apart, rows * product.apart, columns)
    return [*(item * n for n in elements), max((one.workspace for one in algorithms), default=0)]


def compared(product: MatMul, algorithms: Sequence[Algorithm], multiplier: Multiplier, pieces: Sequence[torch.Tensor],
             times: Times, stream: int) -> Outcome:
    """What ``times`` says of ATen's call and of the algorithms whose results are ATen's but for rounding. ``pieces``: memory of
    `sizes_of` bytes."""
    *memory, workspace = pieces
    left, right, wanted, made, bias = matrices(product, memory)
    by_aten = aten_call(product, left, right, bias)
    prepare(product, wanted)
    by_aten(out=wanted, alpha=1.0)
    dropped: dict[str, str] = {}
    contest: dict[str, Callable[[], Any]] = {ATEN: repeatable(product, functools.partial(by_aten, out=made))}
    for algorithm in algorithms:
        run = functools.partial(multiplier.run, algorithm, left.data_ptr(), right.data_ptr(), made.data_ptr(),
                                bias.data_ptr() if product.bias else 0, workspace=workspace.data_ptr(), stream=stream)
        prepare(product, made)
        why = why_dropped(functools.partial(run, alpha=1.0), made, wanted)
        if why:
            dropped[str(algorithm.number)] = why
        else:
            contest[str(algorithm.number)] = repeatable(product, run)
    prepare(product, made)
    (once,) = times([[contest[ATEN]]], 1)
    burst = max(1, min(MOST, round(BURST / max(once, 1e-6))))
    for name in slow(contest, times, burst):
        del contest[name]
        dropped[name] = f"at first sight {FINALISTS} others are faster"
    found = dict(zip(contest, times([[call] * burst for call in contest.values()], ROUNDS)))
    names = [ATEN, *(str(algorithm.number) for algorithm in algorithms)]
    return Outcome(algorithms, {name: found[name] / burst if name in found else None for name in names}, dropped)


def slow(contest: Mapping[str, Callable[[], Any]], times: Times, burst: int) -> list[str]:
    """Those that are not worth more than one measurement. ATen's call and the library's first suggestion always are."""
    if len(contest) <= FINALISTS + 2:
        return []
    found = dict(zip(contest, times([[call] * burst for call in contest.values()], 1)))
    return sorted(list(contest)[2:], key=found.__getitem__)[FINALISTS:]


def prepare(product: MatMul, result: torch.Tensor) -> None:
    """Fill the memory of a result, each time alike: with numbers as large as those that are added to them, or with what shows
    where nothing is written."""
    if product.onto:
        result.normal_(0.0, product.inner**0.5, generator=torch.Generator(result.device).manual_seed(1))  # not the program's
    else:
        result.fill_(torch.nan)


def repeatable(product: MatMul, run: Callable[..., Any]) -> Callable[[], Any]:
    """``run``, which takes ``alpha``, as it can be called any number of times and finds numbers of the same size."""
    signs = itertools.cycle((1.0, -1.0) if product.onto else (1.0,))
    return lambda: run(alpha=next(signs))


def why_dropped(run: Callable[[], None], made: torch.Tensor, wanted: torch.Tensor) -> str:
    """Why what ``run`` leaves in ``made`` is not what is ``wanted``; "": it is. The difference takes the place of ``made``."""
    try:
        run()
    except LibraryError as error:
        return str(error)
    off = float(norm(made.sub_(wanted))) / max(float(norm(wanted)), 1e-30)
    return "" if off <= WRONG else f"its result is off by {off:.2g} of ATen's norm"


def norm(matrix: torch.Tensor) -> torch.Tensor:
    return torch.linalg.vector_norm(matrix, dtype=torch.float32)


def matrices(product: MatMul, memory: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The two factors, two results and the bias, in ``memory`` of `sizes_of` bytes; what is read is random."""
    (left_over, left_apart), (right_over, right_apart) = product.left, product.right
    rows, columns, inner, apart = product.rows, product.columns, product.inner, product.apart
    shapes = (((rows, inner), (1, left_apart) if left_over else (left_apart, 1)),
              ((inner, columns), (1, right_apart) if right_over else (right_apart, 1)),
              ((rows, columns), (apart, 1)), ((rows, columns), (apart, 1)), ((columns,), (1,)))
    typed = [piece.view(product.dtype) for piece in memory]
    draws = torch.Generator(memory[0].device).manual_seed(0)  # not the program's
    for index in (0, 1, 4):
        typed[index].normal_(generator=draws)
    return [torch.as_strided(piece, *shape) for piece, shape in zip(typed, shapes)]


def aten_call(product: MatMul, left: torch.Tensor, right: torch.Tensor, bias: torch.Tensor) -> Callable[..., Any]:
    """ATen's own call; it takes ``out`` and ``alpha``, which is 1 where nothing is added."""
    plain, onto = ops.overload("aten::mm.out"), ops.overload("aten::addmm_")
    if product.onto:
        return lambda out, alpha: onto(out, left, right, alpha=alpha)
    if not product.bias:
        return lambda out, alpha: plain(left, right, out=out)
    target = "aten::_addmm_activation.out" if product.relu else "aten::addmm.out"
    return functools.partial(ops.overload(target), bias, left, right)
