"""Convolutions work on channels_last memory though the program keeps its images in rows. Imports torch, `ir_nodes` and `barriers`
parts only.

In 16 bits, and in TF32, cuDNN's fast kernels take the channels of a pixel side by side. Of a tensor in PyTorch's default format,
rows of pixels, it makes a transposed copy, and a transposed copy of the result. Where the graph makes such a tensor and nobody
outside sees it, its memory is permuted: everyone walks it with other strides, and nothing is copied. What is seen outside keeps
its format; `barriers.passes.bridges` puts copies between that and convolutions, which become kernels that share passes over
memory with what lies around them.

torch.compile does the like (`decide_layout_opt` in torch/_inductor/graph.py). As there, convolutions of several groups with more
than one channel each stay as they are, being many times slower in channels_last. Its rule against convolutions that have fewer
channels behind them than before is of machines and types that this pass leaves alone.
"""

from __future__ import annotations

from typing import Iterator

import torch

from barriers.passes.bridges import GROUP_NORMS, bridge
from barriers.passes.conv_bias import CONVOLUTION, INDICES, VECTOR, may_round, why_no_cudnn
from barriers.passes.conv_gradients import BACKWARD
from barriers.passes.formats import Image, left_in_rows
from barriers.passes.permuted import Shape, in_rows, is_last, permuted, same_either_way
from ir_nodes import BufferKind, Graph, Layout, Node, Operand, Value, Write, ops
from ir_nodes.estimate import operations
from ir_nodes.node import Buffer
from ir_nodes.remarks import Remarks

FORMATLESS = ("pointwise", "reduction", "copy", "fill")
"""Kinds of op that give the same whatever the strides of their operands, and write into memory however it lies."""
BATCH_NORMS = ("native_batch_norm", "native_batch_norm_backward", "cudnn_batch_norm", "cudnn_batch_norm_backward",
               "_native_batch_norm_legit", "_native_batch_norm_legit_no_training")
COMPOSED = ("constant_pad_nd", "slice_backward", "select_backward", "_prelu_kernel", "_prelu_kernel_backward")
"""Other ops that are made of such: PyTorch's kernels for them are fills, copies and iterators over strides."""
LAYER_NORMS = ("native_layer_norm", "native_layer_norm_backward")
"""These read any layout, and leave rows of channels however they lie."""
WORTH = 1 << 20
"""Bytes that a group of convolutions reads and writes below which transposing them costs too little to be told from noise."""
ROUNDED = (torch.float16, torch.bfloat16)
SEEN = "its memory is seen outside, so that convolutions take and leave copies of it"
Place = tuple[Value, Layout]


def permute_images(graph: Graph, remarks: Remarks | None = None) -> Graph:
    """Let images between convolutions, with all that is computed from them pixel by pixel, be channels_last. Returns ``graph``.
    Linear in nodes."""
    if any(node.target in (CONVOLUTION, BACKWARD) for node in graph.nodes):
        _Images(graph, remarks or Remarks()).run()
    return graph


