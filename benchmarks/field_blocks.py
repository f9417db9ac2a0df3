"""Parts of models of points, graphs, fields and images as they are made, as people write them. Imports torch,
`benchmarks.model_blocks`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.model_blocks import FULL, below, full, given, half, mask, several, uniform

FIELDS, block = several()


@block(full(8192, 192), full(8192, 192, 3), uniform(8192, 192))
def rendered_rays(density: Tensor, colours: Tensor, steps: Tensor) -> Tensor:
    alpha = 1 - torch.exp(-F.relu(density) * steps)
    through = torch.cumprod(torch.cat((torch.ones_like(alpha[:, :1]), 1 - alpha + 1e-10), -1), -1)[:, :-1]
    return ((alpha * through)[..., None] * torch.sigmoid(colours)).sum(1)


@block(full(262144, 3))
def frequencies_of_points(x: Tensor) -> Tensor:
    parts = [x]
    for octave in range(6):
        parts += [torch.sin(2.0**octave * x), torch.cos(2.0**octave * x)]
    return torch.cat(parts, -1)


@block(full(65536, 256), full(256))
def sine_layer(x: Tensor, bias: Tensor) -> Tensor:
    return torch.sin(30 * (x + bias))


@block(full(1048576, 3))
def eikonal(slopes: Tensor) -> Tensor:
    return ((slopes.norm(dim=-1) - 1) ** 2).mean()


@block(full(524288, 4), full(524288, 3))
def turned_scales(quaternions: Tensor, scales: Tensor) -> Tensor:
    w, x, y, z = F.normalize(quaternions, dim=-1).unbind(-1)
    turn = torch.stack((1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y),
                        2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x),
                        2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)), -1)  # fmt: skip
    return turn.view(-1, 3, 3) * torch.exp(scales)[:, None]


@block(full(4, 2048, 2048), full(4, 2048), full(4, 2048))
def nearest_points(products: Tensor, first: Tensor, second: Tensor) -> Tensor:
    apart = first[:, :, None] + second[:, None] - 2 * products
    return apart.amin(2).mean() + apart.amin(1).mean()


@block(half(8, 1024, 64), half(8, 1024, 20, 64))
def neighbours_less_centre(centre: Tensor, around: Tensor) -> Tensor:
    middle = centre[:, :, None].expand_as(around)
    return torch.cat((around - middle, middle), -1)


@block(half(8, 128, 1024, 20), half(1, 128, 1, 1), half(1, 128, 1, 1))
def largest_neighbour(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return F.leaky_relu(x * scale + shift, 0.2).amax(-1)


@block(full(16384, 128), below(16384, 131072), below(16384, 131072))
def mean_of_neighbours(x: Tensor, sources: Tensor, targets: Tensor) -> Tensor:
    total = torch.zeros_like(x).index_add_(0, targets, x[sources])
    degree = x.new_zeros(16384).index_add_(0, targets, x.new_ones(131072))
    return F.relu(total / degree.clamp(min=1)[:, None])


@block(full(131072, 8), below(16384, 131072))
def edge_softmax(scores: Tensor, targets: Tensor) -> Tensor:
    shares = torch.exp(F.leaky_relu(scores, 0.2))
    total = scores.new_zeros(16384, 8).index_add_(0, targets, shares)
    return shares / (total[targets] + 1e-16)


@block(half(8, 128, 64, 64))
def bilinear_up(x: Tensor) -> Tensor:
    return F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False)


@block(half(8, 64, 128, 128))
def reflected_edges(x: Tensor) -> Tensor:
    return F.relu(F.pad(x, (3, 3, 3, 3), mode="reflect"))


@block(half(64, 256, 56, 56))
def averaged_down(x: Tensor) -> Tensor:
    return F.avg_pool2d(F.relu(x), 2)


@block(half(64, 2048, 7, 7), half(64, 2048, 7, 7))
def end_of_network(x: Tensor, branch: Tensor) -> Tensor:
    return F.relu(x + branch).mean((2, 3))


@block(full(16, 3, 512, 512), full(16, 3, 512, 512))
def charbonnier(x: Tensor, y: Tensor) -> Tensor:
    return torch.sqrt((x - y) ** 2 + 1e-6).mean()


@block(full(16, 64, 128, 128), given(16, 64, 128, 128, dtype=FULL), full(1, 64, 1, 1))
def perceptual(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    x = x / (x.square().sum(1, keepdim=True).sqrt() + 1e-10)
    y = y / (y.square().sum(1, keepdim=True).sqrt() + 1e-10)
    return (weight * (x - y) ** 2).sum(1, keepdim=True).mean((2, 3))


@block(given(32, 3, 384, 384, dtype=FULL), uniform(32, 1, 1, 1), uniform(32, 1, 1, 1))
def colour_jitter(x: Tensor, contrast: Tensor, saturation: Tensor) -> Tensor:
    def grey(image: Tensor) -> Tensor:
        return 0.299 * image[:, :1] + 0.587 * image[:, 1:2] + 0.114 * image[:, 2:]

    x = torch.lerp(grey(x).mean((2, 3), keepdim=True), x, contrast + 0.5).clamp(0, 1)
    x = torch.lerp(grey(x), x, saturation + 0.5).clamp(0, 1)
    mean, spread = torch.tensor([0.485, 0.456, 0.406], device=x.device), torch.tensor([0.229, 0.224, 0.225], device=x.device)
    return (x - mean[:, None, None]) / spread[:, None, None]


@block(half(1024, 1024, 3, 3), half(1024))
def standardised_weights(weight: Tensor, gain: Tensor) -> Tensor:
    spread, mean = torch.var_mean(weight.float(), (1, 2, 3), keepdim=True)
    return ((weight - mean) * torch.rsqrt(spread * 9216 + 1e-4)).to(weight.dtype) * gain[:, None, None, None]


@block(full(512, 512, 3, 3), full(8, 512))
def demodulated_weights(weight: Tensor, style: Tensor) -> Tensor:
    modulated = weight[None] * style[:, None, :, None, None]
    return (modulated * torch.rsqrt(modulated.square().sum((2, 3, 4), keepdim=True) + 1e-8)).to(torch.bfloat16)


@block(half(32, 64, 112, 112), half(1, 64, 1, 1), half(1, 64, 1, 1), half(1, 64, 1, 1))
def filter_response(x: Tensor, weight: Tensor, bias: Tensor, least: Tensor) -> Tensor:
    x = x * torch.rsqrt(x.float().square().mean((2, 3), keepdim=True) + 1e-6).to(x.dtype)
    return torch.maximum(weight * x + bias, least)


@block(half(32, 384, 28, 28), half(32, 28, 28, 384), half(384))
def scaled_residual(x: Tensor, branch: Tensor, scale: Tensor) -> Tensor:
    return x + (scale * branch).permute(0, 3, 1, 2)


@block(half(32, 256, 56, 56))
def channel_extremes(x: Tensor) -> Tensor:
    return torch.cat((x.amax(1, keepdim=True), x.mean(1, keepdim=True)), 1)


@block(half(32, 4, 128, 128), given(32, 4, 128, 128), half(32, 4, 128, 128), below(1000, 32), given(1000, dtype=FULL))
def noised_loss(x: Tensor, noise: Tensor, predicted: Tensor, steps: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    share = torch.sigmoid(kept)[steps][:, None, None, None]
    noised = share.sqrt() * x + (1 - share).sqrt() * noise
    wanted = share.sqrt() * noise - (1 - share).sqrt() * x
    weight = torch.minimum(share / (1 - share), torch.full_like(share, 5.0))[:, 0, 0, 0]
    return noised, (weight * (predicted.float() - wanted).square().mean((1, 2, 3))).mean()


@block(given(32, 4, 128, 128))
def guided(x: Tensor) -> Tensor:
    without, with_text = x.float().chunk(2)
    led = without + 7.5 * (with_text - without)
    evened = led * with_text.std((1, 2, 3), keepdim=True) / led.std((1, 2, 3), keepdim=True)
    return 0.7 * evened + 0.3 * led


@block(full(65536, 64), full(65536, 64), mask(1, 64))
def coupling(x: Tensor, parameters: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
    scale = torch.tanh(parameters) * (~keep)
    return x * torch.exp(scale) + parameters * (~keep), scale.sum(1)


@block(full(64, 17, 64, 64))
def soft_argmax(heat: Tensor) -> Tensor:
    chances = heat.flatten(2).softmax(-1).view_as(heat)
    places = torch.arange(64, device=heat.device, dtype=heat.dtype)
    return torch.stack(((chances.sum(2) * places).sum(-1), (chances.sum(3) * places).sum(-1)), -1)
