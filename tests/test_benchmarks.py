"""Each benchmark that is compared with torch.compile runs a tiny case to its end: its tables, its results, its floors."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any, Iterator

import pytest
import torch
from torch._inductor.exc import InductorError

from benchmarks import all as all_parts
from benchmarks import blocks, common, composed, floors, inference, kernels, plot, shapes, train
from benchmarks.compositions import TINY, Composition, sizes
from benchmarks.kernel_cases import CASES, bytes_moved
from benchmarks.loop import settings_of
from benchmarks.model_blocks import Block, Input


@pytest.fixture
def in_one_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Children run here, one after the other: a process of its own for each would cost seconds."""
    def run_here(module: Any) -> None:
        handed: list[Any] = []

        def child(_: str, contestant: str, arguments: Any, *rest: Any) -> Any:
            module.main([*arguments, "--child", contestant])
            return json.loads(json.dumps(handed[-1]))

        monkeypatch.setattr(module, "hand_in", handed.append)
        monkeypatch.setattr(module, "in_process", child)

    for module in (train, inference, kernels):
        run_here(module)
        monkeypatch.setattr(module, "fresh_caches", lambda: contextlib.nullcontext({}), raising=False)
    monkeypatch.setattr(kernels, "compile_all", lambda *given: None)
    monkeypatch.setattr(floors, "copy_rate", lambda: 1e10)
    monkeypatch.setattr(kernels, "copy_rate", lambda: 1e10)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def saved(folder: Path, name: str) -> dict[str, Any]:
    (found,) = folder.glob(f"{name}-*.json")
    return json.loads(found.read_text())["result"]


@pytest.mark.usefixtures("in_one_process")
def test_training_has_floors_curves_and_both_first_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--models", "mlp", "--contestants", "eager", "lazysched", "--steps", "1", "--blocks", "1", "--warm-up", "1"]
    assert train.main([*words, "--rounds", "2", "--tiny", "--floors", "--curves", "20", "--output", str(tmp_path)]) == 0
    result = saved(tmp_path, "train")
    assert result["floors"]["mlp"]["calls"]["matrix product"] == 59  # 20 forward, 20 for the weights, 19 for what comes before
    mine = result["models"]["mlp"]["lazysched"]
    assert len(mine["curve"]) == 20 and mine["cold_s"] > 0 and mine["warm_s"] > 0 and mine["counts"]["compiles"] == 0
    assert result["bars"]["training step, ms"]["mlp"].keys() == {"eager", "lazysched", "floor"}
    told = capsys.readouterr().out
    assert "x floor" in told and "on average" in told and "floor " in told


def test_the_launch_preset_is_the_mlp_against_cuda_graphs() -> None:
    options = train.parse(["--preset", "launch", "--steps", "7"])
    assert options.models == ["mlp"] and options.steps == 7
    assert {"reduce-overhead", "reduce-overhead+fused", "lazysched", "lazysched+fused"} <= set(options.contestants)


@pytest.mark.usefixtures("in_one_process")
def test_inference_is_checked_and_compiles_no_token(tmp_path: Path) -> None:
    words = ["--models", "gpt2", "--contestants", "eager", "lazysched", "--tokens", "6", "--prompt", "4", "--prefill", "8"]
    assert inference.main([*words, "--batches", "2", "--blocks", "1", "--tiny", "--output", str(tmp_path)]) == 0
    result = saved(tmp_path, "inference")
    mine = result["models"]["gpt2"]["lazysched"]
    assert mine.keys() == {"prefill 2 x 8", "decode 2 x 6"} == result["floors"]["gpt2"].keys()
    assert mine["decode 2 x 6"]["counts"]["compiles"] == 0 and mine["decode 2 x 6"]["off_by"] < 0.02


@pytest.mark.usefixtures("in_one_process")
def test_kernels_have_both_dtypes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--dtypes", "bf16", "fp32", "--only", "AdamW fused|clip|rotary|conv+bias+add", "--tiny"]
    kernels.main([*words, "--contestants", "eager", "lazysched", "--output", str(tmp_path)])
    mine = saved(tmp_path, "kernels")["cases"]["lazysched"]
    assert len(mine) == 10 and not any("failed" in one for one in mine.values())
    known = ("AdamW fused", "clip by global norm", "rotary", "rotary of pairs backward", "conv+bias+add+relu")
    assert all(mine[f"{name}/small/fp32"]["error"] < (1e-3 if "conv" in name else 1e-5) for name in known)  # TF32 on a GPU
    assert "x best other" in capsys.readouterr().out


