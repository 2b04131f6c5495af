"""``resample.grid_gathered``: sampling by a grid on a CPU, every mode, stride and type, both directions, in Numba.

Method: for a block of output points the neighbours' places and weights are worked out once, in float64, and used for
all channels. Forward gathers. The gradient of x is deterministic: a few channels of an image belong to one thread,
which adds up the points in their order in a buffer of float32 (float64 for float64). The gradient of the grid sums
over channels, tap by tap, then follows the slopes of the weights. Cost: a read a tap, channel and point, mostly from
the first- or second-level cache.
"""

from typing import Any

import numpy as np
from numba.extending import register_jitable

from ...core.engine import Config, Engine, Refusals, Run
from ...core.heuristics import roofline
from ...core.problem import Problem
from ...ops.convolution import five_strides, three
from ...ops.grid_sample import MODES, PADDING_MODES, TAPS
from .. import _numba as nb

TYPES = ("f64", "f32", "f16", "bf16")
BLOCK = 64  # points
GROUP = 4  # channels whose gradient one thread adds up
PARTS = 64

# What the table of 64-bit integers holds: sizes of x and of the grid (D, H, W), strides of x, y, the grid and of the
# gradients, taps along D, H, W, how the places are meant.
N, C, IN, OUT, X, Y, GRID, DX, DGRID = 0, 1, 2, 5, 8, 13, 18, 23, 28
TAPS_OF, MODE, PADDING, CORNERS, NDIM = 33, 36, 37, 38, 39


@register_jitable
def _moved(at, size, padding, corners):
    """A place inside the image, and how fast it moves with the given one: 1, -1 or 0."""
    speed = 1.0
    if padding == 2:
        low = 0.0 if corners else -0.5
        span = size - 1.0 if corners else float(size)
        if span == 0.0:
            return 0.0, 0.0
        if at < low:
            speed = -1.0
        far = abs(at - low)
        flips = np.floor(far / span)
        rest = far - flips * span
        if flips % 2.0 == 1.0:
            at, speed = span - rest + low, -speed
        else:
            at = rest + low
    if padding > 0:
        if at <= 0.0:
            at, speed = 0.0, 0.0
        elif at >= size - 1.0:
            at, speed = size - 1.0, 0.0
    return at, speed


@register_jitable
def _axis(g, size, mode, padding, corners, places, weights, slopes, row):
    """Neighbours of a place along an axis: where (-1 where there is none), weight, slope by g."""
    at = (g + 1.0) / 2.0 * (size - 1.0) if corners else ((g + 1.0) * size - 1.0) / 2.0
    pace = (size - 1.0) / 2.0 if corners else size / 2.0
    if mode != 2:
        at, speed = _moved(at, size, padding, corners)
        pace *= speed
    if not abs(at) < 1e9:  # also where it is no number
        at = -100.0
    first = np.floor(at)
    t = at - first
    if mode == 1:
        places[row, 0], weights[row, 0], slopes[row, 0] = np.int64(np.rint(at)), 1.0, 0.0
    elif mode == 0:
        places[row, 0], weights[row, 0], slopes[row, 0] = np.int64(first), 1.0 - t, -pace
        places[row, 1], weights[row, 1], slopes[row, 1] = np.int64(first) + 1, t, pace
    else:
        a = -0.75
        for k in range(4):
            d = t - (k - 1.0)
            e = abs(d)
            if e <= 1.0:
                weights[row, k] = ((a + 2.0) * e - (a + 3.0)) * e * e + 1.0
                slope = (3.0 * (a + 2.0) * e - 2.0 * (a + 3.0)) * e
            else:
                weights[row, k] = ((e - 5.0) * e + 8.0) * e * a - 4.0 * a
                slope = a * ((3.0 * e - 10.0) * e + 8.0)
            slopes[row, k] = (slope if d > 0.0 else -slope) * pace
            place, _ = _moved(first + (k - 1.0), size, padding, corners)
            places[row, k] = np.int64(place)
    for k in range(4):
        if places[row, k] < 0 or places[row, k] >= size:
            places[row, k] = -1


@register_jitable
def _neighbours(t, grid, n, point, places, weights, slopes):
    """Neighbours along D, H and W of one output point; gives its place along the grid's axes."""
    q, rest = point % t[OUT + 2], point // t[OUT + 2]
    p, o = rest % t[OUT + 1], rest // t[OUT + 1]
    at = n * t[GRID] + o * t[GRID + 1] + p * t[GRID + 2] + q * t[GRID + 3]
    for axis in range(t[NDIM]):
        g = np.float64(nb.load(grid, at + axis * t[GRID + 4]))
        _axis(g, t[IN + 2 - axis], t[MODE], t[PADDING], t[CORNERS] != 0, places, weights, slopes, 2 - axis)
    return o, p, q


