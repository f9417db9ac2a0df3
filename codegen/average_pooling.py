"""Lowers average pooling with its gradient, adaptive or not. Imports torch, `ir_nodes` and codegen's lowering modules.

Both look at a few places for each element that they write, as max pooling does: no atomics, one order of sums. Windows that lie
side by side are plain strides.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Sequence

import torch

from codegen.bounds import add, times
from codegen.expressions import Unsupported
from codegen.instructions import Instr, Part
from codegen.lowering import Lowering, arguments
from codegen.pooling import MOST_TAPS, MOST_WINDOWS, Axis, Place, axes_of, elements, rank_of, sum_at, windows
from codegen.promotion import compute_dtype
from codegen.pulled import Known
from codegen.reductions import divide, operand_of
from codegen.whole_windows import in_runs, sums_of_runs
from ir_nodes.node import Node, Operand


@dataclass(frozen=True, slots=True)
class Rule:
    """What an average divides by: where ``padded``, windows count what lies in the padding; or ``always`` the same number."""

    padded: bool
    always: Any


def _number(lowering: Lowering, value: int) -> Instr:
    return lowering.size(value, torch.int32)


def _checked(node: Node, name: str) -> tuple[dict[str, Any], Operand]:
    """The arguments, and the tensor ``name`` of floats. Raises Unsupported."""
    args = arguments(node)
    source = operand_of(args[name])
    if not source.layout.dtype.is_floating_point or len(node.writes) != 1:
        raise Unsupported(f"no kernel for {node.target} of {str(source.layout.dtype).removeprefix('torch.')}")
    return args, source


# Windows of one size


def lower_average_pool(node: Node, known: Known) -> list[Part]:
    """avg_pool2d, avg_pool3d: the windows' sums over how many elements each counts."""
    args, source = _checked(node, "self")
    axes = axes_of(args, rank_of(node))
    sizes, results, extents = _side_by_side(axes), node.writes[0].layout.size[-len(axes) :], source.layout.size[-len(axes) :]
    if sizes and all(size * count <= extent for size, count, extent in zip(sizes, results, extents)):
        return _sums_of_whole(node, known, source, sizes, [_rule(args).always or math.prod(sizes)])
    if math.prod(axis.kernel for axis in axes) > MOST_TAPS:
        raise Unsupported(f"a window of more than {MOST_TAPS} elements")
    lowering = Lowering(node, node.writes[0].layout.size)
    dims = range(len(lowering.shape) - len(axes), len(lowering.shape))
    total = sum_at(lowering, source, {dim: [(place, None) for place in elements(lowering, axis, dim)]
                                      for axis, dim in zip(axes, dims)})  # zero beside the input
    counts = [_count(lowering, axis, lowering.coord(dim), lowering.shape[dim], extent, _rule(args))
              for axis, dim, extent in zip(axes, dims, extents)]
    lowering.write(0, _averaged(lowering, total, counts, _rule(args)))
    return [lowering.part]


def lower_average_pool_backward(node: Node) -> list[Part]:
    """avg_pool2d_backward and that of boxes: the shares in the gradients of those windows that an element lies in."""
    args, grad = _checked(node, "grad_output")
    axes, rule = axes_of(args, rank_of(node)), _rule(args)
    rank, results = len(axes), grad.layout.size[-len(axes) :]
    sizes = _side_by_side(axes)
    if sizes and node.writes[0].layout.size[-rank:] == tuple(map(math.prod, zip(sizes, results))):
        return _shares_of_whole(node, grad, sizes, [rule.always or math.prod(sizes)])
    if math.prod(axis.windows for axis in axes) > MOST_WINDOWS:
        raise Unsupported(f"elements that lie in more than {MOST_WINDOWS} windows")
    lowering = Lowering(node, node.writes[0].layout.size)
    places, counts = {}, []
    dims = range(len(lowering.shape) - rank, len(lowering.shape))
    for axis, dim, extent, count in zip(axes, dims, lowering.shape[-rank:], results):
        found = windows(lowering, axis, lowering.coord(dim))
        places[dim] = [(window, _reaches(lowering, axis, window, lowering.coord(dim))) for window in found]
        counts.append([_count(lowering, axis, window, count, extent, rule) for window in found])

    def share(value: Instr, numbers: tuple[int, ...]) -> Instr:
        return _averaged(lowering, value, [some[number] for some, number in zip(counts, numbers)], rule)

    lowering.write(0, sum_at(lowering, grad, places, share))
    return [lowering.part]


def _side_by_side(axes: Sequence[Axis]) -> list[int]:
    """The windows' sizes, if each begins where the one before it ends, the first with the first element."""
    return [axis.kernel for axis in axes] if all(axis.kernel == axis.stride and not axis.padding for axis in axes) else []


