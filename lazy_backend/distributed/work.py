"""What an asynchronous collective on lazy tensors returns. Imports torch and `lazy_backend` parts below."""

from __future__ import annotations

from typing import Any, Sequence

import torch
import torch.distributed as dist

from barriers.barrier import BarrierKind
from lazy_backend import core
from lazy_backend.distributed import collectives

Tensor = torch.Tensor


class Recorded(dist.Work):
    """A collective that is recorded. ``wait`` is recorded too, and moves to the first reader: it holds nobody up by itself."""

    def __init__(self, outs: Sequence[Tensor], ins: Sequence[Tensor] = (), parts: Sequence[Recorded] = ()) -> None:
        super().__init__()
        self._tensors, self._sent = list(outs), list(ins)
        self._waits = list(parts) or ([self] if outs or ins else [])

    def wait(self, timeout: Any = None) -> bool:
        waits, self._waits = self._waits, []
        for one in waits:
            if one is self:
                collectives.record_wait(self._tensors, self._sent)
            else:
                one.wait()
        self._sent = []
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        """Has it arrived? Runs what is recorded, or it never would."""
        if not self._waits:
            return True
        run_recorded("Python asks whether a collective is completed")
        return all(collectives.has_arrived(one._tensors, one._sent) if one is self else one.is_completed() for one in self._waits)

    def block_current_stream(self) -> None:
        self.wait()

    def is_success(self) -> bool:
        return True

    def exception(self) -> None:
        return None

    def result(self) -> list[Tensor]:
        return self._tensors

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """Done, and its value is the tensors: whoever reads them waits."""
        self.wait()
        devices = sorted({tensor.device for tensor in self._tensors}, key=lambda device: device.index)
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future(devices=devices)
        value = Hidden(self._tensors)
        future.set_result(value)
        value.shown = True
        return future


class Hidden(list[Tensor]):
    """A list whose tensors a future does not find when it is completed: it would record an event, which ends the recording."""

    shown = False

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return (list, (tuple(self),)) if self.shown else (list, ())


class Received(Recorded):
    """What has arrived already, and from whom."""

    def __init__(self, tensors: Sequence[Tensor], source: int) -> None:
        super().__init__([])
        self._tensors, self._source = list(tensors), source

    def _source_rank(self) -> int:
        return self._source

    source_rank = _source_rank


def run_recorded(why: str) -> None:
    """Run what is recorded, on every index."""
    if core.is_started():
        for index in range(core.device_count()):
            core.get().barrier(index, BarrierKind.COLLECTIVE.label, why)
