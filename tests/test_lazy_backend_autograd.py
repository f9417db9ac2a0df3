"""Autograd on the device: version counters, errors and gradients as in eager PyTorch."""

from __future__ import annotations

from typing import Callable

import pytest
import torch

import lazy_backend
from tests.device import DEVICE, arange, same


def _saved_then_changed(device: str) -> None:
    x = arange(device, 4).requires_grad_()
    y = x.exp()
    y.add_(1)
    y.sum().backward()


def _saved_through_a_view(device: str) -> None:
    x = arange(device, 4).requires_grad_()
    y = x.sigmoid()
    y[1:].zero_()
    y.sum().backward()


def _leaf_in_place(device: str) -> None:
    arange(device, 4).requires_grad_().add_(1)


def _view_of_leaf_in_place(device: str) -> None:
    arange(device, 4).requires_grad_()[1:].mul_(2)


def _twice(device: str) -> None:
    loss = arange(device, 4).requires_grad_().exp().sum()
    loss.backward()
    loss.backward()


def _several_views_in_place(device: str) -> None:
    x = arange(device, 4).requires_grad_()
    first, _ = (x * 1).unbind(0)[:2]
    first.add_(1)


@pytest.mark.parametrize(
    "mistake",
    [_saved_then_changed, _saved_through_a_view, _leaf_in_place, _view_of_leaf_in_place, _twice, _several_views_in_place],
    ids=lambda mistake: mistake.__name__,
)
def test_autograd_refuses_what_eager_refuses_in_the_same_words(mistake: Callable[[str], None]) -> None:
    with pytest.raises(Exception) as wanted:
        mistake("cpu")
    with pytest.raises(type(wanted.value)) as got:
        mistake(DEVICE)
    first_words = str(wanted.value).split(":")[0][:40]
    assert str(got.value).startswith(first_words)


def test_gradients_through_views_and_in_place_writes() -> None:
    def program(device: str, pause: Callable[[], None]) -> list[torch.Tensor]:
        x = (arange(device, 3, 4) / 10).requires_grad_()
        y = x * 2
        y[1:].mul_(x[:2])
        y.t()[0].add_(1)
        pause()
        z = torch.cat([y.tanh(), y.detach() * x], 1).reshape(-1)[::3]
        z.pow(2).sum().backward()
        pause()
        (second,) = torch.autograd.grad((x.sin() ** 3).sum(), x, create_graph=True)
        second.sum().backward()
        return [x.detach(), x.grad, z.detach()]

    same(program(DEVICE, lazy_backend.mark_step), program("cpu", lambda: None))
    same(program(DEVICE, lambda: None), program("cpu", lambda: None))


def test_version_counters_count_as_eager_does() -> None:
    versions = []
    for device in ("cpu", DEVICE):
        x = arange(device, 4)
        view = x[1:]
        view.add_(1)
        x.mul_(2)
        x.detach().add_(1)
        x.data.add_(1)
        versions.append((x._version, view._version))
    assert versions[0] == versions[1]
