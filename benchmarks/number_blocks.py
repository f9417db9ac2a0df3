"""Numbers of few bits and updates by hand, as people write them. Imports torch, `benchmarks.model_blocks`."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.model_blocks import FULL, below, full, given, half, mask, several, uniform

NUMBERS, block = several()


@block(given(16384, 4096))
def bytes_per_token(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.abs().amax(-1, keepdim=True).float().clamp(min=1e-5) / 127
    return (x.float() / scale).round().clamp(-128, 127).to(torch.int8), scale


@block(given(8192, 4096))
def bytes_per_block(x: Tensor) -> tuple[Tensor, Tensor]:
    blocks = x.view(8192, 32, 128).float()
    scale = (blocks.abs().amax(-1, keepdim=True) / 448).clamp(min=1e-12)
    return (blocks / scale).to(torch.float8_e4m3fn).view(8192, 4096), scale.squeeze(-1)


@block(given(8192, 4096))
def bytes_per_tile(x: Tensor) -> tuple[Tensor, Tensor]:
    tiles = x.view(64, 128, 32, 128).float()
    scale = tiles.abs().amax((1, 3), keepdim=True).clamp(min=1e-4) / 448
    return (tiles / scale).to(torch.float8_e4m3fn).view(8192, 4096), scale.view(64, 32)


@block(half(4096, 4096))
def ternary(weight: Tensor) -> Tensor:
    scale = weight.abs().mean().clamp(min=1e-5)
    return weight + ((weight / scale).round().clamp(-1, 1) * scale - weight).detach()


@block(half(4096, 4096))
def signs(weight: Tensor) -> Tensor:
    centred = weight - weight.mean(1, keepdim=True)
    scale = centred.abs().mean(1, keepdim=True)
    return (torch.sign(centred) * scale).detach() - torch.tanh(centred).detach() + torch.tanh(centred)


@block(given(4096, 4096, dtype=FULL), uniform(4096, 4096))
def rounded_by_chance(x: Tensor, draw: Tensor) -> Tensor:
    scale = x.abs().amax(1, keepdim=True) / 127
    return (x / scale + draw).floor().clamp(-128, 127).to(torch.int8)


@block(below(256, 4096, 2048), given(4096, 64), given(4096, 64))
def from_nibbles(packed: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    values = torch.stack((packed & 15, packed >> 4), -1).view(4096, 64, 64)
    return ((values.to(scale.dtype) - zero[..., None]) * scale[..., None]).view(4096, 4096)


@block(below(16, 4096, 4096), given(16, dtype=FULL), given(262144, dtype=FULL))
def from_table(codes: Tensor, table: Tensor, largest: Tensor) -> Tensor:
    return (table[codes].view(-1, 64) * largest[:, None]).to(torch.bfloat16).view(4096, 4096)


@block(*[given(4096, 4096, dtype=FULL)] * 2, *[uniform(4096, 4096)] * 3)
def largest_moment(w: Tensor, g: Tensor, mean: Tensor, square: Tensor, largest: Tensor) -> tuple[Tensor, ...]:
    mean = torch.lerp(mean, g, 0.1)
    square = square * 0.999 + g * g * 0.001
    largest = torch.maximum(largest, square)
    return w * 0.9999 - 1e-3 * (mean / 0.1) / ((largest / 0.001).sqrt() + 1e-8), mean, square, largest


@block(given(4096, 1024), given(4096, 1024), given(4096, 1024, dtype=FULL))
def centred_slopes(w: Tensor, g: Tensor, moment: Tensor) -> tuple[Tensor, Tensor]:
    g = g.float() - g.float().mean(1, keepdim=True) + 0.01 * w.float()
    moment = 0.9 * moment + g
    return (w.float() - 0.1 * (g + 0.9 * moment)).to(w.dtype), moment


@block(given(4096, 1024, dtype=FULL), given(4096, 1024, dtype=FULL), given(4096, 1024, dtype=FULL))
def layer_rate(w: Tensor, g: Tensor, moment: Tensor) -> tuple[Tensor, Tensor]:
    size, slope = w.norm(), g.norm()
    rate = torch.where((size > 0) & (slope > 0), 0.001 * size / (slope + 1e-4 * size + 1e-8), torch.ones_like(size))
    moment = 0.9 * moment + rate * (g + 1e-4 * w)
    return w - moment, moment


@block(given(4096, 1024, dtype=FULL), given(4096, 1024, dtype=FULL))
def clipped_units(w: Tensor, g: Tensor) -> Tensor:
    size = w.norm(dim=1, keepdim=True).clamp(min=1e-3)
    slope = g.norm(dim=1, keepdim=True)
    limit = size * 0.01
    return w - 0.1 * torch.where(slope > limit, g * (limit / slope.clamp(min=1e-6)), g)


@block(given(2048, 2048), given(2048, 2048, dtype=FULL), given(2048, 2048))
def orthogonal_update(w: Tensor, moment: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    moment = torch.lerp(moment, g.float(), 0.05)
    wanted = torch.lerp(g.float(), moment, 0.95).to(torch.bfloat16)
    return moment, wanted / (wanted.norm() + 1e-7)


@block(given(4096, 4096, dtype=FULL), given(4096, 4096, dtype=FULL), uniform(4096, 4096), uniform(4096, 4096))
def clipped_by_curvature(w: Tensor, g: Tensor, mean: Tensor, curve: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    mean = 0.965 * mean + 0.035 * g
    step = (mean.abs() / (0.04 * 16 * curve + 1e-15)).clamp(max=1)
    return w * (1 - 1e-5) - 1e-4 * mean.sign() * step, mean, step.mean()


@block(given(4096, 4096), given(4096, 4096))
def away_from_minimum(w: Tensor, g: Tensor) -> Tensor:
    scale = 0.05 / (g.float().norm() + 1e-12)
    return w + (torch.pow(w.float(), 2) * g.float() * scale).to(w.dtype)


@block(given(8, 1024, 8, 128), given(8, 2048, 8, 128), below(2048, 8))
def written_to_cache(new: Tensor, cache: Tensor, lengths: Tensor) -> Tensor:
    place = torch.arange(2048, device=new.device)[None]
    inside = (place >= lengths[:, None] // 2) & (place < lengths[:, None] // 2 + 1024)
    source = (place - lengths[:, None] // 2).clamp(0, 1023)
    return torch.where(inside[..., None, None], new.gather(1, source[..., None, None].expand(8, 2048, 8, 128)), cache)


@block(half(8192, 4096), half(8192, 4096), mask(8192, 1))
def frozen_rows(x: Tensor, y: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
    joined = torch.where(keep, x, y.detach())
    return joined, (joined.float() - y.float()).square().mean(0)


@block(full(2048, 2048), below(4, 2048))
def soft_neighbours(apart: Tensor, labels: Tensor) -> Tensor:
    same = labels[:, None] == labels
    other = ~torch.eye(2048, dtype=torch.bool, device=apart.device)
    share = (-apart).masked_fill(~other, float("-inf")).softmax(1)
    return -torch.log((share * same).sum(1).clamp(min=1e-8)).mean()
