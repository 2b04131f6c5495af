"""``pool.average_tiled``: average, power and adaptive average pooling on a GPU, any shape, strides and type, in Triton.

Method: a program takes a tile of outputs. Its lanes run along whichever of W and C lies closer together in memory
(W for nchw, C for nhwc), its rows over everything else, so that neighbouring threads read and write neighbouring
addresses; only the rows pay for divisions. Overlapping windows read an element several times; what lies below each
other in H is kept in registers: each row of a tile makes up to four outputs one below the other, and the rows of x that
their windows share are read once and added to all that hold them. Which ones do is known when the kernel is compiled
(`USED`: four bits for each row). Neighbours in W share through the first-level cache. At a stride of 2 along lanes,
columns are read as whole runs, two a lane.

Offsets are 64-bit where a tensor reaches past 2^31 elements. Cost: the memory traffic. No limits beside the four types.
"""

import math

import triton
import triton.language as tl

from ...core.engine import Config, Refusals
from ...core.heuristics import roofline
from ...core.problem import Problem
from .._triton.index import INT32, reciprocal, split
from .._triton.launch import Argument, Launch, Real, TritonEngine
from .._triton.windows import counted, power, quotient
from ._axes import (
    Windows,
    block_of_lanes,
    float_type,
    is_wide,
    kind_of,
    lanes_are_columns,
    shared_divisor,
    sign_of,
    used_lines,
    window_constants,
)

TYPES = ("f64", "f32", "f16", "bf16")
UNROLLED = 48  # loads up to which the loops over them are written out


@triton.jit
def _raised(v, norm, KIND: tl.constexpr, SIGN: tl.constexpr):
    if KIND == 2:
        result = v * v
    elif KIND == 3:
        result = power(v, norm, SIGN)
    else:
        result = v
    return result


