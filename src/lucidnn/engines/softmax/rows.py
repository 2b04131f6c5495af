"""``softmax.rows``: softmax and its logarithm on a CPU over any axes and layout, both directions, in Numba.

Method: sixteen elements are the lanes of a vector (see ``_numba/vector.py``). Where the reduced axes are dense, lanes
lie along the row: it is read for its largest value, read again for the sum of exponentials, and once more for the
result, from the first-level cache but for the first time; the exponentials of float32 rows are kept in the output
meanwhile. Where another axis is dense (channels of nchw images), lanes are neighbouring rows, sixty-four together,
their largest values and sums in registers. Backward is the same with the
sum of y dy, or of dy for the logarithm. Sums are in float32, in float64 where a tensor has that type.

Cost: the memory traffic, and an exponential (two for 16-bit results) an element. Every row is summed by one thread in
one order. Limits: the loops after merging are at most five kept and four reduced.
"""

import math

import numpy as np

from ...core.engine import Config, Engine, Refusals, Run
from ...core.heuristics import roofline
from ...core.problem import Problem
from .. import _numba as nb
from .._numba import exponential as ne
from .._numba import vector as nv
from .._numba.memory import same_type
from .._row_loops import RowLoops, row_loops

TYPES = ("f64", "f32", "f16", "bf16")
GRAIN = 4096  # elements that are worth a thread
WIDTH = 64  # neighbouring rows that are taken together
KEPT, REDUCED = 5, 4

# Table: counts and flags; then for every loop its size and the steps of x (or dx), y, dy and the mask.
UNITS, CHUNKS, RUNS, LOG, EMPTY_ZERO, HAS_MASK = range(6)
SIZE, X, Y, G, Q = range(5)
LANE, INNER, OUTER, OUTER_RUNS = 6, 11, 16, 16 + 5 * KEPT
LOWEST, LOWEST_64 = -3.4028234663852886e38, -1.7976931348623157e308


@nb.jitable
def _place(number, t, first, loops, at):
    """Add the four tensors' places of point `number` of a nest of loops, the innermost first, to `at`."""
    for loop in range(loops):
        base = first + 5 * loop
        if t[base + SIZE] > 1:
            i = number % t[base + SIZE]
            number //= t[base + SIZE]
            for tensor in range(X, Q + 1):
                at[tensor] += i * t[base + tensor]


@nb.jitable
def _start(number, run, t, at):
    for tensor in range(X, Q + 1):
        at[tensor] = 0
    _place(number, t, OUTER, KEPT, at)
    if run > 0:
        _place(run, t, OUTER_RUNS, REDUCED - 1, at)


@nb.jitable
def _get(p, at, step, many):
    """Sixteen elements, or the first `many` and zeros."""
    if step == 1 and many == nv.LANES:
        return nv.read_all(p, at)
    return nv.read(p, at, step, 0, many)


@nb.jitable
def _masked(r, many, has_mask, mask, mask_at, mask_step, zero):
    """Elements of r; `zero` where the mask is false."""
    if has_mask:
        if mask_step == 0:
            return zero if mask[mask_at] == 0 else r
        return nv.select(ne.nonzero(_get(mask, mask_at, mask_step, many)), r, zero)
    return r


@nb.jitable
def _value(x, at, step, many, has_mask, mask, mask_at, mask_step, nothing):
    """Elements of x; minus infinity where there is none or the mask is false."""
    v = _get(x, at, step, many)
    if many < nv.LANES:
        v = nv.select(nv.between(0, many), v, nothing)
    return _masked(v, many, has_mask, mask, mask_at, mask_step, nothing)


@nb.jitable
def _finished(v, most, factor, log):
    """The result from a value, the row's largest, and the sum's reciprocal or, for the logarithm, its logarithm."""
    r = ne.subtract(v, most)
    return ne.subtract(r, factor) if log else ne.multiply(ne.exp(r), factor)


