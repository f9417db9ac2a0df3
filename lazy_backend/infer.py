"""Infers what an op gives, once for each (op, layouts, constants). Imports torch, `ir_nodes.ops`, `core`, `samples`, `schema` and
`varying`.

Meta kernels say shapes and dtypes. Where they are written in Python they may be wrong about strides, and some say nothing of
dtypes that the real kernel refuses: then the physical kernel is asked too, on zeros. The core remembers every answer.
"""

from __future__ import annotations

import functools
import warnings
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Callable

import torch
from torch.utils import _pytree as pytree

from ir_nodes import ops
from lazy_backend import core, samples, schema, varying

Tensor = torch.Tensor
Arguments = tuple[Any, ...]
Answer = tuple[str, bool, list[Any], list[tuple[int, Tensor]]]
"""Why the op cannot be recorded ("": it can), and is that only this line's; returns, on Meta; written arguments, laid anew."""

# Beside pointwise ops: those that refuse some dtypes only when they run.
_CHECKED_BY_RUNNING = frozenset(
    "mm bmm addmm baddbmm addbmm addmv dot _softmax _log_softmax mean nll_loss_forward _linalg_svd _linalg_det _linalg_slogdet "
    "_linalg_eigh _linalg_solve_ex linalg_qr linalg_lu linalg_lu_factor_ex linalg_inv_ex linalg_cholesky_ex gelu hardsigmoid "
    "hardswish amax amin max min".split()
)
_UPDATES = frozenset("_fused_adagrad_ _fused_adam_ _fused_adamw_ _fused_sgd_".split())  # need no Meta: they give nothing new
# They have no Meta kernel that knows, and what they give has a size that follows from the sizes of what they are given.
_SHAPED_BY_RUNNING = ("_logcumsumexp", "_standard_gamma_grad", "_thnn_fused_gru_cell", "_cudnn_rnn")
# Their kernels for the CPU give `out` other strides than they found; that of `svd` gives other strides on CUDA than Meta says.
_RESTRIDES = ("replication_pad", "reflection_pad", "_linalg_svd", "linalg_l", "linalg_eig", "_linalg_eigh", "linalg_qr", "ormqr",
              "linalg_householder", "triangular_solve", "lu_solve", "cholesky_inverse", "_fft_")  # fmt: skip
_OWN_RESULT = ("mvlgamma", "angle")  # pointwise, but their kernels make a contiguous result first and fill it
# Their results on CUDA have other layouts than on a CPU.
_OTHERWISE_ON_CPU = frozenset("_embedding_bag _embedding_bag_forward_only max_unpool2d max_unpool3d".split())
# Their integers are pivots, counted from one: kernels write where zeros point to.
_PIVOTED = frozenset("linalg_ldl_solve linalg_lu_solve lu_solve lu_unpack".split())
_PROBES: dict[int, Callable[..., Tensor]] = {1: torch.neg, 2: torch.add, 3: torch.addcmul}
MOST_BYTES = 1 << 26
"""Ops on more bytes are tried on fewer samples, or not at all: where Meta's word has to do and is wrong, the result is copied."""
MOST_BYTES_ELSEWHERE = 1 << 20
"""The same for what is tried on a CPU in the place of a GPU."""
MISSING = "it has no Meta kernel, so that its result's shape is not known before it runs"
REFUSED = "its Meta kernel refuses this call, so that eager mode decides"


class Refusal(Exception):
    """Why a call is not recorded. Run at once, the physical kernel says in its own words what is wrong, if anything is."""


@dataclass(frozen=True, slots=True)
class Doubts:
    """What Meta is not trusted with. ``dtypes``: the real kernel refuses some; ``layouts``: only the real kernel knows them;
    ``strides``: of a pointwise op, whose real kernel takes them from the operands."""

    dtypes: bool
    layouts: bool
    pointwise: bool
    strides: bool


@functools.cache
def doubts(target: str) -> Doubts:
    base = ops.split(target)[1]
    pointwise = torch.Tag.pointwise in schema.tags_of(target) and base not in _OWN_RESULT
    if schema.is_random(target):
        return Doubts(base.endswith("_"), False, pointwise, False)
    spec = ops.schema(target)
    makes = any(item.alias_info is None for item in spec.returns) or any(arg.is_out for arg in spec.arguments)
    layouts = not pointwise and (base.startswith(_RESTRIDES) or (makes and not shares_meta(target)))
    if base.startswith(schema.RETURN_SIZES):  # attention's backward on CUDA reads its seed in host memory, where zeros are not
        layouts = False
    dtypes = pointwise or base in (*_CHECKED_BY_RUNNING, *_UPDATES) or base.startswith("_foreach_")
    return Doubts(dtypes, layouts, pointwise, pointwise and not shares_meta(target))


@functools.cache
def shares_meta(target: str) -> bool:
    """Has ``target`` a Meta kernel in C++? Then it is the shape function of its other kernels, or made of such."""
    return any(line.startswith("Meta:") and ".cpp" in line for line in torch._C._dispatch_dump(target).splitlines())


