"""Makes the launches of a fused group. Imports codegen's planning modules and `ir_nodes`."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Callable

from codegen.apart import store_apart
from codegen.body import Body, BodyBuilder
from codegen.exponents import fold_logarithms, powers_first, raise_exponentials, scale_exponentials
from codegen.group import Group, new_group
from codegen.instructions import KEPT
from codegen.kernel import Kernel, KernelStep, Temporary
from codegen.layout import lay_out, mixed_blocks
from codegen.load_order import loads_first, plain
from codegen.onehot import sum_one_hots
from codegen.online import merge_passes
from codegen.packed_source import Unpackable
from codegen.reuse import reuses, settles
from codegen.scratch import Scratch
from codegen.shares import divided
from codegen.source_args import ArgumentList
from codegen.split import mixed_body, split_body
from codegen.tangents import rough_tangents
from codegen.tile import Tile
from codegen.triton_source import SourceWriter
from codegen.tuning import Tuning
from ir_nodes import settings
from ir_nodes.node import Node, Value
from ir_nodes.own import PACKED

INT32_LIMIT = (1 << 31) - (1 << 24)

BUSY = 16
"""Warps for each multiprocessor beyond which these hide each other's latency, and registers matter more."""


def emit_group(group: Group, outside: set[Value], scratch: Scratch, tuning: Tuning) -> list[KernelStep]:
    """One launch, or two where a reduction is split over programs; none where nobody needs the results.

    ``outside``: the group's values that other steps or the graph's outputs need.
    """
    try:
        return _launches(group, outside, scratch, tuning)
    except Unpackable:  # masks take a way through memory
        packing = [unit for unit in group.units if unit.node.target == PACKED]
        rest = replace(group, units=[unit for unit in group.units if unit not in packing])
        masks = {value for unit in packing for value in unit.needs}
        alone = [new_group(unit, group.level, tuning) for unit in packing]
        return [*_launches(rest, outside | masks, scratch, tuning),
                *(step for one in alone for step in _launches(one, outside, scratch, tuning))]


def _launches(group: Group, outside: set[Value], scratch: Scratch, tuning: Tuning) -> list[KernelStep]:
    body = build(group, outside)
    nodes = tuple(dict.fromkeys(unit.node for unit in group.units))
    if not body.stored:
        drawing = [unit.node for unit in group.units if unit.part is not None and unit.part.draws]
        if not drawing:
            return []
        body = build(group, {drawing[0].writes[0].value})  # dead, but the generator has to move on
    if group.crossed:
        return _mixed(body, nodes, scratch, tuning)
    if not group.split:
        tile = lay_out(body, tuning)

        def retile(changes: str) -> KernelStep | None:
            again = build(group, outside)
            other = lay_out(again, tuning.changed(changes))
            return None if other.shape() == tile.shape() else _if_packable(_whole, again, other, nodes, scratch, tuning)

        return [replace(_whole(body, tile, nodes, scratch, tuning), retile=retile)]
    share, shares = divided(body, tuning)
    first, second = split_body(body, shares, nodes[0])
    tile = lay_out(first, tuning, share, shares)

    def retile_first(changes: str) -> KernelStep | None:
        other = lay_out(first, tuning.changed(changes), share, shares)
        return None if other.shape() == tile.shape() else _if_packable(_launch, first, other, nodes, scratch, tuning)

    return [replace(_launch(first, tile, nodes, scratch, tuning), retile=retile_first),
            _launch(second, lay_out(second, tuning), nodes, scratch, tuning)]


def _if_packable(emit: Callable[..., KernelStep], *given: object) -> KernelStep | None:
    try:
        return emit(*given)
    except Unpackable:
        return None


def _mixed(body: Body, nodes: tuple[Node, ...], scratch: Scratch, tuning: Tuning) -> list[KernelStep]:
    """Rows with their columns' partial results, then the columns."""
    shares = mixed_blocks(body, tuning).shares
    tiled = [(half, lay_out(half, tuning)) for half in mixed_body(body, shares, nodes[0]) if half.stored]
    assert all(tile.shares == shares for half, tile in tiled if half.mixed), "partial results have room for so many programs"
    return [_launch(half, tile, nodes, scratch, tuning) for half, tile in tiled]


def build(group: Group, outside: set[Value]) -> Body:
    """The group's instructions, as few as will do."""
    body = BodyBuilder(group).build(outside)
    if not group.split:
        sum_one_hots(body)
    fold_logarithms(body)
    rough_tangents(body)
    powers_first(body)
    if not (group.split or group.crossed) and settings.enabled("stores_apart"):
        store_apart(body)
    return body


