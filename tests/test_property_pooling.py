"""Pooling problems built at random: an engine refuses or is right, and the functions agree with the framework's."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as T
from hypothesis import given, settings
from hypothesis import strategies as st

from lucidnn import functional as F
from lucidnn.core.problem import Problem
from lucidnn.core.target import Target
from lucidnn.ops.pooling import pooled_size
from problems_at_random import TILES, comma, line, pads, tensors
from test_property import PICK, SEED, refuses_or_is_right

KINDS = ("avg_pool", "avg_pool", "lp_pool", "adaptive_avg_pool", "adaptive_max_pool", "max_unpool")


@st.composite
def more_pools(draw, dtypes=("f32", "f32", "bf16")) -> str:
    kind, ndim = draw(st.sampled_from(KINDS)), draw(st.sampled_from([1, 2, 2, 2, 3]))
    forward, dtype = draw(st.booleans()), draw(st.sampled_from(dtypes))
    n, c = draw(st.integers(1, 3)), draw(TILES)
    parts: dict[str, object] = {}
    size, out, window, stride, dilation, padding = [], [], [], [], [], []
    ceil = draw(st.booleans())
    for _ in range(ndim):
        r, d, s = draw(st.integers(1, 4)), draw(st.sampled_from([1, 1, 2])), draw(st.integers(1, 4))
        ends = tuple(draw(st.integers(0, r // 2)) for _ in "ab")
        h = draw(st.integers(d * (r - 1) + 1, d * (r - 1) + 9))
        for values, value in zip((size, window, stride, dilation, padding), (h, r, s, d, ends), strict=True):
            values.append(value)
        fixed = kind in ("avg_pool", "lp_pool")
        out.append(pooled_size(h, r, s, ends, d, ceil) if fixed else draw(st.integers(1, 9)))
    if kind == "max_unpool":
        size, out = out, size  # x is the small one
    x, y = (n, c, *size), (n, c, *out)
    index = draw(st.sampled_from(["i64", "i32"]))
    shapes = {
        "avg_pool": {"x": x, "y": y} if forward else {"dy": y, "dx": x},
        "lp_pool": {"x": x, "y": y} if forward else {"dy": y, "x": x, "y": y, "dx": x},
        "adaptive_avg_pool": {"x": x, "y": y} if forward else {"dy": y, "dx": x},
        "adaptive_max_pool": {"x": x, "y": y, "index": y} if forward else {"dy": y, "index": y, "dx": x},
        "max_unpool": {"x": x, "index": x, "y": y} if forward else {"dy": y, "index": x, "dx": x},
    }[kind]
    for role, shape in shapes.items():
        written = role == "dx" or (forward and role != "x" and (kind, role) != ("max_unpool", "index"))
        parts[role] = draw(tensors(index if role == "index" else dtype, shape, output=written))
    if kind in ("avg_pool", "lp_pool"):
        parts |= {"window": comma(window), "stride": comma(stride), "padding": pads(padding)}
        parts |= {"dilation": comma(dilation), "ceil_mode": int(ceil)}
        if kind == "avg_pool":
            parts |= {"count_padding": int(draw(st.booleans())), "divisor": draw(st.sampled_from([0, 0, 5]))}
        else:
            parts["norm"] = draw(st.sampled_from([2.0, 2.0, 1.0, 3.0]))
    elif forward:
        parts["output_size"] = comma(out)
        if kind == "adaptive_max_pool":
            parts["index_type"] = index
    return line(f"{kind}_{'fwd' if forward else 'bwd'}", parts)


@settings(max_examples=30)
@given(more_pools(), st.sampled_from(["cpu:avx2:4", "cuda:sm_90:132"]))
def test_text_comes_back(text, on):
    p = Problem.parse(f"{text} on={on}")
    assert Problem.parse(str(p)) == p
    assert Problem.create(p.op, dict(p.items), p.target, p.epilogue, p.math) == p


@settings(max_examples=30)
@given(more_pools().map(Problem.parse), PICK, SEED)
def test_refused_or_right(problem, pick, seed):
    refuses_or_is_right(problem, pick, seed, torch.device("cpu"))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@settings(max_examples=2000)
@given(more_pools(("f32", "bf16", "f16", "f64")).map(Problem.parse), PICK, SEED)
def test_refused_or_right_at_length(problem, pick, seed):
    refuses_or_is_right(problem, pick, seed, torch.device("cpu"))


@pytest.mark.gpu
@settings(max_examples=40)
@given(st.data(), PICK, SEED)
def test_refused_or_right_on_a_gpu(data, pick, seed):
    problem = Problem.parse(data.draw(more_pools(("f32", "bf16", "f16", "f64"))), Target.of("cuda"))
    refuses_or_is_right(problem, pick, seed, torch.device("cuda"))


@settings(max_examples=30)
@given(more_pools(("f32",)))
def test_the_functions_are_the_frameworks(text):
    """On the same tensor, where the framework has such a problem at all."""
    p = Problem.parse(text)
    op, kind = p.op, p.op.name.removesuffix("_fwd")
    if not op.name.endswith("_fwd") or kind == "max_unpool":
        return
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(p["x"].shape, generator=generator)
    name = f"{kind}{x.ndim - 2}d"
    if kind.startswith("adaptive"):
        ours, theirs = (getattr(m, name)(x, p.op.output_size) for m in (F, T))  # type: ignore[attr-defined]
    else:
        plain = dataclasses.replace(op, dilation=(1,) * len(op.window))  # type: ignore[attr-defined]
        even = [a for a, _ in plain.padding]
        if any(n + 2 * a < r for n, a, r in zip(x.shape[2:], even, plain.window, strict=True)):
            return
        if kind == "lp_pool":
            window, stride = (v[0] if x.ndim == 3 else v for v in (plain.window, plain.stride))
            args = (2.0, window, stride, plain.ceil_mode)
        else:
            args = (plain.window, plain.stride, even, plain.ceil_mode, plain.count_padding)
        ours, theirs = (getattr(m, name)(x, *args) for m in (F, T))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
