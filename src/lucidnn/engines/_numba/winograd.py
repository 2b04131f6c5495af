"""Winograd's transforms of tiles as straight vector code, and the products between them, for CPU kernels.

A tile is a small grid of vectors, one channel a lane. ``transform_input``, ``transform_filter``, ``transform_output``,
``transform_gradient`` and ``transform_sums`` apply one of the matrices of `lucidnn.engines._winograd` along both axes
of a tile, for some vectors side by side; the matrices are constants in the code, so that zeros and ones cost nothing
and rows or columns that come in pairs a, -a share their even and odd terms. 6 x 6 points take 144 operations where the
two matrix products written out take 432. A number picks the tile from `CASES`.

`input_tiles` and `output_tiles` run over a block of tiles between a slab of pixels (see `packing`) and the transformed
values ``[point][tile][channel]``; `products` multiplies those with transformed filters by the register tile of
`microkernel`, point by point. All of it stays in a core's second-level cache.
"""

from __future__ import annotations

import math
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from ...core.engine import Refusals
from ...core.heuristics import roofline
from ...core.problem import Problem
from ...ops.convolution import Geometry
from .._winograd import Matrix, relative_error, transforms
from .blocks import TYPES
from .jit import separate
from .memory import address, pointer, size_of
from .microkernel import ADD, lanes, multiply_narrow, multiply_wide, rows_limit
from .stack import stack

# (m, r) along rows and along columns. Filters along one axis only stand as rows; turned strides make them columns.
_SIDES = ((2, 3), (4, 3), (2, 5), (4, 5))
_LINES, _SQUARES = (*_SIDES, (6, 3), (2, 7)), (*_SIDES, (3, 3), (5, 3))
CASES = (*((side, side) for side in _SQUARES), *(((1, 1), side) for side in _LINES))
CHAIN = 192  # terms that are summed one after another before the sum is put aside
_ROWS = rows_limit()
_VECTOR = lanes(1)  # bytes
_MOST = 5 * 5 * 2 * lanes(4)  # elements of the largest output tile of a wide panel
_I64, _I32 = ir.IntType(64), ir.IntType(32)
_ONE: Matrix = ((1.0,),)


