"""Every kernel of a whole training step, recorded as a user records it, compiles for Hopper on a machine without a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import lazy_backend
from codegen.combo import combine
from codegen.fuse import plan
from codegen.kernel import KernelStep
from examples.gpt import GPT, SIZES

triton_compile = pytest.importorskip("codegen.triton_compile", reason="triton is not installed")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_kernel_of_a_training_step_compiles(dtype: torch.dtype, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = GPT(SIZES["tiny"]).to("lazysched")
    tokens = torch.randint(256, (2, 32)).to("lazysched")
    with torch.autocast("lazysched", dtype=torch.bfloat16, enabled=dtype is torch.bfloat16):
        loss = model.loss(tokens, tokens)
    loss.backward()
    torch._foreach_mul_([p.grad for p in model.parameters()], 0.5)
    graph = lazy_backend.debug.graph([loss, *(p.grad for p in model.parameters())])
    steps = [step for step in combine(plan(graph)).steps if isinstance(step, KernelStep)]
    kernels = dict.fromkeys(step.kernel for step in steps)
    assert len(kernels) > 10
    for kernel in kernels:
        assert triton_compile.compile_for_hopper(kernel, tmp_path).kernel is kernel
