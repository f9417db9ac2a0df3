"""What a step of a program touches in memory. Imports `ir_nodes` and `codegen.kernel`."""

from __future__ import annotations

from dataclasses import dataclass

from codegen.kernel import KernelStep, Temporary
from ir_nodes import Node
from ir_nodes.ops import COLLECTIVE, info


@dataclass(frozen=True, slots=True)
class StepUse:
    """What one step touches: buffers it reads or writes in memory, buffers it makes itself, temporaries.

    ``reuses``: (written, read) buffers that may share memory, if the step is the last to read the one and the first to write the
    other. ``by_address``: it takes addresses, so what it touches may lie anywhere; ATen's ops take whole slots. ``keeps``: what
    it touches is in use until somebody waits for it, perhaps in a later recording: the memory of a collective that it starts.
    ``whole``: it finds what it touches at the start of a slot only, for the core is told no layout with a conjugation.
    """

    buffers: tuple[int, ...]
    makes: tuple[int, ...] = ()  # new outputs of an extern op: ATen allocates them
    temporaries: tuple[int, ...] = ()
    reuses: tuple[tuple[int, int], ...] = ()
    by_address: bool = False
    keeps: bool = False
    whole: bool = False


def kernel_use(step: KernelStep) -> StepUse:
    """What a launch touches."""
    touched = dict.fromkeys((*step.reads, *step.writes))
    buffers = dict.fromkeys(item.buffer.index for item in touched if not isinstance(item, Temporary))
    reuses = tuple((new.buffer.index, old.buffer.index) for new, old in step.reuses)
    return StepUse(tuple(buffers), (), tuple(item.id for item in touched if isinstance(item, Temporary)), reuses, True)


def node_use(node: Node) -> StepUse:
    """What an ATen call of ``node`` touches."""
    returned = {node.writes[index].value.buffer.index: None for index in node.returns if index is not None}
    touched = dict.fromkeys(value.buffer.index for value in node.inputs())
    touched.update(dict.fromkeys(write.value.buffer.index for write in node.writes))
    flipped = any(part.layout.flipped for part in (*node.reads, *node.writes))
    return StepUse(tuple(b for b in touched if b not in returned), tuple(returned), keeps=info(node.target).kind in COLLECTIVE,
                   whole=flipped)
