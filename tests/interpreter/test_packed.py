"""The engines that pack their operands first, in Triton's interpreter, as `test_convolution` does for the others.

TF32 problems test the packing and the product's index arithmetic; the interpreter multiplies in full float32.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from test_convolution import DGRAD, FPROP, TARGET, WGRAD, edge_lines, run, small

from lucidnn.core.problem import Problem
from lucidnn.core.registry import get
from lucidnn.engines._triton.tf32 import rounded

GATHER, PLANES = "conv.implicit_gemm_packed", "conv.implicit_gemm_wgrad_packed"

MORE = """
conv_fprop x=f32[3,7,5,6]@(240,1,42,7) w=f32[9,7,3,3]@nhwc padding=1:0,0:2
conv_fprop x=f32[2,40,3,4]@(0,12,4,1) w=f32[6,20,1,3] groups=2
conv_fprop x=f32[2,9,3,4,5]@ndhwc w=f32[4,9,2,3,2] stride=1,2,2 padding=1
conv_fprop x=f32[2,5,4,5] w=f32[34,5,3,3]@nhwc padding=1 groups=1 act=relu
conv_fprop x=f32[2,20,4,4]@nhwc w=f32[40,10,2,3] groups=2 bias=f32[40]
conv_fprop x=f32[2,9,4,3,3] w=f32[17,9,2,2,2]@(72,8,4,2,1) padding=1
conv_dgrad dy=f32[2,6,4,5]@nhwc w=f32[6,20,3,3]@nhwc dx=f32[2,20,8,10]@nhwc stride=2 padding=1
conv_dgrad dy=f32[2,6,4,5] w=f32[6,18,1,1] dx=f32[2,18,7,10] stride=2 z=f32[2,18,7,10]@nhwc beta=1.0
conv_dgrad dy=f32[2,12,4,5]@nhwc w=f32[12,9,3,3]@nhwc dx=f32[2,18,4,5]@nhwc groups=2 padding=1
conv_wgrad x=f32[2,18,6,8] dy=f32[2,9,6,8] dw=f32[9,18,1,1] alpha=0.5
conv_wgrad x=f32[2,18,6,8] dy=f32[2,9,3,4] dw=f32[9,18,1,1] stride=2
conv_wgrad x=f32[2,6,9,9]@nhwc dy=f32[2,4,4,5] dw=f32[4,3,3,2] groups=2 stride=2 padding=1:0,1 z=f32[4,3,3,2] beta=1
conv_wgrad x=f32[2,3,4,5,6] dy=f32[2,4,2,3,4] dw=f32[4,3,2,2,2] stride=2,2,1 padding=0,1,0 dilation=1,2,2
conv_wgrad x=f32[3,20,7] dy=f32[3,5,7]@nwc dw=f32[5,20,3] padding=1
conv_wgrad x=f32[2,16,5,4,4] dy=f32[2,8,5,4,4] dw=f32[8,16,3,1,1] padding=1,0,0
""".strip().splitlines()


def accepted(lines: list[str]) -> list[tuple[str, str]]:
    """(engine, line) for what the packing engines take, float32 in both modes."""
    found = {}
    lines = [line for line in lines if " math=" not in line and not line.startswith("conv_bgrad")]
    for line in (line + mode for line in lines for mode in ("", " math=tf32")):
        problem = Problem.parse(line + TARGET)
        engine = PLANES if problem.op.name == "conv_wgrad" else GATHER
        if not get(engine).reasons(problem):
            found[problem.text] = engine
    return [(engine, text) for text, engine in found.items()]


@pytest.mark.parametrize("engine,line", accepted(FPROP[::2] + DGRAD[1::2] + WGRAD + MORE))
def test_small_tiles(engine: str, line: str) -> None:
    problem = Problem.parse(line)
    knobs = {"SPLIT_K": 3} if engine == PLANES else {"GROUP_M": 2}
    run(problem, engine, small(get(engine).configs(problem)[0], **knobs))


@pytest.mark.parametrize("engine,line", accepted(FPROP[1::4] + DGRAD[::4] + WGRAD[::4] + MORE))
def test_default_tiles(engine: str, line: str) -> None:
    problem = Problem.parse(line)
    run(problem, engine, get(engine).configs(problem)[0])


@pytest.mark.parametrize("engine,line", accepted(FPROP[1:10:4] + DGRAD[3:12:4] + WGRAD[1:13:5]))
def test_64_bit_offsets(engine: str, line: str) -> None:
    problem = Problem.parse(line)
    knobs = {"SPLIT_K": 2} if engine == PLANES else {}
    run(problem, engine, small(get(engine).configs(problem)[0], **knobs), wide=True)


@pytest.mark.parametrize("engine,line", accepted(edge_lines())[::3])
def test_edge_cases(engine: str, line: str) -> None:
    problem = Problem.parse(line)
    run(problem, engine, get(engine).configs(problem)[-1])


REFUSED = {
    "conv_fprop x=bf16[2,16,8,8]@nhwc w=bf16[8,16,3,3]": "x that is not channels last",
    "conv_dgrad dy=f16[2,16,8,8]@nhwc w=f16[16,8,3,3]": "dy that is not channels last",
    "conv_fprop x=f32[2,16,8,8] w=f32[16,16,3,3]@(1,16,768,256)": "w whose result channels are not innermost",
    "conv_fprop x=f32[2,16,8,8] w=f32[12,16,3,3]": "at least 16 result channels a group",
    "conv_fprop x=f64[2,16,8,8] w=f64[8,16,3,3]": "x of type f32, f16, bf16",
    "conv_wgrad x=bf16[2,16,8,8]@nhwc dy=bf16[2,8,8,8]@nhwc dw=bf16[8,16,3,3] padding=1": "x or dy not channels last",
    "conv_wgrad x=f32[2,16,8,8]@nhwc dy=f32[2,8,8,8] dw=f32[8,16,3,3] padding=1": "x that is not channels last",
    "conv_wgrad x=f32[2,3,8,8] dy=f32[2,8,8,8] dw=f32[8,3,3,3] padding=1": "at least 16 channels a group",
}


@pytest.mark.parametrize("line", REFUSED)
def test_what_gains_nothing_is_refused(line: str) -> None:
    problem = Problem.parse(line + TARGET)
    (reason,) = get(PLANES if problem.op.name == "conv_wgrad" else GATHER).reasons(problem)
    assert REFUSED[line] in reason


ACCEPTED = """
conv_fprop x=f32[2,16,8,8]@nhwc w=f32[8,16,3,3]@nhwc math=tf32
conv_fprop x=bf16[2,16,8,8]@nhwc%8 w=bf16[8,16,3,3]@nhwc
conv_fprop x=bf16[2,12,8,8]@nhwc w=bf16[8,12,3,3]@nhwc
conv_fprop x=bf16[2,16,8,8] w=bf16[8,16,3,3]
conv_wgrad x=bf16[2,16,8,8]@nhwc dy=bf16[2,8,8,8] dw=bf16[8,16,3,3] padding=1
""".strip().splitlines()


@pytest.mark.parametrize("line", ACCEPTED)
def test_what_gains_is_taken(line: str) -> None:
    problem = Problem.parse(line + TARGET)
    assert get(PLANES if problem.op.name == "conv_wgrad" else GATHER).reasons(problem) == []


def test_dy_in_planes_already_is_not_copied() -> None:
    """Lines of 8 pixels are whole multiples of 16 bytes; lines of 7 are not."""
    sizes = []
    for width in (8, 7):
        shapes = f"x=f32[2,4,6,{width}] dy=f32[2,8,6,{width}] dw=f32[8,4,1,1] math=tf32"
        problem = Problem.parse(f"conv_wgrad {shapes}{TARGET}")
        config = small(get(PLANES).configs(problem)[0], SPLIT_K=1)
        sizes.append(get(PLANES).workspace_size(problem, config))
    assert sizes == [0, 2 * (4 + 8) * 6 * 8 * 4]


@triton.jit
def round_all(source, to, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    tl.store(to + i, rounded(tl.load(source + i)))


def test_rounding_to_tf32() -> None:
    """To the nearest of 11 significant bits, ties away from zero; what is not finite, and zeros' signs, stay."""
    random = np.random.default_rng(0).standard_normal(1012) * np.logspace(-30, 30, 1012)
    special = [0.0, -0.0, math.inf, -math.inf, math.nan, 1 + 2**-11, -1 - 2**-11, 1 + 2**-12, 3e38, 1e-38, 1.0, -2.0]
    values = torch.tensor(np.concatenate([random, special]), dtype=torch.float32)
    found = torch.empty_like(values)
    round_all[(1,)](values, found, len(values))
    mantissa, exponent = np.frexp(values.numpy().astype(np.float64))
    want = np.ldexp(np.sign(mantissa) * np.floor(np.abs(mantissa) * 2**11 + 0.5), exponent - 11)
    finite = values.isfinite().numpy()
    np.testing.assert_array_equal(found.numpy()[finite], want[finite].astype(np.float32))
    np.testing.assert_array_equal(found.numpy()[~finite], values.numpy()[~finite])
    assert (found.signbit() == values.signbit()).all()


