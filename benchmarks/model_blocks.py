"""What `benchmarks.blocks` times: parts of well-known models and losses between their products, as people write them. Imports
torch only.

Each is a function of tensors; its gradients are asked for with respect to every input that is ``normal``, with random
tangents.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

Program = Callable[..., "Tensor | tuple[Tensor, ...]"]
HALF, FULL = torch.bfloat16, torch.float32


@dataclass(frozen=True)
class Input:
    """``kind``: ``normal`` random numbers; ``given`` the same without a gradient; ``uniform`` those of (0, 1), without one;
    ``mask`` booleans; ``below`` indices below ``bound``."""

    shape: tuple[int, ...]
    dtype: torch.dtype = HALF
    kind: str = "normal"
    bound: int = 0


@dataclass(frozen=True)
class Block:
    name: str
    program: Program
    inputs: tuple[Input, ...]


BLOCKS: list[Block] = []


def block(*inputs: Input) -> Callable[[Program], Program]:
    def named(program: Program) -> Program:
        BLOCKS.append(Block(program.__name__, program, inputs))
        return program

    return named


def half(*shape: int) -> Input:
    return Input(shape)


def full(*shape: int) -> Input:
    return Input(shape, FULL)


def given(*shape: int, dtype: torch.dtype = HALF) -> Input:
    return Input(shape, dtype, "given")


def uniform(*shape: int, dtype: torch.dtype = FULL) -> Input:
    return Input(shape, dtype, "uniform")


def mask(*shape: int) -> Input:
    return Input(shape, torch.bool, "mask")


def below(bound: int, *shape: int) -> Input:
    return Input(shape, torch.int64, "below", bound)


# Transformers


@block(half(8, 1024, 5120))
def swiglu_chunks(x: Tensor) -> Tensor:
    gate, value = x.chunk(2, -1)
    return F.silu(gate) * value


@block(half(8, 1024, 5120))
def geglu_tanh(x: Tensor) -> Tensor:
    gate, value = x.chunk(2, -1)
    return F.gelu(gate, approximate="tanh") * value


@block(half(8, 1024, 1024), half(8, 1024, 1024), half(1024))
def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    wide = total.float()
    return total, (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * weight


@block(half(8, 1024, 1024), half(64), given(1024, 32), given(1024, 32))
def norm_rotary_heads(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    heads = x.view(8, 1024, 16, 64)
    heads = F.rms_norm(heads, (64,), weight, 1e-6).transpose(1, 2)
    a, b = heads.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


@block(half(8, 16, 1024, 64), given(1024, 32, dtype=FULL), given(1024, 32, dtype=FULL))
def rotary_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.float().unflatten(-1, (32, 2)).unbind(-1)
    return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2).to(x.dtype)


@block(half(4, 1024, 3072))
def split_heads(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = x.view(4, 1024, 3, 16, 64).permute(2, 0, 3, 1, 4)
    return q * 0.125, k.transpose(-1, -2).contiguous(), v.contiguous()


@block(half(8, 16, 512, 512))
def causal_softmax(scores: Tensor) -> Tensor:
    hidden = torch.ones(512, 512, dtype=torch.bool, device=scores.device).triu(1)
    return (scores * 0.125).masked_fill(hidden, float("-inf")).softmax(-1)


@block(half(8, 16, 512, 512))
def alibi_softmax(scores: Tensor) -> Tensor:
    slopes = torch.exp2(-torch.arange(1, 17, device=scores.device) / 2)[:, None, None]
    places = torch.arange(512, device=scores.device)
    far = (places[None] - places[:, None]).to(torch.float32)
    return (scores.float() + slopes * far).masked_fill(far > 0, float("-inf")).softmax(-1).to(scores.dtype)


@block(half(8, 12, 512, 512), full(32, 12), mask(8, 512))
def relative_bias_softmax(scores: Tensor, table: Tensor, keep: Tensor) -> Tensor:
    places = torch.arange(512, device=scores.device)
    far = (places[None] - places[:, None]).clamp(-15, 16) + 15
    bias = table[far].permute(2, 0, 1)[None]
    logits = scores.float() + bias + torch.where(keep, 0.0, -1e9)[:, None, None]
    return logits.softmax(-1).to(scores.dtype)


@block(half(4, 8, 1024, 1024))
def window_softmax(scores: Tensor) -> Tensor:
    places = torch.arange(1024, device=scores.device)
    far = places[:, None] - places[None]
    return scores.masked_fill((far < 0) | (far >= 256), -1e4).softmax(-1)


@block(half(4096, 2048))
def soft_cap(x: Tensor) -> Tensor:
    return 30 * torch.tanh(x / 30)


@block(half(16, 1024, 1152), half(16, 1024, 1152), half(16, 6, 1152))
def adaptive_norm(x: Tensor, branch: Tensor, modulation: Tensor) -> tuple[Tensor, Tensor]:
    shift, scale, gate = modulation[:, 0:1], modulation[:, 1:2], modulation[:, 2:3]
    total = x + gate * branch
    return total, F.layer_norm(total, (1152,), eps=1e-6) * (1 + scale) + shift


@block(half(64, 197, 768), half(64, 197, 768), half(768), uniform(64, 1, 1))
def layer_scale_drop_path(x: Tensor, branch: Tensor, scale: Tensor, draw: Tensor) -> Tensor:
    return x + scale * branch * (draw < 0.9).to(x.dtype) / 0.9


@block(half(64, 196, 768), half(1, 1, 768), half(1, 197, 768), half(768), half(768))
def class_token_norm(patches: Tensor, token: Tensor, places: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    x = torch.cat((token.expand(64, -1, -1), patches), 1) + places
    return F.layer_norm(x, (768,), weight, bias)


@block(half(32, 56, 56, 96), half(96), half(96))
def swin_windows(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    x = F.layer_norm(x, (96,), weight, bias)
    x = torch.roll(x, (-3, -3), (1, 2))
    return x.view(32, 8, 7, 8, 7, 96).permute(0, 1, 3, 2, 4, 5).reshape(-1, 49, 96)


@block(half(2048, 49, 96), half(32, 56, 56, 96))
def swin_windows_back(windows: Tensor, residual: Tensor) -> Tensor:
    x = windows.view(32, 8, 8, 7, 7, 96).permute(0, 1, 3, 2, 4, 5).reshape(32, 56, 56, 96)
    return residual + torch.roll(x, (3, 3), (1, 2))


@block(half(64, 56, 56, 96), half(384), half(384))
def swin_merge(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    x = torch.cat([x[:, 0::2, 0::2], x[:, 1::2, 0::2], x[:, 0::2, 1::2], x[:, 1::2, 1::2]], -1)
    return F.layer_norm(x, (384,), weight, bias)


@block(half(16, 1024, 1024), half(1024), half(1024))
def token_shift(x: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    before = F.pad(x, (0, 0, 1, -1))
    return x * first + before * (1 - first), x * second + before * (1 - second)


@block(full(8, 1024, 512), full(8, 1024, 512))
def decayed_sums(x: Tensor, gate: Tensor) -> Tensor:
    decay = F.logsigmoid(gate).cumsum(1)
    return (torch.exp(decay) * x).cumsum(1) * torch.exp(-decay)


@block(half(16384, 64), uniform(16384, 64))
def noisy_top_gate(logits: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    noisy = logits.float() - torch.log(-torch.log(noise))
    values, chosen = noisy.topk(2, -1)
    return values.softmax(-1), chosen


@block(half(16384, 64))
def load_balance(logits: Tensor) -> Tensor:
    shares = logits.float().softmax(-1)
    load = F.one_hot(shares.argmax(-1), 64).float().mean(0)
    return (shares.mean(0) * load).sum() * 64 + 1e-3 * torch.logsumexp(logits.float(), -1).pow(2).mean()


@block(half(16, 512, 768), mask(16, 512))
def masked_mean(x: Tensor, keep: Tensor) -> Tensor:
    keep = keep[..., None].to(x.dtype)
    return F.normalize((x * keep).sum(1) / keep.sum(1).clamp(min=1), dim=-1)


@block(half(30522, 768), half(512, 768), half(768), half(768), below(30522, 32, 512), below(512, 32, 512))
def embeddings_norm(words: Tensor, places: Tensor, weight: Tensor, bias: Tensor, tokens: Tensor, positions: Tensor) -> Tensor:
    return F.layer_norm(F.embedding(tokens, words) + F.embedding(positions, places), (768,), weight, bias)


@block(full(2048, 1024))
def timestep_features(steps: Tensor) -> Tensor:
    frequencies = torch.exp(-math.log(10000) * torch.arange(128, device=steps.device) / 128)
    angles = steps[:, :1] * frequencies
    return torch.cat((angles.cos(), angles.sin()), -1)


# Convolutional networks


@block(half(32, 128, 56, 56), half(32, 128, 56, 56))
def residual_relu(x: Tensor, branch: Tensor) -> Tensor:
    return F.relu(x + branch)


@block(half(32, 256, 28, 28), half(256), half(256), half(32, 256, 28, 28))
def batch_norm_add_relu(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
    return F.relu(F.batch_norm(x, None, None, weight, bias, True) + residual)


@block(half(32, 256, 28, 28), half(32, 16, 1, 1), half(256, 16))
def squeeze_excite(x: Tensor, squeezed: Tensor, expand: Tensor) -> tuple[Tensor, Tensor]:
    gate = torch.sigmoid((F.relu(squeezed.flatten(1))[:, None] * expand[None]).sum(-1))
    return x * gate[:, :, None, None], x.mean((2, 3))


@block(half(16, 256, 64, 64), half(16, 512))
def film(x: Tensor, modulation: Tensor) -> Tensor:
    scale, shift = modulation[:, :, None, None].chunk(2, 1)
    return F.silu(F.group_norm(x, 32) * (1 + scale) + shift)


@block(half(16, 256, 64, 64), half(256), half(256))
def group_norm_silu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.silu(F.group_norm(x, 32, weight, bias))


@block(half(16, 64, 128, 128))
def instance_norm_relu(x: Tensor) -> Tensor:
    return F.leaky_relu(F.instance_norm(x), 0.2)


@block(half(32, 96, 56, 56), half(96), half(96))
def channel_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x.permute(0, 2, 3, 1), (96,), weight, bias).permute(0, 3, 1, 2)


@block(half(32, 384, 28, 28), half(1, 384, 1, 1), half(1, 384, 1, 1))
def global_response_norm(x: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
    size = x.float().pow(2).sum((2, 3), keepdim=True).sqrt()
    return x + (gamma * (x * (size / (size.mean(1, keepdim=True) + 1e-6)).to(x.dtype)) + beta)


@block(half(32, 128, 28, 28))
def channel_shuffle(x: Tensor) -> Tensor:
    return F.relu(x).view(32, 2, 64, 28, 28).transpose(1, 2).reshape(32, 128, 28, 28)


@block(half(8, 256, 64, 64))
def pixel_shuffle(x: Tensor) -> Tensor:
    return F.leaky_relu(F.pixel_shuffle(x, 2), 0.1)


@block(half(16, 64, 128, 128))
def space_to_depth(x: Tensor) -> Tensor:
    return F.pixel_unshuffle(F.silu(x), 2)


@block(half(16, 128, 32, 32), half(16, 64, 64, 64))
def up_and_join(low: Tensor, high: Tensor) -> Tensor:
    return F.relu(torch.cat((F.interpolate(low, scale_factor=2, mode="nearest"), high), 1))


@block(half(32, 64, 112, 112))
def pool_relu(x: Tensor) -> Tensor:
    return F.max_pool2d(F.relu(x), 3, 2, 1)


@block(half(16, 512, 64, 64))
def pixel_norm(x: Tensor) -> Tensor:
    return F.leaky_relu(x * torch.rsqrt(x.float().pow(2).mean(1, keepdim=True) + 1e-8).to(x.dtype), 0.2)


@block(half(16, 256, 64, 64), half(16, 256, 64, 64), half(16, 2, 64, 64))
def attention_of_two(first: Tensor, second: Tensor, logits: Tensor) -> Tensor:
    shares = logits.float().softmax(1).to(first.dtype)
    return first * shares[:, :1] + second * shares[:, 1:]


@block(Input((128, 3, 224, 224), torch.int64, "below", 256), uniform(128, 1, 1, 1), mask(128))
def augment_images(images: Tensor, share: Tensor, flipped: Tensor) -> Tensor:
    mean = torch.tensor([0.485, 0.456, 0.406], device=images.device)[:, None, None]
    deviation = torch.tensor([0.229, 0.224, 0.225], device=images.device)[:, None, None]
    x = (images.to(torch.uint8).float() / 255 - mean) / deviation
    x = torch.where(flipped[:, None, None, None], x.flip(-1), x)
    return (x * share + x.flip(0) * (1 - share)).to(torch.bfloat16)


@block(half(8, 64, 128, 128))
def blur_pool(x: Tensor) -> Tensor:
    x = F.pad(x, (1, 1, 1, 1))
    rows = x[:, :, :-2:2] + 2 * x[:, :, 1:-1:2] + x[:, :, 2::2]
    return (rows[..., :-2:2] + 2 * rows[..., 1:-1:2] + rows[..., 2::2]) / 16


@block(half(16, 96, 56, 56), half(96))
def prelu_scale(x: Tensor, slope: Tensor) -> Tensor:
    return F.prelu(x, slope)


# Losses


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
