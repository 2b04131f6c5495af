"""The kernels of ``reduce.blocked`` where neighbours in memory are reduced: runs of values, each to one number.

A run is cut into pieces of `PIECE` values, a piece is combined in registers, and the pieces' results in float64. What
limits such a loop is not arithmetic but how many cache lines are on their way at once: one core that reads one run
after another waits at the beginning of every page. So four runs that lie far apart are read side by side, or four parts
of one long run. Which run is beside which does not show in its result.

The place of an extreme is looked for only in a piece whose extreme is the largest so far, while that is in the cache.
Tables and numbers are those of ``_blocks.py``.
"""

import math

import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from .. import _numba as nb
from .._numba import vector as nv
from .._numba.exponential import _folded
from .._numba.memory import address, size_of
from .._numba.stack import stack
from .._numba.vector import LANES, _bits, _bits_between, _masked, _operation, _splat
from . import _blocks as b
from ._blocks import BLOCK, SLOTS

PIECE = BLOCK
FOUR = 4 * PIECE
SUM, SQUARES, PRODUCT, COUNT, EXTREME = range(5)
LAST = 9223372036854775807


class _Four:
    """A function ``void(x, places, count, magnitude, negated, others, out)`` that combines four runs, as LLVM IR.

    ``out[s]`` is ``x[places[s]] ... x[places[s] + count - 1]`` combined, 0 <= s < 4; extremes and sums first without
    signs (`magnitude`) or with the other ones (`negated`). ``others[s]`` is what is counted, or what a product leaves
    out. Numba compiles the same, written with the operations of `vector`, for seconds.
    """

    def __init__(self, module, kind: int, pointer, word: ir.Type):
        self.kind, element = kind, pointer.pointee
        self.vector = ir.VectorType(element, LANES)
        self.wide = isinstance(element, ir.DoubleType)
        self.module = module
        flag = ir.IntType(1)
        arguments = [pointer, word.as_pointer(), word, flag, flag, pointer, pointer]
        name = f"lucidnn.reduce_four.{kind}.{element}"
        self.new = name not in module.globals
        self.function = (
            module.globals[name]
            if not self.new
            else ir.Function(module, ir.FunctionType(ir.VoidType(), arguments), name)
        )
        if self.new:
            self.function.linkage = "internal"
            self.function.attributes.add("noinline")
            self.build = ir.IRBuilder(self.function.append_basic_block("entry"))
            self.size = 8 if self.wide else 4
            self._emit()

    def all(self, number: float) -> ir.Constant:
        return ir.Constant(self.vector, [number] * LANES)

    def turned(self, v):
        whole = ir.VectorType(ir.IntType(8 * self.size), LANES)
        sign, build = 1 << (8 * self.size - 1), self.build

        def bits(number: int) -> ir.Constant:
            return ir.Constant(whole, [number] * LANES)

        kept = build.select(self.magnitude, bits(sign - 1), bits(2 * sign - 1))
        flipped = build.select(self.negated, bits(sign), bits(0))
        return build.bitcast(build.xor(build.and_(build.bitcast(v, whole), kept), flipped), self.vector)

    def larger(self, a, v):
        takes = self.build.and_(self.build.fcmp_unordered(">", v, a), self.build.fcmp_ordered("ord", a, a))
        return self.build.select(takes, v, a)

    def join(self, a, c):
        if self.kind == EXTREME:
            return self.larger(a, c)
        return self.build.fmul(a, c) if self.kind == PRODUCT else self.build.fadd(a, c)

    def combine(self, a, v, other):
        build = self.build
        if self.kind == SQUARES:
            return build.fadd(a, build.fmul(v, v))
        if self.kind == PRODUCT:
            return build.fmul(a, build.select(build.fcmp_ordered("==", v, other), self.all(1.0), v))
        v = self.turned(v)
        if self.kind == COUNT:
            v = build.select(build.fcmp_ordered("==", v, other), self.all(1.0), self.all(0.0))
        return self.join(a, v)

    def _emit(self) -> None:
        x, places, count, self.magnitude, self.negated, others, out = self.function.args
        build, word = self.build, count.type
        start = {PRODUCT: 1.0, EXTREME: -math.inf}.get(self.kind, 0.0)
        absent = self.all({PRODUCT: 1.0, COUNT: math.nan}.get(self.kind, 0.0))
        if self.kind == EXTREME:  # below everything after the turn
            absent = build.select(self.magnitude, self.all(0.0), self.all(-math.inf))
            absent = build.select(self.negated, self.all(math.inf), absent)

        def number(i: int) -> ir.Constant:
            return ir.Constant(word, i)

        def spot(s: int, k):
            place = build.gep(x, [build.add(at[s], k)])
            return build.bitcast(place, self.vector.as_pointer())

        at = [build.load(build.gep(places, [number(s)])) for s in range(4)]
        other = [_splat(build, build.load(build.gep(others, [number(s)]))) for s in range(4)]
        held = [[build.alloca(self.vector) for _ in range(2)] for _ in range(4)]
        for pair in held:
            for one in pair:
                build.store(self.all(start), one)
        rounds = build.lshr(count, number(5))
        with cgutils.for_range(build, rounds) as loop:
            k = build.shl(loop.index, number(5))
            for s in range(4):
                for half in range(2):
                    v = build.load(spot(s, build.add(k, number(half * LANES))), align=self.size)
                    build.store(self.combine(build.load(held[s][half]), v, other[s]), held[s][half])
        whole = build.shl(rounds, number(5))
        rest = build.sub(count, whole)
        with cgutils.for_range(build, build.lshr(build.add(rest, number(LANES - 1)), number(4))) as loop:
            k = build.shl(loop.index, number(4))
            left = build.sub(rest, k)
            left = build.select(build.icmp_signed("<", left, number(LANES)), left, number(LANES))
            mask = _bits(build, _bits_between(build, number(0), left))
            for s in range(4):
                align = ir.Constant(ir.IntType(32), self.size)
                v = _masked(build, "load", self.vector, [spot(s, build.add(whole, k)), align, mask, absent])
                build.store(self.combine(build.load(held[s][0]), v, other[s]), held[s][0])
        for s in range(4):
            lanes = self.join(build.load(held[s][0]), build.load(held[s][1]))
            build.store(_folded(build, lanes, self.join), build.gep(out, [number(s)]))
        build.ret_void()


