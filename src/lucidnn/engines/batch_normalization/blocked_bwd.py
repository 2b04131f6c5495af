"""``batch_norm.blocked_bwd``: backward normalization on a CPU in any layout, in Numba.

Method: two sums a channel, of g = dy act'(...) and of g (x - mean), then dx = scale r (g - a - (x - mean) b), a and b
by the sums. Runs are summed in the type of statistics and runs' sums in float64. The slope of the activation is told
from y where that is given, else from its input, computed again from x, scale, bias and z. Where values of a channel lie
side by side and one thread has them all, dx is made at once, while x and dy are in the cache.

Channels and values are dealt out in fixed parts, whose sums are added in order: the same bits in every run. Cost: dy, x
(and z or y) read twice, once where channels fit the cache, and dx (and dz) written.
"""

import math

import numpy as np

from ...core.engine import Config, Engine, Refusals, Run
from ...core.heuristics import roofline
from ...core.problem import Problem
from ...ops.batch_normalization import TYPES, statistics_type
from .. import _numba as nb
from .._numba import vector as nv
from .._numba.channels import (
    BLOCK,
    BLOCKS,
    C_PARTS,
    CHANNELS,
    CODE,
    INNER,
    LANES,
    LAST,
    LEVEL,
    MEANS,
    NATIVE,
    R_PARTS,
    REPEAT,
    ROWS,
    SLOPE,
    SLOT,
    SQUARES,
    VALUES,
    activate_grad,
    along,
    block_of,
    channel,
    get,
    opened,
    prepared,
    put,
    read,
    target,
    write,
)
from .._numba.stack import stack
from . import _lanes as vectors
from ._loops import Loops

PIXELS = 64  # whose sums are kept in the type of statistics, where channels lie innermost
DY, X, Z, Y, DX, DZ, SCALE, SHIFTED, MEAN, INVERSE, VARIANCE, DSCALE, DBIAS, COUNT = range(14)
ROLES = (
    "dy", "x", "z", "y", "dx", "dz", "scale", "bias", "mean", "inv_variance", "variance", "dscale", "dbias", "count",
)  # fmt: skip
WHOLE, SUMS, APPLY, FROZEN = 0, 1, 2, 3
MODES = {"batch_norm_bwd": WHOLE, "batch_norm_bwd_sums": SUMS, "batch_norm_bwd_apply": APPLY}


@nb.jitable
def _given(t, a, epsilon, c):
    """A channel's mean and r, the factor and the term of its values in the forward direction."""
    co, ci = c // t[INNER], c % t[INNER]
    mean = get(t[SLOT + 3 * MEAN], a[MEAN], channel(t, MEAN, co, ci))
    if t[SLOT + 3 * INVERSE] >= 0:
        inverse = get(t[SLOT + 3 * INVERSE], a[INVERSE], channel(t, INVERSE, co, ci))
    else:
        inverse = 1.0 / math.sqrt(get(t[SLOT + 3 * VARIANCE], a[VARIANCE], channel(t, VARIANCE, co, ci)) + epsilon)
    factor, term = inverse, 0.0
    if t[SLOT + 3 * SCALE] >= 0:
        factor *= get(t[SLOT + 3 * SCALE], a[SCALE], channel(t, SCALE, co, ci))
    if t[SLOT + 3 * SHIFTED] >= 0:
        term = get(t[SLOT + 3 * SHIFTED], a[SHIFTED], channel(t, SHIFTED, co, ci))
    return mean, inverse, factor, term


@nb.jitable
def _taken(t, a, mode, c, inverse, total, product):
    """Writes a channel's sums, or reads them; gives what is subtracted from g, and how much for each x - mean."""
    co, ci = c // t[INNER], c % t[INNER]
    count = float(t[VALUES])
    if mode == APPLY:
        total = get(t[SLOT + 3 * DBIAS], a[DBIAS], channel(t, DBIAS, co, ci))
        product = get(t[SLOT + 3 * DSCALE], a[DSCALE], channel(t, DSCALE, co, ci))
        count = get(t[SLOT + 3 * COUNT], a[COUNT], 0)
    else:
        product *= inverse
        put(t[SLOT + 3 * DBIAS], a[DBIAS], channel(t, DBIAS, co, ci), total)
        put(t[SLOT + 3 * DSCALE], a[DSCALE], channel(t, DSCALE, co, ci), product)
    return total / count, product * inverse / count


