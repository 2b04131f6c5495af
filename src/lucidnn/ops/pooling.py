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
from typing import Any, ClassVar, NamedTuple

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
class Pool(Operation):
    """Attributes and rules that pooling operations with fixed windows share.

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
    """

    window: tuple[int, ...] = attribute(INTS, ())
    stride: tuple[int, ...] = attribute(INTS, ())
    padding: tuple[tuple[int, int], ...] = attribute(PADS, ())
    dilation: tuple[int, ...] = attribute(INTS, ())
    ceil_mode: bool = attribute(BOOL, False)

    x_role: ClassVar[str]
    y_role: ClassVar[str]

    def resolved(self, tensors: Tensors) -> Operation:
        ndim = spatial_axes(self.inputs[0], tensors)
        if not self.window:
            raise InvalidArgument("window", "nothing", f"1 or {ndim} sizes")
        values: dict[str, tuple] = {}
        for name, default in (("window", ()), ("stride", self.window), ("padding", ((0, 0),)), ("dilation", (1,))):
            values[name] = one_each(name, getattr(self, name) or default, ndim)
        for name in ("window", "stride", "dilation"):
            if min(values[name]) < 1:
                raise InvalidArgument(name, list(values[name]), "numbers >= 1")
        for pads, window in zip(values["padding"], values["window"], strict=True):
            if min(pads) < 0 or max(pads) > window // 2:
                raise InvalidArgument("padding", list(pads), f"numbers from 0 to half the window, {window // 2}")
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

    def axes(self, tensors: Tensors) -> tuple[WindowAxis, ...]:
        """The windows along each spatial axis."""
        sizes, counts = tensors[self.x_role].shape[2:], tensors[self.y_role].shape[2:]
        each = zip(sizes, counts, self.window, self.stride, self.padding, self.dilation, strict=True)
        return tuple(WindowAxis(n, m, r, s, a, b, d) for n, m, r, s, (a, b), d in each)

    def smallest_input(self, dy: TensorDescriptor) -> tuple[int, ...]:
        """The smallest shape of x that leads to dy's; what a backward operation assumes where dx is not given."""
        sizes = (
            (q - 1) * s + d * (r - 1) + 1 - sum(p)
            for q, r, s, d, p in zip(dy.shape[2:], self.window, self.stride, self.dilation, self.padding, strict=True)
        )
        return (*dy.shape[:2], *(max(n, 0) for n in sizes))

    def check(self, tensors: Tensors, epilogue: Epilogue) -> None:
        x, y = tensors[self.x_role], tensors[self.y_role]
        check_types(self, tensors)
        sizes = self.output_sizes(x)
        if min(sizes) < 1:
            raise InvalidArgument(self.x_role, str(x), f"an input with room for the window {list(self.window)}")
        expected = (*x.shape[:2], *sizes)
        if y.shape != expected:
            raise InvalidArgument(self.y_role, str(y), f"shape {list(expected)}")

    def flops(self, tensors: Tensors) -> float:
        return float(tensors[self.y_role].numel * math.prod(self.window))


def spatial_axes(role: str, tensors: Tensors) -> int:
    """How many spatial axes the tensor of this role has: 1, 2 or 3, or `InvalidArgument`."""
    ndim = tensors[role].ndim - 2
    if ndim not in (1, 2, 3):
        raise InvalidArgument(role, str(tensors[role]), "3, 4 or 5 axes: batch, channels, 1 to 3 spatial")
    return ndim


def one_each(name: str, value: tuple, ndim: int) -> tuple:
    """The values of an attribute, one for each spatial axis; a single one serves all."""
    value = value * ndim if len(value) == 1 else value
    if len(value) != ndim:
        raise InvalidArgument(name, list(value), f"1 or {ndim} values, one for each of {', '.join(AXES[ndim])}")
    return value


def check_types(op: Operation, tensors: Tensors) -> None:
    """All tensors but the index are of one floating-point type."""
    first = tensors[op.inputs[0]]
    for role, t in tensors.items():
        if role != "index":
            if t.dtype not in FLOATING:
                raise InvalidArgument(role, str(t), f"a floating-point type: {', '.join(FLOATING)}")
            if t.dtype != first.dtype:
                raise InvalidArgument(role, str(t), f"the type of {op.inputs[0]}")


