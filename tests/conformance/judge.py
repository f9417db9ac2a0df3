"""Makes one call on the device and the same call in eager mode on the physical device, and compares all that a user can see.

Imports torch, `lazy_backend`, `mirror`, `truth`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.testing._comparison import default_tolerances
from torch.testing._internal.common_utils import TestCase
from torch.utils import _pytree as pytree

from lazy_backend import core
from tests.conformance.mirror import Mirror, tensors
from tests.conformance.truth import Truth, as_right, widen

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.complex64)
PHYSICAL = "cuda" if core.physical_is_cuda() else "cpu"
SEED = 1234
# Their results are memory that nothing wrote.
UNWRITTEN = ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided", "resize_", "resize_as_")
# Their backward adds in 16 bits with atomics, in any order, so on CUDA two eager runs differ by more than their tolerance.
UNORDERED = ("nn.functional.grid_sample", "grid_sampler_2d", "grid_sampler_3d")


def differentiable(op: Any, dtype: torch.dtype) -> bool:
    unordered = PHYSICAL == "cuda" and op.name in UNORDERED and dtype.itemsize == 2
    return op.supports_autograd and dtype in op.supported_backward_dtypes(PHYSICAL) and not unordered


def as_physical(infos: list[Any]) -> list[Any]:
    """OpInfo entries, told that our device takes the dtypes that its physical device takes."""
    for info in infos:
        info.dtypesIf["lazysched"] = info.dtypesIf["privateuse1"] = info.supported_dtypes(PHYSICAL)
    return infos


@dataclass(slots=True)
class Outcome:
    """What a call gave: a result, or an error; and whether it warned of an output that it had to resize."""

    result: Any = None
    error: Exception | None = None
    warned: bool = False


def attempt(call: Callable[[], Any]) -> Outcome:
    """``call()`` under the test's seed, up to the end of its work on the device."""
    torch.manual_seed(SEED)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            result = call()
            torch.accelerator.synchronize()
        except Exception as error:  # noqa: BLE001  whatever it is, eager mode has to say the same
            return Outcome(error=error)
    return Outcome(result=result, warned=any("was resized since it had shape" in str(w.message) for w in caught))


class Judge(TestCase):
    """Base of the judges. ``device`` is the lazy one; what runs on `PHYSICAL` is the truth."""

    def agree(self, device: str, call: Callable[..., Any], given: Any, what: str, process: Callable[[Any], Any] | None = None,
              grad: bool = False, written: bool = True) -> bool:
        """``call(*given)`` does the same on the device and in eager mode; True where it raised no error.

        ``process`` turns a result into what has gradients; ``written``: the values of the result mean something.
        """
        ours, theirs = pair(device, given)
        ran = [attempt(lambda mine=mine: call(*mine)) for mine in (ours, theirs)]
        if not self.same_outcome(*ran, what):
            return False
        results = [run.result for run in ran]
        truth = Truth(lambda: wide_run(device, call, given))
        self.same_value(*results, what, written, truth)
        self.same_value(tensors(ours), tensors(theirs), f"{what}: inputs afterwards")
        self.same(sharing(results[0], ours), sharing(results[1], theirs), f"{what}: shared memory")
        if grad:
            process = process or (lambda result: result)
            self.same_gradients(ours, theirs, [process(result) for result in results], what, truth, process)
        return True

    def close(self, ours: Any, theirs: Any, what: str, truth: Callable[[], Any], computed: torch.dtype | None = None) -> None:
        """Within OpInfo's tolerance, or, where fused kernels round otherwise, as near to the truth as eager mode.

        ``computed``: the dtype computed in, whose tolerance holds for a result that is handed over in a wider one.
        """
        bounds: dict[str, float] = {}
        if computed is not None and isinstance(theirs, torch.Tensor) and theirs.dtype.itemsize > computed.itemsize:
            bounds["rtol"], bounds["atol"] = default_tolerances(computed)
        try:
            self.assertEqual(ours, theirs, exact_device=False, msg=lambda text: f"{what}\n{text}", **bounds)
        except AssertionError:
            if PHYSICAL == "cpu" or not as_right(ours, theirs, truth()):
                raise

    def same_gradients(self, ours: Any, theirs: Any, results: list[Any], what: str, truth: Truth,
                       process: Callable[[Any], Any]) -> None:
        lists = [[out for out in tensors(result) if out.requires_grad] for result in results]
        if not lists[1]:
            return
        seeds = [torch.randn_like(out.detach()) for out in lists[1]]
        runs = []
        for outs, given in zip(lists, (ours, theirs)):
            leaves = [t for t in tensors(given) if t.requires_grad]
            mirror = Mirror(PHYSICAL, outs[0].device)
            cotangents = [mirror.tensor(seed) for seed in seeds]
            runs.append(attempt(lambda o=outs, i=leaves, c=cotangents: torch.autograd.grad(o, i, c, allow_unused=True)))
        if self.same_outcome(*runs, f"{what}: backward"):
            for index, (mine, yours) in enumerate(zip(runs[0].result, runs[1].result)):
                self.same(mine is None, yours is None, f"{what}: gradient {index} is missing")
                if yours is not None:
                    self.close(mine, yours, f"{what}: gradient {index}", lambda i=index: truth.gradient(i, process, seeds))

    def same_outcome(self, ours: Outcome, theirs: Outcome, what: str) -> bool:
        """The same kind of error, or none in both (then True)."""
        if theirs.error is not None:
            if ours.error is None:
                raise AssertionError(f"{what}: eager mode raises {theirs.error!r}, the device nothing")
            if not isinstance(ours.error, type(theirs.error)) or "INTERNAL ASSERT" in str(ours.error):
                raise AssertionError(f"{what}: eager mode raises {theirs.error!r}") from ours.error
            return False
        if ours.error is not None:
            raise AssertionError(f"{what}: {ours.error!r}") from ours.error
        if theirs.warned and not ours.warned:
            raise AssertionError(f"{what}: eager mode warns that it resized an output")
        return True

    def same_value(self, ours: Any, theirs: Any, what: str, values: bool = True, truth: Truth | None = None,
                   computed: torch.dtype | None = None) -> None:
        """Equal values and layouts, leaf by leaf."""
        mine, spec = pytree.tree_flatten(ours)
        yours, their_spec = pytree.tree_flatten(theirs)
        self.same(str(spec), str(their_spec), f"{what}: structure")
        for index, (a, b) in enumerate(zip(mine, yours)):
            place = f"{what}: output {index}"
            if isinstance(b, torch.Tensor):
                self.same_layout(a, b, place)
            if values and isinstance(b, torch.Tensor) and b.layout is not torch.strided:
                a, b = a.to_dense(), b.to_dense()
            if values:
                self.close(a, b, place, lambda i=index: truth.output(i) if truth else None, computed)

    def same_layout(self, ours: torch.Tensor, theirs: torch.Tensor, what: str) -> None:
        self.same(type(ours), type(theirs), f"{what}: class")
        for name, look in LOOKS.items():
            if look is not dense_strides or theirs.layout is torch.strided:
                self.same(look(ours), look(theirs), f"{what}: {name}")

    def same(self, ours: Any, theirs: Any, what: str) -> None:
        if ours != theirs:
            raise AssertionError(f"{what}: the device gives {ours}, eager mode {theirs}")


