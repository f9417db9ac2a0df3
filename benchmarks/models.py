"""The models that are trained against torch.compile, their sizes, precision, optimizer and data. Imports torch, transformers.

Each is a module whose ``forward(*batch)`` gives the loss. Batches come from a seeded generator on the CPU and hold something to
learn: tokens follow Zipf's law, labels depend on the inputs. transformers and torchvision are imported where they are needed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

Sizes = dict[str, int]
ATTENTION = "sdpa_without_masks"


@dataclass(frozen=True)
class Task:
    """One model's training. ``precision``: autocast (bfloat16), bfloat16 or float32; ``items``: of a step, such as tokens."""

    build: Callable[[Sizes, float], nn.Module]
    draw: Callable[[Sizes, Generator], tuple[Tensor, ...]]
    sizes: Sizes
    tiny: Sizes
    precision: str
    unit: str
    optimizer: str = "AdamW"
    dropout: float = 0.0
    channels_last: bool = False

    def items(self, sizes: Sizes) -> int:
        return sizes["batch"] * sizes.get("length", 1)


def attention() -> str:
    """Names PyTorch's attention to transformers as one that needs no mask.

    With masks transformers reads a value of each batch in eager mode, and hands a full mask instead of ``is_causal`` to compiled
    attention. Without, every contestant gets the fastest kernel.
    """
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register(ATTENTION, sdpa_attention_forward)
    return ATTENTION


class LanguageModel(nn.Module):
    """A model of transformers that takes its tokens, or other labels, and computes the loss itself."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Tensor:
        return self.model(input_ids=tokens, labels=tokens if labels is None else labels).loss


class Classifier(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        found = self.model(images)
        logits = found if isinstance(found, Tensor) else found.logits
        return F.cross_entropy(logits.float(), labels)  # autocast's lists for CPUs and for GPUs differ here


def gpt2(sizes: Sizes, dropout: float) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=sizes["vocabulary"], n_positions=sizes["length"], n_layer=sizes["layers"],
                        n_embd=sizes["width"], n_head=sizes["heads"], resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout,
                        use_cache=False, bos_token_id=0, eos_token_id=0, loss_type="ForCausalLM", attn_implementation=attention())
    return LanguageModel(GPT2LMHeadModel(config))


def llama(sizes: Sizes, dropout: float) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(vocab_size=sizes["vocabulary"], max_position_embeddings=sizes["length"], hidden_size=sizes["width"],
                         num_hidden_layers=sizes["layers"], num_attention_heads=sizes["heads"], intermediate_size=sizes["inner"],
                         attention_dropout=dropout, use_cache=False, bos_token_id=0, eos_token_id=0,
                         attn_implementation=attention())
    return LanguageModel(LlamaForCausalLM(config))


def bert(sizes: Sizes, dropout: float) -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(vocab_size=sizes["vocabulary"], max_position_embeddings=sizes["length"], hidden_size=sizes["width"],
                        num_hidden_layers=sizes["layers"], num_attention_heads=sizes["heads"], intermediate_size=sizes["inner"],
                        hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout, attn_implementation=attention())
    return LanguageModel(BertForMaskedLM(config))


def vit(sizes: Sizes, dropout: float) -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(image_size=sizes["pixels"], patch_size=sizes["patch"], hidden_size=sizes["width"],
                       num_hidden_layers=sizes["layers"], num_attention_heads=sizes["heads"], intermediate_size=sizes["inner"],
                       hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout, num_labels=sizes["classes"],
                       attn_implementation=attention())
    return Classifier(ViTForImageClassification(config))


def resnet(sizes: Sizes, dropout: float) -> nn.Module:
    """ResNet-50 of torchvision; without torchvision, or with few layers, a small net of the same blocks."""
    if sizes["layers"] == 50:
        from torchvision.models import resnet50

        return Classifier(resnet50(num_classes=sizes["classes"]))
    width = sizes["width"]
    stem = [nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2, padding=1)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, sizes["classes"])]
    return Classifier(nn.Sequential(*stem, Bottleneck(width, width, 1), Bottleneck(4 * width, width, 2), *head))


class Bottleneck(nn.Module):
    """He et al., "Deep Residual Learning for Image Recognition" (2015), figure 5."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.norm2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.norm3 = nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width)
        self.shortcut = nn.Sequential(nn.Conv2d(inputs, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)), inplace=True)
        y = F.relu(self.norm2(self.conv2(y)), inplace=True)
        return F.relu(self.norm3(self.conv3(y)) + self.shortcut(x), inplace=True)


