"""What a kernel's threads keep in memory where registers do not suffice, from its machine code. Imports nothing of codegen."""

from __future__ import annotations

import struct
from typing import Iterator

SECTIONS, SIZE_AND_COUNT = 0x28, 0x3A
"""Where an ELF file of 64 bits says where its table of sections is, and how large."""

INFO, FRAME_SIZE, WITH_DATA = b".nv.info", 0x11, 0x04
"""The section of facts about functions, the fact that is the size of a thread's frame, and facts longer than two bytes."""


def frame_bytes(code: bytes) -> int:
    """Bytes of memory that a thread has for what it spills, of machine code for NVIDIA GPUs (an ELF file); 0 where that cannot be
    read."""
    try:
        return max(_frames(code), default=0)
    except struct.error:
        return 0


def _frames(code: bytes) -> Iterator[int]:
    (table,) = struct.unpack_from("<Q", code, SECTIONS)
    size, count, names = struct.unpack_from("<HHH", code, SIZE_AND_COUNT)
    sections = [struct.unpack_from("<IIQQQQ", code, table + number * size) for number in range(count)]
    for name, _, _, _, start, length in sections:
        if code.startswith(INFO + b"\0", sections[names][4] + name):
            yield from _of_functions(code, start, start + length)


def _of_functions(code: bytes, at: int, end: int) -> Iterator[int]:
    while at < end:
        form, fact, length = struct.unpack_from("<BBH", code, at)
        at += 4
        if form == WITH_DATA:
            if fact == FRAME_SIZE:
                yield struct.unpack_from("<II", code, at)[1]
            at += length
