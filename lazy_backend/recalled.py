"""What one call of a function recorded, and how it is recorded again, for `replaying`. Imports torch, `ir_nodes` and parts below.

A call is looked at when it has ended: which buffers were its arguments, which it found, which it made. Of those that it made some
it returned, and each replay makes them anew; some it keeps somewhere (gradients), and each replay fills them anew where they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Sequence

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ir_nodes import BufferKind, Frame, Graph
from lazy_backend import core
from lazy_backend.entered import segments
from lazy_backend.questions import Question
from lazy_backend.rates import Follows, Numbers, values
from lazy_backend.returned import Constant, Found, Leaf, Refused, Returned, home, same_leaf
from lazy_backend.schema import ArgKind
from lazy_backend.trace import Recording, to_graph

LITTLE = 256
"""Bytes of what a function may make of Python's numbers in each call, and copy from the CPU, as ``x[:, [0, 2]]`` does. Where two
calls in turn copy the same, later ones are taken to do so, as they are to take the same numbers."""


class Recorded:
    """One call of a function: the recording, its arguments' homes, what it returned and `kept_elsewhere`.

    Raises Refused where such a call cannot be recorded again.
    """

    def __init__(self, index: int, tensors: Sequence[Tensor], out: Any, kept: set[int], ops: int, ends: bool,
                 asked: Sequence[Question]) -> None:
        leaves, self.spec = pytree.tree_flatten(out)
        self.index, self.ends, self.asked = index, ends, tuple(asked)
        self.trace: Recording = core.get().trace_for([], index)
        self.graph: Graph = to_graph(self.trace, segments.calls)
        if len(self.graph.nodes) != ops:
            raise Refused("it records on several devices")
        self.homes = [address for *_, address in self.trace.buffers()]
        self.places = {home(tensor): place for place, tensor in reversed(list(enumerate(tensors)))}
        self.trains = any(backward >= 0 for *_, backward, _ in self.trace.instrs())
        self.written = {write.value.buffer.index for node in self.graph.nodes for write in node.all_writes()}
        self.check_ops()
        self.constants = self.copied()
        self.check_inputs()
        self.leaves = [self.leaf(one, tensors, kept) for one in leaves]

    def number(self, tensor: Tensor) -> int:
        """Of the tensor's memory in the recording, or -1."""
        address = home(tensor)
        return self.homes.index(address) if address in self.homes else -1

    def check_ops(self) -> None:
        for node in self.graph.nodes:
            if node.target.startswith("lazysched::"):
                raise Refused(f"it communicates with other ranks ({node.target}{at(node.frame)})")
        kinds = [(kind, dtype) for kind, _, _, dtype in self.trace.args()]
        if any(kind == ArgKind.HOST_SCALAR and dtype is not None for kind, dtype in kinds):
            raise Refused("it takes a number from a tensor on the CPU; move the tensor to the device")

    def check_inputs(self) -> None:
        for buffer, address in zip(self.graph.buffers, self.homes):
            if buffer.kind is BufferKind.INPUT and not buffer.live and buffer.index not in self.constants:
                raise Refused(f"what it reads is gone when it ends{self.reader(buffer.index)}: it copies from the CPU, or "
                              "replaces what it keeps; give the tensor as an argument, or write into it with copy_()")
            if buffer.kind is BufferKind.FRESH and address in self.places:
                raise Refused("an argument holds nothing yet")

    def copied(self) -> dict[int, bytes]:
        """What little is read, but not written, of memory that is gone by now, with its contents: a copy from the CPU, unless the
        function keeps something and replaces it, which `check_same` finds out. Without a byte any other will do, such as what a
        cache began with."""
        found = {}
        for buffer in self.graph.buffers:
            gone = buffer.kind is BufferKind.INPUT and not buffer.live and self.homes[buffer.index] not in self.places
            if gone and not buffer.nbytes:
                found[buffer.index] = b""
            elif gone and buffer.nbytes <= LITTLE and buffer.index not in self.written:
                data = self.trace.bytes(buffer.index)
                if data is not None:
                    found[buffer.index] = bytes(data.cpu().tolist())
        return found

    def reader(self, buffer: int) -> str:
        """Where a buffer is first used."""
        for node in self.graph.nodes:
            if any(value.buffer.index == buffer for value in node.inputs()):
                return at(node.frame)
        return ""

    def leaf(self, one: Any, tensors: Sequence[Tensor], kept: set[int]) -> Leaf:
        """How a replay gives what the function returned. Raises Refused."""
        if not isinstance(one, Tensor):
            return Constant(one)
        for place, tensor in enumerate(tensors):
            if one is tensor:
                return place
        if one.requires_grad:
            raise Refused("it returns a tensor that has a gradient's graph; return tensor.detach()")
        if type(one) is not Tensor or one.device != torch.device("lazysched", self.index):
            raise Refused(f"it returns a {type(one).__name__} on {one.device}")
        number, place = self.number(one), self.places.get(home(one), -1)
        made = number >= 0 and self.graph.buffers[number].kind is BufferKind.FRESH
        if not made and place < 0:
            return Found.of(one)
        if one.is_conj() or one.is_neg():
            raise Refused("it returns a tensor whose conjugation or sign is pending; return tensor.resolve_conj()")
        if made and home(one) in kept:
            raise Refused("it returns a tensor that it keeps, too; return tensor.clone()")
        nbytes = self.graph.buffers[number].nbytes if made else 0
        return Returned(number if made else -1, nbytes, place, one.dtype, tuple(one.shape), one.stride(), one.storage_offset())

    def found(self) -> list[int]:
        """Buffers that were there before and are no arguments, but for the `constants`."""
        return [buffer.index for buffer in self.graph.buffers if buffer.kind is not BufferKind.FRESH
                and self.homes[buffer.index] not in self.places and buffer.index not in self.constants]

    def structure(self) -> tuple[Any, ...]:
        ops = [(target, count, outs, n_outs, generator, segment)
               for target, _, count, outs, n_outs, generator, _, _, _, segment in self.trace.instrs()]
        buffers = [(buffer.nbytes, buffer.kind, buffer.live) for buffer in self.graph.buffers]
        return ops, repr(self.trace.args()), self.trace.operands(), buffers

    def check_same(self, before: Recorded, follows: Follows) -> None:
        """Raises Refused where the call before recorded something else than a replay that ``follows`` these numbers could."""
        if self.structure() != before.structure():
            raise Refused("its calls record different ops")
        pairs = zip(before.trace.scalars(), self.trace.scalars(), strict=True)
        followed = {number for numbers, _ in follows for number in numbers}
        for number, (old, new) in enumerate(pairs):
            if repr(old) != repr(new) and number not in followed:
                raise Refused(f"a number changes from call to call, {old} to {new}{self.taker(number)}: make it a tensor on "
                              "the device (optimizers: capturable=True or fused=True)")
        if [question.same() for question in before.asked] != [question.same() for question in self.asked]:
            raise Refused("what it asks of its arguments differs from call to call")
        known = set(before.homes)
        for buffer, data in self.constants.items():
            if data and self.homes[buffer] in known:
                raise Refused(f"it replaces what it keeps{self.reader(buffer)}: write into the old tensor with copy_()")
            if data != before.constants.get(buffer):
                raise Refused(f"what it copies from the CPU changes from call to call{self.reader(buffer)}: give the tensor as "
                              "an argument")
        for buffer in self.found():
            if self.homes[buffer] != before.homes[buffer]:
                raise Refused(f"what it reads lies elsewhere in every call{self.reader(buffer)}: write into the old tensor "
                              "with copy_()")
        for old, new in zip(before.leaves, self.leaves, strict=True):
            if not same_leaf(old, new):
                raise Refused("what it returns differs from call to call, or is an object that it makes; return tensors in "
                              "tuples, lists or dicts")

    def taker(self, scalar: int) -> str:
        """Where a number is used."""
        args = self.trace.args()
        for node, (_, first, count, *_) in zip(self.graph.nodes, self.trace.instrs()):
            for kind, start, length, _ in args[first : first + count]:
                if kind >= ArgKind.SCALAR and start <= scalar < start + length:
                    return at(node.frame)
        return ""

    def stretch(self, follows: Follows) -> Stretch:
        """What replays it."""
        given = tuple((place, self.homes.index(address)) for address, place in self.places.items() if address in self.homes)
        made = {leaf.buffer: leaf.nbytes for leaf in self.leaves if isinstance(leaf, Returned) and leaf.buffer >= 0}
        device = torch.device("lazysched", self.index)
        constants = tuple((buffer, torch.tensor([*data], dtype=torch.uint8).to(device))
                          for buffer, data in self.constants.items())
        for buffer in [*made, *(number for _, number in given), *self.constants]:
            self.trace.forget(buffer)
        others = frozenset(self.homes[buffer] for buffer in self.found())
        changed = tuple(place for place, number in given if number in self.written)
        leaves = tuple(self.leaves)
        return Stretch(self.trace, self.index, given, constants, made, changed, others, leaves, self.spec, self.ends, self.trains,
                       follows)


