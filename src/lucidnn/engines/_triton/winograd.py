"""Winograd's transforms on a GPU: pixels or filters to points, points to finished pixels.

Along an axis a tile of m results needs n = m + r - 1 pixels; `lucidnn.engines._winograd` has the matrices. An axis
along which filters have one tap is not transformed (m = r = n = 1). `winograd_points` reads windows of any tensor of
four axes and writes, for each of the n x n points, a matrix of (tile, channel); filters are images of one tile there.
After the products `winograd_pixels` takes such matrices back and finishes. Coefficients are constants of the kernels:
those that are 0, 1 or -1 cost no multiplication. Values of a tile are tuples of registers, a thread holds whole tiles.

The data gradient is a forward convolution of dy with filters turned around, r - 1 - padding in front. The filter
gradient has the windows of x and the tiles of dy for its operands and the r x r filter for its only tile of results.
"""

import dataclasses
import functools
import math

import triton
import triton.language as tl

from ...core.engine import Refusals
from ...core.problem import Problem
from ...ops.convolution import Geometry
from .._winograd import Matrix, relative_error, transforms
from .index import INT32
from .launch import Argument, Launch, Slice
from .result import places, store_pixels
from .tf32 import rounded

SIZES = {"f64": 8, "f32": 4}
TYPES = ("f64", "f32", "f16", "bf16")


@triton.jit
def combined(values, MATRIX: tl.constexpr, ROW: tl.constexpr, FIRST: tl.constexpr, STEP: tl.constexpr):
    """A row of the matrix times every `STEP`-th of the values, from the `FIRST` on."""
    total = values[FIRST] * MATRIX[ROW][0]
    for k in tl.static_range(1, len(MATRIX[ROW])):
        if MATRIX[ROW][k] == 1.0:
            total += values[FIRST + k * STEP]
        elif MATRIX[ROW][k] == -1.0:
            total -= values[FIRST + k * STEP]
        elif MATRIX[ROW][k] != 0.0:
            total += values[FIRST + k * STEP] * MATRIX[ROW][k]
    return total


@triton.jit
def window(
    src, base, ok, h0, w0, H, W, h_stride, w_stride, MATRIX_H: tl.constexpr, MATRIX_W: tl.constexpr, ACC: tl.constexpr
):
    """The points of tiles whose windows begin at (h0, w0): a tuple, row by row."""
    PH: tl.constexpr = len(MATRIX_H[0])
    NH: tl.constexpr = len(MATRIX_H)
    half = ()
    for b in tl.static_range(len(MATRIX_W[0])):
        column = ()
        ok_w = (w0 + b >= 0) & (w0 + b < W)
        for a in tl.static_range(PH):
            inside = ok & (ok_w & (h0 + a >= 0) & (h0 + a < H))[:, None]
            column = column + (tl.load(src + (base + (a * h_stride + b * w_stride)), mask=inside, other=0.0).to(ACC),)
        for i in tl.static_range(NH):
            half = half + (combined(column, MATRIX_H, i, 0, 1),)
    points = ()
    for i in tl.static_range(NH):
        for j in tl.static_range(len(MATRIX_W)):
            points = points + (combined(half, MATRIX_W, j, i, NH),)
    return points


@triton.jit
def tile_place(row, TILES_H, TILES_W):
    """Image and tile of a row of the matrices."""
    w = row % TILES_W
    rest = row // TILES_W
    return rest // TILES_H, rest % TILES_H, w


