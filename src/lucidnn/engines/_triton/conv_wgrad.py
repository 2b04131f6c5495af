"""The gathered matrix product behind a convolution's filter gradient, and its launches.

The product is (filters) x (taps times channels), summed over all pixels of dy: each trip of the loop takes a
block of pixels, their rows of dy, and the pixels of x that one tap sees from there, gathered through
pointers.  A tile stays within one tap, so that wide loads along channels are possible; where a group has
fewer than 16 channels, taps and channels are packed into one axis and every element finds its own pixel.

The reduction is long and the result small, so it is split (see `split`).  Float32 operands under ``math=tf32`` are
not rounded: the matrix units cut them off, which is what the framework's own library does in this direction (error
8e-4 on random data, as here), and rounding would lead both operands through registers.

Triton lays a load out along the axis that it knows to be contiguous, and along a tile's rows where it knows of none:
tiles have pixels as their rows, so channels-first operands are read along pixels too.
"""

import dataclasses
import math

import triton
import triton.language as tl

from ...core.engine import Config, Refusals
from ...core.problem import Problem
from ...ops.convolution import Geometry
from .epilogue import finish
from .index import INT32, divide, reciprocal
from .launch import Argument, Launch, TritonEngine
from .split import Split, named
from .tiles import Gemm, one_by_one, seconds

DTYPES = ("f64", "f32", "f16", "bf16")
PACK_BELOW = 16  # channels of a group


