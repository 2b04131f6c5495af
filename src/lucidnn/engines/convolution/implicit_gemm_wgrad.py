"""Filter gradient of a convolution as one gathered matrix product (implicit GEMM) with a split reduction, in
Triton.

The product is (filters) x (taps times channels), summed over all pixels of dy: each trip of the loop takes a
block of pixels, their rows of dy, and the pixels of x that one tap sees from there, gathered through
pointers.  A tile stays within one tap, so that wide loads along channels are possible; where a group has
fewer than 16 channels, taps and channels are packed into one axis and every element finds its own pixel.

The reduction is long and the result small, so it is split: `SPLIT_K` blocks sum a part of the pixels each
into float32 (float64 for float64) in the workspace, and a second kernel adds the parts in a fixed order and
applies alpha and beta * z. The result is the same from run to run.  With one part there is no workspace and
no second kernel.

Any strides (also 0), asymmetric padding, dilation, groups, 1 to 3 dimensions; every edge is masked; offsets
are 64-bit where a tensor reaches past 2^31 elements.  Cost: the operations of the definition plus what partly
filled tiles waste, and 8 bytes times `SPLIT_K` for every element of dw.
"""

import math

import triton
import triton.language as tl

from ...core.engine import Config, Refusals
from ...core.heuristics import LAUNCH
from ...core.problem import Problem
from ...ops.convolution import Geometry
from .._triton.epilogue import finish
from .._triton.index import INT32, columns, divide, pixels_first, reciprocal, rows
from .._triton.launch import Argument, Launch, Slice, TritonEngine, blend
from .._triton.tf32 import rounded
from .._triton.tiles import Gemm, ranked, seconds, shapes

DTYPES = ("f64", "f32", "f16", "bf16")
PACK_BELOW = 16  # channels of a group
MOST_PARTS = 512


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
    HAS_D: tl.constexpr, PACKED: tl.constexpr, WIDE: tl.constexpr, INSIDE: tl.constexpr, DY_FLAT: tl.constexpr,
    X_TURNED: tl.constexpr, DY_TURNED: tl.constexpr, EVEN: tl.constexpr, EVEN_K: tl.constexpr, EVEN_C: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
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
        dw = columns(dw, X_TURNED)
        dh = columns(dh, X_TURNED)
        dd = columns(dd, X_TURNED)
    x_columns = columns(x + x_shift, X_TURNED)
    dy_columns = columns(dy + (group * K + k) * dy_c_stride, DY_TURNED)
    ok_x_columns = columns(ok_c, X_TURNED)
    ok_dy_columns = columns(k < K, DY_TURNED)
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
        ok = rows(m < PIXELS, X_TURNED)
        if not INSIDE:
            h = rows(p * STRIDE_H, X_TURNED) + dh
            w = rows(q * STRIDE_W, X_TURNED) + dw
            ok = ok & (h >= 0) & (h < x_h) & (w >= 0) & (w < x_w)
            if HAS_D:
                d = rows(o * STRIDE_D, X_TURNED) + dd
                ok = ok & (d >= 0) & (d < x_d)
        if not EVEN_C:
            ok = ok & ok_x_columns
        x_places = x_columns + rows(x_row, X_TURNED)
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
        dy_places = dy_columns + rows(dy_row, DY_TURNED)
        if EVEN and EVEN_K:
            a = tl.load(dy_places)
        elif EVEN:
            a = tl.load(dy_places, mask=ok_dy_columns, other=0.0)
        elif EVEN_K:
            a = tl.load(dy_places, mask=rows(m < PIXELS, DY_TURNED), other=0.0)
        else:
            a = tl.load(dy_places, mask=rows(m < PIXELS, DY_TURNED) & ok_dy_columns, other=0.0)
        if X_TURNED:
            b = tl.trans(b)
        if not DY_TURNED:
            a = tl.trans(a)
        if PRECISION == "tf32":
            a = rounded(a)
            b = rounded(b)
        acc = tl.dot(a, b, acc, input_precision=PRECISION, out_dtype=acc.dtype)
    # ---- dw itself, or this part's share of it
    ok = (k < K)[:, None] & ok_c[None, :]
    filters = (group * K + k)[:, None]
    z_tile = None
    if z is not None:
        z_shift = t * z_t_stride + r * z_r_stride + s * z_s_stride + c * z_c_stride
        z_tile = tl.load(z + filters * z_k_stride + z_shift[None, :], mask=ok, other=0.0)
    result = finish(acc, z_tile, None, alpha, beta, None, 0)
    out += part.to(tl.int64) * out_part_stride
    shift = t * out_t_stride + r * out_r_stride + s * out_s_stride + c * out_c_stride
    tl.store(out + filters * out_k_stride + shift[None, :], result.to(out.dtype.element_ty), mask=ok)


