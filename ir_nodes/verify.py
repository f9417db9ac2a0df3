"""Checks that a graph is what a pass may rely on. Imports torch, `ir_nodes.call`, `ir_nodes.graph`, `ir_nodes.layout`,
`ir_nodes.node` and `ir_nodes.ops` only."""

from __future__ import annotations

import torch

from ir_nodes import call, ops
from ir_nodes.graph import Graph
from ir_nodes.layout import Layout
from ir_nodes.node import BufferKind, Node, Operand, ScalarInput, Target, Value, Write, leaves

_META = torch.device("meta")
_NO_STATISTICS = ("aten::native_batch_norm", "aten::_native_batch_norm_legit")
_NUMBERS = {"float": 1.0, "double": torch.empty((), dtype=torch.float64, device="meta"), "int": 1, "bool": True, "complex": 1j}


class VerificationError(Exception):
    """A graph breaks a rule. Names the pass that ran before, the node and the user's source line."""

    def __init__(self, after: str, where: Node | Value | None, problem: str) -> None:
        place = f" {where}" if where is not None else ""
        frame = f" (recorded at {where.frame})" if isinstance(where, Node) and where.frame else ""
        super().__init__(f"after {after}:{place}{frame}: {problem}")
        self.after, self.where, self.problem = after, where, problem


def verify(graph: Graph, after: str = "recording") -> list[str]:
    """Check every rule of a graph; ``after`` names the pass that made it.

    Checked: each value assigned once, defined before it is used, use lists exact; a write comes after every reader of the
    value it replaces and keeps the bytes that it does not write; layouts stay inside their buffers; arguments are read and
    written as the schema says; shapes and dtypes equal what the op gives on meta tensors. Returns, for each op whose shapes
    could not be inferred, a line that says why. Raises VerificationError at the first broken rule.
    """
    _check_assignment(graph, after)
    _check_order(graph, after)
    _check_uses(graph, after)
    skipped: dict[str, None] = {}
    for node in graph.nodes:
        _check_arguments(node, after)
        _check_bounds(node, after)
        reason = _check_shapes(node, after)
        if reason:
            skipped[f"{node.target}: {reason}"] = None
    return list(skipped)


def reach(layout: Layout) -> tuple[int, int]:
    """First and one-past-last byte of a buffer that ``layout`` touches; (0, 0) for no elements."""
    if layout.numel == 0:
        return 0, 0
    spans = [stride * (extent - 1) for extent, stride in zip(layout.size, layout.stride)]
    first = layout.offset + sum(span for span in spans if span < 0)
    last = layout.offset + sum(span for span in spans if span > 0)
    return first * layout.itemsize, (last + 1) * layout.itemsize


def _check_assignment(graph: Graph, after: str) -> None:
    seen: dict[tuple[int, int], Node] = {}
    known = {value for values in graph.values for value in values}
    for node in graph.nodes:
        for write in node.all_writes():
            value = write.value
            if value.producer is not node:
                raise VerificationError(after, node, f"{value} names {value.producer or 'nothing'} as its producer")
            key = (value.buffer.index, value.version)
            if not 0 <= key[0] < len(graph.buffers) or graph.buffers[key[0]] is not value.buffer:
                raise VerificationError(after, node, f"{value.buffer} is no buffer of this graph")
            if key in seen or value.version < 1:
                raise VerificationError(after, node, f"{value} is assigned twice, first by {seen.get(key, 'the start')}")
            if value not in known:
                raise VerificationError(after, node, f"{value} is missing from its buffer's values")
            seen[key] = node


def _check_order(graph: Graph, after: str) -> None:
    """In graph order each buffer's versions only grow, and a reader comes before the write that replaces what it reads."""
    newest = {buffer: graph.values[buffer.index][0] for buffer in graph.buffers}
    for node in graph.nodes:
        for operand in node.reads:
            value, current = operand.value, newest.get(operand.value.buffer)
            if value is not current:
                how = f"{current} has replaced it" if current and value.version < current.version else "it is not made yet"
                raise VerificationError(after, node, f"reads {value} but {how}")
        for write in node.all_writes():
            _check_base(write, newest[write.value.buffer], node, after)
            newest[write.value.buffer] = write.value


def _check_base(write: Write, current: Value, node: Node, after: str) -> None:
    if write.value.version <= current.version:
        raise VerificationError(after, node, f"writes {write.value} after {current}")
    if write.base is not None and write.base is not current:
        raise VerificationError(after, node, f"keeps bytes of {write.base} but the buffer then holds {current}")
    if write.base is None:
        nothing_yet = current.producer is None and current.buffer.kind is BufferKind.FRESH
        if write.reads_old:
            raise VerificationError(after, node, f"computes from the old elements of {write.value.buffer} but names no base")
        if not (nothing_yet or write.layout.covers(current.buffer.nbytes)):
            raise VerificationError(after, node, f"{write} loses the bytes of {current} that it does not write")


def _check_uses(graph: Graph, after: str) -> None:
    expected: dict[Value, dict[Node, None]] = {}
    for node in graph.nodes:
        for value in node.inputs():
            expected.setdefault(value, {})[node] = None
    for value in (value for values in graph.values for value in values):
        users = expected.pop(value, {})
        if value.users.keys() != users.keys():
            extra = [node for node in value.users if node not in users]
            missing = [node for node in users if node not in value.users]
            names = "; ".join([f"has no longer {node}" for node in extra] + [f"lacks {node}" for node in missing])
            raise VerificationError(after, value, f"use list is wrong: {names}")
    for value, users in expected.items():
        raise VerificationError(after, next(iter(users)), f"uses {value}, which is no value of this graph")


