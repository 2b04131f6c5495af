"""``pool.average_direct``: average, power and adaptive average pooling on a CPU, any shape and strides, in Numba.

Method: windows are the same for every row and every column, so a table for each axis says where they start and how many
of their points exist, and no other part of the kernels knows of padding, dilation or adaptive sizes. Sixteen neighbours
are the lanes of a vector (see ``_numba/vector.py``).

Where columns (W) lie closest together, one row of y at a time: first the rows of x that its windows reach are added up,
as a row with its padding around it, then the columns of that row. A window of R x S points so costs R + S additions
instead of R S. Where channels lie closest together, 64 of them at a time pass through the window's points. Backward
is the same from the other side: the rows of dy, divided by their windows' counts, that hold a row of dx are added, then
its columns; every element of dx is summed by one thread in one order, and overlapping windows need no atomics. Rows
that the same windows hold are summed once.

Powers are taken of each point on the way in and of each result on the way out; those other than 1 and 2 go through the
C library, lane by lane. 16-bit values are summed in float32.

Cost: the memory traffic, with a few vector operations an element. No limits beside the four types.
"""

import math

import numpy as np
from llvmlite import ir
from numba.core import cgutils
from numba.extending import intrinsic, register_jitable

from ...core.engine import Config, Engine, Refusals, Run
from ...core.heuristics import roofline
from ...core.problem import Problem
from ...ops.pooling import WindowAxis
from .. import _numba as nb
from .._numba import vector as nv
from ._axes import Windows, divisors
from ._lanes import times

CHUNK = 512  # channels that one unit of work has at most
BLOCK = 64  # channels whose sums stay in registers
PARTS = 64
TYPES = ("f64", "f32", "f16", "bf16")
AVERAGE, SUM, SQUARES, POWERS = 0, 1, 2, 3  # what is added up

# What the table of 64-bit integers holds, and where: one number, or one for each of five or three axes.
COLUMNS, UNITS, KIND, SIZES, IN, OUT, DILATION = 0, 1, 2, 3, 8, 11, 14
STRIDE, BEFORE, TAPS, LEFT, LENGTH, WIDTH, LANES_AT_ONCE = 17, 18, 19, 20, 21, 22, 23
X, Y, X_GIVEN, Y_GIVEN, FIRST, SECOND, WEIGHTS, ALIKE, PIECES, INSIDE = 24, 29, 34, 39, 44, 47, 50, 53, 54, 55
TABLES = 56


@intrinsic
def _over(typingctx, v, w):
    """V / w, and 0 where w is."""

    def emit(b, v, w):
        zero = ir.Constant(w.type, None)
        return b.select(b.fcmp_ordered("==", w, zero), zero, b.fdiv(v, w))

    return nv._operation(v, [v, v], emit)


@intrinsic
def _power(typingctx, v, exponent):
    def emit(b, v, e):
        kind = v.type
        name = f"llvm.pow.v{nv.LANES}{kind.element.intrinsic_name}"
        function = cgutils.get_or_insert_function(b.module, ir.FunctionType(kind, [kind, kind]), name)
        return b.call(function, [v, nv._splat(b, e)])

    return nv._operation(v, [v, exponent], emit)


@register_jitable(inline="always")
def _raised(v, kind, norm):
    if kind == SQUARES:
        return times(v, v)
    if kind == POWERS:
        return _power(v, norm)
    return v


@register_jitable(inline="always")
def _shared(v, y, kind, norm):
    """Dy times y to the power 1 - p, 0 where y is."""
    if kind == SQUARES:
        return _over(v, y)
    if kind == SUM:
        return times(_over(v, y), y)
    return times(v, _over(_power(y, nb.cast(2.0 - norm, norm)), y))