@nb.jitable
def _factor(sums, log, zero):
    return ne.log(sums) if log else ne.divide(ne.exp(zero), sums)


@nb.jitable
def _kept(x, x_at, y, y_at, count, most, start, least):
    """Write the exponentials of a dense row less `most`; gives their sum, lane by lane, added to `start`."""
    a, b = start, ne.subtract(most, most)
    whole = count // (2 * nv.LANES) * (2 * nv.LANES)
    for k in range(0, whole, 2 * nv.LANES):
        e = ne.exp(ne.subtract(nv.read_all(x, x_at + k), most))
        f = ne.exp(ne.subtract(nv.read_all(x, x_at + k + nv.LANES), most))
        a, b = nv.add(a, e), nv.add(b, f)
        nv.write(y, y_at + k, 1, e, nv.LANES)
        nv.write(y, y_at + k + nv.LANES, 1, f, nv.LANES)
    for k in range(whole, count, nv.LANES):
        e = ne.exp(ne.subtract(ne.row_end(x, x_at + k, count - k, least), most))
        a = nv.add(a, e)
        nv.write(y, y_at + k, 1, e, min(count - k, nv.LANES))
    return nv.add(a, b)


@nb.jitable
def _written(x, x_at, y, y_at, count, most, factor, keeps, log, least):
    """A dense row's results: scaled where the exponentials were kept, else from the values."""
    whole = count // nv.LANES * nv.LANES
    if keeps:
        for k in range(0, whole, nv.LANES):
            nv.write(y, y_at + k, 1, ne.multiply(nv.read_all(y, y_at + k), factor), nv.LANES)
    elif log:
        for k in range(0, whole, nv.LANES):
            v = nv.read_all(x, x_at + k)
            nv.write(y, y_at + k, 1, ne.subtract(ne.subtract(v, most), factor), nv.LANES)
    else:
        for k in range(0, whole, nv.LANES):
            v = nv.read_all(x, x_at + k)
            nv.write(y, y_at + k, 1, ne.multiply(ne.exp(ne.subtract(v, most)), factor), nv.LANES)
    if whole < count:
        many = count - whole
        r = _finished(ne.row_end(x, x_at + whole, many, least), most, factor, log)
        nv.write(y, y_at + whole, 1, r, many)


