"""Engines that transform (Winograd, Fourier) or copy boxes of pixels, as they run on a GPU, in Triton's interpreter.

Products and Fourier transforms are the framework's; the kernels around them are interpreted. The problems are those of
``problems/edge_transforms.txt`` and some of the general ones.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from test_convolution import DGRAD, FPROP, TARGET, WGRAD, run

from lucidnn.core.problem import Problem
from lucidnn.core.registry import get
from lucidnn.testing import read_problems

FILE = Path(__file__).resolve().parents[2] / "problems" / "edge_transforms.txt"
ENGINES = ("conv.winograd_gemm_triton", "conv.winograd_triton", "conv.fft", "conv.fft_tiled", "conv.implicit_gemm_tma")


def lines() -> list[str]:
    """With float16 in place of bfloat16, which the interpreter cannot multiply."""
    own = [str(p).rpartition(" on=")[0].replace("bf16", "f16") for p in read_problems(FILE)]
    return list(dict.fromkeys(own + FPROP + DGRAD + WGRAD))


def cases() -> list:
    found = []
    for number, line in enumerate(lines()):
        problem = Problem.parse(line + TARGET)
        for engine in map(get, ENGINES):
            if problem.op.name in engine.operations and not engine.reasons(problem):
                config = engine.configs(problem)
                found.append(
                    pytest.param(engine.name, problem, config[number % len(config)], id=f"{engine.name} {line}")
                )
    return found


@pytest.mark.parametrize("name, problem, config", cases())
def test_against_the_definition(name, problem, config) -> None:
    run(problem, name, config)


@pytest.mark.parametrize("line", [FPROP[1], DGRAD[1]])
def test_64_bit_offsets(line) -> None:
    problem = Problem.parse(line + TARGET)
    run(problem, "conv.winograd_triton", get("conv.winograd_triton").configs(problem)[-1], wide=True)
