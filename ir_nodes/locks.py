"""A lock that a forked child can take."""

from __future__ import annotations

import os
import threading
import weakref

_all: weakref.WeakSet[Lock] = weakref.WeakSet()


class Lock:
    """Like `threading.Lock`, or `threading.RLock` where ``reentrant``; for ``with``.

    Another thread may hold a lock while the process forks. That thread is not in the child and would never give it back there:
    the child has new ones.
    """

    def __init__(self, reentrant: bool = False) -> None:
        self._make = threading.RLock if reentrant else threading.Lock
        self._lock = self._make()
        _all.add(self)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *exception: object) -> None:
        self._lock.release()

    def renew(self) -> None:
        self._lock = self._make()


def _renew_all() -> None:
    for lock in _all:
        lock.renew()


os.register_at_fork(after_in_child=_renew_all)