def _side_by_side(kind: int):
    @intrinsic
    def four(typingctx, x, places, count, magnitude, negated, others, out):
        def codegen(context, builder, signature, values):
            pointer = context.get_value_type(x)
            builder.call(_Four(builder.module, kind, pointer, ir.IntType(64)).function, values)
            return context.get_dummy_value()

        return types.void(x, places, types.int64, types.boolean, types.boolean, others, out), codegen

    return four


_sums, _squares, _products, _counts, _extremes = (_side_by_side(kind) for kind in range(5))


@intrinsic
def _first(typingctx, v, value, magnitude, negated):
    """The first lane that is `value` after the turn, or NaN where that is NaN; `LANES` where none is."""

    def emit(builder, v, value, magnitude, negated):
        four = _Four.__new__(_Four)
        four.vector, four.build, four.magnitude, four.negated = v.type, builder, magnitude, negated
        four.size = 8 if isinstance(v.type.element, ir.DoubleType) else 4
        sought, word = _splat(builder, value), ir.IntType(64)
        same = builder.fcmp_ordered("==", four.turned(v), sought)
        both = builder.and_(builder.fcmp_unordered("uno", v, v), builder.fcmp_unordered("uno", sought, sought))
        bits = builder.zext(builder.bitcast(builder.or_(same, both), ir.IntType(LANES)), word)
        return builder.cttz(builder.or_(bits, ir.Constant(word, 1 << LANES)), ir.Constant(ir.IntType(1), 1))

    return _operation(types.int64, [v, value, types.boolean, types.boolean], emit)


@nb.jitable
def _combined(code, x, places, count, others, out):
    """Four runs, by the code of a step."""
    if code <= 1:
        _sums(x, places, count, code == 1, False, others, out)
    elif code == 2:
        _squares(x, places, count, False, False, others, out)
    elif code <= 4:
        _products(x, places, count, False, False, others, out)
    elif code <= 7:
        _extremes(x, places, count, code == 7, code == 5, others, out)
    else:
        _counts(x, places, count, code == 9, False, others, out)


@nb.jitable
def _find(x, at, count, magnitude, negated, value):
    """How far it is to the first of `count` neighbours that is `value` after the turn, or NaN where that is NaN."""
    for k in range(0, count, LANES):
        left = min(LANES, count - k)
        lane = _first(nv.read_some(x, at + k, 0, left), value, magnitude, negated)
        if lane < left:
            return k + lane
    return 0


