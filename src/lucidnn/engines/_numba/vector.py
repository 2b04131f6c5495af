"""Vectors of sixteen lanes as values inside a CPU kernel, for loops that LLVM does not vectorise by itself.

Numba leaves vectorising to LLVM, which wants long loops over neighbouring elements. Rows of a pooled image are
short and read at a stride. Here a vector is a value that stays in registers: it is read with the lanes that
exist, compared, selected, added and written back. LLVM splits it to the width that the processor has; the
masked accesses need AVX2 or AVX-512 to be fast and are right everywhere.

A vector of floats holds float32 or float64 (16-bit floats are widened when read and rounded to nearest even when
written, as in `memory`), a vector of whole numbers int32 (also for uint8) or int64, a mask one bit a lane.

``read(p, at, step, first, last)`` has p[at + lane * step] in the lanes from `first` to `last` and 0 in the others,
whose memory is not touched; 0 <= first < last <= 16. Steps of 1 and 2 are vector loads, others go lane by lane.
``write(p, at, step, v, count)`` writes the first `count` lanes.
"""

from __future__ import annotations

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic, models, register_jitable, register_model

from .memory import converts_half

LANES = 16
_I32, _I16 = ir.IntType(32), ir.IntType(16)
_READ_AS = {types.uint16: types.float32, types.int16: types.float32, types.uint8: types.int32}
_LLVM = {
    types.float32: ir.FloatType(),
    types.float64: ir.DoubleType(),
    types.int32: _I32,
    types.int64: ir.IntType(64),
    types.boolean: ir.IntType(1),
}


class Vector(types.Type):
    """Numba's type of a vector of `element`, or of a mask where that is boolean."""

    def __init__(self, element):
        self.element = element
        super().__init__(f"Vector({element})")


@register_model(Vector)
class _Model(models.PrimitiveModel):
    def __init__(self, manager, kind):
        super().__init__(manager, kind, _vector(_LLVM[kind.element]))


_MASK = Vector(types.boolean)


def _vector(element: ir.Type, count: int = LANES) -> ir.VectorType:
    return ir.VectorType(element, count)


def _numbers(values) -> ir.Constant:
    return ir.Constant(_vector(_I32, len(values)), list(values))


def _splat(builder, value):
    undefined = ir.Constant(_vector(value.type), ir.Undefined)
    single = builder.insert_element(undefined, value, ir.Constant(_I32, 0))
    return builder.shuffle_vector(single, undefined, _numbers([0] * LANES))


def _all(number: int) -> ir.Constant:
    """A number in every lane."""
    return ir.Constant(_vector(_I32), [number] * LANES)


def _half_to_float(builder, v):
    if converts_half():
        return builder.fpext(builder.bitcast(v, _vector(ir.HalfType())), _vector(ir.FloatType()))
    # As in `memory`: the half's exponent and fraction, where a float has them, are the value times 2^-112.
    h = builder.zext(v, _vector(_I32))
    magnitude = builder.shl(builder.and_(h, _all(0x7FFF)), _all(13))
    scale = ir.Constant(_vector(ir.FloatType()), [2.0**112] * LANES)
    value = builder.fmul(builder.bitcast(magnitude, _vector(ir.FloatType())), scale)
    special = builder.icmp_unsigned(">=", magnitude, _all(0x7C00 << 13))
    value = builder.select(special, builder.or_(magnitude, _all(0x7F800000)), builder.bitcast(value, _vector(_I32)))
    sign = builder.shl(builder.and_(h, _all(0x8000)), _all(16))
    return builder.bitcast(builder.or_(value, sign), _vector(ir.FloatType()))


