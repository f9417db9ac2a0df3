"""NVIDIA's cuBLASLt as PyTorch has loaded it: the algorithms that it suggests for a matrix product, and products by one of them.

Imports ctypes, torch and codegen's plan types. Nothing here allocates memory on the GPU or waits for it. Several threads and
streams may use a handle at a time, for what a product needs besides its matrices, a workspace, comes from whoever asks for it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
import weakref
from ctypes import byref, c_float, c_int, c_int64, c_size_t, c_uint32, c_uint64, c_void_p, sizeof
from pathlib import Path
from typing import Any

import torch

from codegen.kernel import Algorithm, MatMul

ALIGNMENT = 16
"""Bytes: addresses that algorithms are asked for are multiples of it. Others than those of the measurement may come."""
WORKSPACE = 32 << 20
"""Bytes that an algorithm may ask for, as many as PyTorch gives cuBLAS on a Hopper GPU."""
SUGGESTIONS = 8
ANY_REDUCTION, IN_FLOAT32, NO_SPLIT = 7, 2, 0
"""Masks of how parts of a sum may be added up: also in 16 bits, in float32 only, or there are no parts."""

_TYPES = {torch.float16: 2, torch.bfloat16: 14}  # cudaDataType_t
_FLOAT32, _COMPUTE_FLOAT32 = 0, 68  # of cudaDataType_t, of cublasComputeType_t
_TRANSPOSE_A, _TRANSPOSE_B, _EPILOGUE, _BIAS = 3, 4, 7, 8  # of cublasLtMatmulDescAttributes_t
_EPILOGUES = {(False, False): 1, (True, False): 4, (True, True): 6}  # cublasLtEpilogue_t of (bias, relu)
_MOST_WORKSPACE, _REDUCTIONS, _ALIGNMENTS = 1, 3, (5, 6, 7, 8)  # of cublasLtMatmulPreferenceAttributes_t
_SOME_BIAS = 1 << 12  # no algorithm is suggested for a bias without an address; this one is not looked into
_STATUS = {1: "not initialized", 3: "allocation failed", 7: "invalid value", 8: "architecture mismatch", 13: "execution failed",
           14: "internal error", 15: "not supported"}


class LibraryError(RuntimeError):
    """cuBLASLt is not there, or refused. The text names the call and the reason."""


class _Heuristic(ctypes.Structure):
    """`cublasLtMatmulHeuristicResult_t`."""

    _fields_ = [("words", c_uint64 * 8), ("workspace", c_size_t), ("state", c_int), ("waves", c_float), ("reserved", c_int * 4)]

    @property
    def able(self) -> bool:
        return bool(self.state == 0 and self.workspace <= WORKSPACE)


class Library:
    """A handle of cuBLASLt on the current device. ``functions``: what has its C functions as attributes. Raises LibraryError."""

    def __init__(self, functions: Any) -> None:
        self._functions, self.handle = functions, c_void_p()
        self.call("cublasLtCreate", byref(self.handle))

    @property
    def version(self) -> int:
        return int(self._functions.cublasLtGetVersion())

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function that answers with a status. Raises LibraryError."""
        code = getattr(self._functions, name)(*arguments)
        if code:
            raise LibraryError(f"{name}: {_STATUS.get(code, 'unknown error')} ({code})")

    def made(self, name: str, *arguments: Any) -> c_void_p:
        """What a function creates."""
        handle = c_void_p()
        self.call(name, byref(handle), *arguments)
        return handle

    def put(self, name: str, handle: c_void_p, attribute: int, value: Any) -> None:
        self.call(name, handle, c_int(attribute), byref(value), c_size_t(sizeof(value)))

    def destroy(self, made: list[tuple[str, c_void_p]]) -> None:
        for name, handle in made:
            with contextlib.suppress(LibraryError):
                self.call(name, handle)


