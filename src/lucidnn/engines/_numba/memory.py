"""Memory access for CPU kernels: typed pointers from addresses, and the 16-bit floats.

Numba has no bfloat16 and no complete float16 on the CPU. A kernel sees such memory as 16-bit integers:
``uint16`` stands for float16 and ``int16`` for bfloat16 (no operation of this package has integers of that
width), and ``load`` and ``store`` convert to and from float32, rounding to nearest even, NaN kept. For all
other types they are plain reads and writes. The conversions compile to vector instructions where the
processor has them.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.core.registry import cpu_target
from numba.extending import intrinsic, overload, register_jitable

_TOKENS = {
    "f64": np.float64(0),
    "f32": np.float32(0),
    "f16": np.uint16(0),
    "bf16": np.int16(0),
    "i32": np.int32(0),
    "i64": np.int64(0),
    "i8": np.int8(0),
    "u8": np.uint8(0),
    "bool": np.uint8(0),
}


def token(dtype: str) -> np.generic:
    """The scalar that stands for `dtype` (``"f32"``, ``"bf16"``, ...) in a kernel's arguments."""
    return _TOKENS[dtype]


@intrinsic
def pointer(typingctx, address, like):
    """A pointer to elements of `like`'s type at `address`; index it as ``p[i]``, without bounds."""
    if not isinstance(address, types.Integer):
        return None
    target = types.CPointer(types.unliteral(like))

    def codegen(context, builder, signature, values):
        return builder.inttoptr(values[0], context.get_value_type(target))

    return target(address, like), codegen


@intrinsic
def address(typingctx, p):
    """The address that a pointer holds, as an integer."""

    def codegen(context, builder, signature, values):
        return builder.ptrtoint(values[0], ir.IntType(64))

    return types.int64(p), codegen


@intrinsic
def prefetch(typingctx, p, at):
    """Start to bring the cache line of element `at` nearer, which need not exist; nothing waits for it."""

    def codegen(context, builder, signature, values):
        line = builder.bitcast(builder.gep(values[0], [values[1]]), ir.IntType(8).as_pointer())
        facts = [ir.Constant(ir.IntType(32), fact) for fact in (0, 3, 1)]  # to read; to the nearest cache; data
        kind = ir.FunctionType(ir.VoidType(), [line.type, *(fact.type for fact in facts)])
        builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0"), [line, *facts])
        return context.get_dummy_value()

    return types.void(p, types.int64), codegen


