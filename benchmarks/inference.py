"""Prefill and greedy decoding of GPT-2 and a Llama: eager, torch.compile, lazysched. Imports torch and `benchmarks` parts.

    python -m benchmarks.inference --models gpt2 llama --contestants eager reduce-overhead lazysched

In bfloat16 with random weights and transformers' static cache: a prompt of 8 x 1,024 tokens; 256 tokens, one after the other, in
batches of 1 and 8. Each contestant runs in a process of its own. Before anything is timed its logits are compared with eager
mode's for the same tokens: what is decoded freely may part where two logits tie. The floor of a token is the weights and the
filled cache at the rate of a copy; that of a prompt is what `benchmarks.floors` says. Without a GPU tiny models run.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import Budget, add_limits, fresh_caches, hand_in, in_process, save, spread, table
from benchmarks.decoding import Decoder, read_bytes
from benchmarks.floors import floor, told
from benchmarks.loop import parts, settings_of
from benchmarks.models import Sizes, sized
from benchmarks.plot import draw
from benchmarks.profiling import gpu_kernels, peak_on_gpu

MODELS = ("gpt2", "llama")
CONTESTANTS = ("eager", "compile", "reduce-overhead", "lazysched", "lazysched+replay")
Result = dict[str, Any]


def cases(options: argparse.Namespace) -> dict[str, tuple[str, int]]:
    """What is timed: name, kind and batch."""
    prefill = {f"prefill {options.prefill_batch} x {options.prefill}": ("prefill", options.prefill_batch)}
    return prefill | {f"decode {batch} x {options.tokens}": ("decode", batch) for batch in options.batches}


def sizes_of(name: str, options: argparse.Namespace) -> Sizes:
    return {**sized(name, options.tiny), "length": max(options.prefill, options.prompt + options.tokens + 1)}


def child(contestant: str, options: argparse.Namespace) -> None:
    """One process: all cases of one model; hands in after each."""
    name, found = options.models[0], {}
    for case, (kind, batch) in cases(options).items():
        decoder = Decoder("eager" if contestant == "floor" else contestant, name, sizes_of(name, options), batch)
        file = options.reference / f"{name} {case}.pt"
        if contestant == "floor":
            found[case] = at_best(decoder, kind, file, options)
        else:
            found[case] = (prefill if kind == "prefill" else decode)(decoder, file, options)
        hand_in(found)
        del decoder


def at_best(decoder: Decoder, kind: str, file: Path, options: argparse.Namespace) -> Result:
    """The floor, and what the others are compared with: eager mode's logits, of some of the tokens that it decodes."""
    if kind == "prefill":
        logits, _ = decoder.prefill(options.prefill)
        torch.save({"logits": [logits]}, file)
        decoder.reset()
        prompt, at = decoder.prompt(options.prefill), decoder.position(options.prefill)
        with torch.no_grad():
            return floor(lambda: decoder.forward(prompt, at), decoder.model.parameters())
    tokens, _, _ = decoder.decode(options.prompt, options.tokens)
    _, logits, _ = decoder.decode(options.prompt, options.tokens, tokens.to(decoder.device))
    torch.save({"tokens": tokens, "logits": logits}, file)
    return {"bytes": read_bytes(decoder, options.prompt + options.tokens / 2)}


def distance(found: list[torch.Tensor], reference: list[torch.Tensor]) -> float:
    """The largest relative distance of logits."""
    return max(float((a - b).norm() / b.norm()) for a, b in zip(found, reference, strict=True))


def prefill(decoder: Decoder, file: Path, options: argparse.Namespace) -> Result:
    cold = [decoder.prefill(options.prefill) for _ in range(3)]
    reference = torch.load(file)
    times = [decoder.prefill(options.prefill)[1] for _ in range(options.blocks * 3)]
    return {"off_by": distance([cold[-1][0]], reference["logits"]), "same": None, "first_s": sum(one[1][1] for one in cold),
            **timed(times), **observed(decoder, lambda: decoder.prefill(options.prefill), 1)}


def decode(decoder: Decoder, file: Path, options: argparse.Namespace) -> Result:
    _, _, cold = decoder.decode(options.prompt, 5)
    reference = torch.load(file)
    tokens, logits, _ = decoder.decode(options.prompt, options.tokens, reference["tokens"].to(decoder.device))
    decoder.decode(options.prompt, options.tokens)
    times = [decoder.decode(options.prompt, options.tokens)[2] for _ in range(options.blocks)]
    return {"off_by": distance(logits, reference["logits"]), "first_s": 4 * cold[1],
            "same": float((tokens == reference["tokens"]).float().mean()),
            **timed(times), **observed(decoder, lambda: decoder.decode(options.prompt, options.tokens), options.tokens)}


