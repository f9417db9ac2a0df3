"""Convolutions with biases, residuals and ReLUs give eager mode's numbers, whoever adds the bias. On a GPU cuDNN's fused ops are
judged; elsewhere CPU kernels stand for them, and for the CUDA graphs that they are kept for."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lazy_backend
from barriers.passes.conv_bias import BIAS, CONVOLUTION, WITH_RELU, WITH_SUM
from barriers.passes.conv_gradients import BACKWARD, SUM
from ir_nodes import Graph, settings
from lazy_backend import core, flush
from tests.cudnn_ops import flag, on_cpu
from tests.device import DEVICE, ON_GPU, PHYSICAL

LAST, FIRST = torch.channels_last, torch.contiguous_format
EXACT = {"rtol": 1e-4, "atol": 1e-4}
NEAR = {torch.float32: {"rtol": 1e-2, "atol": 1e-2} if ON_GPU else EXACT, torch.float16: {"rtol": 1e-2, "atol": 1e-2},
        torch.bfloat16: {"rtol": 4e-2, "atol": 4e-2}}
"""On a GPU float32 is TF32, in eager mode too."""
STEPS = 6 if ON_GPU else 2
"""On a GPU the third replays."""
_batches = itertools.count(2)
"""One for each recording that must not be found compiled."""


@pytest.fixture(autouse=True)
def judged(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        if not core.physical_is_cuda():
            monkeypatch.setattr(flush, "replays", lambda: True)
            stack.enter_context(on_cpu())
        yield


class Block(nn.Module):
    """Two convolutions and what they are given, as in a residual network without norms."""

    def __init__(self, width: int, inplace: bool) -> None:
        super().__init__()
        self.inplace = inplace
        self.first, self.second = nn.Conv2d(width, 2 * width, 3, padding=1), nn.Conv2d(2 * width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        made = self.second(F.relu(self.first(x), inplace=self.inplace))
        if self.inplace:
            made += x
            return F.relu_(made)
        return F.relu(made + x)


class Net(nn.Module):
    """cuDNN may serve the blocks and the stem's ReLU; kernels add the other biases."""

    def __init__(self, inplace: bool = False) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(8, 16, 3, stride=2, bias=False), nn.ReLU(inplace))
        self.blocks = nn.Sequential(Block(16, inplace), Block(16, inplace))
        self.head = nn.Sequential(nn.Conv2d(16, 24, 3), nn.SiLU(inplace), nn.Conv2d(24, 8, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x))).mean((2, 3))


def built(device: str, dtype: torch.dtype, layout: Any, inplace: bool = False) -> nn.Module:
    torch.manual_seed(0)
    return Net(inplace).to(device, dtype).to(memory_format=layout)


def images(batch: int, device: str, dtype: torch.dtype, layout: Any) -> Iterator[Tensor]:
    draws = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        yield torch.randn(batch, 8, 13, 12, generator=draws).to(device, dtype).to(memory_format=layout)


def trained(batch: int, device: str, dtype: torch.dtype, layout: Any, inplace: bool, autocast: bool = False) -> list[Tensor]:
    """Losses, then parameters."""
    model = built(device, dtype, layout, inplace)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for x in images(batch, device, dtype, layout):
        with torch.autocast(device, torch.bfloat16, enabled=autocast):
            loss = model(x).float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [one.detach().cpu().float() for one in (*losses, *model.parameters())]


def inferred(batch: int, device: str, dtype: torch.dtype, layout: Any, inplace: bool) -> list[Tensor]:
    """All blocks' results are held to the end, while later replays fill their memory again."""
    model, found = built(device, dtype, layout, inplace), []
    with torch.no_grad():
        for x in images(batch, device, dtype, layout):
            inside = model.blocks(model.stem(x))
            found += [inside, model.head(inside)]
            if device == DEVICE:
                lazy_backend.mark_step()
    return [one.cpu().float() for one in found]


class Watched:
    """The convolutions of new graphs: how many cuDNN does more than convolve for, who keeps a bias, and who sums its gradient."""

    def __init__(self) -> None:
        self.relus = self.sums = self.biased = self.plain = self.summed = self.whole = 0
        self.before = self.refusals()

    @staticmethod
    def refusals() -> int:
        names = torch._lazy.metrics.counter_names()
        return sum(torch._lazy.metrics.counter_value(name) for name in names if name.startswith("CudaGraphRefused"))

    def __call__(self, graph: Graph, remarks: Any) -> None:
        for node in graph.nodes:
            self.relus += node.target == WITH_RELU
            self.sums += node.target == WITH_SUM
            self.biased += node.target == CONVOLUTION and node.args[BIAS] is not None
            self.plain += node.target == CONVOLUTION and node.args[BIAS] is None
            self.summed += node.target == SUM and node.changed
            self.whole += node.target == BACKWARD and node.args[-1][BIAS]


