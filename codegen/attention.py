"""Attention in kernels of our own, where LAZYSCHED_ATTENTION asks for them. Imports torch, `ir_nodes` and
codegen's kernel modules.

A pass over a finished plan: ATen's call of a forward becomes a kernel that draws what drops and one that computes, the call of
its backward one for the gradients of queries and one for those of keys and values. On an H200 the four take a fifth less time
than cuDNN's kernels. They draw other bits than eager mode's kernels, each of which draws in a way of its own; so they are not
used unless asked for. The generator moves on as eager mode's would, so that all other draws stay what they are. Where a share of
0 is a constant of the recording nothing is drawn, and the other three, which then know nothing of dropping, take a seventh less
time than cuDNN's.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Sequence

import torch

from codegen.attention_joined import JOINED, gradients_of, is_joined, join
from codegen.attention_launches import Left, draw, forward, gradients
from codegen.attention_sums import SUMMED, leave_sums
from codegen.engine import Context
from codegen.kernel import ExternStep, KernelStep, Plan, Temporary
from codegen.lowering import arguments
from codegen.promotion import HALF
from ir_nodes import Graph, Layout, Node, settings
from ir_nodes.node import Operand
from ir_nodes.remarks import Remarks

CUDNN, FLASH = "aten::_scaled_dot_product_cudnn_attention", "aten::_scaled_dot_product_flash_attention"
BACKWARDS = (*SUMMED, *SUMMED.values())
TENSORS = ("query", "key", "value")
OUT, SUMS = 0, 1
"""Results of a forward; the rest are for its backward."""

CAPABILITY = (9, 0)
"""GPUs from this on: on others nobody has measured the kernels."""

HEAD = 64
"""Elements of a head: with 128, the kernels take as long as cuDNN's on an H200."""

BLOCK = 64
"""Of which lengths have to be multiples."""

LONGEST = 1024
"""Queries or keys up to which the kernels are measured to be faster than cuDNN's where nothing drops."""

MOST_ELEMENTS = 1 << 31
"""Places in a tensor, or in the words of a head, that 32 bits tell."""


def use_kernels(plan: Plan, graph: Graph, context: Context) -> Plan:
    """The plan with kernels instead of ATen's calls, where they are asked for."""
    if not asked():
        return plan
    remarks = context.remarks or Remarks()
    if not fits(context):
        remarks.refused("attention", "", "the kernels are measured on Hopper GPUs only, and this one is older")
        return plan
    return with_kernels(plan, graph, remarks, context.redraws)


def asked() -> bool:
    return settings.current().attention == "triton" and settings.enabled("attention")


def fits(context: Context) -> bool:
    return torch.cuda.get_device_capability(context.device) >= CAPABILITY


def with_kernels(plan: Plan, graph: Graph, remarks: Remarks | None = None, redraws: bool = False) -> Plan:
    """The plan with kernels wherever they can be. ``redraws``: the program may draw the same again, in another recording."""
    return _Rewriter(plan, graph, remarks or Remarks(), redraws).run()


def give_more(graph: Graph, context: Context) -> None:
    """Before anything is fused: let backwards that kernels of ours will compute put gradients in their places where they are
    concatenated, and leave sums where they are summed."""
    if asked() and fits(context):
        with_joined(graph, context.remarks, context.redraws)
        if settings.enabled("attention_sums"):
            with_sums(graph, context.remarks, context.redraws)


def with_joined(graph: Graph, remarks: Remarks | None = None, redraws: bool = False) -> None:
    for node in backwards_of_ours(graph, redraws):
        why = join(graph, node, why_not_rows) if node.target in JOINED else ""
        if why and remarks is not None:
            remarks.refused("attention", node.name, why)


def with_sums(graph: Graph, remarks: Remarks | None = None, redraws: bool = False) -> None:
    for node in backwards_of_ours(graph, redraws):
        leave_sums(graph, node, remarks or Remarks())


def backwards_of_ours(graph: Graph, redraws: bool) -> list[Node]:
    """The backwards that kernels of ours will compute."""
    return [node for _, backwards, reason in attentions(graph, redraws) if not reason for node in backwards]


def attentions(graph: Graph, redraws: bool) -> list[tuple[Node, list[Node], str]]:
    """Each forward with its backwards, and why ATen calls them; "": kernels take their place."""
    found = []
    for node in graph.nodes:
        if node.target in (CUDNN, FLASH):
            backwards = list(dict.fromkeys(node.writes[SUMS].value.users))
            reasons = (why_not(graph, node, redraws), *(why_not_backward(one, node) for one in backwards))
            found.append((node, backwards, next(filter(None, reasons), "")))
    return found


def drops(node: Node) -> bool:
    """May anything drop? A share of 0 is a constant, any other a number that each run is given."""
    return bool(arguments(node)["dropout_p"] != 0)


