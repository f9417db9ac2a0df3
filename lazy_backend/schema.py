"""What an op's schema means for recording it, asked once per op by the native core. Imports torch, `ir_nodes.ops` and `core`."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from enum import IntEnum
from types import ModuleType
from typing import Any

import torch

from ir_nodes import ops
from lazy_backend import core


class ArgKind(IntEnum):
    """As in csrc/core.h."""

    CONST = 0
    TENSOR = 1
    TENSOR_LIST = 2
    OPT_TENSOR_LIST = 3
    SCALAR = 4
    EXPONENT = 5
    SHARE = 6
    FACTOR = 7
    SCALAR_LIST = 8
    FLOAT_LIST = 9
    GENERATOR = 10
    DEVICE = 11
    HOST_SCALAR = 12


RECORDED = ("", "")
"""What `refusal` says of an op that can be recorded."""


_KINDS = {
    "Tensor": ArgKind.TENSOR,
    "List[Tensor]": ArgKind.TENSOR_LIST,
    "List[Optional[Tensor]]": ArgKind.OPT_TENSOR_LIST,
    "number": ArgKind.SCALAR,
    "float": ArgKind.SCALAR,
    "List[number]": ArgKind.SCALAR_LIST,
    "List[float]": ArgKind.FLOAT_LIST,
    "Generator": ArgKind.GENERATOR,
    "Device": ArgKind.DEVICE,
}
_NUMBERS = (ArgKind.SCALAR, ArgKind.FACTOR, ArgKind.SCALAR_LIST, ArgKind.FLOAT_LIST)
# What multiplies an operand, 1 unless a program says otherwise: what is known to be 1 needs no multiplication.
_FACTORS = ("alpha", "beta")
# Their int returns are sizes that Meta knows.
RETURN_SIZES = ("_scaled_dot_product", "_flash_attention", "_efficient_attention", "_cudnn_attention")
_NOT_RESIZED = ("normal",)  # eager mode does not resize its `out`, as Meta does
# The shape of their results depends on the data where an index is a mask.
_MASKED = ("index", "_unsafe_index")


@dataclass(frozen=True, slots=True)
class OpSchema:
    """Fields of `OpInfo` in csrc/core.h, in the order in which `read_schema` in csrc/bind.cpp takes them.

    ``args``: kind, and whether the op writes it. ``return_alias``: the argument that a return is, -1 for a new tensor.
    ``refusal``: the kind of barrier that it asks for where it can't be recorded, and ``why``, to follow its name; "": it can.
    ``masks_matter``: data-dependent only for boolean indices.
    """

    args: list[tuple[int, bool]]
    return_alias: list[int]
    refusal: str
    why: str
    random: bool
    generator_arg: bool
    view: bool
    indexing: bool
    masks_matter: bool


def read(target: str) -> OpSchema:
    """What the core wants to know of ``target`` ("aten::add.out"). Raises KeyError for an op that torch does not know."""
    schema = ops.schema(target)
    space, name, _ = ops.split(target)
    base = name if space == "aten" else ""
    kinds = arg_kinds(schema, base)
    aliases = [info for info in (item.alias_info for item in schema.returns) if info is not None]
    return OpSchema(
        [(int(kind), ops.written_mode(target, index) != "r") for index, kind in enumerate(kinds)],
        [alias_of(schema, item.alias_info) for item in schema.returns],
        *refusal(schema, base, tags_of(target)),
        is_random(target),
        ArgKind.GENERATOR in kinds,
        any(not info.is_write for info in aliases),
        ArgKind.OPT_TENSOR_LIST in kinds,
        base in _MASKED,
    )


def is_random(target: str) -> bool:
    """Does the op draw from a generator?"""
    return torch.Tag.nondeterministic_seeded in tags_of(target) and target not in ops.NEVER_DRAWS or any(
        kind_of(str(arg.type)) is ArgKind.GENERATOR for arg in ops.schema(target).arguments
    )


def tags_of(target: str) -> list[torch.Tag]:
    space, name, over = ops.split(target)
    return torch._C._get_operation_overload(f"{space}::{name}", over)[2]


def arg_kinds(schema: torch._C.FunctionSchema, base: str) -> list[ArgKind]:
    """Where numbers decide a result's shape (no tensor does, they scale one, or a workspace's size) they are constants, like all
    else unnamed."""
    kinds = [ArgKind.FACTOR if is_factor(arg) else kind_of(str(arg.type)) for arg in schema.arguments]
    given = [kind for kind, arg in zip(kinds, schema.arguments)
             if not (arg.kwarg_only and arg.alias_info is not None and arg.alias_info.is_write)]
    scales = base.startswith("_upsample") and any(arg.name.startswith("scale") for arg in schema.arguments)
    if base.startswith(("upsample", "_cudnn_rnn")) or scales or not {ArgKind.TENSOR, ArgKind.TENSOR_LIST} & set(given):
        return [ArgKind.CONST if kind in _NUMBERS else kind for kind in kinds]
    if base in ("linalg_vector_norm", "_foreach_norm", "norm"):  # the order chooses the formula, and programs keep to one
        return [ArgKind.CONST if kind is ArgKind.SCALAR else kind for kind in kinds]
    if base.startswith(("pow", "_foreach_pow")):  # an integer exponent chooses the formula
        return [ArgKind.EXPONENT if kind is ArgKind.SCALAR else kind for kind in kinds]
    if base.startswith("_scaled_dot_product"):  # kernels that know that nothing drops draw nothing
        return [ArgKind.SHARE if arg.name == "dropout_p" else kind for kind, arg in zip(kinds, schema.arguments)]
    return kinds


def for_meta(target: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """``args``, in schema order, as a Meta kernel reads them rightly: a norm's dimensions counted from the front, for torch 2.11
    keeps those of one element that are counted from the end."""
    if ops.split(target)[1] != "linalg_vector_norm" or args[2] is None:
        return args
    count = args[0].dim()
    return (*args[:2], [dim + count if -count <= dim < 0 else dim for dim in args[2]], *args[3:])


def is_factor(arg: Any) -> bool:
    return arg.name in _FACTORS and str(arg.type) == "number" and arg.default_value == 1


def kind_of(type_name: str) -> ArgKind:
    bare = type_name[len("Optional[") : -1] if type_name.startswith("Optional[") else type_name
    return _KINDS.get(bare, ArgKind.CONST)


def alias_of(schema: torch._C.FunctionSchema, info: Any) -> int:
    """The last argument that shares a return's alias set; -1 where there is none."""
    found = -1
    for index, arg in enumerate(schema.arguments):
        if info is not None and arg.alias_info is not None and same_alias(arg.alias_info, info):
            found = index
    return found


def same_alias(one: Any, other: Any) -> bool:
    return (one.is_write, one.before_set, one.after_set) == (other.is_write, other.before_set, other.after_set)


def refusal(schema: torch._C.FunctionSchema, base: str, tags: list[torch.Tag]) -> tuple[str, str]:
    """The kind of barrier that an op asks for because it can't be recorded, and why, to follow its name."""
    if base in _NOT_RESIZED:
        return "unrecordable", " cannot be recorded"
    returns = {str(item.type) for item in schema.returns}
    if not returns <= {"Tensor", "List[Tensor]"} and not base.startswith(RETURN_SIZES):
        return "value_access", " returns a Python value"
    if base in _MASKED or torch.Tag.dynamic_output_shape in tags or torch.Tag.data_dependent_output in tags:
        return "data_dependent_shape", ": its result depends on the values"
    return RECORDED


def install(native: ModuleType) -> None:
    native.set_schema_reader(lambda target: astuple(read(target)))


core.at_start(install)
