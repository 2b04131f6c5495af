"""Hypothesis strategies for problem lines: shapes, strides, alignments, attributes and epilogues that fit together."""

from __future__ import annotations

import re

import torch
from hypothesis import note
from hypothesis import strategies as st

from lucidnn.core import registry
from lucidnn.core.descriptor import TensorDescriptor, channels_last_strides, contiguous_strides
from lucidnn.core.problem import Problem
from lucidnn.core.target import Target
from lucidnn.ops.activation import ACTIVATIONS
from lucidnn.ops.convolution import output_size
from lucidnn.ops.pooling import pooled_size
from lucidnn.testing import verify

DTYPES = st.sampled_from(["f32", "f32", "bf16", "f16", "f64"])
EIGHT_BITS = st.sampled_from(["i8", "f8"])
FLOAT8 = st.sampled_from(["f8e4m3", "f8e5m2"])
FACTORS = st.sampled_from([1.0, 1.0, 0.5, -2.0, 0.0])
TILES = st.sampled_from([1, 1, 2, 3, 4, 7, 8, 15, 16, 17, 31, 33])


@st.composite
def tensors(draw, dtype: str, shape: tuple[int, ...], output: bool = False) -> TensorDescriptor:
    """Dense in one of the layouts, or a slice, a permutation or an expansion of something larger."""
    size = TensorDescriptor(dtype, (1,)).itemsize
    alignment = draw(st.sampled_from([16, 16, 16, size, max(size, 8)]))
    kind = draw(st.sampled_from(["first", "first", "last", "last", "sliced", "permuted", "expanded"]))
    strides = contiguous_strides(shape)
    if kind == "last" and len(shape) > 2:
        strides = channels_last_strides(shape)
    elif kind == "sliced":
        padded = tuple(n + draw(st.integers(0, 3)) for n in shape)
        step = draw(st.sampled_from([1, 1, 2]))
        strides = tuple(s * step for s in contiguous_strides(padded))
    elif kind == "permuted":
        order = draw(st.permutations(range(len(shape))))
        dense = contiguous_strides(tuple(shape[a] for a in order))
        strides = tuple(dense[order.index(a)] for a in range(len(shape)))
    elif kind == "expanded" and not output:
        strides = tuple(0 if draw(st.booleans()) else s for s in strides)
    return TensorDescriptor(dtype, shape, strides, alignment)


def activations():
    def write(name):
        if ACTIVATIONS[name].parameter is None:
            return st.just(name)
        return st.sampled_from([0.1, 0.5, 1.5, 6.0]).map(lambda p: f"{name}:{p}")

    return st.sampled_from([*ACTIVATIONS, "relu", "identity"]).flatmap(write)


def line(name: str, parts: dict[str, object]) -> str:
    return " ".join([name, *(f"{key}={value}" for key, value in parts.items())])


def pads(pairs) -> str:
    return ",".join(f"{a}:{b}" for a, b in pairs)


def comma(values) -> str:
    return ",".join(map(str, values))


