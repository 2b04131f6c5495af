"""``pool.adaptive_max_scatter``: backward adaptive max pooling on a GPU, by writing zeros and then the few places that
windows name, in Triton.

Method: a program owns a run of points of some planes of dx. It writes zeros there, waits for all its threads, and then
looks at every window: one whose index lies in the run writes the sum over all windows that name the same place, which
are among its neighbours. Several windows of one place write the same number, summed in the same order, so it does not
matter who comes last; sums are in float32 (float64 for float64), and there are no atomics.

Cost: dx written once, dy and index read. Limits: an index that names a point of its own window; at most four windows
that hold one element along an axis; planes below 2^31 points.
"""

import math

import triton
import triton.language as tl

from ...core.engine import Config, Refusals
from ...core.heuristics import roofline
from ...core.problem import Problem
from .._triton.index import INT32, reciprocal, split
from .._triton.launch import Argument, Launch, TritonEngine
from ._axes import Windows, lanes_are_columns

TYPES = ("f64", "f32", "f16", "bf16")
MOST = 4  # windows of one element along an axis


@triton.jit
def adaptive_max_scatter(
    dy, index, dx, C, POINTS, PIECE, VALUES, O, P, Q, H, W,
    p_mul, p_shift, q_mul, q_shift, h_mul, h_shift, w_mul, w_shift,
    x_n_stride, x_c_stride, x_d_stride, x_h_stride, x_w_stride,
    y_n_stride, y_c_stride, y_d_stride, y_h_stride, y_w_stride,
    i_n_stride, i_c_stride, i_d_stride, i_h_stride, i_w_stride,
    REACH_D: tl.constexpr, REACH_H: tl.constexpr, REACH_W: tl.constexpr, FLAT: tl.constexpr, WIDE: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    SUMS: tl.constexpr = tl.float64 if dy.dtype.element_ty == tl.float64 else tl.float32
    blocks = tl.cdiv(C, BLOCK_C)
    n = tl.program_id(0) // blocks
    c = tl.program_id(0) % blocks * BLOCK_C
    first = tl.program_id(1) * PIECE
    end = tl.minimum(first + PIECE, POINTS)
    if WIDE:
        n = n.to(tl.int64)
        c = c.to(tl.int64)
        first = first.to(tl.int64)
    channel = c + tl.arange(0, BLOCK_C)[None, :]
    plane = dx + (n * x_n_stride + channel * x_c_stride)
    # ---- zeros everywhere
    for start in range(first, end, BLOCK_T):
        k = start + tl.arange(0, BLOCK_T)
        if FLAT:
            at = k * x_w_stride
        else:
            rest, w = split(k, W, w_mul, w_shift, WIDE)
            z, h = split(rest, H, h_mul, h_shift, WIDE)
            at = z * x_d_stride + h * x_h_stride + w * x_w_stride
        nothing = tl.zeros((BLOCK_T, BLOCK_C), dx.dtype.element_ty)
        tl.store(plane + at[:, None], nothing, mask=(k < end)[:, None] & (channel < C))
    tl.debug_barrier()
    # ---- what windows give
    base_y = n * y_n_stride + channel * y_c_stride
    base_i = n * i_n_stride + channel * i_c_stride
    for start in range(0, VALUES, BLOCK_V):
        v = start + tl.arange(0, BLOCK_V)
        if WIDE:
            v = v.to(tl.int64)
        rest, q = split(v, Q, q_mul, q_shift, WIDE)
        o, p = split(rest, P, p_mul, p_shift, WIDE)
        o, p, q = o[:, None], p[:, None], q[:, None]
        mask = (v < VALUES)[:, None] & (channel < C)
        named = tl.load(index + (base_i + (o * i_d_stride + p * i_h_stride + q * i_w_stride)), mask=mask, other=-1)
        mask = mask & (named >= first) & (named < end)
        total = tl.zeros((BLOCK_V, BLOCK_C), SUMS)
        for turn in range((2 * REACH_D + 1) * (2 * REACH_H + 1) * (2 * REACH_W + 1)):
            o1 = o + (turn // ((2 * REACH_H + 1) * (2 * REACH_W + 1)) - REACH_D)
            p1 = p + (turn // (2 * REACH_W + 1) % (2 * REACH_H + 1) - REACH_H)
            q1 = q + (turn % (2 * REACH_W + 1) - REACH_W)
            there = mask & (o1 >= 0) & (o1 < O) & (p1 >= 0) & (p1 < P) & (q1 >= 0) & (q1 < Q)
            at = base_i + (o1 * i_d_stride + p1 * i_h_stride + q1 * i_w_stride)
            there = there & (tl.load(index + at, mask=there, other=-1) == named)
            at = base_y + (o1 * y_d_stride + p1 * y_h_stride + q1 * y_w_stride)
            total += tl.load(dy + at, mask=there, other=0.0).to(SUMS)
        k = tl.where(mask, named, 0)
        if WIDE:
            k = k.to(tl.int64)
        else:
            k = k.to(tl.int32)
        if FLAT:
            at = k * x_w_stride
        else:
            rest, w = split(k, W, w_mul, w_shift, WIDE)
            z, h = split(rest, H, h_mul, h_shift, WIDE)
            at = z * x_d_stride + h * x_h_stride + w * x_w_stride
        tl.store(plane + at, total.to(dx.dtype.element_ty), mask=mask)


class AdaptiveMaxScatter(TritonEngine):
    name = "pool.adaptive_max_scatter"
    operations = ("adaptive_max_pool_bwd",)

    def refusals(self, problem: Problem) -> list[str]:
        r = Refusals()
        r.require_tensors(((role, t) for role, t in problem.items if role != "index"), TYPES, elements=True)
        points = math.prod(Windows.of(problem).sizes)
        r.require(points <= INT32, "planes of less than 2^31 points", points)
        if not r:
            most = max(self._reach(problem)) + 1
            r.require(most <= MOST, f"at most {MOST} windows that hold one element along an axis", most)
            units = min(self._units(problem, c) for c in self.configs(problem))
            r.require(units <= INT32, f"at most {INT32} tiles", units)
        return r

    def _reach(self, problem: Problem) -> list[int]:
        """How far apart two windows may be that hold the same element, along D, H and W."""
        return [max(map(len, a.holders())) - 1 for a in Windows.of(problem).axes]

    def _units(self, problem: Problem, config: Config) -> int:
        g = Windows.of(problem)
        return g.N * -(-g.C // config["BLOCK_C"])

    def configs(self, problem: Problem) -> list[Config]:
        g = Windows.of(problem)
        points, values = math.prod(g.sizes), math.prod(g.counts)
        beside = lanes_are_columns(g, "dx", g.sizes[2])  # points, not channels, are neighbours in memory
        found: list[Config] = []
        for elements, warps in ((4096, 4), (8192, 8), (2048, 4)):
            if beside:
                along = min(1 << (points - 1).bit_length(), 512)
                width = min(elements // along, 1 << (g.C - 1).bit_length(), 64)
            else:
                width = min(1 << (g.C - 1).bit_length(), 64)
                along = max(1, min(elements // width, 1 << (points - 1).bit_length()))
            units = g.N * -(-g.C // width)
            pieces = max(1, min(4 * problem.target.processors // units, points // (4 * along), 65535))
            few = max(1, min(1 << (values - 1).bit_length(), elements // 4 // width))
            config = {"BLOCK_C": width, "BLOCK_T": along, "BLOCK_V": few, "PIECES": pieces}
            config |= {"num_warps": warps, "num_stages": 1}
            if config not in found:
                found.append(config)
        return found

    def cost(self, problem: Problem, config: Config) -> float:
        g = Windows.of(problem)
        programs = self._units(problem, config) * config["PIECES"]
        busy = min(1.0, programs / problem.target.processors)
        values = g.N * g.C * math.prod(g.counts) * config["PIECES"]
        # A window costs a sector of its own and reads of its neighbours from the first-level cache.
        turns = math.prod(2 * reach + 1 for reach in self._reach(problem))
        moved = problem.bytes + values * (32 + 1.0 * turns)
        return roofline(problem, flops=0.0, bytes=moved, memory_efficiency=0.8 * busy)

    def launches(self, problem: Problem, config: Config) -> list[Launch]:
        g = Windows.of(problem)
        points, values = math.prod(g.sizes), math.prod(g.counts)
        args: dict[str, Argument] = {"C": g.C, "POINTS": points, "VALUES": values}
        args |= dict(zip("OPQ", g.counts, strict=True)) | dict(zip("HW", g.sizes[1:], strict=True))
        for name, size in zip("pqhw", (*g.counts[1:], *g.sizes[1:]), strict=True):
            args[f"{name}_mul"], args[f"{name}_shift"] = reciprocal(size)
        for name, role in {"x": "dx", "y": "dy", "i": "index"}.items():
            args |= {f"{name}_{axis}_stride": s for axis, s in zip("ncdhw", g.strides[role], strict=True)}
            args[role] = role
        piece = -(-points // config["PIECES"])
        piece = -(-piece // config["BLOCK_T"]) * config["BLOCK_T"]
        args["PIECE"] = piece
        (_, h, w), (d_step, h_step, w_step) = g.sizes, g.strides["dx"][2:]
        flat = (h == 1 or h_step == w * w_step) and (g.sizes[0] == 1 or d_step == h * w * w_step)
        edge = 2 * (config["BLOCK_C"] + config["BLOCK_T"] + config["BLOCK_V"])
        widest = max(points + piece + edge, values + edge, *(t.span for _, t in problem.items))
        constexprs = dict(zip(("REACH_D", "REACH_H", "REACH_W"), self._reach(problem), strict=True))
        constexprs |= {"FLAT": flat, "WIDE": widest >= 2**31}
        constexprs |= {name: config[name] for name in ("BLOCK_C", "BLOCK_T", "BLOCK_V")}
        grid = (self._units(problem, config), -(-points // piece))
        return [Launch(adaptive_max_scatter, grid, args, constexprs, config["num_warps"], config["num_stages"])]
