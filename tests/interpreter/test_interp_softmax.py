"""The kernels of softmax, cross-entropy and dropout in Triton's interpreter: small lines of the lists of problems.

Each line runs with its usual tiles; some also with tiles of a few elements, so that rows take many steps, and those
that start off the alignment are read from before their start.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from lucidnn.core import registry
from lucidnn.core.problem import Problem
from lucidnn.core.target import Target
from lucidnn.testing import read_problems, verify

PROBLEMS = Path(__file__).resolve().parents[2] / "problems"
TARGET = Target.parse("cuda:sm_90")
FAMILIES = ("softmax", "cross_entropy", "dropout")


def lines(family: str, most: int) -> list[Problem]:
    every = read_problems(PROBLEMS / f"edge_{family}.txt", TARGET)
    return [p for p in every if not p.is_empty and max(t.numel for _, t in p.items) <= most]


def check(problem: Problem, tiles: dict[str, int]) -> None:
    engine = registry.get(problem.op.name.rpartition("_")[0] + ".tiled")
    assert not engine.reasons(problem)
    config = {**engine.configs(problem)[0], **tiles}
    with np.errstate(all="ignore"):
        found = verify(problem, engine, config, torch.device("cpu"))
    assert not found.fault, found.fault


@pytest.mark.parametrize("problem", [p for f in FAMILIES for p in lines(f, 700)[::4]], ids=str)
def test_usual_tiles(problem: Problem) -> None:
    check(problem, {})


@pytest.mark.parametrize("problem", [p for f in FAMILIES[:2] for p in lines(f, 300)[1::3]], ids=str)
def test_steps_along_a_row(problem: Problem) -> None:
    check(problem, {"BLOCK_M": 1, "BLOCK_K": 16})


@pytest.mark.parametrize("problem", lines("dropout", 150)[1::3], ids=str)
def test_small_tiles(problem: Problem) -> None:
    check(problem, {"BLOCK_R": 2, "BLOCK_L": 8})


def test_rows_that_start_anywhere() -> None:
    """The shift to an aligned start, for every remainder; one line has whole steps between the first and the last."""
    for line in (
        "softmax_fwd x=f32[5,67]",
        "softmax_fwd x=f16[9,67] log=1",
        "cross_entropy_fwd x=f32[5,67] target=i64[5]",
        "cross_entropy_bwd dy=f32[] x=f32[5,67] target=i64[5] stats=f32[5] total=f32[]",
    ):
        problem = Problem.parse(line, TARGET)
        engine = registry.get(problem.op.name.rpartition("_")[0] + ".tiled")
        config = {**engine.configs(problem)[0], "BLOCK_M": 1, "BLOCK_K": 16}
        assert engine.launches(problem, config)[0].constexprs["ALIGN"] > 1  # type: ignore[attr-defined]
        check(problem, {"BLOCK_M": 1, "BLOCK_K": 16})
