"""What became of a schedule, as one HTML page without a network. Imports `barriers`, `page` and `schedule_report`."""

from __future__ import annotations

from html import escape
from typing import Iterable, Sequence

from barriers.story import Box, Outlook, Story
from ir_nodes import SegmentCall
from lazy_backend.page import document
from lazy_backend.schedule_report import StepReport, seconds, size

_WIDTH, _LANE, _ROW = 1000, 30, 24
_SCRIPT = """
const all = (query, root = document) => [...root.querySelectorAll(query)];
for (const part of all("[data-s]")) {
  const mark = on => {
    document.body.classList.toggle("dim", on);
    for (const same of all("[data-s]")) same.classList.toggle("on", on && same.dataset.s === part.dataset.s);
  };
  part.addEventListener("mouseenter", () => mark(true));
  part.addEventListener("mouseleave", () => mark(false));
}
const stretch = (shape, name, by) => {
  if (!shape.hasAttribute(name)) return;
  shape.dataset[name] ??= shape.getAttribute(name);
  shape.setAttribute(name, shape.dataset[name] * by);
};
for (const zoom of all("input[type=range]"))
  zoom.addEventListener("input", () => all("svg.time", zoom.closest("section")).forEach(svg => {
    const [,, , height] = svg.getAttribute("viewBox").split(" ");
    svg.setAttribute("viewBox", `0 0 ${1000 * zoom.value} ${height}`);
    svg.style.width = zoom.value * 100 + "%";
    for (const shape of all("rect, text", svg)) for (const name of ["x", "width"]) stretch(shape, name, zoom.value);
  }));
"""


def page(step: StepReport) -> str:
    """The whole page."""
    stories = step.stories()
    parts = [f"<h1>Schedule of the last step</h1>{tiles(step, stories)}", wishes(step)]
    for number, story in enumerate(stories, 1):
        which = f" {number} of {len(stories)}" if len(stories) > 1 else ""
        parts.append(recording(story, which))
    if len(stories) < len(step.recordings):
        parts.append('<p class="soft">Pictures of older recordings are not kept: ask for the report sooner after the step.</p>')
    return document("Schedule", "".join(parts), _SCRIPT)


def tiles(step: StepReport, stories: Sequence[Story]) -> str:
    """What matters most, each figure beside that of the recorded order."""
    told: list[tuple[str, str, str]] = []
    honoured = sum(len(report.honoured) for report in step.recordings)
    refused = sum(not refusal.partly for refusal in step.refusals)
    why = "the others are refused by data flow" if refused else ""
    told.append(("orders honoured", f"{honoured} of {honoured + refused}", why))
    if stories:
        before, after = [story.recorded for story in stories], [story.scheduled for story in stories]
        told.append(("time, estimated", seconds(sum(one.seconds for one in after)),
                     f"recorded order: {seconds(sum(one.seconds for one in before))}"))
        told.append(("memory held at most", size(max(one.peak for one in after)),
                     f"recorded order: {size(max(one.peak for one in before))}"))
        talking = sum(one.communicating for one in after)
        if talking:
            told.append(("communication beside computation", f"{1 - sum(one.exposed for one in after) / talking:.0%}",
                         f"of {seconds(talking)}; recorded order: {1 - sum(one.exposed for one in before) / talking:.0%}"))
    each = (f'<div class="tile"><span>{escape(name)}</span><b>{escape(value)}</b><span>{escape(more)}</span></div>'
            for name, value, more in told)
    return f'<div class="tiles">{"".join(each)}</div>'


def wishes(step: StepReport) -> str:
    """What was wanted, and what became of each wish."""
    refused = {(str(one.earlier.name), str(one.later.name)): one for one in step.refusals}
    rows = []
    for wish in step.wanted:
        refusal = refused.get((wish.earlier, wish.later))
        kind, mark = ("good", "&#10003;") if refusal is None else ("part", "~") if refusal.partly else ("bad", "&#10007;")
        why = f": {escape(refusal.reason)}" if refusal else ""
        rows.append(f'<li><b class="{kind}">{mark}</b> <code>{escape(str(wish))}</code>{why} '
                    f'<span class="soft">{escape(wish.cause)}</span></li>')
    asked = {(wish.earlier, wish.later) for wish in step.wanted}
    rows += [f'<li><b class="{"part" if one.partly else "bad"}">{"~" if one.partly else "&#10007;"}</b> {escape(str(one))}</li>'
             for pair, one in refused.items() if pair not in asked]
    rows += [f'<li class="bad">{escape(problem)}</li>' for problem in [*step.problems, *step.differences]]
    return f'<h2>Wanted</h2><div class="box"><ul>{"".join(rows) or "<li>nothing: the recorded order</li>"}</ul></div>'


def recording(story: Story, which: str) -> str:
    """Lanes over time, the two orders, the table."""
    end = max(story.recorded.seconds, story.scheduled.seconds)
    zoom = '<label class="soft">zoom <input type="range" min="1" max="20" step="0.5" value="1"></label>'
    figures = lanes(story.recorded, end, "recorded order, estimated") + lanes(story.scheduled, end, "order that ran, estimated")
    if story.measured:
        taken = measured(story)
        figures += lanes(taken, taken.seconds, "order that ran, measured (of communication, what was waited for)")
    return (f'<section><h2>Lanes over time{which} {zoom}</h2><div class="box">{figures}</div>'
            f'<h2>Order{which}</h2><div class="box">{slopes(story)}</div>'
            f'<h2>Segments{which}</h2><div class="box scroll">{table(story)}</div></section>')


