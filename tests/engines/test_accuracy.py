"""Numbers at real sizes: an engine's error against float64 is not above the framework's own by more than a tenth.

Both see the same rounded inputs; the floor is two roundings of the accumulator. A few problems, so that a sum is long
enough to show how it is taken: blocked or in one go, in float32 or in the operands' type.
"""

from __future__ import annotations

import pytest
import torch

import peer
from lucidnn.core import registry
from lucidnn.core.problem import Problem
from lucidnn.core.target import Target
from lucidnn.testing import empty, fill, reference, relative_error

TARGETS = {
    "cpu": Target.parse("cpu"),
    "cuda": Target.of("cuda") if torch.cuda.is_available() else Target.parse("cuda:sm_90"),
}
LINES = {
    "cpu": """
conv_fprop x=f32[2,64,20,20] w=f32[64,64,3,3] padding=1
conv_fprop x=f32[2,512,7,7] w=f32[64,512,3,3] padding=1
conv_fprop x=f32[2,16,40,40]@nhwc w=f32[32,16,5,5]@nhwc stride=2
conv_fprop x=f32[4,1024,7,7]@nhwc w=f32[64,1024,1,1]@nhwc
conv_fprop x=bf16[2,256,9,9]@nhwc w=bf16[64,256,3,3]@nhwc padding=1
conv_fprop x=f16[2,256,9,9] w=f16[64,256,3,3] padding=1
conv_fprop x=f64[1,128,9,9] w=f64[32,128,3,3]
conv_dgrad dy=f32[2,256,12,12] w=f32[256,32,3,3] padding=1
conv_dgrad dy=bf16[2,128,12,12]@nhwc w=bf16[128,64,3,3]@nhwc dx=bf16[2,64,24,24]@nhwc stride=2 padding=1
conv_wgrad x=f32[4,16,32,32] dy=f32[4,32,32,32] padding=1
conv_wgrad x=f32[16,32,16,16] dy=f32[16,64,16,16] padding=1
conv_wgrad x=bf16[8,32,16,16]@nhwc dy=bf16[8,64,16,16]@nhwc padding=1
conv_wgrad x=f32[64,64,8,8] dy=f32[64,32,8,8]
conv_bgrad dy=f32[16,8,64,64]
conv_bgrad dy=bf16[16,64,32,32]@nhwc
""",
    "cuda": """
conv_fprop x=f32[8,256,28,28]@nhwc w=f32[128,256,3,3]@nhwc padding=1
conv_fprop x=f32[8,256,28,28]@nhwc w=f32[128,256,3,3]@nhwc padding=1 math=tf32
conv_fprop x=f32[8,64,56,56] w=f32[64,64,3,3] padding=1 math=tf32
conv_fprop x=bf16[16,512,14,14]@nhwc w=bf16[256,512,3,3]@nhwc padding=1
conv_fprop x=f16[16,512,14,14]@nhwc w=f16[256,512,3,3]@nhwc padding=1
conv_fprop x=f64[4,128,14,14] w=f64[64,128,3,3] padding=1
conv_dgrad dy=bf16[16,256,28,28]@nhwc w=bf16[256,128,3,3]@nhwc padding=1
conv_dgrad dy=f32[8,128,28,28] w=f32[128,64,3,3] dx=f32[8,64,56,56] stride=2 padding=1 math=tf32
conv_wgrad x=bf16[64,128,28,28]@nhwc dy=bf16[64,128,28,28]@nhwc padding=1
conv_wgrad x=f32[64,64,28,28]@nhwc dy=f32[64,64,28,28]@nhwc padding=1
conv_wgrad x=f32[64,64,28,28]@nhwc dy=f32[64,64,28,28]@nhwc padding=1 math=tf32
conv_bgrad dy=bf16[64,256,56,56]@nhwc
conv_bgrad dy=f32[64,64,56,56]
""",
}
FLOOR = {"f64": 2.0**-52}  # of the accumulator, which is float32 for all others
NAMES = {"f64": torch.float64, "f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


def cases(kind: str) -> list:
    problems = [Problem.parse(line, TARGETS[kind]) for line in LINES[kind].split("\n") if line]
    return [
        pytest.param(engine, p, id=f"{engine.name} {p.text.rpartition(' on=')[0]}")
        for p in problems
        for engine in registry.for_operation(p.op.name)
        if kind in engine.targets and not {"reference", "winograd", "fft"} & engine.notes and not engine.reasons(p)
    ]


def check(engine, problem: Problem, device: torch.device) -> None:
    inputs = {role: empty(problem[role], device) for role in problem.inputs}
    fill(problem, inputs, seed=11)
    exact = reference(problem, inputs, device)
    dtype = problem.items[0][1].dtype
    theirs = peer.answer(problem, inputs, NAMES[dtype], tf32=problem.math == "tf32")
    for config in engine.configs(problem)[:2]:
        size = engine.workspace_size(problem, config)
        workspace = torch.empty(size, dtype=torch.uint8, device=device) if size else None
        outputs = {role: empty(problem[role], device) for role in problem.outputs}
        engine.build(problem, config)((*inputs.values(), *outputs.values()), workspace)
        for role in problem.outputs:
            ours = relative_error(outputs[role], exact[role])
            bound = 1.1 * relative_error(theirs[role], exact[role]) + FLOOR.get(dtype, 2.0**-23)
            assert ours <= bound, f"{config}: error {ours:.3e}, the framework's and a tenth {bound:.3e}"


@pytest.mark.parametrize("engine, problem", cases("cpu"))
def test_no_worse_than_the_framework_on_a_cpu(engine, problem):
    check(engine, problem, torch.device("cpu"))


@pytest.mark.gpu
@pytest.mark.parametrize("engine, problem", cases("cuda"))
def test_no_worse_than_the_framework_on_a_gpu(engine, problem):
    check(engine, problem, torch.device("cuda"))
