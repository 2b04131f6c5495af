"""Filter gradient of a convolution as a split matrix product over operands packed for it, in Triton.

* On matrix units (float32 under ``math=tf32``; 16-bit types with pixels innermost or strided): both operands are read
  with pixels innermost, because the reduction runs over pixels. x is packed into planes, one copy for each column of
  the filter, already shifted by it, strided and with its padding written out: filter row, plane and channel become
  plain offsets, pixels of an image lie together, and nothing in the loop has an edge. Every load is a 16-byte
  asynchronous copy to shared memory from where the matrix units read it.  dy is packed where its pixels are not
  innermost and aligned.  What is packed is rounded to TF32 on the way, the rest is cut off by the matrix units.
* On vector units (float32 under ``math=ieee``): x is packed channels last, dy is read where it is, and the product is
  that of `lucidnn.engines._triton.conv_wgrad`: its inner loop reads x without bank conflicts then.

The sum is split over the pixels as in ``conv.implicit_gemm_wgrad``, in the same fixed order.

Any strides, padding, dilation and groups, 1 to 3 dimensions; lines of pixels are padded to 16 bytes with zeros in both
operands.  16-bit operands that are channels last, and ieee ones whose x is, gain nothing and are refused.
Cost: reading x and writing it once for each filter column (once on vector units), then the product.  Workspace: the
packed operands and the parts.
"""

import math

import triton
import triton.language as tl

from ...core.engine import Config, Refusals
from ...core.problem import Problem
from ...ops.convolution import Geometry
from .._triton.conv_wgrad import View, wgrad
from .._triton.epilogue import finish
from .._triton.index import INT32, divide, reciprocal
from .._triton.launch import Argument, Launch, Slice, TritonEngine
from .._triton.pack import SIZES, Pixels, Planes, is_aligned, merged, padded
from .._triton.split import Split, named
from .._triton.tiles import Gemm, seconds, start


