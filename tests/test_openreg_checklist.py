"""What PyTorch's reference device out of the tree (torch_openreg) is tested for, on this device, in our own words.

Its tests of devices, streams, events, memory, random numbers, serialization and interchange have files of their own here
(`test_lazy_backend_*`); these are the rest: autograd, autocast, operators, recurrent nets, attention, storages.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any, Callable, Iterator

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import lazy_backend  # noqa: F401 - registers the device
from lazy_backend import core
from tests.cudnn_ops import flag
from tests.device import CLOSE, DEVICE, ON_GPU, arange


def equal(got: torch.Tensor, wanted: torch.Tensor) -> None:
    assert got.device.type == DEVICE
    torch.testing.assert_close(got.detach().cpu(), wanted.detach(), rtol=CLOSE, atol=CLOSE)


def test_autograd_has_a_thread_for_the_device() -> None:
    torch.ones(2, requires_grad=True, device=DEVICE).sum().backward()
    names = {(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()}
    assert names >= {f"pt_autograd_{index}" for index in range(torch.lazysched.device_count())}


def test_autocast_dtypes() -> None:
    assert torch.get_autocast_dtype(DEVICE) is torch.half and torch.amp.is_autocast_available(DEVICE)
    x, y = torch.randn(2, 3, device=DEVICE), torch.randn(3, 3, device=DEVICE)
    for dtype in (torch.float16, torch.bfloat16):
        with torch.amp.autocast(DEVICE, dtype=dtype):
            assert torch.mm(x, y).dtype is dtype and torch.mm(x, y).exp().dtype is torch.float32
    with torch.amp.autocast(DEVICE), torch.amp.autocast(DEVICE, enabled=False):
        assert torch.mm(x, y).dtype is torch.float32
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with torch.autocast(DEVICE, dtype=torch.float32):
            assert torch.mm(x, y).dtype is torch.float32
    assert "lazysched" in str(said[0].message) and "bfloat16" in str(said[0].message)


FACTORIES: dict[str, Callable[[str], torch.Tensor]] = {
    "zeros": lambda d: torch.zeros(3, device=d),
    "ones_like": lambda d: torch.ones_like(torch.empty(3, 4, device=d)),
    "full": lambda d: torch.full((3, 4), 5.0, device=d),
    "of nothing": lambda d: torch.tensor((), device=d),
    "of tensors": lambda d: torch.tensor([torch.ones((), device=d), 2.0], device=d),
    "triu_indices": lambda d: torch.triu_indices(3, 3, device=d),
    "tril_indices": lambda d: torch.tril_indices(3, 3, device=d),
    "eye": lambda d: torch.eye(3, 2, device=d),
    "arange": lambda d: torch.arange(1, 9, 2, device=d),
    "linspace": lambda d: torch.linspace(0, 1, 5, device=d),
    "complex": lambda d: torch.complex(torch.ones(2, device=d), torch.zeros(2, device=d)),
    "hann_window": lambda d: torch.hann_window(6, device=d),
}


@pytest.mark.parametrize("name", FACTORIES)
def test_factories(name: str) -> None:
    equal(FACTORIES[name](DEVICE), FACTORIES[name]("cpu"))


def test_layouts_of_new_tensors() -> None:
    x = torch.empty(2, 3, 4, 4, device=DEVICE, memory_format=torch.channels_last)
    assert x.is_contiguous(memory_format=torch.channels_last) and x.clone().stride() == x.stride()
    assert torch.empty_strided((3, 4), (1, 3), device=DEVICE).stride() == (1, 3)
    with torch._subclasses.fake_tensor.FakeTensorMode():
        fake = torch.empty(3, 3, device=DEVICE) + torch.empty(3, 3, device="lazysched:0")
        assert fake.device.type == DEVICE and fake.shape == (3, 3)


def test_out_with_and_without_a_resize() -> None:
    for stop in (2, 3):  # the second output is too small and has to grow
        results = []
        for device in ("cpu", DEVICE):
            x, out = -arange(device, 2, 2, 3), torch.zeros(2, 2, 6, device=device)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # resizing an output is deprecated
                torch.abs(x, out=out[:, :, 0:6:stop])
            results.append(out)
        equal(results[1], results[0])


PROGRAMS: dict[str, Callable[[str], Any]] = {
    "masked_select": lambda d: torch.masked_select(arange(d, 6), arange(d, 6) > 2),
    "expand": lambda d: arange(d, 3, 1).expand(3, 2),
    "two indices": lambda d: arange(d, 2, 3)[torch.tensor([1, 0], device=d), torch.tensor([1, 2], device=d)],
    "foreach": lambda d: torch._foreach_add([arange(d, 3)] * 2, [arange(d, 3)] * 2)[1],
    "cross dtypes": lambda d: torch.empty(3, dtype=torch.float64, device=d).copy_(arange(d, 3)),
    "nonzero": lambda d: arange(d, 4).nonzero(),
    "unique": lambda d: torch.unique(torch.tensor([3, 1, 3], device=d)),
    "as_strided": lambda d: torch.as_strided(arange(d, 3, 4), (2, 2), (4, 1), 1),
    "resize": lambda d: arange(d, 4, 4).resize_(2, 2, 2, 2),
    "set": lambda d: torch.empty(0, device=d).set_(arange(d, 3, 4)),
    "flip": lambda d: arange(d, 2, 3).flip(1),
    "kron": lambda d: torch.kron(arange(d, 2), arange(d, 2, 2)),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_operators(name: str) -> None:
    equal(PROGRAMS[name](DEVICE), PROGRAMS[name]("cpu"))


def test_views_share_addresses() -> None:
    x = torch.randn(100, device=DEVICE)
    address = x.data_ptr()
    assert x.view(10, 10).data_ptr() == x.expand(2, 100).data_ptr() == x.add_(1).data_ptr() == x.detach().data_ptr() == address
    assert x[1:].data_ptr() == address + 4 and x.clone().data_ptr() != address and x.is_set_to(x.view(100))


def test_lazy_clones_are_two() -> None:
    x = arange(DEVICE, 3)
    y = x._lazy_clone()
    y.add_(1)
    assert x.tolist() == [0, 1, 2] and y.tolist() == [1, 2, 3]


@pytest.fixture
def in_full() -> Iterator[None]:
    """cuDNN's recurrent layers multiply in TF32 else."""
    with flag("allow_tf32", False):
        yield


