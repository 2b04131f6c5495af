r"""Reductions: the sum, product, extremes, mean and norms of a tensor over any of its axes, and their gradients.

.. math::  y_k = \alpha \, f_r(x_{k, r}) + \beta z_k

with k the axes that are kept and r those that are reduced. The modes:

================  ====================================  ===============================================
mode              f                                     its gradient, times dy
================  ====================================  ===============================================
add               sum of x                              1
mul               product of x                          product of the others
mul_no_zeros      product of those x that are not 0     that product / x; 0 where x is 0
min, max          smallest, largest x                   shared evenly by those equal to it, or by index
amax              largest ``|x|``                       likewise, times the sign of x
avg               sum of x / n                          1 / n
norm1             sum of ``|x|``                        sign of x (0 at 0 and for NaN)
norm2             square root of the sum of ``x^2``     x / y; 0 where y is 0
================  ====================================  ===============================================

The index of min, max and amax is the place of the value among the reduced points, counted in logical order over the
reduced axes; the first of equal values wins. A NaN is both the smallest and the largest value: it comes through, and
the first one is what an index names. Sums of nothing are 0, products 1, a mean NaN; extremes of nothing are an error.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from ..core.descriptor import FLOATING, TensorDescriptor
from ..core.errors import InvalidArgument
from ..core.operation import BOOL, INTS, NAME, Epilogue, Operation, Tensors, attribute
from .pointwise import like

MODES = ("add", "mul", "min", "max", "amax", "avg", "norm1", "norm2", "mul_no_zeros")
EXTREMES = ("min", "max", "amax")
INDEX_TYPES = ("none", "i32", "i64")


def reduced_shape(shape: tuple[int, ...], axes: tuple[int, ...], keep: bool) -> tuple[int, ...]:
    """Shape of y: an axis that is reduced stays with size 1, or goes.

    Examples
    --------
    >>> reduced_shape((2, 3, 4), (0, 2), True), reduced_shape((2, 3, 4), (0, 2), False)
    ((1, 3, 1), (3,))
    """
    if keep:
        return tuple(1 if axis in axes else n for axis, n in enumerate(shape))
    return tuple(n for axis, n in enumerate(shape) if axis not in axes)


@dataclasses.dataclass(frozen=True)
class Reduce(Operation):
    """Attributes and rules that both directions share.

    Parameters
    ----------
    mode : str
        One of `MODES`.
    axes : tuple of int
        Which axes of x go; negative ones count from the last, none stands for all.
    keep : bool
        Whether they stay, with size 1.
    """

    mode: str = attribute(NAME, "add")
    axes: tuple[int, ...] = attribute(INTS, ())
    keep: bool = attribute(BOOL, False)

    def with_axes(self, x: TensorDescriptor) -> Any:
        """This operation with the axes checked, counted from the first, and in order."""
        if self.mode not in MODES:
            raise InvalidArgument("mode", repr(self.mode), ", ".join(MODES))
        axes = self.axes or tuple(range(x.ndim))
        for axis in axes:
            if not -x.ndim <= axis < x.ndim:
                raise InvalidArgument("axes", list(axes), f"axes from {-x.ndim} to {x.ndim - 1}, as x has {x.ndim}")
        found = sorted({axis % x.ndim for axis in axes})
        if len(found) < len(axes):
            raise InvalidArgument("axes", list(axes), "every axis once")
        return dataclasses.replace(self, axes=tuple(found))

    def points(self, x: TensorDescriptor) -> int:
        """How many points of x make one of y."""
        return math.prod(x.shape[axis] for axis in self.axes)

    def check_y(self, role: str, tensors: Tensors, x: TensorDescriptor) -> None:
        """Raise `InvalidArgument` unless the tensor of this role, where there is one, has the shape of y."""
        shape = reduced_shape(x.shape, self.axes, self.keep)
        if role in tensors and tensors[role].shape != shape:
            raise InvalidArgument(role, str(tensors[role]), f"shape {list(shape)}")

    def check_index(self, tensors: Tensors, x: TensorDescriptor) -> None:
        """Raise `InvalidArgument` unless the index, where there is one, can hold every place."""
        index = tensors.get("index")
        if index is None:
            return
        if index.dtype not in INDEX_TYPES:
            raise InvalidArgument("index", str(index), "type i32 or i64")
        if self.mode not in EXTREMES:
            raise InvalidArgument("index", str(index), f"no index: only {', '.join(EXTREMES)} have one")
        if index.dtype == "i32" and self.points(x) > 2**31:
            raise InvalidArgument("index", str(index), "type i64 for more than 2^31 points")
        self.check_y("index", tensors, x)


def check_floating(tensors: Tensors) -> None:
    """All tensors but the index are of a floating-point type of 16 bits or more."""
    for role, t in tensors.items():
        if role != "index" and t.dtype not in FLOATING[:4]:
            raise InvalidArgument(role, str(t), f"a floating-point type: {', '.join(FLOATING[:4])}")


@dataclasses.dataclass(frozen=True)
class ReduceFwd(Reduce):
    """``y = alpha * f(x) + beta * z`` and, for the extremes, where each was.

    Parameters
    ----------
    mode, axes, keep
        As in `Reduce`.
    index_type : {'none', 'i32', 'i64'}
        What ``index`` is made of; none for no such output.
    """

    index_type: str = attribute(NAME, "none")

    name = "reduce_fwd"
    inputs, optional, outputs = ("x",), ("z",), ("y", "index")
    epilogue = frozenset({"alpha", "beta"})

    def resolved(self, tensors: Tensors) -> Operation:
        if self.index_type not in INDEX_TYPES:
            raise InvalidArgument("index_type", self.index_type, ", ".join(INDEX_TYPES))
        if self.index_type != "none" and self.mode not in EXTREMES:
            raise InvalidArgument(
                "index_type", self.index_type, f"none for {self.mode}; {', '.join(EXTREMES)} have one"
            )
        return self.with_axes(tensors["x"])

    def infer(self, tensors: Tensors) -> dict[str, TensorDescriptor]:
        x = tensors["x"]
        shape = reduced_shape(x.shape, self.axes, self.keep)
        y = {"y": TensorDescriptor(x.dtype, shape)}
        return y if self.index_type == "none" else y | {"index": TensorDescriptor(self.index_type, shape)}

    def check(self, tensors: Tensors, epilogue: Epilogue) -> None:
        check_floating(tensors)
        x = tensors["x"]
        for role in ("z", "y"):
            self.check_y(role, tensors, x)
        if "index" in tensors and tensors["index"].dtype != self.index_type:
            raise InvalidArgument("index", str(tensors["index"]), f"type {self.index_type}, the index_type")
        self.check_index(tensors, x)
        if self.mode in EXTREMES and not self.points(x) and tensors["y"].numel:
            raise InvalidArgument("x", str(x), f"at least one point along the axes {list(self.axes)} for {self.mode}")

    def flops(self, tensors: Tensors) -> float:
        return float(max(tensors["x"].numel, tensors["y"].numel))

    def sample(self, role: str, tensors: Tensors, shape: tuple[int, ...], generator: Any) -> Any:
        """Extremes have ties, products stay near 1 and may leave zeros out."""
        import torch

        values = torch.randn(shape, generator=generator, dtype=torch.float64)
        return _sampled(self, tensors["x"], values, generator) if role == "x" else values


def _sampled(op: Reduce, x: TensorDescriptor, values: Any, generator: Any) -> Any:
    import torch

    if op.mode in EXTREMES:
        return (4 * values).round() / 4
    if op.mode in ("mul", "mul_no_zeros"):
        near = torch.exp(values / math.sqrt(max(op.points(x), 1))) * values.sign()
        share = 0.25 if op.mode == "mul_no_zeros" else 1.0 / max(op.points(x), 1)
        return torch.where(torch.rand(values.shape, generator=generator) < share, 0.0, near)
    return values


@dataclasses.dataclass(frozen=True)
class ReduceBwd(Reduce):
    """``dx = alpha * dy * (gradient of f at x)``.

    Reads beside dy what the mode needs: nothing for add and avg; x for norm1 and mul; x and y, the plain result, for
    the others. With index the extremes need no y, min and max not even x. Give dx where no x tells its shape.
    """

    name = "reduce_bwd"
    inputs, optional, outputs = ("dy",), ("x", "y", "index"), ("dx",)
    epilogue = frozenset({"alpha"})

    def resolved(self, tensors: Tensors) -> Operation:
        return self.with_axes(self._x(tensors))

    def _x(self, tensors: Tensors) -> TensorDescriptor:
        return tensors.get("dx") or tensors.get("x") or tensors["dy"]

    def needs(self, index: bool) -> tuple[str, ...]:
        """Which of x and y are read."""
        if self.mode in ("add", "avg"):
            return ()
        if self.mode in ("norm1", "mul") or (index and self.mode == "amax"):
            return ("x",)
        return () if index else ("x", "y")

    def infer(self, tensors: Tensors) -> dict[str, TensorDescriptor]:
        return {"dx": like(self._x(tensors))}

    def check(self, tensors: Tensors, epilogue: Epilogue) -> None:
        check_floating(tensors)
        dx = tensors["dx"]
        wanted = self.needs("index" in tensors)
        for role in ("x", "y"):
            if (role in tensors) != (role in wanted):
                found = str(tensors[role]) if role in tensors else "nothing"
                with_index = " with an index" if "index" in tensors else ""
                reads = " and ".join(("dy", *wanted))
                raise InvalidArgument(role, found, f"{self.mode}{with_index} reads {reads}")
        if "x" in tensors and tensors["x"].shape != dx.shape:
            raise InvalidArgument("x", str(tensors["x"]), f"shape {list(dx.shape)} as dx")
        for role in ("dy", "y"):
            self.check_y(role, tensors, dx)
        self.check_index(tensors, dx)
        if "y" in tensors and self.mode in EXTREMES and tensors["y"].dtype != tensors["x"].dtype:
            raise InvalidArgument("y", str(tensors["y"]), f"the type of x, {tensors['x'].dtype}: it is looked for in x")

    def flops(self, tensors: Tensors) -> float:
        return 2.0 * tensors["dx"].numel

    def bytes(self, tensors: Tensors) -> float:
        """Where x decides how dy is shared, it is read before it is known how often."""
        twice = self.mode == "mul" or (self.mode in EXTREMES and "y" in tensors)
        return sum(t.nbytes for t in tensors.values()) + (tensors["x"].nbytes if twice else 0)

    def sample(self, role: str, tensors: Tensors, shape: tuple[int, ...], generator: Any) -> Any:
        """An index names a place that there is; y is among x, or could be."""
        import torch

        values = torch.randn(shape, generator=generator, dtype=torch.float64)
        if role == "index":
            count = max(self.points(tensors["dx"]), 1)
            return (torch.rand(shape, generator=generator, dtype=torch.float64) * count).long().clamp(max=count - 1)
        if role == "x":
            return _sampled(self, tensors["x"], values, generator)
        if role == "y" and self.mode in EXTREMES:
            return ((4 * values).round() / 4).abs() if self.mode == "amax" else (4 * values).round() / 4
        return values.abs() + 0.5 if role == "y" else values
