"""The kernels of normalization by an L_p norm in Triton's interpreter: small lines of the list."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from lucidnn.core import registry
from lucidnn.core.problem import Problem
from lucidnn.core.target import Target
from lucidnn.testing import read_problems, verify

PROBLEMS = Path(__file__).resolve().parents[2] / "problems" / "edge_lp_normalization.txt"
TARGET = Target.parse("cuda:sm_90")


def lines() -> list[Problem]:
    engine = registry.get("lp_norm.tiled")
    return [p for p in read_problems(PROBLEMS, TARGET) if p["x"].numel <= 700 and not engine.reasons(p)]


@pytest.mark.parametrize("problem", lines()[::3], ids=str)
def test_small_lines(problem: Problem) -> None:
    engine = registry.get("lp_norm.tiled")
    with np.errstate(all="ignore"):
        for config in ({}, {"BLOCK_M": 4, "BLOCK_K": 8}):
            found = verify(problem, engine, {**engine.configs(problem)[0], **config}, torch.device("cpu"))
            assert not found.fault, found.fault