class Multiplier:
    """Descriptors of one product. cuBLASLt's matrices lie column by column, so it is told to make the transposed result, of the
    second factor and the first."""

    def __init__(self, library: Library, product: MatMul) -> None:
        self.product = product
        self._library, self._lock = library, threading.Lock()
        made: list[tuple[str, c_void_p]] = []
        weakref.finalize(self, library.destroy, made).atexit = False  # the library may have gone before
        self._product = library.made("cublasLtMatmulDescCreate", c_int(_COMPUTE_FLOAT32), c_int(_FLOAT32))
        made.append(("cublasLtMatmulDescDestroy", self._product))
        (left_over, left_apart), (right_over, right_apart) = product.left, product.right
        self._tell(_TRANSPOSE_A, c_int(right_over))
        self._tell(_TRANSPOSE_B, c_int(left_over))
        self._tell(_EPILOGUE, c_int(_EPILOGUES[product.bias, product.relu]))
        rows, columns, inner = product.rows, product.columns, product.inner
        shapes = ((inner, columns) if right_over else (columns, inner), (rows, inner) if left_over else (inner, rows),
                  (columns, rows))
        self._layouts = []
        for (down, across), apart in zip(shapes, (right_apart, left_apart, product.apart)):
            layout = library.made("cublasLtMatrixLayoutCreate", c_int(_TYPES[product.dtype]), c_uint64(down), c_uint64(across),
                                  c_int64(apart))
            made.append(("cublasLtMatrixLayoutDestroy", layout))
            self._layouts.append(layout)

    def suggestions(self, reductions: int) -> list[Algorithm]:
        """What cuBLASLt suggests, the best by its own judgement first; none where it has nothing. ``reductions``: how parts of
        sums may be added up. Raises LibraryError."""
        library, found, count = self._library, (_Heuristic * SUGGESTIONS)(), c_int()
        wishes = library.made("cublasLtMatmulPreferenceCreate")
        try:
            for attribute, value in ((_MOST_WORKSPACE, c_uint64(WORKSPACE)), (_REDUCTIONS, c_uint32(reductions)),
                                     *((one, c_uint32(ALIGNMENT)) for one in _ALIGNMENTS)):
                library.put("cublasLtMatmulPreferenceSetAttribute", wishes, attribute, value)
            self._ask("cublasLtMatmulAlgoGetHeuristic", wishes, c_int(SUGGESTIONS), found, byref(count))
        finally:
            library.destroy([("cublasLtMatmulPreferenceDestroy", wishes)])
        able = [one for one in found[: count.value] if one.able]
        return [Algorithm(self.product, number, tuple(one.words), one.workspace) for number, one in enumerate(able, 1)]

    def able(self, algorithm: Algorithm, number: int) -> Algorithm | None:
        """``algorithm``, which was suggested for another product, as the one with this ``number`` for this product; None where it
        can't run it."""
        found = _Heuristic()
        with contextlib.suppress(LibraryError):
            self._ask("cublasLtMatmulAlgoCheck", (c_uint64 * 8)(*algorithm.words), byref(found))
            return Algorithm(self.product, number, algorithm.words, found.workspace) if found.able else None
        return None

    def run(self, algorithm: Algorithm, left: int, right: int, made: int, bias: int, alpha: float, workspace: int,
            stream: int) -> None:
        """Launch the product of what lies at the addresses ``left`` and ``right``, times ``alpha``, onto what lies at
        ``made`` if it is such. ``bias``: 0 where there is none; ``workspace``: of as many bytes as the algorithm asks for, used
        until the launch is done. Raises LibraryError."""
        library, words = self._library, (c_uint64 * 8)(*algorithm.words)
        first, second, result = self._layouts
        there = (c_void_p(made), result)
        with self._lock:
            if self.product.bias:
                self._tell(_BIAS, c_uint64(bias))
            library.call("cublasLtMatmul", library.handle, self._product, byref(c_float(alpha)), c_void_p(right), first,
                         c_void_p(left), second, byref(c_float(self.product.onto)), *there, *there, words, c_void_p(workspace),
                         c_size_t(algorithm.workspace), c_void_p(stream))

    def _ask(self, name: str, *arguments: Any) -> None:
        """Call a function that tells of the product, wherever its bias lies. Raises LibraryError."""
        with self._lock:
            if self.product.bias:
                self._tell(_BIAS, c_uint64(_SOME_BIAS))
            self._library.call(name, self._library.handle, self._product, *self._layouts, self._layouts[-1], *arguments)

    def _tell(self, attribute: int, value: Any) -> None:
        self._library.put("cublasLtMatmulDescSetAttribute", self._product, attribute, value)


@functools.cache
def library(device: int) -> Library:
    """The library's handle for CUDA device ``device``, for as long as the process lives. Raises LibraryError."""
    with torch.cuda.device(device):
        return Library(loaded())


@functools.cache
def loaded() -> ctypes.CDLL:
    """The library that PyTorch has loaded: by its name, which the loader knows, or by its file. Raises LibraryError."""
    for name in (f"libcublasLt.so.{str(torch.version.cuda).split('.')[0]}", *mapped(Path("/proc/self/maps"))):
        with contextlib.suppress(OSError):
            return ctypes.CDLL(name)
    raise LibraryError("PyTorch has loaded no cuBLASLt")


def mapped(maps: Path) -> list[str]:
    """Files of cuBLASLt in a process's list of mapped files."""
    try:
        lines = maps.read_text().splitlines()
    except OSError:
        return []
    return list(dict.fromkeys(line.split(maxsplit=5)[5] for line in lines if "/libcublasLt.so" in line))
