"""Masks that wait for another kernel are bits there: the same numbers, from as many kernels, in less memory."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Callable

import pytest
import torch
import torch.nn.functional as F
from graphs import CACHE, compile_all, execute, externs, kernels
from recording import Recorder, Recording

from barriers.model import memory
from barriers.passes import pack_masks as module
from barriers.passes.pack_masks import pack_masks
from codegen import triton_compile
from codegen.body import Step
from codegen.fuse import plan
from codegen.kernel import Plan
from codegen.packed_source import BitWriter
from codegen.partition import partition
from codegen.tuning import HOPPER, Tuning
from ir_nodes import BufferKind, Graph, settings
from ir_nodes.kernels import traffic, unstored
from ir_nodes.own import PACKED, UNPACKED
from ir_nodes.remarks import Remarks
from ir_nodes.verify import verify
from tests.optimised import assert_equals_near

LOOPED = Tuning(tile=64, persistent=16, looped=16)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreted kernels work on few elements."""
    monkeypatch.setattr(module, "LEAST", 1)


def dropping(rows: int, width: int, dtype: torch.dtype = torch.float32, norm: bool = True) -> Recording:
    """Forward and backward of layers with dropout behind a product, and a norm; gives gradients."""
    torch.manual_seed(0)
    given = [torch.randn(rows, width), *torch.randn(2, width), *(torch.randn(2, width, width) / width**0.5)]
    with Recorder() as recorder:
        x, *weights = (one.detach().requires_grad_() for one in given)
        y = x
        for scale, weight in zip(weights, weights[2:]):
            dropped = torch.native_dropout(F.relu(y.to(dtype)) @ weight.to(dtype), 0.3, True)[0]
            y = F.layer_norm(dropped + y, (width,), scale) if norm else (dropped * scale).sin() + y
        grads = torch.autograd.grad((y.tanh() @ weights[2]).square().sum(), (x, *weights))
    return recorder.finish([*grads, *given])


def choosing(program: Callable[..., torch.Tensor], *size: int) -> Recording:
    """Forward and backward of what ``program`` makes of two tensors, products before and behind it; gives gradients."""
    torch.manual_seed(0)
    given = list(torch.randn(3, *size))
    with Recorder() as recorder:
        x, y, z = (one.detach().requires_grad_() for one in given)
        made = program(x @ z.transpose(-2, -1) @ z, y)
        grads = torch.autograd.grad((made @ made.transpose(-2, -1)).sum(), (x, y, z))
    return recorder.finish([*grads, *given])


def both(recorded: Callable[[], Recording], tuning: Tuning = HOPPER, exact: bool = True) -> tuple[Graph, Plan, Remarks]:
    """The graph with its masks packed, its plan, and what was said. It gives what it gives without, and has as many kernels."""
    plain, recording, remarks = recorded(), recorded(), Remarks()
    graph = pack_masks(recording.graph, partial(partition, tuning=tuning), remarks)
    verify(graph)
    before, after = plan(plain.graph, tuning=tuning), plan(graph, tuning=tuning)
    assert len(kernels(after)) == len(kernels(before)) and len(externs(after)) == len(externs(before))
    wanted, found = execute(plain, before), execute(recording, after)
    for old, new in zip(plain.graph.outputs(), graph.outputs()):
        ours, theirs = found[new.buffer.index], wanted[old.buffer.index]
        if exact:
            assert torch.equal(ours, theirs)
        elif new.buffer.kind is not BufferKind.GENERATOR:
            torch.testing.assert_close(ours.view(torch.float32), theirs.view(torch.float32), rtol=1e-3, atol=1e-3)
    return graph, after, remarks


def packed(graph: Graph) -> int:
    return sum(node.target == PACKED for node in graph.nodes)