@nb.exact_kernel
def _rows_part(part, parts, x, ref, z, out, index, space, table, numbers, like):
    t, numbers = nb.pointer(table, np.int64(0)), nb.pointer(numbers, like)
    pieces = stack(FOUR, like)
    acc, sought, where = stack(BLOCK, like), stack(BLOCK, like), stack(BLOCK, np.int64(0))
    total = stack(BLOCK, np.float64(0))
    places, sizes = stack(4, np.int64(0)), stack(4, np.int64(0))
    rows, offsets = stack(4, np.int64(0)), stack(4, np.int64(0))
    results, others = stack(4, like), stack(4, like)
    at, to = stack(SLOTS, np.int64(0)), stack(SLOTS, np.int64(0))
    code, indexed, step = t[b.CODE], t[b.INDEX_KIND] >= 0, t[b.RUN_STEP]
    direct = step == 1 and t[b.KIND] == (0 if size_of(like) == 8 else 1)
    magnitude, negated = code == 7 or code == 9, code == 5
    spare = nb.pointer(space, like)
    spare_places = nb.pointer(space + t[b.UNITS] * t[b.SPLITS] * BLOCK * size_of(like), np.int64(0))
    values = nb.pointer(x, like) if direct else pieces
    for s in range(4):  # of products: what is left out
        others[s] = nb.cast(np.nan if code == 3 else 0.0, like)
    items, number_step, row_step, each = t[b.UNITS] * t[b.SPLITS], t[b.RUN_NUMBER], t[b.X_LANE], t[b.PIECES]
    for item in range(items * part // parts, items * (part + 1) // parts):
        unit, split = item // t[b.SPLITS], item % t[b.SPLITS]
        for slot in range(SLOTS):
            at[slot] = 0
        first = unit % t[b.LANE_BLOCKS] * t[b.CHUNK]
        b._locate(unit // t[b.LANE_BLOCKS], t, b.HEAD, t[b.KEPT], at)
        count = min(t[b.CHUNK], t[b.LANES] - first)
        start = -np.inf if 5 <= code <= 7 else float(numbers[2])
        for i in range(count):
            total[i] = start
            where[i] = LAST
        if ref != 0:
            b._read(t[b.REF_KIND], ref, at[4] + first * t[b.REF_LANE], t[b.REF_LANE], count, sought)
        begin, end = t[b.STEPS] * split // t[b.SPLITS], t[b.STEPS] * (split + 1) // t[b.SPLITS]
        point = begin // max(each, 1)
        while point * each < end:
            low = max(begin - point * each, 0) * PIECE
            high = min(min(end - point * each, each) * PIECE, t[b.RUN])
            for slot in range(SLOTS):
                to[slot] = 0
            to[0] = at[0]
            b._locate(point, t, b.HEAD + t[b.KEPT] * b.ROW, t[b.REDUCED], to)
            base = to[0] + first * row_step
            # Four rows side by side, a quarter of them apart; or, of fewer rows, four quarters of each.
            along = count < 4 and high - low >= 4 * PIECE
            quarter = count if along else -(-count // 4)
            stretch = (high - low) // (4 * PIECE) * PIECE
            for r in range(quarter):
                k = low
                while k < high:
                    size = min(PIECE, high - k)
                    wide = along and k < low + stretch
                    for s in range(4):
                        rows[s] = r if along else r + s * quarter
                        offsets[s] = k + s * stretch if wide else k
                        sizes[s] = size
                        if rows[s] >= count or (along and s > 0 and not wide):  # nothing to do: read what is there
                            rows[s], sizes[s] = r, 0
                        places[s] = base + rows[s] * row_step + offsets[s] * step
                        if ref != 0:
                            others[s] = sought[rows[s]]
                        if not direct:
                            spot = nb.pointer(address(pieces) + s * PIECE * size_of(like), like)
                            b._read(t[b.KIND], x, places[s], step, size, spot)
                            places[s] = s * PIECE
                    _combined(code, values, places, size, others, results)
                    for s in range(4):
                        if sizes[s] == 0:
                            continue
                        i, found = rows[s], float(results[s])
                        if code <= 2 or code >= 8:
                            total[i] += found
                        elif code <= 4:
                            total[i] *= found
                        elif not indexed:
                            total[i] = found if (found > total[i]) | (found != found) else total[i]
                        elif not (found < total[i] or (total[i] != total[i] and found == found)):
                            place = _find(values, places[s], size, magnitude, negated, results[s])
                            place = to[1] + (offsets[s] + place) * number_step
                            if b._takes(1, found, place, total[i], where[i]):
                                total[i], where[i] = found, place
                    k += size
                    if along and k == low + stretch:
                        k = low + 4 * stretch
            point += 1
        for i in range(count):
            value = -total[i] if code == 5 else total[i]
            acc[i] = nb.cast(value, like)
            if 5 <= code <= 7 and t[b.STEPS] == 0:
                acc[i] = numbers[2]
        if t[b.SPLITS] == 1:
            b._finish(unit, acc, where, out, z, index, t, numbers, at, pieces)
        else:
            for i in range(count):
                spare[item * BLOCK + i] = acc[i]
            if indexed:
                for i in range(count):
                    spare_places[item * BLOCK + i] = where[i]


@nb.kernel
def reduce_rows(parts, threads, x, ref, z, out, index, space, table, numbers, like):
    nb.launch(_rows_part, parts, threads, (x, ref, z, out, index, space, table, numbers, like))
    t = nb.pointer(table, np.int64(0))
    if parts > 0 and t[b.SPLITS] > 1:
        nb.launch(b._combine_part, min(parts, t[b.UNITS]), threads, (z, out, index, space, table, numbers, like))
