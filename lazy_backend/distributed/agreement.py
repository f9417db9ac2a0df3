"""Do all ranks start their collectives in one order? Asked before a new plan first runs. Imports `lazy_backend` parts below.

Collectives of a group are numbered as they start, on every rank alike however it cuts its program into recordings. A rank
with a new plan publishes what it is about to start from its next number on, and asks its neighbours what they start from
there. A neighbour that has a new plan too answers from that; one that runs a cached plan answers as soon as it has begun the
collective of that number, so that a rank whose cache hits takes part without doing anything on its way: a thread of its own
watches the store. What a neighbour could not know yet is asked again before the collective in question starts.

A rank waits `PATIENCE` for an answer, then goes on, and its thread goes on watching: so where neighbours wait for what this
rank has still to start, in another group, the question costs time and no deadlock.
"""

from __future__ import annotations

import atexit
import json
import math
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Sequence

import torch.distributed as dist

from barriers.collectives import starts
from ir_nodes import Graph, Node
from ir_nodes.node import Operand, Target
from lazy_backend import flush
from lazy_backend.distributed import collectives

PATIENCE = 30.0
NEIGHBOURS = 8
KEPT = 100_000  # collectives whose names are remembered
_LOOKS = ((2.0, 0.002), (60.0, 0.05), (math.inf, 0.5))  # seconds since the last news, seconds between two looks at the store
Entry = tuple[str, str]
"""A collective as all ranks see it, and the user's line ("" where it is not known)."""


class CollectiveOrderError(RuntimeError):
    """Two ranks start different collectives where they have to start the same; both would wait for ever."""


@dataclass(slots=True)
class Question:
    """What this rank starts from ``number`` on, and how many of those each neighbour has confirmed."""

    key: str
    number: int
    mine: list[Entry]
    waiting: list[int]
    agreed: int
    done: threading.Event = field(default_factory=threading.Event)
    late: bool = False  # nobody waits for the answers any more


class Agreement:
    """One process group's. ``store``: one that only it uses, on every rank the same."""

    def __init__(self, store: dist.Store, name: str, rank: int, size: int, timeout: timedelta) -> None:
        self._store, self._name, self._rank = store, name, rank
        self._patience = min(PATIENCE, timeout.total_seconds())
        self._neighbours = [(rank + step) % size for step in range(1, min(size - 1, NEIGHBOURS) + 1)]
        self._log: deque[Entry] = deque(maxlen=KEPT)
        self._started = self._agreed = self._until = 0
        self._planned: list[Entry] = []
        self._planned_from = 0
        self._lock = threading.Lock()
        self._open: list[Question] = []
        self._broken = ""
        self._asked = 1
        self._unanswered: list[tuple[str, int]] = []
        self._news = self._looked = 0.0

    # ---- in the thread that runs programs ------------------------------------------------------------------------------------

    def plan(self, entries: Sequence[Entry]) -> None:
        """``entries`` are about to start, in this order, for the first time."""
        with self._lock:
            self._planned, self._planned_from = list(entries), self._started
            self._until = self._started + len(entries)
            self._agreed = self._started
        self._watch()

    def compare(self) -> None:
        """Raises CollectiveOrderError, on every rank that asks, where a neighbour is about to start something else."""
        if not self._neighbours or self._agreed >= self._until:
            return
        self._watch()
        with self._lock:
            number = self._started
            question = Question("", number, self._known(number), list(self._neighbours), self._until)
        question.key = self._post([self._rank, number, self._neighbours])
        with self._lock:
            self._open.append(question)
        answered = question.done.wait(self._patience)
        question.late = not answered
        self._agreed = question.agreed if answered else self._until
        self.raise_if_broken()

    def start(self, entry: str) -> None:
        """A program starts this collective."""
        self.raise_if_broken()
        if not self._started:  # a cached program may run before any plan, in a group that was destroyed and made again
            self._watch()
        if self._agreed <= self._started < self._until:
            self.compare()
        with self._lock:
            at = self._started - self._planned_from
            planned = self._planned[at] if at < len(self._planned) else (entry, "")
            if planned[0] != entry:  # the rest of a plan that failed
                self._planned, planned = [], (entry, "")
            self._log.append(planned)
            self._started += 1

    def raise_if_broken(self) -> None:
        """Raises CollectiveOrderError where ranks were found to disagree."""
        if self._broken:
            with self._lock:
                self._planned = []
            raise CollectiveOrderError(self._broken)

    def _known(self, number: int) -> list[Entry]:
        """What this rank starts, or has started, from ``number`` on."""
        first = self._started - len(self._log)
        logged = [self._log[at] for at in range(max(number - first, 0), len(self._log))]
        return logged + self._planned[max(number, self._started) - self._planned_from :]

    # ---- in the thread that watches the store -----------------------------------------------------------------------------

    def _watch(self) -> None:
        self._news = time.monotonic()
        if self._neighbours:
            _watcher.watch(self)

    def stop(self) -> None:
        """Answer no more."""
        _watcher.forget(self)

    def _post(self, message: list[Any]) -> str:
        number = str(self._store.add("messages", 1))
        self._store.set(f"message/{number}", json.dumps(message))
        return number

    def look(self) -> float:
        """See what other ranks have posted: questions, answers, a difference. Returns the seconds until the next look."""
        now = time.monotonic()
        pause = next(pause for age, pause in _LOOKS if now - self._news < age)
        if now - self._looked < pause:
            return self._looked + pause - now
        self._looked = now
        while self._store.check([f"message/{self._asked}"]):
            rank, number, about = json.loads(self._store.get(f"message/{self._asked}"))
            if number < 0 and not self._broken:
                self._break(about, tell=True)
            elif number >= 0 and self._rank in about and rank != self._rank:
                self._unanswered.append((f"answer/{self._asked}/{self._rank}", number))
            self._asked += 1
            self._news = now
        self._unanswered = [one for one in self._unanswered if not self._answer(*one)]
        self._listen()
        return pause

    def _break(self, text: str, tell: bool) -> None:
        """``tell``: the thread that runs programs may wait in a collective already, so say it here."""
        self._broken = text
        if tell:
            print(f"lazysched, rank {self._rank}: {text}", file=sys.stderr, flush=True)

    def _answer(self, key: str, number: int) -> bool:
        with self._lock:
            known = self._known(number)
        if known:
            self._store.set(key, json.dumps(known))
        return bool(known)

    def _listen(self) -> None:
        """Read what neighbours answered."""
        with self._lock:
            questions = list(self._open)
        for question in questions:
            for rank in list(question.waiting):
                if not self._broken and self._store.check([f"answer/{question.key}/{rank}"]):
                    self._weigh(question, rank)
            if not question.waiting or self._broken:
                with self._lock:
                    self._open.remove(question)
                question.done.set()

    def _weigh(self, question: Question, rank: int) -> None:
        key = f"answer/{question.key}/{rank}"
        theirs: list[Entry] = [tuple(one) for one in json.loads(self._store.get(key))]
        self._store.delete_key(key)
        question.waiting.remove(rank)
        for at, (mine, other) in enumerate(zip(question.mine, theirs)):
            if mine[0] != other[0]:
                text = describe(self._name, question.number + at, {self._rank: question.mine[at:], rank: theirs[at:]})
                self._post([self._rank, -1, text])
                self._break(text, tell=question.late)
                return
        question.agreed = min(question.agreed, question.number + len(theirs))


