"""``lp_norm.rows``: normalization by an L_p norm on a CPU over any axes and layout, both directions, in Numba.

Method: sixteen elements are the lanes of a vector (see ``_numba/vector.py``). Where the normalized axes are dense,
lanes lie along the set: it is read for its norm, and once more for the result. Where another axis is dense (channels of
nchw images), lanes are neighbouring sets, up to 512 together, whose sums are in the first-level cache; the next pieces
of memory are asked for ahead, since each is too short for the processor to see where they go. Backward is the same with
the sum of dy x (and, for p = inf, the number of those that are largest). Squares, magnitudes and maxima for p = 2, 1
and inf; for any other p a logarithm and an exponential an element. Sums are float32, float64 for float64.

Cost: the memory traffic, the second reading from the cache where a set fits into it. Every set is summed by one thread
in one order. Limits: one set alone, or sixty-four side by side, are one thread's work; empty sets are refused; loops
after merging are at most five kept, four reduced.
"""

import math

import numpy as np

from ...core.engine import Config, Engine, Refusals, Run
from ...core.heuristics import roofline
from ...core.problem import Problem
from .. import _numba as nb
from .._numba import exponential as ne
from .._numba import vector as nv
from .._numba.memory import prefetch
from .._row_loops import RowLoops
from ._lanes import GENERAL, INF, KINDS, TWO, folded, magnitude, norm_of, slope, taken, term
from ._loops import set_loops

TYPES = ("f64", "f32", "f16", "bf16")
GRAIN = 8192  # elements that are worth a thread
MOST = 512  # neighbouring sets that are taken together
STRIP = 65536  # elements of theirs that stay in a thread's cache
SCRATCH = 5 * MOST * 8  # bytes
KEPT, REDUCED = 5, 4
ROLES = ("x", "dy", "out", "norm", "scale", "dscale")

# Table: counts and flags; then for every loop its size and the tensors' steps. Numbers: p, 1 / p, eps.
SETS, TASKS, CHUNKS, WIDTH, RUNS, KIND, HAS_SCALE, HAS_DX, HAS_DSCALE = range(9)
SIZE, X, G, Y, N, S, D = range(7)
LANE, INNER, OUTER, OUTER_RUNS = 9, 16, 23, 23 + 7 * KEPT


@nb.jitable
def _place(number, t, first, loops, at):
    """Add the tensors' places of point `number` of a nest of loops, the innermost first, to `at`."""
    for loop in range(loops):
        base = first + 7 * loop
        if t[base + SIZE] > 1:
            i = number % t[base + SIZE]
            number //= t[base + SIZE]
            for tensor in range(X, D + 1):
                at[tensor] += i * t[base + tensor]


@nb.jitable
def _start(number, run, t, at):
    for tensor in range(X, D + 1):
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
def _three(numbers, like):
    """p, 1 / p and eps, each in every lane."""
    p, inverse, eps = nb.cast(numbers[0], like), nb.cast(numbers[1], like), nb.cast(numbers[2], like)
    return nv.fill(p), nv.fill(inverse), nv.fill(eps)


@nb.jitable
def _row_norm(x, at, step, count, kind, p, start):
    """The terms of a run of x, lane by lane, taken into `start`."""
    w = nv.LANES
    a, b = start, ne.subtract(start, start)
    c, d, whole = b, b, 0
    if step == 1 and kind == TWO:
        whole = count // (4 * w) * (4 * w)
        for k in range(at, at + whole, 4 * w):
            a = nv.add(a, term(nv.read_all(x, k), TWO, p))
            b = nv.add(b, term(nv.read_all(x, k + w), TWO, p))
            c = nv.add(c, term(nv.read_all(x, k + 2 * w), TWO, p))
            d = nv.add(d, term(nv.read_all(x, k + 3 * w), TWO, p))
        a = nv.add(nv.add(a, b), nv.add(c, d))
    for k in range(whole, count, w):
        a = taken(a, term(_get(x, at + k * step, step, min(w, count - k)), kind, p), kind)
    return a


