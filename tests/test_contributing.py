"""The worked example in CONTRIBUTING.md is an engine: found when its file is dropped in, and right."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# Printed by a fresh interpreter, so that the example never meets the other tests' registry.
DRIVER = """
import sys
import lucidnn.engines
lucidnn.engines.__path__.append(sys.argv[1])
import torch
from lucidnn.core import registry
from lucidnn.core.problem import Problem
from lucidnn.testing import verify

engine = registry.get("conv.tap_gemm")
for line in sys.stdin.read().splitlines():
    problem = Problem.parse(line)
    reasons = engine.reasons(problem)
    if reasons:
        print("refused: " + "; ".join(reasons))
        continue
    faults = []
    for config in engine.configs(problem):
        assert engine.cost(problem, config) > 0
        faults.append(verify(problem, engine, config, torch.device("cpu")).fault)
    print("right" if faults and not any(faults) else f"wrong: {faults}")
"""

ACCEPTED = [
    "conv_fprop x=f32[8,64,28,28] w=f32[64,64,3,3] padding=1",
    "conv_fprop x=f64[40,3,9,8] w=f64[5,3,3,2] padding=1,0:2 stride=2,1 dilation=1,3",
    "conv_fprop x=f32[2,3,17] w=f32[4,3,5] padding=2 stride=3",
    "conv_fprop x=f32[2,3,5,6,7] w=f32[4,3,2,3,1] padding=1 dilation=2,1,1",
    "conv_fprop x=f32[3,8,7,7]@nhwc w=f32[6,8,1,1]@nhwc stride=2",
    "conv_fprop x=f32[1,1,1,1] w=f32[1,1,3,3] padding=2",
    "conv_fprop x=f32[3,4,6,6]@(0,36,6,1) w=f32[5,4,3,3]",
    "conv_fprop x=f32[9,4,6,6] w=f32[5,4,3,3] bias=f32[5] z=f32[9,5,4,4] alpha=0.5 beta=-2.0 act=relu",
]
REFUSED = {
    "conv_fprop x=bf16[2,4,6,6] w=bf16[4,4,3,3]": "needs x of type f32 or f64, found bf16",
    "conv_fprop x=f32[2,4,6,6] w=f32[4,2,3,3] groups=2 act=tanh": (
        "needs groups = 1, found 2; needs activation identity or relu, found tanh"
    ),
    "conv_fprop x=f32[0,4,6,6] w=f32[4,4,3,3]": ("needs at least one element in every tensor, found an empty one"),
}


@pytest.fixture(scope="module")
def outcome(tmp_path_factory) -> dict[str, str]:
    """What became of each problem line once the example lies in a folder of engines."""
    folder = tmp_path_factory.mktemp("engines")
    (example,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "CONTRIBUTING.md").read_text(), re.S | re.M)
    (folder / "example").mkdir()
    (folder / "example" / "__init__.py").touch()
    (folder / "example" / "tap_gemm.py").write_text(example)
    lines = [*ACCEPTED, *REFUSED]
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, str(folder)],
        input="\n".join(lines),
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )
    assert done.returncode == 0, done.stderr
    return dict(zip(lines, done.stdout.splitlines(), strict=True))


@pytest.mark.parametrize("line", ACCEPTED)
def test_the_example_is_right(outcome, line):
    assert outcome[line] == "right"


@pytest.mark.parametrize("line", REFUSED)
def test_the_example_refuses_with_every_reason(outcome, line):
    assert outcome[line] == f"refused: {REFUSED[line]}"
