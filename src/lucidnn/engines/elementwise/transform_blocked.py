"""``transform.blocked``: the tensor transformation on a CPU, any types, strides, padding and folds, in Numba.

Method: nested loops (``_moves.py``) around a run of up to `BLOCK` elements that is read into a buffer in the
first-level cache, scaled, surrounded with padding, added to and written, along an axis on which one tensor's elements
are neighbours. Where the other tensor has its neighbours along another axis, squares of 16 by 16 are read along one and
written along the other, turned in registers. Where the innermost loop is short, as with three channels, and its runs
lie side by side in y, many of them make up a block. What lies outside follows from the coordinates' start and step,
once a run. The types are looked at once a run: three kernels (float32, float64, 64-bit whole numbers) serve every mix.

Cost: the memory traffic, each tensor once. Other runs of a few elements pay some ten nanoseconds each.
"""

import dataclasses
from typing import Any

import numpy as np
from numba.core import types
from numba.extending import overload

from ...core.engine import Config, Engine, Refusals, Run
from ...core.heuristics import roofline
from ...core.problem import Problem
from ...ops.elementwise import TYPES, WHOLE
from .. import _numba as nb
from .._numba.stack import stack
from ._access import KINDS, read, write
from ._moves import FREE, Axis, Loop, Moves
from ._turn import turn

BLOCK = 512
SIDE = 16  # of a square
GRAIN = 16384  # elements that are worth a thread
PARTS = 64
LEAST = 8  # loops that are shorter are not worth squares
MOST = 32  # elements of a run that shares a block with others
MIXED = {("f32", "bf16"): -1, ("f32", "f16"): -2, ("bf16", "f32"): -3, ("f16", "f32"): -4}  # as `_turn_bits` knows them

# The table of 64-bit integers: these; five axes and one that is never left, four numbers each; the two inner loops and
# then the outer ones, seven numbers each.
TURNED, OUTER, UNITS, TILES, X_TYPE, Y_TYPE, Z_TYPE, X_START, Y_START, Z_START, SAME, GROUP = range(12)
AXES = 12
B = AXES + 4 * 6
A, LOOPS = B + 7, B + 14


