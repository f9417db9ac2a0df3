"""A fixed part of the fuzzer's programs; `python -m tests.conformance.fuzz` runs as many as are asked for."""

from __future__ import annotations

from tests.conformance import fuzz
from tests.conformance.fuzz_program import LENGTH, Program

CALLS = 200


def test_random_programs_give_what_they_give_on_the_physical_device() -> None:
    result = fuzz.fuzz(CALLS, seed=0, shown=False)
    assert result.failures == [], "\n".join(result.failures)
    assert result.calls >= CALLS and result.barriers > 0 and result.errors > 0


def test_a_program_is_the_same_every_time() -> None:
    logs = []
    for _ in range(2):
        program = Program(seed=5, number=1)
        program.run()
        logs.append(program.log)
    assert logs[0] == logs[1] and len(logs[0]) > LENGTH


def test_a_crash_is_a_finding() -> None:
    worker = fuzz.Worker()
    worker.start().kill()
    answer = worker.ask(seed=0, program=0, keep=[], check_each=False)
    assert "CRASH" in answer["failure"]
    assert worker.ask(seed=0, program=0, keep=[], check_each=False)["failure"] == ""
    worker.stop()
