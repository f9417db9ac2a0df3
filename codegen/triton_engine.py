"""The triton engine: fused kernels, with ATen calls between them. Imports torch, triton, `ir_nodes` and `codegen` only."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Sequence

import torch

from codegen import cuda_driver, product_bench
from codegen.attention import give_more, use_kernels
from codegen.autotune import tuned
from codegen.benchmark_fusion import measured_sides
from codegen.combo import combine
from codegen.compile_pool import warm_up
from codegen.contest import on_gpu, remembered
from codegen.cuda_driver import Function
from codegen.draws import BLOCK
from codegen.engine import BackEnd, Context, EngineError, Generated, Unmade
from codegen.executable import ARGUMENT_KINDS, Emit, Program
from codegen.explanation import facts
from codegen.extern import emit_call, emit_python
from codegen.fuse import lower_all, plan
from codegen.group import new_group
from codegen.interpreted import Interpreted, launch
from codegen.kernel import ExternStep, Kernel, KernelArg, KernelStep, Offset, Plan, Pointer, Scalar, Seed, Size, Temporary
from codegen.kernel_files import KernelCacheError, KernelCompileError, write_source
from codegen.loading import load_some
from codegen.products import as_op, multiplier_of, with_algorithms
from codegen.rules import can_fuse
from codegen.step_use import kernel_use
from codegen.templates import measured_products, with_tiles
from codegen.triton_compile import interpret
from codegen.tuning import HOPPER, INTERPRETER, Tuning
from ir_nodes import Graph, Node, settings
from ir_nodes.locks import Lock

_shown: set[Kernel] = set()
_interpreted: dict[Kernel, Interpreted] = {}
_lock = Lock()
_SCALAR_KINDS = {torch.float32: "fp32", torch.float64: "fp64", torch.int64: "i64"}


def fuse(graph: Graph, context: Context) -> Plan:
    """What can be fused as kernels, the best of each by measurement; ATen runs the rest."""
    if context.cuda and context.measures and settings.enabled("parallel_compile"):
        warm_up(context.kernel_dir, len(graph.nodes))
    tuning, remarks = tuning_of(context), context.remarks
    if not context.cuda:
        return combine(plan(graph, tuning=tuning, lowered=context.lowered, remarks=remarks))
    give_more(graph, context)
    if remarks is not None and (reason := why_not_overlapping(context)):
        remarks.refused("overlap_launches", "", reason)
    timer = on_gpu(context.kernel_dir, context.device) if context.measures else remembered
    where = (context.kernel_dir, context.device, timer, remarks)
    sides, products = measured_sides(graph, tuning, *where), measured_products(graph, tuning, *where)
    planned = plan(graph, tuning=tuning, sides=sides, products=products, lowered=context.lowered, remarks=remarks)
    planned = use_kernels(planned, graph, context)
    made = tuned(combine(with_tiles(planned, products)), *where)
    if not context.replays:
        return made
    measure = product_bench.on_gpu(context.device) if context.measures else None
    return with_algorithms(made, context.kernel_dir, context.device, measure, context.numbers, remarks)


def generate(graph: Graph, planned: Plan, context: Context) -> Generated:
    """On CUDA kernels are launched by the native core; elsewhere Triton's interpreter runs them, which is slow and meant for
    tests. Raises EngineError, Unmade where it is about some kernels only."""
    ready = ready_kernels(planned, context)
    base = len(graph.buffers)
    scratch = {temporary.id: base + index for index, temporary in enumerate(planned.temporaries)}
    emits = []
    overlaps = context.cuda and settings.enabled("overlap_launches") and not why_not_overlapping(context)
    for step in planned.steps:
        if not isinstance(step, KernelStep):
            emits.append(emit_extern(step, context))
        elif context.cuda:
            emits.append(emit_launch(step, ready[step.kernel], scratch, overlaps and step.kernel.waits))
        else:
            emits.append(emit_interpreted(step, ready[step.kernel], base))
    return emits, [temporary.nbytes for temporary in planned.temporaries]


def refusal(first: Node, second: Node, context: Context) -> str:
    """Why the two share no kernel, whatever lies between them; "" where they may."""
    both = Graph()
    both.nodes = [first, second]
    tuning = tuning_of(context)
    units = lower_all(both, tuning)
    left, right = ([new_group(unit, 0, tuning) for unit in units if unit.node is node] for node in (first, second))
    joint = can_fuse(left[-1], right[0]) if left and right else "nothing is left of one of them"
    return joint if isinstance(joint, str) else ""


triton = BackEnd(refusal, fuse, generate, lambda planned, rates: sum(facts(step, rates).seconds for step in planned.steps))


RESERVED = 7
"""KiB of a multiprocessor's cache that rows are left out of, beside what no program may have of it."""


OVERLAPS = 9
"""The compute capability from which on kernels can wait for the one before them by themselves."""

CLUSTERS = {9: 8, 10: 8}
"""Programs of a cluster by compute capability, where there are any: so many run at the same time on every such GPU."""


