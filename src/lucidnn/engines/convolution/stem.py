"""Forward convolution of few channels, a network's first layer, as a matrix product over runs of inputs, in Triton.

With 1 to 4 channels a filter tap is no reduction: taps and channels have to share one axis, and a gathered product
then spends its time on finding out where each element lies. Here the reduction is cut into the runs of inputs that a
row of the filter reads (`lucidnn.engines._triton.runs`), each padded to a power of two: of a 7x7 filter on 3 channels
7 runs of 21, padded to 32, where channels are innermost, or 21 runs of 7, padded to 8. Places are sums of two numbers,
a run's loads lie together, and nothing is divided within the tile. A first kernel packs the filter in the same order
into the workspace, so that the product reads it by whole tiles without edges.

Any strides, asymmetric padding, dilation and groups of up to 4 channels, 1 to 3 dimensions; float32 sums (float64 for
float64); float32 under ``math=tf32`` is rounded to TF32. Cost: the definition's operations times the padding (1.1 to
1.6), or one load for each element of the gathered operand; the filter is packed at each call. Limits: filters at most
64 wide.
"""

import math

import triton
import triton.language as tl

from ...core.engine import Config, Refusals
from ...core.problem import Problem
from ...ops.convolution import Geometry
from .._triton.index import INT32
from .._triton.launch import Launch, Slice, TritonEngine
from .._triton.result import places, store_pixels
from .._triton.runs import Runs, where_in_runs
from .._triton.tf32 import rounded
from .._triton.tiles import Gemm, one_by_one, ranked, seconds, shapes, start

DTYPES = ("f64", "f32", "f16", "bf16")
MOST_CHANNELS = 4  # of a group
MOST_WIDTH = 64


