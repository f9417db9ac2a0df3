"""Source files, compilation for Hopper without a GPU, the interpreter, and errors that say what failed."""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path

import pytest
import torch
from graphs import kernels, record

from codegen.fuse import plan
from codegen.kernel import Kernel, KernelStep
from codegen.triton_compile import (
    KernelCacheError,
    KernelCompileError,
    compile_for_hopper,
    interpret,
    source_path,
    write_source,
)


def step_of(size: int = 64) -> KernelStep:
    recording, _ = record(lambda x: (x * 0.5).tanh(), torch.randn(size))
    (step,) = kernels(plan(recording.graph))
    return step


def test_a_kernel_compiles_for_hopper_without_a_gpu(tmp_path: Path) -> None:
    compiled = compile_for_hopper(step_of().kernel, tmp_path)
    assert compiled.num_warps == step_of().kernel.num_warps and compiled.shared >= 0
    assert "sm_90" in compiled.handle.asm["ptx"]


def test_the_entry_takes_the_signature_and_two_scratch_pointers(tmp_path: Path) -> None:
    kernel = step_of().kernel
    compiled = compile_for_hopper(kernel, tmp_path)
    entry = compiled.handle.asm["ptx"].split(".entry")[1].split(")")[0]
    kinds = re.findall(r"\.param \.(\w+)", entry)
    natural = {"i32": ("u32", "b32"), "i64": ("u64", "b64"), "fp32": ("f32", "b32"), "fp64": ("f64", "b64")}
    wanted = [("u64", "b64") if kind[0] == "*" else natural[kind] for _, kind in kernel.signature]
    assert len(kinds) == len(kernel.signature) + 2
    assert all(made in allowed for made, allowed in zip(kinds, wanted)) and kinds[-2:] == ["u64", "u64"]
    assert compiled.handle.metadata.global_scratch_size == 0 and compiled.handle.metadata.profile_scratch_size == 0


def test_the_interpreter_runs_the_same_file(tmp_path: Path) -> None:
    step = step_of(100)
    x, out = torch.randn(100), torch.zeros(100)
    args = []
    for (_, kind), arg in zip(step.kernel.signature, step.args):
        pointer = kind.startswith("*")
        args.append((x if step.args.index(arg) == _first_pointer(step) else out) if pointer else getattr(arg, "value", 0.5))
    interpret(step.kernel, tmp_path)(step.grid, args)
    torch.testing.assert_close(out, (x * 0.5).tanh())
    assert [path.suffix for path in tmp_path.iterdir() if path.is_file()] == [".py"]


def _first_pointer(step: KernelStep) -> int:
    return next(index for index, (_, kind) in enumerate(step.kernel.signature) if kind.startswith("*"))


def test_the_interpreter_refuses_a_wrong_number_of_arguments(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="takes"):
        interpret(step_of().kernel, tmp_path)((1, 1, 1), [])


def test_a_source_file_is_named_by_its_text_and_written_once(tmp_path: Path) -> None:
    kernel = step_of().kernel
    path = write_source(kernel, tmp_path / "made" / "on demand")
    before = path.stat().st_mtime_ns
    assert path.read_text() == kernel.source and write_source(kernel, path.parent).stat().st_mtime_ns == before
    other = dataclasses.replace(kernel, source=kernel.source + "\n")
    assert source_path(other, tmp_path) != source_path(kernel, tmp_path)


def test_a_damaged_source_file_is_replaced(tmp_path: Path) -> None:
    kernel = step_of().kernel
    path = write_source(kernel, tmp_path)
    path.write_text("half a fi")
    assert write_source(kernel, tmp_path).read_text() == kernel.source


def test_a_folder_that_cannot_be_written_is_an_error_that_names_it(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    with pytest.raises(KernelCacheError, match=re.escape(str(blocked))) as caught:
        compile_for_hopper(step_of().kernel, blocked / "kernels")
    assert isinstance(caught.value, KernelCompileError) and isinstance(caught.value.cause, OSError)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder_is_an_error(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(KernelCacheError):
        write_source(step_of().kernel, tmp_path)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda source: source.replace("tl.store(", "tl.stoer("), "stoer"),
        (lambda source: source + "\n  broken(", "IndentationError"),
    ],
    ids=["unknown name", "syntax"],
)
def test_a_kernel_that_does_not_compile_names_itself_its_file_and_the_cause(change: object, says: str, tmp_path: Path) -> None:
    kernel = step_of().kernel
    broken: Kernel = dataclasses.replace(kernel, source=change(kernel.source))
    with pytest.raises(KernelCompileError) as caught:
        compile_for_hopper(broken, tmp_path)
    text = str(caught.value)
    assert kernel.name in text and str(source_path(broken, tmp_path)) in text and says in text