def _check_arguments(node: Node, after: str) -> None:
    """The node's reads, targets and returns are those that its arguments and its schema show."""
    try:
        specs = ops.schema(node.target).arguments
    except KeyError as error:
        raise VerificationError(after, node, str(error.args[0])) from error
    if len(node.args) > len(specs):
        raise VerificationError(after, node, f"takes {len(specs)} arguments, holds {len(node.args)}")
    flat = [(index, item) for index, arg in enumerate(node.args) for item in leaves(arg)]
    if [item for _, item in flat if isinstance(item, Operand)] != list(node.reads):
        raise VerificationError(after, node, "its reads are not the operands of its arguments")
    targets = [item.index for _, item in flat if isinstance(item, Target)]
    slots = targets + [index for index in node.returns if index is not None]
    if slots != list(range(len(node.writes))):
        raise VerificationError(after, node, f"its {len(node.writes)} writes are not its targets and returns, {slots}")
    read = ops.reads_only(node.target, node.args)
    for index, item in flat:
        mode = ops.written_mode(node.target, index)
        name = specs[index].name
        if isinstance(item, Operand) and mode != "r" and index not in read:
            raise VerificationError(after, node, f"only reads {name}, which the op writes")
        if isinstance(item, Target):
            _check_target(node, node.writes[item.index], mode, name, after)


def _check_target(node: Node, write: Write, mode: str, name: str, after: str) -> None:
    if mode == "r":
        raise VerificationError(after, node, f"writes {name}, which the op only reads")
    if mode == "rw" and not write.reads_old:
        raise VerificationError(after, node, f"the op reads the old {name}, the write does not say so")


def _check_bounds(node: Node, after: str) -> None:
    seen = [(operand.value, operand.layout) for operand in node.reads]
    seen += [(write.value, write.layout) for write in node.all_writes()]
    for value, layout in seen:
        if len(layout.size) != len(layout.stride):
            raise VerificationError(after, node, f"{value} has {len(layout.size)} sizes and {len(layout.stride)} strides")
        first, last = reach(layout)
        if first < 0 or last > value.buffer.nbytes:
            raise VerificationError(after, node, f"{value}:{layout} touches bytes {first}..{last} of {value.buffer.nbytes}")


def _check_shapes(node: Node, after: str) -> str | None:
    """Infer on meta tensors; the reason where that is not possible."""
    reason = _no_inference(node)
    if reason:
        return reason
    targets = {write.value: _meta(write.layout) for write in node.writes}
    fill = call.Fill(
        operand=lambda operand: _meta(operand.layout),
        target=lambda write: targets[write.value],
        scalar=_number,
        device=_META,
    )
    try:
        positional, keyword = call.arguments(node, fill)
        result = ops.overload(node.target)(*positional, **keyword)
        results = call.new_results(node, result)
    except NotImplementedError as error:
        return f"no meta kernel ({str(error).splitlines()[0]})"
    except (RuntimeError, ValueError, TypeError, IndexError, AssertionError) as error:
        raise VerificationError(after, node, f"the op refuses these arguments: {error}") from error
    for index, tensor in zip(node.returns, results):
        if index is not None:
            targets[node.writes[index].value] = tensor
    for write in node.writes:
        _compare(node, write, targets[write.value], after)
    return None


def _no_inference(node: Node) -> str | None:
    row = ops.info(node.target)
    if row.data_dependent or row.value_access:
        return "its result depends on data"
    if node.target in _NO_STATISTICS and not node.args[5]:
        return "kernels give no statistics in inference, Meta does"
    if node.target == "aten::_grouped_mm" and node.reads[0].layout.dtype is not torch.bfloat16:
        return "kernels for CPUs take dtypes that Meta refuses"
    if node.target == "aten::native_layer_norm" and node.reads[0].layout.itemsize == 2:
        return "kernels for CPUs keep its statistics in 16 bits, Meta in 32"
    if node.target.startswith("aten::_cudnn_rnn"):
        return "only cuDNN knows how much it leaves for backward"
    # a mask is turned into positions first, and how many there are depends on data
    masks = (torch.bool, torch.uint8)
    if row.kind in ("gather", "scatter") and any(operand.layout.dtype in masks for operand in node.reads):
        return "indexed by a mask"
    return None


def _compare(node: Node, write: Write, found: torch.Tensor | None, after: str) -> None:
    wanted = write.layout
    if not isinstance(found, torch.Tensor):
        raise VerificationError(after, node, f"{write} is recorded, but the op returns {found!r} there")
    if tuple(found.shape) != wanted.size or found.dtype is not wanted.dtype:
        got = Layout.contiguous(found.dtype, tuple(found.shape))
        raise VerificationError(after, node, f"{write.value} is recorded as {wanted}, the op gives {got}")


def _meta(layout: Layout) -> torch.Tensor:
    return torch.empty_strided(layout.size, layout.stride, dtype=layout.dtype, device=_META)


def _number(number: ScalarInput) -> float | int | bool | complex:
    return _NUMBERS[number.kind]
