"""Lays the results of a CUDA graph side by side, and what dies before they are made into the same memory. Imports
`codegen.static_plan` only.

A graph's results have their memory all along, because every replay fills them at the same addresses. Gradients come late, so
through all of forward that memory holds nothing. Here it is one block: what is made last lies lowest, so all below a border is
free, which sinks with each result. Guests pile up from the bottom: of the values that wait while the most is held, those lowest
that wait longest.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Sequence

from codegen.static_plan import Piece, padded

ROUNDS = 4
"""Peaks that are looked at: where guests have left one, another place may hold the most."""
MOST = 1024
"""Values that are looked at for one peak, the largest first."""


@dataclass(slots=True)
class Block:
    """``nbytes`` of memory in which ``results`` lie, by slot, and before them ``guests``: at which offset. ``first``, ``last``:
    the steps that touch a guest; ``extent``: how far guests reach."""

    nbytes: int
    results: dict[int, int]
    guests: dict[int, int] = field(default_factory=dict)
    first: int = 0
    last: int = 0
    extent: int = 0


def lodge(pieces: Sequence[Piece], results: Sequence[Piece], held: Sequence[int], steps: range) -> Block | None:
    """A block of the ``results``, and those of the ``pieces`` in it that lower what is ``held`` at most while ``steps`` run. All
    are made and the pieces die in these steps; ``held``: bytes at each step of the program. None: there is no such piece.
    """
    order = sorted(results, key=lambda piece: (-piece.first, piece.slot))
    border = Border(order)
    block = Block(border.tops[-1], dict(zip((piece.slot for piece in order), border.tops)))
    now = list(held)
    lying: list[tuple[Piece, int]] = []  # and where each ends
    for _ in range(ROUNDS):
        here = max(steps, key=now.__getitem__)
        waiting = [piece for piece in pieces
                   if piece.nbytes and piece.first <= here <= piece.last and piece.slot not in block.guests]
        waiting = sorted(waiting, key=lambda piece: (-piece.nbytes, piece.slot))[:MOST]
        earlier, pile = list(lying), 0  # what waits at one place lies on one pile
        for piece in sorted(waiting, key=lambda piece: (-piece.last, -piece.nbytes, piece.slot)):
            bottom = max([pile, *(top for other, top in earlier if meet(piece, other))])
            top = bottom + padded(piece.nbytes)
            if top <= border.free(piece.last):
                block.guests[piece.slot], pile = bottom, top
                lying.append((piece, top))
        if len(lying) == len(earlier):
            break
        now = without(now, [piece for piece, _ in lying[len(earlier) :]])
    if not lying:
        return None
    block.first, block.last = min(piece.first for piece, _ in lying), max(piece.last for piece, _ in lying)
    block.extent = max(top for _, top in lying)
    return block


class Border:
    """How many bytes from the bottom are free at a step, if results lie in this ``order``, the last one lowest."""

    def __init__(self, order: Sequence[Piece]) -> None:
        self.tops = [0, *accumulate(padded(piece.nbytes) for piece in order)]
        self._begins = [-piece.first for piece in order]  # rising

    def free(self, step: int) -> int:
        """Bytes of the results that are made after ``step``."""
        return self.tops[bisect_right(self._begins, -step - 1)]


def without(held: Sequence[int], pieces: Sequence[Piece]) -> list[int]:
    """What is held at each step if ``pieces`` lie elsewhere."""
    change = [0] * (len(held) + 1)
    for piece in pieces:
        change[piece.first] -= piece.nbytes
        change[piece.last + 1] += piece.nbytes
    return [now + changed for now, changed in zip(held, accumulate(change))]


def meet(one: Piece, other: Piece) -> bool:
    """Are both in use at some step?"""
    return one.first <= other.last and other.first <= one.last
