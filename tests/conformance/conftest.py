"""Applies `--conformance` and the table of expected failures to the tests of this folder."""

from __future__ import annotations

from pathlib import Path

import pytest

import lazy_backend  # noqa: F401  before torch.testing looks for devices
from lazy_backend import core
from tests.conformance import expected, selection

FOLDER = Path(__file__).parent


def pytest_configure(config: pytest.Config) -> None:
    selection.everything = config.getoption("--conformance") == "all"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    ours = [item for item in items if item.path.parent == FOLDER]
    dropped = {id(item) for item in ours if not wanted(item)}
    if dropped:
        config.hook.pytest_deselected(items=[item for item in items if id(item) in dropped])
        items[:] = [item for item in items if id(item) not in dropped]
    device = "cuda" if core.physical_is_cuda() else "cpu"
    for item in ours:
        row = expected.row(item.nodeid, device)
        if row is not None:
            item.add_marker(pytest.mark.skip(row.text()) if row.skip else pytest.mark.xfail(strict=True, reason=row.text()))


def wanted(item: pytest.Item) -> bool:
    everyday = getattr(getattr(item, "module", None), "everyday", None)
    return selection.everything or everyday is None or everyday(item.name)