@register_jitable
def _tabulate(t, grid, n, begin, end, d, h, w, found, factors, at_y):
    """For the points of a block every combination of neighbours: how far it is (-1: nowhere), and its weight."""
    places, weights = np.zeros((3, 4), np.int64), np.ones((3, 4))
    slopes = np.zeros((3, 4))
    for point in range(begin, end):
        o, p, q = _neighbours(t, grid, n, point, places, weights, slopes)
        i, tap = point - begin, 0
        at_y[i] = n * t[Y] + o * t[Y + 2] + p * t[Y + 3] + q * t[Y + 4]
        for a in range(t[TAPS_OF]):
            for b in range(t[TAPS_OF + 1]):
                for c in range(t[TAPS_OF + 2]):
                    exists = places[0, a] >= 0 and places[1, b] >= 0 and places[2, c] >= 0
                    far = places[0, a] * d + places[1, b] * h + places[2, c] * w
                    found[tap, i] = far if exists else -1
                    factors[tap, i] = weights[0, a] * weights[1, b] * weights[2, c]
                    tap += 1


@nb.kernel
def _forward_part(part, parts, x_address, grid_address, y_address, table, like):
    t, x, grid = nb.pointer(table, np.int64(0)), nb.pointer(x_address, like), nb.pointer(grid_address, like)
    y, zero = nb.pointer(y_address, like), nb.accumulator(like)
    points = t[OUT] * t[OUT + 1] * t[OUT + 2]
    taps = t[TAPS_OF] * t[TAPS_OF + 1] * t[TAPS_OF + 2]
    found, factors = np.zeros((taps, BLOCK), np.int64), np.full((taps, BLOCK), zero)
    at_y, sums = np.zeros(BLOCK, np.int64), np.full(BLOCK, zero)
    channels = np.full(t[C], zero)
    blocks = (points + BLOCK - 1) // BLOCK
    for unit in range(t[N] * blocks * part // parts, t[N] * blocks * (part + 1) // parts):
        n, begin = unit // blocks, unit % blocks * BLOCK
        count = min(BLOCK, points - begin)
        _tabulate(t, grid, n, begin, begin + count, t[X + 2], t[X + 3], t[X + 4], found, factors, at_y)
        if t[X + 1] == 1 and t[C] >= 8:
            for i in range(count):
                channels[:] = zero
                for tap in range(taps):
                    if found[tap, i] >= 0:
                        at, w = n * t[X] + found[tap, i], factors[tap, i]
                        for c in range(t[C]):
                            channels[c] += w * nb.load(x, at + c)
                for c in range(t[C]):
                    nb.store(y, at_y[i] + c * t[Y + 1], channels[c])
        else:
            for c in range(t[C]):
                base = n * t[X] + c * t[X + 1]
                sums[:] = zero
                for tap in range(taps):
                    for i in range(count):
                        far = found[tap, i]
                        if far >= 0:
                            sums[i] += factors[tap, i] * nb.load(x, base + far)
                for i in range(count):
                    nb.store(y, at_y[i] + c * t[Y + 1], sums[i])


@nb.kernel
def _image_part(part, parts, dy_address, grid_address, dx_address, table, like):
    t, dy, grid = nb.pointer(table, np.int64(0)), nb.pointer(dy_address, like), nb.pointer(grid_address, like)
    dx, zero = nb.pointer(dx_address, like), nb.accumulator(like)
    points = t[OUT] * t[OUT + 1] * t[OUT + 2]
    taps = t[TAPS_OF] * t[TAPS_OF + 1] * t[TAPS_OF + 2]
    found, factors = np.zeros((taps, BLOCK), np.int64), np.full((taps, BLOCK), zero)
    at_y = np.zeros(BLOCK, np.int64)
    d, h, w = t[IN], t[IN + 1], t[IN + 2]
    groups = (t[C] + GROUP - 1) // GROUP
    for unit in range(t[N] * groups * part // parts, t[N] * groups * (part + 1) // parts):
        n, first = unit // groups, unit % groups * GROUP
        many = min(GROUP, t[C] - first)
        sums = np.full((many, d * h * w), zero)
        for begin in range(0, points, BLOCK):
            count = min(BLOCK, points - begin)
            _tabulate(t, grid, n, begin, begin + count, h * w, w, 1, found, factors, at_y)
            for c in range(many):
                for i in range(count):
                    v = nb.load(dy, at_y[i] + (first + c) * t[Y + 1])
                    for tap in range(taps):
                        if found[tap, i] >= 0:
                            sums[c, found[tap, i]] += factors[tap, i] * v
        for c in range(many):
            for place in range(d * h * w):
                k, rest = place % w, place // w
                at = n * t[DX] + (first + c) * t[DX + 1] + rest // h * t[DX + 2] + rest % h * t[DX + 3]
                nb.store(dx, at + k * t[DX + 4], sums[c, place])


@nb.kernel
def _places_part(part, parts, dy_address, x_address, grid_address, dgrid_address, table, like):
    t, dy, x = nb.pointer(table, np.int64(0)), nb.pointer(dy_address, like), nb.pointer(x_address, like)
    grid, dgrid = nb.pointer(grid_address, like), nb.pointer(dgrid_address, like)
    zero = nb.accumulator(like)
    points = t[OUT] * t[OUT + 1] * t[OUT + 2]
    taps = t[TAPS_OF] * t[TAPS_OF + 1] * t[TAPS_OF + 2]
    found, factors = np.zeros((taps, BLOCK), np.int64), np.full((taps, BLOCK), zero)
    at_y, dots = np.zeros(BLOCK, np.int64), np.zeros((taps, BLOCK))
    places, weights, slopes = np.zeros((3, 4), np.int64), np.ones((3, 4)), np.zeros((3, 4))
    blocks = (points + BLOCK - 1) // BLOCK
    for unit in range(t[N] * blocks * part // parts, t[N] * blocks * (part + 1) // parts):
        n, begin = unit // blocks, unit % blocks * BLOCK
        count = min(BLOCK, points - begin)
        _tabulate(t, grid, n, begin, begin + count, t[X + 2], t[X + 3], t[X + 4], found, factors, at_y)
        dots[:] = 0.0
        for c in range(t[C]):
            base = n * t[X] + c * t[X + 1]
            for tap in range(taps):
                for i in range(count):
                    if found[tap, i] >= 0:
                        v = nb.load(dy, at_y[i] + c * t[Y + 1])
                        dots[tap, i] += np.float64(v) * np.float64(nb.load(x, base + found[tap, i]))
        for i in range(count):
            o, p, q = _neighbours(t, grid, n, begin + i, places, weights, slopes)
            along_d, along_h, along_w, tap = 0.0, 0.0, 0.0, 0
            for a in range(t[TAPS_OF]):
                for b in range(t[TAPS_OF + 1]):
                    for c in range(t[TAPS_OF + 2]):
                        v = dots[tap, i]
                        along_d += slopes[0, a] * weights[1, b] * weights[2, c] * v
                        along_h += weights[0, a] * slopes[1, b] * weights[2, c] * v
                        along_w += weights[0, a] * weights[1, b] * slopes[2, c] * v
                        tap += 1
            at = n * t[DGRID] + o * t[DGRID + 1] + p * t[DGRID + 2] + q * t[DGRID + 3]
            nb.store(dgrid, at, nb.cast(along_w, zero))
            nb.store(dgrid, at + t[DGRID + 4], nb.cast(along_h, zero))
            if t[NDIM] == 3:
                nb.store(dgrid, at + 2 * t[DGRID + 4], nb.cast(along_d, zero))


@nb.kernel
def _forward(parts, threads, x, grid, y, table, like):
    nb.launch(_forward_part, parts, threads, (x, grid, y, table, like))


@nb.kernel
def _backward(parts, threads, dy, x, grid, dx, dgrid, table, like):
    if dx != 0:
        nb.launch(_image_part, parts, threads, (dy, grid, dx, table, like))
    if dgrid != 0:
        nb.launch(_places_part, parts, threads, (dy, x, grid, dgrid, table, like))


def _grid_strides(t: Any) -> tuple[int, ...]:
    """Strides of (N, D, H, W, axis); 0 for an axis that is not there."""
    return (t.strides[0], *three(t.strides[1:-1], 0), t.strides[-1])


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
        none = (0,) * 5
        dx, dgrid = problem.tensors.get("dx"), problem.tensors.get("dgrid")
        table = np.array(
            [
                x.shape[0], x.shape[1], *three(x.shape[2:], 1), *three(y.shape[2:], 1),
                *five_strides(x), *five_strides(y), *_grid_strides(grid),
                *(five_strides(dx) if dx else none), *(_grid_strides(dgrid) if dgrid else none),
                *three((taps,) * ndim, 1), MODES.index(op.mode), PADDING_MODES.index(op.padding_mode),
                op.align_corners, ndim,
            ],
            dtype=np.int64,
        )  # fmt: skip
        address, like = table.ctypes.data, nb.token(x.dtype)
        parts = max(1, min(y.numel * taps**ndim // 32768, PARTS))
        threads = nb.threads if parts > 1 else lambda: 1
        if op.name == "grid_sample_fwd":
            _forward(0, 1, 0, 0, 0, address, like)  # compiles, or loads from disk; no part is run

            def forward(tensors, workspace, _keep=table):
                _forward(parts, threads(), *(t.data_ptr() for t in tensors), address, like)

            return forward
        _backward(0, 1, 0, 0, 0, 0, 0, address, like)
        roles = tuple(problem.tensors)
        order = [roles.index(role) if role in roles else None for role in ("dy", "x", "grid", "dx", "dgrid")]

        def backward(tensors, workspace, _keep=table):
            given = [0 if i is None else tensors[i].data_ptr() for i in order]
            _backward(parts, threads(), *given, address, like)

        return backward
