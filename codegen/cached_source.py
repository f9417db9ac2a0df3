"""Writes loops over rows that a multiprocessor's cache holds from one walk to the next. Imports codegen's leaf modules.

A step of such a loop loads several blocks before it computes with the first. The first blocks that lie within the row are loaded
before all others and stay in registers as they were loaded.
"""

from __future__ import annotations

from typing import NamedTuple, Sequence

import torch

from codegen.body import Body, Step
from codegen.cached_rows import TOGETHER
from codegen.exponents import FROM, POWER, ROUGH, SLACK, UNIT, loaded
from codegen.instructions import FULL
from codegen.loop_source import LoopWriter
from codegen.online import ONLINE
from codegen.reuse import made_of
from codegen.source_args import ArgumentList
from codegen.tile import Tile
from ir_nodes import settings

PAIRS = '''
@triton.jit
def {0}(a, b):
    return tl.inline_asm_elementwise("max.NaN.{1}x2 $0, $1, $2;", "=r,r,r", [a, b], a.dtype, True, 2)


'''

PAIR_MAX = {torch.bfloat16: "_max_bf16", torch.float16: "_max_f16"}
"""The larger of two, or nan, two elements at a time."""


class Block(NamedTuple):
    """A block of a row that is in registers: ``name`` is as it was loaded, ``loaded`` the text to compute with. ``inside``: it
    lies within every row."""

    name: str
    loaded: str
    start: str
    inside: bool = True


class CachedWriter(LoopWriter):
    """Adds `_walk_cached`, one walk."""

    def __init__(self, body: Body, tile: Tile, arguments: ArgumentList) -> None:
        super().__init__(body, tile, arguments)
        self._at_hand = ""  # the block that is, as it was loaded
        self._hints = {"load": "", "store": ""}  # what loads and stores over whole rows tell the caches

    def _waits_for(self, reduces: list[Step], stores: list[Step], last: bool) -> set[Step]:
        """What a walk needs. The row's other numbers come behind it, but before the ``last`` walk, which may store over it, what
        an index picks: so neither the first blocks nor the results wait for it."""
        picked = [step for step in self.body.steps if last and step.stage in ("gather", "take")]
        return made_of([*picked, *(step.args[0] for step in (*reduces, *stores))])

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
        self._compute_all([Block(f"{name}_{number}", f"{name}_{number}", start) for number, start in enumerate(starts)],
                          reduces, stores)
        self._indent -= 1
        self._walk("most, last, B1, num_stages=1", [*reduces, *stores], "", inside=True)
        ends = "0, last + B1, last" if self.tile.peel > 1 else "last, last + tl.minimum(last, B1), B1"
        self._walk(ends, [*reduces, *stores], "")
        packed = "_as_loaded({})" if self._widened(load) else "{}"  # what needs no conversion is held as it is anyway
        names = [f"{name}_held{number}" for number in range(walk.held)]
        self._compute_all([Block(held, packed.format(held), self._start(number)) for number, held in enumerate(names)],
                          reduces, stores)
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

    def _compute_all(self, blocks: Sequence[Block], reduces: list[Step], stores: list[Step]) -> None:
        """The same with several blocks: one after the other, but sums of exponentials of what is loaded with all at a time. What
        is computed of it would be computed twice, or held."""
        sums = self._sums(reduces)
        exponentials = {*reduces} == {*sums, *(step for step in reduces if step.text == ONLINE)}
        if stores or not blocks or not exponentials or not all(loaded(highest.args[0]) for highest in sums):
            for block in blocks:
                self._compute(block.loaded, block.start, reduces, stores, block.inside)
            return
        for highest, relative in sums.items():
            self._sum_together(highest, relative, blocks, running=True)

    def _sum_together(self, highest: Step, relative: dict[str, str], blocks: Sequence[Block], running: bool) -> None:
        """The blocks' share: the maximum of neighbours, which a thread holds, over all blocks, and sums relative to it.
        ``running``: there are such already, which are rescaled once."""
        name, lane, (load, _) = self._name(highest), self.tile.near, self._walked()
        apart = f"[B0, B1 // {lane}, {lane}]"
        widened = self._widened(load) if loaded(highest.args[0]) else ""  # of pairs, whose maximum comes before they are widened
        larger = PAIR_MAX[load.access.dtype] if widened and load.access else "_max"
        for number, block in enumerate(blocks):
            value = self._value(block, highest, block.name if widened else "")
            self._line(f"{name}_high = {larger}({name}_high, {value})" if number else f"{name}_high = {value}")
        high, new = f"tl.reduce(tl.reshape({name}_high{widened}, {apart}), 2, _max)", f"{name}_new" if running else f"{name}_acc"
        self._line(f"{new} = " + (f"_max({name}_acc, {high})" if running else high))
        rough = {*relative.values()} <= {ROUGH.removesuffix("({0})")}
        scaled = running and bool(widened) and rough and settings.enabled("scaled_exponentials")
        self._reference(name, new, apart, scaled)
        for number, block in enumerate(blocks):
            value = self._value(block, highest)
            for total, exponential in relative.items():
                power = f"{exponential}({value} - {name}_near)"
                if scaled:
                    power = POWER.format(value, f"{name}_units", f"{name}_near")
                if self._in_place:
                    power = block.name
                    self._line(f"{power} = libdevice.exp({value} - {name}_near)")
                self._line(f"{total}_each {'+=' if number else '='} {power}")
        for total, exponential in relative.items():
            before = f"{total}_acc * {exponential}({name}_acc - {name}_base) + " if running else ""
            slack = " * " + SLACK.format(f"{name}_base", f"{name}_unit", f"{name}_from") if scaled else ""
            self._line(f"{total}_acc = {before}tl.reduce(tl.reshape({total}_each, {apart}), 2, _add){slack}")
        if running:
            self._line(f"{name}_acc = {new}")

    def _reference(self, name: str, new: str, apart: str, scaled: bool) -> None:
        """What a thread's exponents are relative to: its maximum, or, ``scaled``, that times their unit; ``apart``: the shape of
        neighbours."""
        self._line(f'{name}_base = tl.where({new} == float("-inf"), 0.0, {new})')
        spread = {f"{name}_near": f"{name}_base"}
        if scaled:
            self._line(f"{name}_unit = {UNIT.format(f'{name}_base')}")
            self._line(f"{name}_from = {FROM.format(f'{name}_base', f'{name}_unit')}")
            spread = {f"{name}_units": f"{name}_unit", f"{name}_near": f"{name}_from"}
        for each, one in spread.items():
            self._line(f"{each} = tl.reshape(tl.broadcast_to({one}[:, :, None], {apart}), [B0, B1])")

    def _value(self, block: Block, highest: Step, packed: str = "") -> str:
        """What the maximum is taken of, in a block, -inf outside the row; ``packed``: as it was loaded."""
        self._inside, self._at_hand = block.inside, block.loaded
        self._index(1, block.start)
        wanted = self._slice([highest])
        for step in self.body.steps:
            if id(step) in wanted and not packed:
                self._emit(step)
        text = self._masked(highest, packed)
        self._inside, self._at_hand = False, ""
        return text

    def _load(self, step: Step) -> None:
        if self._at_hand and step.level == FULL:
            pairs = step.access is not None and step.access.dtype is torch.bfloat16 and self.tile.packs
            self._line(f"{self._name(step)} = " + (f"_wide({self._at_hand})" if pairs else self._at_hand + self._widened(step)))
        else:
            super()._load(step)

    def _hint(self, step: Step) -> str:
        return self._hints.get(step.stage, "") if step.level == FULL else ""
