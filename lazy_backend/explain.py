"""Shows what becomes of recorded ops: kernels, what was not fused and why, bytes, memory. Imports codegen and parts below."""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass
from functools import partial
from html import escape
from pathlib import Path
from typing import Any, Callable, Iterable, Sequence

import torch

from barriers.pipeline import ordered_passes, run_passes
from codegen import engines
from codegen.combo import combine
from codegen.cuda_graph import told as told_graphs
from codegen.executable import Emit
from codegen.explanation import Explanation, StepFacts
from codegen.explanation import explain as explain_plan
from codegen.fuse import plan
from codegen.lowered import Lowered
from codegen.partition import partition
from ir_nodes import BufferKind, Graph, settings
from ir_nodes.node import Frame
from ir_nodes.remarks import Remarks
from lazy_backend import api, core, debug, flush, orders
from lazy_backend.explain_lists import LONGEST, sections, shortened
from lazy_backend.garbage import uncollected
from lazy_backend.page import bars, document
from lazy_backend.schedule_report import seconds, size
from lazy_backend.step_times import StepTimes, copy_rate, with_times

_HEAD = ("step", "what runs", "ops", "reads", "writes", "estimated", "memory held", "first line")
_MEASURED_HEAD = (*_HEAD[:6], "measured", "of a copy's rate", *_HEAD[6:])
INDENTED = ' style="padding-left: 1.5rem"'
Told = tuple[Graph, Remarks]
_KEYS = itertools.count(1 << 62)  # of recordings that are compiled to be looked at


@dataclass(frozen=True, slots=True)
class Explained:
    """What `explain` found; ``str()`` of it is the report. ``engine``: the one in force; ``recordings``: one for each barrier."""

    engine: str
    recordings: tuple[Explanation, ...]

    def __str__(self) -> str:
        return self.text()

    def text(self, everything: bool = False) -> str:
        """The report; long lists whole if ``everything`` is asked for."""
        parts = [text(one, number, len(self.recordings), everything) for number, one in enumerate(self.recordings, 1)]
        return "\n\n".join(parts) + ("" if self.engine == "triton" else f"\n\n{other_engine(self.engine)}")


def explain(what: torch.Tensor | Iterable[torch.Tensor] | Callable[..., Any], *args: Any,
            html: str | os.PathLike[str] | None = None, measure: bool = False, **kwargs: Any) -> Explained:
    """How the ops behind some tensors, or those of a call ``what(*args, **kwargs)``, become kernels: `print` what this returns.

    For tensors nothing runs. A call runs, barriers and all, and whatever it records is explained, known or not. ``html``: a file
    for the same with pictures, which needs no network. Times and bytes are estimates (`ir_nodes.estimate`). ``measure``: the call
    runs twice, and what the second run takes is told step by step beside the estimates. Raises ValueError for tensors that are
    not lazysched tensors of one device or that were to be measured, and what the call raises.
    """
    if measure and not callable(what):
        raise ValueError("what is measured has to run: give explain a function that makes the tensors")
    if measure:
        found = measured(lambda: what(*args, **kwargs))  # type: ignore[operator]
    else:
        told = recorded_by(lambda: what(*args, **kwargs)) if callable(what) else [recorded_for(what)]
        found = Explained(flush.engine_name(), tuple(explained(graph, remarks) for graph, remarks in told if graph.nodes))
    if html is not None:
        Path(html).write_text(page(found), encoding="utf-8")
    return found


def optimised(tensors: torch.Tensor | Iterable[torch.Tensor]) -> Graph:
    """What is recorded for ``tensors``, as the engine would get it."""
    return recorded_for(tensors)[0]


@uncollected()
def recorded_for(tensors: torch.Tensor | Iterable[torch.Tensor]) -> Told:
    """`optimised`, and what the passes told."""
    remarks = Remarks()
    shared = partial(partition, lowered=Lowered())
    graph = run_passes(debug.graph(tensors), ordered_passes(shared, remarks, *flush.facts()))[0]
    for buffer, values in zip(graph.buffers, graph.values):
        buffer.live = buffer.live or buffer.kind is BufferKind.INPUT and len(values) == 1  # others than ``tensors`` hold it
    return graph, remarks


