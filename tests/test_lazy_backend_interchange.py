"""Other libraries see the device's memory: NumPy, DLPack, CUDA's array interface, in the order of the program."""

from __future__ import annotations

import gc
import random

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import lazy_backend
from lazy_backend import core
from tests.device import DEVICE, arange

needs_cpu = pytest.mark.skipif(core.physical_is_cuda(), reason="NumPy refuses tensors of CUDA, in eager mode too")
needs_gpu = pytest.mark.skipif(not core.physical_is_cuda(), reason="needs a GPU")


@needs_cpu
def test_numpy_shares_memory_both_ways() -> None:
    x = arange(DEVICE, 2, 3)
    x.add_(1)
    array = x.numpy()
    assert array.tolist() == [[1, 2, 3], [4, 5, 6]] and np.shares_memory(array, x.numpy())
    array[0, 0] = 50
    assert x[0, 0].item() == 50
    x.mul_(2)
    assert array.tolist() == [[100, 4, 6], [8, 10, 12]], "the write ran at once"
    later = x + 1
    array[:] = 0
    assert later.tolist() == [[101, 5, 7], [9, 11, 13]], "so did the read"
    x[1].fill_(7)
    x.t()[0].add_(1)
    assert array.tolist() == [[1, 0, 0], [8, 7, 7]] == x.tolist()
    x.copy_(torch.full((2, 3), 3.0))
    assert array.tolist() == [[3] * 3] * 2


@needs_cpu
def test_what_was_recorded_before_sees_the_old_values() -> None:
    x = arange(DEVICE, 4)
    lazy_backend.mark_step()
    before = x * 2
    x.numpy()[:] = 9
    assert before.tolist() == [0, 2, 4, 6] and x.tolist() == [9] * 4


@needs_cpu
def test_ops_are_recorded_again_once_the_array_is_gone() -> None:
    x = arange(DEVICE, 4)
    array = x.numpy()
    x.add_(1)
    assert lazy_backend.barriers()[-1].kind.label == "lent"
    del array
    gc.collect()
    count = lazy_backend.stats()["flushes"]
    x.add_(1).mul_(2)
    assert lazy_backend.stats()["flushes"] == count
    assert x.tolist() == [4, 6, 8, 10]


@needs_cpu
def test_an_array_outlives_its_tensor() -> None:
    array = (arange(DEVICE, 5) + 1).numpy()
    gc.collect()
    torch.ones(5, device=DEVICE).exp().tolist()
    assert array.tolist() == [1, 2, 3, 4, 5]


@needs_cpu
def test_numpy_takes_views_dtypes_and_empties() -> None:
    x = arange(DEVICE, 3, 4)
    assert x.t()[1:3].numpy().tolist() == [[1, 5, 9], [2, 6, 10]] and x.t()[1:3].numpy().strides == (4, 16)
    assert torch.empty(0, 3, device=DEVICE).numpy().shape == (0, 3)
    for dtype in (torch.int8, torch.int64, torch.bool, torch.float16, torch.float64, torch.complex64):
        assert torch.ones(2, dtype=dtype, device=DEVICE).numpy().tolist() == [1, 1]
    assert np.asarray(x, dtype=np.int32).dtype == np.int32 and np.float32(x[2, 1]) == 9
    assert type(np.add(x, 1)) is torch.Tensor and np.add(x, 1).device.type == DEVICE
    assert (x + np.ones(4, dtype=np.float32)).device.type == DEVICE


REFUSED = {
    "grad": lambda d: torch.ones(2, device=d, requires_grad=True),
    "conj": lambda d: torch.ones(2, device=d, dtype=torch.complex64).conj(),
    "bfloat16": lambda d: torch.ones(2, device=d, dtype=torch.bfloat16),
}


@needs_cpu
@pytest.mark.parametrize("name", REFUSED)
def test_numpy_refuses_what_eager_refuses(name: str) -> None:
    messages = []
    for device in ("cpu", DEVICE):
        with pytest.raises((RuntimeError, TypeError)) as error:
            REFUSED[name](device).numpy()
        messages.append((error.type, str(error.value)))
    assert messages[0] == messages[1]


@pytest.mark.parametrize("name", ["grad", "conj"])
def test_forced_numpy_is_a_copy(name: str) -> None:
    x = REFUSED[name](DEVICE)
    assert x.numpy(force=True).tolist() == x.detach().cpu().resolve_conj().tolist()


def test_tensors_without_bytes_are_refused() -> None:
    with pytest.raises((RuntimeError, TypeError)):
        torch.vmap(lambda row: row.numpy())(torch.ones(2, 2, device=DEVICE))
    with FakeTensorMode(), pytest.raises((RuntimeError, TypeError)):
        torch.ones(2, device=DEVICE).numpy()
    with pytest.raises((RuntimeError, ValueError)):
        torch.func.grad(lambda x: torch.from_dlpack(x).sum())(torch.ones(2, device=DEVICE))


@needs_gpu
def test_numpy_says_what_cuda_says() -> None:
    with pytest.raises(TypeError, match="can't convert lazysched:0 device type tensor to numpy. Use Tensor.cpu()"):
        torch.ones(2, device=DEVICE).numpy()


