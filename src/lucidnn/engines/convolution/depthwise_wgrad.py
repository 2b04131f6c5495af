"""Depthwise convolution on a CPU, filter gradient, where pixels of a row are neighbours: row by row.

Method. A task takes some channels. It copies one channel of x and of dy, image by image, into zero-padded planes of its
thread's scratch memory, and runs the register tile `lucidnn.engines._numba.rows.accumulate` over them: up to 7 rows by
3 columns of the filter have a vector of sums each, a vector of x serves all filter rows and a vector of dy all filter
columns. At the end the lanes of each vector are added up. Strides and short rows are treated as in `conv.depthwise`.

Cost. The definition's arithmetic, on whole vectors of a row, and one copy of x and dy. Results are the same on every
run: an element's sum belongs to one task.

Limits. One channel a filter, columns that are neighbours in memory in x and dy; `conv.direct_wgrad` takes
channels-last. Outputs that a tile computes beyond an image's edge are products with zero: a NaN or an infinity within a
filter's reach of x's edge may show in filter rows or columns that do not meet it.
"""

from __future__ import annotations

import functools
import itertools
import math

import torch

from ...core.engine import Engine, Refusals
from ...core.heuristics import roofline
from ...ops.convolution import Geometry, five_strides
from .. import _numba as nb
from .._cpu_convolution import summing
from .._numba import planes, rows
from .._numba.blocks import ALIGN, TYPES, Axis, aligned
from .._numba.jit import kernel
from .._numba.memory import cast, load, pointer, size_of
from .._numba.microkernel import lanes

CHAIN = 192  # terms of a lane that are summed one after another before the sum is put aside
SUM_BYTES = 64 << 10  # of a task's sums, which stay in the second-level cache

# The integers that the kernel reads, in this order, at the head of one table.
(
    FILTERS, CHUNK, CHUNKS, DIVISOR, IMAGES, X_N, X_C, X_D, X_H, Y_N, Y_K, Y_D, Y_H, DEPTHS, W_DEPTH, W_FILTER, Z_DEPTH,
    Z_FILTER, HAS_Z, X_SLAB, Y_SLAB, SUMS, SLOTS, CALLS, X_HEAD, Y_HEAD, DEPTH_TABLE, CALL_TABLE, PLACES,
) = range(29)  # fmt: skip
_HEAD = PLACES + 1
# One call of the tile over two planes: where it reads, which filter columns, where it adds.
(X_AT, X_PITCH, Y_AT, Y_PITCH, Y_BACK, KIND, COLUMNS, SUM_AT, SUM_STEP, LINES, PIECE, VECTORS) = range(12)
_CALL = VECTORS + 1
_LANES_32, _LANES_64 = lanes(4), lanes(8)
_SLACK = 4  # vectors after the last plane that a tile may read


@kernel
def _accumulate_planes(t, table, x, dy, sums, onto, acc):
    """Every call of the tile for one channel of one image; `onto` where there are sums already."""
    size = size_of(acc)
    for call in range(t[CALLS]):
        c = pointer(table + (t[CALL_TABLE] + call * _CALL) * 8, 0)
        piece = c[PIECE]
        adds = onto
        for line in range(0, c[LINES], piece):
            rows.accumulate(
                acc,
                c[KIND],
                dy + (c[Y_AT] + line * c[Y_PITCH]) * size,
                c[Y_PITCH] * size,
                c[Y_BACK] * size,
                x + (c[X_AT] + line * c[X_PITCH]) * size,
                c[X_PITCH] * size,
                table + c[COLUMNS] * 8,
                min(piece, c[LINES] - line),
                c[VECTORS],
                sums + c[SUM_AT] * size,
                c[SUM_STEP] * size,
                adds,
            )
            adds = 1


