"""``pool.adaptive_max_tiled``: adaptive max pooling on a GPU for sizes that do not divide, in Triton.

Method: a program takes a tile of outputs. Its lanes run along whichever of W and C lies closer together in memory
(W for nchw, C for nhwc), its rows over everything else. Windows differ in length by a point or two, so the loop goes
over the points of the longest and leaves out what a shorter one has not; each thread keeps the largest value so far and
its place. Backward is a gather with dx in the place of the output: along each axis the windows that hold an element
follow one another, and each is asked whether its index names the element. One order, float32 sums (float64 for
float64), no atomics.

Offsets are 64-bit where a tensor reaches past 2^31 elements. Cost: the memory traffic; what neighbouring windows share
comes from the first-level cache. Limits: planes below 2^31 points.
"""

import math

import triton
import triton.language as tl

from ...core.engine import Config, Refusals
from ...core.heuristics import roofline
from ...core.problem import Problem
from .._triton.index import INT32, reciprocal, split
from .._triton.launch import Argument, Launch, TritonEngine
from .._triton.windows import visit
from ._axes import Windows, block_of_lanes, is_wide, lanes_are_columns

TYPES = ("f64", "f32", "f16", "bf16")


WRITTEN_OUT = tl.constexpr(12)  # columns of a window up to which the loop over them is


@triton.jit
def adaptive_max_fwd(
    x, y, index, ROWS, LANES, C, O, P, Q, D, H, W,
    c_mul, c_shift, o_mul, o_shift, p_mul, p_shift, q_mul, q_shift,
    x_n_stride, x_c_stride, x_d_stride, x_h_stride, x_w_stride,
    y_n_stride, y_c_stride, y_d_stride, y_h_stride, y_w_stride,
    i_n_stride, i_c_stride, i_d_stride, i_h_stride, i_w_stride,
    T: tl.constexpr, R: tl.constexpr, S: tl.constexpr, INDEXED: tl.constexpr, COLUMNS: tl.constexpr,
    WIDE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_L: tl.constexpr,
):  # fmt: skip
    grid_lanes = tl.cdiv(LANES, BLOCK_L)
    pid = tl.program_id(0)
    row_block = pid // grid_lanes
    lane_block = pid % grid_lanes
    if WIDE:
        row_block = row_block.to(tl.int64)
        lane_block = lane_block.to(tl.int64)
    row = row_block * BLOCK_R + tl.arange(0, BLOCK_R)
    lane = (lane_block * BLOCK_L + tl.arange(0, BLOCK_L))[None, :]
    if COLUMNS:
        rest, p = split(row, P, p_mul, p_shift, WIDE)
        rest, o = split(rest, O, o_mul, o_shift, WIDE)
        n, c = split(rest, C, c_mul, c_shift, WIDE)
        c, q = c[:, None], lane
    else:
        rest, q = split(row, Q, q_mul, q_shift, WIDE)
        rest, p = split(rest, P, p_mul, p_shift, WIDE)
        n, o = split(rest, O, o_mul, o_shift, WIDE)
        c, q = lane, q[:, None]
    n, o, p = n[:, None], o[:, None], p[:, None]
    z0, h0, w0 = o * D // O, p * H // P, q * W // Q
    many_d = ((o + 1) * D + O - 1) // O - z0
    many_h = ((p + 1) * H + P - 1) // P - h0
    many_w = ((q + 1) * W + Q - 1) // Q - w0
    exists = (row < ROWS)[:, None] & (lane < LANES)
    base = x + (n * x_n_stride + c * x_c_stride + z0 * x_d_stride + h0 * x_h_stride + w0 * x_w_stride)
    VALUE: tl.constexpr = tl.float64 if x.dtype.element_ty == tl.float64 else tl.float32
    best = tl.full((BLOCK_R, BLOCK_L), float("-inf"), VALUE)
    place = tl.full((BLOCK_R, BLOCK_L), -1, tl.int32)
    for line in range(T * R):
        a, b = line // R, line % R
        inside = exists & (a < many_d) & (b < many_h)
        if WIDE:
            a = a.to(tl.int64)
            b = b.to(tl.int64)
        row_x = base + (a * x_d_stride + b * x_h_stride)
        number = ((a * H + b) * W).to(tl.int32)
        if S <= WRITTEN_OUT:
            for s in tl.static_range(S):
                here = inside & (s < many_w)
                v = tl.load(row_x + s * x_w_stride, mask=here, other=float("-inf"))
                best, place = visit(v, here, best, place, number + s)
        else:
            for s in range(S):
                here = inside & (s < many_w)
                v = tl.load(row_x + s * x_w_stride, mask=here, other=float("-inf"))
                best, place = visit(v, here, best, place, number + s)
    at = n * y_n_stride + c * y_c_stride + o * y_d_stride + p * y_h_stride + q * y_w_stride
    tl.store(y + at, best.to(y.dtype.element_ty), mask=exists)
    if INDEXED:
        place += ((z0 * H + h0) * W + w0).to(tl.int32)
        at = n * i_n_stride + c * i_c_stride + o * i_d_stride + p * i_h_stride + q * i_w_stride
        tl.store(index + at, place.to(index.dtype.element_ty), mask=exists)


