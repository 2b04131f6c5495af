r"""Softmax and its logarithm over any axes, and their gradients.

.. math::  y_i = \frac{e^{x_i}}{\sum_j e^{x_j}} \qquad  dx_i = y_i \Bigl(dy_i - \sum_j y_j\, dy_j\Bigr)

.. math::  y_i = x_i - \log \sum_j e^{x_j} \qquad  dx_i = dy_i - e^{y_i} \sum_j dy_j \qquad (\mathrm{log})

The sums go over `axes`: axis 1 is cuDNN's channel mode, axes 1 and all after it its instance mode. Everything else is a
row of its own. y may have a wider type than x (the frameworks' `dtype` argument); dx has the type of x.

A mask has a truth value for every element of x (broadcast by strides of 0): where it is false, x counts as minus
infinity, and its gradient is 0. A row that is minus infinity everywhere gives NaN, as the frameworks do; with
`empty_zero` it gives zeros (their logarithm, minus infinity, with `log`), and minus infinity counts as masked: no
gradient goes there.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from ..core.descriptor import FLOATING, TensorDescriptor
from ..core.errors import InvalidArgument
from ..core.operation import BOOL, INTS, Epilogue, Operation, Tensors, attribute
from .pointwise import like


def resolved_axes(axes: tuple[int, ...], t: TensorDescriptor, role: str) -> tuple[int, ...]:
    """Axes counted from the front, in order; `InvalidArgument` where one does not exist or comes twice.

    Examples
    --------
    >>> resolved_axes((-1, 1), TensorDescriptor("f32", (2, 3, 4)), "x")
    (1, 2)
    """
    if t.ndim == 0:
        raise InvalidArgument(role, str(t), "at least one axis")
    if not axes:
        raise InvalidArgument("axes", "nothing", f"axes from {-t.ndim} to {t.ndim - 1}")
    if not all(-t.ndim <= axis < t.ndim for axis in axes):
        raise InvalidArgument("axes", list(axes), f"axes from {-t.ndim} to {t.ndim - 1} for {role} {t}")
    found = tuple(sorted({axis % t.ndim for axis in axes}))
    if len(found) < len(axes):
        raise InvalidArgument("axes", list(axes), "each axis once")
    return found


@dataclasses.dataclass(frozen=True)
class _Softmax(Operation):
    """Attributes that both directions share.

    Parameters
    ----------
    axes : tuple of int
        What the sums go over; negative ones count from the end.
    log : bool
        The logarithm of the softmax.
    empty_zero : bool
        Zeros for a row of nothing but minus infinity, instead of NaN.
    """

    axes: tuple[int, ...] = attribute(INTS, (1,))
    log: bool = attribute(BOOL, False)
    empty_zero: bool = attribute(BOOL, False)

    optional = ("mask",)
    x_role: ClassVar[str]
    y_role: ClassVar[str]

    def resolved(self, tensors: Tensors) -> Operation:
        first = self.inputs[0]
        return dataclasses.replace(self, axes=resolved_axes(self.axes, tensors[first], first))

    def check(self, tensors: Tensors, epilogue: Epilogue) -> None:
        shape = tensors[self.inputs[0]].shape
        for role, t in tensors.items():
            if role == "mask":
                if t.dtype != "bool":
                    raise InvalidArgument(role, str(t), "type bool")
            elif t.dtype not in FLOATING[:4]:
                raise InvalidArgument(role, str(t), f"a floating-point type: {', '.join(FLOATING[:4])}")
            if t.shape != shape:
                raise InvalidArgument(role, str(t), f"shape {list(shape)} as {self.inputs[0]}")

    def flops(self, tensors: Tensors) -> float:
        return 5.0 * tensors[self.y_role].numel  # a comparison, a subtraction, an exponential, a sum, a division


@dataclasses.dataclass(frozen=True)
class SoftmaxFwd(_Softmax):
    """``y = softmax(x)`` over `axes`, of the type of x unless y says otherwise."""

    name = "softmax_fwd"
    inputs, outputs = ("x",), ("y",)
    batched = ("x", "mask", "y")
    x_role, y_role = "x", "y"

    def infer(self, tensors: Tensors) -> dict[str, TensorDescriptor]:
        return {"y": like(tensors["x"])}

    def sample(self, role: str, tensors: Tensors, shape: tuple[int, ...], generator: Any) -> Any:
        return mask_sample(shape, generator) if role == "mask" else super().sample(role, tensors, shape, generator)


@dataclasses.dataclass(frozen=True)
class SoftmaxBwd(_Softmax):
    """``dx`` from the result y and the gradient dy of the forward pass."""

    name = "softmax_bwd"
    inputs, outputs = ("y", "dy"), ("dx",)
    batched = ("y", "dy", "mask", "dx")
    x_role, y_role = "dx", "y"

    def infer(self, tensors: Tensors) -> dict[str, TensorDescriptor]:
        return {"dx": like(tensors["y"])}

    def sample(self, role: str, tensors: Tensors, shape: tuple[int, ...], generator: Any) -> Any:
        """A y that a forward pass may have given."""
        if role == "mask":
            return mask_sample(shape, generator)
        value = super().sample(role, tensors, shape, generator)
        if role != "y":
            return value
        value = value.exp()
        value = value / value.sum(self.axes, keepdim=True)
        return value.log() if self.log else value


def mask_sample(shape: tuple[int, ...], generator: Any) -> Any:
    """Truth values, three of four true."""
    import torch

    return torch.rand(shape, generator=generator) < 0.75
