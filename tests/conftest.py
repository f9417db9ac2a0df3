"""What holds for every test."""

from __future__ import annotations

from typing import Iterator

import hypothesis
import pytest
import torch

# The tensors of the tests are tiny: on a busy machine, threads that wait for each other cost a hundred times more.
torch.set_num_threads(1)

# The gate tries the same examples each time; `pytest --hypothesis-profile=default` looks for new ones.
hypothesis.settings.register_profile("same", derandomize=True)
hypothesis.settings.load_profile("same")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--conformance", choices=("everyday", "all"), default="everyday",
                     help="how much of tests/conformance runs: a fixed part, or all of it (see `python -m tests.conformance`)")


@pytest.fixture(autouse=True)
def same_numbers_each_time() -> None:
    """What a test draws is the same alone and among others, so that one that fails can be run again."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def built() -> None:
    """The native core is there before a child looks for it, so that no child says that it builds one."""
    torch.ones(1, device="lazysched")


@pytest.fixture
def nothing_pending() -> Iterator[None]:
    """The device is in use, and nothing is recorded, before and after."""
    import lazy_backend  # here: most tests need no device

    torch.ones(1, device="lazysched")
    lazy_backend.mark_step(wait=True)
    yield
    lazy_backend.mark_step(wait=True)


@pytest.fixture
def no_segments_left() -> Iterator[None]:
    """Segments are of the process: the names of a test that uses this end with it."""
    yield
    from lazy_backend.entered import segments  # here: most tests need no device

    for name in segments.names():
        segments.remove(name)
