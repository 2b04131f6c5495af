"""Winograd's minimal filtering on a CPU: filter gradient of unit-stride filters, the same result on every run.

Method. The gradient of an r x r filter is a correlation of x with dy, r x r outputs of a "filter" as large as dy. It is
cut into tiles of m x m pixels of dy: each is F(r, m) with m + r - 1 points an axis, ``dw = A' [sum over tiles of
(G dy G') * (B' x B)] A``, 36 products for a tile and pair of channels instead of 144 (m = 4, r = 3). Tiles are dealt
out to parts, a fixed range each. A part copies the pixels of some tiles into a slab (zero-padded, any layout and type),
transforms them to ``[point][tile][channel]``, and, panel of filters by panel, does the same with dy; the register tile
of `lucidnn.engines._numba.microkernel` then runs over the tiles and adds to the part's own sums
``[point][channel][filter]``. At the end these are added in order, transformed to filters, scaled and written. Where the
sums of all filters would take more memory than a process is given again without the system clearing it, filters are
taken in several passes over x, whose sums share the place.

Cost. The products at 85 % of the machine's rate and the transforms of x and dy. Scratch: (m + r - 1)^2 / r^2 times the
filters for each part that works on other pixels than the rest.

Limits. Unit stride and dilation, filters of 3, 5 or 7 along an axis; errors as in `conv.winograd`. A NaN spreads over
the taps.

After Lavin and Gray, "Fast algorithms for convolutional neural networks", 2016.
"""

from __future__ import annotations

import functools
import itertools

import torch

from ...core.engine import Engine
from ...ops.convolution import Geometry
from .. import _numba as nb
from .._cpu_convolution import summing
from .._numba.blocks import ALIGN, aligned, even_parts
from .._numba.jit import kernel
from .._numba.memory import cast, load, pointer, same_type, size_of, store
from .._numba.microkernel import ADD, lanes
from .._numba.packing import pack_slab, staging_elements, unpack_filters
from .._numba.winograd import (
    CASES,
    correlations,
    filter_sums,
    fits,
    gradient_tiles,
    input_tiles,
    seconds,
    sides,
    tile_sizes,
    unsuited,
    weight,
)

TILE_BYTES = 1 << 20  # transformed tiles of x of a block
LEAST, MOST = 48, 128  # tiles of a block: all sums of a pass are read and written for each
SLAB_BYTES = 192 << 10
SUM_BYTES = 24 << 20  # of a pass: a C library hands out more than 32 MB anew each time, page by page, at 0.27 ns a byte
# Operations that it costs to make an element of a tile of x or dy, to add to a sum, to transform and write that.
IN, GRADIENT, ADDED, FINISHED = 34, 20, 5, 160
_VECTOR = lanes(1)  # bytes

# The integers that the kernels read, in this order; a zero and the taps' offsets in dw and z follow.
(
    GROUPS, CHANNELS, FILTERS, IN_D, IN_H, IN_W, X_N, X_C, X_D, X_H, X_W, OUT_H, OUT_W, Y_N, Y_K, Y_D, Y_H, Y_W,
    LOW_H, LOW_W, CASE, TURNED, M_H, M_W, N_H, N_W, R_H, R_W, TILES_H, TILES_W, LINES, BLOCK_LINES, BLOCK_COLUMNS,
    COLUMN_PARTS, BLOCKS, ROWS, C_BLOCK, WIDTH, PANELS, PITCH, A_PLANE, B_PLANE, C_PLANE, SLAB, TILES, GRADIENTS, SLOT,
    SUMS, PIXEL_PARTS, FILTER_PARTS, PARTS, CHUNK, GROUPS_AT_ONCE, PANELS_AT_ONCE, W_GROUP, W_K, W_C, Z_GROUP, Z_K, Z_C,
    HAS_Z, TAPS,
) = range(62)  # fmt: skip


