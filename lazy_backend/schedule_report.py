"""What became of a schedule, as facts and as text. Imports `barriers` and `lazy_backend.orders`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Iterable, Sequence

from barriers.barrier import Barrier
from barriers.order import Ordered
from barriers.refusals import Refusal, at
from barriers.story import Story, tell
from barriers.wishes import Wish
from ir_nodes import SegmentCall
from lazy_backend import orders


@dataclass(frozen=True, slots=True)
class StepReport:
    """One step: what was wanted, what became of each of its recordings, and the barrier that ran it.

    ``foreign``: schedulers of other threads, whose segments are not shown.
    """

    wanted: Sequence[Wish]
    ran: Sequence[tuple[Ordered, Barrier]]
    foreign: frozenset[int] = frozenset()

    def is_own(self, call: SegmentCall) -> bool:
        return self.foreign.isdisjoint(call.owners)

    @property
    def recordings(self) -> list[Ordered]:
        return [report for report, _ in self.ran]

    @property
    def recorded(self) -> list[SegmentCall]:
        """In the program's order, each once."""
        return list(dict.fromkeys(call for report, _ in self.ran for call in report.recorded if self.is_own(call)))

    @property
    def scheduled(self) -> list[SegmentCall]:
        """In the order in which they ran."""
        return [call for report, _ in self.ran for call in report.scheduled if self.is_own(call)]

    @property
    def refusals(self) -> list[Refusal]:
        return [one for report, _ in self.ran for one in report.refusals if self.is_own(one.earlier)]

    @property
    def problems(self) -> list[str]:
        """What hooks did wrong, and what barriers ran before its turn."""
        return [*(problem for report, _ in self.ran for problem in report.problems), *self.early()]

    def early(self) -> list[str]:
        """Segments that had to run before their turn, because a value was needed or a barrier ran all that was recorded."""
        told = [f"{call} ran before its turn, because {barrier.reason}{at(barrier.frame)} needs what it makes"
                for report, barrier in self.ran for call in report.early]
        first: dict[str, int] = {}
        for number, (report, _) in enumerate(self.ran):
            for call in report.scheduled:
                first.setdefault(call.name, number)
        forced = {call.name for report, _ in self.ran for call in report.early}
        for wish in self.wanted:
            a, b = first.get(wish.earlier, -1), first.get(wish.later, -1)
            if 0 <= b < a and wish.later not in forced:
                barrier = self.ran[b][1]
                why = f"{barrier.kind.label}: {barrier.reason}{at(barrier.frame)}"
                told.append(f"wanted {wish}, but a barrier ran {wish.later} before {wish.earlier} was recorded ({why})")
        return told

    @property
    def differences(self) -> list[str]:
        return [report.difference for report in self.recordings if report.difference]

    def stories(self) -> list[Story]:
        """Estimates, and measured times where there are any; of recordings whose graph is still kept."""
        found = []
        for report in self.recordings:
            if report.graph is not None:
                found.append(tell(report.graph, orders.rates()))
                if report.measured is not None:
                    found[-1].measured = report.measured()
                    add_times(found[-1])
        return found


def add_times(story: Story) -> None:
    """Each row's share of the measured times."""
    by_call = {row.call: row for row in story.rows}
    for call, _, took in story.measured:
        for one in call.chain() if call else ():
            by_call[one].measured = (by_call[one].measured or 0.0) + took


def text(step: StepReport) -> str:
    """The step in words: what was wanted, recorded and run, what data flow forbade, what it costs."""

    def line(calls: Iterable[SegmentCall]) -> str:
        return " -> ".join(map(str, calls)) or "(nothing)"

    lines = ["wanted:", *([f"  {wish}   ({wish.cause})" for wish in step.wanted] or ["  (nothing)"])]
    lines += ["recorded: " + line(step.recorded), "run:      " + line(step.scheduled)]
    lines += step.problems
    lines += step.differences
    checked = sum(report.checked for report in step.recordings)
    lines += [f"compared with the program's order: {checked} times"] if checked else []
    lines += [f"could not be honoured: {refusal}" for refusal in step.refusals if not refusal.partly]
    lines += [f"only in part: {refusal}" for refusal in step.refusals if refusal.partly]
    for story in step.stories():
        lines += ["", *costs(story)]
    return "\n".join(lines)


def costs(story: Story) -> list[str]:
    """A table of segments, and both orders' memory and time."""
    measured = any(row.measured is not None for row in story.rows)
    header = ["segment", "ops", "estimated", *(["measured"] if measured else []), "made", "freed", "held by delay"]
    cells = [header] + [
        [str(row.call), str(row.ops), seconds(row.seconds + row.communication),
         *([seconds(row.measured) if row.measured is not None else "-"] if measured else []),
         size(row.made), size(row.freed), size(row.held)]
        for row in story.rows
    ]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    lines = [
        "  ".join(cell.rjust(width) if column else cell.ljust(width) for column, (cell, width) in enumerate(zip(row, widths)))
        for row in cells
    ]
    before, after = story.recorded, story.scheduled
    memory = f"memory held at most: {size(after.peak)}, in the recorded order {size(before.peak)} (before fusion)"
    time = f"time: {seconds(after.seconds)} estimated, in the recorded order {seconds(before.seconds)}"
    return [*(lines if story.rows else []), memory, time, *talk(story)]


def talk(story: Story) -> list[str]:
    before, after = story.recorded, story.scheduled
    if not after.communicating:
        return []
    hidden = after.communicating - after.exposed
    waited = [sum(one.seconds for one in story.measured if one.waits)] if story.measured else []
    return [*(f"waited for communication: {seconds(took)}, measured" for took in waited),
            f"communication: {seconds(after.communicating)}, {hidden / after.communicating:.0%} of it beside computation; in the "
            f"recorded order {1 - before.exposed / before.communicating:.0%} (estimated)"]


def seconds(value: float) -> str:
    for factor, unit in ((1, "s"), (1e3, "ms")):
        if value * factor >= 1:
            return f"{value * factor:.3g} {unit}"
    return f"{value * 1e6:.3g} us"


def size(nbytes: int) -> str:
    value, units = float(nbytes), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        del units[0]
    return f"{value:.4g} {units[0]}"