@nb.jitable
def _channel_gradient(t, a, parameter, co, ci, row, lane, count, mean, factor, term, v, buffer, u, like):
    """Where a run's g is: in dy, or in `u`."""
    native, code = t[NATIVE], t[CODE]
    at = channel(t, DY, co, ci) + along(t, DY, row, lane)
    dy = opened(t[SLOT + 3 * DY], native, a[DY], at, t[SLOT + 3 * DY + 1], count, buffer, like)
    if code == 0:
        return dy
    if t[SLOT + 3 * Y] >= 0:
        read(t[SLOT + 3 * Y], a[Y], channel(t, Y, co, ci) + along(t, Y, row, lane), t[SLOT + 3 * Y + 1], count, u)
    elif t[SLOT + 3 * Z] >= 0:
        read(t[SLOT + 3 * Z], a[Z], channel(t, Z, co, ci) + along(t, Z, row, lane), t[SLOT + 3 * Z + 1], count, u)
        for i in range(count):
            u[i] += (v[i] - mean) * factor + term
    else:
        for i in range(count):
            u[i] = (v[i] - mean) * factor + term
    activate_grad(code, parameter, count, u, dy)
    return u


@nb.jitable
def _sum_channel(t, a, parameter, c, first, last, mean, factor, term, b0, b1, b2, like):
    """The two sums of one channel over some rows; float64."""
    co, ci = c // t[INNER], c % t[INNER]
    m, f, b = nb.cast(mean, like), nb.cast(factor, like), nb.cast(term, like)
    x_at = channel(t, X, co, ci)
    total, product = 0.0, 0.0
    for r in range(first, last):
        for lane in range(0, t[LANES], BLOCK):
            count = min(t[LANES] - lane, BLOCK)
            at = x_at + along(t, X, r, lane)
            v = opened(t[SLOT + 3 * X], t[NATIVE], a[X], at, t[SLOT + 3 * X + 1], count, b0, like)
            g = _channel_gradient(t, a, parameter, co, ci, r, lane, count, m, f, b, v, b1, b2, like)
            s0, s1 = nb.accumulator(like), nb.accumulator(like)
            for i in range(count):
                s0 += g[i]
                s1 += g[i] * (v[i] - m)
            total += s0
            product += s1
    return total, product


@nb.jitable
def _apply_channel(t, a, parameter, frozen, c, first, last, mean, factor, term, level, slope, b0, b1, b2, b3, like):
    """dx, and dz, of one channel in some rows."""
    co, ci = c // t[INNER], c % t[INNER]
    m, f, b = nb.cast(mean, like), nb.cast(factor, like), nb.cast(term, like)
    s0, s1 = nb.cast(level, like), nb.cast(slope, like)
    x_at, dx_at, dz_at = channel(t, X, co, ci), channel(t, DX, co, ci), channel(t, DZ, co, ci)
    kind, step, native = t[SLOT + 3 * DX], t[SLOT + 3 * DX + 1], t[NATIVE]
    for r in range(first, last):
        for lane in range(0, t[LANES], BLOCK):
            count = min(t[LANES] - lane, BLOCK)
            at = x_at + along(t, X, r, lane)
            v = opened(t[SLOT + 3 * X], native, a[X], at, t[SLOT + 3 * X + 1], count, b0, like)
            g = _channel_gradient(t, a, parameter, co, ci, r, lane, count, m, f, b, v, b1, b2, like)
            if t[SLOT + 3 * DZ] >= 0:
                write(t[SLOT + 3 * DZ], a[DZ], dz_at + along(t, DZ, r, lane), t[SLOT + 3 * DZ + 1], count, g)
            at = dx_at + along(t, DX, r, lane)
            w = target(kind, native, a[DX], at, step, b3, like)
            if frozen:
                for i in range(count):
                    w[i] = f * g[i]
            else:
                for i in range(count):
                    w[i] = f * ((g[i] - s0) - (v[i] - m) * s1)
            if kind != native or step != 1:
                write(kind, a[DX], at, step, count, w)


