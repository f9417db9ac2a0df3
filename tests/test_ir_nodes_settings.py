"""Settings: what they take, what they refuse and in which words."""

from __future__ import annotations

from pathlib import Path

import pytest

from ir_nodes import settings
from ir_nodes.settings import SettingsError


def test_defaults() -> None:
    got = settings.read({})
    assert (got.engine, got.device, got.mode, got.cxx) == ("auto", "auto", "lazy", "")
    assert (got.auto_barrier, got.verify, got.frames) == (True, False, True)
    assert (got.max_ops, got.max_pending_bytes, got.cache_size) == (20000, 0, 256)
    assert got.debug == frozenset()
    assert got.cache_dir == Path.home() / ".cache" / "lazysched"


@pytest.mark.parametrize(
    ("variable", "text", "field", "value"),
    [
        ("LAZYSCHED_ENGINE", "triton", "engine", "triton"),
        ("LAZYSCHED_DEVICE", "cpu", "device", "cpu"),
        ("LAZYSCHED_MODE", "eager", "mode", "eager"),
        ("LAZYSCHED_AUTO_BARRIER", "off", "auto_barrier", False),
        ("LAZYSCHED_VERIFY", "True", "verify", True),
        ("LAZYSCHED_MAX_OPS", "7", "max_ops", 7),
        ("LAZYSCHED_MAX_PENDING_BYTES", "4096", "max_pending_bytes", 4096),
        ("LAZYSCHED_MAX_PENDING_BYTES", "3K", "max_pending_bytes", 3 * 1024),
        ("LAZYSCHED_MAX_PENDING_BYTES", "512M", "max_pending_bytes", 512 * 1024**2),
        ("LAZYSCHED_MAX_PENDING_BYTES", "2G", "max_pending_bytes", 2 * 1024**3),
        ("LAZYSCHED_MAX_PENDING_BYTES", "auto", "max_pending_bytes", 0),
        ("LAZYSCHED_CACHE_DIR", "/some/where", "cache_dir", Path("/some/where")),
        ("LAZYSCHED_CACHE_DIR", "~/x", "cache_dir", Path.home() / "x"),
        ("XDG_CACHE_HOME", "/xdg", "cache_dir", Path("/xdg/lazysched")),
        ("XDG_CACHE_HOME", "relative", "cache_dir", Path.home() / ".cache" / "lazysched"),
        ("LAZYSCHED_DEBUG", "barriers, graph", "debug", frozenset({"barriers", "graph"})),
        ("LAZYSCHED_DEBUG", "", "debug", frozenset()),
        ("CXX", "clang++ -O1", "cxx", "clang++ -O1"),
    ],
)
def test_reads(variable: str, text: str, field: str, value: object) -> None:
    assert getattr(settings.read({variable: text}), field) == value


@pytest.mark.parametrize(
    ("variable", "text", "valid"),
    [
        ("LAZYSCHED_ENGINE", "tritn", "auto, aten, triton"),
        ("LAZYSCHED_ENGINE", "", "auto, aten, triton"),
        ("LAZYSCHED_DEVICE", "cuda:0", "auto, cpu, cuda"),
        ("LAZYSCHED_MODE", "LAZY", "lazy, eager"),
        ("LAZYSCHED_FRAMES", "2", "0, 1"),
        ("LAZYSCHED_MAX_OPS", "0", "above 0"),
        ("LAZYSCHED_MAX_OPS", "-3", "above 0"),
        ("LAZYSCHED_MAX_OPS", "1e3", "above 0"),
        ("LAZYSCHED_CACHE_SIZE", "many", "above 0"),
        ("LAZYSCHED_MAX_PENDING_BYTES", "2T", "64K, 512M, 2G"),
        ("LAZYSCHED_CACHE_DIR", "", "a path"),
        ("LAZYSCHED_DEBUG", "barriers,kernel", "barriers, kernels, graph"),
    ],
)
def test_malformed_names_variable_value_and_valid(variable: str, text: str, valid: str) -> None:
    with pytest.raises(SettingsError) as caught:
        settings.read({variable: text})
    message = str(caught.value)
    assert variable in message and repr(text) in message and valid in message


def test_unknown_variable_is_refused_with_the_close_one() -> None:
    with pytest.raises(SettingsError, match=r"LAZYSCHED_ENGIN='aten'.*did you mean LAZYSCHED_ENGINE\?.*LAZYSCHED_CACHE_SIZE"):
        settings.read({"LAZYSCHED_ENGIN": "aten"})
    assert issubclass(SettingsError, ValueError)


def test_override_is_scoped_nested_and_checked() -> None:
    before = settings.current()
    with settings.override(engine="aten", debug={"graph"}) as outer:
        assert settings.current() is outer and outer.engine == "aten" and outer.debug == {"graph"}
        with settings.override(max_ops=5, verify=True):
            inner = settings.current()
            assert (inner.engine, inner.max_ops, inner.verify) == ("aten", 5, True)
        assert settings.current() is outer
        with pytest.raises(SettingsError, match="LAZYSCHED_MAX_OPS='0'"), settings.override(max_ops=0):
            pass
        with pytest.raises(SettingsError, match="max_opps"), settings.override(max_opps=1):
            pass
        assert settings.current() is outer
    assert settings.current() is before


def test_override_ends_with_an_error_in_the_block() -> None:
    before = settings.current()
    with pytest.raises(KeyError), settings.override(frames=False):
        raise KeyError
    assert settings.current() is before


def test_environment_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    before = settings.current()
    monkeypatch.setenv("LAZYSCHED_MAX_OPS", "11")
    assert settings.current() is before
    monkeypatch.setattr(settings, "_current", None)
    assert settings.current().max_ops == 11


def test_child_environment_says_what_override_says() -> None:
    values = {"engine": "aten", "debug": {"graph", "kernels"}, "frames": False, "max_pending_bytes": 5}
    with settings.override(**values) as here:
        there = settings.read(settings.child_environment(**values))
        assert (there.engine, there.debug, there.frames, there.max_pending_bytes) == (
            here.engine, here.debug, here.frames, here.max_pending_bytes)
    with pytest.raises(SettingsError, match="LAZYSCHED_ENGINE='x'"):
        settings.child_environment(engine="x")


def test_code_key_follows_what_changes_code() -> None:
    base = settings.read({}).code_key()
    assert settings.read({"LAZYSCHED_ENGINE": "aten"}).code_key() != base
    assert settings.read({"LAZYSCHED_DEBUG": "graph", "LAZYSCHED_MAX_OPS": "3"}).code_key() == base


def test_table_has_a_row_for_every_field() -> None:
    rows = settings.table()
    assert len(rows) == len(settings.Settings.__dataclass_fields__)
    assert all(variable and doc for variable, _, _, doc, _ in rows)


def test_blocks_with_other_settings_are_told_to_who_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, bool]] = []
    monkeypatch.setattr(settings, "changed", [lambda: seen.append((settings.current().engine, bool(settings.unusual())))])
    usual = settings.current().engine
    other = "aten" if usual != "aten" else "triton"
    with settings.override(engine=other), settings.override(debug={"graph"}):
        pass
    with pytest.raises(ZeroDivisionError), settings.override(verify=True):
        1 / 0  # noqa: B018
    assert seen == [(other, True), (other, True), (other, True), (usual, False), (usual, False), (usual, False)]
