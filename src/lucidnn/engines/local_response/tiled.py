"""``lrn.tiled``: local response and divisive normalization on a GPU, both directions, any layout, in Triton.

Method: a program has neighbours in the memory of the result, and adds up the squares of each one's window in registers,
an element of the window at a time; all but the first reading of x come from the caches. Backward is two kernels: the
first writes the terms of the backward windows' sums to the workspace, the second adds them up. Arithmetic in float32,
or float64 where a tensor has that type.

Cost: the memory traffic forward; backward that of x and dy twice and of the terms; a reading from the first-level cache
for every element of a window. Limits: alpha and k at least 0; five loops after merging, windows along three axes.
"""

import math
from typing import Any

import triton
import triton.language as tl

from ...core.engine import Config, Refusals
from ...core.heuristics import roofline
from ...core.problem import Problem
from .._row_loops import row_loops
from .._triton.epilogue import convert
from .._triton.index import INT32
from .._triton.launch import Argument, Launch, Real, Slice, TritonEngine

TYPES = ("f64", "f32", "f16", "bf16")
LOOPS, WINDOWS = 5, 3
KINDS = {1.0: 1, 0.5: 2, 0.75: 3}  # exponents that need no logarithm


@triton.jit
def _inverse_power(d, beta, KIND: tl.constexpr):
    if KIND == 1:
        r = 1.0 / d
    elif KIND == 2:
        r = 1.0 / tl.sqrt(d)
    elif KIND == 3:
        r = 1.0 / tl.sqrt(d)
        r = r * tl.sqrt(r)
    else:
        r = tl.exp(tl.log(d) * -beta)
    return r


@triton.jit
def _indices(e, S0, S1, S2, S3):
    """The index of element number e in each loop, the innermost first."""
    r1 = e // S0
    r2 = r1 // S1
    r3 = r2 // S2
    r4 = r3 // S3
    return e - r1 * S0, r1 - r2 * S1, r2 - r3 * S2, r3 - r4 * S3, r4


@triton.jit
def _place(i0, i1, i2, i3, i4, s0, s1, s2, s3, s4):
    return i0 * s0 + i1 * s1 + i2 * s2 + i3 * s3 + i4 * s4


@triton.jit
def _window(i0, i1, i2, i3, i4, WHICH: tl.constexpr):
    """The index in the loop that a window goes along; 0 where there is none."""
    if WHICH == 0:
        i = i0
    elif WHICH == 1:
        i = i1
    elif WHICH == 2:
        i = i2
    elif WHICH == 3:
        i = i3
    elif WHICH == 4:
        i = i4
    else:
        i = i0 * 0
    return i


@triton.jit
def _value(x, means, at, at_m, ok, FLOAT: tl.constexpr):
    """Elements of x less the means; 0 where there is no element."""
    u = convert(tl.load(x + at, mask=ok, other=0.0), FLOAT)
    if means is not None:
        u = u - convert(tl.load(means + at_m, mask=ok, other=0.0), FLOAT)
    return u


