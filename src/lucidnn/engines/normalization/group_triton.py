"""``norm.group_triton``: group normalization on a GPU, one block of threads for each group of each image, in Triton.

Method. A block's tile is channels by points. A group that fits is read once and stays in registers; of a larger one
the block takes mean and squared distances by Welford's update, element by element of the tile with no exchange between
threads until the end (Chan's formula then), and reads the group again for the result, from the second-level cache as a
rule. Backward adds up dy and dy times the normalized x for each channel: from these follow dx and, as partial rows for
each image that a second small kernel adds in order, dscale and dbias. The activation is applied on the way out, and its
input computed again on the way back.

Cost: x once (and dy), and again from the cache. Limits: at most 512 channels a group; groups of few channels in
channels-last images, which lie in short pieces, are better served by ``norm.split_triton``.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import triton
import triton.language as tl

from ...core.engine import Config, Refusals
from ...core.heuristics import roofline
from ...core.problem import Problem
from ...ops.activation import ACTIVATIONS
from .._triton.epilogue import activate, activate_grad, convert
from .._triton.index import INT32, columns, rows
from .._triton.launch import Argument, Launch, Real, Slice, TritonEngine
from .._triton.normalization import Parameters, inner_places, loop_arguments, shift_of, steps, summing
from ._sets import Loop, full_roles, sets

TYPES = ("f64", "f32", "f16", "bf16")
CHANNELS = 512


@triton.jit
def _points(s, I0, i0_mul, i0_shift, I1, i1_mul, i1_shift, s0, s1, s2, INNER: tl.constexpr):
    """Elements to some points of an image."""
    k0, k1, k2 = inner_places(s, I0, i0_mul, i0_shift, I1, i1_mul, i1_shift, INNER)
    return steps(k0, k1, k2, s0, s1, s2, INNER)


@triton.jit
def norm_group_fwd(
    x, y, scale, bias, mean, inverse, epsilon, parameter, GROUPS, EACH, POINTS, SIZE,
    I0, i0_mul, i0_shift, I1, i1_mul, i1_shift,
    x_n_stride, x_g_stride, x_c_stride, x_0_stride, x_1_stride, x_2_stride,
    y_n_stride, y_g_stride, y_c_stride, y_0_stride, y_1_stride, y_2_stride,
    m_n_stride, m_g_stride, v_n_stride, v_g_stride,
    INNER: tl.constexpr, ACT: tl.constexpr, TURNED: tl.constexpr, WIDE: tl.constexpr, WHOLE: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    FLOAT: tl.constexpr = tl.float64 if x.dtype.element_ty == tl.float64 else tl.float32
    n = tl.program_id(0) // GROUPS
    g = tl.program_id(0) % GROUPS
    c = tl.arange(0, BLOCK_C)
    lane = tl.arange(0, BLOCK_S)
    if WIDE:
        n = n.to(tl.int64)
        g = g.to(tl.int64)
        c = c.to(tl.int64)
    in_c = rows(c < EACH, TURNED)
    xs = x + (n * x_n_stride + g * x_g_stride) + rows(c * x_c_stride, TURNED)
    ys = y + (n * y_n_stride + g * y_g_stride) + rows(c * y_c_stride, TURNED)
    shift = shift_of(convert(tl.load(x + (n * x_n_stride + g * x_g_stride)), FLOAT))
    if WHOLE:
        at = _points(lane, I0, i0_mul, i0_shift, I1, i1_mul, i1_shift, x_0_stride, x_1_stride, x_2_stride, INNER)
        ok = in_c & columns(lane < POINTS, TURNED)
        v = convert(tl.load(xs + columns(at, TURNED), mask=ok, other=0.0), FLOAT)
        v = tl.where(ok, v - shift, 0.0)
        center = tl.sum(tl.sum(v, axis=1), axis=0) / SIZE
        d = tl.where(ok, v - center, 0.0)
        squares = tl.sum(tl.sum(d * d, axis=1), axis=0)
    else:
        trips = tl.cdiv(POINTS, BLOCK_S)
        m = tl.zeros((BLOCK_S, BLOCK_C) if TURNED else (BLOCK_C, BLOCK_S), dtype=FLOAT)
        q = tl.zeros((BLOCK_S, BLOCK_C) if TURNED else (BLOCK_C, BLOCK_S), dtype=FLOAT)
        one = tl.full((), 1.0, dtype=FLOAT)
        for trip in tl.range(0, trips, num_stages=STAGES):
            s = trip * BLOCK_S + lane
            at = _points(s, I0, i0_mul, i0_shift, I1, i1_mul, i1_shift, x_0_stride, x_1_stride, x_2_stride, INNER)
            ok = in_c & columns(s < POINTS, TURNED)
            u = convert(tl.load(xs + columns(at, TURNED), mask=ok, other=0.0), FLOAT) - shift
            d = tl.where(ok, u - m, 0.0)
            m += d * (one / (trip + 1))
            q += d * (u - m)
        # How many points each element of the tile has seen.
        weight = tl.where(in_c, columns(tl.cdiv(tl.maximum(POINTS - lane, 0), BLOCK_S).to(FLOAT), TURNED), 0.0)
        center = tl.sum(tl.sum(m * weight, axis=1), axis=0) / SIZE
        d = m - center
        squares = tl.sum(tl.sum(q + weight * d * d, axis=1), axis=0)
    factor = 1.0 / tl.sqrt(squares / SIZE + epsilon)
    tl.store(mean + (n * m_n_stride + g * m_g_stride), center + shift)
    tl.store(inverse + (n * v_n_stride + g * v_g_stride), factor)
    a = factor
    if scale is not None:
        a = rows(convert(tl.load(scale + g * EACH + c, mask=c < EACH, other=0.0), FLOAT), TURNED) * factor
    if bias is not None:
        b = rows(convert(tl.load(bias + g * EACH + c, mask=c < EACH, other=0.0), FLOAT), TURNED)
    if WHOLE:
        r = (v - center) * a
        if bias is not None:
            r = r + b
        r = convert(activate(r, ACT, parameter), y.dtype.element_ty)
        at = _points(lane, I0, i0_mul, i0_shift, I1, i1_mul, i1_shift, y_0_stride, y_1_stride, y_2_stride, INNER)
        tl.store(ys + columns(at, TURNED), r, mask=in_c & columns(lane < POINTS, TURNED))
    else:
        for back in tl.range(0, trips, num_stages=STAGES):
            s = (trips - 1 - back) * BLOCK_S + lane  # what was read last is nearest
            at = _points(s, I0, i0_mul, i0_shift, I1, i1_mul, i1_shift, x_0_stride, x_1_stride, x_2_stride, INNER)
            ok = in_c & columns(s < POINTS, TURNED)
            u = convert(tl.load(xs + columns(at, TURNED), mask=ok, other=0.0), FLOAT) - shift
            r = (u - center) * a
            if bias is not None:
                r = r + b
            r = convert(activate(r, ACT, parameter), y.dtype.element_ty)
            at = _points(s, I0, i0_mul, i0_shift, I1, i1_mul, i1_shift, y_0_stride, y_1_stride, y_2_stride, INNER)
            tl.store(ys + columns(at, TURNED), r, mask=ok)


@triton.jit
def _pair(
    xs, dys, s, ok, center, factor, a, b, parameter, I0, i0_mul, i0_shift, I1, i1_mul, i1_shift,
    x_0_stride, x_1_stride, x_2_stride, dy_0_stride, dy_1_stride, dy_2_stride,
    INNER: tl.constexpr, ACT: tl.constexpr, TURNED: tl.constexpr, FLOAT: tl.constexpr,
):  # fmt: skip
    """The normalized x and the gradient of what the activation was given; both 0 outside."""
    at = _points(s, I0, i0_mul, i0_shift, I1, i1_mul, i1_shift, x_0_stride, x_1_stride, x_2_stride, INNER)
    v = convert(tl.load(xs + columns(at, TURNED), mask=ok, other=0.0), FLOAT)
    at = _points(s, I0, i0_mul, i0_shift, I1, i1_mul, i1_shift, dy_0_stride, dy_1_stride, dy_2_stride, INNER)
    g = convert(tl.load(dys + columns(at, TURNED), mask=ok, other=0.0), FLOAT)
    v = tl.where(ok, (v - center) * factor, 0.0)
    if ACT != 0:
        u = v
        if a is not None:
            u = u * a
        if b is not None:
            u = u + b
        g = tl.where(ok, activate_grad(u, g, ACT, parameter), 0.0)
    return v, g


@triton.jit
def norm_group_bwd(
    x, dy, dx, scale, bias, mean, inverse, sums, parameter, GROUPS, EACH, POINTS, SIZE, PLANE,
    I0, i0_mul, i0_shift, I1, i1_mul, i1_shift,
    x_n_stride, x_g_stride, x_c_stride, x_0_stride, x_1_stride, x_2_stride,
    dy_n_stride, dy_g_stride, dy_c_stride, dy_0_stride, dy_1_stride, dy_2_stride,
    y_n_stride, y_g_stride, y_c_stride, y_0_stride, y_1_stride, y_2_stride,
    m_n_stride, m_g_stride, v_n_stride, v_g_stride,
    INNER: tl.constexpr, ACT: tl.constexpr, TURNED: tl.constexpr, WIDE: tl.constexpr, WHOLE: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    FLOAT: tl.constexpr = tl.float64 if x.dtype.element_ty == tl.float64 else tl.float32
    AXIS: tl.constexpr = 0 if TURNED else 1  # of the points
    n = tl.program_id(0) // GROUPS
    g = tl.program_id(0) % GROUPS
    c = tl.arange(0, BLOCK_C)
    lane = tl.arange(0, BLOCK_S)
    first = tl.program_id(0).to(tl.int64) * EACH
    if WIDE:
        n = n.to(tl.int64)
        g = g.to(tl.int64)
        c = c.to(tl.int64)
    in_c = rows(c < EACH, TURNED)
    xs = x + (n * x_n_stride + g * x_g_stride) + rows(c * x_c_stride, TURNED)
    dys = dy + (n * dy_n_stride + g * dy_g_stride) + rows(c * dy_c_stride, TURNED)
    center = tl.load(mean + (n * m_n_stride + g * m_g_stride))
    factor = tl.load(inverse + (n * v_n_stride + g * v_g_stride))
    a = None
    b = None
    if scale is not None:
        a = rows(convert(tl.load(scale + g * EACH + c, mask=c < EACH, other=0.0), FLOAT), TURNED)
    if bias is not None:
        b = rows(convert(tl.load(bias + g * EACH + c, mask=c < EACH, other=0.0), FLOAT), TURNED)
    if WHOLE:
        v, u = _pair(
            xs, dys, lane, in_c & columns(lane < POINTS, TURNED), center, factor, a, b, parameter,
            I0, i0_mul, i0_shift, I1, i1_mul, i1_shift, x_0_stride, x_1_stride, x_2_stride,
            dy_0_stride, dy_1_stride, dy_2_stride, INNER, ACT, TURNED, FLOAT,
        )  # fmt: skip
        plain = tl.sum(u, axis=AXIS)
        along = tl.sum(u * v, axis=AXIS)
    else:
        trips = tl.cdiv(POINTS, BLOCK_S)
        s1 = tl.zeros((BLOCK_S, BLOCK_C) if TURNED else (BLOCK_C, BLOCK_S), dtype=FLOAT)
        s2 = tl.zeros((BLOCK_S, BLOCK_C) if TURNED else (BLOCK_C, BLOCK_S), dtype=FLOAT)
        for trip in tl.range(0, trips, num_stages=STAGES):
            s = trip * BLOCK_S + lane
            v, u = _pair(
                xs, dys, s, in_c & columns(s < POINTS, TURNED), center, factor, a, b, parameter,
                I0, i0_mul, i0_shift, I1, i1_mul, i1_shift, x_0_stride, x_1_stride, x_2_stride,
                dy_0_stride, dy_1_stride, dy_2_stride, INNER, ACT, TURNED, FLOAT,
            )  # fmt: skip
            s1 += u
            s2 += u * v
        plain = tl.sum(s1, axis=AXIS)
        along = tl.sum(s2, axis=AXIS)
    if sums is not None:
        tl.store(sums + first + c, along, mask=c < EACH)
        tl.store(sums + (first + PLANE) + c, plain, mask=c < EACH)
    if dx is not None:
        if scale is not None:
            s_c = convert(tl.load(scale + g * EACH + c, mask=c < EACH, other=0.0), FLOAT)
            plain = plain * s_c
            along = along * s_c
        c1 = tl.sum(plain, axis=0) / SIZE
        c2 = tl.sum(along, axis=0) / SIZE
        out = dx + (n * y_n_stride + g * y_g_stride) + rows(c * y_c_stride, TURNED)
        if WHOLE:
            if scale is not None:
                u = u * a
            r = convert((u - c1 - v * c2) * factor, dx.dtype.element_ty)
            at = _points(lane, I0, i0_mul, i0_shift, I1, i1_mul, i1_shift, y_0_stride, y_1_stride, y_2_stride, INNER)
            tl.store(out + columns(at, TURNED), r, mask=in_c & columns(lane < POINTS, TURNED))
        else:
            for back in tl.range(0, trips, num_stages=STAGES):
                s = (trips - 1 - back) * BLOCK_S + lane
                ok = in_c & columns(s < POINTS, TURNED)
                v, u = _pair(
                    xs, dys, s, ok, center, factor, a, b, parameter,
                    I0, i0_mul, i0_shift, I1, i1_mul, i1_shift, x_0_stride, x_1_stride, x_2_stride,
                    dy_0_stride, dy_1_stride, dy_2_stride, INNER, ACT, TURNED, FLOAT,
                )  # fmt: skip
                if scale is not None:
                    u = u * a
                r = convert((u - c1 - v * c2) * factor, dx.dtype.element_ty)
                at = _points(s, I0, i0_mul, i0_shift, I1, i1_mul, i1_shift, y_0_stride, y_1_stride, y_2_stride, INNER)
                tl.store(out + columns(at, TURNED), r, mask=ok)


class _View:
    """A problem's loops: one over the channels of a group, `inner` over the points from the innermost out."""

    def __init__(self, problem: Problem):
        op: Any = problem.op
        s = sets(problem)
        self.images, self.groups, self.size = problem["x"].shape[0], op.groups, s.size
        self.each = problem["x"].shape[1] // op.groups
        step = problem["x"].strides[1]
        self.channel = Loop(self.each, {r: problem[r].strides[1] for r in full_roles(problem)})
        self.inner = sorted(s.points, key=lambda one: -one.step("x"))[::-1]
        self.points = math.prod(loop.size for loop in self.inner)
        near = self.inner[0].step("x") if self.inner else 1 << 62
        self.turned = self.each > 1 and step < near


