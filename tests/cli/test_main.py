"""The command line as a whole: help, errors in one line, exit codes, and how little it loads."""

from __future__ import annotations

import subprocess
import sys

import pytest

import lucidnn
from lucidnn.cli.main import COMMANDS

BGRAD = ("conv_bgrad", "dy=f32[2,3]")


def run(*words: str, **given) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "lucidnn", *words], capture_output=True, text=True, check=False, **given
    )


def test_the_help_names_every_command_with_a_sentence(cli):
    shown = cli("--help")
    assert shown.exit_code == 0
    lines = [line.split(maxsplit=1) for line in shown.output.splitlines()]
    listed = {words[0]: words[1] for words in lines if len(words) == 2 and words[0] in COMMANDS}
    assert tuple(sorted(listed)) == COMMANDS
    assert all(text.endswith(".") for text in listed.values()), listed
    # the example stands on a line of its own
    assert any(line.strip().startswith("conv_fprop x=") for line in shown.output.splitlines())


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(cli, command):
    shown = cli(command, "--help")
    assert shown.exit_code == 0 and shown.output.startswith(f"Usage: lucidnn {command}")


def test_the_version(cli):
    assert cli("--version").output == lucidnn.__version__ + "\n"


def test_help_loads_nothing_heavy():
    code = (
        "import sys\nfrom lucidnn.cli.main import commands\n"
        "try: commands(['--help'])\nexcept SystemExit: pass\n"
        "heavy = {'torch', 'triton', 'numba', 'numpy', 'rich'} & set(sys.modules)\nassert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("trian",), "command: found 'trian'; accepted: bench, cache, explain, find, info, train, verify"),
        (("--verbose",), "no such option '--verbose'"),
        (("train", "--epoch", "3"), "no such option '--epoch'"),
        (("train", "--epochs", "none"), "invalid value for '--epochs'"),
        (("explain",), "missing argument 'PROBLEM' (see lucidnn explain --help)"),
        (("cache", "drop"), "no such command 'drop' (see lucidnn cache --help)"),
        (("bench",), "problem: found nothing; accepted: a problem line, or --file FILE"),
        (("verify", "--file", "x", "conv_bgrad"), "problem: found a line and a file"),
        (("verify", "--file", "/no/such"), "file: found /no/such (No such file or directory)"),
        (("find", "--device", "tpu", *BGRAD), "device: found 'tpu'; accepted: auto, cpu, cuda or cuda:N"),
        (("bench", "--device", "meta", *BGRAD), "device: found 'meta'"),
        (("explain", "--engine", "conv.dirct", *BGRAD), "engine: found 'conv.dirct'; accepted: conv."),
        (("bench", "--engine", "pool.reference", *BGRAD), "engine: found pool.reference, which takes part in"),
        (("bench", "--json", "/no/such/x.json", *BGRAD), "json: found /no/such/x.json, in a folder that does not"),
    ],
)
def test_a_bad_question_is_one_line_and_exit_code_2(cli, words, said):
    answer = cli(*words)
    assert answer.exit_code == 2 and answer.stdout == ""
    (line,) = answer.stderr.splitlines()
    assert line.startswith("lucidnn: ") and said in line


@pytest.mark.parametrize("command", ["explain", "bench", "verify", "find"])
def test_a_line_that_does_not_parse_points_at_the_token(cli, command):
    answer = cli(command, "conv_fprop x=f32[1,2,3] w=f33[2,2,3]")
    first, line, caret = answer.stderr.splitlines()
    assert answer.exit_code == 2
    assert first.startswith("lucidnn: ") and "f33" in first
    assert line[caret.index("^") :].startswith("f33[2,2,3]")


def test_words_need_no_quotes(cli):
    quoted = cli("explain", "conv_bgrad dy=f32[2,3,4]")
    assert cli("explain", "conv_bgrad", "dy=f32[2,3,4]").output == quoted.output and quoted.exit_code == 0


def test_a_gpu_that_is_not_there_is_said_so(cli):
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is one")
    for words in (
        ("bench", "--device", "cuda", "conv_bgrad dy=f32[2,3]"),
        ("verify", "conv_bgrad dy=f32[2,3] on=cuda:sm_90"),
    ):
        answer = cli(*words)
        assert answer.exit_code == 2 and len(answer.stderr.splitlines()) == 1
        assert "device 'cuda'" in answer.stderr and "use device 'cpu'" in answer.stderr


def test_the_module_is_the_command_and_a_pipe_cuts_nothing_off():
    line = "conv_fprop x=f32[2,30,8,8] w=f32[40,30,3,3] bias=f32[40] padding=1 act=leaky_relu:0.25 on=cuda:sm_90"
    done = run("explain", line, env={"PATH": "", "COLUMNS": "40", "LUCIDNN_CACHE_DIR": "/nowhere"})
    assert done.returncode == 0, done.stderr
    assert "act=leaky_relu:0.25 on=cuda:sm_90:132" in done.stdout.splitlines()[0]
    assert "…" not in done.stdout
    assert any("conv.reference" in line and "reference" in line for line in done.stdout.splitlines())
    assert all(line == line.rstrip() for line in done.stdout.splitlines())


def test_a_closed_pipe_is_no_traceback():
    done = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m lucidnn info | head -n 1"], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("lucidnn ") and "Traceback" not in done.stderr


def test_an_environment_variable_that_makes_no_sense_is_named():
    done = run("info", env={"LUCIDNN_POLICY": "guess"})
    assert done.returncode == 2
    assert done.stderr == "lucidnn: LUCIDNN_POLICY: found 'guess'; accepted: heuristic, find, error\n"
