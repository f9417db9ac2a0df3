"""A library that answers like cuBLASLt and multiplies on the CPU, by what it is told alone: descriptors, layouts, addresses."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, Iterator, Sequence

import pytest
import torch

from codegen import cublaslt, products, triton_engine
from codegen.cublaslt import Library, Multiplier
from codegen.kernel import Algorithm, MatMul, Plan
from codegen.product_bench import Outcome, compared, sizes_of
from lazy_backend import flush

TYPES = {2: torch.float16, 14: torch.bfloat16}
NOT_SUPPORTED = 15


@dataclass
class Handle:
    """What was created, with which arguments, and the attributes that were set, as bytes."""

    kind: str
    arguments: tuple[int, ...] = ()
    attributes: dict[int, bytes] = field(default_factory=dict)

    def number(self, attribute: int, default: int = 0) -> int:
        return int.from_bytes(self.attributes.get(attribute, default.to_bytes(8, "little")), "little")


@dataclass
class Called:
    """A product as it was asked for. ``layouts``: of A, B, C, D as (type, rows, columns, leading dimension)."""

    words: tuple[int, ...]
    layouts: tuple[tuple[int, ...], ...]
    transposed: tuple[int, int]
    alpha: float
    beta: float
    bias: int
    workspace: tuple[int, int]
    stream: int


class FakeCublasLt:
    """Suggests ``count`` algorithms, of which those numbered in ``wrong`` leave something else, those in ``refused`` are
    refused at the call, those in ``unable`` have an error for a state, and those in ``forgetful`` add to nothing."""

    def __init__(self, count: int = 3, wrong: Sequence[int] = (), refused: Sequence[int] = (),
                 unable: Sequence[int] = (), forgetful: Sequence[int] = ()) -> None:
        self.count, self.wrong, self.refused, self.unable, self.forgetful = count, wrong, list(refused), unable, forgetful
        self.handles: dict[int, Handle] = {}
        self.calls: list[Called] = []
        self.wishes: list[Handle] = []
        self._numbers = itertools.count(1)

    def cublasLtGetVersion(self) -> int:
        return 130100

    def __getattr__(self, name: str) -> Any:
        if name.endswith("Create"):
            return lambda made, *arguments: self._create(name, made, arguments)
        if name.endswith("Destroy"):
            return lambda handle: int(self.handles.pop(handle.value, None) is None)
        if name.endswith("SetAttribute"):
            return self._put
        raise AttributeError(name)

    def _create(self, name: str, made: Any, arguments: Sequence[Any]) -> int:
        made._obj.value = number = next(self._numbers)
        self.handles[number] = Handle(name, tuple(argument.value for argument in arguments))
        return 0

    def _put(self, handle: Any, attribute: Any, value: Any, size: Any) -> int:
        data = bytes(value._obj)
        assert len(data) == size.value
        self.handles[handle.value].attributes[attribute.value] = data
        return 0

    def cublasLtMatmulAlgoGetHeuristic(self, *arguments: Any) -> int:
        _, product, *layouts, wishes, most, found, count = arguments
        assert len(layouts) == 4 and most.value == len(found)
        assert self.handles[product.value].number(7, 1) == 1 or self.handles[product.value].number(8) % 16 == 0
        self.wishes.append(self.handles[wishes.value])
        for index in range(min(self.count, most.value)):
            found[index].words[0] = index + 1
            found[index].workspace = 256 * index
            found[index].state = NOT_SUPPORTED if index + 1 in self.unable else 0
        count._obj.value = min(self.count, most.value)
        return 0

    def cublasLtMatmul(self, handle: Any, product: Any, alpha: Any, a: Any, la: Any, b: Any, lb: Any, beta: Any, c: Any, lc: Any,
                       d: Any, ld: Any, words: Any, workspace: Any, nbytes: Any, stream: Any) -> int:  # fmt: skip
        if words[0] in self.refused:
            return NOT_SUPPORTED
        told = self.handles[product.value]
        layouts = tuple(self.handles[one.value].arguments for one in (la, lb, lc, ld))
        over = (told.number(3), told.number(4))
        self.calls.append(Called(tuple(words), layouts, over, alpha._obj.value, beta._obj.value, told.number(8),
                                 (workspace.value or 0, nbytes.value), stream.value or 0))
        assert told.arguments == (68, 0) and c.value == d.value and layouts[2] == layouts[3]
        first, second = (column_major(address.value, layout) for address, layout in zip((a, b), layouts))
        made = (first.t() if over[0] else first).float() @ (second.t() if over[1] else second).float() * alpha._obj.value
        epilogue, result = told.number(7, 1), column_major(d.value, layouts[3])
        if epilogue & 4:
            made += at(told.number(8), result.dtype, result.shape[0]).float()[:, None]
        made = made.relu() if epilogue & 2 else made
        if beta._obj.value and words[0] not in self.forgetful:  # else what is there may be NaN
            made += beta._obj.value * result.float()
        result.copy_(made * 1.5 if words[0] in self.wrong else made)
        return 0


def at(address: int, dtype: torch.dtype, count: int) -> torch.Tensor:
    return torch.frombuffer((ctypes.c_char * (count * dtype.itemsize)).from_address(address), dtype=dtype)


def column_major(address: int, layout: tuple[int, ...]) -> torch.Tensor:
    kind, rows, columns, apart = layout
    return torch.as_strided(at(address, TYPES[kind], (columns - 1) * apart + rows), (rows, columns), (1, apart))


def launch(multiplier: Multiplier, algorithm: Algorithm, tensors: Sequence[torch.Tensor], alpha: float) -> None:
    """`products.launch` without a stream."""
    left, right, made, *bias = tensors
    multiplier.run(algorithm, left.data_ptr(), right.data_ptr(), made.data_ptr(), bias[0].data_ptr() if bias else 0, alpha, 0, 0)


class Measured:
    """Stands for a GPU's clock: ``seconds`` of ATen's call and of each suggestion, which run on the CPU once."""

    def __init__(self, *seconds: float) -> None:
        self.seconds, self.asked = seconds, list[MatMul]()

    def __call__(self, product: MatMul, algorithms: Sequence[Algorithm], multiplier: Multiplier) -> Outcome:
        self.asked.append(product)
        pieces = [torch.zeros(size, dtype=torch.uint8) for size in sizes_of(product, algorithms)]
        return compared(product, algorithms, multiplier, pieces, self.times, 0)

    def times(self, ready: Sequence[Sequence[Callable[[], Any]]], rounds: int) -> list[float]:
        for calls in ready:
            calls[0]()
        return [self.seconds[index] * len(calls) for index, calls in enumerate(ready)]


@contextlib.contextmanager
def multiplying() -> Iterator[tuple[FakeCublasLt, list[str]]]:
    """The triton engine runs every product by the library's second suggestion, as if steps replayed: the library, and the names
    of the ops that it stands for."""
    plain, functions, chosen = triton_engine.plan, FakeCublasLt(), list[str]()

    def plan(graph: Any, **given: Any) -> Plan:
        measured = Measured(3.0, 2.0, 1.0, 2.0)
        made = products.with_algorithms(plain(graph, **given), Path(tempfile.mkdtemp()), 0, measured)
        chosen.extend(step.node.name for step in made.steps if getattr(step, "algorithm", None))
        return made

    with pytest.MonkeyPatch.context() as patch, in_place_of(functions):
        patch.setattr(triton_engine, "plan", plan)
        patch.setattr(flush, "replays", lambda: True)
        yield functions, chosen


@contextlib.contextmanager
def in_place_of(functions: FakeCublasLt) -> Iterator[Library]:
    """``functions`` are the library of every device, and products as small as tests' are worth a measurement."""
    library = Library(functions)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cublaslt, "library", lambda device: library)
        patch.setattr(products, "machine_name", lambda device: "a GPU")
        patch.setattr(products, "launch", launch)
        patch.setattr(products, "SMALLEST", 1)
        yield library
