"""What was recorded: buffers, values, nodes and the graph that holds them. Imports torch only (for dtypes and fx)."""

from ir_nodes.graph import Graph
from ir_nodes.layout import Layout
from ir_nodes.node import Access, Buffer, BufferKind, Frame, Node, Operand, ScalarInput, SegmentCall, Target, Value, Write

__all__ = [
    "Access", "Buffer", "BufferKind", "Frame", "Graph", "Layout", "Node", "Operand", "ScalarInput", "SegmentCall", "Target",
    "Value", "Write",
]
