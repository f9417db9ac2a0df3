"""What compiling a recording costs in Python, phase by phase, on any machine. Imports torch, lazy_backend and what it joins.

    python -m benchmarks.compile_cost

Rows: training steps of a GPT with more and more layers (one recording holds forward, backward and AdamW). Columns: seconds for
the graph, for the passes, for fusing and planning, for assembling the program, of processor time; compiling kernels is not
counted. Other programs on the machine slow a processor down, so the best of some runs is told.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch

import lazy_backend  # noqa: F401  (registers the device)
from barriers.pipeline import ordered_passes, run_passes
from benchmarks.common import save, table
from codegen.combo import combine
from codegen.executable import Emit, assemble
from codegen.fuse import plan
from codegen.kernel import KernelStep
from codegen.lowered import Lowered
from codegen.partition import partition
from codegen.step_use import kernel_use, node_use
from examples.gpt import GPT, Config
from ir_nodes import settings
from lazy_backend import core
from lazy_backend.trace import Recording, to_graph

PHASES = ("graph", "passes", "fuse", "assemble")
T = TypeVar("T")


class NoProgram:
    """Takes the steps that a native program would take."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *arguments: None


def record(layers: int) -> Recording:
    """A training step of a narrow GPT, recorded and not run. Width and batch do not matter for what compiling costs."""
    torch.manual_seed(0)
    model = GPT(Config(context=32, layers=layers, width=64, heads=2)).to("lazysched")
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(256, (4, 32)).to("lazysched")
    with settings.override(auto_barrier=False, max_ops=1 << 24, max_pending_bytes=1 << 42):  # one recording, however long
        core.configure(core.get())
        for _ in range(2):  # the first step makes the optimizer's state
            lazy_backend.mark_step()
            optimizer.zero_grad()
            with torch.autocast("lazysched", dtype=torch.bfloat16):
                loss = model.loss(tokens, tokens)
            loss.backward()
            optimizer.step()
    held = [loss, *model.parameters(), *(p.grad for p in model.parameters() if p.grad is not None)]
    held += [t for state in optimizer.state.values() for t in state.values() if t.device.type == "lazysched"]
    found: Recording = core.get().trace_for(held, 0)
    return found


def phases(recording: Recording) -> dict[str, float]:
    """Seconds by phase; "nodes" and "kernels" beside them."""
    seconds: dict[str, float] = {}

    def timed(name: str, work: Callable[[], T]) -> T:
        start = time.process_time()
        made = work()
        seconds[name] = time.process_time() - start
        return made

    gc.collect()
    gc.disable()  # as `compile_recording` does
    graph = timed("graph", lambda: to_graph(recording))
    recorded = len(graph.nodes)
    lowered = Lowered()
    shared = partial(partition, lowered=lowered)
    graph = timed("passes", lambda: run_passes(run_passes(graph)[0], ordered_passes(shared))[0])
    made = timed("fuse", lambda: combine(plan(graph, lowered=lowered)))
    steps = [Emit(kernel_use(step) if isinstance(step, KernelStep) else node_use(step.node), (), lambda program: None)
             for step in made.steps]
    program: Any = NoProgram()
    timed("assemble", lambda: assemble(graph, program, steps, 0, [temporary.nbytes for temporary in made.temporaries]))
    gc.enable()
    kernels = sum(isinstance(step, KernelStep) for step in made.steps)
    return {"nodes": recorded, "kernels": kernels, **seconds, "all": sum(seconds.values())}


def best(recording: Recording, repeats: int) -> dict[str, float]:
    """`phases` of the run that took least."""
    return min((phases(recording) for _ in range(repeats)), key=lambda row: row["all"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 16, 38, 64, 128, 386])
    parser.add_argument("--repeats", type=int, default=3, help="runs of which the best is told")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    phases(record(2))  # warms caches up
    rows = {layers: best(record(layers), options.repeats) for layers in options.layers}
    header = ["layers", "nodes", "kernels", *(f"{phase} s" for phase in PHASES), "all s", "ms a node"]
    print(table(header, [
        [layers, int(row["nodes"]), int(row["kernels"]), *(f"{row[phase]:.3f}" for phase in PHASES), f"{row['all']:.3f}",
         f"{1e3 * row['all'] / row['nodes']:.3f}"]
        for layers, row in rows.items()
    ]))
    if options.save:
        save("compile-cost", rows)


if __name__ == "__main__":
    main()
