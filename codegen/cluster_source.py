"""Writes kernels whose programs hold a row in registers together. Imports codegen's leaf modules.

The programs of a row are a cluster: they run at the same time and write into each other's shared memory. Each holds every
so-many-th block of the row, reduces those, and tells the others what it has; then all know the row's sums. Triton has no words
for that, but passes PTX through: a scalar is the same in all threads of a program, one of which sends it to each of the others.

A block's largest element is known before the first exponential, unlike in a loop that loads: so each has one.
"""

from __future__ import annotations

import torch

from codegen.body import Step
from codegen.cached_source import CachedWriter
from codegen.online import end_lines

ENTER = "_enter()"
"""Tells the others that the program runs. Nobody may write into the memory of one that does not."""

ENTERED = '''
@triton.jit
def _enter():
    tl.inline_asm_elementwise("barrier.cluster.arrive.relaxed.aligned; mov.u32 $0, 0;", "=r", [], tl.int32, False, 1)


'''

IN_TURN = "_in_turn()"
"""Keeps the compiler from computing with several blocks at a time, which takes registers that hold others."""

ORDERED = '''
@triton.jit
def _in_turn():
    tl.inline_asm_elementwise("bar.warp.sync 0xffffffff; mov.u32 $0, 0;", "=r", [], tl.int32, False, 1)


'''

PAIRS = '''
@triton.jit
def {0}(a, b):
    return tl.inline_asm_elementwise("max.NaN.{1}x2 $0, $1, $2;", "=r,r,r", [a, b], a.dtype, True, 2)


'''

PAIR_MAX = {torch.bfloat16: "_max_bf16", torch.float16: "_max_f16"}
"""The larger of two, or nan, two elements at a time."""


class ClusterWriter(CachedWriter):
    """Adds the parts of a kernel whose programs share rows: `_hold_all`, then `_walk_held` for sums and for results."""

    def _several(self) -> int:
        """How many programs share a row; 0 where one walks it."""
        return self.tile.walk.programs if self.tile.walk is not None else 0

    def _helpers(self, text: str) -> str:
        """The functions of this module that ``text`` calls."""
        found = (ENTERED if ENTER in text else "") + (ORDERED if IN_TURN in text else "")
        found += "".join(PAIRS.format(name, name.removeprefix("_max_")) for name in PAIR_MAX.values() if f"{name}(" in text)
        counts = [count for count in range(2, 9) if f"_exchange{count}(" in text]
        return found.lstrip("\n") + "".join(exchange(count, self._several()) for count in counts)

    def _prologue(self) -> None:
        if self._several():
            self._line(f"part = tl.program_id(0) % {self.tile.cluster}  # of a row, which so many programs hold")
        super()._prologue()
        if self._moved():
            self._line("base += part * B1")
            self._line("shift -= part * B1")

    def _moved(self) -> bool:
        """Do addresses, and how far the row begins behind, follow from the program's first block? All its blocks then lie known
        distances from one address: on an H100 a softmax of 50,257 in float32 takes 731 us so, and 757 otherwise."""
        return self.tile.cluster > 1 and self.tile.peel > 1

    def _hold_all(self) -> None:
        """Loads the program's blocks of the row."""
        if self._several() > 1:
            self._line(f"{ENTER}  # the other programs of the row may write into this one's memory")
        load, name = self._walked()
        self._hints = {"load": ', eviction_policy="evict_first"', "store": ""}
        for number in range(self._blocks_held()):
            self._load_block(load, self._part(number), f"{name}_held{number}", self._within(number))
        self._hints = {"load": "", "store": ""}

    def _walk_held(self, reduces: list[Step], stores: list[Step]) -> None:
        """Sums of the row, or results of its blocks, one after the other."""
        walk = self.tile.walk
        assert walk is not None
        sums = self._sums(reduces)
        for highest, relative in sums.items():
            self._sum_held(highest, [step for step in reduces if step is not highest], relative)
        self._hints = {"load": "", "store": ', cache_modifier=".cs"' if walk.streams else ""}
        for number in range(walk.held if stores else 0):
            if self._widened(self._walked()[0]):
                self._line(IN_TURN)
            self._compute(self._held(number), self._part(number), [], stores, self._within(number))
        self._hints = {"load": "", "store": ""}

    def _sum_held(self, highest: Step, sums: list[Step], relative: dict[str, str]) -> None:
        """The maximum of neighbours, which a thread holds, over all blocks; then sums relative to it; then those of the row."""
        name, lane, (load, loaded) = self._name(highest), self.tile.near, self._walked()
        apart = f"[B0, B1 // {lane}, {lane}]"
        widened = self._widened(load) if plain(highest.args[0]) else ""  # of pairs, whose maximum comes before they are widened
        for number in range(self._blocks_held()):
            value = self._value(number, highest, f"{loaded}_held{number}" if widened else "")
            larger = PAIR_MAX[load.access.dtype] if widened and load.access else "_max"
            self._line(f"{name}_high = {larger}({name}_high, {value})" if number else f"{name}_high = {value}")
        self._line(f"{name}_acc = tl.reduce(tl.reshape({name}_high{widened}, {apart}), 2, _max)")
        self._line(f'{name}_base = tl.where({name}_acc == float("-inf"), 0.0, {name}_acc)')
        self._line(f"{name}_near = tl.reshape(tl.broadcast_to({name}_base[:, :, None], {apart}), [B0, B1])")
        for number in range(self._blocks_held()):
            value = self._value(number, highest)
            for total, exponential in relative.items():
                self._line(f"{total}_each {'+=' if number else '='} {exponential}({value} - {name}_near)")
        for total in relative:
            self._line(f"{total}_acc = tl.reduce(tl.reshape({total}_each, {apart}), 2, _add)")
        for line in end_lines(name, relative, True):
            self._line(line)
        self._exchange(name, relative)
        self._emitted.update(map(id, (highest, *sums)))

    def _value(self, number: int, highest: Step, packed: str = "") -> str:
        """What the maximum is taken of, in a block, -inf outside the row; ``packed``: as it was loaded."""
        self._inside, self._at_hand = self._within(number), self._held(number)
        self._index(1, self._part(number))
        wanted = self._slice([highest])
        for step in self.body.steps:
            if id(step) in wanted and not packed:
                self._emit(step)
        text = self._masked(highest, packed)
        self._inside, self._at_hand = False, ""
        return text

    def _exchange(self, highest: str, sums: dict[str, str]) -> None:
        """The row's maximum and its sums from those of all its programs."""
        count, names = self.tile.cluster, [highest, *sums]
        if count == 1:
            return
        told = ", ".join(f"{name}_{part}" for part in range(count) for name in names)
        self._line(f"{told} = _exchange{len(names)}({', '.join(names)}, part)")
        total = f"{highest}_0"
        for part in range(1, count):
            total = f"_max({total}, {highest}_{part})"
        self._line(f"{highest} = {total}")
        self._line(f'{highest}_base = tl.where({highest} == float("-inf"), 0.0, {highest})')
        for name, exp in sums.items():
            terms = [f"{name}_{part} * {exp}({highest}_{part} - {highest}_base)" for part in range(count)]
            self._line(f"{name} = " + " + ".join(terms))

    def _blocks_held(self) -> int:
        assert self.tile.walk is not None
        return self.tile.walk.held

    def _held(self, number: int) -> str:
        """A block at hand. What is wider than it was in memory is not held so: the compiler can't know that it was at hand."""
        load, name = self._walked()
        return f"_as_loaded({name}_held{number})" if self._widened(load) else f"{name}_held{number}"

    def _part(self, number: int) -> str:
        """Where the program's block of that number starts."""
        blocks = number * self._several()
        if self._moved():
            return f"{blocks} * B1" if blocks else ""
        return f"({blocks} + part) * B1" if blocks else "part * B1"

    def _within(self, number: int) -> bool:
        """Do the blocks of that number lie within every row, wherever it starts?"""
        whole = (number + 1) * self._several() * self._axis(1).block <= self._axis(1).extent
        return whole and (number > 0 or self.tile.peel <= 1)