@intrinsic
def size_of(typingctx, like):
    """Bytes of an element of `like`'s type, a constant to the compiler."""
    kind = types.unliteral(like)

    def codegen(context, builder, signature, values):
        return context.get_constant(types.int64, kind.bitwidth // 8)

    return types.int64(like), codegen


@intrinsic
def same_type(typingctx, left, right):
    """Whether two tokens are of one type, a constant to the compiler."""
    answer = types.unliteral(left) == types.unliteral(right)

    def codegen(context, builder, signature, values):
        return context.get_constant(types.boolean, answer)

    return types.boolean(left, right), codegen


@intrinsic
def cast(typingctx, value, like):
    """`value` converted to the type of `like`: a Python constant would otherwise widen float32 to float64."""
    target = types.unliteral(like)

    def codegen(context, builder, signature, values):
        return context.cast(builder, values[0], signature.args[0], signature.return_type)

    return target(value, like), codegen


@intrinsic
def _half_to_float(typingctx, bits):
    def codegen(context, builder, signature, values):
        return builder.fpext(builder.bitcast(values[0], ir.HalfType()), ir.FloatType())

    return types.float32(types.uint16), codegen


@intrinsic
def _float_to_half(typingctx, value):
    def codegen(context, builder, signature, values):
        return builder.bitcast(builder.fptrunc(values[0], ir.HalfType()), ir.IntType(16))

    return types.uint16(types.float32), codegen


@intrinsic
def _float_bits(typingctx, value):
    def codegen(context, builder, signature, values):
        return builder.bitcast(values[0], ir.IntType(32))

    return types.uint32(types.float32), codegen


@intrinsic
def _bits_float(typingctx, bits):
    def codegen(context, builder, signature, values):
        return builder.bitcast(values[0], ir.FloatType())

    return types.float32(types.uint32), codegen


def converts_half() -> bool:
    """Whether the processor itself converts float16; elsewhere LLVM would call a library that is not there."""
    triple, _, features = cpu_target.target_context.codegen().magic_tuple()
    return "+f16c" in features.split(",") or triple.startswith(("aarch64", "arm64"))


@register_jitable
def _half_to_float_by_bits(bits):
    h = np.uint32(np.uint16(bits))
    # The half's exponent and fraction, put where a float has them, are the value times 2**-112, subnormals included.
    magnitude = (h & np.uint32(0x7FFF)) << np.uint32(13)
    value = _float_bits(_bits_float(magnitude) * np.float32(2.0**112))
    if (h & np.uint32(0x7C00)) == np.uint32(0x7C00):
        value = magnitude | np.uint32(0x7F800000)
    return _bits_float(value | ((h & np.uint32(0x8000)) << np.uint32(16)))


@register_jitable
def _float_to_half_by_bits(value):
    bits = _float_bits(value)
    magnitude = bits & np.uint32(0x7FFFFFFF)
    if magnitude > np.uint32(0x7F800000):
        half = np.uint32(0x7E00) | ((magnitude >> np.uint32(13)) & np.uint32(0x3FF))
    elif magnitude >= np.uint32(0x47800000):
        half = np.uint32(0x7C00)
    elif magnitude < np.uint32(0x38800000):
        # Adding a half pushes the fraction down to units of 2**-24, and the addition rounds to nearest even.
        half = _float_bits(_bits_float(magnitude) + np.float32(0.5)) - np.uint32(0x3F000000)
    else:
        odd = (magnitude >> np.uint32(13)) & np.uint32(1)
        half = (magnitude - np.uint32(112 << 23) + np.uint32(0xFFF) + odd) >> np.uint32(13)
    return np.uint16(half | ((bits >> np.uint32(16)) & np.uint32(0x8000)))


@register_jitable
def _bfloat_to_float(bits):
    return _bits_float(np.uint32(np.uint32(np.uint16(bits)) << np.uint32(16)))


@register_jitable
def _float_to_bfloat(value):
    bits = _float_bits(value)
    # Adding half a unit, less one where the kept part is even, rounds to nearest even; NaN must not overflow.
    rounded = np.uint32(bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    quiet = (bits >> np.uint32(16)) | np.uint32(0x40)
    return np.int16(np.uint16(quiet if value != value else rounded))


@register_jitable
def _nearest(value, low, high):
    """The nearest whole number, halves to even, within limits; 0 for NaN, which fails every comparison."""
    value = np.rint(value)
    return high if value > high else (value if value >= low else (low if value < low else 0.0))


def load(p, i):
    """``p[i]``, a 16-bit float widened to float32. Kernels only."""
    raise NotImplementedError("load works inside a kernel only")


def store(p, i, value):
    """``p[i] = value``, rounded to `p`'s type. Kernels only."""
    raise NotImplementedError("store works inside a kernel only")


def accumulator(like):
    """Zero in the type that sums elements of `like`: float32 for 16-bit floats. Kernels only."""
    raise NotImplementedError("accumulator works inside a kernel only")


def _element(p):
    return p.dtype


@overload(load, inline="always")
def _load(p, i):
    if _element(p) == types.uint16:
        return (lambda p, i: _half_to_float(p[i])) if converts_half() else (lambda p, i: _half_to_float_by_bits(p[i]))
    if _element(p) == types.int16:
        return lambda p, i: _bfloat_to_float(p[i])
    return lambda p, i: p[i]


@overload(store, inline="always")
def _store(p, i, value):
    element = _element(p)
    if element == types.uint16 and converts_half():

        def impl(p, i, value):
            p[i] = _float_to_half(np.float32(value))
    elif element == types.uint16:

        def impl(p, i, value):
            p[i] = _float_to_half_by_bits(np.float32(value))
    elif element == types.int16:

        def impl(p, i, value):
            p[i] = _float_to_bfloat(np.float32(value))
    elif element in (types.int8, types.int32) and isinstance(value, types.Float):
        low, high = (-128.0, 127.0) if element == types.int8 else (-2147483648.0, 2147483647.0)

        def impl(p, i, value):
            p[i] = cast(_nearest(float(value), low, high), p[i])
    else:

        def impl(p, i, value):
            p[i] = value

    return impl


@overload(accumulator, inline="always")
def _accumulator(like):
    kind = types.unliteral(like)
    if kind in (types.uint16, types.int16):
        return lambda like: np.float32(0)
    return lambda like: cast(0, like)