@pytest.mark.parametrize("index", [slice(None), 1, (slice(None), 2)], ids=["whole", "a row", "a column"])
def test_dlpack_shares_the_physical_memory(index: object) -> None:
    x = arange(DEVICE, 3, 4)[index]
    there = torch.from_dlpack(x)
    assert there.device == core.physical_device(0) and there.stride() == x.stride()
    there.add_(100)
    assert x.tolist() == there.tolist() and torch.from_dlpack(x).data_ptr() == there.data_ptr()
    x.zero_()
    assert not there.any()
    capsule = torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(x))
    assert capsule.data_ptr() == there.data_ptr()


@needs_cpu
def test_numpy_reads_dlpack() -> None:
    x = arange(DEVICE, 4) + 1
    array = np.from_dlpack(x)
    x.mul_(3)
    assert array.tolist() == [3, 6, 9, 12] and x.__dlpack_device__()[1] == 0


def test_dlpack_into_the_device() -> None:
    assert torch.from_dlpack(np.arange(3.0), device=DEVICE).tolist() == [0, 1, 2]
    x = torch.from_dlpack(arange(DEVICE, 3) + 1, device=DEVICE)
    assert x.device.type == DEVICE and x.tolist() == [1, 2, 3]
    assert torch.from_dlpack(torch.arange(3, device=core.physical_device(0)), device=DEVICE).tolist() == [0, 1, 2]


def test_dlpack_refuses_what_eager_refuses() -> None:
    with pytest.raises(BufferError, match="require gradient"):
        torch.from_dlpack(torch.ones(2, device=DEVICE, requires_grad=True))
    with pytest.raises(BufferError, match="conjugate bit"):
        torch.from_dlpack(torch.ones(2, device=DEVICE, dtype=torch.complex64).conj())


@needs_gpu
def test_cuda_array_interface() -> None:
    x = torch.arange(4.0, device=DEVICE) + 1
    interface = x.__cuda_array_interface__
    assert interface["shape"] == (4,) and interface["data"][0] == torch.from_dlpack(x).data_ptr()
    x.add_(1)
    assert lazy_backend.barriers()[-1].kind.label == "lent", "its holder keeps an address only"
    x.tolist()
    assert x.__cuda_array_interface__["data"] == interface["data"]


@needs_cpu
def test_no_cuda_array_interface_on_a_cpu() -> None:
    assert not hasattr(torch.ones(1, device=DEVICE), "__cuda_array_interface__")


def test_numbers_and_text() -> None:
    x = arange(DEVICE, 2, 3)
    assert x.tolist() == [[0, 1, 2], [3, 4, 5]] and [int(v) for v in x[1]] == [3, 4, 5] and 4 in x and len(x) == 2
    assert [10, 11, 12][torch.tensor(1, device=DEVICE)] == 11 and list(range(torch.tensor(2, device=DEVICE))) == [0, 1]
    assert f"{x.sum():.2f}" == "15.00" and complex(x[0, 1]) == 1 and bool(x.any()) and round(float(x[1, 2])) == 5
    for make in (
        lambda d: arange(d, 2, 3), lambda d: torch.ones(2, device=d, dtype=torch.bfloat16), lambda d: torch.zeros(3000, device=d),
        lambda d: torch.ones(0, 3, device=d), lambda d: torch.nn.Parameter(torch.ones(2, device=d)),
        lambda d: torch.ones(2, device=d, dtype=torch.complex64),
    ):  # fmt: skip
        wanted, got = "".join(repr(make("cpu")).split()), "".join(repr(make(DEVICE)).split())
        assert got.replace(",device='lazysched:0'", "") == wanted and "device='lazysched:0'" in got


def random_program(device: str, seed: int) -> list[list[float]]:
    """Random writes by ops and by NumPy over tensors, views and arrays, the same for every device; what all of them hold."""
    choose = random.Random(seed)
    tensors, arrays = [torch.arange(6.0).to(device), torch.ones(6).to(device)], []
    for _ in range(25):
        one, other, action = choose.choice(tensors), choose.choice(tensors), choose.randrange(8)
        if action == 0:
            tensors.append(one + other)
        elif action == 1:
            one.add_(other)
        elif action == 2:
            one[1:3].mul_(0.5)
        elif action == 3:
            arrays.append(one.numpy())
        elif action == 4 and arrays:
            choose.choice(arrays)[choose.randrange(3) :] += 1
        elif action == 5:
            tensors.append(one.flip(0))
        elif action == 6 and arrays:
            arrays.pop(choose.randrange(len(arrays)))
        elif action == 7 and len(tensors) > 2:
            tensors.pop(choose.randrange(len(tensors)))
        if choose.random() < 0.1 and device == DEVICE:
            lazy_backend.mark_step()
    return [item.tolist() for item in (*tensors, *arrays)]


@needs_cpu
@pytest.mark.parametrize("seed", range(50))
def test_random_writes_from_both_sides(seed: int) -> None:
    assert random_program(DEVICE, seed) == random_program("cpu", seed)
