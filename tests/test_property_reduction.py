"""Reductions built at random: the text comes back, an engine refuses or is right."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lucidnn import Problem
from lucidnn.ops.reduction import EXTREMES, MODES
from test_property import refuses_or_is_right


@st.composite
def reductions(draw) -> str:
    """A line with axes, gaps between elements, expanded axes and sizes of 0 and 1 among the usual."""
    shape = draw(st.lists(st.sampled_from([1, 2, 3, 5, 17, 40, 0]), min_size=1, max_size=5))
    while torch.Size(shape).numel() > 4000:
        shape[shape.index(max(shape))] = 2
    order = draw(st.permutations(range(len(shape))))
    strides, step = [0] * len(shape), 1
    for axis in order:
        strides[axis] = step
        step *= max(shape[axis], 1) + draw(st.sampled_from([0, 0, 0, 1]))
    if draw(st.booleans()):
        strides[draw(st.integers(0, len(shape) - 1))] = 0
    axes = sorted(draw(st.sets(st.integers(0, len(shape) - 1), min_size=1)))
    mode, dtype = draw(st.sampled_from(MODES)), draw(st.sampled_from(["f32", "f64", "f16", "bf16"]))
    sizes = ",".join(map(str, shape))
    line = f"reduce_fwd x={dtype}[{sizes}]@({','.join(map(str, strides))}) mode={mode}"
    if mode in EXTREMES:
        if not all(shape[axis] for axis in axes):
            line = line.replace(f"mode={mode}", "mode=add")
        else:
            line += f" index_type={draw(st.sampled_from(['none', 'i32', 'i64']))}"
    keep = draw(st.integers(0, 1))
    return f"{line} axes={','.join(map(str, axes))} keep={keep} alpha={draw(st.sampled_from([1.0, -0.5]))}"


@settings(max_examples=40)
@given(reductions(), st.integers(0, 1 << 30))
def test_a_reduction_is_refused_or_right(line, seed):
    problem = Problem.parse(line)
    assert Problem.parse(str(problem)) == problem
    refuses_or_is_right(problem, 0, seed, torch.device("cpu"))
