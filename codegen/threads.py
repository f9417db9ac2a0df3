"""Which work is too small to be shared among a CPU's threads. Imports `ir_nodes` only.

A parallel region costs a microsecond or two where every thread has a core to itself and spins until the next one, and as long as
the operating system leaves a thread waiting where another program wants that core. ATen knows this, but oneDNN's elementwise
kernels, rows of norms and an optimizer's fused kernel, a region for each parameter, split whatever they are given.
"""

from __future__ import annotations

from ir_nodes import Node, ops

GRAIN = 32768
"""Elements below which one thread does the work, as in ATen's elementwise kernels (at::internal::GRAIN_SIZE)."""

# Each element, or row, comes out the same however rows are shared out. Sums over what several threads hold do not: a norm's
# gradients by weight, say, which eager mode adds up in as many parts as there are threads.
_ALIKE_KINDS = ("pointwise", "optimizer")
_ALIKE = ("native_layer_norm",)


def small(node: Node) -> bool:
    """Is ``node`` too little work for two threads, and its result the same to the bit when one does it? The largest result
    decides, of an optimizer's lists the mean, since each tensor is a region of its own."""
    kind, (_, name, _) = ops.info(node.target).kind, ops.split(node.target)
    if kind not in _ALIKE_KINDS and name not in _ALIKE or not node.writes:
        return False
    sizes = [write.layout.numel for write in node.writes]
    return (sum(sizes) / len(sizes) if kind == "optimizer" else max(sizes)) < GRAIN


def chunk(threads: int) -> int:
    """Elements for each of ``threads`` below which torch._inductor leaves a loop to one."""
    return max(512, GRAIN // threads)  # 512: its own default
