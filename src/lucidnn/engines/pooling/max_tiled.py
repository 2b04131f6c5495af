"""``pool.max_tiled``: max pooling on a GPU, any shape, stride and type, both directions, in Triton.

Method: a program takes a tile of outputs. Its lanes run along whichever of W and C lies closer together in memory
(W for nchw, C for nhwc), its rows over everything else, so that neighbouring threads read and write neighbouring
addresses; only the rows pay for divisions. The points of the window pass by in order, and each thread keeps the
largest value so far and its place in registers.

Backward is a gather with dx in the place of the output: along each axis an element is in at most
``dilation * (window - 1) // stride + 1`` windows, and each of these is asked whether its index names the element.
So every element is written once, summed in one order in float32 (float64 for float64), and needs no atomics.

Offsets are 64-bit where a tensor reaches past 2^31 elements. Cost: the memory traffic; what neighbouring windows
share comes from the first-level cache. No limits beside the four types.
"""

import math
from typing import Any

import triton
import triton.language as tl

from ...core.engine import Config, Refusals
from ...core.heuristics import roofline
from ...core.problem import Problem
from ...ops.pooling import PoolGeometry
from .._triton.index import INT32, reciprocal, split
from .._triton.launch import Argument, Launch, TritonEngine
from .._triton.windows import visit

TYPES = ("f64", "f32", "f16", "bf16")
INDEX_KINDS = {"none": 0, "u8": 1, "i32": 2, "i64": 2}  # 1: a number in the window, 2: a place in the plane
UNROLLED = 27  # window points up to which the loops over them are written out


