"""Tuned rows on disk: what is written comes back; what cannot be read or written is a miss and a log line."""

from __future__ import annotations

import dataclasses
import logging
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import threading
import traceback
from pathlib import Path

import pytest

from lucidnn.core.store import Row, Store

ROW = Row("p", "here", "a.b", "s1", {"tile": 4, "name": "x", "flag": True}, 2e-3, 128)


def with_(**changes) -> Row:
    return dataclasses.replace(ROW, **changes)


def test_rows_come_back_fastest_first_and_failures_last(tmp_path):
    store = Store(tmp_path / "not" / "there" / "yet")
    assert store.rows() == []
    rows = [
        with_(engine="c.d", seconds=None, status="failed", reason='it\'s "broken"; DROP TABLE rows'),
        with_(engine="e.f", seconds=1e-3, config={}),
        ROW,
    ]
    assert store.put(rows)
    assert store.rows() == [rows[1], ROW, rows[0]]
    assert Store(store.path.parent).rows("p", "here") == [rows[1], ROW, rows[0]]
    assert store.rows("q") == store.rows("p", "there") == []


def test_the_same_key_is_replaced_and_another_is_not(tmp_path):
    store = Store(tmp_path)
    store.put([ROW])
    store.put([with_(seconds=1e-3, workspace=0, config=dict(reversed(ROW.config.items())))])
    assert [r.seconds for r in store.rows()] == [1e-3]
    others = [with_(**{k: "other"}) for k in ("problem", "environment", "engine", "source")]
    store.put([*others, with_(config={"tile": 8})])
    assert len(store.rows()) == 6
    assert store.clear() == 6 and store.rows() == [] and store.clear() == 0


DAMAGE = {
    "not a database": b"this is not a database, it is a sentence that is long enough to look like one" * 20,
    "empty": b"",
    "cut short": None,
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_file_is_a_miss_and_a_line(tmp_path, caplog, kind):
    store = Store(tmp_path)
    store.put([with_(problem=f"p{n}" * 50) for n in range(100)])
    content = DAMAGE[kind]
    whole = store.path.read_bytes()
    store.path.write_bytes(whole[: len(whole) // 2] if content is None else content)
    for suffix in ("-wal", "-shm"):
        store.path.with_name(store.path.name + suffix).unlink(missing_ok=True)
    with caplog.at_level(logging.WARNING, "lucidnn"):
        assert store.rows() == []
    assert "cannot be read" in caplog.text and str(store.path) in caplog.text
    store.put([ROW])  # may work (an empty file is an empty database) or be a line; never an error
    store.clear()
    assert store.put([ROW]) and store.rows() == [ROW]


@pytest.mark.parametrize("text", ["not json", "[]", '{"problem": "p"}', '{"unknown": 1}'])
def test_a_row_of_another_shape_is_a_miss(tmp_path, caplog, text):
    store = Store(tmp_path)
    store.put([ROW])
    with sqlite3.connect(store.path) as db:
        db.execute("UPDATE rows SET row = ?", (text,))
    db.close()
    with caplog.at_level(logging.WARNING, "lucidnn"):
        assert store.rows() == []
    assert "choosing without them" in caplog.text


def test_a_folder_where_the_file_should_be(tmp_path, caplog):
    store = Store(tmp_path)
    store.path.mkdir()
    with caplog.at_level(logging.WARNING, "lucidnn"):
        assert store.rows() == [] and not store.put([ROW])


def test_a_directory_that_cannot_be_made(tmp_path, caplog):
    (tmp_path / "file").touch()
    store = Store(tmp_path / "file" / "below")
    with caplog.at_level(logging.WARNING, "lucidnn"):
        assert store.rows() == [] and not store.put([ROW])
    assert "cannot be written" in caplog.text


@pytest.mark.parametrize("mode, found", [(0o555, [ROW]), (0o000, [])], ids=["read only", "no entry"])
def test_a_directory_that_others_own(mode, found):
    folder = Path(tempfile.mkdtemp())
    store = Store(folder)
    store.put([ROW])

    def as_an_ordinary_user() -> None:
        assert store.rows() == found
        assert not store.put([with_(engine="x.y")])

    try:
        store.path.chmod(0o444)
        folder.chmod(mode)
        if os.geteuid() != 0:
            as_an_ordinary_user()
        else:
            in_a_child_without_rights(as_an_ordinary_user)
    finally:
        folder.chmod(0o700)
        shutil.rmtree(folder)


def in_a_child_without_rights(body) -> None:
    """The superuser may write anywhere, so a forked child gives its rights up first."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            body()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


WRITER = """
import sys, dataclasses
from pathlib import Path
from lucidnn.core.store import Row, Store
who, folder = sys.argv[1:]
store = Store(Path(folder))
print("ready", flush=True)
sys.stdin.readline()
for n in range(40):
    assert store.put([Row(f"p{n}", who, "a.b", "s", {"n": n}, 1.0 * n, 0)])
    assert any(r.config == {"n": n} for r in store.rows(f"p{n}", who))
"""


def test_two_processes_write_at_once(tmp_path):
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, who, str(tmp_path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for who in ("first", "second")
    ]
    for w in writers:
        assert w.stdout.readline() == "ready\n"
    for w in writers:
        w.stdin.write("go\n")
        w.stdin.flush()
    for w in writers:
        out, err = w.communicate(timeout=120)
        assert w.returncode == 0 and err == "", err
    assert len(Store(tmp_path).rows()) == 80
    assert len(Store(tmp_path).rows(environment="second")) == 40


def test_threads_write_at_once(tmp_path):
    store, failures = Store(tmp_path), []

    def work(who):
        for n in range(20):
            if not store.put([with_(problem=f"p{n}", engine=f"e.{who}")]):
                failures.append((who, n))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failures and len(store.rows()) == 80


def test_the_file_is_named_by_its_format(tmp_path):
    Store(tmp_path).put([ROW])
    assert [f.name for f in tmp_path.iterdir() if f.suffix == ".sqlite"] == ["tuned-1.sqlite"]