@triton.jit
def conv_wgrad_planes(
    x, dy, z, out, alpha, beta, PIXELS, O, P, Q, C, K, TRIPS, o_mul, o_shift, p_mul, p_shift, q_mul, q_shift,
    x_copy, x_n_stride, x_c_stride, x_d_stride, x_h_stride, x_t_stride, x_r_stride,
    dy_n_stride, dy_c_stride, dy_d_stride, dy_h_stride,
    z_k_stride, z_c_stride, z_t_stride, z_r_stride, z_s_stride,
    out_part_stride, out_k_stride, out_c_stride, out_t_stride, out_r_stride, out_s_stride, GROUPS,
    T: tl.constexpr, R: tl.constexpr, S: tl.constexpr, RUN: tl.constexpr, AXES: tl.constexpr, WHOLE: tl.constexpr,
    EVEN: tl.constexpr, DENSE: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    TAPS: tl.constexpr = T * R * S
    # ---- which tile, group and part
    grid_m = tl.cdiv(K, BLOCK_M)
    grid_n = tl.cdiv(TAPS * C, BLOCK_N)
    pid = tl.program_id(0)
    tile_m = pid % grid_m
    pid = pid // grid_m
    tile_n = pid % grid_n
    pid = pid // grid_n
    group = pid % GROUPS
    part = pid // GROUPS
    all_k = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    all_columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    # rows and columns past the last repeat it and are not stored: no mask in the loop
    k = tl.minimum(all_k, K - 1)
    index = tl.minimum(all_columns, TAPS * C - 1)
    tap = index // C
    c = index - tap * C
    s = tap % S
    line = tap // S
    r = line % R
    t = line // R
    first = part * TRIPS
    if WIDE:
        first = first.to(tl.int64)
        group = group.to(tl.int64)
        k = k.to(tl.int64)
        c = c.to(tl.int64)
        s = s.to(tl.int64)
    x_columns = x + (s * x_copy + (group * C + c) * x_c_stride + t * x_t_stride + r * x_r_stride)
    dy_columns = dy + (group * K + k) * dy_c_stride
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    # ---- the product; max(.., 1): see conv_gather. The last part may have fewer trips than the others
    trips = tl.minimum(TRIPS, tl.cdiv(PIXELS, BLOCK_K) - first).to(tl.int32)
    for trip in range(tl.maximum(trips, 1)):
        start = (first + trip) * BLOCK_K
        m = start + tl.arange(0, BLOCK_K)
        if AXES == 1:
            x_row = m
            dy_row = m
        else:
            if WHOLE:  # a trip stays within one line
                rest = start // Q
                q = (start - rest * Q) + tl.arange(0, BLOCK_K)
            elif WIDE:
                rest = m // Q
                q = m - rest * Q
            else:
                rest = divide(m, q_mul, q_shift)
                q = m - rest * Q
            p = rest
            if AXES > 2:
                if WHOLE or WIDE:
                    rest = p // P
                else:
                    rest = divide(p, p_mul, p_shift)
                p -= rest * P
            x_row = p * x_h_stride + q
            dy_row = p * dy_h_stride + q
            if AXES > 2:
                o = rest
                if AXES > 3:
                    if WHOLE or WIDE:
                        rest = o // O
                    else:
                        rest = divide(o, o_mul, o_shift)
                    o -= rest * O
                    x_row += rest * x_n_stride
                    dy_row += rest * dy_n_stride
                x_row += o * x_d_stride
                dy_row += o * dy_d_stride
        # so many neighbours lie together, aligned: what the divisions hide from the compiler
        x_row = tl.max_contiguous(tl.multiple_of(x_row, RUN), RUN)
        dy_row = tl.max_contiguous(tl.multiple_of(dy_row, RUN), RUN)
        if EVEN:
            b = tl.load(x_row[:, None] + x_columns[None, :])
            a = tl.load(dy_row[:, None] + dy_columns[None, :])
        else:
            ok = (m < PIXELS)[:, None]
            b = tl.load(x_row[:, None] + x_columns[None, :], mask=ok, other=0.0)
            a = tl.load(dy_row[:, None] + dy_columns[None, :], mask=ok, other=0.0)
        acc = tl.dot(tl.trans(a), b, acc, input_precision=PRECISION)
    # ---- dw itself, or this part's share of it
    ok = (all_k < K)[:, None] & (all_columns < TAPS * C)[None, :]
    filters = (group * K + all_k)[:, None]
    tap = all_columns // C
    c = all_columns - tap * C
    s = tap % S
    line = tap // S
    r = line % R
    t = line // R
    z_tile = None
    if z is not None:
        z_shift = t * z_t_stride + r * z_r_stride + s * z_s_stride + c * z_c_stride
        z_tile = tl.load(z + filters * z_k_stride + z_shift[None, :], mask=ok, other=0.0)
    result = finish(acc, z_tile, None, alpha, beta, None, 0)
    out += part.to(tl.int64) * out_part_stride
    if DENSE:
        shift = all_columns
    else:
        shift = t * out_t_stride + r * out_r_stride + s * out_s_stride + c * out_c_stride
    tl.store(out + filters * out_k_stride + shift[None, :], result.to(out.dtype.element_ty), mask=ok)


class _Planes:
    """A problem for matrix units: what is packed, and where the kernel finds each operand's pixels."""

    def __init__(self, problem: Problem):
        g = self.geometry = Geometry.of(problem)
        self.dtype, self.math = g.x.dtype, problem.math
        self.rounding = self.dtype == "f32"
        width = padded(g.out_size[2], self.dtype)
        height, depth = ((n - 1) * s + (r - 1) * d + 1 for n, s, r, d in (self._axis(1), self._axis(0)))
        c_sizes = (g.N, g.C, *g.in_size)
        plain = g.filter[2] == 1 and g.stride[2] == 1 and not any((*g.pad, *g.pad_after))
        self.x_planes = self.dy_planes = None
        if plain and is_aligned(g.x_strides, c_sizes, 4, self.dtype, g.x.alignment):
            x_n, x_c, x_d, x_h, _ = g.x_strides
        else:
            space = (depth, height, width)
            shifts = {"shifts": g.filter[2], "step": g.stride[2], "shift": g.dilation[2]}
            self.x_planes = Planes(c_sizes, g.x_strides, space, g.out_size[2], g.pad, **shifts)
            x_c, x_n, x_d, x_h = self.x_planes.points, depth * height * width, height * width, width
        k_sizes = (g.N, g.K, *g.out_size)
        if is_aligned(g.y_strides, k_sizes, 4, self.dtype, g.y.alignment):
            dy_n, dy_c, dy_d, dy_h, _ = g.y_strides
        else:
            o, p, q = g.out_size
            self.dy_planes = Planes(k_sizes, g.y_strides, (o, p, width), q)
            dy_c, dy_n, dy_d, dy_h = self.dy_planes.points, o * p * width, p * width, width
        sizes = (g.N, *g.out_size[:2], width)
        x_steps, dy_steps = (x_n, g.stride[0] * x_d, g.stride[1] * x_h, 1), (dy_n, dy_d, dy_h, 1)
        self.sizes, self.x_steps, self.dy_steps = merged(sizes, x_steps, dy_steps)
        self.x_c, self.dy_c = x_c, dy_c
        self.x_t, self.x_r = g.dilation[0] * x_d, g.dilation[1] * x_h
        taps, c = math.prod(g.filter), g.C // g.G
        pixels = math.prod(self.sizes)
        self.split = Split(g, Gemm(g.K // g.G, taps * c, pixels, 1, g.G, self.dtype, self.math))
        # where things lie in the workspace
        item = SIZES[self.dtype]
        self.dy_at = self.x_planes.elements * item if self.x_planes else 0
        self.parts_at = self.dy_at + (self.dy_planes.elements * item if self.dy_planes else 0)
        operands = [t.span for _, t in problem.items] + [p.elements for p in (self.x_planes, self.dy_planes) if p]
        self.span = max(operands)

    def _axis(self, axis: int) -> tuple[int, int, int, int]:
        g = self.geometry
        return g.out_size[axis], g.stride[axis], g.filter[axis], g.dilation[axis]

    def launches(self, problem: Problem, config: Config) -> list[Launch]:
        g, split = self.geometry, self.split
        found: list[Launch] = []
        x: Argument = "x"
        dy: Argument = "dy"
        if self.x_planes:
            x = Slice(0, self.dtype)
            found.append(self.x_planes.launch("x", x, self.span, self.rounding))
        if self.dy_planes:
            dy = Slice(self.dy_at, self.dtype)
            found.append(self.dy_planes.launch("dy", dy, self.span, self.rounding))
        pixels = split.gemm.depth
        args: dict[str, Argument] = {
            **split.result(problem, config, self.parts_at), "x": x, "dy": dy, "PIXELS": pixels,
            "C": g.C // g.G, "K": g.K // g.G, "GROUPS": g.G, "TRIPS": split.trips(config),
            **dict(zip("OPQ", self.sizes[1:])), "x_copy": g.C * self.x_c, "x_c_stride": self.x_c,
            "x_t_stride": self.x_t, "x_r_stride": self.x_r, "dy_c_stride": self.dy_c,
            **named("x", "ndh", self.x_steps[:3]), **named("dy", "ndh", self.dy_steps[:3]),
        }  # fmt: skip
        for axis, size in zip("opq", self.sizes[1:]):
            args[f"{axis}_mul"], args[f"{axis}_shift"] = reciprocal(size)
        constexprs = {
            **dict(zip("TRS", g.filter)), "RUN": 16 // SIZES[self.dtype],
            "AXES": max(1, sum(size > 1 for size in self.sizes)), "DENSE": split.parts(config) > 1,
            "WHOLE": self.sizes[3] % config["BLOCK_K"] == 0, "EVEN": pixels % config["BLOCK_K"] == 0,
            "WIDE": max(self.span, pixels + config["BLOCK_K"], split.elements) > INT32, "PRECISION": self.math,
            **{knob: config[knob] for knob in ("BLOCK_M", "BLOCK_N", "BLOCK_K")},
        }  # fmt: skip
        grid = (split.tiles(config) * split.parts(config),)
        found.append(Launch(conv_wgrad_planes, grid, args, constexprs, config["num_warps"], config["num_stages"]))
        return [*found, *split.addition(problem, config, self.parts_at)]


class _ChannelsLast:
    """A problem for vector units: x packed channels last."""

    def __init__(self, problem: Problem):
        g = Geometry.of(problem)
        self.view = View.of(problem)
        self.pixels = Pixels(1, (g.N, g.C, *g.in_size), g.x_strides, padded(g.C, "f32"))
        self.split = self.view.split
        self.parts_at = self.pixels.elements * SIZES["f32"]

    def launches(self, problem: Problem, config: Config) -> list[Launch]:
        to = Slice(0, "f32")
        first = self.pixels.launch("x", to, self.view.span, False)
        over = self.view.over(to, self.pixels.packed_strides, self.pixels.elements)
        return [first, *wgrad(problem, over, config, self.parts_at)]


def _method(problem: Problem) -> _Planes | _ChannelsLast:
    matrix = problem["x"].dtype != "f32" or problem.math == "tf32"
    return _Planes(problem) if matrix else _ChannelsLast(problem)


class ImplicitGemmWgradPacked(TritonEngine):
    """Filter gradient."""

    name = "conv.implicit_gemm_wgrad_packed"
    operations = ("conv_wgrad",)
    notes = frozenset({"tensor_core", "tf32", "runtime_compilation"})

    def refusals(self, problem: Problem) -> list[str]:
        refusals = Refusals()
        x, dy = problem["x"], problem["dy"]
        refusals.require(x.dtype in SIZES, f"x of type {', '.join(SIZES)}", x.dtype)
        for name, tensor in problem.items:
            refusals.require(tensor.numel > 0, f"elements in {name}", str(tensor))
        if refusals:
            return refusals
        g = Geometry.of(problem)
        x_ready = is_aligned(g.x_strides, (g.N, g.C, *g.in_size), 1, x.dtype, x.alignment)
        dy_ready = is_aligned(g.y_strides, (g.N, g.K, *g.out_size), 1, x.dtype, dy.alignment)
        if x.dtype != "f32":
            found = f"x={x}, dy={dy}"
            refusals.require(not (x_ready and dy_ready), "x or dy not channels last with aligned rows already", found)
        elif problem.math == "ieee":
            refusals.require(not x_ready, "x that is not channels last with aligned rows already", str(x))
            refusals.require(g.C // g.G >= 16, "at least 16 channels a group in float32 arithmetic", g.C // g.G)
        split = _method(problem).split
        blocks = max(split.tiles(config) * split.parts(config) for config in split.configs(problem.target))
        refusals.require(blocks <= INT32, "at most 2^31 - 1 tiles", blocks)
        return refusals

    def configs(self, problem: Problem) -> list[Config]:
        return _method(problem).split.configs(problem.target)

    def workspace_size(self, problem: Problem, config: Config) -> int:
        method = _method(problem)
        return method.parts_at + method.split.size(config)

    def cost(self, problem: Problem, config: Config) -> float:
        method, target = _method(problem), problem.target
        split = method.split
        launches = len(method.launches(problem, config))
        packing = 0.0
        if method.parts_at:  # x is read from the second-level cache again for every copy
            rate = 0.7 if problem.op.stride[-1] == 1 else 0.35  # a stride leaves half of what a warp reads unused
            packing = (problem["x"].nbytes + method.parts_at) / (rate * target.bandwidth)
        traffic = (problem["dy"].nbytes + method.parts_at) / (0.8 * target.bandwidth)
        return packing + max(seconds(split.gemm, config, target), traffic) + start(target, launches)

    def launches(self, problem: Problem, config: Config) -> list[Launch]:
        return _method(problem).launches(problem, config)
