"""``pool.average_gathered``: backward average, power and adaptive average pooling on a GPU, in Triton.

Method: a program takes a tile of dx. Its lanes run along whichever of W and C lies closer together in memory (W for
nchw, C for nhwc), its rows over everything else. Each element gathers from the windows that hold it: summed in one
order, in float32 (float64 for float64), written once, no atomics.

A row of a tile makes a patch of dx: as many elements below each other as keep the windows' places known when the kernel
is compiled (2 at stride 2, 4 at stride 1), and two side by side at stride 2. Each dy that the patch's windows share is
read once and added to all elements that it reaches (`USED_H`, `USED_W`: bits for each window). Where the stride is no
such number, or windows are adaptive of sizes that do not divide, the windows that hold an element are found by division
and asked one by one. With columns as lanes, two side by side are put together in registers and written as a whole run.

Offsets are 64-bit where a tensor reaches past 2^31 elements. Cost: the memory traffic. No limits beside the four types.
"""

import math

import triton
import triton.language as tl

from ...core.engine import Config, Refusals
from ...core.heuristics import roofline
from ...core.problem import Problem
from ...ops.pooling import WindowAxis
from .._triton.index import INT32, reciprocal, split
from .._triton.launch import Argument, Launch, Real, TritonEngine
from .._triton.windows import counted, holder, power
from ._axes import (
    Windows,
    block_of_lanes,
    float_type,
    is_wide,
    kind_of,
    lanes_are_columns,
    shared_divisor,
    sign_of,
    window_constants,
)

TYPES = ("f64", "f32", "f16", "bf16")
UNROLLED = 48  # loads up to which the loops over windows are written out


@triton.jit
def _share(dy, at, y, at_y, mask, weight, norm, SUMS: tl.constexpr, KIND: tl.constexpr, SIGN: tl.constexpr):
    """What a window gives to each of its points, before their own power."""
    v = tl.load(dy + at, mask=mask, other=0.0).to(SUMS)
    if KIND > 0:
        root = tl.load(y + at_y, mask=mask, other=0.0).to(SUMS)
        if KIND == 2:
            v = tl.where(root == 0, 0.0, v / root)
        elif KIND == 3:
            # The exponent 1 - p is even where p is odd; negative roots come with odd powers only.
            v = tl.where(root == 0, 0.0, v * power(root, 1.0 - norm, -SIGN))
        else:
            v = tl.where(root == 0, 0.0, v)
    return v * weight


@triton.jit
def _give(dx, at, total, x, at_x, mask, norm, KIND: tl.constexpr, SIGN: tl.constexpr):
    if KIND >= 2:
        own = tl.load(x + at_x, mask=mask, other=0.0).to(total.dtype)
        if KIND == 2:
            total = total * own
        else:
            total = total * power(own, norm - 1.0, -SIGN)
    tl.store(dx + at, total.to(dx.dtype.element_ty), mask=mask)