@kernel
def _task(task, slot, table, scalars, x, dy, z, dw, scratch, like, acc, z_like, out):
    """Some filters, every image."""
    t, f = pointer(table, 0), pointer(scalars, 0.0)
    size = size_of(acc)
    lane = _LANES_32 if size == 4 else _LANES_64
    x_plane = scratch + slot * (t[X_SLAB] + t[Y_SLAB] + t[SUMS]) * size
    y_plane = x_plane + t[X_SLAB] * size
    sums = y_plane + t[Y_SLAB] * size
    planes.zero(x_plane, t[X_SLAB] + t[Y_SLAB], acc)
    x_head, y_head = pointer(table + t[X_HEAD] * 8, 0), pointer(table + t[Y_HEAD] * 8, 0)
    depths, places = pointer(table + t[DEPTH_TABLE] * 8, 0), pointer(table + t[PLACES] * 8, 0)
    held, target, add = pointer(sums, acc), pointer(dw, out), pointer(z, z_like)
    alpha, beta = cast(f[0], acc), cast(f[1], acc)
    first = task * t[CHUNK]
    last = min(first + t[CHUNK], t[FILTERS])
    multiple = t[DIVISOR]
    at = 0
    for depth in range(t[DEPTHS]):
        count = depths[at]
        at += 1
        onto = 0
        for i in range(at, at + 2 * count, 2):
            # Channels of an image follow each other in memory: the images are the outer loop.
            for n in range(t[IMAGES]):
                for k in range(first, last):
                    c = k if multiple == 1 else k // multiple
                    base = n * t[X_N] + c * t[X_C] + depths[i] * t[X_D]
                    planes.copy_plane(x_head, x, base, t[X_H], x_plane, like, acc)
                    base = n * t[Y_N] + k * t[Y_K] + depths[i + 1] * t[Y_D]
                    planes.copy_plane(y_head, dy, base, t[Y_H], y_plane, like, acc)
                    own = sums + (k - first) * t[SLOTS] * lane * size
                    _accumulate_planes(t, table, x_plane, y_plane, own, onto, acc)
                onto = 1
        at += 2 * count
        if onto == 0:
            planes.zero(sums, t[SUMS], acc)
        for k in range(first, last):
            for j in range(t[SLOTS]):
                total = cast(0, acc)
                for i in range(lane):
                    total += held[((k - first) * t[SLOTS] + j) * lane + i]
                value = alpha * total
                if t[HAS_Z]:
                    z_at = k * t[Z_FILTER] + depth * t[Z_DEPTH] + places[2 * j + 1]
                    value += beta * cast(load(add, z_at), acc)
                nb.store(target, k * t[W_FILTER] + depth * t[W_DEPTH] + places[2 * j], value)


@kernel
def _filter_gradient(table, scalars, x, dy, z, dw, scratch, threads, like, acc, z_like, out):
    """Run the tasks. `z` is 0 where there is none."""
    t = pointer(table, 0)
    rest = (scratch + ALIGN - 1) // ALIGN * ALIGN
    nb.launch_tasks(_task, t[CHUNKS], threads, (table, scalars, x, dy, z, dw, rest, like, acc, z_like, out))


def _parts(count: int) -> list[int]:
    """Filter rows as numbers that the tile has, large ones first and none alone where that can be."""
    sizes = rows.GRADIENT_ROWS
    if count in sizes:
        return [count]
    if count in (4, 6, 8) and sizes[-1] >= 5:
        return {4: [2, 2], 6: [3, 3], 8: [5, 3]}[count]
    most = max(size for size in sizes if size <= count)
    return [most, *_parts(count - most)]


