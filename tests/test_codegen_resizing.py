"""Average pooling, interpolation, padding at edges and pixel shuffles as kernels: numbers as eager mode's."""

from __future__ import annotations

from typing import Callable

import pytest
import torch
import torch.nn.functional as F
from graphs import check, kernels, record

import lazy_backend
from codegen.fuse import lower_all
from ir_nodes import settings

Tensor = torch.Tensor


def image(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(sum(size))).to(dtype)


def with_gradient(program: Callable[[Tensor], Tensor]) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """The program's result, and its gradient where each result counts differently."""

    def both(x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.detach().requires_grad_()
        result = program(x)
        weights = torch.arange(result.numel(), device=x.device).remainder(7).to(result.dtype).view(result.shape)
        return result.detach(), torch.autograd.grad(result, x, weights)[0]

    return both


POOLS: dict[str, Callable[[Tensor], Tensor]] = {
    "halves": lambda x: F.avg_pool2d(x, 2),
    "overlapping": lambda x: F.avg_pool2d(x, 3, 2),
    "padded": lambda x: F.avg_pool2d(x, 3, 2, 1),
    "padding does not count": lambda x: F.avg_pool2d(x, (3, 2), (2, 1), 1, count_include_pad=False),
    "rounded up": lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True),
    "rounded up, padding does not count": lambda x: F.avg_pool2d(x, 2, 2, 1, ceil_mode=True, count_include_pad=False),
    "with gaps": lambda x: F.avg_pool2d(x, 2, 3),
    "by a number": lambda x: F.avg_pool2d(x, 3, 1, divisor_override=5),
    "side by side": lambda x: F.avg_pool2d(x, (3, 2)),
    "side by side, by a number": lambda x: F.avg_pool2d(x, (1, 2), divisor_override=3),
    "side by side, by a power of two": lambda x: F.avg_pool2d(x, (1, 2)),
    "side by side, large": lambda x: F.avg_pool2d(x, (9, 5)),
    "adaptive": lambda x: F.adaptive_avg_pool2d(x, (3, 2)),
    "adaptive, large shares": lambda x: F.adaptive_avg_pool2d(x, (1, 2)),
    "adaptive, whole shares": lambda x: F.adaptive_avg_pool2d(x, (9, 5)),
    "adaptive, more than there are": lambda x: F.adaptive_avg_pool2d(x, (11, 13)),
}


@pytest.mark.parametrize("name", POOLS)
def test_average_pools(name: str) -> None:
    check(with_gradient(POOLS[name]), image(2, 3, 9, 10), rtol=1e-5, atol=1e-6)


BOXES: dict[str, Callable[[Tensor], Tensor]] = {
    "halves": lambda x: F.avg_pool3d(x, 2),
    "overlapping": lambda x: F.avg_pool3d(x, 3, 2, 1),
    "padding does not count": lambda x: F.avg_pool3d(x, (3, 2, 1), (2, 1, 1), (1, 1, 0), count_include_pad=False),
    "rounded up": lambda x: F.avg_pool3d(x, (1, 3, 3), (1, 2, 2), (0, 1, 1), ceil_mode=True),
    "by a number": lambda x: F.avg_pool3d(x, (2, 3, 1), 1, divisor_override=5),
    "adaptive": lambda x: F.adaptive_avg_pool3d(x, (3, 3, 4)),
    "adaptive, whole shares": lambda x: F.adaptive_avg_pool3d(x, (1, 7, 4)),
    "adaptive, more than there are": lambda x: F.adaptive_avg_pool3d(x, (6, 8, 9)),
}


@pytest.mark.parametrize("name", BOXES)
def test_average_pools_of_volumes(name: str) -> None:
    x = image(2, 3, 5, 7, 8)
    check(with_gradient(BOXES[name]), x, extern=0, rtol=1e-5, atol=1e-6)
    check(with_gradient(BOXES[name]), x.to(memory_format=torch.channels_last_3d), extern=0, rtol=1e-5, atol=1e-6)
    check(BOXES[name], x[0], extern=0, rtol=1e-5, atol=1e-6)
    check(with_gradient(lambda x: F.adaptive_avg_pool3d(x, 1)), x, extern=0, rtol=1e-5, atol=1e-6)


def test_average_pools_of_other_images() -> None:
    check(with_gradient(POOLS["padded"]), image(3, 9, 7), rtol=1e-5, atol=1e-6)  # no batch
    check(with_gradient(POOLS["padded"]), image(2, 8, 9, 7).to(memory_format=torch.channels_last), rtol=1e-5, atol=1e-6)
    check(with_gradient(POOLS["adaptive"]), image(3, 9, 7, dtype=torch.float64))
    check(lambda x: F.avg_pool2d(x, 2).relu() + 1, image(2, 3, 8, 8, dtype=torch.bfloat16), count=1, rtol=1e-2, atol=1e-2)
    check(lambda x: F.avg_pool1d(x, 3, 2), image(4, 3, 33), rtol=1e-5, atol=1e-6)
    for name in ("side by side", "side by side, large", "adaptive, large shares"):
        check(with_gradient(POOLS[name]), image(2, 8, 9, 10).to(memory_format=torch.channels_last), rtol=1e-5, atol=1e-6)


