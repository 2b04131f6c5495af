"""``norm.rows``: layer, RMS and group normalization on a CPU, one set after another, in Numba.

Method. A set is a dense row: x's own memory where it is one, else a copy in scratch memory, in the type of sums
(``_cpu.py``). Its mean and its sum of squared distances are taken in two passes over 4096 elements at a time, while
they are in the first-level cache, with the error of the mean itself taken out; pieces are combined by Chan's formula in
float64. Then the row is scaled, shifted, activated, and written. Backward takes the two sums of the formula in one pass
and dx in a second. While a row is written, the beginning of the next is called for. Gradients of scale and bias are
summed by fixed shares of the sets, and the shares in order: the same bits on every run, whatever the number of threads.

Cost: the memory traffic, as long as a row stays in the cache. Limits: the four types; sets whose elements are far
apart while neighbours belong to other sets are better served by ``norm.columns``.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

from ...core.engine import Config
from ...core.heuristics import roofline
from ...core.problem import Problem
from ...ops.activation import ACTIVATIONS
from .. import _numba as nb
from .._numba.memory import prefetch, size_of
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

CHUNK = 4096  # elements whose mean is taken at once
LINE = 64  # bytes that come together
CALLED = 16  # lines of the next set: about what a core can wait for at once, more would hold up the writing
PARTS = 16  # shares of the sets
ALIGN = 16  # elements

# The table: numbers, then for each tensor (x, dy, the result) its type, whether a set is dense there, and its step.
(UNITS, SIZE, A, B, PA, PB, CENTERED, CODE, PARAMETERS, PITCH, OUTSIDE, LINES, LANES, TENSORS, LOOPS) = (*range(14), 23)
KIND, DENSE, STEP = range(3)
WIDTH = 7  # of a loop: its size; steps in x, dy, the result, mean, inverse, parameters


@nb.kernel
def _moments(p, count, centered):
    """Mean and sum of squared distances from it, both float64; from 0 where the mean is not wanted."""
    mean, total, done = 0.0, 0.0, 0
    zero = nb.cast(0, p[0])
    for first in range(0, count, CHUNK):
        n = min(CHUNK, count - first)
        if centered:
            s = zero
            for i in range(first, first + n):
                s += p[i]
            middle = nb.cast(s / n, zero)
            rest, squares = zero, zero
            for i in range(first, first + n):
                d = p[i] - middle
                rest += d
                squares += d * d
            # What rounding left of the mean, from the distances' own sum.
            left = float(rest) / n
            own = float(middle) + left
            within = float(squares) - float(rest) * left
            within = 0.0 if within < 0.0 else within
            if done == 0:
                mean, total = own, within
            else:
                apart = own - mean
                share = float(n) / (done + n)
                mean += apart * share
                total += within + apart * apart * (done * share)
            done += n
        else:
            squares = zero
            for i in range(first, first + n):
                squares += p[i] * p[i]
            total += float(squares)
    return mean, total


@nb.kernel
def _place(t, unit, at):
    """Elements to a set's first in x, dy, the result, mean, inverse and parameters."""
    for k in range(WIDTH - 1):
        at[k] = 0
    for loop in range(t[OUTSIDE] - 1, -1, -1):
        row = LOOPS + WIDTH * loop
        index, rest = unit, unit
        if loop > 0:
            rest = unit // t[row]
            index = unit - rest * t[row]
        unit = rest
        for k in range(WIDTH - 1):
            at[k] += index * t[row + 1 + k]


@nb.kernel
def _line(t, tensor, line):
    """Elements to the first of a line of a set."""
    at = 0
    for loop in range(t[LINES] - 1, -1, -1):
        row = LOOPS + WIDTH * (t[OUTSIDE] + loop)
        rest = line // t[row]
        at += (line - rest * t[row]) * t[row + 1 + tensor]
        line = rest
    return at


