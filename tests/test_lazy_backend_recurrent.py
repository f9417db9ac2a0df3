"""Recurrent layers by cuDNN: one op for all layers, eager mode's numbers, what backward overwrites. A CPU stands in for a GPU."""

from __future__ import annotations

import contextlib
import copy
import warnings
from typing import Any, Iterator

import pytest
import torch
from torch import Tensor, nn

import lazy_backend
from ir_nodes import settings
from lazy_backend import recurrent
from tests.cudnn_ops import recurrent_on_cpu
from tests.device import DEVICE, ON_GPU, PHYSICAL

KINDS: dict[str, Any] = {"rnn tanh": nn.RNN, "rnn relu": lambda *sizes, **named: nn.RNN(*sizes, nonlinearity="relu", **named),
                         "lstm": nn.LSTM, "gru": nn.GRU}  # fmt: skip
OPTIONS: list[dict[str, Any]] = [{}, {"num_layers": 2, "bidirectional": True}, {"batch_first": True, "bias": False}]


@pytest.fixture(autouse=True)
def cudnn(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Layers by cuDNN, which a CPU has to be told."""
    torch.manual_seed(0)
    torch.empty(0, device=DEVICE)  # the device registers its ops when it starts
    if not ON_GPU:
        monkeypatch.setattr(recurrent, "by_cudnn", lambda x: torch.backends.cudnn.enabled)
    with contextlib.nullcontext() if ON_GPU else recurrent_on_cpu(), settings.override(verify=True):
        yield


def results(net: nn.Module, x: Any, states: Any = None) -> list[Tensor]:
    """Outputs, last states and gradients, on the CPU."""
    out, last = net(x, states)
    data = out.data if isinstance(out, nn.utils.rnn.PackedSequence) else out
    lasts = list(last) if isinstance(last, tuple) else [last]
    loss = data.float().square().sum()
    for state in lasts:
        loss = loss + state.float().sin().sum()
    net.zero_grad()
    loss.backward()
    found = [data, *lasts, *(parameter.grad for parameter in net.parameters() if parameter.grad is not None)]
    return [tensor.detach().cpu() for tensor in found]


def compare(net: nn.Module, *given: Any, **bounds: float) -> None:
    """The device's results beside eager mode's on what it computes on; two steps, of which the second is a cached one."""
    theirs, ours = copy.deepcopy(net).to(PHYSICAL), copy.deepcopy(net).to(DEVICE)
    for _ in range(2):
        wanted = results(theirs, *(moved(one, PHYSICAL) for one in given))
        found = results(ours, *(moved(one, DEVICE) for one in given))
        assert len(wanted) == len(found)
        for mine, reference in zip(found, wanted):
            assert mine.dtype == reference.dtype
            torch.testing.assert_close(mine, reference, **bounds)  # type: ignore[arg-type]


def moved(given: Any, device: str) -> Any:
    if isinstance(given, tuple) and not isinstance(given, nn.utils.rnn.PackedSequence):
        return tuple(one.to(device) for one in given)
    return None if given is None else given.to(device)


def recorded(net: nn.Module, x: Any) -> list[str]:
    """The ops of a forward."""
    lazy_backend.mark_step()
    return [node.target for node in lazy_backend.debug.graph(net(x)[0]).nodes]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_layers_agree_with_eager_mode(kind: str, options: dict[str, Any]) -> None:
    before = lazy_backend.stats()["fallbacks"]
    compare(KINDS[kind](8, 16, **options), torch.randn(5, 3, 8))
    assert lazy_backend.stats()["fallbacks"] == before, "no op had to run by itself"


def test_states_that_are_given_and_projections() -> None:
    compare(nn.LSTM(8, 16, 2, proj_size=4), torch.randn(5, 3, 8), (torch.randn(2, 3, 4), torch.randn(2, 3, 16)))
    compare(nn.GRU(8, 16, 2), torch.randn(5, 3, 8), torch.randn(2, 3, 16))


@pytest.mark.parametrize("kind", KINDS)
def test_packed_sequences(kind: str) -> None:
    compare(KINDS[kind](8, 16, bidirectional=True), nn.utils.rnn.pack_sequence([torch.randn(n, 8) for n in (5, 3, 1)]))


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_is_one_op(kind: str) -> None:
    net, x = KINDS[kind](8, 16, 2).to(DEVICE), torch.randn(5, 3, 8, device=DEVICE)
    assert recorded(net, x).count("aten::_cudnn_rnn") == 1
    assert not any(name.startswith(("aten::addmm", "aten::linear", "aten::_thnn")) for name in recorded(net, x))
    with torch.backends.cudnn.flags(enabled=False):
        assert "aten::_cudnn_rnn" not in recorded(net, x)


def test_cached_steps_compile_nothing() -> None:
    net, x = nn.LSTM(8, 16, 2, dropout=0.5).to(DEVICE), torch.randn(5, 3, 8, device=DEVICE)
    for step in range(4):
        before = lazy_backend.stats()
        net.zero_grad()
        net(x)[0].sum().backward()
        lazy_backend.mark_step(wait=True)
        after = lazy_backend.stats()
        if step > 1:
            assert (after["compiles"], after["shape_inferences"]) == (before["compiles"], before["shape_inferences"])


def test_backward_twice_reads_what_forward_has_left() -> None:
    net, x = nn.LSTM(8, 16).to(DEVICE), torch.randn(5, 3, 8, device=DEVICE)
    loss = net(x)[0].square().sum()
    loss.backward(retain_graph=True)
    first = [parameter.grad.clone() for parameter in net.parameters()]  # type: ignore[union-attr]
    lazy_backend.mark_step(wait=True)
    loss.backward()
    for parameter, grad in zip(net.parameters(), first):
        torch.testing.assert_close(parameter.grad.cpu(), 2 * grad.cpu())  # type: ignore[union-attr]


def test_dropout_between_layers_follows_the_generator() -> None:
    net, x = nn.LSTM(32, 64, 3, dropout=0.5).to(DEVICE), torch.randn(5, 16, 32, device=DEVICE)

    def outputs(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return net(x)[0].detach().cpu()

    assert torch.equal(outputs(1), outputs(1)) and not torch.equal(outputs(1), outputs(2))
    assert recorded(net, x).count("aten::_cudnn_rnn") == 3
    net.eval()
    assert torch.equal(outputs(1), outputs(2))


def test_dropout_of_everything_leaves_the_last_layer_its_biases() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        net = nn.GRU(8, 16, 2, dropout=1.0)
    compare(net, torch.randn(5, 3, 8))


def test_autocast_computes_in_float16_as_on_cuda() -> None:
    net, x = nn.LSTM(8, 16, 2).to(DEVICE), torch.randn(5, 3, 8, device=DEVICE)
    wanted = net(x)[0].detach().cpu()
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast(DEVICE, dtype=dtype):
            out, (hidden, cell) = net(x)
        assert (out.dtype, hidden.dtype, cell.dtype) == (torch.float16,) * 3
        torch.testing.assert_close(out.detach().float().cpu(), wanted, rtol=1e-2, atol=1e-2)
        net.zero_grad()
        out.float().square().sum().backward()
        assert all(parameter.grad.dtype is torch.float32 for parameter in net.parameters())  # type: ignore[union-attr]


def test_nobody_is_told_where_weights_lie() -> None:
    net, x = nn.GRU(8, 16).to(DEVICE), torch.randn(5, 3, 8, device=DEVICE)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        net(x)[0].sum().backward()
        lazy_backend.mark_step(wait=True)


def test_inference_mode_and_evaluation() -> None:
    net, x = nn.GRU(8, 16, 2, dropout=0.5).to(DEVICE).eval(), torch.randn(5, 3, 8, device=DEVICE)
    wanted = net(x)[0].detach().cpu()
    with torch.inference_mode():
        found = net(x)[0]
        assert found.is_inference()
        assert "aten::_cudnn_rnn" in recorded(net, x)
    torch.testing.assert_close(found.cpu(), wanted)


def test_what_is_wrong_is_said_in_eager_modes_words() -> None:
    net = nn.GRU(8, 16).to(DEVICE)
    with pytest.raises(RuntimeError, match="Expected hidden size"):
        net(torch.randn(5, 3, 8, device=DEVICE), torch.zeros(1, 4, 16, device=DEVICE))
    with pytest.raises(RuntimeError, match="backward can only be called in training mode"):
        net.eval()(torch.randn(5, 3, 8, device=DEVICE))[0].sum().backward()
    weights, state = list(nn.LSTM(8, 16).to(DEVICE).parameters()), torch.zeros(1, 3, 16, device=DEVICE)
    with pytest.raises(RuntimeError, match="lstm expects two hidden states"):
        torch.lstm(torch.randn(5, 3, 8, device=DEVICE), [state], weights, True, 1, 0.0, True, False, False)
