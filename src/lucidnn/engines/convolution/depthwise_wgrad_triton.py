"""Filter gradient of a depthwise convolution as the sums it is: every tap's over all pixels, in Triton.

``dw[k, tap]`` is the sum over the pixels of dy's channel k times the x that the tap sees from there: nothing to feed a
matrix unit with. A block takes a tile of channels, up to `TAPS` taps and a part of the pixels; each trip of its loop
reads a tile of dy once and one of x for every tap, and every thread keeps a sum for each tap. `SPLIT_K` parts are
summed by blocks of their own into the workspace and added in a fixed order (`lucidnn.engines._triton.split`): the
result is the same from run to run.

A channel multiplier, any stride, asymmetric padding, dilation, 1 to 3 dimensions; float32 sums (float64 for float64);
64-bit offsets where a tensor reaches past 2^31 elements. Cost: x and dy are read once from memory, dy once for every
`TAPS` taps and x once for each from the caches. Limits: one channel in each group, at most 63 taps an axis.
"""

import math

import triton
import triton.language as tl

from ...core.engine import Config, Refusals
from ...core.problem import Problem
from ...ops.convolution import Geometry
from .._triton.epilogue import finish
from .._triton.index import INT32, divide, pixels_first, reciprocal
from .._triton.launch import Argument, Launch, TritonEngine
from .._triton.split import MOST_PARTS, Split, named
from .._triton.tiles import Gemm, start

DTYPES = ("f64", "f32", "f16", "bf16")
MOST_TAPS = 63  # an axis
LATENCY, TOGETHER = 1e-6, 4  # seconds that a trip of the loop waits for its loads, and blocks that wait side by side
HELD = 8  # sums that a thread has room for, for each of its elements


