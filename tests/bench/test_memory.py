"""The suite of operations that move memory: its lines, its share of the copy rate, its means."""

from __future__ import annotations

import json

import pytest
from benchmarks import run, suite_memory
from benchmarks.context import PROBLEMS
from click.testing import CliRunner

from lucidnn.core.target import Target
from lucidnn.testing import read_problems


def test_rows_say_which_share_of_the_copy_rate_they_reach(tmp_path):
    lines, out = tmp_path / "lines.txt", tmp_path / "out.jsonl"
    lines.write_text("max_pool_fwd x=f32[2,3,8,8] window=2\nmax_pool_fwd x=bf16[2,3,8,8] window=2\n")
    words = ["--suite", "memory", "--device", "cpu", "--quick", "--problems", lines, "--out", out, "--commit", "abc"]
    answer = CliRunner().invoke(run.command, [str(word) for word in words])
    assert answer.exit_code == 0, answer.output
    copy, row, mean = (json.loads(line) for line in out.read_text().splitlines())
    assert copy["bytes_per_second"] > 1e8 and row["name"].startswith("max_pool_fwd x=f32[2,3,8,8]")
    assert 0 < row["share"] < 10 and mean["worst"][0][1] == row["name"]
    assert mean["ratio"] == pytest.approx(row["ratio"])  # the mean of one, through a logarithm


def test_every_line_of_a_benchmark_belongs_to_a_device():
    other = {*suite_memory.GPU, *suite_memory.CPU}
    for file in (f for f in PROBLEMS.glob("bench_*.txt") if f.name not in other):
        for problem in read_problems(file, Target.parse("cpu")):
            assert problem.items[0][1].dtype in ("bf16", "f16", "f32"), f"{file.name}: {problem}"
