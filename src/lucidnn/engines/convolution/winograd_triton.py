"""``conv.winograd_triton``: Winograd's minimal filtering on a GPU in one kernel, forward and data gradient.

Method: a first kernel transforms the filters into the workspace. A block of the second has some tiles of m x m results
and some filters: for every step of channels it reads the tiles' windows from where they are, transforms them in
registers, multiplies them point by point with the transformed filters (a sum for each of the n x n points stays in
registers), and in the end transforms the sums back, finishes and stores the pixels. No points in memory. The transforms
are those of `lucidnn.engines._triton.winograd`. Arithmetic is float32 on vector units, also where TF32 is allowed:
matrix units want the windows in a layout that costs more registers than there are.

Cost: n^2 / (m r)^2 of the arithmetic, 1/2.25 with m = 2 and 1/4 with m = 4 for 3 x 3 filters. Windows overlap (n^2 of
m^2 points are read, mostly from caches) and are transformed again for every block of filters. A block is small,
because it holds n^2 sums for each element, so that its products reach a lower rate than a plain one. So this is for few
filters, where `conv.winograd_gemm_triton` is bound by its points' traffic.

Limits: filters of 3 x 3, 3 x 1, 1 x 3 or 3, unit stride and dilation, expected errors below what a sum of so many terms
may have. An infinity or NaN spreads over its tiles. Lavin and Gray, "Fast algorithms for convolutional neural
networks", 2016.
"""

import math

import triton
import triton.language as tl

from ...core.engine import Config
from ...core.problem import Problem
from .._triton.launch import Argument, Launch, Slice, TritonEngine
from .._triton.result import places
from .._triton.tiles import start
from .._triton.winograd import SIZES, Winograd, require, store_tile, tile_place, window


@triton.jit
def conv_winograd(
    src, filters, z, bias, dst, alpha, beta, parameter, ROWS, RED, OUT, TILES_H, TILES_W, H, W, SRC_H, SRC_W,
    start_h, start_w, src_n_stride, src_c_stride, src_h_stride, src_w_stride,
    filters_point_stride, filters_group_stride, filters_red_stride, bias_stride,
    z_n_stride, z_c_stride, z_d_stride, z_h_stride, z_w_stride,
    dst_n_stride, dst_c_stride, dst_d_stride, dst_h_stride, dst_w_stride,
    B_H: tl.constexpr, B_W: tl.constexpr, A_H: tl.constexpr, A_W: tl.constexpr,
    HAS_D: tl.constexpr, ACT: tl.constexpr, WIDE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    POINTS: tl.constexpr = len(B_H) * len(B_W)
    blocks_m = tl.cast(tl.cdiv(ROWS, BLOCK_M), tl.int32)  # ROWS may be the constant 1
    blocks_n = tl.cdiv(OUT, BLOCK_N)
    tile_n = tl.program_id(0) % blocks_n
    rest = tl.program_id(0) // blocks_n
    tile_m = rest % blocks_m
    group = rest // blocks_m
    if WIDE:
        tile_m = tile_m.to(tl.int64)
        tile_n = tile_n.to(tl.int64)
        group = group.to(tl.int64)
    row = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    n, h, w = tile_place(row, TILES_H, TILES_W)
    h0 = h * len(A_H) + start_h
    w0 = w * len(A_W) + start_w
    first = group * RED * src_c_stride
    base = (n * src_n_stride + h0 * src_h_stride + w0 * src_w_stride + first)[:, None]
    columns = filters + (group * filters_group_stride + k)[None, :]
    ok_row = (row < ROWS)[:, None]
    ok_k = (k < OUT)[None, :]
    sums = ()
    for _ in tl.static_range(POINTS):
        sums = sums + (tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32),)
    for step in range(tl.maximum(tl.cdiv(RED, BLOCK_K), 1)):
        c = step * BLOCK_K + tl.arange(0, BLOCK_K)
        if WIDE:
            c = c.to(tl.int64)
        ok_c = c < RED
        at = base + (c * src_c_stride)[None, :]
        points = window(
            src, at, ok_row & ok_c[None, :], h0, w0, SRC_H, SRC_W, src_h_stride, src_w_stride, B_H, B_W, tl.float32
        )
        rows = columns + (c * filters_red_stride)[:, None]
        more = ()
        for point in tl.static_range(POINTS):
            weight = tl.load(rows + point * filters_point_stride, mask=ok_c[:, None] & ok_k, other=0.0)
            # each trip sums for itself: a long chain would lose digits
            product = tl.dot(points[point], weight, input_precision="ieee", max_num_imprecise_acc=1)
            more = more + (sums[point] + product,)
        sums = more
    store_tile(
        sums, z, bias, dst, alpha, beta, parameter, n, h, w, row < ROWS, group * OUT + k, k < OUT, H, W, bias_stride,
        z_n_stride, z_c_stride, z_d_stride, z_h_stride, z_w_stride,
        dst_n_stride, dst_c_stride, dst_d_stride, dst_h_stride, dst_w_stride, A_H, A_W, HAS_D, ACT,
    )  # fmt: skip


