"""`import torch` alone makes the device known, costs little, and goes on where the device cannot be had."""

from __future__ import annotations

import sys
from pathlib import Path

import children
import pytest
import torch

import lazy_backend  # noqa: F401  (registers the device)
from lazy_backend import accelerator
from tests.device import DEVICE

ROOT = str(children.ROOT)
OURS = {"lazy_backend", "ir_nodes", "barriers", "codegen", "lazysched_autoload"}
HEAVY = ("triton", "hypothesis", "sympy", "setuptools", "torch._dynamo", "torch._inductor", "torch.utils.cpp_extension")
MODULES = "import sys; before = set(sys.modules); import lazy_backend; print(*sorted(set(sys.modules) - before))"


@pytest.fixture
def installed(tmp_path: Path) -> list[str]:
    """Paths that make the package look installed, by the entry point that pyproject.toml names."""
    text = (children.ROOT / "pyproject.toml").read_text()
    entry = text.split('[project.entry-points."torch.backends"]\n')[1].splitlines()[0].replace('"', "")
    assert entry == "lazysched = lazysched_autoload:load"
    info = tmp_path / "site" / "lazysched-0.1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lazysched\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text(f"[torch.backends]\n{entry}\n")
    return [str(info.parent), ROOT]


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    """A folder with packages that have nothing to do with ours."""
    return tmp_path / "foreign"


def package(folder: Path, name: str, source: str = "") -> Path:
    file = folder / name / "__init__.py"
    file.parent.mkdir(parents=True)
    file.write_text(source)
    return file


def test_torch_alone_knows_the_device(installed: list[str]) -> None:
    torch.ones(1, device=DEVICE)  # builds the native core here, so that the child only loads it
    program = ("import torch; x = torch.ones(2, device='lazysched'); "
               "print((x + 1).tolist(), x.device, torch.lazysched.device_count() > 0)")
    done = children.run(program, paths=installed)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[2.0, 2.0] lazysched:0 True\n" and done.stderr == ""


def test_torch_alone_loads_nothing_heavy_and_builds_nothing(installed: list[str], tmp_path: Path) -> None:
    program = "import torch, sys; print(*sorted(sys.modules)); from lazy_backend import core; assert not core.is_started()"
    cache = tmp_path / "cache"
    done = children.run(program, paths=installed, cache_dir=cache)
    assert done.returncode == 0, done.stderr
    loaded = set(done.stdout.split())
    assert OURS <= loaded, "the entry point was not called"
    assert [
        name for name in ("triton", "hypothesis", "torch._dynamo", "torch._inductor", "lazysched_core") if name in loaded
    ] == []
    assert done.stderr == ""
    if torch.version.cuda is None:  # beside CUDA a shim of a few lines is compiled
        assert not cache.exists()


def test_our_own_imports_are_few() -> None:
    done = children.run(f"import torch; {MODULES}", variables={"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"})
    assert done.returncode == 0, done.stderr
    new = done.stdout.split()
    assert "lazy_backend.device" in new and [name for name in HEAVY if name in new] == []
    packages = {name.split(".")[0] for name in new} - set(sys.stdlib_module_names)
    assert packages <= OURS | {"filelock", "torch"}


@pytest.mark.parametrize("name", ["codegen", "barriers", "ir_nodes"])
def test_a_foreign_package_of_the_same_name_breaks_only_the_device(name: str, installed: list[str], foreign: Path) -> None:
    file = package(foreign, name)
    program = (
        "import torch\nassert torch.ones(2).sum().item() == 2\n"
        "try:\n    import lazy_backend\nexcept ImportError as error:\n    print(error)\n"
    )
    done = children.run(program, paths=[str(foreign), *installed])
    assert done.returncode == 0, done.stderr
    for text in (done.stdout, done.stderr):
        assert str(file) in text and f"its own package '{name}'" in text
    assert "RuntimeWarning: the device lazysched is not available: ImportError" in done.stderr


def test_a_foreign_package_that_fails_does_not_break_torch(installed: list[str], foreign: Path) -> None:
    package(foreign, "filelock", "raise RuntimeError('not today')")
    done = children.run("import torch; print(torch.ones(2).sum().item())", paths=[str(foreign), *installed])
    assert (done.returncode, done.stdout) == (0, "2.0\n"), done.stderr
    assert "the device lazysched is not available: RuntimeError: not today" in done.stderr


@pytest.mark.parametrize("module", ["ir_nodes.settings", "codegen.combo_source"])
def test_a_module_of_ours_before_torch_is_told_and_mended(module: str, installed: list[str]) -> None:
    program = f"import {module}\nimport lazy_backend, torch\nprint((torch.ones(2, device='lazysched') + 1).tolist())"
    done = children.run(program, paths=installed)
    assert (done.returncode, done.stdout) == (0, "[2.0, 2.0]\n"), done.stderr
    assert "not available: ImportError" in done.stderr
    assert "If a module of lazysched's was imported before torch: `import lazy_backend` now" in done.stderr


def test_a_wrong_setting_does_not_break_torch_but_the_first_use(installed: list[str]) -> None:
    program = "import torch; print(torch.ones(2).sum().item()); torch.ones(2, device='lazysched')"
    done = children.run(program, paths=installed, variables={"LAZYSCHED_ENGINE": "steam"})
    assert done.stdout == "2.0\n" and done.returncode != 0
    if torch.version.cuda is None:
        assert "LAZYSCHED_ENGINE='steam' is not valid: it takes auto, aten, triton" in done.stderr.splitlines()[-1]


INTEGERS = """
import ctypes, torch
torch.utils.rename_privateuse1_backend("other")
assert torch.device(0).type == "other"
libraries = [f"{torch.__path__[0]}/lib/libtorch_{part}.so".encode() for part in ("cpu", "python")]
for _ in range(9):  # later calls change nothing
    assert ctypes.CDLL(SHIM).lazysched_keep_cuda(*libraries) == 1
print(torch.device(0), torch.accelerator.current_accelerator(), torch.device("other", 0))
"""


def test_beside_cuda_an_integer_goes_on_naming_a_cuda_device() -> None:
    """Programs written for CUDA say `x.to(0)`; the shim that is loaded beside CUDA leaves them alone."""
    program = INTEGERS.replace("SHIM", repr(str(accelerator.build())))
    done = children.run(program, variables={"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"})
    assert done.stdout == "cuda:0 other other:0\n", done.stderr


def test_without_a_driver_cuda_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch for CUDA on a machine that has no GPU is used as PyTorch for CPUs is."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(accelerator, "build", lambda: pytest.fail("the shim is built"))
    monkeypatch.setattr(accelerator, "has_driver", lambda: False)
    accelerator.keep_cuda()
