"""Kernels that are put in place while the one before them still runs (programmatic dependent launch). Imports `ir_nodes` and
codegen's leaf modules only.

From compute capability 9.0 on, a GPU may start a kernel's programs as soon as the last ones of the kernel before have started,
so that a launch costs next to nothing. A kernel may be launched so if it waits before it touches memory; this module
writes the wait into its source, and behind that the word that lets the next kernel's programs start. Both are without effect in a
kernel that was launched otherwise.
"""

from __future__ import annotations

import dataclasses
import re

from codegen.kernel import Kernel
from ir_nodes import settings

FIRST_ARCH = 90
_PROLOGUE = """    tl.extra.cuda.gdc_wait()
    tl.extra.cuda.gdc_launch_dependents()
"""


def waiting(kernel: Kernel, arch: int) -> Kernel:
    """The kernel as it is for compute capability ``arch`` (90 for 9.0): with the wait first, where the GPU knows of it."""
    if arch < FIRST_ARCH or not settings.enabled("overlap"):
        return kernel
    head = re.search(rf"^def {kernel.name}\([^)]*\):\n", kernel.source, re.MULTILINE)
    assert head is not None, kernel.source
    return dataclasses.replace(kernel, source=kernel.source[: head.end()] + _PROLOGUE + kernel.source[head.end() :])


def waits(kernel: Kernel) -> bool:
    """Did `waiting` write the wait into it?"""
    return _PROLOGUE in kernel.source
