r"""Resampling of images in 1, 2 and 3 dimensions to another size, and its gradient.

.. math::  y[n, c, q] = \sum_w m_w[q, w] \; x[n, c, w] \qquad  dx[n, c, w] = \sum_q m_w[q, w] \; dy[n, c, q]

and so along each spatial axis, the product of the axes' weights :math:`m` counting. A place j of the output lies at
``step * (j + 1/2) - 1/2`` of the input, or at ``step * j`` with the corners aligned, where step is the ratio of the
sizes (of the sizes less one, with the corners aligned), or one over the scale factor where one was asked for. There

* ``nearest`` takes the input at ``floor(step * j)``, ``nearest-exact`` the one nearest to the place itself;
* ``linear`` weighs the two neighbours, ``cubic`` four by Keys' kernel with a = -0.75, the border repeated;
* ``area`` averages the inputs that the output place covers wholly or in part;
* with ``antialias`` the kernel (for cubic with a = -0.5) is widened by the step where that is above one, and its
  weights sum to one.
"""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

from ..core.descriptor import FLOATING, TensorDescriptor
from ..core.errors import InvalidArgument
from ..core.operation import BOOL, INTS, NAME, Codec, Epilogue, Operation, Tensors, attribute
from ..core.problem import Problem
from ._axis_map import MODES, AxisMap
from .convolution import five_strides, output_layout, three
from .pooling import check_types, one_each, spatial_axes

FLOATS = Codec(
    lambda v: ",".join(map(repr, v)), lambda text: tuple(map(float, text.split(","))), "numbers such as 2.0,1.5"
)


@dataclasses.dataclass(frozen=True)
class Resample(Operation):
    """What both directions share.

    Parameters
    ----------
    size : tuple of int
        Spatial shape of the result: of y forward, of dx backward.
    mode : {'nearest', 'nearest-exact', 'linear', 'cubic', 'area'}
    scale : tuple of float
        The factors that were asked for instead of a size, one for each axis: they, not the ratio of the sizes, give
        the step. Left out where a size was asked for.
    align_corners, antialias : bool
    """

    size: tuple[int, ...] = attribute(INTS, ())
    mode: str = attribute(NAME, "nearest")
    scale: tuple[float, ...] = attribute(FLOATS, ())
    align_corners: bool = attribute(BOOL, False)
    antialias: bool = attribute(BOOL, False)

    x_role: ClassVar[str]
    y_role: ClassVar[str]

    def resolved(self, tensors: Tensors) -> Operation:
        ndim = spatial_axes(self.inputs[0], tensors)
        if not self.size:
            raise InvalidArgument("size", "nothing", f"1 or {ndim} sizes")
        size = one_each("size", self.size, ndim)
        if min(size) < 1:
            raise InvalidArgument("size", list(size), "sizes >= 1")
        scale = one_each("scale", self.scale, ndim) if self.scale else ()
        if not all(math.isfinite(s) and s > 0 for s in scale):
            raise InvalidArgument("scale", list(scale), "factors above 0")
        if self.mode not in MODES:
            raise InvalidArgument("mode", self.mode, ", ".join(MODES))
        if self.mode == "cubic" and ndim != 2:
            raise InvalidArgument("mode", self.mode, "linear, nearest, nearest-exact or area where H and W are not all")
        if self.align_corners and self.mode not in ("linear", "cubic"):
            raise InvalidArgument("align_corners", True, f"False with mode {self.mode}")
        if self.antialias and (ndim != 2 or self.mode not in ("linear", "cubic")):
            raise InvalidArgument("antialias", True, "False unless mode is linear or cubic and the axes are H and W")
        if self.mode == "area":
            scale = ()
        return dataclasses.replace(self, size=size, scale=scale)

    def infer(self, tensors: Tensors) -> dict[str, TensorDescriptor]:
        t = tensors[self.inputs[0]]
        shape = (*t.shape[:2], *self.size)
        return {self.outputs[0]: TensorDescriptor.make(t.dtype, shape, output_layout(shape, t))}

    def check(self, tensors: Tensors, epilogue: Epilogue) -> None:
        check_types(self, tensors)
        source, result = tensors[self.inputs[0]], tensors[self.outputs[0]]
        if source.dtype not in FLOATING[:4]:
            raise InvalidArgument(self.inputs[0], str(source), f"a type of {', '.join(FLOATING[:4])}")
        if min(source.shape[2:]) < 1:
            raise InvalidArgument(self.inputs[0], str(source), "spatial sizes >= 1")
        expected = (*source.shape[:2], *self.size)
        if result.shape != expected:
            raise InvalidArgument(self.outputs[0], str(result), f"shape {list(expected)}")

    def flops(self, tensors: Tensors) -> float:
        x, y = tensors[self.x_role], tensors[self.y_role]
        terms = 1.0
        for n, q in zip(x.shape[2:], y.shape[2:], strict=True):
            if self.mode == "area" or self.antialias:
                terms *= max(1.0, n / max(q, 1)) * {"area": 1, "linear": 2, "cubic": 4}[self.mode]
            else:
                terms *= {"linear": 2, "cubic": 4}.get(self.mode, 1)
        return 2.0 * terms * y.numel


