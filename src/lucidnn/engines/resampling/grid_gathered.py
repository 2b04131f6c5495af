"""``resample.grid_gathered``: sampling by a grid on a CPU, every mode, stride and type, both directions, in Numba.

Method: for a block of output points the neighbours' places and weights are worked out once, in float64, and used for
all channels (`_grid_tables`). Forward gathers: with points as lanes, two neighbours along W in one access, or with
channels as lanes where they lie side by side. The gradient of x is deterministic: sixteen channels of an image belong
to one thread, which adds up the points in their order in a buffer of float32 (float64 for float64) that has these
channels side by side; blocks of dy and of the result are transposed on the way. The gradient of the grid sums over
channels, tap by tap, then follows the slopes of the weights.
Cost: forward half an access a tap, channel and point, mostly to the first- or second-level cache; the gradient of x
two accesses a tap and point for sixteen channels, and as much memory as sixteen channels of an image for a thread.
"""

import itertools
import math
from typing import Any

import numpy as np
from numba.extending import register_jitable

from ...core.engine import Config, Engine, Refusals, Run
from ...core.heuristics import roofline
from ...core.problem import Problem
from ...ops.convolution import five_strides, three
from ...ops.grid_sample import MODES, PADDING_MODES, TAPS
from .. import _numba as nb
from .._numba import vector as nv
from .._numba.stack import stack
from . import _grid_tables as tables
from ._grid_tables import BLOCK, DGRID, DX, FLAT, GRID, IN, NDIM, PAIRED, ROW, TAPS_OF, C, N, X, Y
from ._lanes import only, plus_product, plus_times, read_neighbours, read_places, sums_of_pairs, total, turn

TYPES = ("f64", "f32", "f16", "bf16")
PARTS = 64
LANES = nv.LANES
MOST, TABLE, PAIRS, ALONG = 16 * BLOCK, 3 * ROW, 8 * BLOCK, 3 * BLOCK  # most combinations of taps; other tables
SQUARE = LANES * LANES


@register_jitable
def _channels(t, dy, at, many, some, square, zero):
    """Sixteen points of dy as rows of `square`, their channels side by side: `some` points, `many` channels."""
    step, c_step = t[Y + 4], t[Y + 1]
    if c_step == 1:
        for i in range(some):
            nv.write(square, i * LANES, 1, nv.read_some(dy, at + i * step, 0, many), LANES)
    else:
        for c in range(many):
            nv.write(square, c * LANES, 1, nv.read(dy, at + c * c_step, step, 0, some), LANES)
        for c in range(many, LANES):
            nv.write(square, c * LANES, 1, nv.fill(zero), LANES)
        turn(square, 0)


@register_jitable
def _finish(t, sums, dx, at, many):
    """Write the gradient of `many` channels, the first at dx[at], from sums that have them side by side."""
    d, h, w = t[IN], t[IN + 1], t[IN + 2]
    step, c_step = t[DX + 4], t[DX + 1]
    if t[FLAT] != 0 and c_step == 1:
        for place in range(d * h * w):
            nv.write(dx, at + place * step, 1, nv.read_all(sums, place * LANES), many)
    elif t[FLAT] != 0:
        for place in range(0, d * h * w, LANES):
            turn(sums, place * LANES)
            some = min(LANES, d * h * w - place)
            for c in range(many):
                nv.write(dx, at + c * c_step + place * step, step, nv.read_all(sums, (place + c) * LANES), some)
    else:
        for place in range(d * h * w):
            k, rest = place % w, place // w
            to = at + rest // h * t[DX + 2] + rest % h * t[DX + 3] + k * step
            for c in range(many):
                nb.store(dx, to + c * c_step, sums[place * LANES + c])


