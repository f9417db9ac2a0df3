"""Tensors go to files and come back, on this device or another, also where this package is not installed."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as checkpoint
from safetensors import torch as safetensors
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import lazy_backend  # noqa: F401 - registers the device
from ir_nodes import settings
from lazy_backend import core
from tests.device import DEVICE, arange


def through_a_file(value: Any, **options: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, **options)


LOCATIONS = {
    "none": (None, DEVICE),
    "cpu": ("cpu", "cpu"),
    "device": (DEVICE, DEVICE),
    "index": (torch.device(DEVICE, 0), DEVICE),
    "dict": ({"lazysched:0": "cpu"}, "cpu"),
    "function": (lambda storage, place: storage if place == "lazysched:0" else None, "cpu"),
    "meta": ("meta", "meta"),
}


@pytest.mark.parametrize("name", LOCATIONS)
@pytest.mark.parametrize("weights_only", [True, False])
def test_map_location(name: str, weights_only: bool) -> None:
    where, wanted = LOCATIONS[name]
    x = arange(DEVICE, 2, 3) * 3
    back = through_a_file({"x": x, "view": x.t()}, map_location=where, weights_only=weights_only)
    assert {tensor.device.type for tensor in back.values()} == {wanted}
    if wanted != "meta":
        assert back["view"].tolist() == [[0, 9], [3, 12], [6, 15]] and back["view"].stride() == (1, 3)
        back["x"].fill_(1)
        assert back["view"].tolist() == [[1, 1]] * 3, "they still share a storage"


def test_from_the_cpu_to_the_device() -> None:
    back = through_a_file(torch.arange(3.0), map_location=DEVICE, weights_only=True)
    assert back.device == torch.device(DEVICE, 0) and back.tolist() == [0, 1, 2]
    with pytest.raises(RuntimeError, match="device_count"):
        through_a_file(back, map_location="lazysched:99")


@pytest.mark.parametrize("where", ["cpu", DEVICE, None])
def test_mapped_files(tmp_path: Path, where: str | None) -> None:
    x = arange(DEVICE, 4, 4) + 1
    torch.save({"x": x, "row": x[1]}, tmp_path / "x.pt")
    back = torch.load(tmp_path / "x.pt", mmap=True, map_location=where, weights_only=True)
    assert back["x"].device.type == (where or DEVICE)
    assert back["row"].tolist() == [5, 6, 7, 8] and (back["x"] * 2).sum().item() == 272
    assert back["x"].untyped_storage().data_ptr() == back["row"].untyped_storage().data_ptr()


VALUES = {
    "parameter": lambda d: nn.Parameter(arange(d, 3)),
    "bfloat16": lambda d: torch.ones(2, dtype=torch.bfloat16, device=d),
    "conj": lambda d: (torch.ones(2, dtype=torch.complex64, device=d) * 1j).conj(),
    "bool": lambda d: torch.tensor([True, False], device=d),
    "0-d": lambda d: torch.tensor(3, device=d),
    "empty": lambda d: torch.empty(0, 3, device=d),
    "a slice": lambda d: arange(d, 5, 5)[1:3, 2:],
    "recorded, not run": lambda d: arange(d, 4).exp().sort(descending=True).values,
}
WAYS = {
    "save": through_a_file,
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", VALUES)
def test_every_way_keeps_value_layout_and_kind(name: str, way: str) -> None:
    x, truth = VALUES[name](DEVICE), VALUES[name]("cpu")
    back, wanted = WAYS[way](x), WAYS[way](truth)
    assert type(back) is type(x) and back.dtype is x.dtype and back.device == x.device and back.stride() == x.stride()
    assert back.requires_grad == wanted.requires_grad and back.is_conj() == wanted.is_conj()
    torch.testing.assert_close(back.detach().cpu(), wanted.detach().resolve_conj())
    shared = back.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    assert shared == (way == "copy")


def test_storages() -> None:
    storage = arange(DEVICE, 3).untyped_storage()
    assert torch.serialization.location_tag(storage) == "lazysched:0"
    assert through_a_file(storage, weights_only=False).device == torch.device(DEVICE, 0)
    moved = torch.serialization.default_restore_location(torch.ones(2).untyped_storage(), "lazysched:0")
    assert moved.device == torch.device(DEVICE, 0) and moved.nbytes() == 8
    assert copy.deepcopy(storage).cpu().tolist() == storage.cpu().tolist()


def test_models_and_optimizers() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 3, device=DEVICE)).square().sum().backward()
    optimizer.step()
    for where in ("cpu", DEVICE):
        state = through_a_file({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, map_location=where)
        twin = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).to(where)
        other = torch.optim.AdamW(twin.parameters())
        twin.load_state_dict(state["model"])
        other.load_state_dict(state["optimizer"])
        assert {t.device.type for t in twin.state_dict().values()} == {where}
        for mine, theirs in zip(optimizer.state.values(), other.state.values()):
            assert theirs["exp_avg"].device.type == where and torch.equal(mine["exp_avg"].cpu(), theirs["exp_avg"].cpu())
    whole = through_a_file(model, weights_only=False)
    assert whole[0].weight.device.type == DEVICE and whole[0].weight is not model[0].weight


@pytest.mark.parametrize("where", [None, "cpu"])
def test_files_of_a_backend_without_storages(where: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Written as a CPU tensor and the device's name; such files exist."""
    monkeypatch.setattr(torch._C, "_has_storage", lambda tensor: False)
    x = arange(DEVICE, 2, 3)
    assert x._reduce_ex_internal(2)[0] is torch._utils._rebuild_device_tensor_from_cpu_tensor
    back = through_a_file({"x": x}, weights_only=True, map_location=where)["x"]
    assert back.device.type == (where or DEVICE) and back.tolist() == x.tolist()