@triton.jit
def adaptive_max_bwd(
    dy, index, dx, ROWS, LANES, C, D, H, W, O, P, Q,
    c_mul, c_shift, d_mul, d_shift, h_mul, h_shift, w_mul, w_shift,
    x_n_stride, x_c_stride, x_d_stride, x_h_stride, x_w_stride,
    y_n_stride, y_c_stride, y_d_stride, y_h_stride, y_w_stride,
    i_n_stride, i_c_stride, i_d_stride, i_h_stride, i_w_stride,
    MANY_D: tl.constexpr, MANY_H: tl.constexpr, MANY_W: tl.constexpr, COLUMNS: tl.constexpr,
    WIDE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_L: tl.constexpr,
):  # fmt: skip
    grid_lanes = tl.cdiv(LANES, BLOCK_L)
    pid = tl.program_id(0)
    row_block = pid // grid_lanes
    lane_block = pid % grid_lanes
    if WIDE:
        row_block = row_block.to(tl.int64)
        lane_block = lane_block.to(tl.int64)
    row = row_block * BLOCK_R + tl.arange(0, BLOCK_R)
    lane = (lane_block * BLOCK_L + tl.arange(0, BLOCK_L))[None, :]
    if COLUMNS:
        rest, h = split(row, H, h_mul, h_shift, WIDE)
        rest, z = split(rest, D, d_mul, d_shift, WIDE)
        n, c = split(rest, C, c_mul, c_shift, WIDE)
        c, w = c[:, None], lane
    else:
        rest, w = split(row, W, w_mul, w_shift, WIDE)
        rest, h = split(rest, H, h_mul, h_shift, WIDE)
        n, z = split(rest, D, d_mul, d_shift, WIDE)
        c, w = lane, w[:, None]
    n, z, h = n[:, None], z[:, None], h[:, None]
    exists = (row < ROWS)[:, None] & (lane < LANES)
    position = ((z * H + h) * W + w).to(tl.int32)
    o0, p0, q0 = z * O // D, h * P // H, w * Q // W
    many_d = ((z + 1) * O + D - 1) // D - o0
    many_h = ((h + 1) * P + H - 1) // H - p0
    many_w = ((w + 1) * Q + W - 1) // W - q0
    base_y = n * y_n_stride + c * y_c_stride
    base_i = n * i_n_stride + c * i_c_stride
    SUMS: tl.constexpr = tl.float64 if dy.dtype.element_ty == tl.float64 else tl.float32
    total = tl.zeros((BLOCK_R, BLOCK_L), SUMS)
    for line in range(MANY_D * MANY_H):
        i, j = line // MANY_H, line % MANY_H
        o, p = o0 + i, p0 + j
        inside = exists & (i < many_d) & (j < many_h)
        for k in range(MANY_W):
            mask = inside & (k < many_w)
            q = q0 + k
            at = base_i + o * i_d_stride + p * i_h_stride + q * i_w_stride
            found = tl.load(index + at, mask=mask, other=-1)
            v = tl.load(dy + (base_y + o * y_d_stride + p * y_h_stride + q * y_w_stride), mask=mask, other=0.0)
            total += tl.where(mask & (found == position), v.to(SUMS), 0.0)
    at = n * x_n_stride + c * x_c_stride + z * x_d_stride + h * x_h_stride + w * x_w_stride
    tl.store(dx + at, total.to(dx.dtype.element_ty), mask=exists)


