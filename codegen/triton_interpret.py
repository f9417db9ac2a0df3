"""Runs a kernel on the CPU through Triton's interpreter, in a process that also compiles. Imports torch, numpy, triton and
`codegen.kernel`.

Triton's own `InterpretedFunction` needs TRITON_INTERPRET before the import of triton, truncates float32 to bfloat16 where
hardware rounds to nearest even, and knows no libdevice. Here the kernel's plain Python function runs under the interpreter's
language patches, over a builder that rounds as hardware does and takes libdevice functions from torch. Not thread-safe:
`triton.language` is patched while a kernel runs.
"""

from __future__ import annotations

import ctypes
import itertools
import re
from typing import Any, Callable, Sequence

import numpy
import torch
import triton.language as tl
from triton.language.extra import cuda
from triton.language.extra.cuda import libdevice
from triton.runtime import interpreter
from triton.runtime.jit import JITFunction

from codegen.kernel import Kernel
from codegen.taking_turns import Turns

_FUNCTIONS: dict[str, Callable[..., torch.Tensor]] = {
    "fast_exp": torch.exp, "fast_fdivide": torch.div,
    "pow": torch.pow, "fmod": torch.fmod, "atan2": torch.atan2, "rint": torch.round, "trunc": torch.trunc,
    "hypot": torch.hypot, "copysign": torch.copysign, "erfinv": torch.erfinv, "lgamma": torch.lgamma,
    **{name: getattr(torch, name) for name in "exp exp2 expm1 log log2 log10 log1p sin cos tan asin acos atan sinh cosh tanh "
       "asinh acosh atanh erf erfc floor ceil".split()},
}
_SCANS: dict[str, Callable[..., Any]] = {
    "_add": numpy.cumsum, "_mul": numpy.cumprod, "_max": numpy.maximum.accumulate, "_min": numpy.minimum.accumulate,
    "_logaddexp": numpy.logaddexp.accumulate,
}
_REDUCTIONS: dict[str, Callable[..., Any]] = {
    "_add": numpy.sum, "_mul": numpy.prod, "_max": numpy.max, "_min": numpy.min,
}


def narrow_to_bfloat16(data: numpy.ndarray[Any, Any]) -> numpy.ndarray[Any, Any]:
    """The bits (uint16) of float32 values rounded to the nearest bfloat16, ties to even."""
    return torch.from_numpy(numpy.ascontiguousarray(data)).to(torch.bfloat16).view(torch.int16).numpy().view(numpy.uint16)


def widen_bfloat16(data: numpy.ndarray[Any, Any]) -> numpy.ndarray[Any, Any]:
    """The float32 values of bfloat16 bits (uint16)."""
    return (data.astype(numpy.uint32) << numpy.uint32(16)).view(numpy.float32)


class ExactBuilder(interpreter.InterpreterBuilder):
    """The interpreter's instruction set with hardware's rounding and libdevice's functions."""

    def cast_impl(self, src: Any, dst_type: Any) -> Any:
        source, target = src.dtype.scalar, dst_type.scalar
        if source == tl.bfloat16 or target == tl.bfloat16:
            data = widen_bfloat16(src.data) if source == tl.bfloat16 else src.data
            if target == tl.bfloat16:
                return interpreter.TensorHandle(narrow_to_bfloat16(data.astype(numpy.float32)), target)
            return interpreter.TensorHandle(data.astype(interpreter._get_np_dtype(target)), target)
        return super().cast_impl(src, dst_type)

    def get_bf16(self, value: float) -> Any:  # not all releases know it
        return interpreter.TensorHandle(narrow_to_bfloat16(numpy.array([value], dtype=numpy.float32)), tl.bfloat16)

    def create_fma(self, x: Any, y: Any, z: Any) -> Any:
        """Rounded once, also where a release multiplies and adds: products of float32s are exact in float64, and a sum that is
        not is made odd (Boldo and Melquiond 2008), so that rounding it again gives the float32 nearest to the exact one."""
        if x.data.dtype != numpy.float32:
            return super().create_fma(x, y, z)
        product, addend = x.data.astype(numpy.float64) * y.data, z.data.astype(numpy.float64)
        total = product + addend
        back = total - product
        error = (product - (total - back)) + (addend - back)
        bits = total.view(numpy.int64)
        inexact = numpy.isfinite(error) & (error != 0) & (bits & 1 == 0)
        odd = bits + numpy.where((error > 0) == (total > 0), 1, -1)
        return interpreter.TensorHandle(numpy.where(inexact, odd, bits).view(numpy.float64).astype(numpy.float32), x.dtype.scalar)

    def create_dot(self, a: Any, b: Any, d: Any, *_: Any) -> Any:
        left, right = (widen_bfloat16(one.data) if one.dtype.scalar == tl.bfloat16 else one.data for one in (a, b))
        product = numpy.matmul(left.astype(d.data.dtype), right.astype(d.data.dtype))
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    def create_atomic_rmw(self, op: Any, ptr: Any, val: Any, mask: Any, sem: Any, scope: Any) -> Any:
        if val.dtype.scalar != tl.bfloat16:
            return super().create_atomic_rmw(op, ptr, val, mask, sem, scope)
        for address, number in zip(ptr.data[mask.data], widen_bfloat16(val.data[mask.data])):  # numbers to one place in turn
            held = numpy.ctypeslib.as_array(ctypes.cast(int(address), ctypes.POINTER(ctypes.c_uint16)), (1,))
            held[:] = narrow_to_bfloat16(widen_bfloat16(held) + number)
        return val

    def create_splat(self, ret_ty: Any, arg: Any) -> Any:
        # The base class trusts a handle's dtype, which for comparisons names what was compared.
        return interpreter.TensorHandle(numpy.full(ret_ty.shape, arg.data, dtype=arg.data.dtype), arg.dtype.scalar)

    def create_extern_elementwise(self, library: str, path: str, symbol: str, args: Any, result: Any, pure: bool) -> Any:
        name = symbol.removeprefix("__nv_")
        how = _FUNCTIONS.get(name) or _FUNCTIONS[name.removesuffix("f")]
        arrays = numpy.broadcast_arrays(*(arg.data for arg in args))
        out = how(*(torch.from_numpy(numpy.ascontiguousarray(array)) for array in arrays)).numpy()
        return interpreter.TensorHandle(out, args[0].dtype.scalar)


