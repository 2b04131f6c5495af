"""Batch normalizations built at random: an engine refuses or is right; functions ask what the line says."""

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

OPERATIONS = ("train_fwd", "infer_fwd", "bwd", "bwd_sums", "bwd_apply", "stats")


@st.composite
def lines(draw) -> str:
    """A problem line: any layout of each large tensor, parameters there or not."""
    name = draw(st.sampled_from(OPERATIONS))
    shape = [draw(st.integers(1, 5)), draw(st.integers(1, 20))]
    shape += draw(st.lists(st.integers(1, 7), max_size=3))
    mode = draw(st.sampled_from(["spatial", "spatial", "per_activation"]))
    values = shape[0]
    if mode == "spatial":
        for n in shape[2:]:
            values *= n
    if values == 1:
        shape[0] = 2
    dtype = draw(st.sampled_from(["f64", "f32", "f32", "bf16", "f16"]))

    def large(role: str) -> str:
        axes = draw(st.permutations(range(len(shape))))
        step, strides = draw(st.integers(1, 2)), [0] * len(shape)
        for axis in reversed(axes):
            strides[axis] = step
            step = step * shape[axis] + draw(st.integers(0, 1))
        plain = draw(st.booleans())
        where = "" if plain else f"@({','.join(map(str, strides))})"
        return f"{role}={dtype}[{','.join(map(str, shape))}]{where}"

    sizes = ",".join(map(str, shape[1:] if mode == "per_activation" else shape[1:2]))

    def small(role: str, kind: str = "") -> str:
        return f"{role}={kind or draw(st.sampled_from(['f32', 'bf16', 'f64']))}[{sizes}]"

    words = [f"batch_norm_{name}"]
    statistics = "f64" if dtype == "f64" else "f32"
    act = ""
    if name.startswith("bwd"):
        words += [large("dy"), large("x"), small("mean", statistics)]
        if name == "bwd_apply":
            words += [small("dscale", statistics), small("dbias", statistics), f"count={statistics}[1]"]
    else:
        words += [large("x")] + [small("mean")] * (name == "infer_fwd")
    if name not in ("train_fwd", "stats"):
        words.append(small(draw(st.sampled_from(["variance", "inv_variance"])), statistics))
    if name != "stats":
        act = draw(st.sampled_from(["", "act=relu", "act=silu", "act=leaky_relu:0.25"]))
        words += [small(role) for role in ("scale", "bias") if draw(st.booleans())]
        if draw(st.booleans()):
            words += [large("z"), "beta=1.0"]
    if name == "train_fwd" and draw(st.booleans()):
        words += [small("running_mean"), small("running_variance"), "momentum=0.25"]
    if name in ("bwd", "bwd_apply"):
        words.append(f"residual={draw(st.integers(0, 1))}")
    return " ".join([*words, f"mode={mode}", act]).strip()


def refuses_or_is_right(problem: Problem, pick: int, seed: int, device: torch.device) -> None:
    note(str(problem))
    assert Problem.parse(str(problem)) == problem
    for engine in registry.for_operation(problem.op.name):
        if problem.target.kind not in engine.targets or "reference" in engine.notes:
            continue
        reasons = engine.reasons(problem)
        if reasons:
            assert all(re.fullmatch(r"needs \S.*, found \S.*", reason) for reason in reasons)
            continue
        configs = engine.configs(problem)
        check = verify(problem, engine, configs[pick % len(configs)], device, seed)
        assert not check.fault, f"{engine.name} {configs[pick % len(configs)]}: {check.fault}"


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