@triton.jit
def _store(
    y, at, total, mask, counts_dh, count_w, norm, DIVISOR: tl.constexpr, SCALE: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Sums to means (or roots of them), in y's type."""
    NARROW: tl.constexpr = y.dtype.element_ty.primitive_bitwidth == 16
    if DIVISOR == 0:
        divisor = (counts_dh * count_w).to(total.dtype)
        mean = quotient(total * SCALE, divisor, NARROW)
    else:
        mean = quotient(total, tl.full(total.shape, DIVISOR, total.dtype), NARROW)
    if KIND == 2:
        mean = tl.sqrt(mean)
    elif KIND == 3:
        mean = power(mean, 1.0 / norm, 0)
    tl.store(y + at, mean.to(y.dtype.element_ty), mask=mask)


@triton.jit
def average_pool_fwd(
    x, y, norm, ROWS, LANES, C, O, PG, P, Q, D, H, W,
    c_mul, c_shift, o_mul, o_shift, pg_mul, pg_shift, q_mul, q_shift,
    x_n_stride, x_c_stride, x_d_stride, x_h_stride, x_w_stride,
    y_n_stride, y_c_stride, y_d_stride, y_h_stride, y_w_stride,
    T: tl.constexpr, R: tl.constexpr, S: tl.constexpr,
    STRIDE_D: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    PAD_D: tl.constexpr, PAD_H: tl.constexpr, PAD_W: tl.constexpr,
    AFTER_D: tl.constexpr, AFTER_H: tl.constexpr, AFTER_W: tl.constexpr,
    DILATION_D: tl.constexpr, DILATION_H: tl.constexpr, DILATION_W: tl.constexpr,
    ADAPTIVE_D: tl.constexpr, ADAPTIVE_H: tl.constexpr, ADAPTIVE_W: tl.constexpr,
    KIND: tl.constexpr, SIGN: tl.constexpr, PADDED: tl.constexpr, DIVISOR: tl.constexpr, SCALE: tl.constexpr,
    COLUMNS: tl.constexpr, HAS_D: tl.constexpr, UNROLL: tl.constexpr, PAIRS: tl.constexpr, GROUP: tl.constexpr,
    SPREAD: tl.constexpr, USED: tl.constexpr, WIDE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_L: tl.constexpr,
):  # fmt: skip
    grid_lanes = tl.cdiv(LANES, BLOCK_L)
    pid = tl.program_id(0)
    row_block = pid // grid_lanes
    lane_block = pid % grid_lanes
    if WIDE:
        row_block = row_block.to(tl.int64)
        lane_block = lane_block.to(tl.int64)
    row = row_block * BLOCK_R + tl.arange(0, BLOCK_R)
    lane = lane_block * BLOCK_L + tl.arange(0, BLOCK_L)
    # ---- where each row is: (n, c, o, p) with columns as lanes, (n, o, p, q) with channels as lanes; p by groups
    o = row * 0
    if COLUMNS:
        rest, pg = split(row, PG, pg_mul, pg_shift, WIDE)
        if HAS_D:
            rest, o = split(rest, O, o_mul, o_shift, WIDE)
        n, c = split(rest, C, c_mul, c_shift, WIDE)
        row_x = n * x_n_stride + c * x_c_stride
        row_y = n * y_n_stride + c * y_c_stride
        lane_y = lane * y_w_stride
        q = lane[None, :]
    else:
        rest, column = split(row, Q, q_mul, q_shift, WIDE)
        rest, pg = split(rest, PG, pg_mul, pg_shift, WIDE)
        n = rest
        if HAS_D:
            n, o = split(rest, O, o_mul, o_shift, WIDE)
        row_x = n * x_n_stride
        row_y = n * y_n_stride + column * y_w_stride
        lane_y = lane * y_c_stride
        q = column[:, None]
    z0 = o * STRIDE_D - PAD_D
    w0 = q * STRIDE_W - PAD_W
    p = pg * GROUP
    h0 = p * STRIDE_H - PAD_H
    # The windows' points that exist, as far as that is no matter of the edges of x.
    many_d, many_h, many_w = T, R, S
    if ADAPTIVE_D:
        z0 = o * D // O
        many_d = ((o + 1) * D + O - 1) // O - z0
    if ADAPTIVE_H:
        h0 = p * H // P
        many_h = ((p + 1) * H + P - 1) // P - h0
    if ADAPTIVE_W:
        w0 = q * W // Q
        many_w = ((q + 1) * W + Q - 1) // Q - w0
    exists = (row < ROWS)[:, None] & (lane < LANES)[None, :]
    if COLUMNS:
        base = x + (row_x[:, None] + w0 * x_w_stride)
    else:
        base = x + (row_x[:, None] + w0 * x_w_stride + (lane * x_c_stride)[None, :])
    # ---- the windows
    SUMS: tl.constexpr = tl.float64 if x.dtype.element_ty == tl.float64 else tl.float32
    acc0 = tl.zeros((BLOCK_R, BLOCK_L), SUMS)
    acc1 = tl.zeros((BLOCK_R, BLOCK_L), SUMS)
    acc2 = tl.zeros((BLOCK_R, BLOCK_L), SUMS)
    acc3 = tl.zeros((BLOCK_R, BLOCK_L), SUMS)
    if PAIRS:
        # Columns two by two from an even one on, as whole runs of memory; a window has one of each pair, or both.
        FROM: tl.constexpr = -(PAD_W + PAD_W % 2)
        pair = (lane_block * 2 * BLOCK_L + tl.arange(0, 2 * BLOCK_L))[None, :]
        pairs = x + (row_x[:, None] + pair)
        for a in tl.static_range(T):
            z = z0 + a * DILATION_D
            for j in tl.static_range(SPREAD):
                if (USED >> (4 * j)) & 15:
                    h = h0 + j
                    in_rows = ((row < ROWS) & (z >= 0) & (z < D) & (h >= 0) & (h < H))[:, None]
                    jump = (z * x_d_stride + h * x_h_stride)[:, None]
                    line = tl.zeros((BLOCK_R, BLOCK_L), SUMS)
                    for at in tl.static_range(FROM, S - PAD_W, 2):
                        inside = in_rows & (pair + at >= 0) & (pair + at < W)
                        v = tl.load(pairs + (jump + at), mask=inside, other=0.0).to(SUMS)
                        v = _raised(v, norm, KIND, SIGN)
                        even, odd = tl.split(tl.reshape(v, (BLOCK_R, BLOCK_L, 2)))
                        if at + PAD_W >= 0:
                            line += even
                        if at + 1 + PAD_W < S:
                            line += odd
                    if (USED >> (4 * j)) & 1:
                        acc0 += line
                    if (USED >> (4 * j)) & 2:
                        acc1 += line
                    if (USED >> (4 * j)) & 4:
                        acc2 += line
                    if (USED >> (4 * j)) & 8:
                        acc3 += line
    elif UNROLL:
        for a in tl.static_range(T):
            z = z0 + a * DILATION_D
            for j in tl.static_range(SPREAD):
                if (USED >> (4 * j)) & 15:
                    h = h0 + j
                    rows = (z >= 0) & (z < D) & (h >= 0) & (h < H)
                    if ADAPTIVE_D:
                        rows = rows & (a < many_d)
                    if ADAPTIVE_H:
                        rows = rows & (j < many_h)
                    jump = (z * x_d_stride + h * x_h_stride)[:, None]
                    line = tl.zeros((BLOCK_R, BLOCK_L), SUMS)
                    for s in tl.static_range(S):
                        w = w0 + s * DILATION_W
                        inside = exists & rows[:, None] & (w >= 0) & (w < W)
                        if ADAPTIVE_W:
                            inside = inside & (s < many_w)
                        v = tl.load(base + (jump + s * DILATION_W * x_w_stride), mask=inside, other=0.0).to(SUMS)
                        line += _raised(v, norm, KIND, SIGN)
                    if (USED >> (4 * j)) & 1:
                        acc0 += line
                    if (USED >> (4 * j)) & 2:
                        acc1 += line
                    if (USED >> (4 * j)) & 4:
                        acc2 += line
                    if (USED >> (4 * j)) & 8:
                        acc3 += line
    else:
        for point in range(T * R * S):
            s = point % S
            b = point // S % R
            a = point // (S * R)
            if WIDE:
                a = a.to(tl.int64)
                b = b.to(tl.int64)
                s = s.to(tl.int64)
            z = z0 + a * DILATION_D
            h = h0 + b * DILATION_H
            w = w0 + s * DILATION_W
            rows = (z >= 0) & (z < D) & (h >= 0) & (h < H) & (a < many_d) & (b < many_h)
            inside = exists & rows[:, None] & (w >= 0) & (w < W) & (s < many_w)
            jump = (z * x_d_stride + h * x_h_stride)[:, None] + s * DILATION_W * x_w_stride
            v = tl.load(base + jump, mask=inside, other=0.0).to(SUMS)
            acc0 += _raised(v, norm, KIND, SIGN)
    # ---- the results
    counts_w = 1
    if DIVISOR == 0:
        counts_w = counted(q, W, Q, PAD_W, AFTER_W, STRIDE_W, DILATION_W, S, PADDED, ADAPTIVE_W)
        count_d = counted(o, D, O, PAD_D, AFTER_D, STRIDE_D, DILATION_D, T, PADDED, ADAPTIVE_D)
    if HAS_D:
        row_y += o * y_d_stride
    for v in tl.static_range(GROUP):
        count = 1
        if DIVISOR == 0:
            count = counted(p + v, H, P, PAD_H, AFTER_H, STRIDE_H, DILATION_H, R, PADDED, ADAPTIVE_H)
            count = (count * count_d)[:, None]
        at = (row_y + (p + v) * y_h_stride)[:, None] + lane_y[None, :]
        mask = exists & (p + v < P)[:, None]
        if v == 0:
            _store(y, at, acc0, mask, count, counts_w, norm, DIVISOR, SCALE, KIND)
        elif v == 1:
            _store(y, at, acc1, mask, count, counts_w, norm, DIVISOR, SCALE, KIND)
        elif v == 2:
            _store(y, at, acc2, mask, count, counts_w, norm, DIVISOR, SCALE, KIND)
        else:
            _store(y, at, acc3, mask, count, counts_w, norm, DIVISOR, SCALE, KIND)


class AverageTiled(TritonEngine):
    name = "pool.average_tiled"
    operations = ("avg_pool_fwd", "lp_pool_fwd", "adaptive_avg_pool_fwd")

    def refusals(self, problem: Problem) -> list[str]:
        r = Refusals()
        r.require_tensors(problem.items, TYPES, elements=True)
        if not r:
            tiles = min(math.prod(self._grid(problem, c)) for c in self.configs(problem))
            r.require(tiles <= INT32, f"at most {INT32} tiles", tiles)
        return r

    def _shape(self, problem: Problem, group: int) -> tuple[int, int, bool]:
        """Rows and lanes of the whole problem, and whether lanes are columns."""
        g = Windows.of(problem)
        o, p, q = g.counts
        rows = g.N * o * -(-p // group)
        columns = lanes_are_columns(g, "y" if g.sizes == (1, 1, 1) else "x", q)
        return (rows * g.C, q, True) if columns else (rows * q, g.C, False)

    def _grid(self, problem: Problem, config: Config) -> tuple[int, int]:
        rows, lanes, _ = self._shape(problem, config["GROUP"])
        return -(-rows // config["BLOCK_R"]), -(-lanes // config["BLOCK_L"])

    def configs(self, problem: Problem) -> list[Config]:
        d, h, w = Windows.of(problem).axes
        overlap = h.stride and h.dilation * (h.window - 1) >= h.stride
        found: list[Config] = []
        for most, elements, warps in ((4 if overlap else 2, 1024, 4), (2, 1024, 4), (4, 512, 4), (1, 2048, 8)):
            group = max(n for n in (1, 2, 4) if n <= max(most, 1) and (n == 1 or n <= h.count))
            spread, used = used_lines(group, h)
            if not h.stride or d.longest * w.longest * _lines(spread, used) > UNROLLED:
                group = 1
            rows, lanes, _ = self._shape(problem, group)
            block = block_of_lanes(lanes)
            height = max(1, min(elements // block, 1 << (rows - 1).bit_length()))
            config = {"GROUP": group, "BLOCK_R": height, "BLOCK_L": block, "num_warps": warps, "num_stages": 1}
            if config not in found:
                found.append(config)
        return found

    def cost(self, problem: Problem, config: Config) -> float:
        g = Windows.of(problem)
        rows, lanes, _ = self._shape(problem, config["GROUP"])
        row_blocks, lane_blocks = self._grid(problem, config)
        waste = row_blocks * lane_blocks * config["BLOCK_R"] * config["BLOCK_L"] / (rows * lanes)
        busy = min(1.0, row_blocks * lane_blocks / problem.target.processors)
        spread, used = used_lines(config["GROUP"], g.axes[1])
        points = g.axes[0].longest * g.axes[2].longest * _lines(spread, used)
        # A window point costs a load that hits the first-level cache, at about twenty times the memory's rate; a thread
        # that has more points than are written out waits for each.
        # With columns as lanes a window's row is also gone from that cache before all of its points are asked for.
        columns = self._shape(problem, config["GROUP"])[2]
        late = 1.0 if points <= UNROLLED else 100.0 if columns else 4.0
        moved = problem.bytes + late * 0.05 * waste * points * problem.items[0][1].itemsize * rows * lanes
        return roofline(problem, flops=0.0, bytes=moved, memory_efficiency=0.85 * busy)

    def launches(self, problem: Problem, config: Config) -> list[Launch]:
        g = Windows.of(problem)
        d, h, w = g.axes
        group = config["GROUP"]
        rows, lanes, columns = self._shape(problem, group)
        spread, used = used_lines(group, h)
        unroll = d.longest * w.longest * _lines(spread, used) <= UNROLLED
        norm = getattr(problem.op, "norm", None)
        x_strides = g.strides["x"]
        paired = (
            columns
            and unroll
            and x_strides[4] == 1
            and (w.stride, w.dilation) == (2, 1)
            and bool(h.stride and d.stride)
        )
        args: dict[str, Argument] = {"ROWS": rows, "LANES": lanes, "C": g.C, "PG": -(-h.count // group)}
        args |= dict(zip("DHWOPQ", (*g.sizes, *g.counts), strict=True))
        for name, size in {"C": g.C, "O": d.count, "PG": -(-h.count // group), "Q": w.count}.items():
            args[f"{name.lower()}_mul"], args[f"{name.lower()}_shift"] = reciprocal(size)
        for role in "xy":
            args |= {f"{role}_{axis}_stride": s for axis, s in zip("ncdhw", g.strides[role], strict=True)}
        args |= {"x": "x", "y": "y", "norm": Real(norm, float_type(problem)) if kind_of(norm) == 3 else None}
        divisor = shared_divisor(problem, g.axes)
        constexprs = window_constants(g) | {
            "KIND": kind_of(norm), "SIGN": sign_of(norm), "DIVISOR": divisor, "COLUMNS": columns,
            "PADDED": norm is not None or getattr(problem.op, "count_padding", False),
            "SCALE": float(math.prod(a.window for a in g.axes)) if norm is not None else 1.0,
            "HAS_D": d.size > 1 or d.count > 1 or d.window > 1, "UNROLL": unroll, "PAIRS": paired,
            "GROUP": group, "SPREAD": spread, "USED": used, "WIDE": is_wide(problem, g, rows, lanes, config),
            "BLOCK_R": config["BLOCK_R"], "BLOCK_L": config["BLOCK_L"],
        }  # fmt: skip
        row_blocks, lane_blocks = self._grid(problem, config)
        grid = (row_blocks * lane_blocks,)
        return [Launch(average_pool_fwd, grid, args, constexprs, config["num_warps"], config["num_stages"])]


def _lines(spread: int, used: int) -> int:
    """Rows of x that are read."""
    return sum(bool(used >> 4 * j & 15) for j in range(spread))
