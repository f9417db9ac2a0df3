"""Launches of attention's kernels: their arguments, blocks and grids. Imports torch, `ir_nodes` and codegen's kernel modules."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from codegen import attention_source as source
from codegen.attention_draws import DRAW as DRAWING
from codegen.attention_joined import gradients_of
from codegen.attention_sums import ROWS, sums_of
from codegen.kernel import Kernel, KernelArg, KernelStep, Offset, Pointer, Scalar, Seed, Size, Temporary
from codegen.lowering import arguments
from codegen.source_args import POINTER_TYPES
from ir_nodes.node import Node, Operand, ScalarInput, Value, Write

TOGETHER = 48
"""Heads at most whose longest blocks run first, while a cache holds their keys and values."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """Queries and keys that a program takes at a time, its warps, and how many steps ahead it loads."""

    queries: int
    keys: int
    warps: int
    stages: int


DRAW, FORWARD, QUERIES, KEYS = Blocks(128, 128, 4, 1), Blocks(64, 64, 4, 3), Blocks(ROWS, 64, 4, 3), Blocks(64, ROWS, 4, 3)
"""The fastest of some dozens on an H200. Those of a backward take the rows that are summed at a time."""

DROPPING, NEAR = Blocks(128, 64, 8, 3), Blocks(ROWS, 64, 4, 2)
"""A forward's where something drops; gradients' of queries where nothing does and attention is causal: 2 to 8 % faster there."""


@dataclass(frozen=True, slots=True, eq=False)
class Left:
    """What a forward leaves for its backwards, in memory that only they know: bits, None where nothing drops; each row's sum."""

    words: Temporary | None
    sums: Temporary


