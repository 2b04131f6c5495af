"""``bench`` and ``verify``: what they show, what they find out about engines that lie, and what they write."""

from __future__ import annotations

import json

import pytest
import torch

from fakes import LINE, Fake
from lucidnn.cli.compare import buffers, compare, contestants
from lucidnn.cli.environment import environment
from lucidnn.cli.peer import Peer
from lucidnn.core.errors import NotSupported
from lucidnn.core.problem import Problem

CPU = torch.device("cpu")
CONV = "conv_fprop x=f32[2,3,8,8] w=f32[4,3,3,3] padding=1"


def rows_of(output: str, start: str = "toy.") -> dict[str, str]:
    return {line.split()[0]: line for line in output.splitlines() if line.startswith(start)}


class Writer(Fake):
    """Writes one element past its output."""

    def build(self, problem, config):
        def run(tensors, workspace):
            x, y = tensors[0], tensors[-1]
            y.copy_(2 * x)
            torch.as_strided(y, (y.numel() + 1,), (1,), y.storage_offset())[-1] = 7

        return run


# ---- bench -------------------------------------------------------------------------------------------------


def test_bench_sets_real_engines_beside_the_framework(cli, quick, tmp_path):
    file = tmp_path / "bench.json"
    answer = cli("bench", CONV, "--json", file, "--device", "cpu")
    assert answer.exit_code == 0, answer.output
    assert "framework: F.conv2d" in answer.output and "conv.im2col_gemm" in answer.output
    report = json.loads(file.read_text())
    assert report["environments"]["cpu"]["threads"] == torch.get_num_threads()
    engines = {row["engine"] for row in report["rows"]}
    assert {"conv.direct", "conv.im2col_gemm"} <= engines and "conv.reference" not in engines
    for row in report["rows"]:
        assert row["fault"] == "" and row["peer_fault"] == "" and row["graph"] is False
        assert row["ratio"] == pytest.approx(row["peer_seconds"] / row["seconds"])
        assert 0 <= row["error"]["y"] < 1e-5 and 0 <= row["peer_error"]["y"] < 1e-5
        assert Problem.parse(row["problem"]).flops == pytest.approx(row["tflops"] * row["seconds"] * 1e12)


def test_bench_does_not_time_a_wrong_engine_and_says_which(cli, engines, quick):
    liar, honest = Fake("toy.liar", factor=2.1), Fake("toy.honest")
    engines(liar, honest)
    answer = cli("bench", LINE)
    assert answer.exit_code == 1 and "y: relative error 5.00e-02 is over the bound" in answer.output
    assert rows_of(answer.output)["toy.liar"].split()[1:3] == ["-", "-"]
    assert liar.runs == 1 and honest.runs > 5


def test_bench_goes_on_where_an_engine_fails(cli, engines, quick):
    engines(
        Fake("toy.build", build_error=OSError("no compiler")),
        Fake("toy.run", run_error=ValueError("oops")),
        Fake("toy.ok"),
    )
    answer = cli("bench", LINE)
    assert answer.exit_code == 1 and "no compiler" in answer.output and "ValueError: oops" in answer.output
    assert "toy.ok" in rows_of(answer.output)


def test_bench_leaves_the_reference_out_unless_it_is_named_or_alone(cli, engines, quick):
    engines(Fake("toy.one"))
    assert set(rows_of(cli("bench", LINE).output)) == {"toy.one"}
    assert set(rows_of(cli("bench", LINE, "--engine", "toy.reference").output)) == {"toy.reference"}
    engines()
    assert set(rows_of(cli("bench", LINE).output)) == {"toy.reference"}


def test_bench_times_every_configuration_if_asked(cli, engines, quick):
    configs = [{"tile": 4}, {"tile": 8}, {"tile": 16}]
    engines(Fake("toy.one", configs=configs, workspace=lambda config: 1000 * config["tile"]))
    assert cli("bench", LINE).output.count("toy.one") == 1
    shown = cli("bench", LINE, "--configs").output
    assert [f"tile={n}" in shown for n in (4, 8, 16)] == [True] * 3
    shown = cli("bench", LINE, "--configs", workspace_limit=8000).output
    assert "tile=8" in shown and "tile=16" not in shown


def test_bench_where_nothing_takes_it_gives_every_reason(cli, engines):
    engines(Fake("toy.picky", refuses=("needs a, found b",)))
    answer = cli("bench", LINE, "--engine", "toy.picky")
    assert answer.exit_code == 2 and "toy.picky: needs a, found b" in answer.stderr


def test_bench_reads_a_file(cli, quick, tmp_path):
    file = tmp_path / "lines.txt"
    file.write_text(f"# two\n{CONV}\nconv_bgrad dy=f32[2,3,4]  # small\n")
    answer = cli("bench", "--file", file, "--rounds", 3)
    assert answer.exit_code == 0
    assert answer.output.count("framework:") == 2 and "framework: sum(dy)" in answer.output
    file.write_text(f"{CONV}\nconv_bgrad dy=f32[2\n")
    assert f"{file}:2: " in cli("bench", "--file", file).stderr


def test_a_peer_that_cannot_is_a_reason_not_an_error(engines, quick):
    engines(Fake("toy.one"))
    problem = Problem.parse(LINE)

    def prepare(tensors):
        def call():
            raise RuntimeError("not implemented for 'Toy'\nsecond line")

        return call

    (row,) = compare(problem, CPU, contestants(problem), against=Peer("toy", ("y",), prepare))
    assert row["peer_fault"] == "not implemented for 'Toy'" and row["peer_seconds"] is None
    assert row["seconds"] > 0 and row["ratio"] is None


