"""The activations on vectors of sixteen float32 lanes, for CPU kernels that apply one to many values.

Numba calls the C library for an exponential, one value at a time. Here it is a polynomial in registers, and with it
the activations and their derivatives, in the formulas of `lucidnn.ops.activation` rearranged so that nothing
overflows and nothing cancels. Errors are a few units in the last place of 1 + |result|. NaN comes out as NaN.

    v = vm.activate(code, p, v)            codes and parameters as in `epilogue`
    dx = vm.activate_grad(code, p, x, dy)

Only in an `exact_kernel`: the order of operations matters. The code is looked at once a vector.

Methods: exp by reduction to |r| <= log(2)/2 and its Taylor polynomial, tanh by the continued fraction
x/(1+z/(3+z/(5+z/(7+z/9)))) near 0 and by exp elsewhere, log(1+t) by the series of the inverse hyperbolic tangent, the
normal distribution by exp(-v^2/2) times a polynomial in 1/(1 + 0.4 |v|/sqrt 2), fitted to the scaled complementary
error function.
"""

from __future__ import annotations

import math
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from .vector import LANES, Vector

_FLOATS = ir.VectorType(ir.FloatType(), LANES)
_WHOLES = ir.VectorType(ir.IntType(32), LANES)
_SQRT_2_OVER_PI = math.sqrt(2.0 / math.pi)
_CUBIC = 0.044715
# erfcx(z) / t as a polynomial in t = 1 / (1 + 0.4 z), highest power first; relative error 7e-9.
_TAIL = (
    -0.02950643242, 0.1419267057, -0.2387361998, 0.1414354672, -0.04974414361, 0.08522816024, 0.1186341236,
    0.1718023453, 0.2076080536, 0.2256760808, 0.2256758327,
)  # fmt: skip


class _Lanes:
    """A vector while its formula is being written: operators emit instructions."""

    def __init__(self, builder: ir.IRBuilder, value: Any):
        self.builder, self.value = builder, value

    def _of(self, other: Any) -> Any:
        return other.value if isinstance(other, _Lanes) else ir.Constant(_FLOATS, [float(other)] * LANES)

    def _emit(self, instruction: str, left: Any, right: Any) -> _Lanes:
        return _Lanes(self.builder, getattr(self.builder, instruction)(self._of(left), self._of(right)))

    def __add__(self, other: Any) -> _Lanes:
        return self._emit("fadd", self, other)

    def __sub__(self, other: Any) -> _Lanes:
        return self._emit("fsub", self, other)

    def __mul__(self, other: Any) -> _Lanes:
        return self._emit("fmul", self, other)

    def __truediv__(self, other: Any) -> _Lanes:
        return self._emit("fdiv", self, other)

    def __rsub__(self, other: Any) -> _Lanes:
        return self._emit("fsub", other, self)

    def __rtruediv__(self, other: Any) -> _Lanes:
        return self._emit("fdiv", other, self)

    def __neg__(self) -> _Lanes:
        return self * -1.0

    __radd__, __rmul__ = __add__, __mul__

    def __abs__(self) -> _Lanes:
        return self._call("llvm.fabs", self)

    def _call(self, name: str, *operands: Any) -> _Lanes:
        function_type = ir.FunctionType(_FLOATS, [_FLOATS] * len(operands))
        name = f"{name}.v{LANES}f32"
        function = cgutils.get_or_insert_function(self.builder.module, function_type, name)
        return _Lanes(self.builder, self.builder.call(function, [self._of(v) for v in operands]))

    def where(self, comparison: str, other: Any, yes: Any, no: Any) -> _Lanes:
        """`yes` where the comparison holds, `no` elsewhere and for NaN."""
        mask = self.builder.fcmp_ordered(comparison, self.value, self._of(other))
        return _Lanes(self.builder, self.builder.select(mask, self._of(yes), self._of(no)))

    def floor(self) -> _Lanes:
        return self._call("llvm.floor", self)

    def fma(self, factor: Any, term: Any) -> _Lanes:
        """This times `factor` plus `term`, rounded once where the processor can."""
        return self._call("llvm.fmuladd", self, factor, term)


