"""A convolution's bias, and the ReLU behind it, cost no pass over memory. Imports torch, `barriers` parts, `ir_nodes`.

On CUDA eager mode runs cuDNN without the bias and adds that in place: what the convolution has written is read and written once
more. Where input and weight are channels_last, cuDNN adds a bias and a residual and applies a ReLU to what it has in registers,
as fast as it convolves; in other layouts it is slower at that than two kernels. There, and where something else than a ReLU reads
the sum, the addition becomes an op of its own, which shares a kernel with what reads it.

Where cuDNN has no engine for one of its fused ops, Python calls others in its place (`codegen.cudnn`): once, where a CUDA graph
captures them, else in every step. A convolution that only loses its bias is still the recorded call.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from barriers.passes.permuted import is_channels_last
from ir_nodes import BufferKind, Graph, Layout, Node, Operand, Value, Write
from ir_nodes.node import Arg, Target
from ir_nodes.remarks import Remarks
from ir_nodes.rewrite import let_go, new_value, node_beside, read

CONVOLUTION, BIAS = "aten::convolution", 2
RELUS = ("aten::relu", "aten::relu_")
SUMS = ("aten::add.out", "aten::add.Tensor", "aten::add_.Tensor")
WITH_RELU, WITH_SUM = "aten::cudnn_convolution_relu", "aten::cudnn_convolution_add_relu"
FLOATS = (torch.float16, torch.bfloat16, torch.float32)
VECTOR = 16
"""Bytes: cuDNN's fast kernels load whole vectors of channels, from addresses that are multiples of it."""
INDICES = 1 << 31
"""Elements from which on ATen cuts a convolution into several, which it does not do for the fused ops."""
DID_JOIN = "cuDNN does the rest to what it has in registers"
DID_PART = "its bias is added in the kernel of what follows"


def add_biases(graph: Graph, remarks: Remarks | None = None) -> Graph:
    """Let cuDNN do what follows convolutions, or let generated kernels add their biases. Returns ``graph``. Linear in nodes."""
    return _Convolutions(graph, remarks or Remarks()).run()


@dataclass(frozen=True, slots=True)
class Chain:
    """A convolution, the sum with ``other`` times ``number`` where there is one, and a ReLU, each the only reader of the last."""

    nodes: tuple[Node, ...]
    other: Operand | None = None
    number: Arg = 1

    @property
    def name(self) -> str:
        return " and ".join(node.name for node in self.nodes)


class _Convolutions:
    def __init__(self, graph: Graph, remarks: Remarks) -> None:
        self.graph, self.remarks = graph, remarks
        self.place = {node: position for position, node in enumerate(graph.nodes)}
        self.instead: dict[Node, tuple[Node, ...]] = {}  # what stands in a node's place

    def run(self) -> Graph:
        for node in self.graph.nodes:
            if node.target == CONVOLUTION and not self._join(node) and isinstance(node.args[BIAS], Operand):
                self._part(node)
        self.graph.nodes = [one for node in self.graph.nodes for one in self.instead.get(node, (node,))]
        return self.graph

    def _join(self, node: Node) -> bool:
        """Let cuDNN do what follows ``node``, if that is a ReLU."""
        chain = chain_of(node)
        if chain is None:
            return False
        reason = why_not_cudnn(node) or why_not_fused(node) or why_not_one(chain) or self._why_not_there(chain)
        if reason:
            self.remarks.refused("conv_bias", chain.name, reason)
            return False
        self.instead.update((one, ()) for one in chain.nodes[1:])
        if self._waits(chain):
            self.instead[node], self.instead[chain.nodes[1]] = (), (node,)
            self.place[node] = self.place[chain.nodes[1]]
        self.remarks.did("conv_bias", chain.name, DID_JOIN)
        join(self.graph, chain)
        return True

    def _waits(self, chain: Chain) -> bool:
        """Is the other summand made behind the convolution?"""
        maker = chain.other.value.producer if chain.other is not None else None
        return maker is not None and self.place[maker] > self.place[chain.nodes[0]]

    def _why_not_there(self, chain: Chain) -> str:
        """Why what comes between keeps the chain from being one; "": it does not."""
        for node in chain.nodes:
            write = node.writes[0]
            buffer = write.value.buffer
            mine = [one.writes[0].value for one in chain.nodes]
            before = [value for value in self.graph.values[buffer.index] if value.version < write.value.version]
            used = any(value not in mine and (value.users or value.producer is not None) for value in before)
            if used or buffer.kind is not BufferKind.FRESH:
                return f"{node.name} goes into memory that was there before"
            if node is not chain.nodes[-1] and self.graph.holds(write.value):
                return f"what {node.name} leaves is held"
        first, second, *_ = chain.nodes
        if self._waits(chain) and any(self._overwritten(read.value) < self.place[second] for read in first.reads):
            return "what the convolution reads is overwritten before the other summand is there"
        return ""

    def _overwritten(self, value: Value) -> int:
        """Where the next value of its buffer is made."""
        values = self.graph.values[value.buffer.index]
        later = values[values.index(value) + 1 :]
        return self.place[later[0].producer] if later and later[0].producer is not None else len(self.place)

    def _part(self, node: Node) -> None:
        """Let a kernel add the bias."""
        reason = why_not_cudnn(node) or why_not_parted(node)
        if reason:
            self.remarks.refused("conv_bias", node.name, reason)
            return
        adds = part(self.graph, node)
        self.instead[node], self.place[adds] = (node, adds), self.place[node]
        self.remarks.did("conv_bias", node.name, DID_PART)


