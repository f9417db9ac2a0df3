"""Parts of models of sequences, recurrent ones and what surrounds decoding, as people write them. Imports torch,
`benchmarks.model_blocks`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.model_blocks import FULL, below, full, given, half, mask, several, uniform

SEQUENCES, block = several()


@block(half(8192, 4096))
def squared_relu(x: Tensor) -> Tensor:
    return F.relu(x).square()


@block(half(8, 1024, 2048), half(8, 1024, 2048), half(8, 1024, 2048), full(2048), half(2048))
def gated_state(y: Tensor, u: Tensor, z: Tensor, skip: Tensor, weight: Tensor) -> Tensor:
    gated = (y.float() + u.float() * skip) * F.silu(z.float())
    return (gated * torch.rsqrt(gated.square().mean(-1, keepdim=True) + 1e-5)).to(y.dtype) * weight


@block(half(8, 1024, 16, 64), half(8, 1024, 1024))
def retention_out(x: Tensor, gate: Tensor) -> Tensor:
    return F.silu(gate) * F.layer_norm(x, (64,)).flatten(2)


@block(half(8, 2048, 1024), half(4, 1024), half(1024))
def short_convolution(x: Tensor, taps: Tensor, bias: Tensor) -> Tensor:
    return F.silu(sum(F.pad(x, (0, 0, back, -back)) * taps[back] for back in range(4)) + bias)


@block(half(16, 512, 4096), half(1, 512, 1))
def gated_channels(x: Tensor, bias: Tensor) -> Tensor:
    filtered, gate = (x + bias).chunk(2, 1)
    return torch.tanh(filtered) * torch.sigmoid(gate)


@block(full(4096, 4096), full(4096), full(4096, 1024))
def lstm_cell(gates: Tensor, bias: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
    keep_in, forget, new, out = (gates + bias).chunk(4, 1)
    cell = torch.sigmoid(forget) * cell + torch.sigmoid(keep_in) * torch.tanh(new)
    return torch.sigmoid(out) * torch.tanh(cell), cell


@block(full(8192, 1536), full(8192, 1536), full(8192, 512))
def gru_cell(given_gates: Tensor, state_gates: Tensor, state: Tensor) -> Tensor:
    r, z, n = given_gates.chunk(3, 1)
    r_state, z_state, n_state = state_gates.chunk(3, 1)
    update = torch.sigmoid(z + z_state)
    return (1 - update) * torch.tanh(n + torch.sigmoid(r + r_state) * n_state) + update * state


@block(full(4, 8, 1024, 64), full(4, 8, 1024, 64))
def linear_attention_weights(query: Tensor, key: Tensor) -> Tensor:
    query, key = F.elu(query) + 1, F.elu(key) + 1
    return query / (query * key.cumsum(2)).sum(-1, keepdim=True)


@block(half(8, 12, 2048, 64), half(8, 12, 2048, 64))
def efficient_attention_weights(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    return query.softmax(-1) * 64**-0.5, key.softmax(-2)


@block(given(64, 80, 3000, dtype=FULL))
def log_mel(power: Tensor) -> Tensor:
    logs = power.square().clamp(min=1e-10).log10()
    return (torch.maximum(logs, logs.amax((1, 2), keepdim=True) - 8) + 4) / 4


@block(full(64, 80, 3000), below(60, 64, 1, 1), below(2800, 64, 1, 1))
def masked_bands(x: Tensor, band: Tensor, start: Tensor) -> Tensor:
    bands, frames = torch.arange(80, device=x.device)[None, :, None], torch.arange(3000, device=x.device)[None, None]
    hidden = ((bands >= band) & (bands < band + 20)) | ((frames >= start) & (frames < start + 200))
    return torch.where(hidden, x.mean((1, 2), keepdim=True), x)


@block(full(128, 512, 321), full(321), full(321))
def reversible_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    mean = x.mean(1, keepdim=True).detach()
    spread = torch.sqrt(x.var(1, keepdim=True, unbiased=False) + 1e-5).detach()
    return (x - mean) / spread * weight + bias


@block(full(64, 512, 128))
def moving_average(x: Tensor) -> tuple[Tensor, Tensor]:
    around = torch.cat((x[:, :1].repeat(1, 12, 1), x, x[:, -1:].repeat(1, 12, 1)), 1)
    trend = F.avg_pool1d(around.transpose(1, 2), 25, 1).transpose(1, 2)
    return x - trend, trend


@block(half(8, 32, 1024, 128), given(4096, 128), given(4096, 128), below(4096, 8, 1024))
def rotary_at_positions(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> Tensor:
    cos, sin = cos[positions][:, None], sin[positions][:, None]
    turned = torch.cat((-x[..., 64:], x[..., :64]), -1)
    return x * cos + turned * sin


@block(full(4, 1024, 32, 128), given(1024, 64, 2, dtype=FULL))
def rotary_complex(x: Tensor, angles: Tensor) -> Tensor:
    turns = torch.view_as_complex(angles)[None, :, None]
    return torch.view_as_real(torch.view_as_complex(x.view(4, 1024, 32, 64, 2)) * turns).flatten(3)


@block(half(4, 1024, 32, 128), full(32, 1, 1))
def cosine_heads(x: Tensor, scale: Tensor) -> Tensor:
    return (F.normalize(x.transpose(1, 2).float(), dim=-1) * scale.clamp(max=4.6).exp()).to(x.dtype)


@block(half(8, 8, 1024, 128))
def repeated_heads(x: Tensor) -> Tensor:
    return x[:, :, None].expand(-1, -1, 4, -1, -1).reshape(8, 32, 1024, 128) * 128**-0.5


@block(half(2, 16, 1024, 1024), below(4, 2, 1024))
def packed_softmax(scores: Tensor, document: Tensor) -> Tensor:
    places = torch.arange(1024, device=scores.device)
    seen = (document[:, :, None] == document[:, None]) & (places[:, None] >= places)
    bias = torch.zeros_like(seen, dtype=scores.dtype).masked_fill_(~seen, torch.finfo(scores.dtype).min)
    return (scores + bias[:, None]).float().softmax(-1).to(scores.dtype)


@block(full(8192, 2, 320), uniform(8192, 2, 320))
def straight_through_choice(logits: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    soft = ((logits - torch.log(-torch.log(noise))) / 0.9).softmax(-1)
    hard = torch.zeros_like(soft).scatter_(-1, soft.argmax(-1, keepdim=True), 1.0)
    used = logits.softmax(-1).mean(0)
    return hard - soft.detach() + soft, torch.exp(-(used * torch.log(used + 1e-7)).sum(-1)).sum()


@block(half(32768, 1024), full(16384, 2), below(32768, 32768))
def combined_experts(outputs: Tensor, shares: Tensor, order: Tensor) -> Tensor:
    return (outputs[order].view(16384, 2, 1024) * shares[..., None].to(outputs.dtype)).sum(1)


@block(full(16, 512, 48), full(48, 48), mask(16, 512))
def chain_of_tags(emissions: Tensor, transitions: Tensor, keep: Tensor) -> Tensor:
    score = emissions[0]
    for step in range(1, 8):
        reached = torch.logsumexp(score[:, :, None] + transitions[None], 1) + emissions[step]
        score = torch.where(keep[step][:, None], reached, score)
    return torch.logsumexp(score, -1).mean()


@block(given(64, 50257, dtype=FULL), below(50257, 64, 256))
def sampling_filters(logits: Tensor, before: Tensor) -> Tensor:
    seen = logits.gather(1, before)
    logits = logits.scatter(1, before, torch.where(seen < 0, seen * 1.2, seen / 1.2)) / 0.8
    ordered, places = logits.sort(-1, descending=True)
    chances = ordered.softmax(-1)
    ordered = ordered.masked_fill(chances.cumsum(-1) - chances > 0.9, -1e9)
    return torch.empty_like(logits).scatter_(1, places, ordered).softmax(-1)


@block(half(16, 512, 768), full(16, 512))
def attention_pool(x: Tensor, scores: Tensor) -> Tensor:
    return (x.float() * scores.softmax(1)[..., None]).sum(1)


@block(half(8192, 2048), half(8192, 2048), uniform(8192, 1))
def highway(x: Tensor, gate: Tensor, chance: Tensor) -> Tensor:
    share = torch.sigmoid(gate - 2)
    return torch.where(chance < 0.8, share * F.gelu(x) + (1 - share) * x, x)
