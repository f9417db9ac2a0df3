"""Random trees of modules that share and change state. Imports torch and hypothesis only."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH = 6
PURE = ("linear", "scale", "view", "checkpoint")
# Its draw stays behind on a CPU; on a GPU it draws while it multiplies, so it cannot change places with another.
MOVABLE = PURE if torch.cuda.is_available() else (*PURE, "dropout")
IMPURE = ("write", "read", "both", "dropout", "in place")
Spec = Any  # a leaf's kind, or (how, [Spec, ...])

leaves = st.sampled_from(PURE + IMPURE)
ways = st.sampled_from(["chain", "sum"])
trees = st.recursive(leaves, lambda inner: st.tuples(ways, st.lists(inner, min_size=1, max_size=4)), max_leaves=8)
sums = st.tuples(st.just("sum"), st.lists(st.sampled_from(MOVABLE), min_size=2, max_size=4))
with_sums = st.one_of(sums, st.builds(lambda before, one, after: ("chain", [*before, one, *after]),
                                      st.lists(trees, max_size=2), sums, st.lists(trees, max_size=2)))
"""Most have parts that may change places: drawn by chance and filtered, few trees would."""


class Leaf(nn.Module):
    """One small computation; ``state`` is shared by the whole tree."""

    def __init__(self, kind: str, state: torch.Tensor) -> None:
        super().__init__()
        self.kind = kind
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("state", state)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        match self.kind:
            case "linear":
                return self.linear(x).relu()
            case "scale":
                return (x * self.linear.bias).sin()
            case "view":
                return self.linear(x).t().flip(0).t().reshape(-1, WIDTH)
            case "checkpoint":
                return checkpoint(self.compute, x, use_reentrant=False)
            case "dropout":
                return nn.functional.dropout(self.linear(x), 0.3)
            case "in place":
                y = self.linear(x).clone()
                y[:, 1:4].mul_(0.5)
                return y.tanh_()
        return self.share(x)

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).sigmoid() * x

    def share(self, x: torch.Tensor) -> torch.Tensor:
        """Reads or writes what all leaves share."""
        seen = self.state.clone() if self.kind in ("read", "both") else 1.0
        if self.kind in ("write", "both"):
            with torch.no_grad():
                self.state.mul_(0.9).add_(x.detach().mean(0))
        return self.linear(x) * seen


class Tree(nn.Module):
    """Its children one after the other, or beside each other and summed."""

    def __init__(self, way: str, children: list[nn.Module]) -> None:
        super().__init__()
        self.way = way
        self.parts = nn.ModuleList(children)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.way == "chain":
            for part in self.parts:
                x = part(x)
            return x
        total = self.parts[0](x)
        for part in list(self.parts)[1:]:
            total = total + part(x)
        return total


def build(spec: Spec, state: torch.Tensor | None = None) -> nn.Module:
    """The tree of ``spec``; all leaves share one buffer."""
    state = torch.ones(WIDTH) if state is None else state
    if isinstance(spec, str):
        return Leaf(spec, state)
    way, children = spec
    return Tree(way, [build(child, state) for child in children])


def state_of(model: nn.Module) -> torch.Tensor:
    """What the leaves share."""
    return next(part.state for part in model.modules() if isinstance(part, Leaf))


def pure_siblings(model: nn.Module) -> list[str]:
    """Paths of the leaves of the first sum that has two or more of those that share nothing; any order of them is legal."""
    for path, part in model.named_modules():
        if isinstance(part, Tree) and part.way == "sum":
            found = [number for number, leaf in enumerate(part.parts) if isinstance(leaf, Leaf) and leaf.kind in MOVABLE]
            if len(found) > 1:
                return [f"{path}.parts.{number}".lstrip(".") for number in found]
    return []
