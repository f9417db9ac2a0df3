"""Sparse, quantized, nested and complex tensors give what they give on the physical device, or its error."""

from __future__ import annotations

import copy
import functools
import io
import warnings
from typing import Any, Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lazy_backend
from tests.device import DEVICE, ON_GPU, PHYSICAL
from tests.plain import agree, plain

Call = Callable[[str], Any]


def coo(d: str) -> torch.Tensor:
    return torch.sparse_coo_tensor(torch.tensor([[0, 1, 1], [2, 0, 2]]), torch.tensor([3.0, 4.0, 5.0]), (2, 3)).to(d)


def csr(d: str) -> torch.Tensor:
    return coo(d).to_sparse_csr()


def ones(d: str, *shape: int) -> torch.Tensor:
    return torch.ones(*shape, device=d)


def saved(tensor: torch.Tensor) -> torch.Tensor:
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def sparse_autograd(make: Call) -> Call:
    def run(d: str) -> list[torch.Tensor]:
        left, right = make(d).requires_grad_(), ones(d, 3, 2).requires_grad_()
        (left @ right).pow(2).sum().backward()
        return [left.grad, right.grad]

    return run


def reduced_autograd(d: str) -> list[torch.Tensor]:
    """The kernel gives the places of maxima only to those who want gradients, and crashes where backward has none."""
    left, right = csr(d).requires_grad_(), torch.arange(6.0).reshape(3, 2).to(d).requires_grad_()
    (torch.sparse.mm(left, right, "amax") * torch.arange(4.0, device=d).view(2, 2)).sum().backward()
    return [left.grad, right.grad]


def values_autograd(d: str) -> torch.Tensor:
    values = torch.tensor([1.0, 2.0], device=d, requires_grad=True)
    made = torch.sparse_coo_tensor(torch.tensor([[0, 1], [1, 0]], device=d), values, (2, 2))
    (made.to_dense() * torch.arange(4.0, device=d).view(2, 2)).sum().backward()
    return values.grad


def embedding(optimizer: Callable[..., torch.optim.Optimizer], layer: Callable[..., nn.Module] = nn.Embedding) -> Call:
    def run(d: str) -> list[torch.Tensor]:
        model = layer(5, 3, sparse=True).to(d)
        chosen = optimizer(list(model.parameters()), lr=0.1)
        for _ in range(3):
            chosen.zero_grad()
            model(torch.tensor([[1, 2], [1, 4]], device=d)).pow(2).sum().backward()
            assert model.weight.grad.is_sparse
            chosen.step()
        return [model.weight, model.weight.grad]

    return run