class _Images:
    def __init__(self, graph: Graph, remarks: Remarks) -> None:
        self.graph, self.remarks = graph, remarks
        self.users: dict[Buffer, dict[Node, None]] = {}
        self.shapes: dict[Buffer, Shape] = {}  # (N, C, H, W) of those that hold one tensor in rows
        self.reasons: dict[Buffer, str] = {}  # why a buffer stays in rows; "": it need not
        self.convolutions: dict[Node, None] = {}
        self.chosen: dict[Buffer, None] = {}
        self.lasting: dict[Buffer, None] = {}  # that the program itself made channels_last
        for node in graph.nodes:
            for value, layout in node.places():
                self.users.setdefault(value.buffer, {})[node] = None
                if len(layout.size) == 4 and layout.is_contiguous and layout.covers(value.buffer.nbytes):
                    if node.target in (CONVOLUTION, BACKWARD):
                        self.shapes[value.buffer] = layout.size
                    else:
                        self.shapes.setdefault(value.buffer, layout.size)

    def run(self) -> None:
        for node in (one for one in self.graph.nodes if one.target in (CONVOLUTION, BACKWARD)):
            reason = why_not_last(node)
            if reason:
                self.remarks.refused("channels_last", node.name, reason)
            else:
                self.convolutions[node] = None
        self.spread()
        self.keep_pairs()
        if self.leave_in_rows():
            self.keep_pairs()
        if self.convolutions:
            self.settle()

    def spread(self) -> None:
        """Find what convolutions are joined to by ops that take images in whatever format, also through images that the program
        has in channels_last."""
        todo = list(self.convolutions)
        while todo:
            for value, layout in todo.pop().places():
                buffer = value.buffer
                if buffer not in self.lasting and buffer not in self.chosen and is_last(value, layout):
                    self.lasting[buffer] = None
                    todo += [user for user in self.users[buffer] if self.passes_on(user, buffer)]
                if buffer in self.lasting or buffer in self.chosen or not self.an_image(value, layout) or self.why_not(buffer):
                    continue
                self.chosen[buffer] = None
                todo += [user for user in self.users[buffer] if self.passes_on(user, buffer)]

    def an_image(self, value: Value, layout: Layout) -> bool:
        return value.buffer in self.shapes and in_rows(layout, self.shapes[value.buffer])

    def passes_on(self, node: Node, buffer: Buffer) -> bool:
        """Does ``node`` take ``buffer`` as images, and may what it makes of them lie as they do?"""
        seen = (place for place in node.places() if place[0].buffer is buffer)
        return node.name not in LAYER_NORMS and any(
            is_last(*place) if buffer in self.lasting else in_rows(place[1], self.shapes[buffer]) for place in seen)

    def settle(self) -> None:
        """Permute the chosen memory, if that pays."""
        names, reason = f"{len(self.convolutions)} convolutions and gradients", self.why_not_worth()
        for buffer, why in self.reasons.items():
            if why and not same_either_way(self.shapes[buffer]):
                self.remarks.refused("channels_last", "a tensor", why)
        if reason:
            self.remarks.refused("channels_last", names, reason)
            return
        for node in dict.fromkeys(node for buffer in self.chosen for node in self.users[buffer]):
            node.relay(self.layout_now)
        bridge(self.graph, self.convolutions)
        self.remarks.did("channels_last", names, f"{len(self.chosen)} tensors between them are channels_last in memory")

    def layout_now(self, place: Operand | Write) -> Layout:
        """How ``place`` is seen with the chosen memory as it lies now."""
        if place.value.buffer not in self.chosen:
            return place.layout
        layout = permuted(place.layout, self.shapes[place.value.buffer])
        assert layout is not None, place
        return layout

    def why_not(self, buffer: Buffer) -> str:
        """Why ``buffer`` stays in rows; "": it need not."""
        if buffer not in self.reasons:
            self.reasons[buffer] = next(self.obstacles(buffer), "")
        return self.reasons[buffer]

    def obstacles(self, buffer: Buffer) -> Iterator[str]:
        if buffer.live or buffer.kind is not BufferKind.FRESH:
            yield SEEN
        shape = self.shapes[buffer]
        for node in self.users[buffer]:
            reason = "" if node in self.convolutions else why_not_any(node)
            if reason:
                yield f"{node.name} {reason}"
            for value, layout in node.places():
                if value.buffer is not buffer:
                    continue
                if layout.nbytes and buffer.nbytes != layout.itemsize * product(shape):
                    yield f"{node.name} sees it in elements of another size"
                if permuted(layout, shape) is None:
                    yield f"{node.name} sees it as {layout}, which goes over from one channel into the next"
        if all(value.buffer is not buffer for node in self.users[buffer] for value, _ in written(node)):
            yield "nobody writes it"

    def keep_pairs(self) -> None:
        """Pooling and interpolation write in the format of what they read, whatever they are handed: where one of the two stays
        in rows, so does the other."""
        todo = dict.fromkeys(node for buffer in self.chosen for node in self.users[buffer] if is_pooling(node))
        while todo:
            node = next(iter(todo))
            del todo[node]
            mine = [value.buffer for value, _ in node.places() if value.buffer in self.chosen] if self.mixes(node) else []
            for buffer in mine:
                del self.chosen[buffer]
                self.reasons[buffer] = f"{node.name} has to find all in one format, and another tensor of it stays in rows"
                todo.update((user, None) for user in self.users[buffer] if is_pooling(user))

    def leave_in_rows(self) -> bool:
        """Let images stay in rows that lie between ops that need rows. Were there any?"""
        last = {value.buffer for node in self.convolutions for value, _ in node.places() if self.moves(value.buffer)}
        last.update(self.lasting)
        users = dict.fromkeys(node for node in self.users_of_images() if node not in self.convolutions)
        left = left_in_rows([found for node in users if len(found := self.images_of(node)) > 1], last)
        for buffer in left:
            del self.chosen[buffer]
            self.reasons[buffer] = "ops around it need rows"
        return bool(left)

    def images_of(self, node: Node) -> list[Image]:
        """The images that ``node`` finds, what it writes first, each once."""
        found: dict[Buffer | None, int] = {}
        for value, layout in (*written(node), *node.places()):
            if value.buffer in self.lasting or self.moves(value.buffer):
                found.setdefault(value.buffer, layout.nbytes)
            elif self.stays(value, layout):
                found[None] = max(found.get(None, 0), layout.nbytes)
        return [*found.items()]

    def mixes(self, node: Node) -> bool:
        """Would ``node`` find images in both formats? Single pixels count only where it reads nothing else: their strides then
        choose."""
        def formats(seen: list[Place], pixels: bool = False) -> set[bool]:
            now = self.chosen.keys() | self.lasting.keys()
            return {value.buffer in now for value, layout in seen if len(layout.size) == 4
                    and (pixels or not same_either_way(layout.size)) and (value.buffer in now or layout.is_contiguous)}

        reads = node.places()[: len(node.reads)]
        return len((formats(reads) or formats(reads, pixels=True)) | formats(written(node))) == 2

    def why_not_worth(self) -> str:
        """Why all had better stay in rows; "": it had not."""
        spared, fast, flops, crossed = 0, 0, 0, self.crossing(self.lasting)
        for node in self.convolutions:
            spared += sum(layout.nbytes for value, layout in node.places() if self.moves(value.buffer))
            mine = operations(node)
            flops += mine
            fast += mine if in_vectors(node) else 0
        if not self.chosen or not spared + crossed:
            return "no image between them is the graph's alone"
        if spared + crossed < WORTH:
            return f"transposing {spared + crossed} bytes costs next to nothing"
        if 2 * fast <= flops:
            return f"most of them have numbers of channels that are no multiples of {VECTOR} bytes, or groups"
        # cuDNN's copies read and write, other kernels only walk another way
        if 2 * spared + crossed <= self.crossing({**self.chosen, **self.lasting}):
            return "what would be transposed for their neighbours is more than what would not be for them"
        return ""

    def moves(self, buffer: Buffer) -> bool:
        return buffer in self.chosen and not same_either_way(self.shapes[buffer])

    def users_of_images(self) -> dict[Node, None]:
        return dict.fromkeys(node for buffer in (*self.chosen, *self.lasting) for node in self.users[buffer])

    def stays(self, value: Value, layout: Layout) -> bool:
        """Is it an image in rows?"""
        buffer = value.buffer
        return buffer not in self.chosen and self.an_image(value, layout) and not same_either_way(self.shapes[buffer])

    def crossing(self, last: dict[Buffer, None]) -> int:
        """Bytes that other ops would read in one format and write in the other, if these were channels_last."""
        total = 0
        for node in self.users_of_images():
            if node in self.convolutions:
                continue
            images = [(value.buffer in last, layout.nbytes) for value, layout in node.places()
                      if value.buffer in self.lasting or self.moves(value.buffer) or self.stays(value, layout)]
            total += min(sum(nbytes for inside, nbytes in images if inside is wanted) for wanted in (True, False))
        return total


