"""Drops states of random generators that are kept for nobody, and those put back where they are in force. Imports `ir_nodes`
and `barriers.passes.dead` only.

A checkpointed layer keeps the state before its first run and puts it back for its second one, and afterwards the one that it
found, whether anything of it draws or not. Where nothing does, no segment would have to wait for another on their account.
"""

from __future__ import annotations

from barriers.passes.dead import drop
from ir_nodes import Graph, Node, Value, own
from ir_nodes.rewrite import Substitution


def drop_kept_states(graph: Graph) -> Graph:
    """Drop them; what follows finds the generator as they found it. Returns ``graph``. Linear in nodes."""
    same, gone = Substitution(), dict[Node, None]()
    for node in _idle(graph):
        same.replace(node.effects[0].value, _found(node))
        gone[node] = None
    for node in graph.nodes:
        if node.target != own.RNG_STATE:
            continue
        state = node.writes[0].value
        if not graph.holds(state) and all(user in gone for user in state.users):
            same.replace(node.effects[0].value, _found(node))
            gone[node] = None
    if gone:
        same.apply(graph)
        drop(graph, list(gone))
    return graph


def _idle(graph: Graph) -> list[Node]:
    """The nodes that put back the state in force."""
    in_force: dict[Value, Value] = {}  # by what a generator is after a node: the first value with the same state
    kept: dict[Value, Value] = {}  # by a state: what the generator was
    idle = []
    for node in graph.nodes:
        if node.target == own.RNG_STATE:
            now = _found(node)
            in_force[node.effects[0].value] = kept[node.writes[0].value] = in_force.get(now, now)
        elif node.target == own.SET_RNG_STATE:
            then, now = kept.get(node.reads[0].value), _found(node)
            if then is not None:
                in_force[node.effects[0].value] = then
            if then is in_force.get(now, now):
                idle.append(node)
    return idle


def _found(node: Node) -> Value:
    (effect,) = node.effects
    assert effect.base is not None, "the state of a generator is always read"
    return effect.base