@nb.jitable
def _valid(start, step, size, count):
    """First and last index (exclusive) below `count` with 0 <= start + index * step < size."""
    first, last = 0, count
    if step == 0:
        if start < 0 or start >= size:
            last = 0
    else:
        first, last = max(0, -(start // step)), min(count, -((start - size) // step))
    return first, max(first, last)


@nb.separate
def _fetch(kind, x, at, step, first, last, begin, end, v, to, alpha, value):
    """A run of the indices begin to end of x, scaled, with padding where they lie outside of first to last."""
    first, last = min(max(first, begin), end), max(min(last, end), begin)
    for i in range(begin, min(first, end)):
        v[to + i - begin] = value
    if last > first:
        read(kind, x, at + first * step, step, last - first, v, to + first - begin)
        if alpha != 1:
            for i in range(to + first - begin, to + last - begin):
                v[i] *= alpha
    for i in range(max(last, first), end):
        v[to + i - begin] = value


def _turn_buffer(v, w):
    """w[i * 16 + j] = v[j * 16 + i]."""
    raise NotImplementedError("works inside a kernel only")


@overload(_turn_buffer)
def _turn_buffer_impl(v, w):
    if v.dtype == types.float32:
        return lambda v, w: turn(v, 0, SIDE, w, 0, SIDE)

    def impl(v, w):
        for i in range(SIDE):
            for j in range(SIDE):
                w[i * SIDE + j] = v[j * SIDE + i]

    return impl


@nb.separate
def _turn_bits(size, x, at, step, y, to, by):
    """A whole square between tensors whose elements have one size in bytes, or types of `MIXED`."""
    if size == -1:
        turn(nb.pointer(x, np.float32(0)), at, step, nb.pointer(y, np.int16(0)), to, by)
    elif size == -2:
        turn(nb.pointer(x, np.float32(0)), at, step, nb.pointer(y, np.uint16(0)), to, by)
    elif size == -3:
        turn(nb.pointer(x, np.int16(0)), at, step, nb.pointer(y, np.float32(0)), to, by)
    elif size == -4:
        turn(nb.pointer(x, np.uint16(0)), at, step, nb.pointer(y, np.float32(0)), to, by)
    elif size == 4:
        turn(nb.pointer(x, np.int32(0)), at, step, nb.pointer(y, np.int32(0)), to, by)
    elif size == 2:
        turn(nb.pointer(x, np.int16(0)), at, step, nb.pointer(y, np.int16(0)), to, by)
    elif size == 1:
        turn(nb.pointer(x, np.uint8(0)), at, step, nb.pointer(y, np.uint8(0)), to, by)
    else:
        turn(nb.pointer(x, np.int64(0)), at, step, nb.pointer(y, np.int64(0)), to, by)


@nb.kernel
def _part(part, parts, x, z, y, table, numbers, like):
    t, numbers = nb.pointer(table, np.int64(0)), nb.pointer(numbers, like)
    alpha, beta, value = numbers[0], numbers[1], numbers[2]
    v, w, u = stack(BLOCK, like), stack(BLOCK, like), stack(SIDE, like)
    in_x, in_y = stack(6, np.int64(0)), stack(6, np.int64(0))
    a_axis, b_axis, a_size, b_size, turned = t[A + 4], t[B + 4], t[A], t[B], t[TURNED]
    for unit in range(t[UNITS] * part // parts, t[UNITS] * (part + 1) // parts):
        rest, tile = unit // t[TILES], unit % t[TILES]
        x_at, y_at, z_at = t[X_START], t[Y_START], t[Z_START]
        for k in range(6):
            in_x[k], in_y[k] = t[AXES + 4 * k], t[AXES + 4 * k + 2]
        for loop in range(t[OUTER] - 1, -1, -1):
            row = LOOPS + 7 * loop
            here, rest = rest % t[row], rest // t[row]
            x_at += here * t[row + 1]
            y_at += here * t[row + 2]
            z_at += here * t[row + 3]
            in_x[t[row + 4]] += here * t[row + 5]
            in_y[t[row + 4]] += here * t[row + 6]
        exists, padding = True, False
        for k in range(5):
            if k != a_axis and k != b_axis:
                if in_y[k] < 0 or in_y[k] >= t[AXES + 4 * k + 3]:
                    exists = False
                if in_x[k] < 0 or in_x[k] >= t[AXES + 4 * k + 1]:
                    padding = True
        if not exists:
            continue
        begin, end = _valid(in_y[b_axis], t[B + 6], t[AXES + 4 * b_axis + 3], b_size)
        first, last = _valid(in_x[b_axis], t[B + 5], t[AXES + 4 * b_axis + 1], b_size)
        if padding:
            first, last = begin, begin
        if t[GROUP]:  # a block of runs that lie side by side in y
            top = tile * t[GROUP]
            rows = min(t[GROUP], a_size - top)
            for i in range(rows * b_size):
                v[i] = value
            for j in range(first, last):
                read(t[X_TYPE], x, x_at + top * t[A + 1] + j * t[B + 1], t[A + 1], rows, w, 0)
                for i in range(rows):
                    v[i * b_size + j] = alpha * w[i]
            write(t[Y_TYPE], y, y_at + top * b_size, 1, rows * b_size, v)
            continue
        if not turned:
            begin, end = max(begin, tile * BLOCK), min(end, (tile + 1) * BLOCK)
            if end <= begin:
                continue
            _fetch(t[X_TYPE], x, x_at, t[B + 1], first, last, begin, end, v, 0, alpha, value)
            if z != 0:
                read(t[Z_TYPE], z, z_at + begin * t[B + 3], t[B + 3], end - begin, w, 0)
                for i in range(end - begin):
                    v[i] += beta * w[i]
            write(t[Y_TYPE], y, y_at + begin * t[B + 2], t[B + 2], end - begin, v)
            continue
        top, bottom = _valid(in_y[a_axis], t[A + 6], t[AXES + 4 * a_axis + 3], a_size)
        a_first, a_last = _valid(in_x[a_axis], t[A + 5], t[AXES + 4 * a_axis + 1], a_size)
        top, bottom = max(top, tile * SIDE), min(bottom, (tile + 1) * SIDE)
        rows = bottom - top
        if rows <= 0:
            continue
        whole = t[SAME] != 0 and rows == SIDE and a_first <= top and bottom <= a_last
        for left in range(begin, end, SIDE):
            count = min(SIDE, end - left)
            if whole and count == SIDE and first <= left and left + SIDE <= last:
                _turn_bits(
                    t[SAME], x, x_at + top + left * t[B + 1], t[B + 1], y, y_at + top * t[A + 2] + left, t[A + 2]
                )
                continue
            for j in range(count):
                at = x_at + (left + j) * t[B + 1]
                if first <= left + j < last:
                    _fetch(t[X_TYPE], x, at, 1, a_first, a_last, top, bottom, v, j * SIDE, alpha, value)
                else:
                    for i in range(rows):
                        v[j * SIDE + i] = value
            _turn_buffer(v, w)
            for i in range(rows):
                if z != 0:
                    z_row = z_at + (top + i) * t[A + 3] + left * t[B + 3]
                    read(t[Z_TYPE], z, z_row, t[B + 3], count, u, 0)
                    for j in range(count):
                        w[i * SIDE + j] += beta * u[j]
                for j in range(count):
                    u[j] = w[i * SIDE + j]
                write(t[Y_TYPE], y, y_at + (top + i) * t[A + 2] + left, 1, count, u)


@nb.kernel
def _run(parts, threads, x, z, y, table, numbers, like):
    nb.launch(_part, parts, threads, (x, z, y, table, numbers, like))


def _inner(loops: tuple[Loop, ...]) -> tuple[list[Loop], Loop | None, Loop]:
    """The outer loops, the one that squares take beside the innermost or None, and the innermost."""
    near_y = max((one for one in loops if one.y == 1), key=lambda one: one.size, default=None)
    near_x = max((one for one in loops if one.x == 1), key=lambda one: one.size, default=None)
    if near_y and near_x and near_x.y != 1 and near_y.x != 1:
        apart = near_x.axis != near_y.axis or near_x.axis < 0
        if apart and min(near_x.size, near_y.size) >= LEAST:
            return [one for one in loops if one not in (near_x, near_y)], near_x, near_y
    found = [one for one in (near_y, near_x) if one]
    inner = max(found, key=lambda one: (one.x == one.y == 1, one.size)) if found else loops[-1]
    outer = [one for one in loops if one is not inner]
    return sorted(outer, key=lambda one: one in found), None, inner


def _grouped(moves: Moves, outer: list[Loop], inner: Loop) -> Loop | None:
    """The loop whose turns lie side by side in y, each a short run of the innermost."""
    if inner.size > MOST or inner.y != 1 or (inner.axis >= 0 and moves.axes[inner.axis].y_size != FREE):
        return None
    return next((one for one in outer if one.axis == -1 and one.y == inner.size and one.size >= SIDE), None)


class TransformBlocked(Engine):
    name = "transform.blocked"
    operations = ("transform_tensor",)
    targets = ("cpu",)
    notes = frozenset({"runtime_compilation"})

    def refusals(self, problem: Problem) -> list[str]:
        r = Refusals()
        r.require_tensors(problem.items, TYPES)
        return r

    def cost(self, problem: Problem, config: Config) -> float:
        moves = Moves.of(problem)
        outer, beside, inner = _inner(moves.loops)
        runs = problem["y"].numel / min(max(inner.size, 1), SIDE if beside else BLOCK)
        if not beside and "z" not in problem.tensors and _grouped(moves, outer, inner):
            runs = problem["y"].numel / BLOCK
        seconds = problem["y"].numel * (0.3e-9 if inner.x == inner.y == 1 or beside else 0.8e-9) + runs * 10e-9
        return roofline(problem, flops=0.0) + seconds / problem.target.processors

    def build(self, problem: Problem, config: Config) -> Run:
        op: Any = problem.op
        tensors, epilogue = problem.tensors, problem.epilogue
        moves = Moves.of(problem)
        outer, beside, inner = _inner(moves.loops)
        group = None if beside or "z" in tensors else _grouped(moves, outer, inner)
        if group:
            outer = [one for one in outer if one is not group]
        kinds = {t.dtype for t in tensors.values()}
        exact = tensors["x"].dtype in WHOLE
        form = "f32"
        if exact:
            form = "i64" if tensors["y"].dtype in WHOLE else "f64"
        elif "f64" in kinds:
            form = "f64"
        like = nb.token(form)
        pair = tensors["x"].dtype, tensors["y"].dtype
        plain = epilogue.alpha == 1.0 and "z" not in tensors
        same = 0 if not plain else tensors["x"].itemsize if pair[0] == pair[1] else MIXED.get(pair, 0)
        tiles = -(-beside.size // SIDE) if beside else -(-inner.size // BLOCK)
        together = BLOCK // inner.size if group else 0
        if group:
            tiles = -(-group.size // together)
        units = 0 if problem["y"].numel == 0 else int(np.prod([one.size for one in outer], dtype=np.int64)) * tiles
        numbers = np.array([epilogue.alpha, epilogue.beta, op.value], dtype=like.dtype)
        types_ = [KINDS[tensors[role].dtype] if role in tensors else -1 for role in ("x", "y", "z")]
        head = [int(beside is not None), len(outer), units, tiles, *types_, moves.x_start, moves.y_start, moves.z_start]
        axes = [*moves.axes, *[Axis()] * (6 - len(moves.axes))]
        loops = [inner, beside or group or Loop(1, 0, 0, 0), *outer]
        table = np.array(
            [
                *head,
                same,
                together,
                *(n for axis in axes for n in dataclasses.astuple(axis)),
                *(n for one in loops for n in dataclasses.astuple(dataclasses.replace(one, axis=one.axis % 6))),
            ],
            dtype=np.int64,
        )
        address, numbers_address = table.ctypes.data, numbers.ctypes.data
        parts = max(1, min(units, problem["y"].numel // GRAIN, PARTS)) if units else 0
        threads = nb.threads if parts > 1 else lambda: 1
        _run(0, 1, 0, 0, 0, address, numbers_address, like)  # compiles, or loads from disk
        order = [(*problem.inputs, *problem.outputs).index(role) if role in tensors else None for role in "xzy"]

        def run(tensors: tuple[Any, ...], workspace: Any, _keep: Any = (table, numbers)) -> None:
            x, z, y = [0 if i is None else tensors[i].data_ptr() for i in order]
            _run(parts, threads(), x, z, y, address, numbers_address, like)

        return run
