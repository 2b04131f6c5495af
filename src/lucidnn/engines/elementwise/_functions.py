"""Logarithm, circular functions, error function, power and remainder of float32 on vectors, for CPU kernels.

The C library computes them one value at a time, in 5 to 15 ns. Here sixteen lanes go through one polynomial, in float64
wherever float32 would lose more than the last place: the result is then rounded once, within 0.6 units in the last
place, subnormal results, infinities, NaN and signs of zero as in the C library. The logarithm stays in float32, within
one unit.

    unary(code, p, at, q, to, count)           q[to + i] = f(p[at + i]), the code of `MODES`; q may be p
    binary(code, p, at, r, by, q, to, count)   q[to + i] = f(p[at + i], r[by + i])

Methods: reduction of angles by multiples of pi in three parts (Cody and Waite 1980), whose products with multiples
below 2^20 are exact; past `FAR` a vector goes to the C library. erf(x) / x is a quotient of polynomials in x^2, fitted
on 0 to 3.95, beyond which it is 1. x^b is 2^(b log2 x). The remainder is x - b trunc(x / b), exact in float64 while the
quotient is below 2^27; other vectors, and what has no remainder, go to the C library. Polynomials interpolate at
Chebyshev's points.
"""

import functools
import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic, overload

from ...ops.elementwise import MODES
from .. import _numba as nb
from .._numba import vector as nv
from .._numba.vector_math import _FLOATS, _WHOLES, _exp, _Lanes, _polynomial, _switch

EXP, LOG, SIN, COS, TAN, ERF, POW, MOD = (
    MODES[name].code for name in ("exp", "log", "sin", "cos", "tan", "erf", "pow", "mod")
)
UNARY, BINARY = (EXP, LOG, SIN, COS, TAN, ERF), (POW, MOD)
FAR = np.float32(1e6)
QUOTIENT = np.float32(2.0**27)

_DOUBLES = ir.VectorType(ir.DoubleType(), nv.LANES)
_LONGS = ir.VectorType(ir.IntType(64), nv.LANES)
_BITS = ir.VectorType(ir.IntType(1), nv.LANES)
_PI = (float.fromhex("0x1.921fb544p+1"), float.fromhex("0x1.0b4611a6p-33"), float.fromhex("0x1.3198a2e037073p-68"))
_WHOLE = 1.5 * 2.0**52  # a float64 of this size has no place for a fraction: adding it rounds
_SQRT_HALF, _SQRT_HALF_LONG = 0x3F3504F3, 0x3FE6A09E667F3BCD
# Highest powers first; relative errors of the functions. sin on -pi/2 to pi/2, 1e-10, and to pi/4, 2e-11:
_SINE = (-2.40797139497972e-8, 2.75364429773019e-6, -1.98410862892288e-4, 8.33333276763359e-3, -0.166666666638743)
_SINE_NEAR = (2.7249772550112e-6, -1.98400855515161e-4, 8.333331872509758e-3, -0.16666666663849486)
# cos on -pi/4 to pi/4, 3e-10:
_COSINE_NEAR = (2.446362051157513e-5, -1.388758786142644e-3, 4.166665062056032e-2, -0.49999999969057773)
# (log(1 + f) - f + f^2 / 2) / f^3 for 1 + f on sqrt 1/2 to sqrt 2, 3e-9 of log(1 + f):
_LOG = (
    0.06971611444, -0.1147973381, 0.1168541992, -0.1242568734, 0.1424905765, -0.1666780232, 0.2000071575,
    -0.2499999696, 0.3333333118,
)  # fmt: skip
# log2(1 + f) / f there, 2e-11:
_LOG2 = (
    0.07553790408683, -0.1414478812885, 0.1449505308043, -0.1434903946241, 0.1587835681609, -0.1802710255753,
    0.206172832264, -0.2404543369769, 0.2885373943791, -0.3606736553155, 0.4808983601762, -0.7213475209632,
    1.442695040871,
)  # fmt: skip
# 2^r on -1/2 to 1/2, 3e-9:
_EXP2 = (
    1.54614446787212e-4, 1.340042817721e-3, 9.61805667857273e-3, 5.55032722667106e-2, 0.240226509222885,
    0.693147206702832, 1.0,
)  # fmt: skip
# erf(x) / x in x^2, 2e-9:
_ERF_ABOVE = (-1.29672565e-8, 4.64047561e-6, 3.7793816e-4, 3.84336545e-3, 5.4274773e-2, 0.185168828, 1.12837917)
_ERF_BELOW = (6.26928911e-5, 1.30406325e-3, 1.5443713e-2, 0.113910937, 0.49743501, 1.0)


