"""Attention and its backward as they are recorded on CUDA, for tests of kernels of our own. Imports torch, `ir_nodes`, `codegen`,
`graphs` and `recording` only."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from graphs import CACHE, kernels
from recording import Recording

from codegen import attention, interpreted
from codegen.attention_draws import PRECISION
from codegen.fuse import plan
from codegen.kernel import Plan
from ir_nodes import Access, BufferKind, Graph, Layout
from ir_nodes.remarks import Remarks

SEED, START = 0x123456789ABCDEF, 8
NAMES = ("attention_draw", "attention_forward", "attention_backward_queries", "attention_backward_keys")
CUDNN, FLASH = attention.CUDNN, attention.FLASH


@dataclass
class Case:
    """A forward and its backward as they are recorded on CUDA. ``sizes``: batch, heads, queries, keys, elements of a head.
    ``p``: None is a share of 0 that is a constant of the recording. ``cat``: in which order gradients are concatenated, as they
    are where one product made queries, keys and values, along ``dim``."""

    sizes: tuple[int, int, int, int, int] = (2, 3, 128, 128, 64)
    causal: bool = True
    p: float | None = 0.25
    mismatch: bool = False  # the backward's share is a constant, the forward's is not
    scale: float | None = None
    dtype: torch.dtype = torch.bfloat16
    target: str = CUDNN
    backwards: int = 1
    cat: str = ""
    dim: int = 2
    held: str = ""  # what a tensor holds: "sums", the forward's second result; "dq0"; "joined0"
    biased: bool = False
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    access: dict[str, Access] = field(default_factory=dict)

    def recording(self) -> Recording:
        graph, inputs = Graph(), {}
        batch, heads, queries, keys, width = self.sizes
        generator = torch.Generator().manual_seed(0)

        def given(name: str, length: int, seen: bool = True) -> Access:
            parts = 3 if seen else 1  # q, k and v are parts of what one product made
            data = torch.randn(batch, length, parts, heads, width, generator=generator).to(self.dtype)
            tensor = data[:, :, parts - 1].transpose(1, 2)
            buffer = graph.add_buffer(data.nbytes, BufferKind.INPUT)
            inputs[buffer.index] = data.untyped_storage()
            self.tensors[name] = tensor
            self.access[name] = Access(buffer, Layout(self.dtype, tuple(tensor.shape), tensor.stride(), tensor.storage_offset()))
            return self.access[name]

        def fresh(name: str, shape: tuple[int, ...], dtype: torch.dtype, live: bool = False, inside: bool = False) -> Access:
            tensor = torch.empty(shape, dtype=dtype)
            if inside:
                tensor = torch.empty(shape[0], shape[2], shape[1], shape[3], dtype=dtype).transpose(1, 2)
            self.tensors[name] = tensor
            self.access[name] = Access(graph.add_buffer(tensor.nbytes, live=live), Layout(dtype, shape, tensor.stride(), 0), "w")
            return self.access[name]

        def read(name: str) -> Access:
            return replace(self.access[name], mode="r")

        q, k, v = given("q", queries), given("k", keys), given("v", keys)
        state = Access(graph.add_buffer(16, BufferKind.GENERATOR, live=True), Layout.contiguous(torch.uint8, (16,)), "rw")
        inputs[state.buffer.index] = torch.tensor([SEED, START])
        self.access["state"] = state
        p = 0.0 if self.p is None else graph.add_scalar("float")
        again = 0.0 if self.mismatch else p
        scale = None if self.scale is None else graph.add_scalar("float")
        bias = given("bias", queries, False) if self.biased else None
        out = fresh("out", (batch, heads, queries, width), self.dtype, True, True)
        flash = self.target == FLASH
        rows = (batch, heads, queries) if flash else (batch, heads, queries, 1)
        drawn = torch.uint64 if flash else torch.int64
        results = [out, fresh("sums", rows, torch.float32, self.held == "sums"), None, None,
                   fresh("seed", (2,) if flash else (), drawn), fresh("offset", (), drawn), None]
        before = [q, k, v] if flash else [q, k, v, bias, True]
        graph.record(self.target, [*before, p, self.causal, False, scale], results, [] if self.p is None else [state])
        for number in range(self.backwards):
            grad = given(f"grad{number}", queries, False)
            names = [f"d{name}{number}" for name in "qkv"]
            made = [fresh(name, tuple(self.access[name[1]].layout.size), self.dtype, not self.cat or self.held == name, True)
                    for name in names]
            seed, ends = [read("seed"), read("offset")], [None, None, queries, keys]
            lasts = [*ends, again, self.causal, *seed] if flash else [*seed, None, *ends, again, self.causal]
            graph.record(f"{self.target}_backward", [grad, q, k, v, read("out"), read("sums"), *lasts, scale], made)
            if self.cat:
                shape = (batch, queries, heads * width)
                parts = [replace(read(f"d{name}{number}"), layout=Layout.contiguous(self.dtype, shape)) for name in self.cat]
                joined = tuple(size * (len(parts) if at == self.dim else 1) for at, size in enumerate(shape))
                live = self.held == f"joined{number}"
                graph.record("aten::cat.out", [parts, self.dim, fresh(f"joined{number}", joined, self.dtype, live)])
                rows = Layout.contiguous(self.dtype, (joined[0] * joined[1], joined[2]))
                graph.record("aten::neg", [read(f"joined{number}")], [fresh(f"negated{number}", joined, self.dtype, True)])
                graph.record("aten::sum.dim_IntList", [replace(read(f"joined{number}"), layout=rows), [0], False, None],
                             [fresh(f"bias{number}", joined[2:], self.dtype, True)])
        data = {index: torch.tensor([], dtype=torch.uint8).set_(one) if isinstance(one, torch.UntypedStorage)
                else one.view(torch.uint8) for index, one in inputs.items()}
        return Recording(graph, data, [number for number in (self.p, self.scale) if number is not None])

    def add_sum(self, recording: Recording, of: str, name: str = "", shape: tuple[int, ...] = (), dims: tuple[int, ...] = (0,),
                keepdim: bool = True, dtype: torch.dtype | None = None, layout: Layout | None = None) -> str:
        """Record the sum of a gradient as [batch * rows, columns], as ``shape`` or through ``layout``. Returns its name."""
        name, access = name or f"sum of {of}", self.access[of]
        batch, heads, rows, width = access.layout.size
        seen = layout or Layout.contiguous(self.dtype, shape or (batch * rows, heads * width))
        result = torch.empty(seen.size, device="meta").sum(dims, keepdim)
        self.tensors[name] = torch.empty(result.shape, dtype=dtype or self.dtype)
        buffer = recording.graph.add_buffer(self.tensors[name].nbytes, live=True)
        self.access[name] = Access(buffer, Layout.contiguous(dtype or self.dtype, tuple(result.shape)), "w")
        args = [replace(access, layout=seen, mode="r"), list(dims), keepdim, dtype]
        recording.graph.record("aten::sum.IntList_out", [*args, self.access[name]])
        return name

    def planned(self, recording: Recording, remarks: Remarks | None = None) -> Plan:
        return attention.with_kernels(plan(recording.graph), recording.graph, remarks)

    def reference(self, kept: torch.Tensor | float) -> dict[str, torch.Tensor]:
        """Result and gradients in float64, where ``kept`` says what does not drop."""
        q, k, v = (self.tensors[name].double().requires_grad_() for name in "qkv")
        scores = q @ k.transpose(2, 3) * (self.sizes[4] ** -0.5 if self.scale is None else self.scale)
        if self.causal:
            scores = scores.masked_fill(torch.ones(scores.shape[2:]).triu(1).bool(), -torch.inf)
        share = round((1 - (self.p or 0.0)) * (1 << PRECISION)) / (1 << PRECISION)
        out = (scores.softmax(-1) * kept / max(share, 1e-9)) @ v
        found = {"out": out}
        for number in range(self.backwards):
            given = self.tensors[f"grad{number}"].double()
            made = torch.autograd.grad(out, (q, k, v), given, retain_graph=True)
            found.update({f"d{name}{number}": one for name, one in zip("qkv", made)})
        return found


def bits_of(case: Case, made: Plan, recording: Recording) -> torch.Tensor:
    """What the first kernel draws, by itself, as [batch, heads, queries, keys]."""
    batch, heads, queries, keys, _ = case.sizes
    step = kernels(made)[0]
    scratch: dict[int, torch.Tensor] = {}
    memory = {index: data.clone() for index, data in recording.inputs.items()}
    interpreted.run_kernel(step, memory, scratch, recording.scalars, CACHE)
    (words,) = scratch.values()
    words = words.view(torch.int32).view(batch, heads, keys // 32, 1, queries)
    bits = words >> torch.arange(32, dtype=torch.int32).view(32, 1) & 1
    return bits.reshape(batch, heads, keys, queries).transpose(2, 3)
