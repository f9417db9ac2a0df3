"""Concatenations, pads and gradients of slices as index arithmetic: numbers and kernel counts."""

from __future__ import annotations

from typing import Any, Callable

import pytest
import torch
import torch.nn.functional as F
from graphs import check, externs, kernels, record

from codegen.fuse import plan
from codegen.tuning import HOPPER, Tuning
from ir_nodes import settings

LOOPED = Tuning(pointwise_block=64, transpose_side=16, tile=64, persistent=16, looped=16)
aten = torch.ops.aten


def data(*size: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool], ids=str)
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_cat_of_two_and_three_is_one_kernel(dim: int, dtype: torch.dtype) -> None:
    sizes = [[5, 7, 9], [5, 7, 9], [5, 7, 9]]
    for number, one in enumerate(sizes):
        one[dim] = 3 + 2 * number
    tensors = [data(*size, seed=i).to(dtype) for i, size in enumerate(sizes)]
    check(lambda x, y, z: (torch.cat([x, y], dim), torch.cat([x, y, z], dim)), *tensors)
    check(lambda x, y, z: torch.cat([x, y, z], dim), *tensors, count=1, tuning=LOOPED)


def test_cat_promotes_and_skips_what_is_empty() -> None:
    check(lambda x, y: torch.cat([x, y, torch.empty(0), x[:0]]), data(4, 3, dtype=torch.bfloat16), data(2, 3), count=1)
    check(lambda x, y: torch.cat([x, y]), torch.arange(4), data(3), count=1)


def test_cat_of_strided_and_broadcast_sources() -> None:
    x = data(6, 8, 10)
    check(lambda x: torch.cat([x.transpose(0, 1)[::2], x[:, :4].permute(1, 0, 2)], 0), x, count=1)
    check(lambda x, c: torch.cat([c.expand(6, 1, 10), x], 1), x, data(1, 1, 10, seed=1), count=1)
    y = data(2, 4, 5, 3).contiguous(memory_format=torch.channels_last)
    check(lambda y: torch.cat([y, y * 2], 1), y, count=1)
    check(lambda x: torch.cat([x, torch.zeros(2, 8, 10), torch.ones(1, 8, 10)]), x, count=1)


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_many_sources_are_stored_into_their_places(dim: int) -> None:
    def program(*tensors: torch.Tensor) -> torch.Tensor:
        return torch.cat([tensor.relu() for tensor in tensors], dim)

    made = check(program, *(data(4, 6, 8, seed=i) for i in range(6)), count=1)
    assert len(kernels(made)[0].reads) == 6 and len(kernels(made)[0].writes) == 1
    check(lambda *xs: torch.stack(xs, dim) + 1, *(data(4, 6, 8, seed=i) for i in range(6)))


