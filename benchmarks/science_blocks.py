"""Parts of simulations, of sound, of series in time and of decisions, as people write them. Imports torch,
`benchmarks.model_blocks`."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.model_blocks import FULL, below, full, given, half, mask, several, uniform

SCIENCES, block = several()


@block(full(16, 512, 512))
def heat_step(x: Tensor) -> Tensor:
    around = torch.roll(x, 1, 1) + torch.roll(x, -1, 1) + torch.roll(x, 1, 2) + torch.roll(x, -1, 2)
    return x + 0.1 * (around - 4 * x)


@block(full(16, 512, 512), full(16, 512, 512))
def divergence_loss(u: Tensor, v: Tensor) -> Tensor:
    across = (u[:, 1:-1, 2:] - u[:, 1:-1, :-2]) / 2
    down = (v[:, 2:, 1:-1] - v[:, :-2, 1:-1]) / 2
    return (across + down).square().mean()


@block(full(2048, 3))
def forces_between(x: Tensor) -> Tensor:
    apart = x[:, None] - x
    near = 1 / (apart.square().sum(-1) + 0.01)
    return (apart * (near**4 - 0.5 * near**2 + near.sqrt())[..., None]).sum(1)


@block(full(9, 1024, 1024))
def lattice(x: Tensor) -> Tensor:
    ways = [(0, 0), (1, 0), (0, 1), (-1, 0), (0, -1), (1, 1), (-1, 1), (-1, -1), (1, -1)]
    moved = torch.stack([torch.roll(x[one], way, (0, 1)) for one, way in enumerate(ways)])
    mass = moved.sum(0)
    return moved - 0.6 * (moved - mass / 9)


@block(full(4096, 6), full(4096, 6))
def volume_of_cells(edges: Tensor, angles: Tensor) -> Tensor:
    first, second = torch.cos(angles[:, :3]), torch.sin(angles[:, 3:])
    shape = (1 - first.square().sum(1) + 2 * first.prod(1)).abs().sqrt()
    return edges[:, :3].prod(1) * shape + (edges * second.repeat(1, 2)).sum(1)


@block(full(64, 65536))
def emphasised(x: Tensor) -> Tensor:
    return torch.cat((x[:, :1], x[:, 1:] - 0.97 * x[:, :-1]), 1)


@block(full(64, 65536))
def companded(x: Tensor) -> Tensor:
    x = x.clamp(-1, 1)
    return torch.sign(x) * torch.log1p(255 * x.abs()) / math.log1p(255)


@block(full(32, 513, 400, 2), full(32, 513, 400, 2))
def spectra_apart(x: Tensor, y: Tensor) -> Tensor:
    first = x.square().sum(-1).clamp(min=1e-7).sqrt()
    second = y.square().sum(-1).clamp(min=1e-7).sqrt()
    return (second - first).norm() / second.norm() + (first.log() - second.log()).abs().mean()


@block(half(32, 80, 1500))
def masked_spectrum(x: Tensor) -> Tensor:
    place = torch.arange(1500, device=x.device)
    band = torch.arange(80, device=x.device)
    out = ((place >= 300) & (place < 340)) | ((band >= 20) & (band < 27))[:, None]
    return x.masked_fill(out, 0) - x.mean((1, 2), keepdim=True)


@block(half(16, 512, 2048), half(16, 512, 2048))
def gated_sound(x: Tensor, condition: Tensor) -> Tensor:
    first, second = (x + condition).chunk(2, 1)
    return torch.tanh(first) * torch.sigmoid(second)


@block(half(16, 256, 4096), half(1, 256, 1), half(1, 256, 1))
def snake(x: Tensor, speed: Tensor, size: Tensor) -> Tensor:
    return x + (size + 1e-9).reciprocal() * torch.sin(x * speed) ** 2


@block(full(512, 96, 321))
def seasons(x: Tensor) -> tuple[Tensor, Tensor]:
    padded = torch.cat((x[:, :1].repeat(1, 12, 1), x, x[:, -1:].repeat(1, 12, 1)), 1)
    trend = F.avg_pool1d(padded.permute(0, 2, 1), 25, 1).permute(0, 2, 1)
    return x - trend, trend


@block(full(256, 512, 64))
def windows_of_series(x: Tensor) -> Tensor:
    x = (x - x.mean(1, keepdim=True)) / (x.std(1, keepdim=True) + 1e-5)
    return x.transpose(1, 2).unfold(2, 16, 8).contiguous()


@block(full(8192, 96, 9), given(8192, 96, dtype=FULL))
def pinball(x: Tensor, wanted: Tensor) -> Tensor:
    levels = torch.arange(1, 10, device=x.device) / 10
    apart = wanted[..., None] - x
    return torch.maximum(levels * apart, (levels - 1) * apart).sum(-1).mean()


@block(full(65536, 26, 16))
def pairs_of_fields(x: Tensor) -> Tensor:
    return 0.5 * (x.sum(1).square() - x.square().sum(1)).sum(-1)


@block(half(65536, 512), half(65536, 512), half(65536), half(512))
def crossed(first: Tensor, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return first * weight[:, None] + bias + x


@block(full(65536, 64), full(65536, 64), full(65536, 64))
def ranked_by_people(person: Tensor, liked: Tensor, other: Tensor) -> Tensor:
    apart = (person * liked).sum(1) - (person * other).sum(1)
    return -F.logsigmoid(apart).mean() + 1e-4 * (person.square().sum() + liked.square().sum() + other.square().sum()) / 65536


@block(half(32768, 8, 128), full(32768, 3, 8))
def tasks_mixed(experts: Tensor, gates: Tensor) -> Tensor:
    share = gates.softmax(-1).to(experts.dtype)
    return (experts[:, None] * share[..., None]).sum(2)


@block(full(16384, 18, 51), below(18, 16384), uniform(16384, 51))
def distributional_loss(logits: Tensor, actions: Tensor, wanted: Tensor) -> Tensor:
    log = logits[torch.arange(16384, device=logits.device), actions].log_softmax(-1)
    return -(wanted / wanted.sum(-1, keepdim=True) * log).sum(-1).mean()


@block(full(65536, 18), below(18, 65536), full(65536), given(65536, 18, dtype=FULL))
def dueling(advantage: Tensor, actions: Tensor, value: Tensor, later: Tensor) -> Tensor:
    chosen = value[:, None] + advantage - advantage.mean(1, keepdim=True)
    chosen = chosen.gather(1, actions[:, None]).squeeze(1)
    return F.smooth_l1_loss(chosen, 0.99 * later.amax(1))


@block(full(65536, 34), given(65536, 17, dtype=FULL))
def squashed_policy(parameters: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    mean, spread = parameters.chunk(2, -1)
    spread = spread.clamp(-20, 2)
    raw = mean + noise * spread.exp()
    log = (-0.5 * noise.square() - spread - 0.919 - 2 * (math.log(2) - raw - F.softplus(-2 * raw))).sum(-1)
    return torch.tanh(raw), log


@block(full(128, 4096), full(128, 4096), mask(128, 4096))
def discounted(rewards: Tensor, values: Tensor, going: Tensor) -> Tensor:
    power = 0.99 ** torch.arange(128, device=rewards.device, dtype=torch.float32)[:, None]
    later = ((rewards * going * power).flip(0).cumsum(0).flip(0)) / power
    apart = later - values
    return ((apart - apart.mean()) / (apart.std() + 1e-8)).square().mean()


@block(full(4096, 4096))
def similarities_spread(x: Tensor) -> Tensor:
    place = torch.arange(4096, device=x.device)
    off = x - torch.diag_embed(x.diagonal())
    return (x.diagonal() - 1).square().sum() + 0.005 * off.square().sum() + (place[:, None] == place).sum()


@block(full(4096, 2048), full(4096, 2048))
def spread_of_features(x: Tensor, y: Tensor) -> Tensor:
    x, y = x - x.mean(0), y - y.mean(0)
    return F.mse_loss(x, y) + F.relu(1 - (x.var(0) + 1e-4).sqrt()).mean() + F.relu(1 - (y.var(0) + 1e-4).sqrt()).mean()


@block(full(1048576), below(64, 1048576))
def per_group_standardised(x: Tensor, group: Tensor) -> Tensor:
    count = x.new_zeros(64).index_add(0, group, torch.ones_like(x))
    mean = x.new_zeros(64).index_add(0, group, x) / count
    apart = x - mean[group]
    spread = x.new_zeros(64).index_add(0, group, apart.square()) / count
    return apart * torch.rsqrt(spread[group] + 1e-6)
