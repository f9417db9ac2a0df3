"""What an asynchronous collective on lazy tensors returns. Imports torch only."""

from __future__ import annotations

from typing import Any, Sequence

import torch
import torch.distributed as dist

Tensor = torch.Tensor


class Recorded(dist.Work):
    """A collective that is recorded. Its result may be used at once: whoever reads it runs after it, so nobody has to wait."""

    def __init__(self, tensors: Sequence[Tensor], source: int = -1) -> None:
        super().__init__()
        self._tensors, self._source = list(tensors), source

    def _source_rank(self) -> int:
        return self._source

    source_rank = _source_rank

    def wait(self, timeout: Any = None) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def block_current_stream(self) -> None:
        pass

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def exception(self) -> None:
        return None

    def result(self) -> list[Tensor]:
        return self._tensors

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """Done, and its value is the tensors."""
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