@pytest.mark.usefixtures("in_full")
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "bidirectional": True}, {"batch_first": True}], ids=str)
def test_recurrent_nets(kind: type[nn.Module], options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    net = kind(8, 16, **options)
    x = torch.randn(4, 3, 8)
    wanted, state = net(x)
    net.to(DEVICE)
    got, got_state = net(x.to(DEVICE))
    equal(got, wanted)
    for mine, theirs in zip(*((s if isinstance(s, tuple) else (s,)) for s in (got_state, state))):
        equal(mine, theirs)
    got.sum().backward()
    assert all(parameter.grad.device.type == DEVICE for parameter in net.parameters())


@pytest.mark.usefixtures("in_full")
def test_packed_sequences() -> None:
    torch.manual_seed(0)
    net = nn.LSTM(10, 20)
    packed = nn.utils.rnn.pack_sequence([torch.randn(n, 10) for n in (5, 3, 1)])
    wanted, (hidden, _) = net(packed)
    got, (got_hidden, _) = net.to(DEVICE)(packed.to(DEVICE))
    equal(got.data, wanted.data)
    equal(got_hidden, hidden)
    padded, lengths = nn.utils.rnn.pad_packed_sequence(got)
    assert padded.shape == (5, 3, 20) and lengths.tolist() == [5, 3, 1]


@pytest.mark.parametrize("backend", [SDPBackend.MATH, None], ids=["math", "chosen"])
def test_attention(backend: SDPBackend | None) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 2, 16, 8) for _ in range(3))
    wanted = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    mine = [t.to(DEVICE).requires_grad_() for t in (q, k, v)]
    with sdpa_kernel([backend] if backend else list(SDPBackend.__members__.values())[1:4]):
        got = nn.functional.scaled_dot_product_attention(*mine, is_causal=True)
    torch.testing.assert_close(got.detach().cpu(), wanted, rtol=1e-2 if ON_GPU else 1e-5, atol=1e-3 if ON_GPU else 1e-6)
    got.sum().backward()
    assert all(t.grad is not None and t.grad.device.type == DEVICE for t in mine)
    assert isinstance(torch._fused_sdp_choice(*(t.detach() for t in mine)), int)


def test_storages() -> None:
    x = arange(DEVICE, 4, 4)
    storage = x.untyped_storage()
    assert storage.device == torch.device(DEVICE, 0) and storage.nbytes() == 64 and storage.is_lazysched
    assert torch.UntypedStorage(4, device=torch.device(DEVICE)).device == torch.device(DEVICE, 0)
    assert storage.cpu().nbytes() == 64 and storage[4] == storage.cpu()[4]
    storage.fill_(0)
    assert not x.any()
    storage.copy_(torch.ones(16).untyped_storage())
    assert x.sum().item() == 16
    storage.resize_(128)
    assert x.resize_(4, 8).shape == (4, 8) and x[:2].sum().item() == 16
    assert torch.ones(4, device=DEVICE).storage().type() == "torch.storage.TypedStorage"
    for refused in (lambda: storage[4:8], lambda: storage.byteswap(torch.float32)):
        with pytest.raises(NotImplementedError):
            refused()


def test_backend_meta_of_a_tensor_is_empty() -> None:
    """The device keeps nothing beside a tensor's bytes, so that a file needs nothing of it."""
    assert torch._utils.get_tensor_metadata(torch.ones(2, device=DEVICE)) == {}


class Doubling(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 2


class Same(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 3


@pytest.mark.parametrize(("function", "slope"), [(Doubling, 2), (Same, 3)])
def test_autograd_functions(function: type[torch.autograd.Function], slope: int) -> None:
    x = torch.ones(4, device=DEVICE, requires_grad=True)
    function.apply(x).sum().backward()
    assert x.grad.tolist() == [slope] * 4
    assert torch.autograd.gradcheck(Doubling.apply, torch.randn(3, dtype=torch.float64, device=DEVICE, requires_grad=True))


def test_shape_errors_leave_the_device_usable() -> None:
    with pytest.raises(RuntimeError, match="cannot be multiplied|size mismatch"):
        torch.matmul(torch.ones(5, 5, device=DEVICE), torch.ones(3, 3, device=DEVICE))
    assert torch.lazysched.current_device() == 0 and torch.ones(5, 5, device=DEVICE).sum().item() == 25


def test_torch_compile_runs_beside_the_device() -> None:
    x = torch.ones(4, device=DEVICE, requires_grad=True)
    out = torch.compile(lambda t: t.sin() * 2, backend="aot_eager")(x)
    out.sum().backward()
    equal(out, torch.ones(4).sin() * 2)
    equal(x.grad, torch.ones(4).cos() * 2)


@pytest.mark.skipif(core.physical_is_cuda(), reason="CUDA does not survive fork")
def test_a_forked_child_computes() -> None:
    x = torch.ones(3, device=DEVICE) + 1
    child = os.fork()
    if child == 0:
        os._exit(0 if (x + torch.ones(3, device=DEVICE)).tolist() == [3, 3, 3] else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0 and x.tolist() == [2, 2, 2]
