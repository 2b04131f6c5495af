"""``pool.max_2x2``: the max pooling that most networks use, on a CPU in Numba: 2x2, stride 2, nothing at the edges.

Method: windows do not overlap, so forward reads every element of x once and backward writes every element of dx
once. Sixteen windows side by side are the lanes of vectors (see ``_numba/vector.py``): the two columns of a
window are split and merged in registers, so memory is read and written in whole neighbouring vectors. What no
window covers (a last odd row or column) gets its zero on the way. Cost: the memory traffic, or the cache's.

Limits: W is the innermost axis of all tensors and no window reaches outside. A third spatial axis may be there
if the window is 1 along it.
"""

import numpy as np
from numba.extending import register_jitable

from ...core.engine import Config, Engine, Refusals, Run
from ...core.heuristics import roofline
from ...core.problem import Problem
from ...ops.pooling import PoolGeometry
from .. import _numba as nb
from .._numba import vector as nv

TYPES = ("f64", "f32", "f16", "bf16")
INDEX_KINDS = {"none": 0, "u8": 1, "i32": 2, "i64": 3}
PARTS = 64

# What the table of 64-bit integers holds, and where. A plane is one n, c, d; strides are along n, c, d, h.
PLANES, KIND, C, D, H, W, P, Q = 0, 1, 2, 3, 4, 5, 6, 7
X, Y, INDEX = 8, 12, 16


@register_jitable(inline="always")
def _largest(v00, v01, v10, v11, right, lower):
    """The largest of four vectors in window order, and how far its place is from the first."""
    take = nv.exceeds(v01, v00)
    v = nv.select(take, v01, v00)
    place = nv.select(take, right, nv.fill(np.int32(0)))
    take = nv.exceeds(v10, v)
    v = nv.select(take, v10, v)
    place = nv.select(take, lower, place)
    take = nv.exceeds(v11, v)
    return nv.select(take, v11, v), nv.select(take, nv.add(lower, right), place)


