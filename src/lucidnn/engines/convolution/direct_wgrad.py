"""Direct filter gradient on a CPU: blocked for registers and caches, nothing unfolded, the same result on every run.

Method. The output pixels are dealt out to parts, a fixed range each. For a block of some hundred pixels a part copies
the input pixels they read into a slab (zero-padded, channels innermost) and dy into panels of one register tile's width
of filters, both in the accumulation type. Then the register tile of `lucidnn.engines._numba.microkernel` runs with its
rows over channels (over a whole filter row of channels where the taps are neighbours in the slab) and its steps over
pixels, and adds to the part's own sums. At the end the parts' sums are added in order, scaled, and written out.

Cost. The arithmetic of the definition at about 90 % of the machine's rate, plus one copy of x and dy. Scratch: a copy
of the filters for each part that works on other pixels than the rest, and below 1 MB a part.

Limits. Few filters waste the tile's width; 1x1 filters are a plain matrix product, which `conv.im2col_gemm` hands to
BLAS.
"""

from __future__ import annotations

import functools
import itertools
import math

import torch

from ...core.engine import Engine, Refusals
from ...core.heuristics import roofline
from ...ops.convolution import Geometry
from .. import _numba as nb
from .._cpu_convolution import summing
from .._numba.blocks import (
    ALIGN,
    SLAB_BYTES,
    TYPES,
    aligned,
    cleared,
    even_parts,
    flattened,
    grouping,
    pixel_pitch,
    seconds,
)
from .._numba.jit import kernel, separate
from .._numba.memory import cast, load, pointer, same_type, size_of, store
from .._numba.microkernel import ADD, lanes, multiply_each, multiply_narrow, multiply_wide, rows_limit
from .._numba.packing import pack_row, pack_spaced_slab, staging_elements, unpack_filters, zero_panel

PIXELS = 192  # pixels of a block: with 32 filters 24 KB of dy, which stay in the first-level cache
CHUNK_ELEMENTS = 144  # of each filter that the reduction takes at once: with 32 filters 18 KB
COPIES = 64 << 20  # bytes that the parts' sums may take together before parts share pixels instead

# The integers that the kernels read, in this order, at the head of one table; lists of offsets follow.
(
    GROUPS, C_COUNT, K_COUNT, IN_D, IN_H, IN_W, X_N, X_C, X_D, X_H, X_W, Y_N, Y_K, Y_D, Y_H, Y_W, OUT_D, OUT_H, OUT_W,
    STEP_D, STEP_H, STEP_W, LOW_D, LOW_H, LOW_W, BLOCK_H, BLOCK_W, BLOCKS_H, BLOCKS_W, BLOCKS, SPAN_D, SPAN_H, SPAN_W,
    WIDTH, PANELS, RUNS, RUN, TAPS, SLAB, PANEL, SLOT, SUMS, PIXEL_PARTS, FILTER_PARTS, PARTS, C_STRIDE, K_STRIDE,
    G_STRIDE, ZC_STRIDE, ZK_STRIDE, ZG_STRIDE, HAS_Z, CHUNK, RUN_TABLE, TAP_TABLE, Z_TABLE, ROW_TABLE,
    DEPTH, SPREAD, PITCH,
) = range(60)  # fmt: skip
_ROWS = rows_limit()
_VECTOR = lanes(1)  # bytes


@separate
def _accumulate(width, slab, panel, sums, runs, run, spread, run_table, row_table, rows, steps, pixel, flags, acc):
    """Add one block's pixels to one panel's sums: every run of neighbours in the slab, tile by tile.

    Where each filter has one channel of its own, a run is a filter row's taps, `spread` elements apart; else that is 0.
    """
    size = size_of(acc)
    offsets = pointer(run_table, 0)
    tiles = (run + _ROWS - 1) // _ROWS
    wide = width * size > _VECTOR
    for i in range(runs):
        a = slab + offsets[i] * size
        done = 0
        for tile in range(1, tiles + 1):
            count = run * tile // tiles - done
            if spread:
                multiply_each(acc, count, a, spread, pixel, row_table, rows, steps, panel, sums, 0, flags)
            elif wide:
                multiply_wide(acc, count, a, 1, pixel, row_table, rows, steps, panel, sums, 0, flags)
            else:
                multiply_narrow(acc, count, a, 1, pixel, row_table, rows, steps, panel, sums, 0, flags)
            done += count
            a += count * max(spread, 1) * size
            sums += count * width * size


@separate
def _pack_gradient(dy, base, strides, rows, columns, valid, width, panel, stage, like, acc):
    """``panel[pixel, filter]`` from dy; `strides` is (filter, row, column). Filters beyond `valid` become zero."""
    size = size_of(acc)
    if valid < width:
        zero_panel(panel, rows * columns * width, acc)
    if strides[1] == columns * strides[2]:
        rows, columns = 1, rows * columns
    for p in range(rows):
        to = panel + p * columns * width * size
        pack_row(dy, base + p * strides[1], strides[0], strides[2], valid, columns, to, width, stage, like, acc)