@triton.jit
def _divisor(
    x, means, at, at_m, ok, a, b, c, NA, NB, NC, xa, xb, xc, ma, mb, mc, k, factor,
    TA: tl.constexpr, TB: tl.constexpr, TC: tl.constexpr, FIRST: tl.constexpr, FLOAT: tl.constexpr,
):  # fmt: skip
    """What is divided by: k and the share of the squares in each element's window."""
    total = tl.zeros(a.shape, FLOAT)
    for tap in range(TA * TB * TC):
        oa = (tap % TA) * (TA > 1) - FIRST * (TA > 1)
        ob = (tap // TA % TB) - FIRST * (TB > 1)
        oc = (tap // (TA * TB)) - FIRST * (TC > 1)
        inside = ok & (a + oa >= 0) & (a + oa < NA) & (b + ob >= 0) & (b + ob < NB) & (c + oc >= 0) & (c + oc < NC)
        there_m = at_m
        if means is not None:
            there_m = at_m + (oa * ma + ob * mb + oc * mc)
        u = _value(x, means, at + (oa * xa + ob * xb + oc * xc), there_m, inside, FLOAT)
        total += u * u
    return k + factor * total


@triton.jit
def local_response(
    x, means, dy, terms, y, N, S0, S1, S2, S3, NA, NB, NC, k, factor, beta,
    x_0_stride, x_1_stride, x_2_stride, x_3_stride, x_4_stride, x_a_stride, x_b_stride, x_c_stride,
    m_0_stride, m_1_stride, m_2_stride, m_3_stride, m_4_stride, m_a_stride, m_b_stride, m_c_stride,
    g_0_stride, g_1_stride, g_2_stride, g_3_stride, g_4_stride,
    y_0_stride, y_1_stride, y_2_stride, y_3_stride, y_4_stride,
    e_a_stride, e_b_stride, e_c_stride,
    STEP: tl.constexpr, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr,
    TA: tl.constexpr, TB: tl.constexpr, TC: tl.constexpr, BEFORE: tl.constexpr, KIND: tl.constexpr,
    FLOAT64: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """STEP 0 is forward, 1 writes the terms of the backward sums, 2 adds them up."""
    FLOAT: tl.constexpr = tl.float64 if FLOAT64 else tl.float32
    start = tl.program_id(0)
    if WIDE:
        start = start.to(tl.int64)
    e = start * BLOCK + tl.arange(0, BLOCK)
    ok = e < N
    i0, i1, i2, i3, i4 = _indices(e, S0, S1, S2, S3)
    at = _place(i0, i1, i2, i3, i4, x_0_stride, x_1_stride, x_2_stride, x_3_stride, x_4_stride)
    at_m = at
    if means is not None:
        at_m = _place(i0, i1, i2, i3, i4, m_0_stride, m_1_stride, m_2_stride, m_3_stride, m_4_stride)
    a = _window(i0, i1, i2, i3, i4, A)
    b = _window(i0, i1, i2, i3, i4, B)
    c = _window(i0, i1, i2, i3, i4, C)
    d = _divisor(
        x, means, at, at_m, ok, a, b, c, NA, NB, NC, x_a_stride, x_b_stride, x_c_stride,
        m_a_stride, m_b_stride, m_c_stride, k, factor, TA, TB, TC, BEFORE, FLOAT,
    )  # fmt: skip
    u = _value(x, means, at, at_m, ok, FLOAT)
    power = _inverse_power(d, beta, KIND)
    if STEP == 0:
        to = _place(i0, i1, i2, i3, i4, y_0_stride, y_1_stride, y_2_stride, y_3_stride, y_4_stride)
        tl.store(y + to, convert(u * power, y.dtype.element_ty), mask=ok)
    else:
        at_g = _place(i0, i1, i2, i3, i4, g_0_stride, g_1_stride, g_2_stride, g_3_stride, g_4_stride)
        g = convert(tl.load(dy + at_g, mask=ok, other=0.0), FLOAT)
        if STEP == 1:
            tl.store(terms + e, g * u * (power / d), mask=ok)
        else:
            total = tl.zeros((BLOCK,), FLOAT)
            for tap in range(TA * TB * TC):
                oa = BEFORE * (TA > 1) - (tap % TA)
                ob = BEFORE * (TB > 1) - (tap // TA % TB)
                oc = BEFORE * (TC > 1) - (tap // (TA * TB))
                inside = ok & (a + oa >= 0) & (a + oa < NA) & (b + ob >= 0) & (b + ob < NB)
                inside = inside & (c + oc >= 0) & (c + oc < NC)
                there = e + (oa * e_a_stride + ob * e_b_stride + oc * e_c_stride)
                total += tl.load(terms + there, mask=inside, other=0.0)
            r = g * power - (2.0 * factor * beta) * u * total
            to = _place(i0, i1, i2, i3, i4, y_0_stride, y_1_stride, y_2_stride, y_3_stride, y_4_stride)
            tl.store(y + to, convert(r, y.dtype.element_ty), mask=ok)


def _nest(problem: Problem) -> list[tuple[int, dict[str, int], bool]]:
    """Loops, the innermost in the result's memory first: size, steps, whether windows go along it."""
    out = problem.outputs[0]
    strides = {out: problem[out].strides} | {role: t.strides for role, t in problem.items}
    shape, axes = problem["x"].shape, problem.op.window_axes(problem["x"].ndim)  # type: ignore[attr-defined]
    loops = row_loops(shape, strides, axes)
    found = [(n, {r: s[i] for r, s in loops.kept_strides.items()}, False) for i, n in enumerate(loops.kept) if n > 1]
    found += [(shape[axis], {r: s[axis] for r, s in strides.items()}, True) for axis in axes if shape[axis] > 1]
    return sorted(found, key=lambda loop: loop[1][out])


class Tiled(TritonEngine):
    name = "lrn.tiled"
    operations = ("lrn_fwd", "lrn_bwd", "divisive_norm_fwd", "divisive_norm_bwd")

    def refusals(self, problem: Problem) -> list[str]:
        r, op = Refusals(), problem.op
        r.require_tensors(problem.items, TYPES)
        r.require(op.lrn_alpha >= 0, "lrn_alpha >= 0", op.lrn_alpha)  # type: ignore[attr-defined]
        r.require(op.lrn_k >= 0, "lrn_k >= 0", op.lrn_k)  # type: ignore[attr-defined]
        if not r and not problem.is_empty:
            nest = _nest(problem)
            r.require(len(nest) <= LOOPS, f"at most {LOOPS} loops after merging", len(nest))
            windows = sum(window for _, _, window in nest)
            r.require(windows <= WINDOWS, f"windows along at most {WINDOWS} axes", windows)
        return r

    def configs(self, problem: Problem) -> list[Config]:
        sizes = ((1024, 4), (512, 4), (2048, 8), (256, 2))
        return [{"BLOCK": block, "num_warps": warps, "num_stages": 2} for block, warps in sizes]

    def workspace_size(self, problem: Problem, config: Config) -> int:
        return problem["x"].numel * (8 if problem["x"].dtype == "f64" else 4) if "dy" in problem.tensors else 0

    def cost(self, problem: Problem, config: Config) -> float:
        op: Any = problem.op
        window = op.size ** len(op.window_axes(problem["x"].ndim))
        terms = 2 * self.workspace_size(problem, config)
        kernels = 2 if terms else 1
        again = problem["x"].numel * window * kernels / 1.2e12  # readings from the first-level cache
        moved = kernels * problem.bytes + terms
        return max(roofline(problem, flops=0.0, bytes=moved, memory_efficiency=0.8, launches=kernels), again)

    def launches(self, problem: Problem, config: Config) -> list[Launch]:
        if problem.is_empty:
            return []
        op: Any = problem.op
        x, out = problem["x"], problem.outputs[0]
        nest = _nest(problem)
        float64 = x.dtype == "f64"
        real = "f64" if float64 else "f32"
        sizes = [n for n, _, _ in nest] + [1] * (LOOPS - len(nest))
        windows = [i for i, (_, _, window) in enumerate(nest) if window]
        args: dict[str, Argument] = {
            "x": "x", "means": "means", "dy": None, "terms": None, "y": out, "N": x.numel,
            "k": Real(op.lrn_k, real), "factor": Real(op.factor(x.ndim), real), "beta": Real(op.lrn_beta, real),
        }  # fmt: skip
        args |= {f"S{i}": sizes[i] for i in range(LOOPS - 1)}
        for prefix, role in {"x": "x", "m": "means", "g": "dy", "y": out}.items():
            for i in range(LOOPS):
                args[f"{prefix}_{i}_stride"] = nest[i][1].get(role, 0) if i < len(nest) else 0
        # Windows that reach over all of an axis need not reach farther.
        before, after = op.reach
        longest = max((sizes[i] for i in windows), default=1) - 1
        before, after = min(before, longest), min(after, longest)
        constexprs: dict[str, Any] = {"BEFORE": before, "KIND": KINDS.get(op.lrn_beta, 0), "FLOAT64": float64}
        for slot, name in enumerate("abc"):
            i = windows[slot] if slot < len(windows) else None
            args[f"N{name.upper()}"] = 1 if i is None else sizes[i]
            for prefix, role in (("x", "x"), ("m", "means")):
                args[f"{prefix}_{name}_stride"] = 0 if i is None else nest[i][1].get(role, 0)
            args[f"e_{name}_stride"] = 0 if i is None else math.prod(sizes[:i])
            constexprs[name.upper()] = -1 if i is None else i
            constexprs[f"T{name.upper()}"] = 1 if i is None else before + after + 1
        block = config["BLOCK"]
        reach = max([x.numel, *(t.span for _, t in problem.items)])
        constexprs |= {"WIDE": 2 * reach + block > INT32, "BLOCK": block}
        grid, knobs = (-(-x.numel // block),), (config["num_warps"], config["num_stages"])
        if "dy" not in problem.tensors:
            return [Launch(local_response, grid, args, {**constexprs, "STEP": 0}, *knobs)]
        args |= {"dy": "dy", "terms": Slice(0, real)}
        return [Launch(local_response, grid, args, {**constexprs, "STEP": step}, *knobs) for step in (1, 2)]
