"""``pool.unpool_direct``: max unpooling on a CPU, any strides and type, both directions, in Numba.

Method: forward, a thread owns planes of y, one at a time, or a block of channels where these lie closest together. It
clears them and puts the values there in reading order, so that the last of several values for one place stays; no two
threads share a plane. Backward fetches, a row at a time. Indices outside the plane are skipped. Values are copied as
they are, 16-bit ones as whole numbers.

Cost: the memory traffic, and about a nanosecond a value. No limits beside the four types.
"""

import math

import numpy as np
from numba.extending import register_jitable

from ...core.engine import Config, Engine, Refusals, Run
from ...core.heuristics import roofline
from ...core.problem import Problem
from ...ops.convolution import five_strides, three
from .. import _numba as nb

TYPES = ("f64", "f32", "f16", "bf16")
BLOCK = 32  # channels that a thread takes at once where channels are innermost
PARTS = 64

# What the table of 64-bit integers holds, and where: one number, or one for each of five or three axes. The small
# tensor is x or dx, the large one y or dy.
UNITS, BLOCKS, WIDTH, C, FLAT, POINTS, SMALL_SIZE, LARGE_SIZE, SMALL, INDEX, LARGE = 0, 1, 2, 3, 4, 5, 6, 9, 12, 17, 22


@register_jitable
def _place(k, t):
    """Where point k of the large plane lies in memory."""
    if t[FLAT]:
        return k * t[LARGE + 4]
    line, w = k // t[LARGE_SIZE + 2], k % t[LARGE_SIZE + 2]
    d, h = line // t[LARGE_SIZE + 1], line % t[LARGE_SIZE + 1]
    return d * t[LARGE + 2] + h * t[LARGE + 3] + w * t[LARGE + 4]


