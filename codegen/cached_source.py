"""Writes loops over rows that a multiprocessor's cache holds from one walk to the next. Imports codegen's leaf modules.

A step of such a loop loads several blocks before it computes with the first. The first blocks that lie within the row are loaded
before all others and stay in registers as they were loaded.
"""

from __future__ import annotations

from codegen.body import Body, Step
from codegen.cached_rows import TOGETHER
from codegen.instructions import FULL
from codegen.source_args import ArgumentList
from codegen.tile import Tile
from codegen.word_source import WordWriter


class CachedWriter(WordWriter):
    """Adds `_walk_cached`, one walk; plain loops and what a block computes are the writer's that inherits from it."""

    def __init__(self, body: Body, tile: Tile, arguments: ArgumentList) -> None:
        super().__init__(body, tile, arguments)
        self._at_hand = ""  # the block that is, as it was loaded
        self._hints = {"load": "", "store": ""}  # what loads and stores over whole rows tell the caches

    def _walk(self, steps: str, sinks: list[Step], end: str, inside: bool = False) -> None:
        raise NotImplementedError

    def _block(self, reduces: list[Step], stores: list[Step]) -> None:
        raise NotImplementedError

    def _walked(self) -> tuple[Step, str]:
        """What is loaded of the row, and its name."""
        (load,) = (step for step in self.body.steps if step.stage == "load" and step.level == FULL)
        return load, self._name(load)

    def _walk_cached(self, reduces: list[Step], stores: list[Step], last: bool) -> None:
        """A walk over the row: the steps that are whole, other blocks, the row's ends, then what is held."""
        walk = self.tile.walk
        assert walk is not None
        load, name = self._walked()
        self._hints = {"load": ', eviction_policy="evict_first"' if last else ', eviction_policy="evict_last"',
                       "store": ', cache_modifier=".cs"' if walk.streams else ""}
        starts = ["r", "r + B1", *(f"r + {number} * B1" for number in range(2, TOGETHER))]
        self._line(f"for r in tl.range({self._held_end()}, most, {TOGETHER} * B1, num_stages=1):")
        self._indent += 1
        for number, start in enumerate(starts):
            self._load_block(load, start, f"{name}_{number}")
        for number, start in enumerate(starts):
            self._compute(f"{name}_{number}", start, reduces, stores)
        self._indent -= 1
        self._walk("most, last, B1, num_stages=1", [*reduces, *stores], "", inside=True)
        ends = "0, last + B1, last" if self.tile.peel > 1 else "last, last + tl.minimum(last, B1), B1"
        self._walk(ends, [*reduces, *stores], "")
        packed = "_as_loaded({})" if self._widened(load) else "{}"  # what needs no conversion is held as it is anyway
        for number in range(walk.held):
            self._compute(packed.format(f"{name}_held{number}"), self._start(number), reduces, stores)
        self._hints = {"load": "", "store": ""}

    def _hold(self) -> None:
        """Where the whole steps end, and the blocks that wait in registers from here on: loaded before what a row needs by itself
        and waits for an index."""
        walk = self.tile.walk
        assert walk is not None
        load, name = self._walked()
        step, end = f"({TOGETHER} * B1)", self._held_end()
        self._line(f"most = (last - {end}) // {step} * {step} + {end}" if end != "0" else f"most = last // {step} * {step}")
        for number in range(walk.held):
            self._load_block(load, self._start(number), f"{name}_held{number}")

    def _held_end(self) -> str:
        assert self.tile.walk is not None
        return self._blocks(self.tile.walk.held) or "0"

    def _blocks(self, number: int) -> str:
        """Where the block of that number starts, of those that lie within the row: how far behind its start, or a boundary."""
        number += self.tile.peel > 1
        return f"{number} * B1" if number > 1 else "B1" * number

    def _start(self, number: int) -> str:
        """The same as an index, which has as many bits as that of a loop."""
        return f"last * 0 + {number + (self.tile.peel > 1)} * B1" if self.arguments.wide else self._blocks(number)

    def _load_block(self, load: Step, start: str, name: str, inside: bool = True) -> None:
        """A block as it lies in memory; ``inside``: within the row."""
        self._inside = inside
        self._index(1, start)
        offset, mask = self._place(load)
        self._line(f"{name} = tl.load({self._pointer(load)} + {offset}{'' if inside else f', mask={mask}'}{self._hint(load)})")
        self._inside = False

    def _compute(self, loaded: str, start: str, reduces: list[Step], stores: list[Step], inside: bool = True) -> None:
        """What the walk computes with a block that is at hand."""
        self._inside, self._at_hand = inside, loaded
        self._index(1, start)
        self._block(reduces, stores)
        self._inside, self._at_hand = False, ""

    def _load(self, step: Step) -> None:
        if self._at_hand and step.level == FULL:
            self._line(f"{self._name(step)} = {self._at_hand}{self._widened(step)}")
        else:
            super()._load(step)

    def _hint(self, step: Step) -> str:
        return self._hints.get(step.stage, "") if step.level == FULL else ""