@dataclass(frozen=True, slots=True)
class Stretch:
    """What one call recorded. ``given``: (tensor argument, buffer); ``constants``: (buffer, what stands for it); ``made``: bytes
    of what it returned, by buffer; ``changed``: arguments that it writes; ``others``: homes of memory that it found; ``ends``: a
    step ends with it; ``trains``: autograd ran; ``follows``: its numbers that optimizers' numbers decide.
    """

    trace: Recording
    index: int
    given: tuple[tuple[int, int], ...]
    constants: tuple[tuple[int, Tensor], ...]
    made: dict[int, int]
    changed: tuple[int, ...]
    others: frozenset[int]
    leaves: tuple[Leaf, ...]
    spec: Any
    ends: bool
    trains: bool
    follows: Follows

    def replay(self, tensors: Sequence[Tensor], numbers: Numbers) -> Any:
        """Record it again with the optimizers' ``numbers``; gives what it returned.

        Raises Refused, with nothing recorded, where memory that it used is gone, or RuntimeError as a barrier does where the
        recording has become long.
        """
        for index, value in list(values(self.follows, numbers)):
            self.trace.set_scalar(index, value)
        device = torch.device("lazysched", self.index)
        memory = {buffer: torch.empty(nbytes, dtype=torch.uint8, device=device) for buffer, nbytes in self.made.items()}
        found = [leaf.again() if isinstance(leaf, Found) else None for leaf in self.leaves]
        native, given = core.get(), [(number, tensors[place]) for place, number in self.given]
        try:
            full = native.again(self.trace, self.index, [*given, *self.constants, *memory.items()])
        except RuntimeError as error:
            raise Refused(str(error)) from None
        for place in self.changed:
            torch.autograd.graph.increment_version(tensors[place])
        if full:
            native.barrier(self.index, "limit", "LAZYSCHED_MAX_OPS or LAZYSCHED_MAX_PENDING_BYTES are reached")
        made = [old if old is not None else self.given_back(leaf, tensors, memory) for leaf, old in zip(self.leaves, found)]
        return pytree.tree_unflatten(made, self.spec)

    def given_back(self, leaf: Leaf, tensors: Sequence[Tensor], memory: dict[int, Tensor]) -> Any:
        if isinstance(leaf, Constant):
            return leaf.value
        if isinstance(leaf, int):
            return tensors[leaf]
        return leaf.on(memory[leaf.buffer] if leaf.buffer >= 0 else tensors[leaf.place])


def at(frame: Frame | None) -> str:
    return f", {frame}" if frame else ""
