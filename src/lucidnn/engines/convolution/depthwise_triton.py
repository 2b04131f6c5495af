"""Depthwise convolution, forward and data gradient, as the sum it is: no matrix units, each input read once, in Triton.

A filter that sees one channel has no reduction to feed a matrix unit with; the work is one multiplication for every tap
and the time is that of reading and writing the tensors. A block takes a tile of pixels by channels, and every thread
sums `ROWS` results below one another: going down a column of the filter, the input that met one row's tap meets the
next row's next tap, so it stays in a register and each step loads one input for `ROWS` products. That needs a stride
equal to the dilation along the column (1 and 1 as a rule); otherwise `ROWS` is 1. Lines of one dimension that are
channels last are taken for columns.

The data gradient deals the pixels into `stride` phases an axis, as pixels of a phase meet the same taps: each phase is
a convolution of stride 1 over every stride-th tap, with the taps in reverse order, and has a launch of its own.

Where channels are neighbours, a filter whose taps are neighbours would be read an element at a time; it is turned into
the workspace first (`PACK`). A channel multiplier, any stride, asymmetric padding, dilation, 1 to 3 dimensions; float32
sums (float64 for float64). Cost: the tensors' traffic, or two operations a tap and an eighth of a load's overhead.
Limits: one channel in each group, filters of at most 63 taps an axis.
"""

import dataclasses
import itertools
import math

import triton
import triton.language as tl

from ...core.engine import Config, Refusals
from ...core.problem import Problem
from ...ops.activation import ACTIVATIONS
from ...ops.convolution import Geometry, five_strides
from .._triton.epilogue import finish
from .._triton.index import INT32, pixels_first
from .._triton.launch import Argument, Launch, Slice, TritonEngine, blend
from .._triton.pack import Filter, pack
from .._triton.tiles import start

LATENCY = 0.3e-6  # seconds that a column of the filter waits for its inputs
SECTOR = 32  # bytes that memory moves at once
DTYPES = ("f64", "f32", "f16", "bf16")
MOST_TAPS = 63  # an axis
MOST_PHASES = 64  # launches of a strided data gradient


@triton.jit
def _read(places, ok, h, height, ACC: tl.constexpr):
    return tl.load(places, mask=ok & ((h >= 0) & (h < height))[:, None], other=0.0).to(ACC)


@triton.jit
def _write(
    acc, z, bias_tile, dst, alpha, beta, parameter, ok, z_places, dst_places, ACT: tl.constexpr,
):  # fmt: skip
    z_tile = None
    if z is not None:
        z_tile = tl.load(z_places, mask=ok, other=0.0)
    result = finish(acc, z_tile, bias_tile, alpha, beta, parameter, ACT)
    tl.store(dst_places, result.to(dst.dtype.element_ty), mask=ok)


