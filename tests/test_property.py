"""Problems built at random: text comes back, an engine refuses or is right, functions ask what the line says."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch
from hypothesis import given, note, settings
from hypothesis import strategies as st

from lucidnn import Problem
from lucidnn import functional as F
from lucidnn.core import registry
from lucidnn.core.descriptor import DTYPES, TensorDescriptor
from lucidnn.core.errors import LucidnnError
from lucidnn.core.plan import observe
from lucidnn.core.target import Target
from lucidnn.ops.convolution import ConvFprop, output_layout
from lucidnn.ops.pointwise import like
from lucidnn.testing import verify
from problems_at_random import convolutions, pads, pools, problem_lines, problems, tensors

CPU = torch.device("cpu")


@settings(max_examples=300)
@given(problem_lines(), st.sampled_from(["cpu:avx2:4", "cuda:sm_90:132", "hip:gfx942:304"]))
def test_text_comes_back(text, on):
    p = Problem.parse(text + " on=" + on)
    again = Problem.parse(str(p))
    assert again == p and str(again) == str(p) and hash(again) == hash(p)
    assert Problem.parse(text, Target.parse(on)) == p
    assert Problem.create(p.op, dict(p.items), p.target, p.epilogue, p.math) == p, "what is checked once stays right"


@settings(max_examples=300)
@given(problem_lines(), st.data())
def test_a_spoilt_line_is_a_clear_error_or_another_problem(text, data):
    """Change, drop or double one character: nothing else than a problem or an error of ours may come of it."""
    at = data.draw(st.integers(0, len(text) - 1))
    new = data.draw(st.sampled_from(["", text[at] * 2, "0", "-", ",", "x", "[", "=", " ", "@", "9"]))
    spoilt = text[:at] + new + text[at + 1 :]
    try:
        p = Problem.parse(spoilt)
    except LucidnnError as error:
        lines = str(error).split("\n")
        assert lines[1] == "  " + spoilt and re.fullmatch(r" *\^", lines[2])
    else:
        assert Problem.parse(str(p)) == p


def refuses_or_is_right(problem: Problem, pick: int, seed: int, device: torch.device) -> None:
    note(str(problem))
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


@settings(max_examples=100)
@given(problems(), PICK, SEED)
def test_an_engine_refuses_or_is_right(problem, pick, seed):
    refuses_or_is_right(problem, pick, seed, CPU)


@settings(max_examples=200)
@given(convolutions().map(Problem.parse), PICK, SEED)
def test_a_convolution_is_refused_or_right(problem, pick, seed):
    refuses_or_is_right(problem, pick, seed, CPU)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@settings(max_examples=4000)
@given(problems(), PICK, SEED)
def test_an_engine_refuses_or_is_right_at_length(problem, pick, seed):
    refuses_or_is_right(problem, pick, seed, CPU)


@pytest.mark.gpu
@settings(max_examples=40)
@given(st.data(), PICK, SEED)
def test_an_engine_refuses_or_is_right_on_a_gpu(data, pick, seed):
    refuses_or_is_right(data.draw(problems(Target.of("cuda"))), pick, seed, torch.device("cuda"))


def placed(t: TensorDescriptor) -> torch.Tensor:
    """A real tensor of this description."""
    from lucidnn.testing import allocate

    return allocate(t, CPU)[0]


@settings(max_examples=150)
@given(convolutions())
def test_the_function_asks_what_the_line_says(text):
    """conv1d/2d/3d on tensors builds the problem that is written in the line with the same things left out."""
    p = Problem.parse(text, Target.of("cpu"))
    if p.op.name != "conv_fprop":
        p = as_fprop(p)
    op, e = p.op, p.epilogue
    given = {role: placed(t) for role, t in p.items if role != "y"}
    dense = TensorDescriptor.make(p["y"].dtype, p["y"].shape, output_layout(p["y"].shape, p["x"], p["w"]))
    expected = dataclasses.replace(p, items=(*p.items[:-1], ("y", dense)), math="ieee")  # what a CPU is asked
    function = (F.conv1d, F.conv2d, F.conv3d)[p["x"].ndim - 3]
    with observe() as plans:
        y = function(
            given["x"], given["w"], given.get("bias"), op.stride, op.padding, op.dilation, op.groups,
            padding_mode=op.padding_mode, flip=op.flip, alpha=e.alpha, beta=e.beta if "z" in given else None,
            z=given.get("z"), scale=given.get("scale"), activation=e.activation, parameter=e.parameter or None,
            dtype=getattr(torch, DTYPES[p["y"].dtype][0]),
        )  # fmt: skip
    assert [str(plan.problem) for plan in plans] == [str(expected)]
    assert plans[0].problem == expected and TensorDescriptor.of(y).strides == expected["y"].strides


def as_fprop(p: Problem) -> Problem:
    """The forward problem of a gradient's operands."""
    tensors = dict(p.items)
    x, w = tensors[p.op.x_role], tensors[p.op.w_role]
    w = TensorDescriptor(x.dtype, w.shape, w.strides)
    x = TensorDescriptor(x.dtype, x.shape, x.strides)
    attributes = {field.name: getattr(p.op, field.name) for field in dataclasses.fields(p.op)}
    return Problem.create(ConvFprop(**attributes), {"x": x, "w": w}, p.target)


@settings(max_examples=80)
@given(pools())
def test_pooling_asks_what_the_line_says(text):
    p = Problem.parse(text, Target.of("cpu"))
    op = p.op
    if p.op.name != "max_pool_fwd" or any(before != after for before, after in op.padding):
        return
    x = placed(p["x"])
    function = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[x.ndim - 3]
    padding = [before for before, _ in op.padding]
    attributes = (
        f"window={','.join(map(str, op.window))} stride={','.join(map(str, op.stride))} padding={pads(op.padding)}"
    )
    attributes += f" dilation={','.join(map(str, op.dilation))} ceil_mode={int(op.ceil_mode)} index_type=i64"
    expected = Problem.parse(f"max_pool_fwd x={p['x']} {attributes}", p.target)
    with observe() as plans:
        function(x, op.window, op.stride, padding, op.dilation, op.ceil_mode, return_indices=True)
    assert [str(plan.problem) for plan in plans] == [str(expected)]


@settings(max_examples=300)
@given(st.data())
def test_elementwise_results_keep_the_frameworks_strides(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=0, max_size=5)))
    t = data.draw(tensors("f32", shape))
    expected = torch.empty_like(torch.empty_strided(t.shape, t.strides)).stride()
    found = like(t).strides
    assert [s for s, n in zip(found, shape, strict=True) if n > 1] == [
        s for s, n in zip(expected, shape, strict=True) if n > 1
    ]
