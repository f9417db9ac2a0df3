"""What passes did and what they refused, in words, for `explain`. Imports nothing of ours.

A pass is handed a `Remarks` and tells it each case, counted: there may be thousands, which a reader wants to see once.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Remark:
    """``optimisation``: a row of `ir_nodes.optimisations`. ``done``: it was applied to ``what``, which is an op, a kernel, or ""
    for the graph; else ``why`` is the reason against it."""

    optimisation: str
    done: bool
    what: str
    why: str

    def __str__(self) -> str:
        return f"{self.what}: {self.why}" if self.what else self.why


class Remarks:
    """Remarks in the order in which each was first made, with how often it was."""

    def __init__(self) -> None:
        self._counted: dict[Remark, int] = {}

    def did(self, optimisation: str, what: str, why: str) -> None:
        """``optimisation`` was applied."""
        self._note(Remark(optimisation, True, what, why))

    def refused(self, optimisation: str, what: str, why: str) -> None:
        """``optimisation`` would have been possible but for ``why``."""
        self._note(Remark(optimisation, False, what, why))

    def _note(self, remark: Remark) -> None:
        self._counted[remark] = self._counted.get(remark, 0) + 1

    def all(self) -> tuple[tuple[Remark, int], ...]:
        """Every remark with its count, the most frequent of each optimisation first."""
        order = {name: place for place, name in enumerate(dict.fromkeys(remark.optimisation for remark in self._counted))}
        return tuple(sorted(self._counted.items(), key=lambda item: (order[item[0].optimisation], not item[0].done, -item[1])))
