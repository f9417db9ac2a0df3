"""A program that compiles nothing never imports Dynamo; one that does finds it as it always is."""

from __future__ import annotations

import json

import children
import pytest

TRAINED = """
import sys
import torch
from torch import nn

layers = nn.Sequential(nn.TransformerEncoderLayer(16, 2, 16, batch_first=True), nn.Linear(16, 4), nn.Hardswish()).to("lazysched")
x = torch.randn(2, 3, 16).to("lazysched")
loss = nn.functional.cross_entropy(layers(x).flatten(0, 1), torch.zeros(6, dtype=torch.long, device="lazysched"))
loss.backward()
torch.mul(x, 2.0, out=torch.empty_like(x))
x.clamp_(-1, 1).masked_fill_(x > 0, 0.5).pow(2).std(-1).cumsum(0)
assert loss.item() > 0
assert "torch._dynamo" not in sys.modules
"""

COMPILED = """
import json
import torch


def program(x):
    y = torch.add(x, 1.5).sigmoid()
    torch._dynamo.graph_break()
    return torch.mul(y, y, out=torch.empty_like(y)).sum() + torch.special.entr(x).mean()


import torch._dynamo
compiled = torch.compile(program, backend="eager")
for device in ("meta", "cpu", "meta"):
    x = torch.rand(3, 4, device=device)
    made = compiled(x)
    if device == "cpu":
        torch.testing.assert_close(made, program(x))
print(json.dumps({name: dict(found) for name, found in torch._dynamo.utils.counters.items() if name in ("frames", "stats")}))
"""


@pytest.mark.parametrize("engine", ["aten", "triton"])
def test_ops_and_gradients_import_no_dynamo(engine: str) -> None:
    done = children.run(TRAINED, engine=engine)
    assert done.returncode == 0, done.stderr


def test_dynamo_compiles_what_it_compiles_without_us() -> None:
    """Also where the device was used before it came."""
    used = "import torch\ntorch.ones(2, device='lazysched').add(1).sum().item()\n"
    told = [children.run(start + COMPILED) for start in ("", used)]
    assert [one.returncode for one in told] == [0, 0], told
    plain, after = (json.loads(one.stdout) for one in told)
    assert plain == after and plain["frames"]["ok"] >= 2
