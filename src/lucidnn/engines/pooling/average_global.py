"""``pool.average_global``: averages over whole planes and their gradient on a GPU, at the memory's speed, in Triton.

Method: planes are rows of points, and a program adds up a tile of rows in steps along them, each thread in sums of its
own that are added across threads at the end. A small plane is one step; of a larger one the steps to come are fetched
ahead into shared memory. Whichever lies closest together in memory, points (nchw) or channels
(nhwc), becomes what neighbouring threads read. Where there are too few planes to keep the GPU busy, the points are
cut into pieces whose sums go to the workspace, and a second kernel adds these up in order: the result is always the
same. Backward writes each plane's share everywhere.

Cost: one read of x, or one write of dx. Limits: one window, which is the whole plane; planes whose axes are one long
axis in memory (dense ones, in either layout).
"""

import math

import triton
import triton.language as tl

from ...core.engine import Config, Refusals
from ...core.heuristics import roofline
from ...core.problem import Problem
from .._triton.index import INT32
from .._triton.launch import Argument, Launch, Slice, TritonEngine
from .._triton.windows import quotient
from ._axes import UNIT, Windows, float_type, shared_divisor

TYPES = ("f64", "f32", "f16", "bf16")
TILE = 4096  # elements of a tile


@triton.jit
def plane_sums(
    x, y, N, C, POINTS, PIECE, x_n_stride, x_c_stride, x_w_stride, y_n_stride, y_c_stride, y_piece_stride,
    DIVISOR: tl.constexpr, SUMS: tl.constexpr, WIDE: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_T: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(C, BLOCK_C)
    pid = tl.program_id(0)
    n = pid // blocks
    c = (pid % blocks) * BLOCK_C
    piece = tl.program_id(1)
    first = piece * PIECE
    if WIDE:
        n = n.to(tl.int64)
        c = c.to(tl.int64)
        piece = piece.to(tl.int64)
        first = first.to(tl.int64)
    channel = c + tl.arange(0, BLOCK_C)
    rows = x + n * x_n_stride + (channel * x_c_stride)[:, None]
    end = tl.minimum(first + PIECE, POINTS)
    total = tl.zeros((BLOCK_C, BLOCK_T), SUMS)
    for start in tl.range(first, end, BLOCK_T, num_stages=STAGES):
        point = start + tl.arange(0, BLOCK_T)
        mask = (channel < C)[:, None] & (point < end)[None, :]
        total += tl.load(rows + (point * x_w_stride)[None, :], mask=mask, other=0.0).to(SUMS)
    found = tl.sum(total, 1)
    if DIVISOR != 0:
        divisor = tl.full((BLOCK_C,), DIVISOR, SUMS)
        found = quotient(found, divisor, y.dtype.element_ty.primitive_bitwidth == 16)
    at = piece * y_piece_stride + n * y_n_stride + channel * y_c_stride
    tl.store(y + at, found.to(y.dtype.element_ty), mask=channel < C)


@triton.jit
def pieces_sum(
    partial, y, N, C, PIECES, y_n_stride, y_c_stride,
    DIVISOR: tl.constexpr, SUMS: tl.constexpr, WIDE: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    plane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if WIDE:
        plane = plane.to(tl.int64)
    mask = plane < N * C
    total = tl.zeros((BLOCK_P, BLOCK), SUMS)
    for start in range(0, PIECES, BLOCK_P):
        piece = start + tl.arange(0, BLOCK_P)
        at = plane[None, :] + (piece * N * C)[:, None]
        total += tl.load(partial + at, mask=mask[None, :] & (piece < PIECES)[:, None], other=0.0)
    mean = quotient(tl.sum(total, 0), tl.full((BLOCK,), DIVISOR, SUMS), y.dtype.element_ty.primitive_bitwidth == 16)
    tl.store(y + (plane // C * y_n_stride + plane % C * y_c_stride), mean.to(y.dtype.element_ty), mask=mask)


@triton.jit
def plane_shares(
    dy, dx, N, C, POINTS, dy_n_stride, dy_c_stride, dx_n_stride, dx_c_stride, dx_w_stride,
    DIVISOR: tl.constexpr, SUMS: tl.constexpr, WIDE: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    blocks, steps = tl.cdiv(C, BLOCK_C), tl.cdiv(POINTS, BLOCK_T)
    pid = tl.program_id(0)
    start = (pid % steps) * BLOCK_T
    n = pid // steps // blocks
    c = (pid // steps % blocks) * BLOCK_C
    if WIDE:
        n = n.to(tl.int64)
        c = c.to(tl.int64)
        start = start.to(tl.int64)
    channel = c + tl.arange(0, BLOCK_C)
    point = start + tl.arange(0, BLOCK_T)
    v = tl.load(dy + n * dy_n_stride + channel * dy_c_stride, mask=channel < C, other=0.0).to(SUMS)
    v = quotient(v, tl.full((BLOCK_C,), DIVISOR, SUMS), False).to(dx.dtype.element_ty)
    at = n * dx_n_stride + (channel * dx_c_stride)[:, None] + (point * dx_w_stride)[None, :]
    mask = (channel < C)[:, None] & (point < POINTS)[None, :]
    tl.store(dx + at, tl.broadcast_to(v[:, None], (BLOCK_C, BLOCK_T)), mask=mask)


class AverageGlobal(TritonEngine):
    name = "pool.average_global"
    operations = ("avg_pool_fwd", "avg_pool_bwd", "adaptive_avg_pool_fwd", "adaptive_avg_pool_bwd")

    def refusals(self, problem: Problem) -> list[str]:
        r = Refusals()
        r.require_tensors(problem.items, TYPES, elements=True)
        d, h, w = Windows.of(problem).axes
        one = (d, h) == (UNIT, UNIT) and w.count == 1 and w.window == w.size and not w.before and not w.after
        r.require(one, "one window, the plane, whose axes are one in memory", [(a.size, a.count) for a in (d, h, w)])
        if not r:
            grid = math.prod(self._tiles(problem, self.configs(problem)[0]))
            r.require(grid <= INT32, f"at most {INT32} tiles", grid)
        return r

    def _rows(self, problem: Problem) -> tuple[int, int, int, dict[str, tuple[int, int, int]]]:
        """N, C and points, and strides (n, c, w) by role; N is 1 where the planes of all images are evenly apart."""
        g = Windows.of(problem)
        strides = {role: (s[0], s[1], s[4]) for role, s in g.strides.items()}
        n, c = g.N, g.C
        if all(n == 1 or c == 1 or s[0] == c * s[1] for s in strides.values()):
            if c == 1:
                strides = {role: (0, s[0], s[2]) for role, s in strides.items()}
            n, c = 1, n * c
        return n, c, g.sizes[2], strides

    def configs(self, problem: Problem) -> list[Config]:
        n, c, points, strides = self._rows(problem)
        role = problem.op.x_role  # type: ignore[attr-defined]
        _, c_step, w_step = strides[role]
        found: list[Config] = []
        for tile, warps, stages in ((TILE, 8, 4), (TILE, 4, 4), (2 * TILE, 8, 3), (TILE, 4, 1)):
            if points > 1 and (w_step < c_step or c == 1):  # points are neighbours: long rows, few at once
                most = 1024 if points % 1024 == 0 or points > 8192 else 512
                along = min(1 << (points - 1).bit_length(), most)
                height = min(max(tile // along, 1), 1 << (c - 1).bit_length())
            else:
                height = min(1 << (c - 1).bit_length(), 64)
                along = min(max(tile // height, 1), 1 << (points - 1).bit_length())
            pieces = 1
            if problem.op.name.endswith("_fwd"):
                programs = n * -(-c // height)
                steps = -(-points // along)
                if programs < 2 * problem.target.processors:
                    pieces = max(1, min(-(-8 * problem.target.processors // programs), steps // 2, 1024))
            if -(-points // (along * pieces)) <= 2 or problem.op.name.endswith("_bwd"):
                stages, warps = 1, min(warps, max(1, height * along // 1024))
            config = {"BLOCK_C": height, "BLOCK_T": along, "PIECES": pieces, "num_warps": warps, "num_stages": stages}
            if config not in found:
                found.append(config)
        return found

    def _tiles(self, problem: Problem, config: Config) -> tuple[int, int]:
        n, c, points, _ = self._rows(problem)
        blocks = n * -(-c // config["BLOCK_C"])
        if problem.op.name.endswith("_fwd"):
            return blocks, config["PIECES"]
        return blocks * -(-points // config["BLOCK_T"]), 1

    def workspace_size(self, problem: Problem, config: Config) -> int:
        n, c, _, _ = self._rows(problem)
        size = 8 if float_type(problem) == "f64" else 4
        return size * n * c * config["PIECES"] if config["PIECES"] > 1 else 0

    def cost(self, problem: Problem, config: Config) -> float:
        programs = math.prod(self._tiles(problem, config))
        busy = min(1.0, programs / problem.target.processors)
        launches = 2 if config["PIECES"] > 1 else 1
        long = config["num_stages"] == 1 and self._rows(problem)[2] > 2 * config["BLOCK_T"] * config["PIECES"]
        efficiency = 0.7 if long and problem.op.name.endswith("_fwd") else 0.9
        return roofline(problem, flops=0.0, memory_efficiency=efficiency * busy, launches=launches)

    def launches(self, problem: Problem, config: Config) -> list[Launch]:
        n, c, points, strides = self._rows(problem)
        sums = tl.float64 if float_type(problem) == "f64" else tl.float32
        divisor = shared_divisor(problem, Windows.of(problem).axes)
        blocks, pieces = self._tiles(problem, config)
        span = max(t.span for _, t in problem.items) + (config["BLOCK_C"] + config["BLOCK_T"]) * 2
        common = {"SUMS": sums, "WIDE": span >= 2**31}
        block = {"BLOCK_C": config["BLOCK_C"], "BLOCK_T": config["BLOCK_T"]}
        sizes: dict[str, Argument] = {"N": n, "C": c}
        warps, ahead = config["num_warps"], {"STAGES": config["num_stages"]}
        if problem.op.name.endswith("_bwd"):
            args = sizes | {"dy": "dy", "dx": "dx", "POINTS": points}
            for role, axes in (("dy", "nc"), ("dx", "ncw")):
                args |= {f"{role}_{a}_stride": strides[role]["ncw".index(a)] for a in axes}
            constexprs = common | block | {"DIVISOR": divisor}
            return [Launch(plane_shares, (blocks,), args, constexprs, warps, 1)]
        piece = -(-points // pieces)
        piece = -(-piece // config["BLOCK_T"]) * config["BLOCK_T"]
        pieces = -(-points // piece)
        args = sizes | {"x": "x", "POINTS": points, "PIECE": piece}
        args |= {f"x_{a}_stride": s for a, s in zip("ncw", strides["x"], strict=True)}
        y_n, y_c, _ = strides["y"]
        if pieces == 1:
            args |= {"y": "y", "y_n_stride": y_n, "y_c_stride": y_c, "y_piece_stride": 0}
            return [Launch(plane_sums, (blocks,), args, common | block | ahead | {"DIVISOR": divisor}, warps, 1)]
        partial = Slice(0, float_type(problem))
        args |= {"y": partial, "y_n_stride": c, "y_c_stride": 1, "y_piece_stride": n * c}
        first = Launch(plane_sums, (blocks, pieces), args, common | block | ahead | {"DIVISOR": 0.0}, warps, 1)
        args = sizes | {"partial": partial, "y": "y", "PIECES": pieces, "y_n_stride": y_n, "y_c_stride": y_c}
        several = min(1 << (pieces - 1).bit_length(), 256)
        block = {"BLOCK_P": several, "BLOCK": TILE // 2 // several if several > 16 else 128, "DIVISOR": divisor}
        return [first, Launch(pieces_sum, (-(-n * c // block["BLOCK"]),), args, common | block, 4, 1)]