@nb.kernel
def _row_of(t, tensor, address, at, scratch, like):
    """Address of a set's dense row: in the tensor itself, or of a copy."""
    about = TENSORS + 3 * tensor
    if t[about + DENSE]:
        return address + at * size_of(like)
    lines, lanes = t[SIZE] // t[LANES], t[LANES]
    for line in range(lines):
        from_ = at + _line(t, tensor, line)
        read_row(t[about + KIND], address, from_, t[about + STEP], lanes, scratch + line * lanes * size_of(like), like)
    return scratch


@nb.kernel
def _finish(t, address, at, row, like):
    """Write a row that is not the result's own memory."""
    about = TENSORS + 6
    if not t[about + DENSE]:
        lines, lanes = t[SIZE] // t[LANES], t[LANES]
        for line in range(lines):
            to = at + _line(t, 2, line)
            write_row(t[about + KIND], address, to, t[about + STEP], lanes, row + line * lanes * size_of(like), like)


@nb.kernel
def _call_for(t, tensor, address, at, like):
    """Start to bring the beginning of a dense set, while memory would rest: another is in the cache and written."""
    if t[TENSORS + 3 * tensor + DENSE]:
        p = nb.pointer(address, like)
        step = LINE // size_of(like)
        for i in range(0, min(t[SIZE], CALLED * step), step):
            prefetch(p, at + i)


@nb.kernel
def _affine(t, p, out, mean, inverse, scale, bias, q0, like):
    """Writes (p - mean) inverse scale + bias; `mean` in two parts, float64."""
    high = nb.cast(mean, like)
    low = mean - float(high)
    rows, count = t[A], t[B]
    for a in range(rows):
        q, first = q0 + a * t[PA], a * count
        if t[PB] == 0:
            factor = nb.cast(inverse * float(scale[q]), like)
            shift = nb.cast(float(bias[q]) - low * inverse * float(scale[q]), like)
            for i in range(first, first + count):
                out[i] = (p[i] - high) * factor + shift
        else:
            factor, shift = nb.cast(inverse, like), nb.cast(-low * inverse, like)
            for i in range(count):
                out[first + i] = ((p[first + i] - high) * factor + shift) * scale[q + i] + bias[q + i]


