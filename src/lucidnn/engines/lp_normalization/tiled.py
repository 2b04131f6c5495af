"""``lp_norm.tiled``: normalization by an L_p norm on a GPU over any axes and layout, both directions, in Triton.

Method: tiles of sets by elements of a set (``_triton/row_tiles.py``), lanes along whichever lie side by side in memory.
A set that fits into registers is read once; a longer one twice, the second time from the cache and backwards, since
what was read last is nearest. Sums lane by lane, then over the lanes, in float32, or float64 for float64.

Cost: the memory traffic. Limits: few sets of great length keep few processors busy; the loops after merging are at
most four kept and four reduced.
"""

import math

import triton
import triton.language as tl

from ...core.engine import Config, Refusals
from ...core.heuristics import roofline
from ...core.problem import Problem
from .._triton.epilogue import convert
from .._triton.launch import Launch, Real, TritonEngine
from .._triton.row_tiles import (
    REDUCED,
    arguments,
    blocks,
    constants,
    fits,
    place_inner,
    place_outer,
    tile_configs,
    waste,
)
from ._loops import set_loops

TYPES = ("f64", "f32", "f16", "bf16")
WHOLE = 16384  # elements of a tile that registers hold
GENERAL, ONE, TWO, INF = range(4)
KINDS = {1.0: ONE, 2.0: TWO, math.inf: INF}  # exponents that need no logarithm


@triton.jit
def _term(v, p, KIND: tl.constexpr):
    """What is summed or, for p = inf, compared."""
    if KIND == 2:
        r = v * v
    elif KIND == 0:
        r = tl.exp(p * tl.log(tl.abs(v)))
    else:
        r = tl.abs(v)
    return r


@triton.jit
def _taken(total, terms, KIND: tl.constexpr):
    """The sum or the larger, lane by lane; NaN is the largest."""
    if KIND == 3:
        r = tl.where((terms > total) | (terms != terms), terms, total)
    else:
        r = total + terms
    return r


@triton.jit
def _norm(total, p, KIND: tl.constexpr):
    """The norms of a tile of sums or maxima: one column."""
    r = tl.sum(total, 1)[:, None]
    if KIND == 3:
        r = tl.where(r != r, r, tl.max(total, 1)[:, None])
    if KIND == 2:
        r = tl.sqrt(r)
    if KIND == 0:
        r = tl.exp(tl.log(r) / p)
    return r


@triton.jit
def _least(norm, eps):
    """What is divided by: NaN stays."""
    return tl.where(norm < eps, eps, norm)


