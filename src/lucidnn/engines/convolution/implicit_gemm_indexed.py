"""Forward convolution as implicit GEMM with an indexed reduction: taps and channels in one axis, looked up in a table.

A gathered product that walks tap by tap pads every tap's channels to whole steps of the loop: of 72 channels in steps
of 64 nearly half is padding. Here the reduction is the filter's memory order, taps times channels without a gap, and
what an element of it means is looked up: its offset from a pixel's first input, and its place along D, H and W, which
says whether it lies in the image. A first kernel writes the table into the workspace, a few kilobytes that stay in the
caches; the filter is a matrix as it lies. Where channels are innermost on both sides the table runs in steps of 2, 4 or
8 neighbours, and loads are as wide.

Any strides, asymmetric padding, dilation and groups, 1 to 3 dimensions; float32 sums (float64 for float64); TF32 is
rounded on the way. Cost: the definition's operations rounded up to whole tiles once, not for every tap, and four
look-ups for every step. Limits: the filter is dense, in either layout.
"""

import math

import triton
import triton.language as tl

from ...core.engine import Config, Refusals
from ...core.problem import Problem
from ...ops.convolution import Geometry
from .._triton.conv_gather import DTYPES, View
from .._triton.index import INT32
from .._triton.launch import Launch, Slice, TritonEngine
from .._triton.result import places, store_pixels
from .._triton.tf32 import rounded
from .._triton.tiles import Gemm, one_by_one, ranked, seconds, shapes, start

FAR = 1 << 30  # a place outside of every image
BLOCK = 256


