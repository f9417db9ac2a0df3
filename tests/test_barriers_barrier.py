"""The barrier log: counting, ranking, bounded memory, threads."""

from __future__ import annotations

import threading

from barriers import Barrier, BarrierKind, BarrierLog
from ir_nodes import Frame

LINE = Frame("train.py", 12, "main")


def access(line: int = 12, ops: int = 3, milliseconds: float = 0.5) -> Barrier:
    frame = Frame("train.py", line, "main")
    return Barrier(BarrierKind.VALUE_ACCESS, "aten::_local_scalar_dense reads the value", frame, ops, milliseconds)


def test_every_kind_has_a_sentence_and_a_label() -> None:
    sentences = [kind.value for kind in BarrierKind]
    assert len(set(sentences)) == len(BarrierKind)
    assert all(len(sentence.split()) >= 4 for sentence in sentences)
    assert BarrierKind.DATA_DEPENDENT_SHAPE.label == "data_dependent_shape"


def test_a_barrier_prints_kind_reason_and_line() -> None:
    assert str(access()) == "value_access: aten::_local_scalar_dense reads the value at train.py:12 in main (3 ops, 0.50 ms)"
    assert str(Barrier(BarrierKind.EXIT, "exit", None, 0, 0.0)) == "exit: exit (0 ops, 0.00 ms)"


def test_counts_are_by_kind_reason_and_frame() -> None:
    log = BarrierLog()
    for barrier in (access(), access(13), access(), Barrier(BarrierKind.MARK_STEP, "mark_step()", LINE, 9, 1.0)):
        log.add(barrier)
    assert [(kind.label, frame.line, count) for (kind, _, frame), count in log.counts().items()] == [
        ("value_access", 12, 2), ("value_access", 13, 1), ("mark_step", 12, 1),
    ]  # fmt: skip
    assert log.total() == 4


def test_recent_keeps_the_newest_last_and_counts_keep_all() -> None:
    log = BarrierLog(keep=3)
    for line in range(10):
        log.add(access(line))
    assert [barrier.frame.line for barrier in log.recent()] == [7, 8, 9]
    assert log.total() == 10


def test_rows_are_bounded() -> None:
    log = BarrierLog(keep=2, rows=5)
    for line in range(100):
        log.add(access(line))
    log.add(access(3))
    counts = log.counts()
    assert len(counts) == 6
    assert counts[BarrierKind.VALUE_ACCESS, "(further places)", None] == 95
    assert counts[BarrierKind.VALUE_ACCESS, "aten::_local_scalar_dense reads the value", Frame("train.py", 3, "main")] == 2


def test_the_table_ranks_by_count_and_says_what_it_leaves_out() -> None:
    log = BarrierLog()
    log.add(Barrier(BarrierKind.MARK_STEP, "mark_step()", None, 100, 2.0))
    for ops in (4, 8):
        log.add(access(ops=ops, milliseconds=ops / 4))
    log.add(access(13))
    assert log.table(limit=2).splitlines() == [
        "count  ops each  ms each  kind          why                                        where",
        "    2         6     1.50  value_access  aten::_local_scalar_dense reads the value  train.py:12 in main",
        "    1       100     2.00  mark_step     mark_step()                                (no Python frame)",
        "and 1 more at 1 further places",
    ]


def test_an_empty_or_cleared_log_says_so() -> None:
    log = BarrierLog()
    assert log.table() == "no barrier yet"
    log.add(access())
    log.clear()
    assert log.table() == "no barrier yet" and log.recent() == [] and log.total() == 0


def test_threads_lose_no_count() -> None:
    log = BarrierLog(keep=10)

    def work() -> None:
        for _ in range(2_000):
            log.add(access())
            log.recent()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert log.total() == 8_000