def _sums_of_whole(node: Node, known: Known, source: Operand, sizes: Sequence[int], divisors: Sequence[Any]) -> list[Part]:
    """Averages of windows side by side."""
    return sums_of_runs(node, known, source, sizes, MOST_TAPS, lambda lowering, total: _divided(lowering, total, divisors))


def _shares_of_whole(node: Node, grad: Operand, sizes: Sequence[int], divisors: Sequence[Any]) -> list[Part]:
    """The gradient of those averages: each element has a share in one."""
    layout = in_runs(node.writes[0].layout, sizes)
    lowering = Lowering(node, layout.size)
    value = lowering.load(Operand(grad.value, in_runs(grad.layout, [1] * len(sizes))))
    lowering.store(node.writes[0].value, layout, _divided(lowering, value, divisors))
    return [lowering.part]


def _divided(lowering: Lowering, total: Instr, divisors: Sequence[Any]) -> Instr:
    for one in divisors:
        if isinstance(one, int) and one > 0 and not one & (one - 1):  # exact
            total = lowering.expr(f"{{0}} * {1 / one}", total, dtype=total.dtype)
        else:
            number = lowering.size(one, total.dtype) if isinstance(one, int) else lowering.read(one, total.dtype)
            total = divide(lowering, total, number)
    return total


def _rule(args: dict[str, Any]) -> Rule:
    return Rule(bool(args.get("count_include_pad", True)), args.get("divisor_override"))


def _reaches(lowering: Lowering, axis: Axis, window: Instr, place: Instr) -> Instr | None:
    """Whether ``window`` reaches ``place``, if it may not. Gradients of windows that are none are zero, and what reaches a place
    counts an element."""
    if axis.kernel % axis.stride == 0:  # the last that it may lie in begins so far before it at the most
        return None
    first, kernel = _first(lowering, axis, window), _number(lowering, axis.kernel)
    return lowering.expr("({0} - {1} < {2})", place, first, kernel, dtype=torch.bool)


def _first(lowering: Lowering, axis: Axis, window: Instr) -> Instr:
    """Where a window begins."""
    return add(lowering, times(lowering, window, axis.stride), -axis.padding)


def _count(lowering: Lowering, axis: Axis, window: Instr, results: int, extent: int, rule: Rule) -> Instr:
    """How many elements of a window, one of ``results``, count along a dimension of ``extent``."""
    if (results - 1) * axis.stride + axis.kernel <= extent + 2 * axis.padding and (rule.padded or axis.padding == 0):
        return _number(lowering, axis.kernel)
    first = _first(lowering, axis, window)
    numbers = add(lowering, first, axis.kernel), first, _number(lowering, extent + axis.padding * rule.padded)
    begin = "{1}" if rule.padded else "tl.maximum({1}, 0)"
    return lowering.expr(f"tl.minimum({{0}}, {{2}}) - {begin}", *numbers, dtype=torch.int32)


def _averaged(lowering: Lowering, total: Instr, counts: Sequence[Instr], rule: Rule) -> Instr:
    """The ``total`` over the product of ``counts``, whose reciprocals are made along each dimension: of windows that an element
    lies in there are fewer so, and no division branches."""
    if rule.always is not None:
        return divide(lowering, total, lowering.read(rule.always, total.dtype))
    held = [lowering.cast(count, total.dtype) for count in counts]
    product = " * ".join(f"{{{number}}}" for number in range(len(held)))
    if total.dtype is not torch.float32:
        return divide(lowering, total, lowering.expr(product, *held, dtype=total.dtype))
    parts = [lowering.expr("libdevice.fast_dividef(1.0, {0})", count, dtype=total.dtype) for count in held]
    products = [" * ".join(f"{{{first + number}}}" for number in range(len(held))) for first in (1, 1 + len(held))]
    return lowering.expr(f"_share({{0}}, {', '.join(products)})", total, *held, *parts, dtype=total.dtype)


# Windows that cut a dimension in so many shares


