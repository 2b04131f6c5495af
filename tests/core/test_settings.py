"""Settings: immutable, from the environment once, changed for a block or the process, never for another thread."""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
import logging
import threading
from pathlib import Path

import pytest

from lucidnn.core import settings
from lucidnn.core.errors import InvalidArgument
from lucidnn.core.settings import Settings, configure, current, from_environment, using


@pytest.fixture(autouse=True)
def process_settings_come_back(monkeypatch):
    monkeypatch.setattr(settings, "_process", settings._process)


def test_defaults():
    s = Settings()
    assert (s.policy, s.deterministic, s.engine, s.workspace_limit, s.allow_tf32) == (
        "heuristic",
        False,
        None,
        None,
        None,
    )
    assert (s.disable_engines, s.exclude_notes, s.no_fallback, s.cache_dir, s.log) == ((), (), False, None, None)


ENVIRONMENTS = {
    "nothing": ({}, Settings()),
    "empty": (
        {f"LUCIDNN_{n}": "" for n in ("POLICY", "CACHE_DIR", "LOG", "DISABLE_ENGINES", "NO_FALLBACK")},
        Settings(),
    ),
    "policy": ({"LUCIDNN_POLICY": "find"}, Settings(policy="find")),
    "folder": ({"LUCIDNN_CACHE_DIR": "/some/where"}, Settings(cache_dir=Path("/some/where"))),
    "log": ({"LUCIDNN_LOG": "INFO"}, Settings(log="info")),
    "disable": ({"LUCIDNN_DISABLE_ENGINES": "a.b, c.*,,"}, Settings(disable_engines=("a.b", "c.*"))),
    "fallback": ({"LUCIDNN_NO_FALLBACK": "1"}, Settings(no_fallback=True)),
    "fallback, false": ({"LUCIDNN_NO_FALLBACK": "False"}, Settings()),
}


@pytest.mark.parametrize("environ, expected", ENVIRONMENTS.values(), ids=ENVIRONMENTS)
def test_environment(environ, expected):
    assert from_environment(environ) == expected


@pytest.mark.parametrize(
    "name, value, accepted",
    [
        ("LUCIDNN_POLICY", "fastest", "heuristic, find, error"),
        ("LUCIDNN_LOG", "loud", "debug, info, warning, error"),
        ("LUCIDNN_NO_FALLBACK", "maybe", "False, True"),
    ],
)
def test_a_bad_environment_names_the_variable(name, value, accepted):
    with pytest.raises(InvalidArgument) as caught:
        from_environment({name: value})
    assert str(caught.value).startswith(f"{name}: found '{value}'") and accepted in str(caught.value)


BAD = {
    "policy": ("fastest", "policy: found 'fastest'; accepted: heuristic, find, error"),
    "log": ("loud", "log: found 'loud'"),
    "workspace_limit": (-1, "workspace_limit: found -1; accepted: a number of bytes >= 0, or None"),
    "disable_engines": ("conv.fft", "disable_engines: found 'conv.fft'; accepted: a sequence of strings"),
    "exclude_notes": ("fft", "exclude_notes: found 'fft'; accepted: a sequence of strings"),
    "polcy": ("find", "setting: found polcy; accepted: allow_tf32, cache_dir"),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("change", [configure, lambda **c: using(**c).__enter__()], ids=["configure", "using"])
def test_a_bad_setting_changes_nothing(change, name):
    before = current()
    value, expected = BAD[name]
    with pytest.raises(InvalidArgument) as caught:
        change(**{name: value})
    assert str(caught.value).startswith(expected)
    assert current() is before


def test_equal_settings_are_one_key():
    a, b = Settings(disable_engines=["x", "y"]), Settings(disable_engines=("x", "y"))
    assert a == b and hash(a) == hash(b) and a != Settings() and a != "x"
    assert dataclasses.replace(a, policy="find") != a
    with pytest.raises(dataclasses.FrozenInstanceError):
        a.policy = "find"


def test_blocks_nest_and_end():
    outside = current()
    with using(policy="find") as outer:
        assert current() is outer and outer.policy == "find"
        with using(deterministic=True) as inner:
            assert (inner.policy, inner.deterministic) == ("find", True)
        assert current() is outer
        with using(outside) as again:
            assert again is outside
        with pytest.raises(ZeroDivisionError), using(policy="error"):
            raise ZeroDivisionError
        assert current() is outer
    assert current() is outside


def test_configure_is_for_the_process_and_blocks_win():
    configure(workspace_limit=7)
    seen = []
    with using(policy="find"):
        thread = threading.Thread(target=lambda: seen.append(current()))
        thread.start()
        thread.join()
        assert current().workspace_limit == 7
        configure(workspace_limit=8)
        assert current().workspace_limit == 7, "a block keeps what it was entered with"
    assert (seen[0].policy, seen[0].workspace_limit) == ("heuristic", 7), "a block leaked into another thread"
    assert current().workspace_limit == 8


def test_blocks_follow_tasks():
    async def one(limit):
        with using(workspace_limit=limit):
            for _ in range(5):
                await asyncio.sleep(0)
                assert current().workspace_limit == limit
            return await asyncio.create_task(two())

    async def two():
        return current().workspace_limit

    async def both():
        return await asyncio.gather(*(one(n) for n in range(10)))

    assert asyncio.run(both()) == list(range(10))
    with using(workspace_limit=3):
        context = contextvars.copy_context()
    assert context.run(lambda: current().workspace_limit) == 3


def test_patterns():
    s = Settings(disable_engines=("conv.fft*", "pool.direct"))
    assert [s.allows(n) for n in ("conv.fft_tiled", "conv.fft", "conv.direct", "pool.direct", "pool.direct2")] == [
        False, False, True, False, True
    ]  # fmt: skip


def test_the_log_level_is_set():
    level = logging.getLogger("lucidnn").level
    try:
        with using(log="debug"):
            assert logging.getLogger("lucidnn").level == logging.DEBUG
        configure(log="error")
        assert logging.getLogger("lucidnn").level == logging.ERROR
    finally:
        logging.getLogger("lucidnn").setLevel(level)


def test_the_cache_directory_is_the_platforms_unless_given(tmp_path):
    assert Settings(cache_dir=tmp_path).directory() == tmp_path
    assert Settings(cache_dir=str(tmp_path)).directory() == tmp_path
    assert Settings().directory().name == "lucidnn"
