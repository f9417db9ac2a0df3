"""Small models of the common kinds train on the device as in eager mode: losses, parameters and running statistics."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any, Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lazy_backend
from ir_nodes import settings
from tests.cudnn_ops import flag

DRAWS_LIKE_CPU = pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU dropout draws CUDA's numbers, not the CPU's")
MakeOptimizer = Callable[[Any], torch.optim.Optimizer]


@pytest.fixture(autouse=True)
def verified() -> Iterator[None]:
    with settings.override(verify=True):
        yield


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def compare(model: nn.Module, x: Tensor, y: Tensor, loss: Callable[[Tensor, Tensor], Tensor], make: MakeOptimizer = sgd) -> None:
    """Four steps on the CPU and on the device, from the same weights and seeds."""
    lazy = copy.deepcopy(model).to("lazysched")
    pairs = [(model, make(model.parameters()), "cpu"), (lazy, make(lazy.parameters()), "lazysched")]
    for step in range(4):
        losses = []
        for module, optimizer, device in pairs:
            torch.manual_seed(step)
            value = loss(module(x.to(device)), y.to(device))
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
            losses.append(value.item())
        assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(
            lazy.state_dict()[name].cpu(), value, rtol=1e-3, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}"
        )


class Last(nn.Module):
    """A recurrent layer, then a linear one on its last output."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.head = layer, nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x)[0][:, -1])


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3), nn.GELU()), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(self.body, x, use_reentrant=False))


def labels(count: int, classes: int = 3) -> Tensor:
    return torch.arange(count) % classes


def test_convolutions_and_their_running_statistics() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3, groups=2),
        nn.GroupNorm(2, 8),
        nn.SiLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 3),
    )
    compare(model, torch.randn(4, 3, 16, 16), labels(4), F.cross_entropy)
    assert model[1].num_batches_tracked == 4 and model[1].running_mean.abs().max() > 0


def test_channels_last() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 3))
    compare(
        model.to(memory_format=torch.channels_last),
        torch.randn(4, 3, 8, 8).to(memory_format=torch.channels_last),
        labels(4),
        F.cross_entropy,
    )


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers(kind: Callable[..., nn.Module]) -> None:
    torch.manual_seed(0)
    before = lazy_backend.stats()["fallbacks"]
    with flag("allow_tf32", False):
        compare(Last(kind(8, 16, 2, batch_first=True)), torch.randn(4, 7, 8), labels(4), F.cross_entropy)
    assert lazy_backend.stats()["fallbacks"] == before, "no op had to run by itself"


@DRAWS_LIKE_CPU
def test_transformer_with_dropout() -> None:
    torch.manual_seed(0)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), 2)
    compare(model, torch.randn(2, 5, 16), torch.randn(2, 5, 16), F.mse_loss)


@DRAWS_LIKE_CPU
def test_checkpoint_draws_the_same_dropout_again() -> None:
    torch.manual_seed(0)
    compare(Checkpointed(), torch.randn(4, 8), labels(4), F.cross_entropy)


def with_tensor(kind: Any, parameters: list[Tensor]) -> torch.optim.Optimizer:
    return kind(parameters, lr=torch.tensor(1e-2, device=parameters[0].device), fused=True)  # type: ignore[no-any-return]


OPTIMIZERS: dict[str, MakeOptimizer] = {
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "adagrad fused": lambda p: torch.optim.Adagrad(p, lr=1e-2, fused=True),
    **{
        f"{kind.__name__} fused, a tensor as rate": lambda p, kind=kind: with_tensor(kind, list(p))
        for kind in (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
    },
    "adam for-loop": lambda p: torch.optim.Adam(p, lr=1e-2, foreach=False),
    **{
        kind.__name__: lambda p, kind=kind: kind(p, lr=1e-2)
        for kind in (
            torch.optim.RMSprop,
            torch.optim.Adagrad,
            torch.optim.Adadelta,
            torch.optim.NAdam,
            torch.optim.RAdam,
            torch.optim.Adamax,
            torch.optim.ASGD,
            torch.optim.Rprop,
        )
    },
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name: str) -> None:
    torch.manual_seed(0)
    before = lazy_backend.stats()["fallbacks"]
    compare(nn.Linear(4, 4), torch.randn(3, 4), torch.randn(3, 4), F.mse_loss, OPTIMIZERS[name])
    assert lazy_backend.stats()["fallbacks"] == before, "no op had to run by itself"


def test_autocast_casts_as_cuda_does() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 2)).to("lazysched")
    with torch.autocast("lazysched", dtype=torch.bfloat16):
        logits = model(torch.randn(4, 8, device="lazysched"))
        loss = F.cross_entropy(logits, torch.zeros(4, dtype=torch.long, device="lazysched"))
    loss.backward()
    assert (logits.dtype, loss.dtype, model[0].weight.grad.dtype) == (torch.bfloat16, torch.float32, torch.float32)
    assert model[0].weight.grad.cpu().abs().sum() > 0


def test_grad_scaler() -> None:
    model = nn.Linear(4, 4).to("lazysched")
    before = model.weight.detach().cpu()
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("lazysched", init_scale=128.0)
    for _ in range(3):
        with torch.autocast("lazysched", dtype=torch.float16):
            loss = model(torch.ones(2, 4, device="lazysched")).sum()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    torch.testing.assert_close(model.weight.cpu(), before - 0.6, rtol=1e-3, atol=1e-3)


def test_pickle_save_and_deepcopy() -> None:
    weight = nn.Linear(3, 3).to("lazysched").weight
    expected = weight.detach().cpu()
    buffer = io.BytesIO()
    torch.save(weight, buffer)
    buffer.seek(0)
    for other in (pickle.loads(pickle.dumps(weight)), copy.deepcopy(weight), torch.load(buffer)):
        assert other.device.type == "lazysched"
        torch.testing.assert_close(other.detach().cpu(), expected)
    buffer.seek(0)
    assert torch.load(buffer, map_location="cpu").device.type == "cpu"


def test_ops_with_several_outputs_under_out_keep_their_arguments_alive() -> None:
    matrix = torch.randn(3, 3)
    lazy = matrix.to("lazysched")
    torch.testing.assert_close(torch.linalg.det(lazy).cpu(), torch.linalg.det(matrix))
    torch.testing.assert_close(torch.aminmax(lazy).max.cpu(), matrix.max())
    torch.testing.assert_close(torch.sort(lazy)[0].cpu(), torch.sort(matrix)[0])


def test_a_loop_that_looks_at_values() -> None:
    x = torch.ones(10, device="lazysched")
    rounds = 0
    while x.sum() > -5:
        x = x - 1
        rounds += 1
    assert rounds == 2 and x[x > 0].numel() == 0 and x.tolist() == [-1.0] * 10
    assert {barrier.kind.label for barrier in lazy_backend.barriers()[-6:]} >= {"value_access"}
