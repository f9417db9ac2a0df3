"""The lists of a report by `explain`: what ATen runs and why, what shares no kernel and why, what other passes did and refused.
Imports `codegen.explanation` and `ir_nodes`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Sequence

from codegen.explanation import Explanation, StepFacts
from ir_nodes import settings
from ir_nodes.optimisations import OPTIMISATIONS
from ir_nodes.remarks import Remark

LONGEST = 20
"""Lines of a list, or steps of a table three times as many, that are shown unless all are asked for."""

PASSES = ("fold", "cse", "recompute", "peak_order", "pad_rows", "inplace")
"""Optimisations of a whole graph, which are told of even where there was nothing to do."""
OCCASIONAL = ("product_bias", "epilogues", "join_products", "product_sums", "channels_last", "conv_bias", "conv_gradients",
              "own_part", "copy_engines", "attention_sums", "reader_order", "packed_masks", "overlap_launches")
"""Those that few graphs give an occasion for."""
MEASURED = ("fusion", "templates", "attention", "autotune", "products")
"""Those that settings ask for, most of them decided by measurement."""


@dataclass(frozen=True, slots=True)
class Section:
    title: str
    lines: tuple[str, ...]


def sections(one: Explanation) -> list[Section]:
    """The lists that are not empty, each with all of its lines."""
    found = [Section("run by ATen, because", tuple(reasons(one.steps))),
             Section("not in one kernel, because", tuple(refusals(one))),
             Section("other optimisations of the whole graph", tuple(passes(one)))]
    return [section for section in found if section.lines]


def reasons(steps: Sequence[StepFacts]) -> list[str]:
    """Each reason why ATen runs an op, with the ops."""
    found: dict[str, dict[str, int]] = {}
    for step in steps:
        if not step.is_kernel:
            ops = found.setdefault(step.why, {})
            name = step.name if step.by == "ATen" else f"{step.name} by {step.by}"
            ops[name] = ops.get(name, 0) + 1
    return [f"{why}: " + ", ".join(times(name, count) for name, count in ops.items()) for why, ops in found.items()]


def refusals(one: Explanation) -> list[str]:
    return [times(f"{first} and {second}: {reason}", count) for (first, second, reason), count in one.refusals]


def passes(one: Explanation) -> list[str]:
    """For each optimisation: its name, what it is for, and under that what it did and what it refused."""
    lines: list[str] = []
    for name in (*PASSES, *OCCASIONAL, *MEASURED):
        mine = [(remark, count) for remark, count in one.remarks if remark.optimisation == name]
        if name not in PASSES and not mine:
            continue
        off = not settings.enabled(name)
        head = f"{name} ({'measured: ' if name in MEASURED else ''}{OPTIMISATIONS[name]})"
        lines.append(f"{head}: " + ("switched off" if off else summed(mine)))
        lines += [f"  {told(remark, count)}" for remark, count in mine]
    return lines


def summed(remarks: Sequence[tuple[Remark, int]]) -> str:
    done, refused = (sum(count for remark, count in remarks if remark.done is how) for how in (True, False))
    parts = [f"{number} {what}" for number, what in ((done, "done"), (refused, "refused")) if number]
    return ", ".join(parts) or "nothing to do"


def told(remark: Remark, count: int) -> str:
    return ("" if remark.done else "refused: ") + times(str(remark), count)


def times(what: str, count: int) -> str:
    return f"{what} ({count} times)" if count > 1 else what


def shortened(lines: Sequence[str], everything: bool, longest: int = LONGEST, what: str = "lines") -> list[str]:
    """The lines, or the first of them with a word of how many more there are and how to see them."""
    if everything or len(lines) <= longest + 1:
        return list(lines)
    more = f"... and {len(lines) - longest} more {what}; .text(everything=True) of what explain gives shows all"
    return [*lines[:longest], more]