@kernel
def _part(part, parts, table, x, dy, sums, g0, g1, k0, k1, scratch, like, acc):
    """One part of a pass over groups g0 to g1, panels k0 to k1: its blocks of tiles, its panels of filters."""
    t = pointer(table, 0)
    size, width, points = size_of(acc), t[WIDTH], t[N_H] * t[N_W]
    pixel_part, filter_part = part % t[PIXEL_PARTS], part // t[PIXEL_PARTS]
    slab = scratch + part * t[SLOT] * size
    tiles = slab + t[SLAB] * size
    gradients = tiles + t[TILES] * size
    stage = gradients + t[GRADIENTS] * size
    panels, filter_parts = k1 - k0, t[FILTER_PARTS]
    first, last = k0 + panels * filter_part // filter_parts, k0 + panels * (filter_part + 1) // filter_parts
    begin, end = t[BLOCKS] * pixel_part // t[PIXEL_PARTS], t[BLOCKS] * (pixel_part + 1) // t[PIXEL_PARTS]
    steps = (t[M_H], t[M_W])
    x_sizes, x_strides = (t[IN_D], t[IN_H], t[IN_W]), (t[X_C], t[X_D], t[X_H], t[X_W])
    y_sizes, y_strides = (t[IN_D], t[OUT_H], t[OUT_W]), (t[Y_K], t[Y_D], t[Y_H], t[Y_W])
    for group in range(g0, g1):
        for block in range(begin, end):
            l0 = block // t[COLUMN_PARTS] * t[BLOCK_LINES]
            l1 = min(l0 + t[BLOCK_LINES], t[LINES])
            q0 = block % t[COLUMN_PARTS] * t[BLOCK_COLUMNS]
            across = min(t[BLOCK_COLUMNS], t[TILES_W] - q0)
            columns = across * t[M_W]
            # Of x all channels, then of dy one panel of filters after the other.
            for k in range(first - 1, last):
                line = l0
                while line < l1:
                    image, h = line // t[TILES_H], line % t[TILES_H]
                    n, d = image // t[IN_D], image % t[IN_D]
                    down = min(t[ROWS], l1 - line, t[TILES_H] - h)
                    place = (line - l0) * across
                    if k < first:
                        wide = columns + t[R_W] - 1
                        origin = (d, h * t[M_H] - t[LOW_H], q0 * t[M_W] - t[LOW_W])
                        counts = (1, down * t[M_H] + t[R_H] - 1, wide)
                        for c0 in range(0, t[CHANNELS], t[C_BLOCK]):
                            run = min(t[C_BLOCK], t[CHANNELS] - c0)
                            base = n * t[X_N] + (group * t[CHANNELS] + c0) * t[X_C]
                            pack_slab(x, base, x_sizes, x_strides, origin, counts, run, slab, stage, like, acc)
                            to = tiles + (place * t[PITCH] + c0) * size
                            vectors = (run * size + _VECTOR - 1) // _VECTOR
                            input_tiles(
                                t[CASE], t[TURNED], slab, (wide * run, run), steps, (down, across),
                                to, t[A_PLANE], t[PITCH], t[N_W], vectors, acc,
                            )  # fmt: skip
                    else:
                        run = min(width, t[FILTERS] - k * width)
                        base = n * t[Y_N] + (group * t[FILTERS] + k * width) * t[Y_K]
                        origin, counts = (d, h * t[M_H], q0 * t[M_W]), (1, down * t[M_H], columns)
                        pack_slab(dy, base, y_sizes, y_strides, origin, counts, run, slab, stage, like, acc)
                        to = gradients + place * width * size
                        vectors = (run * size + _VECTOR - 1) // _VECTOR
                        gradient_tiles(
                            t[CASE], t[TURNED], slab, (columns * run, run), steps, (down, across),
                            to, t[B_PLANE], width, t[N_W], vectors, acc,
                        )  # fmt: skip
                    line += down
                if k >= first:
                    panel = (group - g0) * panels + k - k0
                    c = sums + (pixel_part * t[SUMS] + panel * points * t[C_PLANE]) * size
                    correlations(
                        points, (l1 - l0) * across, t[CHANNELS], width, tiles, t[A_PLANE], t[PITCH],
                        gradients, t[B_PLANE], c, t[C_PLANE], table + TAPS * 8, ADD if block > begin else 0, acc,
                    )  # fmt: skip


