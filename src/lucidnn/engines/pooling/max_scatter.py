"""``pool.max_scatter``: backward max pooling on a CPU by sending each dy to where its maximum was, in Numba.

Method: a thread owns whole planes (all of D, H, W of one image and channel, or of a block of channels where these
lie closest together). It clears them and then walks over their windows in order, adding each dy at the one
place that the index names. No two threads share a plane and the order is fixed, so the result is always the same
and overlapping windows need no atomics. Unlike gathering, which asks every window around an element, the work does not
grow with the window. Where windows overlap and values have 16 bits, the plane is summed in float32 in the
workspace and rounded once.

An index is first turned back into the number of the window point, through a table where it is a place in the
plane; the few windows at the edges then check that this point lies inside. So a wrong index cannot write elsewhere.

Cost: one read of dy and index, and two passes over dx. Limits: backward only; the window's extent, counted in
places of the flat plane, is below 2^20; and where the index is such a place, the window is no wider than the
input, since a place could have two numbers.
"""

import math

import numpy as np
from numba.extending import register_jitable

from ...core.engine import Config, Engine, Refusals, Run
from ...core.heuristics import roofline
from ...core.problem import Problem
from ...ops.pooling import PoolGeometry
from .. import _numba as nb

TYPES = ("f64", "f32", "f16", "bf16")
BLOCK = 32  # channels that a thread takes at once where channels are innermost
TABLE_LIMIT = 1 << 20

# What the table of 64-bit integers holds, and where: one number, or one for each of five or three axes.
UNITS, BLOCKS, FLAT, POINTS, EXTENT, WIDTH = 0, 1, 2, 3, 4, 5
X, Y, INDEX, TOTAL = 6, 11, 16, 21
IN, WINDOW, STRIDE, PAD, DILATION, OUT, C, SCRATCH, TABLES = 26, 29, 32, 35, 38, 41, 44, 45, 46


@register_jitable
def _number(k, start, flat, extent, points, numbers):
    """The window point that an index means, or -1 where it is none of the window's."""
    k = np.int64(k)
    if flat:
        k -= start
        k = np.int64(numbers[k]) if 0 <= k < extent else -1
    return k if k < points else -1


@register_jitable
def _exists(k, z, h, w, t):
    """Whether window point k lies inside the input; z, h, w is the window's first point."""
    # Three numbers a point: how far it is from the first along each axis.
    at = TABLES + t[POINTS] + 3 * k
    z, h, w = z + t[at], h + t[at + 1], w + t[at + 2]
    return z >= 0 and z < t[IN] and h >= 0 and h < t[IN + 1] and w >= 0 and w < t[IN + 2]


@nb.kernel
def _clear(total, base, t, channels, zero):
    """Zero in every element of some channels of a plane."""
    width, w_step, c_step = t[IN + 2], t[TOTAL + 4], t[TOTAL + 1]
    for z in range(t[IN]):
        for h in range(t[IN + 1]):
            row = base + z * t[TOTAL + 2] + h * t[TOTAL + 3]
            if channels == 1 and w_step == 1:
                for w in range(width):
                    total[row + w] = zero
            elif c_step == 1:
                for w in range(width):
                    for c in range(channels):
                        total[row + w * w_step + c] = zero
            else:
                for w in range(width):
                    for c in range(channels):
                        total[row + w * w_step + c * c_step] = zero


