"""The kernel of sampling by a grid on a GPU, and its launch: forward, and both gradients, for two engines.

A program takes a block of output points, works out their neighbours along each axis with weights and slopes, and goes
through the channels a block at a time. `TURNED` tiles have points, not channels, as neighbours in memory.
"""

import math
from typing import Any

import triton
import triton.language as tl

from ...core.engine import Config
from ...core.problem import Problem
from ...ops.convolution import five_strides, three
from ...ops.grid_sample import MODES, PADDING_MODES, TAPS
from .._triton.index import INT32, columns, pixels_first, rows
from .._triton.launch import Argument, Slice

TYPES = ("f64", "f32", "f16", "bf16")


@triton.jit
def _moved(at, size, PADDING: tl.constexpr, CORNERS: tl.constexpr):
    """Places inside the image, and how fast they move with the given ones: 1, -1 or 0. `size` is a float."""
    speed = tl.zeros_like(at) + 1.0
    if PADDING == 2:
        low = 0.0 if CORNERS else -0.5
        span = size - 1.0 if CORNERS else size
        single = span == 0.0
        span = tl.where(single, 1.0, span)
        far = tl.abs(at - low)
        flips = tl.floor(far / span)
        rest = far - flips * span
        odd = flips - 2.0 * tl.floor(flips * 0.5) == 1.0
        speed = tl.where((at < low) != odd, -1.0, 1.0).to(at.dtype)
        at = tl.where(odd, span - rest, rest) + low
        at = tl.where(single, 0.0, at).to(speed.dtype)
        speed = tl.where(single, 0.0, speed).to(speed.dtype)
    if PADDING > 0:
        speed = tl.where((at <= 0.0) | (at >= size - 1.0), 0.0, speed).to(speed.dtype)
        at = tl.where(at < 0.0, 0.0, tl.where(at > size - 1.0, size - 1.0, at)).to(speed.dtype)
    return at, speed


@triton.jit
def _neighbour(g, SIZE, k: tl.constexpr, MODE: tl.constexpr, PADDING: tl.constexpr, CORNERS: tl.constexpr):
    """The k-th neighbour of places along an axis: where, its weight, the weight's slope by g, whether it exists."""
    size = (SIZE + tl.zeros_like(g)).to(g.dtype)  # g times 0 may be no number
    if CORNERS:
        at = (g + 1.0) * 0.5 * (size - 1.0)
        pace = (size - 1.0) * 0.5
    else:
        at = ((g + 1.0) * size - 1.0) * 0.5
        pace = size * 0.5
    if MODE != 2:
        at, speed = _moved(at, size, PADDING, CORNERS)
        pace = pace * speed
    elif PADDING == 1:  # all neighbours of a place as far as that are the edge; so are those of an infinite one
        at = tl.where(at < -4.0, -4.0, tl.where(at > size + 4.0, size + 4.0, at)).to(g.dtype)
    known = tl.abs(at) < (1e9 if PADDING == 0 else float("inf"))  # false where it is no number
    at = tl.where(known, at, -100.0).to(g.dtype)
    first = tl.floor(at)
    t = at - first
    if MODE == 1:
        up = (t > 0.5) | ((t == 0.5) & (first - 2.0 * tl.floor(first * 0.5) == 1.0))
        place = tl.where(up, first + 1.0, first)
        weight = t * 0.0 + 1.0
        slope = t * 0.0
    elif MODE == 0:
        place = first + k
        weight = t if k == 1 else 1.0 - t
        slope = pace if k == 1 else -pace
    else:
        d = t - (k - 1.0)
        e = tl.abs(d)
        near = ((-0.75 + 2.0) * e - (-0.75 + 3.0)) * e * e + 1.0
        far = ((e - 5.0) * e + 8.0) * e * -0.75 + 3.0
        weight = tl.where(e <= 1.0, near, far)
        steep = tl.where(e <= 1.0, (3.75 * e - 4.5) * e, -0.75 * ((3.0 * e - 10.0) * e + 8.0))
        slope = tl.where(d > 0.0, steep, -steep) * pace
        place, speed = _moved(first + (k - 1.0), size, PADDING, CORNERS)
    place = place.to(tl.int32)
    return place, weight, slope, known & (place >= 0) & (place < SIZE)


