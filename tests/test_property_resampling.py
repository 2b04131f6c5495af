"""Resampling problems built at random: text comes back, an engine refuses or is right."""

from __future__ import annotations

import torch
from hypothesis import given, note, settings
from hypothesis import strategies as st

from lucidnn import Problem
from lucidnn.core import registry
from lucidnn.testing import verify
from problems_at_random import TILES, comma, line, tensors

DTYPES = st.sampled_from(["f32", "f32", "bf16"])  # each is a compilation of every kernel; the lists have the others


@st.composite
def resamplings(draw) -> str:
    ndim = draw(st.sampled_from([1, 2, 2, 2, 3]))
    most = {1: 70, 2: 20, 3: 6}[ndim]
    modes = ["nearest", "nearest-exact", "linear", "linear", "area", *["cubic"] * (ndim == 2)]
    mode = draw(st.sampled_from(modes))
    size, out, scale = [], [], []
    for _ in range(ndim):
        n = draw(st.integers(1, most))
        factor = draw(st.sampled_from([0.3, 0.5, 0.75, 1.0, 1.3, 2.0, 2.0, 2.7]))
        size.append(n)
        out.append(max(int(n * factor), 1))
        scale.append(factor)
    parts: dict[str, object] = {}
    dtype, shape = draw(DTYPES), (draw(st.integers(1, 3)), draw(TILES))
    forward = draw(st.booleans())
    for role, spatial in (("x", size), ("y", out)) if forward else (("dy", out), ("dx", size)):
        parts[role] = draw(tensors(dtype, (*shape, *spatial), output=role in ("y", "dx")))
    parts |= {"size": comma(out if forward else size), "mode": mode}
    if draw(st.booleans()):
        parts["scale"] = comma(scale)
    if mode in ("linear", "cubic"):
        parts["align_corners"] = draw(st.sampled_from([0, 0, 1]))
        parts["antialias"] = draw(st.sampled_from([0, 0, 1])) if ndim == 2 else 0
    return line("resample_fwd" if forward else "resample_bwd", parts)


@st.composite
def foldings(draw) -> str:
    dtype, n = draw(DTYPES), draw(st.integers(1, 3))
    if draw(st.booleans()):
        kind, f = (
            draw(st.sampled_from(["pixel_shuffle", "pixel_unshuffle", "channel_shuffle"])),
            draw(st.integers(1, 4)),
        )
        c, h, w = draw(st.integers(1, 5)), draw(st.integers(1, 6)), draw(st.integers(1, 40))
        few, many = (n, c, h * f, w * f), (n, c * f * f, h, w)
        x, y = {"pixel_shuffle": (many, few), "pixel_unshuffle": (few, many)}.get(kind, ((n, c * f, h, w),) * 2)
        parts = {"x": draw(tensors(dtype, x)), "y": draw(tensors(dtype, y, output=True)), "kind": kind, "factor": f}
        return line("shuffle", parts)
    window, stride, dilation, padding = (
        tuple(draw(st.integers(a, b)) for _ in "hw") for a, b in ((1, 3), (1, 3), (1, 2), (0, 3))
    )
    least = [max(d * (r - 1) + 1 - 2 * p, 1) for r, d, p in zip(window, dilation, padding, strict=True)]
    size = tuple(draw(st.integers(a, a + 12)) for a in least)
    c, blocks = draw(st.integers(1, 4)), 1
    for a, r, u, d, p in zip(size, window, stride, dilation, padding, strict=True):
        blocks *= (a + 2 * p - d * (r - 1) - 1) // u + 1
    columns, image = (n, c * window[0] * window[1], blocks), (n, c, *size)
    attributes = {"window": window, "stride": stride, "padding": padding, "dilation": dilation}
    shared = {name: comma(value) for name, value in attributes.items()}
    if draw(st.booleans()):
        given = {"x": draw(tensors(dtype, image)), "y": draw(tensors(dtype, columns, output=True))}
        return line("unfold_fwd", given | shared)
    given = {"dy": draw(tensors(dtype, columns)), "dx": draw(tensors(dtype, image, output=True)), "size": comma(size)}
    return line("unfold_bwd", given | shared)


@st.composite
def samplings(draw) -> str:
    ndim, dtype = draw(st.sampled_from([2, 2, 3])), draw(st.sampled_from(["f32", "f32", "f64"]))
    n, c = draw(st.integers(1, 3)), draw(st.integers(1, 11))
    size, points = (tuple(draw(st.integers(1, 6)) for _ in range(ndim)) for _ in "xy")
    x, y, grid = (n, c, *size), (n, c, *points), (n, *points, ndim)
    given = {"x": draw(tensors(dtype, x)), "grid": draw(tensors(dtype, grid))}
    shared = {
        "mode": draw(st.sampled_from(["bilinear", "nearest", *["bicubic"] * (ndim == 2)])),
        "padding_mode": draw(st.sampled_from(["zeros", "border", "reflection"])),
        "align_corners": draw(st.integers(0, 1)),
    }
    if draw(st.booleans()):
        return line("grid_sample_fwd", given | {"y": draw(tensors(dtype, y, output=True))} | shared)
    wanted = draw(st.sampled_from(["both", "x", "grid"]))
    if wanted != "grid":
        given["dx"] = draw(tensors(dtype, x, output=True))
    return line("grid_sample_bwd", {"dy": draw(tensors(dtype, y))} | given | shared | {"gradients": wanted})


@settings(max_examples=40)
@given(st.one_of(resamplings(), foldings(), samplings()), st.integers(0, 3), st.integers(0, 1 << 30))
def test_an_engine_refuses_or_is_right(text, pick, seed):
    note(text)
    problem = Problem.parse(text)
    assert Problem.parse(str(problem)) == problem
    for engine in registry.for_operation(problem.op.name):
        if "cpu" in engine.targets and "reference" not in engine.notes and not engine.reasons(problem):
            configs = engine.configs(problem)
            check = verify(problem, engine, configs[pick % len(configs)], torch.device("cpu"), seed)
            assert not check.fault, f"{engine.name}: {check.fault}"
