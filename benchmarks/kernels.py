"""How much of the GPU's copy bandwidth generated kernels reach, next to eager and torch.compile. Imports torch, triton,
`ir_nodes`, `codegen` and the tests' recorder.

    python benchmarks/kernels.py [--rows 16384] [--columns 8192] [--no-compile] [--only softmax] [--set stages=3]
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
from pathlib import Path
from typing import Any, Callable, Sequence

import torch
import torch.nn.functional as F
import triton.testing

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "tests")]

import recording  # noqa: E402

from codegen.fuse import plan  # noqa: E402
from codegen.kernel import KernelStep, Plan, Pointer, Scalar, Temporary  # noqa: E402
from codegen.triton_compile import compile_kernel  # noqa: E402
from codegen.tuning import HOPPER, Tuning  # noqa: E402
from ir_nodes import Graph  # noqa: E402


def record_shapes(program: Callable[..., Any], inputs: Sequence[torch.Tensor]) -> tuple[Graph, list[Any], list[int]]:
    """The graph, its numbers and the buffer index of each input."""
    original = recording.bytes_of
    recording.bytes_of = lambda tensor: torch.empty(tensor.untyped_storage().nbytes(), dtype=torch.uint8, device="meta")
    try:
        metas = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta") for t in inputs]
        with recording.Recorder() as recorder:
            indices = [recorder._buffer(meta).index for meta in metas]
            result = program(*metas)
        outs = list(result) if isinstance(result, (tuple, list)) else [result]
        for tensor in outs:
            recorder._buffer(tensor).live = True
    finally:
        recording.bytes_of = original
    return recorder.recording.graph, recorder.recording.scalars, indices


def launcher(made: Plan, graph: Graph, scalars: Sequence[Any], given: dict[int, torch.Tensor]) -> tuple[
        Callable[[], None], dict[int, torch.Tensor]]:
    """A function that launches every kernel of the plan, and the memory it works on (scratch under negative keys)."""
    folder = Path(tempfile.mkdtemp())
    memory = {b.index: given.get(b.index, torch.empty(0)) for b in graph.buffers}
    for buffer in graph.buffers:
        if buffer.index not in given:
            memory[buffer.index] = torch.empty(buffer.nbytes, dtype=torch.uint8, device="cuda")
    scratch = {-1 - t.id: torch.empty(t.nbytes, dtype=torch.uint8, device="cuda") for t in made.temporaries}
    launches = []
    for step in made.steps:
        assert isinstance(step, KernelStep), f"{step.node}: {step.reason}"
        handle = compile_kernel(step.kernel, folder).handle
        args: list[Any] = []
        for arg in step.args:
            if isinstance(arg, Pointer):
                base = scratch[-1 - arg.source.id] if isinstance(arg.source, Temporary) else memory[arg.source.buffer.index]
                args.append(base.untyped_storage().data_ptr() + arg.byte_offset)
            elif isinstance(arg, Scalar):
                args.append(scalars[arg.index])
            else:
                args.append(arg.value)
        launches.append((handle[step.grid], args + [value for _, value in step.kernel.constexprs]))

    def run() -> None:
        for launch, args in launches:
            launch(*args)

    return run, memory | scratch


def milliseconds(run: Callable[[], Any]) -> float:
    """Median time of a run on the GPU."""
    return float(triton.testing.do_bench(run, warmup=20, rep=80, return_mode="median"))


def layer_norm_gradient(grad: torch.Tensor, x: torch.Tensor, w: torch.Tensor, mean: torch.Tensor, scale: torch.Tensor) -> Any:
    return torch.ops.aten.native_layer_norm_backward(grad, x, [x.shape[-1]], mean, scale, w, w, [True, True, True])


def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6).bfloat16() * weight


def gelu_gradient(grad: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    inner = torch.ops.aten.gelu_backward(grad, x)
    return inner, inner.sum(0)


def cases(rows: int, columns: int) -> dict[str, tuple[Callable[..., Any], list[torch.Tensor], float]]:
    """Name: program, inputs, bytes that must move."""

    def tensor(*size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(size, device="cuda").to(dtype)

    x, y, row = tensor(rows, columns), tensor(rows, columns), tensor(columns)
    square = tensor(8192, 8192)
    mean, scale = tensor(rows, 1, dtype=torch.float32), tensor(rows, 1, dtype=torch.float32)
    unit = x.nbytes
    half = columns // 2
    vocabulary = tensor(4096, 50257)
    target = torch.randint(0, 50257, (4096,), device="cuda")
    return {
        "bias+gelu+residual": (lambda x, b, y: F.gelu(x + b) + y, [x, row, y], 3 * unit),
        "softmax": (lambda x: x.softmax(-1), [x], 2 * unit),
        "layernorm": (lambda x, w, b: F.layer_norm(x, (columns,), w, b), [x, row, row.clone()], 2 * unit),
        "rmsnorm": (rms_norm, [x, row], 2 * unit),
        "add+layernorm": (lambda x, y, w, b: (x + y, F.layer_norm(x + y, (columns,), w, b)), [x, y, row, row.clone()], 4 * unit),
        "layernorm gradient": (layer_norm_gradient, [x, y, row, mean, scale], 3 * unit),
        "full sum": (lambda x: x.sum(), [x], unit),
        "row sum": (lambda x: x.sum(1), [x], unit),
        "column sum": (lambda x: x.sum(0), [x], unit),
        "gelu gradient+column sum": (gelu_gradient, [x, y], 3 * unit),
        "transpose+add": (lambda x, y: x.t() + y, [square, square.clone()], 3 * square.nbytes),
        "swiglu": (lambda x: F.silu(x[:, :half]) * x[:, half:], [x], 1.5 * unit),
        "log-softmax mean": (lambda x: x.log_softmax(-1).mean(), [x], unit),
        "cross entropy 4096x50257": (lambda x, t: F.cross_entropy(x, t), [vocabulary, target], 2 * vocabulary.nbytes),
        "softmax 4096x50257": (lambda x: x.softmax(-1), [vocabulary], 2 * vocabulary.nbytes),
        "softmax 128 columns": (lambda x: x.softmax(-1), [x.view(-1, 128)], 2 * unit),
        "column mean of 1000": (lambda x: x.mean(1), [x.view(-1, 1024, 128)], unit),
    }


def distance(data: torch.Tensor, wanted: torch.Tensor) -> float:
    """Largest difference between storage bytes seen as ``wanted`` is, and that."""
    made = torch.empty(0, dtype=wanted.dtype, device="cuda").set_(data.untyped_storage(), 0, wanted.shape, wanted.stride())
    return float((made.double() - wanted.double()).abs().max())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=16384)
    parser.add_argument("--columns", type=int, default=8192)
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--only", default="", help="part of the programs' names")
    parser.add_argument("--set", action="append", default=[], help="codegen.tuning.Tuning instead: looped=8192,loop_lane=16")
    options = parser.parse_args()
    source = torch.empty(options.rows, options.columns, dtype=torch.bfloat16, device="cuda")
    sink = torch.empty_like(source)
    bandwidth = 2 * source.nbytes / milliseconds(lambda: sink.copy_(source))
    print(f"copy {bandwidth / 1e9:.2f} TB/s; share of it that each program reaches")
    print(f"{'program':28}{'kernels':>8}{'eager':>9}{'compile':>9}{'lazysched':>11}  error, then each variant of the tuning")
    for name, (program, inputs, moved) in cases(options.rows, options.columns).items():
        if not any(part in name for part in options.only.split("|")):
            continue
        peers = [milliseconds(lambda p=program, i=inputs: p(*i))]
        if not options.no_compile:
            compiled = torch.compile(program)
            peers.append(milliseconds(lambda c=compiled, i=inputs: c(*i)))
        made = [measure(program, inputs, tuning(text)) for text in ("", *options.set)]
        shares = [f"{moved / time / bandwidth:9.2f}" for time in peers] + [" " * 9] * (2 - len(peers))
        ours = [f"{moved / time / bandwidth:11.2f}  {error:.1g}" for _, time, error in made]
        print(f"{name:28}{made[0][0]:8}" + "".join(shares + ours), flush=True)


def tuning(text: str) -> Tuning:
    """The tuning with what ``text`` ("looped=8192,loop_lane=16") changes."""
    changes = {key: int(value) for key, _, value in (item.partition("=") for item in text.split(",") if item)}
    return dataclasses.replace(HOPPER, **changes)


def measure(program: Callable[..., Any], inputs: Sequence[torch.Tensor], how: Tuning) -> tuple[int, float, float]:
    """Number of kernels, milliseconds, and the error against eager."""
    graph, scalars, indices = record_shapes(program, inputs)
    made = plan(graph, tuning=how)
    run, memory = launcher(made, graph, scalars, dict(zip(indices, inputs)))
    wanted = program(*inputs)
    first = wanted[0] if isinstance(wanted, (tuple, list)) else wanted
    run()
    error = min(distance(memory[v.buffer.index], first) for v in graph.outputs()
                if v.buffer.nbytes == first.untyped_storage().nbytes())
    return len(made.steps), milliseconds(run), error


if __name__ == "__main__":
    main()