@triton.jit
def winograd_points(
    src, dst, ROWS, CHANNELS, TILES_H, TILES_W, H, W, start_h, start_w, GROUP,
    src_n_stride, src_c_stride, src_h_stride, src_w_stride,
    dst_point_stride, dst_group_stride, dst_row_stride, dst_c_stride,
    MATRIX_H: tl.constexpr, MATRIX_W: tl.constexpr, STEP_H: tl.constexpr, STEP_W: tl.constexpr,
    ROUND: tl.constexpr, WIDE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    blocks_n = tl.cdiv(CHANNELS, BLOCK_N)
    tile_m = tl.program_id(0) // blocks_n
    tile_n = tl.program_id(0) % blocks_n
    if WIDE:
        tile_m = tile_m.to(tl.int64)
        tile_n = tile_n.to(tl.int64)
    row = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    c = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    n, h, w = tile_place(row, TILES_H, TILES_W)
    h0 = h * STEP_H + start_h
    w0 = w * STEP_W + start_w
    base = (n * src_n_stride + h0 * src_h_stride + w0 * src_w_stride)[:, None] + (c * src_c_stride)[None, :]
    ok = (row < ROWS)[:, None] & (c < CHANNELS)[None, :]
    points = window(src, base, ok, h0, w0, H, W, src_h_stride, src_w_stride, MATRIX_H, MATRIX_W, dst.dtype.element_ty)
    group = c // GROUP
    to = (row * dst_row_stride)[:, None] + (group * dst_group_stride + (c - group * GROUP) * dst_c_stride)[None, :]
    for point in tl.static_range(len(MATRIX_H) * len(MATRIX_W)):
        value = points[point]
        if ROUND:
            value = rounded(value)
        tl.store(dst + to, value, mask=ok)
        to += dst_point_stride


@triton.jit
def store_tile(
    points, z, bias, dst, alpha, beta, parameter, n, h, w, ok_row, c, ok_c, H, W, bias_stride,
    z_n_stride, z_c_stride, z_d_stride, z_h_stride, z_w_stride,
    dst_n_stride, dst_c_stride, dst_d_stride, dst_h_stride, dst_w_stride,
    MATRIX_H: tl.constexpr, MATRIX_W: tl.constexpr, HAS_D: tl.constexpr, ACT: tl.constexpr,
):  # fmt: skip
    """Transforms points back and stores the tile's pixels, finished."""
    MH: tl.constexpr = len(MATRIX_H)
    MW: tl.constexpr = len(MATRIX_W)
    NW: tl.constexpr = len(MATRIX_W[0])
    half = ()
    for j in tl.static_range(NW):
        for a in tl.static_range(MH):
            half = half + (combined(points, MATRIX_H, a, j, NW),)
    for a in tl.static_range(MH):
        for b in tl.static_range(MW):
            p = h * MH + a
            q = w * MW + b
            store_pixels(
                combined(half, MATRIX_W, b, a, MH), z, bias, dst, alpha, beta, parameter,
                n, 0, p, q, ok_row & (p < H) & (q < W), c, ok_c,
                bias_stride, z_n_stride, z_c_stride, z_d_stride, z_h_stride, z_w_stride,
                dst_n_stride, dst_c_stride, dst_d_stride, dst_h_stride, dst_w_stride, HAS_D, ACT,
            )  # fmt: skip


@triton.jit
def winograd_pixels(
    src, z, bias, dst, alpha, beta, parameter, ROWS, CHANNELS, TILES_H, TILES_W, H, W, GROUP,
    src_point_stride, src_group_stride, src_row_stride, src_c_stride, bias_stride,
    z_n_stride, z_c_stride, z_d_stride, z_h_stride, z_w_stride,
    dst_n_stride, dst_c_stride, dst_d_stride, dst_h_stride, dst_w_stride,
    MATRIX_H: tl.constexpr, MATRIX_W: tl.constexpr, HAS_D: tl.constexpr, ACT: tl.constexpr,
    WIDE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    blocks_n = tl.cdiv(CHANNELS, BLOCK_N)
    tile_m = tl.program_id(0) // blocks_n
    tile_n = tl.program_id(0) % blocks_n
    if WIDE:
        tile_m = tile_m.to(tl.int64)
        tile_n = tile_n.to(tl.int64)
    row = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    c = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    n, h, w = tile_place(row, TILES_H, TILES_W)
    group = c // GROUP
    at = (row * src_row_stride)[:, None] + (group * src_group_stride + (c - group * GROUP) * src_c_stride)[None, :]
    ok = (row < ROWS)[:, None] & (c < CHANNELS)[None, :]
    points = ()
    for _ in tl.static_range(len(MATRIX_H[0]) * len(MATRIX_W[0])):
        points = points + (tl.load(src + at, mask=ok, other=0.0),)
        at += src_point_stride
    store_tile(
        points, z, bias, dst, alpha, beta, parameter, n, h, w, row < ROWS, c, c < CHANNELS, H, W, bias_stride,
        z_n_stride, z_c_stride, z_d_stride, z_h_stride, z_w_stride,
        dst_n_stride, dst_c_stride, dst_d_stride, dst_h_stride, dst_w_stride, MATRIX_H, MATRIX_W, HAS_D, ACT,
    )  # fmt: skip


IDENTITY: Matrix = ((1.0,),)


def require(problem: Problem) -> Refusals:
    """What Winograd's method asks of a problem on any GPU, but for its errors."""
    r = Refusals()
    r.require_tensors(problem.items, TYPES, elements=True)
    g = Geometry.of(problem)
    r.require(len(problem.op.stride) <= 2, "one or two spatial axes", len(problem.op.stride))
    r.require(set(g.filter) == {1, 3}, "filters of 3 x 3, 3 x 1, 1 x 3 or 3", "x".join(map(str, g.filter)))
    r.require(g.stride == (1, 1, 1), "stride 1", g.stride)
    r.require(g.dilation == (1, 1, 1), "dilation 1", g.dilation)
    if not r:
        blocks = Winograd(problem, 2).rows * max(g.C, g.K)
        r.require(blocks <= INT32 << 6, "at most 2^31 - 1 blocks", blocks)
    return r


@dataclasses.dataclass(frozen=True)
class Winograd:
    """A problem cut into tiles of `m` x `m` results (pixels of dy that meet a filter, in the filter gradient)."""

    problem: Problem
    m: int

    @functools.cached_property
    def g(self) -> Geometry:
        return Geometry.of(self.problem)

    @property
    def direction(self) -> str:
        return self.problem.op.name.removeprefix("conv_")

    @property
    def dtype(self) -> str:
        """Of points and products."""
        return "f64" if self.problem.items[0][1].dtype == "f64" else "f32"

    @functools.cached_property
    def sides(self) -> tuple[tuple[int, int], ...]:
        """(m, r) of the axes H and W, (1, 1) where the filter has one tap."""
        return tuple((self.m, r) if r > 1 else (1, 1) for r in self.g.filter[1:])

    def matrices(self, kind: str) -> dict[str, Matrix]:
        """`A` (results), `B` (windows) or `G` (filters; tiles of dy in the filter gradient) along both axes."""
        found = {}
        for name, (m, r) in zip("HW", self.sides, strict=True):
            matrix = IDENTITY
            if r > 1:
                t = transforms(r, m) if self.direction == "wgrad" else transforms(m, r)
                matrix = getattr(t, kind)
                if kind == "G" and self.direction == "dgrad":
                    matrix = tuple(row[::-1] for row in matrix)  # the filter turned around
            found[f"MATRIX_{name}"] = matrix
        return found

    @property
    def points(self) -> int:
        return math.prod(m + r - 1 for m, r in self.sides)

    @functools.cached_property
    def tiles(self) -> tuple[int, int]:
        """Along H and W."""
        size = self.g.in_size if self.direction == "dgrad" else self.g.out_size
        (h, _), (w, _) = self.sides
        return -(-size[1] // h), -(-size[2] // w)

    @property
    def rows(self) -> int:
        """Tiles of all images."""
        return self.g.N * math.prod(self.tiles)

    @property
    def channels(self) -> tuple[int, int]:
        """Of a group, on the side of the windows and on the other."""
        c, k = self.g.C // self.g.G, self.g.K // self.g.G
        return (k, c) if self.direction == "dgrad" else (c, k)

    @property
    def starts(self) -> dict[str, Argument]:
        """Where the first window begins."""
        before = self.g.pad[1:]
        if self.direction == "dgrad":
            before = tuple(r - 1 - p for r, p in zip(self.g.filter[1:], before))
        return {f"start_{name}": -p for name, p in zip("hw", before)}

    @property
    def steps(self) -> dict[str, int]:
        return {f"STEP_{name}": m for name, (m, _) in zip("HW", self.sides)}

    def fits(self, math_: str) -> bool:
        """Whether the errors to expect are no larger than a direct sum of as many terms may have, in roundoffs.

        That is 2, and 4 for each root of a term (for the worst element of millions, some 5 times the usual, 8 times as
        much); under TF32 half a unit of its last digit on top. Its operands' two roundings are 0.6 of that.
        """
        wgrad = self.direction == "wgrad"
        sides = tuple((r, m) if wgrad else (m, r) for m, r in self.sides if r > 1)
        terms = self.rows if wgrad else self.channels[0]
        number = self.problem.flops / (2 * self.problem[self.problem.outputs[0]].numel)
        bound = 4 * math.sqrt(max(number, 1.0)) + (2.0**14 if math_ == "tf32" else 0.0)
        own = 0.6 * 2.0**13 if math_ == "tf32" else 0.0

        def error(worst: bool) -> float:
            return relative_error(sides, terms, 1.0, worst) + own * relative_error(sides, 0.0, 1 / 1.5, worst)

        return error(False) <= 2 + bound and 5 * error(True) <= 8 * bound

    # ---- launches
    def from_tensor(
        self, role: str, to: Slice, kind: str, sizes: tuple[int, int, int], where: tuple[int, ...], rounding: bool
    ) -> Launch:
        """Points of the windows of a tensor (N, channels of all groups, H, W), `kind` the matrices.

        `sizes` are rows, all channels and those of a group; `where` the strides of the matrices: point, group, row and
        channel.
        """
        t, filters = self.problem[role], role == "w"
        strides = (*t.strides[:2], *((0,) * (4 - t.ndim)), *t.strides[2:])
        rows, channels, group = sizes
        size = (1, 1, *t.shape[2:])[-2:]
        windows = kind == "B"
        block_m, block_n = self._block(where[3] == 1, rows, channels)
        args: dict[str, Argument] = {
            "src": role, "dst": to, "ROWS": rows, "CHANNELS": channels, "GROUP": group,
            **dict(zip(("TILES_H", "TILES_W"), (1, 1) if filters else self.tiles)), **dict(zip("HW", size)),
            **(self.starts if windows else {"start_h": 0, "start_w": 0}),
            **{f"src_{axis}_stride": s for axis, s in zip("nchw", strides)}, **_matrix_strides("dst", where),
        }  # fmt: skip
        constexprs = {
            **self.matrices(kind), **self.steps, "ROUND": rounding, "WIDE": self.is_wide,
            "BLOCK_M": block_m, "BLOCK_N": block_n,
        }  # fmt: skip
        blocks = -(-rows // block_m) * -(-channels // block_n)
        return Launch(winograd_points, (blocks,), args, constexprs, 4, 1)

    def to_tensor(self, source: Slice, where: tuple[int, ...]) -> Launch:
        """The results' points, finished."""
        rows, channels, group = self.result_sizes
        block_m, block_n = self._block(where[3] == 1, rows, channels)
        args, constexprs = places(self.problem)
        args |= {
            "src": source, "ROWS": rows, "CHANNELS": channels, "GROUP": group, **self.result_places,
            **_matrix_strides("src", where),
        }  # fmt: skip
        constexprs |= {**self.matrices("A"), "WIDE": self.is_wide, "BLOCK_M": block_m, "BLOCK_N": block_n}
        blocks = -(-rows // block_m) * -(-channels // block_n)
        return Launch(winograd_pixels, (blocks,), args, constexprs, 4, 1)

    @property
    def result_sizes(self) -> tuple[int, int, int]:
        """Rows, channels and channels of a group of the results' matrices."""
        g = self.g
        if self.direction == "wgrad":
            return g.K, g.C // g.G, g.C // g.G
        return self.rows, self.channels[1] * g.G, self.channels[1]

    @property
    def result_places(self) -> dict[str, Argument]:
        """Arguments that say which pixels the results are."""
        size = (1, 1, *self.problem[self.problem.outputs[0]].shape[2:])[-2:]
        tiles = (1, 1) if self.direction == "wgrad" else self.tiles
        return {"H": size[0], "W": size[1], "TILES_H": tiles[0], "TILES_W": tiles[1]}

    def _block(self, channels_inside: bool, rows: int, channels: int) -> tuple[int, int]:
        """Rows and channels of a block of four warps: a thread has two tiles, or four small ones."""
        elements = 256 if self.points > 16 else 512
        if channels_inside:
            across = min(64, _power_of_two(channels))
            return elements // across, across
        down = min(64, _power_of_two(rows))
        return down, min(elements // down, _power_of_two(channels))

    @property
    def elements(self) -> int:
        """Of the largest stack of matrices."""
        g = self.g
        return self.points * max(self.rows * max(g.C, g.K), g.K * g.C // g.G)

    @property
    def is_wide(self) -> bool:
        return max(self.elements, *(t.span for _, t in self.problem.items)) + 2**20 > INT32


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()


def _matrix_strides(name: str, where: tuple[int, ...]) -> dict[str, Argument]:
    return {f"{name}_{axis}_stride": s for axis, s in zip(("point", "group", "row", "c"), where)}
