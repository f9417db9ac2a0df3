"""A GPT-2 style language model in plain PyTorch. Imports torch only.

Radford et al., "Language Models are Unsupervised Multitask Learners" (2019): pre-norm blocks, learned positions, tied head.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Config:
    vocabulary: int = 256
    context: int = 128
    layers: int = 4
    width: int = 192
    heads: int = 6
    dropout: float = 0.0

    def with_(self, **changes: float) -> Config:
        return replace(self, **changes)


SIZES = {
    "tiny": Config(context=32, layers=2, width=64, heads=2),
    "small": Config(),
    "gpt2": Config(context=1024, layers=12, width=768, heads=12),
}


class Attention(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads, self.dropout = config.heads, config.dropout
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        p = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(config.width), nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.up, self.down = nn.Linear(config.width, 4 * config.width), nn.Linear(4 * config.width, config.width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh")))


class GPT(nn.Module):
    """Next-token logits of shape [batch, length, vocabulary] for int64 tokens of shape [batch, length]."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        std = 0.5 * config.width**-0.5  # 0.018 at GPT-2's width, where the paper takes 0.02
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=std)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        for block in self.blocks:
            for last in (block.attention.out, block.down):
                nn.init.normal_(last.weight, std=std / (2 * config.layers) ** 0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        x = self.dropout(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross entropy in nats per token; ``targets`` is int64 of ``tokens``' shape."""
        return F.cross_entropy(self(tokens).flatten(0, 1), targets.flatten())

    @torch.no_grad()
    def generate(self, prompt: Tensor, count: int, generator: torch.Generator, temperature: float = 0.8) -> Tensor:
        """``count`` sampled tokens after ``prompt`` (int64 [context], on the CPU, as is the result).

        The window keeps its length, so every step has the same shapes; tokens are drawn on the CPU, so that devices agree.
        """
        device, window, drawn = self.head.weight.device, prompt.clone(), []
        for _ in range(count):
            logits = self(window[None].to(device))[0, -1].float().cpu()
            token = torch.multinomial((logits / temperature).softmax(0), 1, generator=generator)
            drawn.append(token)
            window = torch.cat([window[1:], token])
        return torch.cat(drawn)