def infer(target: str, args: Arguments, device: torch.device) -> Answer:
    """``args`` are the op's arguments in schema order; ``device`` is the physical one.

    The core calls it below autograd and autocast, once for each hash of a call.
    """
    with torch._C.DisableTorchFunction(), warnings.catch_warnings():  # the user's modes do not see stand-ins
        warnings.simplefilter("ignore")
        if why := varying.refusal(target, args):
            return why, True, [], []
        try:
            given, returns = layouts(target, args, on_meta(args), device)
            if any(item.is_conj() for spec, item in zip(ops.schema(target).returns, returns)
                   if spec.alias_info is None and isinstance(item, Tensor)):  # fmt: skip
                raise Refusal("it leaves the conjugation of its result to whoever reads it")
            return "", False, pytree.tree_map_only(Tensor, to_meta, returns), relaid(target, args, given)
        except Refusal as refusal:
            return str(refusal), False, [], []


def layouts(target: str, args: Arguments, metas: Arguments, device: torch.device) -> tuple[Arguments, list[Any]]:
    """Stand-ins for the arguments after the call, and for its returns. Raises Refusal."""
    doubt, base = doubts(target), ops.split(target)[1]
    try:
        untold = base.startswith(_SHAPED_BY_RUNNING)
        given, returns = ((), []) if untold else (metas, [] if base in _UPDATES else call(target, schema.for_meta(target, metas)))
    except Exception as error:
        if isinstance(error, NotImplementedError):
            raise Refusal(MISSING) from None
        if not doubt.layouts:
            raise Refusal(REFUSED) from None
        given, returns = (), []
    if not all(is_plain(item) for item in tensors(returns)):
        raise Refusal("it gives a tensor that is not strided")
    try:
        if doubt.dtypes:
            try_on_device(target, args, device, doubt, lambda n: min(n, 1))
        few = samples.fewer(target, args, MOST_BYTES) if doubt.layouts and given else args
        if doubt.layouts and may_try(target, few, device, bool(given)):
            tried, found = try_on_device(target, few, device, doubt, lambda n: n)
            whole = few is args or samples.tells_all(target)
            return (tried, found) if whole else (given, list(map(samples.as_many, found, returns)))
        if doubt.layouts and device.type == "cuda" and bytes_of(args) <= MOST_BYTES_ELSEWHERE:
            return try_on_cpu(target, args, doubt, (given, returns))
    except torch.OutOfMemoryError:
        if not given:
            raise Refusal(REFUSED) from None
        return given, returns  # the device is full now: Meta's word has to do
    except Exception:
        raise Refusal("it fails for zeros, so that it has to see the values") from None
    if not given:
        raise Refusal(REFUSED)
    if doubt.strides:
        returns = [restrided(given, item) if isinstance(item, Tensor) else item for item in returns]
    return given, returns


def may_try(target: str, args: Arguments, device: torch.device, known: bool) -> bool:
    """May the op run on zeros? ``known``: Meta has said what it gives.

    Not where zeros may be wrong numbers for an index, a length or a pivot: an assertion on a GPU ends the process's use of it.
    """
    read = [arg for index, arg in enumerate(args) if ops.written_mode(target, index) == "r"]
    integers = any(not (t.is_floating_point() or t.is_complex() or t.dtype is torch.bool) for t in tensors(read))
    return not (device.type == "cuda" and integers) and (not known or bytes_of(args) <= MOST_BYTES)


def try_on_cpu(target: str, args: Arguments, doubt: Doubts, known: tuple[Arguments, list[Any]]) -> tuple[Arguments, list[Any]]:
    """On zeros on the CPU, where a wrong index is an error that can be caught. ``known``: what Meta said, nothing or all."""
    if ops.split(target)[1] in _OTHERWISE_ON_CPU and known[0]:
        return known
    try:
        return try_on_device(target, args, torch.device("cpu"), doubt, lambda n: n)
    except Exception as error:
        if known[0] and isinstance(error, NotImplementedError):  # a dtype that CPUs lack
            return known
        if not known[0] or any(spec.is_out for spec in ops.schema(target).arguments):
            raise  # what is wrong with `out` eager mode says
        return known


@samples.without_a_team()
def try_on_device(
    target: str, args: Arguments, device: torch.device, doubt: Doubts, cut: Callable[[int], int]
) -> tuple[Arguments, list[Any]]:
    """Run the op on zeros with each size cut, or, where it may divide by them, on tiny numbers. What it draws nobody misses."""
    given = pytree.tree_map(lambda arg: stand_in(arg, device, cut, byte=1 if doubt.pointwise else 0), args)
    for tensor in tensors(given) if ops.split(target)[1] in _PIVOTED else ():
        if not (tensor.is_floating_point() or tensor.is_complex()):
            tensor.fill_(1)
    devices = [device.index or 0] if device.type == "cuda" else []
    with torch.random.fork_rng(devices, enabled=schema.is_random(target)):
        return given, call(target, given)


