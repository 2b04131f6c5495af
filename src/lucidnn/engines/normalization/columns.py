"""``norm.columns``: normalization on a CPU where neighbours in memory belong to different sets, in Numba.

So it is with groups of few channels in channels-last images, and with the channels of a channels-first image that are
normalized point by point. Method: **lanes** are what lies side by side: all channels, or all points. Each lane keeps
its own mean and sum of squared distances, in two passes over some steps of the reduced axes at a time, while they are
in the first-level cache; blocks of steps are combined by Chan's formula in float64, and at last the lanes of a group.
Every loop runs along memory. Tensors of other types or strides go through dense tiles in scratch memory (``_cpu.py``).
Gradients of scale and bias are summed by fixed shares, and the shares in order.

Cost: x is read twice (from the cache where an image fits), and one copy of each tile. Limits: the four types; at most
256 channels a group.
"""

from __future__ import annotations

import functools
import math

import numpy as np

from ...core.engine import Config
from ...core.heuristics import roofline
from ...core.problem import Problem
from ...ops.activation import ACTIVATIONS
from .. import _numba as nb
from .._numba.memory import size_of
from .._numba.stack import stack
from ._cpu import (
    TYPES,
    activate_row,
    activate_row_grad,
    add_rows,
    gather_parameter,
    read_row,
    scatter_parameter,
    write_row,
)
from ._cpu_engine import OPERATIONS, CpuNormalization, plain_refusals
from ._sets import Loop, full_roles, sets

BLOCK = 256  # lanes at once, at most
TILE = 8192  # elements of a block of steps
PARTS = 16

# The table: numbers, then for each tensor (x, dy, the result) type, whether tiles are its own memory, step of a lane.
(
    UNITS, LANES, WIDTH_OF_BLOCK, BLOCKS, EACH, STEPS, ROWS, CENTERED, CODE, PARAMETERS, P_LANE, MEAN, INVERSE,
    OUTSIDE, INSIDE, TENSORS, LOOPS,
) = (*range(16), 24)  # fmt: skip
KIND, DENSE, STEP = range(3)
WIDTH = 7  # of a loop: its size; steps in x, dy, the result, mean, inverse, parameters


@nb.kernel
def _step(t, first, count, index, what):
    """Elements to a point of some loops, for the tensor or parameter number `what`."""
    at = 0
    for loop in range(first + count - 1, first - 1, -1):
        row = LOOPS + WIDTH * loop
        if loop == first:
            at += index * t[row + 1 + what]
        else:
            rest = index // t[row]
            at += (index - rest * t[row]) * t[row + 1 + what]
            index = rest
    return at


@nb.kernel
def _tile(t, tensor, address, at, s0, n, lanes, scratch, like):
    """Address of `n` steps from `s0` on as dense rows: in the tensor, or of a copy."""
    about = TENSORS + 3 * tensor
    if t[about + DENSE]:
        return address + (at + _step(t, t[OUTSIDE], t[INSIDE], s0, tensor)) * size_of(like)
    for s in range(n):
        from_ = at + _step(t, t[OUTSIDE], t[INSIDE], s0 + s, tensor)
        read_row(t[about + KIND], address, from_, t[about + STEP], lanes, scratch + s * lanes * size_of(like), like)
    return scratch


@nb.kernel
def _pitch(t, tensor, lanes):
    """Elements from row to row of a tile."""
    if t[TENSORS + 3 * tensor + DENSE]:
        return t[LOOPS + WIDTH * t[OUTSIDE] + 1 + tensor] if t[INSIDE] else 0
    return lanes


@nb.kernel
def _store(t, address, at, s0, n, lanes, tile, like):
    """Write a tile that is not the result's own memory."""
    about = TENSORS + 6
    if not t[about + DENSE]:
        for s in range(n):
            to = at + _step(t, t[OUTSIDE], t[INSIDE], s0 + s, 2)
            write_row(t[about + KIND], address, to, t[about + STEP], lanes, tile + s * lanes * size_of(like), like)


