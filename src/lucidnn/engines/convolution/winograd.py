"""Winograd's minimal filtering on a CPU: forward and data gradient of unit-stride filters, fused from end to end.

Method. ``Y = A [(G g G') * (B d B')] A'`` for tiles of m x m outputs (`lucidnn.engines._winograd`): an r x r filter
costs (m + r - 1)^2 products a tile and channel instead of m^2 r^2, for 3 x 3 filters 4 times fewer with m = 4. Pixels
of some rows of tiles are copied into a slab of a thread's scratch memory (any layout and type, zero-padded),
transformed to ``[point][tile][channel]``, multiplied point by point by the register tile of
`lucidnn.engines._numba.microkernel`, transformed back with the bias added, and finished and stored panel of filters by
panel. In which order depends on the filters:

* few: they are transformed once a call; each task takes its own rows of tiles through all panels.
* many (4 MB transformed): reading them would cost more than the products. All threads share a chunk of transformed
  tiles; each task makes one panel's filters, 64 channels at a time in its cache, and takes the chunk through it.

The data gradient is the same with filters turned by half a turn, channels and filters exchanged, and
``r - 1 - padding`` for the padding. Filters along one axis (1x3, 3x1, 1-D, 1x7, ...) are transformed along that axis
alone. The third spatial axis takes filters of size 1, as if it were part of the batch.

Cost. The products at the machine's rate and 15 to 40 % more for the transforms, less the more channels and filters
there are. Transformed filters are (m + r - 1)^2 / r^2 times as large as the filters: few pixels do not pay for them.

Limits. Unit stride and dilation, filters of 3, 5 or 7 along an axis. Errors are those of a direct sum times
`amplification`, 1.7 (m = 2) and 4.8 (m = 4) for 3 x 3 filters, 19 (m = 4) for 5 x 5; a tile whose expected error is
above what a sum of so many terms may have is refused. A NaN or an infinity spreads over its tiles (as NaN).

After Lavin and Gray, "Fast algorithms for convolutional neural networks", 2016; fused as in Jia et al., "Optimizing
N-dimensional, Winograd-based convolution for manycore CPUs", 2018.
"""

from __future__ import annotations

import functools
import math

import torch

from ...core.engine import Engine
from ...ops.convolution import Geometry
from .. import _numba as nb
from .._cpu_convolution import convolving
from .._numba.blocks import ALIGN, aligned, even_parts
from .._numba.jit import kernel, separate
from .._numba.memory import cast, load, pointer, size_of
from .._numba.microkernel import ADD, lanes
from .._numba.packing import activate_panel, add_panel, pack_filters, pack_slab, staging_elements, store_panel
from .._numba.winograd import (
    CASES,
    fits,
    input_tiles,
    output_tiles,
    products,
    seconds,
    sides,
    tile_sizes,
    transform_filters,
    unsuited,
    weight,
)

TILE_BYTES = 512 << 10  # transformed tiles of a task
SUM_BYTES = 320 << 10  # and the sums of the panels that are multiplied before any is transformed back
LEAST = 28  # tiles of a task, where there are so many: each reads all transformed filters
SLAB_BYTES = 192 << 10
FILTER_BYTES = 4 << 20  # more transformed filters than that are not kept, but made anew for each chunk of tiles
SHARED_BYTES = 24 << 20  # nor of all groups together: a C library keeps 32 MB from call to call
CHUNK_BYTES = 900 << 10  # sums of a chunk for one panel
CHANNELS_AT_ONCE = 64  # of a panel of filters for a chunk
# Operations that it costs to make an element of a tile, a pixel from one, a transformed filter, and to read that.
IN, OUT, MAKE, READ = 31, 22, 27, 9
_VECTOR = lanes(1)  # bytes

