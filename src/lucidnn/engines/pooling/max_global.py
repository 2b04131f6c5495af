"""``pool.max_global``: the largest value of whole planes, and its place, on a GPU, at the memory's speed, in Triton.

Method: planes are rows of points, and a program goes along a tile of rows in steps, each thread keeping the largest
value so far and its place; across threads the first NaN, or else the first of the largest, is found by two reductions:
of the values, then of the places that have it. Whichever lies closest together in memory, points (nchw) or channels
(nhwc), becomes what neighbouring threads read. Where there are too few planes to keep the GPU busy, the points are cut
into pieces whose winners go to the workspace, and a second kernel takes the winner of these.

Cost: one read of x. Limits: forward, one window, which is the whole plane of less than 2^31 points; planes whose axes
are one long axis in memory (dense ones, in either layout).
"""

import math

import triton
import triton.language as tl

from ...core.engine import Config, Refusals
from ...core.heuristics import roofline
from ...core.problem import Problem
from .._triton.index import INT32
from .._triton.launch import Argument, Launch, Slice, TritonEngine
from .._triton.windows import NOWHERE, first_largest
from ._axes import UNIT, Windows, float_type

TYPES = ("f64", "f32", "f16", "bf16")
TILE = 2048  # elements of a tile


@triton.jit
def plane_maxima(
    x, y, index, N, C, POINTS, PIECE, x_n_stride, x_c_stride, x_w_stride,
    y_n_stride, y_c_stride, i_n_stride, i_c_stride, y_piece_stride,
    INDEXED: tl.constexpr, VALUE: tl.constexpr, WIDE: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(C, BLOCK_C)
    pid = tl.program_id(0)
    n = pid // blocks
    c = (pid % blocks) * BLOCK_C
    piece = tl.program_id(1)
    begin = piece * PIECE
    if WIDE:
        n = n.to(tl.int64)
        c = c.to(tl.int64)
        piece = piece.to(tl.int64)
    channel = c + tl.arange(0, BLOCK_C)
    rows = x + n * x_n_stride + (channel * x_c_stride)[:, None]
    end = tl.minimum(begin + PIECE, POINTS)
    best = tl.full((BLOCK_C, BLOCK_T), float("-inf"), VALUE)
    place = tl.full((BLOCK_C, BLOCK_T), NOWHERE, tl.int32)
    for start in range(begin, end, BLOCK_T):
        point = start + tl.arange(0, BLOCK_T)
        mask = (channel < C)[:, None] & (point < end)[None, :]
        if WIDE:
            at = (point.to(tl.int64) * x_w_stride)[None, :]
        else:
            at = (point * x_w_stride)[None, :]
        v = tl.load(rows + at, mask=mask, other=float("-inf")).to(VALUE)
        take = mask & ((place == NOWHERE) | ((best == best) & ~(v <= best)))
        best = tl.where(take, v, best)
        place = tl.where(take, point[None, :], place)
    value, found = first_largest(best, place, 1)
    at = piece * y_piece_stride
    tl.store(y + (at + n * y_n_stride + channel * y_c_stride), value.to(y.dtype.element_ty), mask=channel < C)
    if INDEXED:
        at = at + n * i_n_stride + channel * i_c_stride
        tl.store(index + at, found.to(index.dtype.element_ty), mask=channel < C)


@triton.jit
def pieces_maximum(
    values, places, y, index, N, C, PIECES, y_n_stride, y_c_stride, i_n_stride, i_c_stride,
    INDEXED: tl.constexpr, WIDE: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    plane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if WIDE:
        plane = plane.to(tl.int64)
    piece = tl.arange(0, BLOCK_P)
    at = plane[None, :] + (piece * N * C)[:, None]
    mask = (plane < N * C)[None, :] & (piece < PIECES)[:, None]
    best = tl.load(values + at, mask=mask, other=float("-inf"))
    place = tl.load(places + at, mask=mask, other=NOWHERE)
    value, found = first_largest(best, place, 0)
    n, c = plane // C, plane % C
    tl.store(y + (n * y_n_stride + c * y_c_stride), value.to(y.dtype.element_ty), mask=plane < N * C)
    if INDEXED:
        at = n * i_n_stride + c * i_c_stride
        tl.store(index + at, found.to(index.dtype.element_ty), mask=plane < N * C)


class MaxGlobal(TritonEngine):
    name = "pool.max_global"
    operations = ("adaptive_max_pool_fwd",)

    def refusals(self, problem: Problem) -> list[str]:
        r = Refusals()
        r.require_tensors(((role, t) for role, t in problem.items if role != "index"), TYPES, elements=True)
        d, h, w = Windows.of(problem).axes
        one = (d, h) == (UNIT, UNIT) and w.count == 1
        r.require(one, "one window, the plane, whose axes are one in memory", [(a.size, a.count) for a in (d, h, w)])
        r.require(w.size < 2**30, "planes of less than 2^30 points", w.size)
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
        _, c_step, w_step = strides["x"]
        found: list[Config] = []
        for tile, warps in ((TILE, 4), (2 * TILE, 8), (2 * TILE, 4)):
            if points > 1 and (w_step < c_step or c == 1):  # points are neighbours: long rows, few at once
                along = min(1 << (points - 1).bit_length(), 512)
                height = min(max(tile // along, 1), 1 << (c - 1).bit_length())
            else:
                height = min(1 << (c - 1).bit_length(), 64)
                along = min(max(tile // height, 1), 1 << (points - 1).bit_length())
            pieces, programs, steps = 1, n * -(-c // height), -(-points // along)
            if programs < 2 * problem.target.processors:
                pieces = max(1, min(-(-8 * problem.target.processors // programs), steps // 2, 256))
            config = {"BLOCK_C": height, "BLOCK_T": along, "PIECES": pieces, "num_warps": warps, "num_stages": 1}
            if config not in found:
                found.append(config)
        return found

    def _tiles(self, problem: Problem, config: Config) -> tuple[int, int]:
        n, c, _, _ = self._rows(problem)
        return n * -(-c // config["BLOCK_C"]), config["PIECES"]

    def workspace_size(self, problem: Problem, config: Config) -> int:
        n, c, _, _ = self._rows(problem)
        return 16 * -(-(8 + 4) * n * c * config["PIECES"] // 16) if config["PIECES"] > 1 else 0

    def cost(self, problem: Problem, config: Config) -> float:
        programs = math.prod(self._tiles(problem, config))
        busy = min(1.0, programs / problem.target.processors)
        launches = 2 if config["PIECES"] > 1 else 1
        return roofline(problem, flops=0.0, memory_efficiency=0.85 * busy, launches=launches)

    def launches(self, problem: Problem, config: Config) -> list[Launch]:
        n, c, points, strides = self._rows(problem)
        value, indexed = float_type(problem), "index" in problem.tensors
        blocks, pieces = self._tiles(problem, config)
        span = max(t.span for _, t in problem.items) + (config["BLOCK_C"] + config["BLOCK_T"]) * 2
        common = {"INDEXED": indexed, "WIDE": span >= 2**31}
        block = {"BLOCK_C": config["BLOCK_C"], "BLOCK_T": config["BLOCK_T"]}
        block["VALUE"] = tl.float64 if value == "f64" else tl.float32
        warps, stages = config["num_warps"], config["num_stages"]
        piece = -(-points // pieces)
        piece = -(-piece // config["BLOCK_T"]) * config["BLOCK_T"]
        pieces = -(-points // piece)
        sizes: dict[str, Argument] = {"N": n, "C": c}
        args = sizes | {"x": "x", "POINTS": points, "PIECE": piece}
        args |= {f"x_{a}_stride": s for a, s in zip("ncw", strides["x"], strict=True)}
        y_n, y_c, _ = strides["y"]
        i_n, i_c, _ = strides.get("index", (0, 0, 0))
        results = {
            "y": "y",
            "index": "index",
            "y_n_stride": y_n,
            "y_c_stride": y_c,
            "i_n_stride": i_n,
            "i_c_stride": i_c,
        }
        if pieces == 1:
            args |= results | {"y_piece_stride": 0}
            return [Launch(plane_maxima, (blocks,), args, common | block, warps, stages)]
        values, places = Slice(0, value), Slice(8 * n * c * config["PIECES"] // 16 * 16, "i32")
        args |= {"y": values, "index": places, "y_piece_stride": n * c}
        args |= {"y_n_stride": c, "y_c_stride": 1, "i_n_stride": c, "i_c_stride": 1}
        first = Launch(plane_maxima, (blocks, pieces), args, common | block | {"INDEXED": True}, warps, stages)
        several = 1 << (pieces - 1).bit_length()
        tile = {"BLOCK_P": several, "BLOCK": max(2048 // several, 8)}
        args = sizes | results | {"values": values, "places": places, "PIECES": pieces}
        return [first, Launch(pieces_maximum, (-(-n * c // tile["BLOCK"]),), args, common | tile, 4, 1)]
