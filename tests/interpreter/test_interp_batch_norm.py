"""The batch normalization kernels in Triton's interpreter: the small lines of the list, also on small tiles."""

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
LINES = [
    p
    for p in read_problems(PROBLEMS / "edge_batch_norm.txt", TARGET)
    if not p.is_empty and max(t.numel for _, t in p.items) <= 2500
]


def check(problem: Problem, knobs: dict[str, int]) -> None:
    found = [e for e in registry.for_operation(problem.op.name) if e.name.startswith("batch_norm.tiled")]
    assert len(found) == 1 and not found[0].reasons(problem)
    with np.errstate(all="ignore"):
        check = verify(problem, found[0], {**found[0].configs(problem)[0], **knobs}, torch.device("cpu"))
    assert not check.fault, check.fault


@pytest.mark.parametrize("problem", LINES[::4], ids=str)
def test_usual_tiles(problem: Problem) -> None:
    check(problem, {})


@pytest.mark.parametrize(
    "problem",
    [p for p in LINES if "combine" not in p.op.name and max(t.numel for _, t in p.items) <= 400][1::7],
    ids=str,
)
def test_small_tiles_and_many_parts(problem: Problem) -> None:
    check(problem, {"BLOCK_P": 4, "BLOCK_C": 2, "PARTS": 4, "TRIPS": 2})


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_a_large_mean_costs_no_digits(layout: str) -> None:
    problem = Problem.parse(f"batch_norm_stats x=f32[8,4,16,8]@{layout}", TARGET)
    engine = registry.get("batch_norm.tiled")
    config = {**engine.configs(problem)[0], "BLOCK_P": 32, "BLOCK_C": 4, "PARTS": 4}
    x = torch.randn(8, 4, 16, 8, generator=torch.Generator().manual_seed(0)) + 1e4
    if layout == "nhwc":
        x = x.contiguous(memory_format=torch.channels_last)
    mean, m2 = torch.empty(4), torch.empty(4)
    workspace = torch.empty(engine.workspace_size(problem, config), dtype=torch.uint8)
    engine.build(problem, config)((x, mean, m2), workspace)
    expected = x.double().var((0, 2, 3), correction=0) * 1024
    assert float((m2 / expected - 1).abs().max()) < 3e-6
