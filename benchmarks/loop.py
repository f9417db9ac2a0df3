"""One contestant's training loop of a model of the zoo. Imports torch, `benchmarks.models` and, for lazysched, lazy_backend.

A contestant is a way to run, then what is added to it: ``compile+opt`` compiles the optimizer's step as well,
``eager+fused`` uses PyTorch's own fused optimizer, ``lazysched+replay`` wraps the whole step in `lazy_backend.replayed`; with
``+cleared`` gradients are dropped behind each step, as Hugging Face's Trainer does, otherwise when the next one begins; with
``+annealed`` the learning rate falls along a cosine, a little behind every step.
``+without_combo`` does without lazysched's optimisation of that name.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR

from benchmarks.models import TASKS, Sizes
from benchmarks.timing import wait
from ir_nodes.optimisations import OPTIMISATIONS

MODES = {"compile": None, "reduce-overhead": "reduce-overhead", "max-autotune": "max-autotune-no-cudagraphs"}
WAYS = ("eager", *MODES, "lazysched")
ASKED = {"attention": {"LAZYSCHED_ATTENTION": "triton"}, "tuned": {"LAZYSCHED_AUTOTUNE": "1"}}
"""What lazysched is asked for beyond its defaults, as settings."""
EXTRAS = ("opt", "fused", "cleared", "annealed", "replay", *ASKED)
WITHOUT = "without_"


def parts(contestant: str) -> tuple[str, set[str]]:
    """The way to run and what is added to it. Raises ValueError for names that are not known."""
    way, *extras = contestant.split("+")
    ours = {f"{WITHOUT}{name}" for name in OPTIMISATIONS} | {"replay", *ASKED}
    wrong = ("opt" in extras and way not in MODES) or (ours & set(extras) and way != "lazysched")
    if way not in WAYS or not set(extras) <= ours | set(EXTRAS) or wrong:
        raise ValueError(f"{contestant}: no such contestant. Ways: {', '.join(WAYS)}; added: +fused, +cleared, +annealed, +opt "
                         f"for what compiles, +replay, +attention, +tuned and +{WITHOUT}OPTIMISATION for lazysched")
    return way, set(extras)


def settings_of(contestant: str) -> dict[str, str]:
    """The environment variables that its process is started with."""
    extras = sorted(parts(contestant)[1])
    off = [extra.removeprefix(WITHOUT) for extra in extras if extra.startswith(WITHOUT)]
    asked = {variable: value for extra in extras for variable, value in ASKED.get(extra, {}).items()}
    return asked | ({"LAZYSCHED_DISABLE": ",".join(off)} if off else {})


class Loop:
    """Model, optimizer and data of one contestant. Every contestant starts from the same weights and sees the same batches."""

    def __init__(self, contestant: str, model: str, sizes: Sizes, dropout: float | None = None, resident: bool = False) -> None:
        self.way, self.extras = parts(contestant)
        if self.way == "lazysched":
            import lazy_backend  # noqa: F401  (registers the device, in this contestant only)
        self.physical = "cuda" if torch.cuda.is_available() else "cpu"
        self.device = torch.device("lazysched" if self.way == "lazysched" else self.physical)
        self.task, self.sizes, self.resident = TASKS[model], sizes, resident
        torch.manual_seed(0)
        self.model = self.task.build(sizes, self.task.dropout if dropout is None else dropout).train()
        self.place()
        self.optimizer = self.make_optimizer()
        self.schedule = CosineAnnealingLR(self.optimizer, T_max=1000) if "annealed" in self.extras else None
        self.forward: Callable[..., Tensor] = self.model
        self.update: Callable[[], Any] = self.optimizer.step
        if self.way in MODES:
            self.forward = torch.compile(self.model, mode=MODES[self.way])
            if "opt" in self.extras:
                self.update = torch.compile(self.optimizer.step, mode=MODES[self.way])
        self.whole: Callable[..., Tensor] = self.on_device
        if "replay" in self.extras:
            import lazy_backend

            self.whole = lazy_backend.replayed(self.on_device)
        self.generator = torch.Generator().manual_seed(1)
        self.batches = [self.draw() for _ in range(4)]
        self.number = 0

    def place(self) -> None:
        kind = {"dtype": torch.bfloat16} if self.task.precision == "bfloat16" else {}
        layout = {"memory_format": torch.channels_last} if self.task.channels_last else {}
        self.model.to(self.device, **kind, **layout)

    def make_optimizer(self) -> torch.optim.Optimizer:
        parameters = self.model.parameters()
        fused = True if "fused" in self.extras else None
        if self.task.optimizer == "SGD":
            return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, fused=fused)
        # In CUDA graphs the step numbers have to be on the GPU.
        graphs = self.physical == "cuda" and self.way == "reduce-overhead" and "opt" in self.extras
        capturable = graphs or ("replay" in self.extras and not fused)
        return torch.optim.AdamW(parameters, lr=3e-4, fused=fused, capturable=capturable)

    def draw(self) -> tuple[Tensor, ...]:
        """The next batch, where a data loader would leave it: in pinned memory where there is a GPU."""
        batch = self.task.draw(self.sizes, self.generator)
        if self.task.channels_last:
            batch = (batch[0].contiguous(memory_format=torch.channels_last), *batch[1:])
        if self.resident:
            return tuple(one.to(self.device) for one in batch)
        return tuple(one.pin_memory() for one in batch) if self.physical == "cuda" else batch

    def step(self, batch: tuple[Tensor, ...] | None = None) -> Tensor:
        """One optimizer step on the next of four batches, or on ``batch``; the loss, not read."""
        if batch is None:
            batch = self.batches[self.number % len(self.batches)]
            self.number += 1
        if self.way == "reduce-overhead":
            torch.compiler.cudagraph_mark_step_begin()
        loss = self.whole(*(one.to(self.device, non_blocking=True) for one in batch))
        if self.schedule is not None:
            self.schedule.step()
        return loss

    def on_device(self, *here: Tensor) -> Tensor:
        """A step on a batch that is on the device."""
        if "cleared" not in self.extras:
            self.optimizer.zero_grad()
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.task.precision == "autocast"):
            loss = self.forward(*here)
        loss.backward()
        self.update()
        if "cleared" in self.extras:
            self.optimizer.zero_grad()
        return loss.detach()

    def wait(self) -> None:
        """Until the physical device has done all that was asked."""
        wait(self.way == "lazysched")

    def seconds(self, steps: int, read: bool = False) -> float:
        """How long ``steps`` steps take, to their end on the device; ``read``: each loss is read before the next begins."""
        self.wait()
        start = time.perf_counter()
        for _ in range(steps):
            loss = self.step()
            if read:
                loss.item()
        self.wait()
        return time.perf_counter() - start

    def host_seconds(self, repeats: int = 5) -> list[float]:
        """How long the host is busy with one step while the device has nothing else to do; of each repeat."""
        taken = []
        for _ in range(repeats):
            self.wait()
            start = time.perf_counter()
            self.step()
            taken.append(time.perf_counter() - start)
        self.wait()
        return taken

    def curve(self, steps: int) -> list[float]:
        """The losses of ``steps`` new batches, read at the end."""
        losses = [self.step(self.draw()).clone() for _ in range(steps)]
        return [loss.item() for loss in losses]


def trained(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())
