"""Writes kernels whose programs hold a row in registers together. Imports codegen's leaf modules.

The programs of a row are a cluster: they run at the same time and write into each other's shared memory. Each holds every
so-many-th block of the row, reduces those, and tells the others what it has; then all know the row's sums. Triton has no words
for that, but passes PTX through: a scalar is the same in all threads of a program, one of which sends it to each of the others.

A block's largest element is known before the first exponential, unlike in a loop that loads: so each has one.
"""

from __future__ import annotations

import torch

from codegen.body import Body, Step
from codegen.cached_source import PAIR_MAX, PAIRS, Block, CachedWriter
from codegen.exponents import factor_of, loaded
from codegen.instructions import FULL
from codegen.online import end_lines

ENTER = "_enter()"
"""Tells the others that the program runs. Nobody may write into the memory of one that does not."""

ENTERED = '''
@triton.jit
def _enter():
    tl.inline_asm_elementwise("barrier.cluster.arrive.relaxed.aligned; mov.u32 $0, 0;", "=r", [], tl.int32, False, 1)


'''

SHARE = "_share({0}, {1}, {2})"
"""(element, total, its inverse)"""

IN_TURN = "_in_turn()"
"""Keeps the compiler from computing with several blocks at a time, which takes registers that hold others."""

ORDERED = '''
@triton.jit
def _in_turn():
    tl.inline_asm_elementwise("bar.warp.sync 0xffffffff; mov.u32 $0, 0;", "=r", [], tl.int32, False, 1)


'''


class ClusterWriter(CachedWriter):
    """Adds the parts of a kernel whose programs share rows: `_hold_all`, then `_walk_held` for sums and for results, and
    `_store_apart` at the end of any."""

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
            if len(relative) == 1:
                self._in_place = powers_in_place(self.body, highest, self._walked()[0])
            self._sum_held(highest, [step for step in reduces if step is not highest], relative)
        if stores:
            self._shift_powers()
        self._hints = {"load": "", "store": ', cache_modifier=".cs"' if walk.streams else ""}
        for number in range(walk.held if stores else 0):
            if self._widened(self._walked()[0]):
                self._line(IN_TURN)
            block = self._block_held(number)
            self._compute(block.loaded, block.start, [], stores, block.inside)
        self._hints = {"load": "", "store": ""}

    def _shift_powers(self) -> None:
        """What makes of powers relative to neighbours' maximum those that results need: a number a thread."""
        for power, (highest, *less) in self._in_place.items():
            name, lane = self._name(power), self.tile.near
            exponent = " - ".join([f"{self._name(highest)}_acc", *map(self._name, (highest, *less))])
            shift = f"{power.text.format(exponent)}[:, :, None]"
            self._line(f"{name}_shift = tl.reshape(tl.broadcast_to({shift}, [B0, B1 // {lane}, {lane}]), [B0, B1])")

    def _emit(self, step: Step) -> None:
        if step in self._in_place and self._at_hand:
            self._emitted.add(id(step))
            return
        power = next((arg for arg in step.args if arg in self._in_place), None)
        if power is None or not self._at_hand:
            super()._emit(step)
            return
        self._emitted.add(id(step))
        shift, share = f"{self._name(power)}_shift", step.text == SHARE and step.args[0] is power
        factor = step.args[2] if share else factor_of(step, power)
        names = {power: f"({self._at_hand} * {shift})"}
        if factor is not None:  # one multiplication for each element
            names = {power: self._at_hand, factor: f"({shift} * {self._name(factor)})"}
        text = "{0} * {2}" if share else step.text
        self._line(f"{self._name(step)} = {text.format(*(names.get(arg) or self._name(arg) for arg in step.args))}")

    def _sum_held(self, highest: Step, sums: list[Step], relative: dict[str, str]) -> None:
        """The row's maximum and the sums relative to it: the program's, then those of all."""
        name = self._name(highest)
        self._sum_together(highest, relative, [self._block_held(number) for number in range(self._blocks_held())], running=False)
        for line in end_lines(name, relative, True):
            self._line(line)
        self._exchange(name, relative)
        self._emitted.update(map(id, (highest, *sums)))

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

    def _store_apart(self) -> None:
        """The element of each row that is stored behind the others (`codegen.apart`), by a program that has stored those."""
        stores = [step for step in self.body.steps if step.stage == "store" and step.access and not step.access.scattered]
        stores = [step for step in stores if len(step.args) > 1]
        if stores:
            self._line("tl.debug_barrier()  # what follows replaces an element that another thread may have stored")
        kept = self._kept_axis()
        for store in stores:
            _, index, value = map(self._name, store.args)
            valid = f"({index} >= 0) & ({index} < {self._extent(1 - kept)})"
            if self._moved():  # the place behind the program's own first block, -1 and less before it
                valid += f" & ({index} + shift >= 0) & (({index} + shift) // B1 % {self.tile.cluster} == 0)"
            elif self._several() > 1:
                valid += f" & ({index} // B1 % {self.tile.cluster} == part)"
            strides = self.tile.strides[id(store)]
            along = self._scaled(index, strides[self._dims(1 - kept)[-1]], 1 - kept, strides)
            offset = " + ".join([*self._terms(store).get(kept, [f"i{kept} * 0"]), along])
            guard = f"m{kept} & " * self._guarded(kept)
            self._line(f"tl.store({self._pointer(store)} + {offset}, {value}, mask={guard}{valid})")

    def _blocks_held(self) -> int:
        assert self.tile.walk is not None
        return self.tile.walk.held

    def _block_held(self, number: int) -> Block:
        """One that is held. What is wider than it was in memory is not: the compiler can't know that it was at hand."""
        load, name = self._walked()
        held = f"{name}_held{number}"
        return Block(held, f"_as_loaded({held})" if self._widened(load) else held, self._part(number), self._within(number))

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


def powers_in_place(body: Body, highest: Step, load: Step) -> dict[Step, tuple[Step, ...]]:
    """The exponentials that results need of a row's elements less its maximum, and less what else, if results need nothing but
    them of the elements, which are wide enough to be replaced by exponentials. Each is then computed once."""
    (value,) = highest.args
    if load.dtype is not torch.float32 or load.access is None or load.access.dtype is not torch.float32 or not loaded(value):
        return {}
    found: dict[Step, tuple[Step, ...]] = {}
    stack = [step for step in body.steps if step.stage == "store" and step.level == FULL]
    while stack:
        step = stack.pop()
        less = _less(step.args[0], value) if step.text == "libdevice.exp({0})" else ()
        if step.level == FULL and less and less[0] is highest and all(one.level != FULL for one in less):
            found[step] = less
        elif step is load:
            return {}
        else:
            stack += step.args if step.level == FULL else ()
    return found


def _less(step: Step, value: Step) -> tuple[Step, ...]:
    """What the ``step`` subtracts from the ``value``, in order; nothing where it does something else."""
    if step.text not in ("{0} - {1}", "{0} - {1} - {2}"):
        return ()
    first, *rest = step.args
    before = () if first is value else _less(first, value)
    return (*before, *rest) if before or first is value else ()