class AdaptiveMaxTiled(TritonEngine):
    name = "pool.adaptive_max_tiled"
    operations = ("adaptive_max_pool_fwd", "adaptive_max_pool_bwd")

    def refusals(self, problem: Problem) -> list[str]:
        r = Refusals()
        r.require_tensors(((role, t) for role, t in problem.items if role != "index"), TYPES, elements=True)
        points = math.prod(Windows.of(problem).sizes)
        r.require(points <= INT32, "planes of less than 2^31 points", points)
        if not r:
            tiles = min(math.prod(self._grid(problem, c)) for c in self.configs(problem))
            r.require(tiles <= INT32, f"at most {INT32} tiles", tiles)
        return r

    def _shape(self, problem: Problem) -> tuple[int, int, bool]:
        """Rows and lanes of the whole problem, and whether lanes are columns."""
        g = Windows.of(problem)
        op = problem.op
        plane = g.counts if op.name == "adaptive_max_pool_fwd" else g.sizes
        if lanes_are_columns(g, op.x_role, plane[2]):  # type: ignore[attr-defined]
            return g.N * g.C * plane[0] * plane[1], plane[2], True
        return g.N * math.prod(plane), g.C, False

    def _grid(self, problem: Problem, config: Config) -> tuple[int, int]:
        rows, lanes, _ = self._shape(problem)
        return -(-rows // config["BLOCK_R"]), -(-lanes // config["BLOCK_L"])

    def configs(self, problem: Problem) -> list[Config]:
        rows, lanes, _ = self._shape(problem)
        block = block_of_lanes(lanes)
        found: list[Config] = []
        for elements, warps in ((1024, 4), (512, 4), (2048, 8)):
            height = max(1, min(elements // block, 1 << (rows - 1).bit_length()))
            config = {"BLOCK_R": height, "BLOCK_L": block, "num_warps": warps, "num_stages": 1}
            if config not in found:
                found.append(config)
        return found

    def cost(self, problem: Problem, config: Config) -> float:
        rows, lanes, columns = self._shape(problem)
        row_blocks, lane_blocks = self._grid(problem, config)
        waste = row_blocks * lane_blocks * config["BLOCK_R"] * config["BLOCK_L"] / (rows * lanes)
        busy = min(1.0, row_blocks * lane_blocks / problem.target.processors)
        axes = Windows.of(problem).axes
        forward = problem.op.name == "adaptive_max_pool_fwd"
        turns = math.prod(a.longest if forward else max(map(len, a.holders())) for a in axes)
        # Columns' threads read places far apart; forward, or the windows that hold an element for each of them.
        each = 1.0 if columns else 0.1
        moved = problem.bytes + each * waste * turns * problem.items[0][1].itemsize * rows * lanes
        return roofline(problem, flops=0.0, bytes=moved, memory_efficiency=0.6 * busy)

    def launches(self, problem: Problem, config: Config) -> list[Launch]:
        g = Windows.of(problem)
        op = problem.op
        forward = op.name == "adaptive_max_pool_fwd"
        rows, lanes, columns = self._shape(problem)
        args: dict[str, Argument] = {"ROWS": rows, "LANES": lanes, "C": g.C}
        args |= dict(zip("DHWOPQ", (*g.sizes, *g.counts), strict=True))
        plane = dict(zip("OPQ" if forward else "DHW", g.counts if forward else g.sizes, strict=True))
        for name, size in {"C": g.C, **plane}.items():
            args[f"{name.lower()}_mul"], args[f"{name.lower()}_shift"] = reciprocal(size)
        roles = {"x": op.x_role, "y": op.y_role, "i": "index"}  # type: ignore[attr-defined]
        for name, role in roles.items():
            strides = g.strides.get(role, (None,) * 5)
            args |= {f"{name}_{axis}_stride": s for axis, s in zip("ncdhw", strides, strict=True)}
            args[role] = role
        constexprs = {
            "COLUMNS": columns, "WIDE": is_wide(problem, g, rows, lanes, config),
            "BLOCK_R": config["BLOCK_R"], "BLOCK_L": config["BLOCK_L"],
        }  # fmt: skip
        if forward:
            constexprs |= dict(zip("TRS", (a.longest for a in g.axes), strict=True))
            constexprs["INDEXED"] = "index" in problem.tensors
        else:
            for axis, a in zip("DHW", g.axes, strict=True):
                constexprs[f"MANY_{axis}"] = max(map(len, a.holders()))
        row_blocks, lane_blocks = self._grid(problem, config)
        kernel = adaptive_max_fwd if forward else adaptive_max_bwd
        grid = (row_blocks * lane_blocks,)
        return [Launch(kernel, grid, args, constexprs, config["num_warps"], config["num_stages"])]
