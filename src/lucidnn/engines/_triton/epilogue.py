"""Activations and the common epilogue ``act(alpha * acc + beta * z + bias)`` as Triton device functions.

Codes, formulas and the meaning of the parameter p are those of the table in `lucidnn.ops.activation`.  At a
kink the derivative is the framework's: 0 for relu at 0, for clipped_relu at 0 and p, for hardsigmoid at both
ends.

Everything is computed in the type of `v`, float32 or float64.  NaN comes out as NaN: every ``tl.where`` is
written so that a NaN, for which all comparisons are false, falls through to the value itself.  The language
has no tanh, expm1 or log1p on every backend, so they are built here: tanh from its Padé approximant near 0
(where ``1 - exp`` would cancel) and from exp elsewhere, expm1 from tanh, log1p from the series of the inverse
hyperbolic tangent.  Errors are a few units in the last place of float32 (of float64 for float64); gelu alone
loses relative, not absolute, accuracy far on the negative side.
"""

import math

import triton
import triton.language as tl

# module constants stand to the right of a tensor: the interpreter cannot multiply them from the left
_SQRT_HALF = tl.constexpr(math.sqrt(0.5))
_INV_SQRT_2PI = tl.constexpr(1.0 / math.sqrt(2.0 * math.pi))
_SQRT_2_OVER_PI = tl.constexpr(math.sqrt(2.0 / math.pi))
_GELU_CUBIC = tl.constexpr(0.044715)


@triton.jit
def tanh(v):
    size = tl.abs(v)
    z = v * v
    if v.dtype == tl.float64:  # the approximants are the continued fraction x/(1+z/(3+z/(5+...))) cut off
        top = 34459425.0 + z * (4729725.0 + z * (135135.0 + z * (990.0 + z)))
        bottom = 34459425.0 + z * (16216200.0 + z * (945945.0 + z * (13860.0 + z * 45.0)))
    else:
        top = 945.0 + z * (105.0 + z)
        bottom = 945.0 + z * (420.0 + z * 15.0)
    e = tl.exp(-2.0 * size)
    far = (1.0 - e) / (1.0 + e)
    return tl.where(size < 0.625, v * top / bottom, tl.where(v < 0, -far, far))


@triton.jit
def sigmoid(v):
    return 1.0 / (1.0 + tl.exp(-v))


@triton.jit
def expm1(v):
    half = tanh(0.5 * v)
    return tl.where(tl.abs(v) < 1.0, 2.0 * half / (1.0 - half), tl.exp(v) - 1.0)


@triton.jit
def softplus(v):
    """log(1 + exp(v)) without overflow: max(v, 0) + log1p(exp(-abs(v)))."""
    t = tl.exp(-tl.abs(v))
    s = t / (2.0 + t)  # log1p(t) = 2 artanh(s), s at most 1/3
    z = s * s
    TERMS: tl.constexpr = 17 if v.dtype == tl.float64 else 8
    series = z * 0.0
    for k in tl.static_range(TERMS):
        series = series * z + 1.0 / (2 * (TERMS - 1 - k) + 1)
    return tl.where(v > 0, v, 0.0) + 2.0 * s * series


@triton.jit
def _clamp_3(v):
    """min(max(v + 3, 0), 6), NaN kept."""
    t = v + 3.0
    return tl.where(t <= 0, 0.0, tl.where(t >= 6, 6.0, t))


@triton.jit
def _gelu_tanh_inner(v):
    return tanh((v + v * v * v * _GELU_CUBIC) * _SQRT_2_OVER_PI)


@triton.jit
def _tanh_softplus(v):
    """tanh(log(1 + e)) = (e^2 + 2 e) / (e^2 + 2 e + 2) with e = exp(v); 1 to rounding beyond 20."""
    e = tl.exp(tl.where(v > 20.0, 20.0, v))
    n = e * (e + 2.0)
    return tl.where(v > 20.0, 1.0, n / (n + 2.0))


@triton.jit
def activate(v, ACT: tl.constexpr, p):
    """The activation of code `ACT` with parameter `p` at `v` (float32 or float64)."""
    if ACT == 0:
        r = v
    elif ACT == 1:
        r = tl.where(v <= 0, 0.0, v)
    elif ACT == 2:
        r = tl.where(v <= 0, 0.0, tl.where(v >= p, p, v))
    elif ACT == 3:
        r = tl.where(v > 0, v, p * v)
    elif ACT == 4:
        r = tl.where(v > 0, v, p * expm1(v))
    elif ACT == 5:
        r = sigmoid(v)
    elif ACT == 6:
        r = tanh(v)
    elif ACT == 7:
        r = v * sigmoid(v)
    elif ACT == 8:
        r = 0.5 * v * (1.0 + tl.erf(v * _SQRT_HALF))
    elif ACT == 9:
        r = 0.5 * v * (1.0 + _gelu_tanh_inner(v))
    elif ACT == 10:
        r = softplus(v)
    elif ACT == 11:
        r = v * (_clamp_3(v) / 6.0)
    elif ACT == 12:
        r = _clamp_3(v) / 6.0
    else:
        tl.static_assert(ACT == 13, "unknown activation code")
        r = v * _tanh_softplus(v)
    return r.to(v.dtype)