def test_what_is_packed_is_rounded() -> None:
    """Ones and a value between two TF32 numbers: the product shows which of the two entered."""
    for line, fill in (
        ("conv_fprop x=f32[1,4,4,4] w=f32[4,4,1,1] math=tf32", {"x": 1 + 2**-11, "w": 1.0}),
        ("conv_wgrad x=f32[1,4,4,4] dy=f32[1,4,4,3] dw=f32[4,4,1,2] math=tf32", {"x": 1.0, "dy": 1 + 2**-11}),
    ):
        problem = Problem.parse(line + TARGET)
        engine = get(PLANES if problem.op.name == "conv_wgrad" else GATHER)
        config = small(engine.configs(problem)[0])
        tensors = [torch.full(t.shape, fill.get(role, math.nan)) for role, t in problem.items]
        space = torch.zeros(engine.workspace_size(problem, config), dtype=torch.uint8)
        engine.build(problem, config)(tuple(tensors), space)
        terms = 12 if problem.op.name == "conv_wgrad" else 4
        assert (tensors[-1] == terms * (1 + 2**-10)).all()


def test_workspace_is_what_the_packed_operands_need() -> None:
    problem = Problem.parse("conv_fprop x=f32[2,3,5,5] w=f32[6,3,3,3] math=tf32" + TARGET)
    config = get(GATHER).configs(problem)[0]
    assert get(GATHER).workspace_size(problem, config) == 4 * (2 * 25 * 4 + 6 * 9 * 4)
    ieee = dataclasses.replace(problem, math="ieee")
    assert get(GATHER).workspace_size(ieee, {**config, "BLOCK_N": 16}) == 4 * 3 * 9 * 16  # one tile of columns
