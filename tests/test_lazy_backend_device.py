"""`torch.lazysched` has what `torch.cuda` has, `torch.accelerator` says the same, and indices are devices."""

from __future__ import annotations

import threading
import types
from typing import Any, Callable

import pytest
import torch

import lazy_backend  # noqa: F401 - registers the device
from lazy_backend import core
from lazy_backend.device import register
from tests.children import call
from tests.device import DEVICE, ON_GPU

NAMES = """
    Event OutOfMemoryError Stream StreamContext amp can_device_access_peer current_device current_stream default_generators
    default_stream device device_count device_of empty_cache get_arch_list get_device_capability get_device_name
    get_device_properties get_rng_state get_rng_state_all init initial_seed ipc_collect is_available is_bf16_supported
    is_current_stream_capturing is_initialized is_tf32_supported manual_seed manual_seed_all max_memory_allocated
    max_memory_reserved mem_get_info memory memory_allocated memory_reserved memory_snapshot memory_stats
    memory_stats_as_nested_dict memory_summary random reset_accumulated_memory_stats reset_max_memory_allocated
    reset_peak_memory_stats seed seed_all set_device set_per_process_memory_fraction set_rng_state set_rng_state_all set_stream
    stream streams synchronize
""".split()
needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.mark.parametrize("name", NAMES)
def test_the_module_has_what_cuda_has(name: str) -> None:
    assert hasattr(torch.cuda, name) and hasattr(torch.lazysched, name)


def test_submodules_can_be_imported() -> None:
    import torch.lazysched.amp as amp
    import torch.lazysched.memory as memory
    from torch.lazysched import random

    assert memory.memory_allocated is torch.lazysched.memory_allocated and random.seed is torch.lazysched.seed
    with amp.autocast(dtype=torch.bfloat16):
        assert (torch.ones(2, 2, device=DEVICE) @ torch.ones(2, 2, device=DEVICE)).dtype is torch.bfloat16
    assert amp.GradScaler().scale(torch.ones(1, device=DEVICE)).device.type == DEVICE


def starts_only_when_used() -> None:
    """In a fresh process: asking costs no build and no CUDA context."""
    module = torch.lazysched
    assert not module.is_initialized() and module.is_available() and module.device_count() >= 1
    assert module.memory_allocated() == 0 and module.memory_stats() == {} and not torch.accelerator.memory_stats()
    module.manual_seed_all(3)
    torch.accelerator.empty_cache()
    torch.accelerator.set_device_index(0)
    torch.accelerator.synchronize()
    assert torch.accelerator.current_device_index() == 0
    assert next(iter(torch.utils.data.DataLoader([1, 2], pin_memory=True))).tolist() == [1]
    assert not module.is_initialized()
    module.init()
    assert module.is_initialized() and module.initial_seed() == 3


def test_asking_does_not_start_the_device() -> None:
    call(starts_only_when_used)


def test_properties_are_those_of_the_physical_device() -> None:
    properties = torch.lazysched.get_device_properties(DEVICE)
    assert properties.name == torch.lazysched.get_device_name(0) != ""
    assert properties.total_memory == torch.lazysched.mem_get_info()[1] > 2**20
    assert properties.multi_processor_count >= 1
    assert torch.lazysched.get_device_capability() == (properties.major, properties.minor)
    assert torch.lazysched.is_bf16_supported() and torch.lazysched.can_device_access_peer(0, 0) is False
    if core.physical_is_cuda():
        assert torch.lazysched.get_device_name() == torch.cuda.get_device_name()
    assert torch.bfloat16 in torch.accelerator.get_device_capability(DEVICE)["supported_dtypes"]


