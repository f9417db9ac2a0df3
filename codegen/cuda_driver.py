"""What kernels need of NVIDIA's driver: loading machine code, launching it, memory that PyTorch does not count.

Imports ctypes only. Every function works in the calling thread's current context, that of
`torch.cuda.device`.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from typing import Any, Sequence

_MAX_THREADS, _STATIC_SHARED = 0, 1  # of cuFuncGetAttribute
_DYNAMIC_SHARED = 8  # of cuFuncSetAttribute
_SHARED_OPT_IN = 97  # of cuDeviceGetAttribute
_PREFER_SHARED = 1
_CLUSTER = 4  # of cuLaunchKernelEx
_ALWAYS_SHARED = 48 << 10  # what a kernel may have without asking
_OVERLAPS = 12_030  # the version from which on graphs hold launches that overlap


class DriverError(RuntimeError):
    """The driver refused. The text names the call and the driver's reason."""


@dataclass(frozen=True, slots=True)
class Function:
    """A kernel in the GPU's memory. ``handle`` is a CUfunction; its module stays loaded as long as the process lives."""

    handle: int
    shared: int
    num_warps: int


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute, as far as it says how many programs form a cluster."""

    _fields_ = [("what", ctypes.c_int), ("gap", ctypes.c_int), ("blocks", ctypes.c_uint32 * 3), ("rest", ctypes.c_char * 52)]


class _Launch(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [("grid", ctypes.c_uint32 * 3), ("block", ctypes.c_uint32 * 3), ("shared", ctypes.c_uint32),
                ("stream", ctypes.c_void_p), ("attributes", ctypes.POINTER(_Attribute)), ("count", ctypes.c_uint32)]


@functools.cache
def library() -> ctypes.CDLL:
    """The driver; PyTorch has loaded it. Raises OSError where there is none."""
    return ctypes.CDLL("libcuda.so.1")


@functools.cache
def overlaps_launches() -> bool:
    """May programs of a kernel be placed before the kernel before it has ended, in CUDA graphs, too?"""
    version = ctypes.c_int()
    call("cuDriverGetVersion", ctypes.byref(version))
    return version.value >= _OVERLAPS


def call(name: str, *arguments: Any) -> None:
    """Call a function of the driver. Raises DriverError."""
    code = getattr(library(), name)(*arguments)
    if code:
        text = ctypes.c_char_p()
        library().cuGetErrorString(code, ctypes.byref(text))
        raise DriverError(f"{name}: {(text.value or b'unknown error').decode()} ({code})")


def load(name: str, code: bytes, shared: int, num_warps: int, device: int) -> Function:
    """Load a cubin and take its kernel ``name``. Raises DriverError, also for a kernel that asks for more than the GPU has."""
    _enter(device)
    module, function, limit, threads = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int()
    call("cuModuleLoadData", ctypes.byref(module), code)
    call("cuModuleGetFunction", ctypes.byref(function), module, name.encode())
    call("cuDeviceGetAttribute", ctypes.byref(limit), _SHARED_OPT_IN, device)
    call("cuFuncGetAttribute", ctypes.byref(threads), _MAX_THREADS, function)
    if shared > limit.value or 32 * num_warps > threads.value:
        raise DriverError(f"{name} asks for {shared} bytes of shared memory and {32 * num_warps} threads, "
                          f"and this GPU has {limit.value} and {threads.value}")
    if shared > _ALWAYS_SHARED:
        static = ctypes.c_int()
        call("cuFuncSetCacheConfig", function, _PREFER_SHARED)
        call("cuFuncGetAttribute", ctypes.byref(static), _STATIC_SHARED, function)
        call("cuFuncSetAttribute", function, _DYNAMIC_SHARED, limit.value - static.value)
    return Function(int(function.value or 0), shared, num_warps)


def _enter(device: int) -> None:
    """Make the device's primary context current where the thread has none."""
    context = ctypes.c_void_p()
    call("cuInit", 0)
    call("cuCtxGetCurrent", ctypes.byref(context))
    if not context.value:
        call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        call("cuCtxSetCurrent", context)


def launch(function: Function, grid: tuple[int, int, int], args: Sequence[Any], stream: int, cluster: int = 1) -> None:
    """Launch with ``args`` as ctypes values in the signature's order. Raises DriverError."""
    null = ctypes.c_void_p()
    values = [*args, null, null]  # Triton's two scratch pointers
    places = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
    formed = _Attribute(_CLUSTER, 0, (cluster, 1, 1))
    asked = _Launch(grid, (32 * function.num_warps, 1, 1), function.shared, stream, ctypes.pointer(formed), int(cluster > 1))
    call("cuLaunchKernelEx", ctypes.byref(asked), ctypes.c_void_p(function.handle), places, None)


def allocate(nbytes: int) -> int:
    """The address of ``nbytes`` of memory that holds zeros. Raises DriverError where there is not so much."""
    address = ctypes.c_uint64()
    call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(nbytes))
    call("cuMemsetD8_v2", address, ctypes.c_ubyte(0), ctypes.c_size_t(nbytes))
    return int(address.value)


def fill(address: int, nbytes: int, stream: int) -> None:
    """Write zeros, in a stream's order."""
    call("cuMemsetD8Async", ctypes.c_uint64(address), ctypes.c_ubyte(0), ctypes.c_size_t(nbytes), ctypes.c_void_p(stream))


def free(address: int) -> None:
    call("cuMemFree_v2", ctypes.c_uint64(address))
