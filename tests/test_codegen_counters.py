"""Each product's launch in a CUDA graph has a counter of its own, and nodes that set one to zero leave the graph. A stand-in for
the driver holds the graph where there is no GPU."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from codegen import counters, products
from codegen.counters import APART, COUNTER, ROOM, Counters
from codegen.cublaslt import Multiplier, library
from codegen.cuda_driver import DriverError
from codegen.kernel import Algorithm, MatMul
from codegen.product_bench import ATEN, Outcome
from ir_nodes import settings

CPU = torch.device("cpu")
KERNEL, MEMSET = 0, 2


@dataclass
class Node:
    """A node of the stand-in's graph. ``memset``: start, value, bytes of an item, items in a row, rows."""

    memset: tuple[int, int, int, int, int] = (0, 0, 0, 0, 0)
    before: list[int] = field(default_factory=list)


@dataclass
class Driver:
    """A graph whose nodes wait for one another in a row."""

    nodes: dict[int, Node] = field(default_factory=dict)
    lossy: bool = False  # edges that the functions without edge data refuse to tell

    def add(self, node: Node) -> int:
        handle = len(self.nodes) + 1
        node.before = [handle - 1] if self.nodes else []
        self.nodes[handle] = node
        return handle

    def order(self) -> list[int]:
        """The nodes, each behind all that it waits for."""
        found: list[int] = []
        while len(found) < len(self.nodes):
            ready = [one for one, node in self.nodes.items() if one not in found and set(node.before) <= set(found)]
            assert len(ready) == 1, "a row stays a row"
            found += ready
        return found

    def call(self, name: str, *arguments: Any) -> None:
        getattr(self, name)(*arguments)

    def cuGraphGetNodes(self, graph: Any, out: Any, count: Any) -> None:
        self._tell(list(self.nodes), out, count)

    def cuGraphNodeGetDependencies(self, node: Any, out: Any, count: Any) -> None:
        if self.lossy:
            raise DriverError("cuGraphNodeGetDependencies: lossy query (1)")
        self._tell(self.nodes[node.value].before, out, count)

    def cuGraphNodeGetDependentNodes(self, node: Any, out: Any, count: Any) -> None:
        self._tell([one for one, other in self.nodes.items() if node.value in other.before], out, count)

    def cuGraphNodeGetType(self, node: Any, kind: Any) -> None:
        kind._obj.value = MEMSET if self.nodes[node.value].memset[2] else KERNEL

    def cuGraphMemsetNodeGetParams(self, node: Any, memset: Any) -> None:
        one = memset._obj
        one.start, one.value, one.item, one.width, one.height = self.nodes[node.value].memset

    def cuGraphAddDependencies(self, graph: Any, first: Any, second: Any, count: Any) -> None:
        assert count.value == 1
        self.nodes[second._obj.value].before.append(first._obj.value)

    def cuGraphDestroyNode(self, node: Any) -> None:
        del self.nodes[node.value]
        for other in self.nodes.values():
            other.before = [one for one in other.before if one != node.value]

    @staticmethod
    def _tell(handles: list[int], out: Any, count: Any) -> None:
        count._obj.value = len(handles)
        for index, handle in enumerate(handles if out is not None else []):
            out[index] = ctypes.c_void_p(handle).value


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    stand_in = Driver()
    monkeypatch.setattr(counters, "call", stand_in.call)
    return stand_in


def no_graph() -> int:
    raise AssertionError("nobody asks for a graph without counters")


def zeroing(memory: torch.Tensor, value: int = 0, item: int = 1, width: int = 4, height: int = 1) -> Node:
    return Node((memory.data_ptr(), value, item, width, height))


def test_a_counter_is_nobody_elses_and_zero() -> None:
    with counters.collected() as found:
        taken = [counters.workspace(4, CPU) for _ in range(3)] + [counters.workspace(COUNTER, CPU)]
        assert all(not one.any() and one.numel() == APART for one in taken)
        places = [one.data_ptr() for one in taken]
        assert places == sorted(set(places)) and places[-1] - places[0] == 3 * APART
        assert counters.current() is found
    assert counters.current() is None


def test_other_workspaces_are_memory_of_their_own() -> None:
    with counters.collected():
        first = counters.workspace(4, CPU).data_ptr()
        for nbytes in (0, COUNTER + 1, ROOM):
            other = counters.workspace(nbytes, CPU)
            assert other.numel() == nbytes and not first <= other.data_ptr() < first + ROOM
    assert counters.workspace(4, CPU).numel() == 4, "outside of a capture the library sets it to zero"