def measured(story: Story) -> Outlook:
    """The measured times: of communication only what was waited for."""
    boxes, now = [], 0.0
    for call, waits, took in story.measured:
        boxes.append(Box(call, waits, now, now + took, 0))
        now += took
    waited = sum(one.seconds for one in story.measured if one.waits)
    return Outlook(tuple(boxes), 0, now, now - waited, waited, waited)


def lanes(outlook: Outlook, end: float, title: str) -> str:
    """Computation, and below it communication, if there is any."""
    names = ["computation", *(["communication"] if outlook.communicating else [])]
    height = len(names) * (_LANE + 8) + 18
    shapes = [f'<rect class="lane" x="0" y="{row * (_LANE + 8)}" width="{_WIDTH}" height="{_LANE}" rx="4"/>'
              for row in range(len(names))]
    shapes += [shape for box in outlook.boxes for shape in drawn(box, end or 1.0)]
    shapes += [f'<text class="axis" x="{part * _WIDTH:.0f}" y="{height - 4}" text-anchor="{anchor}">{seconds(end * part)}</text>'
               for part, anchor in ((0.0, "start"), (0.5, "middle"), (1.0, "end"))]
    return (f'<figure><figcaption>{title}: {" above ".join(names)}</figcaption><div class="scroll">'
            f'<svg class="time" viewBox="0 0 {_WIDTH} {height}" role="img">{"".join(shapes)}</svg></div></figure>')


def drawn(box: Box, end: float) -> list[str]:
    """One stretch of a lane that ends at ``end``, with its name where that fits."""
    left, width = box.start / end * _WIDTH, max((box.end - box.start) / end * _WIDTH, 0.4)
    top = (_LANE + 8) * box.collective
    name = str(box.call) if box.call else "communication" if box.collective else "no segment"
    fill = f'fill="{colour(box.call)}"' if box.call else 'class="none"'
    count = f" {box.ops} ops," if box.ops else ""
    told = f"{name}:{count} {seconds(box.end - box.start)} from {seconds(box.start)}"
    place = f'x="{left:.2f}" y="{top}" width="{width:.2f}" height="{_LANE}" rx="2"'
    shapes = [f'<rect data-s="{escape(name)}" {fill} {place}><title>{escape(told)}</title></rect>']
    if box.call and width > 7 * len(name):
        shapes.append(f'<text class="in" x="{left + 4:.2f}" y="{top + 19}">{escape(name)}</text>')
    return shapes


def slopes(story: Story) -> str:
    """Recorded on the left, run on the right, a line for each segment."""
    shapes = ['<text class="axis" x="300" y="14" text-anchor="end">recorded</text><text class="axis" x="700" y="14">run</text>']
    for row in story.rows:
        name = str(row.call)
        left, right = (place * _ROW + 14 for place in row.places)
        shapes.append(f'<g data-s="{escape(name)}"><text x="300" y="{left + 4}" text-anchor="end">{escape(name)}</text>'
                      f'<path d="M 310 {left} C 500 {left} 500 {right} 690 {right}" fill="none" stroke="{colour(row.call)}" '
                      f'stroke-width="3"/><text x="700" y="{right + 4}">{escape(name)}</text></g>')
    return f'<svg viewBox="0 0 {_WIDTH} {len(story.rows) * _ROW + 30}" role="img">{"".join(shapes)}</svg>'


def table(story: Story) -> str:
    """A row for each run of a segment."""
    measured = any(row.measured is not None for row in story.rows)
    head = ["segment", "recorded as", "ran as", "ops", "estimated", *(["measured"] if measured else []), "communication", "made",
            "freed", "held by delay", "needs"]
    rows = []
    for row in story.rows:
        took = [seconds(row.measured) if row.measured is not None else ""] if measured else []
        talked, held = seconds(row.communication) if row.communication else "", size(row.held) if row.held else ""
        cells = [*map(str, row.places), str(row.ops), seconds(row.seconds), *took, talked, size(row.made), size(row.freed), held,
                 ", ".join(row.needs)]
        name = f'<td><span class="dot" style="background:{colour(row.call)}"></span>{escape(str(row.call))}</td>'
        rows.append(f'<tr data-s="{escape(str(row.call))}">{name}{columns("td", cells)}</tr>')
    return f'<table><thead><tr>{columns("th", head)}</tr></thead><tbody>{"".join(rows)}</tbody></table>'


def columns(tag: str, cells: Iterable[str]) -> str:
    return "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells)


def colour(call: SegmentCall) -> str:
    """The same for all runs of a segment, and alike for no two names that are near each other in an alphabet."""
    number = 0
    for letter in call.name:
        number = (number * 31 + ord(letter)) % 360_007
    return f"hsl({number * 137.508 % 360:.0f}, 52%, {42 if call.backward else 50}%)"
