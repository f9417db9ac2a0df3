"""`LazyScheduler(debug_mode=True)`: a step that runs both orders before the real one. Joins `barriers` and `codegen`."""

from __future__ import annotations

from typing import Any

from barriers.order import Ordered
from barriers.refusals import at
from codegen.executable import Emit
from codegen.step_use import StepUse
from ir_nodes import BufferKind, Graph
from ir_nodes.replay import first_difference
from lazy_backend import core


def check_orders(graph: Graph, report: Ordered, device: int) -> Emit | None:
    """Runs the program's order and the scheduled one on copies of the same inputs, and notes in ``report`` where they differ.

    None where nothing was moved.
    """
    scheduled = list(graph.nodes)
    program = sorted(scheduled, key=lambda node: node.index)
    if program == scheduled:
        return None
    given = [value.buffer.index for value in graph.inputs() if value.buffer.kind is BufferKind.INPUT]
    physical = core.physical_device(device)

    def run(slots: list[Any], scalars: list[Any]) -> None:
        report.checked += 1
        try:
            found = first_difference(graph, program, scheduled, {index: slots[index] for index in given}, scalars, physical)
        except Exception as error:  # the check must not cost the user the step that it checks
            problem = f"debug_mode cannot compare the two orders: {type(error).__name__}: {error}"
            report.problems += [problem] if problem not in report.problems else []
            return
        if found is not None and not report.difference:
            node, index = found
            layout = node.writes[index].layout
            tensor = f"`{node.name}` {str(layout.dtype).removeprefix('torch.')}{list(layout.size)}{at(node.frame)}"
            report.difference = (
                f"the scheduled order gives other numbers than the program's: the first in segment {node.segment or '(none)'}, "
                f"{tensor}. Either the order is wrong, a bug of lazysched, or this op gives other bits each time that it runs"
            )

    return Emit(StepUse(tuple(given)), (), lambda program: program.python(run, scheduled[0].instr, given))
