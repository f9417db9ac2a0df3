"""Programs that wait for one another, interpreted one at a time. Imports nothing of ours.

A program of a cluster tells the others what it has and goes on when all have told it. Each runs in a thread of its own, of which
one is awake: it hands over when it waits, or ends.
"""

from __future__ import annotations

import threading
from typing import Any, Callable, Sequence


class Turns:
    """Runs ``count`` programs: ``run(number)`` each, after ``enter(number)`` whenever it goes on. `meet`, called by a program,
    gives what all programs passed to the same meeting, in the order of their numbers."""

    def __init__(self, count: int, run: Callable[[int], None], enter: Callable[[int], None]) -> None:
        self._count, self._run, self._enter = count, run, enter

    def all(self) -> None:
        """Run them. Raises what a program raises."""
        self._told: list[list[Any]] = [[] for _ in range(self._count)]  # by each, at one meeting after the other
        self._current, self._left = 0, set(range(self._count))
        if self._count == 1:
            self._enter(0)
            self._run(0)
            return
        self._awake = [threading.Semaphore(0) for _ in range(self._count)]
        self._done = threading.Semaphore(0)
        self._error: BaseException | None = None
        threads = [threading.Thread(target=self._program, args=(number,), daemon=True) for number in range(self._count)]
        for thread in threads:
            thread.start()
        self._awake[0].release()
        self._done.acquire()
        if self._error is not None:
            raise self._error
        for thread in threads:
            thread.join()

    def meet(self, told: Any) -> Sequence[Any]:
        """What all have told, when all have."""
        number = self._current
        meeting = len(self._told[number])
        self._told[number].append(told)
        while any(len(others) <= meeting for others in self._told):
            self._hand_over(number)
            self._awake[number].acquire()
            self._enter_as(number)
        return [others[meeting] for others in self._told]

    def _program(self, number: int) -> None:
        self._awake[number].acquire()
        self._enter_as(number)
        try:
            self._run(number)
        except BaseException as error:  # told to who asked for the programs
            self._error = error
            self._done.release()
            return
        self._left.discard(number)
        if self._left:
            self._hand_over(number)
        else:
            self._done.release()

    def _enter_as(self, number: int) -> None:
        self._current = number
        self._enter(number)

    def _hand_over(self, number: int) -> None:
        """To the next one that has not ended, from the first again behind the last."""
        following = [*range(number + 1, self._count), *range(number + 1)]
        self._awake[next(other for other in following if other in self._left)].release()
