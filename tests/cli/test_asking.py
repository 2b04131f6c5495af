"""``info``, ``explain``, ``find`` and ``cache``."""

from __future__ import annotations

import json

import pytest

from fakes import LINE, Fake
from lucidnn.cli.cache import from_text, to_text
from lucidnn.core import registry
from lucidnn.core.errors import InvalidArgument
from lucidnn.core.store import Row, Store

GPU = "conv_fprop x=bf16[8,64,14,14]@nhwc w=bf16[32,64,3,3]@nhwc padding=1 on=cuda:sm_90"


# ---- info --------------------------------------------------------------------------------------------------


def test_info_lists_every_engine_version_and_setting(cli, tmp_path):
    import torch

    shown = cli("info", workspace_limit=12345).output
    for name, engine in registry.engines().items():
        (line,) = (line for line in shown.splitlines() if line.startswith(f"{name} "))
        assert all(word in line for word in (*engine.operations, *engine.targets, *engine.notes))
    assert torch.__version__ in shown and str(tmp_path / "rows") in shown and "tuned rows  0" in shown
    changed = [line.split()[0] for line in shown.splitlines() if line.endswith("changed")]
    assert changed == ["workspace_limit", "cache_dir"] and "12345" in shown


def test_info_gives_the_reason_why_a_file_takes_no_part(cli, monkeypatch):
    monkeypatch.setitem(registry._failures, "lucidnn.engines.conv.broken", "ImportError: No module named 'gpulib'")
    assert "ImportError: No module named 'gpulib'" in cli("info").output


# ---- explain -----------------------------------------------------------------------------------------------


def test_explain_answers_for_a_gpu_that_is_not_there(cli):
    answer = cli("explain", GPU)
    assert answer.exit_code == 0
    lines = answer.output.splitlines()
    assert lines[0].endswith("padding=1,1 on=cuda:sm_90:132")
    rows = {line.split()[0]: line for line in lines if line.startswith(("conv.",))}
    assert set(rows) >= {e.name for e in registry.for_operation("conv_fprop")}
    assert "no: needs a target of kind cpu, found cuda:sm_90:132" in rows["conv.direct"]
    winner = next(line for line in lines if " would run: " in line)
    assert winner.split()[0] in rows and "no: " not in rows[winner.split()[0]] and "estimate" in winner


def test_explain_gives_all_reasons_of_an_engine(cli, engines):
    engines(Fake("toy.picky", refuses=("needs a, found b", "needs c, found d")))
    shown = cli("explain", LINE).output
    assert "no: needs a, found b" in shown and "needs c, found d" in shown
    assert "toy.reference would run: the only engine that takes it" in shown


def test_explain_shows_cost_workspace_notes_and_configuration(cli, engines):
    engines(Fake("toy.one", 2.5e-3, notes=("tf32",), configs=[{"tile": 4, "cost": 2.5e-3}], workspace=2048))
    row = next(line for line in cli("explain", LINE).output.splitlines() if line.startswith("toy.one "))
    assert row.split() == ["toy.one", "2.5", "ms", "2", "KiB", "tf32", "tile=4", "cost=0.0025"]


def test_explain_for_another_target(cli):
    assert "on=cuda:sm_80:108" in cli("explain", GPU, "--on", "cuda:sm_80").output
    assert cli("explain", GPU, "--on", "cuda:volta").exit_code == 2


def test_explain_with_an_engine_named(cli):
    answer = cli("explain", GPU, "--engine", "conv.reference")
    assert answer.exit_code == 0 and "conv.reference would run: named by the caller" in answer.output
    answer = cli("explain", GPU, "--engine", "conv.direct")
    assert answer.exit_code == 1 and "engine conv.direct does not take" in answer.output


def test_explain_times_nothing_even_where_the_policy_would(cli, engines):
    toy, other = Fake("toy.one"), Fake("toy.two", 3.0)
    engines(toy, other)
    answer = cli("explain", LINE, policy="find")
    assert toy.built == other.built == [] and "Policy 'find' would time the candidates first" in answer.output


def test_explain_where_nothing_takes_it(cli, engines):
    engines()
    answer = cli("explain", LINE, no_fallback=True)
    assert answer.exit_code == 1 and "no engine takes" in answer.output


# ---- find and cache ----------------------------------------------------------------------------------------


