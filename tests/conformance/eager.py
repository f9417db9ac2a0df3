"""The same computation on the device and in eager mode on its physical device. Imports torch only."""

from __future__ import annotations

import copy
import re
from typing import Any, Callable

import torch
from torch.utils._pytree import tree_flatten, tree_map

DEVICE = "lazysched"
EAGER = "cuda" if torch.cuda.is_available() else "cpu"
# What PyTorch calls a tensor's type in its errors: torch.FloatTensor on a CPU, lazyschedFloatType here.
TYPE_NAME = rf"torch\.({DEVICE}\.)?\w+tensor|{DEVICE}\w+type"


def moved(tree: Any, device: str) -> Any:
    """``tree`` with a fresh leaf on ``device`` for every tensor; a module is copied as a whole."""

    def move(leaf: Any) -> Any:
        if isinstance(leaf, torch.nn.Module):
            return copy.deepcopy(leaf).to(device)
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return leaf.detach().to(device, copy=True).requires_grad_(leaf.requires_grad)

    return tree_map(move, tree, is_leaf=lambda leaf: isinstance(leaf, (torch.Tensor, torch.nn.Module)))


def tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, torch.Tensor)]


def on_cpu(tree: Any) -> Any:
    return tree_map(lambda leaf: leaf.detach().to("cpu", copy=True) if isinstance(leaf, torch.Tensor) else leaf, tree)


def all_on(tree: Any, device: str) -> bool:
    return all(tensor.device.type == device for tensor in tensors(tree))


def outcome(function: Callable[[], Any]) -> Any:
    """What ``function`` gives, or the error that it raises, up to the end of its work on the device."""
    try:
        return on_cpu(function())
    except Exception as error:  # noqa: BLE001  whatever it is, the device has to say the same
        return error


def same_error(ours: Any, theirs: Exception) -> bool:
    """Of one type, and with eager mode's words in ours, where the recorded line may follow."""
    words, ours_words = (re.sub(TYPE_NAME, "type", str(error).lower().replace(EAGER, DEVICE)) for error in (theirs, ours))
    return type(ours) is type(theirs) and words.splitlines()[0] in ours_words