def _float_to_half(builder, v):
    if converts_half():
        return builder.bitcast(builder.fptrunc(v, _vector(ir.HalfType())), _vector(_I16))
    bits = builder.bitcast(v, _vector(_I32))
    magnitude = builder.and_(bits, _all(0x7FFFFFFF))
    odd = builder.and_(builder.lshr(magnitude, _all(13)), _all(1))
    rounded = builder.add(builder.sub(magnitude, _all((112 << 23) - 0xFFF)), odd)
    half = builder.lshr(rounded, _all(13))
    one_half = ir.Constant(_vector(ir.FloatType()), [0.5] * LANES)
    pushed = builder.fadd(builder.bitcast(magnitude, _vector(ir.FloatType())), one_half)
    small = builder.sub(builder.bitcast(pushed, _vector(_I32)), _all(0x3F000000))
    half = builder.select(builder.icmp_unsigned("<", magnitude, _all(0x38800000)), small, half)
    half = builder.select(builder.icmp_unsigned(">=", magnitude, _all(0x47800000)), _all(0x7C00), half)
    quiet = builder.or_(builder.and_(builder.lshr(magnitude, _all(13)), _all(0x3FF)), _all(0x7E00))
    half = builder.select(builder.icmp_unsigned(">", magnitude, _all(0x7F800000)), quiet, half)
    sign = builder.and_(builder.lshr(bits, _all(16)), _all(0x8000))
    return builder.trunc(builder.or_(half, sign), _vector(_I16))


def _widen(builder, element, v):
    """From the type in memory to the type of the lanes."""
    if element == types.uint16:
        return _half_to_float(builder, v)
    if element == types.int16:
        bits = builder.shl(builder.zext(v, _vector(_I32)), _all(16))
        return builder.bitcast(bits, _vector(ir.FloatType()))
    return builder.zext(v, _vector(_I32)) if element == types.uint8 else v


def _narrow(builder, element, v):
    """From the type of the lanes to the type in memory."""
    if element == types.uint16:
        return _float_to_half(builder, v)
    if element == types.int16:
        bits = builder.bitcast(v, _vector(_I32))
        kept = builder.lshr(bits, _all(16))
        half = builder.add(builder.and_(kept, _all(1)), _all(0x7FFF))
        rounded = builder.lshr(builder.add(bits, half), _all(16))
        quiet = builder.or_(kept, _all(0x40))
        is_nan = builder.fcmp_unordered("uno", v, v)
        return builder.trunc(builder.select(is_nan, quiet, rounded), _vector(_I16))
    wanted = _vector(ir.IntType(8)) if element == types.uint8 else _vector(_LLVM[element])
    if v.type == wanted or isinstance(v.type.element, ir.FloatType | ir.DoubleType):
        return v
    return builder.trunc(v, wanted) if v.type.element.width > wanted.element.width else builder.sext(v, wanted)


def _spot(context, builder, pointer_type, p, at):
    """Address of element `at` as a pointer to a vector of the type in memory, that type, and its size."""
    memory = _vector(context.get_value_type(pointer_type.dtype))
    size = context.get_abi_sizeof(context.get_value_type(pointer_type.dtype))
    return builder.bitcast(builder.gep(p, [at]), memory.as_pointer()), memory, size


def _masked(builder, kind, memory, args):
    """Call llvm.masked.load or llvm.masked.store for vectors of type `memory`."""
    name = f"llvm.masked.{kind}.v{LANES}{memory.element.intrinsic_name}.p0"
    returned = memory if kind == "load" else ir.VoidType()
    function_type = ir.FunctionType(returned, [a.type for a in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, function_type, name), args)


def _bits(builder, bits, shift: int = 0):
    """A mask whose lanes are the bits of a 64-bit number from `shift` on."""
    bits = builder.lshr(bits, ir.Constant(bits.type, shift))
    return builder.bitcast(builder.trunc(bits, _I16), _vector(ir.IntType(1)))


def _bits_between(builder, first, last):
    """A number with the bits from `first` to `last` set; both below 64."""
    one = ir.Constant(first.type, 1)
    return builder.xor(builder.sub(builder.shl(one, last), one), builder.sub(builder.shl(one, first), one))


def _reading(p):
    return Vector(_READ_AS.get(p.dtype, p.dtype))


@intrinsic
def read_all(typingctx, p, at):
    """Sixteen neighbours."""

    def codegen(context, builder, signature, values):
        spot, _, size = _spot(context, builder, p, *values)
        return _widen(builder, p.dtype, builder.load(spot, align=size))

    return _reading(p)(p, types.int64), codegen


@intrinsic
def read_some(typingctx, p, at, first, last):
    """Neighbours in the lanes from `first` to `last`."""

    def codegen(context, builder, signature, values):
        spot, memory, size = _spot(context, builder, p, *values[:2])
        mask = _bits(builder, _bits_between(builder, *values[2:]))
        args = [spot, ir.Constant(_I32, size), mask, ir.Constant(memory, None)]
        return _widen(builder, p.dtype, _masked(builder, "load", memory, args))

    return _reading(p)(p, *[types.int64] * 3), codegen


