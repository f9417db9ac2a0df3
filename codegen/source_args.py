"""The run-time arguments of one kernel, numbered in the order of their first use. Imports codegen's leaf modules and
`ir_nodes`."""

from __future__ import annotations

import torch

from codegen.instructions import MemAccess
from codegen.kernel import KernelArg, Offset, Pointer, Scalar, Seed, Size, Temporary
from codegen.scratch import Scratch
from ir_nodes.node import Buffer, Value

POINTER_TYPES = {
    torch.bool: "i1", torch.uint8: "u8", torch.int8: "i8", torch.int16: "i16", torch.int32: "i32", torch.int64: "i64",
    torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64",
}


SMALL = 8
"""Extents up to here are numbers in the source where that saves an element many instructions: larger ones vary more from call to
call."""


class ArgumentList:
    """``entries`` are (name, Triton type, argument). ``wide``: indices need 64 bits."""

    def __init__(self, scratch: Scratch, wide: bool) -> None:
        self.entries: list[tuple[str, str, KernelArg]] = []
        self.wide = wide
        self._scratch = scratch
        self._known: dict[tuple[object, ...], str] = {}
        self._unrelated: set[str] = set()

    def names(self) -> list[str]:
        return [name for name, _, _ in self.entries]

    def _add(self, key: tuple[object, ...], name: str, kind: str, argument: KernelArg) -> str:
        if key not in self._known:
            self._known[key] = name
            self.entries.append((name, kind, argument))
        return self._known[key]

    def source_of(self, value: Value) -> Value | Temporary:
        """The value itself, or the scratch memory behind a value that only the plan knows."""
        return self._scratch.of(value) if value.buffer.index < 0 else value

    def pointer(self, access: MemAccess) -> str:
        source = self.source_of(access.value)
        count = sum(1 for _, kind, _ in self.entries if kind[0] == "*")
        byte_offset = access.byte_offset + access.shift * access.dtype.itemsize
        argument = Pointer(source, byte_offset, access.dtype)
        return self._add(("p", id(source), byte_offset, access.dtype), f"p{count}",
                         f"*{POINTER_TYPES[access.dtype]}", argument)

    def size(self, name: str, value: int, literal: bool = False) -> str:
        """A named extent; one name always holds one value. ``literal``: a small one is a number in the source."""
        if literal and value <= SMALL:
            return str(value)
        return self._add(("n", name), name, "i64" if self.wide else "i32", Size(value))

    def constant(self, name: str, value: int) -> str:
        """A named number that elements are computed with, and no place in memory: whether 16 divides it selects no kernel."""
        self._unrelated.add(name)
        return self.size(name, value)

    def stride(self, value: int) -> str:
        """A stride or count; equal ones share an argument."""
        count = sum(1 for key in self._known if key[0] == "s")
        return self._add(("s", value), f"s{count}", "i64" if self.wide else "i32", Size(value))

    def number(self, stage: str, payload: object, dtype: torch.dtype) -> str:
        """A number input or a count."""
        count = sum(1 for key in self._known if key[0] == "a")
        kind = POINTER_TYPES[dtype]
        number = int(payload)  # type: ignore[call-overload]
        argument = Scalar(number, dtype) if stage == "scalar" else Size(number)
        return self._add(("a", stage, payload, dtype), f"a{count}", kind, argument)

    def generator(self, stage: str, payload: object) -> str:
        """A generator's "seed" (``payload``: its buffer) or "offset" (the buffer, how far the launch moves it on)."""
        if stage == "seed":
            assert isinstance(payload, Buffer)
            return self._add(("seed", id(payload)), "seed", "i64", Seed(payload))
        state, increment = payload  # type: ignore[misc]
        return self._add(("offset", id(state)), "drawn", "i64", Offset(state, increment))

    def divisible(self) -> tuple[str, ...]:
        """Names of pointers and integers that are multiples of 16, where that says something of addresses."""
        out = []
        for name, _, argument in self.entries:
            if isinstance(argument, Pointer) and argument.byte_offset % 16 == 0:
                out.append(name)
            elif isinstance(argument, Size) and argument.value % 16 == 0 and name not in self._unrelated:
                out.append(name)
        return tuple(out)
