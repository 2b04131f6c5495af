"""``lrn.blocked``: local response and divisive normalization on a CPU, both directions, any layout, in Numba.

Method: a unit is what windows do not reach out of: all channels of some neighbouring points, or one channel of an image
(its points for several channels where channels lie side by side). Its squares are written into a block of scratch
memory with zeros around, in float32 (float64 for float64). A window's sum is then a sum of vectors at fixed distances
from an element, so that no case differs at an edge, and nothing is ever subtracted from a sum. Sixteen neighbours in
memory are the lanes of a vector, along the window or across it. Backward writes the terms of its own window sums, and
the powers of the divisor, into two further blocks.

Cost: x is read twice (backward thrice, dy twice), from the cache but for the first time where a unit fits; an addition
from the first-level cache for every element of a window; two roots and a division, or a logarithm and an exponential.
Limits: alpha and k at least 0; at most four loops of units after merging, windows along at most three axes.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math

import numpy as np

from ...core.engine import Config, Engine, Refusals, Run
from ...core.heuristics import roofline
from ...core.problem import Problem
from .. import _numba as nb
from .._numba import exponential as ne
from .._numba import vector as nv
from .._numba.memory import size_of
from .._row_loops import row_loops
from ._powers import GENERAL, KINDS, inverse_power

TYPES = ("f64", "f32", "f16", "bf16")
GRAIN = 8192  # elements that are worth a task
OUTER, WINDOWS = 4, 3
BLOCK = 16384  # elements of scratch blocks that are meant to stay in the cache
ROLES = ("x", "means", "dy", "out")

# The table: numbers, the step of a lane in each tensor, loops over units and rows: size, steps (rows: also in scratch).
UNITS, TASKS, CHUNKS, LANES, WIDTH, TAPS, SIZE, ORIGIN, KIND, HAS_MEANS = range(10)
STEP, ROWS, LOOPS = 10, 14, 14 + 6 * (WINDOWS)
END = LOOPS + 5 * OUTER


@nb.jitable
def _place(unit, t, at):
    """Where a unit begins in each tensor, and how many lanes it has."""
    chunk, number = unit % t[CHUNKS], unit // t[CHUNKS]
    for tensor in range(4):
        at[tensor] = chunk * t[WIDTH] * t[STEP + tensor]
    for loop in range(OUTER):
        base = LOOPS + 5 * loop
        if t[base] > 1:
            i = number % t[base]
            number //= t[base]
            for tensor in range(4):
                at[tensor] += i * t[base + 1 + tensor]
    return min(t[WIDTH], t[LANES] - chunk * t[WIDTH])


@nb.jitable
def _row(row, t, at, here):
    """Where row number `row` of a unit begins in each tensor and, last, in scratch."""
    for tensor in range(4):
        here[tensor] = at[tensor]
    here[4] = t[ORIGIN]
    for loop in range(WINDOWS):
        base = ROWS + 6 * loop
        if t[base] > 1:
            i = row % t[base]
            row //= t[base]
            for tensor in range(5):
                here[tensor] += i * t[base + 1 + tensor]


@nb.jitable
def _get(p, at, step, many):
    """Sixteen elements, or the first `many` and zeros."""
    if step == 1 and many == nv.LANES:
        return nv.read_all(p, at)
    return nv.read(p, at, step, 0, many)


@nb.jitable
def _value(x, means, t, here, v, many):
    """Elements of x less the means."""
    u = _get(x, here[0] + v * t[STEP], t[STEP], many)
    if t[HAS_MEANS]:
        u = ne.subtract(u, _get(means, here[1] + v * t[STEP + 1], t[STEP + 1], many))
    return u


@nb.jitable
def _around(s, at, taps, count, sign, zero):
    """The sum of the elements at each of the distances from `at`."""
    a, b = zero, zero
    for j in range(0, count - 1, 2):
        a = nv.add(a, nv.read_all(s, at + sign * taps[j]))
        b = nv.add(b, nv.read_all(s, at + sign * taps[j + 1]))
    if count % 2:
        a = nv.add(a, nv.read_all(s, at + sign * taps[count - 1]))
    return nv.add(a, b)


@nb.jitable
def _squares(x, means, t, at, here, rows, lanes, s):
    for row in range(rows):
        _row(row, t, at, here)
        for v in range(0, lanes, nv.LANES):
            u = _value(x, means, t, here, v, min(nv.LANES, lanes - v))
            nv.write(s, here[4] + v, 1, ne.multiply(u, u), nv.LANES)


@nb.exact_kernel
def _forward_task(task, slot, x_at, means_at, y_at, table, taps_at, scratch, numbers_at, x_like, like):
    t, taps = nb.pointer(table, np.int64(0)), nb.pointer(taps_at, np.int64(0))
    x, means, y = nb.pointer(x_at, x_like), nb.pointer(means_at, x_like), nb.pointer(y_at, x_like)
    numbers = nb.pointer(numbers_at, np.float64(0))
    s = nb.pointer(scratch + slot * t[SIZE] * size_of(like), like)
    nothing = nb.cast(0, like)
    zero, one = nv.fill(nothing), nv.fill(nb.cast(1, like))
    k, factor = nv.fill(nb.cast(numbers[0], like)), nv.fill(nb.cast(numbers[1], like))
    beta, kind, count = nv.fill(nb.cast(numbers[2], like)), t[KIND], t[TAPS]
    at, here = np.empty(4, np.int64), np.empty(5, np.int64)
    rows = t[ROWS] * t[ROWS + 6] * t[ROWS + 12]
    for i in range(t[SIZE]):
        s[i] = nothing
    for unit in range(t[UNITS] * task // t[TASKS], t[UNITS] * (task + 1) // t[TASKS]):
        lanes = _place(unit, t, at)
        _squares(x, means, t, at, here, rows, lanes, s)
        for row in range(rows):
            _row(row, t, at, here)
            for v in range(0, lanes, nv.LANES):
                many = min(nv.LANES, lanes - v)
                d = nv.add(k, ne.multiply(factor, _around(s, here[4] + v, taps, count, 1, zero)))
                r = ne.multiply(_value(x, means, t, here, v, many), inverse_power(d, kind, beta, one))
                nv.write(y, here[3] + v * t[STEP + 3], t[STEP + 3], r, many)


@nb.exact_kernel
def _backward_task(task, slot, x_at, means_at, dy_at, dx_at, table, taps_at, scratch, numbers_at, x_like, like):
    t, taps = nb.pointer(table, np.int64(0)), nb.pointer(taps_at, np.int64(0))
    x, means = nb.pointer(x_at, x_like), nb.pointer(means_at, x_like)
    dy, dx = nb.pointer(dy_at, x_like), nb.pointer(dx_at, x_like)
    numbers = nb.pointer(numbers_at, np.float64(0))
    block = t[SIZE] * size_of(like)
    s = nb.pointer(scratch + 3 * slot * block, like)
    terms = nb.pointer(scratch + (3 * slot + 1) * block, like)
    powers = nb.pointer(scratch + (3 * slot + 2) * block, like)
    nothing = nb.cast(0, like)
    zero, one = nv.fill(nothing), nv.fill(nb.cast(1, like))
    k, factor = nv.fill(nb.cast(numbers[0], like)), nv.fill(nb.cast(numbers[1], like))
    beta, kind, count = nv.fill(nb.cast(numbers[2], like)), t[KIND], t[TAPS]
    share = nv.fill(nb.cast(2.0 * numbers[1] * numbers[2], like))
    at, here = np.empty(4, np.int64), np.empty(5, np.int64)
    rows = t[ROWS] * t[ROWS + 6] * t[ROWS + 12]
    for i in range(t[SIZE]):
        s[i] = nothing
        terms[i] = nothing
    for unit in range(t[UNITS] * task // t[TASKS], t[UNITS] * (task + 1) // t[TASKS]):
        lanes = _place(unit, t, at)
        _squares(x, means, t, at, here, rows, lanes, s)
        for row in range(rows):
            _row(row, t, at, here)
            for v in range(0, lanes, nv.LANES):
                many = min(nv.LANES, lanes - v)
                d = nv.add(k, ne.multiply(factor, _around(s, here[4] + v, taps, count, 1, zero)))
                power = inverse_power(d, kind, beta, one)
                g = _get(dy, here[2] + v * t[STEP + 2], t[STEP + 2], many)
                term = ne.multiply(ne.multiply(g, _value(x, means, t, here, v, many)), ne.divide(power, d))
                if many < nv.LANES:  # 0 / 0 in lanes that do not exist
                    term = nv.select(nv.between(0, many), term, zero)
                nv.write(terms, here[4] + v, 1, term, nv.LANES)
                nv.write(powers, here[4] + v, 1, power, nv.LANES)
        for row in range(rows):
            _row(row, t, at, here)
            for v in range(0, lanes, nv.LANES):
                many = min(nv.LANES, lanes - v)
                through = ne.multiply(share, _around(terms, here[4] + v, taps, count, -1, zero))
                g = _get(dy, here[2] + v * t[STEP + 2], t[STEP + 2], many)
                own = ne.multiply(g, nv.read_all(powers, here[4] + v))
                r = ne.subtract(own, ne.multiply(_value(x, means, t, here, v, many), through))
                nv.write(dx, here[3] + v * t[STEP + 3], t[STEP + 3], r, many)


@nb.kernel
def _forward(tasks, threads, x, means, y, table, taps, scratch, numbers, x_like, like):
    nb.launch_tasks(_forward_task, tasks, threads, (x, means, y, table, taps, scratch, numbers, x_like, like))


@nb.kernel
def _backward(tasks, threads, x, means, dy, dx, table, taps, scratch, numbers, x_like, like):
    nb.launch_tasks(_backward_task, tasks, threads, (x, means, dy, dx, table, taps, scratch, numbers, x_like, like))


@dataclasses.dataclass(frozen=True)
class _Plan:
    table: np.ndarray
    taps: np.ndarray
    loops: int  # over units
    tasks: int
    size: int  # elements of a thread's blocks
    scattered: float  # how far apart lanes are in memory


@functools.lru_cache(maxsize=256)
def _plan(problem: Problem) -> _Plan:
    op, x = problem.op, problem["x"]
    out = problem.outputs[0]
    tensors = {"x": x, **{role: t for role, t in problem.items if role in ROLES}, "out": problem[out]}
    strides = {role: t.strides for role, t in tensors.items()}
    axes = op.window_axes(x.ndim)  # type: ignore[attr-defined]
    loops = row_loops(x.shape, strides, axes)
    windows = sorted((axis for axis in axes if x.shape[axis] > 1), key=lambda axis: x.strides[axis])
    kept, inner = loops.kept_strides["x"][-1], x.strides[windows[0]] if windows else 0
    along = bool(windows) and (loops.rows == 1 or inner <= kept or (kept == 0 and inner > 0))
    before, after = op.reach  # type: ignore[attr-defined]
    before = min(before, max((x.shape[axis] - 1 for axis in windows), default=0))
    after = min(after, before)
    backward = out == "dx"
    outer = [*range(len(loops.kept))]
    rows = windows[1:] if along else windows
    if along:
        lanes, steps = x.shape[windows[0]], [strides[r][windows[0]] if r in strides else 0 for r in ROLES]
        width, pitch = lanes, before + -(-lanes // nv.LANES) * nv.LANES + before
    else:
        lane = outer.pop()
        lanes, steps = loops.kept[lane], [loops.kept_strides[r][lane] if r in strides else 0 for r in ROLES]
        padded = math.prod(x.shape[axis] + 2 * before for axis in rows)
        most = BLOCK // (2 if backward else 1) // padded // nv.LANES * nv.LANES
        width = pitch = max(nv.LANES, min(most, 4 * nv.LANES, -(-lanes // nv.LANES) * nv.LANES))
    # The distances in scratch from an element to its neighbours, axis by axis from the innermost.
    size, origin, distances, row_loops_ = pitch, before if along else 0, [1] if along else [], []
    for axis in rows:
        row_loops_.append([x.shape[axis], *(strides[r][axis] if r in strides else 0 for r in ROLES), size])
        distances.append(size)
        origin += before * size
        size *= x.shape[axis] + 2 * before
    reach = range(-before, after + 1)
    places = itertools.product(reach, repeat=len(distances))
    taps = [sum(a * b for a, b in zip(place, distances, strict=True)) for place in places]
    chunks = -(-lanes // width)
    units = chunks * math.prod(loops.kept[i] for i in outer)
    tasks = max(1, min(units, x.numel // GRAIN, 8 * problem.target.processors))
    kind = KINDS.get(op.lrn_beta, GENERAL)  # type: ignore[attr-defined]
    numbers = [units, tasks, chunks, lanes, width, len(taps), size, origin, kind, "means" in problem.tensors, *steps]
    for row in [*row_loops_, *[[1, 0, 0, 0, 0, 0]] * WINDOWS][:WINDOWS]:
        numbers += row
    for i in reversed(outer):
        numbers += [loops.kept[i], *(loops.kept_strides[r][i] if r in strides else 0 for r in ROLES)]
    numbers += [1, 0, 0, 0, 0] * (OUTER - len(outer))
    scattered = sum(min(abs(s), 16) for s in steps) / len(tensors)
    size *= 3 if backward else 1
    return _Plan(np.array(numbers, np.int64), np.array(taps, np.int64), len(outer), tasks, size, max(scattered, 1.0))


class Blocked(Engine):
    name = "lrn.blocked"
    operations = ("lrn_fwd", "lrn_bwd", "divisive_norm_fwd", "divisive_norm_bwd")
    targets = ("cpu",)
    notes = frozenset({"runtime_compilation"})

    def refusals(self, problem: Problem) -> list[str]:
        r, op = Refusals(), problem.op
        r.require_tensors(problem.items, TYPES)
        r.require(op.lrn_alpha >= 0, "lrn_alpha >= 0", op.lrn_alpha)  # type: ignore[attr-defined]
        r.require(op.lrn_k >= 0, "lrn_k >= 0", op.lrn_k)  # type: ignore[attr-defined]
        windows = len(op.window_axes(problem["x"].ndim))  # type: ignore[attr-defined]
        r.require(windows <= WINDOWS, f"windows along at most {WINDOWS} axes", windows)
        if not r and not problem.is_empty:
            loops = _plan(problem).loops
            r.require(loops <= OUTER, f"at most {OUTER} loops of units after merging", loops)
        return r

    def _threads(self, problem: Problem) -> int:
        return max(1, min(problem.target.processors, _plan(problem).tasks))

    def workspace_size(self, problem: Problem, config: Config) -> int:
        if problem.is_empty:
            return 0
        return 64 + self._threads(problem) * _plan(problem).size * (8 if problem["x"].dtype == "f64" else 4)

    def cost(self, problem: Problem, config: Config) -> float:
        if problem.is_empty:
            return roofline(problem, flops=0.0)
        plan = _plan(problem)
        each = (0.6e-9 + 0.06e-9 * len(plan.taps)) * (2.5 if "dy" in problem.tensors else 1.0) * plan.scattered
        return roofline(problem, flops=0.0) + problem["x"].numel * each / self._threads(problem)

    def build(self, problem: Problem, config: Config) -> Run:
        if problem.is_empty:
            return lambda tensors, workspace: None
        plan, op = _plan(problem), problem.op
        factor = op.factor(problem["x"].ndim)  # type: ignore[attr-defined]
        numbers = np.array([op.lrn_k, factor, op.lrn_beta], np.float64)  # type: ignore[attr-defined]
        table, taps, tasks = plan.table.ctypes.data, plan.taps.ctypes.data, plan.tasks
        likes = nb.token(problem["x"].dtype), nb.token("f64" if problem["x"].dtype == "f64" else "f32")
        numbers_at, most = numbers.ctypes.data, self._threads(problem)
        threads = (lambda: min(nb.threads(), most)) if most > 1 else (lambda: 1)
        order = {role: i for i, (role, _) in enumerate(problem.items)}
        backward = "dy" in order
        kernel = _backward if backward else _forward
        ways = [order.get(role) for role in (("x", "means", "dy", "dx") if backward else ("x", "means", "y"))]
        kernel(0, 1, *[0] * len(ways), table, taps, 0, numbers_at, *likes)  # compiles, or loads; there is no task

        def run(tensors, workspace, _keep=(plan, numbers)):
            at = [0 if i is None else tensors[i].data_ptr() for i in ways]
            kernel(tasks, threads(), *at, table, taps, workspace.data_ptr() + 63 & -64, numbers_at, *likes)

        return run
