"""What a function finds in modules and optimizers that decides what it records, for `replaying`. Imports torch only."""

from __future__ import annotations

import functools
import types
from typing import Any, Iterable, Iterator

import torch
from torch import nn

_DEPTH, _ITEMS = 4, 256  # how far, and how many items of a collection, are looked at


class Watched:
    """The modules and optimizers within reach of a function: what it closes over, what it is a method of, globals that it names,
    and its arguments."""

    def __init__(self, function: Any, arguments: Iterable[Any]) -> None:
        found = list(reachable([function, *arguments]))
        self.modules = list(dict.fromkeys(module for one in found if isinstance(one, nn.Module) for module in one.modules()))
        self.optimizers = [one for one in found if isinstance(one, torch.optim.Optimizer)]
        self.slots = [(module._parameters, name) for module in self.modules for name in module._parameters]

    def state(self, trains: bool) -> list[Any]:
        """What has to be as it was when a call was recorded, beside `numbers`: modes and parameters; where the function
        ``trains``, gradients, too. Asked before every replay: 0.1 us a module or parameter, 0.3 us for one that trains."""
        parameters = [holder.get(name) for holder, name in self.slots]
        found: list[Any] = [module.training for module in self.modules]
        found += map(id, parameters)
        if trains:
            found += [one.requires_grad for one in parameters if one is not None]
            found += [id(one.grad) for one in parameters if one is not None]
        return found

    def numbers(self) -> list[Any]:
        """Learning rates and the like; a tensor is the same as long as it is the same object."""
        groups = (group for optimizer in self.optimizers for group in optimizer.param_groups)
        return [id(value) if isinstance(value, torch.Tensor) else value
                for group in groups for name, value in group.items() if name != "params"]

    def names(self) -> list[str]:
        """Of the `numbers`: optimizer, group and key; "" of optimizers that are not PyTorch's, whose arithmetic nobody knows."""
        return [f"{number}.{position} {name}" if type(optimizer).__module__.startswith("torch.optim") else ""
                for number, optimizer in enumerate(self.optimizers) for position, group in enumerate(optimizer.param_groups)
                for name in group if name != "params"]

    def on_the_host(self) -> list[tuple[int, int]]:
        """The optimizers' tensors on the CPU, and how often each was written."""
        return [(id(value), value._version) for optimizer in self.optimizers for state in optimizer.state.values()
                for value in (state.values() if isinstance(state, dict) else ())
                if isinstance(value, torch.Tensor) and value.device.type == "cpu" and not value.is_inference()]


def reachable(roots: Iterable[Any]) -> Iterator[Any]:
    """Modules and optimizers, each once."""
    todo, seen = [(root, 0) for root in roots], set()
    while todo:
        one, depth = todo.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, (nn.Module, torch.optim.Optimizer)):
            yield one
        elif depth < _DEPTH:
            todo += [(child, depth + 1) for child in children(one)]


def children(one: Any) -> Iterable[Any]:
    """What an object leads to."""
    if isinstance(one, functools.partial):
        return [one.func, *one.args, *one.keywords.values()]
    if isinstance(one, types.MethodType):
        return [one.__self__, one.__func__]
    if isinstance(one, types.FunctionType):
        return names_of(one)
    if isinstance(one, dict):
        return list(one.values())[:_ITEMS]
    if isinstance(one, (list, tuple, set, frozenset)):
        return list(one)[:_ITEMS]
    if isinstance(one, (type, types.ModuleType, torch.Tensor)):
        return []
    return list(getattr(one, "__dict__", {}).values())[:_ITEMS]


def names_of(function: types.FunctionType) -> list[Any]:
    """What a function closes over, its defaults, the globals that it names; nothing of PyTorch's own functions."""
    if function.__module__ and function.__module__.split(".")[0] == "torch":
        return []
    cells = [cell.cell_contents for cell in function.__closure__ or () if is_full(cell)]
    named = {name for code in codes(function.__code__) for name in code.co_names}  # of inner functions, too
    known = [function.__globals__[name] for name in sorted(named) if name in function.__globals__]
    return [*cells, *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values(), *known]


def is_full(cell: types.CellType) -> bool:
    """Has what a function closes over been given a value yet?"""
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """A function's code and that of the functions inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from codes(constant)
