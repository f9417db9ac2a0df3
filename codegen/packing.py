"""Lowers masks to bits and back (`ir_nodes.own.PACKED`, `UNPACKED`). Imports torch, `ir_nodes` and codegen's leaf modules.

Both walk a mask's elements. Where an element's bit lies follows from where the element would, so that either takes part in a
kernel over such elements; eight neighbours, which a thread holds anyway, are one access.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from codegen import forms
from codegen.expressions import Unsupported
from codegen.instructions import FULL, IN_BITS, Instr, MemAccess, Part
from codegen.lowering import Lowering, arguments
from codegen.reductions import operand_of
from ir_nodes.layout import Layout
from ir_nodes.node import Node, Value
from ir_nodes.own import BITS


def lower_pack(node: Node) -> list[Part]:
    mask, bits = operand_of(arguments(node)["mask"]), node.writes[0]
    if not mask.layout.is_dense or mask.layout.numel % BITS:
        raise Unsupported("a mask that fills no bytes")
    lowering = Lowering(node, mask.layout.size)
    value, place = lowering.load(mask), _place(lowering, mask.layout)
    lowering.add(Instr("put", torch.bool, FULL, (value, place), IN_BITS, _bits(lowering, bits.value, bits.layout)))
    return [lowering.part]


def lower_unpack(node: Node) -> list[Part]:
    bits, mask = operand_of(arguments(node)["bits"]), node.writes[0].layout
    lowering = Lowering(node, mask.size)
    place = _place(lowering, mask)
    access = _bits(lowering, bits.value, bits.layout)
    lowering.write(0, lowering.add(Instr("take", torch.bool, FULL, (place,), IN_BITS, access)))
    return [lowering.part]


def _bits(lowering: Lowering, value: Value, layout: Layout) -> MemAccess:
    """Bytes of ``value``, which every program may touch anywhere as far as fusion knows."""
    first = lowering.access(value, Layout(layout.dtype, (), (), layout.offset))
    return replace(first, scattered=True, high=first.low + layout.nbytes)


def _place(lowering: Lowering, mask: Layout) -> Instr:
    """Where an element lies in a mask of bytes."""
    return lowering.place(forms.collapse(mask.size, mask.stride))
