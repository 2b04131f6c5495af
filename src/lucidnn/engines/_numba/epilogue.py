"""The activations of `lucidnn.ops.activation` for CPU kernels: value and derivative by code.

=============  ====  ===============================================  ==================
name           code  value at v (parameter p)                         p, the framework's default
=============  ====  ===============================================  ==================
identity       0     v
relu           1     max(v, 0)
clipped_relu   2     min(max(v, 0), p)                                ceiling, 6
leaky_relu     3     v if v > 0 else p v                              slope, 0.01
elu            4     v if v > 0 else p (exp(v) - 1)                   alpha, 1
sigmoid        5     1 / (1 + exp(-v))
tanh           6     tanh(v)
silu           7     v sigmoid(v)
gelu           8     v (1 + erf(v / sqrt 2)) / 2
gelu_tanh      9     v (1 + tanh(sqrt(2/pi) (v + 0.044715 v^3))) / 2
softplus       10    log(1 + exp(v))
hardswish      11    v min(max(v + 3, 0), 6) / 6
hardsigmoid    12    min(max(v + 3, 0), 6) / 6
mish           13    v tanh(log(1 + exp(v)))
=============  ====  ===============================================  ==================

Computed in the type of `v` (float32 or float64); 16-bit values arrive as float32. NaN comes out as NaN:
comparisons are written so that a NaN falls through to the value itself. At the kinks the derivative is the
framework's: 0 at 0 for relu, clipped_relu (also at p) and hardsigmoid's ends.

``activate`` tests the code for every value. Where that matters (a loop of relu over a large tensor), test the
code outside the loop.
"""

from __future__ import annotations

import math

from numba.extending import register_jitable

from ...ops import activation
from .memory import cast

ACTIVATIONS = {name: row.code for name, row in activation.ACTIVATIONS.items()}

_SQRT_HALF = math.sqrt(0.5)
_INV_SQRT_2PI = 1.0 / math.sqrt(2.0 * math.pi)
_SQRT_2_OVER_PI = math.sqrt(2.0 / math.pi)
_GELU_CUBIC = 0.044715


@register_jitable
def sigmoid(v):
    one = cast(1, v)
    return one / (one + math.exp(-v))


@register_jitable
def softplus(v):
    # exp of a value that is never positive: no overflow, and exact for large v.
    return math.log1p(math.exp(-abs(v))) + (cast(0, v) if v <= 0 else v)


@register_jitable
def _clamp_3(v):
    """min(max(v + 3, 0), 6), NaN kept."""
    t = v + cast(3, v)
    return cast(0, v) if t <= 0 else (cast(6, v) if t >= 6 else t)


@register_jitable
def _gelu_tanh_inner(v):
    return math.tanh(cast(_SQRT_2_OVER_PI, v) * (v + cast(_GELU_CUBIC, v) * v * v * v))


@register_jitable
def activate(code, p, v):
    """The activation `code` with parameter `p` at `v`."""
    zero, one, half = cast(0, v), cast(1, v), cast(0.5, v)
    p = cast(p, v)
    if code == 0:
        return v
    if code == 1:
        return zero if v <= 0 else v
    if code == 2:
        return zero if v <= 0 else (p if v >= p else v)
    if code == 3:
        return v if v > 0 else p * v
    if code == 4:
        return v if v > 0 else p * math.expm1(v)
    if code == 5:
        return sigmoid(v)
    if code == 6:
        return math.tanh(v)
    if code == 7:
        return v * sigmoid(v)
    if code == 8:
        return half * v * math.erfc(-v * cast(_SQRT_HALF, v))
    if code == 9:
        return half * v * (one + _gelu_tanh_inner(v))
    if code == 10:
        return softplus(v)
    if code == 11:
        return v * _clamp_3(v) / cast(6, v)
    if code == 12:
        return _clamp_3(v) / cast(6, v)
    return v * math.tanh(softplus(v))


@register_jitable
def activate_grad(code, p, x, dy):
    """`dy` times the derivative of the activation `code` with parameter `p` at its input `x`."""
    zero, one, half = cast(0, x), cast(1, x), cast(0.5, x)
    p = cast(p, x)
    dy = cast(dy, x)
    if code == 0:
        return dy
    if code == 1:
        return zero if x <= 0 else dy
    if code == 2:
        return zero if (x <= 0 or x >= p) else dy
    if code == 3:
        return dy if x > 0 else p * dy
    if code == 4:
        return dy if x > 0 else dy * p * math.exp(x)
    if code == 5:
        s = sigmoid(x)
        return dy * s * (one - s)
    if code == 6:
        t = math.tanh(x)
        return dy * (one - t * t)
    if code == 7:
        s = sigmoid(x)
        return dy * s * (one + x * (one - s))
    if code == 8:
        cdf = half * math.erfc(-x * cast(_SQRT_HALF, x))
        return dy * (cdf + x * cast(_INV_SQRT_2PI, x) * math.exp(-half * x * x))
    if code == 9:
        # Far out the cube would overflow, and infinity times the zero of 1 - t t is NaN.
        if x >= 12:
            return dy
        if x <= -12:
            return zero
        t = _gelu_tanh_inner(x)
        inner = cast(_SQRT_2_OVER_PI, x) * (one + cast(3 * _GELU_CUBIC, x) * x * x)
        return dy * (half * (one + t) + half * x * (one - t * t) * inner)
    if code == 10:
        return dy * sigmoid(x)
    if code == 11:
        if x <= -3:
            return zero
        if x >= 3:
            return dy
        return dy * (x / cast(3, x) + half)
    if code == 12:
        return zero if (x <= -3 or x >= 3) else dy / cast(6, x)
    t = math.tanh(softplus(x))
    return dy * (t + x * (one - t * t) * sigmoid(x))
