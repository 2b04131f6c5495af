"""The kernels of local response and divisive normalization in Triton's interpreter: small lines of the list."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from lucidnn.core import registry
from lucidnn.core.problem import Problem
from lucidnn.core.target import Target
from lucidnn.testing import read_problems, verify

PROBLEMS = Path(__file__).resolve().parents[2] / "problems" / "edge_local_response.txt"
TARGET = Target.parse("cuda:sm_90")


def lines() -> list[Problem]:
    engine = registry.get("lrn.tiled")
    return [p for p in read_problems(PROBLEMS, TARGET) if p["x"].numel <= 400 and not engine.reasons(p)]


@pytest.mark.parametrize("problem", lines()[::6], ids=str)
def test_small_lines(problem: Problem) -> None:
    engine = registry.get("lrn.tiled")
    config = {**engine.configs(problem)[0], "BLOCK": 64}
    with np.errstate(all="ignore"):
        found = verify(problem, engine, config, torch.device("cpu"))
    assert not found.fault, found.fault
