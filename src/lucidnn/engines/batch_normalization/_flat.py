"""Elementwise passes of batch normalization over planes that vectors do not fit, as 7 x 7: tiles along all of memory.

A tile of channels by a plane's values starts rows of an odd number of bytes, so that no access is wider than an
element. Tensors that lie as one run (image, channel, plane) are instead cut into vectors of 16 bytes wherever planes
end: a vector meets at most two channels, both found by multiplications, and each of its elements chooses between the
two channels' numbers. Channels are looked up twice a vector, not once an element.
"""

from __future__ import annotations

import math
from typing import Any

import triton
import triton.language as tl

from ...core.descriptor import DTYPES, contiguous_strides
from ...core.engine import Config
from ...core.problem import Problem
from ...ops.activation import ACTIVATIONS
from ...ops.batch_normalization import LARGE, statistics_type
from .._triton.channels import inverse_root
from .._triton.epilogue import activate_grad, convert, finish
from .._triton.index import INT32, divide, reciprocal
from .._triton.launch import Argument, Launch, Real, Slice
from ._tiles import numbers, strided
from ._view import View

LARGEST = 4096


@triton.jit
def _places(C, PLANE, plane_mul, plane_shift, c_mul, c_shift, BLOCK: tl.constexpr, VECTOR: tl.constexpr):
    """Where vectors start, their elements, the first and the next channel, and which elements are of the first."""
    pid = tl.num_programs(0) - 1 - tl.program_id(0)  # what was read last comes first: it may still be in the cache
    start = pid * BLOCK + tl.arange(0, BLOCK // VECTOR) * VECTOR
    lane = tl.arange(0, VECTOR)
    plane = divide(start, plane_mul, plane_shift)
    left = (plane + 1) * PLANE - start
    c = plane - divide(plane, c_mul, c_shift) * C
    following = tl.where(c + 1 == C, 0, c + 1)
    return start, start[:, None] + lane[None, :], c, following, lane[None, :] < left[:, None]


@triton.jit
def _chosen(p, c, following, first, stride, FLOAT: tl.constexpr):
    """An element's own of its vector's two channels' numbers."""
    a = convert(tl.load(p + c * stride), FLOAT)
    b = convert(tl.load(p + following * stride), FLOAT)
    return tl.where(first, a[:, None], b[:, None])


@triton.jit
def _root(inverse, variance, c, stride, C, epsilon, FLOAT: tl.constexpr):
    return inverse_root(inverse, variance, c * stride, c < C, epsilon, FLOAT)


@triton.jit
def _scaled(r, scale, c, stride, FLOAT: tl.constexpr):
    if scale is not None:
        r = r * convert(tl.load(scale + c * stride), FLOAT)
    return r


@triton.jit
def batch_norm_normalize_flat(
    x, z, y, mean, inverse, variance, scale, bias, epsilon, parameter, TOTAL, C, PLANE, plane_mul, plane_shift,
    c_mul, c_shift, mean_stride, inverse_stride, scale_stride, bias_stride,
    ACT: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    FLOAT: tl.constexpr = tl.float64 if x.dtype.element_ty == tl.float64 else tl.float32
    start, at, c, following, first = _places(C, PLANE, plane_mul, plane_shift, c_mul, c_shift, BLOCK, VECTOR)
    ok = (start < TOTAL)[:, None]
    v = tl.load(x + at, mask=ok, other=0.0, eviction_policy="evict_first").to(FLOAT)
    other = None
    if z is not None:
        other = tl.load(z + at, mask=ok, other=0.0, eviction_policy="evict_first")
    center = _chosen(mean, c, following, first, mean_stride, FLOAT)
    a = _scaled(_root(inverse, variance, c, inverse_stride, C, epsilon, FLOAT), scale, c, scale_stride, FLOAT)
    b = _root(inverse, variance, following, inverse_stride, C, epsilon, FLOAT)
    b = _scaled(b, scale, following, scale_stride, FLOAT)
    factor = tl.where(first, a[:, None], b[:, None])
    term = None
    if bias is not None:
        term = _chosen(bias, c, following, first, bias_stride, FLOAT)
    v = finish((v - center) * factor, other, term, None, None, parameter, ACT)
    tl.store(y + at, v.to(y.dtype.element_ty), mask=ok, eviction_policy="evict_first")


@triton.jit
def batch_norm_bwd_apply_flat(
    dy, x, z, y, dx, dz, mean, inverse, variance, scale, bias, dscale, dbias, sums, count, number, epsilon, parameter,
    TOTAL, C, PLANE, plane_mul, plane_shift, c_mul, c_shift, mean_stride, inverse_stride, scale_stride, bias_stride,
    dscale_stride, dbias_stride, FROZEN: tl.constexpr, ACT: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    FLOAT: tl.constexpr = tl.float64 if x.dtype.element_ty == tl.float64 else tl.float32
    start, at, c, following, first = _places(C, PLANE, plane_mul, plane_shift, c_mul, c_shift, BLOCK, VECTOR)
    ok = (start < TOTAL)[:, None]
    g = tl.load(dy + at, mask=ok, other=0.0, eviction_policy="evict_first").to(FLOAT)
    v = None
    if not FROZEN or (ACT != 0 and y is None):
        v = tl.load(x + at, mask=ok, other=0.0, eviction_policy="evict_first").to(FLOAT)
    center = _chosen(mean, c, following, first, mean_stride, FLOAT)
    ra = _root(inverse, variance, c, inverse_stride, C, epsilon, FLOAT)
    rb = _root(inverse, variance, following, inverse_stride, C, epsilon, FLOAT)
    fa = _scaled(ra, scale, c, scale_stride, FLOAT)
    fb = _scaled(rb, scale, following, scale_stride, FLOAT)
    factor = tl.where(first, fa[:, None], fb[:, None])
    if ACT != 0:
        if y is not None:
            source = tl.load(y + at, mask=ok, other=0.0, eviction_policy="evict_first").to(FLOAT)
        else:
            source = (v - center) * factor
            if z is not None:
                source = source + tl.load(z + at, mask=ok, other=0.0, eviction_policy="evict_first").to(FLOAT)
            if bias is not None:
                source = source + _chosen(bias, c, following, first, bias_stride, FLOAT)
        g = activate_grad(source, g, ACT, parameter)
    if dz is not None:
        tl.store(dz + at, g.to(dz.dtype.element_ty), mask=ok, eviction_policy="evict_first")
    if FROZEN:
        g = factor * g
    else:
        if sums is not None:
            m = number
            level = _chosen(sums, c, following, first, 1, FLOAT) / m
            sa = tl.load(sums + C + c)
            sb = tl.load(sums + C + following)
        else:
            m = convert(tl.load(count), FLOAT)
            level = _chosen(dbias, c, following, first, dbias_stride, FLOAT) / m
            sa = convert(tl.load(dscale + c * dscale_stride), FLOAT)
            sb = convert(tl.load(dscale + following * dscale_stride), FLOAT)
        slope = tl.where(first, (sa * ra / m)[:, None], (sb * rb / m)[:, None])
        g = factor * ((g - level) - (v - center) * slope)
    tl.store(dx + at, g.to(dx.dtype.element_ty), mask=ok, eviction_policy="evict_first")


def is_flat(problem: Problem) -> bool:
    """Whether planes are no whole vectors, but a vector is no longer than a plane, and everything is one run."""
    op: Any = problem.op
    x = problem["x"]
    plane, vector = math.prod(x.shape[2:]), _vector(problem)
    large = [t for role, t in problem.items if role in LARGE]
    return (
        getattr(op, "mode", "spatial") == "spatial"
        and x.ndim > 2
        and plane % vector != 0
        and plane > vector
        and x.numel % vector == 0
        and all(t.strides == contiguous_strides(x.shape) for t in large)
        and all(t.span + LARGEST <= INT32 for _, t in problem.items)
    )


def with_flat(problem: Problem, found: list[Config]) -> list[Config]:
    """Configs that say by `FLAT`, 0 or a number of elements, how the elementwise pass is cut; best guess first."""
    if problem.op.name in ("batch_norm_stats", "batch_norm_bwd_sums") or not is_flat(problem):
        return found
    return [{**found[0], "FLAT": 2048}, {**found[0], "FLAT": LARGEST}, *found]


def normalize_flat(problem: Problem, view: View, config: Config) -> Launch:
    """The forward pass."""
    args, constexprs, grid, warps = _common(problem, view, config)
    args |= {"z": "z", "y": "y"}
    return Launch(batch_norm_normalize_flat, grid, args, constexprs, warps, 1)


def apply_flat(problem: Problem, view: View, config: Config, sums: Slice | None) -> Launch:
    """The backward pass; `sums` where those of dscale and dbias are in the workspace, unrounded."""
    args, constexprs, grid, warps = _common(problem, view, config)
    args |= {name: name for name in ("dy", "z", "y", "dx", "dz", "count")}
    args |= {"sums": sums, "number": Real(float(view.values), statistics_type(problem["x"].dtype))}
    for role in ("dscale", "dbias"):
        args |= {role: None if sums else role}
        args[f"{role}_stride"] = None if sums else strided(view, role)[f"{role}_k0_stride"]
    constexprs["FROZEN"] = getattr(problem.op, "frozen", False)
    return Launch(batch_norm_bwd_apply_flat, grid, args, constexprs, warps, 1)


def _common(problem: Problem, view: View, config: Config):
    x = problem["x"]
    plane, block = math.prod(x.shape[2:]), config["FLAT"]
    args: dict[str, Argument] = {"x": "x", "inverse": "inv_variance", "variance": "variance", **numbers(problem)}
    args |= {"TOTAL": x.numel, "C": x.shape[1], "PLANE": plane}
    args["plane_mul"], args["plane_shift"] = reciprocal(plane)
    args["c_mul"], args["c_shift"] = reciprocal(x.shape[1])
    for role in ("mean", "scale", "bias"):
        args |= {role: role, f"{role}_stride": strided(view, role)[f"{role}_k0_stride"]}
    role = "variance" if "variance" in problem.tensors else "inv_variance"
    args["inverse_stride"] = strided(view, role)[f"{role}_k0_stride"]
    constexprs: dict[str, Any] = {
        "ACT": ACTIVATIONS[problem.epilogue.activation].code, "BLOCK": block, "VECTOR": _vector(problem),
    }  # fmt: skip
    return args, constexprs, (-(-x.numel // block),), max(1, block // 512)


def _vector(problem: Problem) -> int:
    """Elements of 16 bytes of x."""
    return 16 // DTYPES[problem["x"].dtype][1]
