"""Says how many programs share a reduction, and how many steps ahead they load. Imports codegen's leaf modules.

Where rows lie off 16-byte boundaries, a program takes every so-many-th of them, which lie alike, so that only some numbers of
programs will do. A few too many, and some multiprocessors have one more than the others, which wait for them.
"""

from __future__ import annotations

from typing import Container

from codegen.aligned import in_a_vector
from codegen.body import Body
from codegen.columns import column_width, moves_much
from codegen.instructions import FULL
from codegen.row_traits import loads, narrow, reads_again
from codegen.tuning import Tuning

IN_FLIGHT = 64 << 10
"""Bytes that a multiprocessor's programs load ahead, all together: fewer leave memory idle, of more programs each waits longer.
On an H200, GELU's gradient and its bias's, 8,191 rows of 5,003 in bfloat16: 70.9 us with 48 KiB, 69.2 with 64, 74.3 with 96."""


def alike(body: Body) -> int:
    """Every so-many-th row lies equally far off a boundary, whatever its length."""
    return in_a_vector([step for step in body.steps if step.level == FULL])


def evenly(body: Body, tuning: Tuning) -> bool:
    """Are columns summed whose rows lie off boundaries, so that each program takes rows that lie alike?"""
    return body.column and body.kept >= tuning.covered and body.kept % alike(body) > 0


def divided(body: Body, tuning: Tuning) -> tuple[int, int]:
    """(summands per program, programs that share them) of a reduction that is split."""
    share = _share(body, tuning)
    if evenly(body, tuning):
        shares = _balanced(body, tuning)
        return -(-body.extent // shares), shares
    shares, like = -(-body.extent // share), alike(body) if body.column else 1
    if body.kept % like:
        shares = -(-shares // like) * like
        share = -(-body.extent // shares)
    return share, shares


def walked_by(body: Body, tuning: Tuning, down: int, programs: int) -> tuple[int, int]:
    """The same of rows that are reduced beside their columns, ``down`` at a time, by at most so many programs."""
    share = -(-body.kept // (programs * down)) * down
    shares, like = -(-body.kept // share), alike(body)
    if body.extent % like:
        above = -(-shares // like) * like
        shares = above if above <= programs else max(programs // like, 1) * like
    return -(-body.kept // (shares * down)) * down, shares


def steps_ahead(body: Body, tuning: Tuning, elements: int, least: int, programs: int = 0, once: Container[int] = ()) -> int:
    """How many steps ahead a loop over so many elements a step loads, which lie in a multiprocessor's memory until then:
    ``least``, or, of so many ``programs``, as many as keep memory busy, but one more than usual at most: the loop's head is
    written out for each. What is loaded ``once`` takes no room."""
    if body.crowded or reads_again(body):
        return 1
    step = max(elements * sum(step.access.dtype.itemsize for step in body.steps if step.stage == "load" and step.level == FULL
                              and step.access is not None and id(step) not in once), 1)
    if programs:
        least = max(least, min(1 + round(IN_FLIGHT * tuning.cores / (step * programs)), tuning.stages + 1))
    return min(least, 1 + tuning.shared_bytes // step)


def _share(body: Body, tuning: Tuning) -> int:
    """Summands per program of a split reduction: enough programs to fill the machine, none with next to nothing to do, nor a last
    step that is."""
    lanes = column_width(body, tuning, True) if body.column else 1
    programs = -(-body.kept // lanes)
    most = body.extent // tuning.split_rows if body.column else -(-body.extent // tuning.looped)
    if not (body.column or narrow(body)) and loads(body) < 2 and programs * most <= tuning.at_once * tuning.programs:
        return tuning.looped  # more programs load at a time than if fewer walked several blocks each
    shares = max(2, min(-(-tuning.programs // programs), most))
    step = tuning.looped if not body.column and body.extent > tuning.looped * shares else 16
    return -(-body.extent // (shares * step)) * step


def _balanced(body: Body, tuning: Tuning) -> int:
    """Programs that share columns off boundaries: about as many as fill the machine, of which each multiprocessor takes next to
    the fewest summands. Where results of 16 bits are stored for all elements, too, twice as many hide what each waits for."""
    like = alike(body)
    across = -(-(body.kept + like - 1) // column_width(body, tuning, True))
    wanted = tuning.programs * (2 if narrow(body) and moves_much(body) else 1)
    most = max(min(wanted * 5 // 4 // across, body.extent // tuning.split_rows), like) // like * like
    least = min(max(wanted * 3 // 4 // across, like), most)

    def longest(shares: int) -> int:
        return -(-body.extent // shares) * -(-across * shares // tuning.cores)

    able = [shares for shares in range(like, most + 1, like) if shares >= least or shares == most]
    shortest = min(map(longest, able))
    return min((shares for shares in able if longest(shares) * 25 <= shortest * 26), key=lambda n: abs(across * n - wanted))
