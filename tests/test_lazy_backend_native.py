"""The builder of the native core, on sources small enough to compile in a second."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import pytest

from ir_nodes import settings
from lazy_backend import native
from lazy_backend.native import Build, NativeBuildError

ROOT = Path(native.__file__).resolve().parents[1]
MAIN = """
#include <Python.h>
#include "answer.h"
int other();
static PyModuleDef def = {PyModuleDef_HEAD_INIT, "NAME"};
extern "C" __attribute__((visibility("default"))) PyObject* PyInit_NAME() {
  PyObject* m = PyModule_Create(&def);
  PyModule_AddIntConstant(m, "answer", ANSWER + other());
  return m;
}
"""


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    folder = tmp_path / "csrc"
    folder.mkdir()
    (folder / "main.cpp").write_text(MAIN.replace("NAME", "tiny"))
    (folder / "other.cpp").write_text("int other() { return 2; }\n")
    (folder / "answer.h").write_text("#define ANSWER 40\n")
    return folder


def answer(sources: Path, root: Path) -> int:
    return native.import_library(native.ensure(Build.plan(sources, "tiny"), root), "tiny").answer


def written(root: Path, stem: str) -> dict[str, int]:
    """Objects of one source and when each was written."""
    return {file.name: file.stat().st_mtime_ns for file in (root / "objects").glob(f"{stem}-*.o")}


def test_builds_once_and_recompiles_only_what_changed(sources: Path, tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    root = tmp_path / "cache"
    assert answer(sources, root) == 42
    assert "compiling its native core (once for torch" in capfd.readouterr().err
    main, other = written(root, "main"), written(root, "other")
    assert answer(sources, root) == 42
    assert capfd.readouterr().err == ""

    (sources / "other.cpp").write_text("int other() { return 3; }\n")
    assert answer(sources, root) == 43
    assert written(root, "main") == main and len(written(root, "other")) == 2

    (sources / "answer.h").write_text("#define ANSWER 50\n")
    assert answer(sources, root) == 53
    assert len(written(root, "main")) == 2 and len(written(root, "other")) == 3
    assert other.items() <= written(root, "other").items()


def test_key_follows_flags_compiler_and_torch(sources: Path) -> None:
    plan = Build.plan(sources, "tiny")
    keys = {
        plan.key(),
        dataclasses.replace(plan, compile_flags=(*plan.compile_flags, "-DX")).key(),
        dataclasses.replace(plan, compiler_version="another").key(),
        dataclasses.replace(plan, link_flags=(*plan.link_flags, "-lm")).key(),
    }
    assert len(keys) == 4
    assert all(key.startswith(f"{native.torch.__version__}-{sys.implementation.cache_tag}-") for key in keys)


def test_two_processes_at_once_build_once(sources: Path, tmp_path: Path) -> None:
    code = (f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
            "from pathlib import Path\nfrom lazy_backend import native\n"
            f"plan = native.Build.plan(Path({str(sources)!r}), 'tiny')\n"
            f"print(native.import_library(native.ensure(plan, Path({str(tmp_path / 'cache')!r})), 'tiny').answer)\n")
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    both = [subprocess.Popen([sys.executable, "-c", code], **pipes) for _ in range(2)]
    outputs = [process.communicate(timeout=120) for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    assert [out.split()[-1] for out, _ in outputs] == ["42", "42"]
    assert sum(err.count("compiling its native core") for _, err in outputs) == 1


def test_what_a_killed_builder_left_is_cleared(sources: Path, tmp_path: Path) -> None:
    root = tmp_path / "cache"
    key = Build.plan(sources, "tiny").key()
    (root / f"{key}.tmp-dead").mkdir(parents=True)
    (root / f"{key}.tmp-dead" / "main.o").write_text("half")
    (root / f"{key}.lock").touch()
    assert answer(sources, root) == 42
    assert list(root.glob("*.tmp-*")) == []


def test_compile_error_shows_the_first_errors_and_the_log(sources: Path, tmp_path: Path) -> None:
    (sources / "other.cpp").write_text("int other() { return nowhere; }\n")
    with pytest.raises(NativeBuildError, match=r"error: .*nowhere") as caught:
        answer(sources, tmp_path / "cache")
    (log,) = (tmp_path / "cache").glob("*.log")
    assert str(log) in str(caught.value) and "nowhere" in log.read_text()
    assert list((tmp_path / "cache").glob("*/tiny.so")) == []


def test_link_error_is_told(sources: Path, tmp_path: Path) -> None:
    plan = Build.plan(sources, "tiny")
    with pytest.raises(NativeBuildError, match="no-such-library"):
        native.ensure(dataclasses.replace(plan, link_flags=("-shared", "-lno-such-library")), tmp_path / "cache")


def test_missing_python_header_names_the_package(sources: Path, tmp_path: Path) -> None:
    plan = dataclasses.replace(Build.plan(sources, "tiny"), compile_flags=("-fPIC",))
    with pytest.raises(NativeBuildError, match="apt install python3-dev"):
        native.ensure(plan, tmp_path / "cache")


def test_no_compiler_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native.shutil, "which", lambda name: None)
    with pytest.raises(NativeBuildError, match=r"apt install g\+\+"):
        native.find_compiler("")
    with pytest.raises(NativeBuildError, match="CXX='no-such -O1' is not found"):
        native.find_compiler("no-such -O1")


def test_compiler_setting_is_used(sources: Path) -> None:
    with settings.override(cxx="no-such-compiler"), pytest.raises(NativeBuildError, match="no-such-compiler"):
        Build.plan(sources, "tiny")


def test_unwritable_cache_falls_back_with_a_warning_and_is_found_again(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for _ in range(2):
        with pytest.warns(UserWarning, match=r"can't write its cache .*file/native.*LAZYSCHED_CACHE_DIR"):
            assert answer(sources, tmp_path / "file" / "native") == 42
    assert capfd.readouterr().err.count("compiling") == 1


def test_read_only_cache_with_a_build_is_used_in_silence(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert answer(sources, tmp_path / "cache") == 42
    monkeypatch.setattr(native, "writable", lambda root: pytest.fail("wrote to a finished cache"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert answer(sources, tmp_path / "cache") == 42


def test_a_broken_library_says_what_to_delete(sources: Path, tmp_path: Path) -> None:
    library = native.ensure(Build.plan(sources, "tiny"), tmp_path / "cache")
    library.unlink()
    library.write_bytes(b"not a library")
    with pytest.raises(NativeBuildError, match="delete the folder"):
        answer(sources, tmp_path / "cache")


def test_old_builds_and_objects_go(sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "KEPT_BUILDS", 1)
    monkeypatch.setattr(native, "KEPT_OBJECTS", 2)
    assert answer(sources, tmp_path / "cache") == 42
    (sources / "other.cpp").write_text("int other() { return 3; }\n")
    assert answer(sources, tmp_path / "cache") == 43
    assert len(list((tmp_path / "cache").glob("*/tiny.so"))) == 1
    assert len(list((tmp_path / "cache" / "objects").iterdir())) == 2


def test_no_sources_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(NativeBuildError, match="not installed completely"):
        Build.plan(tmp_path, "tiny")
