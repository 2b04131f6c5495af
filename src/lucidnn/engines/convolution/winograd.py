"""Winograd's minimal filtering on a CPU: forward and data gradient of unit-stride filters, fused from end to end.

Method. ``Y = A' [(G g G') * (B' d B)] A`` for tiles of m x m outputs (`lucidnn.engines._winograd`): the r x r filter
costs (m + r - 1)^2 products a tile and channel instead of m^2 r^2, for 3 x 3 filters 4 times fewer with m = 4. The
filters are transformed once a call. Then each task takes some rows of tiles: it copies their pixels into a slab of its
thread's scratch memory (any layout and type, zero-padded), transforms them to ``[point][tile][channel]``, multiplies
point by point with the register tile of `lucidnn.engines._numba.microkernel`, transforms the sums back with the bias
added, and finishes and stores the pixels, panel of filters by panel. One parallel region, nothing of it in memory.

The data gradient is the same with filters turned by half a turn, channels and filters exchanged, and
``r - 1 - padding`` for the padding. Filters along one axis (1x3, 3x1, 1-D, 1x7, ...) are transformed along that axis
alone. The third spatial axis takes filters of size 1, as if it were part of the batch.

Cost. The products at 90 % of the machine's rate, transforms of 10 to 20 % of that, and the transformed filters, which
are (m + r - 1)^2 / r^2 times as large as the filters: few pixels do not pay for them.

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

from ...core.engine import Engine, Refusals
from ...core.heuristics import LAUNCH
from ...ops.convolution import Geometry
from .. import _numba as nb
from .._numba.blocks import ALIGN, TYPES, aligned, even_parts
from .._numba.jit import kernel
from .._numba.memory import cast, load, pointer, size_of
from .._numba.microkernel import lanes
from .._numba.packing import activate_panel, add_panel, pack_filters, pack_slab, staging_elements, store_panel
from .._numba.winograd import CASES, fits, input_tiles, output_tiles, products, sides, tile_sizes, transform_filters

TILE_BYTES = 512 << 10  # transformed tiles of a task
SUM_BYTES = 320 << 10  # and the sums of the panels that are multiplied before any is transformed back
LEAST = 28  # tiles of a task, where there are so many: each reads all transformed filters
SLAB_BYTES = 192 << 10
_VECTOR = lanes(1)  # bytes

# The integers that the kernels read, in this order; the taps' offsets in w follow.
(
    GROUPS, CHANNELS, FILTERS, IN_D, IN_H, IN_W, SRC_N, SRC_C, SRC_D, SRC_H, SRC_W, OUT_H, OUT_W,
    DST_N, DST_K, DST_D, DST_H, DST_W, ADD_N, ADD_K, ADD_D, ADD_H, ADD_W, HAS_Z, CODE,
    W_GROUP, W_K, W_C, BIAS_STRIDE, LOW_H, LOW_W, CASE, TURNED, M_H, M_W, N_H, N_W, R_H, R_W,
    TILES_H, LINES, BLOCK, TASK_LINES, COLUMN_PARTS, TASK_COLUMNS, TILES_W, SPLITS, TASKS, ROWS, C_BLOCK,
    WIDTH, PANELS, TOGETHER, PITCH, A_PLANE, B_PLANE, C_PLANE, FILTER_BLOCK, SLAB, TILES, SUMS, PANEL, SLOT,
    B_ELEMENTS, BIASES, TAPS,
) = range(66)  # fmt: skip


@kernel
def _prepare(task, slot, table, scalars, w, bias, filters, biases, scratch, like, bias_like, acc):
    """Pack and transform some channels of one panel of filters; the first task of a panel spreads its bias."""
    t, f = pointer(table, 0), pointer(scalars, 0.0)
    size, width, taps = size_of(acc), t[WIDTH], t[R_H] * t[R_W]
    blocks = (t[CHANNELS] + t[FILTER_BLOCK] - 1) // t[FILTER_BLOCK]
    panel, block = task // blocks, task % blocks
    group, k0, c0 = panel // t[PANELS], panel % t[PANELS] * width, block * t[FILTER_BLOCK]
    run = min(t[FILTER_BLOCK], t[CHANNELS] - c0)
    packed = scratch + slot * t[SLOT] * size
    from_ = w + (group * t[W_GROUP] + k0 * t[W_K] + c0 * t[W_C]) * size_of(like)
    sizes, strides = (t[FILTERS] - k0, run, run, taps), (t[W_K], t[W_C])
    pack_filters(0, 1, from_, packed, sizes, strides, 1, width, table + TAPS * 8 + 8, like, acc)
    to = filters + (panel * t[N_H] * t[N_W] * t[B_PLANE] + c0 * width) * size
    strides = (t[R_W] * run * width, run * width)
    vectors, alpha = run * width * size // _VECTOR, cast(f[0], acc)
    transform_filters(t[CASE], t[TURNED], packed, strides, to, t[B_PLANE], t[N_W], vectors, alpha, acc)
    if block == 0:
        b, target = pointer(bias, bias_like), pointer(biases, acc)
        for k in range(width):
            if bias != 0 and k0 + k < t[FILTERS]:
                value = cast(load(b, (group * t[FILTERS] + k0 + k) * t[BIAS_STRIDE]), acc)
            else:
                value = cast(0, acc)
            target[panel * width + k] = value


@kernel
def _task(task, slot, table, scalars, src, filters, biases, z, y, scratch, like, acc, z_like, out):
    """Some rows of tiles, or parts of rows; some panels of filters."""
    t, f = pointer(table, 0), pointer(scalars, 0.0)
    size, width, points = size_of(acc), t[WIDTH], t[N_H] * t[N_W]
    slab = scratch + slot * t[SLOT] * size
    tiles = slab + t[SLAB] * size
    sums = tiles + t[TILES] * size
    panel = sums + t[SUMS] * size
    stage = panel + t[PANEL] * size
    split, rest = task % t[SPLITS], task // t[SPLITS]
    part, rest = rest % t[COLUMN_PARTS], rest // t[COLUMN_PARTS]
    l0 = rest % t[BLOCK] * t[TASK_LINES]
    group = rest // t[BLOCK]
    l1 = min(l0 + t[TASK_LINES], t[LINES])
    q0 = part * t[TASK_COLUMNS]
    across = min(t[TASK_COLUMNS], t[TILES_W] - q0)
    steps = (t[M_H], t[M_W])
    columns = across * t[M_W] + t[R_W] - 1

    line = l0
    while line < l1:
        image, h = line // t[TILES_H], line % t[TILES_H]
        down = min(t[ROWS], l1 - line, t[TILES_H] - h)
        base = image // t[IN_D] * t[SRC_N] + group * t[CHANNELS] * t[SRC_C]
        origin = (image % t[IN_D], h * t[M_H] - t[LOW_H], q0 * t[M_W] - t[LOW_W])
        counts = (1, down * t[M_H] + t[R_H] - 1, columns)
        for c0 in range(0, t[CHANNELS], t[C_BLOCK]):
            run = min(t[C_BLOCK], t[CHANNELS] - c0)
            pack_slab(
                src, base + c0 * t[SRC_C], (t[IN_D], t[IN_H], t[IN_W]), (t[SRC_C], t[SRC_D], t[SRC_H], t[SRC_W]),
                origin, counts, run, slab, stage, like, acc,
            )  # fmt: skip
            to = tiles + ((line - l0) * across * t[PITCH] + c0) * size
            vectors = (run * size + _VECTOR - 1) // _VECTOR
            input_tiles(
                t[CASE], t[TURNED], slab, (columns * run, run), steps, (down, across),
                to, t[A_PLANE], t[PITCH], t[N_W], vectors, acc,
            )  # fmt: skip
        line += down

    count = (l1 - l0) * across
    last = t[PANELS] * (split + 1) // t[SPLITS]
    code = t[CODE] if t[HAS_Z] == 0 else 0
    low = cast(0, acc) if code == 1 else cast(-math.inf, acc)
    for first in range(t[PANELS] * split // t[SPLITS], last, t[TOGETHER]):
        end = min(first + t[TOGETHER], last)
        for k in range(first, end):
            b = filters + (group * t[PANELS] + k) * points * t[B_PLANE] * size
            c = sums + (k - first) * points * t[C_PLANE] * size
            products(
                points, count, t[CHANNELS], width, tiles, t[A_PLANE], t[PITCH], b, t[B_PLANE], c, t[C_PLANE],
                table + TAPS * 8, acc,
            )  # fmt: skip
        for k in range(first, end):
            c = sums + (k - first) * points * t[C_PLANE] * size
            bias = biases + (group * t[PANELS] + k) * width * size
            valid = min(width, t[FILTERS] - k * width)
            channel = group * t[FILTERS] + k * width
            pixels = min(across * t[M_W], t[OUT_W] - q0 * t[M_W])
            line = l0
            while line < l1:
                image, h = line // t[TILES_H], line % t[TILES_H]
                down = min(t[ROWS], l1 - line, t[TILES_H] - h)
                here = c + (line - l0) * across * width * size
                output_tiles(
                    t[CASE], t[TURNED], here, t[C_PLANE], t[N_W], steps, (down, across), width, pixels,
                    panel, bias, low, acc,
                )  # fmt: skip
                rows = min(down * t[M_H], t[OUT_H] - h * t[M_H])
                if code > 1:
                    activate_panel(panel, rows * pixels * width, code, f[2], acc)
                n, d = image // t[IN_D], image % t[IN_D]
                if t[HAS_Z]:
                    at = n * t[ADD_N] + channel * t[ADD_K] + d * t[ADD_D]
                    at += h * t[M_H] * t[ADD_H] + q0 * t[M_W] * t[ADD_W]
                    strides = (t[ADD_K], t[ADD_H], t[ADD_W])
                    add_panel(panel, width, rows, pixels, z, at, strides, valid, f[1], z_like, acc)
                    activate_panel(panel, rows * pixels * width, t[CODE], f[2], acc)
                at = n * t[DST_N] + channel * t[DST_K] + d * t[DST_D]
                at += h * t[M_H] * t[DST_H] + q0 * t[M_W] * t[DST_W]
                store_panel(
                    panel, width, rows, pixels, y, at, (t[DST_K], t[DST_H], t[DST_W]), valid, stage, out, acc
                )  # fmt: skip
                line += down


@kernel
def _convolve(table, scalars, src, w, bias, z, y, scratch, threads, like, bias_like, acc, z_like, out):
    """Transform the filters, then run the tasks. `bias` and `z` are 0 where there is none."""
    t = pointer(table, 0)
    filters = (scratch + ALIGN - 1) // ALIGN * ALIGN
    biases = filters + t[B_ELEMENTS] * size_of(acc)
    rest = biases + t[BIASES] * size_of(acc)
    blocks = t[GROUPS] * t[PANELS] * ((t[CHANNELS] + t[FILTER_BLOCK] - 1) // t[FILTER_BLOCK])
    arguments = (table, scalars, w, bias, filters, biases, rest, like, bias_like, acc)
    nb.launch_tasks(_prepare, blocks, threads, arguments)
    nb.launch_tasks(
        _task, t[TASKS], threads, (table, scalars, src, filters, biases, z, y, rest, like, acc, z_like, out)
    )


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
        self.pitch = -(-self.channels // lane) * lane
        if self.pitch * self.itemsize % 2048 == 0:
            self.pitch += lane  # the rows of a register tile would fall on each other in the first-level cache
        self.tiles_h, self.tiles_w = -(-self.out[1] // self.m_h), -(-self.out[2] // self.m_w)
        self.lines = self.images * self.tiles_h
        total = self.lines * self.tiles_w
        most = max(LEAST, TILE_BYTES // (self.points * self.pitch * self.itemsize))
        wanted = 3 * self.processors if self.processors > 1 else 1
        most = max(min(most, -(-total * self.groups // wanted)), min(LEAST, total))
        self.columns = even_parts(self.tiles_w, most)
        self.column_parts = -(-self.tiles_w // self.columns)
        self.task_lines = even_parts(self.lines, max(most // self.columns, 1))
        self.blocks = -(-self.lines // self.task_lines)
        tasks = self.groups * self.blocks * self.column_parts
        self.splits = max(1, min(self.panels, -(-self.processors // tasks)))
        self.tasks = tasks * self.splits
        self.tiles = self.task_lines * self.columns
        self.a_plane = aligned(self.tiles * self.pitch, self.itemsize)
        self.a_plane += lane if self.a_plane // lane % 2 == 0 else 0
        self.c_plane = self.tiles * self.width + lane
        self.b_plane = self.channels * self.width + lane
        self.together = max(1, SUM_BYTES // (self.points * self.c_plane * self.itemsize))

        def slab(rows, channels):
            pixels = (rows * self.m_h + r_h - 1) * (self.columns * self.m_w + r_w - 1)
            return pixels * channels + lane

        self.c_block = min(self.channels, 64)
        self.rows = min(self.task_lines, self.tiles_h)
        while self.rows > 1 and slab(self.rows, self.c_block) * self.itemsize > SLAB_BYTES:
            self.rows = -(-self.rows // 2)
        while self.c_block > lane and slab(self.rows, self.c_block) * self.itemsize > SLAB_BYTES:
            self.c_block = -(-self.c_block // 2 // lane) * lane
        self.filter_block = min(self.channels, 2 * lane)
        packed = r_h * r_w * self.filter_block * self.width
        self.slab = aligned(max(slab(self.rows, self.c_block), packed), self.itemsize)
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
        self.tile_elements = aligned(self.points * self.a_plane + lanes(self.itemsize), self.itemsize)
        self.sum_elements = aligned(self.together * self.points * self.c_plane, self.itemsize)
        self.filter_elements = aligned(self.groups * self.panels * self.points * self.b_plane, self.itemsize)
        self.bias_elements = aligned(self.groups * self.panels * self.width, self.itemsize)
        self.slot = self.slab + self.tile_elements + self.sum_elements + self.panel
        self.slot += aligned(staging_elements(), self.itemsize)
        epilogue = problem.epilogue
        values = [
            self.groups, self.channels, self.filters, *self.sizes, *source, *self.out[1:], *target, *add,
            int(z is not None), nb.ACTIVATIONS[epilogue.activation],
            w_k * (g.K // g.G), *((w_k, w_c) if self.forward else (w_c, w_k)), bias.strides[0] if bias else 0,
            *low, case, int(turned), self.m_h, self.m_w, self.n_h, self.n_w, r_h, r_w,
            self.tiles_h, self.lines, self.blocks, self.task_lines, self.column_parts, self.columns, self.tiles_w,
            self.splits, self.tasks, self.rows, self.c_block, self.width, self.panels, self.together, self.pitch,
            self.a_plane, self.b_plane, self.c_plane, self.filter_block, self.slab, self.tile_elements,
            self.sum_elements, self.panel, self.slot, self.filter_elements, self.bias_elements,
        ]  # fmt: skip
        assert len(values) == TAPS
        values += [0, *(i * w_h + j * w_w for i, j in taps)]
        self.table = torch.tensor(values, dtype=torch.int64)
        self.scalars = torch.tensor([epilogue.alpha, epilogue.beta, epilogue.parameter], dtype=torch.float64)

    @property
    def workspace(self) -> int:
        elements = self.filter_elements + self.bias_elements + self.processors * self.slot
        return ALIGN + elements * self.itemsize


_plan = functools.lru_cache(maxsize=256)(_Plan)


class Winograd(Engine):
    """Fused Winograd convolution: forward and data gradient."""

    name = "conv.winograd"
    operations = ("conv_fprop", "conv_dgrad")
    targets = ("cpu",)
    notes = frozenset({"winograd", "runtime_compilation"})

    def refusals(self, problem):
        r = Refusals()
        r.require_tensors(problem.items, TYPES, elements=True)
        g = Geometry.of(problem)
        r.require(set(g.stride) == {1}, "stride = 1", list(problem.op.stride))
        r.require(set(g.dilation) == {1}, "dilation = 1", list(problem.op.dilation))
        r.require(
            g.filter[0] == 1 and g.pad[0] == g.pad_after[0] == 0, "a first of three axes without filter", g.filter
        )
        tiles = tile_sizes(g)
        r.require(bool(tiles), "filters of 3 or 5 points along one or both axes, or 7 along one", g.filter[1:])
        if tiles and not r:
            terms = self._terms(problem, g)
            right = any(fits(problem, g, tile, terms) for tile in tiles)
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
        rate = problem.target.flops(plan.acc)
        tiles = plan.lines * plan.tiles_w * plan.groups
        product = 2.0 * tiles * plan.points * plan.channels * plan.panels * plan.width
        return product / rate / 0.8 + 2 * LAUNCH["cpu"]

    def build(self, problem, config):
        plan = _plan(problem, config["tile"])
        roles = problem.inputs
        like, acc = nb.token(problem[roles[0]].dtype), nb.token(plan.acc)
        out = nb.token(problem[problem.outputs[0]].dtype)
        bias_like = nb.token(problem["bias"].dtype) if "bias" in roles else acc
        bias_at = roles.index("bias") if "bias" in roles else None
        z_at = roles.index("z") if "z" in roles else None
        z_like = nb.token(problem["z"].dtype) if "z" in roles else out
        table, scalars, processors, threads = plan.table, plan.scalars, plan.processors, nb.threads
        table_at, scalars_at = table.data_ptr(), scalars.data_ptr()

        def run(tensors, workspace, keep=(table, scalars)):
            _convolve(
                table_at,
                scalars_at,
                tensors[0].data_ptr(),
                tensors[1].data_ptr(),
                0 if bias_at is None else tensors[bias_at].data_ptr(),
                0 if z_at is None else tensors[z_at].data_ptr(),
                tensors[-1].data_ptr(),
                workspace.data_ptr(),
                min(threads(), processors),
                like,
                bias_like,
                acc,
                z_like,
                out,
            )

        return run