def _whole(body: Body, tile: Tile, nodes: tuple[Node, ...], scratch: Scratch, tuning: Tuning) -> KernelStep:
    """The one launch of a group."""
    if tile.looped:
        merge_passes(body)
    if tile.walk is not None and not tile.walk.programs and settings.enabled("scaled_exponentials"):
        scale_exponentials(body)  # held rows gain nothing: a softmax of 32,000 takes as long, and spills more registers
    full = tile.walk is not None and tile.walk.programs == 1  # of what is held: its registers have no room for both kinds
    if tile.reduced_axis is not None and not full and settings.enabled("raised_exponentials"):
        raise_exponentials(body)
    return _launch(body, tile, nodes, scratch, tuning)


def _launch(body: Body, tile: Tile, nodes: tuple[Node, ...], scratch: Scratch, tuning: Tuning) -> KernelStep:
    arguments = ArgumentList(scratch, _is_wide(body))
    name = _name(body, nodes)
    few = _programs(tile) * tile.num_warps <= BUSY * tuning.cores
    if settings.enabled("early_loads") and (few or plain(body)):
        loads_first(body, tile)
    found = reuses(body, tile.looped, tile.share > 0 and not tile.mixed)
    source = SourceWriter(body, tile, arguments, settles(body, found)).source(name, "; ".join(node.target for node in nodes))
    signature = tuple((argument, kind) for argument, kind, _ in arguments.entries)
    blocks = tuple((f"B{i}", axis.block if axis else 1) for i, axis in enumerate(tile.axes[:2]))
    blocks += (("BK", tile.depth),) if tile.depth else ()
    kernel = Kernel(name, source, signature, blocks, arguments.divisible(), tile.num_warps,
                    tile.walk.registers if tile.walk is not None else tile.registers, tile.cluster)
    loads = [step.access.value for step in body.steps if step.stage in ("load", "gather", "take", "factor") and step.access]
    stores = [step.access.value for step in body.steps if step.stage == "store" and step.access]
    return KernelStep(kernel, (_programs(tile), 1, 1), tuple(entry[2] for entry in arguments.entries), nodes,
                      tuple(body.elided), _sources(arguments, loads), _sources(arguments, stores),
                      flat=tile.axes[1].extent if tile.axes[0] is None and not tile.words else 0,
                      reuses=found, picks=_picks(body))


def _picks(body: Body) -> tuple[tuple[Value, int], ...]:
    """Bytes of values that are touched at scattered places only."""
    accesses = [(step.access, body.kept if step.level == KEPT else body.numel) for step in body.steps if step.access is not None]
    whole = {access.value for access, _ in accesses if not access.scattered}
    picked: dict[Value, int] = {}
    for access, count in accesses:
        if access.value not in whole:
            picked[access.value] = picked.get(access.value, 0) + count * access.dtype.itemsize
    return tuple((value, min(nbytes, value.buffer.nbytes)) for value, nbytes in picked.items())


def _sources(arguments: ArgumentList, values: list[Value]) -> tuple[Value | Temporary, ...]:
    return tuple(dict.fromkeys(arguments.source_of(value) for value in values))


def _is_wide(body: Body) -> bool:
    if body.numel >= INT32_LIMIT:
        return True
    accesses = [step.access for step in body.steps if step.access is not None]
    return any((access.high - access.byte_offset) // access.dtype.itemsize >= INT32_LIMIT for access in accesses)


def _name(body: Body, nodes: tuple[Node, ...]) -> str:
    kind = "pointwise" if body.reduced is None else "scan" if any(step.stage == "scan" for step in body.steps) else "reduce"
    ops = "_".join(dict.fromkeys(re.sub(r"\W", "_", node.name).strip("_") for node in nodes))
    return f"{kind}_{ops}"[:80]


def _programs(tile: Tile) -> int:
    if tile.words:
        return -(-tile.axes[1].extent // (tile.words * tile.strips)) * (tile.words // tile.axes[1].block)
    counts = [1 if axis is None else -(-axis.extent // axis.block) for axis in tile.axes]
    if tile.reduced_axis is None or tile.covered:
        over = max(tile.peel, tile.covered, 1) - 1
        counts[1] = -(-(tile.axes[1].extent + over) // tile.axes[1].block)
    if tile.reduced_axis is None:
        return counts[0] * counts[1] * counts[2]
    return (1 if tile.mixed else counts[1 - tile.reduced_axis]) * counts[2] * max(tile.shares, 1) * tile.cluster
