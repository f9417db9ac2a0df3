"""What the rows are like that a body reduces. Imports torch and codegen's leaf modules."""

from __future__ import annotations

from collections import Counter

import torch

from codegen.body import Body, Step
from codegen.forms import touched
from codegen.instructions import FULL, KEPT, work_of
from codegen.online import pairs
from codegen.tuning import Tuning

MOST_VALUES, FEWEST_ELEMENTS = 160, 4
"""Values of a thread beyond which its elements are fewer, and how many it has at least: of more, ptxas spills, or they take so
many registers that few run at a time. On an H200 a program of some 140 ops takes 89 us; with 32 elements each, 152."""

REGISTERS, FEW_REGISTERS, FILE = 255, 64, 64 << 10
"""Registers that a thread has at most, with which it should still be able to do, and that a multiprocessor has."""

MANY_STEPS, SOME_STEPS = 32, 6
"""Steps for each element of rows that registers hold, and of those that a loop walks, from which on that counts: of fewer, ptxas
finds an order. On an H200 a difference that is stored and summed takes 8 % longer with half as many elements."""

AGAIN = 16
"""How often an operand's elements are loaded that come from a cache."""
MUCH_WORK = 50
"""Instructions of each element from which on twice as many threads share a short row, or a block of a loop: the norm of a gelu's
softplus takes 63, and 60 us on an H200 with 16 elements a thread, which have room for few warps; 67 million sines and cosines,
which are summed, 123 and 77."""

_LONG = ("_ratio", "div_rn", "libdevice")
_FUNCTIONS = ("_normal(", "_logistic(", "_tanh", "_ratio(", "tl.exp", "tl.log", "libdevice.")


def narrow(body: Body) -> bool:
    """True where operands over the whole space have 16-bit elements or shorter ones, but for masks that a reduction leaves: a
    thread would hold twice as many of what these are made of. On an H200, 16.8 million float32 numbers that are compared with the
    least of their column take 149 us so."""
    full = [step for step in body.steps if step.access is not None and step.level == FULL]
    return any(step.access.dtype.itemsize <= 2 and not (body.reduced and step.stage == "store" and step.dtype is torch.bool)
               for step in full if step.access is not None)  # fmt: skip


def loads(body: Body) -> int:
    """How many operands a reduction reads element by element, each from a place of its own."""
    full = [step for step in body.steps if step.stage == "load" and step.level == FULL]
    return sum(touched(step.form) * 2 > body.numel for step in full)


def reductions(body: Body) -> int:
    return sum(step.stage == "reduce" for step in body.steps)


def reduced_once(body: Body) -> bool:
    """Do a program's threads wait for each other once, for the one thing that is made of a row of one operand?"""
    return loads(body) < 2 and reductions(body) == 1


def walks_again(body: Body) -> bool:
    """Does a loop over a row need another one after it?"""
    merged = {id(term) for total in pairs(body) for term in (total.args[0], total.args[0].args[0])}
    return any(step.level == FULL and step.phase and id(step) not in merged for step in body.steps)


def sums_only(body: Body) -> bool:
    """Does it leave nothing for each element?"""
    return not any(step.stage == "store" and step.level == FULL for step in body.steps)


def slow(body: Body) -> bool:
    """Are quotients or functions of each element rounded as float32 ones, which takes tens of instructions?"""
    exact = any(step.level == FULL and any(name in step.text for name in _LONG) for step in body.steps)
    return exact and not narrow(body)


def row_bytes(body: Body) -> int:
    """What is loaded and stored of one row."""
    return body.extent * sum(step.access.dtype.itemsize for step in body.steps
                             if step.stage in ("load", "store") and step.level == FULL and step.access is not None)


def reads_again(body: Body) -> bool:
    """Are operands so small that each of their elements is loaded many times, from a cache? Loading ahead, which copies element
    by element through shared memory, then takes longer than what it would hide. On an H200 the sums of 2,048 x 512 x 64
    differences take 337 us so."""
    full = [step for step in body.steps if step.stage == "load" and step.level == FULL]
    return bool(full) and all(touched(step.form) * AGAIN <= body.numel for step in full)


