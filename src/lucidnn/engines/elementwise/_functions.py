"""Formulas of elementwise modes on sixteen lanes of float32, for the CPU kernels of ``_neighbours.py``.

The C library computes logarithm, circular functions, error function, power and remainder one value at a time, in 5 to
15 ns. Here sixteen lanes go through one polynomial, in float64 wherever float32 would lose more than the last place:
the result is then rounded once, within 0.6 units in the last place; subnormal results, infinities, NaN and zeros are
as in the C library. The logarithm stays in float32, within one unit.

Methods: reduction of angles by multiples of pi in three parts (Cody and Waite 1980), whose products with multiples
below 2^20 are exact; angles past `FAR` are for the C library. erf(x) / x is a quotient of polynomials in x^2, fitted
on 0 to 3.95, beyond which it is 1. x^b is 2^(b log2 x). The remainder is x - b trunc(x / b), exact in float64 while the
quotient is below `QUOTIENT`; the rest, and what has no remainder, is for the C library. Polynomials interpolate at
Chebyshev's points.
"""

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils

from .._numba import vector as nv
from .._numba.vector_math import _FLOATS, _WHOLES, _exp, _Lanes, _polynomial

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


def _sqrt(v: _Lanes) -> _Lanes:
    return v._call("llvm.sqrt", v)


def _chosen(comparison: str) -> Any:
    """Of two vectors: v where the comparison with w holds or v is NaN, else w."""

    def formula(v: _Lanes, w: _Lanes) -> _Lanes:
        return v.where(comparison, w, v, v.where("ord", v, w, v))

    return formula


UNARY = {
    "exp": _exp,
    "log": _log,
    "sin": _sin,
    "cos": _cos,
    "tan": _tan,
    "erf": _erf,
    "abs": abs,
    "neg": lambda v: -v,
    "floor": lambda v: v.floor(),
    "ceil": lambda v: v._call("llvm.ceil", v),
    "sqrt": _sqrt,
    "rsqrt": lambda v: 1.0 / _sqrt(v),
    "reciprocal": lambda v: 1.0 / v,
}
BINARY = {
    "add": lambda v, w: v + w,
    "sub": lambda v, w: v - w,
    "mul": lambda v, w: v * w,
    "div": lambda v, w: v / w,
    "min": _chosen("<"),
    "max": _chosen(">"),
    "pow": _pow,
    "mod": _mod,
}
# LLVM's comparisons and whether NaN counts as true.
COMPARISONS = {
    "cmp_eq": ("==", False),
    "cmp_neq": ("!=", True),
    "cmp_gt": (">", False),
    "cmp_ge": (">=", False),
    "cmp_lt": ("<", False),
    "cmp_le": ("<=", False),
}
