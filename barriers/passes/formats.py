"""Which images are better left in rows between ops that need rows, for `barriers.passes.channels_last`. Imports networkx and
`ir_nodes`.

Some ops have rows, convolutions have channels_last; what is computed pixel by pixel between the two may have either, and each op
that finds both walks across one of them. The images that are moved across weigh least where the bytes that such ops share are
cut: a minimum cut (Ford and Fulkerson, "Maximal flow through a network", 1956), as in torch's partitioner of
forward and backward.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Iterable, Sequence

from ir_nodes.node import Buffer

MOST = 1 << 13
"""Pairs of images that share an op, of which no cut is looked for where there are more: it takes longer than linear time."""
Image = tuple[Buffer | None, int]
"""An image that may have either format, or None for one that stays in rows, and its bytes."""
_ROWS, _LAST = "rows", "last"


def left_in_rows(ops: Iterable[Sequence[Image]], last: set[Buffer]) -> set[Buffer]:
    """Which images had better stay in rows. ``ops``: the images that each op finds, what it writes first; ``last``: those that
    are channels_last whatever it costs. Of several cuts of one weight the one that leaves most in rows."""
    ties: defaultdict[tuple[Buffer | str, Buffer | str], int] = defaultdict(int)
    for images in ops:
        hub, size = max(images[:1] or images, key=lambda one: one[1])
        for other, nbytes in images:
            if other is not hub:
                ties[_end(hub, last), _end(other, last)] += min(size, nbytes)
    if not any(_ROWS in tie for tie in ties) or len(ties) > MOST:
        return set()
    import networkx  # torch's own dependency; most graphs do without

    graph = networkx.DiGraph()
    graph.add_nodes_from((_ROWS, _LAST))
    for (one, other), nbytes in ties.items():
        for start, end in ((one, other), (other, one)):
            known = graph.get_edge_data(start, end, {"capacity": 0})["capacity"]
            graph.add_edge(start, end, capacity=known + nbytes)
    _, (rows, _) = networkx.minimum_cut(graph, _ROWS, _LAST)
    return {one for one in rows if isinstance(one, Buffer)}


def _end(image: Buffer | None, last: set[Buffer]) -> Buffer | str:
    return _ROWS if image is None else _LAST if image in last else image
