r"""Images written out as columns and back, and channels that become pixels: copies to other places.

.. math::  y[n, (c, r, s), (p, q)] = x[n, c, p\,u_h - p_h + r\,d_h, q\,u_w - p_w + s\,d_w] \qquad
           dx[n, c, h, w] = \sum dy \text{ over all that came from there}

``unfold_fwd`` writes every window of the images as a column, zeros where it reaches over the edge; ``unfold_bwd`` adds
the columns up again where they came from. ``shuffle`` moves every element to one other place:

* ``pixel_shuffle``: y[n, c, h f + i, w f + j] = x[n, (c, i, j), h, w], and ``pixel_unshuffle`` back;
* ``channel_shuffle``: y[n, (j, i)] = x[n, (i, j)] for i of `factor` groups.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

from ..core.descriptor import FLOATING, TensorDescriptor
from ..core.errors import InvalidArgument
from ..core.operation import INT, INTS, NAME, Epilogue, Operation, Tensors, attribute
from ..core.problem import Problem
from .convolution import output_layout
from .pooling import check_types, one_each

KINDS = ("pixel_shuffle", "pixel_unshuffle", "channel_shuffle")
INVERSE = {"pixel_shuffle": "pixel_unshuffle", "pixel_unshuffle": "pixel_shuffle"}


def _check_floating(op: Operation, tensors: Tensors) -> None:
    check_types(op, tensors)
    first = op.inputs[0]
    if tensors[first].dtype not in FLOATING[:4]:
        raise InvalidArgument(first, str(tensors[first]), f"a type of {', '.join(FLOATING[:4])}")


@dataclasses.dataclass(frozen=True)
class _Unfold(Operation):
    """What both directions share; each attribute has one number for H and one for W.

    Parameters
    ----------
    window, stride, dilation : tuple of int
    padding : tuple of int
        Zeros on both sides.
    """

    window: tuple[int, ...] = attribute(INTS, ())
    stride: tuple[int, ...] = attribute(INTS, (1, 1))
    padding: tuple[int, ...] = attribute(INTS, (0, 0))
    dilation: tuple[int, ...] = attribute(INTS, (1, 1))

    def resolved(self, tensors: Tensors) -> Operation:
        if not self.window:
            raise InvalidArgument("window", "nothing", "1 or 2 sizes")
        values = {}
        for name, least in (("window", 1), ("stride", 1), ("padding", 0), ("dilation", 1)):
            values[name] = one_each(name, getattr(self, name), 2)
            if min(values[name]) < least:
                raise InvalidArgument(name, list(values[name]), f"numbers >= {least}")
        return dataclasses.replace(self, **values)

    def blocks(self, size: tuple[int, ...]) -> tuple[int, int]:
        """How many windows an image of this size has along H and W."""
        found = tuple(
            (n + 2 * p - d * (r - 1) - 1) // u + 1
            for n, r, u, p, d in zip(size, self.window, self.stride, self.padding, self.dilation, strict=True)
        )
        return found[0], found[1]

    def _checked(self, tensors: Tensors, x_role: str, y_role: str) -> None:
        _check_floating(self, tensors)
        x, y = tensors[x_role], tensors[y_role]
        if x.ndim != 4:
            raise InvalidArgument(x_role, str(x), "4 axes: batch, channels, H, W")
        blocks = self.blocks(x.shape[2:])
        if min(blocks) < 1:
            raise InvalidArgument("window", list(self.window), f"windows that fit the padded image {list(x.shape[2:])}")
        expected = (x.shape[0], x.shape[1] * math.prod(self.window), math.prod(blocks))
        if y.shape != expected:
            raise InvalidArgument(y_role, str(y), f"shape {list(expected)}")

    def flops(self, tensors: Tensors) -> float:
        return 2.0 * tensors["y" if "y" in tensors else "dy"].numel


@dataclasses.dataclass(frozen=True)
class UnfoldFwd(_Unfold):
    """``y``, (N, C window, blocks): the windows of x as columns."""

    name = "unfold_fwd"
    inputs, outputs = ("x",), ("y",)
    batched = ("x", "y")

    def infer(self, tensors: Tensors) -> dict[str, TensorDescriptor]:
        x = tensors["x"]
        if x.ndim != 4:
            raise InvalidArgument("x", str(x), "4 axes: batch, channels, H, W")
        blocks = math.prod(max(n, 0) for n in self.blocks(x.shape[2:]))
        return {"y": TensorDescriptor(x.dtype, (x.shape[0], x.shape[1] * math.prod(self.window), blocks))}

    def check(self, tensors: Tensors, epilogue: Epilogue) -> None:
        self._checked(tensors, "x", "y")


@dataclasses.dataclass(frozen=True)
class UnfoldBwd(_Unfold):
    """``dx``, images of `size`, from columns dy: each element gathers what came from it, in one order."""

    size: tuple[int, ...] = attribute(INTS, ())

    name = "unfold_bwd"
    inputs, outputs = ("dy",), ("dx",)
    batched = ("dy", "dx")

    def resolved(self, tensors: Tensors) -> Operation:
        if not self.size:
            raise InvalidArgument("size", "nothing", "1 or 2 sizes")
        size = one_each("size", self.size, 2)
        if min(size) < 1:
            raise InvalidArgument("size", list(size), "sizes >= 1")
        return dataclasses.replace(super().resolved(tensors), size=size)

    def infer(self, tensors: Tensors) -> dict[str, TensorDescriptor]:
        dy, points = tensors["dy"], math.prod(self.window)
        if dy.ndim != 3 or dy.shape[1] % points:
            raise InvalidArgument("dy", str(dy), f"3 axes, the second a multiple of the window's {points} points")
        return {"dx": TensorDescriptor(dy.dtype, (dy.shape[0], dy.shape[1] // points, *self.size))}

    def check(self, tensors: Tensors, epilogue: Epilogue) -> None:
        self._checked(tensors, "dx", "dy")


@dataclasses.dataclass(frozen=True)
class Shuffle(Operation):
    """``y``: every element of x at another place.

    Parameters
    ----------
    kind : {'pixel_shuffle', 'pixel_unshuffle', 'channel_shuffle'}
    factor : int
        Upscale or downscale factor, or number of groups.
    """

    kind: str = attribute(NAME, "pixel_shuffle")
    factor: int = attribute(INT, 1)

    name = "shuffle"
    inputs, outputs = ("x",), ("y",)
    batched = ("x", "y")

    def resolved(self, tensors: Tensors) -> Operation:
        x, f = tensors["x"], self.factor
        if self.kind not in KINDS:
            raise InvalidArgument("kind", self.kind, ", ".join(KINDS))
        if f < 1:
            raise InvalidArgument("factor", f, "a number >= 1")
        if self.kind == "channel_shuffle":
            if not 3 <= x.ndim <= 5:
                raise InvalidArgument("x", str(x), "3, 4 or 5 axes: batch, channels, 1 to 3 spatial")
            if x.shape[1] % f:
                raise InvalidArgument("factor", f, f"a number of groups that divides the {x.shape[1]} channels")
            return self
        if x.ndim != 4:
            raise InvalidArgument("x", str(x), "4 axes: batch, channels, H, W")
        if self.kind == "pixel_shuffle" and x.shape[1] % (f * f):
            raise InvalidArgument("factor", f, f"a factor whose square divides the {x.shape[1]} channels")
        if self.kind == "pixel_unshuffle" and (x.shape[2] % f or x.shape[3] % f):
            raise InvalidArgument("factor", f, f"a factor that divides the image of {list(x.shape[2:])}")
        return self

    def shape(self, x: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of y."""
        f = self.factor
        if self.kind == "pixel_shuffle":
            return (x[0], x[1] // (f * f), x[2] * f, x[3] * f)
        return (x[0], x[1] * f * f, x[2] // f, x[3] // f) if self.kind == "pixel_unshuffle" else x

    def infer(self, tensors: Tensors) -> dict[str, TensorDescriptor]:
        x = tensors["x"]
        shape = self.shape(x.shape)
        return {"y": TensorDescriptor.make(x.dtype, shape, output_layout(shape, x))}

    def check(self, tensors: Tensors, epilogue: Epilogue) -> None:
        _check_floating(self, tensors)
        expected = self.shape(tensors["x"].shape)
        if tensors["y"].shape != expected:
            raise InvalidArgument("y", str(tensors["y"]), f"shape {list(expected)}")

    def flops(self, tensors: Tensors) -> float:
        return 0.0


class Loop(NamedTuple):
    """One loop of a copy: how many turns, and elements from one to the next in x and in y."""

    size: int
    x: int
    y: int


def loops(problem: Problem) -> list[Loop]:
    """The loops of a shuffle, outermost first in y; those that are one run in both tensors are one.

    Examples
    --------
    >>> found = loops(Problem.parse("shuffle x=f32[2,8,3,5] kind=pixel_shuffle factor=2"))
    >>> [tuple(one) for one in found]
    [(4, 60, 60), (3, 5, 20), (2, 30, 10), (5, 1, 2), (2, 15, 1)]
    """
    op, x, y = problem.op, problem["x"], problem["y"]
    if not isinstance(op, Shuffle):
        raise TypeError(f"{op.name} is no shuffle")
    f, xs, ys = op.factor, x.strides, y.strides
    found = [Loop(x.shape[0], xs[0], ys[0])]
    if op.kind == "channel_shuffle":
        each = x.shape[1] // f
        found += [Loop(f, each * xs[1], ys[1]), Loop(each, xs[1], f * ys[1])]
        found += [Loop(n, a, b) for n, a, b in zip(x.shape[2:], xs[2:], ys[2:], strict=True)]
    else:
        few, many = (y, x) if op.kind == "pixel_shuffle" else (x, y)  # channels
        a, b = few.strides, many.strides
        pairs = [
            (few.shape[1], a[1], f * f * b[1]), (f, a[2], f * b[1]), (f, a[3], b[1]),
            (many.shape[2], f * a[2], b[2]), (many.shape[3], f * a[3], b[3]),
        ]  # fmt: skip
        found += [Loop(n, s, t) if few is x else Loop(n, t, s) for n, s, t in pairs]
    found = sorted((one for one in found if one.size != 1), key=lambda one: (-one.y, -one.x)) or [Loop(1, 0, 0)]
    merged = found[:1]
    for one in found[1:]:
        last = merged[-1]
        if last.x == one.size * one.x and last.y == one.size * one.y:
            merged[-1] = Loop(last.size * one.size, one.x, one.y)
        else:
            merged.append(one)
    return merged
