"""What `benchmarks.kernels` times: memory-bound programs, their inputs and the bytes that must move. Imports torch and
`benchmarks.optimizer`.

A program is an ordinary function of tensors. Backward ones are what autograd calls, or, where ``trains``, a loss whose gradient
is asked for. The floor of each is every input read once and every result written once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim.adamw import adamw

from benchmarks.optimizer import sizes as parameter_sizes

aten = torch.ops.aten
Sizes = tuple[int, ...]
MATRIX = {"large": (16384, 8192), "odd": (8191, 5003), "gpt": (16384, 768), "small": (64, 768)}
WIDE = {"50257": (8192, 50257), "128256": (4096, 128256), "odd": (2047, 30523), "small": (64, 1000)}
IMAGES = {"large": (64, 64, 56, 56), "small": (2, 8, 6, 6)}
SQUARE = {"large": (8192, 8192), "odd": (5003, 4099), "small": (64, 96)}
PARAMETERS = {"124M": (0,), "small": (1,)}  # all of GPT-2's; of a tiny one
BETAS, STEP = (0.9, 0.999), 7.0


@dataclass(frozen=True)
class Case:
    """``inputs``: from (sizes, maker of a random tensor, maker of indices below a bound); ``streams``: how often the first
    input's bytes move; 0: see `bytes_moved`. ``trains``: the gradient of the program's result with respect to the first input is
    part of it."""

    name: str
    program: Callable[..., Any]
    inputs: Callable[[Sizes, Callable[..., Tensor], Callable[..., Tensor]], Sequence[Any]]
    streams: float
    shapes: dict[str, Sizes]
    trains: bool = False
    random: bool = False


def rms_norm(x: Tensor, w: Tensor) -> Tensor:
    return (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * w


def rms_norm_backward(g: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    scale = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)
    normal = x.float() * scale
    inner = g.float() * w.float()
    back = scale * (inner - normal * (inner * normal).mean(-1, keepdim=True))
    return back.to(x.dtype), (g.float() * normal).sum(0).to(w.dtype)


def divergence(x: Tensor, y: Tensor) -> Tensor:
    """What a student's logits are off a teacher's."""
    return F.kl_div(F.log_softmax(x, -1), F.log_softmax(y, -1), reduction="batchmean", log_target=True)


def layer_norm_backward(g: Tensor, x: Tensor, w: Tensor, mean: Tensor, scale: Tensor) -> Any:
    return aten.native_layer_norm_backward(g, x, [x.shape[-1]], mean, scale, w, w, [True, True, True])


def add_norm(x: Tensor, y: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    total = x + y
    return total, F.layer_norm(total, (x.shape[-1],), w, b)


def gelu_backward(g: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    inner = aten.gelu_backward(g, x)
    return inner, inner.sum(0)


def swiglu_backward(g: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    return aten.silu_backward(g * up, gate), g * F.silu(gate)


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


def rotary_of_pairs_backward(g: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Of an embedding that turns neighbours, as autograd writes it."""
    first, second, size = g[..., ::2], g[..., 1::2], list(g.shape)
    turned = (first * cos + second * sin, second * cos - first * sin)
    first, second = (aten.slice_backward(half, size, -1, start, size[-1], 2) for start, half in enumerate(turned))
    return first + second


def cast_chain(x: Tensor) -> Tensor:
    return ((x.float() * 0.5).to(torch.bfloat16).float() + 1.0).to(x.dtype)