@nb.exact_kernel
def _forward_along(part, parts, x_address, mask_address, y_address, table, x_like, y_like, like):
    x, y = nb.pointer(x_address, x_like), nb.pointer(y_address, y_like)
    mask, t = nb.pointer(mask_address, np.uint8(0)), nb.pointer(table, np.int64(0))
    nothing = nv.fill(nb.cast(-np.inf, like))
    finite = nv.fill(nb.cast(LOWEST_64 if same_type(like, np.float64(0)) else LOWEST, like))
    log, runs, has_mask = t[LOG] != 0, t[RUNS], t[HAS_MASK] != 0
    at = np.empty(5, np.int64)
    length, x_step, y_step, mask_step = t[INNER], t[INNER + X], t[INNER + Y], t[INNER + Q]
    dense = x_step == 1 and y_step == 1 and not has_mask
    keeps = same_type(y_like, like) and not log and dense
    zero = nv.fill(nb.cast(0, like))
    for unit in range(t[UNITS] * part // parts, t[UNITS] * (part + 1) // parts):
        most_of = finite
        for run in range(runs):
            _start(unit, run, t, at)
            if dense:
                most_of = ne.row_largest(x, at[X], length, most_of, nothing)
                continue
            for k in range(0, length, nv.LANES):
                many, x_at, mask_at = min(nv.LANES, length - k), at[X] + k * x_step, at[Q] + k * mask_step
                most_of = ne.larger(_value(x, x_at, x_step, many, has_mask, mask, mask_at, mask_step, nothing), most_of)
        most = nv.fill(ne.largest(most_of))
        sums = zero
        for run in range(runs):
            _start(unit, run, t, at)
            if keeps:
                sums = _kept(x, at[X], y, at[Y], length, most, sums, nothing)
            elif dense:
                sums = ne.row_exponentials(x, at[X], length, most, sums, nothing)
            else:
                for k in range(0, length, nv.LANES):
                    many, x_at, mask_at = min(nv.LANES, length - k), at[X] + k * x_step, at[Q] + k * mask_step
                    v = _value(x, x_at, x_step, many, has_mask, mask, mask_at, mask_step, nothing)
                    sums = nv.add(sums, ne.exp(ne.subtract(v, most)))
        total = ne.total(sums)
        empty = total == 0 and t[EMPTY_ZERO] != 0
        factor = nv.fill(nb.cast(math.log(total), like) if log else nb.cast(1, like) / total)
        for run in range(runs):
            _start(unit, run, t, at)
            if dense and not empty:
                _written(x, at[X], y, at[Y], length, most, factor, keeps, log, nothing)
                continue
            for k in range(0, length, nv.LANES):
                many, x_at, mask_at = min(nv.LANES, length - k), at[X] + k * x_step, at[Q] + k * mask_step
                r = nothing if log else zero
                if not empty:
                    v = _value(x, x_at, x_step, many, has_mask, mask, mask_at, mask_step, nothing)
                    r = _finished(v, most, factor, log)
                nv.write(y, at[Y] + k * y_step, y_step, r, many)


@nb.jitable
def _wide_columns(x, x_at, x_step, y, y_at, y_step, length, keeps, log, finite, zero):
    """Sixty-four neighbouring rows of `length` elements `x_step` apart, dense across; empty ones are NaN."""
    w = nv.LANES
    p, q, r, s = finite, finite, finite, finite
    for k in range(length):
        i = x_at + k * x_step
        p, q = ne.larger(nv.read_all(x, i), p), ne.larger(nv.read_all(x, i + w), q)
        r, s = ne.larger(nv.read_all(x, i + 2 * w), r), ne.larger(nv.read_all(x, i + 3 * w), s)
    a, b, c, d = zero, zero, zero, zero
    for k in range(length):
        i, j = x_at + k * x_step, y_at + k * y_step
        e, f = ne.exp(ne.subtract(nv.read_all(x, i), p)), ne.exp(ne.subtract(nv.read_all(x, i + w), q))
        g = ne.exp(ne.subtract(nv.read_all(x, i + 2 * w), r))
        h = ne.exp(ne.subtract(nv.read_all(x, i + 3 * w), s))
        a, b, c, d = nv.add(a, e), nv.add(b, f), nv.add(c, g), nv.add(d, h)
        if keeps:
            for part in range(4):
                nv.write(y, j + part * w, 1, e if part == 0 else f if part == 1 else g if part == 2 else h, w)
    a, b, c, d = _factor(a, log, zero), _factor(b, log, zero), _factor(c, log, zero), _factor(d, log, zero)
    for k in range(length):
        for part in range(4):
            factor = a if part == 0 else b if part == 1 else c if part == 2 else d
            most = p if part == 0 else q if part == 1 else r if part == 2 else s
            i, j = x_at + k * x_step + part * w, y_at + k * y_step + part * w
            if keeps:
                nv.write(y, j, 1, ne.multiply(nv.read_all(y, j), factor), w)
            else:
                nv.write(y, j, 1, _finished(nv.read_all(x, i), most, factor, log), w)


@nb.exact_kernel
def _forward_across(part, parts, x_address, mask_address, y_address, table, x_like, y_like, like):
    x, y = nb.pointer(x_address, x_like), nb.pointer(y_address, y_like)
    mask, t = nb.pointer(mask_address, np.uint8(0)), nb.pointer(table, np.int64(0))
    nothing, zero = nv.fill(nb.cast(-np.inf, like)), nv.fill(nb.cast(0, like))
    finite = nv.fill(nb.cast(LOWEST_64 if same_type(like, np.float64(0)) else LOWEST, like))
    log, runs, has_mask, empty_zero = t[LOG] != 0, t[RUNS], t[HAS_MASK] != 0, t[EMPTY_ZERO] != 0
    at = np.empty(5, np.int64)
    length, x_step, y_step, mask_step = t[INNER], t[LANE + X], t[LANE + Y], t[LANE + Q]
    x_row, y_row, mask_row = t[INNER + X], t[INNER + Y], t[INNER + Q]
    dense = x_step == 1 and y_step == 1 and not has_mask and runs == 1 and not empty_zero
    keeps = same_type(y_like, like) and not log
    for unit in range(t[UNITS] * part // parts, t[UNITS] * (part + 1) // parts):
        first = unit % t[CHUNKS] * WIDTH
        end = min(first + WIDTH, t[LANE])
        if dense and end - first == WIDTH:
            _start(unit // t[CHUNKS], 0, t, at)
            _wide_columns(x, at[X] + first, x_row, y, at[Y] + first, y_row, length, keeps, log, finite, zero)
            continue
        for lane in range(first, end, nv.LANES):
            many = min(nv.LANES, end - lane)
            most, sums, factor = finite, zero, zero
            for turn in range(3):
                if turn == 2:
                    factor = _factor(sums, log, zero)
                for run in range(runs):
                    _start(unit // t[CHUNKS], run, t, at)
                    for k in range(length):
                        x_at = at[X] + k * x_row + lane * x_step
                        mask_at = at[Q] + k * mask_row + lane * mask_step
                        v = _value(x, x_at, x_step, many, has_mask, mask, mask_at, mask_step, nothing)
                        if turn == 0:
                            most = ne.larger(v, most)
                        elif turn == 1:
                            sums = nv.add(sums, ne.exp(ne.subtract(v, most)))
                        else:
                            r = _finished(v, most, factor, log)
                            if empty_zero:
                                r = nv.select(ne.is_value(sums, zero), nothing if log else zero, r)
                            nv.write(y, at[Y] + k * y_row + lane * y_step, y_step, r, many)


@nb.jitable
def _slope(v, g, total, log, empty_zero, nothing, zero):
    """Elements of dx, but for the mask."""
    if log:
        r = ne.subtract(g, ne.multiply(ne.exp(v), total))
        return nv.select(ne.is_value(v, nothing), zero, r) if empty_zero else r
    return ne.multiply(v, ne.subtract(g, total))


@nb.jitable
def _product(y, y_at, y_step, dy, g_at, g_step, many, log):
    """What is summed."""
    g = _get(dy, g_at, g_step, many)
    return g if log else ne.multiply(g, _get(y, y_at, y_step, many))


@nb.jitable
def _dot(y, y_at, dy, g_at, count, log, start):
    """The sum over a dense row, lane by lane, added to `start`."""
    a, b = start, ne.subtract(start, start)
    c, d = b, b
    whole, w = count // (4 * nv.LANES) * (4 * nv.LANES), nv.LANES
    if log:
        for j in range(g_at, g_at + whole, 4 * w):
            a, b = nv.add(a, nv.read_all(dy, j)), nv.add(b, nv.read_all(dy, j + w))
            c, d = nv.add(c, nv.read_all(dy, j + 2 * w)), nv.add(d, nv.read_all(dy, j + 3 * w))
    else:
        for k in range(0, whole, 4 * w):
            i, j = y_at + k, g_at + k
            a = nv.add(a, ne.multiply(nv.read_all(dy, j), nv.read_all(y, i)))
            b = nv.add(b, ne.multiply(nv.read_all(dy, j + w), nv.read_all(y, i + w)))
            c = nv.add(c, ne.multiply(nv.read_all(dy, j + 2 * w), nv.read_all(y, i + 2 * w)))
            d = nv.add(d, ne.multiply(nv.read_all(dy, j + 3 * w), nv.read_all(y, i + 3 * w)))
    for k in range(whole, count, w):
        a = nv.add(a, _product(y, y_at + k, 1, dy, g_at + k, 1, min(w, count - k), log))
    return nv.add(nv.add(a, b), nv.add(c, d))


@nb.exact_kernel
def _backward_along(
    part, parts, y_address, dy_address, mask_address, dx_address, table, y_like, dy_like, dx_like, like
):
    y, dy, dx = nb.pointer(y_address, y_like), nb.pointer(dy_address, dy_like), nb.pointer(dx_address, dx_like)
    mask, t = nb.pointer(mask_address, np.uint8(0)), nb.pointer(table, np.int64(0))
    zero, nothing = nv.fill(nb.cast(0, like)), nv.fill(nb.cast(-np.inf, like))
    log, runs, has_mask, empty_zero = t[LOG] != 0, t[RUNS], t[HAS_MASK] != 0, t[EMPTY_ZERO] != 0
    at = np.empty(5, np.int64)
    length, x_step, y_step, g_step, mask_step = t[INNER], t[INNER + X], t[INNER + Y], t[INNER + G], t[INNER + Q]
    dense = x_step == 1 and y_step == 1 and g_step == 1 and not has_mask
    for unit in range(t[UNITS] * part // parts, t[UNITS] * (part + 1) // parts):
        sums = zero
        for run in range(runs):
            _start(unit, run, t, at)
            if dense:
                sums = _dot(y, at[Y], dy, at[G], length, log, sums)
                continue
            for k in range(0, length, nv.LANES):
                many = min(nv.LANES, length - k)
                sums = nv.add(sums, _product(y, at[Y] + k * y_step, y_step, dy, at[G] + k * g_step, g_step, many, log))
        total = nv.fill(ne.total(sums))
        for run in range(runs):
            _start(unit, run, t, at)
            whole = length // nv.LANES * nv.LANES if dense else 0
            y_at, g_at, x_at = at[Y], at[G], at[X]
            if log or empty_zero:
                for k in range(0, whole, nv.LANES):
                    g, v = nv.read_all(dy, g_at + k), nv.read_all(y, y_at + k)
                    nv.write(dx, x_at + k, 1, _slope(v, g, total, log, empty_zero, nothing, zero), nv.LANES)
            else:
                for k in range(0, whole, nv.LANES):
                    g, v = nv.read_all(dy, g_at + k), nv.read_all(y, y_at + k)
                    nv.write(dx, x_at + k, 1, ne.multiply(v, ne.subtract(g, total)), nv.LANES)
            for k in range(whole, length, nv.LANES):
                many = min(nv.LANES, length - k)
                g, v = _get(dy, g_at + k * g_step, g_step, many), _get(y, y_at + k * y_step, y_step, many)
                r = _slope(v, g, total, log, empty_zero, nothing, zero)
                r = _masked(r, many, has_mask, mask, at[Q] + k * mask_step, mask_step, zero)
                nv.write(dx, x_at + k * x_step, x_step, r, many)


@nb.jitable
def _wide_slopes(y, y_at, y_row, dy, g_at, g_row, dx, x_at, x_row, length, log, empty_zero, nothing, zero):
    """Sixty-four neighbouring rows, dense across."""
    w = nv.LANES
    a, b, c, d = zero, zero, zero, zero
    for k in range(length):
        i, j = y_at + k * y_row, g_at + k * g_row
        a = nv.add(a, _product(y, i, 1, dy, j, 1, w, log))
        b = nv.add(b, _product(y, i + w, 1, dy, j + w, 1, w, log))
        c = nv.add(c, _product(y, i + 2 * w, 1, dy, j + 2 * w, 1, w, log))
        d = nv.add(d, _product(y, i + 3 * w, 1, dy, j + 3 * w, 1, w, log))
    for k in range(length):
        for part in range(4):
            total = a if part == 0 else b if part == 1 else c if part == 2 else d
            v, g = nv.read_all(y, y_at + k * y_row + part * w), nv.read_all(dy, g_at + k * g_row + part * w)
            r = _slope(v, g, total, log, empty_zero, nothing, zero)
            nv.write(dx, x_at + k * x_row + part * w, 1, r, w)


@nb.exact_kernel
def _backward_across(
    part, parts, y_address, dy_address, mask_address, dx_address, table, y_like, dy_like, dx_like, like
):
    y, dy, dx = nb.pointer(y_address, y_like), nb.pointer(dy_address, dy_like), nb.pointer(dx_address, dx_like)
    mask, t = nb.pointer(mask_address, np.uint8(0)), nb.pointer(table, np.int64(0))
    zero, nothing = nv.fill(nb.cast(0, like)), nv.fill(nb.cast(-np.inf, like))
    log, runs, has_mask, empty_zero = t[LOG] != 0, t[RUNS], t[HAS_MASK] != 0, t[EMPTY_ZERO] != 0
    at = np.empty(5, np.int64)
    length, x_step, y_step, g_step, mask_step = t[INNER], t[LANE + X], t[LANE + Y], t[LANE + G], t[LANE + Q]
    x_row, y_row, g_row, mask_row = t[INNER + X], t[INNER + Y], t[INNER + G], t[INNER + Q]
    dense = x_step == 1 and y_step == 1 and g_step == 1 and not has_mask and runs == 1
    for unit in range(t[UNITS] * part // parts, t[UNITS] * (part + 1) // parts):
        first = unit % t[CHUNKS] * WIDTH
        end = min(first + WIDTH, t[LANE])
        if dense and end - first == WIDTH:
            _start(unit // t[CHUNKS], 0, t, at)
            _wide_slopes(
                y, at[Y] + first, y_row, dy, at[G] + first, g_row, dx, at[X] + first, x_row, length, log, empty_zero,
                nothing, zero,
            )  # fmt: skip
            continue
        for lane in range(first, end, nv.LANES):
            many = min(nv.LANES, end - lane)
            total = zero
            for turn in range(2):
                for run in range(runs):
                    _start(unit // t[CHUNKS], run, t, at)
                    for k in range(length):
                        y_at, g_at = at[Y] + k * y_row + lane * y_step, at[G] + k * g_row + lane * g_step
                        if turn == 0:
                            total = nv.add(total, _product(y, y_at, y_step, dy, g_at, g_step, many, log))
                        else:
                            g, v = _get(dy, g_at, g_step, many), _get(y, y_at, y_step, many)
                            r = _slope(v, g, total, log, empty_zero, nothing, zero)
                            mask_at = at[Q] + k * mask_row + lane * mask_step
                            r = _masked(r, many, has_mask, mask, mask_at, mask_step, zero)
                            nv.write(dx, at[X] + k * x_row + lane * x_step, x_step, r, many)


@nb.kernel
def _forward_rows(parts, threads, x, mask, y, table, x_like, y_like, like):
    nb.launch(_forward_along, parts, threads, (x, mask, y, table, x_like, y_like, like))


@nb.kernel
def _forward_lanes(parts, threads, x, mask, y, table, x_like, y_like, like):
    nb.launch(_forward_across, parts, threads, (x, mask, y, table, x_like, y_like, like))


@nb.kernel
def _backward_rows(parts, threads, y, dy, mask, dx, table, y_like, dy_like, dx_like, like):
    nb.launch(_backward_along, parts, threads, (y, dy, mask, dx, table, y_like, dy_like, dx_like, like))


@nb.kernel
def _backward_lanes(parts, threads, y, dy, mask, dx, table, y_like, dy_like, dx_like, like):
    nb.launch(_backward_across, parts, threads, (y, dy, mask, dx, table, y_like, dy_like, dx_like, like))


def _loops(problem: Problem) -> RowLoops:
    strides = {role: t.strides for role, t in problem.items}
    return row_loops(problem.items[0][1].shape, strides, problem.op.axes)  # type: ignore[attr-defined]


class Rows(Engine):
    name = "softmax.rows"
    operations = ("softmax_fwd", "softmax_bwd")
    targets = ("cpu",)
    notes = frozenset({"runtime_compilation"})

    def refusals(self, problem: Problem) -> list[str]:
        r = Refusals()
        for role, t in problem.items:
            if role != "mask":
                r.require(t.dtype in TYPES, f"{role} of type {', '.join(TYPES)}", t.dtype)
            r.require(t.numel > 0, f"elements in {role}", str(t))
        if not r:
            loops = _loops(problem)
            r.require(len(loops.kept) <= KEPT, f"at most {KEPT} kept axes after merging", len(loops.kept))
            r.require(len(loops.reduced) <= REDUCED, f"at most {REDUCED} reduced axes likewise", len(loops.reduced))
        return r

    def cost(self, problem: Problem, config: Config) -> float:
        return roofline(problem, flops=20.0 * problem.items[0][1].numel, memory_efficiency=0.7)

    def build(self, problem: Problem, config: Config) -> Run:
        loops, op = _loops(problem), problem.op
        forward = op.name == "softmax_fwd"
        roles = ("x" if forward else "dx", "y", "dy", "mask")
        along = loops.lanes_reduced
        kept = [*range(len(loops.kept))]
        lane = None if along else kept.pop()
        inner = len(loops.reduced) - 1

        def loop(sizes: tuple[int, ...], strides: dict[str, tuple[int, ...]], i: int | None) -> list[int]:
            if i is None:
                return [1, 0, 0, 0, 0]
            return [sizes[i], *(strides[role][i] if role in strides else 0 for role in roles)]

        chunks = 1 if lane is None else -(-loops.kept[lane] // WIDTH)
        units = math.prod(loops.kept[i] for i in kept) * chunks
        runs = loops.length // loops.reduced[inner]
        has_mask = "mask" in problem.tensors
        numbers = [units, chunks, runs, op.log, op.empty_zero, has_mask]  # type: ignore[attr-defined]
        numbers += loop(loops.kept, loops.kept_strides, lane) + loop(loops.reduced, loops.reduced_strides, inner)
        for i in [*reversed(kept), *[None] * KEPT][:KEPT]:
            numbers += loop(loops.kept, loops.kept_strides, i)
        for i in [*reversed(range(inner)), *[None] * REDUCED][: REDUCED - 1]:
            numbers += loop(loops.reduced, loops.reduced_strides, i)
        table = np.array(numbers, np.int64)
        address = table.ctypes.data
        types = {role: nb.token(t.dtype) for role, t in problem.items if role != "mask"}
        like = nb.token("f64" if any(t.dtype == "f64" for _, t in problem.items) else "f32")
        parts = max(1, min(units, problem.items[0][1].numel // GRAIN, 8 * problem.target.processors))
        threads = nb.threads if parts > 1 else lambda: 1
        if forward:
            kernel = _forward_rows if along else _forward_lanes
            likes = (types["x"], types["y"], like)
            kernel(0, 1, 0, 0, 0, address, *likes)  # compiles, or loads from disk; no part is run

            def call(tensors, workspace, table=table):
                mask = tensors[1].data_ptr() if has_mask else 0
                kernel(parts, threads(), tensors[0].data_ptr(), mask, tensors[-1].data_ptr(), address, *likes)

            return call
        back = _backward_rows if along else _backward_lanes
        kinds = (types["y"], types["dy"], types["dx"], like)
        back(0, 1, 0, 0, 0, 0, address, *kinds)

        def gradient(tensors, workspace, table=table):
            mask = tensors[2].data_ptr() if has_mask else 0
            y, dy, dx = tensors[0].data_ptr(), tensors[1].data_ptr(), tensors[-1].data_ptr()
            back(parts, threads(), y, dy, mask, dx, address, *kinds)

        return gradient
