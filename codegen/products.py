"""Matrix products by the fastest of cuBLASLt's suggestions, where ATen takes the first. Imports torch, `ir_nodes` and codegen's
library, measuring and plan modules.

Only Python can ask the library for one: once, where a CUDA graph captures what it launches, so this is for steps that replay.
Sums may be added up in another order than ATen's, so it is neither for ranks that have to stay equal nor where the program asks
for determinism.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Callable, Mapping, Sequence

import torch

from codegen import choices, counters, cublaslt
from codegen.autotune import machine_name
from codegen.candidates import TIMES, candidates
from codegen.contest import decide, in_words
from codegen.cublaslt import ALIGNMENT, Library, LibraryError, Multiplier
from codegen.kernel import Algorithm, ExternStep, MatMul, Plan
from codegen.last_bits import may_reorder
from codegen.product_bench import ATEN, Outcome
from codegen.promotion import HALF
from ir_nodes import Layout, Node, ops, settings
from ir_nodes.node import ScalarInput, Target
from ir_nodes.remarks import Remarks

BETTER = 0.985
"""Share of the first one's time. What takes 30 us or more comes out alike within half a percent, measured twice."""
SMALLEST = 1 << 32  # operations, some microseconds on a large GPU; below, launching takes longer than any algorithm can save
THIN = 16  # rows, columns or summands; of one of them PyTorch's strides do not say how it lies
PRODUCTS = ("aten::mm", "aten::mm.out", "aten::addmm", "aten::addmm.out", "aten::_addmm_activation.out", "aten::addmm_")
_ACTIVATION = "_addmm_activation"
_SWITCHES = {torch.bfloat16: "allow_bf16_reduced_precision_reduction", torch.float16: "allow_fp16_reduced_precision_reduction"}

Measure = Callable[[MatMul, Sequence[Algorithm], Multiplier], Outcome]


def with_algorithms(plan: Plan, folder: Path, device: int, measure: Measure | None, numbers: Sequence[Any] = (),
                    remarks: Remarks | None = None) -> Plan:
    """The plan with the fastest known algorithm for each large product, unless that is switched off. ``measure``: None where only
    what is remembered counts; ``numbers``: the graph's number inputs, as far as they are known."""
    if not settings.current().autotune or not settings.enabled("products") or not may_reorder():
        return plan
    remarks = remarks or Remarks()
    try:
        library = cublaslt.library(device)
    except LibraryError as error:
        remarks.refused("products", "", str(error))
        return plan
    return Chooser(folder, machine_name(device), library, measure, remarks).chosen(plan, numbers)


class Chooser:
    """Chooses algorithms, and measures each product that is new to the machine once."""

    def __init__(self, folder: Path, machine: str, library: Library, measure: Measure | None, remarks: Remarks) -> None:
        self._folder, self._machine, self._library = folder, machine, library
        self._measure, self._remarks = measure, remarks
        self._known: dict[MatMul, dict[str, Any] | str] = {}

    def chosen(self, plan: Plan, numbers: Sequence[Any]) -> Plan:
        steps = (self._step(step, numbers) if isinstance(step, ExternStep) else step for step in plan.steps)
        return replace(plan, steps=tuple(steps))

    def _step(self, step: ExternStep, numbers: Sequence[Any]) -> ExternStep:
        node = step.node
        if node.target not in PRODUCTS:
            return step
        product = product_of(node, numbers)
        if isinstance(product, str):
            self._remarks.refused("products", node.name, product)
            return step
        if product not in self._known:
            self._known[product] = self._facts(product)
        facts = self._known[product]
        if isinstance(facts, str):
            self._remarks.refused("products", f"{node.name} {product}", facts)
            return step
        self._note(f"{node.name} {product}", facts)
        return replace(step, algorithm=algorithm_in(product, facts))

    def _facts(self, product: MatMul) -> dict[str, Any] | str:
        """What is remembered of the product, or measured now; as text, why nothing is known."""
        reductions = reductions_of(product.dtype)
        key = (product, reductions, settings.enabled("counters"), self._machine, self._library.version, torch.__version__, TIMES)
        facts = choices.recall(self._folder, "multiply", key)
        if facts is not None and is_whole(facts):
            return facts
        if self._measure is None:
            return "it was not measured yet"
        try:
            multiplier = Multiplier(self._library, product)
            outcome = self._measure(product, candidates(self._library, multiplier, reductions), multiplier)
        except LibraryError as error:
            return str(error)
        if not outcome.seconds:
            return outcome.why
        choice = best(outcome)
        winner = next((one for one in outcome.algorithms if str(one.number) == choice), None)
        told = {name: None if time is None else round(time * 1e6, 2) for name, time in outcome.seconds.items()}
        facts = {"choice": choice, "microseconds": told, "product": str(product), "dropped": outcome.dropped,
                 "words": winner.words if winner else (), "workspace": winner.workspace if winner else 0}
        choices.remember(self._folder, "multiply", key, facts)
        return facts

    def _note(self, what: str, facts: Mapping[str, Any]) -> None:
        choice, measured = str(facts["choice"]), facts["microseconds"]
        took = in_words(choice, [ATEN], measured)
        if choice == ATEN:
            self._remarks.refused("products", what, f"none of cuBLASLt's {len(measured) - 1} suggestions is faster: {took}")
        else:
            self._remarks.did("products", what, f"cuBLASLt's suggestion {choice} of {len(measured) - 1}: {took}")


