"""`torch.inference_mode` passes autograd's kernels by: what is recorded and what comes out is as under `torch.no_grad`."""

from __future__ import annotations

from typing import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lazy_backend

DEVICE = "lazysched"


def recurrent(kind: Callable[..., nn.Module]) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        torch.manual_seed(0)
        layer = kind(8, 6, 2, bidirectional=True).to(x.device)
        return layer(x[:, 0])[0]

    return run


def normed(x: Tensor) -> Tensor:
    return nn.GroupNorm(2, 4, device=x.device)(x.to(memory_format=torch.channels_last))


CASES: dict[str, Callable[[Tensor], Tensor]] = {
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True),
    "attention with a mask": lambda x: F.scaled_dot_product_attention(x, x, x, attn_mask=x[0, 0] @ x[0, 0].T > 0),
    "dropout": lambda x: F.dropout(x, 0.5, training=True),
    "group norm": normed,
    "gru": recurrent(nn.GRU),
    "lstm": recurrent(nn.LSTM),
    "rnn": recurrent(nn.RNN),
}
VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "complex": lambda x: torch.view_as_complex(x.unflatten(-1, (4, 2))),
    "other dtype": lambda x: x.view(torch.int32),
    "windows": lambda x: x.unfold(2, 3, 2),
    "transposed": lambda x: x.transpose(0, 1),
    "part": lambda x: x[:, 1:, ::2],
}


def ops(made: Tensor) -> list[str]:
    return [line.split(" = ")[1].split("(")[0] for line in lazy_backend.debug.text([made]).splitlines() if " = aten::" in line]


@pytest.mark.parametrize("name", CASES)
def test_the_same_is_recorded(name: str) -> None:
    x, recorded, made = torch.linspace(-1, 1, 320).reshape(2, 4, 5, 8).to(DEVICE), [], []
    for mode in (torch.no_grad, torch.inference_mode):
        torch.manual_seed(1)
        with mode():
            lazy_backend.mark_step()
            y = CASES[name](x)
            recorded.append(ops(y))
            made.append(y.cpu())
    assert recorded[0] == recorded[1] and recorded[0]
    assert torch.equal(*made)


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("of", [torch.no_grad, torch.inference_mode])
def test_a_view_is_what_its_base_is(name: str, of: Callable[[], torch.no_grad]) -> None:
    with of():
        x = torch.randn(2, 3, 5, 8)
        ours = x.to(DEVICE)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            y, plain = VIEWS[name](ours), VIEWS[name](x)
            assert (y.is_inference(), y._is_view()) == (plain.is_inference(), plain._is_view())
            assert torch.equal(y.cpu(), plain)
