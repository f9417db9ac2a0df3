"""`explain` shows kernels, bytes, refusals and memory, of tensors and of calls. Imports lazy_backend."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import lazy_backend
from ir_nodes import settings
from lazy_backend import explain
from lazy_backend.explain import page
from tests.device import DEVICE, here

FLOAT = 4


def test_a_chain_is_one_kernel_and_its_middle_never_reaches_memory() -> None:
    x = torch.ones(1000).to(DEVICE)
    line, y = here(), (x.exp() * 2 + 1).tanh()
    (one,) = explain(y).recordings
    assert (one.ops, one.kernels, len(one.steps)) == (4, 1, 1)
    step = one.steps[0]
    assert (step.read, step.written) == (1000 * FLOAT, 1000 * FLOAT), "one load, one store"
    assert step.alone == 8 * 1000 * FLOAT, "each op reads and writes by itself"
    assert one.held == (2 * 1000 * FLOAT,) and 0 < one.seconds < 1
    told = str(explain(y))
    assert "4 ops in 1 kernel and 0 ATen calls" in told and f"{Path(__file__).name}:{line}" in told
    assert y.sum().item() == pytest.approx(torch.tensor(1.0).exp().mul(2).add(1).tanh().mul(1000).item())


def test_what_aten_runs_and_what_does_not_share_a_kernel_have_reasons() -> None:
    x = torch.ones(8, 8, device=DEVICE)
    y = (x @ x).relu() + x.sum(0).sum()
    told = str(explain(y))
    assert "run by ATen, because:" in told and "aten::mm" in told
    assert "not in one kernel, because:" in told and "run by ATen" in told
    assert explain(y).recordings[0].refusals


def test_a_call_is_explained_whether_its_recordings_are_known_or_not() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 4).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.ones(2, 4, device=DEVICE)

    def step(scale: float) -> float:
        optimizer.zero_grad()
        loss = (model(x) * scale).square().mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    first = step(2.0)
    found = explain(step, 2.0)
    assert step(2.0) < first, "it ran, and trained"
    assert any("mm" in one.name for part in found.recordings for one in part.steps)
    compiled = lazy_backend.stats()["compiles"]
    step(2.0)
    assert lazy_backend.stats()["compiles"] == compiled, "known programs serve again"


def test_a_call_is_measured_step_by_step() -> None:
    x = torch.ones(300, 300, device=DEVICE)
    runs = []

    def call() -> torch.Tensor:
        runs.append(1)
        return (x @ x).relu() + 1

    found = explain(call, measure=True)
    (one,) = found.recordings
    assert len(runs) == 2 and (one.kernels, len(one.steps)) == (1, 2)
    assert all(step.measured is not None and 0 < step.measured < 10 for step in one.steps)
    assert one.measured == pytest.approx(sum(step.measured or 0 for step in one.steps))
    assert one.copy_rate is not None and 1e8 < one.copy_rate < 1e14
    told = str(found)
    assert " measured; " in told and "of a copy's rate" in told and "%" in told
    assert lazy_backend.flush.steppers == []
    assert "measured" not in str(explain(call))
    with pytest.raises(ValueError, match="has to run"):
        explain(x + 1, measure=True)


def test_a_training_step_is_measured_as_it_repeats() -> None:
    weight = torch.ones(64, 64, device=DEVICE, requires_grad=True)
    optimizer = torch.optim.Adam([weight])

    def step() -> None:
        optimizer.zero_grad()
        (weight @ weight).square().mean().backward()
        optimizer.step()

    found = explain(step, measure=True)
    ops = {node.name for one in found.recordings for step in one.steps for node in step.nodes}
    assert "zeros_like" not in ops, "the second step makes no state"
    assert all(step.measured is not None for one in found.recordings for step in one.steps)


def test_the_memory_plan_is_told() -> None:
    x = torch.ones(1000).to(DEVICE)
    y = (x.exp() * 2).digamma() + 1
    (one,) = explain(y).recordings
    assert one.memory.inputs == (1, 1000 * FLOAT) and one.memory.results == (1, 1000 * FLOAT)
    assert one.memory.registers == (1, 1000 * FLOAT) and one.memory.between[0] == 2
    assert "memory: 1 input of 3.906 KiB, 1 result of 3.906 KiB, 2 buffers" in str(explain(y))


def test_other_passes_tell_what_they_did_and_refused() -> None:
    x = torch.ones(64, 64).to(DEVICE)
    one, two, copied = x.exp(), x.exp(), x.clone()
    y = one.sum(0) + two.sum(1) + copied.sum()
    kept = (x * x).tanh(), (x * x).tanh()
    told = str(explain([y, *kept]))
    assert "other optimisations of the whole graph:" in told
    assert "cse (one node where two would compute the same value): 2 done, 1 refused" in told
    assert "refused: tanh: both results are held at the end, and are two memories" in told
    assert "copy_: it would have copied what is there already" in told
    assert "would hold no less memory at most" in told and "pad_rows (" in told
    with settings.override(disable="cse"):
        off = str(explain([y, *kept]))
    assert "cse (one node where two would compute the same value): switched off" in off


def test_results_over_operands_have_reasons() -> None:
    x = torch.ones(64, 64).to(DEVICE)
    product = x @ x
    assert "a kernel's result: it is written over an operand that dies" in str(explain((product.exp() @ x)))
    assert "refused: a kernel's result: its operand is held when the recording ends" in str(explain([product.exp(), product]))
    with settings.override(disable="inplace"):
        assert "the memory of operands that die): switched off" in str(explain(product.exp() @ x))


def test_long_lists_are_shortened_with_a_way_to_see_all() -> None:
    x = torch.ones(4, 4).to(DEVICE)
    for index in range(70):
        x = x @ x if index % 2 else x.view(2, 8).t().contiguous().view(4, 4) @ x
    found = explain(x)
    (one,) = found.recordings
    hidden = len(one.steps) + 1 - 60
    assert hidden > 1 and f"... and {hidden} more steps" in str(found)
    assert "more steps" not in found.text(everything=True) and str(found.text(everything=True)).count("aten::mm") > 60
    assert "<summary>" in page(found) and f"{hidden - 1} more steps" in page(found)


def test_a_list_that_several_kernels_share_is_counted_once() -> None:
    tensors = [torch.ones(1 << 12).to(DEVICE) for _ in range(6)]
    with settings.override(disable="combo"):
        torch._foreach_mul_(tensors, 3.0)
        (one,) = explain(tensors).recordings
    alone = [step.alone for step in one.steps]
    assert alone == [sum(alone) // 6] * 6 and sum(alone) <= 2 * 6 * (1 << 12) * FLOAT


def test_an_error_in_the_call_is_the_users_and_leaves_nothing_behind() -> None:
    with pytest.raises(ZeroDivisionError):
        explain(lambda: 1 / 0)
    assert lazy_backend.flush.watchers == []
    with pytest.raises(ValueError, match="lazysched tensors"):
        explain(torch.ones(2))


def test_the_page_needs_no_network(tmp_path: Path) -> None:
    x = torch.ones(16, 16, device=DEVICE)
    explain(lambda: (x @ x).softmax(-1), html=tmp_path / "page.html", measure=True)
    page = (tmp_path / "page.html").read_text()
    assert "<svg" in page and "aten::mm" in page and "http" not in page and "measured time" in page
