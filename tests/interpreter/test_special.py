"""Convolution engines for special shapes, in Triton's interpreter, as `test_convolution` does for the general ones.

They take the shared edge cases that they accept: with their last configuration, some with the first, some with 64-bit
offsets.
"""

from __future__ import annotations

import pytest
from test_convolution import DGRAD, FPROP, TARGET, WGRAD, edge_lines, run

from lucidnn.core.problem import Problem
from lucidnn.core.registry import get

BLAS = ("conv.im2col_gemm_triton", "conv.patch_gemm")  # more than a list of launches
ENGINES = (
    "conv.depthwise_triton",
    "conv.depthwise_wgrad_triton",
    "conv.stem",
    "conv.grouped_packed",
    "conv.implicit_gemm_split_k",
    "conv.implicit_gemm_wgrad_atomic",
)


def accepted(names: tuple[str, ...], step: int = 1) -> list[tuple[str, str]]:
    """(engine, problem), every `step`-th that each takes."""
    problems = [Problem.parse(line + TARGET) for line in dict.fromkeys(FPROP + DGRAD + WGRAD + edge_lines())]
    found = []
    for engine in map(get, names):
        mine = [p.text for p in problems if p.op.name in engine.operations and not engine.refusals(p)]
        found += [(engine.name, text) for text in mine[:: step * (1 + len(mine) // 100)]]
    return found


@pytest.mark.parametrize("engine,line", accepted(ENGINES + BLAS))
def test_edge_cases(engine: str, line: str) -> None:
    problem = Problem.parse(line)
    run(problem, engine, get(engine).configs(problem)[-1])


@pytest.mark.parametrize("engine,line", accepted(ENGINES + BLAS, 2))
def test_first_config(engine: str, line: str) -> None:
    problem = Problem.parse(line)
    run(problem, engine, get(engine).configs(problem)[0])


@pytest.mark.parametrize("engine,line", accepted(ENGINES, 5))
def test_64_bit_offsets(engine: str, line: str) -> None:
    problem = Problem.parse(line)
    run(problem, engine, get(engine).configs(problem)[0], wide=True)
