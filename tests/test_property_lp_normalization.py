"""Normalization by an L_p norm built at random: text comes back, an engine refuses or is right."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lucidnn.core.target import Target
from problems_at_random import comma, line, refuses_or_is_right, tensors

SIZES = st.sampled_from([1, 2, 3, 5, 16, 17, 33, 70])


@st.composite
def normalizations(draw) -> str:
    forward = draw(st.booleans())
    shape = tuple(draw(st.lists(SIZES, min_size=1, max_size=5).filter(lambda s: torch.Size(s).numel() < 4000)))
    axes = draw(st.sets(st.integers(0, len(shape) - 1), min_size=1))
    kept = tuple(1 if axis in axes else n for axis, n in enumerate(shape))
    parts: dict[str, object] = {} if forward else {"dy": draw(tensors("f32", shape))}
    parts["x"] = draw(tensors("f32", shape))
    if not forward:
        parts["norm"] = draw(tensors("f32", kept))
    if draw(st.booleans()):
        parts["scale"] = draw(tensors("f32", kept))
        if not forward:
            parts["dscale"] = draw(tensors("f32", kept, output=True))
    parts["y" if forward else "dx"] = draw(tensors("f32", shape, output=True))
    parts |= {"axes": comma(sorted(axes)), "p": draw(st.sampled_from([2.0, 2.0, 1.0, "inf", 0.5, 3.0]))}
    parts["eps"] = draw(st.sampled_from([1e-12, 2.0]))
    return line(f"lp_normalize_{'fwd' if forward else 'bwd'}", parts)


@settings(max_examples=40)
@given(normalizations(), st.integers(0, 1 << 30))
def test_refuses_or_is_right(text, seed):
    refuses_or_is_right(text, Target.parse("cpu"), "cpu", seed)


@pytest.mark.gpu
@settings(max_examples=20)
@given(normalizations(), st.integers(0, 1 << 30))
def test_refuses_or_is_right_on_a_gpu(text, seed):
    refuses_or_is_right(text, Target.of("cuda"), "cuda", seed)