def call(target: str, args: Arguments) -> list[Any]:
    """The op's returns. ``args`` in schema order."""
    specs = ops.schema(target).arguments
    named = {spec.name: arg for spec, arg in zip(specs, args) if spec.kwarg_only}
    result = ops.overload(target)(*(arg for spec, arg in zip(specs, args) if not spec.kwarg_only), **named)
    return [result] if len(ops.schema(target).returns) == 1 else list(result or ())


def stand_in(arg: Any, device: torch.device, cut: Callable[[int], int], byte: int) -> Any:
    """For a tensor of ours one of nothing but this byte on ``device``, and ``device`` for ours."""
    if isinstance(arg, (torch.device, torch.Generator)):
        return device if isinstance(arg, torch.device) else None
    ours = isinstance(arg, Tensor) and arg.device.type == "lazysched"
    return filled(arg, device, [cut(n) for n in arg.shape], byte) if ours else arg


def filled(tensor: Tensor, device: torch.device, size: list[int], byte: int) -> Tensor:
    """A tensor of ``size`` on ``device`` with the strides and flags of ``tensor``: of this byte, or of integers that are it."""
    strides = tensor.stride()
    count = 0 if 0 in size else 1 + sum((n - 1) * stride for n, stride in zip(size, strides))
    if tensor.is_floating_point() or tensor.is_complex():
        raw = torch.full((count * tensor.element_size(),), byte, dtype=torch.uint8, device=device).view(tensor.dtype)
    else:  # the number itself: of the bytes' large one the degree of a polynomial takes for ever
        raw = torch.full((count,), byte, dtype=tensor.dtype, device=device)
    return flagged(raw.as_strided(size, strides), tensor)


def flagged(made: Tensor, like: Tensor) -> Tensor:
    """``made`` with the conjugation and the negation that ``like`` has yet to do."""
    made = torch._conj(made) if like.is_conj() else made
    return torch._neg_view(made) if like.is_neg() else made


def tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def is_plain(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_nested


def bytes_of(value: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors(value))


def on_meta(args: Arguments) -> Arguments:
    """Stand-ins on Meta for our tensors and devices. Numbers that stand as tensors stay on the CPU, as Meta wants them."""
    twins: dict[int, Tensor] = {}  # one argument given twice stays one tensor

    def twin(arg: Any) -> Any:
        if isinstance(arg, torch.device):
            return torch.device("meta")
        if isinstance(arg, torch.Generator):
            return None
        if not isinstance(arg, Tensor) or arg.device.type != "lazysched":
            return arg
        return twins.setdefault(id(arg), window_on_meta(arg))

    return pytree.tree_map(twin, args)  # type: ignore[no-any-return]


def window_on_meta(tensor: Tensor) -> Tensor:
    """On Meta, with the room before and behind that ``tensor`` has in its storage."""
    if tensor.storage_offset() == 0:
        return to_meta(tensor)
    room = torch.empty(tensor.untyped_storage().nbytes() // tensor.element_size(), dtype=tensor.dtype, device="meta")
    return flagged(room.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()), tensor)


def to_meta(tensor: Tensor) -> Tensor:
    """A result's layout on Meta."""
    if tensor.is_meta:
        return tensor
    return flagged(torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta"), tensor)


def relaid(target: str, args: Arguments, given: Arguments) -> list[tuple[int, Tensor]]:
    """Written arguments whose layout the op changed, with the new one. Raises Refusal."""
    found = []
    for index, (before, after) in enumerate(zip(args, given)):
        if not isinstance(before, Tensor) or ops.written_mode(target, index) == "r":
            continue
        resized = before.shape != after.shape
        if torch._debug_has_internal_overlap(after) == 1 or (resized and not may_resize(target, args, index)):
            raise Refusal("its output has fewer elements than its result")
        if resized:
            found.append((index, restrided(given, after) if doubts(target).strides else to_meta(after)))
        elif doubts(target).layouts and before.stride() != after.stride() and not after.is_meta:  # only a real kernel knows
            found.append((index, to_meta(after)))
    return found


def may_resize(target: str, args: Arguments, index: int) -> bool:
    """May the op give this argument another size? Not where it is an input too."""
    alone = sum(1 for arg in args if arg is args[index]) == 1 and ops.schema(target).arguments[index].kwarg_only
    return alone or torch.Tag.inplace_view in schema.tags_of(target)


def restrided(given: Arguments, out: Tensor) -> Tensor:
    """Meta kernels in Python give a result contiguous strides; real pointwise kernels take them from their operands.

    So an op with as many operands, whose Meta kernel shares the real one's iterator, is asked instead.
    """
    operands = [torch.empty_strided(arg.shape, arg.stride(), device="meta") for arg in given
                if isinstance(arg, Tensor) and arg is not out]
    probe = _PROBES.get(len(operands))
    try:
        strides = probe(*operands).expand(out.shape).stride() if probe else out.stride()
    except RuntimeError:  # they do not broadcast to the result
        strides = out.stride()
    return torch.empty_strided(out.shape, strides, dtype=out.dtype, device="meta")


def install(native: ModuleType) -> None:
    native.set_inferrer(infer)


core.at_start(install)
