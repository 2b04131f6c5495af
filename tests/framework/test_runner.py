"""``python -m lucidnn.torch``: a script and a module run as they do alone, their operators on lucidnn."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import sys, torch
print(sys.argv[1:], __name__, torch.conv2d(torch.ones(1, 1, 3, 3), torch.ones(1, 1, 3, 3)).item())
sys.exit(3)
"""


def run(*words, cwd):
    return subprocess.run(
        [sys.executable, "-m", "lucidnn.torch", *words],
        cwd=cwd, check=False, capture_output=True, text=True, timeout=120,
    )  # fmt: skip


def test_a_script_gets_its_arguments_and_keeps_its_exit_code(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    done = run("--report", "script.py", "--lr", "0.1", "-m", "x", cwd=tmp_path)
    assert done.returncode == 3, done.stderr
    assert done.stdout.strip() == "['--lr', '0.1', '-m', 'x'] __main__ 9.0"
    assert "convolution " in done.stderr and "taken" in done.stderr


def test_a_module_runs_too_and_a_missing_file_is_one_line(tmp_path):
    (tmp_path / "program.py").write_text(SCRIPT)
    assert run("-m", "program", "a", cwd=tmp_path).stdout.strip() == "['a'] __main__ 9.0"
    done = run("absent.py", cwd=tmp_path)
    assert done.returncode == 2 and "there is no file absent.py" in done.stderr and "Traceback" not in done.stderr
