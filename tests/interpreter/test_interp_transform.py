"""The kernel of the tensor transformation in Triton's interpreter: lines of its list, with two sizes of tiles."""

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
LINES = [p for p in read_problems(PROBLEMS / "edge_transform.txt", Target.parse("cuda:sm_90")) if not p.is_empty]
SMALL = [p for p in LINES if p["y"].numel < 500]


def check(problem: Problem, tiles: dict[str, int]) -> None:
    engine = registry.get("transform.tiled")
    assert not engine.reasons(problem)
    with np.errstate(all="ignore"):
        found = verify(problem, engine, {**engine.configs(problem)[0], **tiles}, torch.device("cpu"))
    assert not found.fault, found.fault


@pytest.mark.parametrize("problem", LINES[::2], ids=str)
def test_usual_tiles(problem: Problem) -> None:
    check(problem, {})


@pytest.mark.parametrize("problem", SMALL[1::5], ids=str)
def test_small_tiles(problem: Problem) -> None:
    check(problem, {"BLOCK_A": 2, "BLOCK_B": 4})