@nb.kernel
def _forward_part(part, parts, x_at, index_at, y_at, table, like, index_like):
    t, index = nb.pointer(table, np.int64(0)), nb.pointer(index_at, index_like)
    x, y, zero = nb.pointer(x_at, like), nb.pointer(y_at, like), nb.cast(0, like)  # the same bits in all four types
    points, small_w, index_w, large_w = t[POINTS], t[SMALL + 4], t[INDEX + 4], t[LARGE + 4]
    side_by_side = t[FLAT] and t[SMALL + 1] == 1 and t[INDEX + 1] == 1 and t[LARGE + 1] == 1
    for unit in range(t[UNITS] * part // parts, t[UNITS] * (part + 1) // parts):
        n, first = unit // t[BLOCKS], unit % t[BLOCKS] * t[WIDTH]
        channels = min(t[WIDTH], t[C] - first)
        base = n * t[LARGE] + first * t[LARGE + 1]
        dense = t[FLAT] and (t[LARGE + 4] == channels and (t[LARGE + 1] == 1 or channels == 1))
        if dense:
            for i in range(points * channels):
                y[base + i] = zero
        for d in range(0 if dense else t[LARGE_SIZE]):
            for h in range(t[LARGE_SIZE + 1]):
                row = base + d * t[LARGE + 2] + h * t[LARGE + 3]
                if channels == 1 and t[LARGE + 4] == 1:
                    for w in range(t[LARGE_SIZE + 2]):
                        y[row + w] = zero
                elif t[LARGE + 1] == 1:
                    for w in range(t[LARGE_SIZE + 2]):
                        for c in range(channels):
                            y[row + w * t[LARGE + 4] + c] = zero
                else:
                    for w in range(t[LARGE_SIZE + 2]):
                        for c in range(channels):
                            y[row + w * t[LARGE + 4] + c * t[LARGE + 1]] = zero
        for d in range(t[SMALL_SIZE]):
            for h in range(t[SMALL_SIZE + 1]):
                at = n * t[SMALL] + first * t[SMALL + 1] + d * t[SMALL + 2] + h * t[SMALL + 3]
                index_row = n * t[INDEX] + first * t[INDEX + 1] + d * t[INDEX + 2] + h * t[INDEX + 3]
                if t[FLAT] and channels == 1:
                    for w in range(t[SMALL_SIZE + 2]):
                        k = np.int64(index[index_row + w * index_w])
                        if 0 <= k < points:
                            y[base + k * large_w] = x[at + w * small_w]
                    continue
                for w in range(t[SMALL_SIZE + 2]):
                    if side_by_side:
                        for c in range(channels):
                            k = np.int64(index[index_row + w * index_w + c])
                            if 0 <= k < points:
                                y[base + k * large_w + c] = x[at + w * small_w + c]
                        continue
                    for c in range(channels):
                        k = np.int64(index[index_row + w * index_w + c * t[INDEX + 1]])
                        if 0 <= k < points:
                            to = base + _place(k, t) + c * t[LARGE + 1]
                            y[to] = x[at + w * small_w + c * t[SMALL + 1]]


@nb.kernel
def _backward_part(part, parts, dy_at, index_at, dx_at, table, like, index_like):
    t, index = nb.pointer(table, np.int64(0)), nb.pointer(index_at, index_like)
    dy, dx, zero = nb.pointer(dy_at, like), nb.pointer(dx_at, like), nb.cast(0, like)
    points, small_w, index_w, large_w = t[POINTS], t[SMALL + 4], t[INDEX + 4], t[LARGE + 4]
    side_by_side = t[FLAT] and t[SMALL + 1] == 1 and t[INDEX + 1] == 1 and t[LARGE + 1] == 1
    for unit in range(t[UNITS] * part // parts, t[UNITS] * (part + 1) // parts):
        n, first = unit // t[BLOCKS], unit % t[BLOCKS] * t[WIDTH]
        channels = min(t[WIDTH], t[C] - first)
        base = n * t[LARGE] + first * t[LARGE + 1]
        for d in range(t[SMALL_SIZE]):
            for h in range(t[SMALL_SIZE + 1]):
                to = n * t[SMALL] + first * t[SMALL + 1] + d * t[SMALL + 2] + h * t[SMALL + 3]
                index_row = n * t[INDEX] + first * t[INDEX + 1] + d * t[INDEX + 2] + h * t[INDEX + 3]
                if t[FLAT] and channels == 1:
                    for w in range(t[SMALL_SIZE + 2]):
                        k = np.int64(index[index_row + w * index_w])
                        v = zero
                        if 0 <= k < points:
                            v = dy[base + k * large_w]
                        dx[to + w * small_w] = v
                    continue
                for w in range(t[SMALL_SIZE + 2]):
                    if side_by_side:
                        for c in range(channels):
                            k = np.int64(index[index_row + w * index_w + c])
                            v = zero
                            if 0 <= k < points:
                                v = dy[base + k * large_w + c]
                            dx[to + w * small_w + c] = v
                        continue
                    for c in range(channels):
                        k = np.int64(index[index_row + w * index_w + c * t[INDEX + 1]])
                        v = zero
                        if 0 <= k < points:
                            v = dy[base + _place(k, t) + c * t[LARGE + 1]]
                        dx[to + w * small_w + c * t[SMALL + 1]] = v


@nb.kernel
def _forward(parts, threads, x, index, y, table, like, index_like):
    nb.launch(_forward_part, parts, threads, (x, index, y, table, like, index_like))


@nb.kernel
def _backward(parts, threads, dy, index, dx, table, like, index_like):
    nb.launch(_backward_part, parts, threads, (dy, index, dx, table, like, index_like))


def _is_run(sizes: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether the points of a plane are evenly apart, in order."""
    (d, h, w), (d_step, h_step, w_step) = sizes, strides[2:]
    return (h == 1 or h_step == w_step * w) and (d == 1 or d_step == w_step * w * h)


class UnpoolDirect(Engine):
    name = "pool.unpool_direct"
    operations = ("max_unpool_fwd", "max_unpool_bwd")
    targets = ("cpu",)
    notes = frozenset({"runtime_compilation"})

    def refusals(self, problem: Problem) -> list[str]:
        r = Refusals()
        r.require_tensors(((role, t) for role, t in problem.items if role != "index"), TYPES)
        return r

    def cost(self, problem: Problem, config: Config) -> float:
        seconds = 1e-9 * problem["index"].numel  # measured
        return roofline(problem, flops=0.0) + seconds / problem.target.processors

    def build(self, problem: Problem, config: Config) -> Run:
        forward = problem.op.name == "max_unpool_fwd"
        small, large = (problem[role] for role in (("x", "y") if forward else ("dx", "dy")))
        size, s = three(large.shape[2:], 1), five_strides(large)
        given = problem["index"]
        flat = _is_run(size, s)
        sizes, small_strides, index_strides = three(small.shape[2:], 1), five_strides(small), five_strides(given)
        if _is_run(sizes, small_strides) and _is_run(sizes, index_strides):  # one long row
            sizes = (1, 1, math.prod(sizes))
        # Blocks of channels where there are too few images to go round; whole images are cleared in one go.
        most = large.shape[1] if large.shape[0] >= 2 * problem.target.processors else BLOCK
        width = min(most, large.shape[1]) if large.shape[1] > 1 and s[1] < s[4] else 1
        blocks = -(-large.shape[1] // width)
        units = large.shape[0] * blocks
        head = (units, blocks, width, large.shape[1], flat, math.prod(size))
        table = np.array([*head, *sizes, *size, *small_strides, *index_strides, *s], dtype=np.int64)
        parts = int(max(1, min(units, (small.numel + large.numel) // 16384, PARTS)))
        address, kernel = table.ctypes.data, _forward if forward else _backward
        types = nb.token(small.dtype), nb.token(problem["index"].dtype)
        threads = nb.threads if parts > 1 else lambda: 1
        kernel(0, 1, 0, 0, 0, address, *types)  # compiles, or loads from disk; no part is run

        def run(tensors, workspace, _keep=table):
            a, b, c = (t.data_ptr() for t in tensors)
            kernel(parts, threads(), a, b, c, address, *types)

        return run
