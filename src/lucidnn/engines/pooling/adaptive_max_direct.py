"""``pool.adaptive_max_direct``: adaptive max pooling on a CPU for any sizes, global pooling above all, in Numba.

Method: a table for each axis says where windows start and how long they are. Where channels lie closest together,
sixteen of them are the lanes of a vector (see ``_numba/vector.py``) while the points of a window pass by. Where columns
do, the lanes are sixteen neighbours of a row of the window; each lane keeps its own largest value and place, and the
sixteen are compared at the end (short rows go element by element). A global window over dense planes is one long row.

Backward, with channels closest together, asks for every place the few windows that hold it, sixteen channels at a time.
With columns closest together a thread owns a plane: it walks over the windows in order and adds each dy at its index,
in dx itself or, for 16 bits and planes with gaps, in a plane of sums that is rounded once. No two threads share an
element: no atomics.

Cost: the memory traffic, or a few vector operations for each window point. Limits: planes below 2^31 points.
"""

import math

import numpy as np
from numba.extending import register_jitable

from ...core.engine import Config, Engine, Refusals, Run
from ...core.heuristics import roofline
from ...core.problem import Problem
from .. import _numba as nb
from .._numba import vector as nv
from .._numba.memory import size_of
from ._axes import Windows

CHUNK = 512  # channels that one unit of work has at most
PARTS = 64
SHORT = 8  # elements of a row up to which they go one by one
TYPES = ("f64", "f32", "f16", "bf16")
INDEX_KINDS = {"none": 0, "i32": 1, "i64": 2}

# What the table of 64-bit integers holds, and where: one number, or one for each of five or three axes.
COLUMNS, UNITS, KIND, SIZES, IN, OUT, WIDTH = 0, 1, 2, 3, 8, 11, 14
X, Y, INDEX, FIRST, SECOND, STRAIGHT, TABLES = 15, 20, 25, 30, 33, 36, 37


@register_jitable
def _coordinates(unit, t):
    """A unit of work's place along the five axes of `SIZES`; the last one counts chunks of lanes."""
    rest, chunk = unit // t[SIZES + 4], unit % t[SIZES + 4]
    rest, i3 = rest // t[SIZES + 3], rest % t[SIZES + 3]
    rest, i2 = rest // t[SIZES + 2], rest % t[SIZES + 2]
    return rest // t[SIZES + 1], rest % t[SIZES + 1], i2, i3, chunk


@register_jitable
def _offset(t, at, n, c, d, h, w):
    return n * t[at] + c * t[at + 1] + d * t[at + 2] + h * t[at + 3] + w * t[at + 4]


