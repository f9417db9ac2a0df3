"""What ops are inferred to give: recorded where it is known, run at once where not, never tried where that could do harm."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import lazy_backend
from lazy_backend import infer
from tests.cudnn_ops import flag
from tests.device import DEVICE, ON_GPU, PHYSICAL

CPU = torch.device("cpu")


def fallbacks() -> int:
    return lazy_backend.stats()["fallbacks"]


def test_python_numbers_in_tensors_arguments_are_recorded() -> None:
    x = torch.arange(6, device=DEVICE)
    before = fallbacks()
    found = [x % 4, x & 1, x.float().fmod(2.5), x // 2, x + 1, torch.where(x > 2, x, 7)]
    assert fallbacks() == before
    assert [f.tolist() for f in found[:2]] == [[0, 1, 2, 3, 0, 1], [0, 1, 0, 1, 0, 1]]


@pytest.mark.parametrize("adjoint", [False, True])
def test_a_conjugation_that_a_kernel_leaves_to_its_reader(adjoint: bool) -> None:
    torch.manual_seed(0)
    a, b = torch.randn(3, 3, dtype=torch.complex64), torch.randn(2, 3, dtype=torch.complex64)
    factors, pivots = torch.linalg.lu_factor(a)
    wanted = torch.linalg.lu_solve(factors, pivots, b, left=False, adjoint=adjoint)
    got = torch.linalg.lu_solve(factors.to(DEVICE), pivots.to(DEVICE), b.to(DEVICE), left=False, adjoint=adjoint)
    torch.testing.assert_close(got.cpu(), wanted.resolve_conj())


def test_a_singular_value_decomposition_has_the_layout_of_the_physical_kernel() -> None:
    x = torch.randn(4, 5)
    for ours, theirs in zip(torch.linalg.svd(x.to(DEVICE)), torch.linalg.svd(x.to(PHYSICAL))):
        assert ours.stride() == theirs.stride()


def test_a_gpu_is_never_tried_with_made_up_indices_nor_with_much_memory() -> None:
    floats, pivots = torch.zeros(2), torch.zeros(2, dtype=torch.int32)
    large = torch.empty(infer.MOST_BYTES, dtype=torch.float32, device="meta")
    assert infer.may_try("aten::add.Tensor", (floats, True, None), torch.device("cuda"), known=True)
    assert not infer.may_try("aten::lu_unpack", (floats, pivots), torch.device("cuda"), known=True), "the CPU is asked"
    written = (floats, -1, False, floats, pivots)
    assert infer.may_try("aten::sort.values", written, torch.device("cuda"), known=True), "it only writes them"
    assert infer.may_try("aten::lu_unpack", (floats, pivots), CPU, known=True), "on a CPU a wrong index can be caught"
    assert not infer.may_try("aten::sin", (large,), CPU, known=True)
    assert infer.may_try("aten::sin", (large,), CPU, known=False)


def test_a_call_that_meta_refuses_gets_eagers_own_words() -> None:
    refusal, _, returns, relaid = infer.infer("aten::mm", (torch.ones(2, 3, device=DEVICE),) * 2, CPU)
    assert refusal and not returns and not relaid
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
        torch.ones(2, 3, device=DEVICE) @ torch.ones(2, 3, device=DEVICE)


def test_an_out_that_is_resized_is_laid_out_as_eager_mode_does() -> None:
    """`mvlgamma` is tagged pointwise, but its out takes the layout of no operand."""
    x = torch.rand(5, 5).t() + 4
    for op, args in ((torch.mvlgamma, (2,)), (torch.sin, ()), (torch.add, (x,))):
        ours, theirs = (op(given, *rest, out=torch.empty(0, device=given.device))
                        for given, rest in ((x.to(DEVICE), [a.to(DEVICE) if torch.is_tensor(a) else a for a in args]), (x, args)))
        assert ours.stride() == theirs.stride(), op.__name__
        torch.testing.assert_close(ours.cpu(), theirs)


@pytest.mark.skipif(ON_GPU, reason="what is left of rows that overlap depends on which thread comes first, in eager mode too")
def test_a_triangle_in_place_of_overlapping_rows() -> None:
    """Eager mode asks whether the output is the input, and so must what runs."""
    memory = torch.randn(18)
    ours = memory.to(DEVICE)
    for tensor in (memory, ours):
        tensor.as_strided((5, 10, 5), (1, 1, 1)).tril_()
    assert torch.equal(ours.cpu(), memory)


@pytest.mark.parametrize("name", ["legendre_polynomial_p", "laguerre_polynomial_l", "shifted_chebyshev_polynomial_t"])
def test_a_trial_asks_for_no_polynomial_of_a_vast_degree(name: str) -> None:
    op, x, degrees = getattr(torch.special, name), torch.full((3,), 0.5), torch.tensor([1, 2, 3])
    torch.testing.assert_close(op(x.to(DEVICE), degrees.to(DEVICE)).cpu(), op(x, degrees))


@pytest.fixture
def full_precision() -> Iterator[None]:
    """Of convolutions: TF32 would show the last bit of the norm's sums, which are added in another order, as 1e-4."""
    with flag("allow_tf32", False):
        yield