@register_jitable
def _coordinates(unit, t):
    """A unit of work's place along the five axes of `SIZES`; the last one counts chunks of lanes."""
    rest, chunk = unit // t[SIZES + 4], unit % t[SIZES + 4]
    rest, i3 = rest // t[SIZES + 3], rest % t[SIZES + 3]
    rest, i2 = rest // t[SIZES + 2], rest % t[SIZES + 2]
    return rest // t[SIZES + 1], rest % t[SIZES + 1], i2, i3, chunk


@nb.kernel
def _finish(y, at, step, sums, count, weight, weights, kind, root):
    """Y = (sums / weights) ** (1 / p), along the lanes; `weights` has one for each where its address is not 0."""
    for q in range(count):
        v = sums[q] / nb.cast(weight * weights[q], sums[q])
        if kind == SQUARES:
            v = nb.cast(math.sqrt(v), v)
        elif kind == POWERS:
            v = nb.cast(v**root, v)
        nb.store(y, at + q * step, v)


@nb.kernel
def _forward_part(part, parts, x_at, y_at, unused_at, also_unused_at, scratch, table, floats, like):
    t, f = nb.pointer(table, np.int64(0)), nb.pointer(floats, np.float64(0))
    x, y = nb.pointer(x_at, like), nb.pointer(y_at, like)
    zero, kind = nv.fill(nb.accumulator(like)), t[KIND]
    norm, root = nb.cast(f[0], nb.accumulator(like)), nb.cast(1.0 / f[0], nb.accumulator(like))
    row = nb.pointer(scratch + part * 8 * t[LENGTH], nb.accumulator(like))
    sums = nb.pointer(scratch + part * 8 * t[LENGTH] + 8 * t[WIDTH], nb.accumulator(like))
    for i in range(t[WIDTH]):
        row[i] = nb.accumulator(like)
    ones = nb.pointer(floats + 8, np.float64(0))
    x_d, x_h, x_w = t[X + 2] * t[DILATION], t[X + 3] * t[DILATION + 1], t[X + 4] * t[DILATION + 2]
    left, stride, gap = t[LEFT], t[STRIDE], t[DILATION + 2]
    begin, end_unit = t[UNITS] * part // parts, t[UNITS] * (part + 1) // parts
    n, i1, i2, i3, chunk = _coordinates(begin, t)
    for unit in range(begin, end_unit):
        if unit > begin:  # divisions would cost more than a short row
            chunk += 1
            if chunk == t[SIZES + 4]:
                chunk, i3 = 0, i3 + 1
                if i3 == t[SIZES + 3]:
                    i3, i2 = 0, i2 + 1
                    if i2 == t[SIZES + 2]:
                        i2, i1 = 0, i1 + 1
                        if i1 == t[SIZES + 1]:
                            i1, n = 0, n + 1
        o, p = (i2, i3) if t[COLUMNS] else (i1, i2)
        points_d, points_h = t[t[SECOND] + o], t[t[SECOND + 1] + p]
        weight = f[t[WEIGHTS] + o] * f[t[WEIGHTS + 1] + p]
        corner = n * t[X] + t[t[FIRST] + o] * t[X + 2] + t[t[FIRST + 1] + p] * t[X + 3]
        to = n * t[Y] + o * t[Y + 2] + p * t[Y + 3]
        if t[COLUMNS]:
            corner += i1 * t[X + 1]
            to += i1 * t[Y + 1]
            for w in range(0, t[IN + 2], nv.LANES):
                many = min(t[IN + 2] - w, nv.LANES)
                total = zero
                for a in range(points_d):
                    for b in range(points_h):
                        v = nv.read(x, corner + a * x_d + b * x_h + w * t[X + 4], t[X + 4], 0, many)
                        total = nv.add(total, _raised(v, kind, norm))
                nv.write(row, left + w, 1, total, many)
            columns = t[OUT + 2]
            if stride == 1 or stride == 2:
                start = left - t[BEFORE]
                for q in range(0, columns, nv.LANES):
                    many = min(columns - q, nv.LANES)
                    total = zero
                    for s in range(t[TAPS]):
                        total = nv.add(total, nv.read(row, start + q * stride + s * gap, stride, 0, many))
                    nv.write(sums, q, 1, total, many)
            else:
                for q in range(columns):
                    at, points = left + t[t[FIRST + 2] + q], t[t[SECOND + 2] + q]
                    single = nb.accumulator(like)
                    if gap == 1:
                        for s in range(points):
                            single += row[at + s]
                    else:
                        for s in range(points):
                            single += row[at + s * gap]
                    sums[q] = single
            weights = nb.pointer(floats + 8 * t[WEIGHTS + 2], np.float64(0))
            _finish(y, to, t[Y + 4], sums, columns, weight, weights, kind, root)
        else:
            corner += t[t[FIRST + 2] + i3] * t[X + 4]
            to += i3 * t[Y + 4]
            points_w = t[t[SECOND + 2] + i3]
            weight *= f[t[WEIGHTS + 2] + i3]
            step, first = t[X + 1], chunk * t[LANES_AT_ONCE]
            end = min(first + t[LANES_AT_ONCE], t[SIZES])
            c = first
            while step == 1 and c + BLOCK <= end:
                v0, v1, v2, v3 = zero, zero, zero, zero
                for a in range(points_d):
                    for b in range(points_h):
                        at = corner + a * x_d + b * x_h + c
                        for _ in range(points_w):
                            v0 = nv.add(v0, _raised(nv.read_all(x, at), kind, norm))
                            v1 = nv.add(v1, _raised(nv.read_all(x, at + nv.LANES), kind, norm))
                            v2 = nv.add(v2, _raised(nv.read_all(x, at + 2 * nv.LANES), kind, norm))
                            v3 = nv.add(v3, _raised(nv.read_all(x, at + 3 * nv.LANES), kind, norm))
                            at += x_w
                nv.write(sums, c - first, 1, v0, nv.LANES)
                nv.write(sums, c - first + nv.LANES, 1, v1, nv.LANES)
                nv.write(sums, c - first + 2 * nv.LANES, 1, v2, nv.LANES)
                nv.write(sums, c - first + 3 * nv.LANES, 1, v3, nv.LANES)
                c += BLOCK
            while c < end:
                many = min(end - c, nv.LANES)
                total = zero
                for a in range(points_d):
                    for b in range(points_h):
                        for s in range(points_w):
                            at = corner + a * x_d + b * x_h + s * x_w + c * step
                            total = nv.add(total, _raised(nv.read(x, at, step, 0, many), kind, norm))
                nv.write(sums, c - first, 1, total, many)
                c += nv.LANES
            _finish(y, to + first * t[Y + 1], t[Y + 1], sums, end - first, weight, ones, kind, root)


