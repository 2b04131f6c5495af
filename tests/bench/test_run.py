"""The benchmark runner: what it writes, what it refuses, and that a fault ends one result and not the run."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest
import torch
from benchmarks import compile as ahead
from benchmarks import run
from click.testing import CliRunner

from lucidnn import backends
from lucidnn.core import timing
from lucidnn.core.problem import Problem
from lucidnn.testing import read_problems

ROOT = Path(__file__).parents[2]


@pytest.fixture
def quick(monkeypatch):
    measure = timing.measure

    def brief(candidates, device, **given):
        return measure(candidates, device, **{**given, "rounds": 3, "sample_seconds": 1e-4})

    monkeypatch.setattr(timing, "measure", brief)


def invoke(*words: object):
    result = CliRunner().invoke(run.command, [str(word) for word in words])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_every_suite_writes_lines_with_their_environment(tmp_path, quick):
    file, lines = tmp_path / "results.jsonl", tmp_path / "lines.txt"
    lines.write_text(
        "conv_fprop x=f32[2,3,8,8] w=f32[4,3,3,3] padding=1 act=relu\nmax_pool_fwd x=f32[2,3,8,8] window=2\n"
    )
    answer = invoke("--device", "cpu", "--quick", "--out", file, "--problems", lines, "--commit", "abc123")
    assert answer.exit_code == 0, answer.output
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert {row["suite"] for row in rows} == set(run.SUITES)
    for row in rows:
        assert row["name"] and row["seconds"] > 0 and not row.get("fault"), row
        assert row["environment"]["commit"] == "abc123" and row["environment"]["torch"] == torch.__version__
        if row["suite"] != "import":
            assert row["ratio"] == pytest.approx(row["peer_seconds"] / row["seconds"])
    conv = [row for row in rows if row["suite"] == "conv"]
    assert {policy for row in conv for policy in row["policies"]} == {"heuristic", "find"}
    assert {row["problem"].split()[0] for row in conv} == {"conv_fprop", "max_pool_fwd"}
    assert all(max(row["error"].values()) < 1e-5 for row in conv)
    steps = [row for row in rows if row["suite"] == "step"]
    assert {row["policy"] for row in steps} == {"heuristic", "find"} and all(row["error"] < 1e-5 for row in steps)
    imports = {row["name"]: row for row in rows if row["suite"] == "import"}
    assert imports["import lucidnn"]["loads"] == [] and imports["import lucidnn"]["seconds"] < 0.03


def test_a_suite_has_a_file_of_its_own_by_machine(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "RESULTS", tmp_path / "results")
    answer = invoke("--device", "cpu", "--quick", "--suite", "import")
    (file,) = (tmp_path / "results").iterdir()
    assert answer.exit_code == 0 and file.name.startswith("import_") and file.suffix == ".jsonl"
    assert len(file.read_text().splitlines()) == 4


@pytest.mark.parametrize(("load", "busy"), [(5.0, True), (0.1, False)])
def test_a_busy_machine_is_said_and_written_down(tmp_path, monkeypatch, load, busy):
    monkeypatch.setattr(run.os, "getloadavg", lambda: (load, load, load))
    monkeypatch.setattr(
        importlib.import_module("benchmarks.suite_import"), "results", lambda _: [{"name": "a", "seconds": 1.0}]
    )
    file = tmp_path / "out"
    answer = invoke("--suite", "import", "--device", "cpu", "--threads", torch.get_num_threads(), "--out", file)
    assert ("this machine is busy (load 5.0)" in answer.stderr) is busy
    assert json.loads(file.read_text())["environment"]["load"] == load


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--suite", "conv,matmul"), "suite: found 'matmul'; accepted: import, host, step, conv"),
        (("--suite", ","), "suite: found nothing"),
        (("--policy", "error"), "policy: found 'error'; accepted: heuristic, find"),
        (("--out", "/no/such/x"), "json: found /no/such/x"),
        (("--device", "gpu"), "device: found 'gpu'"),
    ],
)
def test_a_wrong_option_is_one_line(words, said):
    answer = invoke(*words)
    assert answer.exit_code == 2 and said in answer.stderr and len(answer.stderr.splitlines()) == 1


def test_an_interrupted_suite_leaves_the_old_file(tmp_path, monkeypatch):
    file = tmp_path / "results.jsonl"
    file.write_text("old\n")
    module = importlib.import_module("benchmarks.suite_import")

    def results(context):
        yield {"name": "one", "seconds": 1.0}
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "results", results)
    answer = invoke("--suite", "import", "--out", file, "--device", "cpu")
    assert answer.exit_code == 130 and file.read_text() == "old\n" and list(tmp_path.iterdir()) == [file]


def test_a_problem_that_fails_is_a_result_of_its_own(tmp_path, monkeypatch, quick):
    file, lines = tmp_path / "results.jsonl", tmp_path / "lines.txt"
    lines.write_text("conv_bgrad dy=f32[2,3,8]\nmax_pool_fwd x=f32[2,3,8,8] window=2\n")
    module = importlib.import_module("benchmarks.suite_conv")
    real = module.compare

    def compare(problem, *rest, **given):
        if problem.op.name == "conv_bgrad":
            raise torch.OutOfMemoryError("too large\nby far")
        return real(problem, *rest, **given)

    monkeypatch.setattr(module, "compare", compare)
    answer = invoke("--suite", "conv", "--out", file, "--problems", lines, "--device", "cpu", "--policy", "heuristic")
    first, second = (json.loads(line) for line in file.read_text().splitlines())
    assert first["fault"] == "OutOfMemoryError: too large" and first["seconds"] is None
    assert second["seconds"] > 0 and "FAULT OutOfMemoryError" in answer.output


@pytest.mark.parametrize("name", ["bench_conv", "bench_network", "bench_network_bf16"])
def test_the_problem_files_parse_and_cover_the_directions(name):
    problems = read_problems(ROOT / "problems" / f"{name}.txt")
    kinds = {problem.op.name for problem in problems}
    assert {"conv_fprop", "conv_dgrad", "conv_wgrad"} <= kinds and len(set(problems)) == len(problems)
    if name == "bench_conv":
        assert len(problems) == 36 and all(p.items[0][1].dtype == "bf16" for p in problems)


def test_the_network_files_hold_the_kernels_of_a_training_step():
    """What a step launches stands in the file, so that nothing is compiled when the step is measured."""
    from lucidnn import functional
    from lucidnn.cli.training import Recipe, Trainer
    from lucidnn.core import plan

    listed = set(read_problems(ROOT / "problems" / "bench_network.txt"))
    trainer = Trainer(functional, True, Recipe(torch.device("cpu")))
    with plan.observe() as seen:
        trainer.step(torch.randn(64, 3, 32, 32), torch.arange(64) % 10)
    assert {one.problem for one in seen} <= listed


# ---- compiling ahead ---------------------------------------------------------------------------------------

GPU = "conv_fprop x=f16[2,16,8,8]@nhwc w=f16[16,16,3,3]@nhwc padding=1 on=cuda:sm_90"


def test_what_is_compiled_ahead_is_what_may_be_chosen():
    problem = Problem.parse(GPU)
    one = ahead._tasks(problem, ["heuristic"])
    many = ahead._tasks(problem, ["heuristic", "find"])
    assert [task[1] for task in one] == ["conv.implicit_gemm"] and one[0] in many and 1 < len(many) <= backends.limit()
    assert all(Problem.parse(text) == problem for text, _, _ in many)
    assert ahead._tasks(Problem.parse(GPU.replace("cuda:sm_90", "cpu")), ["find"]) == []
    assert ahead.compile_ahead([], ["find"]) == 0


def test_workers_compile_for_a_gpu_that_is_not_there(capsys):
    pytest.importorskip("triton")
    assert ahead.compile_ahead([Problem.parse(GPU)], ["heuristic"], workers=1) == 1
    shown = capsys.readouterr().out
    assert "1 kernels compiled by 1 processes" in shown and "Error" not in shown


def test_a_failure_of_a_worker_is_said():
    text = ahead._compile((GPU, "conv.nothing", {}))
    assert text.startswith("conv.nothing {} for conv_fprop") and "UnknownEngine" in text
