"""Pointwise operations on tensors: the operators, their gradients, and `relu`."""

from __future__ import annotations

from typing import Any

import torch

from ..core.errors import InvalidArgument
from ..core.operation import Epilogue
from ..ops.pointwise import PointwiseBwd, PointwiseFwd
from ._library import Described, Op, Planned
from ._second_derivatives import second_derivative


def from_output_suffices(activation: str, parameter: float) -> bool:
    """Whether the activation's slope can be told from its output."""
    return activation in ("identity", "relu", "clipped_relu") or (activation == "leaky_relu" and parameter > 0)


def _dense_like(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)  # keeps dense strides in any order, else row-major: as `lucidnn.ops.pointwise.like` does


def _fwd(tensors: Any, attributes: Any) -> Described:
    given = dict(zip(("x", "bias", "z"), tensors, strict=True))
    return PointwiseFwd(), {"tensors": given, "epilogue": Epilogue(*attributes)}


def _bwd(tensors: Any, attributes: Any) -> Described:
    alpha, activation, parameter = attributes
    given = dict(zip(("dy", "x"), tensors, strict=True))
    return PointwiseBwd(), {"tensors": given, "epilogue": Epilogue(alpha, 0.0, activation, parameter)}


def _fwd_backward(needs, args, outputs, grads):
    x, bias, z, alpha, beta, activation, parameter = args
    (dy,) = grads
    if activation != "identity":
        source = outputs[0] if outputs else pointwise_fwd(x, bias, z, alpha, beta, "identity", 0.0)
        dy = pointwise_bwd(dy, source, 1.0, activation, parameter)
    dx = (dy if alpha == 1.0 else alpha * dy).to(x.dtype) if needs[0] else None
    db = None
    if needs[1]:
        from ._convolution import conv_bgrad  # the sum over all but the channel axis is the convolutions' too

        db = conv_bgrad(dy).to(bias.dtype)
    dz = (beta * dy).to(z.dtype) if needs[2] else None
    return dx, db, dz


def _bwd_backward(needs, args, outputs, grads):
    dy, x, alpha, activation, parameter = args
    (ddx,) = grads
    ddy = pointwise_bwd(ddx, x, alpha, activation, parameter).to(dy.dtype) if needs[0] else None
    if not needs[1]:
        return ddy, None
    curvature = second_derivative(activation, parameter, x)
    if curvature is None:
        return ddy, torch.zeros_like(x)
    return ddy, (curvature * (ddx if alpha == 1.0 else alpha * ddx) * dy).to(x.dtype)


pointwise_fwd = Op(
    "pointwise_fwd(Tensor x, Tensor? bias, Tensor? z, float alpha, float beta, str activation, float parameter) "
    "-> Tensor",
    3,
    Planned(_fwd),
    lambda x, bias, z, alpha, beta, activation, parameter: _dense_like(x),
    _fwd_backward,
    saves_output=lambda args: args[5] != "identity" and from_output_suffices(args[5], args[6]),
)
pointwise_bwd = Op(
    "pointwise_bwd(Tensor dy, Tensor x, float alpha, str activation, float parameter) -> Tensor",
    2,
    Planned(_bwd),
    lambda dy, x, alpha, activation, parameter: _dense_like(x),
    _bwd_backward,
)


def relu(input: torch.Tensor) -> torch.Tensor:
    """``max(input, 0)``, elementwise; NaN stays NaN.

    Parameters
    ----------
    input : torch.Tensor
        Any shape and strides; float64, float32, float16 or bfloat16.

    Examples
    --------
    >>> relu(torch.tensor([-1.0, 0.0, 2.0]))
    tensor([0., 0., 2.])
    """
    if not isinstance(input, torch.Tensor):
        raise InvalidArgument("input", type(input).__name__, "a torch tensor")
    return pointwise_fwd(input, None, None, 1.0, 0.0, "relu", 0.0)
