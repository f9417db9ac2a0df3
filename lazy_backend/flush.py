"""Compiles a recording on a cache miss: graph, passes, engine, program. Joins `barriers` and `codegen`; imports both."""

from __future__ import annotations

import sys
import warnings
from functools import partial
from types import ModuleType
from typing import Any, Callable, Sequence, TypeVar

import torch.distributed as dist

from barriers.collectives import join_launches, part_stages, release_waits, sink_waits
from barriers.passes.bridges import back_to_rows
from barriers.pipeline import PassFailed, ordered_passes, run_passes
from codegen import engines
from codegen.cuda_graph import keep_out
from codegen.early import NEVER, Known, known, part
from codegen.engine import Context, EngineError, Unmade
from codegen.executable import Emit, Program, assemble
from codegen.last_bits import may_reorder
from codegen.lowered import Lowered
from codegen.partition import partition
from ir_nodes import Graph, printer, settings
from ir_nodes.remarks import Remarks
from lazy_backend import core, holding, orders, varying
from lazy_backend.checks import check_orders
from lazy_backend.entered import segments
from lazy_backend.garbage import uncollected
from lazy_backend.measure import part_segments, with_times
from lazy_backend.trace import Recording, to_graph

Made = TypeVar("Made")

before_first_run: list[Callable[[Graph], None]] = []
"""Called with each new graph that has collectives, in the order in which it is about to run; may raise."""


watchers: list[Callable[[Graph, Remarks], None]] = []
"""Called with each new graph as it is handed to the engine, and with what passes tell of it; for `explain`."""


steppers: list[Callable[[Graph, list[Emit], int], list[Emit]]] = []
"""Called with each new graph, its steps and its device's index; give the steps that run instead. For `explain`."""


@uncollected()  # the collector would look through the growing graph again and again and find nothing
def compile_recording(native: ModuleType, recording: Recording, device: int) -> Program:
    """The program for ``recording`` on device ``device``. Runs once per cache miss, under the GIL."""
    try:
        return compiled(native, recording, device)
    except PassFailed as failed:  # an optimisation that has a fault must not cost the user the step
        warnings.warn(f"lazysched: {failed}. The recording is compiled without optional passes; please report this.",
                      RuntimeWarning, stacklevel=2)
        return compiled(native, recording, device, optional=False)


def compiled(native: ModuleType, recording: Recording, device: int, optional: bool = True) -> Program:
    """The program; ``optional``: with the passes that a graph can do without. Raises PassFailed."""
    now, lowered, remarks = settings.current(), Lowered(), Remarks()
    varying.note(recording)
    graph = to_graph(recording, segments.calls)
    recorded = len(graph.nodes)
    seen = seen_when(graph, native, recording, device)
    held = holding.split(graph, recording)
    graph, _ = run_passes(graph, check=now.verify)
    talks = release_waits(graph)
    ordered = orders.apply(graph, held)
    if talks:
        sink_waits(graph)
        join_launches(graph)
        part_stages(graph)
        for check in before_first_run:
            check(graph)
    if optional and not orders.debugging():  # which runs the program's order too
        shared = partial(partition, lowered=lowered) if engine_name() == "triton" else None
        graph, _ = run_passes(graph, ordered_passes(shared, remarks, *facts()), check=now.verify)
    if "graph" in now.debug:
        print(printer.text(graph), file=sys.stderr)
    for watch in watchers:
        watch(graph, remarks)
    if out := recording.refused:
        keep_out(node for node in graph.nodes if node.instr in out)
    program: Program = native.Program()
    program.order = ordered
    program.rest, program.kept = held.rest, held.kept
    keeps_no_order = not (held.rest or talks or ordered >= 0)
    if seen is not None and keeps_no_order:
        program.apart = part(graph, seen) and not seen.always  # else undone where nobody waits
    if orders.measuring():
        part_segments(graph)
    with core.on_physical(device):
        steps, temporaries = plan_steps(graph, engine_name(), device, recording.scalars(), lowered)
    for stepper in steppers:
        steps = stepper(graph, steps, device)
    report = orders.report(ordered)
    if report is not None and orders.measuring():
        steps = with_times(steps, report)
    if report is not None and orders.debugging():
        check = check_orders(graph, report, device)
        steps = [check, *steps] if check else steps
    dead = recorded - len({node.instr for node in graph.nodes if not node.again}) - len(held.rest)
    refused = partial(told_why, native)
    if seen is not None and not keeps_no_order:
        refused("segments, schedules and collectives keep their order")
    # What a collective sends may be in use until a later recording waits for it, though nobody holds it any more.
    assemble(graph, program, steps, dead, temporaries, replays(), donate=not (dist.is_available() and dist.is_initialized()),
             seen=seen if keeps_no_order else None, refused=refused)
    return program