@kernel
def _part(part, parts, table, x, dy, sums, scratch, like, acc):
    """One part: its blocks of pixels, its panels of filters, every group."""
    t = pointer(table, 0)
    size = size_of(acc)
    pixel_part, filter_part = part % t[PIXEL_PARTS], part // t[PIXEL_PARTS]
    slab = scratch + part * t[SLOT] * size
    panel = slab + t[SLAB] * size
    stage = panel + t[PANEL] * size
    first, last = t[PANELS] * filter_part // t[FILTER_PARTS], t[PANELS] * (filter_part + 1) // t[FILTER_PARTS]
    begin, end = t[BLOCKS] * pixel_part // t[PIXEL_PARTS], t[BLOCKS] * (pixel_part + 1) // t[PIXEL_PARTS]
    channels, width = t[C_COUNT], t[WIDTH]
    per_panel = t[RUNS] * t[RUN] * width
    sizes, strides = (t[IN_D], t[IN_H], t[IN_W]), (t[X_C], t[X_D], t[X_H], t[X_W])
    counts = (t[SPAN_D], t[SPAN_H], t[SPAN_W])
    for group in range(t[GROUPS]):
        for block in range(begin, end):
            w0, rest = block % t[BLOCKS_W] * t[BLOCK_W], block // t[BLOCKS_W]
            h0, rest = rest % t[BLOCKS_H] * t[BLOCK_H], rest // t[BLOCKS_H]
            d0, n = rest % t[OUT_D], rest // t[OUT_D]
            rows, columns = min(t[BLOCK_H], t[OUT_H] - h0), min(t[BLOCK_W], t[OUT_W] - w0)
            origin = (d0 * t[STEP_D] - t[LOW_D], h0 * t[STEP_H] - t[LOW_H], w0 * t[STEP_W] - t[LOW_W])
            base = n * t[X_N] + group * channels * t[X_C]
            pack_spaced_slab(x, base, sizes, strides, origin, counts, channels, t[PITCH], slab, stage, like, acc)
            for k in range(first, last):
                k0 = k * width
                at = n * t[Y_N] + (group * t[K_COUNT] + k0) * t[Y_K] + d0 * t[Y_D] + h0 * t[Y_H] + w0 * t[Y_W]
                valid = min(width, t[K_COUNT] - k0)
                y_strides = (t[Y_K], t[Y_H], t[Y_W])
                _pack_gradient(dy, at, y_strides, rows, columns, valid, width, panel, stage, like, acc)
                to = sums + (pixel_part * t[SUMS] + (group * t[PANELS] + k) * per_panel) * size
                flags = ADD if block > begin else 0
                a = slab + k * width * size if t[SPREAD] else slab
                _accumulate(
                    width, a, panel, to, t[RUNS], t[RUN], t[SPREAD], table + t[RUN_TABLE] * 8, table + t[ROW_TABLE] * 8,
                    rows, columns, t[STEP_W] * t[PITCH], flags, acc,
                )  # fmt: skip


