"""The elementwise kernel in Triton's interpreter: every mode, on the small lines of the list of problems.

`lucidnn.testing.verify` runs the engine's own launches on CPU tensors, poisoned and between guard bands. Each line runs
with its usual tiles; some also with tiles of a few elements, so that there are many and the last ones hang over.
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
LINES = [p for p in read_problems(PROBLEMS / "edge_elementwise.txt", Target.parse("cuda:sm_90")) if not p.is_empty]


def check(problem: Problem, tiles: dict[str, int]) -> None:
    engine = registry.get("elementwise.tiled")
    if reasons := engine.reasons(problem):
        assert any(word in reasons[0] for word in ("mod", "pow"))
        return
    config = {**engine.configs(problem)[0], **tiles}
    with np.errstate(all="ignore"):
        found = verify(problem, engine, config, torch.device("cpu"))
    assert not found.fault, found.fault


@pytest.mark.parametrize("problem", LINES[::3], ids=str)
def test_usual_tiles(problem: Problem) -> None:
    check(problem, {})


@pytest.mark.parametrize("problem", LINES[::7], ids=str)
def test_small_tiles(problem: Problem) -> None:
    check(problem, {"BLOCK_R": 2, "BLOCK_L": 8})