def sides(g: Geometry, tile: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """(m, r) along H and W: an axis whose filter has one tap is left alone."""
    _, r, s = g.filter
    return (tile if r > 1 else 1, r), (tile if s > 1 else 1, s)


def tile_sizes(g: Geometry) -> list[int]:
    """Sides of output tiles for this filter, the best guess first."""
    known = []
    for tile in (4, 5, 3, 6, 2):
        down, across = sides(g, tile)
        if (down, across) in CASES or (across, down) in CASES:
            known.append(tile)
    return known


def unsuited(problem: Problem, g: Geometry) -> Refusals:
    """The reasons of shape and type why no tile serves."""
    r = Refusals()
    r.require_tensors(problem.items, TYPES, elements=True)
    r.require(set(g.stride) == {1}, "stride = 1", list(problem.op.stride))  # type: ignore[attr-defined]
    r.require(set(g.dilation) == {1}, "dilation = 1", list(problem.op.dilation))  # type: ignore[attr-defined]
    flat = g.filter[0] == 1 and g.pad[0] == g.pad_after[0] == 0
    r.require(flat, "a first of three axes without filter", g.filter)
    sizes = "filters of 3 or 5 points along one or both axes, or 7 along one"
    r.require(bool(tile_sizes(g)), sizes, g.filter[1:])
    return r


def fits(problem: Problem, g: Geometry, tile: int, terms: float) -> bool:
    """Whether the errors to expect are no larger than a direct sum may have (`lucidnn.testing`).

    That is 2 roundings and 4 for every sqrt(n) of n terms, for the tensor; 8 times as much for its worst element, which
    in millions is 5 times what is usual at its place.
    """
    chosen = tuple(side for side in sides(g, tile) if side[1] > 1)
    if problem.op.name == "conv_wgrad":
        chosen = tuple((r, m) for m, r in chosen)
    number = max(problem.flops / (2 * problem[problem.outputs[0]].numel), 1.0)
    sums = 4 * math.sqrt(number)
    return relative_error(chosen, terms, 1.0) <= 2 + sums and 5 * relative_error(chosen, terms, 1.0, True) <= 8 * sums


def seconds(problem: Problem, plan: Any, product: float, moved: float, launches: int) -> float:
    """Estimate of a Winograd convolution from the operations of its products and those that moving elements stands for.

    The products run at 1.05 of the rate in `devices.toml`. Weights of elements are fitted to 80 layers of known models:
    nine estimates in ten are within 25 % of the time, measured on two AVX-512 cores.
    """
    share = problem.target.processors / plan.processors
    return roofline(problem, flops=share * (0.95 * product + moved), launches=launches, dtype=plan.acc)


def weight(points: int) -> float:
    """Operations for an element of a tile relative to those for one of 6 x 6 points: larger tiles take more."""
    return 0.4 + points / 60


class _Emitter:
    """Writes linear combinations of vectors."""

    def __init__(self, build: ir.IRBuilder, vector: ir.VectorType):
        self.build, self.vector = build, vector
        kind = "f64" if isinstance(vector.element, ir.DoubleType) else "f32"
        signature = ir.FunctionType(vector, [vector] * 3)
        self.fma = cgutils.get_or_insert_function(build.module, signature, f"llvm.fmuladd.v{vector.count}{kind}")

    def number(self, value: float) -> ir.Constant:
        return ir.Constant(self.vector, [value] * self.vector.count)

    def plus(self, total: Any, factor: float, value: Any) -> Any:
        """Gives total + factor * value, where `total` may be None for nothing."""
        if total is None:
            return value if factor == 1 else self.build.fmul(self.number(factor), value)
        if abs(factor) == 1:
            return (self.build.fadd if factor == 1 else self.build.fsub)(total, value)
        return self.build.call(self.fma, [self.number(factor), value, total])

    def combination(self, terms: list[tuple[float, Any]]) -> Any:
        total = None
        for factor, value in sorted(terms, key=lambda term: term[0] != 1):  # one that needs no multiplication first
            total = self.plus(total, factor, value)
        return total

    def apply(self, matrix: Matrix, values: list[Any]) -> list[Any]:
        """The matrix times the values."""
        rows, values = _by_columns(self, matrix, values)
        results: list[Any] = []
        while len(results) < len(rows):
            i = len(results)
            row = [(f, v) for f, v in zip(rows[i], values, strict=True) if f]
            following = rows[i + 1] if i + 1 < len(rows) else None
            if following and len(row) > 1 and all(abs(a) == abs(b) for a, b in zip(rows[i], following, strict=True)):
                signs = [a == b for a, b in zip(rows[i], following, strict=True) if a]
                even = [term for term, same in zip(row, signs, strict=True) if same]
                odd = [term for term, same in zip(row, signs, strict=True) if not same]
                if even and odd:
                    scale = odd[-1][0]
                    first, second = self.combination(even), self.combination([(f / scale, v) for f, v in odd])
                    results += [self.plus(first, scale, second), self.plus(first, -scale, second)]
                    continue
            results.append(self.combination(row))
        return results


def _by_columns(emit: _Emitter, matrix: Matrix, values: list[Any]) -> tuple[list[list[float]], list[Any]]:
    """Replace pairs of columns that differ in signs only by their values' sum and difference."""
    columns, found = list(zip(*matrix, strict=True)), []
    j = 0
    while j < len(columns):
        pair = columns[j : j + 2]
        alike = len(pair) == 2 and all(abs(a) == abs(b) for a, b in zip(*pair, strict=True))
        same = [a == b for a, b in zip(*pair, strict=True)] if alike else []
        if alike and len(same) > 2 and True in same and False in same:
            found.append(([a if s else 0.0 for a, s in zip(pair[0], same, strict=True)], emit.build.fadd, j))
            found.append(([0.0 if s else a for a, s in zip(pair[0], same, strict=True)], emit.build.fsub, j))
            j += 2
        else:
            found.append((columns[j], None, j))
            j += 1
    values = [values[j] if make is None else make(values[j], values[j + 1]) for _, make, j in found]
    return [list(row) for row in zip(*(column for column, _, _ in found), strict=True)], values


def _matrix(kind: str, m: int, r: int) -> Matrix:
    if r == 1:
        return _ONE
    t = transforms(r, m) if kind in ("gradient", "sums") else transforms(m, r)
    return {"input": t.B, "filter": t.G, "gradient": t.G, "output": t.A, "sums": t.A}[kind]


def _emit_transform(module, kind: str, case: int, element) -> ir.Function:
    """``void(source, its row, column strides, target, its row, column strides, vectors, scale or bias, low)``."""
    size = 8 if element == types.float64 else 4
    scalar = ir.DoubleType() if size == 8 else ir.FloatType()
    vector = ir.VectorType(scalar, lanes(size))
    function = ir.Function(
        module, ir.FunctionType(ir.VoidType(), [_I64] * 8 + [scalar]), f"winograd_{kind}_{case}_{size}"
    )
    function.linkage = "internal"
    function.attributes.add("noinline")
    source, source_row, source_column, target, target_row, target_column, count, bias, parameter = function.args
    down, across = (_matrix(kind, *side) for side in CASES[case])
    entry, loop, done = (function.append_basic_block(name) for name in ("entry", "loop", "done"))

    def word(value: int) -> ir.Constant:
        return ir.Constant(_I64, value)

    build = ir.IRBuilder(entry)
    strides = [build.mul(s, word(size)) for s in (source_row, source_column, target_row, target_column)]
    undefined = ir.Constant(vector, ir.Undefined)
    spread = build.insert_element(undefined, parameter, ir.Constant(_I32, 0))
    zeros = ir.Constant(ir.VectorType(_I32, vector.count), [0] * vector.count)
    spread = build.shuffle_vector(spread, undefined, zeros)
    build.branch(loop)

    build.position_at_end(loop)
    offset = build.phi(_I64)
    offset.add_incoming(word(0), entry)
    emit = _Emitter(build, vector)

    def place(base, row, i, column, j):
        at = build.add(base, build.add(build.mul(row, word(i)), build.mul(column, word(j))))
        return build.inttoptr(build.add(at, offset), vector.as_pointer())

    rows, columns = len(down[0]), len(across[0])
    grid = []
    for j in range(columns):
        values = [build.load(place(source, strides[0], i, strides[1], j), align=size) for i in range(rows)]
        grid.append(emit.apply(down, values))
    if kind == "output":
        start = build.load(build.inttoptr(build.add(bias, offset), vector.as_pointer()), align=size)
    for i in range(len(down)):
        results = emit.apply(across, [column[i] for column in grid])
        for j, value in enumerate(results):
            if kind == "output":
                value = build.fadd(value, start)
                value = build.select(build.fcmp_ordered("<=", value, spread), spread, value)
            elif kind in ("filter", "sums"):
                value = build.fmul(value, spread)
            build.store(value, place(target, strides[2], i, strides[3], j), align=size)
    following = build.add(offset, word(vector.count * size))
    offset.add_incoming(following, loop)
    build.cbranch(build.icmp_signed("<", following, build.mul(count, word(vector.count * size))), loop, done)
    build.position_at_end(done)
    build.ret_void()
    return function


def _transform(kind: str):
    """The intrinsic for one kind of transform; see `_emit_transform` for its arguments."""

    @intrinsic
    def transform(typingctx, like, case, source, rows, columns, target, to_rows, to_columns, vectors, bias, parameter):
        element = types.unliteral(like)
        if element not in (types.float32, types.float64):
            return None

        def codegen(context, builder, signature, values):
            module, done = builder.module, builder.append_basic_block("transformed")
            choice = builder.switch(values[1], done)
            for number in range(len(CASES)):
                name = f"winograd_{kind}_{number}_{element.bitwidth // 8}"
                function = module.globals.get(name) or _emit_transform(module, kind, number, element)
                block = builder.append_basic_block(name)
                choice.add_case(ir.Constant(_I64, number), block)
                with builder.goto_block(block):
                    builder.call(function, values[2:])
                    builder.branch(done)
            builder.position_at_end(done)
            return context.get_dummy_value()

        return types.void(element, *[types.int64] * 9, element), codegen

    return transform


transform_input = _transform("input")  # B d B'
transform_filter = _transform("filter")  # G g G', times `parameter`
transform_output = _transform("output")  # A s A' plus the vectors at `bias`, at least `parameter`
transform_gradient = _transform("gradient")  # G of F(r, m): tiles of dy
transform_sums = _transform("sums")  # A of F(r, m), the filter's gradient, times `parameter`


@separate
def input_tiles(case, turned, slab, strides, steps, grid, target, plane, pitch, points, vectors, acc):
    """Transform a grid of tiles of a slab: ``target[point][tile][channel]``.

    `strides` is the slab's (row, column), `steps` a tile's rows and columns, `grid` the tiles along each, `plane` and
    `pitch` the target's elements from point to point and from tile to tile, `points` those along a tile's columns.
    """
    size = size_of(acc)
    zero = pointer(slab, acc)[0]
    for i in range(grid[0]):
        for j in range(grid[1]):
            a = slab + (i * steps[0] * strides[0] + j * steps[1] * strides[1]) * size
            if turned:
                transform_input(acc, case, a, strides[1], strides[0], target, plane, plane, vectors, 0, zero)
            else:
                down = points * plane
                transform_input(acc, case, a, strides[0], strides[1], target, down, plane, vectors, 0, zero)
            target += pitch * size


@separate
def transform_filters(case, turned, packed, strides, target, plane, points, vectors, scale, acc):
    """Transform packed filters ``[row][column][channel, filter]`` to ``[point][channel, filter]``, times `scale`."""
    if turned:
        transform_filter(acc, case, packed, strides[1], strides[0], target, plane, plane, vectors, 0, scale)
    else:
        down = points * plane
        transform_filter(acc, case, packed, strides[0], strides[1], target, down, plane, vectors, 0, scale)


@separate
def gradient_tiles(case, turned, slab, strides, steps, grid, target, plane, pitch, points, vectors, acc):
    """As `input_tiles`, for dy: tiles do not overlap."""
    size = size_of(acc)
    zero = pointer(slab, acc)[0]
    for i in range(grid[0]):
        for j in range(grid[1]):
            a = slab + (i * steps[0] * strides[0] + j * steps[1] * strides[1]) * size
            if turned:
                transform_gradient(acc, case, a, strides[1], strides[0], target, plane, plane, vectors, 0, zero)
            else:
                down = points * plane
                transform_gradient(acc, case, a, strides[0], strides[1], target, down, plane, vectors, 0, zero)
            target += pitch * size


@separate
def filter_sums(case, turned, sums, plane, points, target, strides, vectors, scale, acc):
    """Transform sums ``[point][channel, filter]`` to ``[row][column][channel, filter]``, times `scale`."""
    if turned:
        transform_sums(acc, case, sums, plane, plane, target, strides[1], strides[0], vectors, 0, scale)
    else:
        transform_sums(acc, case, sums, points * plane, plane, target, strides[0], strides[1], vectors, 0, scale)


@separate
def output_tiles(case, turned, sums, plane, points, steps, grid, width, columns, panel, bias, low, acc):
    """Transform a grid of tiles' sums ``[point][tile][filter]`` to pixels ``panel[row][column][filter]``.

    The panel has `columns` pixels a row, the last tiles may reach beyond; the filters of its last rows may be of no
    use. `bias` is the address of one panel's values, `low` what results are raised to.
    """
    size = size_of(acc)
    vectors = width * size // _VECTOR
    aside = stack(_MOST, acc)
    dst = pointer(panel, acc)
    for i in range(grid[0]):
        for j in range(grid[1]):
            inside = min(columns - j * steps[1], steps[1])
            at = (i * steps[0] * columns + j * steps[1]) * width
            to, row = panel + at * size, columns * width
            if inside < steps[1]:
                to, row = address(aside), steps[1] * width
            if turned:
                transform_output(acc, case, sums, plane, plane, to, width, row, vectors, bias, low)
            else:
                transform_output(acc, case, sums, points * plane, plane, to, row, width, vectors, bias, low)
            if inside < steps[1]:
                for p in range(steps[0]):
                    for k in range(inside * width):
                        dst[at + p * columns * width + k] = aside[p * row + k]
            sums += width * size


@separate
def products(points, tiles, depth, width, a, a_plane, pitch, b, b_plane, c, c_plane, start, onto, acc):
    """For every point the product of tiles and transformed filters, ``c[tile, filter] = a[tile, c] b[c, filter]``.

    `start` is the address of an integer 0; where `onto` is `ADD`, what `c` holds is added.
    """
    size = size_of(acc)
    blocks = (tiles + _ROWS - 1) // _ROWS
    for _ in range(points):
        for s in range(0, depth, CHAIN):
            run, flags = min(CHAIN, depth - s), ADD if s else onto
            done, right = 0, b + s * width * size
            for block in range(1, blocks + 1):
                rows = tiles * block // blocks - done
                left, to = a + (done * pitch + s) * size, c + done * width * size
                if width * size > _VECTOR:
                    multiply_wide(acc, rows, left, pitch, 1, start, 1, run, right, to, 0, flags)
                else:
                    multiply_narrow(acc, rows, left, pitch, 1, start, 1, run, right, to, 0, flags)
                done += rows
        a += a_plane * size
        b += b_plane * size
        c += c_plane * size


@separate
def correlations(points, tiles, channels, width, a, a_plane, pitch, b, b_plane, c, c_plane, start, flags, acc):
    """For every point the sum over tiles ``c[channel, filter] (+)= a[tile, channel] b[tile, filter]``.

    `start` is the address of an integer 0, `flags` of the register tile.
    """
    size = size_of(acc)
    blocks = (channels + _ROWS - 1) // _ROWS
    for _ in range(points):
        done = 0
        for block in range(1, blocks + 1):
            rows = channels * block // blocks - done
            left, to = a + done * size, c + done * width * size
            if width * size > _VECTOR:
                multiply_wide(acc, rows, left, 1, pitch, start, 1, tiles, b, to, 0, flags)
            else:
                multiply_narrow(acc, rows, left, 1, pitch, start, 1, tiles, b, to, 0, flags)
            done += rows
        a += a_plane * size
        b += b_plane * size
        c += c_plane * size
