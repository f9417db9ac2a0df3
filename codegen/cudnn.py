"""cuDNN's fused convolutions, in steps where cuDNN has no engine for a size. Imports torch, `codegen.bench`, `ir_nodes`.

Which sizes, layouts and types cuDNN can do in one kernel it tells only when it is asked to; `barriers.passes.conv_bias` keeps to
those that it is known for. A GPU is asked when a program is compiled, which finds the kernel that its steps will take, too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from codegen.bench import aten_call
from ir_nodes import Node, Value
from ir_nodes.node import Operand, leaves

NO_ENGINE = "unable to find an engine"
"""What PyTorch says then."""


def relu_apart(x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
    """`aten::cudnn_convolution_relu` as two ops. ``rest``: stride, padding, dilation, groups."""
    return torch.conv2d(x, weight, bias, *rest).relu_()


def sum_apart(x: Tensor, weight: Tensor, other: Tensor, alpha: Any, bias: Tensor | None, *rest: Any) -> Tensor:
    """`aten::cudnn_convolution_add_relu` as three."""
    return torch.conv2d(x, weight, bias, *rest).add_(other, alpha=1 if alpha is None else alpha).relu_()


APART = {"aten::cudnn_convolution_relu": relu_apart, "aten::cudnn_convolution_add_relu": sum_apart}


def or_apart(target: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, an op of the name ``target``, or what does its work where cuDNN can't: from then on without trying."""
    if target not in APART:
        return function
    able = True

    def run(*args: Any, **named: Any) -> Any:
        nonlocal able
        if able:
            try:
                return function(*args, **named)
            except RuntimeError as error:
                if NO_ENGINE not in str(error):
                    raise
                able = False
        return APART[target](*args, **named)

    return run


_whole: dict[tuple[Any, ...], bool] = {}


def is_one_call(node: Node, ask: bool = True) -> bool:
    """Does cuDNN do all of ``node``, a fused convolution, in one call, as far as is known? The current GPU is asked once for each
    op, layouts, constants and switches, with operands that hold anything, unless not to ``ask``; any error is a no."""
    seen = tuple(leaf.layout if isinstance(leaf, Operand) else leaf for arg in node.args for leaf in leaves(arg))
    switches = torch.backends.cudnn
    same = switches.deterministic or torch.are_deterministic_algorithms_enabled()
    key = (node.target, seen, switches.allow_tf32, switches.benchmark, same)
    if ask and key not in _whole:
        _whole[key] = torch.cuda.is_available() and runs(node)
    return _whole.get(key, False)


def runs(node: Node) -> bool:
    """Does its call work, of operands in memory of their own? Any error is a no."""
    @functools.cache
    def memory(value: Value) -> Tensor:
        return torch.empty(value.buffer.nbytes, dtype=torch.uint8, device="cuda")

    try:
        with torch.no_grad():
            aten_call(node, memory)()
    except RuntimeError:
        return False
    return True