def increment_of(node: Node) -> int:
    """How far ATen's call moves its generator on: cuDNN's by a number for each score, flash attention's by 32 for each head."""
    args = arguments(node)
    batch, heads, queries, _ = args["query"].layout.size
    count = batch * heads * (queries * args["key"].layout.size[2] if node.target == CUDNN else 32)
    return -(-count // 4) * 4


class _Rewriter:
    def __init__(self, plan: Plan, graph: Graph, remarks: Remarks, redraws: bool) -> None:
        self.plan, self.graph, self.remarks, self.redraws = plan, graph, remarks, redraws
        self.temporaries = list(plan.temporaries)
        self.instead: dict[Node, list[KernelStep]] = {}

    def run(self) -> Plan:
        called = {step.node: None for step in self.plan.steps if isinstance(step, ExternStep)}
        for node, backwards, reason in attentions(self.graph, self.redraws):
            if reason or not all(one in called for one in (node, *backwards)):
                self.remarks.refused("attention", node.name, reason or "something else than ATen computes it")
                continue
            self._replace(node, backwards)
            how = "draw what drops once, for the backward too" if drops(node) else "draw nothing, for nothing drops"
            self.remarks.did("attention", node.name, f"kernels of our own {how}")
            for one in backwards:
                if is_joined(one.target):
                    self.remarks.did("attention", one.name, "they put gradients where autograd would concatenate them")
                if one.target in SUMMED.values():
                    self.remarks.did("attention_sums", one.name, "they sum blocks of gradients whose sums biases need")
        return self._rewritten() if self.instead else self.plan

    def _replace(self, node: Node, backwards: Sequence[Node]) -> None:
        args = arguments(node)
        batch, heads, queries, _ = args["query"].layout.size
        rows = batch * heads * queries
        words = self._temporary(rows * args["key"].layout.size[2] // 8) if drops(node) else None
        left = Left(words, self._temporary(rows * 4))
        drawn = [] if words is None else [draw(node, words, increment_of(node))]
        self.instead[node] = [*drawn, forward(node, left)]
        for one in backwards:
            self.instead[one] = gradients(one, left, self._temporary(rows * 8))

    def _temporary(self, nbytes: int) -> Temporary:
        self.temporaries.append(Temporary(max((one.id for one in self.temporaries), default=-1) + 1, nbytes))
        return self.temporaries[-1]

    def _rewritten(self) -> Plan:
        steps: list[KernelStep | ExternStep] = []
        needs: list[tuple[int, ...]] = []
        last: list[int] = []  # where each old step ends
        for step, before in zip(self.plan.steps, self.plan.needs):
            found = self.instead.get(step.node) if isinstance(step, ExternStep) else None
            for number, one in enumerate(found or [step]):
                needs.append((len(steps) - 1,) if number else tuple(last[need] for need in before))
                steps.append(one)
            last.append(len(steps) - 1)
        return replace(self.plan, steps=tuple(steps), needs=tuple(needs), temporaries=tuple(self.temporaries))


def why_not(graph: Graph, node: Node, redraws: bool) -> str:
    """Why ATen calls the forward ``node``, whatever its backwards are."""
    args = arguments(node)
    if redraws and drops(node):  # nothing tells a checkpointed layer's first run, in a recording of its own
        return "the program has read a generator's state, and may draw the same again where ATen does"
    if len(node.effects) != drops(node) or node.again:
        return "it is computed twice"
    if args.get("attn_bias") is not None:
        return "a bias is added to its scores"
    for place in (one for one in node.returns[SUMS:] if one is not None):
        write = node.writes[place]
        if graph.holds(write.value) or any(user.target not in BACKWARDS for user in write.value.users):
            return "its backward is no part of the same recording"
    if not drops(node) and max(args[name].layout.size[2] for name in TENSORS) > LONGEST:
        return f"nothing drops, and with more than {LONGEST} queries or keys the library may be faster: nobody has measured it"
    return why_not_shapes([args[name] for name in TENSORS], node.writes[OUT].layout, args["is_causal"])


def why_not_backward(node: Node, forward: Node) -> str:
    if node.target not in BACKWARDS or node.again:
        return "its backward is computed twice"
    if drops(node) != drops(forward):
        return "its backward drops another share"
    args = arguments(node)
    made = [None if write is None else write.layout for write in gradients_of(node)]
    tensors = [args[name] for name in (*TENSORS, "grad_out", "out")]
    if len(made) != 3 or None in made or not all(isinstance(one, Operand) for one in tensors):
        return "its backward makes other gradients than those of queries, keys and values"
    return next((why for layout in [one.layout for one in tensors] + made if (why := why_not_rows(layout))), "")


def why_not_shapes(tensors: Sequence[Operand], out: Layout, causal: bool) -> str:
    sizes = [one.layout.size for one in tensors]
    batch, heads, queries, width = sizes[0]
    keys = sizes[1][2]
    if width != HEAD or sizes[2][3] != width:
        return f"its heads have {width} elements, not {HEAD}, for which the kernels are the faster ones"
    if sizes[1][:2] != sizes[0][:2] or sizes[2][:2] != sizes[0][:2]:
        return "several heads share keys and values"
    if queries % BLOCK or keys % BLOCK or not queries or not keys:
        return f"a length is no multiple of {BLOCK}"
    if causal and queries != keys:
        return "it is causal, with other queries than keys"
    if tensors[0].layout.dtype not in HALF:
        return "its numbers have not 16 bits"
    if queries * keys // 32 >= MOST_ELEMENTS or batch * heads >= 1 << 16:
        return "it is too large"
    return next((why for layout in (*(one.layout for one in tensors), out) if (why := why_not_rows(layout))), "")


def why_not_rows(layout: Layout) -> str:
    if layout.stride[3] != 1 or layout.flipped:
        return "a head's elements don't lie one behind the other"
    if max(layout.stride[0], *(size * stride for size, stride in zip(layout.size[1:], layout.stride[1:]))) >= MOST_ELEMENTS:
        return "it is too large"
    if any(stride * layout.itemsize % 16 for stride in (*layout.stride[:3], layout.offset)):
        return "a tensor's rows don't start on 16-byte boundaries"
    return ""
