"""Parts of networks for images between their convolutions, as people write them. Imports torch, `benchmarks.model_blocks`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.model_blocks import Input, half, mask, several, uniform

IMAGES, block = several()


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