@nb.exact_kernel
def _forward_along(part, parts, x_at, scale_at, y_at, norm_at, table, numbers_at, x_like, like):
    x, scale, y = nb.pointer(x_at, x_like), nb.pointer(scale_at, x_like), nb.pointer(y_at, x_like)
    norm, t, numbers = nb.pointer(norm_at, like), nb.pointer(table, np.int64(0)), nb.pointer(numbers_at, np.float64(0))
    zero, one = nv.fill(nb.cast(0, like)), nv.fill(nb.cast(1, like))
    p, inverse, eps = _three(numbers, like)
    kind, runs, has_scale, length, w = t[KIND], t[RUNS], t[HAS_SCALE] != 0, t[INNER], nv.LANES
    x_step, y_step = t[INNER + X], t[INNER + Y]
    at = np.empty(7, np.int64)
    for row in range(t[SETS] * part // parts, t[SETS] * (part + 1) // parts):
        total = zero
        for run in range(runs):
            _start(row, run, t, at)
            total = _row_norm(x, at[X], x_step, length, kind, p, total)
        n = norm_of(folded(total, kind), kind, inverse)
        nb.store(norm, at[N], ne.largest(n))  # all lanes are one
        g = nv.fill(nb.cast(nb.load(scale, at[S]), like)) if has_scale else one
        factor = ne.divide(g, ne.larger(eps, n))
        for run in range(runs):
            if runs > 1:
                _start(row, run, t, at)
            whole = length // w * w if x_step == 1 and y_step == 1 else 0
            x_here, y_here = at[X], at[Y]
            for k in range(0, whole, w):
                nv.write(y, y_here + k, 1, ne.multiply(nv.read_all(x, x_here + k), factor), w)
            for k in range(whole, length, w):
                many = min(w, length - k)
                r = ne.multiply(_get(x, x_here + k * x_step, x_step, many), factor)
                nv.write(y, y_here + k * y_step, y_step, r, many)


@nb.exact_kernel
def _forward_across(task, slot, x_at, scale_at, y_at, norm_at, table, numbers_at, scratch, x_like, like):
    x, scale, y = nb.pointer(x_at, x_like), nb.pointer(scale_at, x_like), nb.pointer(y_at, x_like)
    norm, t, numbers = nb.pointer(norm_at, like), nb.pointer(table, np.int64(0)), nb.pointer(numbers_at, np.float64(0))
    zero, one = nv.fill(nb.cast(0, like)), nv.fill(nb.cast(1, like))
    p, inverse, eps = _three(numbers, like)
    kind, runs, has_scale, length, w = t[KIND], t[RUNS], t[HAS_SCALE] != 0, t[INNER], nv.LANES
    x_step, y_step, n_step, s_step = t[LANE + X], t[LANE + Y], t[LANE + N], t[LANE + S]
    x_row, y_row, sums = t[INNER + X], t[INNER + Y], nb.pointer(scratch + slot * SCRATCH, like)
    at = np.empty(7, np.int64)
    for unit in range(t[SETS] * task // t[TASKS], t[SETS] * (task + 1) // t[TASKS]):
        first = unit % t[CHUNKS] * t[WIDTH]
        count = min(t[WIDTH], t[LANE] - first)
        dense = count // w * w if x_step == 1 and y_step == 1 else 0
        for v in range(0, count, w):
            nv.write(sums, v, 1, zero, w)
        for run in range(runs):
            _start(unit // t[CHUNKS], run, t, at)
            for k in range(length):
                i, whole = at[X] + k * x_row + first * x_step, dense if kind == TWO else 0
                for v in range(0, whole, w):
                    prefetch(x, i + v + x_row)
                    nv.write(sums, v, 1, nv.add(nv.read_all(sums, v), term(nv.read_all(x, i + v), TWO, p)), w)
                for v in range(whole, count, w):
                    u = term(_get(x, i + v * x_step, x_step, min(w, count - v)), kind, p)
                    nv.write(sums, v, 1, taken(nv.read_all(sums, v), u, kind), w)
        for v in range(0, count, w):
            many, n = min(w, count - v), norm_of(nv.read_all(sums, v), kind, inverse)
            nv.write(norm, at[N] + (first + v) * n_step, n_step, n, many)
            g = _get(scale, at[S] + (first + v) * s_step, s_step, many) if has_scale else one
            nv.write(sums, v, 1, ne.divide(g, ne.larger(eps, n)), w)
        for run in range(runs):
            if runs > 1:
                _start(unit // t[CHUNKS], run, t, at)
            for back in range(length):
                k = length - 1 - back  # what was read last is nearest
                i, j = at[X] + k * x_row + first * x_step, at[Y] + k * y_row + first * y_step
                for v in range(0, dense, w):
                    prefetch(x, i + v - x_row)
                    prefetch(y, j + v - y_row)
                    nv.write(y, j + v, 1, ne.multiply(nv.read_all(x, i + v), nv.read_all(sums, v)), w)
                for v in range(dense, count, w):
                    many = min(w, count - v)
                    r = ne.multiply(_get(x, i + v * x_step, x_step, many), nv.read_all(sums, v))
                    nv.write(y, j + v * y_step, y_step, r, many)


@nb.jitable
def _shares(g, norm, eps, total, zero, one):
    """Gives t / m, g / m, what slopes are multiplied with, 1 / norm; no slope where the norm is 0 or was clamped."""
    m, is_dead = ne.larger(eps, norm), nv.either(nv.exceeds(eps, norm), ne.is_value(norm, zero))
    share, own = ne.divide(total, m), ne.divide(g, m)
    through = nv.select(is_dead, zero, ne.multiply(share, own))
    return share, own, through, ne.divide(one, nv.select(is_dead, one, norm))


@nb.jitable
def _ones(v, norm, many, zero, one):
    """1 for those of the first lanes that are largest."""
    ones = nv.select(ne.is_value(magnitude(v), norm), one, zero)
    return ones if many == nv.LANES else nv.select(nv.between(0, many), ones, zero)


@nb.jitable
def _dot(x, x_at, dy, g_at, count, start):
    """The sum of dy x over a dense run, lane by lane, added to `start`; `count` is whole steps of four vectors."""
    w = nv.LANES
    a, b = start, ne.subtract(start, start)
    c, d = b, b
    for k in range(0, count, 4 * w):
        i, j = x_at + k, g_at + k
        a = nv.add(a, ne.multiply(nv.read_all(dy, j), nv.read_all(x, i)))
        b = nv.add(b, ne.multiply(nv.read_all(dy, j + w), nv.read_all(x, i + w)))
        c = nv.add(c, ne.multiply(nv.read_all(dy, j + 2 * w), nv.read_all(x, i + 2 * w)))
        d = nv.add(d, ne.multiply(nv.read_all(dy, j + 3 * w), nv.read_all(x, i + 3 * w)))
    return nv.add(nv.add(a, b), nv.add(c, d))


@nb.exact_kernel
def _backward_along(part, parts, dy_at, x_at, norm_at, scale_at, dx_at, dscale_at, table, numbers_at, x_like, like):
    dy, x, dx = nb.pointer(dy_at, x_like), nb.pointer(x_at, x_like), nb.pointer(dx_at, x_like)
    scale, dscale, norm = nb.pointer(scale_at, x_like), nb.pointer(dscale_at, x_like), nb.pointer(norm_at, like)
    t, numbers = nb.pointer(table, np.int64(0)), nb.pointer(numbers_at, np.float64(0))
    zero, one = nv.fill(nb.cast(0, like)), nv.fill(nb.cast(1, like))
    p, _, eps = _three(numbers, like)
    less, w = ne.subtract(p, one), nv.LANES
    kind, runs, has_scale, length = t[KIND], t[RUNS], t[HAS_SCALE] != 0, t[INNER]
    x_step, g_step, y_step = t[INNER + X], t[INNER + G], t[INNER + Y]
    at = np.empty(7, np.int64)
    for row in range(t[SETS] * part // parts, t[SETS] * (part + 1) // parts):
        _start(row, 0, t, at)
        n, sums, largest = nv.fill(norm[at[N]]), zero, zero
        for run in range(runs):
            if run > 0:
                _start(row, run, t, at)
            whole = length // (4 * w) * (4 * w) if x_step == 1 and g_step == 1 and kind != INF else 0
            sums = _dot(x, at[X], dy, at[G], whole, sums)
            for k in range(whole, length, w):
                many = min(w, length - k)
                v = _get(x, at[X] + k * x_step, x_step, many)
                sums = nv.add(sums, ne.multiply(_get(dy, at[G] + k * g_step, g_step, many), v))
                if kind == INF:
                    largest = nv.add(largest, _ones(v, n, many, zero, one))
        g = nv.fill(nb.cast(nb.load(scale, at[S]), like)) if has_scale else one
        share, own, through, inverse = _shares(g, n, eps, nv.fill(ne.total(sums)), zero, one)
        each = ne.divide(one, nv.fill(ne.total(largest)))  # infinite where nothing is largest, and not used
        if t[HAS_DSCALE] != 0:
            nb.store(dscale, at[D], ne.largest(share))
        for run in range(runs if t[HAS_DX] != 0 else 0):
            if runs > 1:
                _start(row, run, t, at)
            whole = length // w * w if x_step == 1 and g_step == 1 and y_step == 1 and kind == TWO else 0
            x_here, g_here, y_here = at[X], at[G], at[Y]
            for k in range(0, whole, w):
                through_norm = ne.multiply(through, ne.multiply(nv.read_all(x, x_here + k), inverse))
                nv.write(dx, y_here + k, 1, ne.subtract(ne.multiply(own, nv.read_all(dy, g_here + k)), through_norm), w)
            for k in range(whole, length, w):
                many = min(w, length - k)
                s = slope(_get(x, x_here + k * x_step, x_step, many), kind, n, inverse, each, less, zero, one)
                r = ne.multiply(own, _get(dy, g_here + k * g_step, g_step, many))
                nv.write(dx, y_here + k * y_step, y_step, ne.subtract(r, ne.multiply(through, s)), many)


@nb.exact_kernel
def _backward_across(
    task, slot, dy_at, x_at, norm_at, scale_at, dx_at, dscale_at, table, numbers_at, scratch, x_like, like
):
    dy, x, dx = nb.pointer(dy_at, x_like), nb.pointer(x_at, x_like), nb.pointer(dx_at, x_like)
    scale, dscale, norm = nb.pointer(scale_at, x_like), nb.pointer(dscale_at, x_like), nb.pointer(norm_at, like)
    t, numbers = nb.pointer(table, np.int64(0)), nb.pointer(numbers_at, np.float64(0))
    zero, one = nv.fill(nb.cast(0, like)), nv.fill(nb.cast(1, like))
    p, _, eps = _three(numbers, like)
    less, w = ne.subtract(p, one), nv.LANES
    kind, runs, has_scale, length = t[KIND], t[RUNS], t[HAS_SCALE] != 0, t[INNER]
    x_step, g_step, y_step = t[LANE + X], t[LANE + G], t[LANE + Y]
    x_row, g_row, y_row = t[INNER + X], t[INNER + G], t[INNER + Y]
    n_step, s_step, d_step = t[LANE + N], t[LANE + S], t[LANE + D]
    # For every set: the sum and g / m, the number of those largest and its reciprocal, two more factors, the norm.
    s, c = nb.pointer(scratch + slot * SCRATCH, like), MOST
    at = np.empty(7, np.int64)
    for unit in range(t[SETS] * task // t[TASKS], t[SETS] * (task + 1) // t[TASKS]):
        first = unit % t[CHUNKS] * t[WIDTH]
        count = min(t[WIDTH], t[LANE] - first)
        dense = count // w * w if x_step == 1 and g_step == 1 and y_step == 1 and kind == TWO else 0
        _start(unit // t[CHUNKS], 0, t, at)
        for v in range(0, count, w):
            nv.write(s, v, 1, zero, w)
            nv.write(s, v + c, 1, zero, w)
            nv.write(s, v + 4 * c, 1, _get(norm, at[N] + (first + v) * n_step, n_step, min(w, count - v)), w)
        for run in range(runs):
            if run > 0:
                _start(unit // t[CHUNKS], run, t, at)
            for k in range(length):
                i, j = at[X] + k * x_row + first * x_step, at[G] + k * g_row + first * g_step
                for v in range(0, dense, w):
                    prefetch(x, i + v + x_row)
                    prefetch(dy, j + v + g_row)
                    u = ne.multiply(nv.read_all(dy, j + v), nv.read_all(x, i + v))
                    nv.write(s, v, 1, nv.add(nv.read_all(s, v), u), w)
                for v in range(dense, count, w):
                    many = min(w, count - v)
                    u, g = _get(x, i + v * x_step, x_step, many), _get(dy, j + v * g_step, g_step, many)
                    nv.write(s, v, 1, nv.add(nv.read_all(s, v), ne.multiply(g, u)), w)
                    if kind == INF:
                        ones = _ones(u, nv.read_all(s, v + 4 * c), w, zero, one)
                        nv.write(s, v + c, 1, nv.add(nv.read_all(s, v + c), ones), w)
        for v in range(0, count, w):
            many = min(w, count - v)
            g = _get(scale, at[S] + (first + v) * s_step, s_step, many) if has_scale else one
            share, own, through, inverse = _shares(g, nv.read_all(s, v + 4 * c), eps, nv.read_all(s, v), zero, one)
            if t[HAS_DSCALE] != 0:
                nv.write(dscale, at[D] + (first + v) * d_step, d_step, share, many)
            nv.write(s, v, 1, own, w)
            nv.write(s, v + c, 1, ne.divide(one, nv.read_all(s, v + c)), w)
            nv.write(s, v + 2 * c, 1, through, w)
            nv.write(s, v + 3 * c, 1, inverse, w)
        for run in range(runs if t[HAS_DX] != 0 else 0):
            if runs > 1:
                _start(unit // t[CHUNKS], run, t, at)
            for back in range(length):
                k = length - 1 - back
                i, j = at[X] + k * x_row + first * x_step, at[G] + k * g_row + first * g_step
                o = at[Y] + k * y_row + first * y_step
                for v in range(0, dense, w):
                    prefetch(x, i + v - x_row)
                    prefetch(dy, j + v - g_row)
                    prefetch(dx, o + v - y_row)
                    u = ne.multiply(
                        nv.read_all(s, v + 2 * c), ne.multiply(nv.read_all(x, i + v), nv.read_all(s, v + 3 * c))
                    )
                    nv.write(dx, o + v, 1, ne.subtract(ne.multiply(nv.read_all(s, v), nv.read_all(dy, j + v)), u), w)
                for v in range(dense, count, w):
                    many, n, inverse = min(w, count - v), nv.read_all(s, v + 4 * c), nv.read_all(s, v + 3 * c)
                    u = _get(x, i + v * x_step, x_step, many)
                    u = slope(u, kind, n, inverse, nv.read_all(s, v + c), less, zero, one)
                    r = ne.multiply(nv.read_all(s, v), _get(dy, j + v * g_step, g_step, many))
                    r = ne.subtract(r, ne.multiply(nv.read_all(s, v + 2 * c), u))
                    nv.write(dx, o + v * y_step, y_step, r, many)


@nb.kernel
def _forward_rows(parts, threads, x, scale, y, norm, table, numbers, scratch, x_like, like):
    nb.launch(_forward_along, parts, threads, (x, scale, y, norm, table, numbers, x_like, like))


@nb.kernel
def _forward_lanes(tasks, threads, x, scale, y, norm, table, numbers, scratch, x_like, like):
    nb.launch_tasks(_forward_across, tasks, threads, (x, scale, y, norm, table, numbers, scratch, x_like, like))


@nb.kernel
def _backward_rows(parts, threads, dy, x, norm, scale, dx, dscale, table, numbers, scratch, x_like, like):
    nb.launch(_backward_along, parts, threads, (dy, x, norm, scale, dx, dscale, table, numbers, x_like, like))


@nb.kernel
def _backward_lanes(tasks, threads, dy, x, norm, scale, dx, dscale, table, numbers, scratch, x_like, like):
    args = dy, x, norm, scale, dx, dscale, table, numbers, scratch, x_like, like
    nb.launch_tasks(_backward_across, tasks, threads, args)


def _width(loops: RowLoops, sets: int, processors: int) -> int:
    """How many neighbouring sets are taken together: that many threads have work, and a strip stays in the cache.

    Where no strip of two cache lines does, long pieces of memory are best.
    """
    width, fits = MOST, 128 * loops.length <= STRIP
    while width > 64 and sets * -(-loops.kept[-1] // width) < (4 if fits else 1) * processors:
        width //= 2
    while fits and width > 64 and width * loops.length > STRIP:
        width //= 2
    return width


class Rows(Engine):
    name = "lp_norm.rows"
    operations = ("lp_normalize_fwd", "lp_normalize_bwd")
    targets = ("cpu",)
    notes = frozenset({"runtime_compilation"})

    def refusals(self, problem: Problem) -> list[str]:
        r = Refusals()
        r.require_tensors(problem.items, TYPES)
        r.require(problem["x"].numel > 0 or problem["norm"].numel == 0, "elements in a set, or no sets", "empty sets")
        if not r and problem["x"].numel > 0:
            loops = set_loops(problem)
            r.require(len(loops.kept) <= KEPT, f"at most {KEPT} kept axes after merging", len(loops.kept))
            r.require(len(loops.reduced) <= REDUCED, f"at most {REDUCED} normalized axes likewise", len(loops.reduced))
        return r

    def workspace_size(self, problem: Problem, config: Config) -> int:
        if problem["x"].numel == 0 or set_loops(problem).lanes_reduced:
            return 0
        return 64 + problem.target.processors * SCRATCH

    def cost(self, problem: Problem, config: Config) -> float:
        known = problem.op.p in KINDS  # type: ignore[attr-defined]
        return roofline(problem, flops=(4.0 if known else 60.0) * problem["x"].numel, memory_efficiency=0.7)

    def build(self, problem: Problem, config: Config) -> Run:
        if problem["x"].numel == 0:
            return lambda tensors, workspace: None
        loops, op = set_loops(problem), problem.op
        order = {role: i for i, (role, _) in enumerate(problem.items)}
        along = loops.lanes_reduced
        kept = [*range(len(loops.kept))]
        lane = None if along else kept.pop()
        inner = len(loops.reduced) - 1

        def loop(sizes: tuple[int, ...], strides: dict[str, tuple[int, ...]], i: int | None) -> list[int]:
            if i is None:
                return [1, *[0] * len(ROLES)]
            return [sizes[i], *(strides[role][i] if role in strides else 0 for role in ROLES)]

        units = math.prod(loops.kept[i] for i in kept)
        width = 1 if lane is None else _width(loops, units, problem.target.processors)
        chunks = 1 if lane is None else -(-loops.kept[lane] // width)
        units *= chunks
        parts = max(1, min(units, problem["x"].numel // GRAIN, 8 * problem.target.processors))
        real = problem["norm"].dtype
        kind = KINDS.get(op.p, GENERAL)  # type: ignore[attr-defined]
        flags = [role in order for role in ("scale", "dx", "dscale")]
        numbers = [units, parts, chunks, width, loops.length // loops.reduced[inner], kind, *flags]
        numbers += loop(loops.kept, loops.kept_strides, lane) + loop(loops.reduced, loops.reduced_strides, inner)
        for i in [*reversed(kept), *[None] * KEPT][:KEPT]:
            numbers += loop(loops.kept, loops.kept_strides, i)
        for i in [*reversed(range(inner)), *[None] * REDUCED][: REDUCED - 1]:
            numbers += loop(loops.reduced, loops.reduced_strides, i)
        table = np.array(numbers, np.int64)
        reals = np.array([op.p, 1 / op.p, op.eps], np.float64)  # type: ignore[attr-defined]
        most = min(parts, problem.target.processors)
        threads = (lambda: min(nb.threads(), most)) if most > 1 else (lambda: 1)
        if op.name == "lp_normalize_fwd":
            kernel, roles = _forward_rows if along else _forward_lanes, ("x", "scale", "y", "norm")
        else:
            kernel = _backward_rows if along else _backward_lanes
            roles = ("dy", "x", "norm", "scale", "dx", "dscale")
        ways = [order.get(role) for role in roles]
        lists, likes = (table.ctypes.data, reals.ctypes.data), (nb.token(problem["x"].dtype), nb.token(real))
        kernel(0, 1, *[0] * len(ways), *lists, 0, *likes)  # compiles, or loads from disk; no part is run

        def run(tensors, workspace, _keep=(table, reals)):
            at = [0 if i is None else tensors[i].data_ptr() for i in ways]
            scratch = 0 if along else workspace.data_ptr() + 63 & -64
            kernel(parts, threads(), *at, *lists, scratch, *likes)

        return run