class _Doubles(_Lanes):
    """The same lanes as float64."""

    def _of(self, other: Any) -> Any:
        return other.value if isinstance(other, _Lanes) else ir.Constant(_DOUBLES, [float(other)] * nv.LANES)

    def _emit(self, instruction: str, left: Any, right: Any) -> "_Doubles":
        return _Doubles(self.builder, getattr(self.builder, instruction)(self._of(left), self._of(right)))

    def _call(self, name: str, *operands: Any) -> "_Doubles":
        function_type = ir.FunctionType(_DOUBLES, [_DOUBLES] * len(operands))
        function = cgutils.get_or_insert_function(self.builder.module, function_type, f"{name}.v{nv.LANES}f64")
        return _Doubles(self.builder, self.builder.call(function, [self._of(v) for v in operands]))

    def where(self, comparison: str, other: Any, yes: Any, no: Any) -> "_Doubles":
        return _Doubles(self.builder, super().where(comparison, other, yes, no).value)


def _widened(v: _Lanes) -> Any:
    return _Doubles(v.builder, v.builder.fpext(v.value, _DOUBLES))


def _rounded(v: Any) -> _Lanes:
    return _Lanes(v.builder, v.builder.fptrunc(v.value, _FLOATS))


def _bits(v: Any) -> Any:
    return v.builder.bitcast(v.value, _LONGS if isinstance(v, _Doubles) else _WHOLES)


def _all(number: int, kind: ir.VectorType = _LONGS) -> ir.Constant:
    return ir.Constant(kind, [number] * nv.LANES)


def _reduced(v: Any, share: float, offset: float) -> tuple[Any, Any]:
    """How far v is past the nearest n + offset, n whole, in shares of pi, and integers as odd as n."""
    shifted = v.fma(1.0 / (share * math.pi), -offset) + _WHOLE
    n = shifted - _WHOLE + offset
    for part in _PI:
        v = n.fma(-share * part, v)
    return v, _bits(shifted)


def _sine(r: Any, odd: Any) -> _Lanes:
    """sin(r), of the other sign where `odd` is odd."""
    b, z = r.builder, r * r
    value = (r * z).fma(_polynomial(z, _SINE), r)
    turned = b.xor(_bits(value), b.shl(odd, _all(63)))
    return _rounded(_Doubles(b, b.bitcast(turned, _DOUBLES)))


def _sin(v: _Lanes) -> _Lanes:
    return _sine(*_reduced(_widened(v), 1.0, 0.0))


def _cos(v: _Lanes) -> _Lanes:
    r, n = _reduced(_widened(v), 1.0, 0.5)  # cos(r + pi / 2) = -sin(r)
    return _sine(r, v.builder.add(n, _all(1)))


def _tan(v: _Lanes) -> _Lanes:
    r, n = _reduced(_widened(v), 0.5, 0.0)
    b, z = r.builder, r * r
    sine = (r * z).fma(_polynomial(z, _SINE_NEAR), r)
    cosine = z.fma(_polynomial(z, _COSINE_NEAR), 1.0)
    odd = b.trunc(n, _BITS)  # tan(r + pi / 2) = -cos(r) / sin(r)
    above = b.select(odd, (-cosine).value, sine.value)
    below = b.select(odd, sine.value, cosine.value)
    return _rounded(_Doubles(b, above) / _Doubles(b, below))


def _log(v: _Lanes) -> _Lanes:
    b = v.builder
    bits = _bits(v.where("<", 2.0**-126, v * 2.0**24, v))
    exponent = b.ashr(b.sub(bits, _all(_SQRT_HALF, _WHOLES)), _all(23, _WHOLES))
    f = _Lanes(b, b.bitcast(b.sub(bits, b.shl(exponent, _all(23, _WHOLES))), _FLOATS)) - 1.0
    n = _Lanes(b, b.sitofp(exponent, _FLOATS))
    n = v.where("<", 2.0**-126, n - 24.0, n)
    square = f * f
    # log(2) in two parts, the first with so few bits that its product with n is exact
    small = (f * square).fma(_polynomial(f, _LOG), n * -2.1219444005469057e-4)
    value = n.fma(0.693359375, f + square.fma(-0.5, small))
    value = v.where(">", 0.0, v.where("==", math.inf, math.inf, value), math.nan)  # NaN also of NaN
    return v.where("==", 0.0, -math.inf, value)


