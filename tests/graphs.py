"""Runs recorded programs through codegen: plans, the interpreter, Hopper compilation. Imports torch, `ir_nodes`, `codegen` and
`recording` only."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, Callable, Sequence

import torch
from recording import Recorder, Recording

from codegen import interpreted, triton_compile
from codegen.combo import combine
from codegen.fuse import plan
from codegen.kernel import ExternStep, Kernel, KernelStep, Plan
from codegen.memory_plan import MemoryPlan
from codegen.step_use import StepUse, kernel_use, node_use
from codegen.tuning import HOPPER, INTERPRETER, Tuning
from ir_nodes import call, ops
from ir_nodes.reference import window

CACHE = Path(tempfile.mkdtemp(prefix="lazysched-kernels-"))
_compiled: set[Kernel] = set()


def record(program: Callable[..., Any], *inputs: torch.Tensor) -> tuple[Recording, list[torch.Tensor]]:
    """The program's graph and its eager results; results and inputs are held at the end."""
    with Recorder() as recorder:
        result = program(*inputs)
    outs = list(result) if isinstance(result, (tuple, list)) else [result]
    return recorder.finish([*outs, *inputs]), outs


def kernels(made: Plan) -> list[KernelStep]:
    return [step for step in made.steps if isinstance(step, KernelStep)]


def externs(made: Plan) -> list[ExternStep]:
    return [step for step in made.steps if isinstance(step, ExternStep)]


def uses_of(made: Plan) -> list[StepUse]:
    """What each step does to memory."""
    return [kernel_use(step) if isinstance(step, KernelStep) else node_use(step.node) for step in made.steps]


def compile_all(made: Plan) -> None:
    """Compile every kernel that no test has compiled yet for Hopper."""
    for step in kernels(made):
        if step.kernel not in _compiled:
            _compiled.add(step.kernel)
            assert triton_compile.compile_for_hopper(step.kernel, CACHE).handle.asm["ptx"]


def execute(recording: Recording, made: Plan, places: MemoryPlan | None = None) -> dict[int, torch.Tensor]:
    """Run the plan on the recording's inputs; memory that nothing wrote is 0xFF. Returns the bytes of every buffer.

    ``places``: where buffers lie that have no memory of their own, as while a CUDA graph is captured.
    """
    memory = {}
    for buffer in recording.graph.buffers:
        given = recording.inputs.get(buffer.index)
        memory[buffer.index] = torch.full((buffer.nbytes + 16,), 0xFF, dtype=torch.uint8)[: buffer.nbytes]
        if given is not None:
            memory[buffer.index].copy_(given)
    slots: dict[int, torch.Tensor] = dict(memory)
    for slot, block in places.blocks.items() if places is not None else ():
        slots[slot] = torch.full((block.nbytes + 16,), 0xFF, dtype=torch.uint8)
        slots.update((result, slots[slot][start : start + places.sizes[result]]) for result, start in block.results.items())
        memory.update((result, slots[result]) for result in block.results if result in memory)
    for index, place in places.places.items() if places is not None else ():
        whole = slots.setdefault(place.slot, torch.full((places.sizes[place.slot] + 16,), 0xFF, dtype=torch.uint8))
        memory[index] = whole[place.offset : place.offset + place.nbytes]

    def run_extern(step: ExternStep) -> None:
        fill = call.Fill(
            operand=lambda operand: window(memory[operand.value.buffer.index], operand.layout),
            target=lambda write: window(memory[write.value.buffer.index], write.layout),
            scalar=lambda number: recording.scalars[number.index],
            device=torch.device("cpu"),
        )
        positional, keyword = call.arguments(step.node, fill)
        result = ops.overload(step.node.target)(*positional, **keyword)
        for index, tensor in zip(step.node.returns, call.new_results(step.node, result)):
            if index is not None and index >= 0:
                write = step.node.writes[index]
                window(memory[write.value.buffer.index], write.layout).copy_(tensor)

    interpreted.run_plan_interpreted(made, memory, recording.scalars, CACHE, run_extern)
    return memory


def typed(data: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Storage bytes seen as ``like`` is."""
    return torch.empty(0, dtype=like.dtype).set_(data.clone().untyped_storage(), like.storage_offset(), like.shape, like.stride())


def drawn(*size: int, dtype: torch.dtype = torch.float32, seed: int = 0, most: int = 9, false: float = 0.1) -> torch.Tensor:
    """Numbers of any dtype: integers up to ``most``, ``false`` of all bools."""
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.rand(size, generator=generator) > false
    if not dtype.is_floating_point:
        return torch.randint(-most, most + 1, size, generator=generator).to(dtype)
    return torch.randn(size, generator=generator).to(dtype)


def assert_same(made: torch.Tensor, wanted: torch.Tensor, rtol: float | None = None, atol: float | None = None) -> None:
    if rtol is None and wanted.dtype is torch.bfloat16:
        rtol, atol = 1e-2, 1e-2
    elif rtol is None and wanted.dtype.is_floating_point:
        rtol, atol = 2e-5, 2e-6
    torch.testing.assert_close(made, wanted, rtol=rtol, atol=atol, equal_nan=True)


def check(program: Callable[..., Any], *inputs: torch.Tensor, count: int | None = None, extern: int | None = 0,
          rtol: float | None = None, atol: float | None = None, tuning: Tuning = HOPPER, combos: bool = False) -> Plan:
    """Plan the program, run the plan in the interpreter, compare with eager and compile its kernels for Hopper.

    ``count``: how many kernels it must have; ``extern``: how many nodes ATen must run; ``combos``: let kernels share launches.
    """
    recording, outs = record(program, *inputs)
    made = plan(recording.graph, tuning=tuning)
    made = combine(made) if combos else made
    text = "\n".join([str([node.target for node in step.nodes]) for step in kernels(made)]
                     + [f"{step.node}: {step.reason}" for step in externs(made)] + [str(r) for r in made.refusals])
    if count is not None:
        assert len(kernels(made)) == count, text
    if extern is not None:
        assert len(externs(made)) == extern, text
    compare(recording, made, [*outs, *inputs], rtol, atol)
    if tuning is not INTERPRETER:  # no GPU ever gets such blocks: they are as large as numpy likes them
        compile_all(made)
    return made


def compare(recording: Recording, made: Plan, tensors: Sequence[torch.Tensor], rtol: float | None, atol: float | None) -> None:
    """Run the plan in the interpreter; what it leaves in these tensors' memory has to be what eager mode left there."""
    wanted = {index: data.clone() for index, data in recording.expected.items()}
    memory = execute(recording, made)
    held = {value.buffer.index for value in recording.graph.outputs()}
    for tensor in tensors:
        index = buffer_of(recording, wanted, tensor)
        if index in held:
            assert_same(typed(memory[index], tensor), tensor, rtol, atol)


def buffer_of(recording: Recording, wanted: dict[int, torch.Tensor], tensor: torch.Tensor) -> int | None:
    """The buffer that holds ``tensor``, found by its storage's bytes."""
    data = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    return next((index for index, known in wanted.items() if known.shape == data.shape and torch.equal(known, data)), None)


def values_named(made: Plan) -> Sequence[str]:
    """Names of the values that no kernel writes to memory."""
    return [str(value) for step in kernels(made) for value in step.elided]
