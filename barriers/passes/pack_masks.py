"""Masks that wait in memory for another kernel are kept as bits. Imports `ir_nodes` and `barriers` parts only.

PyTorch has a byte for each element of a mask: that of every dropout waits for backward, as do comparisons that gradients need.
The kernel that makes such a mask can store eight elements as a byte, and those that read it can take them apart again: that takes
an eighth of the memory for as long, and of the traffic.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from barriers.passes.dead import eliminate_dead
from ir_nodes import BufferKind, Graph, Layout, Node, Operand, Value, Write
from ir_nodes.kernels import Kernels, Partition, homes
from ir_nodes.own import BITS, PACKED, UNPACKED
from ir_nodes.remarks import Remarks
from ir_nodes.rewrite import new_value, node_beside, redirect

LEAST = 1 << 20
"""Bytes of a mask that is worth it."""


def pack_masks(graph: Graph, partition: Partition, remarks: Remarks | None = None) -> Graph:
    """Keep masks as bits between kernels. Returns ``graph``. Linear in nodes, and plans kernels twice where there are masks."""
    remarks = remarks or Remarks()
    masks = [write.value for node in graph.nodes for write in node.writes if _is_mask(graph, write)]
    if not masks:
        return graph
    kernels = partition(graph)
    packer = _Packer(graph, kernels, remarks)
    made = [one for mask in masks if (one := packer.consider(mask)) is not None]
    if not made:
        return graph
    packer.insert()
    _keep_what_joins(graph, partition(graph), made, remarks)
    return eliminate_dead(graph)


def _is_mask(graph: Graph, write: Write) -> bool:
    """Is it a large mask that nobody sees, in memory of its own?"""
    layout, buffer = write.layout, write.value.buffer
    if layout.dtype is not torch.bool or buffer.live or buffer.kind is not BufferKind.FRESH or buffer.nbytes < LEAST:
        return False
    rows = [size for size, stride in zip(layout.size, layout.stride) if stride == 1 and size > 1]
    whole = layout.is_dense and layout.covers(buffer.nbytes) and not layout.flipped and layout.numel == buffer.nbytes
    alone = graph.values[buffer.index][-1] is write.value and write.base is None
    return whole and alone and bool(rows) and rows[0] % BITS == 0


@dataclass(slots=True, eq=False)
class Packed:
    """A ``mask`` with the nodes that make bits of it and, for those who read it in each of several kernels, a mask of those."""

    mask: Value
    pack: Node
    readers: list[tuple[Node, list[Node]]] = field(default_factory=list)

    def take_back(self) -> None:
        for unpack, users in self.readers:
            for user in users:
                redirect(user, {unpack.writes[0].value: self.mask})


class _Packer:
    def __init__(self, graph: Graph, kernels: Kernels, remarks: Remarks) -> None:
        self.graph, self.kernels, self.remarks = graph, kernels, remarks
        self.home = homes(kernels)
        self.place = {node: position for position, node in enumerate(graph.nodes)}
        self.before: dict[Node, list[Node]] = {}
        self.behind: dict[Node, list[Node]] = {}

    def consider(self, mask: Value) -> Packed | None:
        """The mask as bits; None, and why, where it has to stay."""
        maker = mask.producer
        assert maker is not None
        here = self.home.get(maker, -1)
        late: dict[int, list[Node]] = {}
        for user in sorted(mask.users, key=self.place.__getitem__):
            late.setdefault(self.home.get(user, -1), []).append(user)
        late.pop(here, None)
        if not late or here >= 0 and mask not in self.kernels[here].stores:
            return None  # it never leaves its kernel
        if -1 in (here, *late) or not all(self.kernels[number].fused for number in (here, *late)):
            self.remarks.refused("packed_masks", maker.name, "a library makes or reads it, byte by byte")
            return None
        return self._packed(maker, mask, list(late.values()))

    def _packed(self, maker: Node, mask: Value, late: list[list[Node]]) -> Packed:
        layout = next(write.layout for write in maker.writes if write.value is mask)
        bits = Layout.contiguous(torch.uint8, (layout.numel // BITS,))
        small = Write(new_value(self.graph, bits.nbytes), bits, None, False)
        pack = node_beside(maker, PACKED, (Operand(mask, layout),), small, (0,))
        self.behind.setdefault(maker, []).append(pack)
        packed = Packed(mask, pack)
        for users in late:
            args = (Operand(pack.writes[0].value, bits), layout.size, layout.stride)
            own = Write(new_value(self.graph, layout.nbytes), layout, None, False)
            unpack = node_beside(users[0], UNPACKED, args, own, (0,), again=True)
            for user in users:
                redirect(user, {mask: unpack.writes[0].value})
            self.before.setdefault(users[0], []).append(unpack)
            packed.readers.append((unpack, users))
        return packed

    def insert(self) -> None:
        """Put the new nodes where they belong."""
        nodes: list[Node] = []
        for node in self.graph.nodes:
            nodes += [*self.before.get(node, ()), node, *self.behind.get(node, ())]
        self.graph.nodes = nodes


def _keep_what_joins(graph: Graph, kernels: Kernels, made: list[Packed], remarks: Remarks) -> None:
    """Take back what would cost kernels of its own."""
    home, stored = homes(kernels), {value for kernel in kernels for value in kernel.stores}
    for one in made:
        maker = one.mask.producer
        assert maker is not None
        groups = [(maker, one.pack), *((unpack, *users) for unpack, users in one.readers)]
        joined = all(len({home.get(node, -1) for node in nodes}) == 1 for nodes in groups)
        masks = [one.mask, *(unpack.writes[0].value for unpack, _ in one.readers)]
        if joined and not any(mask in stored for mask in masks):
            remarks.did("packed_masks", maker.name, "its mask waits as bits, eight elements to a byte")
        else:
            one.take_back()
            remarks.refused("packed_masks", maker.name, "bits would take a kernel of their own")