@pytest.mark.usefixtures("in_one_process")
def test_short_kernels_are_measured_in_several_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--only", "cast chain|swiglu", "--tiny", "--contestants", "eager", "lazysched", "--output", str(tmp_path)]
    for short, rounds in ((1.0, kernels.ROUNDS), (0.0, 1)):
        monkeypatch.setattr(kernels, "SHORT", short)
        kernels.main(words)
        cases = saved(tmp_path, "kernels")["cases"]
        assert [[one["rounds"] for one in cases[name].values()] for name in ("eager", "lazysched")] == [[rounds] * 3] * 2


def test_a_first_round_gets_most_of_the_time() -> None:
    turns = [0, 0, 1, 1, 2, 2]
    shares = [kernels.share(common.Budget(160.0), turns[place:]) for place in (0, 1, 2, 5)]
    assert shares == pytest.approx([60.0, 96.0, 40.0, 160.0], rel=0.01)
    assert kernels.share(common.Budget(None), turns) is None


def test_rounds_are_merged_by_medians() -> None:
    def one(gpu: float, **more: Any) -> dict[str, Any]:
        return {"gpu": gpu, "wall": 2 * gpu, **more}

    first = {"a": one(3.0, error=0.5), "b": one(9.0), "c": {"failed": "why"}}
    assert kernels.merged([first, {"a": one(1.0)}, {"a": one(2.0), "b": {"failed": "later"}}]) == {
        "a": {"gpu": 2.0, "wall": 4.0, "error": 0.5, "rounds": 3}, "b": {"gpu": 9.0, "wall": 18.0, "rounds": 1},
        "c": {"failed": "why", "rounds": 0}}