def _polynomial(v: _Lanes, coefficients: Any) -> _Lanes:
    """Highest power first."""
    first, *rest = coefficients
    value: Any = first
    for c in rest:
        value = v * value + c if isinstance(value, float) else value.fma(v, c)
    return value


def _exp(v: _Lanes) -> _Lanes:
    v = v.where(">", 110.0, 110.0, v.where("<", -110.0, -110.0, v))
    n = (v * math.log2(math.e) + 0.5).floor()
    # log(2) in two parts, the first with so few bits that its product with n is exact
    r = n.fma(2.1219444005469057e-4, n.fma(-0.693359375, v))
    value = _polynomial(r, [1.0 / math.factorial(k) for k in range(7, -1, -1)])
    b = v.builder
    whole = b.fptosi(n.where("==", n, n, 0.0).value, _WHOLES)  # a NaN has no whole number
    half = b.ashr(whole, ir.Constant(_WHOLES, [1] * LANES))
    for power in (half, b.sub(whole, half)):  # 2^n in two steps reaches the smallest and the largest numbers
        bits = b.shl(b.add(power, ir.Constant(_WHOLES, [127] * LANES)), ir.Constant(_WHOLES, [23] * LANES))
        value = value * _Lanes(b, b.bitcast(bits, _FLOATS))
    return value


def _tanh(v: _Lanes) -> _Lanes:
    z = v * v
    near = v * (z * (z + 105.0) + 945.0) / (z * (z * 15.0 + 420.0) + 945.0)
    e = _exp(abs(v) * -2.0)
    far = (1.0 - e) / (1.0 + e)
    return abs(v).where("<", 0.625, near, v.where("<", 0.0, -far, far))


def _sech2(v: _Lanes) -> _Lanes:
    """1 - tanh(v)^2."""
    e = _exp(abs(v) * -2.0)
    return 4.0 * e / ((1.0 + e) * (1.0 + e))


def _sigmoid(v: _Lanes) -> _Lanes:
    return 1.0 / (1.0 + _exp(-v))


def _expm1(v: _Lanes) -> _Lanes:
    half = _tanh(v * 0.5)
    return abs(v).where("<", 1.0, 2.0 * half / (1.0 - half), _exp(v) - 1.0)


def _softplus(v: _Lanes) -> _Lanes:
    t = _exp(-abs(v))
    s = t / (t + 2.0)
    series = _polynomial(s * s, [1.0 / (2 * k + 1) for k in range(7, -1, -1)])
    return v.where("<=", 0.0, 0.0, v) + 2.0 * s * series


def _normal(v: _Lanes) -> tuple[_Lanes, _Lanes]:
    """The normal distribution up to v, and exp(-v^2 / 2)."""
    square = v * v
    lost = v.fma(v, -square)  # what rounding took from the square
    bell = _exp(square * -0.5) * (1.0 - 0.5 * abs(lost).where("<", 1.0, lost, 0.0))
    t = 1.0 / (1.0 + abs(v) * (0.4 * math.sqrt(0.5)))
    tail = 0.5 * bell * t * _polynomial(t, _TAIL)
    return v.where(">", 0.0, 1.0 - tail, tail), bell


def _gelu_inner(v: _Lanes) -> _Lanes:
    return (v + v * v * v * _CUBIC) * _SQRT_2_OVER_PI


def _gelu_tanh_grad(p: Any, v: _Lanes) -> _Lanes:
    near = v.where(">", 12.0, 12.0, v.where("<", -12.0, -12.0, v))  # farther out it is 1 or 0
    u = _gelu_inner(near)
    slope = (1.0 + near * near * (3.0 * _CUBIC)) * _SQRT_2_OVER_PI
    return 0.5 * (1.0 + _tanh(u)) + 0.5 * near * _sech2(u) * slope


def _silu_grad(p: Any, v: _Lanes) -> _Lanes:
    s = _sigmoid(v)
    return s * (1.0 + v * _sigmoid(-v))


