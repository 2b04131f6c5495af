r"""Elementwise operations: scaling, blending, bias and activation, and the activation's gradient.

.. math::  y = \mathrm{act}(\alpha x + \beta z + b_c) \qquad  dx = \alpha \; dy \; \mathrm{act}'(x)

This is the epilogue of the convolutions as an operation of its own: the same table of activations, the same order of
application. The bias has one value a channel (axis 1). At a kink the gradient is the framework's: 0 for relu at 0.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from ..core.descriptor import FLOATING, TensorDescriptor
from ..core.errors import InvalidArgument
from ..core.operation import Epilogue, Operation
from .activation import check_activation

Tensors = Mapping[str, TensorDescriptor]


def like(t: TensorDescriptor, dtype: str | None = None) -> TensorDescriptor:
    """A dense tensor of the same shape: the same strides where they are dense (in any order), else row-major.

    Examples
    --------
    >>> like(TensorDescriptor.make("bf16", (2, 8, 4, 4), "nhwc"))
    TensorDescriptor('bf16[2,8,4,4]@nhwc')
    >>> like(TensorDescriptor("f32", (2, 3), (9, 1)))
    TensorDescriptor('f32[2,3]@nc')
    """
    dense = t.span == t.numel and not t.is_overlapping
    return TensorDescriptor(dtype or t.dtype, t.shape, t.strides if dense else None)  # type: ignore[arg-type]


def _check_floating(tensors: Tensors) -> None:
    for role, t in tensors.items():
        if t.dtype not in FLOATING:
            raise InvalidArgument(role, str(t), f"a floating-point type: {', '.join(FLOATING)}")


@dataclasses.dataclass(frozen=True)
class PointwiseFwd(Operation):
    """``y = act(alpha * x + beta * z + bias)``; x, y, z of one shape, bias (C,) where C is axis 1."""

    name = "pointwise_fwd"
    inputs, optional, outputs = ("x",), ("bias", "z"), ("y",)
    batched = ("x", "y", "z")
    epilogue = frozenset({"alpha", "beta", "activation", "parameter"})

    def infer(self, tensors: Tensors) -> dict[str, TensorDescriptor]:
        return {"y": like(tensors["x"])}

    def check(self, tensors: Tensors, epilogue: Epilogue) -> None:
        _check_floating(tensors)
        check_activation(epilogue.activation, epilogue.parameter)
        x = tensors["x"]
        for role in ("z", "y"):
            if role in tensors and tensors[role].shape != x.shape:
                raise InvalidArgument(role, str(tensors[role]), f"shape {list(x.shape)} as x")
        if bias := tensors.get("bias"):
            if x.ndim < 2:
                raise InvalidArgument("bias", str(bias), "no bias: x has no channel axis")
            if bias.shape != (x.shape[1],):
                raise InvalidArgument("bias", str(bias), f"shape [{x.shape[1]}], one a channel")

    def flops(self, tensors: Tensors) -> float:
        return float(tensors["x"].numel * len(tensors))


@dataclasses.dataclass(frozen=True)
class PointwiseBwd(Operation):
    """``dx = alpha * dy * act'(x)`` with x the activation's input.

    Activations that keep the sign and pass positive values through (relu) may be given their output as x.
    """

    name = "pointwise_bwd"
    inputs, outputs = ("dy", "x"), ("dx",)
    batched = ("dy", "x", "dx")
    epilogue = frozenset({"alpha", "activation", "parameter"})

    def infer(self, tensors: Tensors) -> dict[str, TensorDescriptor]:
        return {"dx": like(tensors["x"])}

    def check(self, tensors: Tensors, epilogue: Epilogue) -> None:
        _check_floating(tensors)
        check_activation(epilogue.activation, epilogue.parameter)
        for role in ("x", "dx"):
            if tensors[role].shape != tensors["dy"].shape:
                raise InvalidArgument(role, str(tensors[role]), f"shape {list(tensors['dy'].shape)} as dy")

    def flops(self, tensors: Tensors) -> float:
        return 2.0 * tensors["dy"].numel