def tuning_of(context: Context) -> Tuning:
    """What suits the machine."""
    if not context.cuda:
        return INTERPRETER
    device = torch.cuda.get_device_properties(context.device)
    cores, blocks = device.multi_processor_count, device.max_threads_per_multi_processor // BLOCK
    programs, shared = cores * HOPPER.programs // HOPPER.cores, device.shared_memory_per_block_optin
    return replace(HOPPER, cores=cores, programs=programs, few=programs, philox_blocks=cores * blocks, packs=device.major >= 8,
                   overlaps=device.major >= OVERLAPS, shared_bytes=min(HOPPER.shared_bytes, shared * 3 // 4),
                   cached=min(HOPPER.cached, (shared >> 10) - RESERVED), clusters=CLUSTERS.get(device.major, 0))


def why_not_overlapping(context: Context) -> str:
    """Why no programs of a kernel are placed before the kernel before it has ended; "": those of kernels that wait are."""
    if torch.cuda.get_device_properties(context.device).major < OVERLAPS:
        return f"the GPU is older than compute capability {OVERLAPS}.0"
    return "" if cuda_driver.overlaps_launches() else "the driver is older than CUDA 12.3's"


def ready_kernels(planned: Plan, context: Context) -> dict[Kernel, Any]:
    """Every kernel, to be launched or interpreted. Raises EngineError, Unmade where it is about some of them only."""
    kernels = list(dict.fromkeys(step.kernel for step in planned.steps if isinstance(step, KernelStep)))
    try:
        found = load_kernels(kernels, context) if context.cuda else interpret_all(kernels, context)
    except (KernelCacheError, OSError) as error:
        raise EngineError(str(error)) from error
    failed = {kernel: one for kernel, one in found.items() if isinstance(one, KernelCompileError)}
    for one in failed.values():
        if isinstance(one, KernelCacheError):
            raise EngineError(str(one)) from one
    if failed:
        nodes = [node for step in planned.steps if isinstance(step, KernelStep) and step.kernel in failed for node in step.nodes]
        raise Unmade(list(dict.fromkeys(nodes)), "; ".join(map(str, failed.values()))) from next(iter(failed.values()))
    return found


def load_kernels(kernels: Sequence[Kernel], context: Context) -> dict[Kernel, Function | KernelCompileError]:
    """Load what is to be launched, compiling what is new. Raises KernelCacheError."""
    for kernel in kernels:
        show(kernel, context)
    return load_some(kernels, context.kernel_dir, context.device)


def interpret_all(kernels: Sequence[Kernel], context: Context) -> dict[Kernel, Interpreted | KernelCompileError]:
    """Load what is to be interpreted."""
    refused: dict[Kernel, KernelCompileError] = {}
    for kernel in kernels:
        with _lock:
            show(kernel, context)
            try:
                _interpreted[kernel] = _interpreted.get(kernel) or interpret(kernel, context.kernel_dir)
            except KernelCompileError as error:
                refused[kernel] = error
    return {kernel: refused.get(kernel) or _interpreted[kernel] for kernel in kernels}


def show(kernel: Kernel, context: Context) -> None:
    if context.show is not None and kernel not in _shown:
        _shown.add(kernel)
        path = write_source(kernel, context.kernel_dir)
        context.show(f"# {path}\n{kernel.source}")


def written(step: KernelStep) -> tuple[int, ...]:
    return tuple(dict.fromkeys(item.buffer.index for item in step.writes if not isinstance(item, Temporary)))


def emit_extern(step: ExternStep, context: Context) -> Emit:
    """ATen's call, or the library's chosen way to do the same."""
    multiplier = multiplier_of(step.algorithm, context.device) if step.algorithm is not None else None
    if step.algorithm is None or multiplier is None:
        return emit_call(step.node)
    return emit_python(step.node, as_op(step.node.target, step.algorithm, multiplier))


def emit_launch(step: KernelStep, compiled: Function, scratch: dict[int, int], overlaps: bool = False) -> Emit:
    """``overlaps``: it waits by itself for the kernel before it."""
    args = [(ARGUMENT_KINDS.index(kind), index, value) for kind, index, value in (launch_arg(arg, scratch) for arg in step.args)]
    instr = step.nodes[0].instr

    def add(program: Program) -> None:
        grid = (*step.grid, step.kernel.cluster)
        program.launch(compiled.handle, grid, 32 * compiled.num_warps, compiled.shared, overlaps, args, instr)

    numbers = tuple(arg.index for arg in step.args if isinstance(arg, Scalar))
    draws = tuple(dict.fromkeys(arg.generator.index for arg in step.args if isinstance(arg, (Seed, Offset))))
    return Emit(kernel_use(step), written(step), add, step.nodes, "", False, numbers, draws)


def launch_arg(arg: KernelArg, scratch: dict[int, int]) -> tuple[str, int, int]:
    """Kind, index and value of an argument; see `LaunchArg` in csrc/program.h."""
    match arg:
        case Pointer(source=Temporary() as source):
            return ("ptr", scratch[source.id], arg.byte_offset)
        case Pointer(source=source):
            return ("ptr", source.buffer.index, arg.byte_offset)
        case Scalar(index=index, dtype=dtype):
            return (_SCALAR_KINDS[dtype], index, 0)
        case Size(value=value):
            return ("i64", -1, value)
        case Seed(generator=generator):
            return ("seed", generator.index, 0)
        case Offset(generator=generator, increment=increment):
            return ("offset", generator.index, increment)
    raise AssertionError(f"unknown kernel argument {arg}")


def emit_interpreted(step: KernelStep, kernel: Interpreted, base: int) -> Emit:
    def run(slots: list[Any], scalars: list[Any]) -> None:
        memory = {index: slot for index, slot in enumerate(slots[:base]) if slot is not None}
        scratch = {index: slot for index, slot in enumerate(slots[base:]) if slot is not None}
        with _lock:  # the interpreter changes triton.language while it runs
            try:
                launch(step, kernel, memory, scratch, scalars)
            except (IndexError, RuntimeError) as error:
                places = [f"{node.frame}" for node in step.nodes if node.frame and str(error).startswith(f"{node.target}:")]
                if not places:
                    raise
                raise type(error)(f"{error} (recorded at {' or '.join(places)})") from error

    use = kernel_use(step)
    touched = [*use.buffers, *(base + index for index in use.temporaries)]
    return Emit(use, written(step), lambda program: program.python(run, step.nodes[0].instr, touched), step.nodes)
