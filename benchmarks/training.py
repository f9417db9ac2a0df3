"""One contestant's training of the example's GPT. Imports torch, `examples.gpt` and, for lazysched, lazy_backend."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.timing import wait
from examples.gpt import GPT, SIZES

CONTESTANTS = ("eager", "compile", "lazysched")


@dataclass(frozen=True)
class Task:
    """What is trained. ``vocabulary`` and ``context`` of 0 mean the size's own."""

    size: str
    batch: int
    context: int = 0
    vocabulary: int = 0
    bf16: bool = False
    dropout: float = 0.0
    fused: bool = False  # the optimizer's own fused kernel


class Trainer:
    """A GPT on a contestant's device, with AdamW, fed random tokens made on the CPU from a seed."""

    def __init__(self, contestant: str, task: Task) -> None:
        if contestant == "lazysched":
            import lazy_backend  # noqa: F401  (registers the device, in this contestant only)
        self.physical = "cuda" if torch.cuda.is_available() else "cpu"
        self.device = torch.device("lazysched" if contestant == "lazysched" else self.physical)
        config = SIZES[task.size]
        self.config = config.with_(vocabulary=task.vocabulary or config.vocabulary, context=task.context or config.context,
                                   dropout=task.dropout)
        self.task = task
        torch.manual_seed(0)
        self.model = GPT(self.config).to(self.device)
        self.loss: Callable[[Tensor, Tensor], Tensor] = self.model.loss
        if contestant == "compile":
            self.loss = torch.compile(self.model.loss)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4, fused=task.fused or None)
        generator = torch.Generator().manual_seed(1)
        tokens = torch.randint(self.config.vocabulary, (task.batch, self.config.context + 1), generator=generator).to(self.device)
        self.tokens, self.targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def step(self) -> Tensor:
        """One optimizer step on the same batch; the loss, not read."""
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.task.bf16):
            loss = self.loss(self.tokens, self.targets)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def wait(self) -> None:
        """Until the physical device has done all that was asked."""
        wait(self.device.type == "lazysched")

    def seconds(self, steps: int) -> float:
        """How long ``steps`` steps take, to their end on the device."""
        self.wait()
        start = time.perf_counter()
        for _ in range(steps):
            self.step()
        self.wait()
        return time.perf_counter() - start
