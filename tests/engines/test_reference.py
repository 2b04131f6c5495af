"""The reference engines, which all others are held to, against the framework in float64 on every edge line."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
import torch

import peer
from lucidnn import testing
from lucidnn.cli.peer import peer as cli_peer
from lucidnn.core.descriptor import FLOATING, TensorDescriptor
from lucidnn.core.errors import NotSupported
from lucidnn.core.problem import Problem
from lucidnn.testing import read_problems

PROBLEMS = Path(__file__).resolve().parents[2] / "problems"
LINES = [p for file in sorted(PROBLEMS.glob("edge*.txt")) for p in read_problems(file)]


# Gradients that are given results of the forward: in a random problem these do not belong to the inputs.
RECOMPUTES = ("cross_entropy_bwd", "lp_pool_bwd")


def peer_has(problem: Problem) -> bool:
    """Whether the framework can be asked the same: its pooling pads evenly and knows one kind of index."""
    op = problem.op
    if not op.name.startswith("max_pool"):
        return True
    even = all(before == after for before, after in op.padding)
    plain = op.index_type != "u8" if op.name == "max_pool_bwd" else True
    return even and plain and all(n > 0 for n in problem.items[0][1].shape[1:]) and no_window_is_blind(problem)


def framework(problem: Problem, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The framework's answer in float64, by role: all it gives in the problem's own terms."""
    if problem.op.name in peer.FAMILIES:
        return peer.answer(problem, inputs)
    if problem.op.name in RECOMPUTES:
        pytest.skip("the framework computes again what this problem is given; the functional tests compare")
    if problem.is_empty or (problem.op.name == "reduce_bwd" and problem.op.mode in ("mul", "amax")):
        pytest.skip("what a gradient of nothing, or of a tie, is to be is each library's own")
    wide = [(role, dataclasses.replace(t, dtype="f64") if t.dtype in FLOATING else t) for role, t in problem.items]
    precise = dataclasses.replace(problem, items=tuple(wide))
    given = {role: t.double() if t.is_floating_point() else t for role, t in inputs.items()}
    given |= {role: testing.empty(precise[role], "cpu") for role in problem.outputs}
    try:
        rival = cli_peer(precise)
        found = rival.results(rival.prepare(given)())
    except (NotSupported, RuntimeError, ValueError, IndexError) as error:
        pytest.skip(f"the framework does not do this: {(str(error).splitlines() or [''])[0]}")
    if not found:
        pytest.skip("the framework's answer is not in the problem's terms; the functional tests compare")
    return found


def no_window_is_blind(problem: Problem) -> bool:
    """Wide dilation can step over the whole input: what stands for the maximum of nothing is each library's own."""
    op, sizes = problem.op, problem[problem.op.x_role].shape[2:]
    axes = zip(sizes, problem[op.y_role].shape[2:], op.window, op.stride, op.padding, op.dilation, strict=True)
    return all(
        any(0 <= q * s - p[0] + tap * d < n for tap in range(r)) for n, out, r, s, p, d in axes for q in range(out)
    )


@pytest.mark.parametrize("problem", [p for p in LINES if peer_has(p)], ids=str)
def test_reference_is_what_the_framework_computes(problem: Problem):
    inputs = {role: testing.empty(problem[role], "cpu") for role in problem.inputs}
    testing.fill(problem, inputs, seed=3)
    ours = testing.reference(problem, inputs, "cpu")
    theirs = framework(problem, inputs)
    # The framework's interpolation computes its weights in single precision, whatever the tensor's type.
    bound = 1e-6 if problem.op.name.startswith("resample_") else 1e-13
    for role in problem.outputs:
        if role not in theirs:
            continue
        assert ours[role].shape == theirs[role].shape == problem[role].shape
        if problem[role].dtype in ("i32", "i64"):
            assert torch.equal(ours[role], theirs[role].to(ours[role].dtype))
        elif problem[role].dtype != "u8":
            assert testing.relative_error(ours[role], theirs[role]) < bound


COUNTED = [p for p in LINES if p.op.name == "max_pool_fwd" and not p.is_empty and math.prod(p.op.window) <= 256]


@pytest.mark.parametrize("problem", COUNTED, ids=str)
def test_window_positions_and_plane_positions_name_the_same_point(problem: Problem):
    """The one-byte index has no counterpart in the framework: it is held to the wide one."""
    inputs = {role: testing.empty(problem[role], "cpu") for role in problem.inputs}
    testing.fill(problem, inputs, seed=4)
    found = {}
    for kind in ("i64", "u8"):
        op = dataclasses.replace(problem.op, index_type=kind)
        tensors = {role: problem[role] for role in problem.inputs}
        found[kind] = testing.reference(Problem.create(op, tensors, problem.target), inputs, "cpu")
    assert torch.equal(found["i64"]["y"], found["u8"]["y"])
    op, sizes = problem.op, problem["x"].shape[2:]
    tap, place = found["u8"]["index"].long(), torch.zeros_like(found["i64"]["index"])
    inside = torch.ones_like(place, dtype=torch.bool)
    for axis, n in enumerate(sizes):
        r = tap // math.prod(op.window[axis + 1 :]) % op.window[axis]
        q = torch.arange(tap.shape[2 + axis]).reshape(-1, *[1] * (len(sizes) - 1 - axis))
        at = q * op.stride[axis] - op.padding[axis][0] + r * op.dilation[axis]
        inside &= (at >= 0) & (at < n)
        place = place * n + at
    seen = found["i64"]["index"] >= 0  # a window without a point of the input has no maximum
    assert torch.equal(place[seen], found["i64"]["index"][seen]) and bool(inside[seen].all())


def test_a_wrong_answer_is_found():
    """The measure itself: one element off by a little more than its bound, one NaN, one infinity."""
    problem = Problem.parse("conv_fprop x=f32[2,3,6,6] w=f32[4,3,3,3] padding=1")
    inputs = {role: testing.empty(problem[role], "cpu") for role in problem.inputs}
    testing.fill(problem, inputs)
    right = testing.reference(problem, inputs, "cpu")
    assert testing.disagreement(problem, right, right)[1] == ""
    for wrong in (math.nan, math.inf, float(right["y"][1, 2, 3, 4]) + 1e-3):
        out = {"y": right["y"].clone()}
        out["y"][1, 2, 3, 4] = wrong
        assert "over the bound" in testing.disagreement(problem, out, right)[1]


def test_reference_takes_a_64_bit_path_for_every_type():
    """Sums of 16-bit numbers keep float64's accuracy: 1 + 2^-40 summed 2^12 times from halves and singles."""
    x = torch.full((1, 4096, 1, 1), 1.0, dtype=torch.float32)
    w = torch.full((1, 4096, 1, 1), 1.0 + 2.0**-20, dtype=torch.float32)
    problem = Problem.parse("conv_fprop x=f32[1,4096,1,1] w=f32[1,4096,1,1] y=f64[1,1,1,1]")
    y = testing.reference(problem, {"x": x, "w": w}, "cpu")["y"]
    assert y.item() == 4096 * (1.0 + 2.0**-20)
    assert problem["y"] == TensorDescriptor("f64", (1, 1, 1, 1))
