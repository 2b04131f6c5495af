"""Arithmetic and tensor transformations built at random: text comes back, an engine refuses or is right."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lucidnn import Problem
from lucidnn.core.target import Target
from lucidnn.ops.elementwise import MODES
from problems_at_random import line, pads, refuses_or_is_right, tensors

FLOATS = st.sampled_from(["f32", "f32", "bf16", "f16"])
WHOLE = st.sampled_from(["i32", "i64", "u8", "bool"])
SIZES = st.sampled_from([1, 2, 3, 5, 8, 16, 17, 33])
# A tangent or a quotient of whole numbers amplifies what its inputs were rounded to: they have lines of their own.
SMOOTH = [mode for mode in MODES if mode not in ("tan", "mod", "div", "pow")]


def shapes(most: int):
    fits = st.lists(SIZES, min_size=1, max_size=most).filter(lambda s: torch.Size(s).numel() < 4000)
    return fits.map(tuple)


@st.composite
def arithmetic(draw) -> str:
    shape = draw(shapes(4))
    mode = draw(st.sampled_from(SMOOTH))
    whole = MODES[mode].whole and draw(st.booleans())
    kind = draw(WHOLE if whole else FLOATS)
    parts: dict[str, object] = {}
    for role in MODES[mode].reads:
        own = shape if role == "x" else tuple(draw(st.sampled_from([n, n, 1])) for n in shape)
        if role == "b":
            own = own[draw(st.integers(0, len(own) - 1)) :]
        parts[role] = draw(tensors("bool" if role == "t" else kind, own))
    parts["mode"] = mode
    if mode == "gen_index":
        parts["axis"] = draw(st.integers(0, len(shape) - 1))
    elif not mode.startswith(("cmp_", "logical_")):
        parts["alpha1"] = draw(st.sampled_from([1.0, 1.0, 2.0]))
    if mode in ("clip", "relu", "relu_bwd"):
        parts |= {"lower": -0.5, "upper": 0.75}
    return line("elementwise_fwd", parts)


@st.composite
def transformations(draw) -> str:
    shape = draw(shapes(5))
    padding = [(draw(st.integers(-2, 3)), draw(st.integers(0, 3))) for _ in shape]
    padding = [(max(before, -n), after) for n, (before, after) in zip(shape, padding, strict=True)]
    if draw(st.booleans()):
        padding = [(0, 0) for _ in shape]
    fold, unfold = [], False
    if len(shape) > 2 and draw(st.booleans()):
        fold, unfold = [draw(st.integers(1, 3)) for _ in shape[2:]], draw(st.booleans())
        product = int(torch.Size(fold).numel())
        if unfold:
            shape = (shape[0], shape[1] * product, *(min(n, 8) for n in shape[2:]))
            padding[1] = (max(padding[1][0], -(shape[1] // product)), padding[1][1])
        else:  # as much behind as makes the factors divide
            for k, f in enumerate(fold, 2):
                before, after = padding[k]
                padding[k] = (before, after + -(shape[k] + before + after) % f)
    if torch.Size(shape).numel() > 6000:
        shape = (1, *shape[1:])
        padding[0] = (0, 0)
    kind, to = (draw(FLOATS), draw(FLOATS)) if draw(st.integers(0, 3)) else ("i32", draw(WHOLE))
    parts: dict[str, object] = {"x": draw(tensors(kind, shape)), "padding": pads(padding), "value": 2.0}
    if fold:
        parts |= {"fold": ",".join(map(str, fold)), "unfold": int(unfold)}
    y = Problem.parse(line("transform_tensor", parts))["y"].shape
    parts["y"] = draw(tensors(to, y, output=True))
    if draw(st.integers(0, 3)) == 0:
        parts |= {"z": draw(tensors(kind, y)), "beta": -1.0, "alpha": 3.0}
    return line("transform_tensor", parts)


@settings(max_examples=60)
@given(st.one_of(arithmetic(), transformations()), st.integers(0, 1 << 30))
def test_refuses_or_is_right(text, seed):
    refuses_or_is_right(text, Target.parse("cpu"), "cpu", seed)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@settings(max_examples=2000)
@given(st.one_of(arithmetic(), transformations()), st.integers(0, 1 << 30))
def test_refuses_or_is_right_at_length(text, seed):
    refuses_or_is_right(text, Target.parse("cpu"), "cpu", seed)


@pytest.mark.gpu
@settings(max_examples=20)
@given(st.one_of(arithmetic(), transformations()), st.integers(0, 1 << 30))
def test_refuses_or_is_right_on_a_gpu(text, seed):
    refuses_or_is_right(text, Target.of("cuda"), "cuda", seed)