@nb.kernel
def _forward_part(part, parts, x_at, y_at, index_at, scratch, table, like):
    t, x, y = nb.pointer(table, np.int64(0)), nb.pointer(x_at, like), nb.pointer(y_at, like)
    middle, wide = nb.pointer(index_at, np.int32(0)), nb.pointer(index_at, np.int64(0))
    lowest = nv.fill(nb.cast(-np.inf, nb.accumulator(like)))
    nowhere, kind = nv.fill(np.int32(-1)), t[KIND]
    kept = nb.pointer(scratch + part * 256, nb.accumulator(like))
    where = nb.pointer(scratch + part * 256 + 128, np.int32(0))
    for unit in range(t[UNITS] * part // parts, t[UNITS] * (part + 1) // parts):
        n, i1, i2, i3, chunk = _coordinates(unit, t)
        o, p = (i2, i3) if t[COLUMNS] else (i1, i2)
        z, h = t[t[FIRST] + o], t[t[FIRST + 1] + p]
        points_d, points_h = t[t[SECOND] + o], t[t[SECOND + 1] + p]
        if t[COLUMNS]:
            for q in range(t[OUT + 2]):
                w, points = t[t[FIRST + 2] + q], t[t[SECOND + 2] + q]
                at_best, best_number = np.int64(-1), nb.cast(-np.inf, nb.accumulator(like))
                best, place = lowest, nowhere
                for a in range(points_d):
                    for b in range(points_h):
                        at = _offset(t, X, n, i1, z + a, h + b, w)
                        flat = ((z + a) * t[IN + 1] + h + b) * t[IN + 2] + w
                        if points < SHORT:
                            for s in range(points):
                                v = nb.load(x, at + s * t[X + 4])
                                if at_best < 0 or v > best_number or (v != v and best_number == best_number):
                                    best_number, at_best = v, flat + s
                        else:
                            for s in range(0, points, nv.LANES):
                                many = min(points - s, nv.LANES)
                                v = nv.read(x, at + s * t[X + 4], t[X + 4], 0, many)
                                take = nv.either(nv.negative(place), nv.exceeds(v, best))
                                take = nv.both(take, nv.between(0, many))
                                best = nv.select(take, v, best)
                                numbers = nv.ramp(nb.cast(flat + s, np.int32(0)), np.int32(1))
                                place = nv.select(take, numbers, place)
                if points >= SHORT:
                    # The first NaN, or the first of the largest: of equal lanes the one with the smaller place.
                    nv.write(kept, 0, 1, best, nv.LANES)
                    nv.write(where, 0, 1, place, nv.LANES)
                    for lane in range(nv.LANES):
                        v, found = kept[lane], np.int64(where[lane])
                        if found < 0:
                            continue
                        larger = v > best_number or (v != v and best_number == best_number)
                        equal = v == best_number or (v != v and best_number != best_number)
                        if at_best < 0 or larger or (equal and found < at_best):
                            best_number, at_best = v, found
                nb.store(y, _offset(t, Y, n, i1, o, p, q), best_number)
                if kind == 1:
                    middle[_offset(t, INDEX, n, i1, o, p, q)] = nb.cast(at_best, np.int32(0))
                elif kind == 2:
                    wide[_offset(t, INDEX, n, i1, o, p, q)] = at_best
        else:
            w, points = t[t[FIRST + 2] + i3], t[t[SECOND + 2] + i3]
            for c in range(chunk * t[WIDTH], min(chunk * t[WIDTH] + t[WIDTH], t[SIZES]), nv.LANES):
                many = min(t[SIZES] - c, nv.LANES)
                best, place = lowest, nowhere
                for a in range(points_d):
                    for b in range(points_h):
                        at = _offset(t, X, n, c, z + a, h + b, w)
                        flat = ((z + a) * t[IN + 1] + h + b) * t[IN + 2] + w
                        for s in range(points):
                            v = nv.read(x, at + s * t[X + 4], t[X + 1], 0, many)
                            take = nv.either(nv.negative(place), nv.exceeds(v, best))
                            best = nv.select(take, v, best)
                            place = nv.select(take, nv.fill(nb.cast(flat + s, np.int32(0))), place)
                nv.write(y, _offset(t, Y, n, c, o, p, i3), t[Y + 1], best, many)
                at = _offset(t, INDEX, n, c, o, p, i3)
                if kind == 1:
                    nv.write(middle, at, t[INDEX + 1], place, many)
                elif kind == 2:
                    nv.write(wide, at, t[INDEX + 1], nv.widen(place), many)


@nb.kernel
def _backward_part(part, parts, dy_at, dx_at, index_at, scratch, table, like):
    t, dy, dx = nb.pointer(table, np.int64(0)), nb.pointer(dy_at, like), nb.pointer(dx_at, like)
    middle, wide = nb.pointer(index_at, np.int32(0)), nb.pointer(index_at, np.int64(0))
    zero, nothing, kind = nv.fill(nb.accumulator(like)), nb.accumulator(like), t[KIND]
    rows, width = t[IN + 1], t[IN + 2]
    points = t[IN] * rows * width
    # A place's row and plane without a division: half a place away from whole rows no rounding matters below 2^31.
    row_share, plane_share = 1.0 / max(width, 1), 1.0 / max(rows, 1)
    # What a store might change, for all that the compiler knows, is read once.
    flat, steps, dy_step, index_step = t[IN] == 1, t[OUT + 2], t[Y + 4], t[INDEX + 4]
    starts, ends = nb.pointer(table + 8 * t[FIRST + 2], np.int64(0)), nb.pointer(table + 8 * t[SECOND + 2], np.int64(0))
    begin, end_unit = t[UNITS] * part // parts, t[UNITS] * (part + 1) // parts
    n, i1, i2, i3, chunk = _coordinates(begin, t)
    for unit in range(begin, end_unit):
        if t[COLUMNS]:
            if unit > begin:
                i1 += 1
                if i1 == t[SIZES + 1]:
                    i1, n = 0, n + 1
            # The sums are dx itself where that holds them, or a plane of this part's own.
            start = n * t[X] + i1 * t[X + 1]
            sums = nb.pointer(scratch + part * 8 * (points + 8), nb.accumulator(like))
            if t[STRAIGHT]:
                sums = nb.pointer(dx_at + start * size_of(like), nb.accumulator(like))
            for i in range(points):
                sums[i] = nothing
            for o in range(t[OUT]):
                z0, z1 = t[t[FIRST] + o], t[t[SECOND] + o]
                for p in range(t[OUT + 1]):
                    h0, h1 = t[t[FIRST + 1] + p], t[t[SECOND + 1] + p]
                    at = _offset(t, INDEX, n, i1, o, p, 0)
                    from_ = _offset(t, Y, n, i1, o, p, 0)
                    for q in range(steps):
                        k = np.int64(middle[at + q * index_step]) if kind == 1 else wide[at + q * index_step]
                        if 0 <= k < points:
                            line, z = np.int64((k + 0.5) * row_share), 0
                            if not flat:
                                z = np.int64((line + 0.5) * plane_share)
                            h, w = line - z * rows, k - line * width
                            if z0 <= z < z1 and h0 <= h < h1 and starts[q] <= w < ends[q]:
                                sums[k] += nb.load(dy, from_ + q * dy_step)
            if t[STRAIGHT]:
                continue
            for z in range(t[IN]):
                for h in range(rows):
                    at, row = _offset(t, X, n, i1, z, h, 0), (z * rows + h) * width
                    if t[X + 4] == 1:
                        for w in range(width):
                            nb.store(dx, at + w, sums[row + w])
                    else:
                        for w in range(width):
                            nb.store(dx, at + w * t[X + 4], sums[row + w])
        else:
            n, i1, i2, i3, chunk = _coordinates(unit, t)
            place = (i1 * rows + i2) * width + i3
            for c in range(chunk * t[WIDTH], min(chunk * t[WIDTH] + t[WIDTH], t[SIZES]), nv.LANES):
                many = min(t[SIZES] - c, nv.LANES)
                total = zero
                for i in range(t[t[FIRST] + i1], t[t[FIRST] + i1 + 1]):
                    for j in range(t[t[FIRST + 1] + i2], t[t[FIRST + 1] + i2 + 1]):
                        for k in range(t[t[FIRST + 2] + i3], t[t[FIRST + 2] + i3 + 1]):
                            o, p, q = t[t[SECOND] + i], t[t[SECOND + 1] + j], t[t[SECOND + 2] + k]
                            at = _offset(t, INDEX, n, c, o, p, q)
                            v = nv.read(dy, _offset(t, Y, n, c, o, p, q), t[Y + 1], 0, many)
                            if kind == 1:
                                found = nv.read(middle, at, t[INDEX + 1], 0, many)
                                hit = nv.equal(found, nv.fill(nb.cast(place, np.int32(0))))
                            else:
                                hit = nv.equal(nv.read(wide, at, t[INDEX + 1], 0, many), nv.fill(place))
                            total = nv.add(total, nv.select(hit, v, zero))
                nv.write(dx, _offset(t, X, n, c, i1, i2, i3), t[X + 1], total, many)


@nb.kernel
def _forward(parts, threads, a, b, index, scratch, table, like):
    nb.launch(_forward_part, parts, threads, (a, b, index, scratch, table, like))


@nb.kernel
def _backward(parts, threads, a, b, index, scratch, table, like):
    nb.launch(_backward_part, parts, threads, (a, b, index, scratch, table, like))


def _lanes_are_columns(g: Windows, strides: tuple[int, ...]) -> bool:
    """Columns where a step along W of x is the shorter one in memory and there are enough of them."""
    if g.C > 1 and strides[1] <= strides[4]:
        return False
    return g.sizes[2] >= 4 or g.sizes[2] >= g.C


def _is_run(sizes: tuple[int, int, int], strides: tuple[int, ...]) -> bool:
    """Whether the points of a plane lie side by side, in order."""
    _, h, w = sizes
    return all(n == 1 or s == step for n, s, step in zip(sizes, strides[2:], (h * w, w, 1), strict=True))


def _table(problem: Problem) -> tuple[np.ndarray, int]:
    """The table, and the number of parts."""
    g = Windows.of(problem)
    forward = problem.op.name == "adaptive_max_pool_fwd"
    x, y = g.strides[problem.op.x_role], g.strides[problem.op.y_role]  # type: ignore[attr-defined]
    index = g.strides.get("index", (0,) * 5)
    kind = INDEX_KINDS[problem["index"].dtype if "index" in problem.tensors else "none"]
    columns, plane = _lanes_are_columns(g, x), g.counts if forward else g.sizes
    width = CHUNK if g.N * math.prod(plane) >= 4 * problem.target.processors else 4 * nv.LANES
    if columns:
        units = (g.N, g.C, *(plane[:2] if forward else (1, 1)), 1)
    else:
        units = (g.N, *plane, -(-g.C // width))
    tables: list[int] = []
    first, second, at = [], [], TABLES
    for a in g.axes:
        if forward:
            ends = [a.inside(q) for q in range(a.count)]
            pair = [e[0] for e in ends], [e[1] for e in ends]
        elif columns:
            ends = [a.inside(q) for q in range(a.count)]
            pair = [e[0] for e in ends], [e[0] + e[1] for e in ends]
        else:
            holders = a.holders()
            pair = [0, *np.cumsum([len(h) for h in holders]).tolist()], [q for held in holders for q in held]
        for places, numbers in zip((first, second), pair, strict=True):
            places.append(at)
            tables += numbers
            at += len(numbers)
    head = (columns, math.prod(units), kind, g.C, *units[1:], *g.sizes, *g.counts, width)
    straight = columns and not forward and problem["dx"].itemsize >= 4 and _is_run(g.sizes, x)
    table = np.array([*head, *x, *y, *index, *first, *second, straight, *tables], dtype=np.int64)
    work = problem[problem.op.x_role].numel  # type: ignore[attr-defined]
    return table, int(max(1, min(math.prod(units), work // 16384, PARTS)))


class AdaptiveMaxDirect(Engine):
    name = "pool.adaptive_max_direct"
    operations = ("adaptive_max_pool_fwd", "adaptive_max_pool_bwd")
    targets = ("cpu",)
    notes = frozenset({"runtime_compilation"})

    def refusals(self, problem: Problem) -> list[str]:
        r = Refusals()
        r.require_tensors(((role, t) for role, t in problem.items if role != "index"), TYPES)
        points = math.prod(Windows.of(problem).sizes)
        r.require(points < 2**31, "planes of less than 2^31 points", points)
        return r

    def workspace_size(self, problem: Problem, config: Config) -> int:
        table, parts = _table(problem)
        if problem.op.name == "adaptive_max_pool_fwd":
            return 256 * parts
        points = math.prod(Windows.of(problem).sizes)
        return (8 * points + 64) * parts if table[COLUMNS] and not table[STRAIGHT] else 0

    def cost(self, problem: Problem, config: Config) -> float:
        g = Windows.of(problem)
        forward = problem.op.name == "adaptive_max_pool_fwd"
        columns = _lanes_are_columns(g, g.strides[problem.op.x_role])  # type: ignore[attr-defined]
        points = [a.longest for a in g.axes]
        seen = g.N * g.C * (math.prod(g.counts) * math.prod(points) if forward else math.prod(g.sizes))
        # Measured: nanoseconds an element seen, and an element of y.
        short = columns and forward and points[2] < SHORT
        seconds = seen * (1.2e-9 if short else 0.25e-9) + g.N * g.C * math.prod(g.counts) * (20e-9 if columns else 1e-9)
        return roofline(problem, flops=0.0) + seconds / problem.target.processors

    def build(self, problem: Problem, config: Config) -> Run:
        table, parts = _table(problem)
        address = table.ctypes.data
        like = nb.token(problem.items[0][1].dtype)
        forward = problem.op.name == "adaptive_max_pool_fwd"
        kernel = _forward if forward else _backward
        threads = nb.threads if parts > 1 else lambda: 1
        kernel(0, 1, 0, 0, 0, 0, address, like)  # compiles, or loads from disk; no part is run
        indexed = "index" in problem.tensors

        def run(tensors, workspace, _keep=table):
            scratch = 0 if workspace is None else workspace.data_ptr()
            if forward:
                a, b = tensors[0].data_ptr(), tensors[1].data_ptr()
                index = tensors[2].data_ptr() if indexed else 0
            else:
                a, b, index = tensors[0].data_ptr(), tensors[2].data_ptr(), tensors[1].data_ptr()
            kernel(parts, threads(), a, b, index, scratch, address, like)

        return run
