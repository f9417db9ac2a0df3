"""Training loops that read their loss at every step, so that the device waits for the host unless it begins early. Imports torch
and `benchmarks.training_programs`, whose table they join."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.training_programs import Step, adam, drawn, layers, learn, numbers, program


def reading(model: nn.Module, x: Tensor, wanted: Tensor) -> Step:
    """A step in bfloat16 that reads its loss before the next begins."""
    optimizer = adam(model.parameters(), 1e-4)

    def step() -> Tensor:
        with torch.autocast(x.device.type, torch.bfloat16):
            loss = F.cross_entropy(model(x).float(), wanted)
        loss = learn(optimizer, loss)
        loss.item()
        return loss

    return step


@program
def read_layers(device: str, large: bool) -> Step:
    """Linear layers with ReLUs."""
    width, depth, batch = (2048, 16, 4096) if large else (32, 3, 16)
    return reading(layers(device, *[width] * (depth + 1), 10), drawn(device, batch, width), numbers(device, 10, batch))


@program
def read_images(device: str, large: bool) -> Step:
    """Convolutions with biases and GELUs."""
    channels, depth, batch, side = (128, 10, 64, 56) if large else (8, 2, 2, 8)
    parts: list[nn.Module] = []
    for before in [3, *[channels] * depth]:
        parts += [nn.Conv2d(before, channels, 3, padding=1), nn.GELU()]
    model = nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10)).to(device)
    return reading(model, drawn(device, batch, 3, side, side), numbers(device, 10, batch))
