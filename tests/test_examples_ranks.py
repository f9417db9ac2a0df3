"""The examples of several ranks run, check themselves against eager mode, and show the order that was asked for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import prefetch
import pytest
import rfc_overlap

from benchmarks import dlrm
from ir_nodes import settings
from tests import ranks

ROOT = Path(__file__).resolve().parents[1]


def run(*command: str) -> str:
    environment = settings.child_environment() | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, *command], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=200,
                          check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_rfcs_exchange_moves_under_the_backward_of_func2() -> None:
    told = run("examples/rfc_overlap.py", "--width", "32", "--batch", "32", "--features", "16", "--rounds", "1")
    assert "recorded: sdd_fwd -> overarch_fwd -> overarch_func2_bwd -> overarch_func1_bwd" in told
    assert "run:      overarch_fwd -> sdd_fwd -> overarch_func2_bwd -> overarch_func1_bwd" in told
    assert "equal unscheduled bit for bit, and equal eager's" in told and "could not" not in told and "only in part" not in told


def check_workers() -> None:
    prefetch.worker(prefetch.parse(["--width", "16", "--batch", "8", "--layers", "2", "--steps", "2", "--rounds", "1"]))
    sizes = ["--batch", "16", "--rows", "20", "--dim", "4", "--width", "8", "--rounds", "1", "--steps", "1"]
    dlrm.worker(dlrm.parse(["--small", "--no-save", *sizes]))


def test_prefetching_and_the_recommendation_model() -> None:
    told, other = ranks.run(check_workers)
    assert "recorded: multiply1_bwd_first -> multiply0_bwd_first -> gather0_second -> gather1_second" in told
    assert "run:      gather0_second -> multiply1_bwd_first -> gather1_second -> multiply0_bwd_first" in told
    assert told.count("equal to unscheduled, equal to eager") == 2 and "NOT" not in told
    assert "lazysched, scheduled" in told and "lazysched alone" in told and not other


@pytest.mark.parametrize("example", [prefetch, rfc_overlap])
def test_help_says_what_it_shows(example: object, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        example.parse(["--help"])
    assert ended.value.code == 0 and "NCCL where there are enough GPUs" in capsys.readouterr().out