def chain_of(node: Node) -> Chain | None:
    """What cuDNN could do together, as far as ops and readers tell."""
    second = only_reader(node)
    if second is None or second.target in RELUS:
        return Chain((node, second)) if second is not None else None
    third = only_reader(second) if second.target in SUMS else None
    if third is None or third.target not in RELUS:
        return None
    first, other, number, *_ = second.args
    if isinstance(other, Operand) and other.value is node.writes[0].value and number == 1:
        first, other = other, first
    return Chain((node, second, third), other if isinstance(other, Operand) else None, number)


def only_reader(node: Node) -> Node | None:
    users = node.writes[0].value.users
    return next(iter(users)) if len(users) == 1 and len(node.writes) == 1 else None


def why_not_one(chain: Chain) -> str:
    """Why the chain's nodes aren't one op; "": they are."""
    first = chain.nodes[0]
    made = first.writes[0]
    if any((node.segment, node.stage) != (first.segment, first.stage) for node in chain.nodes):
        return "they belong to different segments"
    if len(chain.nodes) == 3 and chain.other is None:
        return "the sum goes into the memory of the other summand, or adds a number"
    if chain.other is not None and chain.other.value is made.value:
        return "the convolution is the summand that a number scales"
    for before, node in zip(chain.nodes, chain.nodes[1:]):
        value = before.writes[0].value
        seen = [read.layout for read in node.reads if read.value is value]
        seen += [write.layout for write in node.writes if write.base is value and write.reads_old]
        if not all(layout.alike(made.layout) for layout in (*seen, node.writes[0].layout)):
            return f"{node.name} reads or leaves another part or layout"
    if chain.other is not None and not replace(chain.other.layout, offset=made.layout.offset).alike(made.layout):
        return "the other summand has another size, dtype or layout"
    if chain.other is not None and not aligned(chain.other.layout):
        return f"the other summand does not start on a {VECTOR}-byte boundary"
    return ""


def why_no_cudnn() -> str:
    """Why cuDNN runs no convolution at all; "": it may."""
    if not torch.backends.cudnn.enabled:
        return "cuDNN is switched off"
    return "this PyTorch has no cuDNN" if torch.cuda.is_available() and not torch.backends.cudnn.is_available() else ""


def why_not_cudnn(node: Node) -> str:
    """Why eager mode would not run cuDNN for a convolution or its gradients, and an op of its own for the bias; "": it would."""
    if reason := why_no_cudnn():
        return reason
    layouts = [one.layout for one in (*node.reads, *node.writes)]
    if layouts[0].dtype not in FLOATS or any(one.dtype is not layouts[0].dtype or one.flipped for one in layouts):
        return "its dtypes are not all float16, bfloat16 or float32"
    if not all(one.numel for one in layouts):
        return "it is empty"
    if any(one.base is not None or not one.layout.covers(one.value.buffer.nbytes) for one in node.writes):
        return "it fills a part of a tensor"
    return ""