@st.composite
def convolutions(draw) -> str:
    """A line of one of the three directions, at most a few hundred thousand operations."""
    ndim = draw(st.sampled_from([1, 2, 2, 2, 3]))
    most = {1: 40, 2: 12, 3: 6}[ndim]
    name = draw(st.sampled_from(["conv_fprop", "conv_dgrad", "conv_wgrad"]))
    groups = draw(st.sampled_from([1, 1, 1, 2, 3, 8]))
    per_group = st.sampled_from([1, 2, 3, 4]) if groups > 1 else TILES
    plain = draw(st.integers(0, 2)) == 0  # the case that most engines take: a small odd filter, dense, one step
    mode = draw(st.sampled_from(["zeros"] * 5 + ["reflect", "replicate", "circular"]))
    c, k = groups * draw(per_group), groups * draw(per_group)
    n = draw(st.sampled_from([1, 1, 2, 3, 5]))
    size, filter_, stride, dilation, padding, out = [], [], [], [], [], []
    for _ in range(ndim):
        r = draw(st.sampled_from([1, 3, 3, 5])) if plain else draw(st.integers(1, 4))
        d, s = (1, draw(st.sampled_from([1, 1, r]))) if plain else (draw(st.integers(1, 3)), draw(st.integers(1, 4)))
        before, after = (draw(st.integers(0, r // 2 if plain else 4)) for _ in "ab")
        least = max(1, d * (r - 1) + 1 - before - after)
        least = max(least, max(before, after) + (mode == "reflect")) if mode in ("reflect", "circular") else least
        h = draw(st.integers(least, max(least, most)))
        for values, value in zip(
            (size, filter_, stride, dilation, padding), (h, r, s, d, (before, after)), strict=True
        ):
            values.append(value)
        out.append(output_size(h, r, s, (before, after), d))
    dtype = draw(st.one_of(DTYPES, DTYPES, DTYPES, EIGHT_BITS))
    if dtype == "i8":
        name = "conv_fprop"
    x, w, y = (n, c, *size), (k, c // groups, *filter_), (n, k, *out)
    roles = {"conv_fprop": ("x", "w", "y"), "conv_dgrad": ("dx", "w", "dy"), "conv_wgrad": ("x", "dw", "dy")}[name]
    result = {"conv_fprop": "y", "conv_dgrad": "dx", "conv_wgrad": "dw"}[name]
    parts: dict[str, object] = {}
    shapes = dict(zip(roles, (x, w, y), strict=True))
    kinds = {"i8": ["i32", "i8", "f32", "bf16"], "f64": ["f64"]}.get(dtype, [dtype] * 3 + ["f32", "bf16"])
    out_type = draw(st.sampled_from(kinds))
    for role, shape in shapes.items():
        kind = out_type if role == result else draw(FLOAT8) if dtype == "f8" else dtype
        parts[role] = draw(tensors("f8e4m3" if kind == "f8" else kind, shape, output=role == result))
    parts |= {"padding_mode": mode, "flip": draw(st.sampled_from([0, 0, 0, 1]))}
    parts |= {"stride": comma(stride), "padding": pads(padding), "dilation": comma(dilation), "groups": groups}
    channels = shapes[result][1] if name != "conv_wgrad" else 1
    if out_type == "i32":
        if draw(st.booleans()):
            parts["bias"] = draw(tensors("i32", (k,)))
        return line(name, parts)
    parts["alpha"] = draw(FACTORS)
    if dtype == "i8":
        parts["alpha"] = draw(st.sampled_from([1e-3, 0.01, -1e-4]))
    if draw(st.integers(0, 5)) == 0:
        parts["scale"] = draw(tensors("f32", (draw(st.sampled_from([1, channels])),)))
    if name != "conv_wgrad":
        if draw(st.booleans()):
            kinds = ["f32"] if dtype in ("i8", "f8") else [dtype, "f32"]
            parts["bias"] = draw(tensors(draw(st.sampled_from(kinds)), (channels,)))
        parts["act"] = draw(activations())
    if draw(st.integers(0, 3)) == 0:
        kind = "f32" if dtype in ("i8", "f8") else dtype
        parts["z"], parts["beta"] = draw(tensors(kind, shapes[result])), draw(st.sampled_from([1.0, -0.5]))
    # z or a bias may cancel a short sum: what TF32 lost of it then is any part of what is left
    if dtype == "f32" and not {"z", "bias"} & set(parts) and draw(st.integers(0, 3)) == 0:
        parts["math"] = "tf32"
    return line(name, parts)


@st.composite
def pools(draw) -> str:
    ndim = draw(st.sampled_from([1, 2, 2, 2, 3]))
    name = draw(st.sampled_from(["max_pool_fwd", "max_pool_bwd"]))
    ceil = draw(st.booleans())
    size, window, stride, dilation, padding, out = [], [], [], [], [], []
    for _ in range(ndim):
        r, d, s = draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.integers(1, 4))
        before, after = (draw(st.integers(0, r // 2)) for _ in "ab")
        # every window holds a point of the input: a maximum of nothing is not what is tested here
        least = max(1, d * (r - 1) + 1)
        h = draw(st.integers(least, least + 9))
        for values, value in zip((size, window, stride, dilation, padding), (h, r, s, d, (before, after)), strict=True):
            values.append(value)
        out.append(pooled_size(h, r, s, (before, after), d, ceil))
    dtype, index = draw(DTYPES), draw(st.sampled_from(["i64", "i32", "u8"]))
    n, c = draw(st.integers(1, 3)), draw(TILES)
    x, y = (n, c, *size), (n, c, *out)
    roles = {"max_pool_fwd": {"x": x, "y": y, "index": y}, "max_pool_bwd": {"dy": y, "index": y, "dx": x}}[name]
    parts: dict[str, object] = {}
    for role, shape in roles.items():
        written = role == "dx" or (name == "max_pool_fwd" and role != "x")
        parts[role] = draw(tensors(index if role == "index" else dtype, shape, output=written))
    parts |= {"window": comma(window), "stride": comma(stride), "padding": pads(padding), "dilation": comma(dilation)}
    return line(name, parts | {"ceil_mode": int(ceil), "index_type": index})


@st.composite
def pointwise(draw) -> str:
    name = draw(st.sampled_from(["pointwise_fwd", "pointwise_bwd"]))
    ndim = draw(st.integers(1, 5))
    shape = tuple(draw(st.integers(1, {1: 400, 2: 40, 3: 12, 4: 7, 5: 4}[ndim])) for _ in range(ndim))
    dtype = draw(DTYPES)
    roles = ("x", "y") if name == "pointwise_fwd" else ("dy", "x", "dx")
    parts: dict[str, object] = {r: draw(tensors(dtype, shape, output=r in ("y", "dx"))) for r in roles}
    parts["alpha"], parts["act"] = draw(FACTORS), draw(activations())
    if name == "pointwise_fwd":
        if ndim > 1 and draw(st.booleans()):
            parts["bias"] = draw(tensors(dtype, (shape[1],)))
        if draw(st.booleans()):
            parts["z"], parts["beta"] = draw(tensors(dtype, shape)), draw(st.sampled_from([1.0, -0.5]))
    return line(name, parts)


@st.composite
def bias_gradients(draw) -> str:
    shape = tuple(draw(st.integers(1, 9)) for _ in range(draw(st.integers(2, 5))))
    return line("conv_bgrad", {"dy": draw(tensors(draw(DTYPES), shape))})


def problem_lines():
    return st.one_of(convolutions(), convolutions(), convolutions(), pools(), pointwise(), bias_gradients())


def problems(target=None):
    return problem_lines().map(lambda text: Problem.parse(text, target))


def refuses_or_is_right(text: str, target: Target, device: str, seed: int) -> None:
    """Every engine for the target gives its reasons, or agrees with the reference in one of its configurations."""
    problem = Problem.parse(text, target)
    note(str(problem))
    assert Problem.parse(str(problem)) == problem
    for engine in registry.for_operation(problem.op.name):
        if target.kind not in engine.targets or "reference" in engine.notes:
            continue
        reasons = engine.reasons(problem)
        assert all(re.fullmatch(r"needs \S.*, found \S.*", reason) for reason in reasons)
        if not reasons:
            configs = engine.configs(problem)
            config = configs[seed % len(configs)]
            check = verify(problem, engine, config, torch.device(device), seed)
            assert not check.fault, f"{engine.name} {config}: {check.fault}"
