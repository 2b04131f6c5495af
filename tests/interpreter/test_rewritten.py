"""Problems with rare parts on a GPU target, in Triton's interpreter: the copies, and what runs between them.

bfloat16 is left out: the interpreter multiplies its raw bits; so are float8 results, which it rounds wrongly.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lucidnn.core.registry import get
from lucidnn.core.target import Target
from lucidnn.testing import read_problems, verify

FORMS = Path(__file__).resolve().parents[2] / "problems" / "edge_forms.txt"
LINES = [
    problem
    for problem in read_problems(FORMS, Target.parse("cuda:sm_90"))
    if problem.op.name in get("conv.rewritten").operations and not get("conv.rewritten").reasons(problem)
    if all(t.dtype != "bf16" for _, t in problem.items)
    if not problem[problem.outputs[0]].dtype.startswith("f8")
]


@pytest.mark.parametrize("problem", LINES, ids=lambda p: p.text.rpartition(" on=")[0])
def test_rewritten(problem):
    engine = get("conv.rewritten")
    configs = engine.configs(problem)
    # An engine that takes part of the work through the framework's BLAS would read flags of a GPU that is not here.
    config = next(c for c in configs if c["engine"] in ("conv.implicit_gemm", "conv.implicit_gemm_wgrad"))
    check = verify(problem, engine, config, torch.device("cpu"))
    assert not check.fault, f"{config}: {check.fault}"


def test_every_mode_is_there():
    text = " ".join(problem.text for problem in LINES)
    assert all(word in text for word in ("reflect", "replicate", "circular", "flip=1", "scale="))
