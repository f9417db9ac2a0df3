"""What a function asks of its arguments, and of what it keeps, while `replayed` looks at it. Imports torch, `ir_nodes`,
`barriers.passes.dead` and parts below it.

Models ask booleans of what they are given: is nothing masked, does a row begin with padding? Read as always, the answer would
end the recording, and no replay could know whether it holds the next time. So the answer is computed aside on the CPU, exactly,
from a copy of what the question needs, while the recording goes on; and each replay asks the same question first.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Sequence

import torch
from torch import Tensor

from barriers.passes.dead import drop, eliminate_dead
from ir_nodes import Graph, Layout, reference
from lazy_backend import core
from lazy_backend.entered import segments
from lazy_backend.returned import Refused, home
from lazy_backend.trace import Recording, to_graph

_OPS = 32  # that a question takes at most: it is asked anew before each replay
_BYTES = 1 << 24  # that are looked at while a call is recorded


class OtherAnswer(Exception):
    """A replay's arguments answer otherwise than those of the recorded calls, which makes it a call of another kind."""

    def __init__(self, question: tuple[int, int, bool]) -> None:
        super().__init__(f"another answer than {question[-1]}")
        self.question = question


@dataclass(frozen=True, slots=True)
class Question:
    """A boolean that a function asked of its arguments, or of what it keeps. ``trace``: what it comes from, of the ``at`` ops
    recorded by then; ``given``: (argument, buffer); the answer is made in ``buffer``."""

    trace: Recording
    index: int
    at: int
    given: tuple[tuple[int, int], ...]
    buffer: int
    answer: bool

    def same(self) -> tuple[int, int, bool]:
        """What is equal of the same question with the same answer in two recordings that are alike."""
        return self.at, self.buffer, self.answer

    def record(self, tensors: Sequence[Tensor]) -> Tensor:
        """Ask it of other arguments: a boolean whose value nobody has read."""
        memory = torch.empty((), dtype=torch.bool, device=torch.device("lazysched", self.index))
        given = [(number, tensors[place]) for place, number in self.given]
        try:
            core.get().again(self.trace, self.index, [*given, (self.buffer, memory)])
        except RuntimeError as error:
            raise Refused(str(error)) from None
        return memory


def ask(questions: Sequence[Question], tensors: Sequence[Tensor]) -> None:
    """Ask them of other arguments; reads values. Raises OtherAnswer at the first that has one, or Refused."""
    for question, told in [(one, one.record(tensors)) for one in questions]:  # all at one barrier
        if bool(told) is not question.answer:
            raise OtherAnswer(question.same())


class Questions:
    """What one call of a function asks of its tensor arguments, while this is entered."""

    def __init__(self, index: int, tensors: Sequence[Tensor]) -> None:
        self.index, self.tensors = index, tensors
        self.asked: list[Question] = []
        self.why = ""  # the first that could not be answered aside was not

    def __enter__(self) -> Questions:
        _now.questions = self
        return self

    def __exit__(self, *error: object) -> None:
        _now.questions = None

    def answer(self, one: Tensor) -> bool | None:
        """The answer, computed aside; None where that cannot be."""
        try:
            question = self.question(one)
        except (Refused, RuntimeError, ValueError, TypeError) as why:  # read as always, it will raise what is wrong with it
            self.why = self.why or str(why).partition("\n")[0]
            return None
        if any(question.trace.live):  # else numbers alone decide
            self.asked.append(question)
        return question.answer

    @torch.no_grad()
    def question(self, one: Tensor) -> Question:
        if one.device.index != self.index:
            raise Refused("it asks of another device")
        one = one.detach().clone().view(())  # something is recorded, even where it only looks at what was there before
        trace = core.get().trace_for([], self.index)
        count, homes = len(trace.instrs()), [address for *_, address in trace.buffers()]
        graph = to_graph(trace, segments.calls)
        places = {home(tensor): place for place, tensor in reversed(list(enumerate(self.tensors)))}
        buffer = homes.index(home(one))
        written = {write.value.buffer.index for node in graph.nodes for write in node.writes}
        needed_for(graph, buffer)
        check(graph)
        read = {value.buffer.index: value.buffer.nbytes for value in graph.inputs()}
        if written & read.keys():  # what has begun early may have written it
            raise Refused("it asks of what it has written by then")
        if not all(trace.live[number] for number in read):
            raise Refused("it asks of what is gone when it ends")
        data = {number: contents(trace, number, nbytes) for number, nbytes in read.items()}
        made = reference.run(graph, data, trace.scalars())
        answer = bool(reference.window(made[buffer], Layout(torch.bool, (), ())))
        given = tuple((places[homes[number]], number) for number in read if homes[number] in places)
        trace.keep([node.instr for node in graph.nodes])
        trace.live = [number in read for number in range(len(homes))]
        arguments = {number for _, number in given}
        for number in range(len(homes)):  # nothing of this call is held
            if number not in read or number in arguments:
                trace.forget(number)
        return Question(trace, self.index, count, given, buffer, answer)


def needed_for(graph: Graph, buffer: int) -> None:
    """Leaves what ``buffer`` comes from."""
    for other in graph.buffers:
        other.live = other.index == buffer
    drop(graph, [node for node in graph.nodes if not node.all_writes()])  # assertions, which the recording itself keeps
    eliminate_dead(graph)


def check(graph: Graph) -> None:
    """Raises Refused where it is no small question with an exact answer."""
    for node in graph.nodes:
        if node.effects or not node.target.startswith("aten::"):
            raise Refused("it asks of what is drawn or comes from other ranks")
    if len(graph.nodes) > _OPS:
        raise Refused(f"what it asks takes {len(graph.nodes)} ops, more than {_OPS}")
    if sum(value.buffer.nbytes for value in graph.inputs()) > _BYTES:
        raise Refused(f"it asks of more than {_BYTES >> 20} MiB")
    layouts = [write.layout for node in graph.nodes for write in node.all_writes()]
    if any(layout.dtype.is_floating_point or layout.dtype.is_complex for layout in layouts):
        raise Refused("it asks of numbers that it computes in floating point")


def contents(trace: Recording, buffer: int, nbytes: int) -> Tensor:
    data: Any = trace.bytes(buffer)
    if data is None:
        raise Refused("it asks of memory that holds nothing yet")
    return data.cpu()[:nbytes]


class _Now(threading.local):
    questions: Questions | None = None


_now = _Now()


def answer(one: Tensor) -> bool | None:
    """Asked by the core before it ends a recording for a boolean."""
    return _now.questions.answer(one) if _now.questions is not None else None


def install(native: ModuleType) -> None:
    native.set_asker(answer)


core.at_start(install)
