"""Products of attention's three gradients run as one each for inputs, weights and biases. Imports `parts`, `product_sums`,
`summands`, `ir_nodes`.

What made queries, keys and values by one product (`join_products`) has one gradient, too: those of the three side by side. The
gradient of the input, which autograd sums of three products, is one product then, whose sums run over all their columns: it is
rounded once, where eager mode rounds three times, so this is for programs that have accepted other last bits. The three weights'
gradients are one product, the biases' one sum. Kernels of our own write the gradients side by side, where libraries' are copied.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from barriers.passes.parts import behind, forget, lie_beside, move, new_node, places_of, together, why_not_moved
from barriers.passes.product_sums import HALF, PRODUCTS, VECTOR
from barriers.passes.summands import Summed, summed
from ir_nodes import Graph, Layout, Node, Operand, Write, settings
from ir_nodes.ops import info
from ir_nodes.remarks import Remarks
from ir_nodes.rewrite import Substitution, let_go, read

SUMS = ("aten::sum.dim_IntList", "aten::sum.IntList_out")


@dataclass(slots=True)
class Gradient:
    """One of the three: [batch, rows, columns] that ``write`` makes, and what reads it as [batch * rows, columns]."""

    write: Write
    size: tuple[int, int, int]
    inputs: list[Node] = field(default_factory=list)  # products for the gradient of what a weight multiplied
    weights: list[Node] = field(default_factory=list)
    biases: list[Node] = field(default_factory=list)

    @property
    def columns(self) -> int:
        return self.size[2]


def join_gradients(graph: Graph, remarks: Remarks | None = None) -> Graph:
    """Let products of one attention's gradients run as one. Returns ``graph``. Linear in nodes."""
    return _Joiner(graph, remarks or Remarks()).run()


class _Joiner:
    def __init__(self, graph: Graph, remarks: Remarks) -> None:
        self.graph, self.remarks = graph, remarks
        self.place = {node: position for position, node in enumerate(graph.nodes)}
        self.instead: dict[Node, list[Node]] = {}  # what is to stand where a node stood
        self.dropped = Substitution()
        self.gone: list[Node] = []

    def run(self) -> Graph:
        for node in self.graph.nodes:
            gradients = gradients_of(node)
            if gradients and all(one.inputs or one.weights for one in gradients):
                self._consider(node, gradients)
        self.graph.nodes = [one for node in self.graph.nodes for one in self.instead.get(node, (node,))]
        if self.gone:
            self.dropped.apply(self.graph, self.gone)
        return self.graph

    def _consider(self, node: Node, gradients: list[Gradient]) -> None:
        reason = self._why_not(node, gradients)
        total = reason or self._total(gradients)
        ours = settings.current().attention == "triton" and settings.enabled("attention")
        if not reason and isinstance(total, str) and (not ours or why_not_weights(self.graph, gradients)):
            reason = total
        if reason:
            self.remarks.refused("join_products", node.name, reason)
            return
        self._join(node, gradients, None if isinstance(total, str) else total)
        what = "weights" if isinstance(total, str) else "weights, and of their input,"
        self.remarks.did("join_products", node.name, f"gradients of {what} are a product of three gradients side by side")

    def _why_not(self, node: Node, gradients: list[Gradient]) -> str:
        """Why the gradients can't lie side by side; "": they can."""
        users = [user for one in gradients for user in (*one.inputs, *one.weights, *one.biases)]
        if node.again or any((user.segment, user.stage) != (node.segment, node.stage) or user.again for user in users):
            return "what reads attention's gradients belongs to another part of the program"
        if any(one.columns * one.write.layout.itemsize % VECTOR for one in gradients):
            return f"a size is no multiple of {VECTOR} bytes, so that products had better run in longer rows"
        return next((why for one, place in zip(gradients, places_of([one.columns for one in gradients]))
                     if (why := why_not_moved(self.graph, one.write, place))), "")

    def _total(self, gradients: list[Gradient]) -> Summed | str:
        """The sum of the products for the input's gradient; as text, why they can't be one."""
        products = [product for one in gradients for product in one.inputs]
        if any(len(one.inputs) != 1 for one in gradients):
            return "gradients of queries, keys and values are not multiplied by one matrix each"
        if not lie_beside([product.reads[1] for product in products]):
            return "the matrices that multiply them do not lie side by side"
        return summed(self.graph, products, self.place)

    def _join(self, node: Node, gradients: list[Gradient], total: Summed | None) -> None:
        (batch, rows, _), widths = gradients[0].size, [one.columns for one in gradients]
        layout = Layout.contiguous(gradients[0].write.layout.dtype, (batch, rows, sum(widths)))
        parts = tuple(Operand(one.write.value, Layout.contiguous(layout.dtype, one.size)) for one in gradients)
        cat = new_node(self.graph, node, "aten::cat.out", (parts, 2), layout)
        self.instead[node] = [node, cat]
        for one, place in zip(gradients, places_of([one.columns for one in gradients])):
            move(one.write.value, cat.writes[0].value, place, but=cat)
        whole = Operand(cat.writes[0].value, Layout.contiguous(layout.dtype, (batch * rows, sum(widths))))
        if total is not None:
            self._join_inputs(whole, total)
        if not why_not_weights(self.graph, gradients):
            self._join_weights(whole, gradients)
        if not why_not_biases(self.graph, gradients):
            self._join_biases(whole, gradients)

    def _join_inputs(self, whole: Operand, total: Summed) -> None:
        """Let the product that is added first multiply all, where the first one ran."""
        kept, first = total.kept, min(total.products, key=self.place.__getitem__)
        let_go(kept)
        kept.args, kept.changed = (whole, together([one.reads[1] for one in total.products]), *kept.args[2:]), True
        read(kept)
        self.instead[kept] = []
        self.instead[first] = [kept] if first is kept else [kept, first]
        for result, rest in total.rests:
            self.dropped.replace(result, rest)
        self.gone += total.gone

    def _join_weights(self, whole: Operand, gradients: list[Gradient]) -> None:
        products = [one.weights[0] for one in gradients]
        (rows, columns), (_, inner) = whole.layout.size, products[0].reads[1].layout.size
        transposed = Operand(whole.value, replace(whole.layout, size=(columns, rows), stride=(1, columns)))
        layout = Layout.contiguous(whole.layout.dtype, (columns, inner))
        first = min(products, key=self.place.__getitem__)
        self._replace(products, new_node(self.graph, first, PRODUCTS[-1], (transposed, products[0].reads[1]), layout))

    def _join_biases(self, whole: Operand, gradients: list[Gradient]) -> None:
        sums = [one.biases[0] for one in gradients]
        first, columns = min(sums, key=self.place.__getitem__), whole.layout.size[1]
        one = first.writes[0].layout
        layout = Layout.contiguous(one.dtype, (*one.size[:-1], columns))
        self._replace(sums, new_node(self.graph, first, SUMS[-1], (whole, *first.args[1:4]), layout))

    def _replace(self, nodes: list[Node], joint: Node) -> None:
        """Let ``joint``, which makes what ``nodes`` make, one after the other, stand where the first of these stood."""
        start, whole = 0, joint.writes[0].value
        for node in nodes:
            self.instead[node] = []
            move(node.writes[0].value, whole, behind(start))
            start += node.writes[0].layout.numel
            forget(self.graph, node)
        self.instead[min(nodes, key=self.place.__getitem__)] = [joint]


