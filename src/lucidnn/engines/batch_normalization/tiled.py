"""``batch_norm.tiled``: normalization on a GPU in any layout, by the batch's or by given statistics, in Triton.

Method: three launches. The first deals tiles of channels by values to a few blocks a processor; every place of a tile
keeps a mean and a sum of squares by Welford's update, on values shifted by the channel's first, and a block combines
its places at the end: mean and squares of its part. The second combines the parts of each channel in order (Chan's
formula from a mean found first), and moves the running statistics. The third normalises, from the end backwards, so
that what the first read last is still in the second-level cache.

A tile lies along whichever axis is innermost in memory: pixels by channels for NHWC, channels by pixels for NCHW.
Offsets are 64-bit where a tensor reaches past 2^31 elements. Cost: x read twice, y written. Sources: Welford, "Note on
a method for calculating corrected sums of squares and products", 1962; Chan, Golub and LeVeque, "Updating formulae and
a pairwise algorithm for computing sample variances", 1979.
"""

from typing import Any

import triton
import triton.language as tl

from ...core.engine import Config, Refusals
from ...core.heuristics import roofline
from ...core.problem import Problem
from ...ops.activation import ACTIVATIONS
from ...ops.batch_normalization import TYPES, statistics_type
from .._triton.channels import inverse_root, split_index
from .._triton.epilogue import convert, finish
from .._triton.index import columns, rows
from .._triton.launch import Argument, Launch, Real, Slice, TritonEngine
from .._triton.loops import offset
from ._flat import normalize_flat, with_flat
from ._tiles import Tiles, common, configs, dense, numbers, strided
from ._view import View


