"""Layer, RMS and group normalization in Triton's interpreter: small lines of the list, also on small tiles."""

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
TARGET = Target.parse("cuda:sm_90:2")
SMALL_TILES = {
    "norm.rows_triton": {"BLOCK_R": 2},
    "norm.group_triton": {"BLOCK_S": 16},
    "norm.split_triton": {"BLOCK_C": 4, "BLOCK_S": 8},
}
CASES = [
    (name, p)
    for name in SMALL_TILES
    for p in read_problems(PROBLEMS / "edge_norm.txt", TARGET)
    if not p.is_empty and max(t.numel for _, t in p.items) <= 500
    if p.op.name in registry.get(name).operations and not registry.get(name).reasons(p)
]


def check(name: str, problem: Problem, knobs: dict[str, int]) -> None:
    engine = registry.get(name)
    with np.errstate(all="ignore"):
        found = verify(problem, engine, {**engine.configs(problem)[0], **knobs}, torch.device("cpu"))
    assert not found.fault, found.fault


@pytest.mark.parametrize("name, problem", CASES[::6], ids=str)
def test_usual_tiles(name: str, problem: Problem) -> None:
    check(name, problem, {})


@pytest.mark.parametrize("name, problem", CASES[2::9], ids=str)
def test_small_tiles_and_many_parts(name: str, problem: Problem) -> None:
    check(name, problem, SMALL_TILES[name])


@pytest.mark.parametrize("name", ["norm.group_triton", "norm.split_triton"])
def test_a_large_mean_does_not_drown_the_variance(name: str) -> None:
    problem = Problem.parse("group_norm_fwd x=f32[2,4,64] groups=2", TARGET)
    engine = registry.get(name)
    config = {**engine.configs(problem)[0], **SMALL_TILES[name]}
    x = torch.randn(2, 4, 64, generator=torch.Generator().manual_seed(0)) + 1e4
    y, mean, inverse = torch.empty(2, 4, 64), torch.empty(2, 2), torch.empty(2, 2)
    workspace = torch.empty(engine.workspace_size(problem, config), dtype=torch.uint8)
    engine.build(problem, config)((x, y, mean, inverse), workspace)
    expected = x.double().reshape(2, 2, -1).var(2, correction=0) ** -0.5
    assert (
        float((inverse / expected - 1).abs().max()) < 1e-4
    )  # a difference of squares would be off by the variance itself


@pytest.mark.parametrize("name", ["norm.group_triton", "norm.split_triton"])
def test_values_far_from_zero_keep_their_variance(name: str) -> None:
    problem = Problem.parse("group_norm_fwd x=f32[2,4,20,20] groups=2", TARGET)
    engine = registry.get(name)
    config = {**engine.configs(problem)[-1], "BLOCK_S": 64}
    x = 1e4 + torch.randn(2, 4, 20, 20, generator=torch.Generator().manual_seed(0))
    outputs = [torch.empty(problem[role].shape) for role in problem.outputs]
    space = torch.empty(engine.workspace_size(problem, config) + 256, dtype=torch.uint8)
    engine.build(problem, config)((x, *outputs), space)
    exact = 1 / torch.sqrt(x.double().reshape(2, 2, -1).var(-1, unbiased=False) + problem.op.epsilon)
    torch.testing.assert_close(outputs[-1].double(), exact, rtol=1e-6, atol=0)