@pytest.mark.usefixtures("full_precision")
def test_a_large_batch_gets_the_layouts_that_a_few_of_its_samples_get(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(infer, "MOST_BYTES", 1 << 16)
    results = {}
    for device in (DEVICE, PHYSICAL):
        torch.manual_seed(0)
        layer = torch.nn.Conv2d(6, 10, 3, stride=2, bias=False).to(device, memory_format=torch.channels_last)
        norm = torch.nn.BatchNorm2d(10).to(device)
        x = torch.randn(37, 6, 9, 11).to(device).to(memory_format=torch.channels_last).requires_grad_()
        y = layer(x)
        z = torch.nn.functional.max_pool2d(norm(y).relu(), 2)
        z.pow(2).sum().backward()
        results[device] = [y, z, x.grad, layer.weight.grad]
    for ours, eager in zip(*results.values()):
        assert ours.stride() == eager.stride() and ours.shape == eager.shape
        torch.testing.assert_close(ours.cpu(), eager.cpu(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dim", [-1, 0, (-1, -2), (0, -1), None])
@pytest.mark.parametrize("keepdim", [False, True])
def test_norms_over_dimensions_of_one_element(dim: object, keepdim: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is too much to try them, Meta's word has to do, and torch 2.11's counts dimensions from the front only."""
    monkeypatch.setattr(infer, "MOST_BYTES", 0)
    x = torch.randn(7, 1, 1)
    wanted = torch.linalg.vector_norm(x, dim=dim, keepdim=keepdim)
    found = torch.linalg.vector_norm(x.to(DEVICE), dim=dim, keepdim=keepdim)
    assert found.shape == wanted.shape
    torch.testing.assert_close(found.cpu(), wanted)


def test_a_norm_over_a_dimension_that_is_not_there_is_eagers_error() -> None:
    for dim in (2, -3):
        with pytest.raises(IndexError, match="Dimension out of range"):
            torch.linalg.vector_norm(torch.ones(3, 1, device=DEVICE), dim=dim)


@pytest.mark.parametrize("shape", [(370, 8), (11, 5, 8), (1, 900, 8), (2, 3, 5, 7, 8)], ids=str)
@pytest.mark.parametrize("whole", [False, True])
def test_large_norms_statistics_have_their_dtype(shape: tuple[int, ...], whole: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU keeps a 16-bit norm's in 16 bits, though Meta says 32."""
    monkeypatch.setattr(infer, "MOST_BYTES", 1 << 9)
    normed = shape if whole else shape[-1:]
    results = {}
    for device in (DEVICE, PHYSICAL):
        torch.manual_seed(0)
        given = [torch.randn(size).to(device, torch.bfloat16).requires_grad_() for size in (shape, normed, normed)]
        y = torch.nn.functional.layer_norm(given[0], normed, *given[1:])
        z = torch.nn.functional.group_norm(given[0], 1)
        results[device] = [y, z, *torch.autograd.grad((y, z), given, (y.detach(), z.detach()))]
    for ours, eager in zip(*results.values()):
        assert ours.dtype is eager.dtype and ours.stride() == eager.stride()
        torch.testing.assert_close(ours.cpu(), eager.cpu())


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("offsets", [False, True])
def test_bags_of_a_large_table(mode: str, offsets: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU's kernels give some results other shapes than Meta says."""
    monkeypatch.setattr(infer, "MOST_BYTES", 1 << 12)
    table, picked = torch.randn(1000, 8), torch.randint(1000, (60,) if offsets else (15, 4))
    for trained in (False, True):
        results = []
        for device in (DEVICE, PHYSICAL):
            weight = table.to(device).requires_grad_(trained)
            ends = torch.arange(0, 60, 4, device=device) if offsets else None
            y = torch.nn.functional.embedding_bag(picked.to(device), weight, ends, mode=mode)
            results.append([y.detach(), *(torch.autograd.grad(y, weight, y.detach()) if trained else ())])
        for ours, eager in zip(*results):
            torch.testing.assert_close(ours.cpu(), eager.cpu())


@pytest.mark.parametrize("samples", [1, 2, 3])
def test_batch_norms_of_few_large_images(samples: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(infer, "MOST_BYTES", 1 << 12)
    for training in (False, True):
        results = []
        for device in (DEVICE, PHYSICAL):
            torch.manual_seed(0)
            x, weight, mean = (torch.randn(size).to(device, torch.bfloat16) for size in ((samples, 4, 50, 40), (4,), (4,)))
            x.requires_grad_()
            y = torch.nn.functional.batch_norm(x, mean, weight.abs(), weight, weight, training=training)
            results.append([y.detach(), *torch.autograd.grad(y, x, y.detach())])
        for ours, eager in zip(*results):
            assert ours.dtype is eager.dtype and ours.stride() == eager.stride()
            torch.testing.assert_close(ours.cpu(), eager.cpu())


@pytest.mark.parametrize("shape", [(16, 8, 12, 10), (16, 8, 300), (4, 8, 6, 5, 9)], ids=str)
@pytest.mark.parametrize("format", ["rows", "channels_last", "gaps"])
def test_large_norms_over_groups_are_recorded(shape: tuple[int, ...], format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their kernels refuse what has gaps, which a few pixels of an image have where they lie."""
    monkeypatch.setattr(infer, "MOST_BYTES", 1 << 10)
    results = []
    for device in (DEVICE, PHYSICAL):
        torch.manual_seed(0)
        x, weight = torch.randn(shape).to(device), torch.randn(8).to(device).requires_grad_()
        x = x.movedim(1, -1).contiguous().movedim(-1, 1) if format == "channels_last" else x[..., ::2] if format == "gaps" else x
        before = fallbacks()
        y = torch.nn.functional.group_norm(x.requires_grad_(), 2, weight)
        results.append([y.detach(), *torch.autograd.grad(y, (x, weight), y.detach())])
        assert format == "gaps" or fallbacks() == before
    assert results[0][0].stride() == results[1][0].stride()  # autograd asks a CPU alone for gradients in channels_last
    for ours, eager in zip(*results):
        torch.testing.assert_close(ours.cpu(), eager.cpu(), rtol=1e-4, atol=1e-4)
