r"""Sampling images at the places that a grid names, in two and three dimensions, and its gradients.

.. math::  y[n, c, q] = \sum_h \sum_w k_h(q, h) \, k_w(q, w) \, x[n, c, h, w]

The grid has a place (x, y) or (x, y, z), that is along W, H, D, for every output point, from -1 to 1 across the image:
the centres of the corner pixels with `align_corners`, else their outer edges. Along an axis of n pixels a place g is at
``a = (g + 1) / 2 (n - 1)`` or ``a = ((g + 1) n - 1) / 2``. There ``bilinear`` weighs two neighbours an axis,
``nearest`` takes the nearest one (halves to even), ``bicubic`` weighs four by Keys' kernel with a = -0.75.

Beyond the image there are ``zeros``, or the place is moved to the ``border``, or mirrored at the edge (``reflection``;
with `align_corners` at the centres of the edge pixels); with bicubic that is done with each of the four neighbours. A
place that is no number has no neighbours. The gradient of a place that was moved to the border is zero there, as is
that of nearest.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from ..core.descriptor import FLOATING, TensorDescriptor
from ..core.errors import InvalidArgument
from ..core.operation import BOOL, NAME, Epilogue, Operation, Tensors, attribute
from .convolution import output_layout
from .pooling import check_types

MODES = ("bilinear", "nearest", "bicubic")
PADDING_MODES = ("zeros", "border", "reflection")
GRADIENTS = ("both", "x", "grid")
TAPS = {"bilinear": 2, "nearest": 1, "bicubic": 4}  # neighbours along an axis


@dataclasses.dataclass(frozen=True)
class _GridSample(Operation):
    """What both directions share.

    Parameters
    ----------
    mode : {'bilinear', 'nearest', 'bicubic'}
    padding_mode : {'zeros', 'border', 'reflection'}
    align_corners : bool
    """

    mode: str = attribute(NAME, "bilinear")
    padding_mode: str = attribute(NAME, "zeros")
    align_corners: bool = attribute(BOOL, False)

    def resolved(self, tensors: Tensors) -> Operation:
        x, grid = tensors["x"], tensors["grid"]
        for name, accepted in (("mode", MODES), ("padding_mode", PADDING_MODES)):
            if getattr(self, name) not in accepted:
                raise InvalidArgument(name, getattr(self, name), ", ".join(accepted))
        ndim = x.ndim - 2
        if ndim not in (2, 3):
            raise InvalidArgument("x", str(x), "4 or 5 axes: batch, channels, 2 or 3 spatial")
        if grid.ndim != x.ndim or grid.shape[-1] != ndim or grid.shape[0] != x.shape[0]:
            accepted = f"shape ({x.shape[0]}, {ndim} sizes, {ndim}): a place in {list(x.shape[2:])} for each point"
            raise InvalidArgument("grid", str(grid), accepted)
        if self.mode == "bicubic" and ndim != 2:
            raise InvalidArgument("mode", self.mode, "bilinear or nearest in three dimensions")
        return self

    def _checked(self, tensors: Tensors, y_role: str) -> None:
        check_types(self, tensors)
        x, grid, y = tensors["x"], tensors["grid"], tensors[y_role]
        if x.dtype not in FLOATING[:4]:
            raise InvalidArgument("x", str(x), f"a type of {', '.join(FLOATING[:4])}")
        if min(x.shape[2:]) < 1:
            raise InvalidArgument("x", str(x), "spatial sizes >= 1")
        expected = (*x.shape[:2], *grid.shape[1:-1])
        if y.shape != expected:
            raise InvalidArgument(y_role, str(y), f"shape {list(expected)}")

    def sample(self, role: str, tensors: Tensors, shape: tuple[int, ...], generator: Any) -> Any:
        """Places inside the image and a little beyond."""
        values = super().sample(role, tensors, shape, generator)
        return values * 0.7 if role == "grid" else values

    def flops(self, tensors: Tensors) -> float:
        # A product and a sum a tap, and the places, whose rounding errors count by how large the image is.
        x = tensors["x"]
        y = tensors["y" if "y" in tensors else "dy"]
        return 2.0 * y.numel * (TAPS[self.mode] ** (x.ndim - 2) + 2.0 * max(x.shape[2:]))


@dataclasses.dataclass(frozen=True)
class GridSampleFwd(_GridSample):
    """``y`` of shape (N, C, the grid's points): x at the places of the grid."""

    name = "grid_sample_fwd"
    inputs, outputs = ("x", "grid"), ("y",)
    batched = ("x", "grid", "y")

    def infer(self, tensors: Tensors) -> dict[str, TensorDescriptor]:
        x, grid = tensors["x"], tensors["grid"]
        shape = (*x.shape[:2], *grid.shape[1:-1])
        return {"y": TensorDescriptor.make(x.dtype, shape, output_layout(shape, x))}

    def check(self, tensors: Tensors, epilogue: Epilogue) -> None:
        self._checked(tensors, "y")


@dataclasses.dataclass(frozen=True)
class GridSampleBwd(_GridSample):
    """``dx`` and ``dgrid`` from dy, x and the grid; `gradients` ('both', 'x', 'grid') says which are wanted."""

    gradients: str = attribute(NAME, "both")

    name = "grid_sample_bwd"
    inputs, outputs = ("dy", "x", "grid"), ("dx", "dgrid")
    batched = ("dy", "x", "grid", "dx", "dgrid")

    def resolved(self, tensors: Tensors) -> Operation:
        if self.gradients not in GRADIENTS:
            raise InvalidArgument("gradients", self.gradients, ", ".join(GRADIENTS))
        return super().resolved(tensors)

    def infer(self, tensors: Tensors) -> dict[str, TensorDescriptor]:
        x, grid = tensors["x"], tensors["grid"]
        found = {
            "dx": TensorDescriptor.make(x.dtype, x.shape, output_layout(x.shape, x)),
            "dgrid": TensorDescriptor(grid.dtype, grid.shape),
        }
        left_out = {"x": "dgrid", "grid": "dx"}.get(self.gradients)
        return {role: t for role, t in found.items() if role != left_out}

    def check(self, tensors: Tensors, epilogue: Epilogue) -> None:
        self._checked(tensors, "dy")
        for role, like in (("dx", "x"), ("dgrid", "grid")):
            wanted = self.gradients == "both" or role == "d" + self.gradients
            if role in tensors and (not wanted or tensors[role].shape != tensors[like].shape):
                accepted = f"shape {list(tensors[like].shape)}" if wanted else f"none: gradients is {self.gradients}"
                raise InvalidArgument(role, str(tensors[role]), accepted)