@triton.jit
def activate_grad(x, dy, ACT: tl.constexpr, p):
    """`dy` times the derivative of the activation at its input `x`; both float32 or both float64."""
    if ACT == 0:
        r = dy
    elif ACT == 1:
        r = tl.where(x <= 0, 0.0, dy)
    elif ACT == 2:
        r = tl.where((x <= 0) | (x >= p), 0.0, dy)
    elif ACT == 3:
        r = tl.where(x > 0, dy, p * dy)
    elif ACT == 4:
        r = tl.where(x > 0, dy, dy * p * tl.exp(x))
    elif ACT == 5:
        s = sigmoid(x)
        r = dy * s * (1.0 - s)
    elif ACT == 6:
        t = tanh(x)
        r = dy * (1.0 - t * t)
    elif ACT == 7:
        s = sigmoid(x)
        r = dy * s * (1.0 + x * (1.0 - s))
    elif ACT == 8:
        cdf = 0.5 * (1.0 + tl.erf(x * _SQRT_HALF))
        r = dy * (cdf + x * _INV_SQRT_2PI * tl.exp(-0.5 * x * x))
    elif ACT == 9:
        t = _gelu_tanh_inner(x)
        inner = (1.0 + x * x * _GELU_CUBIC * 3.0) * _SQRT_2_OVER_PI
        r = dy * (0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * inner)
    elif ACT == 10:
        r = dy * sigmoid(x)
    elif ACT == 11:
        r = tl.where(x <= -3, 0.0, tl.where(x >= 3, dy, dy * (x / 3.0 + 0.5)))
    elif ACT == 12:
        r = tl.where((x <= -3) | (x >= 3), 0.0, dy / 6.0)
    else:
        tl.static_assert(ACT == 13, "unknown activation code")
        t = _tanh_softplus(x)
        r = dy * (t + x * (1.0 - t * t) * sigmoid(x))
    return r.to(x.dtype)


@triton.jit
def finish(acc, z, bias, alpha, beta, p, ACT: tl.constexpr):
    """``act(alpha * acc + beta * z + bias)`` in the accumulator's type.

    `z`, `bias`, `alpha` and `beta` may each be None, which leaves the term (or, for `alpha` and `beta`, the
    factor) out; `z` and `bias` only have to broadcast against `acc`.
    """
    r = acc
    if alpha is not None:
        r = r * alpha
    if z is not None:
        zz = z.to(acc.dtype)
        if beta is not None:
            zz = zz * beta
        r = r + zz
    if bias is not None:
        r = r + bias.to(acc.dtype)
    return activate(r, ACT, p)


@triton.jit
def convert(v, TYPE: tl.constexpr):
    """`v` in another type. Between float64 and the 16-bit types the way goes through float32."""
    if v.dtype.primitive_bitwidth == 16 or TYPE.primitive_bitwidth == 16:
        v = v.to(tl.float32)
    return v.to(TYPE)


@triton.jit
def _nearest(v, LOW: tl.constexpr, HIGH: tl.constexpr):
    """Nearest whole number, halves to even, within limits; 0 for NaN."""
    v = tl.where(v < LOW, LOW, tl.where(v > HIGH, HIGH, tl.where(v == v, v, 0.0)))
    low = tl.floor(v)
    rest = v - low
    odd = low - 2.0 * tl.floor(low * 0.5)
    return low + tl.where((rest > 0.5) | ((rest == 0.5) & (odd != 0.0)), 1.0, 0.0)


@triton.jit
def stored(v, type):
    """A float32 or float64 result in the type that it is stored in; 8-bit types are cut off at their limits."""
    if type == tl.int8:
        v = _nearest(v, -128.0, 127.0)
    elif type == tl.int32:
        v = _nearest(v, -2147483648.0, 2147483647.0)
    elif type == tl.float8e4nv:
        v = tl.where(v > 448.0, 448.0, tl.where(v < -448.0, -448.0, v))
    elif type == tl.float8e5:
        v = tl.where(v > 57344.0, 57344.0, tl.where(v < -57344.0, -57344.0, v))
    return v.to(type)
