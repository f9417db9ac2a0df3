"""Every module of PyTorch's `module_db` computes, trains and is saved on the device as in eager mode."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.testing._internal.common_device_type import instantiate_device_type_tests
from torch.testing._internal.common_modules import FunctionInput, ModuleErrorEnum, ModuleInfo, ModuleInput, module_db, modules
from torch.testing._internal.common_utils import TestCase, freeze_rng_state
from torch.utils._pytree import tree_map

import lazy_backend  # noqa: F401
from tests.conformance import selection
from tests.conformance.eager import DEVICE, EAGER, all_on, moved, on_cpu, outcome, same_error, tensors
from tests.conformance.truth import all_right, widen

# Not equal to the last bit, for a reason: all else is, where eager mode runs on a CPU.
ROUNDS_OTHERWISE = {
    "nn.RNN": "eager mode on a CPU multiplies the inputs of all time steps at once, on other devices step by step",
    "nn.GRU": "as RNN",
    "nn.LSTM": "as RNN; in float32 by oneDNN",
    "nn.LinearCrossEntropyLoss": "PyTorch accumulates in other dtypes on a CPU than on any other device",
}
# Also in half precision.
ROUNDS_HALVES_OTHERWISE = {
    **ROUNDS_OTHERWISE,
    "nn.GRUCell": "off the CPU, eager mode adds the bias to a product that was rounded, on it before the rounding",
    "nn.LSTMCell": "as GRUCell",
}
HALVES = [info for info in module_db if info.name not in ROUNDS_HALVES_OTHERWISE]


def everyday(name: str) -> bool:
    if "LinearCrossEntropy" in name or selection.dtype_of(name) != "float32":  # half a minute
        return False
    return name.startswith(("test_trains", "test_errors")) or selection.one_in(name, 4)


def samples(info: ModuleInfo, dtype: torch.dtype, training: bool, grad: bool = True) -> list[ModuleInput]:
    """The samples of ``info``, on the CPU."""
    torch.manual_seed(0)
    every = info.module_inputs_func(info, device="cpu", dtype=dtype, requires_grad=grad, training=training)
    return [sample for sample in every if sample.forward_input is not None]


def cast(tree: Any, dtype: torch.dtype) -> Any:
    """``tree`` with its floating-point tensors as fresh leaves of ``dtype``."""

    def convert(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not leaf.is_floating_point():
            return leaf
        return leaf.detach().to(dtype).requires_grad_(leaf.requires_grad)

    return tree_map(convert, tree)


def make(info: ModuleInfo, sample: ModuleInput, dtype: torch.dtype, training: bool, device: str) -> nn.Module:
    torch.manual_seed(1)
    constructor = moved((sample.constructor_input.args, sample.constructor_input.kwargs), "cpu")
    module = info.module_cls(*constructor[0], **constructor[1]).to(dtype).to(device)
    return module.train(training)


def call(module: nn.Module, sample: ModuleInput, device: str,
         change: Callable[[Any], Any] = lambda leaf: leaf) -> tuple[Any, list[torch.Tensor]]:
    """What ``module`` gives for the inputs of ``sample``, each changed by ``change``, and those inputs."""
    torch.manual_seed(2)
    args, kwargs = tree_map(change, moved((sample.forward_input.args, sample.forward_input.kwargs), device))
    return module(*args, **kwargs), tensors((args, kwargs))


def gradients(module: nn.Module, output: Any, inputs: list[torch.Tensor]) -> list[torch.Tensor | None]:
    """Of the inputs and parameters, by backward from ``output`` weighted with fixed numbers."""
    outputs = [tensor for tensor in tensors(output) if tensor.requires_grad]
    torch.manual_seed(3)
    weights = [torch.rand(tensor.shape, dtype=tensor.dtype).to(tensor.device) for tensor in outputs]
    if outputs:
        torch.autograd.backward(outputs, weights)
    return [tensor.grad for tensor in [*inputs, *module.parameters()] if tensor.requires_grad]


def as_on_the_device(info: ModuleInfo) -> Any:
    """cuDNN's recurrent layers multiply in TF32, which is far from float64, and have no backward in eval mode."""
    recurrent = info.module_cls.__name__ in ("RNN", "GRU", "LSTM")
    return torch.backends.cudnn.flags(enabled=False) if recurrent and EAGER == "cuda" else contextlib.nullcontext()