@triton.jit
def conv_wgrad_sum(
    parts, z, dw, alpha, beta, PARTS, ELEMENTS, C,
    z_k_stride, z_c_stride, z_t_stride, z_r_stride, z_s_stride,
    dw_k_stride, dw_c_stride, dw_t_stride, dw_r_stride, dw_s_stride,
    T: tl.constexpr, R: tl.constexpr, S: tl.constexpr, WIDE: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Dw = alpha * (sum over the parts, each laid out as K, T, R, S, C) + beta * z."""
    pid = tl.program_id(0)
    if WIDE:
        pid = pid.to(tl.int64)
    e = pid * BLOCK + tl.arange(0, BLOCK)
    ok = e < ELEMENTS
    acc = tl.zeros((BLOCK_S, BLOCK), dtype=parts.dtype.element_ty)
    for first in range(0, PARTS, BLOCK_S):
        part = first + tl.arange(0, BLOCK_S)
        places = parts + part.to(tl.int64)[:, None] * ELEMENTS + e[None, :]
        acc += tl.load(places, mask=(part < PARTS)[:, None] & ok[None, :], other=0.0)
    total = tl.sum(acc, axis=0)
    pixel = e // C
    c = e - pixel * C
    s = pixel % S
    line = pixel // S
    r = line % R
    plane = line // R
    t = plane % T
    k = plane // T
    z_tile = None
    if z is not None:
        z_place = k * z_k_stride + t * z_t_stride + r * z_r_stride + s * z_s_stride + c * z_c_stride
        z_tile = tl.load(z + z_place, mask=ok, other=0.0)
    result = finish(total, z_tile, None, alpha, beta, None, 0)
    place = k * dw_k_stride + t * dw_t_stride + r * dw_r_stride + s * dw_s_stride + c * dw_c_stride
    tl.store(dw + place, result.to(dw.dtype.element_ty), mask=ok)


class _View:
    """A filter-gradient problem as the kernels see it."""

    def __init__(self, problem: Problem):
        g = self.geometry = Geometry.of(problem)
        self.c, self.k = g.C // g.G, g.K // g.G
        self.taps = math.prod(g.filter)
        self.pixels = g.N * math.prod(g.out_size)
        self.elements = g.K * self.taps * self.c
        self.packed = self.c < PACK_BELOW
        n, batch = (self.taps * self.c, g.G) if self.packed else (self.c, g.G * self.taps)
        self.gemm = Gemm(self.k, n, self.pixels, 1, batch, g.x.dtype, problem.math)
        self.part_type = "f64" if g.x.dtype == "f64" else "f32"

    def tiles(self, config: Config) -> int:
        """Blocks of one part."""
        return -(-self.gemm.m // config["BLOCK_M"]) * -(-self.gemm.n // config["BLOCK_N"]) * self.gemm.batch

    def trips(self, config: Config) -> int:
        """Turns of the loop of each part; the last part may have fewer."""
        return -(-self.steps(config) // config["SPLIT_K"])

    def parts(self, config: Config) -> int:
        """Parts that have something to do: at most SPLIT_K."""
        return -(-self.steps(config) // self.trips(config))

    def steps(self, config: Config) -> int:
        return -(-self.pixels // config["BLOCK_K"])


class ImplicitGemmWgrad(TritonEngine):
    """Filter gradient."""

    name = "conv.implicit_gemm_wgrad"
    operations = ("conv_wgrad",)
    notes = frozenset({"tensor_core", "tf32", "runtime_compilation"})

    def refusals(self, problem: Problem) -> list[str]:
        refusals = Refusals()
        for role, tensor in problem.items:
            refusals.require(tensor.dtype in DTYPES, f"{role} of type {', '.join(DTYPES)}", tensor.dtype)
            refusals.require(tensor.numel > 0, f"elements in {role}", str(tensor))
        if not refusals:
            view = _View(problem)
            blocks = max(view.tiles(config) * view.parts(config) for config in self.configs(problem))
            refusals.require(blocks <= INT32, "at most 2^31 - 1 tiles", blocks)
        return refusals

    def configs(self, problem: Problem) -> list[Config]:
        view, target = _View(problem), problem.target
        found = []
        for config in shapes(view.gemm, target):
            tiles, steps = view.tiles(config), view.steps(config)
            splits = {max(1, min(waves * target.processors // tiles, steps, MOST_PARTS)) for waves in (1, 2, 4)}
            found += [{**config, "SPLIT_K": split} for split in sorted(splits | {1})]
        return [*ranked(view.gemm, found, target)]

    def workspace_size(self, problem: Problem, config: Config) -> int:
        view = _View(problem)
        parts = view.parts(config)
        return 0 if parts == 1 else parts * view.elements * (8 if view.part_type == "f64" else 4)

    def cost(self, problem: Problem, config: Config) -> float:
        view, target = _View(problem), problem.target
        traffic = problem.bytes / (0.8 * target.bandwidth)
        launches = 1 if view.parts(config) == 1 else 2
        return max(seconds(view.gemm, config, target), traffic) + launches * LAUNCH[target.kind]

    def launches(self, problem: Problem, config: Config) -> list[Launch]:
        v = _View(problem)
        g = v.geometry
        parts = v.parts(config)
        z = problem.tensors.get("z")
        z_strides = (*z.strides[:2], *(0,) * (5 - z.ndim), *z.strides[2:]) if z else (None,) * 5
        share = dict(zip("ctrsk", _packed_strides(v.c, *g.filter)))  # of one part, laid out K, T, R, S, C
        out_strides = g.w_strides if parts == 1 else tuple(share[axis] for axis in "kctrs")
        wide = any(t.span > INT32 for _, t in problem.items) or v.pixels + config["BLOCK_K"] > INT32
        wide = wide or v.elements + 4096 > INT32
        last = {**blend(problem), "z": "z", **_named("z", "kctrs", z_strides)}
        del last["parameter"]
        nothing = dict.fromkeys(last)
        args: dict[str, Argument] = {
            **(last if parts == 1 else nothing),
            "x": "x", "dy": "dy", "out": "dw" if parts == 1 else Slice(0, v.part_type),
            "PIXELS": v.pixels, "C": v.c, "K": v.k, "GROUPS": g.G, "TRIPS": v.trips(config),
            "out_part_stride": v.elements,
            **dict(zip("OPQ", g.out_size)),
            **{f"x_{axis}": size for axis, size in zip("dhw", g.in_size)},
            **{f"pad_{axis}": size for axis, size in zip("dhw", g.pad)},
            **_named("x", "ncdhw", g.x_strides), **_named("dy", "ncdhw", g.y_strides),
            **_named("out", "kctrs", out_strides),
        }  # fmt: skip
        for axis, size in zip("opq", g.out_size):
            args[f"{axis}_mul"], args[f"{axis}_shift"] = reciprocal(size)
        constexprs = {
            **dict(zip("TRS", g.filter)),
            **{f"STRIDE_{axis}": size for axis, size in zip("DHW", g.stride)},
            **{f"DILATION_{axis}": size for axis, size in zip("DHW", g.dilation)},
            "HAS_D": len(problem.op.stride) == 3, "PACKED": v.packed, "WIDE": wide,
            "INSIDE": not any(g.pad) and not any(g.pad_after),
            "DY_FLAT": _is_flat(g.N, g.out_size, g.y_strides),
            "X_TURNED": pixels_first(g.x_strides, v.c), "DY_TURNED": pixels_first(g.y_strides, v.k),
            "EVEN": v.pixels % config["BLOCK_K"] == 0, "EVEN_K": v.k % config["BLOCK_M"] == 0,
            "EVEN_C": v.gemm.n % config["BLOCK_N"] == 0, "PRECISION": problem.math,
            **{knob: config[knob] for knob in ("BLOCK_M", "BLOCK_N", "BLOCK_K")},
        }  # fmt: skip
        grid = (v.tiles(config) * parts,)
        found = [Launch(conv_wgrad, grid, args, constexprs, config["num_warps"], config["num_stages"])]
        if parts > 1:
            block_s = min(triton.next_power_of_2(parts), 32)
            block = min(1024, 2048 // block_s)
            args = {
                **last, "parts": Slice(0, v.part_type), "dw": "dw",
                "PARTS": parts, "ELEMENTS": v.elements, "C": v.c, **_named("dw", "kctrs", g.w_strides),
            }  # fmt: skip
            constexprs = {**dict(zip("TRS", g.filter)), "WIDE": wide, "BLOCK_S": block_s, "BLOCK": block}
            found.append(Launch(conv_wgrad_sum, (-(-v.elements // block),), args, constexprs, 4, 2))
        return found


def _named(name: str, axes: str, values: tuple) -> dict[str, Argument]:
    return {f"{name}_{axis}_stride": value for axis, value in zip(axes, values)}


def _packed_strides(c: int, t: int, r: int, s: int) -> tuple[int, int, int, int, int]:
    """Strides of C, T, R, S and K in a dense K, T, R, S, C array."""
    return 1, r * s * c, s * c, c, t * r * s * c


def _is_flat(n: int, size: tuple[int, int, int], strides: tuple[int, ...]) -> bool:
    """Whether pixel number m lies at m times the stride of the last axis."""
    step = strides[4]
    for length, stride in zip((size[2], size[1], size[0], n), (strides[4], strides[3], strides[2], strides[0])):
        if length > 1 and stride != step:
            return False
        step *= length
    return True
