"""``batch_norm.tiled_bwd``: backward normalization on a GPU in any layout, in Triton.

Method: three launches. The first deals tiles of channels by values to a few blocks a processor and sums
g = dy act'(...) and g (x - mean) for each channel of its part; the second adds the parts in order; the third makes
dx = scale r (g - a - (x - mean) b), a and b from the sums, and dz = g, from the end backwards, so that what the first
read last is still in the second-level cache. The slope of the activation is told from y where that is given, else from
its input, computed again from x, scale, bias and z.

Tiles lie as in ``batch_norm.tiled``. Cost: dy, x (and z or y) read twice, dx (and dz) written; with frozen statistics
and no sums to wait for still twice.
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
from .._triton.epilogue import activate_grad, convert
from .._triton.index import columns, rows
from .._triton.launch import Argument, Launch, Real, Slice, TritonEngine
from .._triton.loops import offset
from ._flat import apply_flat, with_flat
from ._tiles import Tiles, common, configs, numbers, strided


@triton.jit
def _gradient(dy, v, center, factor, term, z, y, parameter, ACT: tl.constexpr):
    """The gradient before the activation; `term`, `z` and `y` may be None."""
    g = dy
    if ACT != 0:
        if y is not None:
            source = y.to(dy.dtype)
        else:
            source = (v - center) * factor
            if z is not None:
                source = source + z.to(dy.dtype)
            if term is not None:
                source = source + term
        g = activate_grad(source, dy, ACT, parameter)
    return g


@triton.jit
def batch_norm_bwd_sums(
    dy, x, z, y, mean, inverse, variance, scale, bias, totals, products, epsilon, parameter,
    C, ROWS, LANES, CHUNKS, K0, K1, K2, R0, R1, R2, ROW_PARTS, CHUNK_PARTS,
    dy_k0_stride, dy_k1_stride, dy_k2_stride, dy_k3_stride, dy_l_stride, dy_r0_stride, dy_r1_stride, dy_r2_stride,
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
    some = c < C
    k0, k1, k2, k3 = split_index(c, K0, K1, K2, KEPT)
    at = offset(k0, k1, k2, k3, mean_k0_stride, mean_k1_stride, mean_k2_stride, mean_k3_stride, KEPT)
    center = columns(convert(tl.load(mean + at, mask=some, other=0.0), FLOAT), TURNED)
    factor = None
    term = None
    if ACT != 0 and y is None:
        at = offset(k0, k1, k2, k3, inverse_k0_stride, inverse_k1_stride, inverse_k2_stride, inverse_k3_stride, KEPT)
        r = inverse_root(inverse, variance, at, some, epsilon, FLOAT)
        if scale is not None:
            at = offset(k0, k1, k2, k3, scale_k0_stride, scale_k1_stride, scale_k2_stride, scale_k3_stride, KEPT)
            r = r * convert(tl.load(scale + at, mask=some, other=0.0), FLOAT)
        factor = columns(r, TURNED)
        if bias is not None:
            at = offset(k0, k1, k2, k3, bias_k0_stride, bias_k1_stride, bias_k2_stride, bias_k3_stride, KEPT)
            term = columns(convert(tl.load(bias + at, mask=some, other=0.0), FLOAT), TURNED)
    dy_tile = columns(dy + offset(k0, k1, k2, k3, dy_k0_stride, dy_k1_stride, dy_k2_stride, dy_k3_stride, KEPT), TURNED)
    x_tile = columns(x + offset(k0, k1, k2, k3, x_k0_stride, x_k1_stride, x_k2_stride, x_k3_stride, KEPT), TURNED)
    if z is not None:
        z_tile = columns(z + offset(k0, k1, k2, k3, z_k0_stride, z_k1_stride, z_k2_stride, z_k3_stride, KEPT), TURNED)
    if y is not None:
        y_tile = columns(y + offset(k0, k1, k2, k3, y_k0_stride, y_k1_stride, y_k2_stride, y_k3_stride, KEPT), TURNED)
    total = tl.zeros((BLOCK_C, BLOCK_P) if TURNED else (BLOCK_P, BLOCK_C), dtype=FLOAT)
    product = tl.zeros((BLOCK_C, BLOCK_P) if TURNED else (BLOCK_P, BLOCK_C), dtype=FLOAT)
    for trip in tl.range(0, trips, num_stages=STAGES):
        row = row_part + trip % my_rows * ROW_PARTS
        lane = (chunk_part + trip // my_rows * CHUNK_PARTS) * BLOCK_P + tl.arange(0, BLOCK_P)
        r0, r1, r2, r3 = split_index(row, R0, R1, R2, OUTER)
        ok = rows(lane < LANES, TURNED) & columns(some, TURNED)
        spot = lane * dy_l_stride + offset(r0, r1, r2, r3, dy_r0_stride, dy_r1_stride, dy_r2_stride, 0, OUTER)
        g = tl.load(dy_tile + rows(spot, TURNED), mask=ok, other=0.0).to(FLOAT)
        spot = lane * x_l_stride + offset(r0, r1, r2, r3, x_r0_stride, x_r1_stride, x_r2_stride, 0, OUTER)
        v = tl.load(x_tile + rows(spot, TURNED), mask=ok, other=0.0).to(FLOAT)
        z_here = None
        if z is not None:
            spot = lane * z_l_stride + offset(r0, r1, r2, r3, z_r0_stride, z_r1_stride, z_r2_stride, 0, OUTER)
            z_here = tl.load(z_tile + rows(spot, TURNED), mask=ok, other=0.0)
        y_here = None
        if y is not None:
            spot = lane * y_l_stride + offset(r0, r1, r2, r3, y_r0_stride, y_r1_stride, y_r2_stride, 0, OUTER)
            y_here = tl.load(y_tile + rows(spot, TURNED), mask=ok, other=0.0)
        g = tl.where(ok, _gradient(g, v, center, factor, term, z_here, y_here, parameter, ACT), 0.0)
        total += g
        product += tl.where(ok, g * (v - center), 0.0)
    AXIS: tl.constexpr = 1 if TURNED else 0
    at = part * C + tl.program_id(0) % blocks * BLOCK_C + tl.arange(0, BLOCK_C)
    tl.store(totals + at, tl.sum(total, axis=AXIS), mask=some)
    tl.store(products + at, tl.sum(product, axis=AXIS), mask=some)


@triton.jit
def batch_norm_bwd_add(
    totals, products, inverse, variance, dscale, dbias, sums, epsilon, PARTS, C, K0, K1, K2,
    inverse_k0_stride, inverse_k1_stride, inverse_k2_stride, inverse_k3_stride,
    dscale_k0_stride, dscale_k1_stride, dscale_k2_stride, dscale_k3_stride,
    dbias_k0_stride, dbias_k1_stride, dbias_k2_stride, dbias_k3_stride,
    KEPT: tl.constexpr, WIDE: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    FLOAT: tl.constexpr = totals.dtype.element_ty
    at = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    ok = at < C
    total = tl.zeros((BLOCK_S, BLOCK_C), dtype=FLOAT)
    product = tl.zeros((BLOCK_S, BLOCK_C), dtype=FLOAT)
    for start in range(0, PARTS, BLOCK_S):
        part = start + tl.arange(0, BLOCK_S)
        both = (part < PARTS)[:, None] & ok[None, :]
        total += tl.load(totals + part[:, None] * C + at[None, :], mask=both, other=0.0)
        product += tl.load(products + part[:, None] * C + at[None, :], mask=both, other=0.0)
    c = at
    if WIDE:
        c = c.to(tl.int64)
    k0, k1, k2, k3 = split_index(c, K0, K1, K2, KEPT)
    place_r = offset(k0, k1, k2, k3, inverse_k0_stride, inverse_k1_stride, inverse_k2_stride, inverse_k3_stride, KEPT)
    r = inverse_root(inverse, variance, place_r, ok, epsilon, FLOAT)
    by_bias = tl.sum(total, axis=0)
    by_scale = tl.sum(product, axis=0) * r
    to = offset(k0, k1, k2, k3, dbias_k0_stride, dbias_k1_stride, dbias_k2_stride, dbias_k3_stride, KEPT)
    tl.store(dbias + to, convert(by_bias, dbias.dtype.element_ty), mask=ok)
    to = offset(k0, k1, k2, k3, dscale_k0_stride, dscale_k1_stride, dscale_k2_stride, dscale_k3_stride, KEPT)
    tl.store(dscale + to, convert(by_scale, dscale.dtype.element_ty), mask=ok)
    tl.store(sums + at, by_bias, mask=ok)
    tl.store(sums + C + at, by_scale, mask=ok)


@triton.jit
def batch_norm_bwd_apply(
    dy, x, z, y, dx, dz, mean, inverse, variance, scale, bias, dscale, dbias, sums, count, number, epsilon, parameter,
    C, ROWS, LANES, CHUNKS, K0, K1, K2, R0, R1, R2, ROW_TRIPS, CHUNK_TRIPS,
    dy_k0_stride, dy_k1_stride, dy_k2_stride, dy_k3_stride, dy_l_stride, dy_r0_stride, dy_r1_stride, dy_r2_stride,
    x_k0_stride, x_k1_stride, x_k2_stride, x_k3_stride, x_l_stride, x_r0_stride, x_r1_stride, x_r2_stride,
    z_k0_stride, z_k1_stride, z_k2_stride, z_k3_stride, z_l_stride, z_r0_stride, z_r1_stride, z_r2_stride,
    y_k0_stride, y_k1_stride, y_k2_stride, y_k3_stride, y_l_stride, y_r0_stride, y_r1_stride, y_r2_stride,
    dx_k0_stride, dx_k1_stride, dx_k2_stride, dx_k3_stride, dx_l_stride, dx_r0_stride, dx_r1_stride, dx_r2_stride,
    dz_k0_stride, dz_k1_stride, dz_k2_stride, dz_k3_stride, dz_l_stride, dz_r0_stride, dz_r1_stride, dz_r2_stride,
    mean_k0_stride, mean_k1_stride, mean_k2_stride, mean_k3_stride,
    inverse_k0_stride, inverse_k1_stride, inverse_k2_stride, inverse_k3_stride,
    scale_k0_stride, scale_k1_stride, scale_k2_stride, scale_k3_stride,
    bias_k0_stride, bias_k1_stride, bias_k2_stride, bias_k3_stride,
    dscale_k0_stride, dscale_k1_stride, dscale_k2_stride, dscale_k3_stride,
    dbias_k0_stride, dbias_k1_stride, dbias_k2_stride, dbias_k3_stride,
    FROZEN: tl.constexpr, ACT: tl.constexpr, KEPT: tl.constexpr, OUTER: tl.constexpr, TURNED: tl.constexpr,
    WIDE: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    FLOAT: tl.constexpr = tl.float64 if x.dtype.element_ty == tl.float64 else tl.float32
    blocks = tl.cdiv(C, BLOCK_C)
    pid = tl.num_programs(0) - 1 - tl.program_id(0)  # what was read last comes first: it may still be in the cache
    dense = pid % blocks * BLOCK_C + tl.arange(0, BLOCK_C)
    c = dense
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
    r = inverse_root(inverse, variance, at, some, epsilon, FLOAT)
    factor = r
    if scale is not None:
        at = offset(k0, k1, k2, k3, scale_k0_stride, scale_k1_stride, scale_k2_stride, scale_k3_stride, KEPT)
        factor = factor * convert(tl.load(scale + at, mask=some, other=0.0), FLOAT)
    factor = columns(factor, TURNED)
    term = None
    if bias is not None:
        at = offset(k0, k1, k2, k3, bias_k0_stride, bias_k1_stride, bias_k2_stride, bias_k3_stride, KEPT)
        term = columns(convert(tl.load(bias + at, mask=some, other=0.0), FLOAT), TURNED)
    if not FROZEN:
        if sums is not None:
            m = number
            level = tl.load(sums + dense, mask=some, other=0.0)
            slope = tl.load(sums + C + dense, mask=some, other=0.0)
        else:
            m = convert(tl.load(count), FLOAT)
            at = offset(k0, k1, k2, k3, dbias_k0_stride, dbias_k1_stride, dbias_k2_stride, dbias_k3_stride, KEPT)
            level = convert(tl.load(dbias + at, mask=some, other=0.0), FLOAT)
            at = offset(k0, k1, k2, k3, dscale_k0_stride, dscale_k1_stride, dscale_k2_stride, dscale_k3_stride, KEPT)
            slope = convert(tl.load(dscale + at, mask=some, other=0.0), FLOAT)
        level = columns(level / m, TURNED)
        slope = columns(slope * r / m, TURNED)
    dy_tile = columns(dy + offset(k0, k1, k2, k3, dy_k0_stride, dy_k1_stride, dy_k2_stride, dy_k3_stride, KEPT), TURNED)
    x_tile = columns(x + offset(k0, k1, k2, k3, x_k0_stride, x_k1_stride, x_k2_stride, x_k3_stride, KEPT), TURNED)
    dx_tile = columns(dx + offset(k0, k1, k2, k3, dx_k0_stride, dx_k1_stride, dx_k2_stride, dx_k3_stride, KEPT), TURNED)
    if z is not None:
        z_tile = columns(z + offset(k0, k1, k2, k3, z_k0_stride, z_k1_stride, z_k2_stride, z_k3_stride, KEPT), TURNED)
    if y is not None:
        y_tile = columns(y + offset(k0, k1, k2, k3, y_k0_stride, y_k1_stride, y_k2_stride, y_k3_stride, KEPT), TURNED)
    if dz is not None:
        dz_tile = dz + offset(k0, k1, k2, k3, dz_k0_stride, dz_k1_stride, dz_k2_stride, dz_k3_stride, KEPT)
        dz_tile = columns(dz_tile, TURNED)
    for trip in tl.range(0, trips, num_stages=STAGES):
        lane = (first_chunk + trip // my_rows) * BLOCK_P + tl.arange(0, BLOCK_P)
        r0, r1, r2, r3 = split_index(first_row + trip % my_rows, R0, R1, R2, OUTER)
        ok = rows(lane < LANES, TURNED) & columns(some, TURNED)
        spot = lane * dy_l_stride + offset(r0, r1, r2, r3, dy_r0_stride, dy_r1_stride, dy_r2_stride, 0, OUTER)
        g = tl.load(dy_tile + rows(spot, TURNED), mask=ok, other=0.0, eviction_policy="evict_first").to(FLOAT)
        v = None
        if not FROZEN or (ACT != 0 and y is None):
            spot = lane * x_l_stride + offset(r0, r1, r2, r3, x_r0_stride, x_r1_stride, x_r2_stride, 0, OUTER)
            v = tl.load(x_tile + rows(spot, TURNED), mask=ok, other=0.0, eviction_policy="evict_first").to(FLOAT)
        z_here = None
        if z is not None:
            spot = lane * z_l_stride + offset(r0, r1, r2, r3, z_r0_stride, z_r1_stride, z_r2_stride, 0, OUTER)
            z_here = tl.load(z_tile + rows(spot, TURNED), mask=ok, other=0.0, eviction_policy="evict_first")
        y_here = None
        if y is not None:
            spot = lane * y_l_stride + offset(r0, r1, r2, r3, y_r0_stride, y_r1_stride, y_r2_stride, 0, OUTER)
            y_here = tl.load(y_tile + rows(spot, TURNED), mask=ok, other=0.0, eviction_policy="evict_first")
        g = _gradient(g, v, center, factor, term, z_here, y_here, parameter, ACT)
        if dz is not None:
            spot = lane * dz_l_stride + offset(r0, r1, r2, r3, dz_r0_stride, dz_r1_stride, dz_r2_stride, 0, OUTER)
            to = dz_tile + rows(spot, TURNED)
            tl.store(to, g.to(dz.dtype.element_ty), mask=ok, eviction_policy="evict_first")
        if FROZEN:
            g = factor * g
        else:
            g = factor * ((g - level) - (v - center) * slope)
        spot = lane * dx_l_stride + offset(r0, r1, r2, r3, dx_r0_stride, dx_r1_stride, dx_r2_stride, 0, OUTER)
        to = dx_tile + rows(spot, TURNED)
        tl.store(to, g.to(dx.dtype.element_ty), mask=ok, eviction_policy="evict_first")


class TiledBwd(TritonEngine):
    name = "batch_norm.tiled_bwd"
    operations = ("batch_norm_bwd", "batch_norm_bwd_sums", "batch_norm_bwd_apply")

    def refusals(self, problem: Problem) -> list[str]:
        r = Refusals()
        r.require_tensors(problem.items, TYPES, elements=True)
        return r

    def configs(self, problem: Problem) -> list[Config]:
        return with_flat(problem, configs(problem, 2))

    def workspace_size(self, problem: Problem, config: Config) -> int:
        if problem.op.name == "batch_norm_bwd_apply":
            return 0
        tiles = Tiles.of(problem, config)
        return (8 if problem["x"].dtype == "f64" else 4) * tiles.view.channels * (2 * tiles.parts + 2) + 32

    def cost(self, problem: Problem, config: Config) -> float:
        tiles = Tiles.of(problem, config)
        launches = {"batch_norm_bwd": 3, "batch_norm_bwd_sums": 2}.get(problem.op.name, 1)
        busy = min(1.0, tiles.blocks * tiles.rows * tiles.chunks / problem.target.processors)
        waste = tiles.chunks * config["BLOCK_P"] / tiles.lanes * tiles.blocks * config["BLOCK_C"] / tiles.view.channels
        if config.get("FLAT", 0):  # the pass that sums is in tiles all the same
            waste = 1.0 if problem.op.name == "batch_norm_bwd_apply" else max(1.0, waste) ** 0.5
        return roofline(problem, flops=0.0, memory_efficiency=0.8 * busy / max(1.0, waste) ** 0.5, launches=launches)

    def launches(self, problem: Problem, config: Config) -> list[Launch]:
        tiles = Tiles.of(problem, config)
        found = []
        if problem.op.name != "batch_norm_bwd_apply":
            found += [_sums(problem, tiles, config), _add(problem, tiles)]
        if problem.op.name != "batch_norm_bwd_sums":
            found.append(_apply(problem, tiles, config))
        return found


def _slices(problem: Problem, tiles: Tiles) -> dict[str, Argument]:
    """Two arrays of parts by channels, and the sums of all parts."""
    kind = statistics_type(problem["x"].dtype)
    half = -(-(8 if kind == "f64" else 4) * tiles.parts * tiles.view.channels // 16) * 16
    return {"totals": Slice(0, kind), "products": Slice(half, kind), "sums": Slice(2 * half, kind)}


def _given(problem: Problem, tiles: Tiles) -> dict[str, Argument]:
    """What both passes over the large tensors read."""
    view = tiles.view
    args: dict[str, Argument] = {"inverse": "inv_variance", **numbers(problem)}
    for role in ("dy", "x", "z", "y", "mean", "scale", "bias"):
        args |= {role: role, **strided(view, role)}
    return args | {"variance": "variance"} | _inverse(problem, tiles)


def _inverse(problem: Problem, tiles: Tiles) -> dict[str, Argument]:
    return strided(tiles.view, "variance" if "variance" in problem.tensors else "inv_variance", "inverse")


def _sums(problem: Problem, tiles: Tiles, config: Config) -> Launch:
    args, constexprs = common(problem, tiles, config)
    slices = _slices(problem, tiles)
    args |= _given(problem, tiles) | {"totals": slices["totals"], "products": slices["products"]}
    args |= {"ROW_PARTS": tiles.row_parts, "CHUNK_PARTS": tiles.chunk_parts}
    constexprs["ACT"] = ACTIVATIONS[problem.epilogue.activation].code
    grid = (tiles.blocks * tiles.parts,)
    return Launch(batch_norm_bwd_sums, grid, args, constexprs, config["num_warps"], config["num_stages"])


def _add(problem: Problem, tiles: Tiles) -> Launch:
    view = tiles.view
    kept = view.kept[::-1]
    args: dict[str, Argument] = {"PARTS": tiles.parts, "C": view.channels, **_slices(problem, tiles)}
    args |= {f"K{i}": kept[i] if i + 1 < len(kept) else None for i in range(3)}
    args |= {"inverse": "inv_variance", "variance": "variance", "epsilon": numbers(problem)["epsilon"]}
    args |= {"dscale": "dscale", "dbias": "dbias", **strided(view, "dscale"), **strided(view, "dbias")}
    args |= _inverse(problem, tiles)
    block_s = min(triton.next_power_of_2(tiles.parts), 64)
    block_c = max(1, min(triton.next_power_of_2(view.channels), 1024 // block_s, 128))
    constexprs = {
        "KEPT": len(kept), "WIDE": max(t.span for _, t in problem.items) > 2**31 - 1,
        "BLOCK_S": block_s, "BLOCK_C": block_c,
    }  # fmt: skip
    return Launch(batch_norm_bwd_add, (-(-view.channels // block_c),), args, constexprs, 4, 1)


def _apply(problem: Problem, tiles: Tiles, config: Config) -> Launch:
    view, op = tiles.view, problem.op
    whole = op.name == "batch_norm_bwd"
    if config.get("FLAT", 0):
        sums: Any = _slices(problem, tiles)["sums"]
        return apply_flat(problem, view, config, sums if whole else None)
    args, constexprs = common(problem, tiles, config)
    args |= _given(problem, tiles)
    kind = statistics_type(problem["x"].dtype)
    args |= {"count": "count", "number": Real(float(view.values), kind)}
    args["sums"] = _slices(problem, tiles)["sums"] if whole else None
    for role in ("dx", "dz", "dscale", "dbias"):
        args |= {role: role, **strided(view, role)}
    if whole:  # the sums are in the workspace, unrounded
        args |= {name: None for name in args if name.startswith(("dscale", "dbias"))}
    args |= {"ROW_TRIPS": tiles.row_trips, "CHUNK_TRIPS": tiles.chunk_trips}
    frozen: Any = getattr(op, "frozen", False)
    constexprs |= {"ACT": ACTIVATIONS[problem.epilogue.activation].code, "FROZEN": frozen}
    return Launch(batch_norm_bwd_apply, (tiles.grid,), args, constexprs, config["num_warps"], config["num_stages"])
