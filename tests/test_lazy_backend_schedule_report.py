"""What a scheduler reports: text and a page that agree, with estimates, measured times, memory held, lanes over time."""

from __future__ import annotations

import html.parser
import re
from pathlib import Path

import pytest
import torch

import lazy_backend
from barriers.barrier import Barrier, BarrierKind
from barriers.order import Ordered, order_segments
from barriers.story import delayed_calls, tell
from barriers.wishes import Moves, Wish, wishes_of
from ir_nodes import SegmentCall
from ir_nodes.estimate import CPU
from lazy_backend import LazyScheduler, segment
from lazy_backend.schedule_page import page
from lazy_backend.schedule_report import StepReport, seconds, size, text
from tests.device import DEVICE
from tests.towers import Tower, name_all, pair, same, train
from tests.toys import Toy

pytestmark = pytest.mark.usefixtures("no_segments_left")

END = Barrier(BarrierKind.MARK_STEP, "mark_step()", None, 1, 0.0)


class Page(html.parser.HTMLParser):
    """Every tag closes, and nothing comes from elsewhere."""

    ALONE = ("meta", "input", "rect", "path")

    def __init__(self, source: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words = ""
        self.feed(source)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert not {"src", "href"} & {name for name, _ in attrs}
        if tag not in self.ALONE or tag == "rect":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words += data


def test_text_and_page_tell_the_same(tmp_path: Path) -> None:
    model, truth = pair(Tower)
    name_all(model)
    file = tmp_path / "schedule.html"
    with LazyScheduler(schedule=["two", "one", "one_bwd", "two_bwd", "join"], measure=True) as scheduler:
        got = train(model, DEVICE)
    told = scheduler.report(html=file)
    same(got, train(truth, "cpu"))
    source = file.read_text()
    seen = Page(source)
    assert not re.search(r"https?:|@import|url\(", source) and "prefers-color-scheme: dark" in source
    for name in ("one", "two", "join", "one_bwd", "two_bwd"):
        row = next(line for line in told.splitlines() if line.startswith(f"{name} "))
        assert len(re.findall(r"[\d.]+ [mu]?s", row)) == 2, "estimated and measured"
        assert source.count(f'data-s="{name}"') >= 4
    assert "two_bwd needs `addmm` float32[4, 2]" in told and "two_bwd needs `addmm` float32[4, 2]" in seen.words
    assert "3 of 4" in seen.words and "order that ran, measured" in seen.words
    assert "memory held at most" in told and "memory held at most" in seen.words


def test_measuring_changes_no_program_for_others() -> None:
    model, _ = pair(Tower)
    name_all(model)
    counts = []
    for measure in (False, True, False, True):
        with LazyScheduler(measure=measure) as scheduler:
            train(model, DEVICE, steps=2)
        counts.append(lazy_backend.stats()["compiles"])
        assert ("measured" in scheduler.report()) == measure
    assert counts[3] == counts[1]


def test_bytes_that_wait_for_a_delayed_segment_are_counted() -> None:
    x = torch.ones(1024, device=DEVICE)
    with LazyScheduler(schedule=["other", "late"]) as scheduler:
        y = x * 2
        with segment("late"):
            small = y.sum()
        del y
        with segment("other"):
            big = x.exp()
    row = next(line for line in scheduler.report().splitlines() if line.startswith("late "))
    assert row.endswith("4 KiB"), row
    assert small.item() == 2048 and big.shape == (1024,)


def test_communication_has_a_lane_of_its_own() -> None:
    toy = Toy("x", floats=100_000)
    for number in range(4):
        toy.op(f"z{number}", "x" if not number else f"z{number - 1}")
    toy.end("layers")
    toy.talk("sum", "x")
    toy.end("sdd")
    toy.op("y", "sum", "z3")
    report = order_segments(toy.graph, [Wish("sdd", "layers", Moves.EARLIER)])
    report.graph = toy.graph
    story = tell(toy.graph, CPU)
    assert story.recorded.exposed == pytest.approx(story.recorded.communicating)
    assert story.scheduled.exposed < 0.4 * story.recorded.exposed
    assert {box.call.name for box in story.scheduled.boxes if box.collective and box.call} == {"sdd"}
    step = StepReport(wishes_of(["sdd", "layers"]), [(report, END)])
    assert "% of it beside computation; in the recorded order 0%" in text(step)
    assert "computation above communication" in Page(page(step)).words


def test_names_are_escaped_and_an_empty_step_has_a_page() -> None:
    call = SegmentCall("<b>&")
    told = page(StepReport(wishes_of(["<b>&", "c"]), [(Ordered([call], [call]), END)]))
    assert "<b>&" not in told and "&lt;b&gt;&amp;" in told
    assert "Pictures of older recordings are not kept" in Page(told).words
    assert "nothing: the recorded order" in Page(page(StepReport([], []))).words


def test_units() -> None:
    assert [seconds(value) for value in (2.0, 0.0123, 4.5e-6)] == ["2 s", "12.3 ms", "4.5 us"]
    assert [size(value) for value in (0, 2048, 3 << 30)] == ["0 B", "2 KiB", "3 GiB"]


MOVED = {
    "abcd abcd": "", "abcd bacd": "a", "abcd bcda": "a", "abcd dabc": "", "abcd cdab": "ab", "ab ba": "a",
    "abcde badce": "ac", " ": "",
}


@pytest.mark.parametrize("case", MOVED)
def test_who_counts_as_delayed(case: str) -> None:
    """Who is overtaken by one that was moved forward is not delayed."""
    recorded, scheduled = case.split(" ")
    calls = {name: SegmentCall(name) for name in recorded}
    found = delayed_calls([calls[name] for name in recorded], [calls[name] for name in scheduled])
    assert "".join(sorted(call.name for call in found)) == MOVED[case]
