"""Whether the program leaves it to us in which order numbers are added up. Imports torch only."""

from __future__ import annotations

import torch


def may_reorder() -> bool:
    """May a sum be added up in another order than on another rank, or in another run of the program?"""
    ranks = torch.distributed.is_available() and torch.distributed.is_initialized()
    return not ranks and not torch.are_deterministic_algorithms_enabled()
