"""Applies `--conformance` and the table of expected failures to the tests of this folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from lazy_backend import core  # first: torch.testing looks for devices when it is imported

# isort: split
from torch.testing._internal import common_utils
from torch.testing._internal.common_device_type import PrivateUse1TestBase
from torch.testing._internal.opinfo import core as opinfo

from tests.conformance import expected, selection

FOLDER = Path(__file__).parent
PrivateUse1TestBase.setUpClass()  # names the test classes after the device, whichever files are collected
# They look through the sources of the whole stack, several times a test, to note a sample: 0.3 s each time.
common_utils.extract_test_fn = opinfo.extract_test_fn = lambda: None


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
