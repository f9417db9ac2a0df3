"""LAZYSCHED_SCHEDULE: an unchanged program is scheduled by a file; mistakes name the file, the key and the fix."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from lazy_backend.entered import segments
from lazy_backend.schedule_file import ScheduleFileError, model_in, put_in_force, read
from tests import children
from tests.towers import Tower

PROGRAM = """
import torch
torch.set_num_threads(1)
import lazy_backend
from tests.towers import Tower

torch.manual_seed(0)
criterion = torch.nn.BCEWithLogitsLoss(pos_weight=torch.ones(2)).to("lazysched")
model = Tower().to("lazysched")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    x = torch.arange(24.0).add(step).sin().reshape(4, 6).to("lazysched")
    loss = criterion(model(x), torch.ones(4, 2).to("lazysched"))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(loss.item())
"""
WISHES = {
    "model": "Tower",
    "segments": {"one": "func1", "two": "func2", "two_bwd": {"path": "func2", "backward": True},
                 "one_bwd": {"path": "func1", "backward": True, "nth_call": 0}},
    "hooks": [{"run": "one_bwd", "before": "two_bwd"}],
    "schedule": ["two", "one"],
    "schedule_hooks": ["program_order"],
}


def written(folder: Path, given: Any) -> Path:
    path = folder / "schedule.json"
    path.write_text(given if isinstance(given, str) else json.dumps(given))
    return path


def test_an_unchanged_program_follows_the_file(tmp_path: Path) -> None:
    plain = children.run(PROGRAM)
    assert plain.returncode == 0, plain.stderr
    report = tmp_path / "report.txt"
    done = children.run(PROGRAM, schedule=written(tmp_path, WISHES | {"report": str(report), "debug_mode": True}))
    assert done.returncode == 0, done.stderr
    assert done.stdout == plain.stdout, "the numbers stay"
    told = report.read_text()
    assert "run:      two -> one -> one_bwd -> two_bwd" in told and "compared with the program's order: " in told
    assert "schedule" not in done.stderr


def test_a_model_that_never_came_is_named(tmp_path: Path) -> None:
    path = written(tmp_path, WISHES | {"model": "Transformer"})
    done = children.run("import torch, lazy_backend; torch.nn.Linear(2, 2).to('lazysched')", schedule=path)
    assert done.returncode == 0
    assert f"LAZYSCHED_SCHEDULE={path}: its model was never moved to lazysched, nothing was scheduled" in done.stderr


def test_a_mistake_stops_the_program_at_the_line_that_moves_the_model(tmp_path: Path) -> None:
    path = written(tmp_path, {"segments": {"one": "func7"}})
    done = children.run("import lazy_backend\nfrom tests.towers import Tower\nTower().to('lazysched')", schedule=path)
    assert done.returncode == 1
    assert f"ScheduleFileError: {path}: segments.one: Tower has no 'func7'" in done.stderr


MISTAKES: dict[str, tuple[Any, str]] = {
    "no JSON": ('{"model":\n oops}', r"schedule.json:2: is not JSON: Expecting value"),
    "no object": ([1], r"the file: takes an object with model, segments, .*, got \[1\]"),
    "unknown key": ({"segment": {}}, r"the file: has no key 'segment', did you mean 'segments'\?"),
    "wrong type": ({"schedule": "one"}, r"schedule: takes a list, got 'one'"),
    "wrong flag": ({"measure": 1}, r"measure: takes true or false, got 1"),
    "no path": ({"segments": {"one": {"backward": True}}}, r'segments.one: needs "path"'),
    "key in a segment": ({"segments": {"one": {"path": "a", "backwards": True}}}, r"segments.one: has no key 'backwards'"),
    "nth_call": ({"segments": {"one": {"path": "a", "nth_call": -1}}}, r"segments.one.nth_call: takes a number from 0"),
    "a hook's keys": ({"hooks": [{"run": "a"}]}, r'hooks\[0\]: takes \{"run": segment, "before"'),
    "both sides": ({"hooks": [{"run": "a", "before": "b", "after": "c"}]}, r"hooks\[0\]: takes"),
    "a name that is none": ({"schedule": ["a", 3]}, r"schedule\[1\]: takes the name of a segment, got 3"),
    "unknown hook": ({"schedule_hooks": ["fastest"]}, r"schedule_hooks\[0\]: takes one of program_order, earliest, .*'fastest'"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes_name_the_file_and_the_key(case: str, tmp_path: Path) -> None:
    given, words = MISTAKES[case]
    path = written(tmp_path, given)
    with pytest.raises(ScheduleFileError, match=words) as caught:
        read(path)
    assert str(caught.value).startswith(str(path))


LATE: dict[str, tuple[dict[str, Any], str]] = {
    "path": ({"segments": {"x": "head.fward"}}, r"segments.x: Tower has no 'head.fward'"),
    "hook": ({"segments": {"x": "head"}, "hooks": [{"run": "y", "after": "x"}]}, r"hooks\[0\]: there is no segment 'y'; .* 'x'"),
    "schedule": ({"segments": {"x": "head"}, "schedule": ["x", "head"]}, r"schedule: there is no segment 'head'"),
    "twice": ({"segments": {"x": "head"}, "schedule": ["x", "x"]}, r"schedule: the schedule names 'x' twice"),
}


@pytest.mark.parametrize("case", LATE)
def test_what_only_the_model_can_tell_is_named_too(case: str, tmp_path: Path) -> None:
    given, words = LATE[case]
    try:
        with pytest.raises(ScheduleFileError, match=words):
            put_in_force(read(written(tmp_path, given)), Tower())
    finally:
        for name in segments.names():
            segments.remove(name)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    words = re.escape(f"LAZYSCHED_SCHEDULE={tmp_path}/none.json: cannot be read: No such file")
    with pytest.raises(ScheduleFileError, match=words):
        read(tmp_path / "none.json")


def test_the_model_is_found_inside_what_was_moved(tmp_path: Path) -> None:
    file = read(written(tmp_path, {"model": "Tower"}))
    tower = Tower()
    assert model_in(file, nn.Sequential(nn.Linear(2, 2), tower)) is tower
    assert model_in(file, nn.Linear(2, 2)) is None
    assert model_in(read(written(tmp_path, {})), tower) is tower


def test_the_example_of_the_readme_is_valid(tmp_path: Path) -> None:
    readme = (children.ROOT / "README.md").read_text()
    (example,) = re.findall(r"```json\n(.*?)```", readme, re.DOTALL)
    file = read(written(tmp_path, example))
    assert file.segments and file.hooks and file.schedule
