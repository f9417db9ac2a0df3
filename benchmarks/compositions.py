"""Random programs of usual ops over usual and odd shapes, drawn from a seed. Imports torch only.

Which ops a program has follows from its seed and its sizes, not from what tensors hold: it is the same on every device, and in
float64, where casts are left out, says what would be exact.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

Sizes = tuple[int, int, int]
T = TypeVar("T")

WIDTHS = (64, 96, 127, 128, 200, 255, 256, 300, 384, 511, 512, 768, 1000, 1024, 1025, 1152, 1536, 2048, 2049, 3000, 3001, 4096,
          5003, 5120, 8192, 11_008, 14_336, 16_384, 32_000)
LARGEST, TINY = 1 << 25, 1 << 12
DTYPES = (torch.float32, torch.float32, torch.bfloat16, torch.bfloat16, torch.float16)
OUTPUTS, ARRAYS = 5, (2, 3, 4)
KINDS = {"unary": 25, "binary": 22, "view": 15, "reduction": 18, "indexed": 8, "in place": 4, "product": 2, "cast": 6}

UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    **{name: getattr(torch, name) for name in "tanh sigmoid relu abs neg square sin cos erf sign".split()},
    **{name: getattr(F, name) for name in "gelu silu softplus elu leaky_relu hardswish mish logsigmoid".split()},
    "gelu by tanh": lambda x: F.gelu(x, approximate="tanh"), "exp": lambda x: x.clamp(-5, 3).exp(),
    "log": lambda x: (x.abs() + 0.1).log(), "sqrt": lambda x: (x.abs() + 0.1).sqrt(), "rsqrt": lambda x: (x.abs() + 0.3).rsqrt(),
    "scale": lambda x: x * -1.3 + 0.25, "clamp": lambda x: x.clamp(-1, 1), "cube": lambda x: x.clamp(-2, 2) ** 3,
    "reciprocal": lambda x: 1 / (x.abs() + 0.5), "where": lambda x: torch.where(x > 0, x, x * 0.1),
    "times positions": lambda x: x * (torch.arange(x.shape[-1], device=x.device) % 7 - 3).to(x.dtype) if x.dim() else x,
    "triangle": lambda x: x.tril(1) if x.dim() > 1 else x,
}  # fmt: skip
BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": torch.add, "sub": torch.sub, "scaled sub": lambda x, y: torch.sub(x, y, alpha=0.5), "mul": lambda x, y: x * y.tanh(),
    "maximum": torch.maximum, "minimum": torch.minimum, "div": lambda x, y: x / (y.abs() + 1),
    "where": lambda x, y: torch.where(x > y, x, y * 0.5), "lerp": lambda x, y: torch.lerp(x, y.to(x.dtype).expand_as(x), 0.3),
    "addcmul": lambda x, y: torch.addcmul(x, y.to(x.dtype), y.to(x.dtype), value=0.1),
    "hypot": lambda x, y: torch.sqrt(x.square() + y.square() + 0.1),
}  # fmt: skip
REDUCTIONS: dict[str, Callable[[Tensor, int, bool], Tensor]] = {
    "sum": lambda x, d, keep: x.sum(d, keepdim=keep) / x.shape[d] ** 0.5, "mean": lambda x, d, keep: x.mean(d, keepdim=keep),
    "amax": lambda x, d, keep: x.amax(d, keepdim=keep), "amin": lambda x, d, keep: x.amin(d, keepdim=keep),
    "var": lambda x, d, keep: x.var(d, keepdim=keep, correction=0), "of all": lambda x, d, keep: x.mean(),
    "logsumexp": lambda x, d, keep: x.logsumexp(d, keepdim=keep), "norm": lambda x, d, keep: x.norm(dim=d, keepdim=keep),
    "softmax": lambda x, d, keep: x.softmax(d) * x.shape[d] ** 0.5, "log_softmax": lambda x, d, keep: x.log_softmax(d),
    "cumsum": lambda x, d, keep: x.cumsum(d) / x.shape[d] ** 0.5, "normalize": lambda x, d, keep: F.normalize(x + 0.1, dim=d),
    "ends": lambda x, d, keep: x.mean(tuple({0, x.dim() - 1}), keepdim=keep),
    "centre": lambda x, d, keep: x - x.mean(d, keepdim=True),
    "scaled to one": lambda x, d, keep: x * (x.square().mean(d, keepdim=True) + 0.1).rsqrt(),
}  # fmt: skip


class Composition:
    """``Composition(seed, sizes)(inputs)`` are the results, gradients last; ``log`` says what was done, once it ran.

    ``exact``: in float64, without casts.
    """

    def __init__(self, seed: int, sizes: Sizes, largest: int = LARGEST, exact: bool = False) -> None:
        self.seed, self.sizes, self.largest, self.exact = seed, sizes, largest, exact
        self.log: list[str] = []
        self._given: list[Tensor] | None = None
        self._made: list[Tensor] = []

    def inputs(self, device: str) -> list[Tensor]:
        """What it asks for, in order; on the CPU, drawn from the seed, then moved."""
        self._given, self._made = None, []
        self._run("cpu" if device == "lazysched" else device)
        return [one.detach().to(device) for one in self._made]

    def __call__(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        self._given = list(inputs)
        return self._run(str(inputs[0].device.type))

    def _run(self, device: str) -> list[Tensor]:
        self.random, self.device = random.Random(self.seed), device
        self.dtype = self._one_of(DTYPES)
        self._count, self._leaves = 0, list[Tensor]()
        self.log.clear()
        with_gradients = self.random.random() < 0.6
        rows, width, count = self.sizes
        shapes = [(rows, width), (rows, width), (width,), (rows, 1), (width, rows), (rows, width, count), (count, rows, width)]
        drawn = [self._cut(self._one_of(shapes)) for _ in range(self._one_of((2, 3)))]
        self.values = [self._input(shape, "normal", with_gradients) for shape in drawn]
        for _ in range(self.random.randint(3, 10)):
            self._step()
        outputs = self.random.sample(self.values, min(OUTPUTS - 1, len(self.values))) + self.values[-1:]
        results = [one.detach() for one in outputs] + (self._gradients(outputs) if with_gradients else [])
        self.values, self._leaves = [], []  # or a lazy device would have to keep all that lies between
        return results

    def _step(self) -> None:
        kind = self.random.choices(list(KINDS), list(KINDS.values()))[0]
        x = self._one_of(self.values[-6:])
        name, out = getattr(self, "_" + kind.replace(" ", "_"))(x)
        if out.numel() and out.numel() <= self.largest and out.is_floating_point():
            self.values.append(out)
            self.log.append(f"{kind} {name} of {tuple(x.shape)}: {tuple(out.shape)} {str(out.dtype)[6:]}")

    def _gradients(self, outputs: Iterable[Tensor]) -> list[Tensor]:
        """Of all outputs, each element with a weight that follows from its column."""
        total: Any = 0
        for one in (one for one in outputs if one.requires_grad):
            wide = one if self.exact else one.float()
            weights = torch.linspace(-1, 1, wide.shape[-1] if wide.dim() else 1, device=wide.device, dtype=wide.dtype)
            total = total + (wide * weights).sum() / wide.numel() ** 0.5
        found = torch.autograd.grad(total, self._leaves, allow_unused=True) if isinstance(total, Tensor) else ()
        return [one for one in found if one is not None]

    # ---- one op of each kind: its name and its result -------------------------------------------------------------------------

    def _unary(self, x: Tensor) -> tuple[str, Tensor]:
        name = self._one_of(list(UNARY))
        return name, UNARY[name](x)

    def _binary(self, x: Tensor) -> tuple[str, Tensor]:
        name = self._one_of(list(BINARY))
        return name, BINARY[name](x, self._fitting(self._one_of(self.values), x.shape))

    def _reduction(self, x: Tensor) -> tuple[str, Tensor]:
        name = self._one_of([*REDUCTIONS, "layer_norm", "rms_norm"])
        if not x.dim():
            return "nothing", x
        if name in REDUCTIONS:
            return name, REDUCTIONS[name](x, self.random.randrange(x.dim()), self.random.random() < 0.5)
        shape = x.shape[-1:]
        weight, bias = self._input(shape, "normal", True), self._input(shape, "normal", True)
        x = x.to(weight.dtype)
        return name, F.layer_norm(x, shape, weight, bias) if name == "layer_norm" else F.rms_norm(x, shape, weight)

    def _view(self, x: Tensor) -> tuple[str, Tensor]:
        if not x.dim():
            return "unsqueeze", x[None]
        dim, other = self.random.randrange(x.dim()), self.random.randrange(x.dim())
        size = x.shape[dim]
        start = self.random.randrange(size)
        views: dict[str, Callable[[], Tensor]] = {
            "transpose": lambda: x.transpose(dim, other), "narrow": lambda: x.narrow(dim, start, size - start),
            "every second": lambda: x[(slice(None),) * dim + (slice(0, None, 2),)], "flip": lambda: x.flip(dim),
            "flatten": lambda: x.flatten(0, other), "roll": lambda: x.roll(3, dim), "chunk": lambda: x.chunk(2, dim)[0],
            "select": lambda: x.select(dim, start), "contiguous": lambda: x.contiguous(),
            "expand": lambda: x.unsqueeze(dim).expand(*x.shape[:dim], 2, *x.shape[dim:]) if x.dim() < 4 else x,
        }
        name = self._one_of(list(views))
        return name, views[name]()

    def _indexed(self, x: Tensor) -> tuple[str, Tensor]:
        if not x.dim():
            return "nothing", x
        dim = self.random.randrange(x.dim())
        size, few = x.shape[dim], self._one_of((1, 8, 17))
        ops: dict[str, Callable[[], Tensor]] = {
            "index_select": lambda: x.index_select(dim, self._input((few,), size)),
            "cat": lambda: torch.cat([x, x.flip(dim)], dim),
            "gather": lambda: x.gather(dim, self._input(x.shape, size)), "stack": lambda: torch.stack([x, x + 1], dim),
            "index_add": lambda: x.index_add(dim, self._input((size,), size), x, alpha=0.5), "pad": lambda: F.pad(x, (2, 1)),
            "scatter": lambda: x.scatter(dim, self._input([1 if d == dim else n for d, n in enumerate(x.shape)], size), 0.5),
            "masked_fill": lambda: x.masked_fill(self._input(x.shape, "mask"), -1.0),
            "cross_entropy": lambda: F.cross_entropy(x, self._input(x.shape[:1], x.shape[1])) if x.dim() == 2 else x,
        }
        name = self._one_of(list(ops))
        return name, ops[name]()

    def _in_place(self, x: Tensor) -> tuple[str, Tensor]:
        x = x.clone()
        if not x.dim():
            return "add_", x.add_(1)
        dim = self.random.randrange(x.dim())
        part = x.narrow(dim, 0, self.random.randint(1, x.shape[dim]))
        ops: dict[str, Callable[[], Any]] = {
            "mul_": lambda: part.mul_(0.5), "zero_": lambda: part.zero_(), "sigmoid_": lambda: x.sigmoid_(),
            "copy_": lambda: part.copy_(self._fitting(self._one_of(self.values), part.shape)),
        }
        name = self._one_of(list(ops))
        ops[name]()
        return name, x

    def _product(self, x: Tensor) -> tuple[str, Tensor]:
        if not x.dim():
            return "nothing", x
        weight = self._input((self._one_of((8, 17, 64)), x.shape[-1]), "normal", True)
        return "linear", F.linear(x.to(weight.dtype), weight) / x.shape[-1] ** 0.5

    def _cast(self, x: Tensor) -> tuple[str, Tensor]:
        dtype = self._one_of((torch.float32, self.dtype))
        return str(dtype)[6:], x if self.exact else x.to(dtype)

    # ---- what ops take --------------------------------------------------------------------------------------------------------

    def _one_of(self, options: Sequence[T]) -> T:
        return self.random.choice(options)

    def _cut(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        while torch.Size(shape).numel() > self.largest:
            shape = shape[1:] if len(shape) > 2 else (max(shape[0] // 2, 1), *shape[1:])
        return shape

    def _fitting(self, y: Tensor, shape: Sequence[int]) -> Tensor:
        """``y`` so that it broadcasts to ``shape``: what it has too much is averaged."""
        y = y.mean(tuple(range(y.dim() - len(shape)))) if y.dim() > len(shape) else y
        for dim in range(-y.dim(), 0):
            if y.shape[dim] not in (1, shape[dim]):
                y = y.narrow(dim, 0, shape[dim]) if y.shape[dim] > shape[dim] else y.mean(dim, keepdim=True)
        return y

    def _input(self, shape: Sequence[int], kind: str | int, with_gradient: bool = False) -> Tensor:
        """The next input: "normal" numbers, a "mask", or integers below a number."""
        self._count += 1
        if self._given is not None:
            one = self._given[self._count - 1].detach()
        else:
            generator = torch.Generator().manual_seed(1000 * self.seed + self._count)
            if kind == "normal":
                one = torch.randn(tuple(shape), generator=generator).to(self.dtype)
                one = one.double() if self.exact else one
            elif kind == "mask":
                one = torch.rand(tuple(shape), generator=generator) > 0.3
            else:
                one = torch.randint(0, int(kind), tuple(shape), generator=generator)
            one = one.to(self.device)
            self._made.append(one)
        if with_gradient:
            self._leaves.append(one.requires_grad_())
        return one


def sizes(seed: int, largest: int) -> Sizes:
    """Rows, width and how many arrays of them: many rows or few, of usual and odd widths."""
    drawn = random.Random(f"sizes of {seed}")
    width = drawn.choice([one for one in WIDTHS if one * one <= 4 * largest])
    rows = max(int(largest * drawn.choice((0.06, 0.12, 0.25, 0.5))) // width, 1) + drawn.choice((0, 0, 0, 1, 3))
    rows, width = (rows, width) if drawn.random() < 0.8 else (width, rows)
    return rows, width, drawn.choice(ARRAYS)