class Watcher:
    """The thread that looks at the stores of all groups."""

    def __init__(self) -> None:
        self._watched: dict[Agreement, None] = {}
        self._thread: threading.Thread | None = None
        self._ended = False
        self._wake = threading.Event()
        self._lock = threading.Lock()

    def watch(self, one: Agreement) -> None:
        with self._lock:
            self._watched[one] = None
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="lazysched order", daemon=True)
                self._thread.start()
                atexit.register(self._end)
        self._wake.set()

    def forget(self, one: Agreement) -> None:
        with self._lock:
            self._watched.pop(one, None)

    def _end(self) -> None:
        """A thread that is still there when the interpreter ends would fail where it comes back to Python."""
        self._ended = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(5)

    def _run(self) -> None:
        while not self._ended:
            pause = _LOOKS[-1][1]
            with self._lock:
                watched = list(self._watched)
            for one in watched:
                try:
                    pause = min(pause, one.look())
                except (RuntimeError, OSError):  # the store's process has ended, and with it the run
                    self.forget(one)
            self._wake.wait(pause)
            self._wake.clear()


_watcher = Watcher()


def describe(group: str, number: int, orders: dict[int, list[Entry]]) -> str:
    """Both orders from the first difference on."""
    lines = [f"ranks would start their collectives in different orders and wait for each other for ever: group {group!r}, "
             f"from collective number {number} (counted from 0) on"]
    for rank in sorted(orders):
        lines.append(f"  rank {rank}:")
        for at, (entry, place) in enumerate(orders[rank][:10]):
            lines.append(f"    {number + at}. {entry}{' at ' + place if place else ''}")
        if len(orders[rank]) > 10:
            lines.append(f"    and {len(orders[rank]) - 10} more")
    lines.append("Call them in one order on every rank, and give every rank the same schedule and hooks.")
    return "\n".join(lines)


def entry_of(node: Node) -> tuple[str, str]:
    """The node's group, and the collective as all ranks see it."""
    outs, ins, numbers, reduce, group = node.args
    layouts = [[node.writes[arg.index].layout if isinstance(arg, Target) else arg.layout for arg in args
                if isinstance(arg, (Target, Operand))] for args in (outs, ins)]
    sizes = [tuple((layout.dtype, layout.numel) for layout in some) for some in layouts]
    return group, collectives.entry(node.name, *sizes, tuple(numbers), reduce)


def before_first_run(graph: Graph) -> None:
    """Compare the order of ``graph``'s collectives with the other ranks'. Raises CollectiveOrderError."""
    orders: dict[str, list[Entry]] = {}
    for node in starts(graph):
        if node.name not in (*collectives.POINT_TO_POINT, "launch"):
            group, entry = entry_of(node)
            orders.setdefault(group, []).append((entry, str(node.frame or "")))
    agreements = [(collectives.groups[group].agreement, entries) for group, entries in orders.items()]
    for agreement, entries in agreements:
        agreement.plan(entries)
    for agreement, _ in agreements:
        agreement.compare()


def install() -> None:
    if before_first_run not in flush.before_first_run:
        flush.before_first_run.append(before_first_run)