def test_the_accelerator_is_the_device() -> None:
    assert torch.accelerator.current_accelerator() == torch.device(DEVICE) and torch.accelerator.is_available()
    assert torch.accelerator.device_count() == torch.lazysched.device_count()
    torch.accelerator.set_device_index(0)
    with torch.accelerator.device_index(0):
        assert torch.accelerator.current_device_index() == torch.lazysched.current_device() == 0
    with torch.accelerator.device_index(None):
        assert torch.accelerator.current_device_index() == 0
    x = torch.ones(3, device=DEVICE) + 1
    torch.accelerator.synchronize()
    assert lazy_backend.debug.text([x]).count("aten::add") == 0, "synchronize ran the recording"
    assert x.tolist() == [2, 2, 2]


def test_contexts_restore_the_device_after_errors() -> None:
    with pytest.raises(ValueError, match="mine"), torch.lazysched.device(0), torch.accelerator.device_index(0):
        raise ValueError("mine")
    with torch.lazysched.device(None), torch.lazysched.device(-1), torch.lazysched.device_of(torch.ones(1)):
        assert torch.lazysched.current_device() == 0
    with torch.device(DEVICE):
        assert torch.ones(1).device == torch.device(DEVICE, 0)


WRONG: dict[str, Callable[[], Any]] = {
    "empty": lambda: torch.empty(3, device="lazysched:99"),
    "to": lambda: torch.ones(2).to("lazysched:99"),
    "from one index to another": lambda: torch.ones(2, device=DEVICE).to("lazysched:99"),
    "randn": lambda: torch.randn(2, device="lazysched:99"),
    "module": lambda: torch.nn.Linear(2, 2).to("lazysched:99"),
    "generator": lambda: torch.Generator(device="lazysched:99"),
    "stream": lambda: torch.Stream(device="lazysched:99"),
    "Stream": lambda: torch.lazysched.Stream(99),
    "current_stream": lambda: torch.lazysched.current_stream(99),
    "set_device": lambda: torch.lazysched.set_device(99),
    "device": lambda: torch.lazysched.device(99),
    "set_device_index": lambda: torch.accelerator.set_device_index(99),
    "synchronize": lambda: torch.lazysched.synchronize("lazysched:99"),
    "memory_allocated": lambda: torch.lazysched.memory_allocated(99),
    "get_rng_state": lambda: torch.lazysched.get_rng_state(99),
    "get_device_name": lambda: torch.lazysched.get_device_name("lazysched:99"),
}


@pytest.mark.parametrize("name", WRONG)
def test_an_index_that_does_not_exist_is_an_error(name: str) -> None:
    torch.ones(1, device=DEVICE)
    with pytest.raises(RuntimeError, match="invalid device ordinal 99"):
        WRONG[name]()
    assert torch.lazysched.current_device() == 0


def test_another_devices_name_is_an_error() -> None:
    with pytest.raises(ValueError, match="expected a lazysched device, got cpu"):
        torch.lazysched.set_device("cpu")