@triton.jit
def index_table(
    offsets, along_d, along_h, along_w, DEPTH, C, x_c_stride, x_d_stride, x_h_stride, x_w_stride,
    TAPS: tl.constexpr, R: tl.constexpr, S: tl.constexpr, LAST: tl.constexpr, FAR: tl.constexpr,
    DILATION_D: tl.constexpr, DILATION_H: tl.constexpr, DILATION_W: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """For every element of the reduction; those past the last lie far outside. `LAST`: channels vary fastest."""
    e = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if LAST:
        tap = e // C
        c = e - tap * C
    else:
        c = e // TAPS
        tap = e - c * TAPS
    d = (tap // (S * R)) * DILATION_D
    h = ((tap // S) % R) * DILATION_H
    w = (tap % S) * DILATION_W
    offset = c.to(tl.int64) * x_c_stride + d * x_d_stride + h.to(tl.int64) * x_h_stride + w * x_w_stride
    real = e < DEPTH
    tl.store(offsets + e, tl.where(real, offset, 0).to(offsets.dtype.element_ty))
    tl.store(along_d + e, tl.where(real, d, FAR))
    tl.store(along_h + e, tl.where(real, h, FAR))
    tl.store(along_w + e, tl.where(real, w, FAR))


@triton.jit
def conv_indexed(
    x, w, bias, z, dst, offsets, along_d, along_h, along_w, alpha, beta, parameter,
    M, O, P, Q, x_d, x_h, x_w, C, K, DEPTH, GROUPS, pad_d, pad_h, pad_w, x_start,
    x_n_stride, x_c_stride, x_d_stride, x_h_stride, x_w_stride,
    bias_stride, z_n_stride, z_c_stride, z_d_stride, z_h_stride, z_w_stride,
    dst_n_stride, dst_c_stride, dst_d_stride, dst_h_stride, dst_w_stride,
    STRIDE_D: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    HAS_D: tl.constexpr, WIDE: tl.constexpr, ACT: tl.constexpr, PRECISION: tl.constexpr,
    RUN: tl.constexpr, EVEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    grid_n = tl.cdiv(K, BLOCK_N)
    k = (tl.program_id(0) % grid_n) * BLOCK_N + tl.arange(0, BLOCK_N)
    pid = tl.program_id(0) // grid_n
    group = pid % GROUPS
    tile_m = pid // GROUPS
    if WIDE:
        tile_m = tile_m.to(tl.int64)
        group = group.to(tl.int64)
    m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    ok_m = m < M
    q = m % Q
    p = (m // Q) % P
    n = (m // Q) // P
    o = 0
    h_rows = tl.where(ok_m, p * STRIDE_H - pad_h, -(1 << 29))[:, None]  # rows past the last see nothing
    w_rows = (q * STRIDE_W - pad_w)[:, None]
    row = p * (STRIDE_H * x_h_stride) + q * (STRIDE_W * x_w_stride) + group * (C * x_c_stride) + x_start
    if HAS_D:
        o = n % O
        n = n // O
        d_rows = (o * STRIDE_D - pad_d)[:, None]
        row += o * (STRIDE_D * x_d_stride)
    x_rows = (x + row + n * x_n_stride)[:, None]
    filters = (w + (group * K + tl.minimum(k, K - 1)).to(tl.int64) * DEPTH)[:, None]
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float64 if x.dtype.element_ty == tl.float64 else tl.float32)
    for step in range(tl.maximum(tl.cdiv(DEPTH, BLOCK_K), 1)):  # max(.., 1): see conv_gather
        index = step * BLOCK_K + tl.arange(0, BLOCK_K)
        shift = tl.load(offsets + index)
        h = h_rows + tl.max_constancy(tl.load(along_h + index), RUN)[None, :]
        c = w_rows + tl.max_constancy(tl.load(along_w + index), RUN)[None, :]
        if RUN > 1:  # what the table hides from the compiler
            shift = tl.max_contiguous(tl.multiple_of(shift, RUN), RUN)
        # unsigned, a negative number is a large one: one comparison for both ends of an axis
        ok = (h.to(tl.uint32) < tl.cast(x_h, tl.uint32)) & (c.to(tl.uint32) < tl.cast(x_w, tl.uint32))
        if HAS_D:
            d = d_rows + tl.max_constancy(tl.load(along_d + index), RUN)[None, :]
            ok = ok & (d.to(tl.uint32) < tl.cast(x_d, tl.uint32))
        a = tl.load(x_rows + shift[None, :], mask=ok, other=0.0)
        if EVEN:
            b = tl.load(filters + index[None, :])
        else:
            b = tl.load(filters + index[None, :], mask=(index < DEPTH)[None, :], other=0.0)
        b = tl.trans(b)
        if PRECISION == "tf32":
            a = rounded(a)
            b = rounded(b)
        if PRECISION == "ieee" and a.dtype == tl.float32:  # short chains: each trip sums for itself
            acc += tl.dot(a, b, input_precision=PRECISION, max_num_imprecise_acc=1, out_dtype=acc.dtype)
        else:
            acc = tl.dot(a, b, acc, input_precision=PRECISION, out_dtype=acc.dtype)
    store_pixels(
        acc, z, bias, dst, alpha, beta, parameter, n, o, p, q, ok_m, group * K + k, k < K,
        bias_stride, z_n_stride, z_c_stride, z_d_stride, z_h_stride, z_w_stride,
        dst_n_stride, dst_c_stride, dst_d_stride, dst_h_stride, dst_w_stride, HAS_D, ACT,
    )  # fmt: skip


class ImplicitGemmIndexed(TritonEngine):
    """Forward direction."""

    name = "conv.implicit_gemm_indexed"
    operations = ("conv_fprop",)
    notes = frozenset({"tensor_core", "tf32", "runtime_compilation"})

    def refusals(self, problem: Problem) -> list[str]:
        refusals = Refusals()
        refusals.require_tensors(problem.items, DTYPES, elements=True)
        w = problem["w"]
        refusals.require(w.is_contiguous or w.is_channels_last, "a dense filter", str(w))
        for axis, size in zip("DHW", Geometry.of(problem).in_size):
            refusals.require(size < 2**28, f"fewer than 2^28 points along {axis}", size)
        if not refusals:
            blocks = max(map(View.of(problem).blocks, self.configs(problem)))
            refusals.require(blocks <= INT32, "at most 2^31 - 1 tiles", blocks)
        return refusals

    def _gemm(self, problem: Problem) -> Gemm:
        v = View.of(problem)
        return Gemm(v.pixels, v.out, v.taps * v.red, 1, v.geometry.G, v.dtype, problem.math)

    def configs(self, problem: Problem) -> list[Config]:
        gemm, target = self._gemm(problem), problem.target
        return [*ranked(gemm, shapes(gemm, target), target, 6)]

    def _table(self, problem: Problem, config: Config) -> tuple[int, list[Slice], int]:
        """Entries, the four columns of the table in the workspace, and their bytes."""
        v = View.of(problem)
        unit = math.lcm(config["BLOCK_K"], BLOCK)
        entries = -(-v.taps * v.red // unit) * unit
        wide = v.span > INT32
        at = [0, *(entries * (8 if wide else 4) + i * entries * 4 for i in range(4))]
        return entries, [Slice(at[0], "i64" if wide else "i32"), *(Slice(i, "i32") for i in at[1:4])], at[4]

    def workspace_size(self, problem: Problem, config: Config) -> int:
        return self._table(problem, config)[2]

    def cost(self, problem: Problem, config: Config) -> float:
        target = problem.target
        traffic = problem.bytes / (0.75 * target.bandwidth)
        # Where an element lies is read for each: as long as finding it out, and longer where no neighbour is beside it.
        source = config["BLOCK_M"] * config["BLOCK_K"]
        beside = self._run(problem) > 1
        loading = one_by_one(config, target, near=source if beside else 0.0, far=0.0 if beside else source)
        work = seconds(self._gemm(problem), config, target, loading)
        return max(work, traffic) + start(target, 2)

    def _run(self, problem: Problem) -> int:
        """Neighbours in the table that are neighbours, aligned, in the image."""
        g, v = Geometry.of(problem), View.of(problem)
        others = [s for n, s in zip((g.N, *g.in_size), (g.x_strides[0], *g.x_strides[2:])) if n > 1]
        together = g.x_strides[1] == 1 and (not problem["w"].is_contiguous or v.taps == 1)
        return math.gcd(8, v.red, *others) if together else 1

    def launches(self, problem: Problem, config: Config) -> list[Launch]:
        g, v = Geometry.of(problem), View.of(problem)
        entries, table, _ = self._table(problem, config)
        columns = dict(zip(("offsets", "along_d", "along_h", "along_w"), table))
        depth, last = v.taps * v.red, not problem["w"].is_contiguous
        strides = {f"x_{axis}_stride": stride for axis, stride in zip("ncdhw", g.x_strides)}
        args = {**columns, "DEPTH": depth, "C": v.red, **strides}
        del args["x_n_stride"]
        constexprs = {
            "TAPS": v.taps, "R": g.filter[1], "S": g.filter[2], "LAST": last, "FAR": FAR, "BLOCK": BLOCK,
            **{f"DILATION_{axis}": size for axis, size in zip("DHW", g.dilation)},
        }  # fmt: skip
        first = Launch(index_table, (entries // BLOCK,), args, constexprs, 4, 1)
        run = self._run(problem)
        args, constexprs = places(problem)
        start = sum(pad * step for pad, step in zip(g.pad, g.x_strides[2:]))
        args |= {
            "x": "x", "w": "w", **columns, "M": v.pixels, **dict(zip("OPQ", g.out_size)), "C": v.red, "K": v.out,
            "DEPTH": depth, "GROUPS": g.G, "x_start": -start, **strides,
            **{f"x_{axis}": size for axis, size in zip("dhw", g.in_size)},
            **{f"pad_{axis}": size for axis, size in zip("dhw", g.pad)},
        }  # fmt: skip
        constexprs |= {
            **{f"STRIDE_{axis}": size for axis, size in zip("DHW", g.stride)}, "RUN": run,
            "WIDE": max(v.span, v.pixels + config["BLOCK_M"]) > INT32, "PRECISION": problem.math,
            "EVEN": depth % config["BLOCK_K"] == 0, **{n: config[n] for n in ("BLOCK_M", "BLOCK_N", "BLOCK_K")},
        }  # fmt: skip
        grid = (v.blocks(config),)
        return [first, Launch(conv_indexed, grid, args, constexprs, config["num_warps"], config["num_stages"])]
