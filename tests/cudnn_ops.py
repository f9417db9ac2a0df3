"""What cuDNN's fused convolutions and recurrent layers compute, as CPU kernels for tests without a GPU. Imports torch and
`lazy_backend.recurrent`.

Convolutions round where eager mode does; cuDNN rounds once, at the end.
"""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Callable, Iterator, Sequence

import torch
from torch import Tensor

from lazy_backend import recurrent as layers

Sizes = Sequence[int]


def convolved(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: Sizes, padding: Sizes, dilation: Sizes, groups: int
) -> Tensor:  # fmt: skip
    return torch.ops.aten.convolution.default(x, weight, bias, stride, padding, dilation, False, [0] * len(stride), groups)


def with_relu(x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
    return convolved(x, weight, bias, *rest).relu()


def with_sum(x: Tensor, weight: Tensor, other: Tensor, alpha: Any, bias: Tensor | None, *rest: Any) -> Tensor:
    return convolved(x, weight, bias, *rest).add(other, alpha=1 if alpha is None else alpha).relu()


@contextlib.contextmanager
def on_cpu() -> Iterator[None]:
    """The fused ops have CPU kernels."""
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("cudnn_convolution_relu", with_relu, "CPU")
        library.impl("cudnn_convolution_add_relu", with_sum, "CPU")
        yield


@contextlib.contextmanager
def flag(name: str, value: bool) -> Iterator[None]:
    """A switch of ``torch.backends.cudnn``, also where PyTorch's own test suites, in this process, have locked them."""
    cudnn = torch.backends.cudnn
    with torch.backends.__allow_nonbracketed_mutation():
        before = getattr(cudnn, name)
        setattr(cudnn, name, value)
    try:
        yield
    finally:
        with torch.backends.__allow_nonbracketed_mutation():
            setattr(cudnn, name, before)


def layer_of(mode: int, batch_first: bool, bidirectional: bool, batch_sizes: Sizes, biases: bool, count: int
             ) -> Callable[..., Any]:  # fmt: skip
    """PyTorch's recurrent layers as a function of (input, hx, cx, weights)."""
    op = (torch.rnn_relu, torch.rnn_tanh, torch.lstm, torch.gru)[mode]

    def run(x: Tensor, hx: Tensor, cx: Tensor | None, weights: list[Tensor]) -> list[Tensor]:
        states: Any = hx if cx is None else (hx, cx)
        packed = (torch.tensor(batch_sizes),) if len(batch_sizes) else ()
        rest = (bidirectional,) if packed else (bidirectional, batch_first)
        return list(op(x, *packed, states, weights, biases, count, 0.0, False, *rest))  # type: ignore[operator]

    return run


def as_in_eager_mode(function: Callable[[], Any]) -> Any:
    """Kernels run below autograd; what a thread of its own does is not."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def recurrent(x: Tensor, weight: list[Tensor], stride: int, buffer: Tensor | None, hx: Tensor, cx: Tensor | None, mode: int,
              hidden: int, projected: int, count: int, batch_first: bool, dropout: float, train: bool, bidirectional: bool,
              batch_sizes: Sizes, state: Tensor | None) -> tuple[Tensor, ...]:  # fmt: skip
    """`aten::_cudnn_rnn`. What it reserves for backward are ones."""
    assert dropout == 0 and buffer is None and state is None
    layer = layer_of(mode, batch_first, bidirectional, batch_sizes, stride > 3, count)
    out, *last = as_in_eager_mode(lambda: [t.detach() for t in layer(x, hx, cx, weight)])
    reserved = torch.ones(x.numel() if train else 0, dtype=torch.uint8)
    return out, last[0], last[1] if cx is not None else x.new_empty(0), reserved, torch.cat([w.flatten() for w in weight])


def recurrent_backward(x: Tensor, weight: list[Tensor], stride: int, buffer: Tensor, hx: Tensor, cx: Tensor | None,
                       output: Tensor, *rest: Any) -> tuple[Any, ...]:  # fmt: skip
    """`aten::_cudnn_rnn_backward`, which writes on what was reserved: a second run over the same bytes fails."""
    grads, (mode, _, _, count, batch_first, _, train, bidirectional, batch_sizes, _, reserved, mask) = rest[:3], rest[3:]
    if not train:
        raise RuntimeError("cudnn RNN backward can only be called in training mode")
    assert reserved.numel() == x.numel() and not bool((reserved == 2).any()), "not what forward has left"
    reserved.fill_(2)

    def run() -> list[Tensor]:
        given = [t.detach().requires_grad_() for t in (x, hx, *([] if cx is None else [cx]), *weight)]
        states = 2 if cx is None else 3
        layer = layer_of(mode, batch_first, bidirectional, batch_sizes, stride > 3, count)
        with torch.enable_grad():
            outs = layer(given[0], given[1], None if cx is None else given[2], given[states:])
        pairs = [(out, grad) for out, grad in zip(outs, grads) if grad is not None]
        found = torch.autograd.grad([out for out, _ in pairs], given, [grad for _, grad in pairs], allow_unused=True)
        return [torch.zeros_like(t) if grad is None else grad for t, grad in zip(given, found)]

    found = as_in_eager_mode(run)
    dcx, dweights = (None, found[2:]) if cx is None else (found[2], found[3:])
    joined = torch.cat([grad.flatten() for grad in dweights])  # all in one piece of memory, as cuDNN's are
    parts = joined.split([grad.numel() for grad in dweights])
    return found[0], found[1], dcx, [part.view_as(grad) for part, grad in zip(parts, dweights)] if mask[3] else []


@contextlib.contextmanager
def recurrent_on_cpu() -> Iterator[None]:
    """Recurrent layers of our device find cuDNN's ops on a CPU."""
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_cudnn_rnn", recurrent, "CPU")
        library.impl("_cudnn_rnn_backward", recurrent_backward, "CPU")
        layers.register(library)
        yield
