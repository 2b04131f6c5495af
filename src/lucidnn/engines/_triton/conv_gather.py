"""The gathered matrix product behind the convolutions' forward direction and data gradient, and its launch.

The product is (pixels of the result) x (channels) x (filter taps times channels of the source), and the left
operand is never stored: each tile's rows are gathered through pointers, tap by tap, while the right operand
is the filter itself. One kernel serves both directions and 1 to 3 dimensions:

* forward: result pixel p reads source pixel ``p * stride - pad + r * dilation``, for every tap r;
* data gradient: result pixel h reads ``(h + pad - r * dilation) / stride`` where that is whole.  With stride
  > 1 the pixels are dealt into ``stride`` phases an axis; all pixels of a phase meet the same taps, so a tile
  takes one phase and visits only the taps that count.  Every phase is then a convolution of stride 1, and no
  product is wasted.

Sums are kept in float32 (float64 for float64, int32 for int8) and meet the scale, alpha, beta * z, bias and the
activation before they are stored. Channels are visited in blocks of one tap; where a group has fewer than 16, taps and
channels are packed into one axis. Offsets are 64-bit where a tensor reaches past 2^31 elements. Loads are wide (and
asynchronous on NVIDIA GPUs) where channels are innermost and their number is a multiple of 8 (16-bit) or 4 (32-bit);
in channels-first layouts neighbouring threads read neighbouring pixels. Triton lays a load out along the axis that it
knows to be contiguous, and along a tile's rows where it knows of none: tiles of pixels have the pixels as their rows,
tiles of the filter the axis that shared memory should hold contiguous (W_TURNED).

Engines share this file: `View` says what a problem asks of the kernel, `View.over` the same with operands
that have been laid out anew, and `gather` makes the launch.
"""

import dataclasses
import math

import triton
import triton.language as tl

from ...core.engine import Config, Refusals
from ...core.problem import Problem
from ...core.target import Target
from ...ops.activation import ACTIVATIONS
from ...ops.convolution import Geometry
from .epilogue import finish, stored
from .index import INT32, columns, rows
from .launch import Argument, Launch, Slice, blend
from .tf32 import rounded
from .tiles import Gemm, one_by_one, seconds

DTYPES = ("f64", "f32", "f16", "bf16")
EIGHT_BITS = {"i8": 80, "f8e4m3": 89, "f8e5m2": 89}  # operands, and the NVIDIA generation that first multiplied them
PACK_BELOW = 16  # channels of a group
ORDER = {"GROUP_M": 8, "TAPS_INNER": False}  # in which tiles are dealt out, and in which a tile's loop runs


