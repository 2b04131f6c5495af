"""``softmax.tiled``: softmax and its logarithm on a GPU over any axes and layout, both directions, in Triton.

Method: tiles of rows by elements of a row (``_triton/row_tiles.py``), lanes along whichever lie side by side in memory.
A row that fits into registers is read once. A longer one is read twice, the second time from the cache: first every
lane keeps the largest value so far and the sum of exponentials relative to it (Milakov and Gimelshein, "Online
normalizer calculation for softmax", 2018, with one exponential an element), then these are merged and the result is
written. Backward is the same with the sum of y dy, or of dy for the logarithm. Arithmetic in float32, or float64
where a tensor has that type.

Cost: the memory traffic. Limits: few rows of great length keep few processors busy; the loops after merging are at
most four kept and four reduced.
"""

import triton
import triton.language as tl

from ...core.engine import Config, Refusals
from ...core.heuristics import roofline
from ...core.problem import Problem
from .._row_loops import RowLoops, row_loops
from .._triton.epilogue import convert
from .._triton.launch import Launch, TritonEngine
from .._triton.row_tiles import (
    alignment,
    arguments,
    blocks,
    constants,
    fits,
    place_inner,
    place_outer,
    tile_configs,
    visit,
    waste,
)

TYPES = ("f64", "f32", "f16", "bf16")
WHOLE = 16384  # elements of a tile that registers hold


@triton.jit
def _values(x, mask, at_x, at_mask, ok, FULL: tl.constexpr, FLOAT: tl.constexpr):
    """Elements of x, minus infinity where there is none or the mask is false; `FULL` where all are there."""
    if FULL:
        v = convert(tl.load(x + at_x), FLOAT)
    else:
        v = convert(tl.load(x + at_x, mask=ok, other=float("-inf")), FLOAT)
    if mask is not None:
        v = tl.where(tl.load(mask + at_mask, mask=ok, other=0), v, float("-inf"))
    return v


@triton.jit
def _result(v, most, total, LOG: tl.constexpr, EMPTY_ZERO: tl.constexpr):
    if LOG:
        r = (v - most) - tl.log(total)
        if EMPTY_ZERO:
            r = tl.where(total == 0.0, float("-inf"), r)
    else:
        r = tl.exp(v - most) * (1.0 / total)
        if EMPTY_ZERO:
            r = tl.where(total == 0.0, 0.0, r)
    return r


