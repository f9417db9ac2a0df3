"""What an exchange brings stays where the other ranks put it, so that nobody copies it. Imports `ir_nodes` and `barriers` parts.

Ranks whose GPUs reach each other's memory push what they exchange into an inbox that each rank has for all exchanges of a size.
An exchange whose readers are done before the next one of that size starts needs no other memory.
"""

from __future__ import annotations

from barriers.passes.own_part import EXCHANGE, WITHOUT_OWN, arrived_value
from ir_nodes import BufferKind, Graph, Node
from ir_nodes.remarks import Remarks

FORMS = {EXCHANGE: "lazysched::all_to_all_inbox", WITHOUT_OWN: "lazysched::all_to_all_inbox_others"}
"""Exchanges, and the same ones where they bring the memory in which they arrive. Ranks may differ in which one they start."""
LEAST = 1 << 24
"""Bytes of an exchange that is worth two more waits of the ranks for each other."""


def use_inbox(graph: Graph, remarks: Remarks | None = None) -> Graph:
    """Let exchanges bring the memory in which they arrive, where nobody needs it until the next one of their size. Returns
    ``graph``. Linear in nodes, for what one exchange brings is read before the next starts."""
    starts = [node for node in graph.nodes if node.target in FORMS]
    if not starts:
        return graph
    place = {node: position for position, node in enumerate(graph.nodes)}
    following: dict[tuple[str, int], int] = {}  # where the next exchange of a group and a size starts
    for start in reversed(starts):
        name, key = start.name, (str(start.args[-1]), start.reads[0].layout.nbytes)
        reason = why_not(graph, start, place, following.get(key, len(graph.nodes)))
        following[key] = place[start]
        if not reason:
            start.target, start.changed = FORMS[start.target], True
            start.args, start.returns = start.args[1:], (0,)
        if remarks is not None and reason:
            remarks.refused("copy_engines", name, reason)
        elif remarks is not None:
            remarks.did("copy_engines", name, "what arrives is read where the other ranks put it")
    return graph


def why_not(graph: Graph, start: Node, place: dict[Node, int], following: int) -> str:
    """Why ``start`` can't bring the memory in which it arrives; "": it can. ``following``: where the next of its size starts."""
    write, sent = start.writes[0], start.reads[0].layout
    buffer = write.value.buffer
    if len(start.args[2]) > 3:
        return "ranks send parts of different sizes"
    if sent.nbytes < LEAST:
        return f"it is smaller than {LEAST >> 20} MiB"
    arrived = arrived_value(write.value)
    if arrived is None:
        return "it is waited for in another recording, or what it fills is used meanwhile"
    if buffer.live:
        return "what arrives is held at the end"
    if graph.last(buffer) is not arrived:
        return "what arrives is written to later"
    plain = sent.is_contiguous and not sent.flipped and write.layout.covers(buffer.nbytes) and sent.nbytes == buffer.nbytes
    before = [value for value in graph.values[buffer.index] if value.version < write.value.version]
    used = buffer.kind is not BufferKind.FRESH or write.base is not None or any(one.users or one.producer for one in before)
    if used or not plain:
        return "it fills a part of a tensor, or one that was there before"
    if any(place[user] > following for user in arrived.users):
        return "another exchange of its size starts before all have read it"
    return ""
