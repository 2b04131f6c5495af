"""Layer, RMS and group normalizations built at random: an engine refuses or is right."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given, note, settings
from hypothesis import strategies as st

from lucidnn import Problem
from lucidnn.core import registry
from lucidnn.core.target import Target
from lucidnn.testing import verify


@st.composite
def lines(draw) -> str:
    """A problem line: any layout of each large tensor, parameters there or not."""
    kind, direction = draw(st.sampled_from(["layer", "rms", "group"])), draw(st.sampled_from(["fwd", "bwd"]))
    shape = [draw(st.integers(1, 5)), draw(st.integers(1, 20))]
    shape += draw(st.lists(st.integers(1, 9), max_size=3))
    dtype = draw(st.sampled_from(["f64", "f32", "f32", "bf16", "f16"]))
    statistics = "f64" if dtype == "f64" else "f32"
    words, optional, given = [], ["scale"], ["x"]
    if kind == "group":
        groups = draw(st.sampled_from([g for g in range(1, shape[1] + 1) if shape[1] % g == 0]))
        parameter, sets, words = shape[1:2], [shape[0], groups], [f"groups={groups}"]
        act = draw(st.sampled_from(["", "relu", "silu", "leaky_relu:0.25"]))
        words += [f"act={act}"] * bool(act)
        optional += ["bias"] * (direction == "fwd" or bool(act))
    else:
        axes = draw(st.integers(1, len(shape)))
        parameter, words = shape[len(shape) - axes :], [f"axes={axes}"]
        sets = shape[: len(shape) - axes] + [1] * axes
        optional += ["bias"] * (kind == "layer" and direction == "fwd")
    outputs = ["y"]
    if direction == "bwd":
        possible = ["dx", "dscale"] + ["dbias"] * (kind != "rms")
        wanted = draw(st.lists(st.sampled_from(possible), min_size=1, unique=True))
        words.append(f"gradients={','.join(wanted)}")
        given, outputs = ["dy", "x"], ["dx"] * ("dx" in wanted)

    def tensor(role: str, kind: str, sizes: list[int]) -> str:
        text = f"{role}={kind}[{','.join(map(str, sizes))}]"
        if draw(st.booleans()):
            return text
        step, strides = draw(st.integers(1, 2)), [0] * len(sizes)
        for axis in draw(st.permutations(range(len(sizes)))):
            strides[axis] = step
            step = step * sizes[axis] + draw(st.integers(0, 1))
        return f"{text}@({','.join(map(str, strides))})"

    tensors = [tensor(role, dtype, shape) for role in [*given, *outputs]]
    if direction == "bwd":
        names = ["inv_variance"] if kind == "rms" else ["mean", "inv_variance"]
        tensors += [tensor(role, statistics, sets) for role in names]
    types = st.sampled_from([dtype, statistics])
    tensors += [tensor(role, draw(types), parameter) for role in optional if draw(st.booleans())]
    return " ".join([f"{kind}_norm_{direction}", *tensors, *words])


def refuses_or_is_right(problem: Problem, pick: int, seed: int, device: torch.device) -> None:
    note(str(problem))
    assert Problem.parse(str(problem)) == problem
    taken = 0
    for engine in registry.for_operation(problem.op.name):
        if problem.target.kind not in engine.targets or "reference" in engine.notes:
            continue
        reasons = engine.reasons(problem)
        if reasons:
            assert all(re.fullmatch(r"needs \S.*, found \S.*", reason) for reason in reasons)
            continue
        taken += 1
        configs = engine.configs(problem)
        check = verify(problem, engine, configs[pick % len(configs)], device, seed)
        assert not check.fault, f"{engine.name} {configs[pick % len(configs)]}: {check.fault}"
    assert taken, "only the reference takes it"


PICK, SEED = st.integers(0, 3), st.integers(0, 1 << 30)


@settings(max_examples=30, deadline=None)
@given(lines(), PICK, SEED)
def test_an_engine_refuses_or_is_right(line, pick, seed):
    refuses_or_is_right(Problem.parse(line), pick, seed, torch.device("cpu"))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@settings(max_examples=2000, deadline=None)
@given(lines(), PICK, SEED)
def test_an_engine_refuses_or_is_right_at_length(line, pick, seed):
    refuses_or_is_right(Problem.parse(line), pick, seed, torch.device("cpu"))


@pytest.mark.gpu
@settings(max_examples=30, deadline=None)
@given(lines(), PICK, SEED)
def test_an_engine_refuses_or_is_right_on_a_gpu(line, pick, seed):
    refuses_or_is_right(Problem.parse(line, Target.of("cuda")), pick, seed, torch.device("cuda"))