def written(node: Node) -> list[Place]:
    return [(write.value, write.layout) for write in node.writes]


def product(shape: Shape) -> int:
    return shape[0] * shape[1] * shape[2] * shape[3]


def is_pooling(node: Node) -> bool:
    """Does ATen's kernel choose a format by its input's?"""
    return ops.info(node.target).kind == "pool" or node.name.startswith("upsample_")


def why_not_any(node: Node) -> str:
    """Why an op's tensors had better stay as they were recorded; "": it gives the same for any strides."""
    row = ops.info(node.target)
    if node.effects or row.random:
        return "draws random numbers in the order of memory"
    known = row.kind in FORMATLESS or node.name in (*BATCH_NORMS, *COMPOSED, *GROUP_NORMS, *LAYER_NORMS) or is_pooling(node)
    if known and ops.split(node.target)[0] == "aten":
        return ""
    return "may ask for rows" if row.kind != "convolution" else "is a convolution that is left as it is"


def why_not_last(node: Node) -> str:
    """Why a convolution, or its gradients, had better not get channels_last operands; "": it had."""
    source, weight, groups = described(node)
    layouts = [layout for _, layout in node.places() if len(layout.size) != 1]
    if reason := why_no_cudnn():
        return reason
    if any(len(layout.size) != 4 for layout in layouts):
        return "it is not two-dimensional"
    if any(layout.dtype is not source.dtype or layout.flipped for layout in layouts):
        return "its dtypes differ"
    if source.dtype not in ROUNDED and not (source.dtype is torch.float32 and may_round()):
        return "only in 16 bits and in TF32 are cuDNN's kernels for channels_last the fast ones"
    if groups > 1 and weight.size[1] > 1:
        return "cuDNN is many times slower in channels_last where groups have several channels"
    if max(layout.numel for layout in layouts) >= INDICES or not all(layout.numel for layout in layouts):
        return "it is empty, or so large that ATen cuts it into several"
    return ""


def described(node: Node) -> tuple[Layout, Layout, int]:
    """Input, weight and number of groups of a convolution or its backward."""
    first, groups = (0, -1) if node.target == CONVOLUTION else (1, -2)
    return node.args[first].layout, node.args[first + 1].layout, node.args[groups]


def in_vectors(node: Node) -> bool:
    """Is it of one group, and are its channels, before and behind, whole vectors?"""
    source, _, groups = described(node)
    made = node.writes[0].layout if node.target == CONVOLUTION else node.args[0].layout
    return groups == 1 and not any(one.size[1] * one.itemsize % VECTOR for one in (source, made))
