"""The debug views show what is recorded and run nothing."""

from __future__ import annotations

from typing import Iterator

import pytest
import torch

import lazy_backend
from tests.barrier_log import barriers_of, settle
from tests.device import DEVICE, here


@pytest.fixture(autouse=True)
def settled() -> Iterator[None]:
    settle()
    yield
    lazy_backend.mark_step(wait=True)


def test_the_debug_views_show_what_is_recorded_and_run_nothing() -> None:
    x = torch.ones(3, device=DEVICE)
    lazy_backend.mark_step()
    y = (x + 1).tanh(); line = here()  # noqa: E702
    unrelated = x.exp()

    def look() -> None:
        text = lazy_backend.debug.text(y)
        assert "aten::tanh" in text and "aten::exp" not in text
        assert f"test_lazy_backend_debug.py:{line} in test_the_debug_views" in text
        assert lazy_backend.debug.dot([y, unrelated]).count("aten::") >= 3
        module = lazy_backend.debug.fx_graph(y)
        numbers = [1.0] * sum(node.name.startswith("s") for node in module.graph.nodes if node.op == "placeholder")
        torch.testing.assert_close(module(torch.ones(3), *numbers)[0], torch.full((3,), 2.0).tanh())

    assert barriers_of(look) == []
    assert unrelated.tolist() == pytest.approx([2.718281828] * 3)


def test_the_debug_views_refuse_other_tensors() -> None:
    with pytest.raises(ValueError, match="expected lazysched tensors"):
        lazy_backend.debug.text(torch.ones(2))


@pytest.mark.filterwarnings("ignore:Sparse")
def test_what_is_recorded_for_other_layouts() -> None:
    """What lies behind their parts: a sparse tensor's indices and values, what a nested one wraps."""
    weights = torch.eye(4, device=DEVICE)
    sparse = torch.sparse_coo_tensor(torch.tensor([[0, 1], [2, 0]]), torch.tensor([3.0, 4.0]), (2, 3)).to(DEVICE)
    sparse._values().sin_()
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], device=DEVICE, layout=torch.jagged)
    for op, tensor in {"sin": sparse, "mul": nested * 2, "relu": weights.relu()}.items():
        assert op in lazy_backend.debug.text(tensor)
    for tensor in (weights.to_sparse(), weights.to_sparse_csr(), weights.to_sparse_csc()):
        assert not lazy_backend.debug.graph(tensor).nodes, "they are made at once"
    lazy_backend.explain([sparse * 2])
