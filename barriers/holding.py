"""What a value access leaves recorded: the segments that the schedule holds back, and all that follows them. Imports `ir_nodes`
and `barriers` parts only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Collection

from barriers.calls import first_come, runs_of
from barriers.dependencies import predecessors
from ir_nodes import Graph, Node, SegmentCall


@dataclass(slots=True)
class Held:
    """What became of a recording of which a part was asked for.

    ``recorded``: all its segments; ``early``: those held that had to run now all the same; ``waiting``: those that stay recorded;
    ``rest``: the instructions that do; ``kept``: the buffers that these read, which what runs now has to leave as they need them.
    """

    recorded: list[SegmentCall] = field(default_factory=list)
    early: list[SegmentCall] = field(default_factory=list)
    waiting: list[SegmentCall] = field(default_factory=list)
    rest: list[int] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)


def hold_back(graph: Graph, held: Collection[SegmentCall], needed: Collection[int]) -> Held:
    """Take out of ``graph`` what may wait, so that the buffers ``needed`` get their values.

    A node waits with a held segment that it belongs to, or with a node that has to run before it. Linear in nodes and operands.
    """
    recorded = first_come(runs_of(graph.nodes))
    before = predecessors(graph)
    must = ancestors(graph, before, needed)
    wanted = dict.fromkeys(held)
    early = dict.fromkeys(call for position in must for call in chain_of(graph.nodes[position]) if call in wanted)
    waits: set[int] = set()
    for position, node in enumerate(graph.nodes):
        own = any(call in wanted and call not in early for call in chain_of(node))
        if (own and position not in must) or any(other in waits for other in before[position]):
            waits.add(position)
    return Held(recorded, list(early), [call for call in wanted if call not in early], *take_out(graph, sorted(waits)))


def chain_of(node: Node) -> list[SegmentCall]:
    return list(node.segment.chain()) if node.segment is not None else []


def ancestors(graph: Graph, before: list[list[int]], needed: Collection[int]) -> set[int]:
    """The positions of the nodes that make the last values of the buffers ``needed``, and of all that must run before them."""
    place = {node: position for position, node in enumerate(graph.nodes)}
    makers = [graph.values[buffer][-1].producer for buffer in needed]
    pending = [place[maker] for maker in makers if maker is not None]
    found: set[int] = set()
    while pending:
        position = pending.pop()
        if position not in found:
            found.add(position)
            pending.extend(before[position])
    return found


def take_out(graph: Graph, positions: list[int]) -> tuple[list[int], list[int]]:
    """Remove these nodes, which nobody else waits for. Returns their instructions, and the buffers whose values they need."""
    nodes = [graph.nodes[position] for position in positions]
    gone = set(nodes)
    needed = {value.buffer for node in nodes for value in node.inputs() if value.producer not in gone}
    graph.remove(nodes)
    for values in graph.values:
        values[:] = [value for value in values if value.producer not in gone]
    for buffer in needed:
        buffer.live = True
    return [node.instr for node in nodes], sorted(buffer.index for buffer in needed)
