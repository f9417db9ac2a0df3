"""Every row of the expression table against eager PyTorch, by dtype, with special values and odd shapes."""

from __future__ import annotations

from typing import Any, Callable

import pytest
import torch
import torch.nn.functional as F
from graphs import buffer_of, check, execute, record, typed

from codegen import special
from codegen.activations import ACTIVATIONS
from codegen.expressions import ROWS
from codegen.fuse import lower_all, plan
from codegen.pointwise import base_name

aten = torch.ops.aten
FLOATS = (torch.float32, torch.bfloat16, torch.float64)
SPECIAL = [float("nan"), float("inf"), float("-inf"), 0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 2.0, 3.5, -2.5]


def data(dtype: torch.dtype, seed: int, positive: bool | None = False) -> torch.Tensor:
    """(3, 37) elements; floats begin with special values, unless only positive (True) or finite ones (None) are wanted."""
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.rand(3, 37, generator=generator) > 0.5
    if not dtype.is_floating_point:
        return torch.randint(1 if positive else -9, 10, (3, 37), generator=generator).to(dtype)
    made = torch.randn(3, 37, generator=generator) * 2
    made = made.abs() + 0.1 if positive else made
    special = SPECIAL[seed % 5 :] + SPECIAL[: seed % 5]
    if positive is False:
        made.view(-1)[: len(special)] = torch.tensor(special)
    return made.to(dtype)