# The integers that the kernels read, in this order; the taps' offsets in w follow.
(
    GROUPS, CHANNELS, FILTERS, IN_D, IN_H, IN_W, SRC_N, SRC_C, SRC_D, SRC_H, SRC_W, OUT_H, OUT_W,
    DST_N, DST_K, DST_D, DST_H, DST_W, ADD_N, ADD_K, ADD_D, ADD_H, ADD_W, HAS_Z, CODE,
    W_GROUP, W_K, W_C, BIAS_STRIDE, LOW_H, LOW_W, CASE, TURNED, M_H, M_W, N_H, N_W, R_H, R_W,
    TILES_H, TILES_W, LINES, BLOCKS, TASK_LINES, COLUMN_PARTS, TASK_COLUMNS, SPLITS, TASKS, CHUNKS, ROWS, C_BLOCK,
    WIDTH, PANELS, TOGETHER, PITCH, A_PLANE, B_PLANE, C_PLANE, FILTER_BLOCK, SLAB, LOCAL, SUMS, PANEL, STAGE, SLOT,
    SHARED, BIASES, TAPS,
) = range(68)  # fmt: skip


@separate
def _filters(table, w, group, k, c0, run, packed, target, alpha, like, acc):
    """Pack and transform `run` channels of one panel of filters."""
    t = pointer(table, 0)
    size, width, taps = size_of(acc), t[WIDTH], t[R_H] * t[R_W]
    from_ = w + (group * t[W_GROUP] + k * width * t[W_K] + c0 * t[W_C]) * size_of(like)
    sizes, strides = (t[FILTERS] - k * width, run, run, taps), (t[W_K], t[W_C])
    pack_filters(0, 1, from_, packed, sizes, strides, 1, width, table + TAPS * 8 + 8, like, acc)
    strides, vectors = (t[R_W] * run * width, run * width), run * width * size // _VECTOR
    transform_filters(t[CASE], t[TURNED], packed, strides, target, t[B_PLANE], t[N_W], vectors, cast(alpha, acc), acc)


@separate
def _spread_bias(table, bias, group, k, target, like, acc):
    """One panel's bias, zero where there is none."""
    t = pointer(table, 0)
    src, dst, first = pointer(bias, like), pointer(target, acc), k * t[WIDTH]
    for i in range(t[WIDTH]):
        dst[i] = cast(0, acc)
        if bias != 0 and first + i < t[FILTERS]:
            dst[i] = cast(load(src, (group * t[FILTERS] + first + i) * t[BIAS_STRIDE]), acc)


@separate
def _load_tiles(table, src, group, l0, l1, part, c0, c1, slab, stage, target, like, acc):
    """Transform some channels of some rows of tiles; the result starts with channel c0 of the first tile."""
    t = pointer(table, 0)
    size, q0 = size_of(acc), part * t[TASK_COLUMNS]
    across = min(t[TASK_COLUMNS], t[TILES_W] - q0)
    columns = across * t[M_W] + t[R_W] - 1
    line = l0
    while line < l1:
        image, h = line // t[TILES_H], line % t[TILES_H]
        down = min(t[ROWS], l1 - line, t[TILES_H] - h)
        base = image // t[IN_D] * t[SRC_N] + group * t[CHANNELS] * t[SRC_C]
        origin = (image % t[IN_D], h * t[M_H] - t[LOW_H], q0 * t[M_W] - t[LOW_W])
        counts = (1, down * t[M_H] + t[R_H] - 1, columns)
        for c in range(c0, c1, t[C_BLOCK]):
            run = min(t[C_BLOCK], c1 - c)
            pack_slab(
                src, base + c * t[SRC_C], (t[IN_D], t[IN_H], t[IN_W]), (t[SRC_C], t[SRC_D], t[SRC_H], t[SRC_W]),
                origin, counts, run, slab, stage, like, acc,
            )  # fmt: skip
            input_tiles(
                t[CASE], t[TURNED], slab, (columns * run, run), (t[M_H], t[M_W]), (down, across),
                target + (c - c0) * size, t[A_PLANE], t[PITCH], t[N_W], (run * size + _VECTOR - 1) // _VECTOR, acc,
            )  # fmt: skip
        target += down * across * t[PITCH] * size
        line += down


