"""The README's tables come from the committed results, and the README in the repository is up to date."""

from __future__ import annotations

import doctest
import importlib.util
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_spec = importlib.util.spec_from_file_location("readme_table", ROOT / "docs" / "readme_table.py")
assert _spec and _spec.loader
readme_table = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(readme_table)

GPU = {"device": "NVIDIA H200", "target": "cuda:sm_90:132", "threads": 16, "driver": "580.1", "torch": "2.11.0"}
GPU |= {"triton": "3.6.0", "cudnn": 91002, "cuda": "13.0", "commit": "abc123", "date": "2026-11-30T12:00:00Z"}
CPU = {"device": "AMD EPYC", "target": "cpu:avx512:2", "threads": 2, "torch": "2.13.0", "date": "2026-11-29T12:00:00Z"}


def conv(name: str, ratio: float | None, policies: list[str], **more) -> dict:
    row = {
        "suite": "conv",
        "name": name,
        "problem": f"{name} on=cuda:sm_90:132",
        "policies": policies,
        "engine": "conv.x",
    }
    row |= {"seconds": 1e-3, "peer_seconds": 1e-3 * (ratio or 1), "ratio": ratio, "tflops": 432.1, "environment": GPU}
    return row | more


def step(policy: str, ratio: float, environment: dict) -> dict:
    row = {"suite": "step", "name": f"step {policy}", "batch": 64, "dtype": "f32", "layout": "nchw", "how": "eager"}
    return row | {
        "policy": policy,
        "seconds": 0.02,
        "peer_seconds": 0.02 * ratio,
        "ratio": ratio,
        "environment": environment,
    }


ROWS = [
    step("heuristic", 0.9, CPU),
    step("find", 1.25, CPU),
    step("find", 1.5, GPU),
    conv("conv_fprop x=bf16[1,2,3,4] w=bf16[1,2,3,4]", 0.5, ["heuristic"]),
    conv("conv_fprop x=bf16[1,2,3,4] w=bf16[1,2,3,4]", 2.0, ["find"], seconds=4e-4),
    conv("conv_fprop x=bf16[9,2,3,4] w=bf16[1,2,3,4]", 0.5, ["heuristic", "find"]),
    conv("conv_dgrad dy=bf16[9,2,3,4] w=bf16[1,2,3,4]", None, ["find"], seconds=None, fault="out of memory"),
    {"suite": "host", "name": "h", "call": "conv2d", "mode": "no grad", "environment": GPU}
    | {"seconds": 5e-6, "peer_seconds": 1e-5, "ratio": 2.0},
    {"suite": "import", "name": "import lucidnn", "seconds": 4e-3, "loads": [], "environment": CPU},
]


@pytest.fixture
def results(tmp_path) -> Path:
    folder = tmp_path / "results"
    folder.mkdir()
    (folder / "all.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return folder


def written(tmp_path: Path, results: Path, text: str, *words: str) -> tuple[int, str]:
    readme = tmp_path / "README.md"
    readme.write_text(text)
    code = readme_table.main(["--readme", str(readme), "--results", str(results), *words])
    return code, readme.read_text()


def cells(text: str) -> list[list[str]]:
    return [[c.strip() for c in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]


def test_what_stands_around_a_table_is_kept(tmp_path, results):
    text = "# top\n\n<!-- table:step -->\nold\n<!-- end -->\nbetween\n<!-- table:import -->\n<!-- end -->\nbottom\n"
    code, new = written(tmp_path, results, text)
    assert code == 0 and new.startswith("# top\n\n<!-- table:step -->\n| device |") and "old" not in new
    assert "<!-- end -->\nbetween\n<!-- table:import -->\n| machine |" in new and new.endswith("<!-- end -->\nbottom\n")
    assert written(tmp_path, results, new) == (0, new)  # a second time changes nothing


def test_steps_by_device_with_the_gpu_first(tmp_path, results):
    _, new = written(tmp_path, results, "<!-- table:step -->\n<!-- end -->")
    head, _, *rows = cells(new)
    assert head[-1] == "ratio" and [row[0] for row in rows] == ["NVIDIA H200", "AMD EPYC", "AMD EPYC"]
    assert rows[1] == ["AMD EPYC", "batch 64, f32 nchw", "eager", "estimate", "20 ms", "18 ms", "0.90"]
    assert (
        "NVIDIA H200, driver 580.1, cuda 13.0, cudnn 91002, torch 2.11.0, triton 3.6.0, commit abc123, 2026-11-30"
        in new
    )
    assert "AMD EPYC, 2 threads, torch 2.13.0, 2026-11-29" in new


def test_kernels_show_both_ways_to_choose(tmp_path, results):
    _, new = written(tmp_path, results, "<!-- table:conv -->\n<!-- end -->")
    rows = cells(new)[2:]
    assert [row[-2:] for row in rows] == [["0.50", "2.00"], ["0.50", "0.50"], ["-", "out of memory"]]
    assert rows[0][3] == "400 µs" and rows[0][4] == "432"


def test_the_summary_has_geometric_means_and_says_what_is_missing(tmp_path, results):
    _, new = written(tmp_path, results, "<!-- table:summary -->\n<!-- end -->")
    lines = {row[1]: row for row in cells(new)[2:]}
    assert lines["`conv_fprop` bf16, 2 problems, plans by estimate"][-1] == "0.50 (0.50 to 0.50)"
    assert lines["`conv_fprop` bf16, 2 problems, plans by timing"][-1] == "1.00 (0.50 to 2.00)"
    assert not any("conv_dgrad" in name for name in lines)
    steps = [row for row in cells(new)[2:] if row[1].startswith("training step")]
    assert [row[-1] for row in steps] == ["1.50", "1.25"]  # by timing where there is one
    assert lines["host time of `conv2d`, no grad"][2:] == ["5 µs", "10 µs", "2.00"]


def test_every_table_stands_without_any_result(tmp_path):
    (tmp_path / "none").mkdir()
    for name in readme_table.TABLES:
        code, new = written(tmp_path, tmp_path / "none", f"<!-- table:{name} -->\n<!-- end -->")
        assert code == 0 and cells(new) == []


def test_check_changes_nothing_and_tells(tmp_path, results, capsys):
    text = "<!-- table:step -->\nold\n<!-- end -->"
    assert written(tmp_path, results, text, "--check") == (1, text)
    assert "out of date: run `make docs-table`" in capsys.readouterr().err
    _, fresh = written(tmp_path, results, text)
    assert written(tmp_path, results, fresh, "--check") == (0, fresh)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("<!-- table:steps -->\n<!-- end -->", "table:steps is not known; there are summary, step"),
        ("<!-- table:step -->\n", "a table has no <!-- end -->"),
        ("<!-- table:step -->\n<!-- table:host -->\n<!-- end -->", "a table has no <!-- end -->"),
    ],
)
def test_a_marker_that_makes_no_sense(tmp_path, results, capsys, text, said):
    assert written(tmp_path, results, text) == (2, text)
    assert said in capsys.readouterr().err


def test_a_line_that_is_no_result_is_named(tmp_path, results, capsys):
    (results / "bad.jsonl").write_text('{"suite": "step"}\n')
    assert written(tmp_path, results, "")[0] == 2
    assert f"{results / 'bad.jsonl'}:1: not a result" in capsys.readouterr().err


def test_its_examples():
    assert doctest.testmod(readme_table).failed == 0


def test_the_readme_of_this_repository_is_up_to_date():
    assert readme_table.main(["--check"]) == 0
