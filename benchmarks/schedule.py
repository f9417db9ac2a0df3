"""What does scheduling cost? Reorders recorded nodes on a cache miss, enters segments, runs a scheduled step on a hit.

    python -m benchmarks.schedule [--save]
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from typing import Callable

import torch

import lazy_backend
from barriers.order import order_segments
from barriers.wishes import Moves, Wish
from benchmarks.common import save, table
from ir_nodes import Access, BufferKind, Graph, Layout, SegmentCall
from lazy_backend import LazyScheduler, segment

SIZES = ((1_000, 20), (10_000, 200), (100_000, 200), (100_000, 2_000))


def pairs(nodes: int, segments: int) -> tuple[Graph, list[Wish]]:
    """Segments of equal length, each of which reads the one two before it; of each pair the second is to run first."""
    graph = Graph()
    layout = Layout.contiguous(torch.float32, (4,))
    ends = [graph.add_buffer(16, BufferKind.INPUT, live=True)] * 2
    for number in range(segments):
        call, last = SegmentCall(f"s{number}"), ends[number % 2]
        for _ in range(nodes // segments):
            made = graph.add_buffer(16)
            graph.record("aten::sin.out", [Access(last, layout), Access(made, layout, "w")]).segment = call
            last = made
        ends[number % 2] = last
    return graph, [Wish(f"s{number + 1}", f"s{number}", Moves.EARLIER) for number in range(0, segments - 1, 2)]


def miss(nodes: int, segments: int, rounds: int) -> float:
    """Milliseconds of processor time, the median of ``rounds`` fresh graphs."""
    times = []
    for _ in range(rounds):
        graph, wishes = pairs(nodes, segments)
        gc.collect()
        start = time.process_time()
        report = order_segments(graph, wishes)
        times.append((time.process_time() - start) * 1e3)
        assert len(report.honoured) == len(wishes) and not report.refusals
    return statistics.median(times)


def per_call(run: Callable[[], object], times: int) -> float:
    """Microseconds of processor time of a call, the best of five rounds."""
    found = []
    for _ in range(5):
        start = time.process_time()
        for _ in range(times):
            run()
        found.append((time.process_time() - start) / times * 1e6)
    return min(found)


def entry() -> float:
    """Microseconds to enter and leave a segment and its backward."""
    lazy_backend.mark_step()

    def run() -> None:
        for _ in range(100):
            with segment("entry", backward="entry_bwd"):
                pass
        x.add_(1)
        lazy_backend.mark_step()

    x = torch.zeros(1, device="lazysched")
    alone = per_call(lambda: (x.add_(1), lazy_backend.mark_step()), 100)
    return (per_call(run, 100) - alone) / 100


def hit(ops: int, parts: int) -> tuple[float, float, int]:
    """Microseconds of a step of ``ops`` ops in segments, as recorded and scheduled, and compiles while they were measured."""
    x = torch.zeros(4, device="lazysched")
    schedule = [f"p{number}" for number in reversed(range(parts))]

    def step() -> None:
        ends = []
        for number in range(parts):
            with segment(f"p{number}"):
                y = x
                for _ in range(ops // parts):
                    y = y + 1
                ends.append(y)
        lazy_backend.mark_step()

    def measure() -> tuple[float, int]:
        for _ in range(3):
            step()
        compiles = lazy_backend.stats()["compiles"]
        return per_call(step, 20), lazy_backend.stats()["compiles"] - compiles

    plain, compiled = measure()
    scheduler = LazyScheduler(schedule=schedule).start()
    try:
        scheduled, more = measure()
        order = scheduler.recorded_execution_order()
    finally:
        scheduler.stop()
    assert order == schedule, order[:4]
    return plain, scheduled, compiled + more


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--save", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    misses = [{"nodes": nodes, "segments": segments, "ms": miss(nodes, segments, arguments.rounds)} for nodes, segments in SIZES]
    rows = [(f"{one['nodes']:,}", one["segments"], f"{one['ms']:.1f}", f"{one['ms'] / one['nodes'] * 1e3:.2f}") for one in misses]
    print(table(("nodes", "segments", "ms", "us a node"), rows))
    plain, scheduled, compiles = hit(2_000, 50)
    cost = entry()
    print(f"\nentering a segment and its backward: {cost:.1f} us")
    print(f"a step of 2,000 ops in 50 segments on a hit: {plain / 1e3:.2f} ms as recorded, {scheduled / 1e3:.2f} ms scheduled, "
          f"{compiles} compiles")
    if arguments.save:
        save("schedule", {"miss": misses, "entry_us": cost, "hit_us": {"recorded": plain, "scheduled": scheduled}})


if __name__ == "__main__":
    main()
