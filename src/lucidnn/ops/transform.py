r"""A tensor in another layout, type or size: cuDNN's tensor transformation, with padding and folding.

.. math::  y = \alpha \, T(x) + \beta z

T pads every axis and moves blocks of pixels to channels, or back. Padding is `value`, which alpha does not scale; a
negative number takes elements away. Folding with the factors (f, g) of H and W is

.. math::  y[n, (c, i, j), h, w] = x_{padded}[n, c, h f + i, w g + j]

and unfolding its inverse. One undoes the other with opposite padding, so that folding pads first and unfolding last.
The gradient of either is the other one with the padding's sign turned. Types are converted as in
`lucidnn.ops.elementwise`: a floating-point value becomes the nearest whole number, cut off at the type's limits.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from ..core.descriptor import TensorDescriptor
from ..core.errors import InvalidArgument
from ..core.operation import BOOL, FLOAT, INTS, PADS, Epilogue, Operation, Tensors, attribute
from .convolution import output_layout
from .elementwise import TYPES, WHOLE


@dataclasses.dataclass(frozen=True)
class TransformTensor(Operation):
    """``y = alpha * T(x) + beta * z``; x has 1 to 5 axes, z y's shape.

    Parameters
    ----------
    padding : tuple of (int, int)
        Elements before and after, for each axis of x (of y where it unfolds); none if left out.
    value : float
        What padding is made of.
    fold : tuple of int
        A factor for each axis from the third on; none if left out.
    unfold : bool
        From channels to pixels, not from pixels to channels.
    """

    padding: tuple[tuple[int, int], ...] = attribute(PADS, ())
    value: float = attribute(FLOAT, 0.0)
    fold: tuple[int, ...] = attribute(INTS, ())
    unfold: bool = attribute(BOOL, False)

    name = "transform_tensor"
    inputs, optional, outputs = ("x",), ("z",), ("y",)
    epilogue = frozenset({"alpha", "beta"})

    def resolved(self, tensors: Tensors) -> Operation:
        """With nothing written out that changes nothing."""
        x = tensors["x"]
        if not 1 <= x.ndim <= 5:
            raise InvalidArgument("x", str(x), "1 to 5 axes")
        padding, fold = self.padding, self.fold
        if padding and len(padding) != x.ndim:
            raise InvalidArgument("padding", list(padding), f"{x.ndim} pairs, one for each axis")
        if fold and len(fold) != x.ndim - 2:
            raise InvalidArgument("fold", list(fold), f"{max(x.ndim - 2, 0)} factors, one for each spatial axis")
        if min(fold, default=1) < 1:
            raise InvalidArgument("fold", list(fold), "factors >= 1")
        padding = padding if any(p != (0, 0) for p in padding) else ()
        fold = fold if any(f != 1 for f in fold) else ()
        return dataclasses.replace(self, padding=padding, fold=fold, unfold=self.unfold and bool(fold))

    def shape(self, x: tuple[int, ...]) -> tuple[int, ...]:
        """Of y, for an x of this shape.

        Examples
        --------
        >>> TransformTensor(padding=((0, 0), (0, 1), (1, 0), (0, 2)), fold=(2, 3)).shape((5, 3, 7, 7))
        (5, 24, 4, 3)
        >>> TransformTensor(padding=((0, 0), (0, -1), (-1, 0), (0, -2)), fold=(2, 3), unfold=True).shape((5, 24, 4, 3))
        (5, 3, 7, 7)
        """
        pads = self.padding or ((0, 0),) * len(x)
        factors = self.fold or (1,) * max(len(x) - 2, 0)
        product = math.prod(factors)
        if self.unfold:
            if x[1] % product:
                raise InvalidArgument("fold", list(factors), f"factors whose product divides the {x[1]} channels")
            x = (x[0], x[1] // product, *(n * f for n, f in zip(x[2:], factors, strict=True)))
        x = tuple(n + before + after for n, (before, after) in zip(x, pads, strict=True))
        if min(x) < 0:
            raise InvalidArgument("padding", list(pads), "at least as much left as is taken away")
        if self.fold and not self.unfold:
            if any(n % f for n, f in zip(x[2:], factors, strict=True)):
                raise InvalidArgument("fold", list(factors), f"factors that divide the padded sizes {list(x[2:])}")
            x = (x[0], x[1] * product, *(n // f for n, f in zip(x[2:], factors, strict=True)))
        return x

    def infer(self, tensors: Tensors) -> dict[str, TensorDescriptor]:
        x = tensors["x"]
        shape = self.shape(x.shape)
        return {"y": TensorDescriptor.make(x.dtype, shape, output_layout(shape, x))}

    def check(self, tensors: Tensors, epilogue: Epilogue) -> None:
        whole = tensors["x"].dtype in WHOLE
        for role, t in tensors.items():
            if t.dtype not in TYPES:
                raise InvalidArgument(role, str(t), f"one of the types {', '.join(TYPES)}")
            if role == "z" and (t.dtype in WHOLE) != whole:
                raise InvalidArgument(role, str(t), f"{'whole numbers' if whole else 'a floating-point type'}, as x")
        shape = self.shape(tensors["x"].shape)
        for role in ("z", "y"):
            if role in tensors and tensors[role].shape != shape:
                raise InvalidArgument(role, str(tensors[role]), f"shape {list(shape)}")
        for name, number in (("alpha", epilogue.alpha), ("beta", epilogue.beta), ("value", self.value)):
            if whole and number % 1 != 0:
                raise InvalidArgument(name, number, "a whole number, as the tensors are")

    def flops(self, tensors: Tensors) -> float:
        return float(tensors["y"].numel)

    def sample(self, role: str, tensors: Tensors, shape: tuple[int, ...], generator: Any) -> Any:
        """Small whole numbers where the type is one of such."""
        import torch

        if tensors[role].dtype in WHOLE:
            low = 0 if tensors[role].dtype in ("bool", "u8") else -5
            return torch.randint(low, 2 if tensors[role].dtype == "bool" else 7, shape, generator=generator)
        return super().sample(role, tensors, shape, generator)

    def inverse(self) -> TransformTensor:
        """What takes y back to x, and a gradient of y to one of x.

        Examples
        --------
        >>> TransformTensor(padding=((0, 0), (1, 2)), value=7.0).inverse().padding
        ((0, 0), (-1, -2))
        """
        padding = tuple((-before, -after) for before, after in self.padding)
        return dataclasses.replace(self, padding=padding, value=0.0, unfold=bool(self.fold) and not self.unfold)
