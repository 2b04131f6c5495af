"""Local response and divisive normalization built at random: text comes back, an engine refuses or is right."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lucidnn.core.target import Target
from problems_at_random import line, refuses_or_is_right, tensors

SIZES = st.sampled_from([1, 2, 3, 5, 16, 17, 33])


@st.composite
def local_responses(draw) -> str:
    across, forward = draw(st.booleans()), draw(st.booleans())
    shapes = st.lists(SIZES, min_size=2 if across else 3, max_size=5)
    shape = tuple(draw(shapes.filter(lambda s: torch.Size(s).numel() < 4000)))
    kind = draw(st.sampled_from(["f32", "f32", "f32", "bf16"]))
    parts: dict[str, object] = {} if forward else {"dy": draw(tensors(kind, shape))}
    parts["x"] = draw(tensors(kind, shape))
    if not across and draw(st.booleans()):
        parts["means"] = draw(tensors(kind, shape))
    parts["y" if forward else "dx"] = draw(tensors(kind, shape, output=True))
    parts |= {"size": draw(st.integers(1, 7)), "lrn_alpha": draw(st.sampled_from([0.0, 1e-4, 1.0, 5.0]))}
    parts |= {
        "lrn_beta": draw(st.sampled_from([0.75, 0.75, 0.5, 1.0, 1.3])),
        "lrn_k": draw(st.sampled_from([1.0, 2.0])),
    }
    return line(f"{'lrn' if across else 'divisive_norm'}_{'fwd' if forward else 'bwd'}", parts)


@settings(max_examples=30)
@given(local_responses(), st.integers(0, 1 << 30))
def test_refuses_or_is_right(text, seed):
    refuses_or_is_right(text, Target.parse("cpu"), "cpu", seed)


@pytest.mark.gpu
@settings(max_examples=20)
@given(local_responses(), st.integers(0, 1 << 30))
def test_refuses_or_is_right_on_a_gpu(text, seed):
    refuses_or_is_right(text, Target.of("cuda"), "cuda", seed)