def test_the_current_device_belongs_to_the_thread() -> None:
    seen = []
    threads = [threading.Thread(target=lambda: seen.append(torch.ones(4, device=DEVICE).sum().item())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [4.0] * 4


def test_copies_to_the_physical_device_are_copies() -> None:
    x = torch.arange(4.0, device=DEVICE) * 2
    there = x.to(core.physical_device(0))
    there.add_(1)
    back = there.to(DEVICE)
    there.zero_()
    assert x.tolist() == [0, 2, 4, 6] and back.tolist() == [1, 3, 5, 7] and there.tolist() == [0, 0, 0, 0]
    x.copy_(there, non_blocking=True)
    assert x.tolist() == [0, 0, 0, 0]


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
def test_copies_to_cuda_do_not_pass_through_the_host() -> None:
    x = torch.arange(8.0, device=DEVICE) + 1
    with torch.profiler.profile() as profile:
        y = x.to("cuda").to(DEVICE)
        torch.cuda.synchronize()
    names = [event.name for event in profile.events()]
    assert not [name for name in names if "DtoH" in name or "HtoD" in name] and y.tolist() == list(range(1, 9))


@needs_two
def test_the_second_index_is_the_second_gpu() -> None:
    x = torch.arange(4.0, device="lazysched:1") + 1
    assert x.device.index == 1 and x.to("cuda:1").device.index == 1
    y = x.to("lazysched:0") * 2
    assert y.device.index == 0 and y.tolist() == [2, 4, 6, 8]
    assert x.to("cuda:0").tolist() == [1, 2, 3, 4]
    with torch.lazysched.device(1):
        assert torch.ones(1, device=DEVICE).device.index == 1
        assert torch.lazysched.memory_allocated() == torch.cuda.memory_allocated(1)
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        x + y
    torch.manual_seed(1)
    assert torch.equal(torch.randn(4, device="lazysched:1").cpu(), torch.randn(4, device="lazysched:0").cpu())


def test_names_that_torch_makes_for_the_device() -> None:
    activity = torch._C._profiler.ProfilerActivity
    assert getattr(activity, "LAZYSCHED", activity.PrivateUse1) == activity.PrivateUse1  # torch 2.11 has no such name yet
    assert str(torch.device(DEVICE, 0)) == "lazysched:0"
    x = torch.ones(2, 2)
    assert not x.is_lazysched and x.lazysched().is_lazysched and x.lazysched(0).device.index == 0
    assert x.storage().lazysched().is_lazysched and x.untyped_storage().lazysched().is_lazysched
    assert torch.nn.Linear(2, 2).lazysched().weight.is_lazysched
    packed = torch.nn.utils.rnn.PackedSequence(torch.rand(5, 3), torch.tensor([1, 1, 1, 1, 1]))
    assert not packed.is_lazysched and packed.lazysched().data.is_lazysched
    with pytest.raises(RuntimeError, match="has already been set"):
        torch.utils.rename_privateuse1_backend("other")
    torch.utils.rename_privateuse1_backend(DEVICE)


def test_a_second_registration_is_refused_by_torch() -> None:
    for refused, said in (
        (lambda: torch._register_device_module(DEVICE, types.ModuleType("mine")), "The runtime module of"),
        (lambda: torch.utils.generate_methods_for_privateuse1_backend(), "The custom device module of"),
        (lambda: torch.utils.backend_registration._get_custom_mod_func("no_such_function"), "Try to call torch.lazysched"),
    ):
        with pytest.raises(RuntimeError, match=said):
            refused()
    assert torch.utils.backend_registration._get_custom_mod_func("device_count")() == torch.lazysched.device_count()
    register()  # ours does nothing more


@pytest.mark.parametrize(
    ("dtype", "name"),
    [(torch.float32, "Float"), (torch.float64, "Double"), (torch.float16, "Half"), (torch.int64, "Long"), (torch.bool, "Bool")],
)
def test_type_names(dtype: torch.dtype, name: str) -> None:
    x = torch.zeros(2, dtype=dtype, device=DEVICE)
    assert x.type() == f"torch.lazysched.{name}Tensor" and torch.zeros(2).type(x.type()).dtype is dtype
    assert x.type("torch.FloatTensor").device.type == "cpu"


def test_ops_with_kernels_of_the_devices_own() -> None:
    numbers = torch.tensor([1, 2, 1, 7])
    counted = torch.histc(numbers.to(DEVICE), bins=4, min=0, max=8)
    assert counted.dtype == numbers.dtype and counted.tolist() == [2, 1, 0, 1]
    assert torch.histc(numbers.float().to(DEVICE), 4, 0, 8).tolist() == [2.0, 1.0, 0.0, 1.0]
    x = torch.ones(3, device=DEVICE)
    x.set_()
    assert x.shape == (0,) and x.device.type == DEVICE
    zeros = torch._efficientzerotensor((2, 2), device=DEVICE)
    assert zeros.tolist() == [[0.0, 0.0], [0.0, 0.0]]
    small = torch.empty(0, device=DEVICE)
    torch._copy_from_and_resize(numbers.float(), small)
    assert small.tolist() == numbers.tolist()