@triton.jit
def lp_normalize_fwd(
    x, scale, y, norm, M, K, O0, O1, K0, K1, K2, p, eps,
    x_m_stride, x_o0_stride, x_o1_stride, x_o2_stride, x_k0_stride, x_k1_stride, x_k2_stride, x_k3_stride,
    y_m_stride, y_o0_stride, y_o1_stride, y_o2_stride, y_k0_stride, y_k1_stride, y_k2_stride, y_k3_stride,
    n_m_stride, n_o0_stride, n_o1_stride, n_o2_stride,
    s_m_stride, s_o0_stride, s_o1_stride, s_o2_stride,
    KIND: tl.constexpr, FLOAT64: tl.constexpr, ONE: tl.constexpr,
    OUTERS: tl.constexpr, REDUCES: tl.constexpr, WIDE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    FLOAT: tl.constexpr = tl.float64 if FLOAT64 else tl.float32
    blocks_m = tl.cdiv(M, BLOCK_M)
    o = tl.program_id(0) // blocks_m
    m = tl.program_id(0) % blocks_m * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    if WIDE:
        o = o.to(tl.int64)
        m = m.to(tl.int64)
        k = k.to(tl.int64)
    x += place_outer(o, O0, O1, x_o0_stride, x_o1_stride, x_o2_stride, OUTERS)
    y += place_outer(o, O0, O1, y_o0_stride, y_o1_stride, y_o2_stride, OUTERS)
    norm += place_outer(o, O0, O1, n_o0_stride, n_o1_stride, n_o2_stride, OUTERS)
    m = m[:, None]
    ok_m = m < M
    x_row = m * x_m_stride
    y_row = m * y_m_stride
    factor = tl.full((BLOCK_M, 1), 1.0, FLOAT)
    if scale is not None:
        scale += place_outer(o, O0, O1, s_o0_stride, s_o1_stride, s_o2_stride, OUTERS)
        factor = convert(tl.load(scale + m * s_m_stride, mask=ok_m, other=0.0), FLOAT)
    if ONE:
        ok = ok_m & (k < K)[None, :]
        at = place_inner(k, K0, K1, K2, x_k0_stride, x_k1_stride, x_k2_stride, x_k3_stride, REDUCES)[None, :]
        to = place_inner(k, K0, K1, K2, y_k0_stride, y_k1_stride, y_k2_stride, y_k3_stride, REDUCES)[None, :]
        v = convert(tl.load(x + (x_row + at), mask=ok, other=0.0), FLOAT)
        n = _norm(_term(v, p, KIND), p, KIND)
        r = v * (factor / _least(n, eps))
        tl.store(y + (y_row + to), convert(r, y.dtype.element_ty), mask=ok)
        tl.store(norm + m * n_m_stride, n, mask=ok_m)
    else:
        steps = tl.cdiv(K, BLOCK_K)
        total = tl.zeros((BLOCK_M, BLOCK_K), FLOAT)
        for step in range(steps):
            e = step * BLOCK_K + k
            ok = ok_m & (e < K)[None, :]
            at = place_inner(e, K0, K1, K2, x_k0_stride, x_k1_stride, x_k2_stride, x_k3_stride, REDUCES)[None, :]
            v = convert(tl.load(x + (x_row + at), mask=ok, other=0.0), FLOAT)
            total = _taken(total, _term(v, p, KIND), KIND)
        n = _norm(total, p, KIND)
        factor = factor / _least(n, eps)
        tl.store(norm + m * n_m_stride, n, mask=ok_m)
        for back in range(steps):
            e = (steps - 1 - back) * BLOCK_K + k
            ok = ok_m & (e < K)[None, :]
            at = place_inner(e, K0, K1, K2, x_k0_stride, x_k1_stride, x_k2_stride, x_k3_stride, REDUCES)[None, :]
            to = place_inner(e, K0, K1, K2, y_k0_stride, y_k1_stride, y_k2_stride, y_k3_stride, REDUCES)[None, :]
            v = convert(tl.load(x + (x_row + at), mask=ok, other=0.0), FLOAT)
            tl.store(y + (y_row + to), convert(v * factor, y.dtype.element_ty), mask=ok)


@triton.jit
def _slope(v, norm, inverse, each, less, KIND: tl.constexpr):
    """The derivative of a norm by its elements; `inverse` is 1 / norm, `each` 1 / those largest, `less` p - 1."""
    if KIND == 2:
        r = v * inverse
    else:
        r = tl.where(v > 0, 1.0, tl.where(v < 0, -1.0, 0.0)).to(v.dtype)
        if KIND == 3:
            r = tl.where(tl.abs(v) == norm, r * each, 0.0)
        if KIND == 0:
            r = tl.where(v == 0, 0.0, r * tl.exp(less * tl.log(tl.abs(v) * inverse)))
    return r


@triton.jit
def _ones(v, norm, ok):
    """1 for those that are largest."""
    return tl.where(ok & (tl.abs(v) == norm), 1.0, 0.0).to(v.dtype)


@triton.jit
def _shares(t, g, norm, eps):
    """Gives t / m, g / m, what slopes are multiplied with, 1 / norm; no slope where the norm is 0 or was clamped."""
    m = _least(norm, eps)
    is_dead = (norm < eps) | (norm == 0)
    share = t / m
    own = g / m
    through = tl.where(is_dead, 0.0, share * own)
    return share, own, through, 1.0 / tl.where(is_dead, 1.0, norm)


@triton.jit
def lp_normalize_bwd(
    dy, x, norm, scale, dx, dscale, M, K, O0, O1, K0, K1, K2, less, eps,
    x_m_stride, x_o0_stride, x_o1_stride, x_o2_stride, x_k0_stride, x_k1_stride, x_k2_stride, x_k3_stride,
    g_m_stride, g_o0_stride, g_o1_stride, g_o2_stride, g_k0_stride, g_k1_stride, g_k2_stride, g_k3_stride,
    y_m_stride, y_o0_stride, y_o1_stride, y_o2_stride, y_k0_stride, y_k1_stride, y_k2_stride, y_k3_stride,
    n_m_stride, n_o0_stride, n_o1_stride, n_o2_stride,
    s_m_stride, s_o0_stride, s_o1_stride, s_o2_stride,
    d_m_stride, d_o0_stride, d_o1_stride, d_o2_stride,
    KIND: tl.constexpr, FLOAT64: tl.constexpr, ONE: tl.constexpr,
    OUTERS: tl.constexpr, REDUCES: tl.constexpr, WIDE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    FLOAT: tl.constexpr = tl.float64 if FLOAT64 else tl.float32
    blocks_m = tl.cdiv(M, BLOCK_M)
    o = tl.program_id(0) // blocks_m
    m = tl.program_id(0) % blocks_m * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    if WIDE:
        o = o.to(tl.int64)
        m = m.to(tl.int64)
        k = k.to(tl.int64)
    x += place_outer(o, O0, O1, x_o0_stride, x_o1_stride, x_o2_stride, OUTERS)
    dy += place_outer(o, O0, O1, g_o0_stride, g_o1_stride, g_o2_stride, OUTERS)
    norm += place_outer(o, O0, O1, n_o0_stride, n_o1_stride, n_o2_stride, OUTERS)
    m = m[:, None]
    ok_m = m < M
    x_row = m * x_m_stride
    g_row = m * g_m_stride
    y_row = m * 0
    if dx is not None:
        dx += place_outer(o, O0, O1, y_o0_stride, y_o1_stride, y_o2_stride, OUTERS)
        y_row = m * y_m_stride
    n = tl.load(norm + m * n_m_stride, mask=ok_m, other=1.0)
    s = tl.full((BLOCK_M, 1), 1.0, FLOAT)
    if scale is not None:
        scale += place_outer(o, O0, O1, s_o0_stride, s_o1_stride, s_o2_stride, OUTERS)
        s = convert(tl.load(scale + m * s_m_stride, mask=ok_m, other=0.0), FLOAT)
    if ONE:
        ok = ok_m & (k < K)[None, :]
        at = place_inner(k, K0, K1, K2, x_k0_stride, x_k1_stride, x_k2_stride, x_k3_stride, REDUCES)[None, :]
        at_g = place_inner(k, K0, K1, K2, g_k0_stride, g_k1_stride, g_k2_stride, g_k3_stride, REDUCES)[None, :]
        v = convert(tl.load(x + (x_row + at), mask=ok, other=0.0), FLOAT)
        g = convert(tl.load(dy + (g_row + at_g), mask=ok, other=0.0), FLOAT)
        each = n
        if KIND == 3:
            each = 1.0 / tl.sum(_ones(v, n, ok), 1)[:, None]
        share, own, through, inverse = _shares(tl.sum(g * v, 1)[:, None], s, n, eps)
        if dscale is not None:
            dscale += place_outer(o, O0, O1, d_o0_stride, d_o1_stride, d_o2_stride, OUTERS)
            tl.store(dscale + m * d_m_stride, convert(share, dscale.dtype.element_ty), mask=ok_m)
        if dx is not None:
            to = place_inner(k, K0, K1, K2, y_k0_stride, y_k1_stride, y_k2_stride, y_k3_stride, REDUCES)[None, :]
            r = own * g - through * _slope(v, n, inverse, each, less, KIND)
            tl.store(dx + (y_row + to), convert(r, dx.dtype.element_ty), mask=ok)
    else:
        steps = tl.cdiv(K, BLOCK_K)
        total = tl.zeros((BLOCK_M, BLOCK_K), FLOAT)
        count = tl.zeros((BLOCK_M, BLOCK_K), FLOAT)
        for step in range(steps):
            e = step * BLOCK_K + k
            ok = ok_m & (e < K)[None, :]
            at = place_inner(e, K0, K1, K2, x_k0_stride, x_k1_stride, x_k2_stride, x_k3_stride, REDUCES)[None, :]
            at_g = place_inner(e, K0, K1, K2, g_k0_stride, g_k1_stride, g_k2_stride, g_k3_stride, REDUCES)[None, :]
            v = convert(tl.load(x + (x_row + at), mask=ok, other=0.0), FLOAT)
            g = convert(tl.load(dy + (g_row + at_g), mask=ok, other=0.0), FLOAT)
            total += g * v
            if KIND == 3:
                count += _ones(v, n, ok)
        each = n
        if KIND == 3:
            each = 1.0 / tl.sum(count, 1)[:, None]
        share, own, through, inverse = _shares(tl.sum(total, 1)[:, None], s, n, eps)
        if dscale is not None:
            dscale += place_outer(o, O0, O1, d_o0_stride, d_o1_stride, d_o2_stride, OUTERS)
            tl.store(dscale + m * d_m_stride, convert(share, dscale.dtype.element_ty), mask=ok_m)
        if dx is not None:
            for back in range(steps):
                e = (steps - 1 - back) * BLOCK_K + k
                ok = ok_m & (e < K)[None, :]
                at = place_inner(e, K0, K1, K2, x_k0_stride, x_k1_stride, x_k2_stride, x_k3_stride, REDUCES)[None, :]
                at_g = place_inner(e, K0, K1, K2, g_k0_stride, g_k1_stride, g_k2_stride, g_k3_stride, REDUCES)[None, :]
                to = place_inner(e, K0, K1, K2, y_k0_stride, y_k1_stride, y_k2_stride, y_k3_stride, REDUCES)[None, :]
                v = convert(tl.load(x + (x_row + at), mask=ok, other=0.0), FLOAT)
                g = convert(tl.load(dy + (g_row + at_g), mask=ok, other=0.0), FLOAT)
                r = own * g - through * _slope(v, n, inverse, each, less, KIND)
                tl.store(dx + (y_row + to), convert(r, dx.dtype.element_ty), mask=ok)


class Tiled(TritonEngine):
    name = "lp_norm.tiled"
    operations = ("lp_normalize_fwd", "lp_normalize_bwd")

    def refusals(self, problem: Problem) -> list[str]:
        r = Refusals()
        r.require_tensors(problem.items, TYPES)
        r.require(problem["x"].numel > 0 or problem["norm"].numel == 0, "elements in a set, or no sets", "empty sets")
        if not r and problem["x"].numel > 0:
            for fulfilled, requirement, found in fits(set_loops(problem)):
                r.require(fulfilled, requirement, found)
        return r

    def configs(self, problem: Problem) -> list[Config]:
        if problem["x"].numel == 0:
            return [{"BLOCK_M": 1, "BLOCK_K": 1, "num_warps": 1, "num_stages": 1}]
        tensors = 2 if "dy" in problem.tensors else 1
        return tile_configs(set_loops(problem), (4096 // tensors, 8192 // tensors, 2048 // tensors), WHOLE // tensors)

    def cost(self, problem: Problem, config: Config) -> float:
        if problem["x"].numel == 0:
            return roofline(problem, flops=0.0)
        loops = set_loops(problem)
        again = config["BLOCK_K"] < loops.length  # the second reading comes from the second-level cache
        busy = min(1.0, blocks(loops, config) / problem.target.processors)
        efficiency = 0.85 * busy / waste(loops, config) ** 0.5 / (1.3 if again else 1.0)
        return roofline(problem, flops=0.0, memory_efficiency=efficiency)

    def launches(self, problem: Problem, config: Config) -> list[Launch]:
        if problem["x"].numel == 0:
            return []
        loops, op = set_loops(problem), problem.op
        p, eps = op.p, op.eps  # type: ignore[attr-defined]
        forward = "y" in problem.tensors
        real = problem["norm"].dtype
        prefixes = {"x": "x", "y": "out", "n": "norm", "s": "scale"} | ({} if forward else {"g": "dy", "d": "dscale"})
        args = arguments(loops, prefixes)
        for prefix in ("n", "s", "d"):  # one element for a set
            for i in range(REDUCED):
                args.pop(f"{prefix}_k{i}_stride", None)
        args |= {role: role for role in ("x", "norm", "scale", *(("y",) if forward else ("dy", "dx", "dscale")))}
        args |= {"eps": Real(eps, real)} | ({"p": Real(p, real)} if forward else {"less": Real(p - 1, real)})
        constexprs = constants(loops, config, [t.span for _, t in problem.items]) | {
            "KIND": KINDS.get(p, GENERAL), "FLOAT64": real == "f64", "ONE": config["BLOCK_K"] >= loops.length,
        }  # fmt: skip
        kernel = lp_normalize_fwd if forward else lp_normalize_bwd
        return [Launch(kernel, (blocks(loops, config),), args, constexprs, config["num_warps"], config["num_stages"])]
