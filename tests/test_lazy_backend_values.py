"""Tensors of the device behave as values over shared memory, as in eager PyTorch: the same program, on the CPU and on
lazysched, must leave the same numbers in every tensor that is held."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any, Callable

import pytest
import torch
from torch import nn

import lazy_backend

Program = Callable[[str, Callable[[], None]], list[torch.Tensor]]
DEVICE = "lazysched"


def arange(device: str, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """0, 1, 2, ... in ``shape``."""
    count = torch.Size(shape).numel()
    return torch.arange(count, dtype=dtype).reshape(shape).to(device, copy=True)


def same(got: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    assert len(got) == len(wanted)
    for index, (mine, theirs) in enumerate(zip(got, wanted)):
        assert mine.device.type == DEVICE
        assert mine.stride() == theirs.stride() and mine.storage_offset() == theirs.storage_offset(), f"result {index}"
        torch.testing.assert_close(mine.cpu(), theirs, rtol=0, atol=0, equal_nan=True, msg=lambda m, i=index: f"result {i}: {m}")


def in_place(device: str, pause: Callable[[], None]) -> list[torch.Tensor]:
    x = arange(device, 3, 4)
    y = x + 1
    pause()
    x.mul_(2).add_(y)
    x += 1
    pause()
    x.clamp_(min=3)
    x[0] = 7
    return [x, y]


def out_arguments(device: str, pause: Callable[[], None]) -> list[torch.Tensor]:
    a, b = arange(device, 4), arange(device, 4) * 2
    out = torch.empty(4, device=device)
    torch.add(a, b, out=out)
    pause()
    torch.mul(out, b, out=out)  # the result is also an input
    wide = torch.zeros(2, 4, device=device)
    torch.sub(a, b, out=wide[1])
    pause()
    values, places = torch.empty(2, device=device), torch.empty(2, dtype=torch.int64, device=device)
    torch.max(wide, dim=1, out=(values, places))
    grown = torch.empty(0, device=device)
    torch.cat([a, b], out=grown)
    return [a, b, out, wide, values, places, grown]


def writes_through_views(device: str, pause: Callable[[], None]) -> list[torch.Tensor]:
    x = arange(device, 4, 6)
    column, row, corner = x[:, 1], x[2], x.t()[3:, 1:3]
    column.fill_(-1)
    pause()
    row.add_(100)
    corner.mul_(0.5)
    diagonal = x.diagonal()
    diagonal.zero_()
    pause()
    x.view(-1)[::5].sub_(3)
    x.unfold(0, 2, 2)[0].add_(1000)
    return [x, column, row, corner, diagonal]


def view_before_a_barrier_written_after(device: str, pause: Callable[[], None]) -> list[torch.Tensor]:
    x = arange(device, 2, 3)
    view = x.t()
    pause()
    view.add_(10)
    pause()
    x.mul_(2)
    pause()
    view[0] = 5
    return [x, view]


def base_written_view_read(device: str, pause: Callable[[], None]) -> list[torch.Tensor]:
    x = arange(device, 6)
    view = x[1:4]
    before = view + 0
    x.add_(1)
    after = view * 1
    pause()
    x.zero_()
    return [before, after, view, x]


def detach_and_data(device: str, pause: Callable[[], None]) -> list[torch.Tensor]:
    x = arange(device, 4).requires_grad_()
    y = x.detach()
    y.add_(1)
    pause()
    x.data.mul_(3)
    z = x.data
    z[1] = -1
    other = arange(device, 2, 2)
    x2 = arange(device, 4)
    alias = x2.detach()
    x2.data = other
    x2.add_(1)
    pause()
    return [x.detach(), y, z, other, alias, x2]


def set_to_another_storage(device: str, pause: Callable[[], None]) -> list[torch.Tensor]:
    a, b = arange(device, 6), torch.zeros(3, device=device)
    kept = b.detach()
    b.set_(a)
    b.mul_(2)
    pause()
    c = torch.empty(0, device=device)
    c.set_(a.untyped_storage(), 1, (2, 2), (2, 1))
    c.add_(100)
    return [a, b, c, kept]


def resize(device: str, pause: Callable[[], None]) -> list[torch.Tensor]:
    x = arange(device, 2, 3)
    x.add_(1)
    x.resize_(3, 4)
    x[2].fill_(9)
    x.view(-1)[6:].fill_(4)
    pause()
    y = arange(device, 8)
    y.mul_(3)
    y.resize_(2, 2)
    pause()
    z = arange(device, 5)
    z.resize_(2).fill_(1)
    z.resize_(5)
    return [x, y, z]


def dtype_views(device: str, pause: Callable[[], None]) -> list[torch.Tensor]:
    x = arange(device, 4) - 2
    bits = x.view(torch.int32)
    bits.bitwise_and_(0x7FFFFFFF)
    pause()
    halves = x.view(torch.int16)
    halves[1::2].bitwise_xor_(-32768)
    z = torch.view_as_complex(arange(device, 3, 2))
    parts = torch.view_as_real(z)
    parts[:, 1].neg_()
    return [x, bits, halves, parts, torch.view_as_real(z * z)]


def complex_views(device: str, pause: Callable[[], None]) -> list[torch.Tensor]:
    z = torch.view_as_complex(arange(device, 3, 2)) * (1 + 2j)
    pause()
    conj = z.conj()
    return [torch.view_as_real(conj * z), conj.imag + 1, z.real.clone(), z.imag.clone(), torch.view_as_real(conj.resolve_conj())]


def copies_between_layouts(device: str, pause: Callable[[], None]) -> list[torch.Tensor]:
    x = arange(device, 2, 3, 4, 4)
    last = x.to(memory_format=torch.channels_last)
    pause()
    y = torch.empty_like(last)
    y.copy_(x)
    t = torch.zeros(4, 3, device=device, dtype=torch.float64)
    t.copy_(arange(device, 3, 4).t())
    t[1:3].copy_(torch.tensor([5.0, 6.0, 7.0]))
    return [last, y, t, x.transpose(1, 3).contiguous(), x.flip(0)]


def indexing(device: str, pause: Callable[[], None]) -> list[torch.Tensor]:
    x = arange(device, 5, 3)
    picks = torch.tensor([4, 0, 0], device=device)
    taken = x[picks]
    pause()
    x[picks, 1] = 50
    x.index_add_(0, picks, torch.ones(3, 3, device=device))
    x[x > 40] = -1
    x.masked_fill_(x == 3, 0.5)
    pause()
    x.scatter_(1, torch.tensor([[2], [1]], device=device), 9.0)
    return [x, taken, x[torch.tensor([1, 2])], x[x < 0]]


def generations(device: str, pause: Callable[[], None]) -> list[torch.Tensor]:
    """A long chain over one buffer, each old value also read."""
    x, kept = arange(device, 4), []
    for step in range(12):
        kept.append(x * step)
        x[step % 4 :].add_(step)
        if step % 5 == 4:
            pause()
    return [x, *kept]


PROGRAMS: tuple[Program, ...] = (
    in_place, out_arguments, writes_through_views, view_before_a_barrier_written_after, base_written_view_read, detach_and_data,
    set_to_another_storage, resize, dtype_views, complex_views, copies_between_layouts, indexing, generations,
)  # fmt: skip


@pytest.mark.parametrize("barriers", [False, True], ids=["one recording", "with barriers"])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_a_program_leaves_what_eager_leaves(program: Program, barriers: bool) -> None:
    wanted = program("cpu", lambda: None)
    got = program(DEVICE, lazy_backend.mark_step if barriers else lambda: None)
    same(got, wanted)


def test_shared_storages_stay_shared() -> None:
    x = arange(DEVICE, 2, 3)
    views = [x.t(), x.view(6), x.detach(), x[1], x.data]
    lazy_backend.mark_step()
    assert {view.untyped_storage().data_ptr() for view in views} == {x.untyped_storage().data_ptr()}
    views[1][4] = 40.0
    assert [float(views[0][1, 1]), float(views[2][1, 1]), float(views[3][1]), float(views[4][1, 1])] == [40.0] * 4


def test_storage_sizes_and_properties() -> None:
    x = torch.empty(3, 5, dtype=torch.float16, device=DEVICE)
    assert x.untyped_storage().nbytes() == 30 and x.device == torch.device(DEVICE, 0)
    assert x.is_contiguous() and not x.t().is_contiguous() and x.t()._is_view() and x.t()._base is x
    assert type(x) is torch.Tensor and x.numel() == 15 and not x.is_cpu


# ---- autograd ------------------------------------------------------------------------------------------------------------


def _saved_then_changed(device: str) -> None:
    x = arange(device, 4).requires_grad_()
    y = x.exp()
    y.add_(1)
    y.sum().backward()


def _saved_through_a_view(device: str) -> None:
    x = arange(device, 4).requires_grad_()
    y = x.sigmoid()
    y[1:].zero_()
    y.sum().backward()


def _leaf_in_place(device: str) -> None:
    arange(device, 4).requires_grad_().add_(1)


def _view_of_leaf_in_place(device: str) -> None:
    arange(device, 4).requires_grad_()[1:].mul_(2)


def _twice(device: str) -> None:
    loss = arange(device, 4).requires_grad_().exp().sum()
    loss.backward()
    loss.backward()


def _several_views_in_place(device: str) -> None:
    x = arange(device, 4).requires_grad_()
    first, _ = (x * 1).unbind(0)[:2]
    first.add_(1)


@pytest.mark.parametrize(
    "mistake",
    [_saved_then_changed, _saved_through_a_view, _leaf_in_place, _view_of_leaf_in_place, _twice, _several_views_in_place],
    ids=lambda mistake: mistake.__name__,
)
def test_autograd_refuses_what_eager_refuses_in_the_same_words(mistake: Callable[[str], None]) -> None:
    with pytest.raises(Exception) as wanted:
        mistake("cpu")
    with pytest.raises(type(wanted.value)) as got:
        mistake(DEVICE)
    first_words = str(wanted.value).split(":")[0][:40]
    assert str(got.value).startswith(first_words)


def test_gradients_through_views_and_in_place_writes() -> None:
    def program(device: str, pause: Callable[[], None]) -> list[torch.Tensor]:
        x = (arange(device, 3, 4) / 10).requires_grad_()
        y = x * 2
        y[1:].mul_(x[:2])
        y.t()[0].add_(1)
        pause()
        z = torch.cat([y.tanh(), y.detach() * x], 1).reshape(-1)[::3]
        z.pow(2).sum().backward()
        pause()
        (second,) = torch.autograd.grad((x.sin() ** 3).sum(), x, create_graph=True)
        second.sum().backward()
        return [x.detach(), x.grad, z.detach()]

    same(program(DEVICE, lazy_backend.mark_step), program("cpu", lambda: None))
    same(program(DEVICE, lambda: None), program("cpu", lambda: None))


def test_version_counters_count_as_eager_does() -> None:
    versions = []
    for device in ("cpu", DEVICE):
        x = arange(device, 4)
        view = x[1:]
        view.add_(1)
        x.mul_(2)
        x.detach().add_(1)
        x.data.add_(1)
        versions.append((x._version, view._version))
    assert versions[0] == versions[1]


# ---- modules -------------------------------------------------------------------------------------------------------------


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
    assert got == pytest.approx(wanted, rel=1e-6)
    assert wanted[-1] < 0.8 * wanted[0], "it learns"
    torch.testing.assert_close(model.head.weight.detach().cpu(), truth.head.weight.detach(), rtol=1e-6, atol=1e-6)


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
    assert got == pytest.approx(wanted, rel=1e-6)


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


def test_save_and_load(tmp_path: Any) -> None:
    x = arange(DEVICE, 2, 3) * 3
    torch.save({"x": x, "view": x.t()}, tmp_path / "x.pt")
    back = torch.load(tmp_path / "x.pt")
    assert back["x"].device.type == DEVICE and back["x"].tolist() == [[0, 3, 6], [9, 12, 15]]
    there = torch.load(tmp_path / "x.pt", map_location="cpu")
    assert there["view"].device.type == "cpu" and there["view"].tolist() == [[0, 9], [3, 12], [6, 15]]
