"""What numbers may do: NaN and infinity go where the formula takes them and nowhere else (over a tile or an image where
the method transforms those); threads change nothing.

The lines have no padding where the odd number is in dy or w: a product with a zero that is not there is nobody's NaN.
"""

from __future__ import annotations

import os

import pytest
import torch

from lucidnn.core import registry
from lucidnn.core.problem import Problem
from lucidnn.core.target import Target
from lucidnn.testing import allocate, disagreement, fill, reference, run_guarded, verify

TARGETS = {
    "cpu": Target.parse("cpu"),
    "cuda": Target.of("cuda") if torch.cuda.is_available() else Target.parse("cuda:sm_90"),
}
ODD = """
conv_fprop x=f32[2,5,9,8] w=f32[7,5,3,3]
conv_fprop x=f32[2,5,9,8] w=f32[7,5,3,3] padding=1 stride=2 act=relu
conv_fprop x=bf16[2,16,9,8]@nhwc w=bf16[24,16,3,3]@nhwc padding=1
conv_fprop x=f16[2,16,9,8]@nhwc w=f16[24,16,1,1]@nhwc bias=f16[24] act=leaky_relu:0.1
conv_fprop x=f32[2,6,9,8] w=f32[6,1,3,3] groups=6
conv_fprop x=f64[1,3,4,5,6] w=f64[4,3,2,2,2] act=clipped_relu:2.0
conv_dgrad dy=f32[2,7,7,6] w=f32[7,5,3,3]
conv_dgrad dy=bf16[2,16,4,4]@nhwc w=bf16[16,24,3,3]@nhwc dx=bf16[2,24,10,9]@nhwc stride=2
conv_wgrad x=f32[2,5,9,8] dy=f32[2,7,7,6]
conv_wgrad x=bf16[2,16,9,9]@nhwc dy=bf16[2,24,4,4]@nhwc dw=bf16[24,16,3,3]@nhwc stride=2
conv_bgrad dy=f32[3,7,5,6]
conv_bgrad dy=bf16[3,16,5,6]@nhwc
max_pool_fwd x=f32[2,5,9,8] window=3 stride=2 padding=1
max_pool_fwd x=f32[2,6,8,8] window=2
max_pool_fwd x=bf16[2,16,8,8]@nhwc window=2 index_type=u8
max_pool_bwd dy=f32[2,6,4,4] index=i64[2,6,4,4] dx=f32[2,6,8,8] window=2
pointwise_fwd x=f32[2,5,9,8] act=relu
pointwise_fwd x=bf16[2,16,9,8]@nhwc bias=bf16[16] act=hardswish
pointwise_fwd x=f32[2,5,9,8] act=clipped_relu:1.0
pointwise_bwd dy=f32[2,5,9,8] x=f32[2,5,9,8] act=leaky_relu:0.5
""".strip().splitlines()


def cases(kind: str, lines=ODD) -> list:
    return [
        pytest.param(engine, problem, id=f"{engine.name} {problem.text.rpartition(' on=')[0]}")
        for problem in (Problem.parse(line, TARGETS[kind]) for line in lines)
        for engine in registry.for_operation(problem.op.name)
        if kind in engine.targets and "reference" not in engine.notes and not engine.reasons(problem)
    ]


def check(engine, problem: Problem, value: float, device: torch.device) -> None:
    inputs = {role: allocate(problem[role], device)[0] for role in problem.inputs}
    fill(problem, inputs, seed=8)
    poked = inputs[problem.inputs[0]]
    poked[tuple(n // 2 for n in poked.shape)] = value
    for config in engine.configs(problem)[:2]:
        run, size = engine.build(problem, config), engine.workspace_size(problem, config)
        outputs, fault = run_guarded(problem, run, size, inputs, device)
        expected = reference(problem, inputs, device)
        if "spreads" in engine.notes:
            role = problem.outputs[0]
            missed = outputs[role].isfinite() & ~expected[role].isfinite()
            assert fault == "" and not missed.any()
        else:
            assert fault == "" and disagreement(problem, outputs, expected)[1] == ""
    out = expected[problem.outputs[0]]
    strange = int((~out.isfinite()).sum())
    tamed = problem.epilogue.activation in ("relu", "clipped_relu", "hardswish") and value != value
    assert strange < out.numel() and (strange > 0 or not tamed)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")], ids=str)
@pytest.mark.parametrize("engine, problem", cases("cpu"))
def test_a_strange_number_goes_where_it_should_on_a_cpu(engine, problem, value):
    check(engine, problem, value, torch.device("cpu"))


@pytest.mark.gpu
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")], ids=str)
@pytest.mark.parametrize("engine, problem", cases("cuda"))
def test_a_strange_number_goes_where_it_should_on_a_gpu(engine, problem, value):
    check(engine, problem, value, torch.device("cuda"))


WORK = """
conv_fprop x=f32[5,17,23,19] w=f32[33,17,3,3] padding=1 act=relu
conv_fprop x=bf16[3,16,29,31]@nhwc w=bf16[40,16,3,3]@nhwc stride=2
conv_fprop x=f32[1,200,3,3] w=f32[300,200,1,1]
conv_dgrad dy=f32[3,33,13,11] w=f32[33,17,3,3] dx=f32[3,17,26,22] stride=2 padding=1
conv_wgrad x=f32[7,17,23,19] dy=f32[7,33,23,19] padding=1
conv_wgrad x=f64[3,6,40,41] dy=f64[3,6,40,41] padding=1 groups=6
conv_bgrad dy=f32[9,17,23,19]
max_pool_fwd x=f32[5,17,23,19] window=3 stride=2 padding=1 index_type=u8
max_pool_bwd dy=f32[5,17,12,10] index=u8[5,17,12,10] dx=f32[5,17,23,19] window=3 stride=2 padding=1 index_type=u8
pointwise_fwd x=f32[5,17,23,19] bias=f32[17] act=gelu
pointwise_bwd dy=f32[5,17,23,19] x=f32[5,17,23,19] act=relu
""".strip().splitlines()


@pytest.mark.parametrize("processors", [1, 3, 2 * (os.cpu_count() or 1), 61])
@pytest.mark.parametrize("engine, problem", cases("cpu", WORK))
def test_any_number_of_threads(engine, problem, processors):
    """A plan is for a number of processors; how many threads there really are is another matter."""
    text = problem.text.rpartition(" on=")[0]
    planned = Problem.parse(text, Target("cpu", problem.target.arch, processors))
    for config in engine.configs(planned):
        found = verify(planned, engine, config, torch.device("cpu"))
        assert not found.fault, f"{config}: {found.fault}"


@pytest.mark.parametrize("engine, problem", cases("cpu", WORK))
def test_on_one_thread(engine, problem):
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        found = verify(problem, engine, engine.configs(problem)[0], torch.device("cpu"))
    finally:
        torch.set_num_threads(before)
    assert not found.fault, found.fault