def rotary(q: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = q.shape[-1] // 2
    return q * cos + torch.cat((-q[..., half:], q[..., :half]), -1) * sin


def rotary_gradient(q: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    q = q.detach().requires_grad_()
    return torch.autograd.grad(rotary(q, cos, sin), q, grad)[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tuning", [HOPPER, LOOPED], ids=["hopper", "small"])
def test_rotary_embedding_and_its_gradient_are_one_kernel_each(dtype: torch.dtype, tuning: Tuning) -> None:
    q, grad = data(2, 9, 3, 16, dtype=dtype).transpose(1, 2), data(2, 3, 9, 16, dtype=dtype, seed=1)
    cos, sin = data(1, 1, 9, 16, dtype=dtype, seed=2), data(1, 1, 9, 16, dtype=dtype, seed=3)
    check(rotary, q, cos, sin, count=1, tuning=tuning)
    check(rotary_gradient, q, cos, sin, grad, count=1, tuning=tuning)


def test_gradients_of_a_split_projection_meet_in_one_kernel_with_the_bias_gradient() -> None:
    def program(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
        copied = [part.transpose(1, 2).clone(memory_format=torch.contiguous_format) for part in (q, k, v)]
        joined = torch.cat([part.view(2, 8, 12) for part in copied], 2)
        return [joined, joined.sum((0, 1))]

    check(program, *(data(2, 3, 8, 4, seed=i) for i in range(3)), count=1, rtol=1e-4, atol=1e-5)


GRADIENTS: dict[str, Callable[..., Any]] = {
    "slice": lambda x: aten.slice_backward(x, [4, 9, 5], 1, 2, 8, 1),
    "slice from behind": lambda x: aten.slice_backward(x, [4, 9, 5], -2, -6, 9223372036854775807, 1),
    "select": lambda x: aten.select_backward(x, [4, 6, 3, 5], 2, 1),
    "select last": lambda x: aten.select_backward(x, [4, 6, 5, 7], -1, -1),
    "pad": lambda x: aten.constant_pad_nd(x, [1, 2, 0, 3, 4, 0], 0.5),
    "pad nothing": lambda x: aten.constant_pad_nd(x * 2, [0, 0], 0.5),
}


@pytest.mark.parametrize("name", GRADIENTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_pads_and_gradients_of_views(name: str, dtype: torch.dtype) -> None:
    check(lambda x: GRADIENTS[name](x) * 3, data(4, 6, 5, dtype=dtype), count=1)
    check(GRADIENTS[name], data(5, 6, 4, dtype=dtype).transpose(0, 2), count=1)


STEPS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], int]] = {
    "even": (lambda x: x[..., ::2] * 2, 2),
    "odd": (lambda x: x[..., 1::2].exp(), 2),
    "one times the other": (lambda x: x[:, ::2] * x[:, 1::2], 2),
    "of rows": (lambda x: x[::3], 1),
    "from the second of three": (lambda x: x[:, :, 1::3], 1),
    "up to somewhere": (lambda x: x[:, 1:6:2], 1),
    "with a rest": (lambda x: x[..., ::5] * 2, 2),
    "from the end": (lambda x: x[:, -3::2], 1),
    "from before the start": (lambda x: x[:, -90::2], 1),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", STEPS)
def test_gradients_of_slices_with_a_step(name: str, dtype: torch.dtype) -> None:
    slices, count = STEPS[name]

    def program(x: torch.Tensor, grad: torch.Tensor) -> list[torch.Tensor]:
        leaf = x.detach().requires_grad_()
        out = slices(leaf)
        return [out.detach(), *torch.autograd.grad(out, leaf, grad[tuple(map(slice, out.shape))])]

    check(program, data(6, 8, 12, dtype=dtype), data(6, 8, 12, dtype=dtype, seed=1), count=count)


PADS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "behind": lambda x: F.pad(x * 2, (0, 2)),
    "around": lambda x: F.pad(x.exp(), (0, 3, 2, 1)),
    "some cut off": lambda x: F.pad(x * 2, (-1, 2, 3, -2), value=0.5),
    "cut off at both ends": lambda x: F.pad(x * 2, (-1, -2)) * 3,
    "of another order": lambda x: F.pad(x.transpose(0, 2) + 1, (-1, 1, -1, 0), value=2),
    "most cut off": lambda x: F.pad(x, (-11, 9)),
}


@pytest.mark.parametrize("name", PADS)
def test_pads_that_cut_off_and_gradients_of_pads(name: str) -> None:
    def program(x: torch.Tensor) -> list[torch.Tensor]:
        leaf = x.detach().requires_grad_()
        out = PADS[name](leaf)
        return [out.detach(), *torch.autograd.grad(out, leaf, torch.linspace(-1, 1, out.numel()).view(out.shape))]

    check(program, data(6, 8, 12), rtol=1e-5, atol=1e-6)
    check(lambda x: PADS[name](x).bfloat16(), data(6, 8, 12), count=1)


def test_a_rotary_embedding_of_neighbours_and_its_gradient_are_one_kernel_each() -> None:
    def program(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, grad: torch.Tensor) -> list[torch.Tensor]:
        leaf = x.detach().requires_grad_()
        even, odd = leaf[..., ::2], leaf[..., 1::2]
        out = torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)
        return [out.detach(), *torch.autograd.grad(out, leaf, grad)]

    check(program, data(2, 5, 12), data(5, 6, seed=1), data(5, 6, seed=2), data(2, 5, 12, seed=3), count=2)


def test_what_gradients_in_place_were_made_of_is_made_again() -> None:
    """Autograd adds gradients up in place: the first summand is no longer there for those who read the sum by index."""
    def program(grad: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        even, odd, size = grad[..., ::2], grad[..., 1::2], list(grad.shape)
        turned = (even * cos).add_(odd * sin), (odd * cos).sub_(even * sin)
        first, second = (torch.ops.aten.slice_backward(half, size, -1, start, 12, 2) for start, half in enumerate(turned))
        return first + second

    check(program, data(2, 5, 12), data(5, 6, seed=1), data(5, 6, seed=2), count=1)
    check(lambda x: F.pad(x.exp().mul_(2).add_(x), (1, 2)) + 1, data(4, 6), count=1)


def test_windows_within_windows_are_one_kernel() -> None:
    """As gradients of slices along two dimensions: a Swin transformer's merged patches, corners, pads of pads."""
    def merged(x: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        leaf = x.detach().requires_grad_()
        parts = [leaf[:, first::2, second::2] for second in range(2) for first in range(2)]
        return torch.autograd.grad(torch.cat(parts, -1), leaf, grad)[0]

    def corner(x: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        leaf = x.detach().requires_grad_()
        return torch.autograd.grad(leaf[1:4, 2:5, :3] * 2, leaf, grad)[0] + x

    check(merged, data(2, 6, 8, 5), data(2, 3, 4, 20, seed=1), count=1)
    check(corner, data(6, 7, 5), data(3, 3, 3, seed=1), count=1)
    check(lambda x: F.pad(F.pad(F.pad(x * 2, (1, 2)), (0, 0, 3, 1), value=4.0) + 1, (2, 0, 0, 5), value=-1), data(4, 6), count=1)
    check(lambda x: F.pad(F.pad(x, (-1, 3)) * 2, (2, -2)), data(4, 6), count=1)


def test_what_has_been_overwritten_since_is_not_read() -> None:
    def program(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        doubled = x * 2
        x.copy_(y)
        return F.pad(doubled, (1, 2)) + 1

    check(program, data(4, 6), data(4, 6, seed=1))


def test_a_slice_written_over_zeros_is_one_kernel_that_stores_once() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(4, 9, 5)
        out[:, 2:8] = x
        return out * 2

    made = check(program, data(4, 6, 5), count=1)
    assert len(kernels(made)[0].writes) == 1

    def twice(x: torch.Tensor) -> torch.Tensor:
        out = torch.full((4, 9, 5), 0.5)
        out[:, 2:8] = x
        out[:, :2] += 1
        return out

    check(twice, data(4, 6, 5))
    check(lambda x: F.pad(x, (0, 3)).narrow(1, 2, 4).relu(), data(4, 6))


def test_what_was_overwritten_meanwhile_is_not_computed_anew() -> None:
    def program(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        twice = x * 2
        x.add_(1)
        return [torch.cat([twice[:, 3:], y], 1), x]

    check(program, data(4, 7), data(4, 5, seed=1))


def test_a_slice_of_a_smaller_write_is_loaded() -> None:
    def program(x: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        whole = x + 1
        whole.view(-1)[:8] = s * 0.5
        return torch.cat([whole.view(-1)[4:16], x.view(-1)])

    check(program, data(4, 6), data(1)[0])


def test_expensive_producers_are_stored_where_others_read_them_too() -> None:
    made = check(lambda x, y: [torch.cat([F.gelu(x), y]), F.gelu(x)], data(4, 8), data(3, 8))
    assert sum("erf" in step.kernel.source.split("@triton.jit")[-1] for step in kernels(made)) <= 2
    check(lambda x, y: torch.cat([F.gelu(x), y]), data(4, 8), data(3, 8), count=1)


def test_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    recording, _ = record(lambda x: torch.cat([x, x]), data(4, 8))
    monkeypatch.setattr(settings, "enabled", lambda name: name != "windows")
    assert [step.reason for step in externs(plan(recording.graph))] == ["windows is switched off"]


def test_writes_into_every_so_many_rows_and_columns_are_joined() -> None:
    def blurred(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = x.detach().requires_grad_()
        y = x[:, :-2:2] + 2 * x[:, 1:-1:2] + x[:, 2::2]
        y = y[..., :-2:2] + 3 * y[..., 1:-1:2] + y[..., 2::2]
        return y.detach(), torch.autograd.grad(y.square().sum(), x)[0]

    made = check(blurred, data(3, 10, 18), rtol=1e-5, atol=1e-5)
    assert not any("fill" in node.name or "zero" in node.name for step in kernels(made) for node in step.nodes)
    check(_placed, data(3, 4, 20))


def _placed(x: torch.Tensor) -> list[torch.Tensor]:
    """Runs, every second and every third place of two dimensions, with something else around."""
    found = []
    for rows, columns in ((slice(0, 6, 2), slice(1, 5)), (slice(1, 10, 3), slice(0, 10, 2)), (slice(3, 6), slice(2, None, 2))):
        for around in (torch.zeros(2, 9, 10), torch.full((2, 9, 10), 2.5)):
            part = around[:, rows, columns]
            part.copy_(x.sigmoid().reshape(-1)[: part.numel()].reshape(part.shape) if part.numel() <= x.numel() else 1.0)
            found.append(around + 1)
    return found


def test_signs_times_one_number_are_made_where_windows_read_them() -> None:
    """Also where that number is a quotient, which is one for all."""
    def variation(x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        return torch.autograd.grad((x[:, 1:] - x[:, :-1]).abs().mean(), x)[0]

    made = check(variation, data(6, 33))
    assert all(len(step.writes) == 1 for step in kernels(made)[-1:])
    assert not any(step.bytes_of(value) >= 6 * 32 * 4 for step in kernels(made)[:-1] for value in step.writes)


def test_halves_that_are_turned_with_one_another_are_read_once() -> None:
    def turned(x: torch.Tensor, c: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        a, b = x.chunk(2, -1)
        return torch.cat((a * c - b * s, b * c + a * s), -1)

    inputs = data(6, 5, 16), data(5, 8, seed=1), data(5, 8, seed=2)
    (step,) = kernels(check(turned, *inputs, count=1))
    assert step.kernel.source.count("tl.load") == 4 and "other=0" not in step.kernel.source
    (step,) = kernels(check(lambda x, y: torch.cat((x, y), -1), data(6, 16), data(6, 16, seed=1), count=1))
    assert step.kernel.source.count("other=0") == 2, "each element of one or the other"
    check(lambda x: torch.cat([part * 2 for part in x.split((4, 5, 7), -1)], -1), inputs[0], count=1)


def test_an_image_enlarged_by_whole_factors_is_read_as_it_lies() -> None:
    def joined(low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
        return torch.cat((F.interpolate(low, size=high.shape[2:], mode="nearest"), high), 1).relu()

    (step,) = kernels(check(joined, data(2, 3, 4, 6), data(2, 2, 8, 18, seed=1), count=1))
    assert "tl.minimum" not in step.kernel.source.split("@triton.jit")[-1], "no place is computed"
