"""How forms change when an operand is seen from another index space: through a window of a larger one, or through the elements
that another form picks. Imports `codegen.forms` only."""

from __future__ import annotations

import math
from dataclasses import dataclass

from codegen import forms
from codegen.forms import Form


@dataclass(frozen=True, slots=True)
class Window:
    """Where a space of (outer, ``extent``, ``inner``) elements lies in one of (outer, ``whole``, ``inner``): at ``start``."""

    inner: int
    extent: int
    whole: int
    start: int

    def widen(self, form: Form, numel: int) -> tuple[Form, int] | None:
        """``form`` over the small space of ``numel`` elements as one over the large space, and how many elements that has to be
        moved back by. Outside of the window it addresses nothing. None where its dimensions do not fit."""
        upper = self.inner * self.extent
        placed = _placed(form, (self.inner, upper), numel)
        if placed is None:
            return None
        outer = [pair for place, pair in placed if place > upper]
        middle = forms.collapse(*_unzip([pair for place, pair in placed if self.inner < place <= upper]))
        inner = [pair for place, pair in placed if place <= self.inner]
        run = math.prod(size for size, _ in middle[1:])  # how far the middle goes before its outermost dimension moves on
        if self.whole % run or self.start % run:
            return None
        stride = middle[0][1] if middle else 0
        wide = [*outer, (self.whole // run, stride), *middle[1:], *inner]
        return forms.collapse(*_unzip(wide)), self.start // run * stride


def repeated(form: Form, inner: int, times: int, numel: int) -> Form | None:
    """``form`` over ``numel`` elements as one over (outer, ``times``, ``inner``), the same for each of the ``times``; None
    where its dimensions do not fit."""
    placed = _placed(form, (inner,), numel)
    if placed is None:
        return None
    outer = [pair for place, pair in placed if place > inner]
    return forms.collapse(*_unzip([*outer, (times, 0), *(pair for place, pair in placed if place <= inner)]))


def _placed(form: Form, own: tuple[int, ...], numel: int) -> list[tuple[int, tuple[int, int]]] | None:
    """The dimensions of ``form`` cut at ``own`` as well, outermost first, each behind how many elements it spans; None where
    these do not nest."""
    cuts = forms.merge_cuts(forms.cuts(form), tuple(sorted({cut for cut in own if 1 < cut < numel})))
    if cuts is None:
        return None
    dims, position, found = forms.dims_of(cuts, numel), numel, []
    for pair in zip(dims, forms.strides_over(form, dims)):
        found.append((position, pair))
        position //= pair[0]
    return found


def _unzip(pairs: list[tuple[int, int]]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return tuple(size for size, _ in pairs), tuple(stride for _, stride in pairs)


def through(form: Form, picked: Form, start: int) -> tuple[Form, int] | None:
    """``form`` over the indices ``start`` + ``picked``: what it is over the picking space, and its first element's offset.

    None where an index would carry from one dimension of ``form`` into the next.
    """
    digits = [*reversed(form)]
    starts, offset = [], 0
    for size, stride in digits[:-1]:
        starts.append(start % size)
        offset += start % size * stride
        start //= size
    starts.append(start)
    offset += start * digits[-1][1] if digits else 0
    reached = [0] * len(digits)
    sizes: list[int] = []
    strides: list[int] = []
    for count, step in reversed(picked):
        while count > 1:
            taken = _one_digit(digits, starts, reached, count, step)
            if taken is None:
                return None
            size, stride, step = taken
            sizes.append(size)
            strides.append(stride)
            count //= size
    return forms.collapse(tuple(reversed(sizes)), tuple(reversed(strides))), offset


def _one_digit(digits: list[tuple[int, int]], starts: list[int], reached: list[int], count: int, step: int) -> (
        tuple[int, int, int] | None):
    """How many of ``count`` indices, ``step`` apart, stay within one dimension: (how many, stride, the step of the rest)."""
    if step <= 0:
        return (count, 0, 0) if step == 0 else None
    position = 1
    for number, (size, stride) in enumerate(digits):
        if step >= position * size and number + 1 < len(digits):
            position *= size
            continue
        if step % position:
            return None
        multiple = step // position
        last = starts[number] + reached[number] + multiple * (count - 1)
        if last < size:
            reached[number] += multiple * (count - 1)
            return count, multiple * stride, step * count
        turns = size // multiple
        if size % multiple or turns < 2 or count % turns or starts[number] + reached[number] >= multiple:
            return None
        reached[number] += multiple * (turns - 1)
        return turns, multiple * stride, step * turns
    return None


def disjoint(left: Form, right: Form, distance: int) -> bool:
    """True where two operands of one dtype surely share no element; ``right`` begins ``distance`` elements behind ``left``."""
    steps = [max((abs(stride) for _, stride in form), default=0) for form in (left, right)]
    if min(steps) <= 0 or any(stride < 0 for form in (left, right) for _, stride in form):
        return False
    step = max(steps)
    spans = [forms.reach(tuple(pair for pair in form if pair[1] != step)) for form in (left, right)]
    place = distance % step
    return spans[0] <= place and place + spans[1] <= step


def in_memory_order(form: Form, layout: Form, numel: int) -> Form | None:
    """``form`` over the same elements taken in the order in which ``layout`` finds them in memory, which it has to fill densely;
    else None."""
    cuts = forms.merge_cuts(forms.cuts(form), forms.cuts(layout))
    if cuts is None:
        return None
    dims = forms.dims_of(cuts, numel)
    strides, steps = forms.strides_over(form, dims), forms.strides_over(layout, dims)
    order = sorted((dim for dim in range(len(dims)) if dims[dim] > 1), key=lambda dim: -steps[dim])
    expected = 1
    for dim in reversed(order):
        if steps[dim] != expected:
            return None
        expected *= dims[dim]
    return forms.collapse(tuple(dims[dim] for dim in order), tuple(strides[dim] for dim in order))
