"""The convolution kernels in Triton's interpreter, on toy problems, against a float64 definition in numpy.

Every buffer starts as NaN with a band around it that must not change; strides are the problem's own. Each problem runs
with its default tiles and with the smallest ones, so that there are several tiles, trips and parts. bfloat16 is left
out: the interpreter multiplies its raw bits.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as functional

from lucidnn.core.descriptor import DTYPES, TensorDescriptor
from lucidnn.core.problem import Problem
from lucidnn.core.registry import get
from lucidnn.ops.convolution import Geometry

BAND = 64  # elements before and after each buffer
TARGET = " on=cuda:sm_90"

FPROP = """
conv_fprop x=f32[2,5,7,6] w=f32[9,5,3,3]
conv_fprop x=f32[2,20,7,6] w=f32[9,20,3,3] padding=1
conv_fprop x=f32[2,20,7,6]@nhwc w=f32[9,20,3,3]@nhwc padding=1
conv_fprop x=f16[2,16,5,6]@nhwc w=f16[17,16,3,3]@nhwc padding=1 bias=f32[17] act=relu
conv_fprop x=f16[2,24,4,4] w=f16[8,24,1,1] bias=f16[8] act=silu
conv_fprop x=f64[1,18,5,5]@nhwc w=f64[20,18,3,3]@nhwc padding=1
conv_fprop x=f32[3,4,11] w=f32[6,4,3] stride=2 padding=2
conv_fprop x=f32[3,17,11]@nwc w=f32[6,17,4] dilation=2
conv_fprop x=f32[1,3,4,5,6] w=f32[4,3,2,3,2] stride=1,2,1 padding=1,0:2,1
conv_fprop x=f32[1,16,3,4,5]@ndhwc w=f32[5,16,3,3,3]@ndhwc padding=1 dilation=1,2,1
conv_fprop x=f32[2,3,9,9] w=f32[4,3,2,2] stride=5
conv_fprop x=f32[2,3,2,2] w=f32[4,3,5,5] padding=2
conv_fprop x=f32[1,17,8,8] w=f32[3,17,1,1] stride=2
conv_fprop x=f32[2,3,6,8] w=f32[4,3,3,2] stride=2,3 padding=0:1,2:0 dilation=1,2
conv_fprop x=f32[2,1,5,5] w=f32[1,1,3,3] padding=1
conv_fprop x=f32[2,6,5,5] w=f32[6,1,3,3] padding=1 groups=6
conv_fprop x=f32[2,6,5,5]@nhwc w=f32[12,1,3,3] padding=1 groups=6
conv_fprop x=f32[2,40,4,5] w=f32[6,20,3,3] padding=1 groups=2
conv_fprop x=f32[2,40,4,5]@nhwc w=f32[34,20,2,2]@nhwc groups=2
conv_fprop x=f32[2,5,4,6]@(0,24,6,1) w=f32[3,5,3,3] padding=1
conv_fprop x=f32[2,5,4,6]@(0,0,0,1) w=f32[3,5,3,3]@(0,9,3,1) padding=1
conv_fprop x=f32[2,16,4,6]@(2000,100,13,2) w=f32[3,16,3,3]@(500,1,100,20) y=f32[2,3,4,6]@(200,60,12,2) padding=1
conv_fprop x=f16[2,16,5,5]@nhwc%2 w=f16[8,16,3,3]@nhwc%4 padding=1
conv_fprop x=f16[2,7,5,5] w=f16[8,7,3,3] y=f32[2,8,3,3]
conv_fprop x=f32[2,4,5,5] w=f32[8,4,3,3] bias=f32[8] z=f32[2,8,3,3] alpha=0.5 beta=1.0 act=leaky_relu:0.125
conv_fprop x=f64[2,4,5,5] w=f64[8,4,3,3] bias=f64[8] z=f64[2,8,3,3]@nhwc alpha=-1.5 beta=0.3 act=tanh
conv_fprop x=f32[2,16,5,5]@nhwc w=f32[18,16,3,3]@nhwc z=f16[2,18,3,3] beta=2.0 act=clipped_relu:0.5
conv_fprop x=f32[1,20,5,5] w=f32[8,20,3,3] padding=1 math=tf32
""".strip().splitlines()

DGRAD = """
conv_dgrad dy=f32[2,9,5,4] w=f32[9,5,3,3] dx=f32[2,5,7,6]
conv_dgrad dy=f32[2,20,7,6] w=f32[20,9,3,3] dx=f32[2,9,7,6] padding=1
conv_dgrad dy=f16[2,32,5,6]@nhwc w=f16[32,17,3,3]@nhwc dx=f16[2,17,5,6]@nhwc padding=1
conv_dgrad dy=f64[2,18,5,6]@nhwc w=f64[18,16,3,3] dx=f64[2,16,5,6] padding=1
conv_dgrad dy=f32[3,6,7] w=f32[6,4,3] dx=f32[3,4,11] stride=2 padding=2
conv_dgrad dy=f32[3,20,4]@nwc w=f32[20,6,4]@nwc dx=f32[3,6,13]@nwc stride=3 padding=1:2 dilation=2
conv_dgrad dy=f32[2,4,2,2] w=f32[4,3,2,2] dx=f32[2,3,9,9] stride=5
conv_dgrad dy=f32[2,4,4,4] w=f32[4,3,1,1] dx=f32[2,3,8,8] stride=2 z=f32[2,3,8,8] beta=1.0
conv_dgrad dy=f32[2,32,4,4]@nhwc w=f32[32,16,3,3]@nhwc dx=f32[2,16,8,7]@nhwc stride=2 padding=1 alpha=0.5
conv_dgrad dy=f32[1,17,4,3] w=f32[17,20,3,2] dx=f32[1,20,6,8] stride=2,3 padding=1:2,2:1 dilation=1,2
conv_dgrad dy=f32[1,4,4,3,7] w=f32[4,3,2,3,2] dx=f32[1,3,4,5,6] stride=1,2,1 padding=1:0,0:2,1 z=f32[1,3,4,5,6] beta=-1
conv_dgrad dy=f32[1,4,2,3,2] w=f32[4,3,3,3,3] dx=f32[1,3,4,5,4] stride=2 padding=1
conv_dgrad dy=f32[2,16,2,2]@nhwc w=f32[16,4,3,3] dx=f32[2,4,9,9] stride=4 dilation=2 padding=0
conv_dgrad dy=f32[2,6,5,5] w=f32[6,1,3,3] dx=f32[2,6,5,5] padding=1 groups=6
conv_dgrad dy=f32[2,36,3,3]@nhwc w=f32[36,10,2,2]@nhwc dx=f32[2,20,6,6] stride=2 groups=2
conv_dgrad dy=f32[2,9,5,4]@(0,1,36,9) w=f32[9,5,3,3]@(0,9,3,1) dx=f32[2,5,7,6]@(800,1,60,10)
""".strip().splitlines()

WGRAD = """
conv_wgrad x=f32[2,5,7,6] dy=f32[2,9,5,4] dw=f32[9,5,3,3]
conv_wgrad x=f32[2,20,7,6] dy=f32[2,9,7,6] dw=f32[9,20,3,3] padding=1
conv_wgrad x=f16[2,32,5,6]@nhwc dy=f16[2,17,5,6]@nhwc dw=f16[17,32,3,3]@nhwc padding=1 alpha=0.5
conv_wgrad x=f16[2,3,8,8]@nhwc dy=f16[2,16,8,8]@nhwc dw=f32[16,3,3,3] padding=1
conv_wgrad x=f64[2,18,5,6]@nhwc dy=f64[2,16,5,6] dw=f64[16,18,3,3] padding=1
conv_wgrad x=f32[3,4,11] dy=f32[3,6,7] dw=f32[6,4,3] stride=2 padding=2 z=f32[6,4,3] beta=1.0
conv_wgrad x=f32[3,20,13]@nwc dy=f32[3,6,4]@nwc dw=f32[6,20,4]@nwc stride=3 padding=1:2 dilation=2
conv_wgrad x=f32[2,3,9,9] dy=f32[2,4,2,2] dw=f32[4,3,2,2] stride=5
conv_wgrad x=f32[2,17,8,8] dy=f32[2,4,4,4] dw=f32[4,17,1,1] stride=2
conv_wgrad x=f32[2,16,8,8]@nhwc dy=f32[2,32,8,8]@nhwc dw=f32[32,16,1,1]
conv_wgrad x=f32[1,20,6,8] dy=f32[1,17,4,3] dw=f32[17,20,3,2] stride=2,3 padding=1:2,2:1 dilation=1,2
conv_wgrad x=f32[1,3,4,5,6] dy=f32[1,4,4,3,7] dw=f32[4,3,2,3,2] stride=1,2,1 padding=1:0,0:2,1:1
conv_wgrad x=f32[1,16,3,4,5]@ndhwc dy=f32[1,6,3,2,5]@ndhwc dw=f32[6,16,3,3,3] padding=1 dilation=1,2,1
conv_wgrad x=f32[2,6,5,5] dy=f32[2,6,5,5] dw=f32[6,1,3,3] padding=1 groups=6
conv_wgrad x=f32[2,40,3,3]@nhwc dy=f32[2,36,2,2] dw=f32[36,20,2,2]@nhwc groups=2
conv_wgrad x=f32[2,5,7,6]@(0,1,30,5) dy=f32[2,9,5,4]@(0,0,4,1) dw=f32[9,5,3,3]@(100,20,6,2) z=f32[9,5,3,3] beta=0.5
""".strip().splitlines()

BGRAD = """
conv_bgrad dy=f32[2,5,7,6]
conv_bgrad dy=f16[3,40,5,6]@nhwc db=f32[40]
conv_bgrad dy=f64[2,3,2,3,4]
conv_bgrad dy=f32[2,130,3]@nwc
conv_bgrad dy=f32[9,4]
conv_bgrad dy=f32[1,1,1,1]
conv_bgrad dy=f32[3,4,5,6]@(0,7,100,3) db=f32[4]@(3)
""".strip().splitlines()


def strided(descriptor: TensorDescriptor, fill: float) -> tuple[torch.Tensor, torch.Tensor]:
    """A buffer with bands around it, all of one value, and the descriptor's tensor inside, aligned as it says."""
    dtype = getattr(torch, DTYPES[descriptor.dtype][0])
    buffer = torch.full((descriptor.span + 2 * BAND + 16,), fill, dtype=dtype)
    start = BAND
    while True:
        address = buffer.data_ptr() + start * descriptor.itemsize
        if address % descriptor.alignment == 0 and (descriptor.alignment == 16 or address % (2 * descriptor.alignment)):
            break
        start += 1
    return buffer, buffer[start:].as_strided(descriptor.shape, descriptor.strides)