def best(outcome: Outcome) -> str:
    """The name of the fastest. ATen takes the first suggestion: where that counts, it is spared a node of a CUDA graph if it is
    called here."""
    choice = decide(list(outcome.seconds), list(outcome.seconds.values()), BETTER)
    first, aten = outcome.algorithms[0], outcome.seconds[ATEN]
    time = outcome.seconds.get(str(first.number))
    same = time is not None and aten is not None and time * BETTER < aten
    counts = 0 < first.workspace <= counters.COUNTER and settings.enabled("counters")
    return str(first.number) if choice == ATEN and same and counts else choice


def algorithm_in(product: MatMul, facts: Mapping[str, Any]) -> Algorithm | None:
    """The algorithm that was chosen; None: ATen's own call."""
    if facts["choice"] == ATEN:
        return None
    return Algorithm(product, int(facts["choice"]), tuple(facts["words"]), facts["workspace"])


def is_whole(facts: Mapping[str, Any]) -> bool:
    """Is what was read from a file all that was written there?"""
    words, workspace, choice = facts.get("words"), facts.get("workspace"), str(facts["choice"])
    if not isinstance(facts.get("microseconds"), dict) or not isinstance(words, (list, tuple)) or not isinstance(workspace, int):
        return False
    return choice == ATEN or choice.isdigit() and len(words) == 8 and all(isinstance(word, int) for word in words)


def reductions_of(dtype: torch.dtype) -> int:
    """How parts of sums may be added up, as PyTorch's switches say."""
    switches, name = torch.backends.cuda.matmul, _SWITCHES[dtype]
    if getattr(switches, name):
        return cublaslt.ANY_REDUCTION
    return cublaslt.IN_FLOAT32 if getattr(switches, f"{name}_split_k", True) else cublaslt.NO_SPLIT


def product_of(node: Node, numbers: Sequence[Any] = ()) -> MatMul | str:
    """What ``node``, one of `PRODUCTS`, asks a library for; as text, why no library of ours is asked."""
    args = {spec.name: arg for spec, arg in zip(ops.schema(node.target).arguments, node.args)}
    adds, onto, made = "mat1" in args, isinstance(args["self"], Target), node.writes[0].layout
    biased = adds and not onto
    left, right = (args["mat1"], args["mat2"]) if adds else (args["self"], args["mat2"])
    layouts = (left.layout, right.layout, *([args["self"].layout] if biased else []), made)
    if any(layout.dtype is not made.dtype or layout.flipped for layout in layouts) or made.dtype not in HALF:
        return "it is not in 16 bits throughout"
    (rows, inner), columns = left.layout.size, right.layout.size[1]
    if 2 * rows * columns * inner < SMALLEST or min(rows, columns, inner) < THIN:
        return f"it is small: launching it takes about as long as its {2 * rows * columns * inner / 1e9:.2g} GFLOP"
    if any(layout.offset * layout.itemsize % ALIGNMENT for layout in layouts):
        return f"a matrix of it starts off a {ALIGNMENT}-byte boundary"
    if node.writes[0].value.buffer in {read.value.buffer for read in node.reads}:
        return "it writes what it reads"
    first, second, result = (lies(layout) for layout in (left.layout, right.layout, made))
    if first is None or second is None:
        return "neither the rows nor the columns of a factor lie together, one after the other"
    if result is None or result[0]:
        return "the rows of its result do not lie together"
    why = (why_not_added(args, columns, numbers) if adds else "") or why_not_switched(made.dtype)
    return why or MatMul(made.dtype, rows, columns, inner, first, second, result[1], biased, node.name == _ACTIVATION, onto)