# Every other element of 31: lanes 0 to 7 from the first sixteen, the rest from sixteen that start at the 16th.
_EVERY_OTHER = [2 * i if i < 8 else 16 + 2 * i - 15 for i in range(LANES)]


@intrinsic
def read_pairs(typingctx, p, at):
    """p[at + 2 * lane], all lanes; reads nothing past the last."""

    def codegen(context, builder, signature, values):
        fifteen = ir.Constant(values[1].type, 15)
        low, _, size = _spot(context, builder, p, *values)
        high, _, _ = _spot(context, builder, p, values[0], builder.add(values[1], fifteen))
        halves = [builder.load(spot, align=size) for spot in (low, high)]
        return _widen(builder, p.dtype, builder.shuffle_vector(*halves, _numbers(_EVERY_OTHER)))

    return _reading(p)(p, types.int64), codegen


@intrinsic
def read_some_pairs(typingctx, p, at, first, last):
    """p[at + 2 * lane] in the lanes from `first` to `last`."""

    def codegen(context, builder, signature, values):
        at, first, last = values[1:]
        one, fifteen = ir.Constant(at.type, 1), ir.Constant(at.type, 15)
        bits = _bits_between(builder, builder.shl(first, one), builder.sub(builder.shl(last, one), one))
        halves = []
        for shift, place in ((0, at), (15, builder.add(at, fifteen))):
            spot, memory, size = _spot(context, builder, p, values[0], place)
            args = [spot, ir.Constant(_I32, size), _bits(builder, bits, shift), ir.Constant(memory, None)]
            halves.append(_masked(builder, "load", memory, args))
        return _widen(builder, p.dtype, builder.shuffle_vector(*halves, _numbers(_EVERY_OTHER)))

    return _reading(p)(p, *[types.int64] * 3), codegen


@intrinsic
def _read_lanes(typingctx, p, at, step, first, last):
    """p[at + lane * step] in the lanes from `first` to `last`, one by one."""

    def codegen(context, builder, signature, values):
        pointer, at, step, first, last = values
        before_last = builder.sub(last, ir.Constant(last.type, 1))
        gathered = ir.Constant(_vector(context.get_value_type(p.dtype)), ir.Undefined)
        for i in range(LANES):
            lane = ir.Constant(at.type, i)  # lanes that do not exist read one that does
            lane = builder.select(builder.icmp_signed("<", lane, first), first, lane)
            lane = builder.select(builder.icmp_signed(">", lane, before_last), before_last, lane)
            element = builder.load(builder.gep(pointer, [builder.add(at, builder.mul(lane, step))]))
            gathered = builder.insert_element(gathered, element, ir.Constant(_I32, i))
        mask = _bits(builder, _bits_between(builder, first, last))
        gathered = builder.select(mask, gathered, ir.Constant(gathered.type, None))
        return _widen(builder, p.dtype, gathered)

    return _reading(p)(p, *[types.int64] * 4), codegen


@register_jitable(inline="always")
def read(p, at, step, first, last):
    """p[at + lane * step] in the lanes from `first` to `last`, 0 in the others."""
    if step == 1:
        return read_some(p, at, first, last)
    if step == 2:
        return read_some_pairs(p, at, first, last)
    return _read_lanes(p, at, step, first, last)


@intrinsic
def _write_all(typingctx, p, at, v):
    def codegen(context, builder, signature, values):
        spot, _, size = _spot(context, builder, p, *values[:2])
        builder.store(_narrow(builder, p.dtype, values[2]), spot, align=size)
        return context.get_dummy_value()

    return types.void(p, types.int64, v), codegen


@intrinsic
def _write_some(typingctx, p, at, v, count):
    def codegen(context, builder, signature, values):
        spot, memory, size = _spot(context, builder, p, *values[:2])
        mask = _bits(builder, _bits_between(builder, ir.Constant(values[3].type, 0), values[3]))
        value = _narrow(builder, p.dtype, values[2])
        _masked(builder, "store", memory, [value, spot, ir.Constant(_I32, size), mask])
        return context.get_dummy_value()

    return types.void(p, types.int64, v, types.int64), codegen


