r"""Max unpooling: each value goes back to the place that its index names, forward and backward.

.. math::  y[n, c, \mathrm{index}[n, c, q]] = x[n, c, q], \quad 0 \text{ elsewhere} \qquad
           dx[n, c, q] = dy[n, c, \mathrm{index}[n, c, q]]

The index, ``i64`` or ``i32``, is a flat position in the spatial plane of y, as max pooling returns it. Where several
values name one place, the last in reading order (D, H, W) stays: the framework's CPU kernel does the same, its GPU
kernel leaves it open. An index outside the plane is dropped, and its gradient is 0.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from ..core.descriptor import TensorDescriptor
from ..core.errors import InvalidArgument
from ..core.operation import INTS, Epilogue, Operation, Tensors, attribute
from .adaptive_pooling import check_index
from .convolution import output_layout
from .pooling import check_types, one_each, spatial_axes


@dataclasses.dataclass(frozen=True)
class MaxUnpoolFwd(Operation):
    """``y`` from x and index.

    Parameters
    ----------
    output_size : tuple of int
        Of y, one size a spatial axis (or one for all).
    """

    output_size: tuple[int, ...] = attribute(INTS, ())

    name = "max_unpool_fwd"
    inputs, outputs = ("x", "index"), ("y",)
    batched = ("x", "index", "y")

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
        x, index, y = (tensors[role] for role in ("x", "index", "y"))
        check_types(self, tensors)
        check_index(tensors, "y")
        if index.shape != x.shape:
            raise InvalidArgument("index", str(index), f"the shape of x, {list(x.shape)}")
        if y.shape != (*x.shape[:2], *self.output_size):
            raise InvalidArgument("y", str(y), f"shape {[*x.shape[:2], *self.output_size]}")

    def flops(self, tensors: Tensors) -> float:
        return 0.0

    def sample(self, role: str, tensors: Tensors, shape: tuple[int, ...], generator: Any) -> Any:
        if role != "index":
            return super().sample(role, tensors, shape, generator)
        return places(shape, self.output_size, generator)


@dataclasses.dataclass(frozen=True)
class MaxUnpoolBwd(Operation):
    """``dx`` from dy and index: a gather."""

    name = "max_unpool_bwd"
    inputs, outputs = ("dy", "index"), ("dx",)
    batched = ("dy", "index", "dx")

    def resolved(self, tensors: Tensors) -> Operation:
        spatial_axes("dy", tensors)
        return self

    def infer(self, tensors: Tensors) -> dict[str, TensorDescriptor]:
        dy, shape = tensors["dy"], tensors["index"].shape
        return {"dx": TensorDescriptor.make(dy.dtype, shape, output_layout(shape, tensors["index"]))}

    def check(self, tensors: Tensors, epilogue: Epilogue) -> None:
        dy, index, dx = (tensors[role] for role in ("dy", "index", "dx"))
        check_types(self, tensors)
        check_index(tensors, "dy")
        if dy.ndim != index.ndim or dy.shape[:2] != index.shape[:2]:
            raise InvalidArgument("index", str(index), f"{dy.ndim} axes, the first {list(dy.shape[:2])}")
        if dx.shape != index.shape:
            raise InvalidArgument("dx", str(dx), f"the shape of index, {list(index.shape)}")

    def flops(self, tensors: Tensors) -> float:
        return 0.0

    def bytes(self, tensors: Tensors) -> float:
        """Of dy only what the index names has to be read."""
        dy, index, dx = (tensors[role] for role in ("dy", "index", "dx"))
        return index.nbytes + dx.nbytes + min(dy.nbytes, dx.nbytes)

    def sample(self, role: str, tensors: Tensors, shape: tuple[int, ...], generator: Any) -> Any:
        if role != "index":
            return super().sample(role, tensors, shape, generator)
        return places(shape, tensors["dy"].shape[2:], generator)


def places(shape: tuple[int, ...], sizes: tuple[int, ...], generator: Any) -> Any:
    """Positions in planes of `sizes` as pooling without overlap leaves them, each in its value's own part of the plane.

    In small tensors some of the first image stray into the next part, where they may coincide with others.
    """
    import torch

    if not math.prod(shape) or not math.prod(sizes):
        return torch.full(shape, -1, dtype=torch.int64)
    place = torch.zeros(shape, dtype=torch.int64)
    for axis, (n, m) in enumerate(zip(sizes, shape[2:], strict=True)):
        along = (torch.arange(m) * n // m).reshape(-1, *[1] * (len(sizes) - 1 - axis))
        along = along + torch.randint(0, max(n // m, 1), shape, generator=generator)
        if along.numel() < 4096:
            along[:1] += torch.randint(0, 2, along[:1].shape, generator=generator)
        place = place * n + along.clamp(max=n - 1)
    return place
