"""Sampling by a grid on a GPU over a copy of x with channels last: the kernels and their launches, for two engines.

Neighbouring points of an arbitrary grid read places that are far apart. Where pixels are neighbours in memory, every
lane of a warp then meets a 32-byte sector of its own, for one element; with channels last a sector holds the same tap
for a row of channels. So one pass turns x into the workspace, tiles of points by channels are sampled from there with
channels as lanes, and a tile is turned on its way to y. Backward, dy is turned on its way in, and what x is owed is
summed with channels last and turned at the end. 2-D images.
"""

import math
from typing import Any

import triton
import triton.language as tl

from ...core.descriptor import DTYPES
from ...core.engine import Config, Refusals
from ...core.problem import Problem
from ...ops.grid_sample import MODES, PADDING_MODES, TAPS
from .._triton.index import INT32
from .._triton.launch import Argument, Launch, Slice
from ._grid import TYPES, _neighbour, turned


@triton.jit
def to_channels_last(
    x, copy, sums, C, PIXELS, W, P_BLOCKS, C_BLOCKS, x_n_stride, x_c_stride, x_h_stride, x_w_stride,
    FLAT: tl.constexpr, WIDE: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Copy x as (image, pixel, channel), and clear sums that lie so; either may be None."""
    pid = tl.program_id(0)
    c = pid % C_BLOCKS * BLOCK_C + tl.arange(0, BLOCK_C)
    p = pid // C_BLOCKS % P_BLOCKS * BLOCK_P + tl.arange(0, BLOCK_P)
    n = pid // C_BLOCKS // P_BLOCKS
    if WIDE:
        c = c.to(tl.int64)
        p = p.to(tl.int64)
        n = n.to(tl.int64)
    to = (n * PIXELS + p)[:, None] * C + c[None, :]
    ok = (p < PIXELS)[:, None] & (c < C)[None, :]
    if copy is not None:
        spot = p * x_w_stride
        if not FLAT:
            spot = p // W * x_h_stride + p % W * x_w_stride
        at = x + n * x_n_stride + (c * x_c_stride)[:, None] + spot[None, :]
        tile = tl.load(at, mask=(c < C)[:, None] & (p < PIXELS)[None, :], other=0.0)
        tl.store(copy + to, tl.trans(tile), mask=ok)
    if sums is not None:
        tl.store(sums + to, tl.zeros((BLOCK_P, BLOCK_C), sums.dtype.element_ty), mask=ok)


@triton.jit
def from_channels_last(
    sums, dx, C, PIXELS, W, P_BLOCKS, C_BLOCKS, x_n_stride, x_c_stride, x_h_stride, x_w_stride,
    FLAT: tl.constexpr, WIDE: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Round sums, which are (image, pixel, channel), into dx, whose strides are given."""
    pid = tl.program_id(0)
    c = pid % C_BLOCKS * BLOCK_C + tl.arange(0, BLOCK_C)
    p = pid // C_BLOCKS % P_BLOCKS * BLOCK_P + tl.arange(0, BLOCK_P)
    n = pid // C_BLOCKS // P_BLOCKS
    if WIDE:
        c = c.to(tl.int64)
        p = p.to(tl.int64)
        n = n.to(tl.int64)
    at = (n * PIXELS + p)[:, None] * C + c[None, :]
    tile = tl.load(sums + at, mask=(p < PIXELS)[:, None] & (c < C)[None, :], other=0.0)
    spot = p * x_w_stride
    if not FLAT:
        spot = p // W * x_h_stride + p % W * x_w_stride
    to = dx + n * x_n_stride + (c * x_c_stride)[:, None] + spot[None, :]
    tl.store(to, tl.trans(tile.to(dx.dtype.element_ty)), mask=(c < C)[:, None] & (p < PIXELS)[None, :])


@triton.jit
def grid_sample_last(
    copy, places, y, sums, dgrid, M, C, P, Q, H, W, y_n_stride, y_c_stride, y_h_stride, y_w_stride,
    g_n_stride, g_h_stride, g_w_stride, g_a_stride, dg_n_stride, dg_h_stride, dg_w_stride, dg_a_stride,
    MODE: tl.constexpr, PADDING: tl.constexpr, CORNERS: tl.constexpr, TAPS: tl.constexpr, FORWARD: tl.constexpr,
    FLOAT64: tl.constexpr, WIDE: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """`y` is dy where it is not `FORWARD`; `sums` and `dgrid` are None where they are not asked for."""
    SUM: tl.constexpr = tl.float64 if FLOAT64 else tl.float32
    m = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    if WIDE:
        m = tl.program_id(0).to(tl.int64) * BLOCK_P + tl.arange(0, BLOCK_P)
    in_points = m < M
    q = m % Q
    p = m // Q % P
    n = m // Q // P
    place_g = n * g_n_stride + p * g_h_stride + q * g_w_stride
    place_y = n * y_n_stride + p * y_h_stride + q * y_w_stride
    gx = tl.load(places + place_g, mask=in_points, other=0.0).to(SUM)
    gy = tl.load(places + place_g + g_a_stride, mask=in_points, other=0.0).to(SUM)
    along_x = tl.zeros((BLOCK_P,), SUM)
    along_y = tl.zeros((BLOCK_P,), SUM)
    for c0 in range(0, C, BLOCK_C):
        c = c0 + tl.arange(0, BLOCK_C)
        if WIDE:
            c = c.to(tl.int64)
        # Channels by points, as the pixels-first y lies; the tile that is computed on is points by channels.
        at_y = y + ((c * y_c_stride)[:, None] + place_y[None, :])
        ok_y = (c < C)[:, None] & in_points[None, :]
        v = tl.zeros((BLOCK_P, BLOCK_C), SUM)
        if not FORWARD:
            v = tl.trans(tl.load(at_y, mask=ok_y, other=0.0)).to(SUM)
        for j in tl.static_range(TAPS):
            h, wh, sh, in_h = _neighbour(gy, H, j, MODE, PADDING, CORNERS)
            for k in tl.static_range(TAPS):
                w, ww, sw, in_w = _neighbour(gx, W, k, MODE, PADDING, CORNERS)
                there = (in_points & in_h & in_w)[:, None] & (c < C)[None, :]
                weight = wh * ww
                if WIDE:
                    h = h.to(tl.int64)
                    w = w.to(tl.int64)
                far = ((n * H + h) * W + w) * C
                if copy is not None:
                    u = tl.load(copy + (far[:, None] + c[None, :]), mask=there, other=0.0).to(SUM)
                    if FORWARD:
                        v += u * weight[:, None]
                    else:
                        both = tl.sum(tl.where(there, u * v, 0.0), axis=1)
                        along_x += both * wh * sw
                        along_y += both * sh * ww
                if sums is not None:
                    tl.atomic_add(sums + (far[:, None] + c[None, :]), v * weight[:, None], mask=there, sem="relaxed")
        if FORWARD:
            tl.store(at_y, tl.trans(v.to(y.dtype.element_ty)), mask=ok_y)
    if dgrid is not None:
        to = dgrid + n * dg_n_stride + p * dg_h_stride + q * dg_w_stride
        tl.store(to, along_x.to(dgrid.dtype.element_ty), mask=in_points)
        tl.store(to + dg_a_stride, along_y.to(dgrid.dtype.element_ty), mask=in_points)


def last_refusals(problem: Problem, configs: list[Config]) -> Refusals:
    """Images of pixels that are neighbours in memory, and at least something of everything."""
    r = Refusals()
    r.require_tensors(problem.items, TYPES, elements=True)
    r.require(problem["x"].ndim == 4, "2 spatial axes", problem["x"].ndim - 2)
    if not r:
        r.require(turned(problem), "pixels innermost in x", problem["x"].strides)
        blocks = max(_tiles(problem, min(c["BLOCK_P"] for c in configs)), _turns(problem)[2])
        r.require(blocks <= INT32, f"at most {INT32} tiles", blocks)
    return r


def last_configs(problem: Problem) -> list[Config]:
    """Blocks of points by channels, best guess first: 32 points or more, so that a store fills sectors too."""
    y = _points(problem)
    many = max(y.shape[0] * math.prod(y.shape[2:]), 1)
    block_c = min(128, triton.next_power_of_2(max(y.shape[1], 1)))
    found: list[Config] = []
    for elements, warps in (
        ((2048, 8), (1024, 4), (2048, 4)) if "dy" in problem.tensors else ((2048, 4), (4096, 8), (1024, 4))
    ):
        width = max(1, min(elements // block_c, 512, triton.next_power_of_2(many)))
        config = {"BLOCK_P": width, "BLOCK_C": block_c, "num_warps": warps, "num_stages": 1}
        if config not in found:
            found.append(config)
    return found


def copied_bytes(problem: Problem) -> int:
    """Of the copy of x, a multiple of 16; 0 where only dx is wanted, which x's values have no part in."""
    x = problem["x"]
    needed = "dgrid" in problem.tensors or "y" in problem.tensors
    return -(-x.numel * DTYPES[x.dtype][1] // 16) * 16 if needed else 0


def summed_bytes(problem: Problem) -> int:
    """Of the sums that become dx."""
    return problem["x"].numel * (8 if problem["x"].dtype == "f64" else 4) if "dx" in problem.tensors else 0


def tap_traffic(problem: Problem, channels_last: bool) -> float:
    """What the taps cost in bytes of device memory: a quarter of each sector of 32 bytes that a point meets.

    As was measured on an H200 with a grid of places drawn at random, the caches serving most; a smooth grid lets
    neighbouring points share sectors, which pixels-first tensors gain more by.
    """
    op: Any = problem.op
    y = _points(problem)
    taps = TAPS[op.mode] ** (y.ndim - 2) * math.prod(y.shape[2:]) * y.shape[0]
    sizes = [DTYPES[problem["x"].dtype][1]] if "dx" not in problem.tensors or "dgrid" in problem.tensors else []
    if "dx" in problem.tensors:
        sizes.append(8 if problem["x"].dtype == "f64" else 4)
    return sum(8.0 * taps * (-(-y.shape[1] * size // 32) if channels_last else y.shape[1]) for size in sizes)


def last_launches(problem: Problem, config: Config) -> list[Launch]:
    """Turn and clear; sample; turn back."""
    op: Any = problem.op
    x, grid, y = problem["x"], problem["grid"], _points(problem)
    dgrid, dx = problem.tensors.get("dgrid"), problem.tensors.get("dx")
    copied = copied_bytes(problem)
    copy = Slice(0, x.dtype) if copied else None
    sums = Slice(copied, "f64" if x.dtype == "f64" else "f32") if dx else None
    edge = 8192
    widest = max(x.numel + edge, *(t.span + edge for _, t in problem.items))
    wide = widest > INT32
    n, channels, height, width = x.shape
    block_p, block_c, blocks = _turns(problem)

    def turning(strides: tuple[int, ...]) -> tuple[dict[str, Argument], dict[str, Any]]:
        args: dict[str, Argument] = {"C": channels, "PIXELS": height * width, "W": width}
        args |= {"P_BLOCKS": -(-height * width // block_p), "C_BLOCKS": -(-channels // block_c)}
        args |= {f"x_{axis}_stride": s for axis, s in zip("nchw", strides, strict=True)}
        flat = height == 1 or strides[2] == width * strides[3]
        return args, {"FLAT": flat, "WIDE": wide, "BLOCK_P": block_p, "BLOCK_C": block_c}

    args, constexprs = turning(x.strides)
    found = [Launch(to_channels_last, (blocks,), {"x": "x", "copy": copy, "sums": sums, **args}, constexprs, 4, 1)]
    forward = op.name == "grid_sample_fwd"
    args = {
        "copy": copy, "places": "grid", "y": "y" if forward else "dy", "sums": sums,
        "dgrid": "dgrid" if dgrid else None, "M": y.shape[0] * y.shape[2] * y.shape[3], "C": channels,
        "P": y.shape[2], "Q": y.shape[3], "H": height, "W": width,
    }  # fmt: skip
    args |= {f"y_{axis}_stride": s for axis, s in zip("nchw", y.strides, strict=True)}
    for name, t in (("g", grid), ("dg", dgrid)):
        args |= {f"{name}_{axis}_stride": s for axis, s in zip("nhwa", t.strides if t else (None,) * 4, strict=True)}
    constexprs = {
        "MODE": MODES.index(op.mode), "PADDING": PADDING_MODES.index(op.padding_mode), "CORNERS": op.align_corners,
        "TAPS": TAPS[op.mode], "FORWARD": forward, "FLOAT64": x.dtype == "f64", "WIDE": wide,
        "BLOCK_P": config["BLOCK_P"], "BLOCK_C": config["BLOCK_C"],
    }  # fmt: skip
    tiles = _tiles(problem, config["BLOCK_P"])
    found.append(Launch(grid_sample_last, (tiles,), args, constexprs, config["num_warps"], config["num_stages"]))
    if dx:
        args, constexprs = turning(dx.strides)
        found.append(Launch(from_channels_last, (blocks,), {"sums": sums, "dx": "dx", **args}, constexprs, 4, 1))
    return found


def _points(problem: Problem):
    return problem["y" if "y" in problem.tensors else "dy"]


def _tiles(problem: Problem, width: int) -> int:
    y = _points(problem)
    return -(-y.shape[0] * math.prod(y.shape[2:]) // width)


def _turns(problem: Problem) -> tuple[int, int, int]:
    """Pixels and channels of a tile that is turned, and how many there are."""
    n, channels, *size = problem["x"].shape
    pixels = math.prod(size)
    block_c = int(min(64, triton.next_power_of_2(channels)))
    block_p = int(min(4096 // block_c, 512, triton.next_power_of_2(pixels)))
    return block_p, block_c, n * -(-pixels // block_p) * -(-channels // block_c)