def test_a_graph_with_more_products_than_counters_has_the_library_zero_the_rest() -> None:
    with counters.collected() as found:
        taken = [counters.workspace(4, CPU) for _ in range(ROOM // APART + 2)]
    assert [one.numel() for one in taken[-3:]] == [APART, 4, 4] and found.take(4, CPU) is None


def test_a_capture_in_a_capture_has_its_own() -> None:
    with counters.collected() as outer:
        with counters.collected() as inner:
            assert counters.current() is inner
        assert counters.current() is outer


def test_only_what_sets_a_counter_to_zero_leaves_the_graph(driver: Driver) -> None:
    found, elsewhere = Counters(), torch.ones(COUNTER, dtype=torch.uint8)
    first, second = (found.take(4, CPU) for _ in range(2))
    assert first is not None and second is not None
    stay = [driver.add(Node())]
    go = [driver.add(zeroing(first))]
    stay += [driver.add(Node()), driver.add(zeroing(elsewhere))]
    go += [driver.add(zeroing(second, item=4, width=1))]
    stay += [driver.add(zeroing(second, value=1)), driver.add(zeroing(first, width=ROOM)), driver.add(Node())]
    assert found.spare(lambda: 7) == len(go)
    assert driver.order() == stay, "what comes after still waits for what came before"


def test_a_counter_that_was_never_taken_stays_zeroed(driver: Driver) -> None:
    found = Counters()
    first = found.take(4, CPU)
    assert first is not None
    beyond = torch.as_strided(first, (4,), (1,), first.storage_offset() + APART)
    driver.add(zeroing(beyond))
    assert found.spare(lambda: 7) == 0 and Counters().spare(no_graph) == 0 and len(driver.nodes) == 1


def test_what_the_driver_does_not_let_go_stays(driver: Driver) -> None:
    found = Counters()
    first = found.take(4, CPU)
    assert first is not None
    handles = [driver.add(Node()), driver.add(zeroing(first)), driver.add(Node())]
    driver.lossy = True
    assert found.spare(lambda: 7) == 0 and driver.order() == handles


@pytest.mark.parametrize("workspaces, times, choice", [
    ((4, 0), (100e-6, 101e-6, 105e-6), "1"),  # ATen's own, spared a node
    ((4, 0), (100e-6, 110e-6, 103e-6), ATEN),  # not ATen's own, as its time tells
    ((4, 0), (100e-6, None, 101e-6), ATEN),
    ((0, 4), (100e-6, 101e-6, 99e-6), ATEN),  # ATen's own does not count
    ((1 << 20, 4), (100e-6, 101e-6, 99e-6), ATEN),
    ((4, 0), (100e-6, 101e-6, 90e-6), "2"),
])  # fmt: skip
def test_atens_own_algorithm_is_called_here_where_it_counts(workspaces: tuple[int, int], times: tuple[float | None, ...],
                                                            choice: str) -> None:
    product = MatMul(torch.bfloat16, 64, 48, 32, (False, 32), (False, 48), 48)
    algorithms = [Algorithm(product, number, (0,) * 8, workspace) for number, workspace in enumerate(workspaces, 1)]
    outcome = Outcome(algorithms, dict(zip((ATEN, "1", "2"), times)))
    assert products.best(outcome) == choice
    with settings.override(disable="counters"):
        assert products.best(outcome) == ("2" if choice == "2" else ATEN)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="asks cuBLASLt and captures a CUDA graph")
def test_products_in_a_graph_count_from_zero_at_every_replay() -> None:
    from lazy_backend import graphs

    x, w = torch.randn(8192, 768, device="cuda").bfloat16(), torch.randn(768, 3072, device="cuda").bfloat16()
    product = MatMul(torch.bfloat16, 8192, 3072, 768, (False, 768), (False, 3072), 3072)
    multiplier = Multiplier(library(0), product)
    counting = [one for one in multiplier.suggestions(7) if 0 < one.workspace <= COUNTER]
    if not counting:
        pytest.skip("no algorithm that cuBLASLt suggests here counts")
    results = [torch.empty(8192, 3072, device="cuda", dtype=torch.bfloat16) for _ in range(2 * len(counting))]
    spared: list[int] = []

    def body(_: int) -> None:
        for made, algorithm in zip(results, 2 * counting):
            products.launch(multiplier, algorithm, (x, w, made), 1.0)

    plain = Counters.spare
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Counters, "spare", lambda self, captured: spared.append(plain(self, captured)))
        _, launch = graphs.capture(0, [], body)
    assert spared == [len(results)]
    wanted = x @ w
    for _ in range(3):
        for made in results:
            made.fill_(float("nan"))
        launch()
        for made in results:
            torch.testing.assert_close(made, wanted, rtol=1e-2, atol=1e-1)
