"""Groups that are alike become one kernel with other operands, so a model of many equal layers is written down once. Imports
codegen's planning modules and `ir_nodes`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Callable, Hashable, Iterable, Mapping

from codegen.emit import emit_group
from codegen.group import Group
from codegen.instructions import Named
from codegen.kernel import KernelArg, KernelStep, Offset, Pointer, Scalar, Seed, Temporary
from codegen.scratch import Scratch
from codegen.tuning import Tuning
from ir_nodes.node import Buffer, Node, Value


@dataclass(frozen=True, slots=True)
class Structure:
    """``key``: equal for groups whose kernels differ in nothing but ``names``: values, number inputs and generators, in order."""

    key: Hashable
    names: tuple[Named, ...]

    @staticmethod
    def of(group: Group, outside: Iterable[Value]) -> Structure:
        """The structure of a group of which other steps need the values ``outside``."""
        known: dict[Named, int] = {}
        nodes: dict[Node, int] = {}
        parts: list[Hashable] = []
        for unit in group.units:
            part = unit.part
            assert part is not None
            shape, names = part.structure
            parts.append((shape, tuple([known.setdefault(name, len(known)) for name in names]), part.numel, part.reduced,
                          part.column, unit in group.kept_units, unit in group.crossed,
                          nodes.setdefault(unit.node, len(nodes))))
        buffers: dict[Buffer, int] = {}
        memory = tuple([(buffers.setdefault(name.buffer, len(buffers)), name.buffer.nbytes, name.buffer.index < 0)
                        for name in known if isinstance(name, Value)])
        needed = frozenset([buffers.get(value.buffer) for value in outside])
        key = (group.numel, group.reduced, group.split, tuple(parts), memory, needed, tuple([node.target for node in nodes]))
        return Structure(key, tuple(known))


class Emitter:
    """Makes the launches of groups, those of a group like an earlier one by naming other operands."""

    def __init__(self, scratch: Scratch, tuning: Tuning) -> None:
        self._scratch, self._tuning = scratch, tuning
        self._made: dict[Hashable, tuple[Structure, list[KernelStep]]] = {}

    def emit(self, group: Group, outside: set[Value]) -> list[KernelStep]:
        """As `codegen.emit.emit_group`."""
        mine = Structure.of(group, outside)
        known = self._made.get(mine.key)
        if known is None:
            steps = emit_group(group, outside, self._scratch, self._tuning)
            self._made[mine.key] = (mine, steps)
            return steps
        first, steps = known
        renaming = Renaming(dict(zip(first.names, mine.names)), self._scratch, tuple(dict.fromkeys(
            unit.node for unit in group.units)))
        return [renaming.step(step) for step in steps]


class Renaming:
    """Makes of one group's steps those of another: ``names`` gives the other's name for each of the one's."""

    def __init__(self, names: Mapping[Named, Named], scratch: Scratch, nodes: tuple[Node, ...]) -> None:
        self._names, self._scratch, self._nodes = names, scratch, nodes
        self._temporaries: dict[Temporary, Temporary] = {}
        self._behind = {scratch.of(name): other for name, other in names.items()
                        if isinstance(name, Value) and name in scratch}

    def step(self, step: KernelStep) -> KernelStep:
        retile = step.retile
        return replace(
            step, args=tuple([self._argument(arg) for arg in step.args]), nodes=self._nodes,
            elided=tuple([self._value(value) for value in step.elided]),
            reads=tuple([self._source(source) for source in step.reads]),
            writes=tuple([self._source(source) for source in step.writes]),
            retile=None if retile is None else self._retiled(retile),
            reuses=tuple([(self._value(new), self._value(old)) for new, old in step.reuses]),
            picks=tuple([(self._value(value), nbytes) for value, nbytes in step.picks]))

    def _retiled(self, retile: Callable[[str], KernelStep | None]) -> Callable[[str], KernelStep | None]:
        def again(changes: str) -> KernelStep | None:
            other = retile(changes)
            return None if other is None else self.step(other)

        return again

    def _argument(self, arg: KernelArg) -> KernelArg:
        match arg:
            case Pointer():
                return Pointer(self._source(arg.source), arg.byte_offset, arg.dtype)
            case Scalar():
                return Scalar(self._number(arg.index), arg.dtype)
            case Seed():
                return Seed(self._generator(arg.generator))
            case Offset():
                return Offset(self._generator(arg.generator), arg.increment)
            case _:
                return arg

    def _source(self, source: Value | Temporary) -> Value | Temporary:
        return self._value(source) if isinstance(source, Value) else self._temporary(source)

    def _temporary(self, old: Temporary) -> Temporary:
        """Scratch memory behind a value that both groups name, or of this group's steps alone."""
        if old not in self._temporaries:
            behind = self._behind.get(old)
            self._temporaries[old] = self._scratch.of(behind) if isinstance(behind, Value) else self._scratch.more(old.nbytes)
        return self._temporaries[old]

    def _value(self, value: Value) -> Value:
        other = self._names[value]
        assert isinstance(other, Value)
        return other

    def _number(self, index: int) -> int:
        other = self._names[index]
        assert isinstance(other, int)
        return other

    def _generator(self, generator: Buffer) -> Buffer:
        other = self._names[generator]
        assert isinstance(other, Buffer)
        return other

