"""Depthwise convolution on a CPU, forward and data gradient, where pixels of a row are neighbours: row by row.

Method. A task takes some channels of one image. It copies a channel into a zero-padded plane of its thread's scratch
memory and runs the register tile `lucidnn.engines._numba.rows.correlate` over it: up to 7 rows by 3 vectors of outputs
stay in registers while the filter's columns pass, and each vector of pixels that is read serves every row that it
reaches. Strides deal rows and columns into residue classes, so that what the tile reads are neighbours again; dilated
rows are taken class by class. Rows that fill less than a vector, and images of one row, run as one long line instead:
the plane's rows follow each other, and the padding between them is computed along. The result passes through the
epilogue on its way out.

The data gradient is the same: pixels of dx fall into classes by position modulo the stride, each meets its own taps,
and is a convolution of dy with stride 1. Several filters a channel are added up there.

Cost. The definition's arithmetic, on whole vectors of a row, and one copy of the input; for small filters the memory's
rate is the limit. Filters are packed once a call, in column order.

Limits. One channel a filter, columns that are neighbours in memory in x and y; `conv.direct` takes channels-last.
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
from .._cpu_convolution import convolving
from .._numba import planes, rows, vector
from .._numba.blocks import ALIGN, TYPES, Axis, aligned
from .._numba.jit import kernel
from .._numba.memory import cast, load, pointer, size_of
from .._numba.microkernel import lanes
from .._numba.packing import activate_panel, add_panel

CHAIN = 192  # terms that are summed one after another before the sum is put aside
ELEMENTS = 16384  # of results that a task should have at least: some 10 µs

# The integers that the kernel reads, in this order, at the head of one table.
(
    OUTPUTS, CHUNK, CHUNKS, PER, DIVISOR, SRC_N, SRC_C, SRC_D, SRC_H, OUT_N, OUT_K, OUT_D, OUT_H, ADD_N, ADD_K, ADD_D,
    ADD_H, ADD_W, HAS_Z, CODE, BIAS_STRIDE, DEPTHS, SIZE_H, SIZE_W, SPREAD_H, SPREAD_W, OUT_PITCH, OUT_PLANE, SLAB,
    SUMS, W_SIZE, W_TAPS, W_DEPTH, W_FILTER, FILTERS, CALLS, TASKS, PLANE_TABLE, DEPTH_TABLE, SOURCE_TABLE, CALL_TABLE,
) = range(41)  # fmt: skip
_HEAD = CALL_TABLE + 1
# One call of the tile over a plane: where it reads, the filter's part, where it adds, and how many rows and vectors.
(X_AT, X_PITCH, KIND, COLUMNS, COUNT, W_AT, W_STEP, C_AT, C_PITCH, LINES, VECTORS, ADDS, TAPS, LOW, HIGH) = range(15)
_CALL = HIGH + 1
_ROWS, _ANY, _MOST = rows.ROWS, rows.ANY, rows.VECTORS
_SLACK = (_ROWS[-1] + 1) * _MOST  # vectors after the last plane that a tile may read or write
_LANES_32, _LANES_64 = lanes(4), lanes(8)


@kernel
def _correlate_plane(t, table, slab, filters, sums, onto, acc):
    """Every call of the tile for one channel; `onto` where another channel or depth has been summed before."""
    size = size_of(acc)
    lane = _LANES_32 if size == 4 else _LANES_64
    for call in range(t[CALLS]):
        c = pointer(table + (t[CALL_TABLE] + call * _CALL) * 8, 0)
        done, vectors = 0, max(c[VECTORS], 1)
        while done < vectors:
            left = vectors - done
            wide = min(left, _MOST)
            if _MOST > 2 and left == _MOST + 1:
                wide = 2  # two and two instead of three and one
            line = 0
            while line < c[LINES]:
                kind = 0
                while kind < len(_ROWS) - 1 and _ROWS[kind] < c[LINES] - line:
                    kind += 1
                many = _ROWS[kind]
                first, last = max(many - 1, c[LOW] - line), min(c[TAPS], c[HIGH] - line)
                rows.correlate(
                    acc,
                    (c[KIND] * len(_ROWS) + kind) * (_MOST + 1) + min(wide, c[VECTORS]),
                    slab + (c[X_AT] + line * c[X_PITCH] + done * lane) * size,
                    c[X_PITCH] * size,
                    table + c[COLUMNS] * 8,
                    c[COUNT],
                    filters + c[W_AT] * size,
                    c[W_STEP] * size,
                    sums + (c[C_AT] + line * c[C_PITCH] + done * lane) * size,
                    c[C_PITCH] * size,
                    max(onto, c[ADDS]),
                    c[TAPS],
                    first,
                    last,
                )
                line += many
            done += wide


@kernel
def _store_plane(t, sums, y, at, acc, out):
    """Write one channel's sums; the classes of columns are dealt back."""
    v, dst = pointer(sums, acc), pointer(y, out)
    spread = t[SPREAD_W]
    part, line, to = 0, 0, at - t[OUT_H]
    for _ in range(t[SIZE_H]):
        from_ = part * spread * t[OUT_PLANE] + line
        to += t[OUT_H]
        part += 1
        if part == t[SPREAD_H]:
            part = 0
            line += t[OUT_PITCH]
        if spread == 1:
            for q in range(0, t[SIZE_W] - vector.LANES + 1, vector.LANES):
                vector.write(dst, to + q, 1, vector.read_all(v, from_ + q), vector.LANES)
            left = t[SIZE_W] % vector.LANES
            if left:
                q = t[SIZE_W] - left
                vector.write(dst, to + q, 1, vector.read_all(v, from_ + q), left)
        elif spread == 2:
            for q in range(0, (t[SIZE_W] + 1) // 2, vector.LANES):
                even, odd = vector.read_all(v, from_ + q), vector.read_all(v, from_ + t[OUT_PLANE] + q)
                left = t[SIZE_W] - 2 * q
                vector.write(dst, to + 2 * q, 1, vector.lower_half(even, odd), min(left, vector.LANES))
                if left > vector.LANES:
                    place = to + 2 * q + vector.LANES
                    rest = min(left - vector.LANES, vector.LANES)
                    vector.write(dst, place, 1, vector.upper_half(even, odd), rest)
        else:
            for q in range(t[SIZE_W]):
                nb.store(dst, to + q, v[from_ + q % spread * t[OUT_PLANE] + q // spread])


@kernel
def _task(task, slot, table, scalars, src, filters, bias, z, y, scratch, like, bias_like, acc, z_like, out):
    """Some channels of one image."""
    t, f = pointer(table, 0), pointer(scalars, 0.0)
    size = size_of(acc)
    slab = scratch + slot * (t[SLAB] + t[SUMS]) * size
    sums = slab + t[SLAB] * size
    planes.zero(slab, t[SLAB], acc)
    n, first = task // t[CHUNKS], task % t[CHUNKS] * t[CHUNK]
    b = pointer(bias, bias_like)
    depths = pointer(table + t[DEPTH_TABLE] * 8, 0)
    for o in range(first, min(first + t[CHUNK], t[OUTPUTS])):
        at = 0
        for depth in range(t[DEPTHS]):
            count = depths[at]
            at += 1
            onto = 0
            for i in range(at, at + 2 * count, 2):
                for j in range(t[PER]):
                    channel = o // t[DIVISOR] * t[PER] + j
                    base = n * t[SRC_N] + channel * t[SRC_C] + depths[i + 1] * t[SRC_D]
                    planes.copy_plane(pointer(table + t[PLANE_TABLE] * 8, 0), src, base, t[SRC_H], slab, like, acc)
                    w = filters + ((o * t[PER] + j) * t[W_TAPS] + depths[i]) * t[W_SIZE] * size
                    _correlate_plane(t, table, slab, w, sums, onto, acc)
                    onto = 1
            at += 2 * count
            if onto == 0:
                planes.zero(sums, t[SUMS], acc)
            elements = t[SPREAD_H] * t[SPREAD_W] * t[OUT_PLANE]
            shift = cast(load(b, o * t[BIAS_STRIDE]), acc) if bias != 0 else cast(0, acc)
            if f[0] != 1 or bias != 0:
                v, scale = pointer(sums, acc), cast(f[0], acc)
                for i in range(elements):
                    v[i] = scale * v[i] + shift
            if t[HAS_Z]:
                for h in range(t[SIZE_H]):
                    row = h % t[SPREAD_H] * t[SPREAD_W] * t[OUT_PLANE] + h // t[SPREAD_H] * t[OUT_PITCH]
                    z_at = n * t[ADD_N] + o * t[ADD_K] + depth * t[ADD_D] + h * t[ADD_H]
                    for c in range(t[SPREAD_W]):
                        start = sums + (row + c * t[OUT_PLANE]) * size
                        width = (t[SIZE_W] - c + t[SPREAD_W] - 1) // t[SPREAD_W]
                        steps = (0, 0, t[ADD_W] * t[SPREAD_W])
                        add_panel(start, 1, 1, width, z, z_at + c * t[ADD_W], steps, 1, f[1], z_like, acc)
            if t[CODE]:
                activate_panel(sums, elements, t[CODE], f[2], acc)
            to = n * t[OUT_N] + o * t[OUT_K] + depth * t[OUT_D]
            _store_plane(t, sums, y, to, acc, out)


@kernel
def _pack(part, parts, table, w, filters, like, acc):
    """Filters in the order in which the calls read them."""
    t = pointer(table, 0)
    src, dst = pointer(w, like), pointer(filters, acc)
    sources = pointer(table + t[SOURCE_TABLE] * 8, 0)
    for k in range(t[FILTERS] * part // parts, t[FILTERS] * (part + 1) // parts):
        for tap in range(t[W_TAPS]):
            base, at = k * t[W_FILTER] + tap * t[W_DEPTH], (k * t[W_TAPS] + tap) * t[W_SIZE]
            for i in range(t[W_SIZE]):
                dst[at + i] = cast(load(src, base + sources[i]), acc)


@kernel
def _convolve(table, scalars, src, w, bias, z, y, scratch, threads, like, bias_like, acc, z_like, out):
    """Pack the filters, then run the tasks. `bias` and `z` are 0 where there is none."""
    t = pointer(table, 0)
    filters = (scratch + ALIGN - 1) // ALIGN * ALIGN
    rest = filters + t[FILTERS] * t[W_TAPS] * t[W_SIZE] * size_of(acc)
    rest = (rest + ALIGN - 1) // ALIGN * ALIGN
    nb.launch(_pack, min(t[FILTERS], 4 * threads), threads, (table, w, filters, like, acc))
    given = (table, scalars, src, filters, bias, z, y, rest, like, bias_like, acc, z_like, out)
    nb.launch_tasks(_task, t[TASKS], threads, given)


class _Plan:
    """Everything about one problem that does not change from call to call, down to the kernel's table."""

    def __init__(self, problem):
        g = self.g = Geometry.of(problem)
        forward = problem.op.name == "conv_fprop"
        make = Axis.forward if forward else Axis.backward
        numbers = zip(g.in_size, g.out_size, g.filter, g.stride, g.pad, g.dilation, strict=True)
        self.axes = [make(*each) for each in numbers]
        source, target = (g.x, g.y) if forward else (g.y, g.x)
        self.acc = "f64" if "f64" in (source.dtype, target.dtype) else "f32"
        self.itemsize = 8 if self.acc == "f64" else 4
        self.lane = lanes(self.itemsize)
        self.processors = nb.worthwhile(4 * problem.flops, problem.target.processors)
        outputs = g.K if forward else g.C
        self.size = g.out_size if forward else g.in_size
        self.head = planes.head(self.axes, rows.ROWS[-1] * g.dilation[1])
        self.pitch = self.head[planes.PITCH]
        by_row, flat = self._by_row(g), self._flat(g)
        calls, self.sources, self.columns, self.out_pitch, lines, self.products = min(by_row, flat, key=lambda c: c[-1])
        _, h, w = self.axes
        classes = h.spread * w.spread
        self.out_plane = lines * self.out_pitch
        self.slab = aligned(h.step * w.step * self.head[planes.PLANE] + _SLACK * self.lane, self.itemsize)
        self.sums = aligned(classes * self.out_plane + _SLACK * self.lane, self.itemsize)
        # A task has enough work, and no thread waits long for the last one.
        wanted = max(1, ELEMENTS // math.prod(self.size))
        fair = max(1, g.N * outputs // (6 * self.processors))
        self.chunk = min(wanted, fair, outputs)
        self.chunks = -(-outputs // self.chunk)
        self.w_size = len(self.sources)
        self._tabulate(problem, g, forward, outputs, calls)

    def _by_row(self, g: Geometry):
        """Calls that take the rows of a plane for what they are: (..., pitch and lines of a plane of sums, cost)."""
        _, high, wide = self.axes
        pitch, plane = self.pitch, self.head[planes.PLANE]
        out_pitch = -(-wide.points // self.lane) * self.lane
        lines = high.points + rows.ROWS[-1] * g.dilation[1]
        calls, sources, columns, cost = [], [], [], 0.0
        _, _, _, w_h, w_w = g.w_strides
        for (i, (_, points_h, _)), (j, (_, points_w, taps_w)) in itertools.product(
            enumerate(high.phases), enumerate(wide.phases)
        ):
            start = (i * wide.spread + j) * lines * out_pitch
            vectors = 0 if 2 * points_w <= self.lane else -(-points_w // self.lane)
            # (outputs between two that share pixels, filter rows, first slab row)
            runs = [(gap, *part) for gap, run, first in high.runs(i) for part in _split(run, first, high.step * gap)]
            if not runs or not taps_w:
                runs, taps_w = [(1, (), 0)], ()
            for number, (gap, run, first) in enumerate(runs):
                piece = max(1, CHAIN // max(len(run), 1))
                for s0 in range(0, max(len(taps_w), 1), piece):
                    some = taps_w[s0 : s0 + piece]
                    kind = rows.FILTER_ROWS.index(len(run)) if len(run) in rows.FILTER_ROWS else _ANY
                    kind = 0 if not run else kind
                    for residue in range(min(gap, points_h)):
                        x_at = first % high.step * wide.step * plane + (residue + first // high.step) * pitch
                        count = -(-(points_h - residue) // gap)
                        # Rows of the plane that hold an image's, as the call counts them.
                        low = -(-(high.low - first - high.step * residue) // (high.step * gap))
                        top = -(-(high.size + high.low - first - high.step * residue) // (high.step * gap))
                        calls.append([
                            x_at, gap * pitch, kind, len(columns), len(some), len(sources), len(run),
                            start + residue * out_pitch, gap * out_pitch, count, vectors,
                            int(number > 0 or s0 > 0), len(run), low, top,
                        ])  # fmt: skip
                        padded = _rounded(count)
                        reached = min(len(run), top - low + 6) if kind == _ANY else len(run)
                        cost += padded * ((vectors or 0.6) * max(reached, 1) * len(some) + 3 * max(vectors, 1))
                    columns += [s % wide.step * plane + s // wide.step for _, s in some]
                    sources += [r * w_h + s * w_w for s, _ in some for r in run]
        return calls, sources, columns, out_pitch, lines, cost

    def _flat(self, g: Geometry):
        """One call that takes a plane as one line, where there is one class of outputs; its cost is infinite if not."""
        _, high, wide = self.axes
        pitch, plane = self.pitch, self.head[planes.PLANE]
        _, _, _, w_h, w_w = g.w_strides
        (_, points_h, taps_h), (_, points_w, taps_w) = high.phases[0], wide.phases[0]
        length = (points_h - 1) * pitch + points_w
        vectors = -(-length // self.lane)
        across = min(_MOST, -(-vectors // rows.ROWS[-1]))
        count = -(-vectors // across)
        pairs = list(itertools.product(taps_h, taps_w))
        calls, sources, columns = [], [], []
        for at in range(0, max(len(pairs), 1), CHAIN):
            some = pairs[at : at + CHAIN]
            calls.append([
                0, across * self.lane, 0, len(columns), len(some), len(sources), 1, 0, across * self.lane, count,
                across, int(at > 0), 1, 0, 0,
            ])  # fmt: skip
            columns += [
                (h % high.step * wide.step + w % wide.step) * plane + h // high.step * pitch + w // wide.step
                for (_, h), (_, w) in some
            ]
            sources += [r * w_h + s * w_w for (r, _), (s, _) in some]
        single = high.spread == wide.spread == 1
        # Every product reads a vector of its own, mostly across two cache lines.
        cost = across * _rounded(count) * (1.6 * len(pairs) + 3) if single else math.inf
        lines = points_h + -(-(rows.ROWS[-1] + 1) * _MOST * self.lane // pitch)
        return calls, sources, columns, pitch, lines, cost

    def _tabulate(self, problem, g: Geometry, forward: bool, outputs: int, calls: list[list[int]]) -> None:
        source, target = (g.x_strides, g.y_strides) if forward else (g.y_strides, g.x_strides)
        z = problem.tensors.get("z")
        add = five_strides(z) if z else (0,) * 5
        deep, high, wide = self.axes
        depths = []
        for o in range(self.size[0]):
            first = o % deep.spread
            _, _, taps = deep.phases[first]
            found = [(t, o // deep.spread * deep.step + offset - deep.low) for t, offset in taps]
            found = [(t, d) for t, d in found if 0 <= d < deep.size]
            depths += [len(found), *itertools.chain(*found)]
        multiple = g.K // g.G
        per, divisor = (1, multiple) if forward else (multiple, 1)
        self.tasks = g.N * self.chunks
        places = [_HEAD, _HEAD + len(self.head)]
        places += [places[1] + len(depths), places[1] + len(depths) + self.w_size]
        after = places[3] + len(calls) * _CALL
        for call in calls:
            call[COLUMNS] += after
        w_k, _, w_d, _, _ = g.w_strides
        epilogue = problem.epilogue
        values = [
            outputs, self.chunk, self.chunks, per, divisor, *source[:4], *target[:4], *add,
            int(z is not None), nb.ACTIVATIONS[epilogue.activation],
            problem["bias"].strides[0] if "bias" in problem.inputs else 0, self.size[0], *self.size[1:],
            high.spread, wide.spread, self.out_pitch, self.out_plane, self.slab, self.sums, self.w_size, g.filter[0],
            w_d, w_k, g.K, len(calls), self.tasks, *places,
        ]  # fmt: skip
        assert len(values) == _HEAD
        table = values + self.head + depths + self.sources + list(itertools.chain(*calls)) + self.columns
        self.table = torch.tensor(table, dtype=torch.int64)
        self.scalars = torch.tensor([epilogue.alpha, epilogue.beta, epilogue.parameter], dtype=torch.float64)
        self.filter_elements = aligned(g.K * g.filter[0] * self.w_size, self.itemsize)

    def seconds(self, problem) -> float:
        """Estimate: the tile's products and some 30 ns a plane, or the memory's traffic."""
        target = problem.target
        planes_run = problem["w"].shape[0] * self.g.N * self.size[0] * self.g.filter[0]
        vectors = target.flops("f32") / target.processors / (2 * lanes(4))  # products of vectors a second
        each = self.products / (0.85 * vectors) + 3e-8
        return max(planes_run * each / self.processors, roofline(problem, flops=0.0, memory_efficiency=1.0)) + 1e-5

    @property
    def workspace(self) -> int:
        return ALIGN + (self.filter_elements + self.processors * (self.slab + self.sums)) * self.itemsize


def _split(run: tuple[int, ...], first: int, unit: int):
    """A run of filter rows as parts that the tile has straight code for, or as it is: (rows, first row of the slab)."""
    count = len(run)
    parts = {4: (2, 2), 6: (3, 3), 8: (5, 3)}.get(count, (count,))
    at = 0
    for part in parts:
        yield run[at : at + part], first + at * unit
        at += part


def _rounded(count: int) -> int:
    """Rows that the tile computes for so many."""
    whole, left = divmod(count, rows.ROWS[-1])
    return whole * rows.ROWS[-1] + next((n for n in (0, *rows.ROWS) if n >= left), rows.ROWS[-1])


_plan = functools.lru_cache(maxsize=256)(_Plan)


class Depthwise(Engine):
    """Depthwise convolution row by row: forward and data gradient."""

    name = "conv.depthwise"
    operations = ("conv_fprop", "conv_dgrad")
    targets = ("cpu",)
    notes = frozenset({"runtime_compilation"})

    def refusals(self, problem):
        r = Refusals()
        r.require(not problem.is_empty, "tensors with elements", "an empty one")
        r.require_tensors(problem.items, TYPES)
        g = Geometry.of(problem)
        r.require(g.G == g.C, "one channel a group", f"{g.C} channels in {g.G} group(s)")
        wide = [t.dtype == "f64" for t in (g.x, g.y)]
        r.require(wide[0] == wide[1], "operands and result of type f64, or neither", f"{g.x.dtype} and {g.y.dtype}")
        for role, size, stride in (("x", g.in_size[2], g.x_strides[4]), ("y", g.out_size[2], g.y_strides[4])):
            r.require(stride == 1 or size == 1, f"columns of {role} that are neighbours", f"{stride} elements between")
        return r

    def workspace_size(self, problem, config):
        return _plan(problem).workspace

    def cost(self, problem, config):
        return _plan(problem).seconds(problem)

    def build(self, problem, config):
        plan = _plan(problem)
        return convolving(problem, _convolve, plan.table, plan.scalars, plan.acc, plan.processors)
