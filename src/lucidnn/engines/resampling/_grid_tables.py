"""Where the points of a block take from, and how much: the tables of sampling by a grid on a CPU.

A block is a run of at most `BLOCK` output points at one distance in memory, in the grid and in the sampled images.
``neighbours`` works out, in float64, along each axis of the image and for each of its taps the place (-1: nowhere), the
weight and its slope by the grid's number. The loops run over the points, without a branch, so that the compiler makes
vectors of them. From these come, for each combination of taps, distances in an image and weights (``combinations``),
or, where two taps along W are neighbours in memory, pairs (``paired``, ``pairs``).
"""

from __future__ import annotations

import numpy as np
from numba.extending import register_jitable

from .. import _numba as nb

BLOCK = 64  # points
ROW = 4 * BLOCK  # of a table: the taps of an axis

# What the table of 64-bit integers holds: sizes of x and of the grid (D, H, W), strides of x, y, the grid and of the
# gradients, taps along D, H, W, how the places are meant, whether taps along W go in
# pairs and the pixels of dx are at one distance in memory.
N, C, IN, OUT, X, Y, GRID, DX, DGRID = 0, 1, 2, 5, 8, 13, 18, 23, 28
TAPS_OF, MODE, PADDING, CORNERS, NDIM, PAIRED, FLAT = 33, 36, 37, 38, 39, 40, 41


