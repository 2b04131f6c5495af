"""Direct convolution on a CPU: forward and data gradient, blocked for registers and caches, nothing unfolded.

Method. The filters are packed once a call. Then each task (an image, a group, a block of output pixels, some of the
filters) copies the input pixels it needs into a slab of its thread's scratch memory, zero-padded, channels innermost,
converted to the accumulation type, and runs the register tile of `lucidnn.engines._numba.microkernel` over it: 14
output pixels by two vectors of filters stay in registers while the loop runs over filter taps and channels. Where the
taps of a filter row are neighbours in the slab, row and channels are one run, so that three input channels fill the
loop as well as three hundred. The result passes through the epilogue in the first-level cache on its way out.

The data gradient is the same kernel. With stride s the pixels of dx fall into s classes an axis, by position modulo s;
each class meets its own subset of the taps, always the same one, and is a stride-1 convolution of dy with those taps.

Depthwise filters, one channel each, would waste the tile: for them its lanes are channels, and each lane multiplies
with a filter of its own.

Cost. The arithmetic of the definition at 90 % of the machine's rate (depthwise 45 %), plus one copy of the input (more
by the overlap of blocks) and of the filters. Scratch: the packed filters and below 1 MB a thread.

Limits. Few filters waste the tile's width; 1x1 filters are a plain matrix product, which `conv.im2col_gemm` hands to
BLAS.

After Georganas et al., "Anatomy of high-performance deep learning convolutions on SIMD architectures", 2018.
"""

from __future__ import annotations

import functools
import itertools
import math

import torch

from ...core.engine import Engine, Refusals
from ...ops.convolution import Geometry
from .. import _numba as nb
from .._cpu_convolution import convolving
from .._numba.blocks import (
    ALIGN,
    SLAB_BYTES,
    TYPES,
    Axis,
    aligned,
    even_parts,
    flattened,
    grouping,
    pixel_pitch,
    seconds,
)
from .._numba.jit import kernel, separate
from .._numba.memory import cast, load, pointer, size_of
from .._numba.microkernel import ADD, RELU, lanes, multiply_each, multiply_narrow, multiply_wide, rows_limit
from .._numba.packing import (
    activate_panel,
    add_panel,
    finish_panel,
    pack_filters,
    pack_spaced_slab,
    staging_elements,
    store_panel,
    zero_panel,
)

SCRATCH_PIXELS = 256  # pixels of a task: 32 KB of float32 results for one panel of filters
PANEL_BYTES = 160 << 10  # filters of one panel that a task reads again and again
# Passes over memory that a byte of the images costs, where channels are turned and where not, and of the filters.
TURNED, MOVED, WEIGHT = 1.4, 1.0, 3.7

# The integers that the kernels read, in this order, at the head of one table; the records of phases and taps follow.
(
    GROUPS, C_COUNT, K_COUNT, IN_D, IN_H, IN_W, SRC_N, SRC_C, SRC_D, SRC_H, SRC_W, OUT_N, OUT_K, ADD_N, ADD_K,
    BLOCKS_D, BLOCKS_H, BLOCKS_W, SPLITS, BLOCK_D, BLOCK_H, BLOCK_W, STEP_D, STEP_H, STEP_W, LOW_D, LOW_H, LOW_W,
    SPAN_D, SPAN_H, SPAN_W, WIDTH, PANELS, C_BLOCK, SLAB, PANEL, SLOT, CODE, HAS_Z, PHASES,
    TASKS, PACK_PARTS, FILTERS, BIASES, W_K, W_C, W_GROUP, BIAS_STRIDE, DEPTH, PITCH,
) = range(50)  # fmt: skip
# A phase: size of its output grid; its first element and strides in y and in z; its packed filters; its taps twice, as
# the tile runs them (offsets into the slab) and as they are packed (offsets into w).
(
    P_D, P_H, P_W, Y_BASE, Y_D, Y_H, Y_W, Z_BASE, Z_D, Z_H, Z_W, START, COUNT, STEPS, RUNS, TAPS, SOURCES, SPREAD,
) = range(18)  # fmt: skip
_HEAD, _PHASE = PITCH + 1, SPREAD + 1
_ROWS = rows_limit()
CHAIN = 192  # terms that are summed one after another before the sum is put aside
_VECTOR = lanes(1)  # bytes