@uncollected()
def explained(graph: Graph, remarks: Remarks | None = None) -> Explanation:
    """The facts of the plan for ``graph``: on a GPU as the triton engine makes it, with what it has measured before."""
    remarks = remarks or Remarks()
    context = flush.context_of(0, remarks=remarks, measures=False)
    as_run = context.cuda and flush.engine_name() == "triton"
    made = flush.with_kernels_that_can_be(
        graph, lambda: engines.engine("triton").fuse(graph, context) if as_run else combine(plan(graph, remarks=remarks)))
    return explain_plan(graph, made, orders.rates(), flush.replays(), remarks)


def measured(call: Callable[[], Any]) -> Explained:
    """What a second run of ``call`` runs, with times; the first compiles, and warms the device up."""
    clocks: list[tuple[Graph, StepTimes]] = []
    told: list[Told] = []

    def time_steps(graph: Graph, steps: list[Emit], device: int) -> list[Emit]:
        timed, times = with_times(steps, device)
        clocks.append((graph, times))
        return timed

    def twice() -> Any:
        call()
        api.mark_step()
        for _, times in clocks:
            times.runs = 0
        return call()

    flush.steppers.append(time_steps)
    try:
        told += recorded_by(twice)
    finally:
        flush.steppers.remove(time_steps)
    ran = [(graph, times) for graph, times in clocks if graph.nodes and times.runs]
    return Explained(flush.engine_name(), tuple(
        explained(graph, dict(told)[graph]).with_times(times.read(), copy_rate(times.device)) for graph, times in ran))


def recorded_by(call: Callable[[], Any]) -> list[Told]:
    """The graphs of all that ``call`` records, as the engine gets them, with what passes told."""
    api.mark_step()
    graphs: list[Told] = []

    def watch(graph: Graph, remarks: Remarks) -> None:
        graphs.append((graph, remarks))

    flush.watchers.append(watch)
    core.get().set_schedule_key(next(_KEYS))  # no program is known under this key, so each recording is compiled
    try:
        kept = call()
        api.mark_step()
        del kept  # it had to live until here: what nobody holds is not computed
    finally:
        flush.watchers.remove(watch)
        orders.set_key(core.get())
    return graphs


def other_engine(name: str) -> str:
    return (f"This is what the triton engine makes of it. Here the {name} engine runs each op by itself; on a GPU, or with "
            "LAZYSCHED_ENGINE=triton, kernels run as shown.")


def text(one: Explanation, number: int = 1, of: int = 1, everything: bool = False) -> str:
    """One recording in words, a table and lists."""
    title = f"recording {number} of {of}: " if of > 1 else ""
    rows = table(one)
    widths = [max(len(cells[column]) for cells in rows) for column in range(len(rows[0]))]
    lines = [title + summary(one), "", memory(one), "CUDA graphs: " + graphs(one), ""]
    steps = ["  ".join(cell.ljust(width) for cell, width in zip(cells, widths)).rstrip() for cells in rows]
    lines += shortened(steps, everything, 3 * LONGEST, "steps")
    for section in sections(one):
        lines += ["", f"{section.title}:", *(f"  {line}" for line in shortened(section.lines, everything))]
    return "\n".join(lines)


def summary(one: Explanation) -> str:
    alone = sum(step.alone for step in one.steps)
    calls = len(one.steps) - one.kernels
    peak = max(one.held, default=0)
    steps = f"{counted(one.ops, 'op')} in {counted(one.kernels, 'kernel')} and {counted(calls, 'ATen call')}"
    took = "" if one.measured is None else f", {seconds(one.measured)} measured"
    return (f"{steps}; {size(one.moved)} moved, {size(alone)} if each op ran by itself; {seconds(one.seconds)} estimated{took}; "
            f"{size(peak)} held at most")


def graphs(one: Explanation) -> str:
    """What may replay as CUDA graphs, and what keeps the rest out."""
    if not settings.enabled("cuda_graphs"):
        return "switched off"
    return told_graphs([step.nodes for step in one.steps], [not step.is_kernel for step in one.steps],
                       [step.python for step in one.steps])