def taps(g: Geometry):
    """Each tap with the (padded) input positions it reads, one slice an axis."""
    for tap in itertools.product(*map(range, g.filter)):
        starts = [t * d for t, d in zip(tap, g.dilation)]
        yield tap, tuple(slice(a, a + (q - 1) * s + 1, s) for a, q, s in zip(starts, g.out_size, g.stride))


def definition(problem: Problem, pack: dict[str, np.ndarray]) -> np.ndarray:
    """The result in float64, before the epilogue."""
    if problem.op.name == "conv_bgrad":
        dy = pack["dy"]
        return dy.sum(axis=(0, *range(2, dy.ndim)))
    g = Geometry.of(problem)

    def five(role: str, shape: tuple[int, ...]) -> np.ndarray:
        return pack[role].reshape(shape)

    pads = ((0, 0), (0, 0), *zip(g.pad, g.pad_after))
    x_shape, w_shape = (g.N, g.G, g.C // g.G, *g.in_size), (g.G, g.K // g.G, g.C // g.G, *g.filter)
    y_shape = (g.N, g.G, g.K // g.G, *g.out_size)
    padded = (g.N, g.C, *(n + a + b for n, a, b in zip(g.in_size, g.pad, g.pad_after)))
    grouped = (g.N, g.G, g.C // g.G, *padded[2:])
    if problem.op.name == "conv_dgrad":
        dy, w = five("dy", y_shape), five("w", w_shape)
        dx = np.zeros(grouped)
        for tap, where in taps(g):
            dx[(..., *where)] += np.einsum("ngkopq,gkc->ngcopq", dy, w[(..., *tap)])
        inside = tuple(slice(a, a + n) for a, n in zip(g.pad, g.in_size))
        return dx[(..., *inside)].reshape(problem["dx"].shape)
    x = np.pad(five("x", x_shape).reshape(g.N, g.C, *g.in_size), pads).reshape(grouped)
    if problem.op.name == "conv_fprop":
        w = five("w", w_shape)
        y = sum(np.einsum("ngcopq,gkc->ngkopq", x[(..., *where)], w[(..., *tap)]) for tap, where in taps(g))
        return y.reshape(problem["y"].shape)
    dy, dw = five("dy", y_shape), np.zeros(w_shape)
    for tap, where in taps(g):
        dw[(..., *tap)] = np.einsum("ngkopq,ngcopq->gkc", dy, x[(..., *where)])
    return dw.reshape(problem["dw"].shape)


def finished(problem: Problem, result: np.ndarray, pack: dict[str, np.ndarray]) -> np.ndarray:
    e = problem.epilogue
    result = e.alpha * result
    if "z" in pack:
        result = result + e.beta * pack["z"]
    if "bias" in pack:
        result = result + pack["bias"].reshape(-1, *(1,) * (result.ndim - 2))
    act = {
        "identity": lambda v: v,
        "relu": functional.relu,
        "clipped_relu": lambda v: v.clamp(0, e.parameter),
        "leaky_relu": lambda v: functional.leaky_relu(v, e.parameter),
        "elu": lambda v: functional.elu(v, e.parameter),
        "sigmoid": torch.sigmoid,
        "tanh": torch.tanh,
        "silu": functional.silu,
        "gelu": functional.gelu,
        "gelu_tanh": lambda v: functional.gelu(v, approximate="tanh"),
        "softplus": functional.softplus,
        "hardswish": functional.hardswish,
        "hardsigmoid": functional.hardsigmoid,
        "mish": functional.mish,
    }
    return act[e.activation](torch.from_numpy(result)).numpy()


def run(problem: Problem, engine_name: str, config, wide: bool = False) -> None:
    """One call of one engine, with everything checked; `wide` takes the path of 64-bit offsets."""
    engine = get(engine_name)
    assert engine.reasons(problem) == []
    rng = np.random.default_rng(0)
    buffers, tensors, pack = [], [], {}
    for role, descriptor in problem.items:
        buffer, tensor = strided(descriptor, math.nan)
        if role in problem.inputs:
            distinct = tuple(n if s else 1 for n, s in zip(descriptor.shape, descriptor.strides))
            values = np.broadcast_to(rng.standard_normal(distinct), descriptor.shape)
            if 0 not in descriptor.strides:
                tensor.copy_(torch.from_numpy(values.copy()))
            else:
                index = tuple(slice(None) if s else slice(0, 1) for s in descriptor.strides)
                tensor[index] = torch.from_numpy(values[index].copy()).to(tensor.dtype)
            pack[role] = tensor.double().numpy().copy()
        buffers.append(buffer)
        tensors.append(tensor)
    before = [buffer.clone() for buffer in buffers]
    size = engine.workspace_size(problem, config)
    space = torch.full((size + 1024,), 255, dtype=torch.uint8)  # as floating-point numbers: NaN
    program = engine.build(problem, config)
    if wide:
        launches = engine.launches(problem, config)
        program.launches = [replace(one, constexprs=_widened(one.constexprs)) for one in launches]
    program(tuple(tensors), space[512 : 512 + size] if size else None)
    assert (space[:512] == 255).all() and (space[512 + size :] == 255).all(), "wrote outside its workspace"
    (out,) = problem.outputs
    got = tensors[-1].double().numpy().copy()
    tensors[-1].fill_(math.nan)
    for role, buffer, old in zip(problem.tensors, buffers, before):
        assert torch.equal(buffer.nan_to_num(7.5), old.nan_to_num(7.5)), f"changed what is around {role}"
    want = finished(problem, definition(problem, pack), pack)
    kinds = {problem[out].dtype, problem.items[0][1].dtype}
    accuracy = 1e-2 if problem.math == "tf32" else 3e-3 if "f16" in kinds else 1e-5 if "f32" in kinds else 1e-12
    # Errors are those of the sums, which an activation may have cut off.
    scale = max(np.abs(want).max(), math.sqrt(problem.flops / max(2 * problem[out].numel, 1)) / 4) + 1e-3
    assert np.isfinite(got).all(), f"{np.isnan(got).sum()} of {got.size} elements not written"
    assert np.abs(got - want).max() <= accuracy * scale


def _widened(constexprs):
    return {name: name == "WIDE" or value for name, value in constexprs.items()}


def small(config: dict, **knobs) -> dict:
    return {**config, "BLOCK_M": 16, "BLOCK_N": 16, "BLOCK_K": 16, **knobs}


@pytest.mark.parametrize("tiles", ["default", "small"])
@pytest.mark.parametrize("line", FPROP + DGRAD)
def test_implicit_gemm(line: str, tiles: str) -> None:
    problem = Problem.parse(line + TARGET)
    config = get("conv.implicit_gemm").configs(problem)[0]
    run(problem, "conv.implicit_gemm", small(config, GROUP_M=2) if tiles == "small" else config)


@pytest.mark.parametrize("line", FPROP[1:10:2] + DGRAD[1:12:2])
def test_the_other_order_of_taps(line: str) -> None:
    problem = Problem.parse(line + TARGET)
    config = get("conv.implicit_gemm").configs(problem)[0]
    run(problem, "conv.implicit_gemm", small(config, TAPS_INNER=not config["TAPS_INNER"]))


@pytest.mark.parametrize("tiles", ["default", "one part", "three parts"])
@pytest.mark.parametrize("line", WGRAD)
def test_implicit_gemm_wgrad(line: str, tiles: str) -> None:
    problem = Problem.parse(line + TARGET)
    config = get("conv.implicit_gemm_wgrad").configs(problem)[0]
    if tiles != "default":
        config = small(config, SPLIT_K=1 if tiles == "one part" else 3)
    run(problem, "conv.implicit_gemm_wgrad", config)


@pytest.mark.parametrize("tiles", ["default", "small"])
@pytest.mark.parametrize("line", BGRAD)
def test_bias_grad(line: str, tiles: str) -> None:
    problem = Problem.parse(line + TARGET)
    config = get("conv.bias_grad_triton").configs(problem)[0]
    if tiles == "small":
        config = {**config, "BLOCK_P": 4, "BLOCK_C": 2, "SPLIT_K": 5}
    run(problem, "conv.bias_grad_triton", config)


WIDE = {
    "conv.implicit_gemm": FPROP[1:10:2] + DGRAD[3:12:2],
    "conv.implicit_gemm_wgrad": WGRAD[1:13:3],
    "conv.bias_grad_triton": BGRAD[:3],
}


@pytest.mark.parametrize("engine,line", [(engine, line) for engine, lines in WIDE.items() for line in lines])
def test_64_bit_offsets(engine: str, line: str) -> None:
    problem = Problem.parse(line + TARGET)
    small_tiles = {"BLOCK_M": 16, "BLOCK_N": 16, "BLOCK_K": 16, "BLOCK_P": 16, "SPLIT_K": 2}
    config = {knob: small_tiles.get(knob, value) for knob, value in get(engine).configs(problem)[0].items()}
    run(problem, engine, config, wide=True)


ENGINES = {
    "conv_fprop": "conv.implicit_gemm",
    "conv_dgrad": "conv.implicit_gemm",
    "conv_wgrad": "conv.implicit_gemm_wgrad",
    "conv_bgrad": "conv.bias_grad_triton",
}


def edge_lines() -> list[str]:
    """The shared edge cases, with float16 in place of bfloat16."""
    text = (Path(__file__).resolve().parents[2] / "problems" / "edge.txt").read_text(encoding="utf-8")
    lines = (line.partition("#")[0].strip().replace("bf16", "f16") for line in text.splitlines())
    return [line for line in dict.fromkeys(lines) if line.startswith("conv_")]


@pytest.mark.parametrize("line", edge_lines())
def test_edge_cases(line: str) -> None:
    problem = Problem.parse(line + TARGET)
    engine = get(ENGINES[problem.op.name])
    if problem.is_empty:
        assert all("elements" in reason for reason in engine.reasons(problem))
        assert engine.reasons(problem)
        return
    run(problem, engine.name, engine.configs(problem)[-1])
