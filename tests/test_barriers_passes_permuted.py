"""Views of permuted memory see what they saw before, or are told to see nothing in strides."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F

from barriers.passes.permuted import in_rows, last_strides, makes_last, permuted, same_either_way
from ir_nodes import Layout

SHAPES = [(2, 4, 3, 5), (1, 6, 4, 2), (3, 1, 2, 4), (2, 8, 1, 1), (1, 1, 3, 3), (2, 3, 1, 4), (1, 4, 5, 1)]


def memories(shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """The same numbers in rows and channels_last, each as its memory lies."""
    rows = torch.arange(torch.Size(shape).numel(), dtype=torch.float32)
    return rows, rows.view(shape).permute(0, 2, 3, 1).contiguous().flatten()


def seen(memory: torch.Tensor, layout: Layout) -> torch.Tensor:
    return memory.as_strided(layout.size, layout.stride, layout.offset)


def layout_of(view: torch.Tensor) -> Layout:
    return Layout(view.dtype, tuple(view.shape), tuple(view.stride()), view.storage_offset())


def changed(view: torch.Tensor, draws: random.Random) -> torch.Tensor:
    """One random view of ``view``."""
    dim = draws.randrange(view.dim()) if view.dim() else 0
    if not view.dim():
        return view.unsqueeze(0)
    size = view.size(dim)
    choices = [lambda: view.narrow(dim, start := draws.randrange(size), draws.randint(1, size - start)),
               lambda: view[(slice(None),) * dim + (slice(draws.randrange(size), None, draws.randint(1, 3)),)],
               lambda: view.transpose(dim, draws.randrange(view.dim())),
               lambda: view.select(dim, draws.randrange(size)),
               lambda: view.unsqueeze(dim),
               lambda: view.unflatten(dim, (2, size // 2)) if size % 2 == 0 else view,
               lambda: view.flatten(dim, draws.randrange(dim, view.dim())),
               lambda: view.unsqueeze(dim).expand(*view.shape[:dim], 3, *view.shape[dim:]),
               lambda: view.diagonal(0, dim, (dim + 1) % view.dim()) if view.dim() > 1 else view]
    made = draws.choice(choices)()
    return made if made.untyped_storage().data_ptr() == view.untyped_storage().data_ptr() else view


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_random_views_see_the_same_or_none(shape: tuple[int, ...]) -> None:
    draws, (rows, last), found = random.Random(str(shape)), memories(shape), 0
    for _ in range(600):
        view = rows.view(shape)
        for _ in range(draws.randint(0, 4)):
            view = changed(view, draws)
        layout = layout_of(view)
        there = permuted(layout, shape)
        found += there is not None
        if there is not None:
            assert torch.equal(seen(last, there), view), f"{layout} became {there}"
    assert found > 250


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_strides_at_random_see_the_same_or_none(shape: tuple[int, ...]) -> None:
    draws, (rows, last) = random.Random(str(shape)), memories(shape)
    for _ in range(600):
        size = tuple(draws.randint(1, 4) for _ in range(draws.randint(1, 3)))
        stride = tuple(draws.randrange(len(rows)) for _ in size)
        layout = Layout(torch.float32, size, stride, draws.randrange(len(rows)))
        if layout.offset + sum((n - 1) * s for n, s in zip(size, stride)) >= len(rows):
            continue
        there = permuted(layout, shape)
        assert there is None or torch.equal(seen(last, there), seen(rows, layout)), f"{layout} became {there}"


def test_what_strides_can_tell_and_what_they_cannot() -> None:
    x = torch.empty(2, 4, 3, 5)
    told = {"whole": x, "pixels": x.flatten(2), "groups": x.unflatten(1, (2, 2)).transpose(1, 2), "part": x[:, 1:3, ::2],
            "turned": x.permute(0, 2, 3, 1), "one": x[1, 2], "spread": x[:, :1].expand(2, 4, 3, 5)}
    untold = {"flat": x.flatten(1), "images and channels": x.flatten(0, 1), "everything": x.view(-1),
              "rows of channels": x.view(2, 2, 2 * 3 * 5)}
    assert all(permuted(layout_of(view), x.shape) is not None for view in told.values())
    assert all(permuted(layout_of(view), x.shape) is None for view in untold.values())
    assert permuted(Layout(torch.float32, (0, 4, 3, 5), (60, 15, 5, 1)), x.shape) is None
    assert permuted(Layout(torch.complex64, tuple(x.shape), tuple(x.stride()), flipped=True), x.shape) is None
    assert in_rows(layout_of(x[:, :2]), x.shape) and not in_rows(layout_of(x[..., ::2]), x.shape)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_whole_tensor_lies_as_pytorchs_own(shape: tuple[int, ...]) -> None:
    whole = permuted(Layout.contiguous(torch.float32, shape), shape)
    assert whole is not None and whole.stride == last_strides(shape)
    assert whole.stride == torch.empty(shape).to(memory_format=torch.channels_last, copy=True).stride()
    assert same_either_way(shape) == torch.empty(shape).is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("stride", [(8, 1, 8, 8), (8, 1, 1, 1), (8, 1, 1, 8)], ids=str)
def test_strides_of_single_pixels_choose_the_format_as_in_pytorch(stride: tuple[int, ...]) -> None:
    """Convolutions and pools ask the same function."""
    x = torch.empty_strided((2, 8, 1, 1), stride)
    made = F.interpolate(x, scale_factor=3)
    assert makes_last(layout_of(x)) == made.is_contiguous(memory_format=torch.channels_last)