@nb.jitable
def _block_gradient(t, a, parameter, co, ci, row, lane, count, m, f, b, v, buffer, u, like):
    """As `_channel_gradient` for one pixel of a block of channels."""
    native, code = t[NATIVE], t[CODE]
    at = channel(t, DY, co, ci) + along(t, DY, row, lane)
    dy = opened(t[SLOT + 3 * DY], native, a[DY], at, t[SLOT + 3 * DY + 2], count, buffer, like)
    if code == 0:
        return dy
    if t[SLOT + 3 * Y] >= 0:
        read(t[SLOT + 3 * Y], a[Y], channel(t, Y, co, ci) + along(t, Y, row, lane), t[SLOT + 3 * Y + 2], count, u)
    elif t[SLOT + 3 * Z] >= 0:
        read(t[SLOT + 3 * Z], a[Z], channel(t, Z, co, ci) + along(t, Z, row, lane), t[SLOT + 3 * Z + 2], count, u)
        for i in range(count):
            u[i] += (v[i] - m[i]) * f[i] + b[i]
    else:
        for i in range(count):
            u[i] = (v[i] - m[i]) * f[i] + b[i]
    activate_grad(code, parameter, count, u, dy)
    return u


@nb.jitable
def _straight(t, slot, step):
    """Whether a tensor, if there is one, is used where it is; `step`: 1 along values, 2 along channels."""
    return t[SLOT + 3 * slot] < 0 or (t[SLOT + 3 * slot] == t[NATIVE] and t[SLOT + 3 * slot + step] == 1)


@nb.jitable
def _gradient_lanes(dy, y, dy_at, y_at, relu, many):
    """A vector of g, after a ReLU or nothing; as many lanes."""
    g = vectors.read(dy, dy_at, many)
    if relu:
        g = vectors.let_through(vectors.read(y, y_at, many), g)
    return g


@nb.jitable
def _keep(totals, products, s0, s1, count, like):
    """Adds the sums of some pixels to those in float64, and begins anew."""
    for i in range(count):
        totals[i] += s0[i]
        products[i] += s1[i]
        s0[i], s1[i] = nb.accumulator(like), nb.accumulator(like)


@nb.jitable
def _sum_pixel(dy, x, y, dy_at, x_at, y_at, count, m, s0, s1, relu):
    """Adds one pixel of a block of channels to their sums."""
    for i in range(0, count, nv.LANES):
        many = min(count - i, nv.LANES)
        g = _gradient_lanes(dy, y, dy_at + i, y_at + i, relu, many)
        v = vectors.less(vectors.read(x, x_at + i, many), nv.read_all(m, i))
        nv.write(s0, i, 1, nv.add(nv.read_all(s0, i), g), nv.LANES)
        nv.write(s1, i, 1, vectors.scaled(v, g, nv.read_all(s1, i)), nv.LANES)


@nb.jitable
def _apply_pixel(dy, x, y, dx, dz, dy_at, x_at, y_at, dx_at, dz_at, count, m, f, s0, s1, relu, frozen, both):
    """dx, and dz, of one pixel of a block of channels."""
    for i in range(0, count, nv.LANES):
        many = min(count - i, nv.LANES)
        g = _gradient_lanes(dy, y, dy_at + i, y_at + i, relu, many)
        if both:
            nv.write(dz, dz_at + i, 1, g, many)
        if not frozen:
            v = vectors.less(vectors.read(x, x_at + i, many), nv.read_all(m, i))
            g = vectors.without(vectors.less(g, nv.read_all(s0, i)), v, nv.read_all(s1, i))
        nv.write(dx, dx_at + i, 1, vectors.times(nv.read_all(f, i), g), many)


