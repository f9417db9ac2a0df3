"""States of generators that are put back where they are in force go; all others stay, and so do all numbers."""

from __future__ import annotations

import torch

from barriers.passes.kept_states import drop_kept_states
from ir_nodes import Access, BufferKind, Graph, Layout, own
from ir_nodes.verify import verify

STATE = Layout.contiguous(torch.uint8, (16,))


class Program:
    """A program of draws, states kept and states put back, of one generator."""

    def __init__(self) -> None:
        self.graph = Graph()
        self.generator = self.place(BufferKind.GENERATOR, True, "rw")
        self.like = self.place(BufferKind.INPUT)

    def place(self, kind: BufferKind = BufferKind.FRESH, live: bool = False, mode: str = "r") -> Access:
        return Access(self.graph.add_buffer(16, kind, live=live), STATE, mode)

    def keep(self, live: bool = False) -> Access:
        made = self.place(live=live, mode="w")
        self.graph.record(own.RNG_STATE, [self.like, None], [made], [self.generator])
        return Access(made.buffer, STATE)

    def put_back(self, state: Access) -> None:
        self.graph.record(own.SET_RNG_STATE, [state, self.like, None], [], [self.generator])

    def draw(self) -> None:
        place = Access(self.graph.add_buffer(16, live=True), Layout.contiguous(torch.float32, (4,)), "w")
        self.graph.record("aten::uniform_", [place, 0.0, 1.0, None], [], [self.generator])

    def left(self) -> list[str]:
        graph = drop_kept_states(self.graph)
        verify(graph)
        return [node.name for node in graph.nodes]


def test_nothing_is_left_of_layers_that_draw_nothing() -> None:
    program = Program()
    program.draw()
    states = [program.keep() for _ in range(3)]
    for state in reversed(states):
        found = program.keep()
        program.put_back(state)
        program.put_back(found)
    program.draw()
    assert program.left() == ["uniform_", "uniform_"]
    first, second = (node.effects[0] for node in program.graph.nodes)
    assert second.base is first.value and program.graph.last(program.generator.buffer) is second.value


def test_states_between_draws_stay() -> None:
    program = Program()
    before = program.keep()
    program.draw()
    program.put_back(before)
    program.put_back(before)  # is in force
    program.draw()
    assert program.left() == ["rng_state", "uniform_", "set_rng_state", "uniform_"]


def test_a_state_that_somebody_holds_stays_and_so_does_one_from_before() -> None:
    program = Program()
    given = program.place(BufferKind.INPUT)
    program.keep(live=True)
    program.put_back(given)
    kept = program.keep()
    program.put_back(given)  # nothing tells that it is `kept`
    program.put_back(kept)
    assert program.left() == ["rng_state", "set_rng_state", "rng_state", "set_rng_state", "set_rng_state"]
