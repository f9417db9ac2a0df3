"""Tensors of the device behave as values over shared memory, as in eager PyTorch: the same program, on the CPU and on
lazysched, must leave the same numbers in every tensor that is held."""

from __future__ import annotations

from typing import Callable

import pytest
import torch

import lazy_backend
from tests.device import DEVICE, arange, same

Program = Callable[[str, Callable[[], None]], list[torch.Tensor]]


def in_place(device: str, pause: Callable[[], None]) -> list[torch.Tensor]:
    x = arange(device, 3, 4)
    y = x + 1
    pause()
    x.mul_(2).add_(y)
    x += 1
    pause()
    x.clamp_(min=3)
    x[0] = 7
    return [x, y]


def out_arguments(device: str, pause: Callable[[], None]) -> list[torch.Tensor]:
    a, b = arange(device, 4), arange(device, 4) * 2
    out = torch.empty(4, device=device)
    torch.add(a, b, out=out)
    pause()
    torch.mul(out, b, out=out)  # the result is also an input
    wide = torch.zeros(2, 4, device=device)
    torch.sub(a, b, out=wide[1])
    pause()
    values, places = torch.empty(2, device=device), torch.empty(2, dtype=torch.int64, device=device)
    torch.max(wide, dim=1, out=(values, places))
    grown = torch.empty(0, device=device)
    torch.cat([a, b], out=grown)
    return [a, b, out, wide, values, places, grown]


def writes_through_views(device: str, pause: Callable[[], None]) -> list[torch.Tensor]:
    x = arange(device, 4, 6)
    column, row, corner = x[:, 1], x[2], x.t()[3:, 1:3]
    column.fill_(-1)
    pause()
    row.add_(100)
    corner.mul_(0.5)
    diagonal = x.diagonal()
    diagonal.zero_()
    pause()
    x.view(-1)[::5].sub_(3)
    x.unfold(0, 2, 2)[0].add_(1000)
    return [x, column, row, corner, diagonal]


def view_before_a_barrier_written_after(device: str, pause: Callable[[], None]) -> list[torch.Tensor]:
    x = arange(device, 2, 3)
    view = x.t()
    pause()
    view.add_(10)
    pause()
    x.mul_(2)
    pause()
    view[0] = 5
    return [x, view]


def base_written_view_read(device: str, pause: Callable[[], None]) -> list[torch.Tensor]:
    x = arange(device, 6)
    view = x[1:4]
    before = view + 0
    x.add_(1)
    after = view * 1
    pause()
    x.zero_()
    return [before, after, view, x]


def detach_and_data(device: str, pause: Callable[[], None]) -> list[torch.Tensor]:
    x = arange(device, 4).requires_grad_()
    y = x.detach()
    y.add_(1)
    pause()
    x.data.mul_(3)
    z = x.data
    z[1] = -1
    other = arange(device, 2, 2)
    x2 = arange(device, 4)
    alias = x2.detach()
    x2.data = other
    x2.add_(1)
    pause()
    return [x.detach(), y, z, other, alias, x2]


def set_to_another_storage(device: str, pause: Callable[[], None]) -> list[torch.Tensor]:
    a, b = arange(device, 6), torch.zeros(3, device=device)
    kept = b.detach()
    b.set_(a)
    b.mul_(2)
    pause()
    c = torch.empty(0, device=device)
    c.set_(a.untyped_storage(), 1, (2, 2), (2, 1))
    c.add_(100)
    return [a, b, c, kept]


def resize(device: str, pause: Callable[[], None]) -> list[torch.Tensor]:
    x = arange(device, 2, 3)
    x.add_(1)
    x.resize_(3, 4)
    x[2].fill_(9)
    x.view(-1)[6:].fill_(4)
    pause()
    y = arange(device, 8)
    y.mul_(3)
    y.resize_(2, 2)
    pause()
    z = arange(device, 5)
    z.resize_(2).fill_(1)
    z.resize_(5)
    return [x, y, z]


