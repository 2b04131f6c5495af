"""Average, power, adaptive pooling and unpooling kernels in Triton's interpreter, on small lines of the problem lists.

`lucidnn.testing.verify` runs the engines' own launches on CPU tensors, poisoned and between guard bands.
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
ENGINES = (
    "pool.average_tiled", "pool.average_gathered", "pool.average_global", "pool.max_global", "pool.wide_windows",
    "pool.adaptive_max_tiled", "pool.adaptive_max_scatter", "pool.unpool_tiled",
)  # fmt: skip


def small(problem: Problem) -> bool:
    return not problem.is_empty and max(t.numel for _, t in problem.items) <= 600 and problem.flops <= 6000


def cases(name: str) -> list[tuple[str, int, Problem]]:
    """Every third line of each operation, with one of the engine's configurations in turn."""
    engine = registry.get(name)
    lines = [
        p for file in ("average", "adaptive") for p in read_problems(PROBLEMS / f"edge_{file}_pooling.txt", TARGET)
    ]
    found = []
    for operation in engine.operations:
        taken = [p for p in lines if p.op.name == operation and small(p) and not engine.reasons(p)]
        found += [(name, i % len(engine.configs(p)), p) for i, p in enumerate(taken[::3])]
    return found


CASES = [case for name in ENGINES for case in cases(name)]


@pytest.mark.parametrize("name, number, problem", CASES, ids=lambda v: str(v).rpartition(" on=")[0] or str(v))
def test_right(name: str, number: int, problem: Problem) -> None:
    engine = registry.get(name)
    with np.errstate(all="ignore"):
        found = verify(problem, engine, engine.configs(problem)[number], torch.device("cpu"))
    assert not found.fault, found.fault


def test_every_engine_and_operation_is_interpreted() -> None:
    for name in ENGINES:
        assert {p.op.name for n, _, p in CASES if n == name} == set(registry.get(name).operations)