@register_jitable
def units(t):
    """How many blocks there are."""
    return t[N] * t[OUT] * t[OUT + 1] * ((t[OUT + 2] + BLOCK - 1) // BLOCK)


@register_jitable
def block(t, unit):
    """A block: image, point along D, H and W of its first one, how many."""
    chunks = (t[OUT + 2] + BLOCK - 1) // BLOCK
    begin, rest = unit % chunks * BLOCK, unit // chunks
    p, rest = rest % t[OUT + 1], rest // t[OUT + 1]
    return rest // t[OUT], rest % t[OUT], p, begin, min(BLOCK, t[OUT + 2] - begin)


@register_jitable
def _moved(at, size, padding, corners):
    """A place inside the image, and how fast it moves with the given one: 1, -1 or 0."""
    speed = 1.0
    if padding == 2:
        low = 0.0 if corners else -0.5
        span = size - 1.0 if corners else size
        single = span == 0.0
        span = 1.0 if single else span
        far = abs(at - low)
        flips = np.floor(far / span)
        rest = far - flips * span
        odd = flips - 2.0 * np.floor(flips * 0.5) == 1.0
        speed = -1.0 if (at < low) != odd else 1.0
        at = (span - rest if odd else rest) + low
        at = 0.0 if single else at
    if padding > 0:
        speed = 0.0 if at <= 0.0 or at >= size - 1.0 else speed
        at = 0.0 if at < 0.0 else at
        at = size - 1.0 if at > size - 1.0 else at
    return at, speed


@register_jitable
def _inside(place, size):
    whole = np.int64(place)
    return whole if 0.0 <= place < size else -1


@register_jitable
def _axis(t, axis, grid, at, step, count, table, places, weights, slopes):
    """Neighbours along one axis; `table` is the axis's place in the tables."""
    size, mode, padding, corners = np.float64(t[IN + axis]), t[MODE], t[PADDING], t[CORNERS] != 0
    pace = (size - 1.0) / 2.0 if corners else size / 2.0
    for i in range(count):  # alone: from then on neighbours are neighbours
        weights[table + i] = np.float64(nb.load(grid, at + i * step))
    for i in range(count):
        g = weights[table + i]
        place = (g + 1.0) / 2.0 * (size - 1.0) if corners else ((g + 1.0) * size - 1.0) / 2.0
        speed = 1.0
        if mode != 2:
            place, speed = _moved(place, size, padding, corners)
        elif padding == 1:  # all neighbours of a place as far as that are the edge; so are those of an infinite one
            place = -4.0 if place < -4.0 else place
            place = size + 4.0 if place > size + 4.0 else place
        known = abs(place) < (1e9 if padding == 0 else np.inf)  # false where it is no number
        weights[table + i] = place if known else -100.0
        slopes[table + i] = speed * pace if known else 0.0
    if mode == 1:
        for i in range(count):
            places[table + i] = _inside(np.rint(weights[table + i]), size)
            weights[table + i], slopes[table + i] = 1.0, 0.0
    elif mode == 0:
        for i in range(count):
            place, speed = weights[table + i], slopes[table + i]
            first = np.floor(place)
            far = place - first
            places[table + i], places[table + BLOCK + i] = _inside(first, size), _inside(first + 1.0, size)
            weights[table + i], weights[table + BLOCK + i] = 1.0 - far, far
            slopes[table + i], slopes[table + BLOCK + i] = -speed, speed
    else:
        a = -0.75
        for k in range(3, -1, -1):  # the first, whose row holds the places, last; its slopes say which have neighbours
            for i in range(count):
                first = np.floor(weights[table + i])
                d = weights[table + i] - first - (k - 1.0)
                e = abs(d)
                near = ((a + 2.0) * e - (a + 3.0)) * e * e + 1.0
                far = ((e - 5.0) * e + 8.0) * e * a - 4.0 * a
                steep = (3.0 * (a + 2.0) * e - 2.0 * (a + 3.0)) * e
                flat = a * ((3.0 * e - 10.0) * e + 8.0)
                slope = steep if e <= 1.0 else flat
                place, _ = _moved(first + (k - 1.0), size, padding, corners)
                places[table + k * BLOCK + i] = _inside(place if slopes[table + i] != 0.0 else -1.0, size)
                weights[table + k * BLOCK + i] = near if e <= 1.0 else far
                slopes[table + k * BLOCK + i] = (slope if d > 0.0 else -slope) * pace


@register_jitable
def no_depth(places, weights, slopes):
    """The tables of D where images have none."""
    for i in range(BLOCK):
        places[i], weights[i], slopes[i] = 0, 1.0, 0.0


@register_jitable
def neighbours(t, grid, at, count, places, weights, slopes):
    """Neighbours along D, H and W of the points of a block, whose first has its numbers at grid[at]."""
    for axis in range(t[NDIM]):
        table = (2 - axis) * ROW
        _axis(t, 2 - axis, grid, at + axis * t[GRID + 4], t[GRID + 3], count, table, places, weights, slopes)


@register_jitable
def combinations(t, d, h, w, count, places, weights, found, factors, zero):
    """For every combination of taps: how far it is (-1: nowhere), and its weight."""
    tap = 0
    for a in range(0, t[TAPS_OF] * BLOCK, BLOCK):
        for b in range(ROW, ROW + t[TAPS_OF + 1] * BLOCK, BLOCK):
            for c in range(2 * ROW, 2 * ROW + t[TAPS_OF + 2] * BLOCK, BLOCK):
                for i in range(count):
                    o, p, q = places[a + i], places[b + i], places[c + i]
                    far = o * d + p * h + q * w
                    found[tap + i] = far if (o | p | q) >= 0 else -1
                    factors[tap + i] = nb.cast(weights[a + i] * weights[b + i] * weights[c + i], zero)
                tap += BLOCK


@register_jitable
def safe(t, count, found, live):
    """Let taps that are nowhere point to an element that there is, and say in `live`, by ones, which are somewhere.

    Up to whole vectors of points there are such taps behind the last.
    """
    taps = t[TAPS_OF] * t[TAPS_OF + 1] * t[TAPS_OF + 2]
    for tap in range(0, taps * BLOCK, BLOCK):
        for i in range(count, (count + 15) // 16 * 16):
            found[tap + i] = -1
        for i in range((count + 15) // 16 * 16):
            far = found[tap + i]
            live[tap + i] = -1 if far >= 0 else 0
            found[tap + i] = far if far >= 0 else 0


@register_jitable
def paired(t, count, places, weights, slopes):
    """Make the two taps along W neighbours that both exist: what was beyond the image gets weight and slope 0.

    In their places stand the first's, in the third row bits: 1 if the first takes part, 2 if the second does.
    """
    table, last = 2 * ROW, t[IN + 2] - 2
    second, third = table + BLOCK, table + 2 * BLOCK
    for i in range(count):
        first, after = places[table + i], places[second + i]
        late, early, none = first > last, first < 0, after < 0
        w, v, s, u = weights[table + i], weights[second + i], slopes[table + i], slopes[second + i]
        start = first if first >= 0 else 0
        places[table + i] = start if start < last else last
        v_left, u_left = (0.0 if none else v), (0.0 if none else u)
        left, left_slope = (v_left if early else w), (u_left if early else s)
        weights[table + i], slopes[table + i] = (0.0 if late else left), (0.0 if late else left_slope)
        right, right_slope = (0.0 if early else v), (0.0 if early else u)
        weights[second + i], slopes[second + i] = (w if late else right), (s if late else right_slope)
        bits = 0 if none else 1
        bits = bits if early else 3
        places[third + i] = 2 if late else bits


@register_jitable
def pairs(t, d, h, count, places, weights, found, factors, live, zero):
    """For every combination of taps along D and H: how far its pair is, both weights, and ones where it takes part.

    `paired` must have been called. Up to whole vectors of points there are pairs of no weight behind the last.
    """
    row, width, second, third = 0, 2 * ROW, 2 * ROW + BLOCK, 2 * ROW + 2 * BLOCK
    for a in range(0, t[TAPS_OF] * BLOCK, BLOCK):
        for b in range(ROW, ROW + t[TAPS_OF + 1] * BLOCK, BLOCK):
            for i in range(count):
                o, p = places[a + i], places[b + i]
                there = (o | p) >= 0
                w = weights[a + i] * weights[b + i]
                far = o * d + p * h
                found[row + i] = (far if there else 0) + places[width + i]
                bits = places[third + i] if there else 0
                factors[2 * (row + i)] = nb.cast(w * weights[width + i], zero)
                factors[2 * (row + i) + 1] = nb.cast(w * weights[second + i], zero)
                live[2 * (row + i)] = -(bits & 1)
                live[2 * (row + i) + 1] = -(bits >> 1)
            for i in range(count, (count + 15) // 16 * 16):
                found[row + i] = 0
                for k in range(2 * (row + i), 2 * (row + i) + 2):
                    factors[k], live[k] = zero, 0
            row += BLOCK


@register_jitable
def follow(t, count, weights, slopes, dots, along):
    """Gradients of the places along D, H and W, from the sums over channels for every combination of taps."""
    for i in range(3 * BLOCK):
        along[i] = 0.0
    tap = 0
    for a in range(0, t[TAPS_OF] * BLOCK, BLOCK):
        for b in range(ROW, ROW + t[TAPS_OF + 1] * BLOCK, BLOCK):
            for c in range(2 * ROW, 2 * ROW + t[TAPS_OF + 2] * BLOCK, BLOCK):
                for i in range(count):
                    v = np.float64(dots[tap + i])
                    along[i] += slopes[a + i] * weights[b + i] * weights[c + i] * v
                    along[BLOCK + i] += weights[a + i] * slopes[b + i] * weights[c + i] * v
                    along[2 * BLOCK + i] += weights[a + i] * weights[b + i] * slopes[c + i] * v
                tap += BLOCK
