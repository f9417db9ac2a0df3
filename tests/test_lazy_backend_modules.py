"""Modules move to the device and back without losing identity, ties, gradients or optimizers."""

from __future__ import annotations

import copy
import gc
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

import lazy_backend  # noqa: F401 - registers the device
from tests.device import CLOSE, DEVICE, arange


class Tied(nn.Module):
    """An embedding whose weight is also the output projection."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, 8)
        self.hidden = nn.Linear(8, 8)
        self.head = nn.Linear(8, 13, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.hidden(self.embedding(tokens))))


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, device: str, steps: int = 6) -> list[float]:
    tokens = torch.arange(12).reshape(3, 4).to(device)
    losses = []
    for _ in range(steps):
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), (tokens.flatten() + 1) % 13)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("optimizer_first", [False, True], ids=["optimizer after .to", "optimizer before .to"])
def test_tied_embeddings_train_as_on_the_cpu(optimizer_first: bool) -> None:
    torch.manual_seed(0)
    truth = Tied()
    model = copy.deepcopy(truth)
    wanted = _train(truth, torch.optim.Adam(truth.parameters(), lr=0.05), "cpu")
    if optimizer_first:
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        model.to(DEVICE)
    else:
        model.to(DEVICE)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    assert model.head.weight is model.embedding.weight and len(list(model.parameters())) == 3
    got = _train(model, optimizer, DEVICE)
    assert got == pytest.approx(wanted, rel=CLOSE)
    assert wanted[-1] < 0.8 * wanted[0], "it learns"
    torch.testing.assert_close(model.head.weight.detach().cpu(), truth.head.weight.detach(), rtol=CLOSE, atol=CLOSE)


def test_parameters_keep_their_identity_and_their_weak_references() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    before = list(model.parameters())
    references = [weakref.ref(parameter) for parameter in before]
    model.to(DEVICE)
    assert all(old is new for old, new in zip(before, model.parameters()))
    del before
    gc.collect()
    assert [reference() for reference in references] == list(model.parameters())
    assert {tensor.device.type for tensor in model.state_dict().values()} == {DEVICE}


def test_a_module_goes_there_and_back_with_its_gradients_and_optimizer() -> None:
    torch.manual_seed(1)
    model = Tied()
    truth = copy.deepcopy(model)
    optimizer, truth_optimizer = (torch.optim.SGD(m.parameters(), lr=0.3) for m in (model, truth))
    wanted = _train(truth, truth_optimizer, "cpu", steps=6)
    got = _train(model, optimizer, "cpu", steps=2)
    model.to(DEVICE)
    assert model.hidden.weight.grad.device.type == DEVICE
    got += _train(model, optimizer, DEVICE, steps=2)
    model.to("cpu")
    assert model.head.weight is model.embedding.weight and model.head.weight.device.type == "cpu"
    got += _train(model, optimizer, "cpu", steps=2)
    assert got == pytest.approx(wanted, rel=CLOSE)


def test_a_second_to_changes_nothing() -> None:
    model = Tied().to(DEVICE)
    ids = [id(parameter) for parameter in model.parameters()]
    data = [parameter.detach().clone() for parameter in model.parameters()]
    model.to(DEVICE)
    assert [id(parameter) for parameter in model.parameters()] == ids
    assert all(torch.equal(a, b.detach()) for a, b in zip(data, model.parameters()))


def test_moving_modules_between_other_devices_and_dtypes_is_left_alone() -> None:
    model = Tied()
    weight = model.head.weight
    model.to(torch.float64)
    assert model.head.weight is weight and weight.dtype is torch.float64
    model.to("meta")
    assert model.head.weight.device.type == "meta"


def test_move_and_cast_at_once() -> None:
    torch.manual_seed(2)
    model = Tied()
    wanted = model.embedding.weight.detach().to(torch.bfloat16)
    model.to(DEVICE, torch.bfloat16)
    assert model.embedding.weight is model.head.weight and model.head.weight.dtype is torch.bfloat16
    assert torch.equal(model.head.weight.detach().cpu(), wanted)


def test_state_dicts_and_copies() -> None:
    torch.manual_seed(3)
    model = Tied().to(DEVICE)
    twin = copy.deepcopy(model)
    assert twin.head.weight is twin.embedding.weight and twin.head.weight is not model.head.weight
    with torch.no_grad():
        model.head.weight.add_(1)
    assert not torch.equal(twin.head.weight, model.head.weight)
    fresh = Tied()
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(fresh.head.weight, model.head.weight.cpu())


def test_save_and_load(tmp_path: Path) -> None:
    x = arange(DEVICE, 2, 3) * 3
    torch.save({"x": x, "view": x.t()}, tmp_path / "x.pt")
    back = torch.load(tmp_path / "x.pt")
    assert back["x"].device.type == DEVICE and back["x"].tolist() == [[0, 3, 6], [9, 12, 15]]
    there = torch.load(tmp_path / "x.pt", map_location="cpu")
    assert there["view"].device.type == "cpu" and there["view"].tolist() == [[0, 9], [3, 12], [6, 15]]
