"""GELU and its derivative as texts for the table of expressions. Imports nothing of ours at run time; `codegen.helpers` defines
what the texts call.

In 16 bits the normal distribution comes from formula 7.1.26 of Abramowitz and Stegun's "Handbook of Mathematical Functions",
within 1.5e-7, without subtracting from one where the result is small: half the instructions of libdevice's erf, which is what
these kernels wait for; a 16-bit result shows no difference. There, half of 1 + tanh(x) is 1 / (1 + exp(-2x)), which does not
cancel where tanh is near -1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from codegen.expressions import Case

_INNER = "(0.7978845608028654 * ({self} + 0.044715 * {self} * {self} * {self}))"
_TANH = f"@tanh({_INNER})"
_RISEN = f"_logistic(2.0 * {_INNER})"
_DENSITY = "@exp({self} * {self} * -0.5)"
_DENSITY_16 = "tl.exp2({self} * {self} * -0.7213475204444817)"


def _distribution(case: Case) -> str:
    return "_normal({self})" if case.half else "(0.5 * (1.0 + @erf({self} * 0.7071067811865476)))"


def forward(case: Case) -> str:
    if case.constants.get("approximate", "none") != "none":
        return f"{{self}} * {_RISEN}" if case.half else f"0.5 * {{self}} * (1.0 + {_TANH})"
    return f"{{self}} * {_distribution(case)}" if case.half else "{self} * 0.5 * (1.0 + @erf({self} * 0.7071067811865476))"


def backward(case: Case) -> str:
    if case.constants.get("approximate", "none") == "none":
        density = _DENSITY_16 if case.half else _DENSITY
        return f"{{grad_output}} * ({_distribution(case)} + {{self}} * {density} * 0.3989422804014327)"
    inner = "0.7978845608028654 * (1.0 + 3 * 0.044715 * {self} * {self})"
    if case.half:
        return f"{{grad_output}} * ({_RISEN} + 2.0 * {{self}} * {_RISEN} * (1.0 - {_RISEN}) * {inner})"
    return f"{{grad_output}} * (0.5 * (1.0 + {_TANH}) + 0.5 * {{self}} * (1.0 - {_TANH} * {_TANH}) * {inner})"
