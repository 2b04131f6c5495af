"""The reduction kernels in Triton's interpreter: the small lines of the list of problems, whole and in parts.

`lucidnn.testing.verify` runs the engine's own launches on CPU tensors, poisoned and between guard bands. Every other
line runs with its usual tiles, half of the rest with tiles of a few elements and the reduced points cut into parts.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from lucidnn.core import registry
from lucidnn.core.problem import Problem
from lucidnn.core.target import Target
from lucidnn.testing import allocate, read_problems, reference, run_guarded, verify

PROBLEMS = Path(__file__).resolve().parents[2] / "problems"
TARGET = Target.parse("cuda:sm_90")
LINES = [
    p
    for p in read_problems(PROBLEMS / "edge_reduction.txt", TARGET)
    if not p.is_empty and max(t.numel for _, t in p.items) <= 1000
]


def check(problem: Problem, tiles: dict[str, int]) -> None:
    engine = registry.get("reduce.tiled")
    assert not engine.reasons(problem)
    config = {**engine.configs(problem)[0], **tiles}
    with np.errstate(all="ignore"):
        found = verify(problem, engine, config, torch.device("cpu"))
    assert not found.fault, found.fault


@pytest.mark.parametrize("problem", LINES[::2], ids=str)
def test_usual_tiles(problem: Problem) -> None:
    check(problem, {})


@pytest.mark.parametrize("problem", LINES[1::4], ids=str)
def test_small_tiles_in_parts(problem: Problem) -> None:
    check(problem, {"BLOCK_A": 2, "BLOCK_B": 4, "BLOCK_C": 2, "splits": 3})


@pytest.mark.parametrize("mode", ["min", "max", "amax"])
def test_first_of_equals_and_nan_as_the_furthest(mode: str) -> None:
    nan, inf = float("nan"), float("inf")
    values = torch.tensor([-2.0, 0.0, 2.0, nan, inf, -inf, -inf, -inf, inf, inf])
    picks = torch.randint(0, len(values), (12, 9), generator=torch.Generator().manual_seed(1))
    problem = Problem.parse(f"reduce_fwd x=f32[12,9] mode={mode} axes=0 index_type=i64", TARGET)
    x = allocate(problem["x"], torch.device("cpu"))[0]
    x.copy_(values[picks])
    x[:, 0], x[:, 1], x[:, 2] = -inf, inf, nan
    engine = registry.get("reduce.tiled")
    expected = reference(problem, {"x": x}, torch.device("cpu"))
    for tiles in ({}, {"BLOCK_A": 1, "BLOCK_B": 2, "BLOCK_C": 4, "splits": 3}):
        config = {**engine.configs(problem)[0], **tiles}
        run, size = engine.build(problem, config), engine.workspace_size(problem, config)
        with np.errstate(all="ignore"):
            found, fault = run_guarded(problem, run, size, {"x": x}, torch.device("cpu"))
        assert not fault and torch.equal(found["index"], expected["index"])
        torch.testing.assert_close(found["y"].double(), expected["y"], equal_nan=True)