@dataclasses.dataclass(frozen=True)
class ResampleFwd(Resample):
    """``y``: x at another size."""

    name = "resample_fwd"
    inputs, outputs = ("x",), ("y",)
    batched = ("x", "y")
    x_role, y_role = "x", "y"


@dataclasses.dataclass(frozen=True)
class ResampleBwd(Resample):
    """``dx`` from dy. Each dx place gathers from the outputs that it is part of, so that the sum has one order."""

    name = "resample_bwd"
    inputs, outputs = ("dy",), ("dx",)
    batched = ("dy", "dx")
    x_role, y_role = "dx", "dy"


@dataclasses.dataclass(frozen=True, eq=False)
class Resampling:
    """A problem as three maps from the tensor that is read to the one that is written, spatial tuples (D, H, W).

    Examples
    --------
    >>> r = Resampling.of(Problem.parse("resample_bwd dy=f32[2,3,8] size=4 mode=linear"))
    >>> r.in_size, r.out_size, [m.taps for m in r.maps]
    ((1, 1, 8), (1, 1, 4), [1, 1, 4])
    """

    source: TensorDescriptor
    result: TensorDescriptor
    N: int
    C: int
    in_size: tuple[int, int, int]
    out_size: tuple[int, int, int]
    in_strides: tuple[int, ...]
    out_strides: tuple[int, ...]
    maps: tuple[AxisMap, ...]

    @classmethod
    def of(cls, problem: Problem) -> Resampling:
        op = problem.op
        if not isinstance(op, Resample):
            raise TypeError(f"{op.name} is no resampling")
        source, result = (t for _, t in problem.items)
        x, y = problem[op.x_role], problem[op.y_role]
        fill = (0.0,) * len(op.size)
        maps = [AxisMap.of(1, 1, "nearest")] * (3 - len(op.size))
        for n, q, scale in zip(x.shape[2:], y.shape[2:], op.scale or fill, strict=True):
            one = AxisMap.of(n, q, op.mode, op.align_corners, scale, op.antialias, source.dtype == "f64")
            maps.append(one if op.x_role == "x" else one.transposed())
        return cls(
            source, result, source.shape[0], source.shape[1], three(source.shape[2:], 1), three(result.shape[2:], 1),
            five_strides(source), five_strides(result), tuple(maps),
        )  # fmt: skip

    @property
    def lanes_are_columns(self) -> bool:
        """Whether a kernel's lanes run along W: they do unless channels lie closer together in what is written."""
        if self.C == 1 or (self.out_size[2] > 1 and self.out_strides[4] < self.out_strides[1]):
            return True
        return self.C < 8 and self.out_size[2] >= self.C
