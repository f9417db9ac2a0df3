"""Further losses, updates of parameters written by hand, and numbers of few bits, as people write them. Imports torch,
`benchmarks.model_blocks`."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.model_blocks import FULL, below, full, given, half, mask, several, uniform

UPDATES, block = several()


@block(given(50257, 768, dtype=FULL), given(50257, 768, dtype=FULL), given(50257, 768, dtype=FULL), uniform(50257, 768))
def lamb(weight: Tensor, slope: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    first = 0.9 * first + 0.1 * slope
    second = 0.999 * second + 0.001 * slope.square()
    step = first / (second.sqrt() + 1e-6) + 0.01 * weight
    trust = weight.norm() / step.norm()
    return weight - 1e-3 * trust * step, first, second


@block(given(8192, 4096, dtype=FULL), given(8192, 4096, dtype=FULL), uniform(8192), uniform(4096))
def adafactor(weight: Tensor, slope: Tensor, rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    squares = slope.square() + 1e-30
    rows, columns = rows.lerp(squares.mean(1), 0.2), columns.lerp(squares.mean(0), 0.2)
    step = (rows / rows.mean()).rsqrt()[:, None] * columns.rsqrt() * slope
    step = step / (step.square().mean().sqrt()).clamp(min=1.0)
    return weight - 1e-3 * step, rows, columns


@block(given(8192, 4096), given(8192, 4096), given(8192, 4096, dtype=FULL))
def lion(weight: Tensor, slope: Tensor, momentum: Tensor) -> tuple[Tensor, Tensor]:
    step = (0.9 * momentum + 0.1 * slope).sign()
    return weight - 1e-4 * (step.to(weight.dtype) + 0.1 * weight), 0.99 * momentum + 0.01 * slope


@block(given(8192, 4096, dtype=FULL), given(8192, 4096), given(8192, 4096, dtype=FULL))
def averaged_weights(average: Tensor, slope: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    centred = slope.float() - slope.float().mean(1, keepdim=True)
    weight = weight - 0.1 * centred
    return average.lerp(weight, 0.001), weight, weight.to(torch.bfloat16)


@block(half(64, 3, 224, 224))
def gradient_penalty(slopes: Tensor) -> Tensor:
    return ((slopes.float().flatten(1).norm(dim=1) - 1) ** 2).mean() * 10


@block(given(256, 3, 224, 224), below(256, 256), uniform(256, 1, 1, 1))
def mixup(images: Tensor, order: Tensor, share: Tensor) -> Tensor:
    return (images * share + images[order] * (1 - share)).to(images.dtype)


@block(half(4096, 10000), half(4096, 10000))
def two_passes_apart(first: Tensor, second: Tensor) -> Tensor:
    p, q = first.float().log_softmax(-1), second.float().log_softmax(-1)
    return (F.kl_div(p, q, log_target=True, reduction="batchmean") + F.kl_div(q, p, log_target=True, reduction="batchmean")) / 2


@block(full(2048, 10572), below(10572, 2048))
def angular_margin(logits: Tensor, labels: Tensor) -> Tensor:
    cosine = torch.tanh(logits)
    turned = cosine * math.cos(0.5) - torch.sqrt((1 - cosine.square()).clamp(min=1e-6)) * math.sin(0.5)
    chosen = F.one_hot(labels, 10572).bool()
    return F.cross_entropy(torch.where(chosen, turned, cosine) * 64, labels)


@block(half(16384, 512), half(1000, 512), below(1000, 16384))
def centre_loss(x: Tensor, centres: Tensor, labels: Tensor) -> Tensor:
    return (x.float() - centres[labels].float()).square().sum(-1).mean() / 2


@block(full(100000, 64), below(100000, 8192, 20), mask(8192, 20))
def bags(table: Tensor, chosen: Tensor, keep: Tensor) -> Tensor:
    found = F.embedding(chosen, table) * keep[..., None]
    return found.sum(1) / keep.sum(1, keepdim=True).clamp(min=1)


@block(full(64, 8732, 4), given(8732, 4, dtype=FULL))
def decoded_boxes(deltas: Tensor, anchors: Tensor) -> Tensor:
    centre = anchors[:, :2] + deltas[..., :2] * 0.1 * anchors[:, 2:]
    size = anchors[:, 2:] * torch.exp((deltas[..., 2:] * 0.2).clamp(max=4.0))
    return torch.cat((centre - size / 2, centre + size / 2), -1)


@block(full(16, 80, 128, 128), uniform(16, 80, 128, 128))
def heat_loss(logits: Tensor, heat: Tensor) -> Tensor:
    chance = torch.sigmoid(logits).clamp(1e-4, 1 - 1e-4)
    right = heat.gt(0.99).float()
    hits = torch.log(chance) * (1 - chance) ** 2 * right
    misses = torch.log(1 - chance) * chance**2 * (1 - heat) ** 4 * (1 - right)
    return -(hits.sum() + misses.sum()) / right.sum().clamp(min=1)


@block(full(65536, 30), full(65536, 1))
def mixture(parameters: Tensor, wanted: Tensor) -> Tensor:
    weights, means, spreads = parameters.chunk(3, -1)
    spreads = spreads.clamp(min=-7)
    each = -0.5 * ((wanted - means) * torch.exp(-spreads)) ** 2 - spreads - 0.5 * math.log(2 * math.pi)
    return -torch.logsumexp(weights.log_softmax(-1) + each, -1).mean()


@block(full(16, 100, 64, 64), given(16, 3, 64, 64, dtype=FULL))
def discretised_mixture(parameters: Tensor, image: Tensor) -> Tensor:
    weights, rest = parameters[:, :10], parameters[:, 10:].view(16, 3, 30, 64, 64)
    means, spreads, _ = rest.split(10, 2)
    spreads = spreads.clamp(min=-7)
    off = image[:, :, None] - means
    up, down = torch.sigmoid(torch.exp(-spreads) * (off + 1 / 255)), torch.sigmoid(torch.exp(-spreads) * (off - 1 / 255))
    each = torch.log((up - down).clamp(min=1e-12)).sum(1) + weights.log_softmax(1)
    return -torch.logsumexp(each, 1).mean()


@block(full(1024, 64), given(1024, 64, dtype=FULL))
def quantile_huber(quantiles: Tensor, wanted: Tensor) -> Tensor:
    off = wanted[:, None] - quantiles[:, :, None]
    cost = torch.where(off.abs() <= 1, 0.5 * off.square(), off.abs() - 0.5)
    middles = (torch.arange(64, device=off.device) + 0.5) / 64
    return ((middles[:, None] - (off.detach() < 0).float()).abs() * cost).sum(1).mean()


@block(full(512, 200), below(5, 512, 200), mask(512, 200))
def ranked_pairs(scores: Tensor, grades: Tensor, keep: Tensor) -> Tensor:
    better = (grades[:, :, None] > grades[:, None]) & keep[:, :, None] & keep[:, None]
    cost = F.softplus(-(scores[:, :, None] - scores[:, None]))
    return (cost * better).sum() / better.sum().clamp(min=1)


@block(full(4096, 4096))
def other_views(scores: Tensor) -> Tensor:
    same = torch.eye(4096, dtype=torch.bool, device=scores.device)
    scores = (scores / 0.5).masked_fill(same, -1e9)
    positive = torch.cat((scores.diagonal(2048), scores.diagonal(-2048)))
    return (torch.logsumexp(scores, -1) - positive).mean()


@block(full(32, 512, 64), full(32, 512, 64), given(32, 512, 64, dtype=FULL))
def gaussian_likelihood(mean: Tensor, log_variance: Tensor, x: Tensor) -> Tensor:
    return 0.5 * (log_variance + (x - mean) ** 2 / torch.exp(log_variance) + math.log(2 * math.pi)).sum((1, 2)).mean()


@block(given(8192, 4096))
def rows_of_bytes(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.float().abs().amax(-1, keepdim=True).clamp(min=1e-8) / 127
    return torch.round(x.float() / scale).clamp(-128, 127).to(torch.int8), scale


@block(half(4096, 4096))
def groups_of_nibbles(weight: Tensor) -> Tensor:
    groups = weight.float().view(-1, 128)
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    scale = ((high - low) / 15).clamp(min=1e-6)
    whole = torch.round((groups - low) / scale).clamp(0, 15)
    return (groups + (whole * scale + low - groups).detach()).view_as(weight).to(weight.dtype)


@block(half(8192, 4096), full(1), full(1, 4096))
def learned_steps(x: Tensor, step: Tensor, offset: Tensor) -> Tensor:
    scaled = (x.float() + offset) / step.abs()
    clipped = scaled.clamp(-8, 7)
    return ((clipped.round() - clipped).detach() + clipped) * step.abs()


@block(full(16, 512, 512), mask(16, 512, 512))
def masked_huber(predicted: Tensor, keep: Tensor) -> Tensor:
    cost = F.smooth_l1_loss(predicted, torch.zeros_like(predicted), reduction="none")
    return (cost * keep).sum((1, 2)) / keep.sum((1, 2)).clamp(min=1)


@block(full(8192, 32, 32))
def categorical_divergence(logits: Tensor) -> Tensor:
    chances = logits.log_softmax(-1)
    return (chances.exp() * (chances + math.log(32))).sum((-1, -2)).mean().clamp(min=1.0)
