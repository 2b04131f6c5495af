r"""Dropout by Philox-4x32-10, its gradient, and a residual added on the way.

.. math::  y_e = \frac{m_e}{1 - p}\, x_e + \beta z_e \qquad  dx_e = \frac{m_e}{1 - p}\, dy_e \qquad
           m_e = [\, u_e \ge p\, 2^{32} \,]

:math:`u_e` is a word of 32 random bits for element number e, counted in logical order (the last axis fastest) whatever
the strides: word e mod 4 of Philox-4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011) with
``state[0]`` for its key and, for its counter, e // 4 in the lower two words and ``state[1]`` in the upper two. So a
result depends on the state alone: not on the device, the layout, or how the work is cut. ``state``, a tensor of two
64-bit numbers, is read at run time; the backward pass is given the same one and needs no mask. States whose
second numbers differ give independent masks.

With `feature`, elements of one feature map live and die together: e counts pairs (n, c). A dropped element is 0
times x: NaN and infinity are not hidden. p = 0 keeps all, p = 1 none (and its scale is 0).
"""

from __future__ import annotations

import dataclasses
from typing import Any

from ..core.descriptor import FLOATING, TensorDescriptor, contiguous_strides
from ..core.errors import InvalidArgument
from ..core.operation import BOOL, FLOAT, Epilogue, Operation, Tensors, attribute
from .pointwise import like

TYPES = FLOATING[:4]


def threshold(p: float) -> int:
    """Words below it drop their element: 0 to 2^32.

    Examples
    --------
    >>> threshold(0.0), threshold(0.5) == 2**31, threshold(1.0) == 2**32
    (0, True, True)
    """
    return round(p * 2**32)


def scale(p: float) -> float:
    """What a kept element is multiplied by."""
    return 1.0 / (1.0 - p) if threshold(p) < 2**32 else 0.0


def number_strides(t: TensorDescriptor, feature: bool) -> tuple[int, ...]:
    """How far apart the numbers of neighbours along each axis are.

    Examples
    --------
    >>> number_strides(TensorDescriptor("f32", (2, 3, 4, 5)), False)
    (60, 20, 5, 1)
    >>> number_strides(TensorDescriptor("f32", (2, 3, 4, 5)), True)
    (3, 1, 0, 0)
    """
    if not feature:
        return contiguous_strides(t.shape)
    return (t.shape[1], 1, *(0,) * (t.ndim - 2))


@dataclasses.dataclass(frozen=True)
class _Dropout(Operation):
    """Attributes that both directions share.

    Parameters
    ----------
    p : float
        Probability of an element to be dropped, 0 to 1.
    feature : bool
        Drop whole feature maps: all elements of one batch entry and channel.
    """

    p: float = attribute(FLOAT, 0.5)
    feature: bool = attribute(BOOL, False)

    def resolved(self, tensors: Tensors) -> Operation:
        if not 0.0 <= self.p <= 1.0:
            raise InvalidArgument("p", self.p, "a probability from 0 to 1")
        first = tensors[self.inputs[0]]
        if self.feature and first.ndim < 2:
            raise InvalidArgument(self.inputs[0], str(first), "at least two axes, batch and channels, with feature")
        return self

    def check(self, tensors: Tensors, epilogue: Epilogue) -> None:
        shape = tensors[self.inputs[0]].shape
        for role, t in tensors.items():
            if role == "state":
                if t.dtype != "i64" or t.shape != (2,):
                    raise InvalidArgument(role, str(t), "i64 of shape [2]: seed and offset")
                continue
            if role == "mask":
                if t.dtype != "bool":
                    raise InvalidArgument(role, str(t), "type bool")
            elif t.dtype not in TYPES:
                raise InvalidArgument(role, str(t), f"a floating-point type: {', '.join(TYPES)}")
            if t.shape != shape:
                raise InvalidArgument(role, str(t), f"shape {list(shape)} as {self.inputs[0]}")

    def sample(self, role: str, tensors: Tensors, shape: tuple[int, ...], generator: Any) -> Any:
        if role != "state":
            return super().sample(role, tensors, shape, generator)
        import torch

        return torch.randint(-(2**63), 2**63 - 1, shape, generator=generator)

    def flops(self, tensors: Tensors) -> float:
        return 2.0 * tensors[self.inputs[0]].numel


@dataclasses.dataclass(frozen=True)
class DropoutFwd(_Dropout):
    """``y``, and with `keep_mask` ``mask``: which elements were kept."""

    keep_mask: bool = attribute(BOOL, False)

    name = "dropout_fwd"
    inputs, optional, outputs = ("x", "state"), ("z",), ("y", "mask")
    batched = ("x", "z", "y", "mask")
    epilogue = frozenset({"beta"})

    def infer(self, tensors: Tensors) -> dict[str, TensorDescriptor]:
        x = tensors["x"]
        return {"y": like(x)} | ({"mask": like(x, "bool")} if self.keep_mask else {})


@dataclasses.dataclass(frozen=True)
class DropoutBwd(_Dropout):
    """``dx`` from dy, with the mask of the forward pass that had the same state."""

    name = "dropout_bwd"
    inputs, outputs = ("dy", "state"), ("dx",)
    batched = ("dy", "dx")

    def infer(self, tensors: Tensors) -> dict[str, TensorDescriptor]:
        return {"dx": like(tensors["dy"])}
