"""What a step costs at the least on this machine. Imports torch and `benchmarks.timing`.

Matrix products, convolutions and attention are timed alone, each as the step calls it: cuBLAS, cuDNN and PyTorch's attention; a
product of odd sizes also with sizes rounded up, attention also with cuDNN's kernel, and the fastest counts. What is left has to
read or write once each tensor that those exchange with the rest, and the optimizer has to read and write what it keeps: these
bytes at the rate of a large copy. Launches are in the timed calls. A step can be slower for good reasons (a batch norm has to
read its input twice); it can't be faster.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.timing import copy_rate, gpu_seconds, wall_seconds

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "linear")
KINDS = ("matrix product", "convolution", "attention")
ROUNDED = 64
OPTIMIZER_STREAMS = {"AdamW": 7, "SGD": 5}
"""How often an update moves a parameter's bytes: parameter and states are read and written, the gradient is read."""


def kind_of(op: str) -> str | None:
    """The kind of a library's call, by the op's base name."""
    if op in PRODUCTS:
        return "matrix product"
    if "attention" in op and not op.startswith("_fused_sdp"):
        return "attention"
    return "convolution" if op in ("convolution", "convolution_backward") else None


@dataclass
class Library:
    """All calls of one shape: how often, and seconds of one alone."""

    kind: str
    name: str
    shapes: str
    seconds: float
    count: int = 0


@dataclass
class Watch(TorchDispatchMode):
    """Times each library call of the program under it the first time that it comes, and notes the tensors that it exchanges."""

    apart: set[int] = field(default_factory=set)  # addresses of parameters, which the rest need not touch
    calls: dict[Any, Library] = field(default_factory=dict)
    exchanged: dict[int, int] = field(default_factory=dict)  # bytes by address
    _held: list[Any] = field(default_factory=list)  # so that no address comes twice
    attentions: Counter[Any] = field(default_factory=Counter)  # forward: (shape of q, of k, dtype, dropout, causal), how often

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        kind = kind_of(func._schema.name.removeprefix("aten::"))
        if kind:
            self.note(kind, func, args, kwargs)
            self.note_attention(func, args, kwargs)
            self.exchange([args, kwargs, made])
        return made

    def note(self, kind: str, func: Any, args: Any, kwargs: Any) -> None:
        shapes = ", ".join(described(leaf) for leaf in tree_leaves([args, kwargs]) if isinstance(leaf, Tensor))
        key = (str(func), shapes, str([leaf for leaf in tree_leaves([args, kwargs]) if not isinstance(leaf, Tensor)]))
        if key not in self.calls:
            ways = [lambda _: func(*args, **kwargs)]
            if kind == "matrix product" and func._schema.name.removeprefix("aten::") in ("mm", "bmm"):
                ways += rounded(func, args)
            self.calls[key] = Library(kind, str(func), shapes, min(map(seconds, ways)))
        self.calls[key].count += 1

    def note_attention(self, func: Any, args: Any, kwargs: Any) -> None:
        given = {spec.name: arg for spec, arg in zip(func._schema.arguments, args)} | kwargs
        if {"query", "key", "dropout_p", "is_causal"} <= given.keys() and given.get("attn_bias", given.get("attn_mask")) is None:
            query = given["query"]
            shapes = tuple(query.shape), tuple(given["key"].shape)
            self.attentions[(*shapes, query.dtype, given["dropout_p"], given["is_causal"])] += 1

    def exchange(self, values: Any) -> None:
        for leaf in tree_leaves(values):
            if not isinstance(leaf, Tensor) or not leaf.is_floating_point() or leaf.data_ptr() in self.apart:
                continue
            storage = leaf.untyped_storage()
            self._held.append(storage)
            moved = min(leaf.numel() * leaf.element_size(), storage.nbytes())
            self.exchanged[storage.data_ptr()] = max(self.exchanged.get(storage.data_ptr(), 0), moved)


def described(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}:{list(tensor.stride())}"


def seconds(run: Callable[[int], Any]) -> float:
    """Of one call on the GPU, the second time around."""
    run(0)
    once = wall_seconds(run, 1)
    count = max(1, min(20, int(0.02 / max(once, 1e-6))))
    return min(gpu_seconds(run, count, once) for _ in range(2))


