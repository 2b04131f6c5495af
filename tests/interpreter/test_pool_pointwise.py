"""The pooling and elementwise kernels in Triton's interpreter: the small lines of the lists of problems.

`lucidnn.testing.verify` runs the engines' own launches on CPU tensors, poisoned and between guard bands. Each line runs
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
from lucidnn.testing import read_problems, reference, verify

PROBLEMS = Path(__file__).resolve().parents[2] / "problems"
TARGET = Target.parse("cuda:sm_90")
ENGINES = {"max_pool": "pool.max_tiled", "pointwise": "pointwise.tiled"}


def small(problem: Problem) -> bool:
    return not problem.is_empty and max(t.numel for _, t in problem.items) <= 700 and problem.flops <= 8000


LINES = [
    p for name in ("edge_pooling.txt", "edge_pointwise.txt") for p in read_problems(PROBLEMS / name, TARGET) if small(p)
]


def check(problem: Problem, tiles: dict[str, int]) -> None:
    engine = registry.get(ENGINES[problem.op.name.rpartition("_")[0]])
    reasons = engine.reasons(problem)
    if reasons:
        assert "axes after merging" in reasons[0]
        return
    config = {**engine.configs(problem)[0], **tiles}
    with np.errstate(all="ignore"):
        found = verify(problem, engine, config, torch.device("cpu"))
    assert not found.fault, found.fault


@pytest.mark.parametrize("problem", LINES, ids=str)
def test_usual_tiles(problem: Problem) -> None:
    check(problem, {})


@pytest.mark.parametrize("problem", LINES[::6], ids=str)
def test_small_tiles(problem: Problem) -> None:
    check(problem, {"BLOCK_R": 8, "BLOCK_L": 8})


@pytest.mark.parametrize("dtype", ["f32", "f64", "f16", "bf16"])
@pytest.mark.parametrize("geometry", ["window=2", "window=3 stride=2 padding=1", "window=3 stride=1 dilation=2"])
def test_first_of_equals_and_nan_as_the_largest(geometry: str, dtype: str) -> None:
    nan, inf = float("nan"), float("inf")
    values = torch.tensor([-2.0, 0.0, 1.0, nan, inf, -inf, -inf, -inf])
    chosen = values[torch.randint(0, 8, (2, 2, 7, 8), generator=torch.Generator().manual_seed(1))]
    chosen[0] = -inf
    for kind in ("i64", "i32", "u8"):
        problem = Problem.parse(f"max_pool_fwd x={dtype}[2,2,7,8] {geometry} index_type={kind}", TARGET)
        types = {"f32": torch.float32, "f64": torch.float64, "f16": torch.float16, "bf16": torch.bfloat16}
        x = chosen.to(types[dtype])
        expected = reference(problem, {"x": x}, torch.device("cpu"))
        y, index = torch.empty(problem["y"].shape, dtype=x.dtype), torch.empty_like(expected["index"])
        engine = registry.get("pool.max_tiled")
        engine.build(problem, engine.configs(problem)[0])((x, y, index), None)
        torch.testing.assert_close(y.double(), expected["y"], rtol=0, atol=0, equal_nan=True)
        assert torch.equal(index, expected["index"])
