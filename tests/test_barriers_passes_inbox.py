"""An exchange brings its own memory only where nobody could tell the difference."""

from __future__ import annotations

from typing import Sequence

import pytest
import torch

import lazy_backend.distributed.collectives  # noqa: F401  (defines the ops)
from barriers.passes import inbox
from barriers.passes.inbox import use_inbox
from barriers.passes.own_part import read_own_part
from ir_nodes import Access, BufferKind, Graph, Layout
from ir_nodes.node import Buffer, Node
from ir_nodes.remarks import Remarks
from ir_nodes.verify import verify

EIGHT = Layout.contiguous(torch.float32, (8,))
BROUGHT = "all_to_all_single: what arrives is read where the other ranks put it"


@pytest.fixture(autouse=True)
def any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inbox, "LEAST", 1)


class Program:
    """A graph in which rank 0 of two exchanges what an op has made, several times."""

    def __init__(self) -> None:
        self.graph, self.remarks = Graph(), Remarks()
        self.x = self.graph.add_buffer(32, BufferKind.INPUT, True)

    def sine(self, source: Buffer, layout: Layout = EIGHT, live: bool = False) -> Buffer:
        made = self.graph.add_buffer(layout.nbytes, BufferKind.FRESH, live)
        out = Access(made, Layout.contiguous(layout.dtype, layout.size), "w")
        self.graph.record("aten::sin", [Access(source, layout)], [out])
        return made

    def exchange(self, numbers: Sequence[int] = (0,), into: Buffer | None = None, live: bool = False, group: str = "0",
                 wait: bool = True) -> tuple[Node, Buffer]:
        sent = self.sine(self.x)
        arrived = into or self.graph.add_buffer(32, BufferKind.FRESH, live)
        tensors = [Access(arrived, EIGHT, "w")], [Access(sent, EIGHT)]
        start = self.graph.record("lazysched::all_to_all_single", [*tensors, [0, 2, *numbers], "", group])
        if wait:
            self.wait(arrived, sent)
        return start, arrived

    def wait(self, arrived: Buffer, sent: Buffer) -> None:
        self.graph.record("lazysched::wait", [[Access(arrived, EIGHT, "rw")], [Access(sent, EIGHT)]])

    def run(self) -> list[str]:
        """What was told of each exchange, the last first."""
        use_inbox(self.graph, self.remarks)
        verify(self.graph)
        return [str(remark).removeprefix("all_to_all_single: ") for remark, count in self.remarks.all() for _ in range(count)]


def test_an_exchange_that_is_read_brings_its_memory() -> None:
    program = Program()
    start, arrived = program.exchange()
    program.sine(arrived, live=True)
    assert program.run() == ["what arrives is read where the other ranks put it"]
    assert start.target == "lazysched::all_to_all_inbox" and start.changed and start.returns == (0,)
    assert [len(start.args), start.args[1:]] == [4, ((0, 2, 0), "", "0")]
    assert start.writes[0].value.buffer is arrived


def test_so_does_one_without_the_own_part() -> None:
    program = Program()
    start, arrived = program.exchange()
    for offset in (0, 4):
        program.sine(arrived, Layout(torch.float32, (4,), (1,), offset), live=True)
    read_own_part(program.graph)
    program.run()
    assert start.target == "lazysched::all_to_all_inbox_others"


def test_several_do_that_are_read_one_after_the_other() -> None:
    program = Program()
    starts = []
    for _ in range(3):
        start, arrived = program.exchange()
        starts.append(start)
        program.sine(arrived, live=True)
    program.run()
    assert all(start.target == "lazysched::all_to_all_inbox" for start in starts)


@pytest.mark.parametrize("other_group", [False, True])
def test_the_next_of_a_size_and_group_waits_for_the_readers(other_group: bool) -> None:
    program = Program()
    first, one = program.exchange()
    second, other = program.exchange(group="1" if other_group else "0")
    program.sine(one, live=True)
    program.sine(other, live=True)
    told = program.run()
    assert second.returns == (0,) and bool(first.returns) == other_group
    assert other_group or "another exchange of its size starts before all have read it" in told


REFUSED = {
    "what arrives is held at the end": {"live": True},
    "ranks send parts of different sizes": {"numbers": [2, 5, 3, 5, 3]},
    "it is waited for in another recording, or what it fills is used meanwhile": {"wait": False},
}


@pytest.mark.parametrize("reason", REFUSED)
def test_refusals(reason: str) -> None:
    program = Program()
    start, arrived = program.exchange(**REFUSED[reason])
    program.sine(arrived, live=True)
    before = program.graph.describe()
    assert program.run() == [reason]
    assert program.graph.describe() == before and not start.changed


def test_memory_that_was_there_before_is_filled() -> None:
    program = Program()
    start, arrived = program.exchange(into=program.graph.add_buffer(32, BufferKind.INPUT, False))
    program.sine(arrived, live=True)
    used = program.sine(program.x)
    program.sine(used, live=True)
    other, again = program.exchange(into=used)
    program.sine(again, live=True)
    assert program.run() == ["it fills a part of a tensor, or one that was there before"] * 2
    assert not start.changed and not other.changed


def test_what_arrives_is_not_written_to() -> None:
    program = Program()
    start, arrived = program.exchange()
    program.graph.record("aten::mul_.Tensor", [Access(arrived, EIGHT, "rw"), Access(program.x, EIGHT)])
    program.sine(arrived, live=True)
    assert program.run() == ["what arrives is written to later"] and not start.changed


def test_small_exchanges_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inbox, "LEAST", 1 << 24)
    program = Program()
    program.sine(program.exchange()[1], live=True)
    assert program.run() == ["it is smaller than 16 MiB"]