def lower_adaptive_pool(node: Node, known: Known) -> list[Part]:
    """_adaptive_avg_pool2d and that of boxes: averages of as many windows as there are results."""
    _, source = _checked(node, "self")
    rank = rank_of(node)
    sizes = _shares_alike(source.layout.size[-rank:], node.writes[0].layout.size[-rank:])
    if sizes:
        return _sums_of_whole(node, known, source, sizes, sizes)
    lowering = Lowering(node, node.writes[0].layout.size)
    places, counts = {}, []
    for dim, extent in enumerate(source.layout.size[-rank:], len(lowering.shape) - rank):
        begin, end = _share_of(lowering, lowering.coord(dim), extent, lowering.shape[dim])
        places[dim] = _from(lowering, begin, end, _longest(extent, lowering.shape[dim]), MOST_TAPS)
        counts.append(_held(lowering, "{1} - {0}", (begin, end), source))
    if math.prod(map(len, places.values())) > MOST_TAPS:
        raise Unsupported(f"a window of more than {MOST_TAPS} elements")
    total = sum_at(lowering, source, places)
    lowering.write(0, _divided_by(lowering, total, counts))
    return [lowering.part]


def lower_adaptive_pool_backward(node: Node) -> list[Part]:
    """_adaptive_avg_pool2d_backward and that of boxes: the shares in the gradients of those windows that an element lies in."""
    _, grad = _checked(node, "grad_output")
    rank = rank_of(node)
    sizes = _shares_alike(node.writes[0].layout.size[-rank:], grad.layout.size[-rank:])
    if sizes:
        return _shares_of_whole(node, grad, sizes, sizes[::-1])
    lowering = Lowering(node, node.writes[0].layout.size)
    places, counts = {}, []
    for dim, results in enumerate(grad.layout.size[-rank:], len(lowering.shape) - rank):
        extent = lowering.shape[dim]
        first, end = _share_of(lowering, lowering.coord(dim), results, extent)
        found = _from(lowering, first, end, _longest(results, extent), MOST_WINDOWS)
        spans = [_share_of(lowering, window, extent, results) for window, _ in found]
        places[dim] = found
        counts.append([_held(lowering, "tl.maximum({1} - {0}, 1)", span, grad) for span in spans])
    if math.prod(map(len, places.values())) > MOST_WINDOWS:
        raise Unsupported(f"elements that lie in more than {MOST_WINDOWS} windows")

    def share(value: Instr, numbers: tuple[int, ...]) -> Instr:
        return _divided_by(lowering, value, [some[number] for some, number in zip(counts, numbers)][::-1])

    lowering.write(0, sum_at(lowering, grad, places, share))
    return [lowering.part]


def _divided_by(lowering: Lowering, value: Instr, counts: Sequence[Instr]) -> Instr:
    for count in counts:
        value = divide(lowering, value, count)
    return value


def _shares_alike(extents: Sequence[int], results: Sequence[int]) -> list[int]:
    """How many elements each share has, if they are all as long."""
    return [extent // count for extent, count in zip(extents, results)] if not any(map(int.__mod__, extents, results)) else []


def _held(lowering: Lowering, text: str, span: Place, source: Operand) -> Instr:
    """A number of elements as what ``source`` is computed in."""
    return lowering.cast(lowering.expr(text, *span, dtype=torch.int32), compute_dtype(source.layout.dtype))


def _longest(extent: int, shares: int) -> int:
    """How many elements the longest of ``shares`` of ``extent`` has; they overlap where it does not divide."""
    return max(-(-(share + 1) * extent // shares) - share * extent // shares for share in range(shares))


def _share_of(lowering: Lowering, share: Instr, extent: int, shares: int) -> Place:
    """Where the share with this number begins and where it ends."""
    numbers = share, _number(lowering, extent), _number(lowering, shares)
    return (lowering.expr("{0} * {1} // {2}", *numbers, dtype=torch.int32),
            lowering.expr("(({0} + 1) * {1} + {2} - 1) // {2}", *numbers, dtype=torch.int32))


def _from(lowering: Lowering, begin: Instr, end: Instr, longest: int, most: int) -> list[Place]:
    """``longest`` places from ``begin`` on, and whether each lies before ``end``. Raises Unsupported for more than ``most``."""
    if longest > most:
        raise Unsupported(f"windows of more than {most} elements")
    places = [lowering.expr(f"{{0}} + {step}", begin, dtype=torch.int32) for step in range(longest)]
    return [(place, lowering.expr("({0} < {1})", place, end, dtype=torch.bool)) for place in places]


POOLS = {
    **dict.fromkeys(("avg_pool2d", "avg_pool3d"), lower_average_pool),
    **dict.fromkeys(("_adaptive_avg_pool2d", "_adaptive_avg_pool3d"), lower_adaptive_pool),
}
GRADIENTS = {
    **dict.fromkeys(("avg_pool2d_backward", "avg_pool3d_backward"), lower_average_pool_backward),
    **dict.fromkeys(("_adaptive_avg_pool2d_backward", "_adaptive_avg_pool3d_backward"), lower_adaptive_pool_backward),
}
"""Keyed by `ir_nodes.node.Node.name`."""