def rounded(func: Any, args: Any) -> list[Callable[[int], Any]]:
    """The same product with its sizes rounded up, where rows are no multiple of 16 bytes."""
    if all(size * tensor.element_size() % 16 == 0 for tensor in args[:2] for size in tensor.shape[-2:]):
        return []
    larger = [padded(tensor) for tensor in args[:2]]
    return [lambda _: func(*larger)]


def padded(tensor: Tensor) -> Tensor:
    """Zeros in the layout of ``tensor`` whose last two sizes are multiples of 64."""
    rows, columns = (-(-size // ROUNDED) * ROUNDED for size in tensor.shape[-2:])
    lead = tensor.shape[:-2]
    if tensor.stride(-1) == 1:
        return tensor.new_zeros(*lead, rows, columns)
    return tensor.new_zeros(*lead, columns, rows).transpose(-1, -2)


def floor(step: Callable[[], Any], parameters: Iterable[Tensor], optimizer: str | None = None) -> dict[str, Any]:
    """Runs ``step`` once and says what it costs at the least, in milliseconds by kind; "all" is the sum.

    ``optimizer``: its class, None where nothing is trained.
    """
    weights = list(parameters)
    watch = Watch({one.data_ptr() for one in weights})
    with watch:
        step()
    rate = copy_rate()
    streams = OPTIMIZER_STREAMS[optimizer] if optimizer else 0
    moved = sum(watch.exchanged.values()) + streams * sum(one.nbytes for one in weights)
    found = {kind: 1e3 * sum(one.seconds * one.count for one in watch.calls.values() if one.kind == kind) for kind in KINDS}
    calls = {kind: sum(one.count for one in watch.calls.values() if one.kind == kind) for kind in KINDS}
    if optimizer and calls["attention"] == 2 * sum(watch.attentions.values()):  # each forward and backward
        found["attention"] = min(found["attention"], fastest_attention(watch.attentions))
    found["rest"] = 1e3 * moved / rate
    longest = sorted(watch.calls.values(), key=lambda one: -one.seconds * one.count)[:12]
    return {"ms": {**found, "all": math.fsum(found.values())}, "calls": calls, "rest_bytes": moved, "copy_rate": rate,
            "longest": [[one.name, one.shapes, one.count, one.seconds * 1e6] for one in longest]}


def fastest_attention(attentions: Counter[Any]) -> float:
    """Milliseconds of these, forward and backward, by whichever of PyTorch's backends is the fastest for each."""
    return sum(count * min(attention_ms(*one).values(), default=math.inf) for one, count in attentions.items())


def attention_ms(query: tuple[int, ...], key: tuple[int, ...], dtype: torch.dtype, dropout: float, causal: bool
                 ) -> dict[str, float]:  # fmt: skip
    """Milliseconds of one attention forward and backward, by backend; one that cannot do it is left out."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    q, k, v = (torch.randn(shape, dtype=dtype, device=device, requires_grad=True) for shape in (query, key, key))

    def both(_: int) -> None:
        made = torch.nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=causal)
        torch.autograd.grad(made, (q, k, v), made)

    found = {}
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION):
        try:
            with sdpa_kernel(backend):
                found[backend.name] = 1e3 * seconds(both)
        except RuntimeError:
            continue
    return found


def told(found: dict[str, Any]) -> str:
    """A floor in one line."""
    parts = [f"{kind} {found['ms'][kind]:.2f} ({found['calls'][kind]} calls)" for kind in KINDS if found["calls"][kind]]
    parts.append(f"rest {found['ms']['rest']:.2f} ({found['rest_bytes'] / 1e9:.2f} GB at {found['copy_rate'] / 1e12:.2f} TB/s)")
    return f"floor {found['ms']['all']:.2f} ms: " + ", ".join(parts)


def beyond(by_kind: dict[str, list[float]], step_ms: float, found: dict[str, Any]) -> dict[str, float]:
    """Where a step's time beyond the floor goes, in milliseconds: each kind of kernel against its floor, and the idle GPU.

    ``by_kind``: launches and microseconds, see `profiling.by_kind`.
    """
    busy = {kind: time / 1e3 for kind, (_, time) in by_kind.items()}
    rows = {kind: busy.pop(kind, 0.0) - found["ms"][kind] for kind in KINDS}
    rows["rest"] = sum(busy.values()) - found["ms"]["rest"]
    rows["GPU idle"] = step_ms - sum(time for _, time in by_kind.values()) / 1e3
    return rows