@triton.jit
def _store(
    acc, tap, k, ok_k, z, out, alpha, beta, z_k_stride, z_t_stride, z_r_stride, z_s_stride,
    out_k_stride, out_t_stride, out_r_stride, out_s_stride,
    T: tl.constexpr, R: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    s = tap % S
    r = (tap // S) % R
    t = tap // (S * R)
    ok = ok_k & (tap < T * R * S)
    z_row = None
    if z is not None:
        z_place = z + k * z_k_stride + (t * z_t_stride + r * z_r_stride + s * z_s_stride)
        z_row = tl.load(z_place, mask=ok, other=0.0)
    result = finish(tl.sum(acc, axis=0), z_row, None, alpha, beta, None, 0)
    place = out + k * out_k_stride + (t * out_t_stride + r * out_r_stride + s * out_s_stride)
    tl.store(place, result.to(out.dtype.element_ty), mask=ok)


@triton.jit
def conv_depthwise_wgrad(
    x, dy, z, out, alpha, beta, x_start, PIXELS, O, P, Q, x_d, x_h, x_w, K, TRIPS, pad_d, pad_h, pad_w,
    o_mul, o_shift, p_mul, p_shift, q_mul, q_shift,
    x_n_stride, x_c_stride, x_d_stride, x_h_stride, x_w_stride,
    dy_n_stride, dy_c_stride, dy_d_stride, dy_h_stride, dy_w_stride,
    z_k_stride, z_c_stride, z_t_stride, z_r_stride, z_s_stride,
    out_part_stride, out_k_stride, out_c_stride, out_t_stride, out_r_stride, out_s_stride,
    T: tl.constexpr, R: tl.constexpr, S: tl.constexpr,
    STRIDE_D: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    DILATION_D: tl.constexpr, DILATION_H: tl.constexpr, DILATION_W: tl.constexpr,
    MULTIPLIER: tl.constexpr, HAS_D: tl.constexpr, WIDE: tl.constexpr,
    TAPS: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    ACC: tl.constexpr = tl.float64 if x.dtype.element_ty == tl.float64 else tl.float32
    # ---- which taps, channels and part: taps vary fastest, as they read the same pixels
    CHUNKS: tl.constexpr = (T * R * S + TAPS - 1) // TAPS
    tap = (tl.program_id(0) % CHUNKS) * TAPS
    pid = tl.program_id(0) // CHUNKS
    grid_c = tl.cdiv(K, BLOCK_C)
    k = (pid % grid_c) * BLOCK_C + tl.arange(0, BLOCK_C)
    part = pid // grid_c
    first = part * TRIPS
    if WIDE:
        first = first.to(tl.int64)
        k = k.to(tl.int64)
    ok_k = k < K
    x_columns = (x + x_start + (k // MULTIPLIER) * x_c_stride)[None, :]
    dy_columns = (dy + k * dy_c_stride)[None, :]
    acc0 = tl.zeros((BLOCK_P, BLOCK_C), dtype=ACC)
    acc1 = tl.zeros((BLOCK_P, BLOCK_C), dtype=ACC)
    acc2 = tl.zeros((BLOCK_P, BLOCK_C), dtype=ACC)
    acc3 = tl.zeros((BLOCK_P, BLOCK_C), dtype=ACC)
    acc4 = tl.zeros((BLOCK_P, BLOCK_C), dtype=ACC)
    acc5 = tl.zeros((BLOCK_P, BLOCK_C), dtype=ACC)
    acc6 = tl.zeros((BLOCK_P, BLOCK_C), dtype=ACC)
    acc7 = tl.zeros((BLOCK_P, BLOCK_C), dtype=ACC)
    trips = tl.minimum(TRIPS, tl.cdiv(PIXELS, BLOCK_P) - first).to(tl.int32)
    for trip in range(trips):
        m = (first + trip) * BLOCK_P + tl.arange(0, BLOCK_P)
        if WIDE:
            line = m // Q
            n = line // P
        else:
            line = divide(m, q_mul, q_shift)
            n = divide(line, p_mul, p_shift)
        q = m - line * Q
        p = line - n * P
        dy_row = p * dy_h_stride + q * dy_w_stride
        h = p * STRIDE_H - pad_h
        w = q * STRIDE_W - pad_w
        x_row = (p * STRIDE_H) * x_h_stride + (q * STRIDE_W) * x_w_stride
        d = 0
        if HAS_D:
            if WIDE:
                image = n // O
            else:
                image = divide(n, o_mul, o_shift)
            o = n - image * O
            n = image
            d = o * STRIDE_D - pad_d
            dy_row += o * dy_d_stride
            x_row += (o * STRIDE_D) * x_d_stride
        ok = (m < PIXELS)[:, None] & ok_k[None, :]
        dy_tile = tl.load(dy_columns + (dy_row + n * dy_n_stride)[:, None], mask=ok, other=0.0).to(ACC)
        places = x_columns + (x_row + n * x_n_stride)[:, None]
        for j in tl.static_range(TAPS):  # taps past the last see what is not used
            s = (tap + j) % S
            line = (tap + j) // S
            dw = s * DILATION_W
            dh = (line % R) * DILATION_H
            # unsigned, a negative number is a large one: one comparison for both ends of an axis
            inside = ((h + dh).to(tl.uint32) < tl.cast(x_h, tl.uint32)) & (
                (w + dw).to(tl.uint32) < tl.cast(x_w, tl.uint32)
            )
            shift = dh * x_h_stride + dw * x_w_stride
            if HAS_D:
                dd = (line // R) * DILATION_D
                inside = inside & ((d + dd).to(tl.uint32) < tl.cast(x_d, tl.uint32))
                shift += dd * x_d_stride
            v = dy_tile * tl.load(places + shift, mask=ok & inside[:, None], other=0.0).to(ACC)
            if j == 0:
                acc0 += v
            elif j == 1:
                acc1 += v
            elif j == 2:
                acc2 += v
            elif j == 3:
                acc3 += v
            elif j == 4:
                acc4 += v
            elif j == 5:
                acc5 += v
            elif j == 6:
                acc6 += v
            else:
                acc7 += v
    # ---- dw itself, or this part's share of it
    out += part.to(tl.int64) * out_part_stride
    for j in tl.static_range(TAPS):
        low = acc0 if j == 0 else acc1 if j == 1 else acc2 if j == 2 else acc3
        high = acc4 if j == 4 else acc5 if j == 5 else acc6 if j == 6 else acc7
        _store(low if j < 4 else high, tap + j, k, ok_k, z, out, alpha, beta,
               z_k_stride, z_t_stride, z_r_stride, z_s_stride,
               out_k_stride, out_t_stride, out_r_stride, out_s_stride, T, R, S)  # fmt: skip


class DepthwiseWgradTriton(TritonEngine):
    """Filter gradient."""

    name = "conv.depthwise_wgrad_triton"
    operations = ("conv_wgrad",)

    def refusals(self, problem: Problem) -> list[str]:
        refusals = Refusals()
        refusals.require_tensors(problem.items, DTYPES, elements=True)
        g = Geometry.of(problem)
        refusals.require(g.G == g.C, "one channel in each group", g.C // g.G)
        refusals.require(max(g.filter) <= MOST_TAPS, f"at most {MOST_TAPS} taps an axis", max(g.filter))
        if not refusals:
            blocks = max(self._blocks(problem, config) for config in self.configs(problem))
            refusals.require(blocks <= INT32, "at most 2^31 - 1 blocks", blocks)
        return refusals

    def _split(self, problem: Problem) -> Split:
        g = Geometry.of(problem)
        return Split(g, Gemm(g.K, 1, g.N * math.prod(g.out_size), 1, 1, g.x.dtype, problem.math))

    def _blocks(self, problem: Problem, config: Config) -> int:
        g = Geometry.of(problem)
        chunks = -(-math.prod(g.filter) // config["TAPS"])
        return chunks * -(-g.K // config["BLOCK_C"]) * self._split(problem).parts(config)

    def configs(self, problem: Problem) -> list[Config]:
        g = Geometry.of(problem)
        first = pixels_first(g.x_strides, g.C)
        per_thread = 4 if first else 16 // g.x.itemsize
        taps, pixels = math.prod(g.filter), g.N * math.prod(g.out_size)
        found = []
        for held, share in ((HELD, 1), (HELD, 2), (HELD // 2, 2)):
            if held * share * per_thread > 64:
                held = 64 // (share * per_thread)  # sums of a thread, in registers
            chunks = -(-taps // held)
            elements = 128 * per_thread * share
            if first:
                block_p = min(elements, max(triton.next_power_of_2(pixels), 16))
                # channels, which are far apart, share a block only where they are small for its 128 threads
                block_c = min(max(128 // block_p, 1), triton.next_power_of_2(g.K))
            else:
                block_c = min(max(64, 8 * per_thread), triton.next_power_of_2(g.K))
                block_p = max(elements // block_c, 1)
            # BLOCK_K is what `Split` calls a trip's share of the reduction
            config = {"TAPS": -(-taps // chunks), "BLOCK_K": block_p, "BLOCK_C": block_c, "num_warps": 4}
            blocks = chunks * -(-g.K // block_c)
            for waves in (8, 16):  # blocks of 4 warps: to hide the time that loads take
                split = min(waves * problem.target.processors // blocks, -(-pixels // (4 * block_p)), MOST_PARTS)
                config = {**config, "SPLIT_K": max(split, 1)}
                if config not in found:
                    found.append(config)
        return sorted(found, key=lambda config: self.cost(problem, config))

    def workspace_size(self, problem: Problem, config: Config) -> int:
        return self._split(problem).size(config)

    def cost(self, problem: Problem, config: Config) -> float:
        g, target = Geometry.of(problem), problem.target
        wide = 1 if pixels_first(g.x_strides, g.C) else min(16 // g.x.itemsize, config["BLOCK_C"])
        lanes = target.flops("f64" if g.x.dtype == "f64" else "f32") / 2
        arithmetic = problem.flops / 2 * (2 + 10 / wide) / (0.45 * lanes)
        split, blocks = self._split(problem), self._blocks(problem, config)
        parts = split.parts(config)
        sums = config["TAPS"] * config["BLOCK_K"] * config["BLOCK_C"] // (32 * config["num_warps"])
        together = 1 if wide == 1 and sums > 32 else TOGETHER  # with an address for each element, registers run out
        waiting = LATENCY * split.trips(config) * -(-blocks // (together * target.processors))
        traffic = (problem.bytes + 2 * self.workspace_size(problem, config)) / (0.75 * target.bandwidth)
        busy = min(1.0, blocks / target.processors)
        return max(arithmetic / busy, traffic / busy, waiting) + start(target, 1 if parts == 1 else 2)

    def launches(self, problem: Problem, config: Config) -> list[Launch]:
        g, split = Geometry.of(problem), self._split(problem)
        pixels, block_p = split.gemm.depth, config["BLOCK_K"]
        start = sum(pad * step for pad, step in zip(g.pad, g.x_strides[2:]))
        args: dict[str, Argument] = {
            **split.result(problem, config, 0), "x": "x", "dy": "dy", "x_start": -start, "PIXELS": pixels,
            "K": g.K, "TRIPS": split.trips(config), **dict(zip("OPQ", g.out_size)),
            **{f"x_{axis}": size for axis, size in zip("dhw", g.in_size)},
            **{f"pad_{axis}": size for axis, size in zip("dhw", g.pad)},
            **named("x", "ncdhw", g.x_strides), **named("dy", "ncdhw", g.y_strides),
        }  # fmt: skip
        for axis, size in zip("opq", g.out_size):
            args[f"{axis}_mul"], args[f"{axis}_shift"] = reciprocal(size)
        span = max(*(t.span for _, t in problem.items), pixels + block_p, split.elements)
        constexprs = {
            **dict(zip("TRS", g.filter)), **{f"STRIDE_{axis}": size for axis, size in zip("DHW", g.stride)},
            **{f"DILATION_{axis}": size for axis, size in zip("DHW", g.dilation)},
            "MULTIPLIER": g.K // g.G, "HAS_D": len(problem.op.stride) == 3, "WIDE": span > INT32,
            "TAPS": config["TAPS"], "BLOCK_P": block_p, "BLOCK_C": config["BLOCK_C"],
        }  # fmt: skip
        grid = (self._blocks(problem, config),)
        sums = Launch(conv_depthwise_wgrad, grid, args, constexprs, config["num_warps"], 1)
        return [sums, *split.addition(problem, config, 0)]