@kernel
def _finish(task, slot, table, scalars, sums, z, dw, g0, first, panels, scratch, acc, z_like, out):
    """Add the parts' sums of some channels and one panel of filters in order, transform, scale and write.

    The sums are those of `panels` panels from the `first` on of groups from g0 on.
    """
    t, f = pointer(table, 0), pointer(scalars, 0.0)
    source, target, add = pointer(sums, acc), pointer(dw, out), pointer(z, z_like)
    size, width, taps, points = size_of(acc), t[WIDTH], t[R_H] * t[R_W], t[N_H] * t[N_W]
    chunks = (t[CHANNELS] + t[CHUNK] - 1) // t[CHUNK]
    c0, panel = task % chunks * t[CHUNK], task // chunks
    group, k0 = g0 + panel // panels, (first + panel % panels) * width
    count, valid = min(t[CHUNK], t[CHANNELS] - c0), min(width, t[FILTERS] - k0)
    start = panel * points * t[C_PLANE] + c0 * width
    for i in range(1, t[PIXEL_PARTS]):
        for p in range(points):
            at = start + p * t[C_PLANE]
            for j in range(at, at + count * width):
                source[j] += source[i * t[SUMS] + j]
    buffer = scratch + slot * t[SLOT] * size
    strides = (t[R_W] * count * width, count * width)
    vectors, alpha, beta = count * width * size // _VECTOR, cast(f[0], acc), cast(f[1], acc)
    filter_sums(
        t[CASE], t[TURNED], sums + start * size, t[C_PLANE], t[N_W], buffer, strides, vectors, alpha, acc
    )  # fmt: skip
    base = group * t[W_GROUP] + k0 * t[W_K] + c0 * t[W_C]
    places = table + TAPS * 8 + 8
    if valid == width and not t[HAS_Z] and same_type(acc, out):
        if unpack_filters(buffer, count, 0, count, width, dw, base, (t[W_K], t[W_C]), places, taps, acc):
            return
    values, to, from_ = pointer(buffer, acc), pointer(places, 0), pointer(places + taps * 8, 0)
    z_base = group * t[Z_GROUP] + k0 * t[Z_K] + c0 * t[Z_C]
    for k in range(valid):
        for tap in range(taps):
            for c in range(count):
                value = values[(tap * count + c) * width + k]
                if t[HAS_Z]:
                    value += beta * cast(load(add, z_base + k * t[Z_K] + c * t[Z_C] + from_[tap]), acc)
                store(target, base + k * t[W_K] + c * t[W_C] + to[tap], value)


@kernel
def _filter_gradient(table, scalars, x, dy, z, dw, scratch, threads, like, acc, z_like, out):
    """Pass by pass every part, then the sums' transform. `z` is 0 where there is none."""
    t = pointer(table, 0)
    sums = (scratch + ALIGN - 1) // ALIGN * ALIGN
    rest = sums + t[PIXEL_PARTS] * t[SUMS] * size_of(acc)
    chunks = (t[CHANNELS] + t[CHUNK] - 1) // t[CHUNK]
    for g0 in range(0, t[GROUPS], t[GROUPS_AT_ONCE]):
        g1 = min(g0 + t[GROUPS_AT_ONCE], t[GROUPS])
        for k0 in range(0, t[PANELS], t[PANELS_AT_ONCE]):
            k1 = min(k0 + t[PANELS_AT_ONCE], t[PANELS])
            nb.launch(_part, t[PARTS], threads, (table, x, dy, sums, g0, g1, k0, k1, rest, like, acc))
            tasks = (g1 - g0) * (k1 - k0) * chunks
            nb.launch_tasks(
                _finish, tasks, threads, (table, scalars, sums, z, dw, g0, k0, k1 - k0, rest, acc, z_like, out)
            )  # fmt: skip


