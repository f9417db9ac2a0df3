"""Networks in PyTorch's default format give eager mode's numbers in the promised layouts, whatever lies between. On a GPU no
kernel transposes images; elsewhere CPU kernels and Triton's interpreter stand for it."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lazy_backend
from barriers.passes import channels_last
from benchmarks.profiling import gpu_kernels
from codegen import engines
from codegen.engine import EngineError
from ir_nodes import Graph, settings
from lazy_backend import core, flush
from tests.cudnn_ops import on_cpu
from tests.device import DEVICE, ON_GPU, PHYSICAL

STEPS = 5 if ON_GPU else 2
"""On a GPU the third replays."""
BOUNDS = {True: {"rtol": 4e-2, "atol": 4e-2}, False: {"rtol": 1e-2, "atol": 1e-2} if ON_GPU else {"rtol": 1e-4, "atol": 1e-4}}
"""Of bfloat16, and of float32, which is TF32 on a GPU."""
_batches = itertools.cycle(range(2, 13))
"""One for each recording that must not be found compiled."""


@pytest.fixture(autouse=True)
def small_ones_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels_last, "WORTH", 0)
    monkeypatch.setattr(flush, "on_gpu", lambda: True)


class Residual(nn.Module):
    def __init__(self, inplace: bool = True) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, bias=False), nn.BatchNorm2d(16), nn.ReLU(inplace), nn.MaxPool2d(3, 2, 1))
        self.first = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(inplace))
        self.second = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16))
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        x = self.stem(x)
        inside = self.second(self.first(x))
        x = F.relu(inside + x)
        return x, self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.inner = nn.Conv2d(8, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
        self.up, self.turned = nn.Conv2d(32, 16, 3, padding=1), nn.ConvTranspose2d(16, 8, 2, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        down = F.silu(self.down(x))
        inner = F.relu(self.inner(F.max_pool2d(down, 2)))
        up = self.up(torch.cat([F.interpolate(inner, scale_factor=2), down], 1))
        gate, values = up.chunk(2, 1)
        return (gate.sigmoid() * values + self.turned(F.avg_pool2d(up, 2)),)


class Views(nn.Module):
    """Channel shuffles, in-place parts, what is flattened across channels, what another format and what random ops see."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Conv2d(8, 8, 3, padding=1) for _ in range(3))
        self.depthwise, self.norm = nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.LayerNorm(8)
        self.groups, self.head = nn.GroupNorm(2, 8), nn.Linear(8 * 36, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        x = self.first(x)
        x = x.view(-1, 2, 4, 6, 6).transpose(1, 2).reshape(-1, 8, 6, 6)
        x = self.second(x).relu_()
        x = x + self.norm(self.depthwise(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        spread = x.mean((2, 3), keepdim=True).expand_as(x).clone()
        spread[:, 2:4, ::2] *= 2
        x = self.third(spread + self.groups(x))
        return F.dropout(x, 0.0, self.training), self.head(x.flatten(1))


NETS = {Residual: (3, 14, 14), UNet: (8, 8, 8), Views: (8, 6, 6)}
Told = list[tuple[Tensor, tuple[int, ...]]]
"""Tensors on the CPU, with the strides that they had."""


def steps(net: Any, batch: int, device: str, cast: bool, train: bool, pure: bool = False) -> Told:
    """Results and, of the last step, gradients."""
    torch.manual_seed(0)
    model, draws, found = net().to(device), torch.Generator().manual_seed(1), []
    model = model.to(torch.bfloat16) if pure else model
    for _ in range(STEPS):
        x = torch.randn(batch, *NETS[net], generator=draws).to(device, torch.bfloat16 if pure else torch.float32)
        x.requires_grad_(train)
        model.zero_grad()
        with torch.autocast(device, torch.bfloat16, enabled=cast), torch.set_grad_enabled(train):
            made = model.train(train)(x)
        if train:
            sum(one.float().square().mean() for one in made).backward()
        if device == DEVICE:
            lazy_backend.mark_step()
        found += [one.detach() for one in made]
    found += [one.grad for one in (x, *model.parameters())] if train else []
    return [(one.cpu().float(), one.stride()[1:]) for one in found]


@contextlib.contextmanager
def watched(disable: str = "", verify: bool = False) -> Iterator[list[str]]:
    """What the pass did to new graphs."""
    told: list[str] = []

    def watch(graph: Graph, remarks: Any) -> None:
        told.extend(str(one) for one, _ in remarks.all() if one.optimisation == "channels_last" and one.done)

    flush.watchers.append(watch)
    try:
        with settings.override(engine="triton", disable=frozenset(("varying", disable)) - {""}, verify=verify):
            yield told
    finally:
        flush.watchers.remove(watch)


def judged(ours: Told, net: Any, batch: int, cast: bool, train: bool, pure: bool = False) -> None:
    """Near eager mode's numbers, or as near as those to a CPU's float32: eager mode sums some gradients in 16 bits."""
    theirs, bound = steps(net, batch, PHYSICAL, cast, train, pure), BOUNDS[cast or pure]
    exact = steps(net, batch, "cpu", False, train)
    for place, ((mine, _), (other, _), (true, _)) in enumerate(zip(ours, theirs, exact, strict=True)):
        if (mine - true).norm() > 1.1 * (other - true).norm() or mine.isnan().any():
            torch.testing.assert_close(mine, other, **bound, msg=lambda told, place=place: f"tensor {place}: {told}")


@pytest.mark.parametrize("train", [True, False], ids=["trained", "inferred"])
@pytest.mark.parametrize("cast", [True, False], ids=["autocast", "float32"])
@pytest.mark.parametrize("net", NETS, ids=lambda net: net.__name__)
def test_numbers_and_layouts_are_eager_modes(net: Any, cast: bool, train: bool) -> None:
    batch = next(_batches)
    with watched(verify=train) as told:  # evaluating batch norms records statistics that Meta leaves out
        ours = steps(net, batch, DEVICE, cast, train)
    assert told
    with watched("channels_last") as nothing:
        plain = steps(net, next(_batches), DEVICE, cast, train)
    assert not nothing and [stride for _, stride in ours] == [stride for _, stride in plain]
    judged(ours, net, batch, cast, train)


@pytest.mark.parametrize("net", [Residual, UNet], ids=lambda net: net.__name__)
def test_weights_and_gradients_in_bfloat16_stay_in_rows(net: Any) -> None:
    batch = next(_batches)
    with watched() as told:
        ours = steps(net, batch, DEVICE, False, True, pure=True)
    assert told
    judged(ours, net, batch, False, True, pure=True)


@pytest.mark.parametrize("net", [Residual, UNet], ids=lambda net: net.__name__)
def test_beside_cudnns_fused_convolutions(net: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = next(_batches)
    with contextlib.ExitStack() as stack:
        if not core.physical_is_cuda():
            monkeypatch.setattr(flush, "replays", lambda: True)
            stack.enter_context(on_cpu())
        with watched() as told:
            ours = steps(net, batch, DEVICE, False, False)
            trained = steps(net, batch, DEVICE, False, True)
    assert told
    judged(ours, net, batch, False, False)
    judged(trained, net, batch, False, True)


def test_aten_runs_the_same_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where kernels can't be made."""
    def fails(graph: Graph, context: Any) -> Any:
        raise EngineError("no compiler")

    found, batch = engines.engine, next(_batches)
    monkeypatch.setattr(engines, "engine", lambda name: fails if name == "triton" else found(name))
    with watched() as told, pytest.warns(RuntimeWarning, match="no compiler"):
        ours = steps(UNet, batch, DEVICE, False, True)
    assert told
    judged(ours, UNet, batch, False, True)


def test_dropout_drops_what_eager_mode_drops() -> None:
    """Random ops go by the order of memory, so what they read and write stays in rows; what lies before them need not."""
    batch, x, w = next(_batches), torch.randn(2, 8, 6, 6), torch.randn(8, 8, 3, 3) / 8
    x = x.repeat(batch, 1, 1, 1)

    def run(device: str) -> Tensor:
        torch.manual_seed(3)
        a, b = x.to(device), w.to(device)
        with torch.no_grad():
            inner = F.conv2d(F.conv2d(a, b, padding=1).sin(), b, padding=1)
            return F.conv2d(F.dropout(inner, 0.5, True), b, padding=1).cpu()

    with watched() as told:
        ours = run(DEVICE)
    bound = {"rtol": 3e-2, "atol": 3e-2} if ON_GPU else {"rtol": 1e-4, "atol": 1e-4}
    assert told and torch.allclose(ours, run(PHYSICAL), **bound)


def test_explain_tells() -> None:
    torch.manual_seed(0)
    model = Views().to(DEVICE)
    with torch.no_grad(), settings.override(engine="triton"):
        text = str(lazy_backend.explain(lambda: model(torch.zeros(next(_batches), 8, 6, 6, device=DEVICE))))
    assert "tensors between them are channels_last in memory" in text
    assert "its memory is seen outside, so that convolutions take and leave copies of it" in text


@pytest.mark.skipif(not ON_GPU, reason="counts kernels of cuDNN")
@pytest.mark.parametrize("train", [True, False], ids=["trained", "inferred"])
def test_no_kernel_transposes_images(train: bool) -> None:
    """Of the default size of a small network; cuDNN names such kernels by what they do."""
    torch.manual_seed(0)
    width, batch = 64, 32
    model = nn.Sequential(nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(True), nn.MaxPool2d(3, 2, 1),
                          *(Block(width) for _ in range(2)), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))
    model = model.to(DEVICE).train(train)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step() -> None:
        x = torch.randn(batch, 3, 64, 64).to(DEVICE)
        with torch.autocast(DEVICE, torch.bfloat16), torch.set_grad_enabled(train):
            loss = model(x).float().square().mean()
        if train:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        lazy_backend.mark_step(wait=True)

    with watched() as told:
        for _ in range(4):
            step()
        names = [name for name, _, _ in gpu_kernels(step)]
    transposing = [name for name in names if "nchwToNhwc" in name or "nhwcToNchw" in name]
    assert told and names and not transposing, transposing


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.norm1, self.norm2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm2(self.second(F.relu(self.norm1(self.first(x)), True))) + x)