class Recommender(nn.Module):
    """Naumov et al., "Deep Learning Recommendation Model" (2019): embeddings, a bottom MLP, dot products of pairs, a top MLP."""

    DENSE = 13

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        tables, width = sizes["tables"], sizes["width"]
        self.tables = nn.ModuleList(nn.Embedding(sizes["rows"], width) for _ in range(tables))
        self.bottom = perceptron([self.DENSE, 512, 256, width])
        self.top = nn.Sequential(perceptron([width + (tables + 1) * tables // 2, 512, 256]), nn.Linear(256, 1))
        self.register_buffer("pairs", torch.tril_indices(tables + 1, tables + 1, -1), persistent=False)

    def forward(self, dense: Tensor, indices: Tensor, clicks: Tensor) -> Tensor:
        """``dense`` [batch, 13], ``indices`` [tables, batch], ``clicks`` [batch]."""
        bottom = self.bottom(dense)
        found = torch.stack([bottom, *(table(one) for table, one in zip(self.tables, indices))], dim=1)
        products = torch.bmm(found, found.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        logits = self.top(torch.cat([bottom, products], dim=1)).squeeze(1)
        return F.binary_cross_entropy_with_logits(logits, clicks)


def perceptron(widths: list[int]) -> nn.Sequential:
    return nn.Sequential(*(part for a, b in zip(widths, widths[1:]) for part in (nn.Linear(a, b), nn.ReLU())))


class Regression(nn.Module):
    """Many small layers: what launching costs."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        width = sizes["width"]
        self.layers = nn.Sequential(*(part for _ in range(sizes["layers"])
                                      for part in (nn.Linear(width, width), nn.LayerNorm(width), nn.GELU())))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(self.layers(x), target)


class RecurrentModel(nn.Module):
    """Zaremba et al., "Recurrent Neural Network Regularization" (2014): a language model of LSTMs with dropout around them."""

    def __init__(self, sizes: Sizes, dropout: float) -> None:
        super().__init__()
        width = sizes["width"]
        self.tokens, self.drop = nn.Embedding(sizes["vocabulary"], width), nn.Dropout(dropout)
        self.layers = nn.LSTM(width, width, sizes["layers"], batch_first=True, dropout=dropout)
        self.head = nn.Linear(width, sizes["vocabulary"])

    def forward(self, tokens: Tensor) -> Tensor:
        out, _ = self.layers(self.drop(self.tokens(tokens[:, :-1])))
        return F.cross_entropy(self.head(self.drop(out)).flatten(0, 1), tokens[:, 1:].flatten())


def zipf(vocabulary: int, shape: tuple[int, ...], generator: Generator) -> Tensor:
    """Tokens whose frequency falls with their number, as in text: a model learns that within a few steps."""
    return (vocabulary ** torch.rand(shape, generator=generator)).long().clamp_(1, vocabulary) - 1


def draw_tokens(sizes: Sizes, generator: Generator) -> tuple[Tensor, ...]:
    return (zipf(sizes["vocabulary"], (sizes["batch"], sizes["length"]), generator),)


def draw_masked(sizes: Sizes, generator: Generator) -> tuple[Tensor, ...]:
    """Tokens, 15 % of them hidden, and the hidden ones as labels."""
    (tokens,) = draw_tokens(sizes, generator)
    hidden = torch.rand(tokens.shape, generator=generator) < 0.15
    return tokens.masked_fill(hidden, 0), tokens.masked_fill(~hidden, -100)


def draw_images(sizes: Sizes, generator: Generator) -> tuple[Tensor, ...]:
    """Noise whose brightness tells something of the class."""
    labels = torch.randint(sizes["classes"], (sizes["batch"],), generator=generator)
    images = torch.randn(sizes["batch"], 3, sizes["pixels"], sizes["pixels"], generator=generator)
    return images + labels.view(-1, 1, 1, 1) / sizes["classes"], labels


def draw_clicks(sizes: Sizes, generator: Generator) -> tuple[Tensor, ...]:
    dense = torch.randn(sizes["batch"], Recommender.DENSE, generator=generator)
    indices = torch.randint(sizes["rows"], (sizes["tables"], sizes["batch"]), generator=generator)
    return dense, indices, (dense.sum(1) + torch.randn(sizes["batch"], generator=generator) > 0).float()


def draw_regression(sizes: Sizes, generator: Generator) -> tuple[Tensor, ...]:
    x = torch.randn(sizes["batch"], sizes["width"], generator=generator)
    return x, x.tanh()


_TRANSFORMER: Sizes = {"length": 32, "layers": 2, "width": 64, "heads": 2, "inner": 128, "vocabulary": 257}
TASKS: dict[str, Task] = {
    "gpt2": Task(gpt2, draw_tokens, {"batch": 16, "length": 1024, "layers": 12, "width": 768, "heads": 12, "vocabulary": 50257},
                 {"batch": 4, **_TRANSFORMER}, "autocast", "tokens", dropout=0.1),
    "llama": Task(llama, draw_tokens, {"batch": 8, "length": 1024, "layers": 8, "width": 1024, "heads": 16, "inner": 2816,
                                       "vocabulary": 32000},
                  {"batch": 4, **_TRANSFORMER}, "bfloat16", "tokens"),
    "bert": Task(bert, draw_masked, {"batch": 32, "length": 512, "layers": 12, "width": 768, "heads": 12, "inner": 3072,
                                     "vocabulary": 30522},
                 {"batch": 4, **_TRANSFORMER}, "autocast", "tokens", dropout=0.1),
    "resnet": Task(resnet, draw_images, {"batch": 128, "layers": 50, "pixels": 224, "classes": 1000},
                   {"batch": 4, "layers": 2, "width": 8, "pixels": 32, "classes": 10}, "autocast", "images", optimizer="SGD",
                   channels_last=True),
    "dlrm": Task(lambda sizes, _: Recommender(sizes), draw_clicks, {"batch": 8192, "tables": 26, "rows": 100_000, "width": 64},
                 {"batch": 64, "tables": 5, "rows": 100, "width": 16}, "float32", "samples"),
    "vit": Task(vit, draw_images, {"batch": 64, "layers": 12, "width": 768, "heads": 12, "inner": 3072, "pixels": 224,
                                   "patch": 16, "classes": 1000},
                {"batch": 4, "layers": 2, "width": 64, "heads": 2, "inner": 128, "pixels": 32, "patch": 8, "classes": 10},
                "autocast", "images"),
    "lstm": Task(RecurrentModel, draw_tokens, {"batch": 64, "length": 129, "layers": 2, "width": 1024, "vocabulary": 10_000},
                 {"batch": 4, **_TRANSFORMER}, "float32", "tokens", dropout=0.2),
    "mlp": Task(lambda sizes, _: Regression(sizes), draw_regression, {"batch": 32, "width": 64, "layers": 20},
                {"batch": 32, "width": 64, "layers": 20}, "float32", "samples"),
}

TASKS["resnet-rows"] = replace(TASKS["resnet"], channels_last=False)
"""As most programs are written: contestants may change the format themselves."""


def sized(name: str, tiny: bool, **changes: int | None) -> Sizes:
    """The sizes of a model, with those of ``changes`` that are not None."""
    task = TASKS[name]
    told: dict[str, Any] = {key: value for key, value in changes.items() if value is not None}
    return {**(task.tiny if tiny else task.sizes), **told}