SPARSE: dict[str, Call] = {
    "constructor": lambda d: torch.sparse_coo_tensor(torch.tensor([[0, 1], [1, 0]]), torch.ones(2), (2, 2), device=d),
    "to_sparse": lambda d: ones(d, 2, 3).to_sparse(),
    "to_dense": lambda d: coo(d).to_dense(),
    "coalesce": lambda d: torch.sparse_coo_tensor(torch.tensor([[0, 0]]), torch.ones(2), (2,), device=d).coalesce().values(),
    "indices": lambda d: [coo(d).coalesce().indices(), coo(d)._nnz(), coo(d).is_coalesced(), coo(d).sparse_dim()],
    "add": lambda d: coo(d) + coo(d),
    "mul_": lambda d: coo(d).mul_(2),
    "dense + sparse": lambda d: ones(d, 2, 3) + coo(d),
    "dense.add_(sparse)": lambda d: ones(d, 2, 3).add_(coo(d), alpha=-0.5),
    "mm": lambda d: torch.sparse.mm(coo(d), ones(d, 3, 2)),
    "mv": lambda d: coo(d) @ ones(d, 3),
    "sparse @ sparse": lambda d: torch.sparse.mm(coo(d), coo(d).t()),
    "addmm": lambda d: torch.sparse.addmm(ones(d, 2, 2), coo(d), ones(d, 3, 2)),
    "sum": lambda d: [torch.sparse.sum(coo(d), 1), coo(d).sum()],
    "softmax": lambda d: torch.sparse.softmax(coo(d), 1),
    "select": lambda d: [coo(d)[1], coo(d).index_select(0, torch.tensor([1], device=d))],
    "cat": lambda d: torch.cat([coo(d), coo(d)]),
    "sparse_mask": lambda d: ones(d, 2, 3).sparse_mask(coo(d).coalesce()),
    "no kernel": lambda d: coo(d).exp(),
    "two devices": lambda d: coo(d) @ torch.ones(3, 2, device="meta"),
    "dtype": lambda d: coo(d).to(torch.float64),
    "zeros": lambda d: [torch.zeros_like(coo(d)), torch.zeros(2, 3, layout=torch.sparse_coo, device=d)],
    "saved": lambda d: saved(coo(d)),
    "deepcopy": lambda d: copy.deepcopy(coo(d)),
    "zero_": lambda d: coo(d).zero_(),
    "autograd": sparse_autograd(coo),
    "autograd of values": values_autograd,
    "SparseAdam": embedding(torch.optim.SparseAdam),
    "SGD": embedding(torch.optim.SGD),
    "SGD with momentum": embedding(lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9)),
    "Adagrad": embedding(torch.optim.Adagrad),
    "Adam refuses": embedding(torch.optim.Adam),
    "EmbeddingBag": embedding(torch.optim.SGD, lambda *args, **kwargs: nn.EmbeddingBag(*args, mode="sum", **kwargs)),
    "csr constructor": lambda d: torch.sparse_csr_tensor([0, 1, 2], [0, 1], [1.0, 2.0], (2, 2), device=d),
    "csr parts": lambda d: [csr(d).crow_indices(), csr(d).col_indices(), csr(d).values()],
    "csr mm": lambda d: [csr(d) @ ones(d, 3, 2), csr(d) @ ones(d, 3)],
    "csr to": lambda d: [csr(d).to_sparse(), csr(d).to_sparse_csc(), csr("cpu").to(d)],
    "csr math": lambda d: [csr(d) + csr(d), csr(d) * 2, csr(d).sin(), csr(d).sum(), csr(d).t(), csr(d).mul_(3)],
    "blocks": lambda d: [ones(d, 4, 4).to_sparse_bsr((2, 2)), ones(d, 4, 4).to_sparse_bsc((2, 2))],
    "sampled_addmm": lambda d: torch.sparse.sampled_addmm(csr(d), ones(d, 2, 2), ones(d, 2, 3)),
    "csr autograd": sparse_autograd(csr),
    "reduced product, autograd": reduced_autograd,
    "spdiags": lambda d: torch.sparse.spdiags(ones(d, 3, 3), torch.tensor([0, 1, 2], device=d), (3, 3)),
}


X = torch.tensor([[-1.0, 0.0, 0.5, 2.0], [1.0, 3.0, -0.2, 0.7]])


def quantized(d: str) -> torch.Tensor:
    return torch.quantize_per_tensor(X.to(d), 0.1, 10, torch.quint8)


def by_channel(d: str) -> torch.Tensor:
    return torch.quantize_per_channel(X.to(d), torch.tensor([0.1, 0.2], device=d), torch.tensor([1, 2], device=d), 0, torch.qint8)


def fake_quantized(d: str) -> list[torch.Tensor]:
    module, x = torch.ao.quantization.FakeQuantize().to(d), X.to(d, copy=True).requires_grad_()
    module(x).sum().backward()
    return [x.grad, module.scale]