@separate
def _multiply(width, slab, panel, weights, taps, count, steps, spread, grid, jumps, first, flags, acc):
    """The sums of one panel over some channels, for every pixel of a block, tile by tile.

    `grid` is the block's (depth, rows, columns) and `jumps` the slab's elements from one output pixel to the next
    along each. `spread` is 0, or, where each filter has one channel of its own, the elements from step to step.
    """
    size = size_of(acc)
    tiles = (grid[2] + _ROWS - 1) // _ROWS
    wide = width * size > _VECTOR
    taps_a_chain = max(1, CHAIN // steps)
    for d in range(grid[0]):
        for h in range(grid[1]):
            a = slab + (d * jumps[0] + h * jumps[1]) * size
            done = 0
            for tile in range(1, tiles + 1):
                # The row is split evenly into as few tiles as possible.
                rows = grid[2] * tile // tiles - done
                # Long sums are made of chains of at most CHAIN terms, each summed for itself and then added.
                for t0 in range(0, count, taps_a_chain):
                    n = min(taps_a_chain, count - t0)
                    for s0 in range(0, steps, CHAIN):
                        run = min(CHAIN, steps - s0)
                        start = first if t0 + s0 == 0 else 0
                        flag = flags & ADD if t0 + s0 == 0 else ADD
                        flag |= flags & RELU if t0 + n == count and s0 + run == steps else 0
                        left, where = a + s0 * max(spread, 1) * size, taps + t0 * 8
                        right = weights + (t0 * steps + s0) * width * size
                        if spread:
                            multiply_each(acc, rows, left, jumps[2], spread, where, n, run, right, panel, start, flag)
                        elif wide:
                            multiply_wide(acc, rows, left, jumps[2], 1, where, n, run, right, panel, start, flag)
                        else:
                            multiply_narrow(acc, rows, left, jumps[2], 1, where, n, run, right, panel, start, flag)
                done += rows
                a += rows * jumps[2] * size
                panel += rows * width * size


@kernel
def _task(task, slot, table, scalars, src, filters, bias, z, y, scratch, like, acc, z_like, out):
    """One task: for every phase, pack the slab, then panel by panel multiply, finish and store."""
    t, f = pointer(table, 0), pointer(scalars, 0.0)
    size = size_of(acc)
    scratch += slot * t[SLOT] * size
    slab, panel = scratch, scratch + t[SLAB] * size
    stage = panel + t[PANEL] * size
    split, rest = task % t[SPLITS], task // t[SPLITS]
    w0, rest = rest % t[BLOCKS_W] * t[BLOCK_W], rest // t[BLOCKS_W]
    h0, rest = rest % t[BLOCKS_H] * t[BLOCK_H], rest // t[BLOCKS_H]
    d0, rest = rest % t[BLOCKS_D] * t[BLOCK_D], rest // t[BLOCKS_D]
    group, n = rest % t[GROUPS], rest // t[GROUPS]
    channels, pitch, width, block = t[C_COUNT], t[PITCH], t[WIDTH], t[C_BLOCK]
    first, last = t[PANELS] * split // t[SPLITS], t[PANELS] * (split + 1) // t[SPLITS]
    base = n * t[SRC_N] + group * channels * t[SRC_C]
    sizes = (t[IN_D], t[IN_H], t[IN_W])
    strides = (t[SRC_C], t[SRC_D], t[SRC_H], t[SRC_W])
    origin = (d0 * t[STEP_D] - t[LOW_D], h0 * t[STEP_H] - t[LOW_H], w0 * t[STEP_W] - t[LOW_W])
    # All phases read the same pixels: one slab serves them.
    counts = (t[SPAN_D], t[SPAN_H], t[SPAN_W])
    pack_spaced_slab(src, base, sizes, strides, origin, counts, channels, pitch, slab, stage, like, acc)
    for phase in range(t[PHASES]):
        p = pointer(table + (_HEAD + phase * _PHASE) * 8, 0)
        ds, hs, ws = min(t[BLOCK_D], p[P_D] - d0), min(t[BLOCK_H], p[P_H] - h0), min(t[BLOCK_W], p[P_W] - w0)
        if ds <= 0 or hs <= 0 or ws <= 0:
            continue
        taps, count, steps, spread = table + p[TAPS] * 8, p[RUNS], p[STEPS], p[SPREAD]
        pixels = ds * hs * ws
        jumps = (t[STEP_D] * counts[1] * counts[2] * pitch, t[STEP_H] * counts[2] * pitch, t[STEP_W] * pitch)
        for k in range(first, last):
            at = group * t[PANELS] + k
            weights = filters + (p[START] + at * p[COUNT] * t[DEPTH] * width) * size
            offset = bias + at * width * size if bias != 0 else 0
            # The tile itself adds the bias and clamps, where nothing has to come between.
            simple = f[0] == 1 and count > 0
            start = offset if simple else 0
            code = 0 if t[HAS_Z] else t[CODE]
            clamp = RELU if simple and code == 1 else 0
            if count == 0:
                zero_panel(panel, pixels * width, acc)
            elif block == channels:
                a = slab + k * width * size if spread else slab
                _multiply(width, a, panel, weights, taps, count, steps, spread, (ds, hs, ws), jumps, start, clamp, acc)
            else:
                for c0 in range(0, channels, block):
                    run = min(block, channels - c0)
                    a, b = slab + c0 * size, weights + c0 * count * width * size
                    flags = (ADD if c0 else 0) | (clamp if c0 + run == channels else 0)
                    onto = start if c0 == 0 else 0
                    _multiply(width, a, panel, b, taps, count, run, 0, (ds, hs, ws), jumps, onto, flags, acc)
            if not simple:
                finish_panel(panel, pixels, width, f[0], offset, acc)
            if code > clamp // RELU:
                activate_panel(panel, pixels * width, code, f[2], acc)
            k0 = k * width
            valid = min(width, t[K_COUNT] - k0)
            channel = group * t[K_COUNT] + k0
            for d in range(ds):
                part = panel + d * hs * ws * width * size
                if t[HAS_Z]:
                    at = n * t[ADD_N] + channel * t[ADD_K] + p[Z_BASE]
                    at += (d0 + d) * p[Z_D] + h0 * p[Z_H] + w0 * p[Z_W]
                    add_panel(part, width, hs, ws, z, at, (t[ADD_K], p[Z_H], p[Z_W]), valid, f[1], z_like, acc)
                    activate_panel(part, hs * ws * width, t[CODE], f[2], acc)
                at = n * t[OUT_N] + channel * t[OUT_K] + p[Y_BASE]
                at += (d0 + d) * p[Y_D] + h0 * p[Y_H] + w0 * p[Y_W]
                store_panel(part, width, hs, ws, y, at, (t[OUT_K], p[Y_H], p[Y_W]), valid, stage, out, acc)


@kernel
def _pack(part, parts, table, w, bias, filters, packed_bias, like, bias_like, acc):
    """Pack the filters of every group and phase, and the bias."""
    t = pointer(table, 0)
    width, panels = t[WIDTH], t[PANELS]
    for phase in range(t[PHASES]):
        p = pointer(table + (_HEAD + phase * _PHASE) * 8, 0)
        for group in range(t[GROUPS]):
            to = filters + (p[START] + group * panels * p[COUNT] * t[DEPTH] * width) * size_of(acc)
            from_ = w + group * t[W_GROUP] * size_of(like)
            sizes = (t[K_COUNT], t[DEPTH], min(t[C_BLOCK], t[DEPTH]), p[COUNT])
            strides = (t[W_K], t[W_C])
            pack_filters(part, parts, from_, to, sizes, strides, panels, width, table + p[SOURCES] * 8, like, acc)
    if bias != 0 and part == 0:
        b, target = pointer(bias, bias_like), pointer(packed_bias, acc)
        for group in range(t[GROUPS]):
            for k in range(panels * width):
                value = cast(load(b, (group * t[K_COUNT] + min(k, t[K_COUNT] - 1)) * t[BIAS_STRIDE]), acc)
                target[group * panels * width + k] = value


@kernel
def _convolve(table, scalars, src, w, bias, z, y, scratch, threads, like, bias_like, acc, z_like, out):
    """Pack the filters, then run the tasks. `bias` and `z` are 0 where there is none."""
    t = pointer(table, 0)
    filters = (scratch + ALIGN - 1) // ALIGN * ALIGN
    biases = filters + t[FILTERS] * size_of(acc)
    rest = biases + t[BIASES] * size_of(acc)
    nb.launch(_pack, t[PACK_PARTS], threads, (table, w, bias, filters, biases, like, bias_like, acc))
    used = biases if bias != 0 else 0
    nb.launch_tasks(_task, t[TASKS], threads, (table, scalars, src, filters, used, z, y, rest, like, acc, z_like, out))


class _Plan:
    """Everything about one problem that does not change from call to call, down to the kernel's table."""

    def __init__(self, problem):
        g, add = flattened(problem)
        forward = problem.op.name == "conv_fprop"
        make = Axis.forward if forward else Axis.backward
        self.axes = [
            make(*numbers) for numbers in zip(g.in_size, g.out_size, g.filter, g.stride, g.pad, g.dilation, strict=True)
        ]
        source, target = (g.x, g.y) if forward else (g.y, g.x)
        self.acc = "f64" if "f64" in (source.dtype, target.dtype) else "f32"
        self.itemsize = 8 if self.acc == "f64" else 4
        self.processors = nb.worthwhile(problem.flops, problem.target.processors)
        self.groups, self.channels, self.filters, self.depth = grouping(g, lanes(self.itemsize), forward)
        self.taps = math.prod(g.filter)
        self.pitch = self.channels if self.depth < self.channels else pixel_pitch(self.channels, self.itemsize)
        self._block(g)
        self._tabulate(problem, g, add, forward)

    def _block(self, g: Geometry) -> None:
        """Choose the tile's width, the block of channels, and the block of output pixels of a task."""
        lane = lanes(self.itemsize)
        vectors = -(-self.filters // lane)
        self.each = self.depth < self.channels
        self.width = lane if self.each or vectors == 1 or (vectors % 2 and vectors < 8) else 2 * lane
        self.panels = -(-self.filters // self.width)
        limit = PANEL_BYTES // (self.taps * self.width * self.itemsize)
        self.c_block = (
            self.channels if self.each or limit >= self.channels else even_parts(self.channels, max(limit, 16), 16)
        )

        d, h, w = (axis.points for axis in self.axes)

        def spans(block):
            return tuple((b - 1) * a.step + a.reach for b, a in zip(block, self.axes, strict=True))

        def fits(block):
            return math.prod(spans(block)) * self.pitch * self.itemsize <= SLAB_BYTES

        pixels = SCRATCH_PIXELS * 4 // self.itemsize
        least = 4 * _ROWS
        block = [1, 1, even_parts(w, pixels)]
        while block[2] > least and not fits(block):
            block[2] = even_parts(w, block[2] // 2, _ROWS)
        for axis, points in ((1, h), (0, d)):
            if block[axis + 1] < self.axes[axis + 1].points:
                break
            per = math.prod(block)
            block[axis] = even_parts(points, max(pixels // per, 1))
            while block[axis] > 1 and math.prod(block) > least and not fits(block):
                block[axis] = even_parts(points, block[axis] // 2)

        def tasks():
            return g.N * self.groups * math.prod(-(-n // b) for n, b in zip((d, h, w), block, strict=True))

        # Enough tasks that no thread waits long for the last one: smaller blocks, then a share of the filters each.
        wanted = 3 * self.processors if self.processors > 1 else 1
        for axis in (0, 1):
            while tasks() < wanted and block[axis] > 1 and math.prod(block) > 2 * least:
                block[axis] = even_parts((d, h)[axis], -(-block[axis] // 2))
        self.splits = max(1, min(self.panels, -(-wanted // tasks())))
        self.block, self.spans = tuple(block), spans(block)
        self.blocks = tuple(-(-n // b) for n, b in zip((d, h, w), block, strict=True))
        self.tasks = tasks() * self.splits

    def _tabulate(self, problem, g: Geometry, add: tuple[int, ...], forward: bool) -> None:
        source, target = (g.x_strides, g.y_strides) if forward else (g.y_strides, g.x_strides)
        w_k, w_c, *w_taps = g.w_strides
        phases = list(itertools.product(*(axis.phases for axis in self.axes)))
        phase_size = self.panels * self.width * self.depth * self.groups
        records, tables, start = [], [], 0
        place = _HEAD + len(phases) * _PHASE
        for phase in phases:
            first = [p[0] for p in phase]
            combinations = list(itertools.product(*(p[2] for p in phase)))
            sources = [sum(r * s for (r, _), s in zip(c, w_taps, strict=True)) for c in combinations]
            offsets = [
                ((d * self.spans[1] + h) * self.spans[2] + w) * self.pitch for (_, d), (_, h), (_, w) in combinations
            ]
            row = [w for _, w in phase[2][2]]
            steps, runs, spread = self.channels, offsets, 0
            if self.each and row:
                # One channel a filter: the steps are the taps of a row, which lie evenly.
                steps, runs = len(row), offsets[:: len(row)]
                spread = self.pitch * (row[1] - row[0] if len(row) > 1 else 1)
            elif self.c_block == self.pitch and row == list(range(row[0], row[0] + len(row))) if row else False:
                # The taps of a row are neighbours in the slab: one run of steps covers them.
                steps, runs = self.channels * len(row), offsets[:: len(row)]
            records += [p[1] for p in phase]
            for strides in (target, add):
                records.append(sum(f * s for f, s in zip(first, strides[2:], strict=True)))
                records += [s * a.spread for s, a in zip(strides[2:], self.axes, strict=True)]
            records += [start, len(offsets), steps, len(runs), place, place + len(runs), spread]
            tables += runs + sources
            place += len(runs) + len(sources)
            start += phase_size * len(offsets)

        lane = lanes(self.itemsize)
        self.filter_elements = aligned(start, self.itemsize)
        self.bias_elements = aligned(self.groups * self.panels * self.width, self.itemsize)
        slab = aligned(math.prod(self.spans) * self.pitch, self.itemsize)
        panel = aligned((math.prod(self.block) + lane) * self.width, self.itemsize)
        self.slot_elements = slab + panel + aligned(staging_elements(), self.itemsize)
        epilogue = problem.epilogue
        by_filter = forward or self.each
        values = [
            self.groups, self.channels, self.filters, *(axis.size for axis in self.axes), *source,
            *target[:2], *add[:2], *self.blocks, self.splits, *self.block, *(axis.step for axis in self.axes),
            *(axis.low for axis in self.axes), *self.spans, self.width, self.panels, self.c_block, slab, panel,
            self.slot_elements, nb.ACTIVATIONS[epilogue.activation], int("z" in problem.tensors), len(phases),
            self.tasks, min(self.panels, 4 * self.processors), self.filter_elements, self.bias_elements,
            *((w_k, w_c) if by_filter else (w_c, w_k)), w_k * (self.filters if by_filter else self.channels),
            problem["bias"].strides[0] if "bias" in problem.inputs else 0, self.depth, self.pitch,
        ]  # fmt: skip
        assert len(values) == _HEAD
        self.table = torch.tensor(values + records + tables, dtype=torch.int64)
        self.scalars = torch.tensor([epilogue.alpha, epilogue.beta, epilogue.parameter], dtype=torch.float64)

    @property
    def workspace(self) -> int:
        elements = self.filter_elements + self.bias_elements + self.processors * self.slot_elements
        return ALIGN + elements * self.itemsize


_plan = functools.lru_cache(maxsize=256)(_Plan)


class Direct(Engine):
    """Blocked direct convolution: forward and data gradient."""

    name = "conv.direct"
    operations = ("conv_fprop", "conv_dgrad")
    targets = ("cpu",)
    notes = frozenset({"runtime_compilation"})

    def refusals(self, problem):
        r = Refusals()
        r.require(not problem.is_empty, "tensors with elements", "an empty one")
        r.require_tensors(problem.items, TYPES)
        return r

    def workspace_size(self, problem, config):
        return _plan(problem).workspace

    def cost(self, problem, config):
        plan = _plan(problem)
        # Filters are read, turned, written and read; that each block of pixels reads them again from a cache is hidden.
        last = problem.items[0][1].is_channels_last and problem[problem.outputs[0]].is_channels_last
        images = (MOVED if last else TURNED) * (problem.bytes - problem["w"].nbytes)
        return seconds(problem, plan, images + WEIGHT * plan.filter_elements * plan.itemsize)

    def build(self, problem, config):
        plan = _plan(problem)
        return convolving(problem, _convolve, plan.table, plan.scalars, plan.acc, plan.processors)
