"""Scratch memory and arguments of launches that are timed, and what the driver refuses. Imports `codegen` and tests' parts."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import pytest
import torch
from graphs import kernels, record

from codegen import bench, cuda_driver
from codegen.cuda_driver import DriverError
from codegen.fuse import plan
from codegen.kernel import KernelStep, Pointer, Size

BASE = 1 << 20


def steps() -> list[KernelStep]:
    """A reduction that is split: the second launch reads what the first writes to scratch."""
    recording, _ = record(lambda x: (x * 0.5).sum(), torch.ones(512, 1024))
    return kernels(plan(recording.graph))


def test_launches_share_memory_as_the_plan_says_and_nothing_else() -> None:
    both = steps()
    places = bench.memory_places(both, BASE)
    sizes = {1024 * 512 * 4, 4} | {value.nbytes for step in both for value in step.writes if not hasattr(value, "buffer")}
    ends = sorted(places.values())
    assert len(both) == 2 and len(places) == len(sizes) == 3 and ends[0] == BASE
    assert all(place % 512 == 0 for place in ends) and len(set(ends)) == 3
    assert bench.scratch_bytes(both) >= sum(sizes)
    first, second = (bench.arguments(step, places) for step in both)
    written = [arg.value for arg, told in zip(first, both[0].args) if isinstance(told, Pointer) and told.source in both[0].writes]
    read = [arg.value for arg, told in zip(second, both[1].args) if isinstance(told, Pointer) and told.source in both[1].reads]
    assert written == read


def test_arguments_have_the_signatures_types_and_the_plans_sizes() -> None:
    (step,) = kernels(plan(record(lambda x: x * 0.5, torch.ones(100))[0].graph))
    assert bench.can_time(step)
    kinds = {"i32": ctypes.c_int32, "fp32": ctypes.c_float, "fp64": ctypes.c_double}
    for made, told, (_, kind) in zip(bench.arguments(step, bench.memory_places([step], BASE)), step.args, step.kernel.signature):
        assert isinstance(made, ctypes.c_uint64 if kind[0] == "*" else kinds[kind])
        assert not isinstance(told, Size) or made.value == told.value


def test_what_holds_floating_point_numbers_is_known() -> None:
    """Not indices and masks, nor memory that is seen in two ways."""
    def program(x: torch.Tensor, keep: torch.Tensor, index: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        return [(x.masked_fill(keep, 0.0) * 0.5).sum(1), x[index], y.view(torch.int16) + 1, y * 2]

    inputs = (torch.ones(64, 32), torch.ones(64, 32) > 0, torch.zeros(5, dtype=torch.int64), torch.ones(64, dtype=torch.bfloat16))
    recording, outs = record(program, *inputs)
    planned = plan(recording.graph)
    found = bench.floats(planned.steps)
    dtypes = {index: found.get(index) for index in (buffer.index for buffer in recording.graph.buffers)}
    given = list(recording.inputs)
    assert [dtypes[index] for index in given] == [torch.float32, None, None, None]
    assert sorted(str(dtype) for dtype in found.values()) == ["torch.bfloat16", *["torch.float32"] * 3]


class FakeDriver:
    """Answers as libcuda would; every call of ``fails`` is refused."""

    def __init__(self, fails: str = "", threads: int = 1024, shared: int = 200_000) -> None:
        self.fails, self.asked = fails, []
        self._answers = {"threads": threads, "shared": shared}

    def __getattr__(self, name: str) -> object:
        def function(*arguments: object) -> int:
            self.asked.append((name, arguments))
            if name in ("cuDeviceGetAttribute", "cuFuncGetAttribute"):
                arguments[0]._obj.value = self._answers["shared" if name == "cuDeviceGetAttribute" else "threads"]
            return 700 if name == self.fails else 0

        return function


def load(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch, shared: int = 0, num_warps: int = 4) -> SimpleNamespace:
    monkeypatch.setattr(cuda_driver, "library", lambda: driver)
    return cuda_driver.load("kernel", b"code", shared, num_warps, 0)


def test_much_shared_memory_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    small, large = FakeDriver(), FakeDriver()
    assert load(small, monkeypatch).num_warps == 4
    load(large, monkeypatch, shared=100_000)
    asked = [{name for name, _ in driver.asked} for driver in (small, large)]
    assert asked[1] - asked[0] == {"cuFuncSetCacheConfig", "cuFuncSetAttribute"}


@pytest.mark.parametrize("asks", [{"shared": 300_000}, {"num_warps": 64}], ids=["shared memory", "threads"])
def test_a_kernel_that_asks_for_too_much_is_refused(asks: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DriverError, match="kernel asks for"):
        load(FakeDriver(), monkeypatch, **asks)


def test_what_the_driver_refuses_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DriverError, match=r"cuModuleLoadData: .* \(700\)"):
        load(FakeDriver(fails="cuModuleLoadData"), monkeypatch)