class _Plan:
    """Everything about one problem that does not change from call to call, down to the kernel's table."""

    def __init__(self, problem):
        g = self.g = Geometry.of(problem)
        numbers = zip(g.in_size, g.out_size, g.filter, g.stride, g.pad, g.dilation, strict=True)
        self.axes = [Axis.forward(*each, every=True) for each in numbers]
        self.acc = "f64" if "f64" in (g.x.dtype, g.w.dtype) else "f32"
        self.itemsize = 8 if self.acc == "f64" else 4
        self.lane = lanes(self.itemsize)
        self.processors = nb.worthwhile(4 * problem.flops, problem.target.processors)
        # Tiles reach over the lower edge of the plane of dy by up to a filter's rows, and start as many before it.
        self.margin = (rows.GRADIENT_ROWS[-1] - 1) * g.dilation[1]
        self.head = planes.head(self.axes, self.margin)
        self.calls, self.columns, self.taps, self.pitch, self.products = min(
            self._calls(g, False), self._calls(g, True), key=lambda c: c[-1]
        )
        _, h, w = self.axes
        above = self.margin * self.pitch
        self.y_head = [1, 1, g.out_size[1], 0, self.margin, self.pitch, above, 0, 0, g.out_size[2]]
        plane = (g.out_size[1] + 2 * self.margin) * self.pitch
        self.y_slab = aligned(plane + _SLACK * self.lane, self.itemsize)
        self.x_slab = aligned(h.step * w.step * self.head[planes.PLANE] + _SLACK * self.lane, self.itemsize)
        held = SUM_BYTES // (len(self.taps) * self.lane * self.itemsize)
        self.chunk = max(1, min(g.K // (6 * self.processors), 32, held))
        self.chunks = -(-g.K // self.chunk)
        self.sums = aligned(self.chunk * len(self.taps) * self.lane, self.itemsize)
        self._tabulate(problem, g)

    def _calls(self, g: Geometry, flat: bool):
        """Calls, offsets of filter columns, taps by slot, elements of a row of dy, the cost; as rows or as a line."""
        _, high, wide = self.axes
        x_pitch, plane = self.head[planes.PITCH], self.head[planes.PLANE]
        across = -(-g.out_size[2] // self.lane)
        pitch = x_pitch if flat else across * self.lane
        (_, _, taps_w), calls, columns, taps, cost = wide.phases[0], [], [], [], 0.0
        for gap, run, first in high.runs(0):
            done = 0
            for count in _parts(len(run)):
                start = first + done * gap * high.step
                x_at = start % high.step * wide.step * plane + start // high.step * x_pitch
                # Rows of x that hold an image's, and meet a row of dy.
                low = max(0, -(-(high.low - start) // high.step))
                top = -(-(high.size + high.low - start) // high.step)
                top = min(top, g.out_size[1] + gap * (count - 1))
                if top <= low:  # nothing but padding, and the sums must be zero: one row of it
                    low, top = 0, 1
                lines, vectors, steps = top - low, across, (x_pitch, pitch)
                if flat:
                    vectors = -(-((lines - 1) * pitch + g.out_size[2]) // self.lane)
                    lines = -(-vectors // CHAIN)
                    vectors = -(-vectors // lines)
                    steps = (vectors * self.lane, vectors * self.lane)
                for s0 in range(0, len(taps_w), rows.GRADIENT_COLUMNS):
                    some = taps_w[s0 : s0 + rows.GRADIENT_COLUMNS]
                    kind = rows.GRADIENT_ROWS.index(count) * rows.GRADIENT_COLUMNS + len(some) - 1
                    calls.append([
                        x_at + low * x_pitch, steps[0], (self.margin + low) * pitch, steps[1], gap * pitch, kind,
                        len(columns), len(taps) * self.lane, len(some) * self.lane, lines,
                        max(1, CHAIN // vectors), vectors,
                    ])  # fmt: skip
                    columns += [s % wide.step * plane + s // wide.step for _, s in some]
                    taps += [(r, s) for r in run[done : done + count] for s, _ in some]
                    loads = count + (1.6 if flat else 1.3) * len(some)
                    cost += lines * vectors * max(count * len(some), 1.2 * loads) + 8 * count * len(some)
                done += count
        return calls, columns, taps, pitch, cost

    def _tabulate(self, problem, g: Geometry) -> None:
        z = problem.tensors.get("z")
        z_strides = five_strides(z) if z else (0,) * 5
        deep = self.axes[0]
        depths = []
        for t in range(g.filter[0]):
            found = [(o * g.stride[0] - g.pad[0] + t * g.dilation[0], o) for o in range(g.out_size[0])]
            found = [(d, o) for d, o in found if 0 <= d < deep.size]
            depths += [len(found), *itertools.chain(*found)]
        places = [s for r, q in self.taps for s in (r * g.w_strides[3] + q * g.w_strides[4],
                                                    r * z_strides[3] + q * z_strides[4])]  # fmt: skip
        starts = [_HEAD, _HEAD + len(self.head)]
        starts.append(starts[1] + len(self.y_head))
        starts.append(starts[2] + len(depths))
        starts.append(starts[3] + len(self.calls) * _CALL)
        for call in self.calls:
            call[COLUMNS] += starts[4] + len(places)
        values = [
            g.K, self.chunk, self.chunks, g.K // g.G, g.N, *g.x_strides[:4], *g.y_strides[:4], g.filter[0],
            g.w_strides[2], g.w_strides[0], z_strides[2], z_strides[0], int(z is not None), self.x_slab, self.y_slab,
            self.sums, len(self.taps), len(self.calls), *starts,
        ]  # fmt: skip
        assert len(values) == _HEAD
        table = values + self.head + self.y_head + depths + list(itertools.chain(*self.calls)) + places + self.columns
        self.table = torch.tensor(table, dtype=torch.int64)
        self.scalars = torch.tensor([problem.epilogue.alpha, problem.epilogue.beta], dtype=torch.float64)

    def seconds(self, problem) -> float:
        """Estimate: the tile's products and some 50 ns a plane, or the memory's traffic."""
        g, target = self.g, problem.target
        vectors = target.flops("f32") / target.processors / (2 * lanes(4))  # products of vectors a second
        copied = (math.prod(g.in_size[1:]) + math.prod(g.out_size[1:])) / self.lane
        each = (self.products + 2 * copied) / vectors + 5e-8
        done = g.K * g.N * g.out_size[0] * g.filter[0] * each / min(self.processors, self.chunks)
        return max(done, roofline(problem, flops=0.0, memory_efficiency=1.0)) + 1e-5

    @property
    def workspace(self) -> int:
        return ALIGN + self.processors * (self.x_slab + self.y_slab + self.sums) * self.itemsize


_plan = functools.lru_cache(maxsize=256)(_Plan)


class DepthwiseWgrad(Engine):
    """Depthwise convolution row by row: filter gradient."""

    name = "conv.depthwise_wgrad"
    operations = ("conv_wgrad",)
    targets = ("cpu",)
    notes = frozenset({"runtime_compilation", "spreads"})

    def refusals(self, problem):
        r = Refusals()
        r.require(not problem.is_empty, "tensors with elements", "an empty one")
        r.require_tensors(problem.items, TYPES)
        g = Geometry.of(problem)
        r.require(g.G == g.C, "one channel a group", f"{g.C} channels in {g.G} group(s)")
        wide = [t.dtype == "f64" for t in (g.x, g.w)]
        r.require(wide[0] == wide[1], "operands and result of type f64, or neither", f"{g.x.dtype} and {g.w.dtype}")
        for role, size, stride in (("x", g.in_size[2], g.x_strides[4]), ("dy", g.out_size[2], g.y_strides[4])):
            r.require(stride == 1 or size == 1, f"columns of {role} that are neighbours", f"{stride} elements between")
        return r

    def workspace_size(self, problem, config):
        return _plan(problem).workspace

    def cost(self, problem, config):
        return _plan(problem).seconds(problem)

    def build(self, problem, config):
        plan = _plan(problem)
        return summing(problem, _filter_gradient, plan.table, plan.scalars, plan.acc, plan.processors)
