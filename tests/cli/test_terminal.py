"""Tables, units, and files that are written whole or not at all."""

from __future__ import annotations

import io
import json
import os
import re
import stat
import sys

import pytest

from lucidnn.cli import terminal
from lucidnn.core.errors import InvalidArgument


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_on_a_terminal_a_table_fits_and_loses_nothing(monkeypatch):
    screen = Screen()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("TERM", "xterm")
    long = "a problem that is much longer than the screen is wide"
    terminal.show_table(("name", ">time"), [(long, "1 s"), ("!broken", "")])
    shown = re.sub(r"\x1b\[[\d;]*m", "", screen.getvalue())
    assert max(map(len, shown.splitlines())) == 40 and "…" not in shown
    assert all(word in shown for word in long.split()), shown


def test_brackets_and_colons_are_text(capsys):
    terminal.say("x=f32[red,3] on=cuda:warning: [/bold]")
    terminal.show_table(("[a]",), [("[red]x[/red]",)])
    shown = capsys.readouterr().out
    assert "x=f32[red,3] on=cuda:warning: [/bold]" in shown and "[red]x[/red]" in shown and "[a]" in shown


def test_a_fault_is_marked_by_its_cell_alone(capsys):
    terminal.show_table(("engine", "outcome"), [("conv.x", "!wrong")])
    assert "wrong" in capsys.readouterr().out and not capsys.readouterr().out


@pytest.mark.parametrize(
    ("value", "text"), [(2.0, "2 s"), (0.0999, "99.9 ms"), (1e-9, "1 ns"), (float("inf"), "inf"), (123e-6, "123 µs")]
)
def test_times_have_three_digits_and_a_unit(value, text):
    assert terminal.seconds(value) == text


def test_a_file_takes_its_place_whole(tmp_path):
    place = terminal.json_place(str(tmp_path / "report.json"))
    assert place is not None and list(tmp_path.iterdir()) == []  # asking leaves nothing behind
    terminal.write_json(place, {"error": float("inf"), "name": "µ"})
    assert json.loads(place.read_text(encoding="utf-8")) == {"error": "inf", "name": "µ"}
    assert list(tmp_path.iterdir()) == [place]
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE(place.stat().st_mode) == 0o666 & ~umask


def test_a_failure_half_way_leaves_the_old_file(tmp_path, monkeypatch):
    place = tmp_path / "report.json"
    place.write_text("old")

    def broken(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", broken)
    with pytest.raises(KeyboardInterrupt):
        terminal.write_json(place, {"new": 1})
    assert place.read_text() == "old" and list(tmp_path.iterdir()) == [place]


def test_a_place_that_cannot_be_written_is_said_before_the_work(tmp_path):
    for path, found in ((tmp_path, "a folder"), (tmp_path / "no" / "x", "a folder that does not exist")):
        with pytest.raises(InvalidArgument, match="json: found") as caught:
            terminal.json_place(str(path))
        assert found in str(caught.value)
    assert terminal.json_place(None) is None
    if os.geteuid():  # root may write anywhere
        tmp_path.chmod(0o500)
        with pytest.raises(InvalidArgument, match="Permission denied"):
            terminal.json_place(str(tmp_path / "x"))
