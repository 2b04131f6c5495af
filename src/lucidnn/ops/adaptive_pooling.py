r"""Pooling to a given output size, by averages or maxima, in 1, 2 and 3 dimensions, forward and backward.

An axis of n points is divided into m windows as evenly as whole numbers allow: window q has the points

.. math::  \lfloor q\, n / m \rfloor \;\le\; h \;<\; \lceil (q + 1)\, n / m \rceil

so that neighbours share a point where m does not divide n (and points repeat where m > n). y is the mean or the largest
value of a window; among equal values the first in window order (D, H, W) wins, and NaN counts as the largest, the first
NaN standing for all. An output size of 1 is global pooling.

The index of a maximum, ``i64`` or ``i32``, is its flat position in the input's spatial plane. In the backward pass an
index that is not a point of its own window is dropped.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

from ..core.descriptor import TensorDescriptor
from ..core.errors import InvalidArgument
from ..core.operation import INTS, NAME, Epilogue, Operation, Tensors, attribute
from .convolution import output_layout
from .pooling import WindowAxis, check_types, one_each, spatial_axes

INDEX_TYPES = ("none", "i32", "i64")


@dataclasses.dataclass(frozen=True)
class AdaptivePool(Operation):
    """Rules that all four share; x_role and y_role say which tensor plays the input and the output."""

    x_role: ClassVar[str]
    y_role: ClassVar[str]

    def check(self, tensors: Tensors, epilogue: Epilogue) -> None:
        x, y = tensors[self.x_role], tensors[self.y_role]
        check_types(self, tensors)
        if min(x.shape[2:]) < 1:
            raise InvalidArgument(self.x_role, str(x), "spatial sizes >= 1")
        if y.shape[:2] != x.shape[:2] or y.ndim != x.ndim:
            raise InvalidArgument(self.y_role, str(y), f"{x.ndim} axes, the first {list(x.shape[:2])}")

    def axes(self, tensors: Tensors) -> tuple[WindowAxis, ...]:
        """The windows along each spatial axis; where the sizes divide these are ones of fixed size and stride."""
        sizes, counts = tensors[self.x_role].shape[2:], tensors[self.y_role].shape[2:]
        each = zip(sizes, counts, strict=True)
        return tuple(WindowAxis(n, m) if not m or n % m else WindowAxis(n, m, n // m, n // m) for n, m in each)

    def flops(self, tensors: Tensors) -> float:
        x, y = tensors[self.x_role], tensors[self.y_role]
        axes = (max(n / max(m, 1), 1.0) for n, m in zip(x.shape[2:], y.shape[2:], strict=True))
        return float(y.numel * math.prod(axes))


@dataclasses.dataclass(frozen=True)
class _Forward(AdaptivePool):
    """What both forward passes share.

    Parameters
    ----------
    output_size : tuple of int
        One size a spatial axis (or one for all).
    """

    output_size: tuple[int, ...] = attribute(INTS, ())

    batched = ("x", "y")
    x_role, y_role = "x", "y"

    def resolved(self, tensors: Tensors) -> Operation:
        ndim = spatial_axes("x", tensors)
        if not self.output_size:
            raise InvalidArgument("output_size", "nothing", f"1 or {ndim} sizes")
        sizes = one_each("output_size", self.output_size, ndim)
        if min(sizes) < 0:
            raise InvalidArgument("output_size", list(sizes), "numbers >= 0")
        return dataclasses.replace(self, output_size=sizes)

    def infer(self, tensors: Tensors) -> dict[str, TensorDescriptor]:
        x = tensors["x"]
        shape = (*x.shape[:2], *self.output_size)
        return {"y": TensorDescriptor.make(x.dtype, shape, output_layout(shape, x))}

    def check(self, tensors: Tensors, epilogue: Epilogue) -> None:
        super().check(tensors, epilogue)
        if (y := tensors["y"]).shape[2:] != self.output_size:
            raise InvalidArgument("y", str(y), f"spatial sizes {list(self.output_size)}")


@dataclasses.dataclass(frozen=True)
class AdaptiveAvgPoolFwd(_Forward):
    """``y``: the mean of each window."""

    name = "adaptive_avg_pool_fwd"
    inputs, outputs = ("x",), ("y",)


@dataclasses.dataclass(frozen=True)
class AdaptiveMaxPoolFwd(_Forward):
    """``y`` and, unless `index_type` is none, ``index``: the largest value of each window and where it was.

    Parameters
    ----------
    output_size : tuple of int
        One size a spatial axis (or one for all).
    index_type : {'i64', 'i32', 'none'}
        What is kept for the backward pass.
    """

    index_type: str = attribute(NAME, "i64")

    name = "adaptive_max_pool_fwd"
    inputs, outputs = ("x",), ("y", "index")
    batched = ("x", "y", "index")

    def resolved(self, tensors: Tensors) -> Operation:
        if self.index_type not in INDEX_TYPES:
            raise InvalidArgument("index_type", self.index_type, ", ".join(INDEX_TYPES))
        return super().resolved(tensors)

    def infer(self, tensors: Tensors) -> dict[str, TensorDescriptor]:
        found = super().infer(tensors)
        if self.index_type == "none":
            return found
        layout = output_layout(found["y"].shape, tensors["x"])
        return found | {"index": TensorDescriptor.make(self.index_type, found["y"].shape, layout)}

    def check(self, tensors: Tensors, epilogue: Epilogue) -> None:
        super().check(tensors, epilogue)
        if index := tensors.get("index"):
            if index.dtype != self.index_type or index.shape != tensors["y"].shape:
                raise InvalidArgument("index", str(index), f"{self.index_type} of shape {list(tensors['y'].shape)}")
        check_index(tensors, "x")


@dataclasses.dataclass(frozen=True)
class _Backward(AdaptivePool):
    """Both backward passes have no attributes: the shapes say all. Without a given dx it has the shape of dy."""

    outputs = ("dx",)
    x_role, y_role = "dx", "dy"

    def resolved(self, tensors: Tensors) -> Operation:
        spatial_axes("dy", tensors)
        return self

    def infer(self, tensors: Tensors) -> dict[str, TensorDescriptor]:
        dy = tensors["dy"]
        return {"dx": TensorDescriptor.make(dy.dtype, dy.shape, output_layout(dy.shape, dy))}


@dataclasses.dataclass(frozen=True)
class AdaptiveAvgPoolBwd(_Backward):
    """``dx`` from dy: each point gathers its share from the windows that hold it."""

    name = "adaptive_avg_pool_bwd"
    inputs = ("dy",)
    batched = ("dy", "dx")


@dataclasses.dataclass(frozen=True)
class AdaptiveMaxPoolBwd(_Backward):
    """``dx`` from dy and index: each point gathers from the windows that hold it and name it."""

    name = "adaptive_max_pool_bwd"
    inputs = ("dy", "index")
    batched = ("dy", "index", "dx")

    def check(self, tensors: Tensors, epilogue: Epilogue) -> None:
        super().check(tensors, epilogue)
        if (index := tensors["index"]).shape != tensors["dy"].shape:
            raise InvalidArgument("index", str(index), f"the shape of dy, {list(tensors['dy'].shape)}")
        check_index(tensors, "dx")

    def sample(self, role: str, tensors: Tensors, shape: tuple[int, ...], generator: Any) -> Any:
        """An index names a point of its own window."""
        if role != "index":
            return super().sample(role, tensors, shape, generator)
        import torch

        place = torch.zeros(shape, dtype=torch.int64)
        sizes, counts = tensors["dx"].shape[2:], tensors["dy"].shape[2:]
        for number, (n, m) in enumerate(zip(sizes, counts, strict=True)):
            axis = WindowAxis(n, m)
            ends = torch.tensor([axis.inside(q) for q in range(shape[2 + number])], dtype=torch.int64).reshape(-1, 2)
            first, points = (t.reshape(-1, *[1] * (len(sizes) - 1 - number)) for t in ends.unbind(1))
            place = place * n + first + (torch.rand(shape, generator=generator) * points).long()
        return place


def check_index(tensors: Tensors, plane: str) -> None:
    """An index is of type i32 or i64, and i32 only where that can name every point of the plane."""
    index, points = tensors.get("index"), math.prod(tensors[plane].shape[2:])
    if index is not None and index.dtype not in ("i32", "i64"):
        raise InvalidArgument("index", str(index), "type i32 or i64")
    if index is not None and index.dtype == "i32" and points >= 2**31:
        raise InvalidArgument("index", str(index), "i64 for planes of 2^31 points and more")
