"""What a rank sends to itself is read where it lies, and only where nobody would see a difference."""

from __future__ import annotations

import random
from typing import Sequence

import pytest
import torch

import lazy_backend.distributed.collectives  # noqa: F401  (defines the ops)
from barriers.passes.own_part import Window, along, apart, inside, read_own_part
from barriers.pipeline import ordered_passes
from ir_nodes import Access, BufferKind, Graph, Layout, settings
from ir_nodes.node import Buffer
from ir_nodes.remarks import Remarks
from ir_nodes.verify import verify

EIGHT = Layout.contiguous(torch.float32, (8,))


def half(number: int) -> Layout:
    return Layout(torch.float32, (4,), (1,), 4 * number)


class Program:
    """A graph in which rank ``rank`` of two exchanges what an op has made."""

    def __init__(self, rank: int = 0, numbers: Sequence[int] = (0,), live: bool = False) -> None:
        self.graph = Graph()
        x = self.graph.add_buffer(32, BufferKind.INPUT, True)
        self.sent, self.arrived = self.unary(x, EIGHT), self.graph.add_buffer(32, BufferKind.FRESH, live)
        tensors = [Access(self.arrived, EIGHT, "w")], [Access(self.sent, EIGHT)]
        self.start = self.graph.record("lazysched::all_to_all_single", [*tensors, [rank, 2, *numbers], "", "0"])
        self.remarks = Remarks()

    def wait(self) -> None:
        self.graph.record("lazysched::wait", [[Access(self.arrived, EIGHT, "rw")], [Access(self.sent, EIGHT)]])

    def unary(self, source: Buffer, layout: Layout, live: bool = False) -> Buffer:
        made = self.graph.add_buffer(layout.nbytes, BufferKind.FRESH, live)
        out = Access(made, Layout.contiguous(layout.dtype, layout.size), "w")
        self.graph.record("aten::sin", [Access(source, layout)], [out])
        return made

    def read(self, layout: Layout) -> None:
        self.unary(self.arrived, layout, live=True)

    def run(self) -> str:
        """What was told."""
        read_own_part(self.graph, self.remarks)
        verify(self.graph)
        return "\n".join(f"{remark}" for remark, _ in self.remarks.all())

    def refuses(self) -> str:
        """Why nothing was done."""
        before = self.graph.describe()
        told = self.run()
        assert self.graph.describe() == before and not self.start.changed
        return told.removeprefix("all_to_all_single: ")


@pytest.mark.parametrize("rank", [0, 1])
def test_readers_of_one_part_each_read_the_own_one_where_it_was_sent_from(rank: int) -> None:
    program = Program(rank)
    program.wait()
    program.read(half(0))
    program.read(half(1))
    assert program.run() == "all_to_all_single: a rank's own part is read where it was sent from, and not copied"
    reads = [node.reads[0] for node in program.graph.nodes if node.name == "sin"][1:]
    assert [read.value.buffer for read in reads] == [program.sent, program.arrived][:: -1 if rank else 1]
    assert [read.layout for read in reads] == [half(0), half(1)]
    assert program.start.target == "lazysched::all_to_all_others" and program.start.changed
    assert not any(node.relaid for node in program.graph.nodes)


def test_parts_of_different_sizes_lie_elsewhere_in_what_was_sent() -> None:
    program = Program(1, [2, 5, 3, 5, 3])
    program.wait()
    program.read(Layout(torch.float32, (3,), (1,), 5))
    program.run()
    assert program.graph.nodes[-1].reads[0].layout.offset == 5 and not program.graph.nodes[-1].relaid
    program = Program(1, [2, 2, 6, 1, 7])
    program.wait()
    assert program.refuses() == ""  # sizes that other ranks will refuse
    program = Program(1, [2, 2, 3, 3, 3])
    program.wait()
    program.read(Layout(torch.float32, (1, 3), (3, 1), 2))
    program.run()
    assert program.graph.nodes[-1].reads[0].layout.offset == 3 and program.graph.nodes[-1].relaid


def test_one_op_that_reads_several_parts() -> None:
    program = Program()
    program.wait()
    made = program.graph.add_buffer(32, BufferKind.FRESH, True)
    program.graph.record("aten::cat", [[Access(program.arrived, half(1)), Access(program.arrived, half(0))], 0],
                         [Access(made, EIGHT, "w")])
    program.run()
    assert [read.value.buffer for read in program.graph.nodes[-1].reads] == [program.arrived, program.sent]