@separate
def _store_tiles(table, scalars, group, k, l0, l1, part, sums, bias, panel, stage, z, y, acc, z_like, out):
    """Transform one panel's sums of some rows of tiles back, finish and store the pixels."""
    t, f = pointer(table, 0), pointer(scalars, 0.0)
    size, width, q0 = size_of(acc), t[WIDTH], part * t[TASK_COLUMNS]
    across = min(t[TASK_COLUMNS], t[TILES_W] - q0)
    pixels = min(across * t[M_W], t[OUT_W] - q0 * t[M_W])
    valid, channel = min(width, t[FILTERS] - k * width), group * t[FILTERS] + k * width
    code = t[CODE] if t[HAS_Z] == 0 else 0
    low = cast(0, acc) if code == 1 else cast(-math.inf, acc)
    line = l0
    while line < l1:
        image, h = line // t[TILES_H], line % t[TILES_H]
        n, d = image // t[IN_D], image % t[IN_D]
        down = min(t[ROWS], l1 - line, t[TILES_H] - h)
        output_tiles(
            t[CASE], t[TURNED], sums, t[C_PLANE], t[N_W], (t[M_H], t[M_W]), (down, across), width, pixels,
            panel, bias, low, acc,
        )  # fmt: skip
        rows = min(down * t[M_H], t[OUT_H] - h * t[M_H])
        if code > 1:
            activate_panel(panel, rows * pixels * width, code, f[2], acc)
        if t[HAS_Z]:
            at = n * t[ADD_N] + channel * t[ADD_K] + d * t[ADD_D] + h * t[M_H] * t[ADD_H] + q0 * t[M_W] * t[ADD_W]
            add_panel(panel, width, rows, pixels, z, at, (t[ADD_K], t[ADD_H], t[ADD_W]), valid, f[1], z_like, acc)
            activate_panel(panel, rows * pixels * width, t[CODE], f[2], acc)
        at = n * t[DST_N] + channel * t[DST_K] + d * t[DST_D] + h * t[M_H] * t[DST_H] + q0 * t[M_W] * t[DST_W]
        store_panel(panel, width, rows, pixels, y, at, (t[DST_K], t[DST_H], t[DST_W]), valid, stage, out, acc)
        sums += down * across * width * size
        line += down


@kernel
def _prepare(task, slot, table, scalars, w, bias, filters, biases, scratch, like, bias_like, acc):
    """Transform some channels of one panel of filters; the first task of a panel spreads its bias."""
    t, f = pointer(table, 0), pointer(scalars, 0.0)
    size = size_of(acc)
    blocks = (t[CHANNELS] + t[FILTER_BLOCK] - 1) // t[FILTER_BLOCK]
    panel, c0 = task // blocks, task % blocks * t[FILTER_BLOCK]
    group, k = panel // t[PANELS], panel % t[PANELS]
    to = filters + (panel * t[N_H] * t[N_W] * t[B_PLANE] + c0 * t[WIDTH]) * size
    run = min(t[FILTER_BLOCK], t[CHANNELS] - c0)
    _filters(table, w, group, k, c0, run, scratch + slot * t[SLOT] * size, to, f[0], like, acc)
    if c0 == 0:
        _spread_bias(table, bias, group, k, biases + panel * t[WIDTH] * size, bias_like, acc)