@triton.jit
def conv_depthwise(
    src, w, bias, z, dst, alpha, beta, parameter,
    M, O, BANDS, P, Q, src_d, src_h, src_w, OUT, base_d, base_h, base_w,
    src_n_stride, src_c_stride, src_d_stride, src_h_stride, src_w_stride,
    w_start, w_out_stride, w_t_stride, w_r_stride, w_s_stride, bias_stride,
    z_start, z_n_stride, z_c_stride, z_d_stride, z_h_stride, z_w_stride,
    dst_start, dst_n_stride, dst_c_stride, dst_d_stride, dst_h_stride, dst_w_stride,
    T: tl.constexpr, R: tl.constexpr, S: tl.constexpr,
    STRIDE_D: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    DILATION_D: tl.constexpr, DILATION_H: tl.constexpr, DILATION_W: tl.constexpr,
    MULTIPLIER: tl.constexpr, DGRAD: tl.constexpr, HAS_D: tl.constexpr, WIDE: tl.constexpr, ACT: tl.constexpr,
    UNROLL: tl.constexpr, ROWS: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    ACC: tl.constexpr = tl.float64 if src.dtype.element_ty == tl.float64 else tl.float32
    # ---- which pixels (of each column ROWS, from p on) and channels of the result
    grid_c = tl.cast(tl.cdiv(OUT, BLOCK_C), tl.int32)
    tile_c = tl.program_id(0) % grid_c
    tile_m = tl.program_id(0) // grid_c
    if WIDE:
        tile_c = tile_c.to(tl.int64)
        tile_m = tile_m.to(tl.int64)
    m = tile_m * BLOCK_P + tl.arange(0, BLOCK_P)
    k = tile_c * BLOCK_C + tl.arange(0, BLOCK_C)
    q = m % Q
    rest = m // Q
    p = (rest % BANDS) * ROWS
    n = rest // BANDS
    if HAS_D:
        o = n % O
        n = n // O
    ok = (m < M)[:, None] & (k < OUT)[None, :]
    h0 = p * STRIDE_H + base_h
    w0 = q * STRIDE_W + base_w
    row = n * src_n_stride + h0 * src_h_stride + w0 * src_w_stride
    if HAS_D:
        d0 = o * STRIDE_D + base_d
        row += d0 * src_d_stride
    if DGRAD:
        channel = k * MULTIPLIER
        first_filter = tile_c * (BLOCK_C * MULTIPLIER)
    else:
        channel = k // MULTIPLIER
        first_filter = tile_c * BLOCK_C
    src_places = (src + row)[:, None] + (channel * src_c_stride)[None, :]
    filters = w + w_start
    if BLOCK_C > 1:  # a tile like the source's, so that no thread has to be told another's filter
        which = k * MULTIPLIER if DGRAD else k
        filter_places = tl.broadcast_to((filters + which * w_out_stride)[None, :], (BLOCK_P, BLOCK_C))
        ok_filters = tl.broadcast_to((k < OUT)[None, :], (BLOCK_P, BLOCK_C))
    acc0 = tl.zeros((BLOCK_P, BLOCK_C), dtype=ACC)
    acc1 = tl.zeros((BLOCK_P, BLOCK_C), dtype=ACC)
    acc2 = tl.zeros((BLOCK_P, BLOCK_C), dtype=ACC)
    acc3 = tl.zeros((BLOCK_P, BLOCK_C), dtype=ACC)
    # ---- the sum: filters of this channel, then the columns of each
    for member in range(MULTIPLIER if DGRAD else 1):
        for column in range(T * S):
            t = column // S
            s = column % S
            dw = s * DILATION_W
            shift = dw * src_w_stride
            inside = (w0 + dw >= 0) & (w0 + dw < src_w)
            w_shift = s * w_s_stride + member * w_out_stride
            if HAS_D:
                dd = t * DILATION_D
                shift += dd * src_d_stride
                inside = inside & (d0 + dd >= 0) & (d0 + dd < src_d)
                w_shift += t * w_t_stride
            if DGRAD:
                shift += member * src_c_stride
            places = src_places + shift
            ok_column = ok & inside[:, None]
            if ROWS > 1:
                x0 = _read(places, ok_column, h0, src_h, ACC)
            if ROWS > 2:
                x1 = _read(places + STRIDE_H * src_h_stride, ok_column, h0 + STRIDE_H, src_h, ACC)
                x2 = _read(places + 2 * STRIDE_H * src_h_stride, ok_column, h0 + 2 * STRIDE_H, src_h, ACC)
            for r in tl.range(0, R, loop_unroll_factor=UNROLL):
                w_place = w_shift + r * w_r_stride
                if BLOCK_C > 1:
                    f = tl.load(filter_places + w_place, mask=ok_filters, other=0.0).to(ACC)
                else:
                    f = tl.load(filters + first_filter * w_out_stride + w_place).to(ACC)
                dh = r * DILATION_H + (ROWS - 1) * STRIDE_H
                new = _read(places + dh * src_h_stride, ok_column, h0 + dh, src_h, ACC)
                if ROWS == 1:
                    acc0 += new * f
                elif ROWS == 2:
                    acc0 += x0 * f
                    acc1 += new * f
                    x0 = new
                else:
                    acc0 += x0 * f
                    acc1 += x1 * f
                    acc2 += x2 * f
                    acc3 += new * f
                    x0 = x1
                    x1 = x2
                    x2 = new
    # ---- the epilogue, row by row
    bias_tile = None
    if bias is not None:
        bias_tile = tl.load(bias + k * bias_stride, mask=k < OUT, other=0.0)[None, :]
    dst_row = n * dst_n_stride + p * dst_h_stride + q * dst_w_stride + dst_start
    z_row = 0
    if z is not None:
        z_row = n * z_n_stride + p * z_h_stride + q * z_w_stride + z_start
    if HAS_D:
        dst_row += o * dst_d_stride
        if z is not None:
            z_row += o * z_d_stride
    dst_places = (dst + dst_row)[:, None] + (k * dst_c_stride)[None, :]
    z_places = None
    z_step = 0
    if z is not None:
        z_places = (z + z_row)[:, None] + (k * z_c_stride)[None, :]
        z_step = z_h_stride
    for i in tl.static_range(ROWS):
        acc = acc0 if i == 0 else acc1 if i == 1 else acc2 if i == 2 else acc3
        here = ok & (p + i < P)[:, None]
        if z is not None:
            _write(acc, z, bias_tile, dst, alpha, beta, parameter, here, z_places + i * z_step,
                   dst_places + i * dst_h_stride, ACT)  # fmt: skip
        else:
            _write(acc, None, bias_tile, dst, alpha, beta, parameter, here, None, dst_places + i * dst_h_stride, ACT)


@dataclasses.dataclass(frozen=True)
class _Axis:
    """One axis of one phase: `size` results, `start` and `step` where they lie, and the taps that reach them.

    Result i lies at ``start + i * step`` and reads source ``i * stride + base + j * dilation`` for tap j of `taps`,
    which is the filter's tap ``first + j * tap_step``.
    """

    size: int
    start: int = 0
    step: int = 1
    taps: int = 0
    stride: int = 1
    base: int = 0
    dilation: int = 1
    first: int = 0
    tap_step: int = 1


def _phases(g: Geometry, axis: int, dgrad: bool) -> list[_Axis]:
    """The phases of an axis: one where the filter moves forward, `stride` of them for the data gradient."""
    taps, stride, pad, dilation = g.filter[axis], g.stride[axis], g.pad[axis], g.dilation[axis]
    if not dgrad:
        return [_Axis(g.out_size[axis], taps=taps, stride=stride, base=-pad, dilation=dilation)]
    found = []
    for phase in range(min(stride, g.in_size[axis])):
        size = -(-(g.in_size[axis] - phase) // stride)
        reach = [r for r in range(taps) if (phase + pad - r * dilation) % stride == 0]
        if not reach:
            found.append(_Axis(size, phase, stride))
            continue
        apart = stride // math.gcd(stride, dilation)
        base = (phase + pad - reach[-1] * dilation) // stride
        found.append(_Axis(size, phase, stride, len(reach), 1, base, apart * dilation // stride, reach[-1], -apart))
    return found


class DepthwiseTriton(TritonEngine):
    """Forward and data gradient."""

    name = "conv.depthwise_triton"
    operations = ("conv_fprop", "conv_dgrad")

    def refusals(self, problem: Problem) -> list[str]:
        refusals = Refusals()
        refusals.require_tensors(problem.items, DTYPES, elements=True)
        g = Geometry.of(problem)
        refusals.require(g.G == g.C, "one channel in each group", g.C // g.G if g.G else 0)
        refusals.require(max(g.filter) <= MOST_TAPS, f"at most {MOST_TAPS} taps an axis", max(g.filter))
        if problem.op.name == "conv_dgrad":
            phases = math.prod(g.stride)
            refusals.require(phases <= MOST_PHASES, f"at most {MOST_PHASES} phases (strides multiplied)", phases)
        if not refusals:
            out = problem[problem.outputs[0]]
            refusals.require(out.numel <= INT32 * 16, "at most 2^35 results", out.numel)
        return refusals

    def configs(self, problem: Problem) -> list[Config]:
        g, (_, source) = Geometry.of(problem), problem.items[0]
        out = problem[problem.outputs[0]]
        first = pixels_first(five_strides(source), source.shape[1])
        per_thread = 1 if first else 16 // source.itemsize
        swapped = _is_swapped(g, first)
        column = 2 if swapped else 1
        stride, dilation = g.stride[column], g.dilation[column]
        # One step down the results has to be one step down the taps; a phase of the data gradient has stride 1.
        slides = stride % dilation == 0 if problem.op.name == "conv_dgrad" else stride == dilation
        slides = slides and g.filter[column] > 1
        pack_filter = not first and problem["w"].strides[0] != 1
        found = []
        for rows, share in itertools.product((4, 2, 1) if slides else (1,), (1, 2)):
            elements = 128 * per_thread * share * (2 if first else 1)
            points = out.numel // out.shape[1] // rows + 1
            if first:
                block_p = min(elements, max(triton.next_power_of_2(points), 16))
                block_c = min(elements // block_p, triton.next_power_of_2(out.shape[1]))
            else:
                block_c = min(max(64, 8 * per_thread), triton.next_power_of_2(out.shape[1]))
                block_p = max(elements // block_c, 1)
            for packs in (True, False) if pack_filter else (False,):
                config = {"ROWS": rows, "BLOCK_P": block_p, "BLOCK_C": block_c, "PACK": packs, "num_warps": 4}
                if config not in found:
                    found.append(config)
        return sorted(found, key=lambda config: self.cost(problem, config))

    def workspace_size(self, problem: Problem, config: Config) -> int:
        return problem["w"].numel * problem["w"].itemsize if config["PACK"] else 0

    def cost(self, problem: Problem, config: Config) -> float:
        target, g = problem.target, Geometry.of(problem)
        (_, source), rows = problem.items[0], config["ROWS"]
        first = pixels_first(five_strides(source), source.shape[1])
        wide = 1 if first else min(16 // source.itemsize, config["BLOCK_C"])
        scattered = not first and not config["PACK"] and problem["w"].strides[0] != 1
        out, dgrad = problem[problem.outputs[0]], problem.op.name == "conv_dgrad"
        products = problem.flops / 2
        # Instructions a product: itself, and its share of the loads. A filter that is read an element at a time costs
        # each thread more than its source does.
        filters = 15 / rows if scattered else 6 * (0.2 if first else 1) / (rows * wide)
        lanes = target.flops("f64" if source.dtype == "f64" else "f32") / 2
        arithmetic = products * (2 + 6 / (rows * wide) + filters) / (0.5 * lanes)
        traffic = problem.bytes / (0.75 * target.bandwidth)
        if not first and config["BLOCK_C"] == 1 < source.shape[1]:  # each load is a sector from the second-level cache
            traffic += products / rows * SECTOR / (2 * target.bandwidth)
        if first and out.strides[1] == 1 < out.shape[1]:  # each store is a sector to memory
            traffic += out.numel * SECTOR / (0.75 * target.bandwidth)
        elif first and dgrad and g.stride[2] > 1:  # sectors are written in parts, by one phase after the other
            traffic += (2 * g.stride[2] - 1) * out.nbytes / (0.75 * target.bandwidth)
        tiles = -(-out.numel // (rows * config["BLOCK_P"] * config["BLOCK_C"]))
        busy = min(1.0, tiles / target.processors)
        waiting = LATENCY * g.filter[0] * g.filter[1 if _is_swapped(g, first) else 2]
        launches = len(self._shapes(problem)) + config["PACK"]
        return max(arithmetic, traffic) / busy + waiting + start(target, launches)

    def _shapes(self, problem: Problem) -> list[tuple[_Axis, ...]]:
        g, dgrad = Geometry.of(problem), problem.op.name == "conv_dgrad"
        return list(itertools.product(*(_phases(g, axis, dgrad) for axis in range(3))))

    def launches(self, problem: Problem, config: Config) -> list[Launch]:
        g = Geometry.of(problem)
        filters, w_strides, found = "w", (g.w_strides[0], *g.w_strides[2:]), []
        if config["PACK"]:
            turned = Filter(1, 1, g.K, g.K, g.filter, (0, 0, *w_strides), taps_first=True)
            filters = Slice(0, g.w.dtype)
            found.append(pack(turned, "w", filters, None, None, None, g.w.span, False))
            w_strides = turned.packed_strides[2:]
        return found + [_launch(problem, config, axes, filters, w_strides) for axes in self._shapes(problem)]


def _is_swapped(g: Geometry, first: bool) -> bool:
    """Whether W plays the column: channels are neighbours and H has no taps."""
    return not first and g.filter[1] == 1 < g.filter[2]


def _launch(
    problem: Problem, config: Config, axes: tuple[_Axis, ...], filters: Argument, w_strides: tuple[int, ...]
) -> Launch:
    """The launch of one phase; an axis that no tap reaches leaves the sum empty."""
    g, dgrad = Geometry.of(problem), problem.op.name == "conv_dgrad"
    role, source = problem.items[0]
    out, z, bias = problem[problem.outputs[0]], problem.tensors.get("z"), problem.tensors.get("bias")
    src_strides, dst_strides, z_strides = five_strides(source), five_strides(out), five_strides(z) if z else None
    swapped = _is_swapped(g, pixels_first(src_strides, source.shape[1]))

    def turned(values):
        return (values[0], values[2], values[1]) if swapped else tuple(values)

    def places(strides: tuple[int, ...]) -> tuple[int, list[int]]:
        """Where a phase starts in the result, or in z, and its strides."""
        steps = strides[2:]
        start = sum(axis.start * step for axis, step in zip(axes, steps))
        return start, [*strides[:2], *turned([axis.step * step for axis, step in zip(axes, steps)])]

    size_d, size_h, size_w = turned([axis.size for axis in axes])
    bands = -(-size_h // config["ROWS"])
    pixels = g.N * size_d * bands * size_w
    w_k, *w_taps = w_strides
    dst_start, dst = places(dst_strides)
    z_start, z_steps = places(z_strides) if z_strides else (None, (None,) * 5)
    src_size = g.out_size if dgrad else g.in_size
    args: dict[str, Argument] = {
        "src": role, "w": filters, "bias": "bias", "z": "z", "dst": problem.outputs[0], **blend(problem),
        "M": pixels, "O": size_d, "BANDS": bands, "P": size_h, "Q": size_w, "OUT": out.shape[1],
        "w_start": sum(axis.first * step for axis, step in zip(axes, w_taps)), "w_out_stride": w_k,
        "bias_stride": bias.strides[0] if bias else None, "dst_start": dst_start, "z_start": z_start,
        **dict(zip(("src_d", "src_h", "src_w"), turned(src_size))),
        **dict(zip(("base_d", "base_h", "base_w"), turned([axis.base for axis in axes]))),
        **{f"w_{a}_stride": v for a, v in zip("trs", turned([x.tap_step * s for x, s in zip(axes, w_taps)]))},
    }  # fmt: skip
    strides = (("src", (*src_strides[:2], *turned(src_strides[2:]))), ("z", z_steps), ("dst", dst))
    for name, values in strides:
        args.update({f"{name}_{axis}_stride": value for axis, value in zip("ncdhw", values)})
    reached = all(axis.taps for axis in axes)
    taps = dict(zip("TRS", turned([axis.taps for axis in axes]) if reached else (0, 1, 1)))
    span = max(*(t.span for _, t in problem.items), pixels + config["BLOCK_P"])
    constexprs = {
        **taps, **{f"STRIDE_{a}": v for a, v in zip("DHW", turned([axis.stride for axis in axes]))},
        **{f"DILATION_{a}": v for a, v in zip("DHW", turned([axis.dilation for axis in axes]))},
        "MULTIPLIER": g.K // g.G, "DGRAD": dgrad, "HAS_D": len(problem.op.stride) == 3, "WIDE": span > INT32,
        "ACT": ACTIVATIONS[problem.epilogue.activation].code, "UNROLL": taps["R"] if taps["R"] <= 9 else 1,
        **{knob: config[knob] for knob in ("ROWS", "BLOCK_P", "BLOCK_C")},
    }  # fmt: skip
    grid = (-(-pixels // config["BLOCK_P"]) * -(-out.shape[1] // config["BLOCK_C"]),)
    return Launch(conv_depthwise, grid, args, constexprs, config["num_warps"], 1)
