"""Every optimizer of PyTorch's `optim_db`, in each of its flavours, steps and is saved on the device as in eager mode."""

from __future__ import annotations

import copy
import io
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import _default_to_fused_or_foreach
from torch.testing._internal.common_device_type import instantiate_device_type_tests
from torch.testing._internal.common_optimizers import OptimizerInfo, optim_db, optims
from torch.testing._internal.common_utils import TestCase

import lazy_backend
from tests.conformance.eager import DEVICE, EAGER, on_cpu, outcome, same_error

Kwargs = dict[str, Any]
STEPS = 4
# SparseAdam takes sparse gradients only and has a test of its own.
DENSE = [info for info in optim_db if not info.only_supports_sparse_grads]
# These change their formula at step 6, which compiles once more.
CHANGES_FORMULA = ("RAdam",)


def flavours(info: OptimizerInfo) -> list[Kwargs]:
    """The for-loop, foreach, fused and capturable forms of ``info``, each with every set of arguments that PyTorch tests."""
    inputs = [given.kwargs for given in info.optim_inputs_func("cuda")]  # its list of capturable ones too
    flags = [flag for flag in ("foreach", "fused") if flag in info.supported_impls]
    flags = [flag for flag in flags if flag != "fused" or EAGER in info.supports_fused_on]
    every = [{flag: False for flag in flags}, *({flag: True} for flag in flags)] if flags else [{}]
    return [{**kwargs, **chosen} for kwargs in inputs for chosen in every if allowed(kwargs, chosen)]


def allowed(kwargs: Kwargs, chosen: Kwargs) -> bool:
    """Refused by PyTorch on every device: numbers as tensors in a foreach form that is not capturable."""
    numbers = [kwargs.get("lr"), *kwargs.get("betas", ())]
    return kwargs.get("capturable", False) or not chosen.get("foreach") or not any(isinstance(n, torch.Tensor) for n in numbers)


def as_eager(kwargs: Kwargs) -> Kwargs:
    """A CPU has no capturable optimizers, and without that no numbers as tensors in a foreach form: only the order differs."""
    if EAGER == "cuda":
        return kwargs
    return {name: name != "foreach" and value for name, value in kwargs.items() if name != "capturable"}


def model_on(device: str, info: OptimizerInfo) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6, bias=False), nn.Tanh(), nn.Linear(6, 3, bias=False)).to(device)
    # LBFGS divides differences of gradients: the last bit of a float32, which a GPU's fused kernels may round otherwise, grows.
    return model.double() if EAGER == "cuda" and info.optim_cls is torch.optim.LBFGS else model


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    weight = next(model.parameters())
    x = torch.linspace(-1, 1, 20).reshape(5, 4).to(weight)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().sum()
        loss.backward()
        return loss

    if isinstance(optimizer, torch.optim.LBFGS):
        optimizer.step(closure)
    else:
        closure()
        optimizer.step()


def trained(info: OptimizerInfo, kwargs: Kwargs, device: str) -> list[torch.Tensor]:
    model = model_on(device, info)
    optimizer = info.optim_cls(model.parameters(), **copy.deepcopy(kwargs))
    for _ in range(STEPS):
        step(model, optimizer)
    return on_cpu(list(model.parameters()))


def resumed(info: OptimizerInfo, kwargs: Kwargs, source: str, target: str) -> list[torch.Tensor]:
    """As `trained` on ``target``, but for the first two steps, which ``source`` made and saved."""
    model = model_on(source, info)
    optimizer = info.optim_cls(model.parameters(), **kwargs)
    for _ in range(2):
        step(model, optimizer)
    file = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict()), file)
    file.seek(0)
    weights, state = torch.load(file, weights_only=True, map_location=target)
    model = model_on(target, info)
    model.load_state_dict(weights)
    optimizer = info.optim_cls(model.parameters(), **kwargs)
    optimizer.load_state_dict(state)
    for _ in range(STEPS - 2):
        step(model, optimizer)
    return on_cpu(list(model.parameters()))


