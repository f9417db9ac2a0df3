"""Makes a plan's steps of fused groups, with what each waits for. Imports `ir_nodes` and codegen's planning modules."""

from __future__ import annotations

from typing import Iterable, Mapping, Sequence

from codegen.alike import Emitter
from codegen.engine import Unmade
from codegen.group import Group, Unit
from codegen.kernel import ExternStep, KernelStep, Temporary
from codegen.scratch import Scratch
from codegen.tuning import Tuning
from ir_nodes.node import Buffer, Value

Step = KernelStep | ExternStep
Users = Mapping[Value, Iterable[Unit]]


class Steps:
    """``steps`` in order, and for each in ``needs`` the positions of those that it waits for."""

    def __init__(self, wanted: Iterable[Value], users: Users, tuning: Tuning) -> None:
        self.steps: list[Step] = []
        self.needs: list[tuple[int, ...]] = []
        self.scratch = Scratch()
        self._wanted, self._users = dict.fromkeys(wanted), users
        self._emitter = Emitter(self.scratch, tuning)
        self._made: dict[Group, tuple[int, ...]] = {}
        self._before: dict[Group, tuple[int, ...]] = {}

    def add(self, group: Group) -> None:
        """Append the steps of ``group``, whose predecessors are all there. Raises Unmade where its kernel can't be written."""
        before = tuple(dict.fromkeys(step for pred in group.preds for step in self._awaited(pred, group)))
        try:
            made = self._emit(group)
        except Exception as error:  # a fault in writing one kernel must not cost the others
            nodes = list(dict.fromkeys(unit.node for unit in group.units))
            names = ", ".join(dict.fromkeys(node.name for node in nodes))
            raise Unmade(nodes, f"a kernel of {names}: {type(error).__name__}: {error}") from error
        self._made[group], self._before[group] = tuple(range(len(self.steps), len(self.steps) + len(made))), before
        for step in made:
            self.needs.append(before)
            before = (len(self.steps),)
            self.steps.append(step)

    def _emit(self, group: Group) -> Sequence[Step]:
        if not group.fusible:
            return [ExternStep(group.units[0].node, group.units[0].reason)]
        inside = dict.fromkeys(group.units)
        outside = {value for unit in group.units for value in unit.makes
                   if value in self._wanted or any(user not in inside for user in self._users.get(value, ()))}
        return self._emitter.emit(group, outside)

    def _awaited(self, pred: Group, group: Group) -> tuple[int, ...]:
        """The steps of ``pred`` that ``group`` waits for: the first of a split reduction's two where only that one matters."""
        made = self._made[pred]
        if len(made) != 2:
            return made[-1:] or self._before[pred]
        values = [value for unit in group.units for value in (*unit.needs, *unit.makes)]
        mine = {self.scratch.of(value) if value in self.scratch else value.buffer for value in values}
        first, last = (mine & memory(self.steps[end]) for end in (made[0], made[-1]))
        return made[:1] if first and not last else made[-1:]


def memory(step: Step) -> set[Buffer | Temporary]:
    """What a kernel loads from or stores to."""
    assert isinstance(step, KernelStep)
    return {value if isinstance(value, Temporary) else value.buffer for value in (*step.reads, *step.writes)}
