"""Nodes as calls of ATen: steps that the native core runs, or that only Python can. Imports torch, `ir_nodes` and codegen's plan
types only."""

from __future__ import annotations

from typing import Any, Callable

import torch

from codegen.cuda_graph import blocked_call, scalars
from codegen.cudnn import APART, is_one_call, or_apart
from codegen.executable import Chosen, Emit, Placed, Program
from codegen.step_use import node_use
from codegen.threads import small
from ir_nodes import Layout, Node, call, ops
from ir_nodes.node import Buffer, Operand, Target, Write


def emit_call(node: Node) -> Emit:
    """``node`` as one ATen call on the physical device."""
    if not node.as_recorded:
        return emit_own(node)
    slots, layouts = operand_slots(node)
    draws = tuple(effect.value.buffer.index for effect in node.effects)
    alone = small(node)

    def add(program: Program) -> None:
        places = program.places if isinstance(program, Placed) else {}
        inside = any(places[slot].offset for slot in slots if slot in places)
        program.call(node.instr, slots, layouts if node.relaid or inside else [], alone)

    return Emit(node_use(node), written_buffers(node), add, (node,), blocked_call(node), numbers=tuple(scalars([node])),
                draws=draws)


def emit_own(node: Node) -> Emit:
    """An op that the compiler chose, such as zeros for `codegen.pad_products`. The native core calls it if all that it takes can
    be told beforehand; else Python does."""
    given = given_arguments(node)
    if given is None:
        return emit_python(node, or_apart(node.target, ops.overload(node.target)))
    (slots, layouts), results, alone = operand_slots(node), len(node.returns), small(node)

    def add(program: Program) -> None:
        program.own((node.target, given, results), slots, layouts, alone, node.instr)

    return Emit(node_use(node), written_buffers(node), add, (node,), blocked_call(node))


def needs_python(node: Node, ask: bool = True) -> bool:
    """Can only Python call it, as far as is known? ``ask``: a GPU may be asked, too."""
    return not node.as_recorded and given_arguments(node, ask) is None


def given_arguments(node: Node, ask: bool = True) -> list[Any] | None:
    """What the native core is told of each argument of an op that was not recorded: for tensors how many slots they take, else
    the constant. None where it can't call it: an op that is Python's, or several calls as far as is known, numbers of the
    recording, views that PyTorch resolves. ``ask``: a GPU may be asked, too."""
    if not node.target.startswith("aten::") or tuple(scalars([node])):
        return None
    if any(place.layout.flipped for place in (*node.reads, *node.writes)) or node.target in APART and not is_one_call(node, ask):
        return None
    given: list[Any] = []
    for position, (spec, arg) in enumerate(zip(ops.schema(node.target).arguments, node.args)):
        if "Generator" in str(spec.type) or spec.name == "pin_memory":
            arg = None
        if "Tensor" in str(spec.type):
            arg = None if arg is None and position not in node.left_out else len(arg) if isinstance(arg, tuple) else 1
        given.append(list(arg) if isinstance(arg, tuple) else arg)
    return given


def emit_python(node: Node, function: Callable[..., Any]) -> Emit:
    """``function`` of what ``node`` takes, in its op's place. One that returns a tensor brings the memory that its result
    fills."""
    use = node_use(node)
    returned = [place for place in node.returns if place is not None]
    assert len(returned) < 2 and not node.effects, node

    def run(slots: list[Any], numbers: list[Any]) -> torch.Tensor | None:
        def seen(place: Operand | Write) -> torch.Tensor:
            memory, layout = slots[place.value.buffer.index], place.layout
            typed = memory[: memory.numel() // layout.itemsize * layout.itemsize].view(layout.dtype)
            return torch.as_strided(typed, layout.size, layout.stride, typed.storage_offset() + layout.offset)

        positional, keyword = call.arguments(node, call.Fill(seen, seen, lambda number: numbers[number.index], None))
        made = function(*positional, **keyword)
        found = call.new_results(node, made) if returned else []
        return next((as_promised(one, node.writes[place].layout) for one, place in zip(found, node.returns) if place is not None),
                    None)

    slots = (*use.buffers, *use.makes)
    return Emit(use, written_buffers(node), lambda program: program.python(run, node.instr, slots), (node,),
                blocked_call(node), numbers=tuple(scalars([node])), python=True,
                early=False)  # in a CUDA graph it runs once, at the capture


def as_promised(made: torch.Tensor, layout: Layout) -> torch.Tensor:
    """``made`` itself where its elements lie as ``layout`` says, or it is memory of another shape; else a copy that does."""
    if made.shape != layout.size or all(n == 1 or mine == wanted for n, mine, wanted in
                                        zip(layout.size, made.stride(), layout.stride)):
        return made
    return torch.empty_strided(layout.size, layout.stride, dtype=made.dtype, device=made.device).copy_(made)


def operand_slots(node: Node) -> tuple[list[int], list[Chosen]]:
    """The slot and the layout of each tensor operand in argument order, then of each new output. Slot -1 where there is none,
    or the compiler leaves it out; -2 - a for a tensor that argument ``a`` has read already, since some ops ask whether two of
    their tensors are one."""
    slots: list[int] = []
    layouts: list[Chosen] = []
    read: dict[tuple[Buffer, Layout], int] = {}

    def add(slot: int, layout: Layout | None) -> None:
        slots.append(slot)
        layouts.append((layout.dtype, layout.size, layout.stride, layout.offset) if layout else (torch.uint8, (), (), 0))

    def walk(arg: object, position: int | None) -> None:
        if isinstance(arg, tuple):
            for item in arg:
                add(-1, None) if item is None else walk(item, None)
        elif isinstance(arg, (Operand, Target)):
            place = node.writes[arg.index] if isinstance(arg, Target) else arg
            seen = (place.value.buffer, place.layout)
            again = position is not None and seen in read and not place.layout.flipped
            add(-2 - read[seen] if again else place.value.buffer.index, place.layout)
            if position is not None and isinstance(arg, Operand):
                read.setdefault(seen, position)

    for position, arg in enumerate(node.args):
        add(-1, None) if position in node.left_out else walk(arg, position)
    for index in node.returns:
        add(-1, None) if index is None else add(node.writes[index].value.buffer.index, node.writes[index].layout)
    return slots, layouts


def written_buffers(node: Node) -> tuple[int, ...]:
    return tuple(write.value.buffer.index for write in node.writes)
