"""The example trains, and trains the same on lazysched as on the CPU."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import compare
import corpus
import pytest
import torch
import torch._lazy.metrics
import train_gpt
from gpt import GPT, SIZES
from train_gpt import Options, Result, train

import lazy_backend  # noqa: F401  (registers the device)
from ir_nodes import settings

ROOT = Path(__file__).resolve().parents[1]
SAME = 1e-3 if torch.cuda.is_available() else 1e-6  # a GPU adds up in another order
TINY = {"size": "tiny", "batch": 4, "sample": 20, "held_out_batches": 2, "quiet": True, "learning_rate": 3e-3}


def run(device: str, **changes: object) -> Result:
    return train(Options(**{**TINY, "device": device, **changes}))


def test_lazysched_gives_the_cpu_curve() -> None:
    cpu, ours = run("cpu", steps=30, read_every=1), run("lazysched", steps=30, read_every=1)
    assert list(cpu.losses) == list(ours.losses) == list(range(30))
    torch.testing.assert_close(list(ours.losses.values()), list(cpu.losses.values()), rtol=SAME, atol=0)
    assert ours.held_out == pytest.approx(cpu.held_out, rel=SAME)
    assert torch.cuda.is_available() or ours.sample == cpu.sample


@pytest.mark.parametrize("read_every", [10, 1000])
def test_reading_the_loss_seldom_changes_nothing(read_every: int) -> None:
    often = run("lazysched", steps=20, read_every=1, sample=0)
    seldom = run("lazysched", steps=20, read_every=read_every, sample=0)
    rounding = 1e-5 if torch.cuda.is_available() else 0.0  # atomics add an embedding's gradient in an order of their own
    assert {step: often.losses[step] for step in seldom.losses} == pytest.approx(seldom.losses, rel=rounding, abs=0.0)
    assert often.held_out == pytest.approx(seldom.held_out, rel=rounding, abs=0.0)


def test_it_learns_more_than_frequencies() -> None:
    result = run("lazysched", steps=120, batch=8, sample=0)
    assert result.held_out < result.unigram_entropy - 0.1
    assert result.losses[0] > 5.0


def test_a_longer_run_compiles_nothing_more() -> None:
    with settings.override(engine="aten"):
        run("lazysched", steps=8, read_every=4)
        before = torch._lazy.metrics.counter_value("UncachedCompile")
        run("lazysched", steps=32, read_every=4)
        assert torch._lazy.metrics.counter_value("UncachedCompile") == before


def test_the_head_stays_tied_on_the_device() -> None:
    model = GPT(SIZES["tiny"]).to("lazysched")
    assert model.head.weight is model.tokens.weight
    assert model.head.weight.device.type == "lazysched"


def test_same_seed_same_run_another_seed_another() -> None:
    first, again, other = run("cpu", steps=3), run("cpu", steps=3), run("cpu", steps=3, seed=1)
    assert first.losses == again.losses and first.sample == again.sample
    assert first.losses != other.losses


def test_generate_takes_the_likeliest_token_when_cold() -> None:
    torch.manual_seed(0)
    model = GPT(SIZES["tiny"]).eval()
    with torch.no_grad():
        model.tokens.weight.mul_(20)  # far apart, so that cold means certain
    window = torch.arange(model.config.context)
    drawn = model.generate(window, 5, torch.Generator(), temperature=1e-4)
    for token in drawn:
        expected = model(window[None])[0, -1].argmax()
        assert token == expected
        window = torch.cat([window[1:], token[None]])


def test_attention_sees_only_the_past() -> None:
    torch.manual_seed(0)
    model = GPT(SIZES["tiny"]).eval()
    tokens = torch.randint(256, (1, 32))
    changed = tokens.clone()
    changed[0, 20] = (changed[0, 20] + 1) % 256
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :20], after[:, :20])
    assert not torch.allclose(before[:, 20:], after[:, 20:])


def test_unigram_entropy() -> None:
    nothing = torch.zeros(0, dtype=torch.uint8)
    for text, entropy in (([7, 7, 9, 9], math.log(2)), ([1, 2, 3, 3], 1.5 * math.log(2)), ([5, 5], 0.0)):
        counted = corpus.Corpus(torch.tensor(text, dtype=torch.uint8), nothing)
        assert counted.unigram_entropy() == pytest.approx(entropy)


def test_batches_are_windows_and_what_follows() -> None:
    text = torch.arange(200, dtype=torch.uint8)
    tokens, targets = corpus.batch(text, 6, 10, torch.Generator().manual_seed(3))
    assert tokens.shape == targets.shape == (6, 10)
    assert torch.equal(targets, tokens + 1)
    assert torch.equal(tokens - tokens[:, :1], torch.arange(10).expand(6, 10))
    assert torch.equal(tokens, corpus.batch(text, 6, 10, torch.Generator().manual_seed(3))[0])


def test_training_and_held_out_text_are_apart() -> None:
    assert not set(corpus.TRAIN) & set(corpus.HELD_OUT)
    assert len(corpus.TRAIN) == len(set(corpus.TRAIN))
    text = corpus.load()
    assert len(text.train) > 1_000_000 and 3.0 < text.unigram_entropy() < 3.3


def test_learning_rate_rises_then_falls_to_a_tenth() -> None:
    options = Options(steps=100, learning_rate=1.0)
    rates = [train_gpt.learning_rate(step, options) for step in range(100)]
    assert rates[0] == pytest.approx(0.2) and rates[5] == pytest.approx(1.0) and rates[99] == pytest.approx(0.1, abs=0.01)
    assert rates[:5] == sorted(rates[:5]) and rates[5:] == sorted(rates[5:], reverse=True)


def test_compare_shows_both_and_their_distance() -> None:
    one = {"device": "cpu", "losses": [[0, 2.0], [1, 1.0]], "held_out": 1.0, "tokens_per_second": 10.0}
    other = {"device": "lazysched", "losses": [[0, 2.0], [1, 1.5]], "held_out": 1.0, "tokens_per_second": 20.0}
    lines = compare.table(one, other).splitlines()
    assert lines[1].split() == ["0", "2.000000", "2.000000", "0.0e+00"]
    assert lines[2].split() == ["1", "1.000000", "1.500000", "5.0e-01"]
    assert lines[-1].split() == ["tok/s", "10", "20"]


def test_command_line_prints_the_report_and_saves_the_curve(tmp_path: Path) -> None:
    curve = tmp_path / "curve.json"
    arguments = ["--size", "tiny", "--steps", "3", "--sample", "5", "--held-out-batches", "1", "--curve", str(curve)]
    environment = {**settings.child_environment(), "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, str(ROOT / "examples" / "train_gpt.py"), *arguments], env=environment,
                          capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    for words in ("nats per byte", "--- a sample ---", "graphs compiled", "why each barrier fired", "optimizer_step"):
        assert words in done.stdout
    assert "loss" in done.stderr  # the progress bar
    saved = json.loads(curve.read_text())
    assert saved["device"] == "lazysched" and [step for step, _ in saved["losses"]] == [0, 2]
