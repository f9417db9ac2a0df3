"""Lowers ops that draw random numbers to Philox inside the kernel. Imports torch, `ir_nodes` and codegen's leaf modules.

The numbers are those of CUDA's eager kernels for the same seed and offset, so which number an element gets follows how ATen
would launch: aten/src/ATen/native/cuda/Dropout.cu (`fused_dropout_kernel_vec` and `fused_dropout_kernel`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from codegen import forms
from codegen.expressions import Unsupported
from codegen.instructions import FULL, UNIFORM, Instr, Part
from codegen.lowering import Lowering, arguments
from codegen.promotion import compute_dtype
from codegen.reductions import operand_of
from codegen.tuning import Tuning
from ir_nodes import settings
from ir_nodes.layout import Layout
from ir_nodes.node import Node

BLOCK, WORDS = 256, 4  # threads per block of ATen's launch; numbers that one Philox call gives
VECTOR_BYTES = 16


@dataclass(frozen=True, slots=True)
class Stream:
    """How elements share out the numbers of ATen's ``threads`` threads, each of which works on ``vector`` neighbours at a time.

    ``vector`` 1 stands for the launch in which a thread's four numbers belong to elements that lie ``threads`` apart.
    """

    threads: int
    vector: int


def vector_size(layout: Layout) -> int:
    """How many elements of 16 bytes at most ATen's dropout handles at a time: alignment, size and density allow it."""
    if not layout.is_dense:
        return 1
    vector = VECTOR_BYTES // layout.itemsize
    while vector > 1 and (layout.numel % vector or layout.offset % vector):
        vector //= 2
    return vector


def random(lowering: Lowering, layout: Layout, tuning: Tuning) -> Instr:
    """A uniform number from (0, 1] per element of ``layout``, drawn as ATen's dropout of a tensor like that draws."""
    node = lowering.part.node
    state = node.effects[0].value.buffer
    blocks = min(tuning.philox_blocks, -(-layout.numel // BLOCK))
    increment = ((layout.numel - 1) // (BLOCK * blocks * WORDS) + 1) * WORDS
    vector = vector_size(layout)
    in_memory = forms.collapse(layout.size, layout.stride)  # a vector's elements are neighbours in memory
    place = lowering.place(in_memory if vector > 1 else forms.collapse((layout.numel,), (1,)))
    seed = lowering.add(Instr("seed", torch.int64, UNIFORM, payload=state))
    offset = lowering.add(Instr("offset", torch.int64, UNIFORM, payload=(state, increment)))
    stream = Stream(blocks * BLOCK, vector)
    return lowering.add(Instr("random", torch.float32, FULL, (seed, offset, place), payload=stream))


def calls_for_each(part: Part, row: int) -> bool:
    """Would rows of ``row`` elements take a call of Philox for each number, three of whose four words nobody needs?"""
    streams = [instr.payload for instr in part.instrs if instr.kind == "random"]
    return any(stream.vector not in (WORDS, 2 * WORDS) or row % stream.vector for stream in streams)


def check_generator(tuning: Tuning) -> None:
    """Raises Unsupported where draws are left to ATen."""
    if not tuning.philox_blocks:
        raise Unsupported("its generator is not Philox")
    if not settings.enabled("fused_random"):
        raise Unsupported("fused_random is switched off")


def lower_dropout(node: Node, tuning: Tuning) -> list[Part]:
    """native_dropout in training: the scaled input where a number is below 1 - p, and the mask."""
    args = arguments(node)
    source = operand_of(args["input"])
    if args["train"] is False or len(node.effects) != 1:
        raise Unsupported("dropout that draws nothing")
    check_generator(tuning)
    out, mask = (node.writes[index] for index in node.returns if index is not None)
    if source.layout.is_dense and not out.layout.stride == mask.layout.stride == source.layout.stride:
        raise Unsupported("dropout into another memory format")
    lowering = Lowering(node, source.layout.size)
    value = lowering.load(source)
    keep = _share_kept(lowering, args["p"], value.dtype)
    drawn = random(lowering, source.layout, tuning)
    kept = lowering.expr("({0} < {1})", drawn, keep, dtype=torch.bool)
    lowering.write(node.writes.index(out), _scaled(lowering, value, kept, keep, source.layout.dtype))
    lowering.write(node.writes.index(mask), kept)
    return [lowering.part]


def lower_dropped(node: Node, tuning: Tuning) -> list[Part]:
    """What dropout has given, from its mask (`ir_nodes.own.DROPPED`)."""
    args = arguments(node)
    source = operand_of(args["input"])
    lowering = Lowering(node, source.layout.size)
    value = lowering.load(source)
    kept = lowering.cast(lowering.load(operand_of(args["mask"])), torch.bool)
    keep = _share_kept(lowering, args["p"], value.dtype)
    lowering.write(0, _scaled(lowering, value, kept, keep, source.layout.dtype))
    return [lowering.part]


def _share_kept(lowering: Lowering, p: Any, held: torch.dtype) -> Instr:
    """1 - p, in the precision that ATen computes in."""
    return lowering.cast(lowering.expr("(1.0 - {0})", lowering.read(p, torch.float64), dtype=torch.float64), held)


def _scaled(lowering: Lowering, value: Instr, kept: Instr, keep: Instr, dtype: torch.dtype) -> Instr:
    """What is ``kept``, over the share ``keep`` of all that is."""
    # p = 1 keeps nothing: its scale, which is infinite, must not make NaN of what is dropped
    wide = keep.dtype is torch.float64
    inverse = "1.0 / {0}" if wide else "tl.math.div_rn(1.0, {0})"
    scale = lowering.expr(f"tl.where({{0}} == 0, 0.0, {inverse})", keep, dtype=keep.dtype)
    text = f"{{0}} * {{1}}.to(tl.{'float64' if wide else 'float32'}) * {{2}}"
    return lowering.expr(text, value, kept, scale, dtype=compute_dtype(dtype))