QUANTIZED: dict[str, Call] = {
    "per tensor": lambda d: [quantized(d), quantized(d).int_repr(), quantized(d).q_scale(), quantized(d).q_zero_point()],
    "per channel": lambda d: [by_channel(d), by_channel(d).q_per_channel_scales(), by_channel(d).q_per_channel_axis()],
    "dynamic": lambda d: torch.quantize_per_tensor_dynamic(X.to(d), torch.qint8, False),
    "moved": lambda d: [quantized(d).cpu(), quantized("cpu").to(d), by_channel("cpu").to(d)],
    "views": lambda d: [quantized(d).view(8), quantized(d).t(), quantized(d)[0], quantized(d).reshape(4, 2)],
    "ops": lambda d: [quantized(d).relu(), quantized(d) == quantized(d), quantized(d).max(), quantized(d).clone()],
    "cat": lambda d: torch.cat([quantized(d), quantized(d)]),
    "no kernel": lambda d: quantized(d) + quantized(d),
    "copy_ of floats": lambda d: quantized(d).copy_(X.to(d) * 0),
    "quantized::add": lambda d: torch.ops.quantized.add(quantized(d), quantized(d), 0.2, 5),
    "saved": lambda d: saved(quantized(d)),
    "fake_quantize": lambda d: torch.fake_quantize_per_tensor_affine(X.to(d), 0.1, 0, 0, 255),
    "FakeQuantize": fake_quantized,
}


def nested(d: str, layout: torch.layout = torch.strided) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.arange(6.0).view(2, 3), torch.ones(1, 3)], device=d, layout=layout)


def jagged(d: str) -> torch.Tensor:
    return nested(d, torch.jagged)


def nested_autograd(layout: torch.layout) -> Call:
    def run(d: str) -> list[torch.Tensor]:
        a, b = torch.arange(6.0, device=d).view(2, 3).requires_grad_(), ones(d, 1, 3).requires_grad_()
        made = torch.nested.as_nested_tensor([a, b], layout=layout) * 3
        (made.to_padded_tensor(0.0) if layout is torch.strided else made.values()).pow(2).sum().backward()
        return [a.grad, b.grad]

    return run


def attention(layout: torch.layout) -> Call:
    def run(d: str) -> torch.Tensor:
        made = torch.nested.nested_tensor([torch.randn(2, 8), torch.randn(3, 8)], layout=layout).to(d)
        if layout is torch.strided:
            return F.scaled_dot_product_attention(made, made, made)
        heads = made.unflatten(-1, (2, 4)).transpose(1, 2)
        return F.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).flatten(-2)

    return run


NESTED: dict[str, Call] = {
    "unbind": lambda d: [list(nested(d).unbind()), nested(d)[1], nested(d).size(2)],
    "padded": lambda d: nested(d).to_padded_tensor(-1.0),
    "math": lambda d: [nested(d) + nested(d), nested(d) * 2, nested(d).relu(), nested(d).softmax(-1)],
    "linear": lambda d: [F.linear(nested(d), ones(d, 2, 3)), F.layer_norm(nested(d), (3,), ones(d, 3), ones(d, 3))],
    "matmul": lambda d: torch.matmul(nested(d), nested(d).transpose(1, 2)),
    "moved": lambda d: [nested(d).cpu(), nested("cpu").to(d), nested(d).clone()],
    "autograd": nested_autograd(torch.strided),
    "attention": attention(torch.strided),
    "jagged": lambda d: [jagged(d), jagged(d) * 2 + 1, jagged(d).sum(1), jagged(d).cpu(), jagged(d).to_padded_tensor(0.0)],
    "jagged linear": lambda d: [F.linear(jagged(d), ones(d, 2, 3)), F.layer_norm(jagged(d), (3,))],
    "jagged autograd": nested_autograd(torch.jagged),
    "jagged attention": attention(torch.jagged),
}


def z(d: str) -> torch.Tensor:
    return torch.tensor([1 + 2j, 3 - 1j]).to(d)


def complex_autograd(d: str) -> torch.Tensor:
    x = z(d).requires_grad_()
    (torch.fft.fft(x * x.conj()).abs() ** 2).sum().backward()
    return x.grad


