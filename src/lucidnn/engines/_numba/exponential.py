"""Exponentials, logarithms and sums along rows on the vectors of `vector`, for float32 and float64 lanes.

``exp`` and ``log`` of float32 are polynomials in registers, with errors of a few units in the last place; results of
``exp`` below the normal numbers are 0. The first is the Taylor series around the nearest multiple of log 2, the second
the series of the inverse hyperbolic tangent on 1/sqrt 2 to sqrt 2. Those of float64 are the C library's, lane by lane.
NaN comes out as NaN. Only in an `exact_kernel`: the order of operations matters.
"""

from __future__ import annotations

import math

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from . import vector
from .jit import jitable
from .vector import LANES, Vector, _numbers, _operation
from .vector_math import _FLOATS, _WHOLES, _Lanes, _polynomial

_SQRT_HALF_BITS = 0x3F3504F3
_WHOLE = 1.5 * 2.0**23  # a number of this size has no place for a fraction: adding it rounds


def _library(name: str):
    """A function of the C library on every lane of a float64 vector."""

    def emit(builder: ir.IRBuilder, v):
        function_type = ir.FunctionType(v.type, [v.type])
        full = f"llvm.{name}.v{LANES}f64"
        return builder.call(cgutils.get_or_insert_function(builder.module, function_type, full), [v])

    return emit


def _exp(builder: ir.IRBuilder, v):
    given = _Lanes(builder, v)
    shifted = given.fma(math.log2(math.e), _WHOLE)
    n = shifted - _WHOLE
    # log(2) in two parts, the first with so few bits that its product with n is exact
    r = n.fma(2.1219444005469057e-4, n.fma(-0.693359375, given))
    value = _polynomial(r, [1.0 / math.factorial(k) for k in range(7, -1, -1)])
    # The low bits of `shifted` are n: moved to the exponent's place and added they multiply by 2^n.
    power = builder.shl(builder.bitcast(shifted.value, _WHOLES), ir.Constant(_WHOLES, [23] * LANES))
    bits = builder.add(builder.bitcast(value.value, _WHOLES), power)
    value = _Lanes(builder, builder.bitcast(bits, _FLOATS))
    value = given.where(">=", -87.33, given.where("<=", 88.72, value, math.inf), given.where("<", 0.0, 0.0, given))
    return value.value


def _log(builder: ir.IRBuilder, v):
    def all_(number: int) -> ir.Constant:
        return ir.Constant(_WHOLES, [number] * LANES)

    bits = builder.bitcast(v, _WHOLES)
    exponent = builder.ashr(builder.sub(bits, all_(_SQRT_HALF_BITS)), all_(23))
    rest = builder.bitcast(builder.sub(bits, builder.shl(exponent, all_(23))), _FLOATS)
    f = _Lanes(builder, rest) - 1.0
    s = f / (f + 2.0)
    series = _polynomial(s * s, [1.0 / (2 * k + 1) for k in range(5, -1, -1)])
    whole = _Lanes(builder, builder.sitofp(exponent, _FLOATS))
    # log(2) in two parts, the first with so few bits that its product with the exponent is exact
    value = whole * 0.693359375 + (whole * -2.1219444005469057e-4 + 2.0 * s * series)
    given = _Lanes(builder, v)
    value = given.where("==", 0.0, -math.inf, value)
    value = given.where("==", math.inf, math.inf, value)
    return given.where(">=", 0.0, value, math.nan).value  # also what is below 0, and NaN


@intrinsic
def exp(typingctx, v):
    """The exponential of every lane."""
    return _operation(v, [v], _exp if v == Vector(types.float32) else _library("exp"))


@intrinsic
def log(typingctx, v):
    """The natural logarithm of every lane that is not subnormal; of 0 it is minus infinity."""
    return _operation(v, [v], _log if v == Vector(types.float32) else _library("log"))


@intrinsic
def subtract(typingctx, v, w):
    return _operation(v, [v, v], lambda b, v, w: b.fsub(v, w))


@intrinsic
def multiply(typingctx, v, w):
    return _operation(v, [v, v], lambda b, v, w: b.fmul(v, w))


@intrinsic
def divide(typingctx, v, w):
    return _operation(v, [v, v], lambda b, v, w: b.fdiv(v, w))


@intrinsic
def larger(typingctx, v, best):
    """Lanes of v where they are larger than those of best, which has no NaN; a NaN in v is passed over."""
    return _operation(v, [v, v], lambda b, v, w: b.select(b.fcmp_ordered(">", v, w), v, w))


@intrinsic
def is_value(typingctx, v, w):
    """The mask of equal lanes of two vectors of floats."""
    return _operation(Vector(types.boolean), [v, v], lambda b, v, w: b.fcmp_ordered("==", v, w))


@intrinsic
def nonzero(typingctx, v):
    """The mask of the lanes of a vector of whole numbers that are not 0."""
    return _operation(Vector(types.boolean), [v], lambda b, v: b.icmp_signed("!=", v, ir.Constant(v.type, None)))


def _folded(builder: ir.IRBuilder, v, combine):
    """Halves combined with halves, in one order on every machine, down to one lane."""
    width = LANES // 2
    while width:
        order = [(i + width) % LANES for i in range(LANES)]
        v = combine(v, builder.shuffle_vector(v, v, _numbers(order)))
        width //= 2
    return builder.extract_element(v, ir.Constant(ir.IntType(32), 0))


@intrinsic
def total(typingctx, v):
    """The sum of all lanes."""
    return _operation(v.element, [v], lambda b, v: _folded(b, v, b.fadd))


@intrinsic
def largest(typingctx, v):
    """The largest of all lanes, none of which is NaN."""
    return _operation(
        v.element, [v], lambda b, v: _folded(b, v, lambda a, c: b.select(b.fcmp_ordered(">", a, c), a, c))
    )


@jitable
def row_largest(x, at, count, start, least):
    """The largest of `count` neighbours and of the lanes of `start`, lane by lane; `least` holds minus infinity."""
    a, b, c, d = start, start, start, start
    whole = count // (4 * LANES) * (4 * LANES)
    for k in range(0, whole, 4 * LANES):
        a = larger(vector.read_all(x, at + k), a)
        b = larger(vector.read_all(x, at + k + LANES), b)
        c = larger(vector.read_all(x, at + k + 2 * LANES), c)
        d = larger(vector.read_all(x, at + k + 3 * LANES), d)
    for k in range(whole, count, LANES):
        a = larger(row_end(x, at + k, count - k, least), a)
    return larger(larger(a, b), larger(c, d))


@jitable
def row_end(x, at, left, least):
    """Sixteen neighbours; `least` in the lanes from `left` on, where there are fewer."""
    if left >= LANES:
        return vector.read_all(x, at)
    return vector.select(vector.between(0, left), vector.read_some(x, at, 0, left), least)


@jitable
def row_exponentials(x, at, count, most, start, least):
    """The sum of the exponentials of `count` neighbours less `most`, lane by lane, added to `start`."""
    a, b = start, subtract(most, most)
    whole = count // (2 * LANES) * (2 * LANES)
    for k in range(0, whole, 2 * LANES):
        a = vector.add(a, exp(subtract(vector.read_all(x, at + k), most)))
        b = vector.add(b, exp(subtract(vector.read_all(x, at + k + LANES), most)))
    for k in range(whole, count, LANES):
        a = vector.add(a, exp(subtract(row_end(x, at + k, count - k, least), most)))
    return vector.add(a, b)