def test_a_copy_of_all_parts_becomes_a_concatenation() -> None:
    program = Program(1, [2, 3, 5, 3, 5])
    program.wait()
    made = program.graph.add_buffer(28, BufferKind.FRESH, True)
    copy = program.graph.record("aten::clone", [Access(program.arrived, Layout(torch.float32, (7,), (1,), 1)), None],
                                [Access(made, Layout.contiguous(torch.float32, (7,)), "w")])
    program.run()
    assert copy.target == "aten::cat.out" and copy.changed and copy.args[1] == 0
    assert [(read.value.buffer, read.layout) for read in copy.reads] == [
        (program.arrived, Layout(torch.float32, (2,), (1,), 1)), (program.sent, Layout(torch.float32, (5,), (1,), 3))]


def test_along_finds_exactly_the_own_elements() -> None:
    """Compared with the addresses of all elements, over random views."""
    rng, found = random.Random(0), 0
    for _ in range(3000):
        size = tuple(rng.randint(1, 4) for _ in range(rng.randint(1, 3)))
        layout = Layout.contiguous(torch.float32, size)
        order = rng.sample(range(len(size)), len(size))
        stride = tuple(layout.stride[at] * (2 if rng.random() < 0.2 else 1) for at in order)
        layout = Layout(torch.float32, tuple(size[at] for at in order), stride, rng.randint(0, 3))
        first = rng.randint(0, 12)
        own = Window(4 * first, 4 * first + 4 * rng.randint(1, 12), 0)
        if inside(layout, own) or apart(layout, own) or along(layout, own) is None:
            continue
        dim, start, end = along(layout, own) or (0, 0, 0)
        places = torch.arange(200).as_strided(layout.size, layout.stride, layout.offset) * 4
        mine = (places >= own.first) & (places < own.end)
        wanted = torch.zeros_like(mine)
        wanted.narrow(dim, start, end - start).fill_(True)
        assert torch.equal(mine, wanted), (layout, own)
        found += 1
    assert found > 300


def test_a_part_that_nobody_reads_is_not_copied_either() -> None:
    program = Program()
    program.wait()
    program.read(half(1))
    program.run()
    assert program.start.changed


def test_what_somebody_could_see_stays() -> None:
    program = Program(live=True)
    program.wait()
    program.read(half(0))
    assert program.refuses() == "what arrives is held at the end"

    program = Program()
    assert program.refuses() == "it is waited for in another recording, or what it fills is used meanwhile"

    program = Program()
    program.wait()
    program.read(half(0))
    program.graph.record("aten::fill_.Scalar", [Access(program.arrived, half(0), "w"), 1.0])
    program.read(EIGHT)
    assert program.refuses() == "what arrives is written to later"

    program = Program()
    program.wait()
    program.read(Layout(torch.float32, (4,), (1,), 2))
    assert program.refuses() == "sin reads this rank's part together with others'"

    program = Program()
    program.wait()
    program.graph.record("aten::fill_.Scalar", [Access(program.sent, half(1), "w"), 1.0])
    program.read(half(0))
    assert program.refuses() == "what was sent is overwritten while it would be read"

    program = Program()
    program.wait()
    program.graph.record("lazysched::send", [[], [Access(program.arrived, half(0))], [1, 0], "", "0"])
    assert program.refuses() == "send sends this rank's part on"

    program = Program(1, [2, 2, 3, 3, 3])
    program.wait()
    program.read(Layout(torch.float64, (1,), (1,), 1))
    assert program.refuses() == "sin reads it as a type that does not fit where it was sent from"

    program = Program(1, [2, 2, 3, 3, 3])
    program.wait()
    program.read(Layout(torch.float32, (3,), (1,), 2, flipped=True))
    assert program.refuses() == "sin reads a conjugate or negative view, which can't be read elsewhere"


def test_an_overwrite_after_the_last_reader_does_not_matter() -> None:
    program = Program()
    program.wait()
    program.read(half(0))
    program.graph.record("aten::fill_.Scalar", [Access(program.sent, half(1), "w"), 1.0])
    program.run()
    assert program.start.changed


def test_what_was_sent_is_not_kept_where_that_would_raise_the_peak() -> None:
    program = Program()
    program.wait()
    buffers = [program.unary(program.graph.nodes[0].reads[0].value.buffer, EIGHT) for _ in range(40)]
    for buffer in buffers:
        program.unary(buffer, EIGHT)
    program.read(half(0))
    assert program.refuses() == "keeping what was sent for so long would raise the peak of memory"


def test_it_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "own_part" in [one.__name__ for one in ordered_passes()]
    monkeypatch.setattr(settings, "enabled", lambda name: name != "own_part")
    assert "own_part" not in [one.__name__ for one in ordered_passes()]