def test_windows_side_by_side_have_no_conditions() -> None:
    def program(x: Tensor) -> Tensor:
        return F.avg_pool2d(x.relu(), 2)

    made = check(program, image(2, 3, 8, 12, dtype=torch.bfloat16), count=1)  # which computes what it reads
    assert "other=0" not in kernels(made)[0].kernel.source
    made = check(with_gradient(program), image(2, 3, 8, 12), extern=0)
    assert not any("other=0" in step.kernel.source for step in kernels(made))


NEAREST: dict[str, Callable[[Tensor], Tensor]] = {
    "five times": lambda x: F.interpolate(x, (45, 50)),
    "twice": lambda x: F.interpolate(x, scale_factor=2),
    "a half": lambda x: F.interpolate(x, scale_factor=0.5),
    "odd sizes": lambda x: F.interpolate(x, (13, 17)),
    "one and a half": lambda x: F.interpolate(x, scale_factor=1.5),
    "smaller": lambda x: F.interpolate(x, (4, 3)),
    "exact": lambda x: F.interpolate(x, (13, 4), mode="nearest-exact"),
    "exact, by a factor": lambda x: F.interpolate(x, scale_factor=1.7, mode="nearest-exact"),
}


@pytest.mark.parametrize("name", NEAREST)
def test_nearest(name: str) -> None:
    check(with_gradient(NEAREST[name]), image(2, 3, 9, 10), rtol=1e-5, atol=1e-5)


def test_nearest_of_other_ranks() -> None:
    check(with_gradient(lambda x: F.interpolate(x, scale_factor=2)), image(2, 3, 9), rtol=1e-5, atol=1e-5)
    check(with_gradient(lambda x: F.interpolate(x, (4, 5, 9))), image(1, 2, 3, 4, 5), rtol=1e-5, atol=1e-5)
    check(lambda x: F.interpolate(x, scale_factor=2).relu() + 1, image(2, 4, 5, 6, dtype=torch.float16), count=1)
    check(with_gradient(NEAREST["twice"]), image(2, 8, 5, 6).to(memory_format=torch.channels_last), rtol=1e-5, atol=1e-5)


LINEAR = {3: "linear", 4: "bilinear", 5: "trilinear"}