def _erf(v: _Lanes) -> _Lanes:
    x = _widened(v.where(">", 3.95, 3.95, v.where("<", -3.95, -3.95, v)))
    z = x * x
    return _rounded(x * _polynomial(z, _ERF_ABOVE) / _polynomial(z, _ERF_BELOW))


def _log2(v: Any) -> Any:
    """Of a float64 that is not subnormal; infinities where it is 0 or infinite."""
    b, bits = v.builder, _bits(v)
    exponent = b.ashr(b.sub(bits, _all(_SQRT_HALF_LONG)), _all(52))
    f = _Doubles(b, b.bitcast(b.sub(bits, b.shl(exponent, _all(52))), _DOUBLES)) - 1.0
    n = _Doubles(b, b.sitofp(b.trunc(exponent, _WHOLES), _DOUBLES))
    value = f.fma(_polynomial(f, _LOG2), n)
    return v.where("==", 0.0, -math.inf, v.where("<", math.inf, value, v))


def _pow(x: _Lanes, y: _Lanes) -> _Lanes:
    b, power = x.builder, _widened(y)
    # Exponents past 1e30 are as good as infinite, but times a logarithm of 0 they are no NaN.
    power = power.where(">", 1e30, 1e30, power.where("<", -1e30, -1e30, power))
    t = power * _log2(_widened(abs(x)))
    t = t.where(">", 1000.0, 1000.0, t.where("<", -1000.0, -1000.0, t))
    shifted = t + _WHOLE
    value = _polynomial(t - (shifted - _WHOLE), _EXP2)
    scaled = b.add(_bits(value), b.shl(_bits(shifted), _all(52)))  # the low bits of `shifted` are a whole number
    value = _rounded(_Doubles(b, b.bitcast(scaled, _DOUBLES)))
    whole = y.floor()
    odd = y.where("==", whole, (y * 0.5).floor() * 2.0 - y, 0.0)  # -1 for odd ones; nothing past 2^24
    minus = odd.where("<", 0.0, math.copysign(1.0, -1.0), 0.0)
    sign = b.and_(_bits(x), b.and_(_bits(minus), _all(-(2**31), _WHOLES)))
    value = _Lanes(b, b.bitcast(b.or_(_bits(value), sign), _FLOATS))
    fraction = y.where("!=", whole, math.nan, value)
    value = x.where("<", 0.0, x.where(">", -math.inf, fraction, value), value)
    return y.where("==", 0.0, 1.0, x.where("==", 1.0, 1.0, value))


def _mod(x: _Lanes, y: _Lanes) -> _Lanes:
    u, w = _widened(x), _widened(y)
    rest = w._call("llvm.trunc", u / w).fma(-w, u)
    rest = rest._call("llvm.copysign", rest, u)  # a remainder of 0 has x's sign
    return _rounded(abs(w).where("==", math.inf, u, rest))


def _alone(formula):
    return lambda _parameter, v: formula(v)


_FORMULAS = {code: _alone(f) for code, f in zip(UNARY, (_exp, _log, _sin, _cos, _tan, _erf), strict=True)}
_FLOAT_VECTOR = nv.Vector(types.float32)


@intrinsic
def _value(typingctx, code, v):
    """The function of a code of `UNARY`, lane by lane."""

    def codegen(context, builder, signature, values):
        return _switch(builder, values[0], _FORMULAS, ir.Constant(ir.FloatType(), 0.0), values[1])

    return v(types.int64, v), codegen


def _of_two(formula):
    @intrinsic
    def function(typingctx, v, w):
        def codegen(context, builder, signature, values):
            return formula(*(_Lanes(builder, value) for value in values)).value

        return v(v, v), codegen

    return function


_power, _remainder = _of_two(_pow), _of_two(_mod)


