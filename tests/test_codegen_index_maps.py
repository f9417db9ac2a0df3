"""Forms seen through windows and through other forms, against addresses that are counted out."""

from __future__ import annotations

import math
import random

from codegen import forms
from codegen.forms import Form
from codegen.index_maps import Window, disjoint, through


def addresses(form: Form, numel: int) -> list[int]:
    out = []
    for index in range(numel):
        address = 0
        for size, stride in reversed(form):
            address += index % size * stride
            index //= size
        out.append(address)
    return out


def some_form(draw: random.Random, sizes: list[int]) -> Form:
    return forms.collapse(tuple(sizes), tuple(draw.choice([0, 1, 2, 5, 12, 40]) for _ in sizes))


def factors(draw: random.Random, number: int) -> list[int]:
    out = []
    while number > 1:
        out.append(draw.choice([one for one in range(2, number + 1) if number % one == 0]))
        number //= out[-1]
    return out


def test_a_form_through_another_addresses_what_that_picks() -> None:
    draw, found = random.Random(1), 0
    for _ in range(4000):
        sizes = [draw.choice([1, 2, 3, 4, 6]) for _ in range(draw.randint(1, 4))]
        form, numel = some_form(draw, sizes), math.prod(sizes)
        extents = [draw.choice([1, 2, 3, 4, 6]) for _ in range(draw.randint(1, 3))]
        steps = [draw.choice([0, 1, 2, 3, 4, 6, 8, 12, 24]) for _ in extents]
        reach = sum((extent - 1) * step for extent, step in zip(extents, steps))
        if reach >= numel:
            continue
        start, picked = draw.randint(0, numel - 1 - reach), forms.collapse(tuple(extents), tuple(steps))
        got = through(form, picked, start)
        if got is not None:
            found += 1
            every, count = addresses(form, numel), math.prod(extents)
            assert [got[1] + a for a in addresses(got[0], count)] == [every[start + i] for i in addresses(picked, count)]
    assert found > 700


def test_a_slice_of_every_row_goes_through_a_broadcast() -> None:
    assert through(((6, 0), (128, 1)), ((48, 16), (8, 1)), 8) == (((6, 0), (8, 16), (8, 1)), 8)


def test_a_window_moves_a_form_to_its_place() -> None:
    draw, found = random.Random(2), 0
    for _ in range(4000):
        outer, extent, inner = draw.choice([1, 2, 3]), draw.choice([1, 2, 4, 6]), draw.choice([1, 2, 4])
        form = some_form(draw, factors(draw, outer) + factors(draw, extent) + factors(draw, inner))
        whole = draw.choice([extent, extent + 1, extent + 2, 2 * extent, 3 * extent])
        start = draw.randint(0, whole - extent)
        got = Window(inner, extent, whole, start).widen(form, outer * extent * inner)
        if got is None:
            continue
        found += 1
        small = addresses(form, outer * extent * inner)
        large = addresses(got[0], outer * whole * inner)
        for row in range(outer):
            for place in range(extent * inner):
                assert large[row * whole * inner + start * inner + place] - got[1] == small[row * extent * inner + place]
    assert found > 2000


def test_disjoint_forms_share_no_address() -> None:
    draw, found = random.Random(3), 0
    for _ in range(4000):
        pair = []
        for _ in range(2):
            sizes = [draw.choice([1, 2, 3]) for _ in range(3)]
            pair.append(forms.collapse(tuple(sizes), tuple(sorted((draw.choice([1, 2, 3, 6, 12]) for _ in sizes), reverse=True))))
        left, right = pair
        distance = draw.randint(-20, 20)
        if disjoint(left, right, distance):
            found += 1
            far = {distance + address for address in addresses(right, math.prod(size for size, _ in right))}
            assert not far & set(addresses(left, math.prod(size for size, _ in left)))
    assert found > 100