@nb.jitable
def _walk_block(t, a, ws, parameter, mode, applies, block, first, last, totals, products, b0, b1, b2, b3, like):
    """Some pixels of a block of channels: their sums, or dx and dz."""
    m, f, b = stack(BLOCK, like), stack(BLOCK, like), stack(BLOCK, like)
    s0, s1 = stack(BLOCK, like), stack(BLOCK, like)
    co, ci, count = block_of(t, block)
    means, factors, terms = prepared(t, ws)
    levels, slopes = nb.pointer(ws + t[LEVEL], 0.0), nb.pointer(ws + t[SLOPE], 0.0)
    for i in range(count):
        c = co * t[INNER] + (ci + i) % t[INNER]
        m[i], f[i], b[i] = nb.cast(means[c], like), nb.cast(factors[c], like), nb.cast(terms[c], like)
        if applies:
            s0[i], s1[i] = nb.cast(levels[c], like), nb.cast(slopes[c], like)
        else:
            s0[i], s1[i] = nb.accumulator(like), nb.accumulator(like)
            totals[i], products[i] = 0.0, 0.0
    x_at, dx_at, dz_at = channel(t, X, co, ci), channel(t, DX, co, ci), channel(t, DZ, co, ci)
    kind, step, native = t[SLOT + 3 * DX], t[SLOT + 3 * DX + 2], t[NATIVE]
    row, lane = first // t[LANES], first % t[LANES]
    straight = _straight(t, DY, 2) and _straight(t, X, 2) and _straight(t, DX, 2) and _straight(t, DZ, 2)
    relu = t[CODE] == 1
    straight = straight and (t[CODE] == 0 or (relu and t[SLOT + 3 * Y] >= 0 and _straight(t, Y, 2)))
    dys, xs, ys = nb.pointer(a[DY], like), nb.pointer(a[X], like), nb.pointer(a[Y], like)
    dxs, dzs = nb.pointer(a[DX], like), nb.pointer(a[DZ], like)
    dy_at, y_at = channel(t, DY, co, ci), channel(t, Y, co, ci)
    for i in range(count, BLOCK if straight else 0):  # lanes of the last vector that are no channels
        m[i], f[i], s0[i], s1[i] = (
            nb.accumulator(like),
            nb.accumulator(like),
            nb.accumulator(like),
            nb.accumulator(like),
        )
    for pixel in range(first, last):
        if straight:
            dy_row, x_row = dy_at + along(t, DY, row, lane), x_at + along(t, X, row, lane)
            y_row = y_at + along(t, Y, row, lane)
            if applies:
                dx_row, dz_row = dx_at + along(t, DX, row, lane), dz_at + along(t, DZ, row, lane)
                frozen, both = mode == FROZEN, t[SLOT + 3 * DZ] >= 0
                _apply_pixel(
                    dys, xs, ys, dxs, dzs, dy_row, x_row, y_row, dx_row, dz_row, count, m, f, s0, s1, relu, frozen, both
                )  # fmt: skip
            else:
                _sum_pixel(dys, xs, ys, dy_row, x_row, y_row, count, m, s0, s1, relu)
                if (pixel - first) % PIXELS == PIXELS - 1 or pixel == last - 1:
                    _keep(totals, products, s0, s1, count, like)
            lane += 1
            if lane == t[LANES]:
                lane, row = 0, row + 1
            continue
        at = x_at + along(t, X, row, lane)
        v = opened(t[SLOT + 3 * X], native, a[X], at, t[SLOT + 3 * X + 2], count, b0, like)
        g = _block_gradient(t, a, parameter, co, ci, row, lane, count, m, f, b, v, b1, b2, like)
        if not applies:
            for i in range(count):
                s0[i] += g[i]
                s1[i] += g[i] * (v[i] - m[i])
            if (pixel - first) % PIXELS == PIXELS - 1 or pixel == last - 1:
                _keep(totals, products, s0, s1, count, like)
        else:
            if t[SLOT + 3 * DZ] >= 0:
                write(t[SLOT + 3 * DZ], a[DZ], dz_at + along(t, DZ, row, lane), t[SLOT + 3 * DZ + 2], count, g)
            at = dx_at + along(t, DX, row, lane)
            w = target(kind, native, a[DX], at, step, b3, like)
            if mode == FROZEN:
                for i in range(count):
                    w[i] = f[i] * g[i]
            else:
                for i in range(count):
                    w[i] = f[i] * ((g[i] - s0[i]) - (v[i] - m[i]) * s1[i])
            if kind != native or step != 1:
                write(kind, a[DX], at, step, count, w)
        lane += 1
        if lane == t[LANES]:
            lane, row = 0, row + 1


