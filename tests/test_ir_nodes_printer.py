"""What people see of a graph: every part of it, escaped, in the same words each time."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest
import torch

from ir_nodes import Access, BufferKind, Frame, Graph, Layout, printer

FOUR = Layout.contiguous(torch.float32, (4,))


def small_graph() -> Graph:
    graph = Graph()
    x, y = graph.add_buffer(16, BufferKind.INPUT), graph.add_buffer(16, live=True)
    state = graph.add_buffer(8, BufferKind.GENERATOR, live=True)
    rate, power = graph.add_scalar(), graph.add_scalar("int")
    graph.record("aten::mul.Tensor", [Access(x, FOUR), rate], [Access(y, FOUR, "w")], frame=Frame('a "b".py', 7, "main"))
    half = Layout(torch.float32, (2,), (2,), 1)
    whole_state = Access(state, Layout.contiguous(torch.uint8, (8,)), "rw")
    graph.record("aten::normal_", [Access(y, half, "w"), 0.0, power, None], effects=[whole_state], frame=Frame("c.py", 8, "f"))
    return graph


def test_text_shows_inputs_numbers_nodes_frames_and_outputs() -> None:
    lines = printer.text(small_graph(), title="step 3").splitlines()
    assert re.fullmatch(r"step 3: 2 nodes, 3 buffers, 2 inputs, 2 numbers, 2 outputs; key [0-9a-f]{12}", lines[0])
    first = "b1.1:float32[4] = aten::mul.Tensor(b0.0:float32[4], s0:float)"
    second = "b1.2:float32[2]:[2]+1 over b1.1 = aten::normal_(out0, 0.0, s1:int, None) !b2.1"
    assert lines[1:] == [
        "inputs:", "  b0.0 input 16 bytes", "  b2.0 generator 8 bytes", "numbers:", "  s0 float", "  s1 int", "nodes:",
        f'  {first:{len(second)}}  # a "b".py:7 in main', f"  {second}  # c.py:8 in f",
        "outputs:", "  b1.2 16 bytes", "  b2.1 8 bytes",
    ]  # fmt: skip


def test_neighbouring_numbers_share_a_line() -> None:
    graph = Graph()
    for kind in ("float", "float", "float", "int", "float"):
        graph.add_scalar(kind)
    lines = printer.text(graph).splitlines()
    assert lines[1:] == ["numbers:", "  s0..s2 float", "  s3 int", "  s4 float"]


def test_an_empty_graph_is_one_line() -> None:
    assert printer.text(Graph()).startswith("graph: 0 nodes, 0 buffers, 0 inputs, 0 numbers, 0 outputs; key ")


def test_nodes_and_values_show_themselves_and_not_the_graph_behind_them() -> None:
    """As dataclasses do by themselves: each of 60 nodes that read the one before twice would be shown 2^60 times."""
    graph = Graph()
    last = graph.add_buffer(16, BufferKind.INPUT)
    for _ in range(60):
        made = graph.add_buffer(16)
        graph.record("aten::mul.Tensor", [Access(last, FOUR), Access(last, FOUR)], [Access(made, FOUR, "w")])
        last = made
    node = graph.nodes[-1]
    assert repr(node) == str(node) == "b60.1:float32[4] = aten::mul.Tensor(b59.1:float32[4], b59.1:float32[4])"
    assert repr(node.writes[0].value) == "b60.1"


def test_dot_has_a_node_for_each_op_and_an_edge_for_each_value() -> None:
    source = printer.dot(small_graph(), title='my "graph"')
    assert source.startswith('digraph "my \\"graph\\"" {') and source.endswith("}")
    assert 'tooltip="a \\"b\\".py:7 in main"' in source
    edges = [line.strip() for line in source.splitlines() if "->" in line]
    assert edges == [
        '"in b0.0" -> "n0" [label="b0.0:float32[4]"];',
        '"n0" -> "n1" [label="b1.1:float32[2]:[2]+1", style=dashed];',
        '"in b2.0" -> "n1" [label="b2.0:uint8[8]", style=dashed];',
        '"n1" -> "out b1.2";',
        '"n1" -> "out b2.1";',
    ]
    colours = dict(re.findall(r'n(\d) \[.*fillcolor="(#\w+)"', source))
    assert colours["0"] != colours["1"], "a pointwise op and a random one look different"


def test_dot_does_not_draw_memory_that_nothing_wrote() -> None:
    graph = Graph()
    x, y = graph.add_buffer(16), graph.add_buffer(16, live=True)
    graph.record("aten::relu", [Access(x, FOUR)], [Access(y, FOUR, "w")])
    assert [line for line in printer.dot(graph).splitlines() if "->" in line] == ['  "n0" -> "out b1.1";']


def test_both_prints_are_deterministic() -> None:
    assert printer.text(small_graph()) == printer.text(small_graph())
    assert printer.dot(small_graph()) == printer.dot(small_graph())


@pytest.mark.skipif(shutil.which("dot") is None, reason="Graphviz is not installed")
def test_graphviz_reads_it() -> None:
    subprocess.run(["dot", "-Tplain"], input=printer.dot(small_graph()), text=True, check=True, capture_output=True)
