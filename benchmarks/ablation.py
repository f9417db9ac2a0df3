"""What each optimisation brings: a training step planned with all of them, and without each in turn. Imports `benchmarks` parts.

    python -m benchmarks.ablation --models gpt2 bert
    python -m benchmarks.ablation --models gpt2 --budgets 0.65 0.5

Nothing runs, so no GPU is needed and full sizes cost no memory: a step is recorded (forward, backward, AdamW), planned as for
a GPU. Kernels, ATen calls, bytes moved, the time that a roofline expects of them, and memory held at most; see
`lazy_backend.explain`. Optimisations of how a plan runs (CUDA graphs, tiles, parallel compiling) change none of these and are
left out, and what padded matrices save is time in cuBLAS, which a roofline does not know.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

from benchmarks.common import save, table
from benchmarks.models import TASKS, sized
from ir_nodes import settings
from ir_nodes.estimate import CUDA

PLANNED = ("cse", "fold", "recompute", "hold_less", "peak_order", "pad_rows", "fusion", "horizontal", "mix_order", "row_totals",
           "split", "loop_order", "windows", "small_products", "narrow_products", "combo")
PENDING = 1 << 42  # nothing runs, so nothing has to be let go


def recorded(name: str, full: bool) -> list[torch.Tensor]:
    """Everything that one step of the model leaves, recorded and not run."""
    import lazy_backend

    task, sizes = TASKS[name], sized(name, not full)
    dtype = torch.bfloat16 if task.precision == "bfloat16" else torch.float32
    model = task.build(sizes, 0.0).to("lazysched", dtype)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    for one in parameters:  # as after some steps
        moments = {key: torch.zeros_like(one) for key in ("exp_avg", "exp_avg_sq")}
        optimizer.state[one] = {"step": torch.tensor(3.0), **moments}
    batch = tuple(part.to("lazysched") for part in task.draw(sizes, torch.Generator().manual_seed(0)))
    batch = tuple(part.to(dtype) if part.is_floating_point() else part for part in batch)
    lazy_backend.mark_step()
    with torch.autocast("lazysched", torch.bfloat16, enabled=task.precision == "autocast"):
        loss = model(*batch)
    loss.backward()
    optimizer.step()
    moments = [part for state in optimizer.state.values() for key, part in state.items() if key != "step"]
    return [loss, *(one.grad for one in parameters if one.grad is not None), *parameters, *moments]


def planned(tensors: list[torch.Tensor], disable: str = "", budget: int = 0) -> dict[str, Any]:
    from codegen.combo import combine
    from codegen.explanation import explain
    from codegen.fuse import plan
    from lazy_backend.explain import optimised

    with settings.override(disable=disable, memory_budget=budget):
        graph = optimised(tensors)
        found = explain(graph, combine(plan(graph)), CUDA, False)
    return {
        "without": f"more than {budget / 2**30:.2f} GiB" if budget else disable or "nothing",
        "kernels": found.kernels,
        "calls": len(found.steps) - found.kernels,
        "moved_bytes": found.moved,
        "estimated_s": found.seconds,
        "held_bytes": max(found.held, default=0),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=TASKS, default=["gpt2"], metavar="MODEL", help=", ".join(TASKS))
    parser.add_argument("--budgets", nargs="+", type=float, help="instead: parts of the peak that LAZYSCHED_MEMORY_BUDGET leaves")
    parser.add_argument("--tiny", action="store_true", help="tiny models, to try it out")
    options = parser.parse_args()
    results: dict[str, list[dict[str, Any]]] = {}
    with settings.override(auto_barrier=False, max_pending_bytes=PENDING, engine="triton"):
        for name in options.models:
            tensors = recorded(name, not options.tiny)
            rows = [planned(tensors)]
            if options.budgets:
                rows += [planned(tensors, budget=int(part * rows[0]["held_bytes"])) for part in options.budgets]
            else:
                rows += [planned(tensors, off) for off in PLANNED]
            results[name] = rows
            show(name, rows)
    if not options.tiny:
        save("memory-budget" if options.budgets else "ablation", results)


def show(name: str, rows: list[dict[str, Any]]) -> None:
    base = rows[0]
    cells = [[row["without"], row["kernels"], row["calls"], f"{row['moved_bytes'] / 1e9:.2f}",
              f"{row['moved_bytes'] / base['moved_bytes']:.2f}", f"{row['estimated_s'] * 1e3:.2f}",
              f"{row['estimated_s'] / base['estimated_s']:.2f}", f"{row['held_bytes'] / 2**30:.2f}"] for row in rows]
    print(f"\n{name}, a training step planned without\n"
          + table(["", "kernels", "ATen calls", "GB moved", "x", "ms expected", "x", "GiB held"], cells))


if __name__ == "__main__":
    main()