@nb.kernel
def _whole_part(part, parts, ws, table, numbers, mode, like):
    """Channels whose values all belong to this part: sums, and at once dx."""
    t, a, numbers = nb.pointer(table, 0), nb.pointer(ws, 0), nb.pointer(numbers, 0.0)
    b0, b1, b2, b3 = stack(BLOCK, like), stack(BLOCK, like), stack(BLOCK, like), stack(BLOCK, like)
    p = nb.cast(numbers[1], like)
    total, product = 0.0, 0.0
    for c in range(t[CHANNELS] * part // parts, t[CHANNELS] * (part + 1) // parts):
        mean, inverse, factor, term = _given(t, a, numbers[0], c)
        if mode != APPLY:
            total, product = _sum_channel(t, a, p, c, 0, t[ROWS], mean, factor, term, b0, b1, b2, like)
        level, slope = _taken(t, a, mode, c, inverse, total, product)
        if mode != SUMS:
            _apply_channel(
                t, a, p, mode == FROZEN, c, 0, t[ROWS], mean, factor, term, level, slope, b0, b1, b2, b3, like
            )


@nb.kernel
def _prepare_part(part, parts, ws, table, numbers):
    """What kernels need of a share of the channels, side by side in float64."""
    t, a, numbers = nb.pointer(table, 0), nb.pointer(ws, 0), nb.pointer(numbers, 0.0)
    means, factors, terms = prepared(t, ws)
    for c in range(t[CHANNELS] * part // parts, t[CHANNELS] * (part + 1) // parts):
        means[c], _, factors[c], terms[c] = _given(t, a, numbers[0], c)


@nb.kernel
def _walk_part(part, parts, ws, table, numbers, mode, applies, like):
    """Sums, or dx and dz, of a share of the channels over a share of the values; what was read last, first taken."""
    t, a, numbers = nb.pointer(table, 0), nb.pointer(ws, 0), nb.pointer(numbers, 0.0)
    if applies:
        part = t[R_PARTS] * t[C_PARTS] - 1 - part
    totals, products = nb.pointer(ws + t[MEANS], 0.0), nb.pointer(ws + t[SQUARES], 0.0)
    means, factors, terms = prepared(t, ws)
    levels, slopes = nb.pointer(ws + t[LEVEL], 0.0), nb.pointer(ws + t[SLOPE], 0.0)
    b0, b1, b2, b3 = stack(BLOCK, like), stack(BLOCK, like), stack(BLOCK, like), stack(BLOCK, like)
    own_totals, own_products = stack(BLOCK, 0.0), stack(BLOCK, 0.0)
    p = nb.cast(numbers[1], like)
    c_part, r_part = part // t[R_PARTS], part % t[R_PARTS]
    out = r_part * t[REPEAT] * t[CHANNELS]
    if t[LAST]:
        pixels = t[ROWS] * t[LANES]
        first, last = pixels * r_part // t[R_PARTS], pixels * (r_part + 1) // t[R_PARTS]
        for block in range(t[BLOCKS] * c_part // t[C_PARTS], t[BLOCKS] * (c_part + 1) // t[C_PARTS]):
            _walk_block(t, a, ws, p, mode, applies, block, first, last, own_totals, own_products, b0, b1, b2, b3, like)
            if not applies:
                co, ci, count = block_of(t, block)
                for i in range(count):
                    totals[out + co * t[INNER] + ci + i] = own_totals[i]
                    products[out + co * t[INNER] + ci + i] = own_products[i]
    else:
        first, last = t[ROWS] * r_part // t[R_PARTS], t[ROWS] * (r_part + 1) // t[R_PARTS]
        for c in range(t[CHANNELS] * c_part // t[C_PARTS], t[CHANNELS] * (c_part + 1) // t[C_PARTS]):
            m, f, b = means[c], factors[c], terms[c]
            if applies:
                s0, s1 = levels[c], slopes[c]
                _apply_channel(t, a, p, mode == FROZEN, c, first, last, m, f, b, s0, s1, b0, b1, b2, b3, like)
            else:
                totals[out + c], products[out + c] = _sum_channel(t, a, p, c, first, last, m, f, b, b0, b1, b2, like)


@nb.kernel
def _finish_part(part, parts, ws, table, numbers, pieces, mode):
    """Add the sums of all parts for a share of the channels, in order."""
    t, a, numbers = nb.pointer(table, 0), nb.pointer(ws, 0), nb.pointer(numbers, 0.0)
    totals, products = nb.pointer(ws + t[MEANS], 0.0), nb.pointer(ws + t[SQUARES], 0.0)
    levels, slopes = nb.pointer(ws + t[LEVEL], 0.0), nb.pointer(ws + t[SLOPE], 0.0)
    for c in range(t[CHANNELS] * part // parts, t[CHANNELS] * (part + 1) // parts):
        total, product = 0.0, 0.0
        if mode != APPLY:
            for p in range(pieces):
                total += totals[p * t[CHANNELS] + c]
                product += products[p * t[CHANNELS] + c]
        _, inverse, _, _ = _given(t, a, numbers[0], c)
        levels[c], slopes[c] = _taken(t, a, mode, c, inverse, total, product)


@nb.kernel
def _run(
    parts, threads, channel_parts, pieces, whole, mode, ws, table, numbers,
    dy, x, z, y, dx, dz, scale, bias, mean, inverse, variance, dscale, dbias, count, like,
):  # fmt: skip
    a = nb.pointer(ws, 0)
    a[DY], a[X], a[Z], a[Y], a[DX], a[DZ], a[SCALE] = dy, x, z, y, dx, dz, scale
    a[SHIFTED], a[MEAN], a[INVERSE], a[VARIANCE] = bias, mean, inverse, variance
    a[DSCALE], a[DBIAS], a[COUNT] = dscale, dbias, count
    if whole:
        nb.launch(_whole_part, parts, threads, (ws, table, numbers, mode, like))
    else:
        nb.launch(_prepare_part, channel_parts, threads, (ws, table, numbers))
        if mode != APPLY:
            nb.launch(_walk_part, parts, threads, (ws, table, numbers, mode, False, like))
        nb.launch(_finish_part, channel_parts, threads, (ws, table, numbers, pieces, mode))
        if mode != SUMS:
            nb.launch(_walk_part, parts, threads, (ws, table, numbers, mode, True, like))


class BlockedBwd(Engine):
    name = "batch_norm.blocked_bwd"
    operations = tuple(MODES)
    targets = ("cpu",)
    notes = frozenset({"runtime_compilation"})

    def refusals(self, problem: Problem) -> list[str]:
        r = Refusals()
        r.require_tensors(problem.items, TYPES, elements=True)
        return r

    def workspace_size(self, problem: Problem, config: Config) -> int:
        return Loops(problem, ROLES).workspace

    def cost(self, problem: Problem, config: Config) -> float:
        return roofline(problem, flops=0.0, launches=2)

    def build(self, problem: Problem, config: Config) -> Run:
        loops = Loops(problem, ROLES)
        op = problem.op
        like = nb.token(statistics_type(problem["x"].dtype))
        constants = (op.epsilon, problem.epilogue.parameter)  # type: ignore[attr-defined]
        numbers = np.array(constants, dtype=np.float64)
        table, constants_at = loops.table.ctypes.data, numbers.ctypes.data
        mode = FROZEN if getattr(op, "frozen", False) else MODES[op.name]
        pieces, parts, channel_parts = len(loops.counts), loops.parts, loops.channel_parts
        whole = not loops.last and not loops.split
        threads = nb.threads if parts > 1 else lambda: 1
        names = tuple(problem.tensors)
        order = [names.index(role) if role in names else -1 for role in ROLES]
        scratch = np.zeros(256, dtype=np.uint8)  # compiles, or loads from disk; no part is run
        _run(0, 1, 0, 0, True, mode, scratch.ctypes.data, table, constants_at, *[0] * len(ROLES), like)

        def run(tensors, workspace, _keep=(loops.table, numbers)):
            space = (workspace.data_ptr() + 63) & -64
            addresses = [tensors[i].data_ptr() if i >= 0 else 0 for i in order]
            _run(parts, threads(), channel_parts, pieces, whole, mode, space, table, constants_at, *addresses, like)

        return run
