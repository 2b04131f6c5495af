"""``fold.windows``: windows of images as columns, and columns added up, on a CPU, any strides and types, in Numba.

Method: forward, every channel and window point is a row of the result: copies of rows of the image, zeros at the edges.
Backward each row of the image gathers the rows of columns that came from it, in one order, in float32 (float64 for
float64): in vectors where windows lie a pixel apart, else by a list, in a buffer. No two threads write to one element,
and which rows and blocks meet is worked out once, since a division costs as much as ten elements. Cost: the memory
traffic of the columns.
"""

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic, register_jitable

from ...core.engine import Config, Engine, Refusals, Run
from ...core.heuristics import roofline
from ...core.problem import Problem
from .. import _numba as nb
from .._numba import vector as nv

TYPES = ("f64", "f32", "f16", "bf16")
PARTS = 64
GRAIN = 32768  # elements that are worth a thread

# What the table of 64-bit integers holds: the turns of the outer loop, channels, then two numbers each (H, W). For
# columns that are added up follow the column and the first and last block (one past it) of every point along a window's
# W; for every row of the image where its rows of columns start in the list at the end, of how far these are; for every
# column how far are the at most `MOST` elements of such a row that it gathers (-1: none).
UNITS, C, IN, WINDOW, STRIDE, PAD, DILATION, BLOCKS, X, Y, MOST, FIRST = 0, 1, 2, 4, 6, 8, 10, 12, 14, 18, 21, 22