@nb.kernel
def _forward_part(part, parts, x_address, y_address, index_address, table, like):
    t = nb.pointer(table, np.int64(0))
    x, y = nb.pointer(x_address, like), nb.pointer(y_address, like)
    narrow, middle = nb.pointer(index_address, np.uint8(0)), nb.pointer(index_address, np.int32(0))
    wide = nb.pointer(index_address, np.int64(0))
    width, columns, below, kind = t[W], t[Q], t[X + 3], t[KIND]
    right = nv.fill(np.int32(1))
    lower = nv.fill(nb.cast(2 if kind == 1 else width, np.int32(0)))
    for plane in range(t[PLANES] * part // parts, t[PLANES] * (part + 1) // parts):
        n, rest = plane // (t[C] * t[D]), plane % (t[C] * t[D])
        c, d = rest // t[D], rest % t[D]
        for p in range(t[P]):
            row = n * t[X] + c * t[X + 1] + d * t[X + 2] + 2 * p * below
            to = n * t[Y] + c * t[Y + 1] + d * t[Y + 2] + p * t[Y + 3]
            to_index = n * t[INDEX] + c * t[INDEX + 1] + d * t[INDEX + 2] + p * t[INDEX + 3]
            for q in range(0, columns, nv.LANES):
                at = row + 2 * q
                many = min(columns - q, nv.LANES)
                if many == nv.LANES:
                    v, place = _largest(
                        nv.read_pairs(x, at),
                        nv.read_pairs(x, at + 1),
                        nv.read_pairs(x, at + below),
                        nv.read_pairs(x, at + below + 1),
                        right,
                        lower,
                    )
                else:
                    v, place = _largest(
                        nv.read_some_pairs(x, at, 0, many),
                        nv.read_some_pairs(x, at + 1, 0, many),
                        nv.read_some_pairs(x, at + below, 0, many),
                        nv.read_some_pairs(x, at + below + 1, 0, many),
                        right,
                        lower,
                    )
                nv.write(y, to + q, 1, v, many)
                if kind == 1:
                    nv.write(narrow, to_index + q, 1, place, many)
                elif kind > 1:
                    flat = nv.add(nv.widen(place), nv.ramp((d * t[H] + 2 * p) * width + 2 * q, 2))
                    if kind == 2:
                        nv.write(middle, to_index + q, 1, flat, many)
                    else:
                        nv.write(wide, to_index + q, 1, flat, many)


@nb.kernel
def _backward_part(part, parts, dy_address, index_address, dx_address, table, like):
    t = nb.pointer(table, np.int64(0))
    dy, dx = nb.pointer(dy_address, like), nb.pointer(dx_address, like)
    narrow, middle = nb.pointer(index_address, np.uint8(0)), nb.pointer(index_address, np.int32(0))
    wide = nb.pointer(index_address, np.int64(0))
    width, columns, below, kind = t[W], t[Q], t[X + 3], t[KIND]
    zero = nv.fill(nb.accumulator(like))
    lower = 2 if kind == 1 else width
    for plane in range(t[PLANES] * part // parts, t[PLANES] * (part + 1) // parts):
        n, rest = plane // (t[C] * t[D]), plane % (t[C] * t[D])
        c, d = rest // t[D], rest % t[D]
        for p in range(t[P]):
            row = n * t[X] + c * t[X + 1] + d * t[X + 2] + 2 * p * below
            at = n * t[Y] + c * t[Y + 1] + d * t[Y + 2] + p * t[Y + 3]
            at_index = n * t[INDEX] + c * t[INDEX + 1] + d * t[INDEX + 2] + p * t[INDEX + 3]
            for q in range(0, columns, nv.LANES):
                many = min(columns - q, nv.LANES)
                start = (d * t[H] + 2 * p) * width + 2 * q
                v = nv.read_some(dy, at + q, 0, many)
                for i in range(2):
                    if kind == 1:
                        found = nv.read_some(narrow, at_index + q, 0, many)
                        left = nv.equal(found, nv.fill(nb.cast(i * lower, np.int32(0))))
                        right = nv.equal(found, nv.fill(nb.cast(i * lower + 1, np.int32(0))))
                    elif kind == 2:
                        first = nb.cast(start + i * lower, np.int32(0))
                        found = nv.read_some(middle, at_index + q, 0, many)
                        left = nv.equal(found, nv.ramp(first, np.int32(2)))
                        right = nv.equal(found, nv.ramp(nb.cast(first + 1, np.int32(0)), np.int32(2)))
                    else:
                        found = nv.read_some(wide, at_index + q, 0, many)
                        left = nv.equal(found, nv.ramp(start + i * lower, 2))
                        right = nv.equal(found, nv.ramp(start + i * lower + 1, 2))
                    left, right = nv.select(left, v, zero), nv.select(right, v, zero)
                    to = row + i * below + 2 * q
                    nv.write(dx, to, 1, nv.lower_half(left, right), min(2 * many, nv.LANES))
                    if 2 * many > nv.LANES:
                        rest = 2 * many - nv.LANES
                        nv.write(dx, to + nv.LANES, 1, nv.upper_half(left, right), rest)
            for w in range(2 * columns, width):
                dx[row + w] = nb.cast(0, like)  # the same bits in all four types
                dx[row + below + w] = nb.cast(0, like)
        for h in range(2 * t[P], t[H]):
            row = n * t[X] + c * t[X + 1] + d * t[X + 2] + h * below
            for w in range(width):
                dx[row + w] = nb.cast(0, like)


@nb.kernel
def _forward(parts, threads, x, y, index, table, like):
    nb.launch(_forward_part, parts, threads, (x, y, index, table, like))


@nb.kernel
def _backward(parts, threads, dy, index, dx, table, like):
    nb.launch(_backward_part, parts, threads, (dy, index, dx, table, like))


class Max2x2(Engine):
    name = "pool.max_2x2"
    operations = ("max_pool_fwd", "max_pool_bwd")
    targets = ("cpu",)
    notes = frozenset({"runtime_compilation"})

    def refusals(self, problem: Problem) -> list[str]:
        g = PoolGeometry.of(problem)
        r = Refusals()
        for role, t in problem.items:
            if role != "index":
                r.require(t.dtype in TYPES, f"{role} of type {', '.join(TYPES)}", t.dtype)
            columns = t.strides[-1] if t.shape[-1] > 1 else 1
            r.require(columns == 1, f"{role} with W innermost, stride 1", columns)
        ones = (1, 2, 2)
        r.require(g.window == ones, "a window of 2 along H and W and 1 along D", g.window)
        r.require(g.stride == ones, "a stride of 2 along H and W and 1 along D", g.stride)
        r.require(g.dilation == (1, 1, 1), "no dilation", g.dilation)
        r.require(g.pad == (0, 0, 0), "no padding before", g.pad)
        covered = tuple(q * s for q, s in zip(g.out_size, ones, strict=True))
        fits = all(c <= n for c, n in zip(covered, g.in_size, strict=True))
        r.require(fits, f"windows inside the input {g.in_size}", f"windows that cover {covered}")
        r.require(g.in_size[2] < 2**31, "a width below 2^31", g.in_size[2])
        return r

    def cost(self, problem: Problem, config: Config) -> float:
        return roofline(problem, flops=0.0)

    def build(self, problem: Problem, config: Config) -> Run:
        g = PoolGeometry.of(problem)
        kind = problem.op.index_type  # type: ignore[attr-defined]
        planes = g.N * g.C * g.in_size[0]
        sizes = (INDEX_KINDS[kind], g.C, *g.in_size, *g.out_size[1:])
        strides = (*g.x_strides[:4], *g.y_strides[:4], *g.index_strides[:4])
        table = np.array([planes, *sizes, *strides], dtype=np.int64)
        address = table.ctypes.data
        like = nb.token(problem.items[0][1].dtype)
        parts = max(1, min(planes, g.x.numel // 16384, PARTS))
        kernel = _forward if problem.op.name == "max_pool_fwd" else _backward
        threads = nb.threads if parts > 1 else lambda: 1
        kernel(0, 1, 0, 0, 0, address, like)  # compiles, or loads from disk; no part is run
        indexed = len(problem.items) == 3

        def run(tensors, workspace, _keep=table):
            a, b = tensors[0].data_ptr(), tensors[1].data_ptr()
            c = tensors[2].data_ptr() if indexed else 0
            kernel(parts, threads(), a, b, c, address, like)

        return run
