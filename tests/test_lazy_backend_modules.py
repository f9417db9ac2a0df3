"""Modules move to the device and back without losing identity, ties, gradients or optimizers."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import lazy_backend  # noqa: F401 - registers the device
from tests.device import CLOSE, DEVICE


class Tied(nn.Module):
    """An embedding whose weight is also the output projection."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, 8)
        self.hidden = nn.Linear(8, 8)
        self.head = nn.Linear(8, 13, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.hidden(self.embedding(tokens))))


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, device: str, steps: int = 6) -> list[float]:
    tokens = torch.arange(12).reshape(3, 4).to(device)
    losses = []
    for _ in range(steps):
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), (tokens.flatten() + 1) % 13)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("optimizer_first", [False, True], ids=["optimizer after .to", "optimizer before .to"])
def test_tied_embeddings_train_as_on_the_cpu(optimizer_first: bool) -> None:
    torch.manual_seed(0)
    truth = Tied()
    model = copy.deepcopy(truth)
    wanted = _train(truth, torch.optim.Adam(truth.parameters(), lr=0.05), "cpu")
    if optimizer_first:
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        model.to(DEVICE)
    else:
        model.to(DEVICE)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    assert model.head.weight is model.embedding.weight and len(list(model.parameters())) == 3
    got = _train(model, optimizer, DEVICE)
    assert got == pytest.approx(wanted, rel=CLOSE)
    assert wanted[-1] < 0.8 * wanted[0], "it learns"
    torch.testing.assert_close(model.head.weight.detach().cpu(), truth.head.weight.detach(), rtol=CLOSE, atol=CLOSE)


def test_parameters_keep_their_identity_and_their_weak_references() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    before = list(model.parameters())
    references = [weakref.ref(parameter) for parameter in before]
    model.to(DEVICE)
    assert all(old is new for old, new in zip(before, model.parameters()))
    del before
    gc.collect()
    assert [reference() for reference in references] == list(model.parameters())
    assert {tensor.device.type for tensor in model.state_dict().values()} == {DEVICE}


def test_a_module_goes_there_and_back_with_its_gradients_and_optimizer() -> None:
    torch.manual_seed(1)
    model = Tied()
    truth = copy.deepcopy(model)
    optimizer, truth_optimizer = (torch.optim.SGD(m.parameters(), lr=0.3) for m in (model, truth))
    wanted = _train(truth, truth_optimizer, "cpu", steps=6)
    got = _train(model, optimizer, "cpu", steps=2)
    model.to(DEVICE)
    assert model.hidden.weight.grad.device.type == DEVICE
    got += _train(model, optimizer, DEVICE, steps=2)
    model.to("cpu")
    assert model.head.weight is model.embedding.weight and model.head.weight.device.type == "cpu"
    got += _train(model, optimizer, "cpu", steps=2)
    assert got == pytest.approx(wanted, rel=CLOSE)


def test_a_second_to_changes_nothing() -> None:
    model = Tied().to(DEVICE)
    ids = [id(parameter) for parameter in model.parameters()]
    data = [parameter.detach().clone() for parameter in model.parameters()]
    model.to(DEVICE)
    assert [id(parameter) for parameter in model.parameters()] == ids
    assert all(torch.equal(a, b.detach()) for a, b in zip(data, model.parameters()))


def test_moving_modules_between_other_devices_and_dtypes_is_left_alone() -> None:
    model = Tied()
    weight = model.head.weight
    model.to(torch.float64)
    assert model.head.weight is weight and weight.dtype is torch.float64
    model.to("meta")
    assert model.head.weight.device.type == "meta"


def test_move_and_cast_at_once() -> None:
    torch.manual_seed(2)
    model = Tied()
    wanted = model.embedding.weight.detach().to(torch.bfloat16)
    model.to(DEVICE, torch.bfloat16)
    assert model.embedding.weight is model.head.weight and model.head.weight.dtype is torch.bfloat16
    assert torch.equal(model.head.weight.detach().cpu(), wanted)