_builder = ExactBuilder()


def _reduce(input: Any, axis: int | None, combine: Any, keep_dims: bool = False, **_: Any) -> Any:
    how = _REDUCTIONS[combine.fn.__name__]
    data = numpy.asarray(how(input.handle.data, axis=axis, keepdims=keep_dims)).astype(input.handle.data.dtype)
    kind = tl.block_type(input.dtype, list(data.shape)) if data.shape else input.dtype.scalar
    return tl.core.tensor(interpreter.TensorHandle(data if data.shape else data.reshape(1), input.dtype), kind)


def _scan(input: Any, axis: int, combine: Any, reverse: bool = False, **_: Any) -> Any:
    data = input.handle.data
    data = numpy.flip(data, axis) if reverse else data
    out = _SCANS[combine.fn.__name__](data, axis=axis).astype(data.dtype)
    return tl.core.tensor(interpreter.TensorHandle(numpy.flip(out, axis) if reverse else out, input.dtype.scalar), input.type)


def _assembly(values: Sequence[Any], turns: Turns, text: Any, constraints: str, args: Any, dtype: Any, is_pure: bool,
              pack: int) -> Any:
    """What PTX makes of one number: nothing, rounds it, takes the launch's argument that lies so many bytes behind one, or drops
    it where the sign of a word's byte is 0. Of several: what all programs of a cluster have. Of none: nothing to see here."""
    text = str(getattr(text, "value", text))
    if "mapa.shared::cluster" in text:
        return tl.tuple([told for one in turns.meet(args[:-1]) for told in one])
    if not args:
        return None
    arg = args[0]
    if "prmt.b32 m" in text:
        data, word, byte = (one.handle.data for one in args)
        kept = word >> (byte & 7) * 8 + 7 & 1
        return tl.core.tensor(interpreter.TensorHandle(numpy.where(kept != 0, data, 0).astype(data.dtype), dtype), arg.type)
    if text.startswith("mov.b32"):
        return arg
    if text.startswith("shl.b32 $0, $2, 16"):
        return tl.core.tensor(interpreter.TensorHandle(widen_bfloat16(arg.handle.data), dtype), tl.block_type(dtype, arg.shape))
    if text.startswith("max.NaN."):
        left, right = (widen_bfloat16(one.handle.data) if one.dtype == tl.bfloat16 else one.handle.data for one in args)
        larger = numpy.maximum(left, right)
        larger = narrow_to_bfloat16(larger) if dtype == tl.bfloat16 else larger
        return tl.core.tensor(interpreter.TensorHandle(larger, dtype), arg.type)
    argument = re.search(r"_param_(\d+);.* ld\.param\.u(\d+) ", text)
    if argument:
        first, bits = map(int, argument.groups())
        data = values[first + int(arg.handle.data.item()) // (bits // 8)].handle.data
        return tl.core.tensor(interpreter.TensorHandle(data.view(interpreter._get_np_dtype(dtype)), dtype), dtype)
    assert text.startswith("cvt.rn.bf16x2.f32"), f"no meaning for {text}"
    return tl.core.tensor(interpreter.TensorHandle(widen_bfloat16(narrow_to_bfloat16(arg.handle.data)), dtype), arg.type)


def _assert(condition: Any, message: Any = "", mask: Any = None) -> None:
    """`tl.device_assert`, which the interpreter passes over. Raises IndexError for an index, RuntimeError for other elements, as
    ATen does on CPUs."""
    valid = condition.handle.data if mask is None else condition.handle.data | ~mask.handle.data
    if not valid.all():
        text = str(getattr(message, "value", message))
        raise (IndexError if "an index" in text else RuntimeError)(text)


def _argument(value: Any, kind: str) -> Any:
    """A kernel argument of Triton type ``kind``: the address of a tensor's first element, or a number."""
    if kind.startswith("*"):
        dtype = tl.pointer_type(_type_of(kind[1:]))
        return tl.tensor(interpreter.TensorHandle(numpy.array([value.data_ptr()], dtype=numpy.uint64), dtype), dtype)
    dtype = _type_of(kind)
    data = numpy.array([value], dtype=interpreter._get_np_dtype(dtype))
    return tl.tensor(interpreter.TensorHandle(data, dtype), dtype)


def _widened(tensor: Any, **_: Any) -> Any:
    """What maxima and minima of bfloat16 are taken of."""
    return tensor.to(tl.float32) if tensor.type.scalar == tl.bfloat16 else tensor


def _numbers(arg: Any) -> Any:
    """A loop's step as a tensor, as it is when compiled: Python's int times a block size would be a constant expression."""
    return _argument(arg, "i32") if type(arg) is int else arg


_add_constants = tl.constexpr.__add__


def _added(left: Any, right: Any) -> Any:
    """A constant plus a tensor as a tensor, as it is when compiled."""
    return right + left if isinstance(right, tl.core.tensor) else _add_constants(left, right)


def _type_of(name: str) -> Any:
    names = {"i": "int", "u": "uint", "fp": "fp", "bf": "bf"}
    prefix = name.rstrip("0123456789")
    return tl.dtype(names[prefix] + name[len(prefix) :])


def interpret(kernel: Kernel, function: Callable[..., None]) -> Callable[[tuple[int, int, int], Sequence[Any]], None]:
    """A launcher ``run(grid, args)``; ``function`` is the plain Python function that ``kernel.source`` defines.

    Pointer arguments are CPU tensors whose first element is the one addressed; the others are Python numbers.
    """
    kinds = [kind for _, kind in kernel.signature]
    blocks = {name: tl.constexpr(value) for name, value in kernel.constexprs}

    def run(grid: tuple[int, int, int], args: Sequence[Any]) -> None:
        if len(args) != len(kinds):
            raise ValueError(f"{kernel.name} takes {len(kinds)} arguments, got {len(args)}")
        values = [_argument(arg, kind) for arg, kind in zip(args, kinds)]
        first: tuple[int, ...] = (0, 0, 0)  # of the programs that take turns

        def program(part: int) -> None:
            with numpy.errstate(all="ignore"):
                function(*values, **blocks)

        turns = Turns(kernel.cluster, program, lambda part: _builder.set_grid_idx(first[0] + part, *first[1:]))
        semantic = interpreter.interpreter_semantic
        original = semantic.builder
        interpreter.interpreter_builder = _builder  # what older releases bind in the patches
        scope = interpreter._patch_lang(function)
        interpreter._patch_builtin(libdevice, _builder, scope)
        scope.set_attr(cuda, "gdc_wait", lambda: None)  # one kernel runs at a time
        scope.set_attr(tl, "reduce", _reduce)
        scope.set_attr(tl, "inline_asm_elementwise", lambda *asked: _assembly(values, turns, *asked))
        scope.set_attr(tl, "associative_scan", _scan)
        scope.set_attr(tl, "device_assert", _assert)
        scope.set_attr(tl.core, "_promote_bfloat16_to_float32", _widened)  # not all releases patch it
        scope.set_attr(tl.constexpr, "__add__", _added)
        scope.set_attr(JITFunction, "__call__", lambda called, *args: called.fn(*map(_numbers, args)))
        scope.set_attr(tl.tensor, "__index__", lambda scalar: int(scalar.handle.data.item()))  # older releases need 0-d
        semantic.builder = _builder
        try:
            _builder.set_grid_dim(*grid)
            for first in itertools.product(range(0, grid[0], kernel.cluster), range(grid[1]), range(grid[2])):  # noqa: B007
                turns.all()
        finally:
            semantic.builder = interpreter.interpreter_builder = original
            scope.restore()

    return run