_view = functools.lru_cache(maxsize=256)(_View)


class GroupTriton(TritonEngine):
    """A block of threads for each group."""

    name = "norm.group_triton"
    operations = ("group_norm_fwd", "group_norm_bwd")

    def refusals(self, problem: Problem) -> list[str]:
        r = Refusals()
        r.require_tensors(problem.items, TYPES, elements=True)
        if not r:
            v = _view(problem)
            r.require(v.each <= CHANNELS, f"at most {CHANNELS} channels a group", v.each)
            r.require(len(v.inner) <= 3, "at most 3 loops over the points after merging", len(v.inner))
            r.require(v.points < INT32 - 65536, f"fewer than {INT32 - 65536} points", v.points)
            r.require(v.images * v.groups <= INT32, f"at most {INT32} groups", v.images * v.groups)
        return r

    def configs(self, problem: Problem) -> list[Config]:
        v = _view(problem)
        backward = problem.op.name.endswith("bwd")
        channels = triton.next_power_of_2(v.each)
        whole = channels * triton.next_power_of_2(v.points)
        found: list[Config] = []
        least = 2 if problem["x"].dtype == "f64" else 1
        if whole * least <= (8192 if backward else 16384):
            warps = max(1, min(16, whole * least // (1024 if not backward else 512)))
            found.append({"BLOCK_S": whole // channels, "num_warps": warps, "num_stages": 1})
        for elements, warps in ((4096, 8), (8192, 8), (4096, 4), (8192, 16)):
            block = max(1, min(elements // least // channels, triton.next_power_of_2(v.points)))
            config = {"BLOCK_S": block, "num_warps": warps, "num_stages": 1}
            if channels * block < whole and config not in found:
                found.append(config)
        return found[:4]

    def workspace_size(self, problem: Problem, config: Config) -> int:
        v = _view(problem)
        end = Parameters(problem).end
        if {"dscale", "dbias"} & set(problem.outputs):
            end += 2 * v.images * v.groups * v.each * (8 if problem["x"].dtype == "f64" else 4)
        return end

    def cost(self, problem: Problem, config: Config) -> float:
        v = _view(problem)
        programs = v.images * v.groups
        whole = config["BLOCK_S"] >= v.points
        busy = min(1.0, programs / problem.target.processors)
        moved = sum(problem[role].nbytes for role in full_roles(problem))
        if v.turned:  # pieces of lines: half a sector is read for nothing, or several times
            moved *= max(1.0, 64 / (v.each * problem["x"].itemsize))
        if not whole:  # the second reading, from the second-level cache
            moved *= 1.25
        launches = 1 + len({"dscale", "dbias"} & set(problem.outputs))
        return roofline(problem, flops=0.0, bytes=moved, memory_efficiency=0.8 * busy, launches=launches)

    def launches(self, problem: Problem, config: Config) -> list[Launch]:
        v, op, e = _view(problem), problem.op, problem.epilogue
        backward = op.name.endswith("bwd")
        real = "f64" if problem["x"].dtype == "f64" else "f32"
        dense = Parameters(problem)
        activation = ACTIVATIONS[e.activation]
        args: dict[str, Argument] = {
            "x": "x", "mean": "mean", "inverse": "inv_variance", **dense.where,
            "parameter": None if activation.parameter is None else Real(e.parameter, real),
            "GROUPS": v.groups, "EACH": v.each, "POINTS": v.points, "SIZE": v.size,
            **loop_arguments([loop.size for loop in v.inner]),
        }  # fmt: skip
        out = "dx" if backward else "y"
        for name, role in ({"x": "x", "y": out} | ({"dy": "dy"} if backward else {})).items():
            there = role in problem.tensors
            args[f"{name}_n_stride"] = problem[role].strides[0] if there else None
            args[f"{name}_g_stride"] = problem[role].strides[1] * v.each if there else None
            args[f"{name}_c_stride"] = problem[role].strides[1] if there else None
            for i in range(3):
                args[f"{name}_{i}_stride"] = v.inner[i].step(role) if there and i < len(v.inner) else None
        for name, role in (("m", "mean"), ("v", "inv_variance")):
            args[f"{name}_n_stride"], args[f"{name}_g_stride"] = problem[role].strides
        constexprs: dict[str, Any] = {
            "INNER": len(v.inner), "ACT": activation.code, "TURNED": v.turned,
            "WIDE": max(t.span for _, t in problem.items) + 65536 > INT32,
            "WHOLE": config["BLOCK_S"] >= v.points, "BLOCK_C": triton.next_power_of_2(v.each),
            "BLOCK_S": config["BLOCK_S"], "STAGES": 2,
        }  # fmt: skip
        if not backward:
            args |= {"y": "y", "epsilon": Real(op.epsilon, real)}  # type: ignore[attr-defined]
            kernel = norm_group_fwd
        else:
            wants = {"dscale", "dbias"} & set(problem.outputs)
            plane = v.images * v.groups * v.each
            args |= {"dy": "dy", "dx": "dx", "sums": Slice(dense.end, real) if wants else None, "PLANE": plane}
            kernel = norm_group_bwd
        grid = (v.images * v.groups,)
        found = [*dense.launches, Launch(kernel, grid, args, constexprs, config["num_warps"], 1)]
        if backward:
            size = v.images * v.groups * v.each * (8 if real == "f64" else 4)
            for role, offset in (("dscale", dense.end), ("dbias", dense.end + size)):
                if role in problem.outputs:
                    found.append(summing(problem, role, Slice(offset, real), v.images))
        return found
