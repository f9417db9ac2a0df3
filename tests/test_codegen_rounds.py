"""How candidates of a round of fusion are ranked, and that rounds find what the order of recording hides."""

from __future__ import annotations

import torch
from graphs import check, kernels, record

from codegen import rounds
from codegen.fuse import Fuser, add_dependencies, lower_all, plan
from codegen.group import Group
from codegen.tuning import HOPPER
from ir_nodes import Graph, settings


def groups_of(graph: Graph) -> list[Group]:
    """Each unit in a group of its own."""
    units = lower_all(graph)
    add_dependencies(graph, units, ())
    with settings.override(disable="fusion"):
        fuser = Fuser(HOPPER, {})
        for unit in units:
            fuser.place(unit)
    return fuser.groups()


def test_makers_come_before_sharers_and_more_bytes_before_fewer() -> None:
    def program(x: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
        y = x * 2
        return [y.exp(), x.sin(), b + 1, x[:4] + b]

    recording, _ = record(program, torch.randn(8, 16), torch.randn(16))
    found = rounds.pairs(groups_of(recording.graph), True)
    assert [pair.rank for pair in found] == sorted(pair.rank for pair in found)
    names = [(pair.first.units[0].node.name, pair.second.units[0].node.name) for pair in found]
    assert found[0].vertical and names[0] == ("mul", "exp") and found[0].shared == 8 * 16 * 4
    assert names[1] == ("mul", "sin") and found[1].shared == 8 * 16 * 4
    assert not any(pair.vertical for pair in found[1:]) and ("add", "add") in names
    assert all(pair.vertical for pair in rounds.pairs(groups_of(recording.graph), False))


def test_a_number_that_all_share_is_no_reason_to_share_a_kernel() -> None:
    def program(number: torch.Tensor, *tensors: torch.Tensor) -> list[torch.Tensor]:
        return [tensor * number for tensor in tensors]

    tensors = [torch.randn(64) for _ in range(4)]
    assert len(kernels(check(program, torch.ones(()), *tensors))) == 4
    check(program, torch.ones(()), *tensors, count=1, combos=True)


def test_elements_of_any_row_are_not_looked_up_in_a_kernel_that_walks_all_rows() -> None:
    def program(x: torch.Tensor, index: torch.Tensor) -> list[torch.Tensor]:
        return [x.mean(0), x.gather(0, index), x.flip(0) + x]

    made = check(program, torch.randn(40, 24), torch.randint(0, 40, (40, 24)))
    names = [[node.name for node in step.nodes] for step in kernels(made)]
    assert ["gather"] in names and any("mean" in one and "flip" in one for one in names), names


def test_an_update_is_not_torn_from_its_readers_by_who_reads_the_same() -> None:
    def program(p: torch.Tensor, g: torch.Tensor) -> list[torch.Tensor]:
        half = p.bfloat16()
        grad = (half.float() * g).digamma()  # ATen
        p.mul_(0.9)
        p.sub_(grad)
        return [p, half]

    made = check(program, torch.randn(40), torch.randn(40), extern=1, count=2)
    # What is widened again is read as it is, so its own copy is nowhere.
    assert [[node.name for node in step.nodes] for step in kernels(made)] == [["_to_copy", "mul"], ["mul_", "sub_"]]


def test_sharers_that_lie_apart_are_found_in_rounds() -> None:
    def program(x: torch.Tensor) -> list[torch.Tensor]:
        return [x.sin(), x[:5] * 2, x[1:] + 1, x.cos()]

    check(program, torch.randn(9, 16), count=3)


def test_fusion_and_its_horizontal_half_can_be_switched_off() -> None:
    def program(x: torch.Tensor) -> list[torch.Tensor]:
        return [(x * 2).exp(), x.sin()]

    for disabled, count in (("", 1), ("horizontal", 2), ("fusion", 3)):
        with settings.override(disable=disabled):
            recording, _ = record(program, torch.randn(40))
            assert len(kernels(plan(recording.graph))) == count