def test_what_find_measures_is_shown_chosen_and_cleared(cli, engines, tmp_path, quick):
    engines(
        Fake("toy.cheap", 1.0, seconds=2e-3), Fake("toy.fast", 9.0), Fake("toy.broken", 2.0, run_error=OSError("no"))
    )
    answer = cli("find", LINE)
    assert answer.exit_code == 1  # one of them failed
    names = [line.split()[0] for line in answer.output.splitlines() if line.startswith("toy.")]
    assert names[:2] == ["toy.fast", "toy.cheap"] and "failed: OSError: no" in answer.output
    assert "toy.fast would run: fastest of the user's timings" in cli("explain", LINE).output
    shown = cli("cache").output
    assert shown.startswith(f"3 tuned rows in {tmp_path / 'rows'}") and shown == cli("cache", "show").output
    assert cli("cache", "clear").output.startswith("3 tuned rows deleted")
    assert cli("cache").output.startswith("0 tuned rows")
    assert "by estimate" in cli("explain", LINE).output


def test_find_where_there_is_nothing_to_time(cli, engines):
    engines()
    answer = cli("find", LINE)
    assert answer.exit_code == 0 and "nothing to time: toy.reference takes it" in answer.output


def test_find_says_so_where_times_cannot_be_kept(cli, engines, tmp_path, quick):
    engines(Fake("toy.one"), Fake("toy.two"))
    file = tmp_path / "taken"
    file.write_text("a file where the directory would be")
    answer = cli("find", LINE, cache_dir=file)
    assert answer.exit_code == 0 and answer.output.splitlines()[-1].startswith("not kept: ")
    assert "kept in " in cli("find", LINE).output.splitlines()[-1]


def test_rows_travel_as_text(cli, engines, tmp_path, quick):
    engines(Fake("toy.one", configs=[{"tile": 4}, {"tile": 8}]), Fake("toy.two"))
    cli("find", LINE)
    file = tmp_path / "rows.jsonl"
    assert cli("cache", "export", file).exit_code == 0
    lines = file.read_text().splitlines()
    assert json.loads(lines[0]) == {"format": 1} and len(lines) == 4
    assert {json.loads(line)["engine"] for line in lines[1:]} == {"toy.one", "toy.two"}
    before = Store(tmp_path / "rows").rows()
    cli("cache", "clear")
    answer = cli("cache", "import", file)
    assert answer.exit_code == 0 and answer.output.startswith("3 tuned rows added")
    assert Store(tmp_path / "rows").rows() == before
    other = cli("cache", "import", file, cache_dir=tmp_path / "elsewhere")
    assert other.exit_code == 0 and Store(tmp_path / "elsewhere").rows() == before


def test_exporting_nothing_and_reading_it_back():
    assert from_text(to_text([])) == []


ROW = Row("p", "here", "conv.direct", "ab12", {"tile": 4}, 1e-3, 0)


@pytest.mark.parametrize(
    ("spoil", "line", "said"),
    [
        (lambda text: "", 1, "a file of tuned rows"),
        (lambda text: "# rows\n" + text, 1, "a file of tuned rows"),
        (lambda text: text.replace('"format": 1', '"format": 7'), 1, "format 7"),
        (lambda text: text[:-10], 2, "a tuned row"),
        (lambda text: text.replace('"problem"', '"qroblem"'), 2, "a tuned row"),
        (lambda text: text.replace('"workspace": 0', '"workspace": "0"'), 2, "workspace '0'"),
        (lambda text: text.replace('"seconds": 0.001', '"seconds": -1'), 2, "seconds -1"),
        (lambda text: text.replace('"seconds": 0.001', '"seconds": null'), 2, "status 'ok' with seconds None"),
        (lambda text: text.replace('{"tile": 4}', "4"), 2, "another type"),
        (lambda text: text + "[]\n", 3, "a tuned row"),
    ],
)
def test_a_spoilt_file_is_named_with_its_line_and_adds_nothing(cli, tmp_path, spoil, line, said):
    file = tmp_path / "rows.jsonl"
    file.write_text(spoil(to_text([ROW])))
    answer = cli("cache", "import", file)
    assert answer.exit_code == 2 and f"{file}:{line}: " in answer.stderr and said in answer.stderr
    assert len(answer.stderr.splitlines()) == 1 and not (tmp_path / "rows").exists()


@pytest.mark.parametrize(
    "words", [("export", "/no/such/folder/x"), ("export", "/"), ("import", "/no/such"), ("import", "/")]
)
def test_a_file_that_cannot_be_used(cli, words):
    answer = cli("cache", *words)
    assert answer.exit_code == 2 and answer.stderr.startswith(f"lucidnn: file: found {words[1]}")


def test_bytes_that_are_not_text(cli, tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b"\xff\xfe\x00")
    assert "which is not text" in cli("cache", "import", file).stderr


def test_a_row_of_another_type_is_never_made():
    with pytest.raises(InvalidArgument):
        from_text(to_text([ROW]).replace('"status": "ok"', '"status": "fine"'))
    assert from_text(to_text([ROW])) == [ROW]
