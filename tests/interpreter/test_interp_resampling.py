"""Kernels of resampling, folding and sampling by a grid in Triton's interpreter: the small lines of their lists."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lucidnn.core import registry
from lucidnn.core.problem import Problem
from lucidnn.core.target import Target
from lucidnn.engines._triton.launch import TritonEngine
from lucidnn.testing import read_problems, verify

PROBLEMS = Path(__file__).resolve().parents[2] / "problems"
TARGET = Target.parse("cuda:sm_90")
LINES = [
    p
    for name in ("edge_resample.txt", "edge_fold.txt", "edge_grid_sample.txt")
    for p in read_problems(PROBLEMS / name, TARGET)
    if not p.is_empty and max(t.numel for _, t in p.items) <= 1200
]


def check(problem: Problem, tiles: dict[str, int]) -> None:
    for engine in registry.for_operation(problem.op.name):
        if isinstance(engine, TritonEngine) and not engine.reasons(problem):
            config = {**engine.configs(problem)[0], **tiles}
            found = verify(problem, engine, config, torch.device("cpu"))
            assert not found.fault, f"{engine.name}: {found.fault}"


@pytest.mark.parametrize("problem", LINES[::3], ids=str)
def test_usual_tiles(problem: Problem) -> None:
    check(problem, {})


@pytest.mark.parametrize("problem", LINES[::5], ids=str)
def test_small_tiles(problem: Problem) -> None:
    small = {"BLOCK_P": 4, "BLOCK_C": 2} if problem.op.name.startswith("grid") else {"BLOCK_R": 4, "BLOCK_L": 8}
    check(problem, small)


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_places_far_away_and_those_that_are_no_numbers(mode: str) -> None:
    x = torch.arange(1, 7.0).view(1, 1, 2, 3)
    grid = torch.tensor([float("nan"), 1e10, -1e10]).view(1, 1, 3, 1).expand(1, 1, 3, 2).contiguous()
    line = f"grid_sample_fwd x=f32[1,1,2,3] grid=f32[1,1,3,2] mode={mode} padding_mode=border on={TARGET}"
    engine, y = registry.get("resample.grid_tiled"), torch.full((1, 1, 1, 3), float("nan"))
    problem = Problem.parse(line)
    engine.build(problem, engine.configs(problem)[0])((x, grid, y), None)
    assert y.flatten().tolist() == [0, 6, 1]
