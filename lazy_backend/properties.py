"""What the physical device is and can do, as `torch.cuda` tells it. Imports torch, `lazy_backend.core` and `lazy_backend.api`."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lazy_backend import api, core

__all__ = ["can_device_access_peer", "get_amp_supported_dtype", "get_arch_list", "get_device_capability", "get_device_name",
           "get_device_properties", "is_bf16_supported", "is_tf32_supported"]

Device = torch.device | str | int | None


@dataclass(frozen=True, slots=True)
class DeviceProperties:
    """What `torch.cuda.get_device_properties` tells of a GPU, of a CPU: its memory in bytes, its cores as multiprocessors."""

    name: str
    total_memory: int
    multi_processor_count: int
    major: int = 0
    minor: int = 0


def get_device_properties(device: Device = None) -> Any:
    """CUDA's own object, or DeviceProperties of the CPU. Raises RuntimeError where there is no such device."""
    index = api.device_index(device)
    if core.physical_is_cuda():
        return torch.cuda.get_device_properties(index)
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return DeviceProperties(_cpu_name(), total, os.cpu_count() or 1)


def get_device_name(device: Device = None) -> str:
    return str(get_device_properties(device).name)


def get_device_capability(device: Device = None) -> tuple[int, int]:
    """CUDA's compute capability; (0, 0) on a CPU."""
    properties = get_device_properties(device)
    return properties.major, properties.minor


def get_arch_list() -> list[str]:
    return torch.cuda.get_arch_list() if core.physical_is_cuda() else []


def can_device_access_peer(device: Device, peer: Device) -> bool:
    one, other = api.device_index(device), api.device_index(peer)
    return core.physical_is_cuda() and one != other and torch.cuda.can_device_access_peer(one, other)


def is_bf16_supported(including_emulation: bool = True) -> bool:
    return torch.cuda.is_bf16_supported(including_emulation) if core.physical_is_cuda() else True


def is_tf32_supported() -> bool:
    return core.physical_is_cuda() and torch.cuda.is_tf32_supported()


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16]


def _cpu_name() -> str:
    information = Path("/proc/cpuinfo")
    lines = information.read_text().splitlines() if information.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