@pytest.mark.parametrize("tuning", [HOPPER, LOOPED], ids=["hopper", "looped"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows, width", [(3, 24), (3, 40), (8, 16)])
def test_dropout_waits_for_backward_as_bits(rows: int, width: int, dtype: torch.dtype, tuning: Tuning) -> None:
    graph, made, remarks = both(partial(dropping, rows, width, dtype), replace(tuning, philox_blocks=4), exact=False)
    assert packed(graph) == 2 and sum(node.target == UNPACKED for node in graph.nodes) == 2
    assert any(one.done and one.optimisation == "packed_masks" for one, _ in remarks.all())
    compile_all(made)


@settings.override(disable=frozenset(["narrow_products"]))  # the interpreter takes minutes for products of two rows
def test_rows_in_strips() -> None:
    """A thread has the eight neighbours; bits are stored before anything is reduced."""
    for dtype in (torch.float32, torch.bfloat16):
        _, made, _ = both(partial(dropping, 2, 768, dtype), HOPPER.changed("few=0"), exact=False)
        sources = [step.kernel.source for step in kernels(made) if "_of_eight(tl" in step.kernel.source]
        assert len(sources) == 2 and all("i1_2" in source for source in sources)
        for source in sources:
            assert source.rindex("_of_eight(tl") < source.rindex("tl.reduce(t")
        assert sum("_to_eight(tl" in step.kernel.source for step in kernels(made)) == 2
        compile_all(made)
    before = plan(dropping(2, 768, torch.bfloat16).graph, tuning=HOPPER.changed("few=0"))
    assert shuffles(made) == shuffles(before), "each thread puts its own bits together"


def shuffles(made: Plan) -> int:
    """Instructions of the drawing kernels that hand numbers from thread to thread."""
    names = {step.kernel: step.kernel.name for step in kernels(made)}
    drawing = [one for one, name in names.items() if "native_dropout" in name and "backward" not in name]
    return sum(triton_compile.compile_for_hopper(one, CACHE).handle.asm["ptx"].count("shfl.sync") for one in drawing)


def test_columns_that_are_summed_beside_rows_read_bits() -> None:
    tuning = replace(HOPPER, split_numel=64, mixed_rows=2)
    graph, made, _ = both(partial(dropping, 64, 48), tuning, exact=False)
    assert packed(graph) == 2
    compile_all(made)


@pytest.mark.parametrize("numel", [(6, 24), (3, 5, 8), (4, 136)])
def test_elementwise_kernels(numel: tuple[int, ...]) -> None:
    def program(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.where(x > y, x * 2.0, y.sin())

    graph, made, _ = both(partial(choosing, program, *numel))
    assert packed(graph) == 1
    compile_all(made)


def test_a_mask_that_lies_transposed_keeps_the_order_of_its_memory() -> None:
    def program(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.where(x.transpose(0, 1) > y.transpose(0, 1), x.transpose(0, 1), y.transpose(0, 1) * 3.0).transpose(0, 1)

    graph, made, _ = both(partial(choosing, program, 24, 40))
    assert packed(graph) == 1
    compile_all(made)


def test_one_mask_for_several_kernels() -> None:
    def program(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        mask = x > 0.1
        first = torch.where(mask, x, y)
        return torch.where(mask, (first @ first.transpose(-2, -1)) @ y, first)

    graph, made, _ = both(partial(choosing, program, 16, 24))
    assert packed(graph) == 1 and sum(node.target == UNPACKED for node in graph.nodes) >= 2
    compile_all(made)


def test_what_stays_as_it_is() -> None:
    """Masks that somebody sees, that a library reads, whose rows fill no bytes, or that no kernel leaves."""
    def seen(x: torch.Tensor) -> list[torch.Tensor]:
        mask = x > 0
        return [mask, torch.where(mask, x @ x, x)]

    def read(x: torch.Tensor) -> list[torch.Tensor]:
        mask = x > 0
        return [mask.nonzero_static(size=4), torch.where(mask, x @ x, x)]

    def narrow(x: torch.Tensor) -> list[torch.Tensor]:
        x = x[:, :6] @ x[:6, :6]
        return [torch.where(x > 0, x @ x[:6], x)]

    def inside(x: torch.Tensor) -> list[torch.Tensor]:
        return [torch.where(x > 0, x * 2, x)]

    for program in (seen, read, narrow, inside):
        with Recorder() as recorder:
            x = torch.randn(8, 8)
            made = program(x)
        remarks = Remarks()
        graph = pack_masks(recorder.finish([*made, x]).graph, partition, remarks)
        assert not packed(graph), program.__name__
        why = [one.why for one, _ in remarks.all()]
        assert why == (["a library makes or reads it, byte by byte"] if program is read else []), program.__name__


def test_blocks_that_hold_no_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bits are taken one by one there. What would store them leaves bytes to a kernel that packs them."""
    fraction = BitWriter.fraction

    def rarely(self: BitWriter, step: Step, count: int) -> tuple[str, str] | None:
        alone = sum(one.stage != "coord" for one in self.body.steps) == 2
        return fraction(self, step, count) if alone else None

    monkeypatch.setattr(BitWriter, "fraction", rarely)
    recording, plain = dropping(6, 24), dropping(6, 24)
    graph = pack_masks(recording.graph, partition)
    before, after = plan(plain.graph), plan(graph)
    assert packed(graph) == 2 and len(kernels(after)) == len(kernels(before)) + 2
    assert sum(step.kernel.name == "pointwise_pack_bits" for step in kernels(after)) == 2
    wanted, found = execute(plain, before), execute(recording, after)
    for old, new in zip(plain.graph.outputs(), graph.outputs()):
        if new.buffer.kind is not BufferKind.GENERATOR:
            torch.testing.assert_close(found[new.buffer.index].view(torch.float32), wanted[old.buffer.index].view(torch.float32),
                                       rtol=1e-3, atol=1e-3)
    compile_all(after)


def test_less_is_held_and_moved() -> None:
    plain, recording = dropping(40, 64), dropping(40, 64)
    graph = pack_masks(recording.graph, partition)
    before, after = partition(plain.graph), partition(graph)
    bits = 40 * 64 * 7 // 8
    assert traffic(plain.graph, before) - traffic(graph, after) == 2 * 2 * bits
    held = [max(memory(one, one.nodes, unstored(one, made))) for one, made in ((plain.graph, before), (graph, after))]
    assert held[1] < held[0]


def test_ops_of_torch_give_the_same() -> None:
    """As engines run them that make no kernels."""
    recording = choosing(lambda x, y: torch.where(x > y, x * 2.0, y.sin()), 6, 24)
    graph = pack_masks(recording.graph, partition)
    assert packed(graph) == 1
    assert_equals_near(graph, recording)


def test_it_can_be_switched_off() -> None:
    assert settings.enabled("packed_masks") and settings.enabled("early_stores")
    recording = dropping(6, 768)
    with settings.override(disable=frozenset(["early_stores"])):
        made = plan(recording.graph, tuning=HOPPER.changed("few=0"))
    late = [step.kernel.source for step in kernels(made) if "native_dropout_" in step.kernel.name]
    assert late and all(source.index("tl.store(") > source.rindex("tl.reduce(t") for source in late if "tl.reduce(t" in source)


@pytest.mark.parametrize("size", [(4, 24, 16), (3, 9, 40), (2, 1, 8)], ids=str)
def test_masks_of_what_columns_are_reduced_to(size: tuple[int, ...]) -> None:
    """One bit for each column, not for each element: such a kernel did not compile, and ATen ran the step."""
    def averaging() -> Recording:
        torch.manual_seed(0)
        given = [torch.randn(*size), torch.randn(size[1:]), torch.randn(size[2], size[2])]
        with Recorder() as recorder:
            x, w, z = (one.detach().requires_grad_() for one in given)
            made = F.leaky_relu(torch.minimum(w, x.mean(0))) @ z
            grads = torch.autograd.grad(made.square().sum(), (x, w, z))
        return recorder.finish([*grads, *given])

    _, made, _ = both(averaging)
    assert any("_of_eight" in step.kernel.source and step.kernel.name.startswith("reduce_mean") for step in kernels(made))
    compile_all(made)