@kernel
def _by_tiles(task, slot, table, scalars, src, filters, biases, z, y, scratch, like, acc, z_like, out):
    """Some rows of tiles, or parts of rows; some panels of filters, transformed before."""
    t = pointer(table, 0)
    size, width, points = size_of(acc), t[WIDTH], t[N_H] * t[N_W]
    slab = scratch + slot * t[SLOT] * size
    tiles = slab + t[SLAB] * size
    sums = tiles + t[LOCAL] * size
    panel = sums + t[SUMS] * size
    stage = panel + t[PANEL] * size
    split, rest = task % t[SPLITS], task // t[SPLITS]
    part, rest = rest % t[COLUMN_PARTS], rest // t[COLUMN_PARTS]
    l0, group = rest % t[BLOCKS] * t[TASK_LINES], rest // t[BLOCKS]
    l1 = min(l0 + t[TASK_LINES], t[LINES])
    _load_tiles(table, src, group, l0, l1, part, 0, t[CHANNELS], slab, stage, tiles, like, acc)
    count = (l1 - l0) * min(t[TASK_COLUMNS], t[TILES_W] - part * t[TASK_COLUMNS])
    last = t[PANELS] * (split + 1) // t[SPLITS]
    for first in range(t[PANELS] * split // t[SPLITS], last, t[TOGETHER]):
        end = min(first + t[TOGETHER], last)
        for k in range(first, end):
            b = filters + (group * t[PANELS] + k) * points * t[B_PLANE] * size
            c = sums + (k - first) * points * t[C_PLANE] * size
            products(
                points, count, t[CHANNELS], width, tiles, t[A_PLANE], t[PITCH], b, t[B_PLANE], c, t[C_PLANE],
                table + TAPS * 8, 0, acc,
            )  # fmt: skip
        for k in range(first, end):
            c = sums + (k - first) * points * t[C_PLANE] * size
            bias = biases + (group * t[PANELS] + k) * width * size
            _store_tiles(table, scalars, group, k, l0, l1, part, c, bias, panel, stage, z, y, acc, z_like, out)


@kernel
def _share_tiles(task, slot, table, src, tiles, group, l0, l1, part, scratch, like, acc):
    """One block of channels of some of a chunk's rows of tiles, for all threads: ``[block][point][tile][channel]``."""
    t = pointer(table, 0)
    size, blocks = size_of(acc), (t[CHANNELS] + t[PITCH] - 1) // t[PITCH]
    block, first = task % blocks, l0 + task // blocks * t[ROWS]
    slab = scratch + slot * t[SLOT] * size
    stage = slab + (t[SLOT] - t[STAGE]) * size
    across = min(t[TASK_COLUMNS], t[TILES_W] - part * t[TASK_COLUMNS])
    to = tiles + (block * t[N_H] * t[N_W] * t[A_PLANE] + (first - l0) * across * t[PITCH]) * size
    c0, end = block * t[PITCH], min(first + t[ROWS], l1)
    c1 = min(c0 + t[PITCH], t[CHANNELS])
    _load_tiles(table, src, group, first, end, part, c0, c1, slab, stage, to, like, acc)


@kernel
def _by_panels(
    task, slot, table, scalars, w, bias, tiles, z, y, group, l0, l1, part, scratch, like, bias_like, acc, z_like, out
):
    """One panel of filters, transformed block by block of channels, for all tiles of a chunk."""
    t, f = pointer(table, 0), pointer(scalars, 0.0)
    size, width, points = size_of(acc), t[WIDTH], t[N_H] * t[N_W]
    packed = scratch + slot * t[SLOT] * size
    filters = packed + t[SLAB] * size
    sums = filters + t[LOCAL] * size
    panel = sums + t[SUMS] * size
    stage = panel + t[PANEL] * size
    count = (l1 - l0) * min(t[TASK_COLUMNS], t[TILES_W] - part * t[TASK_COLUMNS])
    for c0 in range(0, t[CHANNELS], t[PITCH]):
        run = min(t[PITCH], t[CHANNELS] - c0)
        for c in range(0, run, t[FILTER_BLOCK]):
            some, to = min(t[FILTER_BLOCK], run - c), filters + c * width * size
            _filters(table, w, group, task, c0 + c, some, packed, to, f[0], like, acc)
        a = tiles + c0 // t[PITCH] * points * t[A_PLANE] * size
        products(
            points, count, run, width, a, t[A_PLANE], t[PITCH], filters, t[B_PLANE], sums, t[C_PLANE],
            table + TAPS * 8, ADD if c0 else 0, acc,
        )  # fmt: skip
    _spread_bias(table, bias, group, task, packed, bias_like, acc)
    _store_tiles(table, scalars, group, task, l0, l1, part, sums, packed, panel, stage, z, y, acc, z_like, out)


@kernel
def _convolve(table, scalars, src, w, bias, z, y, scratch, threads, like, bias_like, acc, z_like, out):
    """Filters, then tiles; or chunk by chunk tiles, then filters. `bias` and `z` are 0 where there is none."""
    t = pointer(table, 0)
    shared = (scratch + ALIGN - 1) // ALIGN * ALIGN
    biases = shared + t[SHARED] * size_of(acc)
    rest = biases + t[BIASES] * size_of(acc)
    if t[CHUNKS] == 0:
        blocks = t[GROUPS] * t[PANELS] * ((t[CHANNELS] + t[FILTER_BLOCK] - 1) // t[FILTER_BLOCK])
        arguments = (table, scalars, w, bias, shared, biases, rest, like, bias_like, acc)
        nb.launch_tasks(_prepare, blocks, threads, arguments)
        nb.launch_tasks(
            _by_tiles, t[TASKS], threads, (table, scalars, src, shared, biases, z, y, rest, like, acc, z_like, out)
        )
        return
    for chunk in range(t[CHUNKS]):
        part, rest_of = chunk % t[COLUMN_PARTS], chunk // t[COLUMN_PARTS]
        l0, group = rest_of % t[BLOCKS] * t[TASK_LINES], rest_of // t[BLOCKS]
        l1 = min(l0 + t[TASK_LINES], t[LINES])
        blocks = (t[CHANNELS] + t[PITCH] - 1) // t[PITCH] * ((l1 - l0 + t[ROWS] - 1) // t[ROWS])
        nb.launch_tasks(
            _share_tiles, blocks, threads, (table, src, shared, group, l0, l1, part, rest, like, acc)
        )  # fmt: skip
        nb.launch_tasks(
            _by_panels, t[PANELS], threads,
            (table, scalars, w, bias, shared, z, y, group, l0, l1, part, rest, like, bias_like, acc, z_like, out),
        )  # fmt: skip


class _Plan:
    """Everything about one problem and tile that does not change from call to call, down to the kernel's table."""

    def __init__(self, problem, tile: int):
        g = Geometry.of(problem)
        self.forward = forward = problem.op.name == "conv_fprop"
        source, target = (g.x, g.y) if forward else (g.y, g.x)
        self.acc = "f64" if "f64" in (source.dtype, target.dtype) else "f32"
        self.itemsize = 8 if self.acc == "f64" else 4
        self.sides = sides(g, tile)
        self.groups = g.G
        inner, outer = g.C // g.G, g.K // g.G
        self.channels, self.filters = (inner, outer) if forward else (outer, inner)
        self.sizes, self.out = (g.in_size, g.out_size) if forward else (g.out_size, g.in_size)
        self.images = g.N * self.out[0]
        self.processors = nb.worthwhile(problem.flops / 2, problem.target.processors)
        self._block()
        self._tabulate(problem, g)

    def _block(self) -> None:
        """Choose the panels' width, and the rows and columns of tiles, the channels and the panels taken at once."""
        lane = lanes(self.itemsize)
        (self.m_h, r_h), (self.m_w, r_w) = self.sides
        self.n_h, self.n_w = self.m_h + r_h - 1, self.m_w + r_w - 1
        self.points = self.n_h * self.n_w
        vectors = -(-self.filters // lane)
        self.width = lane if vectors == 1 or (vectors % 2 and vectors < 8) else 2 * lane
        self.panels = -(-self.filters // self.width)
        self.tiles_h, self.tiles_w = -(-self.out[1] // self.m_h), -(-self.out[2] // self.m_w)
        self.lines = self.images * self.tiles_h
        total = self.lines * self.tiles_w
        point = self.points * self.itemsize
        filter_bytes = point * self.channels * self.panels * self.width
        many = filter_bytes > FILTER_BYTES or filter_bytes * self.groups > SHARED_BYTES
        self.by_panels = many and self.panels >= 2 * self.processors
        if self.by_panels:
            self.pitch = even_parts(self.channels, CHANNELS_AT_ONCE, lane)
            most = max(LEAST, CHUNK_BYTES // (point * self.width))
        else:
            self.pitch = -(-self.channels // lane) * lane
            if self.pitch * self.itemsize % 2048 == 0:
                self.pitch += lane  # the rows of a register tile would fall on each other in the first-level cache
            most = max(LEAST, TILE_BYTES // (point * self.pitch))
            wanted = 3 * self.processors if self.processors > 1 else 1
            most = max(min(most, -(-total * self.groups // wanted)), min(LEAST, total))
        self.columns = even_parts(self.tiles_w, most)
        self.column_parts = -(-self.tiles_w // self.columns)
        self.task_lines = even_parts(self.lines, max(most // self.columns, 1))
        self.blocks = -(-self.lines // self.task_lines)
        pieces = self.groups * self.blocks * self.column_parts
        self.chunks = pieces if self.by_panels else 0
        self.splits = max(1, min(self.panels, -(-self.processors // pieces)))
        self.tasks = pieces * self.splits
        self.tiles = self.task_lines * self.columns
        self.a_plane = aligned(self.tiles * self.pitch, self.itemsize)
        self.a_plane += lane if self.a_plane // lane % 2 == 0 else 0
        self.c_plane = self.tiles * self.width + lane
        self.b_plane = (self.pitch if self.by_panels else self.channels) * self.width + lane
        self.together = 1 if self.by_panels else max(1, SUM_BYTES // (point * self.c_plane))

        def slab(rows, channels):
            pixels = (rows * self.m_h + r_h - 1) * (self.columns * self.m_w + r_w - 1)
            return (pixels * channels + lane) * self.itemsize

        self.c_block = min(self.channels, self.pitch, 64)
        self.rows = min(self.task_lines, self.tiles_h)
        while self.rows > 1 and slab(self.rows, self.c_block) > SLAB_BYTES:
            self.rows = -(-self.rows // 2)
        while self.c_block > lane and slab(self.rows, self.c_block) > SLAB_BYTES:
            self.c_block = -(-self.c_block // 2 // lane) * lane
        self.filter_block = min(self.channels, 2 * lane)
        packed = r_h * r_w * self.filter_block * self.width
        self.slab = aligned(max(slab(self.rows, self.c_block) // self.itemsize, packed), self.itemsize)
        self.panel = aligned((self.rows * self.m_h * self.columns * self.m_w + lane) * self.width, self.itemsize)

    def _tabulate(self, problem, g: Geometry) -> None:
        source, target = (g.x_strides, g.y_strides) if self.forward else (g.y_strides, g.x_strides)
        w_k, w_c, _, w_h, w_w = g.w_strides
        (_, r_h), (_, r_w) = self.sides
        taps = [(i, j) for i in range(r_h) for j in range(r_w)]
        if not self.forward:
            taps.reverse()
        low = g.pad[1:] if self.forward else (r_h - 1 - g.pad[1], r_w - 1 - g.pad[2])
        z, bias = problem.tensors.get("z"), problem.tensors.get("bias")
        add = (*z.strides[:2], *(0,) * (5 - z.ndim), *z.strides[2:]) if z else (0,) * 5
        turned = self.sides not in CASES
        case = CASES.index(self.sides[::-1] if turned else self.sides)
        tile_blocks = -(-self.channels // self.pitch) if self.by_panels else 1
        tiles = aligned(tile_blocks * self.points * self.a_plane + lanes(self.itemsize), self.itemsize)
        panels = 1 if self.by_panels else self.groups * self.panels
        filters = aligned(panels * self.points * self.b_plane, self.itemsize)
        self.shared, local = (tiles, filters) if self.by_panels else (filters, tiles)
        self.biases = aligned(panels * self.width, self.itemsize)
        sums, stage = (
            aligned(n, self.itemsize) for n in (self.together * self.points * self.c_plane, staging_elements())
        )
        self.slot = self.slab + local + sums + self.panel + stage
        epilogue = problem.epilogue
        values = [
            self.groups, self.channels, self.filters, *self.sizes, *source, *self.out[1:], *target, *add,
            int(z is not None), nb.ACTIVATIONS[epilogue.activation],
            w_k * (g.K // g.G), *((w_k, w_c) if self.forward else (w_c, w_k)), bias.strides[0] if bias else 0,
            *low, case, int(turned), self.m_h, self.m_w, self.n_h, self.n_w, r_h, r_w,
            self.tiles_h, self.tiles_w, self.lines, self.blocks, self.task_lines, self.column_parts, self.columns,
            self.splits, self.tasks, self.chunks, self.rows, self.c_block, self.width, self.panels, self.together,
            self.pitch, self.a_plane, self.b_plane, self.c_plane, self.filter_block, self.slab, local, sums, self.panel,
            stage, self.slot, self.shared, self.biases,
        ]  # fmt: skip
        assert len(values) == TAPS
        values += [0, *(i * w_h + j * w_w for i, j in taps)]
        self.table = torch.tensor(values, dtype=torch.int64)
        self.scalars = torch.tensor([epilogue.alpha, epilogue.beta, epilogue.parameter], dtype=torch.float64)

    @property
    def workspace(self) -> int:
        elements = self.shared + self.biases + self.processors * self.slot
        return ALIGN + elements * self.itemsize


_plan = functools.lru_cache(maxsize=256)(_Plan)


class Winograd(Engine):
    """Fused Winograd convolution: forward and data gradient."""

    name = "conv.winograd"
    operations = ("conv_fprop", "conv_dgrad")
    targets = ("cpu",)
    notes = frozenset({"winograd", "runtime_compilation", "spreads"})

    def refusals(self, problem):
        g = Geometry.of(problem)
        r = unsuited(problem, g)
        if not r:
            terms = self._terms(problem, g)
            right = any(fits(problem, g, tile, terms) for tile in tile_sizes(g))
            r.require(right, "a sum whose own error is above that of the transforms", f"{terms} channels")
        return r

    def _terms(self, problem, g: Geometry) -> int:
        return (g.C if problem.op.name == "conv_fprop" else g.K) // g.G

    def configs(self, problem):
        g = Geometry.of(problem)
        terms = self._terms(problem, g)
        found = [{"tile": tile} for tile in tile_sizes(g) if fits(problem, g, tile, terms)]
        return sorted(found, key=lambda config: self.cost(problem, config))

    def workspace_size(self, problem, config):
        return _plan(problem, config["tile"]).workspace

    def cost(self, problem, config):
        plan = _plan(problem, config["tile"])
        filters = plan.groups * plan.channels * plan.panels * plan.width * plan.points
        tiles = plan.lines * plan.tiles_w * plan.groups * plan.points
        product = 2.0 * tiles * plan.channels * plan.panels * plan.width
        lane = lanes(plan.itemsize)
        inputs = tiles * -(-plan.channels // lane) * lane * plan.splits
        moved = weight(plan.points) * (IN * inputs + OUT * tiles * plan.panels * plan.width)
        if plan.by_panels:
            moved += MAKE * filters * (plan.chunks // plan.groups)
        else:
            moved += (MAKE + READ * (plan.tasks // plan.splits // plan.groups)) * filters
        return seconds(problem, plan, product, moved, 2 * max(plan.chunks, 1))

    def build(self, problem, config):
        plan = _plan(problem, config["tile"])
        return convolving(problem, _convolve, plan.table, plan.scalars, plan.acc, plan.processors)
