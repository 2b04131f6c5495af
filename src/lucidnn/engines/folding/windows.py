"""``fold.windows``: windows of images as columns, and columns added up, on a CPU, any strides and types, in Numba.

Method: forward, every channel and window point is a row of the result: copies of rows of the image, zeros at the edges.
Backward each row of the image gathers the rows of columns that came from it, in one order, in a buffer of float32
(float64 for float64): no two threads write to one element. Cost: the memory traffic of the columns.
"""

import math
from typing import Any

import numpy as np
from numba.extending import register_jitable

from ...core.engine import Config, Engine, Refusals, Run
from ...core.heuristics import roofline
from ...core.problem import Problem
from .. import _numba as nb

TYPES = ("f64", "f32", "f16", "bf16")
PARTS = 64
GRAIN = 32768  # elements that are worth a thread

# What the table of 64-bit integers holds: the turns of the outer loop, channels, then two numbers each (H, W).
UNITS, C, IN, WINDOW, STRIDE, PAD, DILATION, BLOCKS, X, Y = 0, 1, 2, 4, 6, 8, 10, 12, 14, 18


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


@nb.kernel
def _fold_part(part, parts, dy_address, dx_address, table, like):
    t, dy, dx = nb.pointer(table, np.int64(0)), nb.pointer(dy_address, like), nb.pointer(dx_address, like)
    row = np.full(t[IN + 1], nb.accumulator(like))
    step, width = t[STRIDE + 1], t[BLOCKS + 1]
    for unit in range(t[UNITS] * part // parts, t[UNITS] * (part + 1) // parts):
        h, rest = unit % t[IN], unit // t[IN]
        c, n = rest % t[C], rest // t[C]
        row[:] = nb.accumulator(like)
        for r in range(t[WINDOW]):
            down = h + t[PAD] - r * t[DILATION]
            p = down // t[STRIDE]
            if p * t[STRIDE] != down or p < 0 or p >= t[BLOCKS]:
                continue
            for s in range(t[WINDOW + 1]):
                right = s * t[DILATION + 1] - t[PAD + 1]
                first, last = _reached(right, step, t[IN + 1], width)
                at = n * t[Y] + ((c * t[WINDOW] + r) * t[WINDOW + 1] + s) * t[Y + 1] + p * width * t[Y + 2]
                if step == 1 and t[Y + 2] == 1:
                    for q in range(first, last):
                        row[q + right] += nb.load(dy, at + q)
                else:
                    for q in range(first, last):
                        row[q * step + right] += nb.load(dy, at + q * t[Y + 2])
        to = n * t[X] + c * t[X + 1] + h * t[X + 2]
        for w in range(t[IN + 1]):
            nb.store(dx, to + w * t[X + 3], row[w])


@nb.kernel
def _unfold(parts, threads, x, y, table, like):
    nb.launch(_unfold_part, parts, threads, (x, y, table, like))


@nb.kernel
def _fold(parts, threads, dy, dx, table, like):
    nb.launch(_fold_part, parts, threads, (dy, dx, table, like))


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
        table = np.array([units, x.shape[1], *sizes, *x.strides, *y.strides], dtype=np.int64)
        address, like = table.ctypes.data, nb.token(x.dtype)
        kernel = _unfold if forward else _fold
        parts = max(1, min(units, y.numel // GRAIN, PARTS))
        threads = nb.threads if parts > 1 else lambda: 1
        kernel(0, 1, 0, 0, address, like)  # compiles, or loads from disk; no part is run

        def run(tensors, workspace, _keep=table):
            kernel(parts, threads(), tensors[0].data_ptr(), tensors[1].data_ptr(), address, like)

        return run