def plain(step: Step) -> bool:
    """Is it what is loaded, and nothing else?"""
    return step.stage == "load" or step.text == "{0}" and plain(step.args[0])


def exchange(values: int, programs: int) -> str:
    """A function that tells ``values`` float32 numbers to all ``programs`` of a cluster, and returns those of all, the first
    program's first. A kernel calls it once: it waits for programs to run before it writes into their memory.

    ``%tid.x`` numbers the threads: that of a program's number writes what it has into its own place in that program's memory.
    """
    results = values * programs
    given = [f"${results + number}" for number in range(values)]
    lines = [
        ".reg .pred sends;", ".reg .b32 thread, place;", f".shared .align 4 .b32 told[{results}];",
        "barrier.cluster.wait.aligned;",
        "mov.u32 thread, %tid.x;", f"setp.lt.u32 sends, thread, {programs};",
        "mov.u32 place, told;", f"mad.lo.u32 place, ${results + values}, {4 * values}, place;",
        "@sends mapa.shared::cluster.u32 place, place, thread;",
        *(f"@sends st.shared::cluster.b32 [place+{4 * number}], {one};" for number, one in enumerate(given)),
        "barrier.cluster.arrive.release.aligned;", "barrier.cluster.wait.acquire.aligned;",
        *(f"ld.shared.b32 ${number}, [told+{4 * number}];" for number in range(results)),
    ]
    text = "\n        ".join(lines)
    constraints = ",".join(["=&r"] * results + ["r"] * (values + 1))
    names = ", ".join(f"v{number}" for number in range(values))
    return f'''@triton.jit
def _exchange{values}({names}, part):
    return tl.inline_asm_elementwise("""{{
        {text}
        }}""", "{constraints}", [{names}, part], ({", ".join(["tl.float32"] * results)}), False, 1)


'''
