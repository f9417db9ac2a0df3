"""Hugging Face models train and generate on the device as in eager mode, and a training step compiles nothing after warm-up."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import lazy_backend
from tests.conformance.eager import DEVICE, EAGER, moved, on_cpu
from tests.conformance.truth import all_right, widen

models = pytest.importorskip("tests.conformance.models", reason="transformers is not installed")
FIRST = ("gpt2", "llama", "qwen2", "mixtral", "mamba", "bert", "t5", "vit", "clip", "whisper")
NEW_TOKENS = 20
NAMES = list(models.MODELS)
GENERATING = [name for name in NAMES if models.MODELS[name].prompt]
# Fused kernels round otherwise; on a CPU there are none.
TOLERANCE = {"rtol": 0, "atol": 0} if EAGER == "cpu" else {"rtol": 1e-3, "atol": 1e-4}


# Where a gradient is nearly zero, AdamW makes full steps of what rounding leaves of it: on a GPU that would be all that is seen.
EPSILON = 1e-8 if EAGER == "cpu" else 1e-4


def everyday(test: str) -> bool:
    return any(f"[{name}]" in test for name in FIRST)


def train(name: str, device: str, wide: bool = False) -> tuple[list[torch.Tensor], dict[str, torch.Tensor], list[int]]:
    """Losses of five AdamW steps, the parameters afterwards, and the count of compiles after each step.

    ``wide``: in float64.
    """
    example = models.MODELS[name]
    torch.manual_seed(0)
    model: nn.Module = example.make().to(device).train()
    batch: dict[str, Any] = moved(example.batch, device)
    model, batch = widen((model, batch)) if wide else (model, batch)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=EPSILON)
    losses, compiles = [], []
    for step in range(5):
        torch.manual_seed(step)
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        compiles.append(lazy_backend.stats()["compiles"] if device == DEVICE else 0)
    return on_cpu(losses), on_cpu(dict(model.named_parameters())), compiles


@pytest.mark.parametrize("name", NAMES)
def test_trains(name: str) -> None:
    before = lazy_backend.stats()["fallbacks"]
    with torch.backends.cudnn.flags(allow_tf32=False):  # its ten bits would be all that differs
        losses, parameters, compiles = train(name, DEVICE)
        assert lazy_backend.stats()["fallbacks"] == before
        their_losses, their_parameters, _ = train(name, EAGER)
    torch.testing.assert_close(losses, their_losses, **TOLERANCE)
    all_right(parameters, their_parameters, lambda: train(name, EAGER, wide=True)[1],
              lambda a, b: torch.testing.assert_close(a, b, **TOLERANCE))
    assert compiles[1] == compiles[-1], f"compiles after each step: {compiles}"


@pytest.mark.parametrize("name", GENERATING)
def test_generates(name: str) -> None:
    example = models.MODELS[name]
    torch.manual_seed(0)
    eager = example.make().eval().to(EAGER)
    ours = copy.deepcopy(eager).to(DEVICE)
    more = {} if name == "whisper" else {"pad_token_id": 0}
    texts = []
    for model, device in ((ours, DEVICE), (eager, EAGER)):
        prompt = example.batch[example.prompt].to(device)
        texts.append(model.generate(prompt, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False, **more))
    assert texts[0].device.type == DEVICE and texts[0].tolist() == texts[1].tolist()