COMPLEX: dict[str, Call] = {
    "conj": lambda d: [z(d).conj(), z(d).conj() * z(d), z(d).conj().is_conj(), z(d).abs(), z(d).angle()],
    "neg bit": lambda d: [z(d).conj().imag.is_neg(), z(d).conj().imag * 2],
    "view_as_real": lambda d: torch.view_as_real(z(d)).add_(1),
    "view_as_complex": lambda d: torch.view_as_complex(ones(d, 3, 2)),
    "fft": lambda d: [torch.fft.fft(z(d)), torch.fft.irfft(z(d)), torch.fft.rfft(ones(d, 4))],
    "autograd": complex_autograd,
}


def outcome(call: Call, device: str) -> Any:
    torch.manual_seed(0)
    try:
        return plain(call(device))
    except (RuntimeError, NotImplementedError) as error:
        return type(error).__name__


# Kernels that PyTorch has for the devices it knows by name.
NAMED: dict[str, Call] = {
    "kaiser_window": lambda d: torch.kaiser_window(9, device=d),
    "kaiser_window periodic": lambda d: torch.kaiser_window(9, False, device=d),
    "stack out": lambda d: torch.ops.aten._stack.out([ones(d, 2, 3), ones(d, 2, 3)], 1, out=torch.empty(0, device=d)),
    "range out": lambda d: torch.ops.aten.range.out_(1.0, 7.0, out=torch.empty(7, device=d)),
    "reshape from a tensor": lambda d: torch.ops.aten._reshape_from_tensor(ones(d, 12), torch.tensor([3, 4], device=d)),
    "batch norm, no update": lambda d: list(torch.ops.aten._batch_norm_no_update(
        torch.arange(12.0, device=d).view(2, 3, 2), None, None, ones(d, 3), ones(d, 3), 0.1, 1e-5)),
    "kaiser_window beta": lambda d: torch.kaiser_window(9, True, 8.0, dtype=torch.float64, device=d),
}


CASES = {**{f"sparse {k}": v for k, v in SPARSE.items()}, **{f"quantized {k}": v for k, v in QUANTIZED.items()},
         **{f"nested {k}": v for k, v in NESTED.items()}, **{f"complex {k}": v for k, v in COMPLEX.items()}, **NAMED}  # fmt: skip


AMISS = ("stack out", "range out", "reshape from a tensor")
"""CUDA's own form joins without stacking, leaves the step to chance, reads a shape as if it were in host memory."""


@functools.cache
def makes_quantized() -> bool:
    """PyTorch 2.11 does on devices that it knows by name only."""
    try:
        torch.quantize_per_tensor(torch.ones(1, device=DEVICE), 0.1, 0, torch.quint8)
    except NotImplementedError as error:
        assert "call .cpu()" in str(error)
        return False
    return True


@pytest.mark.parametrize("name", CASES)
def test_it_gives_what_eager_mode_gives(name: str) -> None:
    torch.ones(1, device=DEVICE)
    if name.startswith("quantized") and not makes_quantized():
        pytest.skip("this PyTorch makes no quantized tensors here")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mine, theirs = outcome(CASES[name], DEVICE), outcome(CASES[name], "cpu" if name in AMISS else PHYSICAL)
    assert agree(mine, theirs), (mine, theirs)


def test_what_runs_at_once_is_counted() -> None:
    before = torch._lazy.metrics.counter_value("aten::_sparse_softmax") or 0
    torch.sparse.softmax(coo(DEVICE), 1)
    assert torch._lazy.metrics.counter_value("aten::_sparse_softmax") == before + 1
    assert "aten::_sparse_softmax" in lazy_backend.metrics_report()


def test_values_share_memory_and_stay_lazy() -> None:
    made = coo(DEVICE)
    made._values().mul_(2)
    assert made.to_dense().tolist() == [[0, 0, 6], [8, 0, 10]]


@pytest.mark.skipif(ON_GPU, reason="CUDA has no such tensors, and says so in its own words")
def test_a_layout_that_the_device_cannot_hold_says_what_to_do() -> None:
    with pytest.raises(NotImplementedError, match=r"mkldnn.*call .cpu\(\)"):
        torch.ones(3, device=DEVICE).to_mkldnn()
