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
from ..core.operation import BOOL, Epilogue, Operation, attribute
from .activation import check_activation

Tensors = Mapping[str, TensorDescriptor]


def like(t: TensorDescriptor, dtype: str | None = None) -> TensorDescriptor:
    """A dense tensor of the same shape, its axes in the order that `t` has them in memory, as the framework does.

    Examples
    --------
    >>> like(TensorDescriptor.make("bf16", (2, 8, 4, 4), "nhwc"))
    TensorDescriptor('bf16[2,8,4,4]@nhwc')
    >>> like(TensorDescriptor("f32", (2, 3), (9, 1))), like(TensorDescriptor("f32", (2, 3), (1, 9)))
    (TensorDescriptor('f32[2,3]@nc'), TensorDescriptor('f32[2,3]@(1,2)'))
    """
    strides = t.strides
    if t.span != t.numel or t.is_overlapping:
        dense, step = {}, 1
        for axis in _order(t):
            dense[axis] = step
            step *= max(t.shape[axis], 1)
        strides = tuple(dense[axis] for axis in range(t.ndim))
    return TensorDescriptor(dtype or t.dtype, t.shape, strides)


def _order(t: TensorDescriptor) -> list[int]:
    """Axes from the innermost out: by stride, then size; an expanded axis (stride 0) compares with no other."""
    order = [*reversed(range(t.ndim))]
    for i in range(1, t.ndim):
        at = i
        for before in reversed(range(i)):
            (a, b), (inner, outer) = (order[before], order[at]), (t.strides[order[before]], t.strides[order[at]])
            if 0 in (inner, outer):
                continue
            if inner < outer:
                break
            if inner > outer or t.shape[a] > t.shape[b]:
                order[before], order[at] = b, a
                at = before
    return order


def _check_floating(tensors: Tensors) -> None:
    for role, t in tensors.items():
        if t.dtype not in FLOATING:
            raise InvalidArgument(role, str(t), f"a floating-point type: {', '.join(FLOATING)}")


FROM_OUTPUT = ("identity", "relu", "clipped_relu", "leaky_relu", "elu", "sigmoid", "tanh")
"""Activations whose slope can be told from their output."""


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

    With `from_output` x is the activation's output, from which the slopes of `FROM_OUTPUT` can be told. Activations
    that keep the sign and pass positive values through (relu) may be given their output either way.
    """

    from_output: bool = attribute(BOOL, False)

    name = "pointwise_bwd"
    inputs, outputs = ("dy", "x"), ("dx",)
    batched = ("dy", "x", "dx")
    epilogue = frozenset({"alpha", "activation", "parameter"})

    def infer(self, tensors: Tensors) -> dict[str, TensorDescriptor]:
        return {"dx": like(tensors["x"])}

    def check(self, tensors: Tensors, epilogue: Epilogue) -> None:
        _check_floating(tensors)
        check_activation(epilogue.activation, epilogue.parameter)
        if self.from_output and epilogue.activation not in FROM_OUTPUT:
            raise InvalidArgument("from_output", f"it, for {epilogue.activation}", f"one of {', '.join(FROM_OUTPUT)}")
        if self.from_output and epilogue.activation in ("elu", "leaky_relu") and not epilogue.parameter >= 0:
            raise InvalidArgument("parameter", epilogue.parameter, "a number >= 0, or the slope cannot be told")
        for role in ("x", "dx"):
            if tensors[role].shape != tensors["dy"].shape:
                raise InvalidArgument(role, str(tensors[role]), f"shape {list(tensors['dy'].shape)} as dy")

    def flops(self, tensors: Tensors) -> float:
        return 2.0 * tensors["dy"].numel
