"""torch.func, autograd's own features and hooks give on the device what they give in eager mode."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, stack_module_state, vjp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.conformance.eager import DEVICE
from tests.conformance.features import filled, gradients, mlp, randn, same


def wave(x: Tensor) -> Tensor:
    return (x.sin() * x).sum()


def pulled(device: str) -> Any:
    out, back = vjp(lambda x: x.exp() * 2, randn(device, 5))
    return out, back(torch.ones_like(out))


def pushed(device: str) -> Any:
    out, forward = torch.func.linearize(torch.sin, randn(device, 5))
    return out, forward(torch.ones(5, device=device))


def per_sample_gradients(device: str) -> Any:
    model, x, y = mlp(device), randn(device, 6, 4), torch.arange(6, device=device) % 3
    parameters = {name: value.detach() for name, value in model.named_parameters()}

    def loss(given: dict[str, Tensor], sample: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(model, given, (sample[None],)), label[None])

    return vmap(grad(loss), (None, 0, 0))(parameters, x, y)


def ensemble(device: str) -> Any:
    models = [mlp(device) for _ in range(3)]
    state = stack_module_state(models)
    base, x = copy.deepcopy(models[0]).to("meta"), randn(device, 5, 4)
    return vmap(lambda *given: functional_call(base, given, (x,)))(*state)


FUNC: dict[str, Callable[[str], Any]] = {
    "grad": lambda d: grad(wave)(randn(d, 5)),
    "grad_and_value": lambda d: torch.func.grad_and_value(wave)(randn(d, 5)),
    "vmap": lambda d: vmap(lambda a, b: (a @ b).relu())(randn(d, 3, 4, 5), randn(d, 3, 5, 2)),
    "vmap of grad": lambda d: vmap(grad(wave))(randn(d, 3, 5)),
    "vmap, different draws": lambda d: vmap(lambda x: x + torch.rand_like(x), randomness="different")(randn(d, 3, 5)),
    "vmap, the same draws": lambda d: vmap(lambda x: x + torch.rand_like(x), randomness="same")(randn(d, 3, 5)),
    "vmap of a convolution": lambda d: vmap(lambda x: F.conv2d(x, torch.ones(2, 3, 3, 3, device=d)))(randn(d, 4, 2, 3, 6, 6)),
    "jvp": lambda d: jvp(torch.exp, (randn(d, 5),), (randn(d, 5),)),
    "vjp": pulled,
    "linearize": pushed,
    "jacrev": lambda d: jacrev(lambda x: x.tanh() * x.sum())(randn(d, 5)),
    "jacfwd": lambda d: jacfwd(lambda x: x.tanh() * x.sum())(randn(d, 5)),
    "hessian": lambda d: hessian(wave)(randn(d, 5)),
    "per-sample gradients": per_sample_gradients,
    "an ensemble": ensemble,
    "functional.jacobian": lambda d: torch.autograd.functional.jacobian(lambda x: x.exp().sum(0), randn(d, 3, 2)),
    "functional.hvp": lambda d: torch.autograd.functional.hvp(wave, randn(d, 5), randn(d, 5)),
}


@pytest.mark.parametrize("name", FUNC)
def test_func(name: str) -> None:
    same(FUNC[name])


def double_backward(model: nn.Module, x: Tensor) -> Any:
    x.requires_grad_()
    (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    slope.square().sum().backward()
    return [x.grad, *gradients(model)]


def twice_through_convolutions(device: str) -> Any:
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.SiLU(), nn.LayerNorm(4), nn.GELU(), nn.Mish())
    return double_backward(filled(model).to(device), randn(device, 2, 2, 6, 6))


def twice_through_attention(device: str) -> Any:
    qkv = [randn(device, 1, 2, 4, 8).requires_grad_() for _ in range(3)]
    with sdpa_kernel(SDPBackend.MATH):
        out = F.scaled_dot_product_attention(*qkv)
    slopes = torch.autograd.grad(out.square().sum(), qkv, create_graph=True)
    sum(slope.square().sum() for slope in slopes).backward()
    return [x.grad for x in qkv]


def with_forward_mode(device: str) -> Any:
    with forward_ad.dual_level():
        x = forward_ad.make_dual(randn(device, 3, 4), randn(device, 3, 4))
        return list(forward_ad.unpack_dual(F.layer_norm(mlp(device)(x), (3,))))


AUTOGRAD: dict[str, Callable[[str], Any]] = {
    "double backward": lambda d: double_backward(mlp(d), randn(d, 3, 4)),
    "double backward, convolutions": twice_through_convolutions,
    "double backward, attention": twice_through_attention,
    "forward mode": with_forward_mode,
}


@pytest.mark.parametrize("name", AUTOGRAD)
def test_autograd(name: str) -> None:
    same(AUTOGRAD[name])


def test_gradcheck() -> None:
    x = torch.randn(3, dtype=torch.double).to(DEVICE).requires_grad_()
    every = {"check_forward_ad": True, "check_batched_grad": True, "check_batched_forward_grad": True}
    assert torch.autograd.gradcheck(lambda x: x.sin() * x, (x,), **every)
    layer = nn.Linear(3, 2).double().to(DEVICE)
    assert torch.autograd.gradgradcheck(lambda x: layer(x).exp(), (x,))


def hooked(device: str) -> Any:
    model, seen = mlp(device), []
    model[0].register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    model[0].register_forward_hook(lambda module, args, out: out + 1)
    model[2].register_full_backward_pre_hook(lambda module, grads: (grads[0] * 0.5,))
    model[2].register_full_backward_hook(lambda module, grads, given: (grads[0] * 3,))
    model[0].weight.register_post_accumulate_grad_hook(lambda weight: seen.append(weight.grad.clone()))
    x = randn(device, 2, 4).requires_grad_()
    x.register_hook(lambda slope: slope * 10)
    y = model(x)
    y.retain_grad()
    y.sum().backward()
    return [x.grad, y.grad, seen, *gradients(model)]


def saved_elsewhere(device: str) -> Any:
    x, y = randn(device, 4).requires_grad_(), randn(device, 4).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.cpu(), lambda t: t.to(device)):
        (x.exp() * x).sum().backward()
    with torch.autograd.graph.save_on_cpu():
        (y.exp() * y).sum().backward()
    return x.grad, y.grad


class Exp(torch.autograd.Function):
    @staticmethod
    def forward(x):
        return x.exp()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(output)
        ctx.save_for_forward(output)

    @staticmethod
    def backward(ctx, slope):
        return slope * ctx.saved_tensors[0]

    @staticmethod
    def jvp(ctx, tangent):
        return tangent * ctx.saved_tensors[0]

    @staticmethod
    def vmap(info, dims, x):
        return Exp.apply(x), dims[0]


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    @once_differentiable
    def backward(ctx, slope):
        return slope * 2


def own_functions(device: str) -> Any:
    x, y = randn(device, 4).requires_grad_(), randn(device, 4).requires_grad_()
    Exp.apply(x).sum().backward()
    Doubled.apply(y.clone()).sum().backward()
    return x.grad, y.grad, jvp(Exp.apply, (randn(device, 4),), (randn(device, 4),)), vmap(Exp.apply)(randn(device, 3, 4))


HOOKS = {"hooks": hooked, "saved tensors": saved_elsewhere, "own functions": own_functions}


@pytest.mark.parametrize("name", HOOKS)
def test_hooks_and_functions(name: str) -> None:
    same(HOOKS[name])


def test_once_differentiable_refuses_a_second_backward() -> None:
    x = torch.ones(2, device=DEVICE, requires_grad=True)
    (slope,) = torch.autograd.grad(Doubled.apply(x.clone()).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        slope.sum().backward()


def test_anomaly_mode_names_the_function() -> None:
    x = torch.zeros(1, device=DEVICE, requires_grad=True)
    with pytest.warns(UserWarning, match="Error detected in SqrtBackward0"):
        with pytest.raises(RuntimeError, match="nan"), torch.autograd.detect_anomaly():
            (x * 0).sqrt().mul(0).sum().backward()