def makes_gradient(body: Body) -> bool:
    """Does it leave both a number of each row's exponentials, a loss, and results for all elements, its gradient?"""
    late = {step.level for step in body.steps if step.stage == "store" and step.phase}
    return {KEPT, FULL} <= late and any(pairs(body))


def alive(body: Body) -> int:
    """How many values of an element are held at a time, where results are stored last and sums are held throughout."""
    last: dict[Step, int] = {}
    for number, step in enumerate(body.steps):
        last.update((arg, number) for arg in step.args if arg.level == FULL and arg.stage != "reduce")
    ends = Counter(last.values())
    now, most = reductions(body), 0
    for number, step in enumerate(body.steps):
        now += step in last
        most = max(most, now)
        now -= ends[number]
    return most


def fitting(body: Body, lane: int, looped: bool, row: int = 0, most: int = MOST_VALUES) -> int:
    """Elements per thread, ``lane`` or fewer, of which ``most`` values are held at a time. Not of scans, whose threads wait for
    one another at each step, nor where a warp would no longer hold a ``row`` of so many elements: waiting for others takes
    longer."""
    full = [step for step in body.steps if step.level == FULL]
    if any(step.stage == "scan" for step in body.steps):
        return lane
    lane = lane // 2 if not looped and lane >= 4 * FEWEST_ELEMENTS and works_much(body) else lane
    if len(full) < (SOME_STEPS if looped else MANY_STEPS):
        return lane
    held, fits = alive(body), lane
    while fits > FEWEST_ELEMENTS and fits * held > most:
        fits //= 2
    return lane if not looped and row // fits > 32 >= row // lane else fits


def works_much(body: Body) -> bool:
    """Does each element take so many instructions that more threads with fewer elements each are better?"""
    steps = [step for step in body.steps if step.level == FULL]
    return sum(work_of(step.text if step.stage == "expr" else "") for step in steps) > MUCH_WORK


def has_functions(body: Body) -> bool:
    """Are functions of each element computed? Threads wait for them, so that columns' sums, which few threads make, had better be
    made by twice as many with half the elements each: on an H200, beside gelu's gradient of 12,544 x 1,280 in bfloat16, 29 us and
    not 54, beside silu's of 50,176 x 512 42 and 51."""
    return any(step.level == FULL and any(name in step.text for name in _FUNCTIONS) for step in body.steps)


def values_at_once(body: Body, threads: int, cores: int) -> int:
    """Values of a thread that leave room for all the ``threads`` that share a reduction (0: none do) at the same time, where
    there can be: a few programs more than the machine has room for take twice the time. What is only summed, or loads nothing,
    has as many as others: it waits less. On an H200, 512 programs of 128 that make a mean of 2^23 quotients, which are stored,
    take 37 us with 213 registers each, 25 with 128."""
    each = cores * FILE // max(threads, 1)
    if not threads or each < FEW_REGISTERS or sums_only(body) or not loads(body):
        return MOST_VALUES
    return min(MOST_VALUES, MOST_VALUES * each // REGISTERS)


def lanes_needed(body: Body, shortest: int = 0) -> int:
    """Elements of a row and, where rows do not start on 16-byte boundaries, of what may lie between one and its start. Rows of up
    to ``shortest`` elements are not read from there on."""
    return body.extent + (7 if body.extent % 8 and body.extent > shortest else 0)


def longest_held(body: Body, tuning: Tuning) -> int:
    """Elements of the longest row that one block holds: more where a loop would have to read it again."""
    longest = tuning.persistent if _read_again(body) else tuning.once
    return longest // (1 if loads(body) < 2 else 2)


def longest_in_strips(body: Body, tuning: Tuning) -> int:
    """The same where strips hold it."""
    alone = loads(body) < 2 and walks_again(body) and any(pairs(body))
    if alone and makes_gradient(body):
        return tuning.held_loss if narrow(body) else 2 * tuning.held_loss
    return tuning.held if alone else longest_held(body, tuning)


def _read_again(body: Body) -> bool:
    """Would a loop read rows more than once, for something else than a gradient, whose loop has a way of its own?"""
    return walks_again(body) and not makes_gradient(body)