@triton.jit
def conv_stem(
    x, w, bias, z, dst, alpha, beta, parameter,
    M, O, P, Q, x_d, x_h, x_columns, C, K, GROUPS, pad_d, pad_h, pad_run, column_step,
    x_start, x_n_stride, x_c_stride, x_d_stride, x_h_stride, x_w_stride, x_run_stride, w_k_stride, w_red_stride,
    bias_stride, z_n_stride, z_c_stride, z_d_stride, z_h_stride, z_w_stride,
    dst_n_stride, dst_c_stride, dst_d_stride, dst_h_stride, dst_w_stride,
    T: tl.constexpr, R: tl.constexpr, RUN: tl.constexpr, RUN_STEP: tl.constexpr, PAD: tl.constexpr,
    LINES: tl.constexpr, STRIDE_D: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    DILATION_D: tl.constexpr, DILATION_H: tl.constexpr, HAS_D: tl.constexpr, WIDE: tl.constexpr, ACT: tl.constexpr,
    PRECISION: tl.constexpr, EVEN_K: tl.constexpr, INNER_OUT: tl.constexpr, STEPS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    grid_n = tl.cdiv(K, BLOCK_N)
    tile_n = tl.program_id(0) % grid_n
    pid = tl.program_id(0) // grid_n
    group = pid % GROUPS
    tile_m = pid // GROUPS
    if WIDE:
        tile_m = tile_m.to(tl.int64)
        group = group.to(tl.int64)
    m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    ok_m = m < M
    q = m % Q
    line = m // Q
    p = line % P
    n = line // P
    o = 0
    row = p * (STRIDE_H * x_h_stride) + q * (STRIDE_W * x_w_stride) + group * (C * x_c_stride) + x_start
    # rows past the last are moved out of the image, so that one comparison serves for both
    h_rows = tl.where(ok_m, p * STRIDE_H - pad_h, -(1 << 30))[:, None]
    column_rows = (q * column_step - pad_run)[:, None]
    d_rows = 0
    if HAS_D:
        o = n % O
        n = n // O
        row += o * (STRIDE_D * x_d_stride)
        d_rows = (o * STRIDE_D - pad_d)[:, None]
    x_rows = (x + row + n * x_n_stride)[:, None]
    filters = w + (group * K + k) * w_k_stride
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float64 if x.dtype.element_ty == tl.float64 else tl.float32)
    for step in range(STEPS):
        index = step * BLOCK_K + tl.arange(0, BLOCK_K)
        shift, dd, dh, dc, real = where_in_runs(
            index, x_c_stride, x_d_stride, x_h_stride, x_run_stride,
            T, R, RUN, RUN_STEP, PAD, LINES, DILATION_D, DILATION_H,
        )  # fmt: skip
        # unsigned, a negative number is a large one: one comparison for both ends of an axis
        h = (h_rows + dh[None, :]).to(tl.uint32)
        columns = (column_rows + dc[None, :]).to(tl.uint32)
        ok = (h < tl.cast(x_h, tl.uint32)) & (columns < tl.cast(x_columns, tl.uint32)) & real[None, :]
        if HAS_D:
            ok = ok & ((d_rows + dd[None, :]).to(tl.uint32) < tl.cast(x_d, tl.uint32))
        a = tl.load(x_rows + shift[None, :], mask=ok, other=0.0)
        if INNER_OUT:
            w_places = filters[None, :] + (index * w_red_stride)[:, None]
        else:
            w_places = filters[:, None] + (index * w_red_stride)[None, :]
        if EVEN_K:
            b = tl.load(w_places)
        elif INNER_OUT:
            b = tl.load(w_places, mask=(k < K)[None, :], other=0.0)
        else:
            b = tl.load(w_places, mask=(k < K)[:, None], other=0.0)
        if not INNER_OUT:
            b = tl.trans(b)
        if PRECISION == "tf32":
            a = rounded(a)
        if PRECISION == "ieee" and a.dtype == tl.float32:  # short chains: each trip sums for itself
            acc += tl.dot(a, b, input_precision=PRECISION, max_num_imprecise_acc=1, out_dtype=acc.dtype)
        else:
            acc = tl.dot(a, b, acc, input_precision=PRECISION, out_dtype=acc.dtype)
    store_pixels(
        acc, z, bias, dst, alpha, beta, parameter, n, o, p, q, ok_m, group * K + k, k < K,
        bias_stride, z_n_stride, z_c_stride, z_d_stride, z_h_stride, z_w_stride,
        dst_n_stride, dst_c_stride, dst_d_stride, dst_h_stride, dst_w_stride, HAS_D, ACT,
    )  # fmt: skip


