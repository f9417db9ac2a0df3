"""Places buffers in memory that others have left: over operands that die, and side by side in one arena. Imports `ir_nodes` and
`codegen.step_use` only."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field
from typing import Mapping, Sequence

from codegen.step_use import StepUse
from ir_nodes import Buffer, BufferKind

ALIGNMENT = 256
"""What CUDA's allocator gives, and more than any kernel asks for."""


def shared(
    uses: Sequence[StepUse], buffers: Sequence[Buffer], first: Mapping[int, int], last: Mapping[int, int], donate: bool
) -> tuple[dict[int, int], dict[int, str]]:
    """For each buffer that is written over another one, which dies in the same step: whose slot it takes. For others that could
    be, but for where and how long that one is needed: why they are not.

    ``first`` and ``last``: the first and last step of each slot. ``donate``: an input that nobody holds any more may be written
    over. What a collective sends or fills is left alone.
    """
    kept = {buffer for use in uses if use.keeps for buffer in use.buffers}
    taken: dict[int, int] = {}
    refused: dict[int, str] = {}
    given: set[int] = set()
    makes = {slot for use in uses for slot in use.makes}  # ATen may have made these larger than they look
    for number, use in enumerate(uses):
        for new, old in use.reuses:
            one, other = buffers[new], buffers[old]
            if new in taken or one.kind is not BufferKind.FRESH or first.get(new) != number:
                continue
            slot = taken.get(old, old)
            if other.kind is BufferKind.INPUT and not donate:
                reason = "its operand is an input, which CUDA graphs find elsewhere in each run"
            elif other.live or other.kind is BufferKind.GENERATOR:
                reason = "its operand is held when the recording ends"
            elif last.get(old) != number:
                reason = "its operand is read again later"
            elif one.nbytes != other.nbytes:
                reason = "its operand's memory has another size"
            elif one.live and slot in makes:
                reason = "it is a result, and its operand's memory is one that ATen made"
            elif {new, old} & kept:
                reason = "a collective sends or fills one of the two"
            elif old in given:
                reason = "another result of the same kernel takes its operand's memory"
            else:
                taken[new] = slot
                given.add(old)
                continue
            refused.setdefault(new, reason)
    return taken, {new: reason for new, reason in refused.items() if new not in taken}


@dataclass(frozen=True, slots=True)
class Piece:
    """What is to be placed: a slot, its bytes, and the first and last step that touch it."""

    slot: int
    nbytes: int
    first: int
    last: int


def offsets(pieces: Sequence[Piece]) -> tuple[dict[int, int], int]:
    """Where each piece lies, so that pieces that live at the same time do not overlap; and the bytes that all take.

    As an allocator would do it that gives the smallest gap that fits, run once when planning: what ends in a step makes room for
    what begins in a later one, and of what begins in one step the largest comes first.
    """
    arena, placed = Arena(), {}
    begin: dict[int, list[Piece]] = {}
    for piece in pieces:
        begin.setdefault(piece.first, []).append(piece)
    ending: list[tuple[int, int, int]] = []  # last step, offset, bytes
    for step in sorted(begin):
        while ending and ending[0][0] < step:
            _, offset, nbytes = ending.pop(0)
            arena.give(offset, nbytes)
        for piece in sorted(begin[step], key=lambda piece: (-piece.nbytes, piece.slot)):
            nbytes = padded(piece.nbytes)
            placed[piece.slot] = arena.take(nbytes)
            insort(ending, (piece.last, placed[piece.slot], nbytes))
    return placed, arena.top


def padded(nbytes: int) -> int:
    return -(-max(nbytes, 1) // ALIGNMENT) * ALIGNMENT


@dataclass(slots=True)
class Arena:
    """Stretches of free memory below ``top``, by size and by their two ends."""

    top: int = 0
    sizes: list[tuple[int, int]] = field(default_factory=list)  # (bytes, start), in order
    ends: dict[int, int] = field(default_factory=dict)  # end by start
    starts: dict[int, int] = field(default_factory=dict)  # start by end

    def take(self, nbytes: int) -> int:
        """The start of ``nbytes`` that are now taken."""
        place = bisect_left(self.sizes, (nbytes, -1))
        if place < len(self.sizes):
            start = self.sizes[place][1]
            end = self._forget(start)
        else:  # the last gap grows
            start = self.starts.get(self.top, self.top)
            if start < self.top:
                self._forget(start)
            end = self.top = start + nbytes
        if start + nbytes < end:
            self._note(start + nbytes, end)
        return start

    def give(self, start: int, nbytes: int) -> None:
        """These are free again."""
        end = start + nbytes
        if start in self.starts:
            start = self.starts[start]
            self._forget(start)
        if end in self.ends:
            end = self._forget(end)
        self._note(start, end)

    def _note(self, start: int, end: int) -> None:
        self.ends[start], self.starts[end] = end, start
        insort(self.sizes, (end - start, start))

    def _forget(self, start: int) -> int:
        end = self.ends.pop(start)
        del self.starts[end]
        del self.sizes[bisect_left(self.sizes, (end - start, start))]
        return end
