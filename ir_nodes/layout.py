"""How an operand looks at a buffer: dtype, size, stride and offset. Imports torch only."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True, slots=True)
class Layout:
    """A strided window on a buffer.

    ``size`` and ``stride`` are per dimension, ``offset`` counts from the buffer's first byte; strides and offset are in
    elements of ``dtype``, as in `torch.as_strided`. ``flipped``: the view has PyTorch's conjugate or negative bit, so its
    elements mean the conjugate or negative of what memory holds; only ATen resolves that.
    """

    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int = 0
    flipped: bool = False

    @staticmethod
    def contiguous(dtype: torch.dtype, size: tuple[int, ...]) -> "Layout":
        """The row-major layout of ``size`` that starts at the buffer's first byte."""
        stride, step = [], 1
        for extent in reversed(size):
            stride.append(step)
            step *= max(extent, 1)
        return Layout(dtype, tuple(size), tuple(reversed(stride)), 0)

    @property
    def numel(self) -> int:
        total = 1
        for extent in self.size:
            total *= extent
        return total

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of the elements seen, counting an element that strides reach twice twice."""
        return self.numel * self.itemsize

    @property
    def is_contiguous(self) -> bool:
        step = 1
        for extent, stride in zip(reversed(self.size), reversed(self.stride)):
            if extent == 0:
                return True
            if extent != 1 and stride != step:
                return False
            step *= extent
        return True

    @property
    def is_dense(self) -> bool:
        """True where the elements fill one run of memory without holes or overlap, in whatever dimension order."""
        step = 1
        for stride, extent in sorted((s, n) for n, s in zip(self.size, self.stride) if n != 1):
            if extent == 0:
                return True
            if stride != step:
                return False
            step *= extent
        return True

    def alike(self, other: "Layout") -> bool:
        """True where both see the same elements in the same order; the stride of a dimension of one element does not count."""
        same = (self.dtype, self.size, self.offset, self.flipped) == (other.dtype, other.size, other.offset, other.flipped)
        return same and all(n == 1 or a == b for n, a, b in zip(self.size, self.stride, other.stride))

    def in_runs(self, dim: int, run: int) -> "Layout":
        """Dimension ``dim``, not negative, as two, the inner one of ``run`` elements, which divides it."""
        extent, step = self.size[dim], self.stride[dim]
        size, stride = ((*of[:dim], *two, *of[dim + 1 :]) for of, two in (
            (self.size, (extent // run, run)), (self.stride, (step * run, step))))  # fmt: skip
        return replace(self, size=size, stride=stride)

    def selected(self, dim: int, index: int) -> "Layout":
        """What has ``index`` along ``dim``, which may count from the last and goes."""
        at = dim % len(self.size)
        size, stride = ((*of[:at], *of[at + 1 :]) for of in (self.size, self.stride))
        return replace(self, size=size, stride=stride, offset=self.offset + index * self.stride[at])

    def unsqueezed(self, dim: int) -> "Layout":
        """With one more dimension, of one element, which is ``dim`` then."""
        at = dim % (len(self.size) + 1)
        size, stride = ((*of[:at], one, *of[at:]) for of, one in ((self.size, 1), (self.stride, 0)))
        return replace(self, size=size, stride=stride)

    def expanded(self, size: tuple[int, ...]) -> "Layout":
        """Broadcast to ``size``."""
        missing = len(size) - len(self.size)
        steps = zip((1,) * missing + self.size, (0,) * missing + self.stride, size)
        return replace(self, size=size, stride=tuple(step if extent == wanted else 0 for extent, step, wanted in steps))

    def turned(self) -> "Layout":
        """The matrices in the last two dimensions transposed."""
        size, stride = ((*of[:-2], of[-1], of[-2]) for of in (self.size, self.stride))
        return replace(self, size=size, stride=stride)

    def covers(self, nbytes: int) -> bool:
        """True where a write through this layout overwrites all of a buffer of ``nbytes`` bytes."""
        return self.offset == 0 and self.nbytes == nbytes and (self.is_contiguous or self.is_dense)

    def __str__(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        shape = f"{name}[{','.join(map(str, self.size))}]"
        shape += "~" if self.flipped else ""
        return shape if self.is_contiguous and self.offset == 0 else f"{shape}:{list(self.stride)}+{self.offset}"
