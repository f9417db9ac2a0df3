"""Windows of images and series, resizing, boxes of volumes, products of few summands or results, and what rows share. Imports
torch, `benchmarks.model_blocks`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.model_blocks import full, half, several

WINDOWS, block = several()


@block(half(64, 192, 28, 28))
def every_other_window(x: Tensor) -> Tensor:
    return F.unfold(x, 3, padding=1, stride=2)


@block(half(64, 192 * 9, 14 * 14))
def windows_put_together(x: Tensor) -> Tensor:
    return F.fold(x, 28, 3, padding=1, stride=2)


@block(half(64, 16 * 16 * 3, 14 * 14))
def patches_put_together(x: Tensor) -> Tensor:
    return F.fold(x, 224, 16, stride=16)


@block(half(32, 64, 64, 64))
def twice_the_size(x: Tensor) -> Tensor:
    return F.interpolate(x, scale_factor=2, mode="bilinear")


@block(half(32, 21, 32, 32))
def logits_of_pixels(x: Tensor) -> Tensor:
    return F.interpolate(x, size=(256, 256), mode="bilinear", align_corners=False)


@block(half(2, 64, 16, 32, 32))
def twice_the_volume(x: Tensor) -> Tensor:
    return F.interpolate(x, scale_factor=2, mode="trilinear")


@block(half(8, 64, 16, 56, 56))
def largest_of_boxes(x: Tensor) -> Tensor:
    return F.max_pool3d(x, 3, 2, 1)


@block(half(8, 64, 16, 56, 56))
def averages_of_boxes(x: Tensor) -> Tensor:
    return F.avg_pool3d(x.relu(), 2)


@block(half(32, 128, 40, 40))
def largest_of_three_sizes(x: Tensor) -> Tensor:
    return torch.cat([x, *(F.max_pool2d(x, size, 1, size // 2) for size in (3, 5))], 1)


@block(half(32, 64, 64, 64))
def repeated_edges(x: Tensor) -> Tensor:
    return F.pad(x, (1, 1, 1, 1), mode="replicate")


@block(half(64, 128, 56, 56))
def shuffled_channels(x: Tensor) -> Tensor:
    return F.channel_shuffle(x, 4) + 1


@block(full(1 << 18, 3, 3), full(1 << 18, 3, 3))
def turned_frames(x: Tensor, turns: Tensor) -> Tensor:
    return torch.bmm(turns, x)


@block(half(1 << 20, 3), half(64, 3), half(64))
def layer_over_coordinates(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.linear(x, weight, bias).relu()


@block(half(75264, 9, 9), half(75264, 9, 32))
def attention_in_windows(scores: Tensor, values: Tensor) -> Tensor:
    return torch.bmm(scores.softmax(-1), values)


@block(full(1 << 22, 3), full(1 << 22, 3))
def normals(x: Tensor, y: Tensor) -> Tensor:
    return F.normalize(torch.linalg.cross(x, y), dim=-1)


@block(half(1 << 16, 1024), half(1, 1024), half(1))
def number_for_each_row(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.linear(x.relu(), weight, bias).sigmoid()


@block(half(32, 512, 768), half(2, 768), half(2))
def beginnings_and_ends(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """How much each token looks like an answer's first, and its last."""
    first, last = F.linear(x, weight, bias).unbind(-1)
    return first.log_softmax(-1), last.log_softmax(-1)


@block(half(1 << 18, 128), half(1 << 18, 128), half(128), half(128), half(128))
def scaled_layer_and_norm(x: Tensor, y: Tensor, scale: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    total = x + y * scale
    return total, F.layer_norm(total, (128,), weight, bias)