@contextlib.contextmanager
def watched(disable: str = "") -> Iterator[Watched]:
    watch = Watched()
    flush.watchers.append(watch)
    try:
        # Sizes are new in each test, and rows have to stay rows.
        with settings.override(engine="triton", disable=frozenset(("varying", "channels_last", disable)) - {""}):
            yield watch
    finally:
        flush.watchers.remove(watch)


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("layout", [LAST, FIRST], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("run", [trained, inferred])
def test_numbers_are_eager_modes(run: Any, dtype: torch.dtype, layout: Any, inplace: bool) -> None:
    batch, replayed = next(_batches), lazy_backend.stats()["graphs_replayed"]
    with watched() as found:
        ours = run(batch, DEVICE, dtype, layout, inplace)
    graphs = found.plain // (2 if layout is LAST else 6)
    assert graphs and (found.relus, found.sums) == ((3 * graphs, 2 * graphs) if layout is LAST else (0, 0)) and not found.biased
    torch.testing.assert_close(ours, run(batch, PHYSICAL, dtype, layout, inplace), **NEAR[dtype])
    others = graphs * (layout is LAST)  # the mean's gradient lies otherwise than what the last convolution read
    assert (found.summed, found.whole) == ((6 * graphs - others, others) if run is trained else (0, 0))
    if core.physical_is_cuda():
        assert lazy_backend.stats()["graphs_replayed"] > replayed and Watched.refusals() == found.before


@pytest.mark.parametrize("layout", [LAST, FIRST], ids=str)
def test_without_tf32_kernels_add_biases(layout: Any) -> None:
    batch = next(_batches)
    with flag("allow_tf32", False):
        with watched() as found:
            ours = trained(batch, DEVICE, torch.float32, layout, False)
        theirs = trained(batch, PHYSICAL, torch.float32, layout, False)
    assert found.plain and not (found.relus or found.sums or found.biased)
    torch.testing.assert_close(ours, theirs, **EXACT)


@pytest.mark.parametrize("layout", [LAST, FIRST], ids=str)
def test_switched_off_only_rounding_differs(layout: Any) -> None:
    batch = next(_batches)
    with watched("conv_bias") as found:
        ours = trained(batch, DEVICE, torch.float32, layout, False)
    assert found.relus == found.sums == 0 and found.biased == 6 * found.plain
    torch.testing.assert_close(ours, trained(batch, PHYSICAL, torch.float32, layout, False), **NEAR[torch.float32])


@pytest.mark.parametrize("layout", [LAST, FIRST], ids=str)
def test_autocast_casts_weights_and_biases_before(layout: Any) -> None:
    batch = next(_batches)
    with watched() as found:
        ours = trained(batch, DEVICE, torch.float32, layout, False, autocast=True)
    assert not found.biased and bool(found.sums) == (layout is LAST)
    theirs = trained(batch, PHYSICAL, torch.float32, layout, False, autocast=True)
    torch.testing.assert_close(ours, theirs, **NEAR[torch.bfloat16])


def test_explain_tells() -> None:
    model = built(DEVICE, torch.float32, LAST)
    with torch.no_grad(), settings.override(engine="triton"):
        told = str(lazy_backend.explain(lambda: model(torch.zeros(1, 8, 13, 12, device=DEVICE).to(memory_format=LAST))))
    assert "cuDNN does the rest to what it has in registers" in told and "its bias is added in the kernel" in told


def test_without_cuda_graphs_convolutions_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flush, "replays", lambda: False)
    with watched() as found:
        inferred(next(_batches), DEVICE, torch.float32, LAST, False)
    assert found.biased and found.relus == found.sums == 0


SHAPES = [  # channels in and out, kernel, stride, padding, dilation, height and width
    (8, 8, (1, 1), 1, 0, 1, (7, 5)), (16, 24, (5, 5), 2, 2, 1, (9, 11)), (64, 64, (3, 3), 1, 2, 2, (14, 14)),
    (8, 16, (3, 1), (2, 1), (1, 0), 1, (6, 9)), (72, 8, (3, 3), 1, 1, 1, (1, 1)), (8, 136, (4, 4), 4, 0, 1, (16, 12)),
    (16, 16, (3, 3), 1, 0, 1, (3, 3)), (256, 256, (3, 3), 1, 1, 1, (7, 7)),
]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", NEAR, ids=str)
@pytest.mark.parametrize("biased", [True, False])
def test_shapes(shape: tuple[Any, ...], dtype: torch.dtype, biased: bool) -> None:
    """cuDNN has an engine for each."""
    inputs, outputs, kernel, stride, padding, dilation, size = shape
    batch = next(_batches)

    def run(device: str) -> list[Tensor]:
        torch.manual_seed(0)
        layer = nn.Conv2d(inputs, outputs, kernel, stride, padding, dilation, bias=biased).to(dtype, memory_format=LAST)
        layer = layer.to(device)
        x = torch.randn(batch, inputs, *size).to(device, dtype).to(memory_format=LAST)
        with torch.no_grad():
            first = F.relu(layer(x))
            made = [first.cpu()]
            other = torch.linspace(-1, 1, first.numel()).view(first.shape).to(device, dtype).to(memory_format=LAST)
            for alpha in (1, 0.5):
                made.append(F.relu(torch.add(layer(x), other, alpha=alpha)).cpu())
        assert all(one.is_contiguous(memory_format=LAST) for one in made)
        return [one.float() for one in made]

    with watched() as found:
        ours = run(DEVICE)
    assert found.relus == 1 and found.sums == 2
    torch.testing.assert_close(ours, run(PHYSICAL), **NEAR[dtype])


@pytest.mark.parametrize("layout", [LAST, FIRST], ids=str)
def test_what_is_no_number_stays_so(layout: Any) -> None:
    """A ReLU passes NaN on, and so does a residual."""
    batch = next(_batches)

    def run(device: str) -> list[Tensor]:
        torch.manual_seed(0)
        layer = nn.Conv2d(8, 8, 3, padding=1).to(device).to(memory_format=layout)
        x = torch.randn(batch, 8, 9, 9)
        x[0, 2, 1, 1], x[1, 0, 7, 7] = float("nan"), float("inf")
        x = x.to(device).to(memory_format=layout)
        with torch.no_grad():
            return [one.cpu() for one in (F.relu(layer(x)), F.relu(layer(x.nan_to_num(0, 1, 1)) + x))]

    with watched() as found:
        ours = run(DEVICE)
    assert (found.relus, found.sums) == ((1, 1) if layout is LAST else (0, 0))
    torch.testing.assert_close(ours, run(PHYSICAL), equal_nan=True, **NEAR[torch.float32])
