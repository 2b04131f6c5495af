r"""Maximum pooling in 1, 2 and 3 dimensions, forward with the place of each maximum, and backward by it.

.. math::  y[n, c, q] = \max_{s'} x[n, c, q s - p + s' d] \qquad
           dx[n, c, h] = \sum_{q:\, \mathrm{argmax}(q) = h} dy[n, c, q]

Points outside x take no part. Among equal values the first in window order (D, H, W) wins; NaN counts as the largest.
An output axis has ``(in + before + after - d (window - 1) - 1) // s + 1`` points, rounded up instead with `ceil_mode`,
and a last window that would start beyond the input and its padding before is left out.

The index tensor's type says what it holds: ``i64`` or ``i32`` the flat position in the input's spatial plane (the
frameworks' convention), ``u8`` the position inside the window (a quarter of the traffic or less; windows up to 256).
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

from ..core.descriptor import FLOATING, TensorDescriptor
from ..core.errors import InvalidArgument
from ..core.operation import BOOL, INTS, NAME, PADS, Epilogue, Operation, Tensors, attribute
from ..core.problem import Problem
from .convolution import AXES, five_strides, output_layout, three

INDEX_TYPES = ("none", "u8", "i32", "i64")


def pooled_size(size: int, window: int, stride: int, pads: tuple[int, int], dilation: int, ceil_mode: bool) -> int:
    """Points of one output axis.

    Examples
    --------
    >>> pooled_size(32, 2, 2, (0, 0), 1, False), pooled_size(5, 2, 2, (0, 0), 1, True)
    (16, 3)
    >>> pooled_size(1, 1, 3, (0, 0), 1, True)
    1
    """
    room = size + sum(pads) - dilation * (window - 1) - 1
    count = (-(-room // stride) if ceil_mode else room // stride) + 1
    if ceil_mode and (count - 1) * stride >= size + pads[0]:
        count -= 1
    return count


@dataclasses.dataclass(frozen=True)
class _MaxPool(Operation):
    """Attributes that both directions share.

    Parameters
    ----------
    window : tuple of int
        One size a spatial axis (or one for all).
    stride : tuple of int
        The window if left out.
    padding : tuple of (int, int)
        Before and after; at most half the window.
    dilation : tuple of int
    ceil_mode : bool
    index_type : {'i64', 'i32', 'u8', 'none'}
        What is kept for the backward pass; see the module's text.
    """

    window: tuple[int, ...] = attribute(INTS, ())
    stride: tuple[int, ...] = attribute(INTS, ())
    padding: tuple[tuple[int, int], ...] = attribute(PADS, ())
    dilation: tuple[int, ...] = attribute(INTS, ())
    ceil_mode: bool = attribute(BOOL, False)
    index_type: str = attribute(NAME, "i64")

    x_role: ClassVar[str]
    y_role: ClassVar[str]

    def resolved(self, tensors: Tensors) -> Operation:
        first = tensors[self.inputs[0]]
        ndim = first.ndim - 2
        if ndim not in (1, 2, 3):
            raise InvalidArgument(self.inputs[0], str(first), "3, 4 or 5 axes: batch, channels, 1 to 3 spatial")
        if not self.window:
            raise InvalidArgument("window", "nothing", f"1 or {ndim} sizes")
        values: dict[str, tuple] = {}
        for name, default in (("window", ()), ("stride", self.window), ("padding", ((0, 0),)), ("dilation", (1,))):
            value = getattr(self, name) or default
            value = value * ndim if len(value) == 1 else value
            if len(value) != ndim:
                raise InvalidArgument(name, list(value), f"1 or {ndim} values, one for each of {', '.join(AXES[ndim])}")
            values[name] = value
        for name in ("window", "stride", "dilation"):
            if min(values[name]) < 1:
                raise InvalidArgument(name, list(values[name]), "numbers >= 1")
        for pads, window in zip(values["padding"], values["window"], strict=True):
            if min(pads) < 0 or max(pads) > window // 2:
                raise InvalidArgument("padding", list(pads), f"numbers from 0 to half the window, {window // 2}")
        if self.index_type not in INDEX_TYPES:
            raise InvalidArgument("index_type", self.index_type, ", ".join(INDEX_TYPES))
        if self.index_type == "u8" and math.prod(values["window"]) > 256:
            raise InvalidArgument(
                "index_type", "u8", f"i32 or i64 for a window of {math.prod(values['window'])} points"
            )
        return dataclasses.replace(self, **values)

    def is_default(self, name: str) -> bool:
        if name == "stride":
            return self.stride == self.window
        if name in ("padding", "dilation"):
            return set(getattr(self, name)) == {{"padding": (0, 0), "dilation": 1}[name]}
        return super().is_default(name)

    def output_sizes(self, x: TensorDescriptor) -> tuple[int, ...]:
        """Spatial shape of y."""
        axes = zip(x.shape[2:], self.window, self.stride, self.padding, self.dilation, strict=True)
        return tuple(pooled_size(*axis, self.ceil_mode) for axis in axes)

    def check(self, tensors: Tensors, epilogue: Epilogue) -> None:
        x, y = tensors[self.x_role], tensors[self.y_role]
        for role in (self.x_role, self.y_role):
            if tensors[role].dtype not in FLOATING:
                raise InvalidArgument(role, str(tensors[role]), f"a floating-point type: {', '.join(FLOATING)}")
        if x.dtype != y.dtype:
            raise InvalidArgument(self.outputs[0], str(tensors[self.outputs[0]]), f"the type of {self.inputs[0]}")
        sizes = self.output_sizes(x)
        if min(sizes) < 1:
            raise InvalidArgument(self.x_role, str(x), f"an input with room for the window {list(self.window)}")
        expected = (*x.shape[:2], *sizes)
        if y.shape != expected:
            raise InvalidArgument(self.y_role, str(y), f"shape {list(expected)}")
        if index := tensors.get("index"):
            if index.dtype != self.index_type or index.shape != expected:
                raise InvalidArgument("index", str(index), f"{self.index_type} of shape {list(expected)}")
        if self.index_type == "i32" and math.prod(x.shape[2:]) >= 2**31:
            raise InvalidArgument("index_type", "i32", "i64 for 2^31 points and more")

    def flops(self, tensors: Tensors) -> float:
        return float(tensors[self.y_role].numel * math.prod(self.window))


@dataclasses.dataclass(frozen=True)
class MaxPoolFwd(_MaxPool):
    """``y`` and, unless `index_type` is none, ``index``: the largest value of each window and where it was."""

    name = "max_pool_fwd"
    inputs, outputs = ("x",), ("y", "index")
    batched = ("x", "y", "index")
    x_role, y_role = "x", "y"

    def infer(self, tensors: Tensors) -> dict[str, TensorDescriptor]:
        x = tensors["x"]
        shape = (*x.shape[:2], *(max(n, 0) for n in self.output_sizes(x)))
        layout = output_layout(shape, x)
        y = {"y": TensorDescriptor.make(x.dtype, shape, layout)}
        return y if self.index_type == "none" else y | {"index": TensorDescriptor.make(self.index_type, shape, layout)}


@dataclasses.dataclass(frozen=True)
class MaxPoolBwd(_MaxPool):
    """``dx`` from dy and index. Each dx point gathers from the windows that hold it, so that the sum has one order."""

    name = "max_pool_bwd"
    inputs, outputs = ("dy", "index"), ("dx",)
    batched = ("dy", "index", "dx")
    x_role, y_role = "dx", "dy"

    def infer(self, tensors: Tensors) -> dict[str, TensorDescriptor]:
        dy = tensors["dy"]
        sizes = (
            (q - 1) * s + d * (r - 1) + 1 - sum(p)
            for q, r, s, d, p in zip(dy.shape[2:], self.window, self.stride, self.dilation, self.padding, strict=True)
        )
        shape = (*dy.shape[:2], *(max(n, 0) for n in sizes))
        return {"dx": TensorDescriptor.make(dy.dtype, shape, output_layout(shape, dy))}

    def sample(self, role: str, tensors: Tensors, shape: tuple[int, ...], generator: Any) -> Any:
        """An index names a point that its window really holds."""
        if role != "index":
            return super().sample(role, tensors, shape, generator)
        import torch

        sizes = tensors["dx"].shape[2:]
        place = torch.zeros(shape, dtype=torch.int64)
        for axis, (n, r, s, p, d) in enumerate(
            zip(sizes, self.window, self.stride, self.padding, self.dilation, strict=True)
        ):
            q = shape[2 + axis]
            start = (torch.arange(q) * s - p[0]).reshape(-1, *[1] * (len(sizes) - 1 - axis))
            first = ((-start).clamp(min=0) + d - 1) // d
            last = ((n - 1 - start) // d).clamp(max=r - 1)
            tap = first + (torch.rand(shape, generator=generator) * (last - first + 1)).long()
            place = place * r + tap if self.index_type == "u8" else place * n + start + tap * d
        return place


@dataclasses.dataclass(frozen=True)
class PoolGeometry:
    """A pooling problem in numbers, spatial tuples padded to (D, H, W); `x` and `y` are dx and dy in the backward.

    Examples
    --------
    >>> g = PoolGeometry.of(Problem.parse("max_pool_fwd x=f32[2,8,6,6] window=2"))
    >>> g.in_size, g.window, g.stride, g.out_size
    ((1, 6, 6), (1, 2, 2), (1, 2, 2), (1, 3, 3))
    """

    x: TensorDescriptor
    y: TensorDescriptor
    N: int
    C: int
    in_size: tuple[int, int, int]
    window: tuple[int, int, int]
    out_size: tuple[int, int, int]
    stride: tuple[int, int, int]
    pad: tuple[int, int, int]
    dilation: tuple[int, int, int]
    x_strides: tuple[int, ...]
    y_strides: tuple[int, ...]
    index_strides: tuple[int, ...]

    @classmethod
    def of(cls, problem: Problem) -> PoolGeometry:
        op = problem.op
        if not isinstance(op, _MaxPool):
            raise TypeError(f"{op.name} has no pooling geometry")
        x, y = problem[op.x_role], problem[op.y_role]
        index = problem.tensors.get("index")
        return cls(
            x, y, x.shape[0], x.shape[1], three(x.shape[2:], 1), three(op.window, 1), three(y.shape[2:], 1),
            three(op.stride, 1), three((p[0] for p in op.padding), 0), three(op.dilation, 1),
            five_strides(x), five_strides(y), five_strides(index) if index else (0,) * 5,
        )  # fmt: skip