class TestModules(TestCase):
    """Each test runs a module on the device and eagerly on its physical device."""

    def run_on(self, info: ModuleInfo, sample: ModuleInput, dtype: torch.dtype, training: bool, device: str,
               wide: bool = False) -> Any:
        """Outputs, gradients and state; with ``wide`` computed in float64 from the same numbers."""
        with freeze_rng_state(), as_on_the_device(info):
            module = make(info, sample, dtype, training, device)
            module, change = (module.double(), widen) if wide else (module, lambda leaf: leaf)
            output, inputs = call(module, sample, device, change)
            grads = gradients(module, output, inputs)
            state = dict(module.state_dict())
        self.assertTrue(all_on((output, grads, state), device))
        return on_cpu((output, grads, state))

    @modules(module_db)
    def test_trains(self, device, dtype, module_info, training):
        if module_info.name == "nn.LinearCrossEntropyLoss" and dtype in (torch.bfloat16, torch.float16):
            self.skipTest(ROUNDS_OTHERWISE[module_info.name])
        for sample in samples(module_info, dtype, training):
            wanted = self.run_on(module_info, sample, dtype, training, EAGER)
            ours = self.run_on(module_info, sample, dtype, training, DEVICE)
            exact = EAGER == "cpu" and module_info.name not in ROUNDS_OTHERWISE
            if exact:
                self.assertEqual(ours, wanted, atol=0, rtol=0, equal_nan=True)
            else:
                self.compare(ours, wanted, lambda: self.run_on(module_info, sample, dtype, training, EAGER, wide=True))  # noqa: B023

    @modules(HALVES, allowed_dtypes=[torch.float32])
    def test_half_precision(self, device, dtype, module_info, training):
        """In bfloat16 and float16 a module gives what it gives in eager mode, or what that refuses."""
        for half in (torch.bfloat16, torch.float16):
            for sample in samples(module_info, dtype, training):
                halved = copy.copy(sample)
                given = (sample.forward_input.args, sample.forward_input.kwargs)
                halved.forward_input = FunctionInput()
                halved.forward_input.args, halved.forward_input.kwargs = cast(given, half)
                ours, theirs = (outcome(lambda: self.run_on(module_info, halved, half, training, where))  # noqa: B023
                                for where in (DEVICE, EAGER))
                self.compare(ours, theirs, lambda: self.run_on(module_info, halved, half, training, EAGER, wide=True))  # noqa: B023

    @modules(module_db, allowed_dtypes=[torch.float32])
    def test_saved_and_moved(self, device, dtype, module_info, training):
        """state_dict, pickle, torch.save, deepcopy and `.to` in both directions keep every number."""
        for sample in samples(module_info, dtype, training, grad=False):
            module = make(module_info, sample, dtype, training, DEVICE)
            call(module, sample, DEVICE)  # a lazy module takes its shape here
            state = on_cpu(dict(module.state_dict()))
            for other in self.copies(module):
                self.assertEqual(on_cpu(dict(other.state_dict())), state)
                self.assertTrue(all_on(dict(other.state_dict()), DEVICE))
                again = copy.deepcopy(module)
                self.assertEqual(on_cpu(call(other, sample, DEVICE)[0]), on_cpu(call(again, sample, DEVICE)[0]))
            fresh = copy.deepcopy(module)
            parameters = list(fresh.parameters())
            for target in (EAGER, DEVICE, EAGER):
                self.assertTrue(all_on(dict(fresh.to(target).state_dict()), target))
                self.assertEqual(on_cpu(dict(fresh.state_dict())), state)
                self.assertTrue(all(one is other for one, other in zip(parameters, fresh.parameters())))

    def copies(self, module: nn.Module) -> list[nn.Module]:
        saved, weights = io.BytesIO(), io.BytesIO()
        torch.save(module, saved)
        torch.save(module.state_dict(), weights)
        saved.seek(0)
        weights.seek(0)
        filled = copy.deepcopy(module)
        for tensor in filled.state_dict().values():
            tensor.zero_()
        filled.load_state_dict(torch.load(weights, weights_only=True))
        return [copy.deepcopy(module), pickle.loads(pickle.dumps(module)), torch.load(saved, weights_only=False), filled]

    @modules(module_db, allowed_dtypes=[torch.float32])
    def test_strided_inputs(self, device, dtype, module_info, training):
        """Inputs with gaps, or channels last, give what dense ones give."""

        def gaps(leaf):
            if not isinstance(leaf, torch.Tensor) or leaf.dim() == 0:
                return leaf
            return torch.stack([leaf.detach()] * 2, -1)[..., 0].requires_grad_(leaf.requires_grad)

        def run(sample, device, change):
            module = make(module_info, sample, dtype, training, device)
            args, kwargs = moved((sample.forward_input.args, sample.forward_input.kwargs), device)
            args, kwargs = tree_map(change, (args, kwargs))
            torch.manual_seed(2)
            output = module(*args, **kwargs)
            strides = [tensor.stride() for tensor in tensors(output)]
            return output, gradients(module, output, tensors((args, kwargs))), strides

        def channels_last(leaf):
            if not isinstance(leaf, torch.Tensor) or leaf.dim() not in (4, 5):
                return leaf
            form = torch.channels_last if leaf.dim() == 4 else torch.channels_last_3d
            return leaf.detach().contiguous(memory_format=form).requires_grad_(leaf.requires_grad)

        for sample in samples(module_info, dtype, training):
            for change in (gaps, channels_last):
                with as_on_the_device(module_info):
                    ours, theirs = (outcome(lambda: run(sample, where, change)) for where in (DEVICE, EAGER))  # noqa: B023
                self.compare(ours, theirs)

    @modules([info for info in module_db if info.module_error_inputs_func], allowed_dtypes=[torch.float32])
    def test_errors(self, device, dtype, module_info, training):
        """What a module refuses, in eager mode's words."""
        more = {"dtype": dtype, "requires_grad": False, "training": training}
        for wrong in module_info.module_error_inputs_func(module_info, device=EAGER, **more):
            given = wrong.module_error_input
            forward = wrong.error_on == ModuleErrorEnum.FORWARD_ERROR

            def run(device, given=given, forward=forward):
                constructor = moved((given.constructor_input.args, given.constructor_input.kwargs), "cpu")
                module = module_info.module_cls(*constructor[0], **constructor[1]).to(device).train(training)
                if forward:
                    return module(*moved(given.forward_input.args, device), **moved(given.forward_input.kwargs, device))

            ours, theirs = (outcome(lambda: run(device)) for device in (DEVICE, EAGER))  # noqa: B023
            self.compare(ours, theirs)

    def compare(self, ours: Any, theirs: Any, truth: Callable[[], Any] = lambda: None) -> None:
        if isinstance(theirs, Exception):
            self.assertTrue(same_error(ours, theirs), f"{ours!r}, eager mode: {theirs!r}")
        elif EAGER == "cpu" or isinstance(ours, Exception):
            self.assertEqual(ours, theirs, equal_nan=True)
        else:
            all_right(ours, theirs, truth, lambda a, b: self.assertEqual(a, b, equal_nan=True))


instantiate_device_type_tests(TestModules, globals(), only_for=("privateuse1",))