def test_a_peer_stands_beside_with_its_own_error(engines, quick):
    engines(Fake("toy.one"))
    problem = Problem.parse(LINE)
    half = Peer("half", ("y",), lambda t: lambda: t["x"] * 3)
    (row,) = compare(problem, CPU, contestants(problem), against=half)
    assert row["peer_error"]["y"] == pytest.approx(0.5) and row["fault"] == ""


def test_a_result_that_is_not_written_shows(engines, quick):
    class Idle(Fake):
        def build(self, problem, config):
            return lambda tensors, workspace: None

    engines(Idle("toy.idle"))
    problem = Problem.parse(LINE)
    (row,) = compare(problem, CPU, contestants(problem))
    assert "inf" in row["fault"] and row["seconds"] is None


def test_contestants_of_an_engine_that_refuses():
    with pytest.raises(NotSupported, match="needs a target of kind"):
        contestants(Problem.parse(CONV), ["conv.implicit_gemm"])


def test_buffers_pass_the_cache_and_differ():
    sets = buffers(Problem.parse("pointwise_fwd x=f32[1048576] act=relu"), CPU, most=3)
    assert len(sets) == 3 and not torch.equal(sets[0]["x"], sets[1]["x"])


# ---- verify ------------------------------------------------------------------------------------------------


def test_verify_holds_every_real_engine_to_the_reference(cli):
    answer = cli("verify", CONV, "--device", "cpu")
    assert answer.exit_code == 0, answer.output
    rows = rows_of(answer.output, "conv.")
    assert "agrees" in rows["conv.direct"] and "agrees" in rows["conv.reference"]
    assert "takes no part" in rows["conv.implicit_gemm"] and "FAULT" not in answer.output


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        (Fake("toy.bad", factor=2.01), "over the bound"),
        (Writer("toy.bad"), "wrote outside y"),
        (Fake("toy.bad", run_error=ValueError("oops\nmore")), "ValueError: oops"),
        (Fake("toy.bad", build_error=KeyError("tile")), "KeyError: 'tile'"),
    ],
)
def test_verify_finds_a_fault_and_exits_with_1(cli, engines, engine, said):
    engines(engine, Fake("toy.good"))
    answer = cli("verify", LINE)
    rows = rows_of(answer.output)
    assert answer.exit_code == 1 and "FAULT" in rows["toy.bad"] and said in rows["toy.bad"]
    assert "agrees" in rows["toy.good"]
    assert cli("verify", LINE, "--engine", "toy.good").exit_code == 0


def test_verify_checks_every_configuration_if_asked(cli, engines):
    class Fragile(Fake):
        def build(self, problem, config):
            return lambda tensors, workspace: tensors[1].copy_(tensors[0] * (3 if config["tile"] == 8 else 2))

    engines(Fragile("toy.one", configs=[{"tile": 4}, {"tile": 8}]))
    assert cli("verify", LINE).exit_code == 0
    answer = cli("verify", LINE, "--configs")
    assert answer.exit_code == 1 and "tile=8" in next(line for line in answer.output.splitlines() if "FAULT" in line)


def test_verify_of_a_file_sums_up_and_shows_each_fault_with_its_line(cli, engines, tmp_path):
    engines(Fake("toy.bad", factor=3.0), Fake("toy.picky", refuses=("no",)))
    file, report = tmp_path / "lines.txt", tmp_path / "out.json"
    file.write_text(f"{LINE}\n{LINE.replace('4,3', '5,2')}\n")
    answer = cli("verify", "--file", file, "--json", report)
    assert answer.exit_code == 1
    rows = rows_of(answer.output)
    assert rows["toy.picky"].split() == ["toy.picky", "0", "2", "0%", "0"]
    assert rows["toy.reference"].split()[1] == "2" and rows["toy.reference"].split()[-1] == "0"
    assert answer.output.count("toy.bad: y: relative error") == 2 and "x=f32[5,2]" in answer.output
    written = json.loads(report.read_text())
    faults = [row for row in written["rows"] if row["fault"]]
    assert len(written["rows"]) == 6 and [row["engine"] for row in faults] == ["toy.bad"] * 2


# ---- the environment ---------------------------------------------------------------------------------------


def test_the_environment_says_what_a_time_depends_on():
    here = environment(CPU)
    assert here["torch"] == torch.__version__ and here["device"] and "driver" not in here
    assert here["date"].endswith("Z") and environment(CPU, "abc")["commit"] == "abc"
    json.dumps(here)


def test_the_commit_is_the_checkouts_own(monkeypatch, tmp_path):
    from lucidnn.cli import environment as module

    module.source_commit.cache_clear()
    try:
        commit = module.source_commit()
        assert commit is None or all(c in "0123456789abcdef" for c in commit.removesuffix("+"))
        # elsewhere, inside another project's repository, there is none
        other = tmp_path / "site" / "environment.py"
        other.parent.mkdir()
        module.subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
        monkeypatch.setattr(module, "__file__", str(other))
        module.source_commit.cache_clear()
        assert module.source_commit() is None
    finally:
        monkeypatch.undo()
        module.source_commit.cache_clear()