class _Plan:
    """Everything about one problem and tile that does not change from call to call, down to the kernel's table."""

    def __init__(self, problem, tile: int):
        g = Geometry.of(problem)
        self.acc = "f64" if "f64" in (g.x.dtype, g.w.dtype) else "f32"
        self.itemsize = 8 if self.acc == "f64" else 4
        self.sides = sides(g, tile)
        self.groups, self.channels, self.filters = g.G, g.C // g.G, g.K // g.G
        self.processors = nb.worthwhile(problem.flops / 2, problem.target.processors)
        self._block(g)
        self._tabulate(problem, g)

    def _block(self, g: Geometry) -> None:
        """Choose the panels' width, the block of tiles, and how tiles and filters are dealt out to parts."""
        lane = lanes(self.itemsize)
        (m_h, r_h), (m_w, r_w) = self.sides
        self.points = (m_h + r_h - 1) * (m_w + r_w - 1)
        vectors = -(-self.filters // lane)
        self.width = lane if vectors == 1 or (vectors % 2 and vectors < 8) else 2 * lane
        self.panels = -(-self.filters // self.width)
        self.pitch = -(-self.channels // lane) * lane
        # Rows a multiple of 1 KB apart share few sets of the first-level cache.
        self.pitch += lane if self.pitch * self.itemsize % 1024 == 0 else 0
        self.tiles_h, self.tiles_w = -(-g.out_size[1] // m_h), -(-g.out_size[2] // m_w)
        self.lines = g.N * g.out_size[0] * self.tiles_h
        most = min(max(LEAST, TILE_BYTES // (self.points * self.pitch * self.itemsize)), MOST)
        self.columns = even_parts(self.tiles_w, most)
        self.column_parts = -(-self.tiles_w // self.columns)
        self.block_lines = even_parts(self.lines, max(most // self.columns, 1))
        self.blocks = -(-self.lines // self.block_lines) * self.column_parts
        tiles = self.block_lines * self.columns
        self.a_plane = aligned(tiles * self.pitch, self.itemsize)
        self.a_plane += lane if self.a_plane // lane % 2 == 0 else 0
        self.b_plane = tiles * self.width + lane
        self.c_plane = self.channels * self.width + lane

        def slab(rows, channels):
            return (rows * m_h + r_h - 1) * (self.columns * m_w + r_w - 1) * channels + lane

        self.c_block = min(self.channels, 64)
        self.rows = min(self.block_lines, self.tiles_h)
        while self.rows > 1 and slab(self.rows, self.c_block) * self.itemsize > SLAB_BYTES:
            self.rows = -(-self.rows // 2)
        while self.c_block > lane and slab(self.rows, self.c_block) * self.itemsize > SLAB_BYTES:
            self.c_block = -(-self.c_block // 2 // lane) * lane
        self.chunk = even_parts(self.channels, 2 * lane, lane)
        most_channels = max(self.c_block, self.width)
        self.slab = aligned(max(slab(self.rows, most_channels), r_h * r_w * self.chunk * self.width), self.itemsize)
        self.tile_elements = aligned(self.points * self.a_plane + lane, self.itemsize)
        self.gradient_elements = aligned(self.points * self.b_plane + lane, self.itemsize)
        self.slot = self.slab + self.tile_elements + self.gradient_elements + aligned(staging_elements(), self.itemsize)
        one = self.points * self.c_plane  # sums of a panel
        tiles_of_x = self.lines * self.tiles_w * self.points * self.channels * self.groups

        def at_once(pixel_parts):
            # Groups and panels of a pass: some groups as a whole, or some panels of one.
            some = max(1, SUM_BYTES // (pixel_parts * one * self.itemsize))
            if some >= self.panels:
                return min(some // self.panels, self.groups), self.panels
            return 1, even_parts(self.panels, some, self.processors // pixel_parts)

        def passes(pixel_parts):
            groups, panels = at_once(pixel_parts)
            return -(-self.groups // groups) * -(-self.panels // panels)

        def moved(pixel_parts):
            # Parts that share pixels transform them each; parts that share filters keep their own sums and add them.
            filter_parts = min(self.panels, -(-self.processors // pixel_parts))
            again = -(-self.panels // at_once(pixel_parts)[1])
            return 4 * pixel_parts * self.groups * self.panels * one + filter_parts * again * tiles_of_x

        choices = [p for p in range(1, min(self.processors, self.blocks) + 1) if self.processors % p == 0]
        full = [p for p in choices if at_once(p)[1] >= self.processors // p]
        self.pixel_parts = min(full, key=moved) if full else choices[-1]
        self.groups_at_once, self.panels_at_once = at_once(self.pixel_parts)
        self.passes = passes(self.pixel_parts)
        self.filter_parts = max(1, min(self.panels_at_once, self.processors // self.pixel_parts))
        self.parts = self.pixel_parts * self.filter_parts
        self.sums = aligned(self.groups_at_once * self.panels_at_once * one, self.itemsize)
        self.rounds = -(-self.panels // self.panels_at_once)  # times that x is transformed

    def _tabulate(self, problem, g: Geometry) -> None:
        z = problem.tensors.get("z")
        z_strides = (*z.strides[:2], *(0,) * (5 - z.ndim), *z.strides[2:]) if z else (0,) * 5
        (m_h, r_h), (m_w, r_w) = self.sides
        turned = self.sides not in CASES
        case = CASES.index(self.sides[::-1] if turned else self.sides)
        values = [self.groups, self.channels, self.filters, *g.in_size, *g.x_strides, *g.out_size[1:], *g.y_strides]
        values += [*g.pad[1:], case, int(turned), m_h, m_w, m_h + r_h - 1, m_w + r_w - 1, r_h, r_w]
        values += [self.tiles_h, self.tiles_w, self.lines, self.block_lines, self.columns, self.column_parts]
        values += [self.blocks, self.rows, self.c_block, self.width, self.panels, self.pitch]
        values += [self.a_plane, self.b_plane, self.c_plane, self.slab, self.tile_elements, self.gradient_elements]
        values += [self.slot, self.sums, self.pixel_parts, self.filter_parts, self.parts, self.chunk]
        values += [self.groups_at_once, self.panels_at_once]
        for strides in (g.w_strides, z_strides):
            values += [strides[0] * self.filters, *strides[:2]]
        values += [int(z is not None)]
        assert len(values) == TAPS
        values += [0]
        for strides in (g.w_strides, z_strides):
            values += [i * strides[3] + j * strides[4] for i, j in itertools.product(range(r_h), range(r_w))]
        self.table = torch.tensor(values, dtype=torch.int64)
        self.scalars = torch.tensor([problem.epilogue.alpha, problem.epilogue.beta], dtype=torch.float64)

    @property
    def workspace(self) -> int:
        slots = max(self.parts, self.processors)
        return ALIGN + (self.pixel_parts * self.sums + slots * self.slot) * self.itemsize


_plan = functools.lru_cache(maxsize=256)(_Plan)


class WinogradWgrad(Engine):
    """Winograd convolution: filter gradient."""

    name = "conv.winograd_wgrad"
    operations = ("conv_wgrad",)
    targets = ("cpu",)
    notes = frozenset({"winograd", "runtime_compilation", "spreads"})

    def refusals(self, problem):
        g = Geometry.of(problem)
        r = unsuited(problem, g)
        if not r:
            right = any(fits(problem, g, tile, self._terms(g, tile)) for tile in tile_sizes(g))
            r.require(right, "a sum whose own error is above that of the transforms", g.out_size)
        return r

    def _terms(self, g: Geometry, tile: int) -> float:
        """Tiles that are summed."""
        (m_h, _), (m_w, _) = sides(g, tile)
        return g.N * g.out_size[0] * max(g.out_size[1] / m_h, 1) * max(g.out_size[2] / m_w, 1)

    def configs(self, problem):
        g = Geometry.of(problem)
        found = [{"tile": tile} for tile in tile_sizes(g) if fits(problem, g, tile, self._terms(g, tile))]
        return sorted(found, key=lambda config: self.cost(problem, config))

    def workspace_size(self, problem, config):
        return _plan(problem, config["tile"]).workspace

    def cost(self, problem, config):
        plan = _plan(problem, config["tile"])
        filters = plan.groups * plan.channels * plan.panels * plan.width * plan.points
        tiles = plan.lines * plan.tiles_w * plan.groups * plan.points
        product = 2.0 * tiles * plan.channels * plan.panels * plan.width
        inputs = tiles * aligned(plan.channels, plan.itemsize) * plan.filter_parts * plan.rounds
        moved = weight(plan.points) * (IN * inputs + GRADIENT * tiles * plan.panels * plan.width)
        moved += (ADDED * plan.blocks + FINISHED * plan.pixel_parts) * filters
        return seconds(problem, plan, product, moved, 2 * plan.passes)

    def build(self, problem, config):
        plan = _plan(problem, config["tile"])
        return summing(problem, _filter_gradient, plan.table, plan.scalars, plan.acc, plan.processors)