# m -> blocks worth trying for 3 x 3 filters: (BLOCK_M, BLOCK_N, BLOCK_K, num_warps); n^2 sums an element of a block
_BLOCKS = {
    2: ((32, 32, 16, 4), (32, 32, 16, 8), (16, 64, 16, 8), (16, 16, 16, 4)),
    4: ((16, 32, 16, 8), (16, 16, 16, 4)),
}
# The same for filters of three taps along one axis: few points, larger blocks.
_BLOCKS_OF_LINES = dict.fromkeys((2, 4), ((64, 64, 16, 8), (32, 64, 16, 8), (32, 32, 16, 4), (16, 16, 16, 4)))
# Guess of the part of the peak that products reach for each sum a thread has at a point: with few of them it loads more
# than it multiplies.
RATE, MOST_RATE = 0.03, 0.35


class WinogradTriton(TritonEngine):
    """Filters in advance, all else in one kernel."""

    name = "conv.winograd_triton"
    operations = ("conv_fprop", "conv_dgrad")
    notes = frozenset({"winograd", "runtime_compilation", "spreads"})

    def refusals(self, problem: Problem) -> list[str]:
        r = require(problem)
        r.require(problem.items[0][1].dtype != "f64", "a type that is computed in f32", problem.items[0][1].dtype)
        if not r:
            fitting = any(Winograd(problem, m).fits("ieee") for m in _BLOCKS)
            r.require(fitting, "sums long enough to hide what the transforms err", str(problem))
        return r

    def configs(self, problem: Problem) -> list[Config]:
        found = []
        for m in _BLOCKS:
            v = Winograd(problem, m)
            if not v.fits("ieee"):
                continue
            blocks = (_BLOCKS if v.points >= 16 else _BLOCKS_OF_LINES)[m]
            for down, across, depth, warps in blocks:
                if across > 16 and across >= 2 * v.channels[1]:
                    continue  # half the block or more would be empty
                sizes = {"BLOCK_M": down, "BLOCK_N": across, "BLOCK_K": depth}
                found.append({"TILE": m, **sizes, "num_warps": warps, "num_stages": 1})
        return sorted(found, key=lambda config: self.cost(problem, config))

    def workspace_size(self, problem: Problem, config: Config) -> int:
        v = Winograd(problem, config["TILE"])
        return v.points * v.g.K * (v.g.C // v.g.G) * SIZES[v.dtype]

    def cost(self, problem: Problem, config: Config) -> float:
        v, target = Winograd(problem, config["TILE"]), problem.target
        blocks = _blocks(v, config)
        each = math.ceil(blocks / target.processors)
        sizes = config["BLOCK_M"] * config["BLOCK_N"] * -(-v.channels[0] // config["BLOCK_K"]) * config["BLOCK_K"]
        sums = config["BLOCK_M"] * config["BLOCK_N"] / (32 * config["num_warps"])
        rate = target.flops("f32") / target.processors * min(RATE * sums, MOST_RATE)
        products = each * 2.0 * v.points * sizes / rate
        # Every block reads its windows and filters, from the second-level cache as a rule: three times memory's rate.
        read = (config["BLOCK_M"] + config["BLOCK_N"]) * v.points * v.channels[0] * 4.0 * blocks
        traffic = problem.bytes / (0.6 * target.bandwidth) + read / (3 * target.bandwidth)
        return max(products, traffic) + start(target, 2)

    def launches(self, problem: Problem, config: Config) -> list[Launch]:
        v = Winograd(problem, config["TILE"])
        g, (cin, cout), to = v.g, v.channels, Slice(0, "f32")
        weights, dgrad = g.K * (g.C // g.G), v.direction == "dgrad"
        # [point][source channel][result channel], all groups' result channels (dgrad: all groups' sources) together
        where = (weights, 0, g.C // g.G, 1) if dgrad else (weights, 0, 1, g.K)
        sizes = (g.K, g.C // g.G, g.C // g.G)
        prepare = v.from_tensor("w", to, "G", sizes, where, False)
        source = problem.items[0][1]
        src_strides = (*source.strides[:2], *((0,) * (4 - source.ndim)), *source.strides[2:])
        args, constexprs = places(problem)
        found: dict[str, Argument] = {
            **args, "src": problem.inputs[0], "filters": to, "ROWS": v.rows, "RED": cin, "OUT": cout,
            **v.result_places, **dict(zip(("SRC_H", "SRC_W"), (1, *source.shape[2:])[-2:])), **v.starts,
            **{f"src_{axis}_stride": s for axis, s in zip("nchw", src_strides)},
            "filters_point_stride": weights, "filters_group_stride": cin * cout if dgrad else cout,
            "filters_red_stride": cout if dgrad else g.K,
        }  # fmt: skip
        matrices = {f"{kind}_{axis[-1]}": m for kind in "AB" for axis, m in v.matrices(kind).items()}
        constexprs |= {
            **matrices, "WIDE": v.is_wide,
            **{knob: config[knob] for knob in ("BLOCK_M", "BLOCK_N", "BLOCK_K")},
        }  # fmt: skip
        grid = (_blocks(v, config),)
        return [prepare, Launch(conv_winograd, grid, found, constexprs, config["num_warps"], config["num_stages"])]


def _blocks(v: Winograd, config: Config) -> int:
    return -(-v.rows // config["BLOCK_M"]) * -(-v.channels[1] // config["BLOCK_N"]) * v.g.G
