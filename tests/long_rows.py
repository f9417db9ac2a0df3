"""Programs over long rows, their inputs, and what the compiler makes of their kernels."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import torch
import torch.nn.functional as F
from graphs import CACHE, drawn
from torch import Tensor
from triton.backends.nvidia.compiler import get_ptxas

from codegen import triton_compile
from codegen.kernel import Kernel


def loss(x: Tensor, target: Tensor) -> list[Tensor]:
    """A mean over rows and its gradient by ``x``."""
    leaf = x.detach().requires_grad_()
    out = F.cross_entropy(leaf.float(), target)
    (grad,) = torch.autograd.grad(out, leaf, torch.full_like(out, 1.5))
    return [out.detach(), grad]


def softmax(x: Tensor, target: Tensor) -> Tensor:
    return x.softmax(1)


def inputs(extent: int, dtype: torch.dtype = torch.bfloat16, rows: int = 3) -> tuple[Tensor, Tensor]:
    """Rows whose largest elements lie in each of the parts that are walked in turn, or held by one program or another, and
    targets at their ends."""
    x = drawn(rows, extent, dtype=dtype)
    x[0, 5] = x[1, extent // 2] = x[2, -1] = 9.0
    return x, torch.arange(rows) * (extent - 1) // (rows - 1)


def spilled(kernel: Kernel, folder: Path) -> tuple[int, str]:
    """Bytes of a thread's registers that Hopper's machine code moves to memory, and what the assembler said."""
    ptx = folder / "kernel.ptx"
    ptx.write_text(triton_compile.compile_for_hopper(kernel, CACHE).handle.asm["ptx"])
    command = [get_ptxas(90).path, "-v", "--gpu-name=sm_90a", ptx, "-o", folder / "cubin"]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    (stored,) = re.findall(r"(\d+) bytes spill stores", told)
    return int(stored), told
