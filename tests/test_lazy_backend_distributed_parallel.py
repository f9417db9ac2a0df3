"""DistributedDataParallel, FSDP2 and DTensor over lazy tensors, on two ranks: as on plain ones."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import lazy_backend
from lazy_backend import core
from tests import ranks
from tests.test_lazy_backend_distributed import Group, mine


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 16),
                                          torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def train(device: str, group: Group, **options: Any) -> tuple[list[float], list[torch.Tensor], int]:
    torch.manual_seed(dist.get_rank())
    model = Net().to(device)
    parallel = torch.nn.parallel.DistributedDataParallel(model, process_group=group, **options)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1, momentum=0.9)
    losses, flushes = [], 0
    for step in range(4):
        torch.manual_seed(10 * step + dist.get_rank())
        x, y = torch.randn(6, 8).to(device), torch.randn(6, 4).to(device)
        before = lazy_backend.stats()["flushes"]
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(parallel(x), y)
        loss.backward()
        optimizer.step()
        flushes = lazy_backend.stats()["flushes"] - before
        losses.append(loss.item())
    return losses, [p.detach().cpu() for p in model.parameters()], flushes


def check_ddp() -> None:
    assert dist.get_backend(dist.new_group(backend="lazysched")) == "lazysched"
    for options in ({}, {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.0005}):
        wanted = train("cpu", dist.new_group(backend="gloo"), **options)
        got = train("lazysched", None, **options)
        assert got[0] == wanted[0] and got[2] == 1  # one recording a step: buckets are nodes of it
        for ours, theirs in zip(got[1], wanted[1]):
            assert torch.equal(ours, theirs)


def check_what_needs_pinned_memory() -> None:
    for options in ({"find_unused_parameters": True}, {"static_graph": True}):
        if core.physical_is_cuda():
            train("lazysched", None, **options)
            continue
        try:
            train("lazysched", None, **options)
        except NotImplementedError as error:
            assert "pinned memory" in str(error) and "Leave both False" in str(error)
        else:
            raise AssertionError("no error")


def check_communication_hook() -> None:
    grads = []
    for device, group in (("cpu", dist.new_group(backend="gloo")), ("lazysched", None)):
        torch.manual_seed(0)
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4).to(device), process_group=group)
        model.register_comm_hook(group, allreduce_hook)
        model(mine(device, 3, 4)).sum().backward()
        grads.append(model.module.weight.grad.cpu())
    assert torch.equal(*grads)


def check_sharded() -> None:
    losses = []
    for device in ("cpu", "lazysched"):
        torch.manual_seed(0)
        mesh = init_device_mesh(device, (2,))
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)).to(device)
        for part in (*model, model):
            fully_shard(part, mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = mine(device, 4, 8) / 30
        losses.append([])
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
    assert losses[0] == losses[1]


def check_dtensor() -> None:
    mesh = init_device_mesh("lazysched", (2,))
    a = distribute_tensor(torch.arange(16.0).view(4, 4).to("lazysched"), mesh, [Shard(0)])
    b = distribute_tensor(torch.full((4, 4), 2.0).to("lazysched"), mesh, [Replicate()])
    whole = (a @ b).full_tensor()
    assert torch.equal(whole.cpu(), torch.arange(16.0).view(4, 4) @ torch.full((4, 4), 2.0))


def check_all() -> None:
    check_ddp()
    check_what_needs_pinned_memory()
    check_communication_hook()
    check_sharded()
    check_dtensor()


def test_ddp_fsdp_and_dtensor_compute_as_on_plain_tensors() -> None:
    ranks.run(check_all, backend="")