class Holder(nn.Module):
    """One weight in many hands: modules, lists, dicts, plain attributes, a buffer that is a view of it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4, bias=False)
        self.second = nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight
        self.listed = nn.ParameterList([self.first.weight, nn.Parameter(torch.ones(4))])
        self.named = nn.ParameterDict({"w": self.first.weight})
        self.modules_too = nn.ModuleList([self.first, self.second])
        self.outside = [self.first.weight]
        self.register_parameter("again", self.first.weight)
        self.register_buffer("as_buffer", self.first.weight)
        self.register_buffer("seen", torch.zeros(2))
        self.register_buffer("seen_again", self.seen)

    def held(self) -> list[nn.Parameter]:
        return [self.first.weight, self.second.weight, self.listed[0], self.named["w"], self.modules_too[1].weight,
                self.outside[0], self.again, self.as_buffer]  # fmt: skip


@pytest.mark.parametrize("moves", [[DEVICE], [DEVICE, "cpu"], [DEVICE, "cpu", DEVICE, DEVICE]], ids="-".join)
def test_a_weight_in_many_hands_stays_one(moves: list[str]) -> None:
    model = Holder()
    weight, wanted = model.first.weight, model.first.weight.detach().clone()
    weight.grad = torch.ones_like(weight)
    for where in moves:
        model.to(where)
        assert all(held is weight for held in model.held())
        assert weight.device.type == where == weight.grad.device.type == model.seen.device.type
        assert len(list(model.parameters())) == 2 and torch.equal(weight.detach().cpu(), wanted)
    with torch.no_grad():
        model.again.zero_()
    assert not model.second(torch.ones(1, 4, device=moves[-1])).any()
    twin = copy.deepcopy(model)
    assert len({id(held) for held in twin.held()}) == 1 and twin.again is not weight
    twin.to("cpu").to(DEVICE)
    assert len({id(held) for held in twin.held()}) == 1


def test_a_tie_over_the_border_of_two_modules() -> None:
    """Each module is moved by itself; the weight moves with the first and is there already for the second."""
    embedding, head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
    head.weight = embedding.weight
    embedding.to(DEVICE)
    assert head.weight is embedding.weight and head.weight.device.type == DEVICE
    head.to(DEVICE)
    assert head.weight is embedding.weight
    head.to("cpu")
    assert head.weight is embedding.weight and embedding.weight.device.type == "cpu"


def test_parametrized_and_normed_weights() -> None:
    class Symmetric(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.triu() + x.triu(1).transpose(-1, -2)

    torch.manual_seed(0)
    makers = {
        "parametrize": lambda m: nn.utils.parametrize.register_parametrization(m, "weight", Symmetric()) and m,
        "weight_norm": nn.utils.parametrizations.weight_norm,
        "spectral_norm": nn.utils.parametrizations.spectral_norm,
        "orthogonal": nn.utils.parametrizations.orthogonal,
    }
    for name, make in makers.items():
        model = make(nn.Linear(4, 4)).eval()
        tied = nn.Linear(4, 4)
        tied.bias = model.bias
        both = nn.ModuleList([model, tied])
        before = {key: id(value) for key, value in both.named_parameters()}
        x = torch.randn(2, 4)
        wanted = model(x).detach()
        both.to(DEVICE)
        assert {key: id(value) for key, value in both.named_parameters()} == before and tied.bias is model.bias, name
        out = model(x.to(DEVICE))
        torch.testing.assert_close(out.detach().cpu(), wanted, rtol=CLOSE, atol=CLOSE)
        out.sum().backward()
        assert all(p.grad is not None and p.grad.device.type == DEVICE for p in model.parameters()), name
        both.to("cpu")
        assert {key: id(value) for key, value in both.named_parameters()} == before
        torch.testing.assert_close(model(x).detach(), wanted, rtol=CLOSE, atol=CLOSE)


def test_ties_below_parametrizations_and_pruning() -> None:
    one, two = nn.Linear(3, 3), nn.Linear(3, 3)
    two.weight = one.weight
    for module in (one, two):
        nn.utils.parametrize.register_parametrization(module, "weight", nn.Identity())
    pruned = prune.l1_unstructured(nn.Linear(3, 3), "weight", amount=0.5)
    pruned.register_parameter("bias", one.bias)
    model = nn.ModuleList([one, two, pruned])
    original = one.parametrizations.weight.original
    for where in (DEVICE, "cpu", DEVICE):
        model.to(where)
        assert one.parametrizations.weight.original is two.parametrizations.weight.original is original
        assert pruned.bias is one.bias and pruned.weight_mask.device.type == where == original.device.type
    assert torch.equal(one.weight, two.weight) and pruned(torch.ones(1, 3, device=DEVICE)).device.type == DEVICE


def test_data_takes_contents_over_the_border() -> None:
    """`p.data = p.data.to(device)`, as programs that move parameters themselves write it."""
    p = nn.Parameter(torch.arange(3.0))
    optimizer = torch.optim.SGD([p], lr=1.0)
    (p * 2).sum().backward()  # its gradient accumulator now knows the CPU
    p.grad = None
    p.data = p.data.to(DEVICE)
    assert p.device.type == DEVICE and p.is_leaf and p.requires_grad and optimizer.param_groups[0]["params"][0] is p
    (p * 2).sum().backward()
    optimizer.step()
    assert p.tolist() == [-2, -1, 0]
    p.data, p.grad.data = p.data.cpu(), p.grad.data.cpu()
    assert p.device.type == "cpu" == p.grad.device.type and p.tolist() == [-2, -1, 0] and p.grad.tolist() == [2, 2, 2]
    plain = torch.ones(2, 2)
    plain.data = torch.zeros(3, device=DEVICE)
    assert plain.shape == (3,) and plain.device.type == DEVICE and torch._has_compatible_shallow_copy_type(plain, torch.ones(1))
    with pytest.raises(RuntimeError, match="incompatible tensor type"):
        plain.data = torch.ones(2, device="meta")
    with pytest.raises(TypeError, match="has to be a tensor"):
        plain.data = 3
    assert torch.ones(2, device=DEVICE, requires_grad=True).data.requires_grad is False


def test_hooks_and_modules_without_shapes_survive_a_move() -> None:
    seen = []
    model = nn.Linear(2, 2)
    model.weight.register_hook(lambda grad: seen.append(grad.device.type))
    model.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.device.type))
    model.to(DEVICE)(torch.ones(1, 2, device=DEVICE)).sum().backward()
    assert seen == [DEVICE, DEVICE]
    lazy = nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d()).to(DEVICE)
    assert lazy(torch.ones(2, 5, device=DEVICE)).device.type == DEVICE and lazy[0].weight.shape == (3, 5)

    class Named(nn.Parameter):
        """A class of the user's."""

    holder = nn.Module()
    holder.one = holder.two = named = Named(torch.ones(2))
    assert holder.to(DEVICE).one is holder.two is named and type(named) is Named and named.device.type == DEVICE
    assert nn.Linear(2, 2, device="meta").to_empty(device=DEVICE).weight.device.type == DEVICE


@pytest.mark.parametrize("swap", [False, True])
def test_torchs_own_switches_for_moving(swap: bool) -> None:
    torch.__future__.set_swap_module_params_on_conversion(swap)
    torch.__future__.set_overwrite_module_params_on_conversion(not swap)
    try:
        model = nn.Linear(2, 2)
        weight, wanted = model.weight, model.weight.tolist()
        model.to(DEVICE)
        assert (model.weight is weight) == swap and model.weight.tolist() == wanted and model.weight.device.type == DEVICE
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
        torch.__future__.set_overwrite_module_params_on_conversion(False)


def test_state_dicts_and_copies() -> None:
    torch.manual_seed(3)
    model = Tied().to(DEVICE)
    twin = copy.deepcopy(model)
    assert twin.head.weight is twin.embedding.weight and twin.head.weight is not model.head.weight
    with torch.no_grad():
        model.head.weight.add_(1)
    assert not torch.equal(twin.head.weight, model.head.weight)
    fresh = Tied()
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(fresh.head.weight, model.head.weight.cpu())