def timed(times: list[list[float]]) -> Result:
    wall = [1e3 * one[1] for one in times]
    return {"ms": statistics.median(wall), "spread": spread(wall), "host_ms": statistics.median(1e3 * one[0] for one in times)}


def observed(decoder: Decoder, run: Callable[[], Any], steps: int) -> Result:
    """Peak memory of a run, its barriers and compiles a step, the kernels of one step."""
    if decoder.physical == "cuda":
        torch.cuda.reset_peak_memory_stats()
    before = stats(decoder)
    run()
    after = stats(decoder)
    counted = {name: (after[name] - before[name]) / steps for name in after}
    one = run if steps == 1 else decoder.one_token
    kernels = gpu_kernels(one) if decoder.physical == "cuda" else []
    peak = peak_on_gpu() if decoder.physical == "cuda" else 0
    return {"peak_bytes": peak, "counts": counted, "kernels": kernels}


def stats(decoder: Decoder) -> dict[str, int]:
    if decoder.way != "lazysched":
        return {}
    import lazy_backend

    found = lazy_backend.stats()
    return {name: found[name] for name in ("recorded", "compiles", "flushes", "nodes_run", "graphs_replayed")}


def run(name: str, contestant: str, options: argparse.Namespace, folder: Path, budget: Budget) -> dict[str, Result]:
    """What one contestant gave, per case; the second round tells what its first steps cost with warm caches."""
    rounds: list[dict[str, Result]] = []
    keys = ("prefill", "prefill_batch", "prompt", "tokens", "blocks")
    given = [word for key in keys for word in (f"--{key.replace('_', '-')}", str(getattr(options, key)))]
    given += ["--batches", *map(str, options.batches), "--models", name, "--reference", str(folder), *["--tiny"] * options.tiny]
    asked = {} if contestant == "floor" else settings_of(contestant)
    with fresh_caches() as variables:
        for number in range(1 if contestant == "floor" else options.rounds):
            if number and budget.refuses(f"{name}: {contestant}, round {number + 1}"):
                break
            print(f"{name}: {contestant}, round {number + 1}", file=sys.stderr, flush=True)
            rounds.append(in_process("benchmarks.inference", contestant, given, variables | asked, budget.left(options.timeout)))
    found = {case: dict(one) for case, one in rounds[-1].items()}
    for case, one in found.items() if contestant != "floor" else ():
        every = [r[case] for r in rounds if case in r]
        one |= {"ms": statistics.median(r["ms"] for r in every), "cold_s": rounds[0].get(case, one)["first_s"],
                "warm_s": one["first_s"] if len(every) > 1 else None}
    return found


def show(name: str, case: str, results: dict[str, Result], best_ms: float | None, wrong: list[str], tolerance: float) -> None:
    """The table of one case. Adds to ``wrong`` whose logits are not eager's."""
    found = {contestant: r[case] for contestant, r in results.items() if case in r}
    if not found:
        return
    base = next(iter(found.values()))
    compiled = min((r["ms"] for c, r in found.items() if parts(c)[0] not in ("eager", "lazysched")), default=None)
    rows = []
    for contestant, r in found.items():
        if not r["off_by"] < tolerance:
            wrong.append(f"{name}, {case}: {contestant}'s logits are {r['off_by']:.2%} away from eager mode's")
        launched = sum(count for _, count, _ in r["kernels"]) or r["counts"].get("nodes_run", "")
        busy = sum(time for _, _, time in r["kernels"]) / 1e3
        rows.append([contestant, f"{r['ms']:.3f}", f"{r['spread']:.1%}", f"{base['ms'] / r['ms']:.2f}",
                     f"{compiled / r['ms']:.2f}" if compiled else "", f"{r['ms'] / best_ms:.2f}" if best_ms else "",
                     f"{r['host_ms']:.3f}", f"{busy:.3f}", f"{launched:.0f}" if launched else "",
                     f"{r['counts']['flushes']:.1f}, {r['counts']['compiles']:.2f}" if r["counts"] else "",
                     f"{r['peak_bytes'] / 2**30:.2f}", f"{r['cold_s']:.1f}", "" if r["warm_s"] is None else f"{r['warm_s']:.1f}",
                     f"{r['off_by']:.2%}", "" if r["same"] is None else f"{r['same']:.1%}"])
    unit = "ms" if case.startswith("prefill") else "ms/token"
    print(f"\n{name}, {case}" + (f": floor {best_ms:.3f} {unit}" if best_ms else ""))
    print(table(["", unit, "spread", "x eager", "x best compile", "x floor", "host ms", "GPU ms", "kernels", "barriers, compiles",
                 "peak GiB", "cold s", "warm s", "off by", "same tokens"], rows))