def lies(layout: Layout) -> tuple[bool, int] | None:
    """Whether a matrix lies in memory column by column, and the elements from one of its rows, or columns, to the next."""
    (rows, columns), (down, across) = layout.size, layout.stride
    if across == 1 and down >= columns:
        return False, down
    return (True, across) if down == 1 and across >= rows else None


def why_not_added(args: Mapping[str, Any], columns: int, numbers: Sequence[Any]) -> str:
    """Why the library can't add what the op adds to its product; "": it can."""
    added, beta = args["self"], args["beta"]
    if not isinstance(added, Target) and (added.layout.size != (columns,) or added.layout.stride != (1,)):
        return "what is added to it is no row, one number for each column"
    known = beta.index < len(numbers) if isinstance(beta, ScalarInput) else True
    if known and (numbers[beta.index] if isinstance(beta, ScalarInput) else beta) != 1:
        return "what is added to it is multiplied by another number than 1"
    return "its activation is a GELU" if args.get("use_gelu") else ""


def why_not_switched(dtype: torch.dtype) -> str:
    """Why PyTorch's switches leave the product to ATen; "": they do not."""
    if dtype is torch.float16 and getattr(torch.backends.cuda.matmul, "allow_fp16_accumulation", False):
        return "PyTorch is told to add up in float16"
    carveout = getattr(torch._C, "_get_sm_carveout_experimental", lambda: None)()
    return "PyTorch is told to leave multiprocessors free" if carveout is not None else ""


def launch(multiplier: Multiplier, algorithm: Algorithm, tensors: Sequence[torch.Tensor], alpha: float) -> None:
    """Launch on the current stream. ``tensors``: left, right, result, bias if there is one. The workspace is memory of PyTorch's
    allocator that is free again at once: what takes it next on this stream runs later, a CUDA graph's pool owns what is taken
    while the graph is captured, and another stream never gets it. Raises LibraryError."""
    left, right, made, *bias = tensors
    workspace = counters.workspace(algorithm.workspace, made.device)
    multiplier.run(algorithm, left.data_ptr(), right.data_ptr(), made.data_ptr(), bias[0].data_ptr() if bias else 0, alpha,
                   workspace.data_ptr(), torch.cuda.current_stream(made.device).cuda_stream)


def as_op(target: str, algorithm: Algorithm, multiplier: Multiplier) -> Callable[..., torch.Tensor]:
    """A function like the op ``target`` that multiplies by ``algorithm``. ATen's own serves calls with numbers or addresses that
    the library was not asked for, and, once it has refused one, all."""
    aten, product = ops.overload(target), algorithm.product
    able = True

    def multiply(*args: Any, **named: Any) -> torch.Tensor:
        nonlocal able
        *added, left, right = args[: 3 if product.bias or product.onto else 2]
        alpha, beta = named.get("alpha", 1), named.get("beta", 1)
        bias, made = ((), added[0]) if product.onto else (added, named.get("out"))
        given = (left, right, *bias) if made is None else (left, right, *bias, made)
        if not able or beta != 1 or any(one.data_ptr() % ALIGNMENT for one in given):
            return aten(*args, **named)
        if made is None:
            made = left.new_empty_strided((product.rows, product.columns), (product.apart, 1))
        try:
            launch(multiplier, algorithm, (left, right, made, *bias), float(alpha))
        except LibraryError:
            able = False
            return aten(*args, **named)
        return made

    return multiply


def multiplier_of(algorithm: Algorithm, device: int) -> Multiplier | None:
    """The product's descriptors on CUDA device ``device``; None where the library refuses them."""
    try:
        return Multiplier(cublaslt.library(device), algorithm.product)
    except LibraryError:
        return None
