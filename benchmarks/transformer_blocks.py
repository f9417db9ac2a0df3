"""Parts of transformers and their like between their products, as people write them. Imports torch, `benchmarks.model_blocks`."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.model_blocks import FULL, below, full, given, half, mask, several, uniform

TRANSFORMERS, block = several()


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
    decay = F.logsigmoid(gate + 5).cumsum(1)
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
