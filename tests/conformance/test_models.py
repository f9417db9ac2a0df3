"""Hugging Face models train and generate on the device as in eager mode, and a training step compiles nothing after warm-up."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import lazy_backend
from tests.conformance.eager import DEVICE, EAGER, moved, on_cpu

models = pytest.importorskip("tests.conformance.models", reason="transformers is not installed")
FIRST = ("gpt2", "llama", "qwen2", "mixtral", "mamba", "bert", "t5", "vit", "clip", "whisper")
NEW_TOKENS = 20
NAMES = list(models.MODELS)
GENERATING = [name for name in NAMES if models.MODELS[name].prompt]
# Fused kernels round otherwise; on a CPU there are none.
TOLERANCE = {"rtol": 0, "atol": 0} if EAGER == "cpu" else {"rtol": 1e-3, "atol": 1e-4}
# One number added to all keys changes no softmax: the gradient is zero, and AdamW makes full steps of what rounding leaves of it.
NOISE = ("k_proj.bias", "key.bias", "k.bias")


def everyday(test: str) -> bool:
    return any(f"[{name}]" in test for name in FIRST)


def train(name: str, device: str) -> tuple[list[torch.Tensor], dict[str, torch.Tensor], list[int]]:
    """Losses of five AdamW steps, the parameters afterwards, and the count of compiles after each step."""
    example = models.MODELS[name]
    torch.manual_seed(0)
    model: nn.Module = example.make().to(device).train()
    batch: dict[str, Any] = moved(example.batch, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
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
    for one in NOISE if EAGER == "cuda" else ():
        parameters, their_parameters = ({k: v for k, v in all.items() if one not in k} for all in (parameters, their_parameters))
    torch.testing.assert_close(parameters, their_parameters, **TOLERANCE)
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