@triton.jit
def max_pool_fwd(
    x, y, index, ROWS, LANES, C, O, P, Q, D, H, W,
    c_mul, c_shift, o_mul, o_shift, p_mul, p_shift, q_mul, q_shift,
    x_n_stride, x_c_stride, x_d_stride, x_h_stride, x_w_stride,
    y_n_stride, y_c_stride, y_d_stride, y_h_stride, y_w_stride,
    i_n_stride, i_c_stride, i_d_stride, i_h_stride, i_w_stride,
    T: tl.constexpr, R: tl.constexpr, S: tl.constexpr,
    STRIDE_D: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    PAD_D: tl.constexpr, PAD_H: tl.constexpr, PAD_W: tl.constexpr,
    DILATION_D: tl.constexpr, DILATION_H: tl.constexpr, DILATION_W: tl.constexpr,
    KIND: tl.constexpr, COLUMNS: tl.constexpr, HAS_D: tl.constexpr, UNROLL: tl.constexpr, PAIRS: tl.constexpr,
    WIDE: tl.constexpr, WIDE_PLANE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_L: tl.constexpr,
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
    # ---- where each row is: (n, c, o, p) with columns as lanes, (n, o, p, q) with channels as lanes
    o = row * 0
    if COLUMNS:
        rest, p = split(row, P, p_mul, p_shift, WIDE)
        if HAS_D:
            rest, o = split(rest, O, o_mul, o_shift, WIDE)
        n, c = split(rest, C, c_mul, c_shift, WIDE)
        row_x = n * x_n_stride + c * x_c_stride
        row_y = n * y_n_stride + c * y_c_stride
        row_i = n * i_n_stride + c * i_c_stride if KIND > 0 else row
        lane_x = (lane * STRIDE_W - PAD_W) * x_w_stride
        lane_y = lane * y_w_stride
        lane_i = lane * i_w_stride if KIND > 0 else lane
        w0 = (lane * STRIDE_W - PAD_W)[None, :]
    else:
        rest, q = split(row, Q, q_mul, q_shift, WIDE)
        rest, p = split(rest, P, p_mul, p_shift, WIDE)
        n = rest
        if HAS_D:
            n, o = split(rest, O, o_mul, o_shift, WIDE)
        row_x = n * x_n_stride + (q * STRIDE_W - PAD_W) * x_w_stride
        row_y = n * y_n_stride + q * y_w_stride
        row_i = n * i_n_stride + q * i_w_stride if KIND > 0 else row
        lane_x = lane * x_c_stride
        lane_y = lane * y_c_stride
        lane_i = lane * i_c_stride if KIND > 0 else lane
        w0 = (q * STRIDE_W - PAD_W)[:, None]
    h0 = p * STRIDE_H - PAD_H
    row_x += h0 * x_h_stride
    row_y += p * y_h_stride
    z0 = o * STRIDE_D - PAD_D
    if HAS_D:
        row_x += z0 * x_d_stride
        row_y += o * y_d_stride
    exists = (row < ROWS)[:, None] & (lane < LANES)[None, :]
    base = x + (row_x[:, None] + lane_x[None, :])
    # ---- the window
    VALUE: tl.constexpr = tl.float64 if x.dtype.element_ty == tl.float64 else tl.float32
    PLACE: tl.constexpr = tl.int64 if WIDE_PLANE else tl.int32
    best = tl.full((BLOCK_R, BLOCK_L), float("-inf"), VALUE)
    place = tl.full((BLOCK_R, BLOCK_L), -1, PLACE)
    if PAIRS:
        # Columns two by two from an even one on, as whole runs of memory; a window has one of each pair, or both.
        FROM: tl.constexpr = -(PAD_W + PAD_W % 2)
        column = (lane_block * 2 * BLOCK_L + tl.arange(0, 2 * BLOCK_L))[None, :]
        pairs = x + (row_x[:, None] + column)
        for a in tl.static_range(T):
            z = z0 + a * DILATION_D
            for b in tl.static_range(R):
                h = h0 + b * DILATION_H
                in_rows = ((row < ROWS) & (z >= 0) & (z < D) & (h >= 0) & (h < H))[:, None]
                jump = a * DILATION_D * x_d_stride + b * DILATION_H * x_h_stride
                first = (a * R + b) * S if KIND == 1 else (a * DILATION_D * H + b * DILATION_H) * W
                for at in tl.static_range(FROM, S - PAD_W, 2):
                    inside = in_rows & (column + at >= 0) & (column + at < W)
                    v = tl.load(pairs + (jump + at), mask=inside, other=float("-inf"))
                    even, odd = tl.split(tl.reshape(v, (BLOCK_R, BLOCK_L, 2)))
                    w = w0 + (PAD_W + at)
                    in_rows_now = exists & in_rows
                    if at + PAD_W >= 0:
                        inside = in_rows_now & (w >= 0) & (w < W)
                        best, place = visit(even, inside, best, place, first + (at + PAD_W))
                    if at + 1 + PAD_W < S:
                        inside = in_rows_now & (w + 1 >= 0) & (w + 1 < W)
                        best, place = visit(odd, inside, best, place, first + (at + 1 + PAD_W))
    elif UNROLL:
        for a in tl.static_range(T):
            z = z0 + a * DILATION_D
            for b in tl.static_range(R):
                h = h0 + b * DILATION_H
                rows = exists & ((z >= 0) & (z < D) & (h >= 0) & (h < H))[:, None]
                for s in tl.static_range(S):
                    w = w0 + s * DILATION_W
                    if KIND == 1:
                        number = (a * R + b) * S + s
                    else:
                        number = (a * DILATION_D * H + b * DILATION_H) * W + s * DILATION_W
                    jump = a * DILATION_D * x_d_stride + b * DILATION_H * x_h_stride + s * DILATION_W * x_w_stride
                    inside = rows & (w >= 0) & (w < W)
                    v = tl.load(base + jump, mask=inside, other=float("-inf"))
                    best, place = visit(v, inside, best, place, number)
    else:
        for point in range(T * R * S):
            s = point % S
            b = point // S % R
            a = point // (S * R)
            if WIDE or WIDE_PLANE:
                a = a.to(tl.int64)
                b = b.to(tl.int64)
                s = s.to(tl.int64)
            z = z0 + a * DILATION_D
            h = h0 + b * DILATION_H
            w = w0 + s * DILATION_W
            rows = exists & ((z >= 0) & (z < D) & (h >= 0) & (h < H))[:, None]
            if KIND == 1:
                number = point
            else:
                number = (a * DILATION_D * H + b * DILATION_H) * W + s * DILATION_W
            jump = a * DILATION_D * x_d_stride + b * DILATION_H * x_h_stride + s * DILATION_W * x_w_stride
            inside = rows & (w >= 0) & (w < W)
            v = tl.load(base + jump, mask=inside, other=float("-inf"))
            best, place = visit(v, inside, best, place, number.to(PLACE))
    # ---- the results
    tl.store(y + (row_y[:, None] + lane_y[None, :]), best.to(y.dtype.element_ty), mask=exists)
    if KIND > 0:
        row_i += p * i_h_stride
        if HAS_D:
            row_i += o * i_d_stride
        if KIND == 1:
            place = tl.where(place < 0, 0, place)
        else:
            start = (z0.to(PLACE) * H + h0)[:, None] * W + w0
            place = tl.where(place < 0, -1, start + place)
        tl.store(index + (row_i[:, None] + lane_i[None, :]), place.to(index.dtype.element_ty), mask=exists)


@triton.jit
def _window(place, back, PAD: tl.constexpr, STRIDE: tl.constexpr, DILATION: tl.constexpr, WINDOW: tl.constexpr, SIZE):
    """The window `back` before the last one that starts at or before `place`: which, which of its points lies on
    `place`, and whether there is such a one.
    """
    window = (place + PAD) // STRIDE - back
    reach = place + PAD - window * STRIDE
    point = reach // DILATION
    exists = (window >= 0) & (window < SIZE) & (point < WINDOW)
    if DILATION > 1:
        exists = exists & (reach % DILATION == 0)
    return window, point, exists


@triton.jit
def max_pool_bwd(
    dy, index, dx, ROWS, LANES, C, D, H, W, O, P, Q,
    c_mul, c_shift, d_mul, d_shift, h_mul, h_shift, w_mul, w_shift,
    y_n_stride, y_c_stride, y_d_stride, y_h_stride, y_w_stride,
    i_n_stride, i_c_stride, i_d_stride, i_h_stride, i_w_stride,
    x_n_stride, x_c_stride, x_d_stride, x_h_stride, x_w_stride,
    T: tl.constexpr, R: tl.constexpr, S: tl.constexpr,
    STRIDE_D: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    PAD_D: tl.constexpr, PAD_H: tl.constexpr, PAD_W: tl.constexpr,
    DILATION_D: tl.constexpr, DILATION_H: tl.constexpr, DILATION_W: tl.constexpr,
    KIND: tl.constexpr, COLUMNS: tl.constexpr, HAS_D: tl.constexpr, UNROLL: tl.constexpr, PAIRS: tl.constexpr,
    WIDE: tl.constexpr, WIDE_PLANE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_L: tl.constexpr,
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
    # ---- where each row is: (n, c, z, h) with columns as lanes, (n, z, h, w) with channels as lanes
    z = row * 0
    if COLUMNS:
        rest, h = split(row, H, h_mul, h_shift, WIDE)
        if HAS_D:
            rest, z = split(rest, D, d_mul, d_shift, WIDE)
        n, c = split(rest, C, c_mul, c_shift, WIDE)
        row_x = n * x_n_stride + c * x_c_stride
        base_y = (n * y_n_stride + c * y_c_stride)[:, None]
        base_i = (n * i_n_stride + c * i_c_stride)[:, None]
        lane_x = lane * x_w_stride
        w = lane[None, :] * (2 if PAIRS else 1)
    else:
        rest, column = split(row, W, w_mul, w_shift, WIDE)
        rest, h = split(rest, H, h_mul, h_shift, WIDE)
        n = rest
        if HAS_D:
            n, z = split(rest, D, d_mul, d_shift, WIDE)
        row_x = n * x_n_stride + column * x_w_stride
        base_y = (n * y_n_stride)[:, None] + (lane * y_c_stride)[None, :]
        base_i = (n * i_n_stride)[:, None] + (lane * i_c_stride)[None, :]
        lane_x = lane * x_c_stride
        w = column[:, None]
    row_x += h * x_h_stride
    if HAS_D:
        row_x += z * x_d_stride
    exists = (row < ROWS)[:, None] & (lane < LANES)[None, :]
    PLACE: tl.constexpr = tl.int64 if WIDE_PLANE else tl.int32
    position = (z.to(PLACE) * H + h)[:, None] * W + w
    # ---- the windows that hold the element, last one first along each axis
    SUM: tl.constexpr = tl.float64 if dy.dtype.element_ty == tl.float64 else tl.float32
    total = tl.zeros((BLOCK_R, BLOCK_L), SUM)
    MOST_D: tl.constexpr = DILATION_D * (T - 1) // STRIDE_D + 1
    MOST_H: tl.constexpr = DILATION_H * (R - 1) // STRIDE_H + 1
    MOST_W: tl.constexpr = DILATION_W * (S - 1) // STRIDE_W + 1
    if PAIRS:
        # A lane is two neighbouring columns; the windows from `NEAR` on, counted from the lane, hold one or both.
        NEAR: tl.constexpr = (PAD_W - S + 2) // 2
        FAR: tl.constexpr = (PAD_W + 1) // 2
        other = tl.zeros((BLOCK_R, BLOCK_L), SUM)
        for i in tl.static_range(MOST_D):
            o, a, ok_d = _window(z, i, PAD_D, STRIDE_D, DILATION_D, T, O)
            for j in tl.static_range(MOST_H):
                p, b, ok_h = _window(h, j, PAD_H, STRIDE_H, DILATION_H, R, P)
                for near in tl.static_range(NEAR, FAR + 1):
                    q = lane[None, :] + near
                    ok = (ok_d & ok_h & (row < ROWS))[:, None] & (q >= 0) & (q < Q)
                    at_y = base_y + (o * y_d_stride + p * y_h_stride)[:, None] + q * y_w_stride
                    at_i = base_i + (o * i_d_stride + p * i_h_stride)[:, None] + q * i_w_stride
                    found = tl.load(index + at_i, mask=ok, other=0)
                    v = tl.load(dy + at_y, mask=ok, other=0.0).to(SUM)
                    s = PAD_W - 2 * near  # the window's point that lies on the even column
                    number = (a * R + b)[:, None] * S + s if KIND == 1 else position
                    if s >= 0 and s < S:
                        total += tl.where(ok & (found == number), v, 0.0)
                    if s + 1 >= 0 and s + 1 < S:
                        other += tl.where(ok & (found == number + 1), v, 0.0)
    elif UNROLL:
        for i in tl.static_range(MOST_D):
            o, a, ok_d = _window(z, i, PAD_D, STRIDE_D, DILATION_D, T, O)
            for j in tl.static_range(MOST_H):
                p, b, ok_h = _window(h, j, PAD_H, STRIDE_H, DILATION_H, R, P)
                for k in tl.static_range(MOST_W):
                    q, s, ok_w = _window(w, k, PAD_W, STRIDE_W, DILATION_W, S, Q)
                    ok = exists & (ok_d & ok_h)[:, None] & ok_w
                    at_y = base_y + (o * y_d_stride + p * y_h_stride)[:, None] + q * y_w_stride
                    at_i = base_i + (o * i_d_stride + p * i_h_stride)[:, None] + q * i_w_stride
                    number = (a * R + b)[:, None] * S + s if KIND == 1 else position
                    found = tl.load(index + at_i, mask=ok, other=0)
                    v = tl.load(dy + at_y, mask=ok, other=0.0).to(SUM)
                    total += tl.where(ok & (found == number), v, 0.0)
    else:
        for turn in range(MOST_D * MOST_H * MOST_W):
            o, a, ok_d = _window(z, turn // (MOST_H * MOST_W), PAD_D, STRIDE_D, DILATION_D, T, O)
            p, b, ok_h = _window(h, turn // MOST_W % MOST_H, PAD_H, STRIDE_H, DILATION_H, R, P)
            q, s, ok_w = _window(w, turn % MOST_W, PAD_W, STRIDE_W, DILATION_W, S, Q)
            ok = exists & (ok_d & ok_h)[:, None] & ok_w
            at_y = base_y + (o * y_d_stride + p * y_h_stride)[:, None] + q * y_w_stride
            at_i = base_i + (o * i_d_stride + p * i_h_stride)[:, None] + q * i_w_stride
            number = (a * R + b)[:, None] * S + s if KIND == 1 else position
            found = tl.load(index + at_i, mask=ok, other=0)
            v = tl.load(dy + at_y, mask=ok, other=0.0).to(SUM)
            total += tl.where(ok & (found == number), v, 0.0)
    if PAIRS:
        column = (lane_block * 2 * BLOCK_L + tl.arange(0, 2 * BLOCK_L))[None, :]
        both = tl.reshape(tl.join(total, other), (BLOCK_R, 2 * BLOCK_L))
        exists = (row < ROWS)[:, None] & (column < W)
        tl.store(dx + (row_x[:, None] + column), both.to(dx.dtype.element_ty), mask=exists)
    else:
        tl.store(dx + (row_x[:, None] + lane_x[None, :]), total.to(dx.dtype.element_ty), mask=exists)


def _lanes_are_columns(g: PoolGeometry, forward: bool) -> bool:
    """Columns where a step along W is the shorter one in memory, in the tensor that is written and read most."""
    if g.C == 1:
        return True
    width = g.out_size[2] if forward else g.in_size[2]
    return width > 1 and g.x_strides[4] < g.x_strides[1]


def _is_paired(g: PoolGeometry, forward: bool) -> bool:
    """Whether columns of x are taken two by two: at stride 2 single ones would be every other one in memory."""
    if not _lanes_are_columns(g, forward) or g.x_strides[4] != 1 or g.stride[2] != 2 or g.dilation[2] != 1:
        return False
    return math.prod(_loops(g, forward)) <= UNROLLED


def _loops(g: PoolGeometry, forward: bool) -> list[int]:
    """Turns of the loops over D, H, W: points of a window, or windows that hold an element."""
    if forward:
        return list(g.window)
    return [d * (n - 1) // s + 1 for d, n, s in zip(g.dilation, g.window, g.stride, strict=True)]


class MaxTiled(TritonEngine):
    name = "pool.max_tiled"
    operations = ("max_pool_fwd", "max_pool_bwd")

    def refusals(self, problem: Problem) -> list[str]:
        r = Refusals()
        for role, t in problem.items:
            if role != "index":
                r.require(t.dtype in TYPES, f"{role} of type {', '.join(TYPES)}", t.dtype)
            r.require(t.numel > 0, f"elements in {role}", str(t))
        if not r:
            tiles = min(math.prod(self._grid(problem, c)) for c in self.configs(problem))
            r.require(tiles <= INT32, f"at most {INT32} tiles", tiles)
        return r

    def _shape(self, problem: Problem) -> tuple[int, int, bool]:
        """Rows and lanes of the whole problem, and whether lanes are columns."""
        g = PoolGeometry.of(problem)
        forward = problem.op.name == "max_pool_fwd"
        plane = g.out_size if forward else g.in_size
        if _lanes_are_columns(g, forward):
            lanes = -(-plane[2] // 2) if _is_paired(g, forward) and not forward else plane[2]
            return g.N * g.C * plane[0] * plane[1], lanes, True
        return g.N * math.prod(plane), g.C, False

    def _grid(self, problem: Problem, config: Config) -> tuple[int, int]:
        rows, lanes, _ = self._shape(problem)
        return -(-rows // config["BLOCK_R"]), -(-lanes // config["BLOCK_L"])

    def configs(self, problem: Problem) -> list[Config]:
        rows, lanes, _ = self._shape(problem)
        widest = min(triton.next_power_of_2(lanes), 256)
        # The block of lanes that wastes least; of equals the widest.
        block = min(
            (n for n in (16, 32, 64, 128, 256) if n <= widest), default=widest, key=lambda n: (-(-lanes // n) * n, -n)
        )
        found = []
        for elements, warps in ((1024, 4), (512, 4), (2048, 4), (2048, 8)):
            height = max(1, min(elements // block, triton.next_power_of_2(rows)))
            config = {"BLOCK_R": height, "BLOCK_L": block, "num_warps": warps, "num_stages": 1}
            if config not in found:
                found.append(config)
        return found

    def cost(self, problem: Problem, config: Config) -> float:
        rows, lanes, _ = self._shape(problem)
        row_blocks, lane_blocks = self._grid(problem, config)
        waste = row_blocks * lane_blocks * config["BLOCK_R"] * config["BLOCK_L"] / (rows * lanes)
        busy = min(1.0, row_blocks * lane_blocks / problem.target.processors)
        points = math.prod(PoolGeometry.of(problem).window)
        # A window point costs a load that hits the first-level cache, at about twenty times the memory's rate.
        moved = problem.bytes + 0.05 * waste * points * problem.items[0][1].itemsize * rows * lanes
        return roofline(problem, flops=0.0, bytes=moved, memory_efficiency=0.8 * busy)

    def launches(self, problem: Problem, config: Config) -> list[Launch]:
        g = PoolGeometry.of(problem)
        forward = problem.op.name == "max_pool_fwd"
        rows, lanes, columns = self._shape(problem)
        plane = dict(zip("OPQ" if forward else "DHW", g.out_size if forward else g.in_size, strict=True))
        kind = INDEX_KINDS[problem.op.index_type]  # type: ignore[attr-defined]
        args: dict[str, Argument] = {"ROWS": rows, "LANES": lanes, "C": g.C}
        args |= dict(zip("DHWOPQ", (*g.in_size, *g.out_size), strict=True))
        for name, size in {"C": g.C, **plane}.items():
            args[f"{name.lower()}_mul"], args[f"{name.lower()}_shift"] = reciprocal(size)
        for name, strides in (("x", g.x_strides), ("y", g.y_strides), ("i", g.index_strides)):
            absent = name == "i" and kind == 0
            args |= {f"{name}_{axis}_stride": None if absent else s for axis, s in zip("ncdhw", strides, strict=True)}
        args |= {role: role for role in (("x", "y", "index") if forward else ("dy", "index", "dx"))}
        constexprs: dict[str, Any] = dict(zip("TRS", g.window, strict=True))
        for name, values in (("STRIDE", g.stride), ("PAD", g.pad), ("DILATION", g.dilation)):
            constexprs |= {f"{name}_{axis}": v for axis, v in zip("DHW", values, strict=True)}
        edge = config["BLOCK_R"] + config["BLOCK_L"]
        widest = max(rows + edge, lanes + edge, *(t.span for _, t in problem.items))
        places = math.prod(s + 2 * p for s, p in zip(g.in_size, g.pad, strict=True))
        constexprs |= {
            "KIND": kind, "COLUMNS": columns, "HAS_D": g.in_size[0] > 1 or g.out_size[0] > 1 or g.window[0] > 1,
            "UNROLL": math.prod(_loops(g, forward)) <= UNROLLED, "PAIRS": _is_paired(g, forward),
            "WIDE": widest > INT32, "WIDE_PLANE": places > INT32,
            "BLOCK_R": config["BLOCK_R"], "BLOCK_L": config["BLOCK_L"],
        }  # fmt: skip
        row_blocks, lane_blocks = self._grid(problem, config)
        kernel = max_pool_fwd if forward else max_pool_bwd
        grid = (row_blocks * lane_blocks,)
        return [Launch(kernel, grid, args, constexprs, config["num_warps"], config["num_stages"])]
