"""Trains a byte-level GPT on Python's own library sources, on any device. Imports torch, tqdm, `gpt` and `corpus`.

    python examples/train_gpt.py                   on the device lazysched
    python examples/train_gpt.py --device cpu      the same without it: same seed, same weights, same batches
"""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import dataclass, field
from pathlib import Path

import corpus
import torch
from gpt import GPT, SIZES
from tqdm import tqdm

WARM_UP = 5  # steps that tokens/s leaves out: they compile


@dataclass
class Options:
    device: str = "lazysched"
    steps: int = 400
    seed: int = 0
    size: str = "small"
    batch: int = 8
    context: int = 0  # 0: the size's own
    dropout: float = 0.0
    bf16: bool = False
    learning_rate: float = 2e-3
    read_every: int = 10  # steps between two reads of the loss
    held_out_batches: int = 8
    sample: int = 300  # bytes of text at the end
    curve: Path | None = None
    quiet: bool = False


@dataclass
class Result:
    device: str
    losses: dict[int, float] = field(default_factory=dict)  # nats per byte, by step
    held_out: float = math.nan
    unigram_entropy: float = math.nan
    tokens_per_second: float = math.nan
    parameters: int = 0
    sample: str = ""


def learning_rate(step: int, options: Options) -> float:
    """A short linear warm-up, then half a cosine down to a tenth."""
    warm_up = max(1, options.steps // 20)
    if step < warm_up:
        return options.learning_rate * (step + 1) / warm_up
    progress = (step - warm_up) / max(1, options.steps - warm_up)
    return options.learning_rate * (0.55 + 0.45 * math.cos(math.pi * progress))


def train(options: Options) -> Result:
    """Train, test on held-out text, sample. Losses are in nats per byte."""
    device = torch.device(options.device)
    text = corpus.load()
    config = SIZES[options.size].with_(dropout=options.dropout)
    config = config.with_(context=options.context or config.context)
    torch.manual_seed(options.seed)
    model = GPT(config).to(device)  # made on the CPU, so that every device starts from the same weights
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate, betas=(0.9, 0.95), weight_decay=0.1)
    generator = torch.Generator().manual_seed(options.seed)
    result = Result(options.device, unigram_entropy=text.unigram_entropy())
    result.parameters = sum(p.numel() for p in model.parameters())
    clock = Clock(options.batch * config.context)

    bar = tqdm(range(options.steps), desc=f"{options.device}, {result.parameters / 1e6:.1f} M parameters", disable=options.quiet,
               mininterval=1.0)
    for step in bar:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, options)
        tokens, targets = corpus.batch(text.train, options.batch, config.context, generator)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=options.bf16):
            loss = model.loss(tokens.to(device), targets.to(device))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % options.read_every == 0 or step in (WARM_UP, options.steps - 1):
            result.losses[step] = loss.item()
            clock.tick(step)
            speed = clock.tokens_per_second()
            rate = "compiling" if math.isnan(speed) else f"{speed:,.0f} tokens/s"
            bar.set_postfix_str(f"loss {result.losses[step]:.3f}, {rate}")

    result.tokens_per_second = clock.tokens_per_second()
    result.held_out = held_out_loss(model, text, options)
    result.sample = sample(model, text, options)
    return result


class Clock:
    """Tokens per second between the end of the warm-up and the last time the loss was read."""

    def __init__(self, tokens_per_step: int) -> None:
        self.tokens_per_step = tokens_per_step
        self.ticks: list[tuple[int, float]] = []

    def tick(self, step: int) -> None:
        if len(self.ticks) == 2:
            self.ticks.pop()
        if step <= WARM_UP:
            self.ticks.clear()
        self.ticks.append((step, time.perf_counter()))

    def tokens_per_second(self) -> float:
        (first, start), (last, end) = self.ticks[0], self.ticks[-1]
        return (last - first) * self.tokens_per_step / (end - start) if end > start else math.nan


@torch.no_grad()
def held_out_loss(model: GPT, text: corpus.Corpus, options: Options) -> float:
    """Mean loss on modules that the training never saw."""
    device, generator = model.head.weight.device, torch.Generator().manual_seed(1)
    model.eval()
    total = torch.zeros((), device=device)
    for _ in range(options.held_out_batches):
        tokens, targets = corpus.batch(text.held_out, options.batch, model.config.context, generator)
        total += model.loss(tokens.to(device), targets.to(device))
    return total.item() / max(1, options.held_out_batches)


def sample(model: GPT, text: corpus.Corpus, options: Options) -> str:
    """What the model writes after the first lines of a held-out module."""
    if not options.sample:
        return ""
    model.eval()
    prompt = text.held_out[: model.config.context].long()
    drawn = model.generate(prompt, options.sample, torch.Generator().manual_seed(options.seed))
    return bytes(drawn.tolist()).decode(errors="replace")


def save_curve(result: Result, options: Options) -> None:
    """The run as JSON, for `compare.py`."""
    assert options.curve is not None
    told = {key: value for key, value in vars(options).items() if key not in ("curve", "quiet")}
    data = {**vars(result), "losses": list(result.losses.items()), "options": told, "torch": torch.__version__}
    options.curve.write_text(json.dumps(data, indent=1) + "\n")


def report(result: Result) -> str:
    last = list(result.losses.values())[-1]
    return (f"\nloss {last:.3f} nats per byte, held out {result.held_out:.3f}; "
            f"knowing only how frequent each byte is: {result.unigram_entropy:.3f}\n"
            f"{result.tokens_per_second:,.0f} tokens/s after the first {WARM_UP} steps\n"
            + (f"\n--- a sample ---\n{result.sample}\n----------------\n" if result.sample else ""))


def parse(arguments: list[str] | None = None) -> Options:
    defaults = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], formatter_class=defaults)
    plain = Options()
    parser.add_argument("--device", default=plain.device, help="lazysched, cpu or cuda")
    parser.add_argument("--size", default=plain.size, choices=list(SIZES), help="of the model")
    parser.add_argument("--dropout", type=float, default=plain.dropout, help="probability")
    parser.add_argument("--learning-rate", type=float, default=plain.learning_rate, help="after the warm-up")
    parser.add_argument("--bf16", action="store_true", help="run under autocast to bfloat16")
    parser.add_argument("--curve", type=Path, help="JSON file for the losses")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    for name, text in (("steps", "optimizer steps"), ("seed", "of weights, batches and sample"), ("batch", "sequences a step"),
                       ("context", "bytes a sequence; 0: the size's own"), ("read-every", "steps between two reads of the loss"),
                       ("held-out-batches", "batches of the held-out loss"), ("sample", "bytes of text to write at the end")):
        parser.add_argument(f"--{name}", type=int, default=getattr(plain, name.replace("-", "_")), help=text)
    return Options(**vars(parser.parse_args(arguments)))


def main() -> None:
    options = parse()
    if options.device.startswith("lazysched"):
        import lazy_backend  # registers the device; not needed once the package is installed
    result = train(options)
    print(report(result))
    if options.curve:
        save_curve(result, options)
    if options.device.startswith("lazysched"):
        print(lazy_backend.metrics_report())


if __name__ == "__main__":
    main()