def draw(node: Node, words: Temporary, increment: int) -> KernelStep:
    """The launch that draws what drops, and moves the generator on by ``increment``."""
    args, state = arguments(node), node.effects[0].value.buffer
    (batch, heads, queries, _), keys = args["query"].layout.size, args["key"].layout.size[2]
    rows, columns = (math.gcd(size, most) for size, most in ((queries, DRAW.queries), (keys, DRAW.keys)))
    given = _Arguments()
    given.scratch("words", words, torch.int32, written=True)
    given.entries += [("seed", "i64", Seed(state)), ("drawn", "i64", Offset(state, increment))]
    given.number("p", args["dropout_p"])
    given.sizes(queries=queries, keys=keys)
    constants = {"B0": rows, "B1": columns // 32, "CAUSAL": int(args["is_causal"])}
    return given.step("draw", DRAWING, node, constants, DRAW.warps, (queries // rows, keys // columns, batch * heads))


def forward(node: Node, left: Left) -> KernelStep:
    given, args = _Arguments(), arguments(node)
    for name, strides in (("query", "q"), ("key", "k"), ("value", "v")):
        given.tensor(strides, args[name], strides)
    given.tensor("out", node.writes[0], "o")
    given.scratch("sums", left.sums, torch.float32, written=True)
    blocks = DROPPING if left.words is not None and args["query"].layout.size[2] % DROPPING.queries == 0 else FORWARD
    return _attend("forward", source.FORWARD, given, node, left, blocks)


def gradients(node: Node, left: Left, common: Temporary) -> list[KernelStep]:
    """The launches for the gradients of queries, and of keys and values."""
    args = arguments(node)
    dq, dk, dv = (write for write in gradients_of(node) if write is not None)
    partial = dict(zip(("dq", "dk", "dv"), sums_of(node)))
    steps = []
    near = NEAR if left.words is None and args["is_causal"] else QUERIES
    for name, text, blocks in (("queries", source.QUERIES, near), ("keys", source.KEYS, KEYS)):
        given = _Arguments()
        for tensor, strides in (("query", "q"), ("key", "k"), ("value", "v")):
            given.tensor(strides, args[tensor], strides)
        given.tensor("grad", args["grad_out"], "g")
        if name == "queries":
            given.tensor("out", args["out"], "o")
            given.tensor("dq", dq, "d")
        else:
            given.tensor("dk", dk, "d")
            given.tensor("dv", dv, "e")
        text = _with_sums(text, given, {one: partial[one] for one in (("dq",) if name == "queries" else ("dk", "dv"))})
        given.scratch("common", common, torch.float32, written=name == "queries")
        if name == "queries":
            given.scratch("sums", left.sums, torch.float32)
        steps.append(_attend(f"backward_{name}", text, given, node, left, blocks))
    return steps


def _with_sums(text: str, given: "_Arguments", partial: dict[str, Write | None]) -> str:
    """The kernel ``text`` that leaves sums of those gradients that have a place for them."""
    places = {name: write for name, write in partial.items() if write is not None}
    for name, write in places.items():
        text = source.with_sums(text, name)
        given.place(f"{name}_partial", write)
    if places:
        given.sizes(columns=next(iter(places.values())).layout.stride[0])
    return text


def _attend(name: str, text: str, given: "_Arguments", node: Node, left: Left, blocks: Blocks) -> KernelStep:
    """A launch of programs for a block of queries each, of keys where gradients of these are made. Those of several heads lie
    side by side."""
    args = arguments(node)
    (batch, heads, queries, width), keys = args["query"].layout.size, args["key"].layout.size[2]
    programs = keys // blocks.keys if name == "backward_keys" else queries // blocks.queries
    group = max(count for count in range(1, TOGETHER + 1) if batch * heads % count == 0)
    if left.words is None:
        text = source.without_drops(text)
    else:
        given.scratch("words", left.words, torch.int32)
        given.number("p", args["dropout_p"])
    scale = args.get("scale")
    if isinstance(scale, ScalarInput):
        given.number("scale", scale)
    given.sizes(heads=heads, group=group, queries=queries, keys=keys)
    constants = {"B0": blocks.queries, "B1": blocks.keys, "D": width, "CAUSAL": int(args["is_causal"]), "STAGES": blocks.stages}
    text = text.replace("{scale}", "scale" if isinstance(scale, ScalarInput) else repr(width**-0.5 if scale is None else scale))
    return given.step(name, text, node, constants, blocks.warps, (programs * group, batch * heads // group, 1))


class _Arguments:
    """The run-time arguments of one kernel, in the order of its parameters."""

    def __init__(self) -> None:
        self.entries: list[tuple[str, str, KernelArg]] = []
        self.reads: list[Value | Temporary] = []
        self.writes: list[Value | Temporary] = []

    def tensor(self, name: str, place: Operand | Write, strides: str) -> None:
        """A tensor, and its strides along batch, heads and rows as ``strides`` with "b", "h" and "t"."""
        self.place(name, place)
        self.entries += [(strides + axis, "i32", Size(stride)) for axis, stride in zip("bht", place.layout.stride)]

    def place(self, name: str, place: Operand | Write) -> None:
        """Where a tensor starts."""
        layout = place.layout
        self.entries.append((name, f"*{POINTER_TYPES[layout.dtype]}",
                             Pointer(place.value, layout.offset * layout.itemsize, layout.dtype)))
        (self.writes if isinstance(place, Write) else self.reads).append(place.value)

    def scratch(self, name: str, memory: Temporary, dtype: Any, written: bool = False) -> None:
        self.entries.append((name, f"*{POINTER_TYPES[dtype]}", Pointer(memory, 0, dtype)))
        (self.writes if written else self.reads).append(memory)

    def sizes(self, **sizes: int) -> None:
        self.entries += [(name, "i32", Size(size)) for name, size in sizes.items()]

    def number(self, name: str, number: ScalarInput) -> None:
        self.entries.append((name, "fp32", Scalar(number.index, torch.float32)))

    def divisible(self) -> tuple[str, ...]:
        return tuple(name for name, _, argument in self.entries
                     if isinstance(argument, Pointer) or isinstance(argument, Size) and argument.value % 16 == 0)

    def step(self, name: str, text: str, node: Node, constants: dict[str, int], warps: int,
             grid: tuple[int, int, int]) -> KernelStep:
        """The launch of the kernel ``text``, which has gaps for its name, title and parameters."""
        whole = f"attention_{name}"
        parameters = ", ".join(name for name, _, _ in self.entries)
        for gap, filled in (("{title}", node.target), ("{name}", whole), ("{parameters}", parameters)):
            text = text.replace(gap, filled)
        kernel = Kernel(whole, text, tuple((one, kind) for one, kind, _ in self.entries), tuple(constants.items()),
                        self.divisible(), warps)
        return KernelStep(kernel, grid, tuple(argument for _, _, argument in self.entries), (node,), (),
                          tuple(dict.fromkeys(self.reads)), tuple(dict.fromkeys(self.writes)))