@triton.jit
def average_pool_bwd(
    dy, x, y, dx, norm, ROWS, LANES, C, D, H, W, HG, WG, O, P, Q,
    c_mul, c_shift, d_mul, d_shift, hg_mul, hg_shift, wg_mul, wg_shift,
    dy_n_stride, dy_c_stride, dy_d_stride, dy_h_stride, dy_w_stride,
    x_n_stride, x_c_stride, x_d_stride, x_h_stride, x_w_stride,
    y_n_stride, y_c_stride, y_d_stride, y_h_stride, y_w_stride,
    dx_n_stride, dx_c_stride, dx_d_stride, dx_h_stride, dx_w_stride,
    T: tl.constexpr, R: tl.constexpr, S: tl.constexpr,
    STRIDE_D: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    PAD_D: tl.constexpr, PAD_H: tl.constexpr, PAD_W: tl.constexpr,
    AFTER_D: tl.constexpr, AFTER_H: tl.constexpr, AFTER_W: tl.constexpr,
    DILATION_D: tl.constexpr, DILATION_H: tl.constexpr, DILATION_W: tl.constexpr,
    ADAPTIVE_D: tl.constexpr, ADAPTIVE_H: tl.constexpr, ADAPTIVE_W: tl.constexpr,
    KIND: tl.constexpr, SIGN: tl.constexpr, PADDED: tl.constexpr, DIVISOR: tl.constexpr, SCALE: tl.constexpr,
    COLUMNS: tl.constexpr, HAS_D: tl.constexpr, UNROLL: tl.constexpr,
    GROUP_H: tl.constexpr, FIRST_H: tl.constexpr, MANY_H: tl.constexpr, USED_H: tl.constexpr, KNOWN_H: tl.constexpr,
    GROUP_W: tl.constexpr, FIRST_W: tl.constexpr, MANY_W: tl.constexpr, USED_W: tl.constexpr, KNOWN_W: tl.constexpr,
    MANY_D: tl.constexpr, WIDE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_L: tl.constexpr,
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
    # ---- where each row is: (n, c, z, h) with columns as lanes, (n, z, h, w) with channels as lanes; by patches
    z = row * 0
    if COLUMNS:
        rest, hg = split(row, HG, hg_mul, hg_shift, WIDE)
        if HAS_D:
            rest, z = split(rest, D, d_mul, d_shift, WIDE)
        n, c = split(rest, C, c_mul, c_shift, WIDE)
        row_x = (n * dx_n_stride + c * dx_c_stride)[:, None]
        row_y = (n * dy_n_stride + c * dy_c_stride)[:, None]
        wg = lane[None, :]
    else:
        rest, column = split(row, WG, wg_mul, wg_shift, WIDE)
        rest, hg = split(rest, HG, hg_mul, hg_shift, WIDE)
        n = rest
        if HAS_D:
            n, z = split(rest, D, d_mul, d_shift, WIDE)
        row_x = (n * dx_n_stride)[:, None] + (lane * dx_c_stride)[None, :]
        row_y = (n * dy_n_stride)[:, None] + (lane * dy_c_stride)[None, :]
        wg = column[:, None]
    given_x, given_y = row_x, row_y
    if KIND > 0:
        if COLUMNS:
            given_x = (n * x_n_stride + c * x_c_stride)[:, None]
            given_y = (n * y_n_stride + c * y_c_stride)[:, None]
        else:
            given_x = (n * x_n_stride)[:, None] + (lane * x_c_stride)[None, :]
            given_y = (n * y_n_stride)[:, None] + (lane * y_c_stride)[None, :]
    exists = (row < ROWS)[:, None] & (lane < LANES)[None, :]
    SUMS: tl.constexpr = tl.float64 if dy.dtype.element_ty == tl.float64 else tl.float32
    acc0 = tl.zeros((BLOCK_R, BLOCK_L), SUMS)
    acc1 = tl.zeros((BLOCK_R, BLOCK_L), SUMS)
    acc2 = tl.zeros((BLOCK_R, BLOCK_L), SUMS)
    acc3 = tl.zeros((BLOCK_R, BLOCK_L), SUMS)
    if UNROLL:
        for i in tl.static_range(MANY_D):
            o, ok_d = holder(z, i, D, O, PAD_D, STRIDE_D, DILATION_D, T, ADAPTIVE_D)
            count_d = 1
            if DIVISOR == 0:
                count_d = counted(o, D, O, PAD_D, AFTER_D, STRIDE_D, DILATION_D, T, PADDED, ADAPTIVE_D)
            for j in tl.static_range(MANY_H):
                if KNOWN_H:
                    p = hg * (GROUP_H // STRIDE_H) + (FIRST_H + j)
                    ok_h = (p >= 0) & (p < P)
                else:
                    p, ok_h = holder(hg, j, H, P, PAD_H, STRIDE_H, DILATION_H, R, ADAPTIVE_H)
                count_h = 1
                if DIVISOR == 0:
                    count_h = counted(p, H, P, PAD_H, AFTER_H, STRIDE_H, DILATION_H, R, PADDED, ADAPTIVE_H)
                    count_h = (count_h * count_d)[:, None]
                line = row_y + (o * dy_d_stride + p * dy_h_stride)[:, None]
                line_y = given_y
                if KIND > 0:
                    line_y = given_y + (o * y_d_stride + p * y_h_stride)[:, None]
                for k in tl.static_range(MANY_W):
                    if KNOWN_W:
                        q = wg * (GROUP_W // STRIDE_W) + (FIRST_W + k)
                        ok_w = (q >= 0) & (q < Q)
                    else:
                        q, ok_w = holder(wg, k, W, Q, PAD_W, STRIDE_W, DILATION_W, S, ADAPTIVE_W)
                    if DIVISOR == 0:
                        count = counted(q, W, Q, PAD_W, AFTER_W, STRIDE_W, DILATION_W, S, PADDED, ADAPTIVE_W)
                        weight = SCALE / (count * count_h).to(SUMS)
                    else:
                        weight = tl.full((1, 1), 1.0 / DIVISOR, SUMS)
                    mask = exists & (ok_d & ok_h)[:, None] & ok_w
                    at_y = line_y
                    if KIND > 0:
                        at_y = line_y + q * y_w_stride
                    v = _share(dy, line + q * dy_w_stride, y, at_y, mask, weight, norm, SUMS, KIND, SIGN)
                    # Which elements of the patch the window holds: four bits for rows, two for columns.
                    if (USED_W >> (4 * k)) & 1:
                        if (USED_H >> (4 * j)) & 1:
                            acc0 += v
                        if (USED_H >> (4 * j)) & 2:
                            if GROUP_W == 1:
                                acc1 += v
                            else:
                                acc2 += v
                        if (USED_H >> (4 * j)) & 4:
                            acc2 += v
                        if (USED_H >> (4 * j)) & 8:
                            acc3 += v
                    if (USED_W >> (4 * k)) & 2:
                        if (USED_H >> (4 * j)) & 1:
                            acc1 += v
                        if (USED_H >> (4 * j)) & 2:
                            acc3 += v
    else:
        for turn in range(MANY_D * MANY_H * MANY_W):
            o, ok_d = holder(z, turn // (MANY_H * MANY_W), D, O, PAD_D, STRIDE_D, DILATION_D, T, ADAPTIVE_D)
            p, ok_h = holder(hg, turn // MANY_W % MANY_H, H, P, PAD_H, STRIDE_H, DILATION_H, R, ADAPTIVE_H)
            q, ok_w = holder(wg, turn % MANY_W, W, Q, PAD_W, STRIDE_W, DILATION_W, S, ADAPTIVE_W)
            if DIVISOR == 0:
                count_d = counted(o, D, O, PAD_D, AFTER_D, STRIDE_D, DILATION_D, T, PADDED, ADAPTIVE_D)
                count_h = counted(p, H, P, PAD_H, AFTER_H, STRIDE_H, DILATION_H, R, PADDED, ADAPTIVE_H)
                count = counted(q, W, Q, PAD_W, AFTER_W, STRIDE_W, DILATION_W, S, PADDED, ADAPTIVE_W)
                weight = SCALE / (count * (count_h * count_d)[:, None]).to(SUMS)
            else:
                weight = tl.full((1, 1), 1.0 / DIVISOR, SUMS)
            mask = exists & (ok_d & ok_h)[:, None] & ok_w
            at = row_y + (o * dy_d_stride + p * dy_h_stride)[:, None] + q * dy_w_stride
            at_y = given_y
            if KIND > 0:
                at_y = given_y + (o * y_d_stride + p * y_h_stride)[:, None] + q * y_w_stride
            acc0 += _share(dy, at, y, at_y, mask, weight, norm, SUMS, KIND, SIGN)
    # ---- the results
    if HAS_D:
        row_x += (z * dx_d_stride)[:, None]
        if KIND > 0:
            given_x += (z * x_d_stride)[:, None]
    for i in tl.static_range(GROUP_H):
        h = hg * GROUP_H + i
        line = row_x + (h * dx_h_stride)[:, None]
        line_x = given_x
        if KIND > 0:
            line_x = given_x + (h * x_h_stride)[:, None]
        there = ((row < ROWS) & (h < H))[:, None]
        if GROUP_W == 2:
            even, odd = acc0, acc1
            if i == 1:
                even, odd = acc2, acc3
            if COLUMNS:
                w = (lane_block * 2 * BLOCK_L + tl.arange(0, 2 * BLOCK_L))[None, :]
                both = tl.reshape(tl.join(even, odd), (BLOCK_R, 2 * BLOCK_L))
                at_x = line_x + w * x_w_stride if KIND > 0 else line_x
                _give(dx, line + w * dx_w_stride, both, x, at_x, there & (w < W), norm, KIND, SIGN)
            else:
                there = there & (lane < LANES)[None, :]
                w = wg * 2
                at_x = line_x + w * x_w_stride if KIND > 0 else line_x
                _give(dx, line + w * dx_w_stride, even, x, at_x, there & (w < W), norm, KIND, SIGN)
                w = wg * 2 + 1
                at_x = line_x + w * x_w_stride if KIND > 0 else line_x
                _give(dx, line + w * dx_w_stride, odd, x, at_x, there & (w < W), norm, KIND, SIGN)
        else:
            total = acc0
            if i == 1:
                total = acc1
            if i == 2:
                total = acc2
            if i == 3:
                total = acc3
            at_x = line_x + wg * x_w_stride if KIND > 0 else line_x
            mask = there & exists & (wg < W)
            _give(dx, line + wg * dx_w_stride, total, x, at_x, mask, norm, KIND, SIGN)


class _Reach:
    """Along one axis: the windows that a patch of `group` neighbouring elements is asked for."""

    def __init__(self, axis: WindowAxis, group: int):
        self.group, self.axis = group, axis
        self.known = axis.stride > 0 and group % axis.stride == 0
        if self.known:
            reach = axis.dilation * (axis.window - 1)
            self.first = -((reach - axis.before) // axis.stride)
            self.many = (group - 1 + axis.before) // axis.stride - self.first + 1
        else:
            self.first = 0
            if axis.stride:
                self.many = axis.dilation * (axis.window - 1) // axis.stride + 1
            else:
                self.many = max(map(len, axis.holders()))

    @property
    def used(self) -> int:
        """Four bits for each window: which elements of the patch it holds."""
        if not self.known:
            return sum(1 << 4 * k for k in range(self.many))
        bits = 0
        for k in range(self.many):
            for i in range(self.group):
                reach = i + self.axis.before - (self.first + k) * self.axis.stride
                point, rest = divmod(reach, self.axis.dilation)
                bits |= (0 <= point < self.axis.window and not rest) << 4 * k + i
        return bits


class AverageGathered(TritonEngine):
    name = "pool.average_gathered"
    operations = ("avg_pool_bwd", "lp_pool_bwd", "adaptive_avg_pool_bwd")

    def refusals(self, problem: Problem) -> list[str]:
        r = Refusals()
        r.require_tensors(problem.items, TYPES, elements=True)
        if not r:
            tiles = min(math.prod(self._grid(problem, c)) for c in self.configs(problem))
            r.require(tiles <= INT32, f"at most {INT32} tiles", tiles)
        return r

    def _shape(self, problem: Problem, group: tuple[int, int]) -> tuple[int, int, bool]:
        """Rows and lanes of the whole problem, and whether lanes are columns."""
        g = Windows.of(problem)
        d, h, w = g.sizes
        rows, lanes = g.N * d * -(-h // group[0]), -(-w // group[1])
        columns = lanes_are_columns(g, "dx", w)
        return (rows * g.C, lanes, True) if columns else (rows * lanes, g.C, False)

    def _grid(self, problem: Problem, config: Config) -> tuple[int, int]:
        rows, lanes, _ = self._shape(problem, (config["GROUP_H"], config["GROUP_W"]))
        return -(-rows // config["BLOCK_R"]), -(-lanes // config["BLOCK_L"])

    def configs(self, problem: Problem) -> list[Config]:
        d, h, w = Windows.of(problem).axes
        whole_w = 2 if w.stride == 2 and w.size > 1 else 1
        whole_h = {1: 4, 2: 2, 3: 3, 4: 4}.get(h.stride, 1) if h.size > 1 else 1
        patches = [(min(whole_h, 4 // whole_w), whole_w), (1, 1), (1, whole_w)]
        if h.stride == 1 and whole_w == 1:
            patches.insert(1, (2, 1))
        found: list[Config] = []
        for (p, q), elements, warps in [
            (patches[0], 1024, 4),
            (patches[0], 512, 4),
            *((g, 1024, 4) for g in patches[1:]),
        ]:
            several = (p, q) != (1, 1)
            if several and not _unrolled(d, h, w, p, q):
                continue
            rows, lanes, _ = self._shape(problem, (p, q))
            block = block_of_lanes(lanes)
            height = max(1, min(elements // block, 1 << (rows - 1).bit_length()))
            config = {"GROUP_H": p, "GROUP_W": q, "BLOCK_R": height, "BLOCK_L": block}
            config |= {"num_warps": warps, "num_stages": 1}
            if config not in found:
                found.append(config)
        return found

    def cost(self, problem: Problem, config: Config) -> float:
        d, h, w = Windows.of(problem).axes
        group = config["GROUP_H"], config["GROUP_W"]
        rows, lanes, _ = self._shape(problem, group)
        row_blocks, lane_blocks = self._grid(problem, config)
        waste = row_blocks * lane_blocks * config["BLOCK_R"] * config["BLOCK_L"] / (rows * lanes)
        busy = min(1.0, row_blocks * lane_blocks / problem.target.processors)
        turns = _Reach(d, 1).many * _Reach(h, group[0]).many * _Reach(w, group[1]).many
        moved = problem.bytes + 0.05 * waste * turns * problem.items[0][1].itemsize * rows * lanes
        # Patches of one element find their windows by division.
        efficiency = 0.85 if group != (1, 1) else 0.6
        return roofline(problem, flops=0.0, bytes=moved, memory_efficiency=efficiency * busy)

    def launches(self, problem: Problem, config: Config) -> list[Launch]:
        g = Windows.of(problem)
        d, h, w = g.axes
        group = config["GROUP_H"], config["GROUP_W"]
        rows, lanes, columns = self._shape(problem, group)
        norm = getattr(problem.op, "norm", None)
        along_d, along_h, along_w = _Reach(d, 1), _Reach(h, group[0]), _Reach(w, group[1])
        unroll = _unrolled(d, h, w, *group)
        if not unroll:  # every window is found by division
            along_h.many, along_w.many = (
                a.dilation * (a.window - 1) // a.stride + 1 if a.stride else r.many
                for a, r in ((h, along_h), (w, along_w))
            )
        args: dict[str, Argument] = {"ROWS": rows, "LANES": lanes, "C": g.C}
        args |= {"HG": -(-h.size // group[0]), "WG": -(-w.size // group[1])}
        for name, size in {"C": g.C, "D": d.size, "HG": args["HG"], "WG": args["WG"]}.items():
            args[f"{name.lower()}_mul"], args[f"{name.lower()}_shift"] = reciprocal(size)  # type: ignore[arg-type]
        args |= dict(zip("DHWOPQ", (*g.sizes, *g.counts), strict=True))
        for role in ("dy", "x", "y", "dx"):
            strides = g.strides.get(role, (None,) * 5)
            args |= {f"{role}_{axis}_stride": s for axis, s in zip("ncdhw", strides, strict=True)} | {role: role}
        args["norm"] = Real(norm, float_type(problem)) if norm is not None and kind_of(norm) == 3 else None
        constexprs = window_constants(g) | {
            "KIND": kind_of(norm), "SIGN": sign_of(norm), "DIVISOR": shared_divisor(problem, g.axes),
            "PADDED": norm is not None or getattr(problem.op, "count_padding", False),
            "SCALE": float(math.prod(a.window for a in g.axes)) if norm is not None else 1.0,
            "COLUMNS": columns, "HAS_D": d.size > 1 or d.count > 1 or d.window > 1, "UNROLL": unroll,
            "GROUP_H": group[0], "FIRST_H": along_h.first, "MANY_H": along_h.many, "USED_H": along_h.used,
            "GROUP_W": group[1], "FIRST_W": along_w.first, "MANY_W": along_w.many, "USED_W": along_w.used,
            "KNOWN_H": along_h.known, "KNOWN_W": along_w.known, "MANY_D": along_d.many,
            "WIDE": is_wide(problem, g, rows, lanes, config),
            "BLOCK_R": config["BLOCK_R"], "BLOCK_L": config["BLOCK_L"],
        }  # fmt: skip
        row_blocks, lane_blocks = self._grid(problem, config)
        grid = (row_blocks * lane_blocks,)
        return [Launch(average_pool_bwd, grid, args, constexprs, config["num_warps"], config["num_stages"])]


def _unrolled(d: WindowAxis, h: WindowAxis, w: WindowAxis, group_h: int, group_w: int) -> bool:
    """Whether the loops over windows are short enough to be written out."""
    return _Reach(d, 1).many * _Reach(h, group_h).many * _Reach(w, group_w).many <= UNROLLED
