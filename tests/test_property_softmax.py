"""Softmax, cross-entropy and dropout built at random: text comes back, an engine refuses or is right."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lucidnn.core.target import Target
from problems_at_random import line, refuses_or_is_right, tensors

TYPES = st.sampled_from(["f32", "f32", "f32", "bf16"])
SIZES = st.sampled_from([1, 2, 3, 5, 16, 17, 33])


@st.composite
def softmaxes(draw) -> str:
    shape = tuple(draw(st.lists(SIZES, min_size=1, max_size=4).filter(lambda s: torch.Size(s).numel() < 6000)))
    kind, forward = draw(TYPES), draw(st.booleans())
    roles = {"x": False, "y": True} if forward else {"y": False, "dy": False, "dx": True}
    parts: dict[str, object] = {role: draw(tensors(kind, shape, output=out)) for role, out in roles.items()}
    if draw(st.integers(0, 3)) == 0:
        parts["mask"] = draw(tensors("bool", shape))
        parts["empty_zero"] = draw(st.sampled_from([0, 1]))
    axes = draw(st.lists(st.integers(0, len(shape) - 1), min_size=1, unique=True))
    parts |= {"axes": ",".join(map(str, axes)), "log": draw(st.sampled_from([0, 1]))}
    return line("softmax_fwd" if forward else "softmax_bwd", parts)


@st.composite
def cross_entropies(draw) -> str:
    shape = tuple(draw(st.lists(SIZES, min_size=2, max_size=4).filter(lambda s: torch.Size(s).numel() < 6000)))
    rows = (shape[0], *shape[2:])
    kind, forward = draw(TYPES), draw(st.booleans())
    by_class = draw(st.booleans())
    reduction = draw(st.sampled_from(["none", "sum", "mean"]))
    loss = rows if reduction == "none" else ()
    parts: dict[str, object] = {"x": draw(tensors(kind, shape)), "reduction": reduction}
    parts["target"] = draw(tensors("i64", rows)) if by_class else draw(tensors(kind, shape))
    if draw(st.booleans()):
        parts["weight"] = draw(tensors(kind, (shape[1],)))
    from_log = by_class and draw(st.integers(0, 3)) == 0
    parts["from_log" if from_log else "smoothing"] = 1 if from_log else draw(st.sampled_from([0.0, 0.0, 0.25]))
    if forward:
        return line("cross_entropy_fwd", parts)
    parts |= {"dy": draw(tensors(kind, loss)), "dx": draw(tensors(kind, shape, output=True))}
    if not from_log:
        parts["stats"] = draw(tensors("f32", rows))
    if by_class and reduction == "mean":
        parts["total"] = "f32[]"
    return line("cross_entropy_bwd", parts)


@st.composite
def dropouts(draw) -> str:
    shape = tuple(draw(st.lists(SIZES, min_size=1, max_size=4).filter(lambda s: torch.Size(s).numel() < 6000)))
    kind, forward = draw(TYPES), draw(st.booleans())
    parts: dict[str, object] = {"x" if forward else "dy": draw(tensors(kind, shape)), "state": "i64[2]"}
    parts["y" if forward else "dx"] = draw(tensors(kind, shape, output=True))
    if forward and draw(st.booleans()):
        parts |= {"z": draw(tensors(kind, shape)), "beta": 1.0}
    if forward and draw(st.booleans()):
        parts |= {"mask": draw(tensors("bool", shape, output=True)), "keep_mask": 1}
    parts |= {"p": draw(st.sampled_from([0.0, 0.1, 0.5, 1.0])), "feature": int(len(shape) > 1 and draw(st.booleans()))}
    return line("dropout_fwd" if forward else "dropout_bwd", parts)


@settings(max_examples=60)
@given(st.one_of(softmaxes(), cross_entropies(), dropouts()), st.integers(0, 1 << 30))
def test_refuses_or_is_right(text, seed):
    refuses_or_is_right(text, Target.parse("cpu"), "cpu", seed)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@settings(max_examples=2000)
@given(st.one_of(softmaxes(), cross_entropies(), dropouts()), st.integers(0, 1 << 30))
def test_refuses_or_is_right_at_length(text, seed):
    refuses_or_is_right(text, Target.parse("cpu"), "cpu", seed)


@pytest.mark.gpu
@settings(max_examples=20)
@given(st.one_of(softmaxes(), cross_entropies(), dropouts()), st.integers(0, 1 << 30))
def test_refuses_or_is_right_on_a_gpu(text, seed):
    refuses_or_is_right(text, Target.of("cuda"), "cuda", seed)