def gradients_of(node: Node) -> list[Gradient]:
    """What attention's backward ``node`` makes for queries, keys and values, if each lies in rows; else nothing."""
    if info(node.target).kind != "attention" or not node.name.endswith("_backward") or None in node.returns[:3]:
        return []
    found = []
    for write in (node.writes[place] for place in node.returns[:3] if place is not None):
        (batch, heads, rows, width), layout = write.layout.size, write.layout
        lies = replace(layout, stride=(rows * heads * width, width, heads * width, 1), offset=0)
        if not layout.alike(lies) or layout.dtype not in HALF:
            return []
        found.append(Gradient(write, (batch, rows, heads * width)))
        sort_readers(found[-1])
    return found if len({one.size[:2] for one in found}) == 1 else []


def sort_readers(gradient: Gradient) -> None:
    """Tell which readers of a gradient are which."""
    value, (batch, rows, columns) = gradient.write.value, gradient.size
    seen = Layout.contiguous(gradient.write.layout.dtype, (batch * rows, columns))
    turned = replace(seen, size=seen.size[::-1], stride=seen.stride[::-1])
    for user in value.users:
        if user.target not in (*PRODUCTS, *SUMS) or user.writes[0].layout.dtype is not seen.dtype:
            continue
        first = user.reads[0]
        if first.value is not value:
            continue
        if user.target in PRODUCTS and user.reads[1].value is not value:
            if first.layout.alike(seen) and user.reads[1].layout.is_contiguous:
                gradient.inputs.append(user)
            elif first.layout.alike(turned):
                gradient.weights.append(user)
        elif user.target in SUMS and first.layout.alike(seen) and tuple(user.args[1] or ()) == (0,):
            gradient.biases.append(user)


def why_not_weights(graph: Graph, gradients: list[Gradient]) -> str:
    """Why the products for weights' gradients can't be one; "": they can."""
    products = [one.weights[0] for one in gradients if len(one.weights) == 1]
    if len(products) < len(gradients) or len({product.reads[1] for product in products}) > 1:
        return "they are not multiplied by one input"
    return why_not_made(graph, products)


def why_not_biases(graph: Graph, gradients: list[Gradient]) -> str:
    """Why the sums for biases' gradients can't be one; "": they can."""
    sums = [one.biases[0] for one in gradients if len(one.biases) == 1]
    if len(sums) < len(gradients) or len({one.args[1:4] for one in sums}) > 1:
        return "they are not summed alike"
    return why_not_made(graph, sums)


def why_not_made(graph: Graph, nodes: list[Node]) -> str:
    """Why one node can't make what ``nodes`` make, one after the other; "": it can."""
    return next((why for node in nodes if (why := why_not_moved(graph, node.writes[0], behind(0)))), "")
