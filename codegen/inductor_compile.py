"""Has torch._inductor compile a traced run. Imports torch, `ir_nodes.settings` and `codegen.inductor_trace` only."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._guards import TracingContext, tracing
from torch._inductor import config
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.exc import InvalidCxxCompiler
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from codegen.inductor_trace import Traced
from codegen.threads import chunk
from ir_nodes import settings

Compiled = Callable[[list[Tensor]], object]

# Nothing is checked again at every step, for what the arguments are is known. Results are rounded where eager mode rounds.
OPTIONS: dict[str, Any] = {
    "size_asserts": False,
    "alignment_asserts": False,
    "scalar_asserts": False,
    "nan_asserts": False,
    "emulate_precision_casts": True,
    "triton.cudagraphs": False,
    "cpp_wrapper": False,
    "fx_graph_cache": True,
}


class InductorFailed(RuntimeError):
    """torch._inductor could not compile a run. The text says why and what to do."""


def compile_run(traced: Traced, cuda: bool, folder: Path) -> Compiled:
    """A function of the tensors that ``traced.module`` takes, which empties the list. Raises InductorFailed."""
    chosen = settings.current().cxx
    wanted = OPTIONS | {"cpp.min_chunk_size": chunk(torch.get_num_threads())}
    options = {name: value for name, value in wanted.items() if known(name)} | {"combo_kernels": cuda}
    if chosen:
        options["cpp.cxx"] = (None, chosen)
    with ExitStack() as stack:
        stack.enter_context(config.patch(options))
        stack.enter_context(settings.variable("TORCHINDUCTOR_CACHE_DIR", str(folder), default_cache_dir()))
        stack.enter_context(tracing(TracingContext(traced.mode)))  # without which it would keep nothing on disk
        stack.enter_context(torch.no_grad())
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        try:
            compiled = compile_fx_inner(traced.module, traced.inputs)
        except Exception as error:  # lowering, code generation, the C++ compiler: all may fail in ways of their own
            raise InductorFailed(cause_of(getattr(error, "inner_exception", error))) from error
    return getattr(compiled, "current_callable", None) or compiled


def known(option: str) -> bool:
    """Whether this release of torch has the option."""
    found: Any = config
    for name in option.split("."):
        found = getattr(found, name, None)
    return found is not None


def cause_of(error: BaseException) -> str:
    """The first line of what went wrong; a compiler's first complaint where there is one."""
    if isinstance(error, InvalidCxxCompiler):
        return "no C++ compiler is found: install one (apt install g++) or name it in CXX"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    complaints = [line for line in lines if any(word in line for word in ("error:", "fopenmp", "omp.h"))]
    complaint = (complaints or lines or [""])[0]
    if "fopenmp" in complaint or "omp.h" in complaint:
        return f"the C++ compiler has no OpenMP, install it (apt install g++, or libomp-dev for clang): {complaint}"
    return f"{type(error).__name__}: {complaint}"