@nb.kernel
def _apply(t, p, pitch, out, out_pitch, s0, n, lanes, middle, factor, shift, scale, bias):
    """Out = (p - middle) factor + shift, by lane, and then by step where parameters go along the steps."""
    for s in range(n):
        a, b = s * pitch, s * out_pitch
        if t[P_LANE]:
            for i in range(lanes):
                out[b + i] = (p[a + i] - middle[i]) * factor[i] + shift[i]
        else:
            q = _step(t, t[OUTSIDE], t[INSIDE], s0 + s, 5)
            left, right = scale[q], bias[q]
            for i in range(lanes):
                out[b + i] = ((p[a + i] - middle[i]) * factor[i] + shift[i]) * left + right


@nb.kernel
def _begin(t, unit, at):
    """Elements to a unit's first in x, dy, the result, mean and inverse; its first lane and how many there are."""
    block, outer = unit % t[BLOCKS], unit // t[BLOCKS]
    lane = block * t[WIDTH_OF_BLOCK]
    for k in range(5):
        at[k] = _step(t, 0, t[OUTSIDE], outer, k)
    for k in range(3):
        at[k] += lane * t[TENSORS + 3 * k + STEP]
    at[3] += lane // t[EACH] * t[MEAN]
    at[4] += lane // t[EACH] * t[INVERSE]
    return lane, min(t[WIDTH_OF_BLOCK], t[LANES] - lane)


