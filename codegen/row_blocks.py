"""How much of a row a program that reduces rows works on at a time, with how many threads. Imports codegen's leaf modules."""

from __future__ import annotations

import math

from codegen.body import Body
from codegen.instructions import FULL, KEPT
from codegen.online import pairs
from codegen.tuning import Tuning, power_of_two, snug_block
from ir_nodes import settings


def narrow(body: Body) -> bool:
    """True where operands over the whole space have 16-bit elements or shorter ones."""
    return any(step.access.dtype.itemsize <= 2 for step in body.steps if step.access is not None and step.level == FULL)


def loads(body: Body) -> int:
    """How many operands a reduction reads element by element, each from a place of its own."""
    full = [step for step in body.steps if step.stage == "load" and step.level == FULL]
    return sum(math.prod(n for n, stride in step.form if stride) * 2 > body.numel for step in full)


def loop_lane(body: Body, tuning: Tuning) -> int:
    """Elements per thread where one operand is summed up in a loop; what reads several, or scans, has fewer at a time."""
    return tuning.loop_lane // (1 if narrow(body) else 2) if loads(body) < 2 and not any(step.stage == "scan" for step in body.steps) else tuning.lane


def may_walk_again(body: Body) -> bool:
    """True where a row lies off 16-byte boundaries, is read in vectors nevertheless, and draws no numbers, which cost much."""
    plain = not any(step.stage in ("random", "take") for step in body.steps)
    return body.extent % 8 != 0 and plain and settings.enabled("aligned_rows")


def row_block(body: Body, tuning: Tuning, split: bool) -> tuple[int, bool, int]:
    """(elements per step, looped?, elements per thread) where rows are reduced."""
    reads, extent = loads(body), power_of_two(body.extent + (7 if body.extent % 8 and body.extent > tuning.covered else 0))
    longest = tuning.persistent if walks_again(body) and not makes_gradient(body) else tuning.once
    if not split and (part := part_of(body, tuning, longest // (1 if reads < 2 else 2))):
        return part, False, tuning.part_lane
    if not split and extent > tuning.short_row and extent * 3 > body.extent * tuning.padded and may_walk_again(body):
        return snug_block(body.extent + 7, min(tuning.looped, 2 * tuning.short_row), 512), True, tuning.lane
    if not split and extent <= longest // (1 if reads < 2 else 2):
        highest = any(step.stage == "reduce" and step.text != "add" or step.stage == "scan" for step in body.steps)
        wide = extent > tuning.short_row and body.extent % 8 == 0 and narrow(body) and reads < 2 and not highest
        return extent, False, tuning.wide_lane if wide else tuning.lane
    if any(pairs(body)):
        return min(tuning.online, extent), True, tuning.online_lane
    return min(tuning.looped, extent), True, loop_lane(body, tuning)


def part_of(body: Body, tuning: Tuning, longest: int) -> int:
    """Elements of each of the parts that hold a row of at most ``longest`` elements in registers, where that takes clearly fewer
    lanes than one block; else 0."""
    reduces = [step for step in body.steps if step.stage == "reduce"]
    if body.kept <= tuning.few or makes_gradient(body) or any(step.stage == "scan" for step in body.steps) or any(step.args[0].level != FULL for step in reduces):
        return 0
    row = lanes_needed(body)
    whole = power_of_two(row)
    if tuning.part_always and tuning.part_always < row <= min(longest, tuning.part_always * tuning.parts):
        return tuning.part_always
    part = snug_block(row, whole // 2, tuning.part_least)
    held = -(-row // part) * part
    fits = held <= longest and held <= part * tuning.parts and held * 8 <= whole * 7
    return part if reduces and fits and settings.enabled("row_parts") else 0


def lanes_needed(body: Body) -> int:
    """Elements of a row and, where rows do not start on 16-byte boundaries, of what may lie between one and its start."""
    return body.extent + (7 if body.extent % 8 else 0)


def walks_again(body: Body) -> bool:
    """Does a loop over a row need another one after it?"""
    merged = {id(term) for total in pairs(body) for term in (total.args[0], total.args[0].args[0])}
    return any(step.level == FULL and step.phase and id(step) not in merged for step in body.steps)


def makes_gradient(body: Body) -> bool:
    """Does it leave both a number of each row's exponentials, a loss, and results for all elements, its gradient?"""
    late = {step.level for step in body.steps if step.stage == "store" and step.phase}
    return {KEPT, FULL} <= late and any(pairs(body))


def neighbours(body: Body, tuning: Tuning) -> int:
    """How many elements, which one thread loads at a time, share a maximum beside a sum of exponentials; 0: all of a block."""
    if not (tuning.near > 1 or tuning.near and makes_gradient(body)):
        return 0
    widths = [step.access.dtype.itemsize for step in body.steps if step.stage == "load" and step.level == FULL and step.access]
    return 16 // max(min(widths, default=4), 2)


def warps_resident(body: Body, tuning: Tuning) -> int:
    """Warps per row with which the rows that the machine works on at a time stay in its cache until they are walked again."""
    limit, warps = (tuning.rewalked, tuning.rewalking) if makes_gradient(body) else (tuning.resident, 64)
    if not limit or not walks_again(body):
        return 1
    row = sum(step.access.dtype.itemsize for step in body.steps if step.stage == "load" and step.level == FULL and step.access)
    return max(1, min(32, power_of_two(tuning.cores * warps * row * body.extent // (limit << 20))))
