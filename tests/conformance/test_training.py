"""What training loops use beside a model and an optimizer gives on the device what it gives in eager mode."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn, update_bn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential, create_selective_checkpoint_contexts

from tests.conformance.eager import EAGER
from tests.conformance.features import filled, gradients, mlp, randn, same


class Symmetric(nn.Module):
    def forward(self, weight):
        return weight.triu() + weight.triu(1).transpose(-1, -2)


def symmetric(layer: nn.Module) -> nn.Module:
    return parametrize.register_parametrization(layer, "weight", Symmetric())


def parametrized(change: Callable[[nn.Module], nn.Module], device: str) -> Any:
    """A layer whose weight is computed, made on the CPU and moved: its output and gradients, and the weight made plain again."""
    layer = change(filled(nn.Linear(5, 5))).to(device)
    out = layer(randn(device, 3, 5))
    out.sum().backward()
    found = [out, *gradients(layer), layer.weight]
    if parametrize.is_parametrized(layer):
        parametrize.remove_parametrizations(layer, "weight")
    return [*found, layer.weight]


def pruned(device: str) -> Any:
    layer = filled(nn.Linear(5, 5)).to(device)
    prune.l1_unstructured(layer, "weight", 0.5)
    out = layer(randn(device, 2, 5))
    prune.remove(layer, "weight")
    return out, layer.weight


PARAMETRIZED = {"own": symmetric, "weight_norm": parametrizations.weight_norm, "spectral_norm": parametrizations.spectral_norm,
                "orthogonal": parametrizations.orthogonal, "old weight_norm": nn.utils.weight_norm,
                "old spectral_norm": nn.utils.spectral_norm}


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
@pytest.mark.parametrize("name", PARAMETRIZED)
def test_parametrizations(name: str) -> None:
    same(functools.partial(parametrized, PARAMETRIZED[name]))


def test_pruning() -> None:
    same(pruned)


def with_gradients(device: str) -> nn.Module:
    model = mlp(device)
    model(randn(device, 3, 4)).square().sum().backward()
    return model


@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("norm", [1.0, 2.0, float("inf")])
def test_clipping_norms(norm: float, foreach: bool | None) -> None:
    def clipped(device: str) -> Any:
        model = with_gradients(device)
        return [nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm, foreach=foreach), *gradients(model)]

    same(clipped)


def test_clipping_values_and_vectors() -> None:
    def clipped(device: str) -> Any:
        model = with_gradients(device)
        nn.utils.clip_grad_value_(model.parameters(), 0.1)
        vector = nn.utils.parameters_to_vector(model.parameters())
        nn.utils.vector_to_parameters(vector * 2, model.parameters())
        return [*gradients(model), *model.parameters()]

    same(clipped)


def recurrent(kind: type[nn.Module], device: str, **kwargs: Any) -> Any:
    layer = filled(kind(4, 6, 2, **kwargs)).to(device)
    x = randn(device, 5, 3, 4).requires_grad_()
    out, state = layer(x)
    out.sum().backward()
    return [out, state, x.grad, *gradients(layer)]


def packed(kind: type[nn.Module], device: str) -> Any:
    layer, x = filled(kind(4, 6, bidirectional=True)).to(device), randn(device, 5, 3, 4).requires_grad_()
    sequences = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([3, 5, 2]), enforce_sorted=False)
    out, state = layer(sequences)
    out, lengths = nn.utils.rnn.pad_packed_sequence(out)
    out.sum().backward()
    return [out, lengths, state, x.grad]


@pytest.fixture
def without_cudnn() -> Iterator[None]:
    """cuDNN's recurrent layers multiply in TF32 and draw their own dropout: `tests/test_lazy_backend_recurrent.py`."""
    with torch.backends.cudnn.flags(enabled=False) if EAGER == "cuda" else contextlib.nullcontext():
        yield


@pytest.mark.usefixtures("without_cudnn")
@pytest.mark.parametrize("kwargs", [{}, {"bidirectional": True}, {"dropout": 0.5}, {"batch_first": True}], ids=str)
@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
def test_recurrent_layers(kind: type[nn.Module], kwargs: dict[str, Any]) -> None:
    # On a CPU, eager mode multiplies the inputs of all time steps at once.
    same(lambda device: recurrent(kind, device, **kwargs), exact=False)


