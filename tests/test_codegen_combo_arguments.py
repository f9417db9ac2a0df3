"""Programs of a combo find the arguments of their step by number: the right ones, in few registers, known to be multiples."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import torch
import triton
from graphs import CACHE, check, kernels
from test_codegen_combo import adamw, counted, lists

from codegen import triton_compile
from ir_nodes import settings


def test_numbers_picked_from_arguments_are_known_to_be_multiples() -> None:
    """Or Triton would load two bytes at a time where a row's start or a share's is computed from them."""
    def norms(*tensors: torch.Tensor) -> torch.Tensor:
        return torch.stack(torch._foreach_norm(tensors))

    made = check(norms, *(torch.ones(size, dtype=torch.bfloat16) for size in (40960, 81920, 49152, 57344)), combos=True,
                 rtol=1e-2, atol=0.0)
    (step,) = [step for step in kernels(made) if "share_extent" in step.kernel.source]
    assert re.search(r"share_extent = _argument32\(at, .*\) // 16 \* 16", step.kernel.source)
    text = str(triton_compile.compile_for_hopper(step.kernel, CACHE).handle.asm["ptx"])
    assert "ld.global.v4.b32" in text and "ld.global.b16" not in text


def test_many_steps_take_one_launch_and_few_registers() -> None:
    """A program finds its step's arguments by number: chosen in branches, all of them would be in registers, 198 for 32 steps."""
    (step,) = kernels(counted(adamw, *lists((*((1 << 20,),) * 20, *((16,),) * 20), 4))[1])
    few = kernels(counted(adamw, *lists(((16,), (32,)), 4))[1])[0]
    handles = [triton_compile.compile_for_hopper(one.kernel, CACHE).handle for one in (step, few)]
    assert len(step.writes) == 40 * 3
    pressure = [max(map(int, re.findall(r"\.reg \.b64\s+%rd<(\d+)>", str(handle.asm["ptx"])))) for handle in handles]
    assert pressure[0] < pressure[1] + 60, "64-bit numbers, of which 40 steps have 160"


@pytest.mark.parametrize("count", [3, 4, 7, 24, 33])
def test_each_program_finds_its_arguments(count: int) -> None:
    """Also where a step has nothing to do, and among two kernels whose arguments have different types."""
    def program(*tensors: torch.Tensor) -> list[torch.Tensor]:
        return [one * 2 if one.dtype is torch.float64 else one + 1 for one in tensors]

    sizes = [1 + 37 * number % 300 for number in range(count)]
    doubles = [torch.randn(3 * size, dtype=torch.float64) for size in sizes]
    made = check(program, *(torch.randn(size) for size in sizes), *doubles, combos=True)
    assert len(kernels(made)) == 1 and "_range_of" in kernels(made)[0].kernel.source
    with settings.override(disable="numbered_arguments"):
        made = check(program, *(torch.randn(size) for size in sizes), *doubles, combos=True)
    assert len(kernels(made)) == 1 and "_range_of" not in kernels(made)[0].kernel.source


def test_arguments_lie_where_their_numbers_say() -> None:
    """In the machine code: one behind the other, as wide as their types, also those that no instruction names."""
    (step,) = kernels(counted(adamw, *lists(((16,),) * 20 + ((32, 3),) * 4, 4))[1])
    cubin = CACHE / "arguments.cubin"
    cubin.write_bytes(triton_compile.compile_for_hopper(step.kernel, CACHE).handle.asm["cubin"])
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    sections, code = (subprocess.run([tools / tool, option, cubin], capture_output=True, text=True, check=True).stdout
                      for tool, option in (("cuobjdump", "-elf"), ("nvdisasm", "-c")))
    found = re.findall(r"Ordinal\s*:\s*0x(\w+)\s+Offset\s*:\s*0x(\w+)\s+Size\s*:\s*0x(\w+)", sections)
    places = {int(ordinal, 16): (int(offset, 16), int(size, 16)) for ordinal, offset, size in found}
    expected, end = [], 0
    for _, kind in step.kernel.signature:
        size = 8 if kind[0] == "*" or kind.endswith("64") else 4
        expected.append((-(-end // size) * size, size))
        end = sum(expected[-1])
    assert [places[position] for position in range(len(expected))] == expected
    (bank,) = re.findall(r"EIATTR_PARAM_CBANK\s+Format:\s*EIFMT_SVAL\s+Value:\s*0x\w+\s+0x(\w+)", sections)
    base = int(bank, 16) & 0xFFFF
    asked = {int(number) for number in re.findall(r"_param_(\d+)", step.kernel.source)}
    taken = {int(offset, 16) - base for offset in re.findall(r"c\[0x0\]\[U?R\d+\+0x(\w+)\]", code)}
    assert taken and taken <= {expected[number][0] for number in asked}