def why_not_fused(node: Node) -> str:
    """Why cuDNN, which runs ``node``, would not, or not fast, do what follows with it; "": it would."""
    source, weight, bias, *_, transposed, _, groups = node.args
    made = node.writes[0].layout
    if torch.backends.cudnn.deterministic or torch.are_deterministic_algorithms_enabled():
        return "deterministic algorithms are asked for, which the fused op can't be told"
    if made.dtype is torch.float32 and not may_round():
        return "without TF32 cuDNN has few fused kernels, and convolving takes far longer than a pass over memory"
    if len(made.size) != 4 or transposed or groups != 1:
        return "cuDNN's fused op is for plain two-dimensional convolutions"
    if not all(is_channels_last(one) for one in (source.layout, weight.layout, made)):
        return "input or weight is not channels_last, where cuDNN's fused op is slower than two kernels"
    if any(one.size[1] * one.itemsize % VECTOR for one in (source.layout, made)):
        return f"a number of channels is no multiple of {VECTOR} bytes"
    if not all(aligned(one.layout) for one in (source, weight, bias) if one is not None):
        return f"an operand does not start on a {VECTOR}-byte boundary"
    if max(source.layout.numel, made.numel) >= INDICES:
        return "it is so large that ATen cuts it into several"
    return ""


def may_round() -> bool:
    """May convolutions round float32 to TF32?"""
    try:
        return bool(torch.backends.cudnn.allow_tf32)
    except RuntimeError:  # PyTorch refuses to tell by this name what was set by its new one
        return False


def why_not_parted(node: Node) -> str:
    """Why ATen had better add the bias of a convolution that cuDNN runs; "": a kernel may."""
    source, _, bias, *_, transposed, _, groups = node.args
    if bias.layout.size != node.writes[0].layout.size[1:2]:
        return "the bias is no number for each channel"
    if has_own_kernel(source.layout, transposed, groups):
        return "the kernel of depthwise convolutions adds the bias itself"
    return ""


def has_own_kernel(source: Layout, transposed: bool, groups: int) -> bool:
    """Does a convolution of ``source`` run in PyTorch's own kernels for a group per channel? Of channels_last ones cuDNN does."""
    return 1 < groups == source.size[1] and not transposed and (source.is_contiguous or not is_channels_last(source))


def aligned(layout: Layout) -> bool:
    return layout.offset * layout.itemsize % VECTOR == 0


def join(graph: Graph, chain: Chain) -> None:
    """Make the first of the chain leave what its last does. The others stay in the graph's list."""
    node, *others = chain.nodes
    made, write = node.writes[0], chain.nodes[-1].writes[0]
    for one in others:
        let_go(one)
    for one in chain.nodes[:-1]:
        graph.values[one.writes[0].value.buffer.index].remove(one.writes[0].value)
    source, weight, bias, stride, padding, dilation, *_, groups = node.args
    spread = tuple(tuple(one) * (2 // len(one)) for one in (stride, padding, dilation))
    node.target, node.changed, node.returns = (WITH_SUM if chain.other else WITH_RELU), True, (0,)
    node.args = (source, weight, *((chain.other, chain.number) if chain.other else ()), bias, *spread, groups)
    node.writes = (Write(write.value, made.layout, None, False),)
    write.value.producer = node
    read(node)


def part(graph: Graph, node: Node) -> Node:
    """Make ``node`` leave its bias out. Returns what adds it, and belongs behind ``node``."""
    made, bias = node.writes[0], node.args[BIAS]
    plain = new_value(graph, made.value.buffer.nbytes, node)
    bias.value.users.pop(node, None)
    node.args, node.left_out = (*node.args[:BIAS], None, *node.args[BIAS + 1 :]), (BIAS,)
    node.writes = (Write(plain, made.layout, None, False),)
    read(node)
    beyond = len(made.layout.size) - 2
    row = replace(bias.layout, size=(*bias.layout.size, *(1,) * beyond), stride=(*bias.layout.stride, *(1,) * beyond))
    return node_beside(node, "aten::add.out", (Operand(plain, made.layout), Operand(bias.value, row), 1, Target(0)), made)