def _sigmoid_grad(p: Any, v: _Lanes) -> _Lanes:
    e = _exp(-abs(v))
    return e / ((1.0 + e) * (1.0 + e))


def _gelu_grad(p: Any, v: _Lanes) -> _Lanes:
    below, bell = _normal(v)
    return below + v * bell * (0.5 * math.sqrt(2.0 / math.pi))


def _mish_parts(v: _Lanes) -> tuple[_Lanes, _Lanes]:
    """exp(v), e say, and n = e^2 + 2 e; tanh(log(1 + e)) is n / (n + 2)."""
    e = _exp(v.where(">", 20.0, 20.0, v))
    return e, e * (e + 2.0)


def _mish(p: Any, v: _Lanes) -> _Lanes:
    _, n = _mish_parts(v)
    return v * (n / (n + 2.0))


def _mish_grad(p: Any, v: _Lanes) -> _Lanes:
    e, n = _mish_parts(v)
    v = v.where(">", 20.0, 20.0, v.where("<", -100.0, -100.0, v))  # beyond, the second term is 0
    return n / (n + 2.0) + v * (4.0 * (n + 1.0) / ((n + 2.0) * (n + 2.0))) * (e / (e + 1.0))


_VALUES = {
    4: lambda p, v: v.where(">", 0.0, v, _expm1(v) * p),
    5: lambda p, v: _sigmoid(v),
    6: lambda p, v: _tanh(v),
    7: lambda p, v: v * _sigmoid(v),
    8: lambda p, v: v * _normal(v)[0],
    9: lambda p, v: 0.5 * v * (1.0 + _tanh(_gelu_inner(v))),
    10: lambda p, v: _softplus(v),
    13: _mish,
}
_SLOPES = {
    4: lambda p, v: v.where(">", 0.0, 1.0, _exp(v) * p),
    5: _sigmoid_grad,
    6: lambda p, v: _sech2(v),
    7: _silu_grad,
    8: _gelu_grad,
    9: _gelu_tanh_grad,
    10: lambda p, v: _sigmoid(v),
    13: _mish_grad,
}
CODES = tuple(_VALUES)


def _switch(builder: ir.IRBuilder, code: Any, formulas: dict, p: Any, v: Any) -> Any:
    """The formula of a code that is known at run time only; 0 for a code that has none here."""
    start, done = builder.block, builder.append_basic_block("done")
    choice = builder.switch(code, done)
    results = [(start, ir.Constant(_FLOATS, None))]
    for number, formula in formulas.items():
        block = builder.append_basic_block(f"activation_{number}")
        choice.add_case(ir.Constant(code.type, number), block)
        builder.position_at_end(block)
        undefined = ir.Constant(_FLOATS, ir.Undefined)
        spread = builder.insert_element(undefined, p, ir.Constant(ir.IntType(32), 0))
        spread = builder.shuffle_vector(spread, undefined, ir.Constant(_WHOLES, [0] * LANES))
        value = formula(_Lanes(builder, spread), _Lanes(builder, v)).value
        results.append((builder.block, value))
        builder.branch(done)
    builder.position_at_end(done)
    merged = builder.phi(_FLOATS)
    for block, value in results:
        merged.add_incoming(value, block)
    return merged


@intrinsic
def activate(typingctx, code, p, v):
    """The activation `code`, one of `CODES`, with parameter `p` on a vector of float32."""
    if v != Vector(types.float32):
        return None

    def codegen(context, builder, signature, values):
        return _switch(builder, values[0], _VALUES, *values[1:])

    return v(types.int64, types.float32, v), codegen


@intrinsic
def activate_grad(typingctx, code, p, x, dy):
    """`dy` times the derivative of activation `code`, one of `CODES`, at `x`."""
    if x != Vector(types.float32):
        return None

    def codegen(context, builder, signature, values):
        slope = _switch(builder, values[0], _SLOPES, *values[1:3])
        return builder.fmul(values[3], slope)

    return x(types.int64, types.float32, x, x), codegen