@dataclasses.dataclass(frozen=True)
class _MaxPool(Pool):
    """What both directions of max pooling share.

    Parameters
    ----------
    window, stride, padding, dilation, ceil_mode
        As in `Pool`.
    index_type : {'i64', 'i32', 'u8', 'none'}
        What is kept for the backward pass; see the module's text.
    """

    index_type: str = attribute(NAME, "i64")

    def resolved(self, tensors: Tensors) -> Operation:
        op = super().resolved(tensors)
        if self.index_type not in INDEX_TYPES:
            raise InvalidArgument("index_type", self.index_type, ", ".join(INDEX_TYPES))
        points = math.prod(op.window)  # type: ignore[attr-defined]
        if self.index_type == "u8" and points > 256:
            raise InvalidArgument("index_type", "u8", f"i32 or i64 for a window of {points} points")
        return op

    def check(self, tensors: Tensors, epilogue: Epilogue) -> None:
        super().check(tensors, epilogue)
        x, y = tensors[self.x_role], tensors[self.y_role]
        if index := tensors.get("index"):
            if index.dtype != self.index_type or index.shape != y.shape:
                raise InvalidArgument("index", str(index), f"{self.index_type} of shape {list(y.shape)}")
        if self.index_type == "i32" and math.prod(x.shape[2:]) >= 2**31:
            raise InvalidArgument("index_type", "i32", "i64 for 2^31 points and more")


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
        shape = self.smallest_input(dy)
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
        if not isinstance(op, Pool):
            raise TypeError(f"{op.name} has no pooling geometry")
        x, y = problem[op.x_role], problem[op.y_role]
        index = problem.tensors.get("index")
        return cls(
            x, y, x.shape[0], x.shape[1], three(x.shape[2:], 1), three(op.window, 1), three(y.shape[2:], 1),
            three(op.stride, 1), three((p[0] for p in op.padding), 0), three(op.dilation, 1),
            five_strides(x), five_strides(y), five_strides(index) if index else (0,) * 5,
        )  # fmt: skip


class WindowAxis(NamedTuple):
    """The windows of a pooling along one axis of x, `size` points, that give `count` points of y.

    With a `stride` of 0 they are adaptive: they divide the axis as evenly as whole numbers allow, and overlap by a
    point where these do not divide.

    Examples
    --------
    >>> axis = WindowAxis(size=7, count=4, window=3, stride=2, before=1, after=1, dilation=1)
    >>> [axis.inside(q) for q in range(4)], axis.counted(0, True), axis.counted(0, False)
    ([(0, 2), (1, 3), (3, 3), (5, 2)], 3, 2)
    >>> [WindowAxis(7, 3).inside(q) for q in range(3)]
    [(0, 3), (2, 3), (4, 3)]
    """

    size: int
    count: int
    window: int = 0
    stride: int = 0
    before: int = 0
    after: int = 0
    dilation: int = 1

    @property
    def longest(self) -> int:
        """Most points that a window has."""
        if self.stride:
            return self.window
        return max((self.inside(q)[1] for q in range(self.count)), default=0)

    def inside(self, q: int) -> tuple[int, int]:
        """Of window q the first place in x, and how many of its points are places in x (`dilation` apart)."""
        if not self.stride:
            first = q * self.size // self.count
            return first, -(-(q + 1) * self.size // self.count) - first
        start = q * self.stride - self.before
        skipped = -(min(start, 0) // self.dilation)  # rounded up
        return start + skipped * self.dilation, max(self._points(start, self.size) - skipped, 0)

    def _points(self, start: int, end: int) -> int:
        """Points of a window from `start` on that lie before `end`."""
        return min(self.window, max(-(-(end - start) // self.dilation), 0))

    def counted(self, q: int, padding: bool) -> int:
        """Points of window q that lie in x or, with `padding`, in x and its padding."""
        if self.stride and padding:
            return self._points(q * self.stride - self.before, self.size + self.after)
        return self.inside(q)[1]

    def holders(self) -> list[list[int]]:
        """For every place of x the windows that have it among their points, in order."""
        found: list[list[int]] = [[] for _ in range(self.size)]
        for q in range(self.count):
            first, points = self.inside(q)
            for k in range(points):
                found[first + k * self.dilation].append(q)
        return found


def window_axes(problem: Problem) -> tuple[WindowAxis, WindowAxis, WindowAxis]:
    """The windows of a pooling problem, fixed or adaptive, along (D, H, W); axes that are not there have one point.

    Examples
    --------
    >>> window_axes(Problem.parse("avg_pool_fwd x=f32[2,8,6] window=2"))[2]
    WindowAxis(size=6, count=3, window=2, stride=2, before=0, after=0, dilation=1)
    """
    unit = WindowAxis(1, 1, 1, 1)
    d, h, w = (unit, unit, *problem.op.axes(problem.tensors))[-3:]  # type: ignore[attr-defined]
    return d, h, w