def told_why(native: ModuleType, why: str) -> None:
    """In `torch._lazy.metrics`, like what keeps stretches out of CUDA graphs."""
    native.count(f"StartEarlyRefused: {why}")


def seen_when(graph: Graph, native: ModuleType, recording: Recording, device: int) -> Known | None:
    """What is known of the recording at which place; None where no program starts early. Where its loop reads something at every
    step, as far as one can tell when it is compiled, also where its updates begin."""
    chosen = settings.current().start_early
    if chosen == "never" or (chosen == "auto" and not on_gpu()):
        return None
    always = chosen == "always"
    if not settings.enabled("early_kernels"):
        return known(graph, always)
    backward = next((index for index, (*_, node, _) in enumerate(recording.instrs()) if node >= 0), NEVER)
    return known(graph, always, backward, always or bool(recording.needed) or native.waited(device))


def replays() -> bool:
    """May stretches of a program be replayed as CUDA graphs?"""
    return core.physical_is_cuda() and settings.current().mode == "lazy" and settings.enabled("cuda_graphs")


def on_gpu() -> bool:
    """Do programs run on a GPU, beside the host, and convolutions, whose kernels have formats of their own there?"""
    return core.physical_is_cuda()


def facts() -> tuple[bool, bool, bool]:
    """What `ordered_passes` is told of how steps run."""
    return replays(), on_gpu(), may_reorder()


def engine_name() -> str:
    chosen = settings.current().engine
    if chosen == "auto":
        return "triton" if core.physical_is_cuda() else "aten"
    return chosen


def plan_steps(graph: Graph, engine: str, device: int, numbers: Sequence[Any], lowered: Lowered) -> tuple[list[Emit], list[int]]:
    """The engine's steps. ATen runs the nodes of kernels that can't be made, and the whole graph where the engine fails; a
    warning names the cause."""
    show = show_source if "kernels" in settings.current().debug else None
    context = context_of(device, show=show, numbers=numbers, lowered=lowered)
    try:
        return with_kernels_that_can_be(graph, lambda: engines.engine(engine)(graph, context))
    except Exception as error:  # a kernel that cannot be made must not cost the user the step
        if engine == "aten":
            raise
        cause = str(error) if isinstance(error, EngineError) else f"{type(error).__name__}: {error}"
        warnings.warn(
            f"lazysched: the {engine} engine gives up on a graph of {len(graph.nodes)} nodes, "
            f"which the aten engine runs instead: {cause}",
            RuntimeWarning,
            stacklevel=2,
        )
        back_to_rows(graph, graph.nodes)
        return engines.engine("aten")(graph, context)


def with_kernels_that_can_be(graph: Graph, make: Callable[[], Made]) -> Made:
    """What ``make`` makes of the graph, again without the nodes of kernels that can't be made. Raises what it raises."""
    while True:
        try:
            return make()
        except Unmade as unmade:
            if graph.left.keys() >= set(unmade.nodes):
                raise
            graph.left |= dict.fromkeys(unmade.nodes, f"its kernel can't be made: {unmade}")
            back_to_rows(graph, unmade.nodes)
            warnings.warn(f"lazysched: ATen runs {len(unmade.nodes)} of {len(graph.nodes)} nodes, as their kernel can't be made; "
                          f"please report this: {unmade}", RuntimeWarning, stacklevel=2)


def context_of(device: int, **more: Any) -> Context:
    """What an engine is told of the device, the settings and the program so far, and ``more`` of the graph."""
    return Context(core.physical_is_cuda(), device, settings.current().cache_dir / "kernels", redraws=orders.state_was_read(),
                   replays=replays(), **more)


def show_source(text: str) -> None:
    print(text, file=sys.stderr)


def install(native: ModuleType) -> None:
    native.set_compiler(lambda recording, device: compile_recording(native, recording, device))


core.at_start(install)
