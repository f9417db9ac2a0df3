"""What holds for every test."""

from __future__ import annotations

import torch

# The tensors of the tests are tiny: on a busy machine, threads that wait for each other cost a hundred times more.
torch.set_num_threads(1)
