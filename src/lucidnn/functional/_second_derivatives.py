"""The activations' second derivatives, in plain tensor arithmetic: what the gradient of ``pointwise_bwd`` is made of.

One row an activation of `lucidnn.ops.activation`; those that are made of straight lines have none. Nothing here is a
kernel: a second backward is rare, and the framework differentiates these formulas further, to any order. An input far
out is brought to where the derivative is already 0, so that no infinity meets a zero. Sixteen-bit inputs are widened.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

_INV_SQRT_2PI = 1.0 / math.sqrt(2.0 * math.pi)
_SQRT_2_OVER_PI = math.sqrt(2.0 / math.pi)
_CUBIC = 0.044715

Formula = Callable[[float, torch.Tensor], torch.Tensor]


def _sech2(v: torch.Tensor) -> torch.Tensor:
    """1 - tanh(v)^2."""
    return 1.0 / torch.cosh(v) ** 2


def _sigmoid(p: float, v: torch.Tensor) -> torch.Tensor:
    up, down = torch.sigmoid(v), torch.sigmoid(-v)
    return up * down * (down - up)


def _silu(p: float, v: torch.Tensor) -> torch.Tensor:
    v = v.clamp(-800.0, 800.0)
    up, down = torch.sigmoid(v), torch.sigmoid(-v)
    return up * down * (2.0 + v * (down - up))


def _gelu(p: float, v: torch.Tensor) -> torch.Tensor:
    v = v.clamp(-50.0, 50.0)
    return _INV_SQRT_2PI * torch.exp(-0.5 * v * v) * (2.0 - v * v)


def _gelu_tanh(p: float, v: torch.Tensor) -> torch.Tensor:
    v = v.clamp(-15.0, 15.0)
    inner = _SQRT_2_OVER_PI * (v + _CUBIC * v**3)
    once, twice = _SQRT_2_OVER_PI * (1.0 + 3.0 * _CUBIC * v * v), 6.0 * _SQRT_2_OVER_PI * _CUBIC * v
    return _sech2(inner) * (once + 0.5 * v * (twice - 2.0 * torch.tanh(inner) * once * once))


def _mish(p: float, v: torch.Tensor) -> torch.Tensor:
    v = v.clamp(-800.0, 800.0)
    up, down = torch.sigmoid(v), torch.sigmoid(-v)
    soft = -torch.nn.functional.logsigmoid(-v)  # log(1 + exp(v))
    return _sech2(soft) * up * (2.0 + v * (down - 2.0 * torch.tanh(soft) * up))


_TABLE: dict[str, Formula] = {
    "elu": lambda p, v: torch.where(v > 0, torch.zeros_like(v), p * torch.exp(v)),
    "sigmoid": _sigmoid,
    "tanh": lambda p, v: -2.0 * torch.tanh(v) * _sech2(v),
    "silu": _silu,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "softplus": lambda p, v: torch.sigmoid(v) * torch.sigmoid(-v),
    "hardswish": lambda p, v: (v.abs() < 3.0).to(v.dtype) / 3.0,
    "mish": _mish,
}


def second_derivative(activation: str, parameter: float, x: torch.Tensor) -> torch.Tensor | None:
    """The activation's second derivative at its input `x`, float32 at least; None where it is 0 everywhere.

    At a kink it is the one of the side whose slope ``pointwise_bwd`` takes.

    Examples
    --------
    >>> second_derivative("tanh", 0.0, torch.tensor([0.0, 1.0]))
    tensor([-0.0000, -0.6397])
    >>> second_derivative("relu", 0.0, torch.tensor([1.0])) is None
    True
    """
    if activation not in _TABLE:
        return None
    return _TABLE[activation](parameter, x if x.dtype == torch.float64 else x.float())
