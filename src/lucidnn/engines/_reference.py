"""The activations' definitions, in whole-tensor operations and meant for float64: what kernels are held to.

Each formula is that of `lucidnn.ops.activation`, rearranged only where the plain spelling overflows or
cancels (the logarithm of one plus an exponential, the upper tail of the error function, one minus a squared
tanh). Gradients are the derivatives written out by hand. Nothing of the framework's own activation library is
called, so an error there cannot hide one here.

At a kink the gradient is the one-sided one that the frameworks chose: 0 at 0 for relu, 0 at both ends for
clipped_relu and hardsigmoid, the slope below for leaky_relu and elu at 0. Comparisons are written so that a
NaN falls through.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from ..core.problem import Problem

_SQRT_HALF = math.sqrt(0.5)
_INV_SQRT_2PI = 1.0 / math.sqrt(2.0 * math.pi)
_SQRT_2_OVER_PI = math.sqrt(2.0 / math.pi)
_CUBIC = 0.044715

Value = Callable[[float, Any], Any]


def _sigmoid(v: Any) -> Any:
    return 1.0 / (1.0 + torch.exp(-v))


def _softplus(v: Any) -> Any:
    return torch.log1p(torch.exp(-v.abs())) + torch.where(v <= 0, 0.0, v)


def _ramp(v: Any) -> Any:
    """min(max(v + 3, 0), 6), NaN kept."""
    t = v + 3.0
    return torch.where(t <= 0, 0.0, torch.where(t >= 6, 6.0, t))


def _gelu_inner(v: Any) -> Any:
    return _SQRT_2_OVER_PI * (v + _CUBIC * v * v * v)


def _gelu_tanh_slope(v: Any) -> Any:
    # Beyond 40 the tanh is 1 to the last bit; there the cube could overflow and meet a zero.
    near = torch.where(v > 40, 40.0, torch.where(v < -40, -40.0, v))
    u = _gelu_inner(near)
    inner = _SQRT_2_OVER_PI * (1.0 + 3.0 * _CUBIC * near * near)
    return 0.5 * (1.0 + torch.tanh(u)) + 0.5 * near * inner / torch.cosh(u) ** 2


def _mish_slope(v: Any) -> Any:
    t = torch.tanh(_softplus(v))
    slope = t + v * (1.0 - t * t) * _sigmoid(v)
    return torch.where(v.abs() > 500, (v > 0).to(v.dtype), slope)  # the limits, without infinity times zero


def _silu_slope(v: Any) -> Any:
    s = _sigmoid(v)
    return s * (1.0 + v * _sigmoid(-v))


_VALUES: dict[str, Value] = {
    "identity": lambda p, v: v,
    "relu": lambda p, v: torch.where(v <= 0, 0.0, v),
    "clipped_relu": lambda p, v: torch.where(v <= 0, 0.0, torch.where(v >= p, p, v)),
    "leaky_relu": lambda p, v: torch.where(v > 0, v, p * v),
    "elu": lambda p, v: torch.where(v > 0, v, p * torch.expm1(v)),
    "sigmoid": lambda p, v: _sigmoid(v),
    "tanh": lambda p, v: torch.tanh(v),
    "silu": lambda p, v: v * _sigmoid(v),
    "gelu": lambda p, v: 0.5 * v * torch.erfc(-v * _SQRT_HALF),
    "gelu_tanh": lambda p, v: 0.5 * v * (1.0 + torch.tanh(_gelu_inner(v))),
    "softplus": lambda p, v: _softplus(v),
    "hardswish": lambda p, v: v * _ramp(v) / 6.0,
    "hardsigmoid": lambda p, v: _ramp(v) / 6.0,
    "mish": lambda p, v: v * torch.tanh(_softplus(v)),
}

_SLOPES: dict[str, Value] = {
    "elu": lambda p, v: torch.where(v > 0, 1.0, p * torch.exp(v)),
    "sigmoid": lambda p, v: _sigmoid(v) * _sigmoid(-v),
    "tanh": lambda p, v: 1.0 / torch.cosh(v) ** 2,
    "silu": lambda p, v: _silu_slope(v),
    "gelu": lambda p, v: 0.5 * torch.erfc(-v * _SQRT_HALF) + v * _INV_SQRT_2PI * torch.exp(-0.5 * v * v),
    "gelu_tanh": lambda p, v: _gelu_tanh_slope(v),
    "softplus": lambda p, v: _sigmoid(v),
    "mish": lambda p, v: _mish_slope(v),
}


def activate(name: str, p: float, v: Any) -> Any:
    """The activation at `v`, in the type of `v`.

    Parameters
    ----------
    name : str
        A name of `lucidnn.ops.activation.ACTIVATIONS`.
    p : float
        Its parameter; not looked at where it has none.
    v : torch.Tensor
        Any shape; float64 for a reference.

    Examples
    --------
    >>> activate("clipped_relu", 6.0, torch.tensor([-1.0, 2.0, 9.0])).tolist()
    [0.0, 2.0, 6.0]
    """
    return _VALUES[name](p, v)


def activate_grad(name: str, p: float, v: Any, dy: Any) -> Any:
    """`dy` times the derivative of the activation at its input `v`; both of one shape and type.

    Where the derivative is 0 or 1 for a whole range, `dy` is left out or taken as it is, infinite or not.

    Examples
    --------
    >>> activate_grad("relu", 0.0, torch.tensor([-1.0, 0.0, 2.0]), torch.tensor([5.0, 6.0, 7.0])).tolist()
    [0.0, 0.0, 7.0]
    """
    if name == "identity":
        return dy.clone()
    if name == "relu":
        return torch.where(v <= 0, 0.0, dy)
    if name == "clipped_relu":
        return torch.where((v <= 0) | (v >= p), 0.0, dy)
    if name == "leaky_relu":
        return torch.where(v > 0, dy, p * dy)
    if name == "hardswish":
        return torch.where(v <= -3, 0.0, torch.where(v >= 3, dy, dy * (v / 3.0 + 0.5)))
    if name == "hardsigmoid":
        return torch.where((v <= -3) | (v >= 3), 0.0, dy / 6.0)
    return dy * _SLOPES[name](p, v)


def finish(problem: Problem, result: torch.Tensor, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """The epilogue, in the type of the result: ``act(alpha * scale * result + beta * z + bias)``."""
    e = problem.epilogue
    result = e.alpha * result
    if "scale" in inputs:
        result = result * inputs["scale"].reshape(1, -1, *[1] * (result.ndim - 2))
    if "z" in inputs:
        result = result + e.beta * inputs["z"]
    if "bias" in inputs:
        result = result + inputs["bias"].reshape(1, -1, *[1] * (result.ndim - 2))
    return activate(e.activation, e.parameter, result)


def store(out: torch.Tensor, result: torch.Tensor) -> None:
    """Write a result in the output's type: rounded to nearest even, and cut off where the type is 8 bits wide."""
    if not out.dtype.is_floating_point:
        limits = torch.iinfo(out.dtype)
        result = result.nan_to_num(0.0).round().clamp(limits.min, limits.max)
    elif out.dtype.itemsize == 1:
        largest = torch.finfo(out.dtype).max
        result = result.clamp(-largest, largest)
    out.copy_(result)