@nb.kernel
def _forward_part(part, parts, x_address, grid_address, y_address, table, like, bits):
    t, x, grid = nb.pointer(table, np.int64(0)), nb.pointer(x_address, like), nb.pointer(grid_address, like)
    y, zero = nb.pointer(y_address, like), nb.accumulator(like)
    places, weights, slopes = stack(TABLE, np.int64(0)), stack(TABLE, 0.0), stack(TABLE, 0.0)
    found, factors, live = stack(MOST, np.int64(0)), stack(MOST, zero), stack(MOST, bits)
    tables.no_depth(places, weights, slopes)
    rows, taps = t[TAPS_OF] * t[TAPS_OF + 1], t[TAPS_OF] * t[TAPS_OF + 1] * t[TAPS_OF + 2]
    lined = t[X + 1] == 1 and t[C] >= 8
    for unit in range(tables.units(t) * part // parts, tables.units(t) * (part + 1) // parts):
        n, o, p, q, count = tables.block(t, unit)
        at_grid = n * t[GRID] + o * t[GRID + 1] + p * t[GRID + 2] + q * t[GRID + 3]
        at_y = n * t[Y] + o * t[Y + 2] + p * t[Y + 3] + q * t[Y + 4]
        tables.neighbours(t, grid, at_grid, count, places, weights, slopes)
        if t[PAIRED] != 0:
            tables.paired(t, count, places, weights, slopes)
            tables.pairs(t, t[X + 2], t[X + 3], count, places, weights, found, factors, live, zero)
            for c in range(t[C]):
                base, to = n * t[X] + c * t[X + 1], at_y + c * t[Y + 1]
                for i in range(0, count, LANES):
                    low, high = nv.fill(zero), nv.fill(zero)
                    for row in range(0, rows * BLOCK, BLOCK):
                        k = row + i
                        v = only(read_neighbours(x, base, found, k), nv.read_all(live, 2 * k))
                        low = plus_product(low, v, nv.read_all(factors, 2 * k))
                        k += LANES // 2
                        v = only(read_neighbours(x, base, found, k), nv.read_all(live, 2 * k))
                        high = plus_product(high, v, nv.read_all(factors, 2 * k))
                    nv.write(y, to + i * t[Y + 4], t[Y + 4], sums_of_pairs(low, high), min(LANES, count - i))
            continue
        tables.combinations(t, t[X + 2], t[X + 3], t[X + 4], count, places, weights, found, factors, zero)
        if lined:
            for i in range(count):
                for c in range(0, t[C], LANES):
                    many = min(LANES, t[C] - c)
                    v = nv.fill(zero)
                    for tap in range(i, taps * BLOCK, BLOCK):
                        if found[tap] >= 0:
                            u = nv.read_some(x, n * t[X] + found[tap] + c, 0, many)
                            v = plus_times(v, u, factors[tap])
                    nv.write(y, at_y + i * t[Y + 4] + c * t[Y + 1], t[Y + 1], v, many)
        else:
            tables.safe(t, count, found, live)
            for c in range(t[C]):
                base, to = n * t[X] + c * t[X + 1], at_y + c * t[Y + 1]
                for i in range(0, count, LANES):
                    v = nv.fill(zero)
                    for tap in range(i, taps * BLOCK, BLOCK):
                        u = only(read_places(x, base, found, tap), nv.read_all(live, tap))
                        v = plus_product(v, u, nv.read_all(factors, tap))
                    nv.write(y, to + i * t[Y + 4], t[Y + 4], v, min(LANES, count - i))


@nb.kernel
def _image_part(part, parts, dy_address, grid_address, dx_address, table, like):
    t, dy, grid = nb.pointer(table, np.int64(0)), nb.pointer(dy_address, like), nb.pointer(grid_address, like)
    dx, zero = nb.pointer(dx_address, like), nb.accumulator(like)
    places, weights, slopes = stack(TABLE, np.int64(0)), stack(TABLE, 0.0), stack(TABLE, 0.0)
    found, factors, square = stack(MOST, np.int64(0)), stack(MOST, zero), stack(SQUARE, zero)
    tables.no_depth(places, weights, slopes)
    taps = t[TAPS_OF] * t[TAPS_OF + 1] * t[TAPS_OF + 2]
    d, h, w = t[IN], t[IN + 1], t[IN + 2]
    groups, blocks = (t[C] + LANES - 1) // LANES, tables.units(t) // max(t[N], 1)
    begin, end = t[N] * groups * part // parts, t[N] * groups * (part + 1) // parts
    if begin == end:
        return
    memory = np.full((d * h * w + LANES) * LANES, zero)
    sums = nb.pointer(memory.ctypes.data, zero)
    for unit in range(begin, end):
        n, first = unit // groups, unit % groups * LANES
        many = min(LANES, t[C] - first)
        for i in range(0, d * h * w * LANES, LANES):
            nv.write(sums, i, 1, nv.fill(zero), LANES)
        for one in range(n * blocks, (n + 1) * blocks):
            _, o, p, q, count = tables.block(t, one)
            at_grid = n * t[GRID] + o * t[GRID + 1] + p * t[GRID + 2] + q * t[GRID + 3]
            at_y = n * t[Y] + first * t[Y + 1] + o * t[Y + 2] + p * t[Y + 3] + q * t[Y + 4]
            tables.neighbours(t, grid, at_grid, count, places, weights, slopes)
            tables.combinations(t, h * w, w, 1, count, places, weights, found, factors, zero)
            for start in range(0, count, LANES):
                some = min(LANES, count - start)
                _channels(t, dy, at_y + start * t[Y + 4], many, some, square, zero)
                for i in range(some):
                    v = nv.read_all(square, i * LANES)
                    for tap in range(start + i, taps * BLOCK, BLOCK):
                        if found[tap] >= 0:
                            at = found[tap] * LANES
                            nv.write(sums, at, 1, plus_times(nv.read_all(sums, at), v, factors[tap]), LANES)
        _finish(t, sums, dx, n * t[DX] + first * t[DX + 1], many)
    memory[0] = zero  # it lives until here


@nb.kernel
def _places_part(part, parts, dy_address, x_address, grid_address, dgrid_address, table, like, bits):
    t, dy, x = nb.pointer(table, np.int64(0)), nb.pointer(dy_address, like), nb.pointer(x_address, like)
    grid, dgrid = nb.pointer(grid_address, like), nb.pointer(dgrid_address, like)
    zero = nb.accumulator(like)
    places, weights, slopes = stack(TABLE, np.int64(0)), stack(TABLE, 0.0), stack(TABLE, 0.0)
    found, factors, live = stack(MOST, np.int64(0)), stack(MOST, zero), stack(MOST, bits)
    dots, both, along = stack(MOST, zero), stack(PAIRS, zero), stack(ALONG, 0.0)
    tables.no_depth(places, weights, slopes)
    rows, taps = t[TAPS_OF] * t[TAPS_OF + 1], t[TAPS_OF] * t[TAPS_OF + 1] * t[TAPS_OF + 2]
    lined = t[X + 1] == 1 and t[Y + 1] == 1 and t[C] >= 8
    for unit in range(tables.units(t) * part // parts, tables.units(t) * (part + 1) // parts):
        n, o, p, q, count = tables.block(t, unit)
        at_grid = n * t[GRID] + o * t[GRID + 1] + p * t[GRID + 2] + q * t[GRID + 3]
        at_y, step = n * t[Y] + o * t[Y + 2] + p * t[Y + 3] + q * t[Y + 4], t[Y + 4]
        tables.neighbours(t, grid, at_grid, count, places, weights, slopes)
        if t[PAIRED] != 0:
            tables.paired(t, count, places, weights, slopes)
            tables.pairs(t, t[X + 2], t[X + 3], count, places, weights, found, factors, live, zero)
            for i in range(2 * rows * BLOCK):
                both[i] = zero
            for c in range(t[C]):
                base, at = n * t[X] + c * t[X + 1], at_y + c * t[Y + 1]
                for i in range(0, count, LANES):
                    v = nv.read(dy, at + i * step, step, 0, min(LANES, count - i))
                    low, high = nv.lower_half(v, v), nv.upper_half(v, v)
                    for row in range(0, rows * BLOCK, BLOCK):
                        k = row + i
                        v = plus_product(nv.read_all(both, 2 * k), low, read_neighbours(x, base, found, k))
                        nv.write(both, 2 * k, 1, v, LANES)
                        k += LANES // 2
                        v = plus_product(nv.read_all(both, 2 * k), high, read_neighbours(x, base, found, k))
                        nv.write(both, 2 * k, 1, v, LANES)
            for row in range(0, rows * BLOCK, BLOCK):
                for i in range(count):
                    left, right = both[2 * (row + i)], both[2 * (row + i) + 1]
                    dots[2 * row + i] = left if live[2 * (row + i)] != 0 else zero
                    dots[2 * row + BLOCK + i] = right if live[2 * (row + i) + 1] != 0 else zero
        else:
            tables.combinations(t, t[X + 2], t[X + 3], t[X + 4], count, places, weights, found, factors, zero)
            for i in range(taps * BLOCK):
                dots[i] = zero
            if lined:
                for i in range(count):
                    for tap in range(i, taps * BLOCK, BLOCK):
                        if found[tap] >= 0:
                            v = nv.fill(zero)
                            for c in range(0, t[C], LANES):
                                many = min(LANES, t[C] - c)
                                u = nv.read_some(x, n * t[X] + found[tap] + c, 0, many)
                                v = plus_product(v, u, nv.read_some(dy, at_y + i * step + c, 0, many))
                            dots[tap] = total(v)
            else:
                tables.safe(t, count, found, live)
                for c in range(t[C]):
                    base, at = n * t[X] + c * t[X + 1], at_y + c * t[Y + 1]
                    for i in range(0, count, LANES):
                        v = nv.read(dy, at + i * step, step, 0, min(LANES, count - i))
                        for tap in range(i, taps * BLOCK, BLOCK):
                            u = only(read_places(x, base, found, tap), nv.read_all(live, tap))
                            nv.write(dots, tap, 1, plus_product(nv.read_all(dots, tap), u, v), LANES)
        tables.follow(t, count, weights, slopes, dots, along)
        to = n * t[DGRID] + o * t[DGRID + 1] + p * t[DGRID + 2] + q * t[DGRID + 3]
        for axis in range(t[NDIM]):
            for i in range(count):
                v = nb.cast(along[(2 - axis) * BLOCK + i], zero)
                nb.store(dgrid, to + i * t[DGRID + 3] + axis * t[DGRID + 4], v)


@nb.kernel
def _forward(parts, threads, x, grid, y, table, like, bits):
    nb.launch(_forward_part, parts, threads, (x, grid, y, table, like, bits))


@nb.kernel
def _backward(parts, threads, dy, x, grid, dx, dgrid, table, like, bits):
    if dx != 0:
        nb.launch(_image_part, parts, threads, (dy, grid, dx, table, like))
    if dgrid != 0:
        nb.launch(_places_part, parts, threads, (dy, x, grid, dgrid, table, like, bits))


def _grid_strides(t: Any) -> tuple[int, ...]:
    """Strides of (N, D, H, W, axis); 0 for an axis that is not there."""
    return (t.strides[0], *three(t.strides[1:-1], 0), t.strides[-1])


def _flat(sizes: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether points in their order are at one distance in memory: that of the last axis.

    Examples
    --------
    >>> _flat((1, 4, 5), (0, 10, 2)), _flat((1, 4, 5), (0, 12, 2)), _flat((1, 4, 1), (0, 12, 12))
    (True, False, True)
    """
    (d, h, w), (d_step, h_step, w_step) = sizes, strides
    return (h == 1 or h_step == w * w_step) and (d == 1 or d_step == h * w * w_step)


class GridGathered(Engine):
    name = "resample.grid_gathered"
    operations = ("grid_sample_fwd", "grid_sample_bwd")
    targets = ("cpu",)
    notes = frozenset({"runtime_compilation"})

    def refusals(self, problem: Problem) -> list[str]:
        r = Refusals()
        r.require_tensors(problem.items, TYPES)
        return r

    def cost(self, problem: Problem, config: Config) -> float:
        op: Any = problem.op
        y = problem["y" if "y" in problem.tensors else "dy"]
        seconds = y.numel * TAPS[op.mode] ** (y.ndim - 2) * 2e-9
        return roofline(problem, flops=0.0) + seconds / problem.target.processors

    def build(self, problem: Problem, config: Config) -> Run:
        op: Any = problem.op
        x, grid, y = problem["x"], problem["grid"], problem["y" if "y" in problem.tensors else "dy"]
        ndim, taps = x.ndim - 2, TAPS[op.mode]
        dx, dgrid = problem.tensors.get("dx"), problem.tensors.get("dgrid")
        steps = [five_strides(x), five_strides(y), _grid_strides(grid)]
        steps += [five_strides(dx) if dx else (0,) * 5, _grid_strides(dgrid) if dgrid else (0,) * 5]
        sizes = three(y.shape[2:], 1)
        if all(_flat(sizes, s) for s in (steps[1][2:], steps[2][1:4], steps[4][1:4])):
            sizes = (1, 1, math.prod(sizes))
        paired = op.mode == "bilinear" and x.strides[-1] == 1 and x.shape[-1] >= 2
        table = np.array(
            [
                x.shape[0], x.shape[1], *three(x.shape[2:], 1), *sizes, *itertools.chain(*steps),
                *three((taps,) * ndim, 1), MODES.index(op.mode), PADDING_MODES.index(op.padding_mode),
                op.align_corners, ndim, paired, _flat(three(x.shape[2:], 1), steps[3][2:]),
            ],
            dtype=np.int64,
        )  # fmt: skip
        address, like = table.ctypes.data, nb.token(x.dtype)
        kinds = like, nb.token("i64" if x.dtype == "f64" else "i32")
        parts = max(1, min(y.numel * taps**ndim // 32768, PARTS))
        threads = nb.threads if parts > 1 else lambda: 1
        if op.name == "grid_sample_fwd":
            _forward(0, 1, 0, 0, 0, address, *kinds)  # compiles, or loads from disk; no part is run

            def forward(tensors, workspace, _keep=table):
                _forward(parts, threads(), *(t.data_ptr() for t in tensors), address, *kinds)

            return forward
        _backward(0, 1, 0, 0, 0, 0, 0, address, *kinds)
        roles = tuple(problem.tensors)
        order = [roles.index(role) if role in roles else None for role in ("dy", "x", "grid", "dx", "dgrid")]

        def backward(tensors, workspace, _keep=table):
            given = [0 if i is None else tensors[i].data_ptr() for i in order]
            _backward(parts, threads(), *given, address, *kinds)

        return backward
