"""A graph as text for people: lines, or Graphviz. Imports `ir_nodes.fx_export` (to offer it here), `ir_nodes.graph`,
`ir_nodes.layout`, `ir_nodes.node` and `ir_nodes.ops` only."""

from __future__ import annotations

from typing import Iterable

from ir_nodes import ops
from ir_nodes.fx_export import fx_inputs, to_fx
from ir_nodes.graph import Graph
from ir_nodes.layout import Layout
from ir_nodes.node import Node, Value

__all__ = ["dot", "fx_inputs", "text", "to_fx"]

_COLOURS = {
    "pointwise": "#cfe8ff", "foreach": "#cfe8ff", "optimizer": "#cfe8ff", "reduction": "#ffe1b8", "softmax": "#ffe1b8",
    "normalization": "#ffe1b8", "scan": "#ffe1b8", "loss": "#ffe1b8", "matmul": "#d9f2c4", "convolution": "#d9f2c4",
    "attention": "#d9f2c4", "random": "#f5cfe3", "copy": "#ececec", "fill": "#ececec", "gather": "#e4d7fb", "scatter": "#e4d7fb",
}  # fmt: skip
_OTHER_COLOUR = "#ffffff"


def text(graph: Graph, title: str = "graph") -> str:
    """One line for each input, number, node and output; a node's source line follows as a comment."""
    inputs, outputs = graph.inputs(), graph.outputs()
    lines = [
        f"{title}: {_count(len(graph.nodes), 'node')}, {_count(len(graph.buffers), 'buffer')}, "
        f"{_count(len(inputs), 'input')}, {_count(len(graph.scalars), 'number')}, {_count(len(outputs), 'output')}; "
        f"key {graph.key()[:12]}"
    ]
    lines += _section("inputs", (f"{v} {v.buffer.kind.value} {v.buffer.nbytes} bytes" for v in inputs))
    lines += _section("numbers", _runs(graph.scalars))
    lines += _section("nodes", _aligned([(_line(node), str(node.frame or "")) for node in graph.nodes]))
    lines += _section("outputs", (f"{v} {v.buffer.nbytes} bytes" for v in outputs))
    return "\n".join(lines)


def dot(graph: Graph, title: str = "graph") -> str:
    """Graphviz text: ops are filled boxes coloured by kind, inputs and outputs ellipses, edges the values read and kept."""
    lines = [f"digraph {_quoted(title)} {{"]
    lines += ['  node [fontname="monospace", fontsize=10];', '  edge [fontname="monospace", fontsize=9];']
    for value in graph.inputs():
        label = f"{value}\n{value.buffer.kind.value}, {value.buffer.nbytes} bytes"
        lines.append(f"  {_quoted(_source(value))} [shape=ellipse, label={_quoted(label)}];")
    for number, node in enumerate(graph.nodes):
        lines += _dot_node(number, node)
    names = {node: f"n{number}" for number, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        lines += _dot_edges(node, names)
    for value in graph.outputs():
        name = f"out {value}"
        lines.append(f"  {_quoted(name)} [shape=ellipse, style=bold, label={_quoted(f'{value} out')}];")
        lines.append(f"  {_quoted(names[value.producer])} -> {_quoted(name)};")
    return "\n".join([*lines, "}"])


def _line(node: Node) -> str:
    effects = "".join(f" !{write.value}" for write in node.effects)
    return f"{node}{effects}"


def _section(name: str, lines: Iterable[str]) -> list[str]:
    body = [f"  {line}" for line in lines]
    return [f"{name}:", *body] if body else []


def _runs(kinds: list[str]) -> list[str]:
    """Neighbouring numbers of one kind as one line: "s0..s7 float"."""
    starts = [index for index, kind in enumerate(kinds) if index == 0 or kinds[index - 1] != kind]
    ends = [start - 1 for start in starts[1:]] + [len(kinds) - 1]
    return [f"s{a} {kinds[a]}" if a == b else f"s{a}..s{b} {kinds[a]}" for a, b in zip(starts, ends)]


def _aligned(rows: list[tuple[str, str]]) -> list[str]:
    width = min(max((len(left) for left, _ in rows), default=0), 100)
    return [f"{left:{width}}  # {right}" if right else left for left, right in rows]


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"


def _dot_node(number: int, node: Node) -> list[str]:
    colour = _COLOURS.get(ops.info(node.target).kind, _OTHER_COLOUR)
    writes = [f"{write.value}: {write.layout}" for write in node.writes]
    effects = [f"{write.value}: state" for write in node.effects]
    label = "\n".join([node.target, *writes, *effects])
    hint = str(node.frame or "")
    return [f'  n{number} [shape=box, style=filled, fillcolor="{colour}", label={_quoted(label)}, tooltip={_quoted(hint)}];']


def _dot_edges(node: Node, names: dict[Node, str]) -> list[str]:
    lines = [_edge(operand.value, operand.layout, names[node], names, "") for operand in node.reads]
    for write in node.all_writes():
        if write.base is not None and write.base.producer is not node:
            lines.append(_edge(write.base, write.layout, names[node], names, ", style=dashed"))
    return [line for line in dict.fromkeys(lines) if line]


def _edge(value: Value, layout: Layout, to: str, names: dict[Node, str], style: str) -> str:
    if value.producer is None and not _is_input(value):
        return ""  # memory that nothing wrote
    start = names[value.producer] if value.producer is not None else _source(value)
    return f"  {_quoted(start)} -> {_quoted(to)} [label={_quoted(f'{value}:{layout}')}{style}];"


def _is_input(value: Value) -> bool:
    return value.version == 0 and value.buffer.kind.value != "fresh"


def _source(value: Value) -> str:
    return f"in {value}"


def _quoted(words: str) -> str:
    escaped = words.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