def cross_entropy(x: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(x.float(), target)


def parted(tensors: Sequence[Tensor], count: int) -> list[list[Tensor]]:
    """``count`` lists of equal length."""
    each = len(tensors) // count
    return [list(tensors[i * each : (i + 1) * each]) for i in range(count)]


def adamw_foreach(*tensors: Tensor) -> list[Tensor]:
    parameters, gradients, means, squares, steps = parted(tensors, 5)
    adamw(parameters, gradients, means, squares, [], steps, foreach=True, amsgrad=False, beta1=BETAS[0], beta2=BETAS[1], lr=1e-3,
          weight_decay=0.01, eps=1e-8, maximize=False)
    return parameters


def adamw_fused(*tensors: Tensor) -> list[Tensor]:
    parameters, gradients, means, squares, steps = parted(tensors, 5)
    torch._fused_adamw_(parameters, gradients, means, squares, [], steps, lr=1e-3, beta1=BETAS[0], beta2=BETAS[1],
                        weight_decay=0.01, eps=1e-8, amsgrad=False, maximize=False)
    return parameters


def clip(*gradients: Tensor) -> list[Tensor]:
    """`torch.nn.utils.clip_grad_norm_`, of the norm of all."""
    norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
    torch._foreach_mul_(gradients, torch.clamp(1.0 / (norm + 1e-6), max=1.0))
    return list(gradients)


def _parameters(lists: int, new: Callable[..., Tensor], size: Sizes) -> list[Tensor]:
    shapes = parameter_sizes(("gpt2", "tiny")[size[0]])
    return [new(*shape).abs() if squares else new(*shape) for squares in [False] * min(lists, 3) + [True] * (lists - 3)
            for shape in shapes]


def _foreach(size: Sizes, new: Callable[..., Tensor], _: Any) -> Sequence[Any]:
    """Parameters, gradients, both moments, and step numbers on the CPU."""
    found = _parameters(4, new, size)
    return [*found, *(torch.full((), STEP) for _ in range(len(found) // 4))]


def _fused(size: Sizes, new: Callable[..., Tensor], _: Any) -> Sequence[Any]:
    """The same with step numbers on the device."""
    found = _parameters(4, new, size)
    return [*found, *(new(dtype=torch.float32).zero_().add_(STEP) for _ in range(len(found) // 4))]


def _rows(*, vectors: int = 0, tensors: int = 1) -> Callable[..., Sequence[Any]]:
    return lambda size, new, _: [*(new(*size) for _ in range(tensors)), *(new(size[-1]) for _ in range(vectors))]


def _statistics(size: Sizes, new: Callable[..., Tensor], _: Any) -> Sequence[Any]:
    exact = {"dtype": torch.float32}
    return [new(*size), new(*size), new(size[-1]), new(size[0], 1, **exact), new(size[0], 1, **exact).abs() + 0.5]


def _rotary(size: Sizes, new: Callable[..., Tensor], _: Any) -> Sequence[Any]:
    return [new(size[0] // 64, 16, 64, size[1]), new(1, 1, 64, size[1]), new(1, 1, 64, size[1])]


def _pairs(size: Sizes, new: Callable[..., Tensor], _: Any) -> Sequence[Any]:
    return [new(size[0] // 64, 16, 64, size[1]), new(1, 1, 64, size[1] // 2), new(1, 1, 64, size[1] // 2)]


def _convolution(layout: torch.memory_format, tensors: int = 1) -> Callable[..., Sequence[Any]]:
    """Input, further tensors of its size, a weight that keeps the size, a bias."""
    return lambda size, new, _: [*(new(*size).to(memory_format=layout) for _ in range(tensors)),
                                 new(size[1], size[1], 3, 3).mul_(0.05).to(memory_format=layout), new(size[1])]


def convolved(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.conv2d(x, w, b, padding=1)


def _targets(size: Sizes, new: Callable[..., Tensor], index: Callable[..., Tensor]) -> Sequence[Any]:
    return [new(*size), index(size[-1], size[0])]


CASES = [
    Case("bias+gelu+residual", lambda x, y, b: F.gelu(x + b) + y, _rows(vectors=1, tensors=2), 3, MATRIX),
    Case("softmax", lambda x: x.softmax(-1), _rows(), 2, MATRIX | {"50257": WIDE["50257"]}),
    Case("layer norm", lambda x, w, b: F.layer_norm(x, (x.shape[-1],), w, b), _rows(vectors=2), 2, MATRIX),
    Case("rms norm", rms_norm, _rows(vectors=1), 2, MATRIX),
    Case("add+norm", add_norm, _rows(vectors=2, tensors=2), 4, MATRIX),
    Case("swiglu", lambda x, y: F.silu(x) * y, _rows(tensors=2), 3, MATRIX),
    Case("rotary", rotary, _rotary, 2, {"large": (65536, 128), "odd": (16384, 74), "small": (64, 128)}),
    Case("rotary of pairs backward", rotary_of_pairs_backward, _pairs, 2,
         {"large": (65536, 128), "odd": (16384, 74), "small": (64, 128)}),
    Case("cross entropy", cross_entropy, _targets, 1, WIDE),
    Case("full sum", lambda x: x.sum(), _rows(), 1, MATRIX),
    Case("row+column sums", lambda x: (x.sum(0), x.sum(1)), _rows(), 1, MATRIX),
    Case("column sum", lambda x: x.sum(0), _rows(), 1, MATRIX),
    Case("cumsum", lambda x: x.cumsum(-1), _rows(), 2, MATRIX | {"50257": WIDE["50257"]}),
    Case("column cumsum", lambda x: x.cumsum(0), _rows(), 2, MATRIX),
    Case("softmax+cumsum", lambda x: x.softmax(-1).cumsum(-1), _rows(), 2, MATRIX),
    Case("transpose+add", lambda x, y: x.t() + y, lambda s, new, _: [new(s[1], s[0]), new(*s)], 3, SQUARE),
    Case("dropout+add", lambda x, y: F.dropout(x, 0.1) + y, _rows(tensors=2), 3, MATRIX, random=True),
    Case("dropout+add+norm", lambda x, y, w, b: add_norm(F.dropout(x, 0.1), y, w, b), _rows(vectors=2, tensors=2), 4, MATRIX,
         random=True),
    Case("embedding", lambda i, w: F.embedding(i, w), lambda s, new, index: [index(50257, s[0] * 8), new(50257, s[1])], 0,
         {"large": (16384, 768), "odd": (2047, 771), "small": (16, 768)}),
    Case("cast chain", cast_chain, _rows(), 2, MATRIX),
    Case("group norm", lambda x: F.group_norm(x, 32), lambda s, new, _: [new(s[0], 256, s[1], s[1])], 2,
         {"large": (256, 32), "odd": (33, 31), "small": (2, 32)}),
    Case("layer norm backward", layer_norm_backward, _statistics, 3, MATRIX),
    Case("rms norm backward", rms_norm_backward, _rows(vectors=1, tensors=2), 3, MATRIX),
    Case("softmax backward", lambda g, y: aten._softmax_backward_data(g, y, -1, y.dtype), _rows(tensors=2), 3, MATRIX),
    Case("cross entropy fwd+bwd", cross_entropy, _targets, 2, WIDE, trains=True),
    Case("divergence fwd+bwd", divergence, _rows(tensors=2), 3, MATRIX, trains=True),
    Case("gelu+bias backward", gelu_backward, _rows(tensors=2), 3, MATRIX),
    Case("swiglu backward", swiglu_backward, _rows(tensors=3), 5, MATRIX),
    # Not bound by memory alone: what bias, residual and activation add to the convolution is.
    Case("conv+bias+relu", lambda x, w, b: convolved(x, w, b).relu_(), _convolution(torch.channels_last), 2, IMAGES),
    Case("conv+bias+add+relu", lambda x, y, w, b: (convolved(x, w, b) + y).relu(), _convolution(torch.channels_last, 2), 3,
         IMAGES),
    Case("conv+bias+silu", lambda x, w, b: F.silu(convolved(x, w, b)), _convolution(torch.channels_last), 2, IMAGES),
    Case("conv+bias+relu rows", lambda x, w, b: convolved(x, w, b).relu(), _convolution(torch.contiguous_format), 2, IMAGES),
    Case("AdamW foreach", adamw_foreach, _foreach, 0, PARAMETERS),
    Case("AdamW fused", adamw_fused, _fused, 0, PARAMETERS),
    Case("clip by global norm", clip, lambda size, new, _: _parameters(1, new, size), 0, PARAMETERS),
]  # fmt: skip


def bytes_moved(case: Case, inputs: Sequence[Any]) -> float:
    """The floor: bytes that any implementation reads and writes."""
    if case.name == "embedding":
        index, weight = inputs
        return index.nbytes + 2 * index.numel() * weight.shape[1] * weight.element_size()
    if case.shapes is PARAMETERS:  # clipping reads gradients twice, as no cache holds them; AdamW writes all but gradients
        lists = 1 if case.name.startswith("clip") else 5
        first = sum(one.nbytes for one in parted(inputs, lists)[0])
        return first * (3 if lists == 1 else 7)
    return case.streams * inputs[0].nbytes
