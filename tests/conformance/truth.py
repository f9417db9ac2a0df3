"""Which of two roundings is right, where the device's fused kernels round otherwise than eager mode's. Imports torch, `mirror`.

The criterion is PyTorch's own for compiled code, `torch._dynamo.utils.same`: against the same computation in float64 the error
may be no more than two to three times that of eager mode. On a CPU both sides run the same kernels, and nobody is asked here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

TOLERANCE = 1e-4  # a tenth of it is added to the errors: what `assertEqual` allows float32 near zero


def widen(tree: Any) -> Any:
    """``tree`` with float64 and complex128 in the place of narrower tensors and dtypes; modules too."""

    def wide(leaf: Any) -> Any:
        if isinstance(leaf, torch.nn.Module):
            return leaf.double()
        if isinstance(leaf, torch.dtype):
            return torch.float64 if leaf.is_floating_point else leaf
        if not isinstance(leaf, torch.Tensor) or not (leaf.is_floating_point() or leaf.is_complex()):
            return leaf
        dtype = torch.complex128 if leaf.is_complex() else torch.float64
        return leaf.detach().to(dtype).requires_grad_(leaf.requires_grad)

    return pytree.tree_map(wide, tree)


def as_right(ours: Any, theirs: Any, truth: Any) -> bool:
    """Is ``ours`` about as near to ``truth`` as ``theirs``? All three are tensors; False where the truth is not a wide one."""
    from torch._dynamo.utils import same  # it takes a second to import

    every = (ours, theirs, truth)
    if not all(isinstance(one, torch.Tensor) and one.layout is torch.strided for one in every) or ours.shape != truth.shape:
        return False
    if truth.dtype not in (torch.float64, torch.complex128):
        return False
    parts = [torch.view_as_real(one.detach().resolve_conj()) if one.is_complex() else one.detach() for one in every]
    mine, yours, wide = (one.cpu() for one in parts)
    return bool(same(yours, mine, wide, tol=TOLERANCE, equal_nan=True))


class Truth:
    """A call in float64 on the physical device, made when it is first asked for."""

    def __init__(self, call: Callable[[], tuple[Any, list[torch.Tensor]]]) -> None:
        """``call`` gives what has gradients, and the inputs that want them."""
        self.call = call
        self.ran: tuple[Any, list[torch.Tensor]] | None = None

    def run(self) -> tuple[Any, list[torch.Tensor]]:
        if self.ran is None:
            try:
                self.ran = self.call()
            except Exception:  # noqa: BLE001  the op takes no float64: there is no truth then
                self.ran = (None, [])
        return self.ran

    def output(self, index: int) -> Any:
        leaves = pytree.tree_leaves(self.run()[0])
        return leaves[index] if index < len(leaves) else None

    def gradient(self, index: int, process: Callable[[Any], Any], seeds: list[torch.Tensor]) -> Any:
        """That of input ``index`` of those that want one, for cotangents ``seeds``."""
        result, inputs = self.run()
        outs = [out for out in pytree.tree_leaves(process(result)) if isinstance(out, torch.Tensor) and out.requires_grad]
        if len(outs) != len(seeds):
            return None
        leaves = [t for t in inputs if t.requires_grad]
        try:
            return torch.autograd.grad(outs, leaves, widen(seeds), allow_unused=True, retain_graph=True)[index]
        except RuntimeError:
            return None


def all_right(ours: Any, theirs: Any, truth: Callable[[], Any], tolerance: Callable[[Any, Any], None]) -> None:
    """Every leaf of ``ours`` passes ``tolerance`` with that of ``theirs``, or is as near to that of ``truth``.

    Raises AssertionError.
    """
    mine, yours = pytree.tree_leaves(ours), pytree.tree_leaves(theirs)
    wide: list[Any] = []
    assert len(mine) == len(yours)
    for index, (a, b) in enumerate(zip(mine, yours)):
        try:
            tolerance(a, b)
        except AssertionError:
            wide = wide or pytree.tree_leaves(truth())
            if len(wide) != len(yours) or not as_right(a, b, wide[index]):
                raise
