"""The house keeps its shape: imports, environment reads, lengths, the native core's size, the README's table."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest

from ir_nodes import settings

ROOT = Path(__file__).resolve().parents[1]
# What each package may import of ours besides itself.
MAY_IMPORT = {
    "ir_nodes": set(),
    "barriers": {"ir_nodes"},
    "codegen": {"ir_nodes"},
    "lazy_backend": {"ir_nodes", "barriers", "codegen"},
}
OURS = {*MAY_IMPORT, "tests", "examples", "benchmarks"}
MAX_PYTHON_LINES = 300
MAX_CPP_LINES = 2000

PACKAGE_FILES = sorted(file for package in MAY_IMPORT for file in (ROOT / package).rglob("*.py"))
OTHER_FILES = sorted(file for folder in ("tests", "examples", "benchmarks") for file in (ROOT / folder).rglob("*.py"))
ALL_FILES = [*PACKAGE_FILES, *OTHER_FILES, *sorted(ROOT.glob("*.py"))]
NATIVE_FILES = sorted((ROOT / "lazy_backend" / "csrc").glob("*"))


def name(file: Path) -> str:
    return str(file.relative_to(ROOT))


def imports(tree: ast.AST) -> list[tuple[int, str]]:
    """Line and top-level package of every absolute import, those inside functions too."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name.split(".")[0]) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found.append((node.lineno, (node.module or "").split(".")[0] if node.level == 0 else "."))
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("importlib.import_module", "import_module", "__import__"):
            argument = node.args[0] if node.args else None
            if isinstance(argument, ast.Constant):
                found.append((node.lineno, str(argument.value).split(".")[0]))
    return found


def wrong_imports(package: str, source: str) -> list[tuple[int, str]]:
    """Imports in a file of ``package`` that do not run downwards; relative ones hide where they go and are wrong too."""
    allowed = MAY_IMPORT[package] | {package}
    return [(line, what) for line, what in imports(ast.parse(source)) if what == "." or (what in OURS and what not in allowed)]


def local_imports(source: str) -> list[tuple[int, str]]:
    """Imports of our own packages inside functions, where they would hide a cycle."""
    functions = [n for n in ast.walk(ast.parse(source)) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))]
    return [(line, what) for function in functions for line, what in imports(function) if what in MAY_IMPORT]


def environment_reads(source: str) -> list[int]:
    """Lines that name os.environ or os.getenv, however imported."""
    lines = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "environb", "getenv", "getenvb"):
            lines.append(node.lineno)
        elif isinstance(node, ast.ImportFrom) and node.module == "os":
            lines += [node.lineno for alias in node.names if alias.name in ("environ", "environb", "getenv", "getenvb")]
    return lines


@pytest.mark.parametrize("file", PACKAGE_FILES, ids=name)
def test_imports_only_run_downwards(file: Path) -> None:
    source = file.read_text()
    assert wrong_imports(file.relative_to(ROOT).parts[0], source) == []
    assert local_imports(source) == []


@pytest.mark.parametrize(
    ("package", "source"),
    [
        ("ir_nodes", "import barriers"),
        ("ir_nodes", "from lazy_backend.native import load"),
        ("barriers", "def f():\n    import codegen.fuse"),
        ("codegen", "from barriers import schedule"),
        ("codegen", "import importlib\nimportlib.import_module('lazy_backend.flush')"),
        ("lazy_backend", "from . import native"),
        ("lazy_backend", "import examples.gpt"),
    ],
)
def test_a_wrong_import_is_seen(package: str, source: str) -> None:
    assert len(wrong_imports(package, source)) == 1


def test_an_import_inside_a_function_is_seen() -> None:
    assert local_imports("def f():\n    from ir_nodes import node\n") == [(2, "ir_nodes")]


@pytest.mark.parametrize("file", ALL_FILES, ids=name)
def test_only_settings_reads_the_environment(file: Path) -> None:
    reads = environment_reads(file.read_text())
    assert bool(reads) == (name(file) == "ir_nodes/settings.py"), reads


def test_an_environment_read_is_seen() -> None:
    sources = ["import os\nos.environ['A']", "import os\nos.getenv('A')", "from os import environ", "import os as o\no.environ"]
    assert [len(environment_reads(source)) for source in sources] == [1, 1, 1, 1]


@pytest.mark.parametrize("file", ALL_FILES, ids=name)
def test_files_are_short_and_say_their_job(file: Path) -> None:
    source = file.read_text()
    assert len(source.splitlines()) <= MAX_PYTHON_LINES
    assert ast.get_docstring(ast.parse(source)), "a file's docstring states its job"


@pytest.mark.parametrize("file", PACKAGE_FILES, ids=name)
def test_every_signature_is_typed_and_no_except_is_bare(file: Path) -> None:
    untyped, bare = [], []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            untyped += [f"{node.name}({a.arg})" for a in arguments if a.annotation is None and a.arg not in ("self", "cls")]
            untyped += [node.name] if node.returns is None else []
        elif isinstance(node, ast.ExceptHandler) and node.type is None:
            bare.append(node.lineno)
    assert (untyped, bare) == ([], [])


def code_lines(text: str) -> int:
    """Lines of C or C++ that hold more than a comment."""
    return sum(1 for line in text.splitlines() if line.strip() and not line.strip().startswith("//"))


def test_native_core_is_small_and_knows_no_cuda() -> None:
    assert {file.suffix for file in NATIVE_FILES} <= {".cpp", ".h", ".c"}
    texts = [file.read_text() for file in NATIVE_FILES]
    assert sum(code_lines(file.read_text()) for file in NATIVE_FILES if file.suffix != ".c") < MAX_CPP_LINES
    assert [line for text in texts for line in re.findall(r"#include\s*[<\"](?:.*/)?cuda.*", text)] == []


def test_packages_are_listed_and_complete() -> None:
    listed = re.search(r"^packages = \[(.*)\]$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert listed is not None
    folders = {".".join(file.parent.relative_to(ROOT).parts) for file in PACKAGE_FILES}
    assert set(re.findall(r'"([\w.]+)"', listed[1])) == folders


def test_dependencies_cover_what_packages_import() -> None:
    known = {*sys.stdlib_module_names, *OURS, "lazysched_core"}  # the core is built, not installed
    used = {what for file in PACKAGE_FILES for _, what in imports(ast.parse(file.read_text()))} - known
    text = (ROOT / "pyproject.toml").read_text()
    block = text[text.index("dependencies = [") : text.index("[project.optional-dependencies]")]
    assert used <= set(re.findall(r'"([a-z]+)', block))


def test_readme_shows_every_setting() -> None:
    readme = (ROOT / "README.md").read_text()
    rows = re.findall(r"^\| `(LAZYSCHED_\w+|CXX)` \| (.*?) \| (.*?) \| (.*?) \| (.*?) \|$", readme, re.MULTILINE)
    expected = [(row[0], row[1], f"`{row[2]}`" if row[2] else "", *row[3:]) for row in settings.table()]
    assert rows == expected


def test_no_file_is_named_like_a_package_in_tests() -> None:
    assert [path.name for path in (ROOT / "tests").iterdir() if path.is_dir() and path.name in MAY_IMPORT] == []