@nb.kernel
def _forward_part(part, slot, parts, table, x, y, mean, inverse, parameters, scratch, numbers, like):
    t, numbers = nb.pointer(table, np.int64(0)), nb.pointer(numbers, np.float64(0))
    means, inverses = nb.pointer(mean, like), nb.pointer(inverse, like)
    scale = nb.pointer(parameters, like)
    bias = nb.pointer(parameters + t[PARAMETERS] * size_of(like), like)
    at, following = np.empty(WIDTH, np.int64), np.empty(WIDTH, np.int64)
    first = scratch + 3 * slot * t[PITCH] * size_of(like)
    second = first + t[PITCH] * size_of(like)
    for unit in range(t[UNITS] * part // parts, t[UNITS] * (part + 1) // parts):
        _place(t, unit, at)
        source = _row_of(t, 0, x, at[0], first, like)
        p = nb.pointer(source, like)
        middle, squares = _moments(p, t[SIZE], t[CENTERED] != 0)
        _place(t, min(unit + 1, t[UNITS] - 1), following)
        _call_for(t, 0, x, following[0], like)
        factor = 1.0 / math.sqrt(squares / t[SIZE] + numbers[0])
        if t[CENTERED]:
            means[at[3]] = nb.cast(middle, like)
        inverses[at[4]] = nb.cast(factor, like)
        target = y + at[2] * size_of(like) if t[TENSORS + 6 + DENSE] else second
        _affine(t, p, nb.pointer(target, like), middle, factor, scale, bias, at[5], like)
        if t[CODE]:
            activate_row(t[CODE], numbers[1], t[SIZE], target, like)
        _finish(t, y, at[2], target, like)


@nb.kernel
def _backward_part(
    part, slot, parts, table, x, dy, dx, mean, inverse, parameters, sums, scratch, numbers, wanted, like
):  # fmt: skip
    t, numbers = nb.pointer(table, np.int64(0)), nb.pointer(numbers, np.float64(0))
    means, inverses = nb.pointer(mean, like), nb.pointer(inverse, like)
    every = t[PARAMETERS]
    scale = nb.pointer(parameters, like)
    bias = nb.pointer(parameters + every * size_of(like), like)
    dscale = nb.pointer(sums + part * every * size_of(like), like)
    dbias = nb.pointer(sums + (parts + part) * every * size_of(like), like)
    zero, one = nb.cast(0, like), nb.cast(1, like)
    if wanted & 2:
        for i in range(every):
            dscale[i] = zero
            dbias[i] = zero
    at, following = np.empty(WIDTH, np.int64), np.empty(WIDTH, np.int64)
    first = scratch + 3 * slot * t[PITCH] * size_of(like)
    second = first + t[PITCH] * size_of(like)
    third = second + t[PITCH] * size_of(like)
    rows, count = t[A], t[B]
    for unit in range(t[UNITS] * part // parts, t[UNITS] * (part + 1) // parts):
        _place(t, unit, at)
        p = nb.pointer(_row_of(t, 0, x, at[0], first, like), like)
        given = _row_of(t, 1, dy, at[1], second, like)
        middle = means[at[3]] if t[CENTERED] else zero
        factor = inverses[at[4]]
        if t[CODE]:  # the activation's input again, and the gradient of what it was given
            _affine(t, p, nb.pointer(third, like), float(middle), float(factor), scale, bias, at[5], like)
            activate_row_grad(t[CODE], numbers[1], t[SIZE], third, given, third, like)
            given = third
        g = nb.pointer(given, like)
        plain, against = 0.0, 0.0  # sums of s g and of s g (x - mean) over the set
        for a in range(rows):
            q, begin = at[5] + a * t[PA], a * count
            s1, s2 = zero, zero
            if t[PB] == 0:
                for i in range(begin, begin + count):
                    s1 += g[i]
                    s2 += g[i] * (p[i] - middle)
                plain += float(s1) * float(scale[q])
                against += float(s2) * float(scale[q])
                if wanted & 2:
                    dscale[q] += s2 * factor
                    dbias[q] += s1
            else:
                if wanted & 1:
                    for i in range(count):
                        v = g[begin + i] * scale[q + i]
                        s1 += v
                        s2 += v * (p[begin + i] - middle)
                    plain += float(s1)
                    against += float(s2)
                if wanted & 2:
                    for i in range(count):
                        v = g[begin + i]
                        dscale[q + i] += v * ((p[begin + i] - middle) * factor)
                        dbias[q + i] += v
        _place(t, min(unit + 1, t[UNITS] - 1), following)
        _call_for(t, 0, x, following[0], like)
        _call_for(t, 1, dy, following[1], like)
        if wanted & 1:
            target = dx + at[2] * size_of(like) if t[TENSORS + 6 + DENSE] else third
            out = nb.pointer(target, like)
            c1 = nb.cast(plain / t[SIZE], like) if t[CENTERED] else zero
            c2 = nb.cast(against * float(factor) * float(factor) / t[SIZE], like)
            for a in range(rows):
                q, begin = at[5] + a * t[PA], a * count
                if t[PB] == 0:
                    s = scale[q] * one
                    for i in range(begin, begin + count):
                        out[i] = factor * (s * g[i] - c1 - c2 * (p[i] - middle))
                else:
                    for i in range(count):
                        v = scale[q + i] * g[begin + i]
                        out[begin + i] = factor * (v - c1 - c2 * (p[begin + i] - middle))
            _finish(t, dx, at[2], target, like)


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


def _row_major_inside(s: Any) -> tuple[list[Loop], tuple[int, int, int, int]]:
    """The loops inside a set, and sizes and parameter steps of `a` and `b`."""
    if s.inside or not (s.channels or s.points):
        return s.inside, (1, s.size, 0, 1)
    each = s.channels[0].size if s.channels else 1
    points = math.prod(loop.size for loop in s.points)
    channels_inside = s.channels and s.points and s.channels[0].step("x") < s.points[-1].step("x")
    if channels_inside:
        return [*s.points, *s.channels], (points, each, 0, 1)
    return [*s.channels, *s.points], (each, points, 1, 0)


class _Plan:
    def __init__(self, problem: Problem):
        s = sets(problem)
        op = problem.op
        self.backward = op.name.endswith("bwd")
        wide = any(t.dtype == "f64" for _, t in problem.items)
        self.like = "f64" if wide else "f32"
        inside, (a, b, pa, pb) = _row_major_inside(s)
        self.inner = inside[-1] if inside else Loop(1, {})
        lines, lanes = inside[:-1], self.inner.size
        full = full_roles(problem)
        out = problem.outputs[0] if not self.backward else "dx"
        tensors = ("x", "dy", out)
        about: list[int] = []
        for role in tensors:
            present = role in full
            run = [*_runs(inside, role)]
            dense = present and problem[role].dtype == self.like and (len(run) == 0 or run == [1])
            about += [TYPES[problem[role].dtype] if present else 1, dense, self.inner.step(role)]
        # A copy of x is read where it is not dense; a result that is nowhere wanted is never touched.
        roles = (*tensors, "mean", "inv_variance", "parameter")
        loops = [n for loop in (*s.outside, *lines) for n in (loop.size, *(loop.step(role) for role in roles))]
        pitch = -(-s.size // ALIGN) * ALIGN
        centered = "mean" in op.statistics  # type: ignore[attr-defined]
        code = ACTIVATIONS[problem.epilogue.activation].code
        head = (s.count, s.size, a, b, pa, pb, centered, code, s.parameters, pitch, len(s.outside), len(lines), lanes)
        self.table = np.array([*head, *about, *[0] * (LOOPS - len(head) - len(about)), *loops], dtype=np.int64)
        self.parts = max(1, min(s.count, PARTS))
        self.pitch, self.parameters = pitch, s.parameters

        self.dense = all(about[DENSE::3][i] for i, role in enumerate(tensors) if role in full)
        nothing = np.zeros(LOOPS, dtype=np.int64)
        nothing[LANES] = 1
        self.nothing = nothing

    def workspace(self, problem: Problem) -> int:
        elements = 2 * self.parameters + 3 * self.pitch * max(1, min(problem.target.processors, self.parts))
        if self.backward and {"dscale", "dbias"} & set(problem.outputs):
            elements += 2 * self.parts * self.parameters
        return 64 + elements * (8 if self.like == "f64" else 4)


def _runs(inside: list[Loop], role: str) -> list[int]:
    """Steps of the runs that a set is in one tensor, after merging; [1] is a dense row."""
    found: list[tuple[int, int]] = []
    for loop in inside:
        size, step = loop.size, loop.step(role)
        if found and found[-1][1] == size * step:
            size *= found.pop()[0]
        found.append((size, step))
    return [step for _, step in found]


class Rows(CpuNormalization):
    """One set after another."""

    name = "norm.rows"
    operations = OPERATIONS
    notes = frozenset({"runtime_compilation"})
    kernels = (_forward, _backward)
    plan = staticmethod(functools.lru_cache(maxsize=256)(_Plan))

    def refusals(self, problem: Problem) -> list[str]:
        return plain_refusals(problem)

    def cost(self, problem: Problem, config: Config) -> float:
        plan = self.plan(problem)
        steps = [abs(plan.inner.step(role)) for role in full_roles(problem)]
        # An element of a line that is far from the next moves a cache line.
        scattered = sum(min(step, 16) for step in steps) / len(steps) if plan.inner.size > 1 else 1.0
        rounds = 0.35e-9 if not plan.backward else 0.6e-9
        if problem.epilogue.activation != "identity":
            rounds += 0.6e-9
        lines = problem["x"].numel / max(plan.inner.size, 1) if not plan.dense else 0
        seconds = problem["x"].numel * rounds * max(1.0, scattered / 2) + plan.table[UNITS] * 60e-9 + lines * 15e-9
        return roofline(problem, flops=0.0) + seconds / min(problem.target.processors, plan.parts)