def floors_of(found: dict[str, Result]) -> dict[str, float]:
    """Milliseconds of each case at best."""
    rate = next((one["copy_rate"] for one in found.values() if "copy_rate" in one), None)
    return {case: one["ms"]["all"] if "ms" in one else 1e3 * one["bytes"] / rate for case, one in found.items()
            if "ms" in one or rate}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--contestants", nargs="+", default=CONTESTANTS,
                        help="the first is the reference; " + ", ".join(CONTESTANTS))
    tiny = "--tiny" in (sys.argv if arguments is None else arguments) or not on_gpu
    parser.add_argument("--prefill", type=int, default=32 if tiny else 1024, help="tokens of a prompt that is timed")
    parser.add_argument("--prefill-batch", type=int, default=2 if tiny else 8)
    parser.add_argument("--prompt", type=int, default=8 if tiny else 512, help="tokens before those that are decoded")
    parser.add_argument("--tokens", type=int, default=16 if tiny else 256, help="that are decoded")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2] if tiny else [1, 8], help="of decoding")
    parser.add_argument("--blocks", type=int, default=3, help="timed in each process")
    parser.add_argument("--rounds", type=int, default=1, help="processes of each contestant; the second finds warm caches")
    parser.add_argument("--tolerance", type=float, default=0.03, help="relative, of logits in bfloat16")
    parser.add_argument("--tiny", action="store_true", default=not on_gpu, help="tiny models; without a GPU always")
    parser.add_argument("--timeout", type=float, default=600, help="seconds of one process")
    parser.add_argument("--save", metavar="NAME", default="inference", help="of the results' file; tiny models are not saved")
    add_limits(parser)
    parser.add_argument("--reference", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    for contestant in options.contestants:
        parts(contestant)
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if options.child:
        child(options.child, options)
        return 0
    budget, wrong = Budget(options.budget), []
    found: dict[str, dict[str, dict[str, Result]]] = {}
    best: dict[str, dict[str, float]] = {}
    path = None
    for name in options.models:
        found[name], best[name] = {}, {}
        with tempfile.TemporaryDirectory(prefix="inference") as folder:
            for contestant in ("floor", *options.contestants):
                if budget.refuses(f"{name}: {contestant}"):
                    break
                try:
                    results = run(name, contestant, options, Path(folder), budget)
                except RuntimeError as error:
                    print(f"{name}: {error}", file=sys.stderr, flush=True)
                    continue
                if contestant == "floor":
                    best[name] = floors_of(results)
                    print("\n".join(f"{name}, {case}: {told(one)}" for case, one in results.items() if "ms" in one))
                else:
                    found[name][contestant] = results
                if not options.tiny or options.output:
                    path = save(options.save, summary(options, found, best), options.output, quiet=True)
        for case in cases(options):
            show(name, case, found[name], best[name].get(case), wrong, options.tolerance)
    if path:
        draw(path, summary(options, found, best))
    for line in wrong:
        print(line, file=sys.stderr)
    return bool(wrong)


def summary(options: argparse.Namespace, found: dict[str, dict[str, dict[str, Result]]], best: dict[str, dict[str, float]]
            ) -> Result:  # fmt: skip
    """What is saved, charts included."""
    times = {f"{name}, {case}": {contestant: r[case]["ms"] for contestant, r in one.items() if case in r}
             | ({"floor": best[name][case]} if case in best[name] else {})
             for name, one in found.items() for case in cases(options)}
    kept = {key: value for key, value in vars(options).items() if key not in ("child", "reference")}
    return {"options": kept, "models": found, "floors": best, "bars": {"prefill ms, decoding ms a token": times}}


if __name__ == "__main__":
    sys.exit(main())