@triton.jit
def batch_norm_stats(
    x, means, squares, shifts, counts, C, ROWS, LANES, CHUNKS, K0, K1, K2, R0, R1, R2, ROW_PARTS, CHUNK_PARTS,
    x_k0_stride, x_k1_stride, x_k2_stride, x_k3_stride, x_l_stride, x_r0_stride, x_r1_stride, x_r2_stride,
    KEPT: tl.constexpr, OUTER: tl.constexpr, TURNED: tl.constexpr, WIDE: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    FLOAT: tl.constexpr = tl.float64 if x.dtype.element_ty == tl.float64 else tl.float32
    blocks = tl.cdiv(C, BLOCK_C)
    part = tl.program_id(0) // blocks
    c = tl.program_id(0) % blocks * BLOCK_C + tl.arange(0, BLOCK_C)
    row_part = part % ROW_PARTS
    chunk_part = part // ROW_PARTS
    my_rows = tl.cdiv(ROWS - row_part, ROW_PARTS)
    trips = my_rows * tl.cdiv(CHUNKS - chunk_part, CHUNK_PARTS)
    if WIDE:
        c = c.to(tl.int64)
        row_part = row_part.to(tl.int64)
        chunk_part = chunk_part.to(tl.int64)
    k0, k1, k2, k3 = split_index(c, K0, K1, K2, KEPT)
    channel = x + offset(k0, k1, k2, k3, x_k0_stride, x_k1_stride, x_k2_stride, x_k3_stride, KEPT)
    # One value for all parts of a channel: their means stay small numbers, which lose nothing when they are combined.
    shift = tl.load(channel, mask=c < C, other=0.0).to(FLOAT)
    shift_tile = columns(shift, TURNED)
    channel_tile = columns(channel, TURNED)
    in_channels = columns(c < C, TURNED)
    mean = tl.zeros((BLOCK_C, BLOCK_P) if TURNED else (BLOCK_P, BLOCK_C), dtype=FLOAT)
    m2 = tl.zeros((BLOCK_C, BLOCK_P) if TURNED else (BLOCK_P, BLOCK_C), dtype=FLOAT)
    seen = tl.zeros((BLOCK_P,), dtype=FLOAT)
    one = tl.full((), 1.0, FLOAT)
    for trip in tl.range(0, trips, num_stages=STAGES):
        row = row_part + trip % my_rows * ROW_PARTS
        lane = (chunk_part + trip // my_rows * CHUNK_PARTS) * BLOCK_P + tl.arange(0, BLOCK_P)
        r0, r1, r2, r3 = split_index(row, R0, R1, R2, OUTER)
        spot = lane * x_l_stride + offset(r0, r1, r2, r3, x_r0_stride, x_r1_stride, x_r2_stride, 0, OUTER)
        ok = rows(lane < LANES, TURNED) & in_channels
        v = tl.load(channel_tile + rows(spot, TURNED), mask=ok, other=0.0).to(FLOAT) - shift_tile
        d = tl.where(ok, v - mean, 0.0)
        mean += d * (one / (trip + 1))
        m2 += d * (v - mean)
        seen += tl.where(lane < LANES, 1.0, 0.0).to(FLOAT)
    # All places of the tile together: a mean, what it is off by, and the squares about it.
    AXIS: tl.constexpr = 1 if TURNED else 0
    share = rows(seen, TURNED)
    count = tl.sum(seen, axis=0)
    base = tl.sum(share * mean, axis=AXIS) / count
    d = mean - columns(base, TURNED)
    off = tl.sum(share * d, axis=AXIS) / count
    total = tl.sum(m2 + share * d * d, axis=AXIS) - count * off * off
    at = part * C + tl.program_id(0) % blocks * BLOCK_C + tl.arange(0, BLOCK_C)
    tl.store(means + at, base + off, mask=c < C)
    tl.store(squares + at, total, mask=c < C)
    tl.store(counts + part, count, mask=tl.program_id(0) % blocks == 0)
    tl.store(shifts + at, shift, mask=(c < C) & (part == 0))


@triton.jit
def batch_norm_combine(
    means, squares, shifts, counts, mean, inverse, m2, old_mean, old_variance, new_mean, new_variance, factor, PARTS, C,
    K0, K1, K2, epsilon, momentum, counts_stride, means_p_stride, squares_p_stride,
    means_k0_stride, means_k1_stride, means_k2_stride, means_k3_stride,
    squares_k0_stride, squares_k1_stride, squares_k2_stride, squares_k3_stride,
    mean_k0_stride, mean_k1_stride, mean_k2_stride, mean_k3_stride,
    inverse_k0_stride, inverse_k1_stride, inverse_k2_stride, inverse_k3_stride,
    m2_k0_stride, m2_k1_stride, m2_k2_stride, m2_k3_stride,
    old_mean_k0_stride, old_mean_k1_stride, old_mean_k2_stride, old_mean_k3_stride,
    old_variance_k0_stride, old_variance_k1_stride, old_variance_k2_stride, old_variance_k3_stride,
    new_mean_k0_stride, new_mean_k1_stride, new_mean_k2_stride, new_mean_k3_stride,
    new_variance_k0_stride, new_variance_k1_stride, new_variance_k2_stride, new_variance_k3_stride,
    KEPT: tl.constexpr, FLOAT64: tl.constexpr, WIDE: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    FLOAT: tl.constexpr = tl.float64 if FLOAT64 else tl.float32
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    if WIDE:
        c = c.to(tl.int64)
    k0, k1, k2, k3 = split_index(c, K0, K1, K2, KEPT)
    from_mean = means + offset(k0, k1, k2, k3, means_k0_stride, means_k1_stride, means_k2_stride, means_k3_stride, KEPT)
    from_m2 = squares + offset(
        k0, k1, k2, k3, squares_k0_stride, squares_k1_stride, squares_k2_stride, squares_k3_stride, KEPT
    )
    ok = c < C
    count = tl.zeros((BLOCK_S,), dtype=FLOAT)
    total = tl.zeros((BLOCK_S, BLOCK_C), dtype=FLOAT)
    for start in range(0, PARTS, BLOCK_S):
        part = start + tl.arange(0, BLOCK_S)
        n = convert(tl.load(counts + part * counts_stride, mask=part < PARTS, other=0.0), FLOAT)
        both = (part < PARTS)[:, None] & ok[None, :]
        value = tl.load(from_mean[None, :] + (part * means_p_stride)[:, None], mask=both, other=0.0)
        total += n[:, None] * convert(value, FLOAT)
        count += n
    every = tl.sum(count, axis=0)
    some = tl.where(every == 0.0, 1.0, every).to(FLOAT)
    base = tl.sum(total, axis=0) / some
    total = tl.zeros((BLOCK_S, BLOCK_C), dtype=FLOAT)
    spread = tl.zeros((BLOCK_S, BLOCK_C), dtype=FLOAT)
    for start in range(0, PARTS, BLOCK_S):
        part = start + tl.arange(0, BLOCK_S)
        n = convert(tl.load(counts + part * counts_stride, mask=part < PARTS, other=0.0), FLOAT)
        both = (part < PARTS)[:, None] & ok[None, :]
        value = tl.load(from_mean[None, :] + (part * means_p_stride)[:, None], mask=both, other=0.0)
        own = tl.load(from_m2[None, :] + (part * squares_p_stride)[:, None], mask=both, other=0.0)
        d = convert(value, FLOAT) - base[None, :]
        total += n[:, None] * d
        spread += convert(own, FLOAT) + n[:, None] * d * d
    off = tl.sum(total, axis=0) / some
    q = tl.sum(spread, axis=0) - every * off * off
    center = base + off
    if shifts is not None:
        center = center + tl.load(shifts + c, mask=ok, other=0.0)
    center = tl.where(q == q, center, q)
    at = offset(k0, k1, k2, k3, mean_k0_stride, mean_k1_stride, mean_k2_stride, mean_k3_stride, KEPT)
    tl.store(mean + at, convert(center, mean.dtype.element_ty), mask=ok)
    if m2 is not None:
        at = offset(k0, k1, k2, k3, m2_k0_stride, m2_k1_stride, m2_k2_stride, m2_k3_stride, KEPT)
        tl.store(m2 + at, convert(q, m2.dtype.element_ty), mask=ok)
    if inverse is not None:
        at = offset(k0, k1, k2, k3, inverse_k0_stride, inverse_k1_stride, inverse_k2_stride, inverse_k3_stride, KEPT)
        tl.store(inverse + at, convert(1.0 / tl.sqrt(q / some + epsilon), inverse.dtype.element_ty), mask=ok)
    if old_mean is not None:
        f = momentum
        if factor is not None:
            f = convert(tl.load(factor), FLOAT)
        f = tl.where(every == 0.0, 0.0, f).to(FLOAT)
        at = offset(
            k0, k1, k2, k3, old_mean_k0_stride, old_mean_k1_stride, old_mean_k2_stride, old_mean_k3_stride, KEPT
        )
        old = convert(tl.load(old_mean + at, mask=ok, other=0.0), FLOAT)
        at = offset(
            k0, k1, k2, k3, new_mean_k0_stride, new_mean_k1_stride, new_mean_k2_stride, new_mean_k3_stride, KEPT
        )
        tl.store(new_mean + at, convert(old + f * (center - old), new_mean.dtype.element_ty), mask=ok)
        at = offset(
            k0, k1, k2, k3, old_variance_k0_stride, old_variance_k1_stride, old_variance_k2_stride,
            old_variance_k3_stride, KEPT,
        )  # fmt: skip
        old = convert(tl.load(old_variance + at, mask=ok, other=0.0), FLOAT)
        new = q / tl.where(every > 1.0, every - 1.0, 1.0).to(FLOAT)
        at = offset(
            k0, k1, k2, k3, new_variance_k0_stride, new_variance_k1_stride, new_variance_k2_stride,
            new_variance_k3_stride, KEPT,
        )  # fmt: skip
        tl.store(new_variance + at, convert(old + f * (new - old), new_variance.dtype.element_ty), mask=ok)


@triton.jit
def batch_norm_normalize(
    x, z, y, mean, inverse, variance, scale, bias, epsilon, parameter, C, ROWS, LANES, CHUNKS, K0, K1, K2, R0, R1, R2,
    ROW_TRIPS, CHUNK_TRIPS,
    x_k0_stride, x_k1_stride, x_k2_stride, x_k3_stride, x_l_stride, x_r0_stride, x_r1_stride, x_r2_stride,
    z_k0_stride, z_k1_stride, z_k2_stride, z_k3_stride, z_l_stride, z_r0_stride, z_r1_stride, z_r2_stride,
    y_k0_stride, y_k1_stride, y_k2_stride, y_k3_stride, y_l_stride, y_r0_stride, y_r1_stride, y_r2_stride,
    mean_k0_stride, mean_k1_stride, mean_k2_stride, mean_k3_stride,
    inverse_k0_stride, inverse_k1_stride, inverse_k2_stride, inverse_k3_stride,
    scale_k0_stride, scale_k1_stride, scale_k2_stride, scale_k3_stride,
    bias_k0_stride, bias_k1_stride, bias_k2_stride, bias_k3_stride,
    ACT: tl.constexpr, KEPT: tl.constexpr, OUTER: tl.constexpr, TURNED: tl.constexpr, WIDE: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    FLOAT: tl.constexpr = tl.float64 if x.dtype.element_ty == tl.float64 else tl.float32
    blocks = tl.cdiv(C, BLOCK_C)
    pid = tl.num_programs(0) - 1 - tl.program_id(0)  # what was read last comes first: it may still be in the cache
    c = pid % blocks * BLOCK_C + tl.arange(0, BLOCK_C)
    rest = pid // blocks
    row_groups = tl.cdiv(ROWS, ROW_TRIPS)
    first_row = rest % row_groups * ROW_TRIPS
    first_chunk = rest // row_groups * CHUNK_TRIPS
    my_rows = tl.minimum(ROW_TRIPS, ROWS - first_row)
    trips = my_rows * tl.minimum(CHUNK_TRIPS, CHUNKS - first_chunk)
    if WIDE:
        c = c.to(tl.int64)
        first_row = first_row.to(tl.int64)
        first_chunk = first_chunk.to(tl.int64)
    some = c < C
    k0, k1, k2, k3 = split_index(c, K0, K1, K2, KEPT)
    at = offset(k0, k1, k2, k3, mean_k0_stride, mean_k1_stride, mean_k2_stride, mean_k3_stride, KEPT)
    center = columns(convert(tl.load(mean + at, mask=some, other=0.0), FLOAT), TURNED)
    at = offset(k0, k1, k2, k3, inverse_k0_stride, inverse_k1_stride, inverse_k2_stride, inverse_k3_stride, KEPT)
    factor = inverse_root(inverse, variance, at, some, epsilon, FLOAT)
    if scale is not None:
        at = offset(k0, k1, k2, k3, scale_k0_stride, scale_k1_stride, scale_k2_stride, scale_k3_stride, KEPT)
        factor = factor * convert(tl.load(scale + at, mask=some, other=0.0), FLOAT)
    factor = columns(factor, TURNED)
    term = None
    if bias is not None:
        at = offset(k0, k1, k2, k3, bias_k0_stride, bias_k1_stride, bias_k2_stride, bias_k3_stride, KEPT)
        term = columns(convert(tl.load(bias + at, mask=some, other=0.0), FLOAT), TURNED)
    x_tile = columns(x + offset(k0, k1, k2, k3, x_k0_stride, x_k1_stride, x_k2_stride, x_k3_stride, KEPT), TURNED)
    y_tile = columns(y + offset(k0, k1, k2, k3, y_k0_stride, y_k1_stride, y_k2_stride, y_k3_stride, KEPT), TURNED)
    if z is not None:
        z_tile = columns(z + offset(k0, k1, k2, k3, z_k0_stride, z_k1_stride, z_k2_stride, z_k3_stride, KEPT), TURNED)
    for trip in tl.range(0, trips, num_stages=STAGES):
        lane = (first_chunk + trip // my_rows) * BLOCK_P + tl.arange(0, BLOCK_P)
        r0, r1, r2, r3 = split_index(first_row + trip % my_rows, R0, R1, R2, OUTER)
        ok = rows(lane < LANES, TURNED) & columns(some, TURNED)
        spot = lane * x_l_stride + offset(r0, r1, r2, r3, x_r0_stride, x_r1_stride, x_r2_stride, 0, OUTER)
        v = tl.load(x_tile + rows(spot, TURNED), mask=ok, other=0.0, eviction_policy="evict_first").to(FLOAT)
        other = None
        if z is not None:
            spot = lane * z_l_stride + offset(r0, r1, r2, r3, z_r0_stride, z_r1_stride, z_r2_stride, 0, OUTER)
            other = tl.load(z_tile + rows(spot, TURNED), mask=ok, other=0.0, eviction_policy="evict_first")
        v = finish((v - center) * factor, other, term, None, None, parameter, ACT)
        spot = lane * y_l_stride + offset(r0, r1, r2, r3, y_r0_stride, y_r1_stride, y_r2_stride, 0, OUTER)
        tl.store(y_tile + rows(spot, TURNED), v.to(y.dtype.element_ty), mask=ok, eviction_policy="evict_first")


class Tiled(TritonEngine):
    name = "batch_norm.tiled"
    operations = ("batch_norm_train_fwd", "batch_norm_infer_fwd", "batch_norm_stats", "batch_norm_combine")

    def refusals(self, problem: Problem) -> list[str]:
        r = Refusals()
        r.require_tensors(problem.items, TYPES, elements=True)
        return r

    def configs(self, problem: Problem) -> list[Config]:
        if problem.op.name == "batch_norm_combine":
            return [{"num_warps": 4, "num_stages": 1}]
        return with_flat(problem, configs(problem, 1))

    def workspace_size(self, problem: Problem, config: Config) -> int:
        if problem.op.name in ("batch_norm_infer_fwd", "batch_norm_combine"):
            return 0
        tiles = Tiles.of(problem, config)
        parts, one = _sizes(problem, tiles)
        return 2 * parts + one + 8 * tiles.parts

    def cost(self, problem: Problem, config: Config) -> float:
        launches = {"batch_norm_train_fwd": 3, "batch_norm_stats": 2}.get(problem.op.name, 1)
        if problem.op.name == "batch_norm_combine":
            return roofline(problem, flops=0.0, launches=1)
        tiles = Tiles.of(problem, config)
        busy = min(1.0, tiles.blocks * tiles.rows * tiles.chunks / problem.target.processors)
        waste = tiles.chunks * config["BLOCK_P"] / tiles.lanes * tiles.blocks * config["BLOCK_C"] / tiles.view.channels
        if config.get("FLAT", 0):  # the pass over x that makes statistics is in tiles all the same
            waste = 1.0 if problem.op.name == "batch_norm_infer_fwd" else max(1.0, waste) ** 0.5
        return roofline(problem, flops=0.0, memory_efficiency=0.8 * busy / max(1.0, waste) ** 0.5, launches=launches)

    def launches(self, problem: Problem, config: Config) -> list[Launch]:
        if problem.op.name == "batch_norm_combine":
            return [_combine_given(problem)]
        tiles = Tiles.of(problem, config)
        found = []
        if problem.op.name != "batch_norm_infer_fwd":
            found += [_stats(problem, tiles, config), _combine_parts(problem, tiles)]
        if problem.op.name != "batch_norm_stats":
            flat = config.get("FLAT", 0) > 0
            found.append(normalize_flat(problem, tiles.view, config) if flat else _normalize(problem, tiles, config))
        return found


def _sizes(problem: Problem, tiles: Tiles) -> tuple[int, int]:
    """Bytes of an array of parts by channels, and of one of channels."""
    size = 8 if problem["x"].dtype == "f64" else 4
    return -(-size * tiles.parts * tiles.view.channels // 16) * 16, -(-size * tiles.view.channels // 16) * 16


def _slices(problem: Problem, tiles: Tiles) -> dict[str, Argument]:
    kind = statistics_type(problem["x"].dtype)
    parts, one = _sizes(problem, tiles)
    places = {"means": 0, "squares": parts, "shifts": 2 * parts, "counts": 2 * parts + one}
    return {name: Slice(place, kind) for name, place in places.items()}


def _stats(problem: Problem, tiles: Tiles, config: Config) -> Launch:
    args, constexprs = common(problem, tiles, config)
    args |= {"x": "x", **_slices(problem, tiles), **strided(tiles.view, "x")}
    args |= {"ROW_PARTS": tiles.row_parts, "CHUNK_PARTS": tiles.chunk_parts}
    grid = (tiles.blocks * tiles.parts,)
    return Launch(batch_norm_stats, grid, args, constexprs, config["num_warps"], config["num_stages"])


_ROLES = {
    "mean": "mean", "inverse": "inv_variance", "m2": "m2", "old_mean": "running_mean",
    "old_variance": "running_variance", "new_mean": "next_mean", "new_variance": "next_variance",
}  # fmt: skip


def _combine(problem: Problem, view: View, parts: int, args: dict[str, Argument], kind: str) -> Launch:
    op: Any = problem.op
    kept = view.kept[::-1]
    args |= {"PARTS": parts, "C": view.channels, "factor": "factor"}
    args |= {f"K{i}": kept[i] if i + 1 < len(kept) else None for i in range(3)}
    args |= {"epsilon": Real(getattr(op, "epsilon", 0.0), kind), "momentum": Real(getattr(op, "momentum", 0.0), kind)}
    for name, role in _ROLES.items():
        args |= {name: role, **strided(view, role, name)}
    block_s = min(triton.next_power_of_2(parts), 64)
    block_c = max(1, min(triton.next_power_of_2(view.channels), 1024 // block_s, 128))
    constexprs = {
        "KEPT": len(kept), "FLOAT64": kind == "f64", "WIDE": max(t.span for _, t in problem.items) > 2**31 - 1,
        "BLOCK_S": block_s, "BLOCK_C": block_c,
    }  # fmt: skip
    return Launch(batch_norm_combine, (-(-view.channels // block_c),), args, constexprs, 4, 1)


def _combine_parts(problem: Problem, tiles: Tiles) -> Launch:
    view = tiles.view
    args = _slices(problem, tiles) | dense(view, "means") | dense(view, "squares")
    args |= {"counts_stride": 1, "means_p_stride": view.channels, "squares_p_stride": view.channels}
    return _combine(problem, view, tiles.parts, args, statistics_type(problem["x"].dtype))


def _combine_given(problem: Problem) -> Launch:
    view = View.of(problem)
    args: dict[str, Argument] = {"means": "means", "squares": "m2s", "shifts": None, "counts": "counts"}
    args |= strided(view, "means") | strided(view, "m2s", "squares")
    args |= {
        "counts_stride": problem["counts"].strides[0],
        "means_p_stride": problem["means"].strides[0],
        "squares_p_stride": problem["m2s"].strides[0],
    }
    wide = any(t.dtype == "f64" for _, t in problem.items)
    return _combine(problem, view, problem["counts"].shape[0], args, "f64" if wide else "f32")


def _normalize(problem: Problem, tiles: Tiles, config: Config) -> Launch:
    view = tiles.view
    args, constexprs = common(problem, tiles, config)
    args |= {"x": "x", "z": "z", "y": "y", "mean": "mean", "inverse": "inv_variance", "variance": "variance"}
    args |= {"scale": "scale", "bias": "bias", **numbers(problem)}
    args |= {"ROW_TRIPS": tiles.row_trips, "CHUNK_TRIPS": tiles.chunk_trips}
    for role in ("x", "z", "y", "mean", "scale", "bias"):
        args |= strided(view, role)
    args |= strided(view, "variance" if "variance" in problem.tensors else "inv_variance", "inverse")
    constexprs["ACT"] = ACTIVATIONS[problem.epilogue.activation].code
    return Launch(batch_norm_normalize, (tiles.grid,), args, constexprs, config["num_warps"], config["num_stages"])
