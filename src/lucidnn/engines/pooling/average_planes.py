"""``pool.average_planes``: averages over whole dense planes and their gradient on a CPU, in Numba.

Method: a plane is one row of neighbours in memory. Forward adds it up in four vectors of sixteen lanes, whose lanes are
added in a fixed order at the end; backward writes the plane's share everywhere. Planes follow one another without a
division or a table, since a plane of 7x7 points is three vectors and one lane: anything else about it would take longer
than its sum.

Cost: one read of x, or one write of dx. Limits: one window, the plane, whose points lie side by side; a thread owns
whole planes, so one plane alone is one thread's work.
"""

import numpy as np

from ...core.engine import Config, Engine, Refusals, Run
from ...core.heuristics import roofline
from ...core.problem import Problem
from .. import _numba as nb
from .._numba import vector as nv
from ._axes import UNIT, Windows, shared_divisor
from ._lanes import total

TYPES = ("f64", "f32", "f16", "bf16")
BLOCK = 4 * nv.LANES

# What the table of 64-bit integers holds, and where: planes, channels, points, and strides along n and c.
PLANES, C, POINTS, LARGE, SMALL = 0, 1, 2, 3, 5


@nb.kernel
def _forward_part(part, parts, x_at, y_at, table, divisor, like):
    t, x, y = nb.pointer(table, np.int64(0)), nb.pointer(x_at, like), nb.pointer(y_at, like)
    zero, points, by = nv.fill(nb.accumulator(like)), t[POINTS], nb.cast(divisor, nb.accumulator(like))
    begin, end = t[PLANES] * part // parts, t[PLANES] * (part + 1) // parts
    n, c = begin // t[C], begin % t[C]
    for _ in range(begin, end):
        at, w = n * t[LARGE] + c * t[LARGE + 1], 0
        v0, v1, v2, v3 = zero, zero, zero, zero
        while w + BLOCK <= points:
            v0 = nv.add(v0, nv.read_all(x, at + w))
            v1 = nv.add(v1, nv.read_all(x, at + w + nv.LANES))
            v2 = nv.add(v2, nv.read_all(x, at + w + 2 * nv.LANES))
            v3 = nv.add(v3, nv.read_all(x, at + w + 3 * nv.LANES))
            w += BLOCK
        while w + nv.LANES <= points:
            v0 = nv.add(v0, nv.read_all(x, at + w))
            w += nv.LANES
        if w < points:
            v1 = nv.add(v1, nv.read_some(x, at + w, 0, points - w))
        nb.store(y, n * t[SMALL] + c * t[SMALL + 1], total(nv.add(nv.add(v0, v1), nv.add(v2, v3))) / by)
        c += 1
        if c == t[C]:
            c, n = 0, n + 1


@nb.kernel
def _backward_part(part, parts, dy_at, dx_at, table, divisor, like):
    t, dy, dx = nb.pointer(table, np.int64(0)), nb.pointer(dy_at, like), nb.pointer(dx_at, like)
    points, by = t[POINTS], nb.cast(divisor, nb.accumulator(like))
    begin, end = t[PLANES] * part // parts, t[PLANES] * (part + 1) // parts
    n, c = begin // t[C], begin % t[C]
    for _ in range(begin, end):
        to, w = n * t[LARGE] + c * t[LARGE + 1], 0
        share = nv.fill(nb.load(dy, n * t[SMALL] + c * t[SMALL + 1]) / by)
        while w + nv.LANES <= points:
            nv.write(dx, to + w, 1, share, nv.LANES)
            w += nv.LANES
        if w < points:
            nv.write(dx, to + w, 1, share, points - w)
        c += 1
        if c == t[C]:
            c, n = 0, n + 1


@nb.kernel
def _forward(parts, threads, x, y, table, divisor, like):
    nb.launch(_forward_part, parts, threads, (x, y, table, divisor, like))


@nb.kernel
def _backward(parts, threads, dy, dx, table, divisor, like):
    nb.launch(_backward_part, parts, threads, (dy, dx, table, divisor, like))


class AveragePlanes(Engine):
    name = "pool.average_planes"
    operations = ("avg_pool_fwd", "avg_pool_bwd", "adaptive_avg_pool_fwd", "adaptive_avg_pool_bwd")
    targets = ("cpu",)
    notes = frozenset({"runtime_compilation"})

    def refusals(self, problem: Problem) -> list[str]:
        r = Refusals()
        r.require_tensors(problem.items, TYPES, elements=True)
        g = Windows.of(problem)
        d, h, w = g.axes
        one = (d, h) == (UNIT, UNIT) and w.count == 1 and w.window == w.size and not w.before and not w.after
        r.require(one, "one window, the plane, whose axes are one in memory", [(a.size, a.count) for a in (d, h, w)])
        step = g.strides[problem.op.x_role][4] if w.size > 1 else 1  # type: ignore[attr-defined]
        r.require(step == 1, f"points of {problem.op.x_role} side by side", f"{step} apart")  # type: ignore
        return r

    def cost(self, problem: Problem, config: Config) -> float:
        g = Windows.of(problem)
        # Measured: nanoseconds a plane beyond its bytes.
        return roofline(problem, flops=0.0) + 3e-9 * g.N * g.C / problem.target.processors

    def build(self, problem: Problem, config: Config) -> Run:
        g = Windows.of(problem)
        forward = problem.op.name.endswith("_fwd")
        large, small = g.strides[problem.op.x_role], g.strides[problem.op.y_role]  # type: ignore[attr-defined]
        table = np.array([g.N * g.C, g.C, g.sizes[2], *large[:2], *small[:2]], dtype=np.int64)
        work = g.N * g.C * g.sizes[2]
        parts = int(max(1, min(g.N * g.C, work // 16384, 4 * problem.target.processors)))
        address, divisor = table.ctypes.data, shared_divisor(problem, g.axes)
        like = nb.token(problem.items[0][1].dtype)
        kernel = _forward if forward else _backward
        threads = nb.threads if parts > 1 else lambda: 1
        kernel(0, 1, 0, 0, address, divisor, like)  # compiles, or loads from disk; no part is run

        def run(tensors, workspace, _keep=table):
            kernel(parts, threads(), tensors[0].data_ptr(), tensors[1].data_ptr(), address, divisor, like)

        return run