def dense_strides(tensor: torch.Tensor) -> list[int]:
    """Strides that mean something: of dimensions with several places, in a tensor that has any."""
    return [stride for size, stride in zip(tensor.shape, tensor.stride()) if size > 1] if tensor.numel() else []


LOOKS: dict[str, Callable[[torch.Tensor], Any]] = {
    "dtype": lambda t: t.dtype,
    "shape": lambda t: t.shape,
    "layout": lambda t: t.layout,
    "on the device": lambda t: t.device.type if t.device.type == "cpu" and PHYSICAL != "cpu" else "",
    "strides": dense_strides,
    "requires_grad": lambda t: t.requires_grad,
    "is a view": lambda t: t._is_view(),
    # CUDA's solvers leave conjugations to the reader or not, by the driver that they choose; the numbers are the same.
    "conj bit": lambda t: PHYSICAL == "cpu" and t.is_conj(),
    "neg bit": lambda t: t.is_neg(),
}


def storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else 0


def sharing(outputs: Any, inputs: Any) -> list[tuple[int, bool]]:
    """For each output the first input or output with the same memory, and whether it is that very tensor."""
    found, seen = [], tensors(inputs)
    for out in tensors(outputs):
        match = next((i for i, other in enumerate(seen) if storage(other) == storage(out) != 0), -1)
        found.append((match, match >= 0 and any(other is out for other in seen)))
        seen.append(out)
    return found


def wide_run(device: str, call: Callable[..., Any], given: Any) -> tuple[Any, list[torch.Tensor]]:
    """The call on float64 in eager mode, and its inputs. Raises ValueError where they are that wide already."""
    narrow = Mirror(device, PHYSICAL).all(given)
    wide = widen(narrow)
    if [t.dtype for t in tensors(narrow)] == [t.dtype for t in tensors(wide)]:
        raise ValueError("eager mode's is the only truth")
    torch.manual_seed(SEED)
    return call(*wide), tensors(wide)


def pair(device: str, values: Any) -> tuple[Any, Any]:
    """Two copies of ``values`` (on ``device``): one for the device, one for eager mode."""
    return Mirror(device, device).all(values), Mirror(device, PHYSICAL).all(values)