@register_jitable
def _reached(shift, stride, size, blocks):
    """The blocks whose place, ``block * stride + shift``, lies in 0 to `size`: the first, one past the last."""
    first = min(max(-(shift // stride), 0), blocks)
    return first, min(max((size - 1 - shift) // stride + 1, first), blocks)


@nb.kernel
def _unfold_part(part, parts, x_address, y_address, table, like):
    t, x, y = nb.pointer(table, np.int64(0)), nb.pointer(x_address, like), nb.pointer(y_address, like)
    zero = nb.cast(0, like)  # of 16 bits too: these are integers here, and zero has no bits
    step, width = t[STRIDE + 1], t[BLOCKS + 1]
    for unit in range(t[UNITS] * part // parts, t[UNITS] * (part + 1) // parts):
        s, rest = unit % t[WINDOW + 1], unit // t[WINDOW + 1]
        r, rest = rest % t[WINDOW], rest // t[WINDOW]
        c, n = rest % t[C], rest // t[C]
        down, right = r * t[DILATION] - t[PAD], s * t[DILATION + 1] - t[PAD + 1]
        first, last = _reached(right, step, t[IN + 1], width)
        to = n * t[Y] + ((c * t[WINDOW] + r) * t[WINDOW + 1] + s) * t[Y + 1]
        for p in range(t[BLOCKS]):
            h = p * t[STRIDE] + down
            begin, end = (first, last) if 0 <= h < t[IN] else (0, 0)
            at = n * t[X] + c * t[X + 1] + h * t[X + 2] + right * t[X + 3]
            jump, by = step * t[X + 3], t[Y + 2]
            for q in range(begin):
                y[to + q * by] = zero
            if jump == 1 and by == 1:
                for q in range(begin, end):
                    y[to + q] = x[at + q]
            else:
                for q in range(begin, end):
                    y[to + q * by] = x[at + q * jump]
            for q in range(end, width):
                y[to + q * by] = zero
            to += width * by


@intrinsic
def _fetch(typingctx, p, at):
    """Have p[at] brought to the first-level cache; what is not there at all is nobody's concern."""

    def codegen(context, builder, signature, values):
        spot = builder.bitcast(builder.gep(values[0], [values[1]]), ir.IntType(8).as_pointer())
        number = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [spot.type, number, number, number])
        fetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        builder.call(fetch, [spot, number(0), number(3), number(1)])
        return context.get_dummy_value()

    return types.void(p, types.int64), codegen


@nb.kernel
def _fold_part(part, parts, dy_address, dx_address, table, like):
    t, dy, dx = nb.pointer(table, np.int64(0)), nb.pointer(dy_address, like), nb.pointer(dx_address, like)
    zero, size = nb.accumulator(like), t[IN + 1]
    memory = np.full(size + nv.LANES, zero)
    row = nb.pointer(np.int64(memory.ctypes.data), zero)  # an array would look at the sign of every index
    step, by, wide = t[STRIDE + 1], t[Y + 2], t[WINDOW + 1]
    columns, rows = FIRST, FIRST + 3 * wide
    places = rows + t[IN] + 1
    taken = places + t[MOST] * size
    # A channel's columns are one piece of memory, but rows of the image take from all over it: every row has its share
    # of the next channel's brought in meanwhile.
    block = t[WINDOW] * wide * t[Y + 1]
    dense = by == 1 and t[Y + 1] == t[BLOCKS] * t[BLOCKS + 1]
    share = (block + t[IN] - 1) // t[IN] if dense else 0
    for unit in range(t[UNITS] * part // parts, t[UNITS] * (part + 1) // parts):
        h, rest = unit % t[IN], unit // t[IN]
        c, n = rest % t[C], rest // t[C]
        base = n * t[Y] + c * t[WINDOW] * wide * t[Y + 1]
        to = n * t[X] + c * t[X + 1] + h * t[X + 2]
        for i in range(base + block + h * share, base + block + (h + 1) * share, nv.LANES):
            _fetch(dy, i)
        if step == 1 and by == 1:
            for w in range(0, size, nv.LANES):
                v = nv.fill(zero)
                for e in range(t[rows + h], t[rows + h + 1]):
                    for s in range(wide):
                        shift = t[columns + 3 * s] - w  # lane less column
                        at = base + t[taken + e] + s * t[Y + 1] - shift
                        begin = max(t[columns + 3 * s + 1] + shift, 0)
                        end = min(t[columns + 3 * s + 2] + shift, nv.LANES)
                        if begin == 0 and end == nv.LANES:
                            v = nv.add(v, nv.read_all(dy, at))
                        elif begin < end:
                            v = nv.add(v, nv.read_some(dy, at, begin, end))
                nv.write(dx, to + w * t[X + 3], t[X + 3], v, min(nv.LANES, size - w))
            continue
        for i in range(0, size, nv.LANES):
            nv.write(row, i, 1, nv.fill(zero), nv.LANES)
        for e in range(t[rows + h], t[rows + h + 1]):
            for k in range(places, places + t[MOST] * size, size):
                for w in range(size):
                    if t[k + w] >= 0:
                        row[w] += nb.load(dy, base + t[taken + e] + t[k + w])
        for w in range(0, size, nv.LANES):
            nv.write(dx, to + w * t[X + 3], t[X + 3], nv.read_all(row, w), min(nv.LANES, size - w))
    memory[0] = zero  # it lives until here


@nb.kernel
def _unfold(parts, threads, x, y, table, like):
    nb.launch(_unfold_part, parts, threads, (x, y, table, like))


@nb.kernel
def _fold(parts, threads, dy, dx, table, like):
    nb.launch(_fold_part, parts, threads, (dy, dx, table, like))


def _sources(op: Any, size: tuple[int, ...], y_strides: tuple[int, ...]) -> list[int]:
    """The table's last part: what every column and every row of an image gathers."""
    (rows, wide), (down, step), (above, left), (apart, spread) = op.window, op.stride, op.padding, op.dilation
    p_size, q_size = op.blocks(size)
    found: list[int] = []
    for s in range(wide):
        shift = s * spread - left
        first = min(max(-(shift // step), 0), q_size)
        found += [shift, first, min(max((size[1] - 1 - shift) // step + 1, first), q_size)]
    gathered: list[list[int]] = [[] for _ in range(size[1])]
    if step > 1 or y_strides[2] != 1:
        for s in range(wide):
            shift, first, last = found[3 * s : 3 * s + 3]
            for q in range(first, last):
                gathered[q * step + shift].append(s * y_strides[1] + q * y_strides[2])
    most = max(map(len, gathered))
    starts, taken = [0], []
    for h in range(size[0]):
        for r in range(rows):
            p, rest = divmod(h + above - r * apart, down)
            if rest == 0 and 0 <= p < p_size:
                taken.append(r * wide * y_strides[1] + p * q_size * y_strides[2])
        starts.append(len(taken))
    places = [one[k] if k < len(one) else -1 for k in range(most) for one in gathered]
    return [most, *found, *starts, *places, *taken]


class Windows(Engine):
    name = "fold.windows"
    operations = ("unfold_fwd", "unfold_bwd")
    targets = ("cpu",)
    notes = frozenset({"runtime_compilation"})

    def refusals(self, problem: Problem) -> list[str]:
        r = Refusals()
        r.require_tensors(problem.items, TYPES)
        return r

    def cost(self, problem: Problem, config: Config) -> float:
        columns = problem["y" if problem.op.name == "unfold_fwd" else "dy"]
        return roofline(problem, flops=0.0) + columns.numel * 0.3e-9 / problem.target.processors

    def build(self, problem: Problem, config: Config) -> Run:
        op: Any = problem.op
        forward = op.name == "unfold_fwd"
        x, y = (problem["x"], problem["y"]) if forward else (problem["dx"], problem["dy"])
        units = x.shape[0] * x.shape[1] * (math.prod(op.window) if forward else x.shape[2])
        sizes = (*x.shape[2:], *op.window, *op.stride, *op.padding, *op.dilation, *op.blocks(x.shape[2:]))
        sources = [] if forward else _sources(op, x.shape[2:], y.strides)
        table = np.array([units, x.shape[1], *sizes, *x.strides, *y.strides, *sources], dtype=np.int64)
        address, like = table.ctypes.data, nb.token(x.dtype)
        kernel = _unfold if forward else _fold
        parts = max(1, min(units, y.numel // GRAIN, PARTS))
        threads = nb.threads if parts > 1 else lambda: 1
        kernel(0, 1, 0, 0, address, like)  # compiles, or loads from disk; no part is run

        def run(tensors, workspace, _keep=table):
            kernel(parts, threads(), tensors[0].data_ptr(), tensors[1].data_ptr(), address, like)

        return run