@triton.jit
def grid_sample(
    x, places, y, sums, dgrid, M, C, O, P, Q, D, H, W,
    x_n_stride, x_c_stride, x_d_stride, x_h_stride, x_w_stride,
    y_n_stride, y_c_stride, y_d_stride, y_h_stride, y_w_stride,
    g_n_stride, g_d_stride, g_h_stride, g_w_stride, g_a_stride,
    dg_n_stride, dg_d_stride, dg_h_stride, dg_w_stride, dg_a_stride,
    s_n_stride, s_c_stride, s_p_stride,
    MODE: tl.constexpr, PADDING: tl.constexpr, CORNERS: tl.constexpr, HAS_D: tl.constexpr,
    TAPS_D: tl.constexpr, TAPS: tl.constexpr, FORWARD: tl.constexpr, DX: tl.constexpr, DGRID: tl.constexpr,
    TURNED: tl.constexpr, WIDE: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """`y` is dy where it is not `FORWARD`; dx is added up in `sums`."""
    SUM: tl.constexpr = tl.float64 if x.dtype.element_ty == tl.float64 else tl.float32
    m = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    if WIDE:
        m = tl.program_id(0).to(tl.int64) * BLOCK_P + tl.arange(0, BLOCK_P)
    in_points = m < M
    q = m % Q
    p = m // Q % P
    o = m // Q // P % O
    n = m // Q // P // O
    place_g = n * g_n_stride + p * g_h_stride + q * g_w_stride
    place_y = n * y_n_stride + p * y_h_stride + q * y_w_stride
    place_dg = m * 0
    if DGRID:
        place_dg = n * dg_n_stride + p * dg_h_stride + q * dg_w_stride
    gz = tl.zeros((BLOCK_P,), SUM)
    if HAS_D:
        place_g += o * g_d_stride
        place_y += o * y_d_stride
        gz = tl.load(places + place_g + 2 * g_a_stride, mask=in_points, other=0.0).to(SUM)
        if DGRID:
            place_dg += o * dg_d_stride
    gx = tl.load(places + place_g, mask=in_points, other=0.0).to(SUM)
    gy = tl.load(places + place_g + g_a_stride, mask=in_points, other=0.0).to(SUM)
    along_x = tl.zeros((BLOCK_P,), SUM)
    along_y = tl.zeros((BLOCK_P,), SUM)
    along_z = tl.zeros((BLOCK_P,), SUM)
    for c0 in range(0, C, BLOCK_C):
        c = c0 + tl.arange(0, BLOCK_C)
        if WIDE:
            c = c.to(tl.int64)
        ok = rows(in_points, TURNED) & columns(c < C, TURNED)
        at_y = y + (rows(place_y, TURNED) + columns(c * y_c_stride, TURNED))
        v = rows(tl.zeros_like(gx), TURNED) + columns(c * 0, TURNED).to(SUM)
        if not FORWARD:
            v = tl.load(at_y, mask=ok, other=0.0).to(SUM)
        for i in tl.static_range(TAPS_D):
            d = m * 0
            wd = tl.zeros_like(gz) + 1.0
            sd = tl.zeros_like(gz)
            in_d = in_points
            if HAS_D:
                d, wd, sd, in_d = _neighbour(gz, D, i, MODE, PADDING, CORNERS)
            for j in tl.static_range(TAPS):
                h, wh, sh, in_h = _neighbour(gy, H, j, MODE, PADDING, CORNERS)
                for k in tl.static_range(TAPS):
                    w, ww, sw, in_w = _neighbour(gx, W, k, MODE, PADDING, CORNERS)
                    there = ok & rows(in_d & in_h & in_w, TURNED)
                    weight = wd * wh * ww
                    if WIDE:
                        h = h.to(tl.int64)
                        w = w.to(tl.int64)
                        d = d.to(tl.int64)
                    if FORWARD or DGRID:
                        far = n * x_n_stride + h * x_h_stride + w * x_w_stride
                        if HAS_D:
                            far += d * x_d_stride
                        at_x = x + (rows(far, TURNED) + columns(c * x_c_stride, TURNED))
                        u = tl.load(at_x, mask=there, other=0.0).to(SUM)
                        if FORWARD:
                            v += u * rows(weight, TURNED)
                        else:
                            both = tl.sum(tl.where(there, u * v, 0.0), axis=0 if TURNED else 1)
                            along_x += both * wd * wh * sw
                            along_y += both * wd * sh * ww
                            along_z += both * sd * wh * ww
                    if DX:
                        far = n * s_n_stride + ((d * H + h) * W + w) * s_p_stride
                        to = sums + (rows(far, TURNED) + columns(c * s_c_stride, TURNED))
                        tl.atomic_add(to, v * rows(weight, TURNED), mask=there, sem="relaxed")
        if FORWARD:
            tl.store(at_y, v.to(y.dtype.element_ty), mask=ok)
    if DGRID:
        to = dgrid + place_dg
        tl.store(to, along_x.to(dgrid.dtype.element_ty), mask=in_points)
        tl.store(to + dg_a_stride, along_y.to(dgrid.dtype.element_ty), mask=in_points)
        if HAS_D:
            tl.store(to + 2 * dg_a_stride, along_z.to(dgrid.dtype.element_ty), mask=in_points)


def turned(problem: Problem) -> bool:
    """Whether points are neighbours in memory."""
    x = problem["x"]
    return pixels_first(five_strides(x), x.shape[1])


def configs(problem: Problem) -> list[Config]:
    """Blocks of points by channels, in the order of memory."""
    points = problem["y" if "y" in problem.tensors else "dy"]
    many = max(_points(problem), 1)
    found = []
    for elements, warps in ((512, 4), (1024, 4), (256, 2)):
        if turned(problem):
            width = min(128, triton.next_power_of_2(many))
            block_c = max(1, min(elements // width, triton.next_power_of_2(max(points.shape[1], 1))))
        else:
            block_c = min(128, triton.next_power_of_2(max(points.shape[1], 1)))
            width = max(1, min(elements // block_c, triton.next_power_of_2(many)))
        config = {"BLOCK_P": width, "BLOCK_C": block_c, "num_warps": warps, "num_stages": 1}
        if config not in found:
            found.append(config)
    return found


def tiles(problem: Problem, config: Config) -> int:
    """How many programs."""
    return -(-_points(problem) // config["BLOCK_P"])


def has_points(problem: Problem) -> bool:
    """Whether there is something to take samples of."""
    return math.prod(problem["x"].shape[2:]) > 0


def _points(problem: Problem) -> int:
    shape = problem["y" if "y" in problem.tensors else "dy"].shape
    return shape[0] * math.prod(shape[2:])


def sample_arguments(
    problem: Problem, config: Config, sums: Slice | None
) -> tuple[dict[str, Argument], dict[str, Any]]:
    """Arguments and constexprs of `grid_sample`."""
    op: Any = problem.op
    forward = op.name == "grid_sample_fwd"
    x, grid, y = problem["x"], problem["grid"], problem["y" if forward else "dy"]
    in_size, out_size = three(x.shape[2:], 1), three(y.shape[2:], 1)
    ndim, pixels = x.ndim - 2, math.prod(x.shape[2:])
    aside = turned(problem)
    points = _points(problem)
    dgrid = problem.tensors.get("dgrid")
    args: dict[str, Argument] = {
        "x": "x", "places": "grid", "y": "y" if forward else "dy", "sums": sums, "dgrid": "dgrid" if dgrid else None,
        "M": points, "C": x.shape[1], **dict(zip("DHW", in_size)), **dict(zip("OPQ", out_size)),
        "s_n_stride": x.shape[1] * pixels, "s_c_stride": pixels if aside else 1,
        "s_p_stride": 1 if aside else x.shape[1],
    }  # fmt: skip
    for name, t in (("x", x), ("y", y)):
        args |= {f"{name}_{axis}_stride": s for axis, s in zip("ncdhw", five_strides(t), strict=True)}
    for name, t in (("g", grid), ("dg", dgrid)):
        strides = (t.strides[0], *three(t.strides[1:-1], 0), t.strides[-1]) if t else (None,) * 5
        args |= {f"{name}_{axis}_stride": s for axis, s in zip("ndhwa", strides, strict=True)}
    taps = TAPS[op.mode]
    edge = config["BLOCK_P"] + config["BLOCK_C"]
    widest = max(points + edge, x.numel, *(t.span + edge for _, t in problem.items))
    constexprs = {
        "MODE": MODES.index(op.mode), "PADDING": PADDING_MODES.index(op.padding_mode), "CORNERS": op.align_corners,
        "HAS_D": ndim == 3, "TAPS_D": taps if ndim == 3 else 1, "TAPS": taps, "FORWARD": forward,
        "DX": sums is not None, "DGRID": dgrid is not None, "TURNED": aside, "WIDE": widest > INT32,
        "BLOCK_P": config["BLOCK_P"], "BLOCK_C": config["BLOCK_C"],
    }  # fmt: skip
    return args, constexprs