@triton.jit
def softmax_fwd(
    x, mask, y, M, K, O0, O1, K0, K1, K2,
    x_m_stride, x_o0_stride, x_o1_stride, x_o2_stride, x_k0_stride, x_k1_stride, x_k2_stride, x_k3_stride,
    q_m_stride, q_o0_stride, q_o1_stride, q_o2_stride, q_k0_stride, q_k1_stride, q_k2_stride, q_k3_stride,
    y_m_stride, y_o0_stride, y_o1_stride, y_o2_stride, y_k0_stride, y_k1_stride, y_k2_stride, y_k3_stride,
    LOG: tl.constexpr, EMPTY_ZERO: tl.constexpr, FLOAT64: tl.constexpr, ONE: tl.constexpr, ALIGN: tl.constexpr,
    OUTERS: tl.constexpr, REDUCES: tl.constexpr, WIDE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    FLOAT: tl.constexpr = tl.float64 if FLOAT64 else tl.float32
    LOWEST: tl.constexpr = -1.7976931348623157e308 if FLOAT64 else -3.4028234663852886e38
    blocks_m = tl.cdiv(M, BLOCK_M)
    o = tl.program_id(0) // blocks_m
    m = tl.program_id(0) % blocks_m * BLOCK_M + tl.arange(0, BLOCK_M)
    if WIDE:
        o = o.to(tl.int64)
        m = m.to(tl.int64)
    x_at = place_outer(o, O0, O1, x_o0_stride, x_o1_stride, x_o2_stride, OUTERS)
    y_at = place_outer(o, O0, O1, y_o0_stride, y_o1_stride, y_o2_stride, OUTERS)
    q_at = o * 0
    q_row = (m * 0)[:, None]
    if mask is not None:
        q_at = place_outer(o, O0, O1, q_o0_stride, q_o1_stride, q_o2_stride, OUTERS)
        q_row = (m * q_m_stride)[:, None]
    ok_m = (m < M)[:, None]
    k = tl.arange(0, BLOCK_K)
    if WIDE:
        k = k.to(tl.int64)
    q = (k * 0)[None, :]
    if ONE:
        ok = ok_m & (k < K)[None, :]
        at = place_inner(k, K0, K1, K2, x_k0_stride, x_k1_stride, x_k2_stride, x_k3_stride, REDUCES)[None, :]
        if mask is not None:
            q = place_inner(k, K0, K1, K2, q_k0_stride, q_k1_stride, q_k2_stride, q_k3_stride, REDUCES)[None, :]
        v = _values(x + x_at, mask, (m * x_m_stride)[:, None] + at, q_at + q_row + q, ok, False, FLOAT)
        most = tl.maximum(tl.max(v, 1), LOWEST)[:, None]
        total = tl.sum(tl.exp(v - most), 1)[:, None]
        r = _result(v, most, total, LOG, EMPTY_ZERO)
        at = place_inner(k, K0, K1, K2, y_k0_stride, y_k1_stride, y_k2_stride, y_k3_stride, REDUCES)[None, :]
        tl.store(y + y_at + ((m * y_m_stride)[:, None] + at), convert(r, y.dtype.element_ty), mask=ok)
    else:
        x_row = (m * x_m_stride)[:, None]
        y_row = (m * y_m_stride)[:, None]
        shift = 0
        if ALIGN > 1:  # one row: begin at an aligned place, `shift` elements early
            start = x_at + tl.program_id(0) % blocks_m * x_m_stride
            shift = (start % ALIGN).to(tl.int32)
            x_at = tl.multiple_of(start - shift, ALIGN)
            y_at = x_at
            x_row = x_row * 0
            y_row = y_row * 0
        steps = tl.cdiv(K + shift, BLOCK_K)
        most = tl.full((BLOCK_M, BLOCK_K), LOWEST, FLOAT)
        total = tl.zeros((BLOCK_M, BLOCK_K), FLOAT)
        for step in range(steps):
            e = step * BLOCK_K + k
            j = e - shift
            ok = ok_m & ((j >= 0) & (j < K))[None, :]
            at = place_inner(e, K0, K1, K2, x_k0_stride, x_k1_stride, x_k2_stride, x_k3_stride, REDUCES)[None, :]
            if mask is not None:
                q = place_inner(j, K0, K1, K2, q_k0_stride, q_k1_stride, q_k2_stride, q_k3_stride, REDUCES)[None, :]
            if ALIGN > 1:
                if (step > 0) & (step + 1 < steps):
                    v = _values(x + x_at, mask, x_row + at, q_at + q_row + q, ok, True, FLOAT)
                else:
                    v = _values(x + x_at, mask, x_row + at, q_at + q_row + q, ok, False, FLOAT)
            else:
                v = _values(x + x_at, mask, x_row + at, q_at + q_row + q, ok, False, FLOAT)
            most, total = visit(most, total, v)
        largest = tl.max(most, 1)[:, None]
        total_row = tl.sum(total * tl.exp(most - largest), 1)[:, None]
        for back in range(steps):
            last = steps - 1 - back  # what was read last is nearest
            e = last * BLOCK_K + k
            j = e - shift
            ok = ok_m & ((j >= 0) & (j < K))[None, :]
            at = place_inner(e, K0, K1, K2, x_k0_stride, x_k1_stride, x_k2_stride, x_k3_stride, REDUCES)[None, :]
            if mask is not None:
                q = place_inner(j, K0, K1, K2, q_k0_stride, q_k1_stride, q_k2_stride, q_k3_stride, REDUCES)[None, :]
            to = place_inner(e, K0, K1, K2, y_k0_stride, y_k1_stride, y_k2_stride, y_k3_stride, REDUCES)[None, :]
            if ALIGN > 1:
                if (last > 0) & (back > 0):
                    v = _values(x + x_at, mask, x_row + at, q_at + q_row + q, ok, True, FLOAT)
                    r = _result(v, largest, total_row, LOG, EMPTY_ZERO)
                    tl.store(y + y_at + (y_row + to), convert(r, y.dtype.element_ty))
                else:
                    v = _values(x + x_at, mask, x_row + at, q_at + q_row + q, ok, False, FLOAT)
                    r = _result(v, largest, total_row, LOG, EMPTY_ZERO)
                    tl.store(y + y_at + (y_row + to), convert(r, y.dtype.element_ty), mask=ok)
            else:
                v = _values(x + x_at, mask, x_row + at, q_at + q_row + q, ok, False, FLOAT)
                r = _result(v, largest, total_row, LOG, EMPTY_ZERO)
                tl.store(y + y_at + (y_row + to), convert(r, y.dtype.element_ty), mask=ok)


@triton.jit
def _product(y, dy, at_y, at_dy, ok, LOG: tl.constexpr, FLOAT: tl.constexpr):
    """Both tensors' elements, and what is summed."""
    g = convert(tl.load(dy + at_dy, mask=ok, other=0.0), FLOAT)
    v = convert(tl.load(y + at_y, mask=ok, other=0.0), FLOAT)
    return v, g, g if LOG else v * g


@triton.jit
def _gradient(v, g, total, mask, at_mask, ok, LOG: tl.constexpr, EMPTY_ZERO: tl.constexpr):
    if LOG:
        r = g - tl.exp(v) * total
        if EMPTY_ZERO:
            r = tl.where(v == float("-inf"), 0.0, r)
    else:
        r = v * (g - total)
    if mask is not None:
        r = tl.where(tl.load(mask + at_mask, mask=ok, other=0), r, 0.0)
    return r


@triton.jit
def softmax_bwd(
    y, dy, mask, dx, M, K, O0, O1, K0, K1, K2,
    x_m_stride, x_o0_stride, x_o1_stride, x_o2_stride, x_k0_stride, x_k1_stride, x_k2_stride, x_k3_stride,
    g_m_stride, g_o0_stride, g_o1_stride, g_o2_stride, g_k0_stride, g_k1_stride, g_k2_stride, g_k3_stride,
    q_m_stride, q_o0_stride, q_o1_stride, q_o2_stride, q_k0_stride, q_k1_stride, q_k2_stride, q_k3_stride,
    y_m_stride, y_o0_stride, y_o1_stride, y_o2_stride, y_k0_stride, y_k1_stride, y_k2_stride, y_k3_stride,
    LOG: tl.constexpr, EMPTY_ZERO: tl.constexpr, FLOAT64: tl.constexpr, ONE: tl.constexpr,
    OUTERS: tl.constexpr, REDUCES: tl.constexpr, WIDE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    FLOAT: tl.constexpr = tl.float64 if FLOAT64 else tl.float32
    blocks_m = tl.cdiv(M, BLOCK_M)
    o = tl.program_id(0) // blocks_m
    m = tl.program_id(0) % blocks_m * BLOCK_M + tl.arange(0, BLOCK_M)
    if WIDE:
        o = o.to(tl.int64)
        m = m.to(tl.int64)
    y += place_outer(o, O0, O1, y_o0_stride, y_o1_stride, y_o2_stride, OUTERS)
    dy += place_outer(o, O0, O1, g_o0_stride, g_o1_stride, g_o2_stride, OUTERS)
    dx += place_outer(o, O0, O1, x_o0_stride, x_o1_stride, x_o2_stride, OUTERS)
    q_row = (m * 0)[:, None]
    if mask is not None:
        q_row = (place_outer(o, O0, O1, q_o0_stride, q_o1_stride, q_o2_stride, OUTERS) + m * q_m_stride)[:, None]
    y_row = (m * y_m_stride)[:, None]
    g_row = (m * g_m_stride)[:, None]
    x_row = (m * x_m_stride)[:, None]
    ok_m = (m < M)[:, None]
    k = tl.arange(0, BLOCK_K)
    if WIDE:
        k = k.to(tl.int64)
    q = (k * 0)[None, :]
    if ONE:
        ok = ok_m & (k < K)[None, :]
        at = place_inner(k, K0, K1, K2, y_k0_stride, y_k1_stride, y_k2_stride, y_k3_stride, REDUCES)[None, :]
        at_g = place_inner(k, K0, K1, K2, g_k0_stride, g_k1_stride, g_k2_stride, g_k3_stride, REDUCES)[None, :]
        to = place_inner(k, K0, K1, K2, x_k0_stride, x_k1_stride, x_k2_stride, x_k3_stride, REDUCES)[None, :]
        if mask is not None:
            q = place_inner(k, K0, K1, K2, q_k0_stride, q_k1_stride, q_k2_stride, q_k3_stride, REDUCES)[None, :]
        v, g, part = _product(y, dy, y_row + at, g_row + at_g, ok, LOG, FLOAT)
        r = _gradient(v, g, tl.sum(part, 1)[:, None], mask, q_row + q, ok, LOG, EMPTY_ZERO)
        tl.store(dx + (x_row + to), convert(r, dx.dtype.element_ty), mask=ok)
    else:
        steps = tl.cdiv(K, BLOCK_K)
        total = tl.zeros((BLOCK_M, BLOCK_K), FLOAT)
        for step in range(steps):
            e = step * BLOCK_K + k
            ok = ok_m & (e < K)[None, :]
            at = place_inner(e, K0, K1, K2, y_k0_stride, y_k1_stride, y_k2_stride, y_k3_stride, REDUCES)[None, :]
            at_g = place_inner(e, K0, K1, K2, g_k0_stride, g_k1_stride, g_k2_stride, g_k3_stride, REDUCES)[None, :]
            v, g, part = _product(y, dy, y_row + at, g_row + at_g, ok, LOG, FLOAT)
            total += part
        total_row = tl.sum(total, 1)[:, None]
        for back in range(steps):
            e = (steps - 1 - back) * BLOCK_K + k  # what was read last is nearest
            ok = ok_m & (e < K)[None, :]
            at = place_inner(e, K0, K1, K2, y_k0_stride, y_k1_stride, y_k2_stride, y_k3_stride, REDUCES)[None, :]
            at_g = place_inner(e, K0, K1, K2, g_k0_stride, g_k1_stride, g_k2_stride, g_k3_stride, REDUCES)[None, :]
            to = place_inner(e, K0, K1, K2, x_k0_stride, x_k1_stride, x_k2_stride, x_k3_stride, REDUCES)[None, :]
            if mask is not None:
                q = place_inner(e, K0, K1, K2, q_k0_stride, q_k1_stride, q_k2_stride, q_k3_stride, REDUCES)[None, :]
            v, g, part = _product(y, dy, y_row + at, g_row + at_g, ok, LOG, FLOAT)
            r = _gradient(v, g, total_row, mask, q_row + q, ok, LOG, EMPTY_ZERO)
            tl.store(dx + (x_row + to), convert(r, dx.dtype.element_ty), mask=ok)


def _loops(problem: Problem) -> RowLoops:
    """The loops, by the memory of what is read, then of what is written."""
    strides = {role: t.strides for role, t in problem.items}
    return row_loops(problem.items[0][1].shape, strides, problem.op.axes)  # type: ignore[attr-defined]


class Tiled(TritonEngine):
    name = "softmax.tiled"
    operations = ("softmax_fwd", "softmax_bwd")

    def refusals(self, problem: Problem) -> list[str]:
        r = Refusals()
        for role, t in problem.items:
            if role != "mask":
                r.require(t.dtype in TYPES, f"{role} of type {', '.join(TYPES)}", t.dtype)
            r.require(t.numel > 0, f"elements in {role}", str(t))
        if not r:
            for fulfilled, requirement, found in fits(_loops(problem)):
                r.require(fulfilled, requirement, found)
        return r

    def configs(self, problem: Problem) -> list[Config]:
        tensors = 1 if problem.op.name == "softmax_fwd" else 2
        return tile_configs(_loops(problem), (4096 // tensors, 8192 // tensors, 2048 // tensors), WHOLE // tensors)

    def cost(self, problem: Problem, config: Config) -> float:
        loops = _loops(problem)
        again = config["BLOCK_K"] < loops.length  # the second reading comes from the second-level cache
        busy = min(1.0, blocks(loops, config) / problem.target.processors)
        efficiency = 0.85 * busy / waste(loops, config) ** 0.5 / (1.3 if again else 1.0)
        return roofline(problem, flops=0.0, memory_efficiency=efficiency)

    def launches(self, problem: Problem, config: Config) -> list[Launch]:
        loops, op = _loops(problem), problem.op
        forward = op.name == "softmax_fwd"
        roles = {"x": "x" if forward else "dx", "q": "mask", "y": "y"} | ({} if forward else {"g": "dy"})
        args = arguments(loops, roles) | {"mask": "mask", "y": "y"}
        args |= {"x": "x"} if forward else {"dy": "dy", "dx": "dx"}
        constexprs = constants(loops, config, [t.span for _, t in problem.items]) | {
            "LOG": op.log, "EMPTY_ZERO": op.empty_zero,  # type: ignore[attr-defined]
            "FLOAT64": any(t.dtype == "f64" for _, t in problem.items), "ONE": config["BLOCK_K"] >= loops.length,
        }  # fmt: skip
        if forward:
            x, y = problem["x"], problem["y"]
            same = x.itemsize == y.itemsize and x.alignment == y.alignment == 16 and "mask" not in problem.tensors
            constexprs["ALIGN"] = alignment(loops, config, x.itemsize, ["x", "y"], same)
        kernel = softmax_fwd if forward else softmax_bwd
        return [Launch(kernel, (blocks(loops, config),), args, constexprs, config["num_warps"], config["num_stages"])]
