"""Which engine runs a recording: the triton engine end to end, what it prints.

The triton engine runs in child processes, because a program in the cache keeps the engine that made it. Without a GPU its
kernels run in Triton's interpreter.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Callable

import children
import corpus
import hypothesis
import programs
import pytest
import torch
from gpt import GPT, SIZES

import lazy_backend
from codegen import loading, triton_engine
from tests.device import DEVICE, ON_GPU

pytestmark = pytest.mark.usefixtures("built")


def compiles() -> int:
    return int(lazy_backend.stats()["compiles"])


def fusible(x: torch.Tensor, number: float = 0.5) -> torch.Tensor:
    """One pointwise kernel and one reduction."""
    return ((x * number).tanh() + 1).softmax(-1)


def run(program: Callable[..., torch.Tensor], *args: Any) -> torch.Tensor:
    """``program`` as one recording."""
    result = program(*args)
    lazy_backend.mark_step()
    return result


# ---- the triton engine end to end --------------------------------------------------------------------------------------


def losses(device: str) -> list[float]:
    text = corpus.load()
    torch.manual_seed(0)
    model = GPT(SIZES["tiny"]).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(25):
        tokens, targets = corpus.batch(text.train, 2, model.config.context, generator)
        loss = model.loss(tokens.to(device), targets.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def a_gpt() -> None:
    wanted, got = losses("cpu"), losses(DEVICE)
    torch.testing.assert_close(got, wanted, rtol=1e-3, atol=0)
    assert got[-1] < got[0] - 1
    assert len(triton_engine._interpreted) + len(loading._loaded) >= 10
    assert compiles() <= 3


def test_a_gpt_trains_on_fused_kernels_as_on_the_cpu() -> None:
    assert children.call(a_gpt, engine="triton", verify=True).stderr == ""


def agree(program: list[programs.Step]) -> None:
    wanted = programs.interpret(program, programs.inputs("cpu"))
    got = programs.interpret(program, programs.inputs(DEVICE), lambda held, choice: lazy_backend.mark_step())
    assert len(got) == len(wanted)
    for mine, theirs in zip(got, wanted):
        tolerance = 4e-2 if theirs.dtype is torch.bfloat16 else 1e-4
        torch.testing.assert_close(mine.cpu(), theirs, rtol=tolerance, atol=tolerance, equal_nan=True)


def random_programs() -> None:
    long = hypothesis.strategies.lists(programs.steps(barriers=True), min_size=1, max_size=4).map(lambda parts: sum(parts, []))

    @hypothesis.settings(max_examples=200, deadline=None, derandomize=True, database=None)
    @hypothesis.given(long)
    @hypothesis.example([("in_place", 1, 0, 0), ("in_place", 1, 0, 0), ("in_place", 1, 0, 2)])  # dead writes of one buffer
    def check(program: list[programs.Step]) -> None:
        agree(program)

    check()
    assert len(triton_engine._interpreted) + len(loading._loaded) > 150


def test_random_programs_on_fused_kernels_equal_the_cpu() -> None:
    assert "gives up" not in children.call(random_programs, engine="triton", verify=True).stderr


def numbers_beside_integers() -> None:
    x = torch.arange(1, 6)
    for program in (
        lambda t: t * torch.tensor(0.1, dtype=torch.float64),
        lambda t: t / torch.tensor(3.0, dtype=torch.float64),
        lambda t: t + torch.tensor(0.1),
        lambda t: t.bfloat16() * torch.tensor(0.1),
        lambda t: t.int() + torch.tensor(2**40),
    ):
        got, wanted = program(x.to(DEVICE)).cpu(), program(x)
        torch.testing.assert_close(got, wanted, rtol=1e-15 if wanted.dtype is torch.float64 else 0, atol=0)


def test_0d_cpu_tensors_keep_their_precision_in_kernels() -> None:
    children.call(numbers_beside_integers, engine="triton")


def filled() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        for program in (
            lambda t: t.softmax(1), lambda t: t.log_softmax(0), lambda t: t.sum(), lambda t: t > 0.1, lambda t: t.erf(),
            lambda t: torch.layer_norm(t, (3,)),
        ):  # fmt: skip
            got, wanted = (program(torch.full((2, 3), 0.1, dtype=dtype, device=device)) for device in (DEVICE, "cpu"))
            torch.testing.assert_close(got.cpu(), wanted, rtol=1e-6, atol=1e-6)


def test_a_tensor_filled_with_one_number_is_rounded_to_its_dtype() -> None:
    children.call(filled, engine="triton")


# ---- what debug levels print ----------------------------------------------------------------------------------------------


def a_small_program() -> None:
    x = torch.linspace(-1, 1, 12, device=DEVICE)
    total = run(fusible, x).sum().item()
    print("sum", round(total, 5) if ON_GPU else total)


@pytest.fixture(scope="module")
def told() -> str:
    """All that a small program prints where everything is to be told."""
    done = children.call(a_small_program, engine="triton", debug={"barriers", "graph", "kernels"})
    assert "sum 1.0" in done.stdout
    return done.stdout + done.stderr


def test_debug_kernels_prints_each_source_after_the_file_that_holds_it(told: str) -> None:
    files = re.findall(r"^# (/.*\.py)$", told, flags=re.MULTILINE)
    assert len(files) >= 2 and any("softmax" in file for file in files)
    for file in files:
        source = Path(file).read_text()
        assert "@triton.jit" in source and f"# {file}\n{source}" in told


def test_debug_barriers_prints_kind_reason_and_frame(told: str) -> None:
    lines = [line for line in told.splitlines() if line.startswith("lazysched: barrier")]
    place = r"test_lazy_backend_engines\.py:\d+ in"
    assert any(re.search(rf"mark_step: .*mark_step\(\) at .*{place} run \(\d+ ops", line) for line in lines)
    assert any(re.search(rf"value_access: .* at .*{place} a_small_program \(1 ops", line) for line in lines)


def test_debug_graph_prints_the_graph_with_source_lines(told: str) -> None:
    line = f"{Path(__file__).name}:{fusible.__code__.co_firstlineno + 2} in fusible"
    for words in ("aten::tanh", "aten::_softmax", "float32[12]", line):
        assert words in told


def test_without_a_debug_level_nothing_is_printed() -> None:
    done = children.call(a_small_program, engine="triton")
    assert (done.stdout, done.stderr) == ("sum 1.0\n", "")


def tensors_of_no_dimension() -> None:
    """A 0-d CPU tensor promotes by its own dtype, a Python number does not."""
    tenth = torch.tensor(0.1, dtype=torch.float64)

    def results(device: str) -> list[torch.Tensor]:
        counts = torch.tensor([16777217, 1]).to(device)
        more = counts > torch.tensor(16777216.5, dtype=torch.float64)
        return [more, counts * tenth, counts * 0.1, counts.float() * tenth, tenth - counts]

    for expected, got in zip(results("cpu"), results("lazysched")):
        torch.testing.assert_close(got.cpu(), expected, rtol=0, atol=0)


@pytest.mark.parametrize("engine", ["aten", "triton"])
def test_a_cpu_tensor_of_no_dimension_promotes_as_in_eager_mode(engine: str) -> None:
    children.call(tensors_of_no_dimension, engine=engine)
