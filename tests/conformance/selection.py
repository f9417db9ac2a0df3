"""How much of the conformance tests runs: a fixed part every day, or all. Set by `--conformance`; imports nothing of ours.

A test module that has an `everyday(name)` function says with it which of its tests, by name, belong to the everyday part; where
it has none, all do. Tests that go through many samples pass them through `few`.
"""

from __future__ import annotations

import itertools
import re
import zlib
from typing import Any, Iterable, Iterator

_DTYPE = re.compile(r"_(bfloat16|float16|float32|float64|complex32|complex64|complex128|bool|u?int\d+|float8_\w+)$")
everything = False


def few(samples: Iterable[Any], count: int = 2) -> Iterator[Any]:
    """All samples, or the first ``count`` of them in the everyday part."""
    return iter(samples) if everything else itertools.islice(samples, count)


def dtype_of(name: str) -> str:
    """The dtype at the end of a test's name; "" where it has none."""
    found = _DTYPE.search(name)
    return found[1] if found else ""


def one_in(name: str, share: int) -> bool:
    """Is ``name`` among the 1/``share`` of names that a checksum picks, the same ones every day?"""
    return zlib.crc32(name.encode()) % share == 0