@pytest.mark.usefixtures("without_cudnn")
def test_projections_cells_and_packed_sequences() -> None:
    same(lambda device: recurrent(nn.LSTM, device, proj_size=2), exact=False)
    for kind in (nn.RNN, nn.LSTM, nn.GRU):
        same(functools.partial(packed, kind), exact=False)
    same(lambda device: nn.utils.rnn.pack_sequence([randn(device, 3, 2), randn(device, 2, 2)]).data)
    same(lambda device: nn.utils.rnn.pad_sequence([randn(device, 3, 2), randn(device, 2, 2)]))
    for kind in (nn.RNNCell, nn.GRUCell):
        same(lambda device, kind=kind: filled(kind(4, 6)).to(device)(randn(device, 3, 4), randn(device, 3, 6)))
    same(lambda device: filled(nn.LSTMCell(4, 6)).to(device)(randn(device, 3, 4), (randn(device, 3, 6), randn(device, 3, 6))))


def averaged(device: str, **kwargs: Any) -> Any:
    model = filled(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))).to(device)
    average, optimizer = AveragedModel(model, **kwargs), torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = SWALR(optimizer, swa_lr=0.05, anneal_epochs=2)
    for _ in range(4):
        optimizer.zero_grad()
        model(randn(device, 3, 4)).square().sum().backward()
        optimizer.step()
        average.update_parameters(model)
        schedule.step()
    update_bn([randn(device, 3, 4)], average)
    return dict(average.state_dict())


AVERAGES: dict[str, dict[str, Any]] = {
    "swa": {},
    "ema": {"multi_avg_fn": get_ema_multi_avg_fn(0.9), "use_buffers": True},
    "ema one by one": {"avg_fn": get_ema_avg_fn(0.9)},
}


@pytest.mark.parametrize("name", AVERAGES)
def test_averaged_models(name: str) -> None:
    same(lambda device: averaged(device, **AVERAGES[name]))


SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "step": lambda o: lr_scheduler.StepLR(o, 2),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=10),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1),
    "sequential": lambda o: lr_scheduler.SequentialLR(o, [lr_scheduler.ConstantLR(o), lr_scheduler.LinearLR(o)], [3]),
}


@pytest.mark.parametrize("tensor_lr", [False, True])
@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules(name: str, tensor_lr: bool) -> None:
    def scheduled(device: str) -> Any:
        model, x = mlp(device), randn(device, 3, 4)
        lr = torch.tensor(0.1) if tensor_lr else 0.1
        optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, foreach=False)
        schedule = SCHEDULES[name](optimizer)
        for _ in range(6):
            optimizer.zero_grad()
            loss = model(x).square().sum()
            loss.backward()
            optimizer.step()
            schedule.step(*[loss.item()] * (name == "plateau"))
        return [*model.parameters(), float(optimizer.param_groups[0]["lr"])]

    same(scheduled)


def checkpointed(device: str, **kwargs: Any) -> Any:
    model = filled(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 3))).to(device)
    x = randn(device, 3, 4).requires_grad_()
    out = checkpoint(model, x, **kwargs)
    out.sum().backward()
    return [out, x.grad, *gradients(model)]


def keep(*ops: Any) -> Callable[[], Any]:
    return functools.partial(create_selective_checkpoint_contexts, list(ops))


CHECKPOINTS: dict[str, Callable[[str], Any]] = {
    "reentrant": lambda d: checkpointed(d, use_reentrant=True),
    "not reentrant": lambda d: checkpointed(d, use_reentrant=False),
    "selective": lambda d: checkpointed(d, use_reentrant=False, context_fn=keep(torch.ops.aten.addmm.default)),
    "sequential": lambda d: checkpoint_sequential(mlp(d), 2, randn(d, 2, 4).requires_grad_(), use_reentrant=False),
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_checkpoints(name: str) -> None:
    same(CHECKPOINTS[name])
