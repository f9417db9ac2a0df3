"""Shows what becomes of recorded ops: kernels, what was not fused and why, bytes, memory. Imports codegen and parts below."""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, Callable, Iterable, Sequence

import torch

from barriers.pipeline import ordered_passes, run_passes
from codegen.combo import combine
from codegen.explanation import Explanation, StepFacts
from codegen.explanation import explain as explain_plan
from codegen.fuse import plan
from ir_nodes import Graph
from ir_nodes.node import Frame
from lazy_backend import api, core, debug, flush, orders
from lazy_backend.page import bars, document
from lazy_backend.schedule_report import seconds, size

_HEAD = ("step", "what runs", "ops", "reads", "writes", "estimated", "memory held", "first line")
_KEYS = itertools.count(1 << 62)  # of recordings that are compiled to be looked at


@dataclass(frozen=True, slots=True)
class Explained:
    """What `explain` found; ``str()`` of it is the report. ``engine``: the one in force; ``recordings``: one for each barrier."""

    engine: str
    recordings: tuple[Explanation, ...]

    def __str__(self) -> str:
        return "\n\n".join(text(one, number, len(self.recordings)) for number, one in enumerate(self.recordings, 1)) + (
            "" if self.engine == "triton" else f"\n\n{other_engine(self.engine)}")


def explain(what: torch.Tensor | Iterable[torch.Tensor] | Callable[..., Any], *args: Any,
            html: str | os.PathLike[str] | None = None, **kwargs: Any) -> Explained:
    """How the ops behind some tensors, or those of a call ``what(*args, **kwargs)``, become kernels: `print` what this returns.

    For tensors nothing runs. A call runs, barriers and all, and whatever it records is explained, known or not. ``html``: a file
    for the same with pictures, which needs no network. Times and bytes are estimates (`ir_nodes.estimate`). Raises ValueError for
    tensors that are not lazysched tensors of one device, and what the call raises.
    """
    graphs = recorded_by(lambda: what(*args, **kwargs)) if callable(what) else [optimised(what)]
    rates = orders.rates()
    plans = [(graph, combine(plan(graph))) for graph in graphs if graph.nodes]
    found = Explained(flush.engine_name(), tuple(explain_plan(*both, rates) for both in plans))
    if html is not None:
        Path(html).write_text(page(found), encoding="utf-8")
    return found


def optimised(tensors: torch.Tensor | Iterable[torch.Tensor]) -> Graph:
    """What is recorded for ``tensors``, as the engine would get it."""
    return run_passes(debug.graph(tensors), ordered_passes())[0]


def recorded_by(call: Callable[[], Any]) -> list[Graph]:
    """The graphs of all that ``call`` records, as the engine gets them."""
    api.mark_step()
    graphs: list[Graph] = []
    watch = graphs.append
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


def text(one: Explanation, number: int = 1, of: int = 1) -> str:
    """One recording in words and a table."""
    title = f"recording {number} of {of}: " if of > 1 else ""
    rows = [_HEAD, *(row(*both) for both in zip(itertools.count(), one.steps, one.held))]
    widths = [max(len(cells[column]) for cells in rows) for column in range(len(_HEAD))]
    lines = [title + summary(one), ""]
    lines += ["  ".join(cell.ljust(width) for cell, width in zip(cells, widths)).rstrip() for cells in rows]
    lines += ["", "run by ATen, because:", *(f"  {reason}" for reason in reasons(one.steps))] if reasons(one.steps) else []
    lines += ["", "not in one kernel, because:", *(f"  {told}" for told in refusals(one))] if one.refusals else []
    return "\n".join(lines)


def summary(one: Explanation) -> str:
    alone = sum(step.alone for step in one.steps)
    calls = len(one.steps) - one.kernels
    peak = max(one.held, default=0)
    steps = f"{counted(one.ops, 'op')} in {counted(one.kernels, 'kernel')} and {counted(calls, 'ATen call')}"
    return (f"{steps}; {size(one.moved)} moved, {size(alone)} if each op ran by itself; {seconds(one.seconds)} estimated; "
            f"{size(peak)} held at most")


def counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def row(number: int, step: StepFacts, held: int) -> tuple[str, ...]:
    what = step.name if step.is_kernel else f"{step.name} (ATen)"
    return (str(number), what, str(len(step.nodes)), size(step.read), size(step.written), seconds(step.seconds), size(held),
            str(frame_of(step) or ""))


def frame_of(step: StepFacts) -> Frame | None:
    return next((node.frame for node in step.nodes if node.frame is not None), None)


def reasons(steps: Sequence[StepFacts]) -> list[str]:
    """Each reason why ATen runs an op, with the ops."""
    found: dict[str, dict[str, int]] = {}
    for step in steps:
        if not step.is_kernel:
            ops = found.setdefault(step.why, {})
            ops[step.name] = ops.get(step.name, 0) + 1
    return [f"{why}: " + ", ".join(f"{name} ({count})" if count > 1 else name for name, count in ops.items())
            for why, ops in found.items()]


def refusals(one: Explanation) -> list[str]:
    return [f"{first} and {second}: {reason}" + (f" ({count} times)" if count > 1 else "")
            for (first, second, reason), count in one.refusals]


def page(found: Explained) -> str:
    """The report as one HTML page."""
    parts = ["<h1>What becomes of the recorded ops</h1>"]
    for number, one in enumerate(found.recordings, 1):
        parts.append(f"<h2>Recording {number} of {len(found.recordings)}</h2><p>{escape(summary(one))}</p>")
        names = [label(step) for step in one.steps]
        times = [step.seconds for step in one.steps]
        parts.append(bars("estimated time of each step", list(zip(names, times, map(seconds, times)))))
        parts.append(bars("memory held while it runs", list(zip(names, one.held, map(size, one.held)))))
        body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row(*both)) + "</tr>"
                       for both in zip(itertools.count(), one.steps, one.held))
        head = "".join(f"<th>{cell}</th>" for cell in _HEAD)
        parts.append(f'<div class="scroll box"><table><tr>{head}</tr>{body}</table></div>')
        for title, told in (("Run by ATen, because", reasons(one.steps)), ("Not in one kernel, because", refusals(one))):
            if told:
                lines = "".join(f"<li>{escape(line)}</li>" for line in told)
                parts.append(f'<h2>{title}</h2><div class="box"><ul>{lines}</ul></div>')
    if found.engine != "triton":
        parts.append(f'<p class="soft">{escape(other_engine(found.engine))}</p>')
    return document("What becomes of the recorded ops", "".join(parts))


def label(step: StepFacts) -> str:
    return step.name if step.is_kernel else f"{step.name} (ATen)"