@intrinsic
def _write_lanes(typingctx, p, at, step, v, count):
    def codegen(context, builder, signature, values):
        pointer, at, step, vector, count = values
        value = _narrow(builder, p.dtype, vector)
        with builder.goto_block(builder.function.entry_basic_block):
            kept = builder.alloca(value.type)
        builder.store(value, kept)
        elements = builder.bitcast(kept, value.type.element.as_pointer())
        with cgutils.for_range(builder, count) as loop:
            place = builder.gep(pointer, [builder.add(at, builder.mul(loop.index, step))])
            builder.store(builder.load(builder.gep(elements, [loop.index])), place)
        return context.get_dummy_value()

    return types.void(p, types.int64, types.int64, v, types.int64), codegen


@register_jitable(inline="always")
def write(p, at, step, v, count):
    """p[at + lane * step] = the lane of `v`, for the first `count` lanes."""
    if step == 1:
        if count == LANES:
            _write_all(p, at, v)
        else:
            _write_some(p, at, v, count)
    else:
        _write_lanes(p, at, step, v, count)


def _operation(result, arguments, emit):
    """An intrinsic on values: `result` and `arguments` give its types from those of the call."""

    def codegen(context, builder, signature, values):
        return emit(builder, *values)

    return result(*arguments), codegen


@intrinsic
def fill(typingctx, value):
    """`value` in every lane."""
    element = types.unliteral(value)
    return _operation(Vector(element), [element], _splat)


@intrinsic
def ramp(typingctx, start, step):
    """Whole numbers: start + lane * step."""
    element = types.unliteral(start)

    def emit(builder, first, by):
        lanes = ir.Constant(_vector(first.type), list(range(LANES)))
        return builder.add(_splat(builder, first), builder.mul(lanes, _splat(builder, by)))

    return _operation(Vector(element), [element, element], emit)


@intrinsic
def between(typingctx, first, last):
    """The mask of the lanes from `first` to `last`, 0 to 16."""
    return _operation(_MASK, [types.int64] * 2, lambda b, first, last: _bits(b, _bits_between(b, first, last)))


@intrinsic
def exceeds(typingctx, v, best):
    """Where v is larger than best or the first NaN."""

    def emit(builder, v, best):
        larger = builder.fcmp_unordered(">", v, best)
        return builder.and_(larger, builder.fcmp_ordered("ord", best, best))

    return _operation(_MASK, [v, best], emit)


@intrinsic
def negative(typingctx, v):
    """Where a vector of whole numbers is below zero."""
    return _operation(_MASK, [v], lambda b, v: b.icmp_signed("<", v, ir.Constant(v.type, None)))


@intrinsic
def equal(typingctx, v, w):
    """Where two vectors of whole numbers agree."""
    return _operation(_MASK, [v, w], lambda b, v, w: b.icmp_signed("==", v, w))


@intrinsic
def either(typingctx, m, n):
    return _operation(_MASK, [m, n], lambda b, m, n: b.or_(m, n))


@intrinsic
def both(typingctx, m, n):
    return _operation(_MASK, [m, n], lambda b, m, n: b.and_(m, n))


@intrinsic
def select(typingctx, mask, v, w):
    """Lanes of v where the mask is set, of w elsewhere."""
    return _operation(v, [mask, v, v], lambda b, mask, v, w: b.select(mask, v, w))


@intrinsic
def add(typingctx, v, w):
    def emit(builder, v, w):
        whole = isinstance(v.type.element, ir.IntType)
        return builder.add(v, w) if whole else builder.fadd(v, w)

    return _operation(v, [v, v], emit)


@intrinsic
def widen(typingctx, v):
    """int32 lanes as int64."""
    result = Vector(types.int64)
    return _operation(result, [v], lambda b, v: b.sext(v, _vector(ir.IntType(64))))


def _interleaved(start: int):
    @intrinsic
    def half(typingctx, v, w):
        order = [(start + i) // 2 + LANES * (i % 2) for i in range(LANES)]
        return _operation(v, [v, v], lambda b, v, w: b.shuffle_vector(v, w, _numbers(order)))

    return half


lower_half = _interleaved(0)  # v0 w0 v1 w1 ... of two vectors
upper_half = _interleaved(LANES)
