"""Losses and what else ends a model, as people write them. Imports torch, `benchmarks.model_blocks`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.model_blocks import FULL, below, full, given, half, mask, several

LOSSES, block = several()


@block(half(4096, 32000), below(32000, 4096))
def smoothed_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), labels, label_smoothing=0.1)


@block(half(4096, 32000), below(32000, 4096))
def cross_entropy_z_loss(logits: Tensor, labels: Tensor) -> Tensor:
    wide = logits.float()
    return F.cross_entropy(wide, labels) + 1e-4 * torch.logsumexp(wide, -1).pow(2).mean()


@block(half(2048, 32000), given(2048, 32000))
def distillation(student: Tensor, teacher: Tensor) -> Tensor:
    return F.kl_div(F.log_softmax(student.float() / 2, -1), F.softmax(teacher.float() / 2, -1), reduction="batchmean") * 4


@block(half(2, 1024, 32000), below(32000, 2, 1024), mask(2, 1024))
def preference(logits: Tensor, tokens: Tensor, keep: Tensor) -> Tensor:
    chances = logits.float().log_softmax(-1).gather(-1, tokens[..., None]).squeeze(-1)
    totals = (chances * keep).sum(-1)
    return -F.logsigmoid(0.1 * (totals[0] - totals[1]))


@block(half(32, 512, 2048), below(2048, 32, 512), given(32, 512, dtype=FULL), given(32, 512, dtype=FULL), mask(32, 512))
def clipped_policy(logits: Tensor, actions: Tensor, old: Tensor, advantages: Tensor, keep: Tensor) -> Tensor:
    chances = logits.float().log_softmax(-1)
    taken = chances.gather(-1, actions[..., None]).squeeze(-1)
    ratio = torch.exp(taken - old)
    gain = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    spread = -(chances.exp() * chances).sum(-1)
    return -((gain + 0.01 * spread) * keep).sum() / keep.sum()


@block(full(1024, 1024))
def contrastive(scores: Tensor) -> Tensor:
    labels = torch.arange(1024, device=scores.device)
    return (F.cross_entropy(scores / 0.07, labels) + F.cross_entropy(scores.t() / 0.07, labels)) / 2


@block(full(64, 100, 8732), below(2, 64, 100, 8732))
def focal(logits: Tensor, targets: Tensor) -> Tensor:
    targets = targets.float()
    chance = torch.sigmoid(logits)
    cost = F.binary_cross_entropy_with_logits(logits, targets, reduction="none")
    right = chance * targets + (1 - chance) * (1 - targets)
    return ((0.25 * targets + 0.75 * (1 - targets)) * cost * (1 - right) ** 2).sum() / 6400


@block(half(8, 21, 512, 512), below(21, 8, 512, 512))
def segmentation(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), labels, ignore_index=0)


@block(full(8, 4, 256, 256), below(4, 8, 256, 256))
def dice(logits: Tensor, labels: Tensor) -> Tensor:
    chance = logits.softmax(1)
    wanted = F.one_hot(labels, 4).permute(0, 3, 1, 2).float()
    both = (chance * wanted).sum((0, 2, 3))
    return (1 - (2 * both + 1) / (chance.sum((0, 2, 3)) + wanted.sum((0, 2, 3)) + 1)).mean()


@block(full(100000, 4), given(100000, 4, dtype=FULL))
def boxes(a: Tensor, b: Tensor) -> Tensor:
    def area(box: Tensor) -> Tensor:
        return (box[:, 2] - box[:, 0]) * (box[:, 3] - box[:, 1])

    def overlap(low: Tensor, high: Tensor) -> Tensor:
        size = (high - low).clamp(min=0)
        return size[:, 0] * size[:, 1]

    inner = overlap(torch.max(a[:, :2], b[:, :2]), torch.min(a[:, 2:], b[:, 2:]))
    outer = overlap(torch.min(a[:, :2], b[:, :2]), torch.max(a[:, 2:], b[:, 2:]))
    union = area(a) + area(b) - inner
    return (1 - (inner / (union + 1e-6) - (outer - union) / (outer + 1e-6))).mean()


@block(full(16, 3, 512, 512))
def total_variation(x: Tensor) -> Tensor:
    return (x[..., 1:, :] - x[..., :-1, :]).abs().mean() + (x[..., 1:] - x[..., :-1]).abs().mean()


@block(full(4096, 512), full(4096, 512), given(4096, 512, dtype=FULL))
def variational(mean: Tensor, spread: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    drawn = mean + torch.exp(0.5 * spread) * noise
    return drawn, -0.5 * (1 + spread - mean.pow(2) - spread.exp()).sum(1).mean()


@block(half(4096, 1024), given(4096, 1024), given(4096, 1024))
def triplet(anchor: Tensor, near: Tensor, far: Tensor) -> Tensor:
    return F.triplet_margin_loss(anchor.float(), near.float(), far.float())


@block(full(16, 3, 256, 256), given(16, 3, 256, 256, dtype=FULL))
def structural_similarity(x: Tensor, y: Tensor) -> Tensor:
    def around(image: Tensor) -> Tensor:
        return F.avg_pool2d(image, 7, 1)

    mx, my = around(x), around(y)
    vx, vy, both = around(x * x) - mx * mx, around(y * y) - my * my, around(x * y) - mx * my
    return 1 - ((2 * mx * my + 1e-4) * (2 * both + 9e-4) / ((mx * mx + my * my + 1e-4) * (vx + vy + 9e-4))).mean()


@block(full(2048, 64), full(512, 64))
def nearest_codes(x: Tensor, codes: Tensor) -> tuple[Tensor, Tensor]:
    apart = (x[:, None] - codes[None]).pow(2).sum(-1)
    return apart.min(1).values.mean(), apart.argmin(1)


@block(full(64, 2048), given(64, 2048, dtype=FULL), mask(64, 2048))
def advantages(values: Tensor, rewards: Tensor, alive: Tensor) -> Tensor:
    errors = rewards + 0.99 * F.pad(values[:, 1:], (0, 1)) * alive - values
    weights = 0.95 ** torch.arange(2048, device=values.device)
    total = (errors * weights).flip(1).cumsum(1).flip(1) / weights
    return F.huber_loss(total, torch.zeros_like(total))


@block(full(8192, 8192))
def transport(cost: Tensor) -> Tensor:
    plan = -cost / 0.1
    for _ in range(2):
        plan = plan - torch.logsumexp(plan, 1, keepdim=True)
        plan = plan - torch.logsumexp(plan, 0, keepdim=True)
    return (plan.exp() * cost).sum()


@block(half(8192, 4096), half(8192, 4096))
def cosine_rows(a: Tensor, b: Tensor) -> Tensor:
    return (1 - F.cosine_similarity(a.float(), b.float(), dim=-1)).mean()


@block(full(4096, 4096), full(4096, 1))
def weight_norm(direction: Tensor, size: Tensor) -> Tensor:
    return direction * (size / direction.norm(dim=1, keepdim=True))


@block(full(512, 26, 16))
def interactions(x: Tensor) -> tuple[Tensor, Tensor]:
    total = x.sum(1)
    return 0.5 * (total * total - (x * x).sum(1)).sum(-1), x.flatten(1)


@block(half(4096, 4096))
def fake_quantise(x: Tensor) -> Tensor:
    wide = x.float()
    scale = wide.detach().abs().amax(1, keepdim=True) / 127
    rounded = torch.round(wide / scale).clamp(-128, 127) * scale
    return (wide + (rounded - wide).detach()).to(x.dtype)