def dtype_views(device: str, pause: Callable[[], None]) -> list[torch.Tensor]:
    x = arange(device, 4) - 2
    bits = x.view(torch.int32)
    bits.bitwise_and_(0x7FFFFFFF)
    pause()
    halves = x.view(torch.int16)
    halves[1::2].bitwise_xor_(-32768)
    z = torch.view_as_complex(arange(device, 3, 2))
    parts = torch.view_as_real(z)
    parts[:, 1].neg_()
    return [x, bits, halves, parts, torch.view_as_real(z * z)]


def complex_views(device: str, pause: Callable[[], None]) -> list[torch.Tensor]:
    z = torch.view_as_complex(arange(device, 3, 2)) * (1 + 2j)
    pause()
    conj = z.conj()
    return [torch.view_as_real(conj * z), conj.imag + 1, z.real.clone(), z.imag.clone(), torch.view_as_real(conj.resolve_conj())]


def copies_between_layouts(device: str, pause: Callable[[], None]) -> list[torch.Tensor]:
    x = arange(device, 2, 3, 4, 4)
    last = x.to(memory_format=torch.channels_last)
    pause()
    y = torch.empty_like(last)
    y.copy_(x)
    t = torch.zeros(4, 3, device=device, dtype=torch.float64)
    t.copy_(arange(device, 3, 4).t())
    t[1:3].copy_(torch.tensor([5.0, 6.0, 7.0]))
    return [last, y, t, x.transpose(1, 3).contiguous(), x.flip(0)]


def indexing(device: str, pause: Callable[[], None]) -> list[torch.Tensor]:
    x = arange(device, 5, 3)
    picks = torch.tensor([4, 0, 0], device=device)
    taken = x[picks]
    pause()
    x[picks, 1] = 50
    x.index_add_(0, picks, torch.ones(3, 3, device=device))
    x[x > 40] = -1
    x.masked_fill_(x == 3, 0.5)
    pause()
    x.scatter_(1, torch.tensor([[2], [1]], device=device), 9.0)
    return [x, taken, x[torch.tensor([1, 2])], x[x < 0]]


def generations(device: str, pause: Callable[[], None]) -> list[torch.Tensor]:
    """A long chain over one buffer, each old value also read."""
    x, kept = arange(device, 4), []
    for step in range(12):
        kept.append(x * step)
        x[step % 4 :].add_(step)
        if step % 5 == 4:
            pause()
    return [x, *kept]


PROGRAMS: tuple[Program, ...] = (
    in_place, out_arguments, writes_through_views, view_before_a_barrier_written_after, base_written_view_read, detach_and_data,
    set_to_another_storage, resize, dtype_views, complex_views, copies_between_layouts, indexing, generations,
)  # fmt: skip


@pytest.mark.parametrize("barriers", [False, True], ids=["one recording", "with barriers"])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_a_program_leaves_what_eager_leaves(program: Program, barriers: bool) -> None:
    wanted = program("cpu", lambda: None)
    got = program(DEVICE, lazy_backend.mark_step if barriers else lambda: None)
    same(got, wanted)


def test_shared_storages_stay_shared() -> None:
    x = arange(DEVICE, 2, 3)
    views = [x.t(), x.view(6), x.detach(), x[1], x.data]
    lazy_backend.mark_step()
    assert {view.untyped_storage().data_ptr() for view in views} == {x.untyped_storage().data_ptr()}
    views[1][4] = 40.0
    assert [float(views[0][1, 1]), float(views[2][1, 1]), float(views[3][1]), float(views[4][1, 1])] == [40.0] * 4


def test_storage_sizes_and_properties() -> None:
    x = torch.empty(3, 5, dtype=torch.float16, device=DEVICE)
    assert x.untyped_storage().nbytes() == 30 and x.device == torch.device(DEVICE, 0)
    assert x.is_contiguous() and not x.t().is_contiguous() and x.t()._is_view() and x.t()._base is x
    assert type(x) is torch.Tensor and x.numel() == 15 and not x.is_cpu
