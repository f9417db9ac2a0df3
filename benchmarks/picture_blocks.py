"""More parts of models of pictures and of how they are trained, as people write them. Imports torch,
`benchmarks.model_blocks`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.model_blocks import FULL, below, full, given, half, mask, several, uniform

PICTURES, block = several()


@block(half(32, 256, 56, 56), half(32, 256), half(32, 256))
def channel_gate(x: Tensor, mean: Tensor, largest: Tensor) -> Tensor:
    x = x * torch.sigmoid(mean + largest)[..., None, None]
    return torch.cat((x.amax(1, keepdim=True), x.mean(1, keepdim=True)), 1)


@block(half(32, 128, 56, 56))
def pooled_both_ways(x: Tensor) -> Tensor:
    return torch.cat((x.mean(3, keepdim=True), x.mean(2, keepdim=True).transpose(2, 3)), 2)


@block(half(32, 128, 56, 56), half(32, 128, 56, 1), half(32, 128, 1, 56))
def gated_both_ways(x: Tensor, down: Tensor, across: Tensor) -> Tensor:
    return x * torch.sigmoid(down) * torch.sigmoid(across)


@block(half(32, 128, 56, 56), uniform(32, 128, 56, 56))
def drop_block(x: Tensor, draw: Tensor) -> Tensor:
    keep = 1 - F.max_pool2d((draw < 0.01).to(x.dtype), 7, stride=1, padding=3)
    return x * keep * (keep.numel() / keep.sum())


@block(full(32, 1, 256, 256), full(32, 1, 256, 256))
def edges_loss(x: Tensor, y: Tensor) -> Tensor:
    def edges(image: Tensor) -> Tensor:
        image = F.pad(image, (1, 1, 1, 1))
        down = image[..., 2:, :-2] + 2 * image[..., 2:, 1:-1] + image[..., 2:, 2:] - image[..., :-2, :-2] \
            - 2 * image[..., :-2, 1:-1] - image[..., :-2, 2:]  # fmt: skip
        across = image[..., :-2, 2:] + 2 * image[..., 1:-1, 2:] + image[..., 2:, 2:] - image[..., :-2, :-2] \
            - 2 * image[..., 1:-1, :-2] - image[..., 2:, :-2]  # fmt: skip
        return torch.sqrt(down**2 + across**2 + 1e-6)

    return (edges(x) - edges(y)).abs().mean()


@block(full(32, 3, 256, 256))
def luminance_and_colour(x: Tensor) -> Tensor:
    red, green, blue = x.unbind(1)
    light = 0.299 * red + 0.587 * green + 0.114 * blue
    return torch.stack((light, 0.564 * (blue - light) + 0.5, 0.713 * (red - light) + 0.5), 1)


@block(full(32, 3, 256, 256))
def linear_light(x: Tensor) -> Tensor:
    return torch.where(x <= 0.04045, x / 12.92, ((x.clamp(min=0.04045) + 0.055) / 1.055) ** 2.4)


@block(half(64, 3, 224, 224))
def patches(x: Tensor) -> Tensor:
    return x.view(64, 3, 14, 16, 14, 16).permute(0, 2, 4, 3, 5, 1).reshape(64, 196, 768)


@block(half(64, 196, 768), given(64, 3, 224, 224), mask(64, 196))
def masked_pixels(predicted: Tensor, images: Tensor, masked: Tensor) -> Tensor:
    wanted = images.view(64, 3, 14, 16, 14, 16).permute(0, 2, 4, 3, 5, 1).reshape(64, 196, 768).float()
    wanted = (wanted - wanted.mean(-1, keepdim=True)) / (wanted.var(-1, keepdim=True) + 1e-6).sqrt()
    apart = (predicted.float() - wanted).square().mean(-1)
    return (apart * masked).sum() / masked.sum()


@block(full(16, 1, 256, 320), full(16, 3, 256, 320))
def smooth_depth(depth: Tensor, image: Tensor) -> Tensor:
    depth = depth / (depth.mean((2, 3), True) + 1e-7)
    loss = torch.zeros((), device=depth.device)
    for dim in (2, 3):
        loss = loss + (depth.diff(dim=dim).abs() * torch.exp(-image.diff(dim=dim).abs().mean(1, True))).mean()
    return loss


@block(full(8, 16, 128, 128), uniform(8, 128, 128, 2))
def warped(x: Tensor, flow: Tensor) -> Tensor:
    place = flow * 126
    corner = place.floor()
    across, down = (place - corner).unbind(-1)
    index = (corner[..., 1] * 128 + corner[..., 0]).long().view(8, 1, -1).expand(8, 16, -1)
    flat = x.flatten(2)
    parts = [flat.gather(2, index + step).view(8, 16, 128, 128) for step in (0, 1, 128, 129)]
    upper = parts[0] * (1 - across[:, None]) + parts[1] * across[:, None]
    lower = parts[2] * (1 - across[:, None]) + parts[3] * across[:, None]
    return upper * (1 - down[:, None]) + lower * down[:, None]


@block(full(131072, 4), full(131072, 4))
def complete_overlap(a: Tensor, b: Tensor) -> Tensor:
    a, b = torch.cat((a[:, :2], a[:, :2] + a[:, 2:].exp()), 1), torch.cat((b[:, :2], b[:, :2] + b[:, 2:].exp()), 1)
    shared = (torch.minimum(a[:, 2:], b[:, 2:]) - torch.maximum(a[:, :2], b[:, :2])).clamp(min=0).prod(1)
    sizes, others = a[:, 2:] - a[:, :2], b[:, 2:] - b[:, :2]
    overlap = shared / (sizes.prod(1) + others.prod(1) - shared + 1e-7)
    around = torch.maximum(a[:, 2:], b[:, 2:]) - torch.minimum(a[:, :2], b[:, :2])
    centres = ((a[:, :2] + a[:, 2:] - b[:, :2] - b[:, 2:]) ** 2).sum(1) / 4 / (around.square().sum(1) + 1e-7)
    turn = (torch.atan(sizes[:, 0] / sizes[:, 1]) - torch.atan(others[:, 0] / others[:, 1])) ** 2 * 0.405
    return (1 - overlap + centres + turn * (turn / (1 - overlap + turn + 1e-7)).detach()).mean()


@block(half(16, 256, 64, 64), half(16, 256, 32, 32))
def pyramid_sum(lateral: Tensor, top: Tensor) -> Tensor:
    return lateral + F.interpolate(top, scale_factor=2, mode="nearest")


@block(half(8, 64, 64, 64), half(8, 64, 64, 64), half(8, 64, 1, 1))
def branches_joined(x: Tensor, y: Tensor, whole: Tensor) -> Tensor:
    return F.relu(torch.cat((x, y, whole.expand(8, 64, 64, 64)), 1))


@block(half(64, 96, 56, 56), half(96), half(96))
def channels_first_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    mean = x.mean(1, keepdim=True)
    spread = (x - mean).pow(2).mean(1, keepdim=True)
    return weight[:, None, None] * ((x - mean) / torch.sqrt(spread + 1e-6)) + bias[:, None, None]


@block(half(16, 256, 32, 32), half(16, 256, 32, 32))
def adaptive_instance_norm(content: Tensor, style: Tensor) -> Tensor:
    spread, mean = torch.var_mean(content, (2, 3), keepdim=True)
    other, centre = torch.var_mean(style, (2, 3), keepdim=True)
    return (content - mean) / (spread + 1e-5).sqrt() * (other + 1e-5).sqrt() + centre


@block(full(64, 1, 62, 62), full(64, 1, 62, 62))
def hinge(real: Tensor, made: Tensor) -> tuple[Tensor, Tensor]:
    return F.relu(1 - real).mean() + F.relu(1 + made).mean(), -made.mean()


@block(half(16, 1024, 256), given(16, 1024, 256))
def committed_codes(x: Tensor, codes: Tensor) -> tuple[Tensor, Tensor]:
    return x + (codes - x).detach(), F.mse_loss(x.float(), codes.float()) * 0.25


@block(full(16, 4, 128, 128), given(16, 4, 128, 128, dtype=FULL), uniform(16))
def preconditioned(x: Tensor, noise: Tensor, level: Tensor) -> tuple[Tensor, Tensor]:
    sigma = torch.exp(level * 1.2 - 1.2)[:, None, None, None]
    noisy = x + noise * sigma
    scale = 0.5 / (sigma**2 + 0.25).sqrt()
    return noisy * (sigma**2 + 0.25).rsqrt(), ((noisy * scale - x) ** 2 * (sigma**2 + 0.25) / (sigma * 0.5) ** 2).mean()


@block(half(64, 257, 1024), half(1, 257, 1024), uniform(64, 256))
def kept_patches(x: Tensor, places: Tensor, draws: Tensor) -> Tensor:
    x = x + places
    order = draws.argsort(1)[:, :64]
    kept = x[:, 1:].gather(1, order[..., None].expand(64, 64, 1024))
    return torch.cat((x[:, :1], kept), 1)


@block(full(64, 21, 64, 64), below(21, 64, 64, 64))
def tversky(logits: Tensor, labels: Tensor) -> Tensor:
    share = logits.softmax(1)
    wanted = F.one_hot(labels, 21).permute(0, 3, 1, 2).to(share.dtype)
    both, wrong, missed = (one.sum((0, 2, 3)) for one in (share * wanted, share * (1 - wanted), (1 - share) * wanted))
    return ((1 - both / (both + 0.3 * wrong + 0.7 * missed + 1e-6)) ** 0.75).sum()