@nb.kernel
def _part(
    part, parts, dy_at, index_at, dx_at, scratch, table, numbers_at, like, index_like, sum_like
):  # fmt: skip
    t = nb.pointer(table, np.int64(0))
    numbers, steps = nb.pointer(numbers_at, np.int32(0)), nb.pointer(table + 8 * TABLES, np.int64(0))
    dy, dx, index = nb.pointer(dy_at, like), nb.pointer(dx_at, like), nb.pointer(index_at, index_like)
    flat, extent, points, in_scratch = t[FLAT] != 0, t[EXTENT], t[POINTS], t[SCRATCH] > 0
    stride, pad, width, columns = t[STRIDE + 2], t[PAD + 2], t[IN + 2], t[OUT + 2]
    reach_z, reach_h = (t[WINDOW] - 1) * t[DILATION], (t[WINDOW + 1] - 1) * t[DILATION + 1]
    reach_w = (t[WINDOW + 2] - 1) * t[DILATION + 2]
    y_w, y_c, index_w, index_c = t[Y + 4], t[Y + 1], t[INDEX + 4], t[INDEX + 1]
    total_w, total_c, step = t[TOTAL + 4], t[TOTAL + 1], t[TOTAL + 4] * stride
    inner_0 = min((pad + stride - 1) // stride, columns)
    inner_1 = max(min((width - reach_w + pad + stride - 1) // stride, columns), inner_0)
    for unit in range(t[UNITS] * part // parts, t[UNITS] * (part + 1) // parts):
        n, first = unit // t[BLOCKS], unit % t[BLOCKS] * t[WIDTH]
        channels = min(t[WIDTH], t[C] - first)
        x_start = n * t[X] + first * t[X + 1]
        # The sums are dx itself, or float32 planes of this part's own.
        total, base = nb.pointer(dx_at, sum_like), x_start
        if in_scratch:
            total, base = nb.pointer(scratch + part * t[SCRATCH], sum_like), 0
        _clear(total, base, t, channels, nb.cast(0, sum_like))  # zero has the same bits in all types
        for o in range(t[OUT]):
            z = o * t[STRIDE] - t[PAD]
            for p in range(t[OUT + 1]):
                h = p * t[STRIDE + 1] - t[PAD + 1]
                rows = z >= 0 and z + reach_z < t[IN] and h >= 0 and h + reach_h < t[IN + 1]
                start = (z * t[IN + 1] + h) * width - pad
                to_row = base + z * t[TOTAL + 2] + h * t[TOTAL + 3] - pad * total_w
                from_ = n * t[Y] + first * y_c + o * t[Y + 2] + p * t[Y + 3]
                from_index = n * t[INDEX] + first * index_c + o * t[INDEX + 2] + p * t[INDEX + 3]
                # Windows from q0 to q1 lie inside: in them every window point exists.
                q0, q1 = (inner_0, inner_1) if rows else (columns, columns)
                if channels == 1:
                    for q in range(q0, q1):
                        k = index[from_index + q * index_w]
                        k = _number(k, start + q * stride, flat, extent, points, numbers)
                        if k >= 0:
                            to = to_row + q * step + steps[k]
                            v = nb.load(dy, from_ + q * y_w)
                            nb.store(total, to, nb.load(total, to) + v)
                else:
                    for q in range(q0, q1):
                        for c in range(channels):
                            k = index[from_index + q * index_w + c * index_c]
                            k = _number(k, start + q * stride, flat, extent, points, numbers)
                            if k >= 0:
                                to = to_row + q * step + c * total_c + steps[k]
                                v = nb.load(dy, from_ + q * y_w + c * y_c)
                                nb.store(total, to, nb.load(total, to) + v)
                for i in range(columns - (q1 - q0)):
                    q = i if i < q0 else i + q1 - q0
                    for c in range(channels):
                        k = index[from_index + q * index_w + c * index_c]
                        k = _number(k, start + q * stride, flat, extent, points, numbers)
                        if k >= 0 and _exists(k, z, h, q * stride - pad, t):
                            to = to_row + q * step + c * total_c + steps[k]
                            v = nb.load(dy, from_ + q * y_w + c * y_c)
                            nb.store(total, to, nb.load(total, to) + v)
        if in_scratch:
            # Scratch is dense, channels innermost.
            for z in range(t[IN]):
                for h in range(t[IN + 1]):
                    row, to = z * t[TOTAL + 2] + h * t[TOTAL + 3], x_start + z * t[X + 2] + h * t[X + 3]
                    if channels == 1 and t[X + 4] == 1:
                        for w in range(width):
                            nb.store(dx, to + w, nb.load(total, row + w * total_w))
                    else:
                        for w in range(width):
                            for c in range(channels):
                                v = nb.load(total, row + w * total_w + c)
                                nb.store(dx, to + w * t[X + 4] + c * t[X + 1], v)


@nb.kernel
def _backward(parts, threads, dy, index, dx, scratch, table, numbers, like, index_like, sum_like):
    nb.launch(_part, parts, threads, (dy, index, dx, scratch, table, numbers, like, index_like, sum_like))


def _extent(g: PoolGeometry) -> int:
    """Places of the flat plane from a window's first point to one past its last."""
    reach = [d * (r - 1) for d, r in zip(g.dilation, g.window, strict=True)]
    return (reach[0] * g.in_size[1] + reach[1]) * g.in_size[2] + reach[2] + 1


def _overlaps(g: PoolGeometry) -> bool:
    return any(d * (r - 1) >= s and r > 1 for d, r, s in zip(g.dilation, g.window, g.stride, strict=True))


class MaxScatter(Engine):
    name = "pool.max_scatter"
    operations = ("max_pool_bwd",)
    targets = ("cpu",)
    notes = frozenset({"runtime_compilation"})

    def refusals(self, problem: Problem) -> list[str]:
        r = Refusals()
        r.require_tensors(((role, t) for role, t in problem.items if role != "index"), TYPES)
        g = PoolGeometry.of(problem)
        extent = _extent(g)
        limit = extent <= TABLE_LIMIT
        r.require(limit, f"a window whose ends lie less than {TABLE_LIMIT} places apart in the plane", extent)
        if problem["index"].dtype != "u8":
            reach = [d * (n - 1) + 1 for d, n in zip(g.dilation, g.window, strict=True)]
            fits = reach[2] <= g.in_size[2] and reach[1] <= g.in_size[1]
            r.require(fits, f"a window no wider than the input {g.in_size}, or a u8 index", reach)
        return r

    def _plan(self, problem: Problem) -> tuple[int, int, int]:
        """Channels of a unit, number of parts, and bytes of a part's own sums (0: dx holds them)."""
        g = PoolGeometry.of(problem)
        width = min(BLOCK, g.C) if g.C > 1 and g.x_strides[1] < g.x_strides[4] else 1
        units = g.N * -(-g.C // width)
        parts = max(1, min(units, (g.x.numel + g.y.numel) // 16384, 4 * problem.target.processors))
        own = g.x.itemsize == 2 and _overlaps(g)
        return width, parts, -(-4 * width * math.prod(g.in_size) // 64) * 64 if own else 0

    def workspace_size(self, problem: Problem, config: Config) -> int:
        _, parts, own = self._plan(problem)
        return parts * own

    def cost(self, problem: Problem, config: Config) -> float:
        width, parts, own = self._plan(problem)
        g = PoolGeometry.of(problem)
        busy = min(parts, problem.target.processors)
        moved = problem.bytes + g.x.nbytes + 2 * own * g.N * -(-g.C // width)
        return roofline(problem, flops=0.0, bytes=moved) + 2.5e-9 * g.y.numel / busy  # measured

    def build(self, problem: Problem, config: Config) -> Run:
        g = PoolGeometry.of(problem)
        width, parts, own = self._plan(problem)
        flat = problem.op.index_type != "u8"  # type: ignore[attr-defined]
        blocks = -(-g.C // width)
        _, h, w = g.in_size
        sums = (0, 1, h * w * width, w * width, width) if own else g.x_strides
        points = list(np.ndindex(*g.window))
        jumps = [d * s for d, s in zip(g.dilation, sums[2:], strict=True)]
        steps = [sum(i * s for i, s in zip(point, jumps, strict=True)) for point in points]
        places = [i * d for point in points for i, d in zip(point, g.dilation, strict=True)]
        head = (g.N * blocks, blocks, flat, len(points), _extent(g), width)
        strides = (*g.x_strides, *g.y_strides, *g.index_strides, *sums)
        axes = (*g.in_size, *g.window, *g.stride, *g.pad, *g.dilation, *g.out_size)
        table = np.array([*head, *strides, *axes, g.C, own, *steps, *places], dtype=np.int64)
        numbers = np.full(_extent(g) if flat else 1, -1, dtype=np.int32)
        if flat:
            dt, dr, ds = g.dilation
            numbers[[(a * dt * h + b * dr) * w + s * ds for a, b, s in points]] = np.arange(len(points))
        address, numbers_address = table.ctypes.data, numbers.ctypes.data
        like = nb.token(g.x.dtype)
        types = (like, nb.token(problem["index"].dtype), nb.token("f32") if own else like)
        threads = nb.threads if parts > 1 else lambda: 1
        _backward(0, 1, 0, 0, 0, 0, address, numbers_address, *types)  # compiles, or loads from disk

        def run(tensors, workspace, _keep=(table, numbers)):
            dy, index, dx = tensors
            scratch = workspace.data_ptr() if own else 0
            a, b, c = dy.data_ptr(), index.data_ptr(), dx.data_ptr()
            _backward(parts, threads(), a, b, c, scratch, address, numbers_address, *types)

        return run
