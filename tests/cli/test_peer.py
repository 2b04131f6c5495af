"""The framework's side of a comparison computes what the problem says: it is held to the float64 reference, too."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lucidnn import testing
from lucidnn.cli.peer import Peer, flags, linear_peer, peer
from lucidnn.core.errors import NotSupported
from lucidnn.core.problem import Problem
from lucidnn.ops.activation import ACTIVATIONS
from lucidnn.testing import read_problems

CPU = torch.device("cpu")
PROBLEMS = Path(__file__).parents[2] / "problems"
EDGE = [p for p in read_problems(PROBLEMS / "edge.txt") if not p.is_empty]


def errors(problem: Problem, given: Peer | None = None) -> dict[str, float]:
    found = given or peer(problem)
    tensors = testing.buffers(problem, CPU)
    before = {role: tensors[role].clone() for role in problem.inputs}
    expected = testing.reference(problem, tensors, CPU)
    results = found.results(found.prepare(tensors)())
    for role, tensor in before.items():
        assert torch.equal(tensors[role], tensor), f"{found.name} changed {role}"
    for role, out in results.items():
        assert out.shape == problem[role].shape and testing.TensorDescriptor.of(out).dtype == problem[role].dtype
    return {role: testing.relative_error(out, expected[role]) / bound(problem, role) for role, out in results.items()}


def bound(problem: Problem, role: str) -> float:
    """The engines' own four times over; six roundings where the framework keeps intermediate results in 16 bits."""
    if problem[role].dtype in testing.EXACT:
        return 1e-9
    return 4 * testing.tolerance(problem, role) + {"f16": 6 * 2.0**-11, "bf16": 6 * 2.0**-8}.get(
        problem.items[0][1].dtype, 0.0
    )


@pytest.mark.parametrize("chunk", range(8))
def test_it_agrees_with_the_reference_on_every_convolution_of_the_edge_list(chunk):
    for problem in EDGE[chunk::8]:
        assert max(errors(problem).values()) <= 1, problem


LINES = [
    "max_pool_fwd x=f32[2,3,9] window=3 stride=2 padding=1",
    "max_pool_fwd x=f32[2,3,7,9]@nhwc window=3,2 stride=2 padding=1 ceil_mode=1",
    "max_pool_fwd x=f64[2,3,7,9] window=2 dilation=2 index_type=u8",
    "max_pool_fwd x=bf16[2,3,5,6,7] window=2 index_type=none",
    "max_pool_bwd dy=f32[2,3,4] index=i64[2,3,4] dx=f32[2,3,9] window=3 stride=2",
    "max_pool_bwd dy=f32[2,3,4,5]@nhwc index=u8[2,3,4,5]@nhwc dx=f32[2,3,8,10]@nhwc window=2 index_type=u8",
    "max_pool_bwd dy=f64[2,3,4,5] index=i32[2,3,4,5] dx=f64[2,3,7,9] window=3 stride=2 padding=1 index_type=i32",
    "max_pool_bwd dy=f32[2,3,2,3,3] index=i64[2,3,2,3,3] dx=f32[2,3,5,6,7] window=2",
    "pointwise_fwd x=f32[4,5] act=relu",
    "pointwise_fwd x=f32[4,5,6] bias=f32[5] z=f32[4,5,6] alpha=2.0 beta=-0.5 act=clipped_relu:1.5",
    "pointwise_bwd dy=f32[4,5] x=f32[4,5] alpha=3.0",
    "pointwise_bwd dy=f32[4,5] x=f32[4,5] alpha=3.0 act=relu",
    "conv_bgrad dy=f32[6,5]",
    "conv_bgrad dy=bf16[6,5,7] db=f32[5]",
    "conv_fprop x=f32[2,3,8,8] w=f32[4,3,3,3] bias=f32[4] padding=1 alpha=0.5 act=silu",
    "conv_fprop x=bf16[2,8,8,8]@nhwc w=bf16[4,8,3,3]@nhwc y=f32[2,4,6,6]@nhwc",
]


@pytest.mark.parametrize("line", LINES)
def test_it_agrees_with_the_reference_on(line):
    problem = Problem.parse(line)
    assert max(errors(problem).values()) <= 1


@pytest.mark.parametrize("act", [name for name in ACTIVATIONS if name != "identity"])
def test_every_activation_and_its_gradient(act):
    parameter = ACTIVATIONS[act].parameter
    text = act if parameter is None else f"{act}:{parameter}"
    assert max(errors(Problem.parse(f"pointwise_fwd x=f64[300] act={text}")).values()) <= 1e7  # softplus has a cut-off
    assert max(errors(Problem.parse(f"pointwise_fwd x=f32[300] act={text}")).values()) <= 1
    assert max(errors(Problem.parse(f"pointwise_bwd dy=f32[300] x=f32[300] act={text}")).values()) <= 1


@pytest.mark.parametrize(
    "line",
    [
        "conv_fprop x=f32[8,16,1] w=f32[4,16,1] bias=f32[4]",
        "conv_dgrad dy=f32[8,4,1] w=f32[4,16,1]",
        "conv_wgrad x=f32[8,16,1] dy=f32[8,4,1]",
        "conv_bgrad dy=f32[8,4,1]",
    ],
)
def test_a_linear_layer_is_the_frameworks_matrix_product(line):
    problem = Problem.parse(line)
    found = linear_peer(problem)
    assert max(errors(problem, found).values()) <= 1
    assert "conv" not in found.name


def test_what_the_framework_cannot_do_is_said():
    for line, reason in (
        ("max_pool_fwd x=f32[2,3,9] window=3 padding=0:1", "both sides"),
        ("max_pool_bwd dy=f32[2,3,4] index=i64[2,3,4] dx=f32[2,3,8] window=2 index_type=i64 padding=1:0", "both sides"),
    ):
        with pytest.raises(NotSupported, match=reason):
            peer(Problem.parse(line))


def test_the_name_says_every_call():
    line = "conv_fprop x=f32[2,3,8] w=f32[4,3,3] z=f32[2,4,7] bias=f32[4] padding=0:1 alpha=2.0 beta=1.0 act=relu"
    assert peer(Problem.parse(line)).name == "F.pad + F.conv1d + mul_ + add_(z) + add_(bias) + relu_"


def test_tf32_follows_the_problem_and_comes_back():
    before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.benchmark
    line = "conv_fprop x=f32[2,3,8,8] w=f32[4,3,3,3] on=cuda:sm_90"
    for text, allowed in ((line, False), (line + " math=tf32", True)):
        with flags(Problem.parse(text)):
            assert torch.backends.cudnn.allow_tf32 is allowed and torch.backends.cuda.matmul.allow_tf32 is allowed
            assert torch.backends.cudnn.benchmark
    after = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.benchmark
    assert after == before