@nb.kernel
def _forward_part(part, slot, parts, table, x, y, mean, inverse, parameters, scratch, numbers, like):
    t, numbers = nb.pointer(table, np.int64(0)), nb.pointer(numbers, np.float64(0))
    means, inverses = nb.pointer(mean, like), nb.pointer(inverse, like)
    scale = nb.pointer(parameters, like)
    bias = nb.pointer(parameters + t[PARAMETERS] * size_of(like), like)
    first = scratch + 3 * slot * t[ROWS] * t[WIDTH_OF_BLOCK] * size_of(like)
    second = first + t[ROWS] * t[WIDTH_OF_BLOCK] * size_of(like)
    at = stack(8, np.int64(0))
    middle, factor, shift = stack(BLOCK, like), stack(BLOCK, like), stack(BLOCK, like)
    rest, squares = stack(BLOCK, like), stack(BLOCK, like)
    own, total = stack(BLOCK, np.float64(0)), stack(BLOCK, np.float64(0))
    zero, steps, each = nb.cast(0, like), t[STEPS], t[EACH]
    for unit in range(t[UNITS] * part // parts, t[UNITS] * (part + 1) // parts):
        lane, lanes = _begin(t, unit, at)
        pitch = _pitch(t, 0, lanes)
        for i in range(lanes):
            own[i] = 0.0
            total[i] = 0.0
            middle[i] = zero
        for s0 in range(0, steps, t[ROWS]):
            n = min(t[ROWS], steps - s0)
            p = nb.pointer(_tile(t, 0, x, at[0], s0, n, lanes, first, like), like)
            if t[CENTERED]:
                for i in range(lanes):
                    middle[i] = zero
                s = 0
                while s + 4 <= n:
                    a, b, c, d = s * pitch, (s + 1) * pitch, (s + 2) * pitch, (s + 3) * pitch
                    for i in range(lanes):
                        middle[i] += (p[a + i] + p[b + i]) + (p[c + i] + p[d + i])
                    s += 4
                while s < n:
                    for i in range(lanes):
                        middle[i] += p[s * pitch + i]
                    s += 1
                for i in range(lanes):
                    middle[i] = nb.cast(middle[i] / n, like)
            for i in range(lanes):
                rest[i] = zero
                squares[i] = zero
            s = 0
            while s + 2 <= n:
                a, b = s * pitch, (s + 1) * pitch
                for i in range(lanes):
                    u, v = p[a + i] - middle[i], p[b + i] - middle[i]
                    rest[i] += u + v
                    squares[i] += u * u + v * v
                s += 2
            if s < n:
                for i in range(lanes):
                    u = p[s * pitch + i] - middle[i]
                    rest[i] += u
                    squares[i] += u * u
            done = float(s0)
            for i in range(lanes):
                if t[CENTERED]:
                    here = float(middle[i]) + float(rest[i]) / n
                    within = float(squares[i]) - float(rest[i]) * float(rest[i]) / n
                    apart = here - own[i]
                    own[i] += apart * (n / (done + n))
                    total[i] += (0.0 if within < 0.0 else within) + apart * apart * (done * n / (done + n))
                else:
                    total[i] += float(squares[i])
        for group in range(lanes // each):
            i0, mu, sum_ = group * each, 0.0, 0.0
            for i in range(i0, i0 + each):
                mu += own[i]
            mu /= each
            for i in range(i0, i0 + each):
                sum_ += total[i] + steps * (own[i] - mu) * (own[i] - mu)
            f = 1.0 / math.sqrt(sum_ / (float(each) * steps) + numbers[0])
            high = nb.cast(mu, like)
            low = mu - float(high)
            if t[CENTERED]:
                means[at[3] + group * t[MEAN]] = high
            inverses[at[4] + group * t[INVERSE]] = nb.cast(f, like)
            for i in range(i0, i0 + each):
                middle[i] = high
                if t[P_LANE]:
                    own_factor = f * float(scale[lane + i])
                    factor[i] = nb.cast(own_factor, like)
                    shift[i] = nb.cast(float(bias[lane + i]) - low * own_factor, like)
                else:
                    factor[i], shift[i] = nb.cast(f, like), nb.cast(-low * f, like)
        for s0 in range(0, steps, t[ROWS]):
            n = min(t[ROWS], steps - s0)
            p = nb.pointer(_tile(t, 0, x, at[0], s0, n, lanes, first, like), like)
            target = _target(t, y, at[2], s0, second, like)
            out, out_pitch = nb.pointer(target, like), _pitch(t, 2, lanes)
            _apply(t, p, pitch, out, out_pitch, s0, n, lanes, middle, factor, shift, scale, bias)
            if t[CODE]:
                for s in range(n):
                    activate_row(t[CODE], numbers[1], lanes, target + s * out_pitch * size_of(like), like)
            _store(t, y, at[2], s0, n, lanes, target, like)


@nb.kernel
def _target(t, address, at, s0, scratch, like):
    """Address of a tile of the result."""
    if t[TENSORS + 6 + DENSE]:
        return address + (at + _step(t, t[OUTSIDE], t[INSIDE], s0, 2)) * size_of(like)
    return scratch


@nb.kernel
def _gradients(t, dy, at, s0, n, lanes, p, pitch, middle, factor, shift, scale, bias, numbers, second, third, like):
    """A tile of the gradient of what the activation was given, and its pitch."""
    given = _tile(t, 1, dy, at[1], s0, n, lanes, second, like)
    given_pitch = _pitch(t, 1, lanes)
    if t[CODE] == 0:
        return given, given_pitch
    size = size_of(like)
    _apply(t, p, pitch, nb.pointer(third, like), lanes, s0, n, lanes, middle, factor, shift, scale, bias)
    for s in range(n):
        row = third + s * lanes * size
        activate_row_grad(t[CODE], numbers[1], lanes, row, given + s * given_pitch * size, row, like)
    return third, lanes


@nb.kernel
def _backward_part(
    part, slot, parts, table, x, dy, dx, mean, inverse, parameters, sums, scratch, numbers, wanted, like
):  # fmt: skip
    t, numbers = nb.pointer(table, np.int64(0)), nb.pointer(numbers, np.float64(0))
    means, inverses = nb.pointer(mean, like), nb.pointer(inverse, like)
    every, size = t[PARAMETERS], size_of(like)
    scale, bias = nb.pointer(parameters, like), nb.pointer(parameters + every * size, like)
    dscale = nb.pointer(sums + part * every * size, like)
    dbias = nb.pointer(sums + (parts + part) * every * size, like)
    zero, steps, each = nb.cast(0, like), t[STEPS], t[EACH]
    if wanted & 2:
        for i in range(every):
            dscale[i] = zero
            dbias[i] = zero
    first = scratch + 3 * slot * t[ROWS] * t[WIDTH_OF_BLOCK] * size
    second = first + t[ROWS] * t[WIDTH_OF_BLOCK] * size
    third = second + t[ROWS] * t[WIDTH_OF_BLOCK] * size
    at = stack(8, np.int64(0))
    middle, factor, shift, unscaled = stack(BLOCK, like), stack(BLOCK, like), stack(BLOCK, like), stack(BLOCK, like)
    s1, s2, c1, c2 = stack(BLOCK, like), stack(BLOCK, like), stack(BLOCK, like), stack(BLOCK, like)
    t1, t2 = stack(BLOCK, np.float64(0)), stack(BLOCK, np.float64(0))
    for unit in range(t[UNITS] * part // parts, t[UNITS] * (part + 1) // parts):
        lane, lanes = _begin(t, unit, at)
        pitch = _pitch(t, 0, lanes)
        for i in range(lanes):
            group = i // each
            middle[i] = means[at[3] + group * t[MEAN]] if t[CENTERED] else zero
            unscaled[i] = inverses[at[4] + group * t[INVERSE]]
            factor[i] = unscaled[i] * scale[lane + i] if t[P_LANE] else unscaled[i]
            shift[i] = bias[lane + i] if t[P_LANE] else zero
            t1[i] = 0.0
            t2[i] = 0.0
        for s0 in range(0, steps, t[ROWS]):
            n = min(t[ROWS], steps - s0)
            p = nb.pointer(_tile(t, 0, x, at[0], s0, n, lanes, first, like), like)
            given, g_pitch = _gradients(
                t, dy, at, s0, n, lanes, p, pitch, middle, factor, shift, scale, bias, numbers, second, third, like
            )
            g = nb.pointer(given, like)
            for i in range(lanes):
                s1[i] = zero
                s2[i] = zero
            for s in range(n):
                a, b = s * pitch, s * g_pitch
                if t[P_LANE]:
                    for i in range(lanes):
                        s1[i] += g[b + i]
                        s2[i] += g[b + i] * (p[a + i] - middle[i])
                else:
                    q = _step(t, t[OUTSIDE], t[INSIDE], s0 + s, 5)
                    left = scale[q]
                    for i in range(lanes):
                        v = g[b + i] * left
                        s1[i] += v
                        s2[i] += v * (p[a + i] - middle[i])
                    if wanted & 2:
                        along, plain = zero, zero
                        for i in range(lanes):
                            along += g[b + i] * ((p[a + i] - middle[i]) * unscaled[i])
                            plain += g[b + i]
                        dscale[q] += along
                        dbias[q] += plain
            for i in range(lanes):
                t1[i] += float(s1[i])
                t2[i] += float(s2[i])
        if t[P_LANE] and wanted & 2:
            for i in range(lanes):
                dscale[lane + i] += nb.cast(t2[i] * float(unscaled[i]), like)
                dbias[lane + i] += nb.cast(t1[i], like)
        if not wanted & 1:
            continue
        for group in range(lanes // each):
            i0, plain_sum, along_sum = group * each, 0.0, 0.0
            for i in range(i0, i0 + each):
                by = float(scale[lane + i]) if t[P_LANE] else 1.0
                plain_sum += t1[i] * by
                along_sum += t2[i] * by
            f, m = float(unscaled[i0]), float(each) * steps
            for i in range(i0, i0 + each):
                c1[i] = nb.cast(plain_sum * f / m, like) if t[CENTERED] else zero
                c2[i] = nb.cast(along_sum * f * f * f / m, like)
        for s0 in range(0, steps, t[ROWS]):
            n = min(t[ROWS], steps - s0)
            p = nb.pointer(_tile(t, 0, x, at[0], s0, n, lanes, first, like), like)
            given, g_pitch = _gradients(
                t, dy, at, s0, n, lanes, p, pitch, middle, factor, shift, scale, bias, numbers, second, third, like
            )
            g = nb.pointer(given, like)
            target = _target(t, dx, at[2], s0, third, like)
            out, out_pitch = nb.pointer(target, like), _pitch(t, 2, lanes)
            for s in range(n):
                a, b, c = s * pitch, s * g_pitch, s * out_pitch
                if t[P_LANE]:
                    for i in range(lanes):
                        out[c + i] = factor[i] * g[b + i] - c1[i] - c2[i] * (p[a + i] - middle[i])
                else:
                    left = scale[_step(t, t[OUTSIDE], t[INSIDE], s0 + s, 5)]
                    for i in range(lanes):
                        out[c + i] = factor[i] * (left * g[b + i]) - c1[i] - c2[i] * (p[a + i] - middle[i])
            _store(t, dx, at[2], s0, n, lanes, target, like)


@nb.kernel
def _forward(
    parts, threads, table, x, y, mean, inverse, scale, scale_kind, scale_at, bias, bias_kind, bias_at, workspace,
    numbers, like,
):  # fmt: skip
    t = nb.pointer(table, np.int64(0))
    every = t[PARAMETERS]
    gather_parameter(scale_kind, scale, scale_at, every, 1, workspace, like)
    gather_parameter(bias_kind, bias, bias_at, every, 0, workspace + every * size_of(like), like)
    scratch = workspace + 2 * every * size_of(like)
    nb.launch_tasks(
        _forward_part, parts, threads, (parts, table, x, y, mean, inverse, workspace, scratch, numbers, like)
    )


@nb.kernel
def _backward(
    parts, threads, table, x, dy, dx, mean, inverse, scale, scale_kind, scale_at, bias, bias_kind, bias_at,
    dscale, dscale_kind, dscale_at, dbias, dbias_kind, dbias_at, workspace, numbers, like,
):  # fmt: skip
    t = nb.pointer(table, np.int64(0))
    every, size = t[PARAMETERS], size_of(like)
    gather_parameter(scale_kind, scale, scale_at, every, 1, workspace, like)
    gather_parameter(bias_kind, bias, bias_at, every, 0, workspace + every * size, like)
    sums = workspace + 2 * every * size
    more = dscale != 0 or dbias != 0
    scratch = sums + (2 * parts * every * size if more else 0)
    wanted = (1 if dx != 0 else 0) + (2 if more else 0)
    nb.launch_tasks(
        _backward_part, parts, threads,
        (parts, table, x, dy, dx, mean, inverse, workspace, sums, scratch, numbers, wanted, like),
    )  # fmt: skip
    if dscale:
        add_rows(parts, every, sums, like)
        scatter_parameter(dscale_kind, dscale, dscale_at, every, sums, like)
    if dbias:
        later = sums + parts * every * size
        add_rows(parts, every, later, like)
        scatter_parameter(dbias_kind, dbias, dbias_at, every, later, like)


def _lanes(problem: Problem) -> tuple[Loop | None, int, list[Loop], list[Loop]]:
    """The loop of the lanes (None where there is none), lanes of a set, loops outside and inside."""
    s = sets(problem)
    if problem.op.name.startswith("group"):
        if len(s.channels) > 1 or problem.op.groups * s.count == 0:  # type: ignore[attr-defined]
            return None, 1, [], []
        x, each = problem["x"], problem["x"].shape[1] // problem.op.groups  # type: ignore[attr-defined]
        roles = full_roles(problem)
        lanes = Loop(x.shape[1], {r: problem[r].strides[1] for r in roles} | {"parameter": 1})
        stats = ("mean", "inv_variance")
        lanes.steps.update({r: problem[r].strides[1] for r in stats})
        images = Loop(x.shape[0], {r: problem[r].strides[0] for r in (*roles, *stats)} | {"parameter": 0})
        return lanes, each, [images], s.points
    if not s.outside:
        return None, 1, [], []
    lanes = min(s.outside, key=lambda loop: loop.step("x"))
    return lanes, 1, [loop for loop in s.outside if loop is not lanes], s.inside


class _Plan:
    def __init__(self, problem: Problem):
        op, s = problem.op, sets(problem)
        lanes, each, outside, inside = _lanes(problem)
        assert lanes is not None
        self.backward = op.name.endswith("bwd")
        self.like = "f64" if any(t.dtype == "f64" for _, t in problem.items) else "f32"
        steps, outer = s.size // each, math.prod(loop.size for loop in outside)
        widest = max(each, BLOCK // each * each)
        # Some units for each thread, but a block of lanes is at least a cache line or two.
        wanted = 4 * problem.target.processors
        narrow = -(-lanes.size // max(1, -(-wanted // outer)))
        narrow = -(-max(narrow, 32) // each) * each
        block = max(each, min(widest, narrow, lanes.size))
        blocks = -(-lanes.size // block)
        rows = max(4, min(steps, TILE // block))
        full = full_roles(problem)
        out = "dx" if self.backward else problem.outputs[0]
        tensors = ("x", "dy", out)
        about: list[int] = []
        for role in tensors:
            present = role in full
            run = len(inside) <= 1
            dense = present and problem[role].dtype == self.like and run and lanes.step(role) == 1
            about += [TYPES[problem[role].dtype] if present else 1, dense, lanes.step(role)]
        roles = (*tensors, "mean", "inv_variance", "parameter")
        loops = [n for loop in (*outside, *inside) for n in (loop.size, *(loop.step(role) for role in roles))]
        centered = "mean" in op.statistics  # type: ignore[attr-defined]
        head = (
            outer * blocks, lanes.size, block, blocks, each, steps, rows, centered,
            ACTIVATIONS[problem.epilogue.activation].code, s.parameters, lanes.step("parameter"),
            lanes.step("mean"), lanes.step("inv_variance"), len(outside), len(inside),
        )  # fmt: skip
        self.table = np.array([*head, *about, *loops], dtype=np.int64)
        self.nothing = np.zeros(LOOPS, dtype=np.int64)
        self.nothing[BLOCKS] = 1
        self.parts = max(1, min(outer * blocks, PARTS))
        self.tile, self.parameters, self.lanes = rows * block, s.parameters, lanes

    def workspace(self, problem: Problem) -> int:
        elements = 2 * self.parameters + 3 * self.tile * max(1, min(problem.target.processors, self.parts))
        if self.backward and {"dscale", "dbias"} & set(problem.outputs):
            elements += 2 * self.parts * self.parameters
        return 64 + elements * (8 if self.like == "f64" else 4)


class Columns(CpuNormalization):
    """Many sets side by side."""

    name = "norm.columns"
    operations = OPERATIONS
    notes = frozenset({"runtime_compilation"})
    kernels = (_forward, _backward)
    plan = staticmethod(functools.lru_cache(maxsize=256)(_Plan))

    def refusals(self, problem: Problem) -> list[str]:
        r = plain_refusals(problem)
        if not r:
            lanes, each, _, _ = _lanes(problem)
            r.require(lanes is not None, "more than one set or channel", "one")
            r.require(each <= BLOCK, f"at most {BLOCK} channels a group", each)
        return r

    def cost(self, problem: Problem, config: Config) -> float:
        plan = self.plan(problem)
        steps = [abs(plan.lanes.step(role)) for role in full_roles(problem)]
        scattered = sum(min(step, 16) for step in steps) / len(steps)
        rounds = 1.0e-9 if plan.backward else 0.5e-9
        if problem.epilogue.activation != "identity":
            rounds += 0.6e-9
        rows = problem["x"].numel / plan.table[WIDTH_OF_BLOCK]
        seconds = problem["x"].numel * rounds * max(1.0, scattered / 2) + rows * 20e-9
        return roofline(problem, flops=0.0) + seconds / min(problem.target.processors, plan.parts)