@triton.jit
def conv_wgrad(
    x, dy, z, out, alpha, beta,
    PIXELS, O, P, Q, x_d, x_h, x_w, C, K, GROUPS, TRIPS, pad_d, pad_h, pad_w,
    o_mul, o_shift, p_mul, p_shift, q_mul, q_shift,
    x_n_stride, x_c_stride, x_d_stride, x_h_stride, x_w_stride,
    dy_n_stride, dy_c_stride, dy_d_stride, dy_h_stride, dy_w_stride,
    z_k_stride, z_c_stride, z_t_stride, z_r_stride, z_s_stride,
    out_part_stride, out_k_stride, out_c_stride, out_t_stride, out_r_stride, out_s_stride,
    T: tl.constexpr, R: tl.constexpr, S: tl.constexpr,
    STRIDE_D: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    DILATION_D: tl.constexpr, DILATION_H: tl.constexpr, DILATION_W: tl.constexpr,
    HAS_D: tl.constexpr, PACKED: tl.constexpr, WIDE: tl.constexpr, INSIDE: tl.constexpr,
    DY_FLAT: tl.constexpr, DY_RUN: tl.constexpr, EVEN: tl.constexpr, EVEN_K: tl.constexpr, EVEN_C: tl.constexpr,
    DENSE: tl.constexpr, ATOMIC: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    TAPS: tl.constexpr = T * R * S
    # ---- which tile, group and part: parts vary slowest, so that blocks that run together read the same pixels
    grid_m = tl.cdiv(K, BLOCK_M)
    if PACKED:
        grid_n = tl.cdiv(TAPS * C, BLOCK_N)
    else:
        blocks = tl.cdiv(C, BLOCK_N)
        grid_n = blocks * TAPS
    pid = tl.program_id(0)
    tile_m = pid % grid_m
    pid = pid // grid_m
    tile_n = pid % grid_n
    pid = pid // grid_n
    group = pid % GROUPS
    part = pid // GROUPS
    # ---- its filters, and its taps and channels
    k = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    if PACKED:
        index = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
        tap = index // C
        c = index - tap * C
        ok_c = tap < TAPS
    else:
        tap = tile_n // blocks
        c = (tile_n - tap * blocks) * BLOCK_N + tl.arange(0, BLOCK_N)
        ok_c = c < C
    s = tap % S
    line = tap // S
    r = line % R
    t = line // R
    dw = s * DILATION_W - pad_w
    dh = r * DILATION_H - pad_h
    dd = t * DILATION_D - pad_d
    first = part * TRIPS
    if WIDE:
        first = first.to(tl.int64)
        group = group.to(tl.int64)
        k = k.to(tl.int64)
        c = c.to(tl.int64)
    x_shift = dh * x_h_stride + dw * x_w_stride + (group * C + c) * x_c_stride
    if HAS_D:
        x_shift += dd * x_d_stride
    if PACKED:
        dw = dw[None, :]
        dh = dh[None, :]
        dd = dd[None, :]
    x_columns = (x + x_shift)[None, :]
    dy_columns = (dy + (group * K + k) * dy_c_stride)[None, :]
    ok_x_columns = ok_c[None, :]
    ok_dy_columns = (k < K)[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float64 if x.dtype.element_ty == tl.float64 else tl.float32)
    # ---- the product; max(.., 1): see conv_gather. The last part may have fewer trips than the others
    trips = tl.minimum(TRIPS, tl.cdiv(PIXELS, BLOCK_K) - first).to(tl.int32)
    for trip in range(tl.maximum(trips, 1)):
        m = (first + trip) * BLOCK_K + tl.arange(0, BLOCK_K)
        if WIDE:
            rest = m // Q
            n = rest // P
            p = rest - n * P
        else:
            rest = divide(m, q_mul, q_shift)
            n = divide(rest, p_mul, p_shift)
            p = rest - n * P
        q = m - rest * Q
        if HAS_D:
            if WIDE:
                image = n // O
            else:
                image = divide(n, o_mul, o_shift)
            o = n - image * O
            n = image
        x_row = n * x_n_stride + (p * STRIDE_H) * x_h_stride + (q * STRIDE_W) * x_w_stride
        if HAS_D:
            x_row += (o * STRIDE_D) * x_d_stride
        ok = (m < PIXELS)[:, None]
        if not INSIDE:
            h = (p * STRIDE_H)[:, None] + dh
            w = (q * STRIDE_W)[:, None] + dw
            ok = ok & (h >= 0) & (h < x_h) & (w >= 0) & (w < x_w)
            if HAS_D:
                d = (o * STRIDE_D)[:, None] + dd
                ok = ok & (d >= 0) & (d < x_d)
        if not EVEN_C:
            ok = ok & ok_x_columns
        x_places = x_columns + x_row[:, None]
        if INSIDE and EVEN and EVEN_C:
            b = tl.load(x_places)
        else:
            b = tl.load(x_places, mask=ok, other=0.0)
        if DY_FLAT:
            dy_row = m * dy_w_stride
        else:
            dy_row = n * dy_n_stride + p * dy_h_stride + q * dy_w_stride
            if HAS_D:
                dy_row += o * dy_d_stride
        if DY_RUN > 1:  # so many neighbours lie together, aligned: what the divisions hide from the compiler
            dy_row = tl.max_contiguous(tl.multiple_of(dy_row, DY_RUN), DY_RUN)
        dy_places = dy_columns + dy_row[:, None]
        if EVEN and EVEN_K:
            a = tl.load(dy_places)
        elif EVEN:
            a = tl.load(dy_places, mask=ok_dy_columns, other=0.0)
        elif EVEN_K:
            a = tl.load(dy_places, mask=(m < PIXELS)[:, None], other=0.0)
        else:
            a = tl.load(dy_places, mask=(m < PIXELS)[:, None] & ok_dy_columns, other=0.0)
        if PRECISION == "ieee" and a.dtype == tl.float32:
            # Each trip sums for itself and is then added: a chain of thousands of terms would lose digits that the
            # peer keeps. The limit on imprecise terms means nothing here but stops the two from being merged again.
            acc += tl.dot(tl.trans(a), b, input_precision=PRECISION, max_num_imprecise_acc=1, out_dtype=acc.dtype)
        else:
            acc = tl.dot(tl.trans(a), b, acc, input_precision=PRECISION, out_dtype=acc.dtype)
    # ---- dw itself, or this part's share of it
    ok = (k < K)[:, None] & ok_c[None, :]
    filters = (group * K + k)[:, None]
    z_tile = None
    if z is not None:
        z_shift = t * z_t_stride + r * z_r_stride + s * z_s_stride + c * z_c_stride
        z_tile = tl.load(z + filters * z_k_stride + z_shift[None, :], mask=ok, other=0.0)
    result = finish(acc, z_tile, None, alpha, beta, None, 0)
    out += part.to(tl.int64) * out_part_stride
    if PACKED and DENSE:
        shift = index
    else:
        shift = t * out_t_stride + r * out_r_stride + s * out_s_stride + c * out_c_stride
    if ATOMIC:
        tl.atomic_add(out + filters * out_k_stride + shift[None, :], result, mask=ok, sem="relaxed")
    else:
        tl.store(out + filters * out_k_stride + shift[None, :], result.to(out.dtype.element_ty), mask=ok)


@dataclasses.dataclass(frozen=True)
class View:
    """A filter-gradient problem as the kernel sees it."""

    geometry: Geometry
    x: Argument
    x_strides: tuple[int, ...]
    precision: str
    span: int  # elements that the largest operand reaches over

    @classmethod
    def of(cls, problem: Problem) -> "View":
        g = Geometry.of(problem)
        return cls(g, "x", g.x_strides, problem.math, max(t.span for _, t in problem.items))

    def over(self, x: Argument, x_strides: tuple[int, ...], span: int) -> "View":
        """The same product over an x that lies elsewhere and is `span` elements long."""
        return dataclasses.replace(self, x=x, x_strides=x_strides, span=max(self.span, span))

    @property
    def packed(self) -> bool:
        """Whether taps and channels share one axis."""
        return self.geometry.C // self.geometry.G < PACK_BELOW

    @property
    def split(self) -> Split:
        g = self.geometry
        taps, c = math.prod(g.filter), g.C // g.G
        n, batch = (taps * c, g.G) if self.packed else (c, g.G * taps)
        pixels = g.N * math.prod(g.out_size)
        return Split(g, Gemm(g.K // g.G, n, pixels, 1, batch, g.x.dtype, self.precision))


def wgrad(problem: Problem, v: View, config: Config, at: int) -> list[Launch]:
    """The launches: the product, and the sum over the parts that it leaves in the workspace from byte `at` on."""
    result = v.split.result(problem, config, at)
    return [product(problem, v, config, result), *v.split.addition(problem, config, at)]


def product(problem: Problem, v: View, config: Config, result: dict[str, Argument], atomic: bool = False) -> Launch:
    """The launch of the product; `result` says where it writes, `atomic` that all parts are added to one there."""
    g, split = v.geometry, v.split
    pixels, k = split.gemm.depth, g.K // g.G
    wide = max(v.span, pixels + config["BLOCK_K"], split.elements + 4096) > INT32
    args: dict[str, Argument] = {
        **result, "x": v.x, "dy": "dy", "PIXELS": pixels,
        "C": g.C // g.G, "K": k, "GROUPS": g.G, "TRIPS": split.trips(config), **dict(zip("OPQ", g.out_size)),
        **{f"x_{axis}": size for axis, size in zip("dhw", g.in_size)},
        **{f"pad_{axis}": size for axis, size in zip("dhw", g.pad)},
        **named("x", "ncdhw", v.x_strides), **named("dy", "ncdhw", g.y_strides),
    }  # fmt: skip
    for axis, size in zip("opq", g.out_size):
        args[f"{axis}_mul"], args[f"{axis}_shift"] = reciprocal(size)
    constexprs = {
        **dict(zip("TRS", g.filter)),
        **{f"STRIDE_{axis}": size for axis, size in zip("DHW", g.stride)},
        **{f"DILATION_{axis}": size for axis, size in zip("DHW", g.dilation)},
        "HAS_D": len(problem.op.stride) == 3, "PACKED": v.packed, "WIDE": wide,
        "INSIDE": not any(g.pad) and not any(g.pad_after),
        "DY_FLAT": _is_flat(g.N, g.out_size, g.y_strides), "DY_RUN": _run(g),
        "EVEN": pixels % config["BLOCK_K"] == 0, "EVEN_K": k % config["BLOCK_M"] == 0,
        "EVEN_C": split.gemm.n % config["BLOCK_N"] == 0, "DENSE": result["out"] != "dw",
        "ATOMIC": atomic, "PRECISION": v.precision,
        **{knob: config[knob] for knob in ("BLOCK_M", "BLOCK_N", "BLOCK_K")},
    }  # fmt: skip
    grid = (split.tiles(config) * split.parts(config),)
    return Launch(conv_wgrad, grid, args, constexprs, config["num_warps"], config["num_stages"])


def _is_flat(n: int, size: tuple[int, int, int], strides: tuple[int, ...]) -> bool:
    """Whether pixel number m lies at m times the stride of the last axis."""
    step = strides[4]
    for length, stride in zip((size[2], size[1], size[0], n), (strides[4], strides[3], strides[2], strides[0])):
        if length > 1 and stride != step:
            return False
        step *= length
    return True


def _run(g: Geometry) -> int:
    """Pixels of dy, a power of two, that always lie together and aligned to as many elements."""
    if g.y_strides[4] != 1:
        return 1
    others = [s for n, s in zip((g.N, *g.out_size[:2]), (g.y_strides[0], *g.y_strides[2:4])) if n > 1]
    return math.gcd(8, g.out_size[2], *others)


class GatheredWgrad(TritonEngine):
    """Base of the engines whose product is `conv_wgrad` on the tensors as they are."""

    operations = ("conv_wgrad",)
    notes = frozenset({"tensor_core", "tf32", "runtime_compilation"})

    def refusals(self, problem: Problem) -> list[str]:
        refusals = Refusals()
        refusals.require_tensors(problem.items, DTYPES, elements=True)
        if not refusals:
            split = View.of(problem).split
            blocks = max(split.tiles(config) * split.parts(config) for config in self.configs(problem))
            refusals.require(blocks <= INT32, "at most 2^31 - 1 tiles", blocks)
        return refusals

    def configs(self, problem: Problem) -> list[Config]:
        return View.of(problem).split.configs(problem.target)


def product_seconds(problem: Problem, split: Split, config: Config, packed: bool) -> float:
    """Estimated time of the product, at least of its traffic; `packed` says that taps and channels share an axis.

    A single 16-bit element is less than an asynchronous copy takes. TF32 operands, whose reduction is the pixels, are
    turned and rounded on the way through registers, with twice the instructions.
    """
    target, gemm = problem.target, split.gemm
    sides = min(config["BLOCK_N"], gemm.n) * config["BLOCK_K"], min(config["BLOCK_M"], gemm.m) * config["BLOCK_K"]
    last = [t.is_channels_last for _, t in problem.items[:2]]  # of x and of dy
    times, near, far = 1, 0, 0
    if gemm.itemsize == 2:
        near = (sides[0] if packed or not last[0] else 0) + (0 if last[1] else sides[1])
    elif gemm.on_matrix_units:
        times, near = 2, sum(sides)
    else:
        far = sum(size for size, beside in zip(sides, last) if not beside)
    loading = times * one_by_one(config, target, near, far)
    return max(seconds(gemm, config, target, loading), problem.bytes / (0.75 * target.bandwidth))
