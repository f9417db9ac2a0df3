"""The driver shim, csrc/driver.c, against a driver made for the test: arguments arrive as CUDA declares them. Needs no GPU."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from codegen import cuda_driver
from codegen.cuda_driver import Function
from ir_nodes import settings
from tests.children import ROOT

FAKE = r"""
#include <stdio.h>
#include <stdint.h>
typedef enum { CLUSTER_DIMENSION = 4, PROGRAMMATIC_STREAM_SERIALIZATION = 6 } AttributeID;
typedef union {
  char pad[64];
  struct { unsigned x, y, z; } clusterDim;
  int programmaticStreamSerializationAllowed;
} AttributeValue;
typedef struct { AttributeID id; char pad[8 - sizeof(AttributeID)]; AttributeValue value; } Attribute;
typedef struct {
  unsigned gridDimX, gridDimY, gridDimZ, blockDimX, blockDimY, blockDimZ, sharedMemBytes;
  void* hStream;
  Attribute* attrs;
  unsigned numAttrs;
} Config;
int cuLaunchKernelEx(const Config* c, void* f, void** args, void** extra) {
  printf("launch %p %u %u %u %u %u %u %u %p %lu %d", f, c->gridDimX, c->gridDimY, c->gridDimZ, c->blockDimX, c->blockDimY,
         c->blockDimZ, c->sharedMemBytes, c->hStream, *(unsigned long*)args[0], extra != 0);
  for (unsigned i = 0; i < c->numAttrs; i++) {
    const AttributeValue v = c->attrs[i].value;
    if (c->attrs[i].id == CLUSTER_DIMENSION) printf(" 4: %u %u %u", v.clusterDim.x, v.clusterDim.y, v.clusterDim.z);
    else printf(" %d: %d", c->attrs[i].id, v.programmaticStreamSerializationAllowed);
  }
  printf("\n");
  return f == (void*)0x66 ? 700 : 0;
}
int cuGetErrorString(int code, const char** text) { *text = code == 700 ? "an illegal memory access" : 0; return 0; }
static void* nodes[1] = {(void*)0x77};
int cuStreamGetCaptureInfo_v2(void* s, int* status, uint64_t* id, void** graph, void* const** last, size_t* n) {
  *status = 1, *last = nodes, *n = 1;
  return 0;
}
int cuGraphLaunch(void* exec, void* stream) { printf("run %p %p\n", exec, stream); return 0; }
typedef struct { void* func; unsigned g[3], b[3], shared; void **params, **extra; void *kern, *ctx; } Params;
int cuGraphExecKernelNodeSetParams_v2(void* exec, void* node, const Params* p) {
  printf("set %p %p %p %u %u %u %u %u %u %u %lu %d\n", exec, node, p->func, p->g[0], p->g[1], p->g[2], p->b[0], p->b[1], p->b[2],
         p->shared, *(unsigned long*)p->params[0], p->extra != 0 || p->kern != 0 || p->ctx != 0);
  return 0;
}
"""


def build(source: Path, library: Path) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no C compiler")
    subprocess.run([compiler, "-x", "c", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"], check=True, timeout=60)


def talk(shim: str) -> None:
    """Calls each function of the shim; runs in a process that finds the fake driver."""
    lib = ctypes.CDLL(shim)
    for name in ("launch", "last_captured", "set_kernel", "run_graph"):
        getattr(lib, f"lazysched_{name}").restype = ctypes.c_char_p
    grid, word = (ctypes.c_uint32 * 4)(4, 5, 6, 1), ctypes.c_uint64(42)
    pairs = (ctypes.c_uint32 * 4)(4, 5, 6, 2)  # clusters of two
    args = (ctypes.c_void_p * 1)(ctypes.addressof(word))
    pointer = ctypes.c_void_p
    kernels = ((pointer(0x11), grid, 0), (pointer(0x66), grid, 1), (pointer(0x11), pairs, 1))  # the others overlap
    said = [lib.lazysched_launch(kernel, size, 128, 64, overlaps, pointer(0x55), args) for kernel, size, overlaps in kernels]
    node, count, made = pointer(), ctypes.c_size_t(), pointer(0x21)
    said.append(lib.lazysched_last_captured(pointer(0x55), ctypes.byref(node), ctypes.byref(count)))
    said.append(lib.lazysched_set_kernel(made, node, pointer(0x11), grid, 128, 64, args))
    said.append(lib.lazysched_run_graph(made, pointer(0x55)))
    ctypes.CDLL(None).fflush(None)
    print([text.decode() if text else None for text in said], node.value, count.value)


def ask(shim: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    program = f"from tests.test_lazy_backend_driver import talk; talk({str(shim)!r})"
    environment = {**settings.child_environment(), "LD_LIBRARY_PATH": str(folder), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", program]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)


def test_calls_reach_the_driver_as_cuda_declares_them(tmp_path: Path) -> None:
    (tmp_path / "fake.c").write_text(FAKE)
    build(tmp_path / "fake.c", tmp_path / "libcuda.so.1")
    build(ROOT / "lazy_backend" / "csrc" / "driver.c", tmp_path / "shim.so")
    done = ask(tmp_path / "shim.so", tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "launch 0x11 4 5 6 128 1 1 64 0x55 42 0",
        "launch 0x66 4 5 6 128 1 1 64 0x55 42 0 6: 1",
        "launch 0x11 4 5 6 128 1 1 64 0x55 42 0 6: 1 4: 2 1 1",
        "set 0x21 0x77 0x11 4 5 6 128 1 1 64 42 0",
        "run 0x21 0x55",
        f"{[None, 'an illegal memory access', None, None, None, None]} {0x77} 1",
    ]


def test_a_driver_that_lacks_a_function_is_told(tmp_path: Path) -> None:
    (tmp_path / "fake.c").write_text("int nothing;")
    build(tmp_path / "fake.c", tmp_path / "libcuda.so.1")
    build(ROOT / "lazy_backend" / "csrc" / "driver.c", tmp_path / "shim.so")
    assert "libcuda.so.1 cannot be loaded, or is too old" in ask(tmp_path / "shim.so", tmp_path).stdout


@pytest.mark.parametrize(("cluster", "told"), [(1, ""), (2, " 4: 2 1 1")])
def test_what_is_timed_is_launched_the_same_way(cluster: int, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "fake.c").write_text(FAKE)
    build(tmp_path / "fake.c", tmp_path / "fake.so")
    driver = ctypes.CDLL(str(tmp_path / "fake.so"))
    monkeypatch.setattr(cuda_driver, "library", lambda: driver)
    cuda_driver.launch(Function(0x11, 64, 4), (4, 5, 6), [ctypes.c_uint64(42)], 0x55, cluster)
    ctypes.CDLL(None).fflush(None)
    assert capfd.readouterr().out == f"launch 0x11 4 5 6 128 1 1 64 0x55 42 0{told}\n"