class TestOptimizers(TestCase):
    @optims(DENSE, dtypes=[torch.float32])
    def test_steps(self, device, dtype, optim_info):
        for kwargs in flavours(optim_info):
            wanted = trained(optim_info, as_eager(kwargs), EAGER)
            self.assertEqual(trained(optim_info, kwargs, DEVICE), wanted, msg=lambda text, k=kwargs: f"{k}: {text}")

    @optims(DENSE, dtypes=[torch.float32])
    def test_saved_in_between(self, device, dtype, optim_info):
        """A state_dict through a file, from the device or from eager mode, goes on where it was taken."""
        for kwargs in flavours(optim_info)[:3]:
            wanted = trained(optim_info, kwargs, EAGER)
            refused = outcome(lambda k=kwargs: resumed(optim_info, k, EAGER, EAGER))
            for source in (DEVICE, EAGER):
                ours = outcome(lambda k=kwargs, source=source: resumed(optim_info, k, source, DEVICE))
                if isinstance(refused, Exception):  # some releases of PyTorch lose track of where a state belongs
                    self.assertTrue(same_error(ours, refused), f"{ours!r}, eager mode: {refused!r}")
                else:
                    self.assertEqual(ours, wanted, msg=lambda text, k=kwargs: f"{k}: {text}")

    @optims([info for info in DENSE if info.supports_param_groups], dtypes=[torch.float32])
    def test_param_groups(self, device, dtype, optim_info):
        def run(where):
            model = model_on(where, optim_info)
            first, second = model.parameters()
            optimizer = optim_info.optim_cls([{"params": [first], "lr": 0.1}], lr=0.01)
            optimizer.add_param_group({"params": [second]})
            for _ in range(STEPS):
                step(model, optimizer)
            return list(model.parameters())

        ours, theirs = (outcome(lambda where=where: run(where)) for where in (DEVICE, EAGER))
        if isinstance(theirs, Exception):
            self.assertTrue(same_error(ours, theirs), f"{ours!r}, eager mode: {theirs!r}")
        else:
            self.assertEqual(ours, theirs)

    @optims(DENSE, dtypes=[torch.float32])
    def test_compiles_nothing_after_warm_up(self, device, dtype, optim_info):
        if optim_info.optim_cls is torch.optim.LBFGS:
            self.skipTest("LBFGS reads its loss and decides by it in Python")
        for kwargs in flavours(optim_info)[:3]:
            model = model_on(DEVICE, optim_info)
            optimizer = optim_info.optim_cls(model.parameters(), **kwargs)
            for _ in range(8 if optim_info.optim_cls.__name__ in CHANGES_FORMULA else 3):
                step(model, optimizer)
            before = lazy_backend.stats()["compiles"]
            for lr in (0.5, 0.25):
                optimizer.param_groups[0]["lr"] = lr
                step(model, optimizer)
            self.assertEqual(lazy_backend.stats()["compiles"], before, msg=f"{kwargs}")

    def test_foreach_is_the_default(self, device):
        """As on CUDA: what PyTorch chooses where a user chooses nothing."""
        weight = nn.Parameter(torch.zeros(2, device=device))
        self.assertEqual(_default_to_fused_or_foreach([weight], differentiable=False, use_fused=False), (False, True))
        self.assertEqual(_default_to_fused_or_foreach([weight], differentiable=False, use_fused=True), (True, False))

    def test_sparse_gradients(self, device):
        for kind in (torch.optim.SparseAdam, torch.optim.SGD, torch.optim.Adagrad):
            results = []
            for where in (DEVICE, EAGER):
                torch.manual_seed(0)
                model = nn.Embedding(10, 3, sparse=True).to(where)
                optimizer = kind(model.parameters(), lr=0.1)
                for _ in range(3):
                    optimizer.zero_grad()
                    model(torch.tensor([1, 2, 2, 7], device=where)).square().sum().backward()
                    optimizer.step()
                results.append(on_cpu(model.weight))
            self.assertEqual(*results)


instantiate_device_type_tests(TestOptimizers, globals(), only_for=("privateuse1",))
