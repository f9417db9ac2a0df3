"""Random tensor programs: what hypothesis draws, and the one interpreter that runs them on any device. Imports torch and
hypothesis only."""

from __future__ import annotations

from typing import Callable

import torch
from hypothesis import strategies as st

Step = tuple[str, int, int, int]

_UNARY: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    torch.tanh, torch.sigmoid, torch.relu, torch.neg, torch.abs, torch.sin, lambda t: (t * t + 1).sqrt(),
    lambda t: t.clamp(-2, 2), torch.square, lambda t: torch.nn.functional.gelu(t),
)  # fmt: skip
_BINARY: tuple[Callable[[torch.Tensor, torch.Tensor], torch.Tensor], ...] = (
    torch.add, torch.sub, torch.mul, torch.maximum, torch.minimum, lambda a, b: torch.where(a > b, a, b),
    lambda a, b: a / (b.abs() + 1), lambda a, b: torch.add(a, b, alpha=0.5),
)  # fmt: skip
_REDUCTION: tuple[Callable[[torch.Tensor, int], torch.Tensor], ...] = (
    lambda t, d: t.sum(), lambda t, d: t.mean(d), lambda t, d: t.amax(d), lambda t, d: t.sum(d, keepdim=True),
    lambda t, d: torch.softmax(t, d), lambda t, d: torch.var(t, d, correction=0), lambda t, d: torch.cumsum(t, d),
)  # fmt: skip
_IN_PLACE: tuple[Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor], ...] = (
    lambda t, o, s: t.add_(o), lambda t, o, s: t.mul_(s), lambda t, o, s: t.copy_(o), lambda t, o, s: t.fill_(s),
    lambda t, o, s: t.zero_(), lambda t, o, s: t.tanh_(), lambda t, o, s: torch.add(o, s, out=t),
    lambda t, o, s: t.addcmul_(o, o, value=s), lambda t, o, s: t.clamp_(-1, 1),
)  # fmt: skip
KINDS = ("unary", "binary", "reduction", "view", "view", "in_place", "in_place", "in_place", "drop", "cast")


def steps(barriers: bool, max_size: int = 25) -> st.SearchStrategy[list[Step]]:
    """Programs of up to ``max_size`` steps; with ``barriers`` some steps are "barrier", which the caller defines."""
    kinds = KINDS + (("barrier", "barrier") if barriers else ())
    number = st.integers(0, 1000)
    return st.lists(st.tuples(st.sampled_from(kinds), number, number, number), min_size=1, max_size=max_size)


def inputs(device: str) -> list[torch.Tensor]:
    """float32[4, 6], [6], [3, 4, 2], [4, 1]; and float64[2, 6]."""
    base = torch.linspace(-2, 2, 24)
    made = [base.reshape(4, 6), torch.linspace(-1, 1, 6), base.flip(0).reshape(3, 4, 2)]
    made += [torch.linspace(0.1, 0.4, 4).reshape(4, 1), torch.linspace(-1, 3, 12, dtype=torch.float64).reshape(2, 6)]
    return [tensor.clone().to(device) for tensor in made]


def interpret(
    program: list[Step], tensors: list[torch.Tensor], barrier: Callable[[list[torch.Tensor], int], None] | None = None
) -> list[torch.Tensor]:
    """Run ``program`` on ``tensors`` (changed in place); returns the tensors that are held at the end.

    Which op a step is depends on shapes, strides and shared storages alone, so it is the same on every device.
    """
    held = list(tensors)
    for kind, a, b, c in program:
        if kind == "barrier":
            if barrier is not None:
                barrier(held, a)
            continue
        if kind == "drop":
            if len(held) > 2:
                held.pop(a % len(held))
            continue
        made = _apply(kind, held[a % len(held)], held, b, c)
        if made is not None and len(held) < 40 and made.dim() <= 4 and made.numel() <= 2000:
            held.append(made)
    return held


def _apply(kind: str, subject: torch.Tensor, held: list[torch.Tensor], b: int, c: int) -> torch.Tensor | None:
    if kind == "unary":
        return _UNARY[c % len(_UNARY)](subject)
    if kind == "binary":
        return _BINARY[c % len(_BINARY)](subject, _partner(subject, held, b))
    if kind == "reduction":
        if subject.numel() == 0:
            return subject.sum()
        full = subject if subject.dim() else subject.reshape(1)
        return _REDUCTION[c % len(_REDUCTION)](full, b % full.dim())
    if kind == "view":
        return _view(subject, b, c)
    if kind == "cast":
        return subject.to((torch.float64, torch.float32, torch.bfloat16)[c % 3])
    _write(subject, held, b, c)
    return None


def _partner(subject: torch.Tensor, held: list[torch.Tensor], choice: int) -> torch.Tensor:
    """A held tensor that broadcasts with ``subject``."""
    fitting = [t for t in held if _broadcasts(subject, t)]
    return fitting[choice % len(fitting)]


def _broadcasts(a: torch.Tensor, b: torch.Tensor) -> bool:
    return all(m == n or m == 1 or n == 1 for m, n in zip(reversed(a.shape), reversed(b.shape)))


def _view(t: torch.Tensor, b: int, c: int) -> torch.Tensor:
    if t.dim() == 0:
        return (t.reshape(1), t.expand(3), t.detach())[c % 3]
    d = b % t.dim()
    n = t.shape[d]
    choices: tuple[Callable[[], torch.Tensor], ...] = (
        lambda: t.transpose(0, d),
        lambda: t.narrow(d, min(c % 3, n), max(n - c % 3 - 1, 0)) if n else t,
        lambda: t.select(d, c % n) if n else t,
        lambda: t.reshape(-1),
        lambda: t.unsqueeze(d),
        lambda: t[(slice(None),) * d + (slice(None, None, 2),)],
        lambda: t.unsqueeze(0).expand(2, *t.shape) if t.dim() < 3 else t.detach(),
        lambda: t.view(torch.int32).view(torch.float32) if t.dtype is torch.float32 else t.detach(),
    )
    return choices[(b // 7) % len(choices)]()


def _write(target: torch.Tensor, held: list[torch.Tensor], b: int, c: int) -> None:
    if any(stride == 0 and extent > 1 for stride, extent in zip(target.stride(), target.shape)):
        return  # eager refuses to write through overlapping elements
    other = _partner(target, held, b)
    if torch.broadcast_shapes(target.shape, other.shape) != target.shape or not torch.can_cast(other.dtype, target.dtype):
        other = torch.ones((), device=target.device, dtype=target.dtype)
    if other.untyped_storage()._cdata == target.untyped_storage()._cdata:
        other = other.clone()
    if other.dtype is not target.dtype and c % len(_IN_PLACE) in (6, 7):
        other = other.to(target.dtype)
    _IN_PLACE[c % len(_IN_PLACE)](target, other.expand(target.shape), (c % 17) / 8 - 1)