def memory(one: Explanation) -> str:
    """The memory plan in a sentence."""
    facts = one.memory
    parts = [f"{counted(number, what)} of {size(nbytes)}" for (number, nbytes), what in
             ((facts.inputs, "input"), (facts.results, "result"), (facts.between, "buffer")) if number]
    told = "memory: " + ", ".join(parts) + (" in between" if facts.between[0] else "")
    told += f"; {counted(facts.reused, 'buffer')} written over operands that die" if facts.reused else ""
    told += f"; {size(facts.apart)} in one arena of {size(facts.arena)}" if facts.arena else ""
    number, nbytes = facts.registers
    return told + (f"; {counted(number, 'value')} of {size(nbytes)} in registers only" if number else "")


def table(one: Explanation) -> list[tuple[str, ...]]:
    """The steps' facts under their heads."""
    head = _HEAD if one.copy_rate is None else _MEASURED_HEAD
    return [head, *(row(number, step, held, one.copy_rate) for number, step, held in zip(itertools.count(), one.steps, one.held))]


def counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def row(number: int, step: StepFacts, held: int, copy_rate: float | None) -> tuple[str, ...]:
    return (str(number), label(step), str(len(step.nodes)), size(step.read), size(step.written), seconds(step.seconds),
            *([] if copy_rate is None else rate_of(step, copy_rate)), size(held), str(frame_of(step) or ""))


def rate_of(step: StepFacts, copy_rate: float) -> tuple[str, str]:
    """What the step took, and how its traffic compares with a copy's."""
    if not step.measured:
        return "", ""
    return seconds(step.measured), f"{(step.read + step.written) / step.measured / copy_rate:.0%}"


def frame_of(step: StepFacts) -> Frame | None:
    return next((node.frame for node in step.nodes if node.frame is not None), None)


def page(found: Explained) -> str:
    """The report as one HTML page."""
    parts = ["<h1>What becomes of the recorded ops</h1>"]
    for number, one in enumerate(found.recordings, 1):
        parts.append(f"<h2>Recording {number} of {len(found.recordings)}</h2>")
        parts += [f"<p>{escape(told)}</p>" for told in (summary(one), memory(one), "CUDA graphs: " + graphs(one))]
        names = [label(step) for step in one.steps]
        times = [step.seconds for step in one.steps]
        charts = [bars("estimated time of each step", list(zip(names, times, map(seconds, times))))]
        if one.copy_rate is not None:
            took = [step.measured or 0.0 for step in one.steps]
            charts.append(bars("measured time of each step", list(zip(names, took, map(seconds, took)))))
        charts.append(bars("memory held while it runs", list(zip(names, one.held, map(size, one.held)))))
        parts += charts if len(names) <= 3 * LONGEST else [unfolded(f"{len(names)} steps as bars", chart) for chart in charts]
        first, *rest = table(one)
        head = "".join(f"<th>{escape(cell)}</th>" for cell in first)
        rows = ["<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>" for cells in rest]
        parts.append(folded([f'<div class="scroll box"><table><tr>{head}</tr>{"".join(some)}</table></div>'
                             for some in (rows[: 3 * LONGEST], rows[3 * LONGEST :]) if some], len(rows) - 3 * LONGEST, "steps"))
        for section in sections(one):
            items = [f'<li{INDENTED if line.startswith("  ") else ""}>{escape(line.strip())}</li>' for line in section.lines]
            parts.append(f"<h2>{escape(section.title.capitalize())}</h2>" + folded(
                [f'<div class="box"><ul>{"".join(some)}</ul></div>' for some in (items[:LONGEST], items[LONGEST:]) if some],
                len(items) - LONGEST, "lines"))
    if found.engine != "triton":
        parts.append(f'<p class="soft">{escape(other_engine(found.engine))}</p>')
    return document("What becomes of the recorded ops", "".join(parts))


def folded(parts: Sequence[str], more: int, what: str) -> str:
    """The first part, and the second behind a line that says how much it is."""
    return parts[0] + "".join(unfolded(f"{more} more {what}", part) for part in parts[1:])


def unfolded(title: str, body: str) -> str:
    """What is shown once its title is clicked."""
    return f"<details><summary>{escape(title)}</summary>{body}</details>"


def label(step: StepFacts) -> str:
    return step.name if step.is_kernel else f"{step.name} ({step.by})"