def _any(builder, mask):
    return builder.icmp_unsigned("!=", builder.bitcast(mask, ir.IntType(nv.LANES)), ir.IntType(nv.LANES)(0))


@intrinsic
def _beyond(typingctx, v, limit):
    """Whether a lane is finite and its absolute value as large as the limit or larger."""

    def codegen(context, builder, signature, values):
        size = abs(_Lanes(builder, values[0])).value
        large = builder.fcmp_ordered(">=", size, nv._splat(builder, values[1]))
        finite = builder.fcmp_ordered("<", size, ir.Constant(_FLOATS, [math.inf] * nv.LANES))
        return _any(builder, builder.and_(large, finite))

    return types.boolean(v, types.float32), codegen


@intrinsic
def _exceeds(typingctx, v, w, times):
    """Whether the absolute value of a lane of v is that of w times a number, or larger."""

    def codegen(context, builder, signature, values):
        left, right = (abs(_Lanes(builder, value)).value for value in values[:2])
        right = builder.fmul(right, nv._splat(builder, values[2]))
        return _any(builder, builder.fcmp_ordered(">=", left, right))

    return types.boolean(v, v, types.float32), codegen


@functools.partial(nb.separate, exact=True)
def unary(code, p, at, q, to, count):
    """q[to + i] = f(p[at + i]) for float32; q may be p."""
    limit = FAR if (code == SIN) | (code == COS) | (code == TAN) else np.float32(np.inf)
    for i in range(0, count, nv.LANES):
        left = min(count - i, nv.LANES)
        v = nv.read_all(p, at + i) if left == nv.LANES else nv.read_some(p, at + i, 0, left)
        if _beyond(v, limit):
            for j in range(i, i + left):
                u = np.float64(p[at + j])
                u = math.sin(u) if code == SIN else math.cos(u) if code == COS else math.tan(u)
                q[to + j] = nb.cast(u, p[at + j])
        else:
            nv.write(q, to + i, 1, _value(code, v), left)


@functools.partial(nb.separate, exact=True)
def binary(code, p, at, r, by, q, to, count):
    """q[to + i] = f(p[at + i], r[by + i]) for float32; q may be p."""
    for i in range(0, count, nv.LANES):
        left = min(count - i, nv.LANES)
        v = nv.read_all(p, at + i) if left == nv.LANES else nv.read_some(p, at + i, 0, left)
        w = nv.read_all(r, by + i) if left == nv.LANES else nv.read_some(r, by + i, 0, left)
        if code == POW:
            nv.write(q, to + i, 1, _power(v, w), left)
        elif _exceeds(v, w, QUOTIENT):
            for j in range(i, i + left):
                rest = np.fmod(np.float64(p[at + j]), np.float64(r[by + j]))
                q[to + j] = nb.cast(rest, p[at + j])
        else:
            nv.write(q, to + i, 1, _remainder(v, w), left)


def functions(code, count, v):
    """v[i] = f(v[i]) of a buffer of any type, for the codes of `UNARY`. Kernels only."""
    raise NotImplementedError("works inside a kernel only")


@overload(functions)
def _functions(code, count, v):
    if v.dtype == types.float32:
        return lambda code, count, v: unary(code, v, 0, v, 0, count)

    def impl(code, count, v):
        for i in range(count):
            u = np.float64(v[i])
            if code == EXP:
                u = math.exp(u)
            elif code == LOG:
                u = np.log(u)
            elif code == SIN:
                u = math.sin(u)
            elif code == COS:
                u = math.cos(u)
            elif code == TAN:
                u = math.tan(u)
            else:
                u = math.erf(u)
            v[i] = nb.cast(u, v[0])

    return impl


def functions_of_two(code, count, v, w):
    """v[i] = f(v[i], w[i]) of buffers of any type, for the codes of `BINARY`. Kernels only."""
    raise NotImplementedError("works inside a kernel only")


@overload(functions_of_two)
def _functions_of_two(code, count, v, w):
    if v.dtype == types.float32:
        return lambda code, count, v, w: binary(code, v, 0, w, 0, v, 0, count)

    def impl(code, count, v, w):
        for i in range(count):
            x, y = np.float64(v[i]), np.float64(w[i])
            v[i] = nb.cast(math.pow(x, y) if code == POW else np.fmod(x, y), v[0])

    return impl
