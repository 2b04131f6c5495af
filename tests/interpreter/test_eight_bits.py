"""8-bit operands and scales in the gathered product, in Triton's interpreter.

Results of type float8 are left out: the interpreter loses the carry where rounding reaches the next power of two.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lucidnn.core.registry import get
from lucidnn.core.target import Target
from lucidnn.testing import read_problems, verify

FORMS = Path(__file__).resolve().parents[2] / "problems" / "edge_forms.txt"
ENGINE = get("conv.implicit_gemm")
LINES = [
    problem
    for problem in read_problems(FORMS, Target.parse("cuda:sm_90"))
    if problem.op.name in ENGINE.operations and not ENGINE.reasons(problem)
    if problem.items[0][1].itemsize == 1 or "scale" in problem.tensors
    if problem.items[0][1].dtype != "bf16" and not problem[problem.outputs[0]].dtype.startswith("f8")
]


@pytest.mark.parametrize("problem", LINES, ids=lambda p: p.text.rpartition(" on=")[0])
def test_eight_bits(problem):
    check = verify(problem, ENGINE, ENGINE.configs(problem)[-1], torch.device("cpu"))
    assert not check.fault


def test_all_kinds_are_there():
    found = {problem["x"].dtype if "x" in problem.tensors else problem["dy"].dtype for problem in LINES}
    assert {"i8", "f8e4m3", "f8e5m2", "f32"} <= found


def test_an_older_gpu_has_no_float8():
    line = "conv_fprop x=f8e4m3[2,16,8,8]@nhwc w=f8e4m3[32,16,3,3]@nhwc y=bf16[2,32,6,6]@nhwc on=cuda:sm_80"
    (first, *_) = ENGINE.reasons(type(LINES[0]).parse(line))
    assert first == "needs x of type f64, f32, f16, bf16, i8, found f8e4m3"