@pytest.mark.parametrize("corners", [False, True])
@pytest.mark.parametrize("size", [(18, 20), (13, 4), (1, 1), (9, 10), (36, 37), (27, 100)])
def test_bilinear(corners: bool, size: tuple[int, int]) -> None:
    def program(x: Tensor) -> Tensor:
        return F.interpolate(x, size, mode="bilinear", align_corners=corners)

    check(program, image(2, 3, 9, 10), count=1, rtol=1e-5, atol=1e-5)
    check(with_gradient(program), image(2, 3, 9, 10), extern=0, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("factor", [1.7, 2, 0.4, 3, 4])
def test_bilinear_by_a_factor(factor: float) -> None:
    def program(x: Tensor) -> Tensor:
        return F.interpolate(x, scale_factor=factor, mode="bilinear")

    check(program, image(2, 3, 9, 10), count=1, rtol=1e-5, atol=1e-5)
    check(lambda x: program(x) * 2, image(2, 3, 5, 6, dtype=torch.bfloat16), count=1, rtol=2e-2, atol=2e-2)
    x = image(2, 3, 9, 10)
    with settings.override(engine="triton"):  # which knows the factor, as no graph of `check` does
        found = with_gradient(program)(x.to("lazysched"))
        assert "aten::upsample" not in str(lazy_backend.explain(found))
        for one, other in zip(found, with_gradient(program)(x)):
            torch.testing.assert_close(one.cpu(), other, rtol=1e-5, atol=2e-5)


def test_the_gradient_by_an_unknown_factor_stays_with_aten() -> None:
    made = check(with_gradient(lambda x: F.interpolate(x, scale_factor=1.7, mode="bilinear")), image(2, 3, 9, 10), extern=1)
    assert "known only when the kernel runs" in next(step.reason for step in made.steps if hasattr(step, "reason"))


@pytest.mark.parametrize("corners", [False, True])
def test_linear_of_other_ranks(corners: bool) -> None:
    for x, size in ((image(2, 3, 9), (17,)), (image(1, 2, 3, 4, 5), (4, 8, 7)), (image(2, 1, 1), (5,)),
                    (image(2, 8, 5, 6).to(memory_format=torch.channels_last), (20, 21))):
        program = lambda x: F.interpolate(x, size, mode=LINEAR[x.dim()], align_corners=corners)  # noqa: E731, B023
        check(with_gradient(program), x, extern=0, rtol=1e-5, atol=2e-5)


def test_many_results_of_an_element_are_summed_along_one_dimension_after_the_other() -> None:
    def program(grad: Tensor) -> Tensor:
        return torch.ops.aten.upsample_bilinear2d_backward(grad, [36, 40], [2, 8, 9, 10], False)

    made = check(program, image(2, 8, 36, 40).to(memory_format=torch.channels_last), count=2, rtol=1e-5, atol=2e-5)
    assert max(step.kernel.source.count("tl.load") for step in kernels(made)) <= 9


def test_very_many_results_stay_with_aten() -> None:
    made = check(lambda grad: torch.ops.aten.upsample_linear1d_backward(grad, [99], [1, 1, 3], False), image(1, 1, 99), extern=1)
    assert "more than 40 results" in made.steps[0].reason  # type: ignore[union-attr]


def test_padding_at_edges() -> None:
    for mode in ("reflect", "replicate"):
        check(lambda x, mode=mode: F.pad(x, (2, 3, 1, 4), mode=mode), image(2, 3, 6, 7), count=1)
        check(lambda x, mode=mode: F.pad(x, (3, 1), mode=mode) * 2, image(3, 7), count=1)
        check(lambda x, mode=mode: F.pad(x, (1, 1, 0, 2, 1, 1), mode=mode), image(2, 2, 3, 4, 5), count=1)
    check(with_gradient(lambda x: F.pad(x, (2, 3, 1, 4), mode="reflect")), image(2, 3, 6, 7), rtol=1e-5, atol=1e-5)
    check(with_gradient(lambda x: F.pad(x, (6, 0), mode="reflect")), image(3, 7), rtol=1e-5, atol=1e-5)
    check(with_gradient(lambda x: F.pad(x, (2, 2, 2, 2), mode="reflect")), image(1, 3, 3), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("padding", [(2, 3), (0, 2), (1, 1, 2, 0), (1, 2, 0, 1, 1, 1)])
def test_gradients_of_repeated_edges(padding: tuple[int, ...]) -> None:
    x = image(2, 3, *(5, 4, 6)[: len(padding) // 2])
    check(with_gradient(lambda x: F.pad(x, padding, mode="replicate")), x, extern=0, rtol=1e-5, atol=1e-5)
    check(with_gradient(lambda x: F.pad(x, padding, mode="replicate")), x[0], extern=0, rtol=1e-5, atol=1e-5)


def test_channel_shuffles() -> None:
    for x in (image(2, 12, 3, 5), image(2, 12, 3, 5).to(memory_format=torch.channels_last), image(3, 6, 4)):
        check(with_gradient(lambda x: F.channel_shuffle(x, 3)), x, extern=0)
    check(lambda x: F.channel_shuffle(x.relu(), 2) + 1, image(2, 8, 4, 6, dtype=torch.bfloat16), count=1)


def test_pixel_shuffles() -> None:
    check(with_gradient(lambda x: F.pixel_shuffle(x, 2)), image(2, 8, 3, 5))
    check(with_gradient(lambda x: F.pixel_unshuffle(x, 3)), image(2, 6, 9), extern=0)
    check(lambda x: F.pixel_shuffle(x.relu(), 2) + 1, image(2, 3, 8, 4, 6, dtype=torch.bfloat16), count=1)
    check(lambda x: F.pixel_shuffle(x, 2), image(2, 8, 3, 5).to(memory_format=torch.channels_last))


@pytest.mark.parametrize(("program", "why"), [
    (lambda x: F.avg_pool2d(x, 6, 1), "a window of more than 27 elements"),
    (lambda x: with_gradient(lambda x: F.avg_pool2d(x, 6, 1))(x), "elements that lie in more than 27 windows"),
    (lambda x: F.adaptive_avg_pool2d(x, (3, 1)), "a window of more than 27 elements"),
    (lambda x: with_gradient(lambda x: F.interpolate(x, size=49))(x), "elements that more than 27 others took"),
    (lambda x: F.interpolate(x.double(), scale_factor=2), "resizing of float64"),
], ids=["window", "gradient", "adaptive", "nearest", "float64"])
def test_what_is_atens(program: Callable[[Tensor], Tensor], why: str) -> None:
    recording, _ = record(program, image(1, 2, 8, 8))
    assert why in " ".join(unit.reason for unit in lower_all(recording.graph))
