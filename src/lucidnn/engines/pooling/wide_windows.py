"""``pool.wide_windows``: average and adaptive max pooling of planes (nchw) with wide windows on a GPU, in Triton.

Method: where columns are neighbours in memory and windows are wide, threads that each walk through a window of their
own read places far apart, and much of every line of memory that the cache holds for them is gone before its turn comes.
Here a tile is outputs by neighbouring points of a window's row, so that neighbouring threads read a row of a window,
and then the next one's, as memory has them; a thread's points are whole vectors where windows start at multiples of
them. Each thread keeps a sum, or the largest value and its place, and a window's threads are combined at the end.

Cost: the memory traffic, or for windows at odd places some 15 instructions a point. Limits: columns of stride 1, and
windows of 3 to 128 columns.
"""

import math

import triton
import triton.language as tl

from ...core.engine import Config, Refusals
from ...core.heuristics import LAUNCH, roofline
from ...core.problem import Problem
from .._triton.index import INT32, reciprocal, split
from .._triton.launch import Argument, Launch, TritonEngine
from .._triton.windows import NOWHERE, counted, first_largest, quotient, visit
from ._axes import Windows, is_wide, lanes_are_columns, shared_divisor, window_constants

TYPES = ("f64", "f32", "f16", "bf16")


@triton.jit
def wide_windows(
    x, y, index, OUTPUTS, C, O, P, Q, D, H, W, c_mul, c_shift, o_mul, o_shift, p_mul, p_shift, q_mul, q_shift,
    x_n_stride, x_c_stride, x_d_stride, x_h_stride, x_w_stride,
    y_n_stride, y_c_stride, y_d_stride, y_h_stride, y_w_stride,
    i_n_stride, i_c_stride, i_d_stride, i_h_stride, i_w_stride,
    T: tl.constexpr, R: tl.constexpr, S: tl.constexpr,
    STRIDE_D: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    PAD_D: tl.constexpr, PAD_H: tl.constexpr, PAD_W: tl.constexpr,
    AFTER_D: tl.constexpr, AFTER_H: tl.constexpr, AFTER_W: tl.constexpr,
    DILATION_D: tl.constexpr, DILATION_H: tl.constexpr, DILATION_W: tl.constexpr,
    ADAPTIVE_D: tl.constexpr, ADAPTIVE_H: tl.constexpr, ADAPTIVE_W: tl.constexpr,
    MAXIMUM: tl.constexpr, PADDED: tl.constexpr, DIVISOR: tl.constexpr, WIDE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_S: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    VALUE: tl.constexpr = tl.float64 if x.dtype.element_ty == tl.float64 else tl.float32
    pid = tl.program_id(0)
    if WIDE:
        pid = pid.to(tl.int64)
    m = pid * BLOCK_M + tl.arange(0, BLOCK_M)
    exists = m < OUTPUTS
    rest, q = split(m, Q, q_mul, q_shift, WIDE)
    rest, p = split(rest, P, p_mul, p_shift, WIDE)
    rest, o = split(rest, O, o_mul, o_shift, WIDE)
    n, c = split(rest, C, c_mul, c_shift, WIDE)
    # ---- where windows start, and how many of their points exist as far as that is no matter of the edges of x
    z0, h0, w0 = o * STRIDE_D - PAD_D, p * STRIDE_H - PAD_H, q * STRIDE_W - PAD_W
    many_d, many_h, many_w = T, R, S
    if ADAPTIVE_D:
        z0 = o * D // O
        many_d = ((o + 1) * D + O - 1) // O - z0
    if ADAPTIVE_H:
        h0 = p * H // P
        many_h = ((p + 1) * H + P - 1) // P - h0
    if ADAPTIVE_W:
        w0 = q * W // Q
        many_w = (((q + 1) * W + Q - 1) // Q - w0)[:, None]
    point = tl.arange(0, BLOCK_S)[None, :]
    w = w0[:, None] + point * DILATION_W
    start = x + ((n * x_n_stride + c * x_c_stride)[:, None] + w * x_w_stride)
    best = tl.full((BLOCK_M, BLOCK_S), float("-inf") if MAXIMUM else 0.0, VALUE)
    place = tl.full((BLOCK_M, BLOCK_S), -1, tl.int32)
    for line in tl.range(0, T * R, loop_unroll_factor=UNROLL):
        a, b = line // R, line % R
        z, h = z0 + a * DILATION_D, h0 + b * DILATION_H
        in_row = exists & (z >= 0) & (z < D) & (h >= 0) & (h < H) & (a < many_d) & (b < many_h)
        row_x = start + (z * x_d_stride + h * x_h_stride)[:, None]
        number = ((z * H + h) * W).to(tl.int32)[:, None] + w.to(tl.int32)
        for s in tl.static_range(0, S, BLOCK_S):
            inside = in_row[:, None]
            if not ADAPTIVE_W:
                inside = inside & (w + s * DILATION_W >= 0) & (w + s * DILATION_W < W)
            if ADAPTIVE_W or s + BLOCK_S > S:
                inside = inside & (s + point < many_w)
            if MAXIMUM:
                v = tl.load(row_x + s * DILATION_W * x_w_stride, mask=inside, other=float("-inf"))
                best, place = visit(v, inside, best, place, number + s * DILATION_W)
            else:
                best += tl.load(row_x + s * DILATION_W * x_w_stride, mask=inside, other=0.0).to(VALUE)
    at = n * y_n_stride + c * y_c_stride + o * y_d_stride + p * y_h_stride + q * y_w_stride
    if MAXIMUM:
        result, found = first_largest(best, tl.where(place < 0, NOWHERE, place), 1)
        if index is not None:
            to = n * i_n_stride + c * i_c_stride + o * i_d_stride + p * i_h_stride + q * i_w_stride
            tl.store(index + to, found.to(index.dtype.element_ty), mask=exists)
    else:
        result = tl.sum(best, axis=1)
        divisor = tl.full((BLOCK_M,), DIVISOR, VALUE)
        if DIVISOR == 0:
            count = counted(o, D, O, PAD_D, AFTER_D, STRIDE_D, DILATION_D, T, PADDED, ADAPTIVE_D)
            count *= counted(p, H, P, PAD_H, AFTER_H, STRIDE_H, DILATION_H, R, PADDED, ADAPTIVE_H)
            count *= counted(q, W, Q, PAD_W, AFTER_W, STRIDE_W, DILATION_W, S, PADDED, ADAPTIVE_W)
            divisor = count.to(VALUE)
        result = quotient(result, divisor, y.dtype.element_ty.primitive_bitwidth == 16)
    tl.store(y + at, result.to(y.dtype.element_ty), mask=exists)


class WideWindows(TritonEngine):
    name = "pool.wide_windows"
    operations = ("avg_pool_fwd", "adaptive_avg_pool_fwd", "adaptive_max_pool_fwd")

    def refusals(self, problem: Problem) -> list[str]:
        r = Refusals()
        r.require_tensors(((role, t) for role, t in problem.items if role != "index"), TYPES, elements=True)
        if not r:
            g = Windows.of(problem)
            beside = lanes_are_columns(g, "x", g.sizes[2]) and g.strides["x"][4] == 1
            r.require(beside, "columns that are neighbours in memory", f"steps {g.strides['x']}")
            columns = g.axes[2].longest
            r.require(3 <= columns <= 128, "windows of 3 to 128 columns", columns)
            r.require(math.prod(g.sizes) <= INT32, "planes of less than 2^31 points", math.prod(g.sizes))
            tiles = min(self._tiles(problem, c) for c in self.configs(problem))
            r.require(tiles <= INT32, f"at most {INT32} tiles", tiles)
        return r

    def _tiles(self, problem: Problem, config: Config) -> int:
        g = Windows.of(problem)
        return -(-g.N * g.C * math.prod(g.counts) // config["BLOCK_M"])

    def configs(self, problem: Problem) -> list[Config]:
        g = Windows.of(problem)
        outputs, w, vector = g.N * g.C * math.prod(g.counts), g.axes[2], self._vector(problem)
        found: list[Config] = []
        widths = (vector, vector, 4) if vector > 1 else (4, 2, 8)
        maximum = problem.op.name == "adaptive_max_pool_fwd"
        for elements, width in zip((512, 512, 1024) if maximum else (2048, 1024, 1024), widths, strict=True):
            width = min(width, 1 << (w.longest - 1).bit_length())
            block = min(elements // width, max(16, 1 << (outputs - 1).bit_length()))
            config = {"BLOCK_M": block, "BLOCK_S": width, "UNROLL": 4 if vector > 1 else 1}
            config |= {"num_warps": 4, "num_stages": 1}
            if config not in found:
                found.append(config)
        return found

    def _vector(self, problem: Problem) -> int:
        """Elements in 16 bytes where every window's rows start at and have a multiple of so many, else 1."""
        g, t = Windows.of(problem), problem["x"]
        w, whole = g.axes[2], 16 // t.itemsize
        steps = (*(s for s in g.strides["x"][:4]), w.stride, w.longest, g.sizes[2])
        even = w.stride and w.dilation == 1 and not w.before and not any(step % whole for step in steps)
        return whole if even and t.alignment >= 16 else 1

    def cost(self, problem: Problem, config: Config) -> float:
        g = Windows.of(problem)
        tiles = self._tiles(problem, config)
        points = [a.longest for a in g.axes]
        width = -(-points[2] // config["BLOCK_S"]) * config["BLOCK_S"]
        read = tiles * config["BLOCK_M"] * points[0] * points[1] * width
        each = 15.0 if self._vector(problem) == 1 else 5.0  # instructions a point
        rate = problem.target.processors * 128 * 1.5e9
        busy = min(1.0, tiles / problem.target.processors)
        traffic = roofline(problem, flops=0.0, memory_efficiency=0.8 * busy)
        return max(traffic, read * each / (rate * busy) + LAUNCH[problem.target.kind])

    def launches(self, problem: Problem, config: Config) -> list[Launch]:
        g = Windows.of(problem)
        op = problem.op
        outputs = g.N * g.C * math.prod(g.counts)
        args: dict[str, Argument] = {"OUTPUTS": outputs, "C": g.C}
        args |= dict(zip("DHWOPQ", (*g.sizes, *g.counts), strict=True))
        for name, size in zip("copq", (g.C, *g.counts), strict=True):
            args[f"{name}_mul"], args[f"{name}_shift"] = reciprocal(size)
        for name, role in {"x": "x", "y": "y", "i": "index"}.items():
            strides = g.strides.get(role, (None,) * 5)
            args |= {f"{name}_{axis}_stride": s for axis, s in zip("ncdhw", strides, strict=True)} | {role: role}
        maximum = op.name == "adaptive_max_pool_fwd"
        constexprs = window_constants(g) | {
            "MAXIMUM": maximum, "PADDED": getattr(op, "count_padding", False),
            "DIVISOR": 1.0 if maximum else shared_divisor(problem, g.axes),
            "WIDE": is_wide(problem, g, outputs, 0, {"BLOCK_R": config["BLOCK_M"], "BLOCK_L": config["BLOCK_S"]}),
            **{name: config[name] for name in ("BLOCK_M", "BLOCK_S", "UNROLL")},
        }  # fmt: skip
        grid = (self._tiles(problem, config),)
        return [Launch(wide_windows, grid, args, constexprs, config["num_warps"], 1)]