class Stem(TritonEngine):
    """Forward direction."""

    name = "conv.stem"
    operations = ("conv_fprop",)
    notes = frozenset({"tensor_core", "tf32", "runtime_compilation"})

    def refusals(self, problem: Problem) -> list[str]:
        refusals = Refusals()
        refusals.require_tensors(problem.items, DTYPES, elements=True)
        g = Geometry.of(problem)
        refusals.require(g.C <= MOST_CHANNELS * g.G, f"at most {MOST_CHANNELS} channels a group", g.C // g.G)
        refusals.require(g.filter[2] <= MOST_WIDTH, f"filters at most {MOST_WIDTH} wide", g.filter[2])
        for axis, size in zip("DHW", g.in_size):
            refusals.require(size < 2**26, f"fewer than 2^26 points along {axis}", size)
        if not refusals:
            blocks = max(self._blocks(problem, config) for config in self.configs(problem))
            refusals.require(blocks <= INT32, "at most 2^31 - 1 tiles", blocks)
        return refusals

    def _cut(self, problem: Problem, least: int = 0) -> tuple[Gemm, Runs]:
        """The product, and how its reduction is cut: trips of at least `least`, by default 128 bytes of each row."""
        g = Geometry.of(problem)
        gemm = Gemm(g.N * math.prod(g.out_size), g.K // g.G, 1, 1, g.G, g.x.dtype, problem.math)
        runs = Runs.of(g, least or (128 // gemm.itemsize if gemm.on_matrix_units else 16))
        return Gemm(gemm.m, gemm.n, runs.depth, 1, g.G, gemm.dtype, gemm.math), runs

    def _blocks(self, problem: Problem, config: Config) -> int:
        gemm, _ = self._cut(problem)
        return -(-gemm.m // config["BLOCK_M"]) * -(-gemm.n // config["BLOCK_N"]) * gemm.batch

    def configs(self, problem: Problem) -> list[Config]:
        target, found = problem.target, []
        for least in (0, 32) if self._cut(problem)[0].on_matrix_units else (0,):
            gemm, runs = self._cut(problem, least)
            for tile in ranked(gemm, shapes(gemm, target), target, 6):
                operands = (tile["BLOCK_M"] + tile["BLOCK_N"]) * runs.block_k * gemm.itemsize
                stages = min(tile["num_stages"], 3, (target.shared_memory - 2048) // operands)
                config = {**tile, "BLOCK_K": runs.block_k, "num_stages": stages}
                if stages > 0 and config not in found:
                    found.append(config)
        return sorted(found, key=lambda config: self.cost(problem, config))

    def workspace_size(self, problem: Problem, config: Config) -> int:
        gemm, runs = self._cut(problem, config["BLOCK_K"])
        return gemm.n * gemm.batch * runs.depth * problem["w"].itemsize

    def cost(self, problem: Problem, config: Config) -> float:
        target = problem.target
        gemm, runs = self._cut(problem, config["BLOCK_K"])
        # Every element of the gathered operand is a load of its own and goes through registers.
        beside = runs.stride == 1
        gathered = config["BLOCK_M"] * config["BLOCK_K"]
        loading = one_by_one(config, target, near=gathered if beside else 0.0, far=0.0 if beside else gathered)
        traffic = problem.bytes / (0.75 * target.bandwidth)
        return max(seconds(gemm, config, target, loading), traffic) + start(target, 2)

    def launches(self, problem: Problem, config: Config) -> list[Launch]:
        g, (gemm, runs) = Geometry.of(problem), self._cut(problem, config["BLOCK_K"])
        inner_out = not gemm.on_matrix_units
        rounding = gemm.dtype == "f32" and problem.math == "tf32"
        packed = Slice(0, gemm.dtype)
        args, constexprs = places(problem)
        start = sum(pad * step for pad, step in zip(g.pad, g.x_strides[2:]))
        args |= {
            "x": "x", "w": packed, "M": gemm.m, **dict(zip("OPQ", g.out_size)), "C": g.C // g.G, "K": gemm.n,
            "GROUPS": g.G, "x_d": g.in_size[0], "x_h": g.in_size[1], "x_columns": g.in_size[2] * runs.unit,
            "pad_d": g.pad[0], "pad_h": g.pad[1], "pad_run": g.pad[2] * runs.unit,
            "column_step": g.stride[2] * runs.unit, "x_start": -start, "x_run_stride": runs.stride,
            **{f"x_{axis}_stride": stride for axis, stride in zip("ncdhw", g.x_strides)},
            "w_k_stride": 1 if inner_out else runs.depth, "w_red_stride": g.K if inner_out else 1,
        }  # fmt: skip
        elements = max(g.K * runs.depth, gemm.m + config["BLOCK_M"], *(t.span for _, t in problem.items))
        constexprs |= {
            **dict(zip("TR", g.filter)), **runs.constexprs, "STEPS": runs.depth // config["BLOCK_K"],
            **{f"STRIDE_{axis}": size for axis, size in zip("DHW", g.stride)},
            **{f"DILATION_{axis}": size for axis, size in zip("DH", g.dilation)},
            "WIDE": elements > INT32, "PRECISION": problem.math, "EVEN_K": gemm.n % config["BLOCK_N"] == 0,
            "INNER_OUT": inner_out, **{knob: config[knob] for knob in ("BLOCK_M", "BLOCK_N", "BLOCK_K")},
        }  # fmt: skip
        grid = (self._blocks(problem, config),)
        product = Launch(conv_stem, grid, args, constexprs, config["num_warps"], config["num_stages"])
        return [runs.pack(g, packed, inner_out, rounding), product]