@kernel
def _reduce(part, parts, table, scalars, sums, z, dw, acc, z_like, out):
    """Add the parts' sums in order, scale, and write a share of the filters: some channels of one panel at a time."""
    t, f = pointer(table, 0), pointer(scalars, 0.0)
    source, target, add = pointer(sums, acc), pointer(dw, out), pointer(z, z_like)
    to, from_ = pointer(table + t[TAP_TABLE] * 8, 0), pointer(table + t[Z_TABLE] * 8, 0)
    alpha, beta = cast(f[0], acc), cast(f[1], acc)
    channels, width, panels, taps = t[DEPTH], t[WIDTH], t[PANELS], t[TAPS]
    # Dense filters are written in order, whether their taps or their channels are neighbours.
    outer, inner = (taps, t[CHUNK]) if t[C_STRIDE] == 1 else (t[CHUNK], taps)
    chunks = (channels + t[CHUNK] - 1) // t[CHUNK]
    total = t[GROUPS] * panels * chunks
    for item in range(total * part // parts, total * (part + 1) // parts):
        chunk, rest = item % chunks, item // chunks
        k, group = rest % panels, rest // panels
        c0 = chunk * t[CHUNK]
        count = min(t[CHUNK], channels - c0)
        valid = min(width, t[K_COUNT] - k * width)
        start = (rest * taps * channels + c0) * width
        for i in range(1, t[PIXEL_PARTS]):
            for tap in range(taps):
                at = start + tap * channels * width
                for j in range(at, at + count * width):
                    source[j] += source[i * t[SUMS] + j]
        if alpha == 1 and valid == width and not t[HAS_Z] and same_type(acc, out):
            base = group * t[G_STRIDE] + k * width * t[K_STRIDE]
            panel = sums + rest * taps * channels * width * size_of(acc)
            y_strides, places = (t[K_STRIDE], t[C_STRIDE]), table + t[TAP_TABLE] * 8
            if unpack_filters(panel, channels, c0, count, width, dw, base, y_strides, places, taps, acc):
                continue
        for j in range(valid):
            y_at = group * t[G_STRIDE] + (k * width + j) * t[K_STRIDE]
            z_at = group * t[ZG_STRIDE] + (k * width + j) * t[ZK_STRIDE]
            for a in range(outer):
                for b in range(inner):
                    tap, c = (a, b) if t[C_STRIDE] == 1 else (b, a)
                    if c < count:
                        value = alpha * source[start + (tap * channels + c) * width + j]
                        if t[HAS_Z]:
                            value += beta * cast(load(add, z_at + from_[tap] + (c0 + c) * t[ZC_STRIDE]), acc)
                        store(target, y_at + to[tap] + (c0 + c) * t[C_STRIDE], value)


@kernel
def _filter_gradient(table, scalars, x, dy, z, dw, scratch, threads, like, acc, z_like, out):
    """Every part, then the reduction. `z` is 0 where there is none."""
    t = pointer(table, 0)
    sums = (scratch + ALIGN - 1) // ALIGN * ALIGN
    rest = sums + t[PIXEL_PARTS] * t[SUMS] * size_of(acc)
    nb.launch(_part, t[PARTS], threads, (table, x, dy, sums, rest, like, acc))
    items = t[GROUPS] * t[PANELS] * ((t[DEPTH] + t[CHUNK] - 1) // t[CHUNK])
    nb.launch(_reduce, min(4 * threads, items), threads, (table, scalars, sums, z, dw, acc, z_like, out))


class _Plan:
    """Everything about one problem that does not change from call to call, down to the kernel's table."""

    def __init__(self, problem):
        g, _ = flattened(problem)
        self.acc = "f64" if "f64" in (g.x.dtype, g.w.dtype) else "f32"
        self.itemsize = 8 if self.acc == "f64" else 4
        self.groups, self.channels, self.filters, self.depth = grouping(g, lanes(self.itemsize))
        self.each = self.depth < self.channels
        self.taps = math.prod(g.filter)
        # Taps that are neighbours in the slab make long runs: worth more than pixels in sets of their own.
        side_by_side = self.each or (g.filter[2] > 1 and g.dilation[2] == 1)
        self.pitch = self.channels if side_by_side else pixel_pitch(self.channels, self.itemsize)
        self._block(problem, g)
        self._tabulate(problem, g)

    def _block(self, problem, g: Geometry) -> None:
        """Choose the tile's width, the block of pixels, and how pixels and filters are dealt out to parts."""
        lane = lanes(self.itemsize)
        vectors = -(-self.filters // lane)
        self.width = lane if self.each or vectors == 1 or (vectors % 2 and vectors < 8) else 2 * lane
        self.panels = -(-self.filters // self.width)
        _, h, w = g.out_size
        pixels = PIXELS * 4 // self.itemsize

        def spans(rows, columns):
            block = (1, rows, columns)
            return tuple((b - 1) * s + d * (r - 1) + 1 for b, s, d, r in zip(block, g.stride, g.dilation, g.filter))

        def fits(rows, columns):
            return math.prod(spans(rows, columns)) * self.pitch * self.itemsize <= SLAB_BYTES

        columns = even_parts(w, pixels)
        while columns > 32 and not fits(1, columns):
            columns = even_parts(w, columns // 2)
        rows = even_parts(h, max(pixels // columns, 1)) if columns == w else 1
        while rows > 1 and rows * columns > 32 and not fits(rows, columns):
            rows = even_parts(h, rows // 2)
        self.rows, self.columns, self.spans = rows, columns, spans(rows, columns)
        self.blocks = g.N * g.out_size[0] * -(-h // rows) * -(-w // columns)
        self.sums = aligned(self.groups * self.panels * self.taps * self.depth * self.width, self.itemsize)
        processors = nb.worthwhile(problem.flops, problem.target.processors)
        copies = max(1, COPIES // (self.sums * self.itemsize))
        slabs = self.blocks * math.prod(self.spans) * self.channels * self.groups

        def moved(pixel_parts):
            # Parts that share pixels pack them each; parts that share filters keep their own sums and add them later.
            filter_parts = min(self.panels, -(-processors // pixel_parts))
            return 2 * pixel_parts * self.sums + filter_parts * slabs

        choices = [p for p in range(1, min(processors, self.blocks, copies) + 1) if processors % p == 0]
        full = [p for p in choices if self.panels >= processors // p]
        self.pixel_parts = min(full, key=moved) if full else choices[-1]
        self.filter_parts = max(1, min(self.panels, processors // self.pixel_parts))
        self.parts = self.pixel_parts * self.filter_parts

    def _tabulate(self, problem, g: Geometry) -> None:
        lane = lanes(self.itemsize)
        z = problem.tensors.get("z")
        z_strides = (*z.strides[:2], *(0,) * (5 - z.ndim), *z.strides[2:]) if z else (0,) * 5
        row = self.spans[2] * self.pitch
        plane = self.spans[1] * row
        joined = g.dilation[2] == 1 and self.pitch == self.channels
        starts = [
            t * g.dilation[0] * plane + r * g.dilation[1] * row + s * g.dilation[2] * self.pitch
            for t, r, s in itertools.product(*map(range, g.filter))
        ]
        run, spread = self.channels, 0
        if self.each:
            starts, run, spread = starts[:: g.filter[2]], g.filter[2], g.dilation[2] * self.channels
        elif joined:
            # The taps of a filter row are neighbours in the slab: one run of rows covers them.
            starts, run = starts[:: g.filter[2]], self.channels * g.filter[2]
        taps, z_taps = (
            [sum(i * s for i, s in zip(tap, strides[2:])) for tap in itertools.product(*map(range, g.filter))]
            for strides in (g.w_strides, z_strides)
        )
        rows = [p * g.stride[1] * row for p in range(self.rows)]
        slab = aligned(math.prod(self.spans) * self.pitch, self.itemsize)
        panel = aligned(self.rows * self.columns * self.width, self.itemsize)
        self.slot = slab + panel + aligned(staging_elements(), self.itemsize)
        (w_k, w_c), (z_k, z_c) = g.w_strides[:2], z_strides[:2]
        head = PITCH + 1
        places = [head, head + len(starts)]
        places += [places[1] + len(taps), places[1] + 2 * len(taps)]
        values = [
            self.groups, self.channels, self.filters, *g.in_size, *g.x_strides, *g.y_strides, *g.out_size, *g.stride,
            *g.pad, self.rows, self.columns, -(-g.out_size[1] // self.rows), -(-g.out_size[2] // self.columns),
            self.blocks,
            *self.spans, self.width, self.panels, len(starts), run, self.taps, slab, panel, self.slot, self.sums,
            self.pixel_parts, self.filter_parts, self.parts, w_c, w_k, self.filters * w_k, z_c, z_k, self.filters * z_k,
            int(z is not None), even_parts(self.depth, max(CHUNK_ELEMENTS // self.taps, 1), lane), *places,
            self.depth, spread, self.pitch,
        ]  # fmt: skip
        self.table = torch.tensor(values + starts + taps + z_taps + rows, dtype=torch.int64)
        self.scalars = torch.tensor([problem.epilogue.alpha, problem.epilogue.beta], dtype=torch.float64)

    @property
    def workspace(self) -> int:
        return ALIGN + (self.pixel_parts * self.sums + self.parts * self.slot) * self.itemsize


_plan = functools.lru_cache(maxsize=256)(_Plan)


class DirectWgrad(Engine):
    """Blocked direct convolution: filter gradient."""

    name = "conv.direct_wgrad"
    operations = ("conv_wgrad",)
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
        # Slabs and panels stay in the cache. The parts' sums are written, read and written out; and read and written by
        # each block of pixels, which shows where they are more than the cache holds.
        slabs = plan.blocks * math.prod(plan.spans) * plan.channels * plan.filter_parts
        panels = plan.blocks * plan.rows * plan.columns * plan.panels * plan.width
        sums = plan.pixel_parts * plan.sums * plan.itemsize
        again = 0.1 * plan.blocks * plan.sums * plan.itemsize if plan.sums * plan.itemsize > 1 << 20 else 0.0
        images = problem["x"].nbytes + problem["dy"].nbytes + 0.15 * (slabs + panels) * plan.itemsize
        moved = images + 3.7 * sums + again + cleared(sums)
        if plan.each and not problem["x"].is_channels_last:
            # Channels of a pixel are gathered one by one, and the product is quicker than `seconds` has it: from four
            # depthwise layers on 7x7, of 3x3 to 7x7, that it now meets within 10 %.
            product = 0.51 * seconds(problem, plan, 0.0)
            return product + roofline(problem, flops=0.0, bytes=2.9 * moved, memory_efficiency=1.0, launches=0)
        return seconds(problem, plan, moved)

    def build(self, problem, config):
        plan = _plan(problem)
        return summing(problem, _filter_gradient, plan.table, plan.scalars, plan.acc, plan.parts)
