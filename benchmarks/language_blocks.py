"""More parts of models of language and of what chooses tokens, as people write them. Imports torch, `benchmarks.model_blocks`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.model_blocks import FULL, below, full, given, half, mask, several, uniform

LANGUAGE, block = several()


@block(half(16384, 768), below(2, 16384), half(2, 768), half(768), half(768))
def typed_embeddings(x: Tensor, kinds: Tensor, table: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x + table[kinds], (768,), weight, bias)


@block(half(32, 384, 2), below(384, 32), below(384, 32))
def spans(logits: Tensor, first: Tensor, last: Tensor) -> Tensor:
    begin, end = logits.float().split(1, -1)
    return (F.cross_entropy(begin.squeeze(-1), first) + F.cross_entropy(end.squeeze(-1), last)) / 2


@block(half(4, 16, 512, 513))
def differential_softmax(scores: Tensor) -> Tensor:
    first, second = scores.float().softmax(-1).chunk(2, 1)
    return (first - 0.8 * second).to(scores.dtype)


@block(half(4, 16, 512, 512), half(16))
def softmax_with_sink(scores: Tensor, sink: Tensor) -> Tensor:
    joined = torch.cat((scores, sink.view(1, 16, 1, 1).expand(4, 16, 512, 1)), -1)
    return (joined - joined.amax(-1, keepdim=True)).float().softmax(-1)[..., :-1].to(scores.dtype)


@block(half(4, 16, 512, 512))
def sigmoid_attention(scores: Tensor) -> Tensor:
    before = torch.ones(512, 512, dtype=torch.bool, device=scores.device).tril()
    return torch.sigmoid(scores.float() - 6.24).masked_fill(~before, 0).to(scores.dtype)


@block(half(4, 1024, 1024), half(4, 1024, 1024))
def sliding_window(scores: Tensor, other: Tensor) -> Tensor:
    place = torch.arange(1024, device=scores.device)
    apart = place[:, None] - place
    return (scores + other).masked_fill((apart < 0) | (apart >= 256), float("-inf")).softmax(-1)


@block(full(512, 32000), full(512, 400), full(512, 1), below(32000, 512, 400))
def pointer_mixture(logits: Tensor, attention: Tensor, gate: Tensor, sources: Tensor) -> Tensor:
    copied = torch.sigmoid(gate)
    words = (1 - copied) * logits.softmax(-1)
    return torch.log(words.scatter_add(1, sources, copied * attention.softmax(-1)) + 1e-9)


@block(full(64, 50257), below(50257, 64, 256))
def repetition_penalty(logits: Tensor, seen: Tensor) -> Tensor:
    chosen = logits.gather(1, seen)
    return logits.scatter(1, seen, torch.where(chosen < 0, chosen * 1.2, chosen / 1.2))


@block(full(8192, 64))
def places_in_experts(logits: Tensor) -> tuple[Tensor, Tensor]:
    chosen = F.one_hot(logits.argmax(-1), 64)
    place = (chosen.cumsum(0) - 1) * chosen
    return (logits.softmax(-1) * chosen).sum(-1) * (place.sum(-1) < 160), place.sum(-1)


@block(half(8, 1024, 3 * 1024), half(64), half(64))
def normed_queries(x: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = x.view(8, 1024, 3, 16, 64).permute(2, 0, 3, 1, 4)
    return F.rms_norm(query, (64,), first, 1e-6) * 0.125, F.rms_norm(key, (64,), second, 1e-6), value.contiguous()


@block(half(8, 1024, 8, 64), half(1024, 32), half(1024, 32))
def rotary_halves_in_float(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.float().chunk(2, -1)
    cos, sin = cos[None, :, None].float(), sin[None, :, None].float()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).type_as(x).transpose(1, 2).contiguous()


@block(half(8, 16, 1024, 64), half(1024, 16), half(1024, 16))
def rotary_part(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    turned, kept = x[..., :32], x[..., 32:]
    half_turned = torch.cat((-turned[..., 16:], turned[..., :16]), -1)
    cos, sin = torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)
    return torch.cat((turned * cos + half_turned * sin, kept), -1)


@block(half(16384, 1024), half(16384, 1024), mask(16384, 1), half(1024))
def parallel_residual(x: Tensor, branch: Tensor, keep: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    x = x + (branch * keep) / 0.7
    return x, F.layer_norm(x, (1024,), weight)


@block(half(8192, 32000), below(32000, 8192), mask(8192))
def weighted_tokens(logits: Tensor, targets: Tensor, keep: Tensor) -> Tensor:
    apart = F.cross_entropy(logits.float(), targets, reduction="none")
    return (apart * keep).sum() / keep.sum().clamp(min=1)


@block(half(4096, 32000))
def entropy_of_tokens(logits: Tensor) -> Tensor:
    log = logits.float().log_softmax(-1)
    return -(log.exp() * log).sum(-1).mean()


@block(half(16, 512, 1024), mask(16, 512, 1))
def pooled_and_normed(x: Tensor, keep: Tensor) -> Tensor:
    mean = (x * keep).sum(1) / keep.sum(1).clamp(min=1e-9)
    return F.normalize(mean, dim=-1)


@block(half(16, 512, 1024), mask(16, 512))
def largest_of_tokens(x: Tensor, keep: Tensor) -> Tensor:
    return x.masked_fill(~keep[..., None], -1e4).amax(1)


@block(half(8, 2048, 1024), half(4, 1024), half(1024))
def convolved_tokens(x: Tensor, taps: Tensor, bias: Tensor) -> Tensor:
    padded = F.pad(x, (0, 0, 3, 0))
    return F.silu(sum(padded[:, one : one + 2048] * taps[one] for one in range(4)) + bias)


@block(half(16384, 2048), half(16384, 2048), half(2048), half(2048))
def clamped_swiglu(x: Tensor, gate: Tensor, first: Tensor, second: Tensor) -> Tensor:
    gate, x = (gate + first).clamp(max=7.0), (x + second).clamp(-7.0, 7.0)
    return gate * torch.sigmoid(1.702 * gate) * (x + 1)


@block(full(4096, 8), below(8, 4096, 2), half(4096, 2, 1024))
def two_experts_joined(logits: Tensor, chosen: Tensor, outputs: Tensor) -> Tensor:
    share = logits.softmax(-1).gather(1, chosen)
    share = share / share.sum(-1, keepdim=True)
    return (outputs * share[..., None].to(outputs.dtype)).sum(1)


@block(half(4, 2048, 16, 64), uniform(4, 2048, 16, dtype=FULL))
def gated_delta(x: Tensor, decay: Tensor) -> tuple[Tensor, Tensor]:
    log = torch.log(decay).view(4, 32, 64, 16).cumsum(2)
    return x.view(4, 32, 64, 16, 64) * log.exp()[..., None], (log[:, :, -1:] - log).exp()


@block(given(2, 1024, 2048, dtype=torch.float16), given(2048, dtype=torch.float16))
def scaled_norm(x: Tensor, weight: Tensor) -> Tensor:
    x = x.float()
    return (weight * (x / (x.norm(dim=-1, keepdim=True) * 2048**-0.5 + 1e-6))).to(torch.float16)


@block(half(16, 131072), below(131072, 16))
def next_words(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), target)