INTS = (torch.int64, torch.int32)
ALL = (*FLOATS, torch.int64)
CASES: list[tuple[str, Callable[..., Any], int, tuple[torch.dtype, ...], bool | None]] = [
    ("add", lambda x, y: torch.add(x, y, alpha=2), 2, ALL, False),
    ("add", lambda x, y: x + y, 2, (torch.bool,), False),
    ("sub", lambda x, y: x - y, 2, ALL, False),
    ("rsub", lambda x: torch.rsub(x, 3), 1, ALL, False),
    ("mul", lambda x, y: x * y, 2, (*ALL, torch.bool), False),
    ("mul", lambda x: x * 1.5, 1, (*FLOATS, torch.float64, torch.int64), False),
    ("div", lambda x, y: x / y, 2, (*ALL, torch.float64), False),
    ("div", lambda x, y: torch.div(x, y, rounding_mode="floor"), 2, (torch.float32, torch.int64), True),
    ("div", lambda x, y: torch.div(-x, y, rounding_mode="floor"), 2, (torch.int32,), True),
    ("div", lambda x, y: torch.div(-x, y, rounding_mode="trunc"), 2, (torch.float32, torch.int64), True),
    ("floor_divide", lambda x, y: x // y, 2, (torch.int64,), True),
    ("remainder", lambda x, y: torch.remainder(-x, y), 2, (torch.float32, torch.int64), True),
    ("fmod", lambda x, y: torch.fmod(-x, y), 2, (torch.float32, torch.int64), True),
    ("pow", lambda x: (x.pow(2), x**3), 1, ALL, False),
    ("pow", lambda x: x**4, 1, (*FLOATS, torch.float64, torch.int64), False),
    ("pow", lambda x: (x**0.5, x**-1, x**-0.5, x**-2, x**1.7), 1, FLOATS, True),
    ("pow", lambda x, y: x**y, 2, FLOATS, True),
    ("neg", lambda x: -x, 1, ALL, False),
    ("abs", torch.abs, 1, ALL, False),
    ("sign", torch.sign, 1, (torch.float32, torch.int64, torch.bool), False),
    ("reciprocal", torch.reciprocal, 1, ALL, True),
    ("sqrt", torch.sqrt, 1, (*ALL, torch.float64), True),
    ("rsqrt", torch.rsqrt, 1, FLOATS, True),
    ("exp", torch.exp, 1, (*ALL, torch.float64), False),
    ("exp2", torch.exp2, 1, FLOATS, False),
    ("expm1", torch.expm1, 1, FLOATS, False),
    *[(name, getattr(torch, name), 1, FLOATS, True) for name in ("log", "log2", "log10", "log1p", "acosh")],
    *[(name, getattr(torch, name), 1, FLOATS, False) for name in (
        "sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh", "asinh", "atanh", "erf", "erfc", "sigmoid")],
    ("atan2", torch.atan2, 2, FLOATS, False),
    *[(name, getattr(torch, name), 1, (torch.float32, torch.int64), False) for name in ("floor", "ceil", "trunc", "round")],
    ("frac", torch.frac, 1, (torch.float32,), True),
    ("relu", torch.relu, 1, ALL, False),
    ("leaky_relu", lambda x: F.leaky_relu(x, 0.1), 1, FLOATS, False),
    ("elu", lambda x: F.elu(x, 0.7), 1, FLOATS, False),
    ("silu", F.silu, 1, FLOATS, False),
    ("gelu", F.gelu, 1, (*FLOATS, torch.float64), None),  # eager CPU gives NaN at infinity
    ("gelu", lambda x: F.gelu(x, approximate="tanh"), 1, FLOATS, None),
    ("mish", F.mish, 1, FLOATS, True),
    ("softplus", F.softplus, 1, FLOATS, False),
    ("hardtanh", F.hardtanh, 1, FLOATS, False),
    ("hardswish", F.hardswish, 1, (torch.float32,), True),
    ("hardsigmoid", F.hardsigmoid, 1, (torch.float32,), True),
    ("threshold", lambda x: F.threshold(x, 0.2, 20.0), 1, FLOATS, False),
    ("threshold_backward", lambda g, x: aten.threshold_backward(g, x, 0), 2, FLOATS, True),
    ("tanh_backward", aten.tanh_backward, 2, FLOATS, False),
    ("sigmoid_backward", aten.sigmoid_backward, 2, FLOATS, False),
    ("silu_backward", aten.silu_backward, 2, FLOATS, True),
    ("gelu_backward", aten.gelu_backward, 2, FLOATS, True),
    ("gelu_backward", lambda g, x: aten.gelu_backward(g, x, approximate="tanh"), 2, FLOATS, True),
    ("leaky_relu_backward", lambda g, x: aten.leaky_relu_backward(g, x, 0.1, False), 2, FLOATS, False),
    ("elu_backward", lambda g, x: aten.elu_backward(g, 0.7, 1.0, 1.0, False, x), 2, FLOATS, True),
    ("elu_backward", lambda g, x: aten.elu_backward(g, 0.7, 1.0, 1.0, True, x), 2, (torch.float32,), True),
    ("hardtanh_backward", lambda g, x: aten.hardtanh_backward(g, x, -1.0, 1.0), 2, FLOATS, True),
    ("softplus_backward", lambda g, x: aten.softplus_backward(g, x, 1.0, 20.0), 2, FLOATS, True),
    ("native_dropout_backward", lambda g: aten.native_dropout_backward(g, torch.ones(3, 37) > 0, 1.25), 1, FLOATS, True),
    ("maximum", torch.maximum, 2, (*ALL, torch.bool), False),
    ("minimum", torch.minimum, 2, (*ALL, torch.bool), False),
    ("fmax", torch.fmax, 2, (torch.float32, torch.int64), False),
    ("fmin", torch.fmin, 2, (torch.float32, torch.int64), False),
    ("clamp", lambda x: (torch.clamp(x, -1, 2), torch.clamp(x, min=0.5), torch.clamp(x, max=0)), 1, FLOATS, False),
    ("clamp", lambda x: torch.clamp(x, -1, 2), 1, (torch.int64,), False),
    ("clamp", lambda x, y: torch.clamp(x, y), 2, FLOATS, False),
    ("clamp_min", lambda x: torch.clamp_min(x, 1), 1, ALL, False),
    ("clamp_max", lambda x: torch.clamp_max(x, 1), 1, ALL, False),
    *[(name, getattr(torch, name), 2, (torch.float32, torch.int64, torch.bool), False) for name in "eq ne lt le gt ge".split()],
    ("lt", lambda x: x < 0.1, 1, (torch.float32, torch.bfloat16, torch.int64), False),
    ("isnan", torch.isnan, 1, FLOATS, False),
    *[(name, getattr(torch, name), 2, (torch.float32, torch.int64, torch.bool), False)
      for name in ("logical_and", "logical_or", "logical_xor")],
    ("logical_not", torch.logical_not, 1, (torch.float32, torch.bool), False),
    *[(name, getattr(torch, name), 2, (torch.int64, torch.bool), False)
      for name in ("bitwise_and", "bitwise_or", "bitwise_xor")],
    ("bitwise_not", torch.bitwise_not, 1, (torch.int64, torch.bool), False),
    ("where", lambda x, y: torch.where(x > y, x, y), 2, ALL, False),
    ("where", lambda x: torch.where(x > 0, x, 0.0), 1, FLOATS, False),
    ("masked_fill", lambda x: x.masked_fill(x > 0, -7.0), 1, ALL, False),
    ("lerp", lambda x, y: (torch.lerp(x, y, 0.1), torch.lerp(x, y, 0.9)), 2, FLOATS, True),
    ("addcmul", lambda x, y: torch.addcmul(x, y, y, value=0.5), 2, FLOATS, False),
    ("addcdiv", lambda x, y: torch.addcdiv(x, x, y, value=0.5), 2, FLOATS, True),
    ("copy", lambda x: torch.empty(3, 37).copy_(x), 1, (*ALL, torch.bool), False),
    ("copy", lambda x: torch.empty(3, 37, dtype=torch.bfloat16).copy_(x), 1, (torch.float32, torch.int64), False),
    ("copy", lambda x: torch.empty(3, 37, dtype=torch.bool).copy_(x), 1, (torch.float32, torch.int64), False),
    ("copy", lambda x: torch.empty(3, 37, dtype=torch.int64).copy_(x), 1, (torch.float32, torch.int32), True),
    ("clone", torch.clone, 1, (*ALL, torch.bool), False),
    ("_to_copy", lambda x: (x.double(), x.bfloat16(), x.bool()), 1, (torch.float32, torch.int64), False),
    ("fill", lambda x: torch.empty_like(x).fill_(3), 1, (*ALL, torch.bool), False),
    ("full", lambda x: (x, torch.full((3, 37), 0.1)), 1, (torch.float32,), False),
    ("full_like", lambda x: torch.full_like(x, 2), 1, ALL, False),
    ("scalar_tensor", lambda x: x * torch.scalar_tensor(0.3), 1, (torch.bfloat16,), False),
    *[(name, lambda x, how=name: getattr(torch, how)((3, 37), dtype=x.dtype), 1, ALL, False) for name in ("zeros", "ones")],
    *[(name, getattr(torch, name), 1, ALL, False) for name in ("zeros_like", "ones_like")],
    *[(name, lambda x, how=name: getattr(x, how)((5, 7)), 1, ALL, False) for name in ("new_zeros", "new_ones")],
    ("zero", lambda x: torch.empty_like(x).zero_(), 1, (*ALL, torch.bool), False),
    ("sgn", torch.sgn, 1, (torch.float32, torch.int64), False),
    ("log_sigmoid_forward", F.logsigmoid, 1, FLOATS, False),
    ("log_sigmoid_backward", lambda g, x: aten.log_sigmoid_backward(g, x, (-x.abs()).exp()), 2, FLOATS, False),
    ("mish_backward", aten.mish_backward, 2, FLOATS, None),
    ("hardswish_backward", aten.hardswish_backward, 2, FLOATS, None),
    ("hardswish_backward", lambda g, x: aten.hardswish_backward(g, x * 0 - 3), 2, FLOATS, None),
    ("hardsigmoid_backward", lambda g, x: aten.hardsigmoid_backward(g, x * 2), 2, FLOATS, None),
    ("softshrink", F.softshrink, 1, FLOATS, False),
    ("softshrink_backward", lambda g, x: aten.softshrink_backward(g, x, 0.5), 2, FLOATS, None),  # CPUs differ in NaN
    ("hardshrink", F.hardshrink, 1, FLOATS, False),
    ("hardshrink_backward", lambda g, x: aten.hardshrink_backward(g, x, 0.5), 2, FLOATS, None),  # CPUs differ in NaN
    ("_prelu_kernel", lambda x: F.prelu(x.view(1, 3, 37), torch.tensor([0.1, 0.0, -2.0], dtype=x.dtype)), 1, FLOATS, False),
    ("_prelu_kernel_backward", aten._prelu_kernel_backward, 3, FLOATS, False),
    ("logit", lambda x: (torch.logit(x), torch.logit(x, 0.1)), 1, FLOATS, False),
    ("logit_backward", lambda g, x: (aten.logit_backward(g, x / 8), aten.logit_backward(g, x / 8, 0.1)), 2, FLOATS, True),
    ("glu", lambda x: (F.glu(x[:, 1:]), F.glu(x[1:].t().contiguous())), 1, FLOATS, None),
    ("glu_backward", lambda g, x: aten.glu_backward(g[:, 19:], x[:, 1:], 1), 2, FLOATS, None),
    ("xlogy", lambda x, y: (torch.xlogy(x, y), torch.xlogy(x, 0.7), torch.xlogy(0.0, y)), 2, FLOATS, False),
    ("special_xlog1py", torch.special.xlog1py, 2, FLOATS, False),
    ("special_entr", torch.special.entr, 1, FLOATS, False),
    ("logaddexp", torch.logaddexp, 2, FLOATS, False),
    ("logaddexp2", torch.logaddexp2, 2, FLOATS, False),
    ("sinc", torch.sinc, 1, FLOATS, None),
    ("hypot", torch.hypot, 2, FLOATS, False),
    ("copysign", lambda x, y: (torch.copysign(x, y), torch.copysign(x, -1.0)), 2, FLOATS, False),
    ("heaviside", torch.heaviside, 2, FLOATS, None),
    ("erfinv", lambda x: torch.erfinv(x.sin()), 1, FLOATS, None),
    ("lgamma", torch.lgamma, 1, (torch.float32, torch.float64), True),
    ("nan_to_num", lambda x: (torch.nan_to_num(x), torch.nan_to_num(x, 1.5, 2.5, -3.5)), 1, ALL, False),
    ("bitwise_left_shift", torch.bitwise_left_shift, 2, INTS, True),
    ("bitwise_right_shift", torch.bitwise_right_shift, 2, INTS, True),
    ("__lshift__", lambda x, y: (x << y, x << 3), 2, INTS, True),
    ("__rshift__", lambda x, y: (x >> y, (x * 9) >> 3, x >> (y * 20)), 2, (*INTS, torch.uint8), True),
]


@pytest.mark.parametrize(
    ("name", "program", "inputs", "dtype", "positive"),
    [pytest.param(name, program, inputs, dtype, positive, id=f"{index}-{name}-{str(dtype)[6:]}")
     for index, (name, program, inputs, dtypes, positive) in enumerate(CASES) for dtype in dtypes],
)
def test_row_equals_eager(name: str, program: Callable[..., Any], inputs: int, dtype: torch.dtype, positive: bool | None) -> None:
    tensors = [data(dtype, seed + 1, positive) for seed in range(inputs)]
    recording, _ = record(program, *tensors)
    assert name in {base_name(unit.node) for unit in lower_all(recording.graph) if unit.part is not None}
    check(program, *tensors)


def test_every_row_has_a_case() -> None:
    assert {*ROWS, *ACTIVATIONS, *special.SPECIAL} - {case[0] for case in CASES} == set()


MIXED = [
    ("int + float scalar", lambda x: x + 0.5, (torch.int64,)),
    ("int / int", lambda x, y: x / y, (torch.int32, torch.int64)),
    ("bf16 + f32", lambda x, y: x + y, (torch.bfloat16, torch.float32)),
    ("f16 * bf16", lambda x, y: x * y, (torch.float16, torch.bfloat16)),
    ("int * float", lambda x, y: x * y, (torch.int64, torch.float32)),
    ("bool * float", lambda x, y: x * y, (torch.bool, torch.bfloat16)),
    ("bool + int", lambda x, y: x + y, (torch.bool, torch.int64)),
    ("int < float", lambda x, y: x < y, (torch.int64, torch.float32)),
    ("uint8 + int8", lambda x, y: x + y, (torch.uint8, torch.int8)),
    ("uint8 wraps", lambda x: x * 37, (torch.uint8,)),
    ("where of mixed", lambda x, y: torch.where(x > 0, x, y), (torch.float32, torch.float64)),
    ("zero-dim double does not widen", lambda x: x + torch.tensor(0.1, dtype=torch.float64), (torch.float32,)),
    ("zero-dim double widens int", lambda x: x * torch.tensor(0.1, dtype=torch.float64), (torch.int32,)),
]


@pytest.mark.parametrize(("name", "program", "dtypes"), MIXED, ids=[case[0] for case in MIXED])
def test_mixed_dtypes_promote_as_torch_does(name: str, program: Callable[..., Any], dtypes: tuple[torch.dtype, ...]) -> None:
    check(program, *(data(dtype, seed + 1, True) for seed, dtype in enumerate(dtypes)))


def test_a_half_precision_chain_rounds_where_eager_rounds() -> None:
    x, y = data(torch.bfloat16, 1, True), data(torch.bfloat16, 2, True)
    check(lambda x, y: ((x + y) * y - x) * 3, x, y, count=1, rtol=0.0, atol=0.0)


def test_a_power_in_half_precision_rounds_each_product() -> None:
    """As CUDA's kernels do; the CPU's do in bfloat16."""
    check(lambda x: x**3, data(torch.bfloat16, 2, True), rtol=0.0, atol=0.0)


def test_bfloat16_stores_round_to_nearest_even() -> None:
    bits = torch.arange(0x3F80_0000, 0x3F83_0000, 0x1000, dtype=torch.int32).view(torch.float32)
    check(lambda x: torch.empty(x.shape, dtype=torch.bfloat16).copy_(x), bits, rtol=0.0, atol=0.0)


def test_unknown_ops_and_dtypes_are_left_to_aten_with_a_reason() -> None:
    recording, _ = record(lambda x, c: (x.digamma(), c * c), data(torch.float32, 1), torch.randn(3, dtype=torch.complex64))
    reasons = [unit.reason for unit in lower_all(recording.graph)]
    assert reasons == ["no kernel for aten::digamma", "dtype torch.complex64"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_gelu_in_16_bits_is_as_exact_as_they_show(dtype: torch.dtype) -> None:
    x = torch.cat([torch.linspace(-9, 9, 3001), torch.tensor([float("nan"), 0.0, -0.0])]).to(dtype)
    near = {"rtol": 1e-2 if dtype is torch.bfloat16 else 2e-3, "atol": 2e-4}
    check(torch.nn.functional.gelu, x, **near)
    check(torch.ops.aten.gelu_backward, torch.ones_like(x), x, **near)


def test_quotients_and_roots_without_a_branch_are_exact() -> None:
    """Bit by bit in float32, for all pairs of 1,000 numbers of any size and of special ones. Quotients of or as small numbers as
    the steps do not hold for may be the next number. (Eager mode's roots are not exact on all CPUs.)"""
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(1 << 31), (1 << 31) - 1, (1000,), generator=generator).to(torch.int32)
    edges = [2.0**power for power in (-149, -127, -126, -101, -100, -96, 63, 64, 99, 100, 101, 126, 127)]
    numbers = torch.cat([bits.view(torch.float32), torch.tensor([*SPECIAL, *edges, 1e-40, 1e-45, 3.4028234e38])])
    left, right = numbers[:, None].expand(-1, len(numbers)).contiguous(), numbers[None, :]
    recording, (quotients, roots) = record(lambda a, b: (a / b, a.sqrt()), left, right)
    memory = execute(recording, plan(recording.graph))
    made, rooted = (typed(memory[buffer_of(recording, recording.expected, like)], like) for like in (quotients, roots))
    small = torch.minimum(left.abs(), quotients.abs()) < 2.0**-99
    signs = made.signbit() == quotients.signbit()
    assert ((made == quotients) & signs | made.isnan() & quotients.isnan())[~small].all()
    assert (signs & ((made - quotients).abs() <= quotients.abs() * 2.0**-23 + 2.0**-149))[small & (made != quotients)].all()
    exact = left.double().sqrt().float()
    assert torch.equal(rooted.isnan(), exact.isnan())
    assert ((rooted == exact) & (rooted.signbit() == exact.signbit()))[~exact.isnan()].all()


def test_zeros_change_their_sign() -> None:
    """Which Triton's minus does not do."""
    zeros = torch.tensor([0.0, -0.0, 1.0])
    recording, results = record(lambda x: (-x, -x.bfloat16(), -x.double()), zeros)
    memory = execute(recording, plan(recording.graph))
    for like in results:
        assert typed(memory[buffer_of(recording, recording.expected, like)], like).signbit().tolist() == [True, False, True]
