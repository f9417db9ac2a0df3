"""The table of pointwise ops: one line says how an ATen op's element is computed. Imports torch,
`codegen.gelu` and `codegen.promotion` only.

A row's text names the op's schema arguments in braces. ``@exp(x)`` and its like stand for a function that is chosen by
dtype (see `FUNCTIONS`). A row that depends on dtype or on constant arguments is a function from `Case` to such a text.
Semantics follow ATen's CUDA kernels: NaN propagates through min, max, clamp and relu; division is IEEE for float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Callable, Mapping

import torch

from codegen import gelu
from codegen.promotion import TRITON_TYPES
from ir_nodes import settings


class Unsupported(Exception):
    """This op, dtype or argument has no expression; the text is the reason that `explain` shows."""


@dataclass(frozen=True, slots=True)
class Case:
    """What a row may depend on: the dtype computed in, and each argument that is a constant (None where absent)."""

    dtype: torch.dtype
    constants: Mapping[str, Any]
    half: str = ""  # Triton's name of the 16-bit float that ATen's kernel computes in, so that each step rounds
    numbers: frozenset[str] = frozenset()  # arguments that are numbers known when the kernel runs

    @property
    def is_float(self) -> bool:
        return self.dtype.is_floating_point

    @property
    def is_bool(self) -> bool:
        return self.dtype is torch.bool

    def given(self, name: str) -> bool:
        """True where the argument was passed (as an operand, a number input or a constant)."""
        return bool(name) and self.constants.get(name, name) is not None


Text = str | Callable[[Case], str]


@dataclass(frozen=True, slots=True)
class Row:
    """``promote``: "default" (torch's), "float" (integers become floats), "division" ("float" unless it rounds to an
    integer), "compare" (computes in the common dtype, gives bool), "truth" (operands become bool), "cast" (computes in the
    first operand's dtype, then converts to the result's), or "result" (everything is converted to the result's dtype first).
    """

    text: Text
    promote: str = "default"
    typed: tuple[str, ...] = ()  # arguments that keep the dtype given after the colon: "mask:bool"


FUNCTIONS: dict[str, tuple[str, str, str]] = {  # name: (float32, float64, float32 whose result is rounded to 16 bits)
    "exp": ("libdevice.exp", "libdevice.exp", "tl.exp"),
    "log": ("libdevice.log", "libdevice.log", "tl.log"),
    "div": ("_ratio", "tl.fdiv", "tl.fdiv"),
    "pow": ("libdevice.pow", "libdevice.pow", "_pow_16"),
    "sqrt": ("_root", "tl.sqrt", "tl.sqrt"),
    "tanh": ("_tanh", "libdevice.tanh", "_tanh_16"),
    "grow": ("libdevice.exp", "libdevice.exp", "libdevice.fast_expf"),
    "share": ("_ratio", "tl.fdiv", "libdevice.fast_dividef"),
}
"""``grow`` is exp where something of at least 1 is added to it, or where nobody sees whether a denormal result is zero, ``share``
a quotient whose divisor is at least 1: there, two instructions do what takes five and eight where results may be denormal."""

BRANCHING = {"_ratio": "tl.math.div_rn", "_root": "tl.sqrt_rn"}
"""What the machine has for them, each with a branch."""

_LOGIC = (("and", "&"), ("or", "|"), ("xor", "^"))
LIBDEVICE = frozenset(
    "exp2 expm1 log2 log10 log1p sin cos tan asin acos atan sinh cosh asinh acosh atanh atan2 erf erfc fmod rint "
    "trunc floor ceil hypot copysign erfinv lgamma".split()
)


def function(name: str, dtype: torch.dtype, rounded: bool, branches: bool = False) -> str:
    """Triton's name for ``@name`` in ``dtype``; ``rounded``: the result is rounded to a 16-bit float, so may be fast;
    ``branches``: as the machine has it, in fewer instructions with a branch."""
    if name in LIBDEVICE:
        return f"libdevice.{name}"
    exact, double, fast = FUNCTIONS[name]
    if branches or not settings.enabled("branchless"):
        exact = BRANCHING.get(exact, exact)
    return double if dtype is torch.float64 else fast if rounded else exact


def choose(floating: str | None = None, integer: str | None = None, boolean: str | None = None) -> Callable[[Case], str]:
    """A row with one text per category; None: the category has no expression."""

    def pick(case: Case) -> str:
        text = boolean if case.is_bool else floating if case.is_float else integer
        if text is None:
            raise Unsupported(f"no expression for {str(case.dtype).removeprefix('torch.')}")
        return text

    return pick


def _floor_div(left: str, right: str, kind: str) -> str:
    rest = f"({left} % {right})"
    return f"({left} // {right}) - (({rest} != 0) & (({rest} < 0) != ({right} < 0))).to({kind})"


def _div(case: Case) -> str:
    mode = case.constants.get("rounding_mode")
    if mode is None:
        return "@div({self}, {other})"
    if case.is_bool or mode not in ("trunc", "floor"):
        raise Unsupported(f"division of {case.dtype} with rounding mode {mode!r}")
    if mode == "trunc" and case.is_float:
        quotient = f"@div({{self}}, {{other}}).to({case.half}).to(tl.float32)" if case.half else "@div({self}, {other})"
        return f"@trunc({quotient})"
    if mode == "trunc":
        return "{self} // {other}"
    if not case.is_float:
        return _floor_div("{self}", "{other}", TRITON_TYPES[case.dtype])
    rest = "@fmod({self}, {other})"
    exact = f"@div({{self}} - {rest}, {{other}}) - tl.where(({rest} != 0) & (({rest} < 0) != ({{other}} < 0)), 1.0, 0.0)"
    snapped = f"@floor({exact}) + tl.where(({exact}) - @floor({exact}) > 0.5, 1.0, 0.0)"
    return f"tl.where({{other}} == 0, @div({{self}}, {{other}}), {snapped})"


def _remainder(case: Case) -> str:
    if case.is_bool:
        raise Unsupported("remainder of bool")
    rest = "@fmod({self}, {other})" if case.is_float else "({self} % {other})"
    return f"tl.where(({rest} != 0) & (({rest} < 0) != ({{other}} < 0)), {rest} + {{other}}, {rest})"


def _inverse(case: Case, text: str) -> str:
    # Triton's division functions take a literal for a float32: beside a double it does not fit.
    return f"1.0 / ({text})" if case.dtype is torch.float64 else f"@div(1.0, {text})"


def _pow(case: Case) -> str:
    exponent = case.constants.get("exponent")
    square = f"({{self}} * {{self}}).to({case.half}).to(tl.float32)" if case.half else "{self} * {self}"
    powers = {1: "{self}", 2: square, 3: square + " * {self}", 4: "({self} * {self}) * ({self} * {self})"}
    if case.is_float:
        powers |= {0.5: "@sqrt({self})", -0.5: "tl.rsqrt({self})", -1: _inverse(case, "{self}"), -2: _inverse(case, square)}
    if exponent in powers:
        return powers[exponent]
    if not case.is_float:
        raise Unsupported(f"integer power with exponent {exponent}")
    if "exponent" in case.numbers:
        return f"{'_number_pow_16' if case.half else '_pow'}({{self}}, {{exponent}}, {case.half or TRITON_TYPES[case.dtype]})"
    return "@pow({self}, {exponent})"


def largest(left: str, right: str) -> str:
    """The larger of two, or NaN where one is."""
    return f"tl.where(({left} > {right}) | ({left} != {left}), {left}, {right})"


def smallest(left: str, right: str) -> str:
    return f"tl.where(({left} < {right}) | ({left} != {left}), {left}, {right})"


def _clamp(low: str, high: str) -> Callable[[Case], str]:
    def text(case: Case) -> str:
        out = "{self}"
        if case.given(low):
            bound = f"{{{low}}}"
            out = f"tl.where(({out} < {bound}) | ({bound} != {bound}), {bound}, {out})"
        if case.given(high):
            bound = f"{{{high}}}"
            out = f"tl.where(({out} > {bound}) | ({bound} != {bound}), {bound}, {out})"
        return out

    return text


def _sign(case: Case) -> str:
    kind = TRITON_TYPES[case.dtype]
    return "{self}" if case.is_bool else f"({{self}} > 0).to({kind}) - ({{self}} < 0).to({kind})"


def _rint(case: Case) -> str:
    if case.constants.get("decimals", 0) != 0:
        raise Unsupported("round to decimals")
    return "@rint({self})" if case.is_float else "{self}"


def _elu_backward(case: Case) -> str:
    left = "{self_or_result}"
    negative = "{alpha} * {scale}"
    slope = f"({left} + {negative})" if case.constants.get("is_result") else f"{negative} * @exp({left} * {{input_scale}})"
    return f"tl.where({left} <= 0, {{grad_output}} * {{input_scale}} * {slope}, {{grad_output}} * {{scale}})"


def _silu_backward(case: Case) -> str:
    own = f"({sigmoid(case)})"
    return f"{{grad_output}} * {own} * (1.0 + {{self}} * (1.0 - {own}))"


def sigmoid(case: Case) -> str:
    below = "1.0 + @grow(-{self})"
    return f"1.0 / ({below})" if case.dtype is torch.float64 else f"@share(1.0, {below})"


_SAME = choose("{self}", "{self}", "{self}")


def _math(name: str) -> Row:
    return Row(f"@{name}({{self}})", "float")


def _compare(operator: str) -> Row:
    return Row(f"{{self}} {operator} {{other}}", "compare")


ROWS: dict[str, Row] = {
    "add": Row(choose("{self} + {alpha} * {other}", "{self} + {alpha} * {other}", "{self} | ({alpha} & {other})")),
    "sub": Row(choose("{self} - {alpha} * {other}", "{self} - {alpha} * {other}")),
    "rsub": Row(choose("{other} - {alpha} * {self}", "{other} - {alpha} * {self}")),
    "mul": Row(choose("{self} * {other}", "{self} * {other}", "{self} & {other}")),
    "div": Row(_div, "division"),
    "floor_divide": Row(lambda case: _div(Case(case.dtype, {"rounding_mode": "floor"}))),
    "remainder": Row(_remainder),
    "fmod": Row(choose("@fmod({self}, {other})", "{self} % {other}")),
    "pow": Row(_pow),
    "neg": Row(choose("(-0.0 - {self})", "-{self}")),  # Triton's minus is 0 - x, which makes 0 of 0
    "abs": Row(choose("tl.abs({self})", "tl.abs({self})", "{self}")),
    **dict.fromkeys(("sign", "sgn"), Row(_sign)),
    "reciprocal": Row(partial(_inverse, text="{self}"), "float"),
    "sqrt": Row("@sqrt({self})", "float"),
    "rsqrt": Row("tl.rsqrt({self})", "float"),
    **{name: _math(name) for name in "exp exp2 expm1 log log2 log10 log1p sin cos tan asin acos atan sinh cosh tanh asinh "
       "acosh atanh erf erfc".split()},
    "atan2": Row("@atan2({self}, {other})", "float"),
    "sigmoid": Row(sigmoid, "float"),
    "floor": Row(choose("@floor({self})", "{self}")),
    "ceil": Row(choose("@ceil({self})", "{self}")),
    "trunc": Row(choose("@trunc({self})", "{self}")),
    "frac": Row(choose("{self} - @trunc({self})")),
    "round": Row(_rint),
    "relu": Row(choose("tl.where({self} <= 0, 0.0, {self})", "tl.where({self} <= 0, 0, {self})")),
    "leaky_relu": Row("tl.where({self} > 0, {self}, {self} * {negative_slope})"),
    "elu": Row("tl.where({self} > 0, {self} * {scale}, @expm1({self} * {input_scale}) * {alpha} * {scale})"),
    "silu": Row("@share({self}, 1.0 + @grow(-{self}))"),
    "gelu": Row(gelu.forward),
    "mish": Row("{self} * @tanh(@log1p(@exp({self})))"),
    "softplus": Row("tl.where({self} * {beta} > {threshold}, {self}, @div(@log1p(@exp({self} * {beta})), {beta}))"),
    "hardtanh": Row(_clamp("min_val", "max_val")),
    "hardswish": Row("{self} * tl.where({self} <= -3, 0.0, tl.where({self} >= 3, 6.0, {self} + 3)) * 0.16666666666666666"),
    "hardsigmoid": Row("tl.where({self} <= -3, 0.0, tl.where({self} >= 3, 6.0, {self} + 3)) * 0.16666666666666666"),
    "threshold": Row("tl.where({self} <= {threshold}, {value}, {self})"),
    "threshold_backward": Row("tl.where({self} <= {threshold}, {grad_output} * 0, {grad_output})"),
    "tanh_backward": Row("{grad_output} * (1.0 - {output} * {output})"),
    "sigmoid_backward": Row("{grad_output} * ((1.0 - {output}) * {output})"),
    "silu_backward": Row(_silu_backward),
    "gelu_backward": Row(gelu.backward),
    "leaky_relu_backward": Row("tl.where({self} > 0, {grad_output}, {grad_output} * {negative_slope})"),
    "elu_backward": Row(_elu_backward),
    "hardtanh_backward": Row("tl.where(({self} <= {min_val}) | ({self} >= {max_val}), {grad_output} * 0, {grad_output})"),
    "softplus_backward": Row("tl.where({self} * {beta} > {threshold}, {grad_output}, "
                             "{grad_output} * @div(@exp({self} * {beta}), 1.0 + @exp({self} * {beta})))"),
    "native_dropout_backward": Row("{grad_output} * tl.where({mask}, {scale}, {scale} * 0)", typed=("mask:bool",)),
    "maximum": Row(choose(largest("{self}", "{other}"), largest("{self}", "{other}"), "{self} | {other}")),
    "minimum": Row(choose(smallest("{self}", "{other}"), smallest("{self}", "{other}"), "{self} & {other}")),
    "fmax": Row(choose("tl.where(({self} >= {other}) | ({other} != {other}), {self}, {other})", "tl.maximum({self}, {other})")),
    "fmin": Row(choose("tl.where(({self} <= {other}) | ({other} != {other}), {self}, {other})", "tl.minimum({self}, {other})")),
    "clamp": Row(_clamp("min", "max")),
    "clamp_min": Row(_clamp("min", "")),
    "clamp_max": Row(_clamp("", "max")),
    "eq": _compare("=="), "ne": _compare("!="), "lt": _compare("<"), "le": _compare("<="), "gt": _compare(">"),
    "ge": _compare(">="),
    "isnan": Row("{self} != {self}", "compare"),
    **{f"logical_{name}": Row(f"{{self}} {sign} {{other}}", "truth") for name, sign in _LOGIC},
    "logical_not": Row("{self} == 0", "truth"),
    **{f"bitwise_{name}": Row(choose(None, *[f"{{self}} {sign} {{other}}"] * 2)) for name, sign in _LOGIC},
    "bitwise_not": Row(choose(None, "~{self}", "{self} == 0")),
    "where": Row("tl.where({condition}, {self}, {other})", typed=("condition:bool",)),
    "masked_fill": Row("tl.where({mask}, {value}, {self})", "result", typed=("mask:bool",)),
    "lerp": Row("tl.where(tl.abs({weight}) < 0.5, {self} + {weight} * ({end} - {self}), "
                "{end} - ({end} - {self}) * (1.0 - {weight}))"),
    "addcmul": Row(choose("{self} + {value} * {tensor1} * {tensor2}", "{self} + {value} * {tensor1} * {tensor2}")),
    "addcdiv": Row("{self} + {value} * @div({tensor1}, {tensor2})"),
    "copy": Row("{src}", "cast"),
    "clone": Row("{self}", "cast"),
    "_to_copy": Row("{self}", "cast"),
    "fill": Row("{value}", "result"),
    "full": Row("{fill_value}", "result"),
    "full_like": Row("{fill_value}", "result"),
    "scalar_tensor": Row("{s}", "result"),
    **{name: Row("0", "result") for name in ("zero", "zeros", "zeros_like", "new_zeros")},
    **{name: Row("1", "result") for name in ("ones", "ones_like", "new_ones")},
}
"""Keyed by `ir_nodes.node.Node.name` without a trailing underscore: all overloads of an op share one row."""