@pytest.mark.parametrize("name", ["AdamW foreach", "AdamW fused"])
def test_an_update_moves_seven_times_its_parameters(name: str) -> None:
    case = next(case for case in CASES if case.name == name)
    inputs = kernels.make_inputs(case, case.shapes["small"], torch.float32, "cpu", 0)
    parameters = sum(one.nbytes for one in inputs[: len(inputs) // 5])
    assert bytes_moved(case, inputs) == 7 * parameters


def test_floors_count_each_exchanged_tensor_once() -> None:
    x, weight = torch.randn(8, 16), torch.randn(16, 4)

    def step() -> torch.Tensor:
        first = x @ weight  # x and the result; the weight is a parameter
        return torch.relu(first) @ first.t()  # relu's result, the same first result again, and what comes out

    found = floors.floor(step, [weight])
    assert found["calls"]["matrix product"] == 2
    assert found["rest_bytes"] == 4 * (8 * 16 + 8 * 4 + 8 * 4 + 8 * 8)


def test_odd_products_are_also_tried_with_rounded_sizes() -> None:
    a, b = torch.randn(5, 7), torch.randn(7, 3)
    (run,) = floors.rounded(torch.ops.aten.mm.default, (a, b.t().contiguous().t()))
    assert run(0).shape == (64, 64)
    assert floors.rounded(torch.ops.aten.mm.default, (torch.randn(8, 8), torch.randn(8, 8))) == []


def test_a_child_that_is_stopped_counts_with_what_it_had(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(f"import time\nprint({common.MARK!r} + '[1]', flush=True)\ntime.sleep(60)\n")
    monkeypatch.setattr(common, "ROOT", tmp_path)
    assert common.in_process("slow", "eager", timeout=3.0) == [1]


def test_a_spent_budget_begins_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    budget = common.Budget(1.0)
    assert budget.refuses("gpt2: eager") and "left out" in capsys.readouterr().err
    assert not common.Budget(None).refuses("gpt2: eager") and common.Budget(None).left(7.0) == 7.0


def test_parts_share_what_is_left() -> None:
    every = list(all_parts.PARTS)
    assert sum(share for _, share in all_parts.PARTS.values()) == pytest.approx(1.0)
    assert all_parts.budgets(every, 1000) == pytest.approx(150) and all_parts.budgets(every[-1:], 300) == 300


def test_all_keeps_what_a_part_prints(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "quick.py").write_text("print('measured')")
    monkeypatch.setattr(all_parts, "ROOT", tmp_path)
    monkeypatch.setitem(all_parts.PARTS, "launch", (["quick"], 0.15))
    all_parts.main(["--output", str(tmp_path), "--parts", "launch", "--budget", "30"])
    assert "measured" in (tmp_path / "launch.txt").read_text()


def test_saved_charts_can_be_drawn_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="charts need matplotlib")
    result = {"bars": {"ms": {"mlp": {"eager": 2.0, "lazysched": 1.0}}}, "lines": {"loss": {"mlp": {"eager": [2.0, 1.0]}}}}
    file = tmp_path / "train.json"
    file.write_text(json.dumps({"machine": common.machine(), "result": result}))
    monkeypatch.setattr("sys.argv", ["plot", str(file)])
    plot.main()
    assert {one.name for one in tmp_path.glob("*.png")} == {"train.png", "train-curves.png"}


def test_shapes_are_drawn_compared_and_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert shapes.cases(1, 5, True) == shapes.cases(1, 5, True) != shapes.cases(2, 5, True)
    assert shapes.main(["--tiny", "--count", "6", "--workers", "1", "--seconds", "300", "--output", str(tmp_path)]) == 0
    rows = saved(tmp_path, "shapes")["cases"]
    assert len(rows) == 6 and all(row["ours"] > 0 and not shapes.wrong(row) for row in rows)
    assert "6 cases" in capsys.readouterr().out
    row = {"op": "sum", "shape": (2,), "dtype": "float32", "eager": 1.0, "ours": 3.0, "apart": 1.0, "ours from float64": 1.0,
           "eager from float64": 0.0}
    shapes.report([row])
    assert "WRONG" in capsys.readouterr().out
    none, one = torch.tensor([float("nan"), float("inf"), 1.0]), torch.ones(3)
    assert shapes.distance(none, none) == shapes.distance(one, one) == 0.0
    assert not shapes.distance(none, one) <= 1.0 and not shapes.distance(one, none) <= 1.0
    shapes.report([])
    assert "No case was measured" in capsys.readouterr().out


@pytest.mark.parametrize("first", range(0, 60, 10))
def test_compositions_are_the_same_programs_everywhere(first: int) -> None:
    """And have the same results, as both run ATen's kernels here."""
    for seed in range(first, first + 10):
        program = Composition(seed, sizes(seed, TINY), TINY)
        inputs = program.inputs("cpu")
        wanted, log = program(inputs), list(program.log)
        got = program([one.to("lazysched") for one in inputs])
        assert program.log == log and len(got) == len(wanted) and not program.values
        torch.testing.assert_close([one.cpu() for one in got], wanted, equal_nan=True)


def test_compositions_are_compared_and_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert composed.main(["--tiny", "--count", "2", "--seed", "3", "--workers", "1", "--output", str(tmp_path)]) == 0
    (row, *_) = rows = saved(tmp_path, "composed")["programs"]
    assert len(rows) == 2 and all(one["lazysched"] > 0 and not composed.wrong(one) for one in rows)
    assert "2 programs" in capsys.readouterr().out
    composed.report([row | {"lazysched": 3.0, "compile": 1.0, "ours from float64": 1.0, "eager from float64": 0.0}])
    assert "WRONG" in capsys.readouterr().out
    composed.report([])
    assert "No program was measured" in capsys.readouterr().out


def test_a_composition_that_torch_compile_fails_on_costs_no_other(capsys: pytest.CaptureFixture[str]) -> None:
    program = composed.drawn(3, TINY)
    assert program is not None and program.refused() == ""

    def broken(*inputs: torch.Tensor) -> None:
        raise InductorError(TypeError("a fault\nof theirs"), None)

    program._compiled = broken
    assert "a fault" in program.refused()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(composed, "drawn", lambda *_: program)
        assert composed.measured(3, TINY) is None
    assert "3: torch.compile fails, left out: TypeError: a fault" in capsys.readouterr().out


def test_blocks_of_models_are_whole_programs() -> None:
    """Each has a name of its own, results and gradients, and the same of them in float64."""
    assert len({block.name for block in blocks.BLOCKS}) == len(blocks.BLOCKS)
    for block in blocks.BLOCKS:
        run = blocks.Trained(block)
        inputs = run.inputs("meta")
        results, exact = run(inputs), blocks.exact(block, "meta")
        trained = sum(one.kind == "normal" for one in block.inputs)
        assert len(results) == len(exact) and len(results) > (trained > 0), block.name
        assert not any(one.dtype in blocks.FLOATS for one in exact), block.name


def test_blocks_are_compared_and_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
                                          capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    small = Block("small", lambda x, i: (x.softmax(-1).gather(-1, i).log().sum(), x * 2), (
        Input((6, 40), torch.float32), Input((6, 1), torch.int64, "below", 40)))  # fmt: skip
    monkeypatch.setattr(blocks, "BLOCKS", [small])
    assert blocks.main(["--workers", "1", "--output", str(tmp_path)]) == 0
    (row,) = saved(tmp_path, "blocks")["blocks"]
    assert row["block"] == "small" and row["lazysched"] > 0 and not blocks.wrong(row)
    assert "1 block" in capsys.readouterr().out
    blocks.report([])
    assert "No block was measured" in capsys.readouterr().out


def test_a_contestant_does_without_optimisations() -> None:
    asked = settings_of("lazysched+tuned+without_cse+without_combo")
    assert asked == {"LAZYSCHED_AUTOTUNE": "1", "LAZYSCHED_DISABLE": "combo,cse"}
    assert settings_of("lazysched+replay") == {}
    for wrong in ("compile+without_cse", "lazysched+without_nothing"):
        with pytest.raises(ValueError, match="no such contestant"):
            settings_of(wrong)