@nb.kernel
def _give_back(dx, at, step, x, x_at, x_step, sums, count, kind, norm):
    """Dx = x ** (p - 1) sums, along the lanes."""
    if kind == AVERAGE and step == 1:
        for q in range(0, count, nv.LANES):
            many = min(count - q, nv.LANES)
            nv.write(dx, at + q, 1, nv.read_some(sums, q, 0, many), many)
        return
    for q in range(count):
        v = sums[q]
        if kind == SQUARES:
            v *= nb.load(x, x_at + q * x_step)
        elif kind == POWERS:
            v *= nb.load(x, x_at + q * x_step) ** nb.cast(norm - 1.0, norm)
        nb.store(dx, at + q * step, v)


@nb.kernel
def _backward_part(part, parts, dy_at, dx_at, x_at, y_at, scratch, table, floats, like):
    t, f = nb.pointer(table, np.int64(0)), nb.pointer(floats, np.float64(0))
    dy, dx = nb.pointer(dy_at, like), nb.pointer(dx_at, like)
    x, y = nb.pointer(x_at, like), nb.pointer(y_at, like)
    zero, kind = nv.fill(nb.accumulator(like)), t[KIND]
    norm = nb.cast(f[0], nb.accumulator(like))
    row = nb.pointer(scratch + part * 8 * t[LENGTH], nb.accumulator(like))
    sums = nb.pointer(scratch + part * 8 * t[LENGTH] + 8 * t[WIDTH], nb.accumulator(like))
    for i in range(t[WIDTH]):
        row[i] = nb.accumulator(like)
    left, stride, before, taps, gap = t[LEFT], t[STRIDE], t[BEFORE], t[TAPS], t[DILATION + 2]
    divided, shares = 1.0, nv.fill(nb.cast(1.0, norm))
    begin, end_unit = t[UNITS] * part // parts, t[UNITS] * (part + 1) // parts
    n, i1, i2, i3, chunk = _coordinates(begin, t)
    for unit in range(begin, end_unit):
        if unit > begin:  # divisions would cost more than a short row
            chunk += 1
            if chunk == t[SIZES + 4]:
                chunk, i3 = 0, i3 + 1
                if i3 == t[SIZES + 3]:
                    i3, i2 = 0, i2 + 1
                    if i2 == t[SIZES + 2]:
                        i2, i1 = 0, i1 + 1
                        if i1 == t[SIZES + 1]:
                            i1, n = 0, n + 1
        z, h = (i2, i3) if t[COLUMNS] else (i1, i2)
        o_first, o_end = t[t[FIRST] + z], t[t[FIRST] + z + 1]
        p_first, p_end = t[t[FIRST + 1] + h], t[t[FIRST + 1] + h + 1]
        to = n * t[X] + z * t[X + 2] + h * t[X + 3]
        given = n * t[X_GIVEN] + z * t[X_GIVEN + 2] + h * t[X_GIVEN + 3]
        # Rows of one plane that the same windows hold get the same sums.
        if t[COLUMNS] and (unit == begin or h == 0 or not t[t[ALIKE] + h]):
            for q in range(0, t[OUT + 2], nv.LANES):
                many = min(t[OUT + 2] - q, nv.LANES)
                total = zero
                for i in range(o_first, o_end):
                    o = t[t[SECOND] + i]
                    for j in range(p_first, p_end):
                        p = t[t[SECOND + 1] + j]
                        at = n * t[Y] + i1 * t[Y + 1] + o * t[Y + 2] + p * t[Y + 3] + q * t[Y + 4]
                        v = nv.read(dy, at, t[Y + 4], 0, many)
                        if kind != AVERAGE:
                            at = n * t[Y_GIVEN] + i1 * t[Y_GIVEN + 1] + o * t[Y_GIVEN + 2] + p * t[Y_GIVEN + 3]
                            at += q * t[Y_GIVEN + 4]
                            v = _shared(v, nv.read(y, at, t[Y_GIVEN + 4], 0, many), kind, norm)
                        share = 1.0 / (f[t[WEIGHTS] + o] * f[t[WEIGHTS + 1] + p])
                        total = nv.add(total, times(v, nv.fill(nb.cast(share, norm))))
                nv.write(row, left + q, 1, total, many)
            for q in range(t[OUT + 2]):
                row[left + q] /= nb.cast(f[t[WEIGHTS + 2] + q], norm)
            width = t[IN + 2]
            if stride == 1:
                for w in range(0, width, nv.LANES):
                    many = min(width - w, nv.LANES)
                    total = zero
                    for s in range(taps):
                        total = nv.add(total, nv.read(row, left + w + before - s * gap, 1, 0, many))
                    nv.write(sums, w, 1, total, many)
            elif stride == 2 and gap == 1:
                for j in range(0, (width + 1) // 2, nv.LANES):
                    even, odd = zero, zero
                    for s in range(taps):
                        at = before - s
                        if at % 2 == 0:
                            even = nv.add(even, nv.read_all(row, left + j + at // 2))
                        else:
                            odd = nv.add(odd, nv.read_all(row, left + j + (at + 1) // 2))
                    nv.write(sums, 2 * j, 1, nv.lower_half(even, odd), nv.LANES)
                    nv.write(sums, 2 * j + nv.LANES, 1, nv.upper_half(even, odd), nv.LANES)
            elif gap == 1:
                # The windows that hold a column are neighbours, and change at few columns: from one to the next all get
                # one number; what a vector writes beyond them, the next ones or nobody needs.
                for i in range(t[PIECES], t[PIECES] + 4 * t[t[PIECES]], 4):
                    single = nb.accumulator(like)
                    for q in range(t[i + 3], t[i + 4]):
                        single += row[left + q]
                    for w in range(t[i + 1], t[i + 2], nv.LANES):
                        nv.write(sums, w, 1, nv.fill(single), nv.LANES)
            else:
                for w in range(width):
                    sums[w] = nb.accumulator(like)
                for q in range(t[OUT + 2]):
                    at, points, share = t[t[INSIDE] + 2 * q], t[t[INSIDE] + 2 * q + 1], row[left + q]
                    for s in range(points):
                        sums[at + s * gap] += share
        if t[COLUMNS]:
            to += i1 * t[X + 1]
            given += i1 * t[X_GIVEN + 1]
            _give_back(dx, to, t[X + 4], x, given, t[X_GIVEN + 4], sums, t[IN + 2], kind, norm)
        else:
            first = chunk * t[LANES_AT_ONCE]
            end = min(first + t[LANES_AT_ONCE], t[SIZES])
            q_first, q_end = t[t[FIRST + 2] + i3], t[t[FIRST + 2] + i3 + 1]
            straight = kind == AVERAGE and t[X + 1] == 1 and t[Y + 1] == 1
            blocks = (end - first) // BLOCK if straight else 0
            for block in range(blocks):
                c = first + block * BLOCK
                v0, v1, v2, v3 = zero, zero, zero, zero
                for i in range(o_first, o_end):
                    o = t[t[SECOND] + i]
                    for j in range(p_first, p_end):
                        p = t[t[SECOND + 1] + j]
                        for k in range(q_first, q_end):
                            q = t[t[SECOND + 2] + k]
                            at = n * t[Y] + c + o * t[Y + 2] + p * t[Y + 3] + q * t[Y + 4]
                            weight = f[t[WEIGHTS] + o] * f[t[WEIGHTS + 1] + p] * f[t[WEIGHTS + 2] + q]
                            if weight != divided:  # mostly all are the same, and a division takes as long as the rest
                                divided, shares = weight, nv.fill(nb.cast(1.0 / weight, norm))
                            v0 = nv.add(v0, times(nv.read_all(dy, at), shares))
                            v1 = nv.add(v1, times(nv.read_all(dy, at + nv.LANES), shares))
                            v2 = nv.add(v2, times(nv.read_all(dy, at + 2 * nv.LANES), shares))
                            v3 = nv.add(v3, times(nv.read_all(dy, at + 3 * nv.LANES), shares))
                at = to + i3 * t[X + 4] + c
                nv.write(dx, at, 1, v0, nv.LANES)
                nv.write(dx, at + nv.LANES, 1, v1, nv.LANES)
                nv.write(dx, at + 2 * nv.LANES, 1, v2, nv.LANES)
                nv.write(dx, at + 3 * nv.LANES, 1, v3, nv.LANES)
            first += blocks * BLOCK
            if first == end:
                continue
            for c in range(first, end, nv.LANES):
                many = min(end - c, nv.LANES)
                total = zero
                for i in range(o_first, o_end):
                    o = t[t[SECOND] + i]
                    for j in range(p_first, p_end):
                        p = t[t[SECOND + 1] + j]
                        for k in range(q_first, q_end):
                            q = t[t[SECOND + 2] + k]
                            at = n * t[Y] + c * t[Y + 1] + o * t[Y + 2] + p * t[Y + 3] + q * t[Y + 4]
                            v = nv.read(dy, at, t[Y + 1], 0, many)
                            if kind != AVERAGE:
                                at = n * t[Y_GIVEN] + c * t[Y_GIVEN + 1] + o * t[Y_GIVEN + 2] + p * t[Y_GIVEN + 3]
                                at += q * t[Y_GIVEN + 4]
                                v = _shared(v, nv.read(y, at, t[Y_GIVEN + 1], 0, many), kind, norm)
                            share = 1.0 / (f[t[WEIGHTS] + o] * f[t[WEIGHTS + 1] + p] * f[t[WEIGHTS + 2] + q])
                            total = nv.add(total, times(v, nv.fill(nb.cast(share, norm))))
                nv.write(sums, c - first, 1, total, many)
            to += i3 * t[X + 4] + first * t[X + 1]
            given += i3 * t[X_GIVEN + 4] + first * t[X_GIVEN + 1]
            _give_back(dx, to, t[X + 1], x, given, t[X_GIVEN + 1], sums, end - first, kind, norm)


@nb.kernel
def _forward(parts, threads, a, b, c, d, scratch, table, floats, like):
    nb.launch(_forward_part, parts, threads, (a, b, c, d, scratch, table, floats, like))


@nb.kernel
def _backward(parts, threads, a, b, c, d, scratch, table, floats, like):
    nb.launch(_backward_part, parts, threads, (a, b, c, d, scratch, table, floats, like))


def _lanes_are_columns(g: Windows, strides: tuple[int, ...]) -> bool:
    """Columns where a step along W of the larger tensor is the shorter one in memory and there are enough of them."""
    if g.C > 1 and strides[1] <= strides[4]:
        return False
    return g.sizes[2] >= 4 or g.sizes[2] >= g.C


def _pieces(row: WindowAxis) -> list[int]:
    """How many runs of columns the same neighbouring windows hold, and of each its ends and those of the windows."""
    held = row.holders()
    starts = [w for w in range(len(held)) if w == 0 or held[w] != held[w - 1]]
    found = [len(starts)]
    for w, end in zip(starts, [*starts[1:], len(held)], strict=True):
        found += [w, end, held[w][0] if held[w] else 0, held[w][-1] + 1 if held[w] else 0]
    return found


def _table(problem: Problem) -> tuple[np.ndarray, np.ndarray, int]:
    """The tables of whole numbers and of floating-point ones, and the number of parts."""
    g = Windows.of(problem)
    forward = problem.op.name.endswith("_fwd")
    norm = getattr(problem.op, "norm", None)
    kind = AVERAGE if norm is None else {1.0: SUM, 2.0: SQUARES}.get(norm, POWERS)
    x, y = g.strides[problem.op.x_role], g.strides[problem.op.y_role]  # type: ignore[attr-defined]
    columns = _lanes_are_columns(g, x)
    plane, processors = (g.counts if forward else g.sizes), problem.target.processors
    if columns:
        units, width = (g.N, g.C, plane[0], plane[1], 1), 0
    else:
        others = g.N * math.prod(plane)
        width = CHUNK if others >= 4 * processors else BLOCK
        units = (g.N, *plane, -(-g.C // width))
    row = g.axes[2]
    reach = row.dilation * max(row.window - 1, 0)
    left = (row.before if forward else reach) + nv.LANES
    length = left + max(g.sizes[2], g.counts[2]) + max(row.before, row.after) + reach + row.stride + 2 * nv.LANES
    length = max(length, left + (row.count - 1) * row.stride + reach + 2 * nv.LANES) if columns else 0
    lanes = max(g.sizes[2], g.counts[2]) + 2 * nv.LANES if columns else CHUNK
    head = (columns, math.prod(units), kind, g.C, *units[1:], *g.sizes, *g.counts, *(a.dilation for a in g.axes))
    slides = (row.stride, row.before, row.window, left, length + lanes, length, width)
    given = (g.strides.get("x", x), g.strides.get("y", y)) if kind != AVERAGE and not forward else (x, y)
    weights = divisors(problem, g.axes)
    first, second, at = [], [], TABLES
    tables: list[int] = []
    for a in g.axes:
        if forward:
            ends = [a.inside(q) for q in range(a.count)]
            pair = [e[0] for e in ends], [e[1] for e in ends]
        else:
            holders = a.holders()
            pair = [0, *np.cumsum([len(h) for h in holders]).tolist()], [q for held in holders for q in held]
        for places, numbers in zip((first, second), pair, strict=True):
            places.append(at)
            tables += numbers
            at += len(numbers)
    starts = np.cumsum([1 + CHUNK, *map(len, weights[:2])]).tolist()
    alike, pieces, row_ends = [], [0], []
    if columns and not forward:
        held = g.axes[1].holders()
        alike = [int(h > 0 and held[h] == held[h - 1]) for h in range(len(held))]
        pieces = _pieces(row)
        row_ends = [n for q in range(row.count) for n in row.inside(q)]
    places = (at, at + len(alike), at + len(alike) + len(pieces))
    given_strides = (*x, *y, *given[0], *given[1])
    numbers = (*head, *slides, *given_strides, *first, *second, *starts, *places, *tables, *alike, *pieces, *row_ends)
    floats = [norm or 1.0, *[1.0] * CHUNK, *(w for axis in weights for w in axis)]
    work = problem.items[0][1].numel + problem.flops
    parts = int(max(1, min(math.prod(units), work // 16384, PARTS)))
    return np.array(numbers, dtype=np.int64), np.array(floats, dtype=np.float64), parts


class AverageDirect(Engine):
    name = "pool.average_direct"
    operations = (
        "avg_pool_fwd", "avg_pool_bwd", "lp_pool_fwd", "lp_pool_bwd", "adaptive_avg_pool_fwd", "adaptive_avg_pool_bwd",
    )  # fmt: skip
    targets = ("cpu",)
    notes = frozenset({"runtime_compilation"})

    def refusals(self, problem: Problem) -> list[str]:
        r = Refusals()
        r.require_tensors(problem.items, TYPES)
        return r

    def workspace_size(self, problem: Problem, config: Config) -> int:
        table, _, parts = _table(problem)
        return 8 * parts * int(table[LENGTH])

    def cost(self, problem: Problem, config: Config) -> float:
        g = Windows.of(problem)
        forward = problem.op.name.endswith("_fwd")
        columns = _lanes_are_columns(g, g.strides[problem.op.x_role])  # type: ignore[attr-defined]
        steps = [a.longest if forward else -(-a.longest // max(a.stride, 1)) + (not a.stride) for a in g.axes]
        points = steps[0] * steps[1] + steps[2] if columns else math.prod(steps)
        lanes = g.N * g.C * math.prod(g.counts if forward else g.sizes) / nv.LANES
        power = getattr(problem.op, "norm", None) not in (None, 1.0, 2.0)
        # Measured: nanoseconds a vector, for each point of a window, and for a power lane by lane.
        seconds = lanes * (15e-9 + points * (2e-9 + 150e-9 * power))
        return roofline(problem, flops=0.0) + seconds / problem.target.processors

    def build(self, problem: Problem, config: Config) -> Run:
        table, floats, parts = _table(problem)
        address, floats_address = table.ctypes.data, floats.ctypes.data
        like = nb.token(problem.items[0][1].dtype)
        kernel = _forward if problem.op.name.endswith("_fwd") else _backward
        threads = nb.threads if parts > 1 else lambda: 1
        kernel(0, 1, 0, 0, 0, 0, 0, address, floats_address, like)  # compiles, or loads from disk; no part is run
        given = len(problem.items) == 4

        def run(tensors, workspace, _keep=(table, floats)):
            a, b = tensors[0].data_ptr(), tensors[-1].data_ptr()
            c, d = (tensors[1].data_ptr(), tensors[2].data_ptr()) if given else (0, 0)
            scratch = workspace.data_ptr()
            kernel(parts, threads(), a, b, c, d, scratch, address, floats_address, like)

        return run