@pytest.mark.parametrize("later", [False, True], ids=["save", "async_save"])
def test_distributed_checkpoint(tmp_path: Path, later: bool) -> None:
    model = nn.Linear(3, 3).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    model(torch.ones(2, 3, device=DEVICE)).sum().backward()
    optimizer.step()
    states = get_state_dict(model, optimizer)
    wanted = model.weight.tolist()
    saved = {"model": states[0], "optimizer": states[1], "step": 3}
    if later:
        checkpoint.async_save(saved, checkpoint_id=tmp_path).result()
    else:
        checkpoint.save(saved, checkpoint_id=tmp_path)
    optimizer.step()
    assert model.weight.tolist() != wanted
    loaded = {"model": states[0], "optimizer": states[1], "step": 0}
    checkpoint.load(loaded, checkpoint_id=tmp_path)
    set_state_dict(model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
    assert model.weight.tolist() == wanted and model.weight.device.type == DEVICE and loaded["step"] == 3


def test_checkpoints_mix_devices(tmp_path: Path) -> None:
    state = {"mine": arange(DEVICE, 3), "host": torch.ones(2), "physical": torch.ones(2, device=core.physical_device(0))}
    checkpoint.save(state, checkpoint_id=tmp_path)
    back = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    checkpoint.load(back, checkpoint_id=tmp_path)
    assert {name: tensor.device for name, tensor in back.items()} == {name: tensor.device for name, tensor in state.items()}
    assert back["mine"].tolist() == [0, 1, 2] and back["physical"].tolist() == [1, 1] == back["host"].tolist()


def test_safetensors(tmp_path: Path) -> None:
    x = arange(DEVICE, 2, 3)
    safetensors.save_file({"x": x, "half": x.bfloat16()}, tmp_path / "x.safetensors")
    back = safetensors.load_file(tmp_path / "x.safetensors")
    assert back["x"].tolist() == x.tolist() and back["half"].to(DEVICE).dtype is torch.bfloat16
    assert safetensors.load(safetensors.save({"x": x}))["x"].tolist() == x.tolist()
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).to(DEVICE)
    model[1].weight = model[0].weight
    safetensors.save_model(model, str(tmp_path / "model.safetensors"))
    wanted = model[0].weight.tolist()
    with torch.no_grad():
        model[0].weight.zero_()
    safetensors.load_model(model, str(tmp_path / "model.safetensors"))
    assert model[1].weight is model[0].weight and model[1].weight.tolist() == wanted


def test_safetensors_straight_to_the_device(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    model = nn.Linear(3, 2)
    safetensors.save_model(model, str(file))
    for device in (DEVICE, torch.device(DEVICE, 0)):
        back = safetensors.load_file(file, device=device)
        assert {tensor.device for tensor in back.values()} == {torch.device(DEVICE, 0)}
        assert torch.equal(back["weight"].cpu(), model.weight)
    assert safetensors.load_file(file)["weight"].device.type == "cpu"
    ours = nn.Linear(3, 2).to(DEVICE)
    safetensors.load_model(ours, str(file), device=DEVICE)
    assert torch.equal(ours.weight.cpu(), model.weight)


READER = """
import sys, torch
assert not hasattr(torch, "lazysched"), "the package must be out of sight"
for mmap in (False, True):
    state = torch.load(sys.argv[1], map_location="cpu", weights_only=True, mmap=mmap)
    assert state["weight"].device.type == "cpu" and type(state["weight"]) is torch.nn.Parameter
    assert state["view"].tolist() == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]] and state["half"].dtype is torch.bfloat16
    assert state["model"]["0.weight"].shape == (2, 2) and len(state["optimizer"]["state"]) == 2
"""


def test_a_file_loads_where_this_package_is_not_installed(tmp_path: Path) -> None:
    x = arange(DEVICE, 2, 3)
    model = nn.Sequential(nn.Linear(2, 2)).to(DEVICE)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2, device=DEVICE)).sum().backward()
    optimizer.step()
    content = {"weight": nn.Parameter(x), "view": x.t(), "half": x.bfloat16(), "model": model.state_dict(),
               "optimizer": optimizer.state_dict()}  # fmt: skip
    torch.save(content, tmp_path / "x.pt")
    environment = settings.child_environment() | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "PYTHONPATH": ""}
    done = subprocess.run([sys.executable, "-c", READER, str(tmp_path / "x.pt")], env=environment, cwd=tmp_path,
                          capture_output=True, text=True, timeout=300, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