@triton.jit
def _first_tap(phase, pad, TAPS: tl.constexpr, STRIDE: tl.constexpr, DILATION: tl.constexpr, STEP: tl.constexpr):
    """Taps r with (phase + pad - r * DILATION) divisible by STRIDE: the first, how many, where the first
    points.

    These taps are `STEP` apart.  Without any the number is 0 and the other results mean nothing.
    """
    first = phase * 0
    count = phase * 0
    for r in tl.static_range(min(TAPS, STEP)):
        hit = (phase + pad + r * (STRIDE - DILATION % STRIDE)) % STRIDE == 0
        first = tl.where(hit, r, first)
        count = tl.where(hit, (TAPS - r + STEP - 1) // STEP, count)
    return first, count, (phase + pad - first * DILATION) // STRIDE


@triton.jit
def conv_gather(
    src, w, scale, bias, z, dst, alpha, beta, parameter,
    M, O, P, Q, src_d, src_h, src_w, dst_d, dst_h, dst_w, RED, OUT, GROUPS, TRIPS, pad_d, pad_h, pad_w,
    src_n_stride, src_c_stride, src_d_stride, src_h_stride, src_w_stride,
    w_group_stride, w_out_stride, w_red_stride, w_t_stride, w_r_stride, w_s_stride,
    scale_stride, bias_stride, z_n_stride, z_c_stride, z_d_stride, z_h_stride, z_w_stride,
    dst_part_stride, dst_n_stride, dst_c_stride, dst_d_stride, dst_h_stride, dst_w_stride,
    T: tl.constexpr, R: tl.constexpr, S: tl.constexpr,
    STRIDE_D: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    DILATION_D: tl.constexpr, DILATION_H: tl.constexpr, DILATION_W: tl.constexpr,
    STEP_D: tl.constexpr, STEP_H: tl.constexpr, STEP_W: tl.constexpr,
    DGRAD: tl.constexpr, HAS_D: tl.constexpr, PACKED: tl.constexpr, TAPS_INNER: tl.constexpr, SPLIT: tl.constexpr,
    EVEN: tl.constexpr, WIDE: tl.constexpr, W_TURNED: tl.constexpr,
    EDGE: tl.constexpr, ACT: tl.constexpr, PRECISION: tl.constexpr, ROUND: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    PHASED: tl.constexpr = DGRAD and STRIDE_D * STRIDE_H * STRIDE_W > 1
    # ---- which tile
    grid_m = tl.cast(tl.cdiv(M, BLOCK_M), tl.int32)  # M may be the constant 1
    grid_n = tl.cdiv(OUT, BLOCK_N)
    tiles = grid_m * grid_n
    outer = tl.program_id(0) // tiles
    pid = tl.program_id(0) - outer * tiles
    part = 0
    if SPLIT:  # parts vary slowest; there are no phases then
        part = outer // GROUPS
        outer = outer - part * GROUPS
    group = outer % GROUPS
    phase = outer // GROUPS
    band = pid // (GROUP_M * grid_n)
    height = min(grid_m - band * GROUP_M, GROUP_M)
    within = pid - band * (GROUP_M * grid_n)
    tile_m = band * GROUP_M + within % height
    tile_n = within // height
    if WIDE:
        tile_m = tile_m.to(tl.int64)
        tile_n = tile_n.to(tl.int64)
        group = group.to(tl.int64)
    # ---- its pixels
    m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    ok_m = m < M
    q = m % Q
    rest = m // Q
    p = rest % P
    n = rest // P
    if HAS_D:
        o = n % O
        n = n // O
    # ---- where the taps start and how they step, by axis
    if PHASED:
        first_s, count_s, w0 = _first_tap(phase % STRIDE_W, pad_w, S, STRIDE_W, DILATION_W, STEP_W)
        phase_h = phase // STRIDE_W
        first_r, count_r, h0 = _first_tap(phase_h % STRIDE_H, pad_h, R, STRIDE_H, DILATION_H, STEP_H)
        phase_d = phase_h // STRIDE_H
        first_t, count_t, d0 = _first_tap(phase_d, pad_d, T, STRIDE_D, DILATION_D, STEP_D)
        found = count_t * count_r * count_s
        in_s = tl.maximum(count_s, 1)
        in_r = tl.maximum(count_r, 1)
        taps = tl.maximum(found, 1)
        w0 += q
        h0 += p
        JUMP_D: tl.constexpr = -(STEP_D * DILATION_D // STRIDE_D)
        JUMP_H: tl.constexpr = -(STEP_H * DILATION_H // STRIDE_H)
        JUMP_W: tl.constexpr = -(STEP_W * DILATION_W // STRIDE_W)
    else:
        in_s: tl.constexpr = S
        in_r: tl.constexpr = R
        taps: tl.constexpr = T * R * S
        w0 = q + pad_w if DGRAD else q * STRIDE_W - pad_w
        h0 = p + pad_h if DGRAD else p * STRIDE_H - pad_h
        JUMP_D: tl.constexpr = -DILATION_D if DGRAD else DILATION_D
        JUMP_H: tl.constexpr = -DILATION_H if DGRAD else DILATION_H
        JUMP_W: tl.constexpr = -DILATION_W if DGRAD else DILATION_W
    src_row = n * src_n_stride + h0 * src_h_stride + w0 * src_w_stride + group * (RED * src_c_stride)
    if HAS_D:
        if PHASED:
            d0 += o
        else:
            d0 = o + pad_d if DGRAD else o * STRIDE_D - pad_d
        src_row += d0 * src_d_stride
        d_rows = d0[:, None]
    src_rows = (src + src_row)[:, None]
    h_rows = h0[:, None]
    w_rows = w0[:, None]
    ok_rows = ok_m[:, None]
    if EDGE == "repeat":  # columns past the last repeat it and are not stored: no mask in the loop
        filters = columns(w + (group * w_group_stride + tl.minimum(k, OUT - 1) * w_out_stride), W_TURNED)
    else:
        filters = columns(w + (group * w_group_stride + k * w_out_stride), W_TURNED)
    ok_filters = columns(k < OUT, W_TURNED)
    KIND: tl.constexpr = src.dtype.element_ty
    SUMS: tl.constexpr = tl.float64 if KIND == tl.float64 else (tl.int32 if KIND == tl.int8 else tl.float32)  # noqa: SIM300
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=SUMS)
    # ---- the product. max(.., 1): a loop that might not run makes Triton 3.6 have every wgmma serialised
    if PACKED:
        steps = tl.cdiv(taps * PACKED, BLOCK_K)
    else:
        blocks = tl.cdiv(RED, BLOCK_K)
        steps = blocks * taps
    first = part * TRIPS
    if SPLIT:  # the last part may have fewer trips than the others
        steps = tl.minimum(steps - first, TRIPS)
    for trip in range(tl.maximum(steps, 1)):
        step = first + trip if SPLIT else trip
        if PACKED:
            index = step * BLOCK_K + tl.arange(0, BLOCK_K)
            tap = index // PACKED
            c = index - tap * PACKED
            ok_c = tap < taps
        else:
            if TAPS_INNER:
                block = step // taps
                tap = step - block * taps
            else:
                tap = step // blocks
                block = step - tap * blocks
            c = block * BLOCK_K + tl.arange(0, BLOCK_K)
            ok_c = c < RED
        if PHASED and not EVEN:
            # Pixels that no tap meets are sums of zeros. A choice between 0 and acc after the loop would say the same,
            # but around a loop of one trip the assembler of Triton 3.6 takes the wgmma out and leaves zeros everywhere.
            ok_c = ok_c & (found > 0)
        if WIDE:
            tap = tap.to(tl.int64)
            c = c.to(tl.int64)
        s = tap % in_s
        line = tap // in_s
        r = line % in_r
        t = line // in_r
        dh = r * JUMP_H
        dw = s * JUMP_W
        shift = dh * src_h_stride + dw * src_w_stride
        if PHASED:
            s = first_s + s * STEP_W
            r = first_r + r * STEP_H
        w_shift = r * w_r_stride + s * w_s_stride
        if HAS_D:
            dd = t * JUMP_D
            shift += dd * src_d_stride
            if PHASED:
                t = first_t + t * STEP_D
            w_shift += t * w_t_stride
        if PACKED:
            dh = dh[None, :]
            dw = dw[None, :]
        ok = (h_rows + dh >= 0) & (h_rows + dh < src_h) & (w_rows + dw >= 0) & (w_rows + dw < src_w) & ok_rows
        if HAS_D:
            if PACKED:
                dd = dd[None, :]
            ok = ok & (d_rows + dd >= 0) & (d_rows + dd < src_d)
        places = src_rows + (shift + c * src_c_stride)[None, :]
        w_places = filters + rows(w_shift + c * w_red_stride, W_TURNED)
        if not EVEN:
            ok = ok & ok_c[None, :]
        a = tl.load(places, mask=ok, other=0.0)
        if EVEN and EDGE != "mask":
            b = tl.load(w_places)
        elif EDGE != "mask":
            b = tl.load(w_places, mask=rows(ok_c, W_TURNED), other=0.0)
        else:
            b = tl.load(w_places, mask=rows(ok_c, W_TURNED) & ok_filters, other=0.0)
        if W_TURNED:
            b = tl.trans(b)
        if ROUND:
            a = rounded(a)
            b = rounded(b)
        if PRECISION == "ieee" and a.dtype == tl.float32:
            # Each trip sums for itself and is then added: a chain of thousands of terms would lose digits that the
            # peer keeps. The limit on imprecise terms means nothing here but stops the two from being merged again.
            acc += tl.dot(a, b, input_precision=PRECISION, max_num_imprecise_acc=1, out_dtype=acc.dtype)
        elif a.dtype.is_fp8():
            # The matrix units keep few bits of a sum of float8 products: each trip sums for itself, at most 128.
            acc = tl.dot(a, b, acc, max_num_imprecise_acc=BLOCK_K, out_dtype=acc.dtype)
        else:
            acc = tl.dot(a, b, acc, input_precision=PRECISION, out_dtype=acc.dtype)
    # ---- the epilogue
    if PHASED:
        q = q * STRIDE_W + phase % STRIDE_W
        p = p * STRIDE_H + phase_h % STRIDE_H
        ok_m = ok_m & (q < dst_w) & (p < dst_h)
        if HAS_D:
            o = o * STRIDE_D + phase_d
            ok_m = ok_m & (o < dst_d)
    ok = ok_m[:, None] & (k < OUT)[None, :]
    channel = group * OUT + k
    z_tile = None
    if z is not None:
        z_row = n * z_n_stride + p * z_h_stride + q * z_w_stride
        if HAS_D:
            z_row += o * z_d_stride
        z_places = (z + z_row)[:, None] + (channel * z_c_stride)[None, :]
        z_tile = tl.load(z_places, mask=ok, other=0.0)
    bias_tile = None
    if bias is not None:
        bias_tile = tl.load(bias + channel * bias_stride, mask=k < OUT, other=0.0)[None, :]
    if dst.dtype.element_ty == tl.int32:  # sums as they are, exact
        result = acc if bias is None else acc + bias_tile
    else:
        sums = acc.to(tl.float32) if SUMS == tl.int32 else acc  # noqa: SIM300
        if scale is not None:
            sums = sums * tl.load(scale + channel * scale_stride, mask=k < OUT, other=0.0)[None, :].to(sums.dtype)
        result = stored(finish(sums, z_tile, bias_tile, alpha, beta, parameter, ACT), dst.dtype.element_ty)
    dst_row = n * dst_n_stride + p * dst_h_stride + q * dst_w_stride
    if HAS_D:
        dst_row += o * dst_d_stride
    if SPLIT:
        dst += part.to(tl.int64) * dst_part_stride
    dst_places = (dst + dst_row)[:, None] + (channel * dst_c_stride)[None, :]
    tl.store(dst_places, result, mask=ok)


@dataclasses.dataclass(frozen=True)
class View:
    """A forward or data-gradient problem as the kernel sees it: source, result, and the product between them.

    Strides are in elements: of source and result (N, C, D, H, W), of the filter (group, result channel, source
    channel, T, R, S). `red` and `out` are the channels of a group on the source's and on the result's side.
    """

    geometry: Geometry
    dgrad: bool
    source: Argument
    src_strides: tuple[int, ...]
    src_size: tuple[int, ...]
    dst_strides: tuple[int, ...]
    dst_size: tuple[int, ...]
    red: int
    out: int
    filters: Argument
    w_strides: tuple[int, ...]
    steps: tuple[int, ...]
    phases: int
    grid: tuple[int, ...]
    dtype: str
    span: int  # elements that the largest operand reaches over

    @classmethod
    def of(cls, problem: Problem) -> "View":
        g = Geometry.of(problem)
        dgrad = problem.op.name == "conv_dgrad"
        x_side, y_side = (g.x_strides, g.in_size, g.C // g.G), (g.y_strides, g.out_size, g.K // g.G)
        (src_strides, src_size, red), (dst_strides, dst_size, out) = (y_side, x_side) if dgrad else (x_side, y_side)
        w_k, w_c, *w_taps = g.w_strides
        w_strides = (red * w_k, w_c, w_k, *w_taps) if dgrad else (out * w_k, w_k, w_c, *w_taps)
        gcds = (math.gcd(s, d) for s, d in zip(g.stride, g.dilation))
        by = g.stride if dgrad else (1, 1, 1)
        role, source = problem.items[0]
        return cls(
            g, dgrad, role, src_strides, src_size, dst_strides, dst_size, red, out, "w", w_strides,
            tuple(s // gcd for s, gcd in zip(g.stride, gcds)) if dgrad else (1, 1, 1), math.prod(by),
            tuple(-(-size // s) for size, s in zip(dst_size, by)), source.dtype,
            max(t.span for _, t in problem.items),
        )  # fmt: skip

    def over(self, span: int, **operands) -> "View":
        """The same product over operands that lie elsewhere, the longest of them `span` elements."""
        return dataclasses.replace(self, span=max(self.span, span), **operands)

    @property
    def taps(self) -> int:
        return math.prod(self.geometry.filter)

    @property
    def packed(self) -> bool:
        """Whether taps and channels share one axis."""
        return self.red < PACK_BELOW

    @property
    def gaps(self) -> bool:
        """Whether there are phases whose pixels no tap meets."""
        g = self.geometry
        return self.dgrad and any(min(r, step) < s for r, step, s in zip(g.filter, self.steps, g.stride))

    @property
    def pixels(self) -> int:
        """Of the result; of one phase where there are several."""
        return self.geometry.N * math.prod(self.grid)

    def gemm(self, precision: str) -> Gemm:
        taps = -(-self.taps // self.phases)
        pieces = taps if self.gaps else self.taps / self.phases  # on average: phases differ
        depth, pieces = (taps * self.red, 1) if self.packed else (self.red, pieces)
        return Gemm(self.pixels, self.out, depth, pieces, self.geometry.G * self.phases, self.dtype, precision)

    def trips(self, config: Config) -> int:
        """Turns of the loop over the whole reduction, where there are no phases."""
        depth, pieces = (self.taps * self.red, 1) if self.packed else (self.red, self.taps)
        return -(-depth // config["BLOCK_K"]) * pieces

    def loading(self, precision: str, config: Config, target: Target) -> float:
        """Seconds a trip spends on elements that are loaded one at a time.

        A single 16-bit element is less than an asynchronous copy takes, and TF32 is rounded on its way, which leads
        through registers: twice the instructions. In nchw a filter's taps keep its channels apart.
        """
        source = config["BLOCK_M"] * config["BLOCK_K"]
        filters = min(config["BLOCK_N"], self.out) * config["BLOCK_K"]
        _, w_out, w_red, *_ = self.w_strides
        near = far = 0.0
        if self.packed and self.src_strides[1] == 1:
            near, far = (source, 0.0) if self.red >= 8 else (0.0, source)
        elif self.src_strides[1] != 1 and (self.dtype in ("f16", "bf16") or precision == "tf32"):
            near += source
        beside = w_out == 1 or (w_red == 1 and self.gemm(precision).on_matrix_units)
        if not beside and self.dgrad:
            near += filters
        elif not beside:
            far += filters
        if self.dtype != "f32" or precision != "tf32":
            return one_by_one(config, target, near, far)
        near += (filters if beside else 0.0) + (source if self.src_strides[1] == 1 and not self.packed else 0.0)
        return 2 * one_by_one(config, target, near, far)

    def seconds(self, precision: str, config: Config, target: Target) -> float:
        """Estimated time of the product without its launch."""
        return seconds(self.gemm(precision), config, target, self.loading(precision, config, target))

    def blocks(self, config: Config) -> int:
        tiles = -(-self.pixels // config["BLOCK_M"]) * -(-self.out // config["BLOCK_N"])
        return tiles * self.geometry.G * self.phases


def unfit(problem: Problem, refusals: Refusals) -> None:
    """Add the reasons why the kernel does not take the problem's types."""
    generation = problem.target.capability
    operands = (*DTYPES, *(t for t, since in EIGHT_BITS.items() if generation >= since))
    results = (*operands, "i32") if problem.items[0][1].dtype == "i8" else (*DTYPES, *EIGHT_BITS)
    roles = problem.op.inputs
    refusals.require_tensors([i for i in problem.items if i[0] in roles], operands, elements=True)
    others = [i for i in problem.items if i[0] not in roles and i[0] != "scale"]
    refusals.require_tensors(others, results, elements=True)


def gather(
    problem: Problem, v: View, config: Config, *, precision: str, rounding: bool, full: bool = False,
    parts: int = 1, into: Slice | None = None,
) -> Launch:  # fmt: skip
    """The launch of `conv_gather`.

    `rounding` has the kernel round both operands to TF32 itself; `full` says that the filter's rows are padded up
    to whole tiles. With `parts` > 1 the reduction is split, and the bare parts are written `into` the workspace, each
    dense with its channels innermost.
    """
    config, g = {**ORDER, **config}, v.geometry
    z, bias, scale = (problem.tensors.get(role) for role in ("z", "bias", "scale"))
    z_strides = (*z.strides[:2], *(0,) * (5 - z.ndim), *z.strides[2:]) if z else (None,) * 5
    w_group, w_out, w_red, w_t, w_r, w_s = v.w_strides
    args: dict[str, Argument] = dict(
        src=v.source, w=v.filters, scale="scale", bias="bias", z="z", dst=problem.outputs[0], **blend(problem),
        M=v.pixels, O=v.grid[0], P=v.grid[1], Q=v.grid[2], RED=v.red, OUT=v.out, GROUPS=g.G,
        w_group_stride=w_group, w_out_stride=w_out, w_red_stride=w_red,
        w_t_stride=w_t, w_r_stride=w_r, w_s_stride=w_s, bias_stride=bias.strides[0] if bias else None,
        scale_stride=None if scale is None else scale.strides[0] if scale.shape[0] > 1 else 0,
    )  # fmt: skip
    for name, values in (("src", v.src_strides), ("z", z_strides), ("dst", v.dst_strides)):
        args.update({f"{name}_{axis}_stride": value for axis, value in zip("ncdhw", values)})
    for name, values in (("src", v.src_size), ("dst", v.dst_size)):
        args.update({f"{name}_{axis}": value for axis, value in zip("dhw", values)})
    args.update({f"pad_{axis}": value for axis, value in zip("dhw", g.pad)})
    args.update(TRIPS=-(-v.trips(config) // parts), dst_part_stride=0)
    code = ACTIVATIONS[problem.epilogue.activation].code
    if into:
        (d, h, w), channels = v.dst_size, v.out * g.G
        dense = (d * h * w * channels, 1, h * w * channels, w * channels, channels)
        args.update({f"dst_{axis}_stride": value for axis, value in zip("ncdhw", dense)})
        args.update({name: None for name in args if name.startswith("z_")})
        args.update(dict.fromkeys(("bias", "z", "bias_stride", *blend(problem))), dst=into)
        args.update(dst_part_stride=g.N * dense[0])
        code = 0
    even = (v.taps * v.red if v.packed else v.red) % config["BLOCK_K"] == 0
    even = even and not (v.packed and v.phases > 1) and not v.gaps
    constexprs = dict(zip("TRS", g.filter))
    for name, values in (("STRIDE", g.stride), ("DILATION", g.dilation), ("STEP", v.steps)):
        constexprs.update({f"{name}_{axis}": value for axis, value in zip("DHW", values)})
    constexprs.update(
        DGRAD=v.dgrad, HAS_D=len(problem.op.stride) == 3, PACKED=v.red if v.packed else 0, SPLIT=into is not None,
        EVEN=even, WIDE=max(v.span, v.pixels + config["BLOCK_M"]) > INT32,
        W_TURNED=w_out < w_red or not v.gemm(precision).on_matrix_units,
        EDGE="none" if full or v.out % config["BLOCK_N"] == 0 else "mask" if w_out == 1 else "repeat",
        ACT=code, PRECISION=precision, ROUND=rounding,
        **{knob: config[knob] for knob in ("BLOCK_M", "BLOCK_N", "BLOCK_K", "GROUP_M", "TAPS_INNER")},
    )  # fmt: skip
    return Launch(conv_gather, (v.blocks(config) * parts,), args, constexprs, config["num_warps"], config["num_stages"])
