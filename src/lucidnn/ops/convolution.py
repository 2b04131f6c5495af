r"""Convolution in 1, 2 and 3 dimensions: forward, data gradient, filter gradient, bias gradient.

With stride s, dilation d, padding (before) p and G groups, each output of group g is (cross-correlation, as every
framework means it; one axis shown)

.. math::  y[n, k, q] = \mathrm{act}\Big(\alpha \sum_{c, s'} x[n, g C/G + c,\; q s - p + s' d] \; w[k, c, s']
           + \beta z[n,k,q] + b[k]\Big)

where x is 0 outside its bounds, or what `padding_mode` says; with `flip` w is read from its far end, which makes the
sum a convolution in the mathematical sense. ``conv_dgrad`` and ``conv_wgrad`` are the gradients of the sum by x and by
w:

.. math::  dx[n, c, h] = \sum_{k, s': q s - p + s' d = h} dy[n, k, q] \, w[k, c, s'] \qquad
           dw[k, c, s'] = \sum_{n, q} dy[n, k, q] \, x[n, c, q s - p + s' d]

and ``conv_bgrad`` sums dy over everything but k. An output axis has
``(in + before + after - d (filter - 1) - 1) // s + 1`` points.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any, ClassVar, Self

from ..core.descriptor import FLOATING, TensorDescriptor
from ..core.errors import InvalidArgument
from ..core.operation import BOOL, INT, INTS, NAME, PADS, Epilogue, Operation, Tensors, attribute
from ..core.problem import Problem
from .activation import check_activation

AXES = {1: ("W",), 2: ("H", "W"), 3: ("D", "H", "W")}
BLEND = frozenset({"alpha", "beta"})
PADDING_MODES = ("zeros", "reflect", "replicate", "circular")
INTEGER_RESULTS = ("i32", "i8", "f32", "f16", "bf16")  # what a convolution of int8 tensors can be stored as


def output_size(size: int, filter_size: int, stride: int, pads: tuple[int, int], dilation: int) -> int:
    """Points of one output axis; 0 or less where the filter does not fit.

    Examples
    --------
    >>> output_size(32, 3, 1, (1, 1), 1), output_size(7, 3, 2, (0, 1), 1)
    (32, 3)
    """
    return (size + sum(pads) - dilation * (filter_size - 1) - 1) // stride + 1


def output_layout(shape: tuple[int, ...], *sources: TensorDescriptor) -> str:
    """Layout of a result: channels last where one of the sources is, as the frameworks do."""
    last = next((t.layout for t in sources if t.is_channels_last and t.ndim == len(shape)), "")
    return last if len(shape) > 2 else ""


def three(values: Iterable[int], fill: int) -> tuple[int, int, int]:
    """Up to three spatial values as (D, H, W), the missing ones in front filled in.

    Examples
    --------
    >>> three((6, 7), 1)
    (1, 6, 7)
    """
    d, h, w = (fill, fill, *values)[-3:]
    return d, h, w


def five_strides(t: TensorDescriptor) -> tuple[int, ...]:
    """Strides for (N, C, D, H, W); 0 for an axis that is not there."""
    return (*t.strides[:2], *three(t.strides[2:], 0))


@dataclasses.dataclass(frozen=True)
class Convolution(Operation):
    """Attributes and rules that the three directions share. A direction says which tensor plays x, w and y.

    Parameters
    ----------
    stride, dilation : tuple of int
        One a spatial axis (D, H, W order); a single number serves all axes; 1 if left out.
    padding : tuple of (int, int)
        Zeros before and after, one pair an axis.
    groups : int
        Divides C and K; filters of a group see only that group's C / groups channels.
    padding_mode : str
        What stands in the padding: zeros; reflect (x mirrored at its edge points, which are not repeated), replicate
        (the edge points), circular (x again).
    flip : bool
        Whether the filter is turned around along every spatial axis (a convolution, not a cross-correlation).
    """

    stride: tuple[int, ...] = attribute(INTS, ())
    padding: tuple[tuple[int, int], ...] = attribute(PADS, ())
    dilation: tuple[int, ...] = attribute(INTS, ())
    groups: int = attribute(INT, 1)
    padding_mode: str = attribute(NAME, "zeros")
    flip: bool = attribute(BOOL, False)

    x_role: ClassVar[str]
    w_role: ClassVar[str]
    y_role: ClassVar[str]
    math_modes = ("ieee", "tf32")
    rare = frozenset({"padding_mode", "flip", "scale"})

    def _written_out(self, ndim: int) -> dict[str, tuple]:
        values = {}
        for name, default in (("stride", 1), ("padding", (0, 0)), ("dilation", 1)):
            value = getattr(self, name) or (default,)
            value = value * ndim if len(value) == 1 else value
            if len(value) != ndim:
                raise InvalidArgument(name, list(value), f"1 or {ndim} values, one for each of {', '.join(AXES[ndim])}")
            values[name] = value
        return values

    def resolved(self, tensors: Tensors) -> Self:
        first, second = (tensors[role] for role in self.inputs)
        for role in self.inputs:
            if tensors[role].ndim not in (3, 4, 5):
                raise InvalidArgument(
                    role, str(tensors[role]), "3, 4 or 5 axes: batch or filters, channels, 1 to 3 spatial"
                )
        if second.ndim != first.ndim:
            role = self.inputs[1]
            raise InvalidArgument(role, str(second), f"{first.ndim} axes as {self.inputs[0]}={first} has")
        values = self._written_out(first.ndim - 2)
        for name in ("stride", "dilation"):
            if min(values[name]) < 1:
                raise InvalidArgument(name, list(values[name]), "numbers >= 1")
        if min(min(pair) for pair in values["padding"]) < 0:
            raise InvalidArgument("padding", [p if p[0] != p[1] else p[0] for p in values["padding"]], "numbers >= 0")
        if self.groups < 1:
            raise InvalidArgument("groups", self.groups, "a number >= 1")
        if self.padding_mode not in PADDING_MODES:
            raise InvalidArgument("padding_mode", repr(self.padding_mode), ", ".join(PADDING_MODES))
        # The mode means nothing without padding: one problem, one text.
        mode = self.padding_mode if any(map(any, values["padding"])) else "zeros"
        return dataclasses.replace(self, **values, padding_mode=mode)

    def is_default(self, name: str) -> bool:
        plain = {"stride": 1, "dilation": 1, "padding": (0, 0)}.get(name)
        return super().is_default(name) if plain is None else all(v == plain for v in getattr(self, name))

    def output_sizes(self, x: TensorDescriptor, w: TensorDescriptor) -> tuple[int, ...]:
        """Spatial shape of y."""
        return tuple(map(output_size, x.shape[2:], w.shape[2:], self.stride, self.padding, self.dilation))

    def check(self, tensors: Tensors, epilogue: Epilogue) -> None:
        x, w, y = (tensors[r] for r in (self.x_role, self.w_role, self.y_role))
        self._check_types(tensors)
        if x.shape[1] % self.groups:
            raise InvalidArgument("groups", self.groups, f"a divisor of {self.x_role}'s {x.shape[1]} channels")
        if w.shape[0] % self.groups:
            raise InvalidArgument("groups", self.groups, f"a divisor of {self.w_role}'s {w.shape[0]} filters")
        if w.shape[1] * self.groups != x.shape[1]:
            have = f"{self.x_role} has {x.shape[1]} in {self.groups} group(s)"
            raise InvalidArgument(self.w_role, str(w), f"{x.shape[1] // self.groups} channels in each filter ({have})")
        if min(w.shape[2:]) < 1:
            raise InvalidArgument(self.w_role, str(w), "filter sizes >= 1")
        sizes = self.output_sizes(x, w)
        for axis, name in enumerate(AXES[x.ndim - 2]):
            if sizes[axis] < 1:
                have = x.shape[2 + axis] + sum(self.padding[axis])
                need = self.dilation[axis] * (w.shape[2 + axis] - 1) + 1
                raise InvalidArgument(
                    self.x_role, str(x), f"at least {need} points along {name} with padding (it has {have})"
                )
            # the points of x that the padding repeats must be there
            most = {"reflect": x.shape[2 + axis] - 1, "circular": x.shape[2 + axis]}.get(self.padding_mode)
            if self.padding_mode == "replicate" and not x.shape[2 + axis]:
                most = 0
            if most is not None and max(self.padding[axis]) > max(most, 0):
                accepted = f"at most {max(most, 0)} along {name} in mode {self.padding_mode}, where {self.x_role}={x}"
                raise InvalidArgument("padding", list(self.padding[axis]), accepted)
        expected = (x.shape[0], w.shape[0], *sizes)
        if y.shape != expected:
            raise InvalidArgument(self.y_role, str(y), f"shape {list(expected)}")
        self._check_epilogue(tensors, epilogue)

    def _check_types(self, tensors: Tensors) -> None:
        out, (a, b) = self.outputs[0], (tensors[role] for role in self.inputs)
        whole = self.name == "conv_fprop" and a.dtype == "i8"
        for role in (*self.inputs, out):
            kinds = FLOATING if not whole else INTEGER_RESULTS if role == out else ("i8",)
            if tensors[role].dtype not in kinds:
                also = ", or i8 for both" if self.name == "conv_fprop" and role == self.inputs[0] else ""
                of = "a floating-point type: " if kinds is FLOATING else "type "
                raise InvalidArgument(role, str(tensors[role]), of + ", ".join(kinds) + also)
        if a.dtype != b.dtype and not (a.itemsize == b.itemsize == 1):  # the two float8 types mix
            raise InvalidArgument(self.inputs[1], str(b), f"the data type of {self.inputs[0]}, {a.dtype}")

    def _check_epilogue(self, tensors: Tensors, epilogue: Epilogue) -> None:
        check_activation(epilogue.activation, epilogue.parameter)
        out = tensors[self.outputs[0]]
        channels = out.shape[1] if "dw" not in self.outputs else 1
        exact = out.dtype == "i32"
        if exact and (epilogue != Epilogue() or "scale" in tensors):
            have = "scale" if "scale" in tensors else "alpha, beta or act"
            raise InvalidArgument(self.outputs[0], f"{out} with {have}", "another type than i32, which holds bare sums")
        if z := tensors.get("z"):
            if z.shape != out.shape or z.dtype not in (*FLOATING, out.dtype):
                raise InvalidArgument("z", str(z), f"shape {list(out.shape)}, floating point, as {self.outputs[0]}")
        if bias := tensors.get("bias"):
            kinds = {"i32"} if exact else {tensors[self.inputs[0]].dtype, out.dtype, "f32"} - {"i8"}
            if bias.shape != (out.shape[1],) or bias.dtype not in kinds:
                raise InvalidArgument(
                    "bias", str(bias), f"shape [{out.shape[1]}], one a filter, of type {' or '.join(sorted(kinds))}"
                )
        if scale := tensors.get("scale"):
            if scale.dtype != "f32" or scale.shape not in ((1,), (channels,)):
                accepted = "[1]" if channels == 1 else f"[1] or [{channels}]"
                raise InvalidArgument("scale", str(scale), f"type f32 and shape {accepted}")

    def sample(self, role: str, tensors: Tensors, shape: tuple[int, ...], generator: Any) -> Any:
        import torch

        if tensors[role].dtype in ("i8", "i32"):  # a bias of 32 bits has more of them than float32 holds
            limit = 128 if tensors[role].dtype == "i8" else 2**30
            return torch.randint(-limit, limit, shape, generator=generator)
        values = super().sample(role, tensors, shape, generator)
        # A factor, never near zero: results keep their size, which is what errors are measured against.
        return 0.5 + values.abs() if role == "scale" else values

    def flops(self, tensors: Tensors) -> float:
        w, y = tensors[self.w_role], tensors[self.y_role]
        return 2.0 * y.numel * math.prod(w.shape[1:])


@dataclasses.dataclass(frozen=True)
class ConvFprop(Convolution):
    """``y = act(alpha * scale * conv(x, w) + beta * z + bias)``.

    Shapes: x (N, C, spatial), w (K, C / groups, filter), bias (K,), z and y (N, K, output), scale (1,) or (K,). Where
    x and w are int8, sums are exact; y is int32 (the sums, with an int32 bias), a floating-point type, or int8 (rounded
    to nearest even and cut off at -128 and 127). float8 results are cut off at the largest number of their type.
    """

    name = "conv_fprop"
    inputs, optional, outputs = ("x", "w"), ("bias", "z", "scale"), ("y",)
    batched = ("x", "y", "z")
    epilogue = BLEND | {"activation", "parameter"}
    x_role, w_role, y_role = "x", "w", "y"

    def infer(self, tensors: Tensors) -> dict[str, TensorDescriptor]:
        x, w = tensors["x"], tensors["w"]
        shape = (x.shape[0], w.shape[0], *(max(n, 0) for n in self.output_sizes(x, w)))
        dtype = "i32" if x.dtype == "i8" else x.dtype
        return {"y": TensorDescriptor.make(dtype, shape, output_layout(shape, x, w))}


@dataclasses.dataclass(frozen=True)
class ConvDgrad(Convolution):
    """``dx = act(alpha * scale * (gradient of the convolution by x) + beta * z + bias)``, from dy and w.

    This is also the transposed convolution of dy, whose bias (C,), scale (1,) or (C,) and activation it takes. Several
    input sizes lead to one output size where stride > 1; without a given dx the smallest is taken.
    """

    name = "conv_dgrad"
    inputs, optional, outputs = ("dy", "w"), ("bias", "z", "scale"), ("dx",)
    batched = ("dy", "dx", "z")
    epilogue = BLEND | {"activation", "parameter"}
    x_role, w_role, y_role = "dx", "w", "dy"

    def infer(self, tensors: Tensors) -> dict[str, TensorDescriptor]:
        dy, w = tensors["dy"], tensors["w"]
        sizes = (
            (q - 1) * s + d * (r - 1) + 1 - sum(p)
            for q, r, s, d, p in zip(dy.shape[2:], w.shape[2:], self.stride, self.dilation, self.padding, strict=True)
        )
        shape = (dy.shape[0], w.shape[1] * self.groups, *(max(n, 0) for n in sizes))
        return {"dx": TensorDescriptor.make(dy.dtype, shape, output_layout(shape, dy, w))}


@dataclasses.dataclass(frozen=True)
class ConvWgrad(Convolution):
    """``dw = alpha * scale * (gradient of the convolution by w) + beta * z``, from x and dy, with scale (1,).

    Without a given dw the smallest filter that leads to dy's size is taken.
    """

    name = "conv_wgrad"
    inputs, optional, outputs = ("x", "dy"), ("z", "scale"), ("dw",)
    batched = ("x", "dy")
    epilogue = BLEND
    x_role, w_role, y_role = "x", "dw", "dy"

    def infer(self, tensors: Tensors) -> dict[str, TensorDescriptor]:
        x, dy = tensors["x"], tensors["dy"]
        sizes = (
            max((n + sum(p) - 1 - (q - 1) * s) // d + 1 if s == 1 else (n + sum(p) - (q - 1) * s - s) // d + 1, 1)
            for n, q, s, d, p in zip(x.shape[2:], dy.shape[2:], self.stride, self.dilation, self.padding, strict=True)
        )
        shape = (dy.shape[1], x.shape[1] // self.groups, *sizes)
        return {"dw": TensorDescriptor.make(x.dtype, shape, output_layout(shape, x, dy))}


@dataclasses.dataclass(frozen=True)
class ConvBgrad(Operation):
    """``db[k]`` = sum of dy over batch and space."""

    name = "conv_bgrad"
    inputs, outputs = ("dy",), ("db",)
    batched = ("dy",)

    def infer(self, tensors: Tensors) -> dict[str, TensorDescriptor]:
        dy = tensors["dy"]
        if dy.ndim not in (2, 3, 4, 5):
            raise InvalidArgument("dy", str(dy), "2 to 5 axes: batch, channels, spatial")
        return {"db": TensorDescriptor(dy.dtype, (dy.shape[1],))}

    def check(self, tensors: Tensors, epilogue: Epilogue) -> None:
        dy, db = tensors["dy"], tensors["db"]
        for role in ("dy", "db"):
            if tensors[role].dtype not in FLOATING:
                raise InvalidArgument(role, str(tensors[role]), f"a floating-point type: {', '.join(FLOATING)}")
        if db.shape != (dy.shape[1],):
            raise InvalidArgument("db", str(db), f"shape [{dy.shape[1]}]")

    def flops(self, tensors: Tensors) -> float:
        return float(tensors["dy"].numel)


@dataclasses.dataclass(frozen=True)
class Geometry:
    """A convolution problem in numbers, the same for all directions, with every spatial tuple padded to (D, H, W).

    Unit axes are put in front, so that one kernel with three spatial loops serves 1-D to 3-D. `x`, `w`, `y` are the
    descriptors that play these parts (dx, dw, dy in the gradients); their `*_strides` have five entries
    (N, C, D, H, W or K, C, T, R, S), in elements.

    Examples
    --------
    >>> p = Problem.parse("conv_dgrad dy=f32[2,8,5] w=f32[8,4,3] stride=2")
    >>> g = Geometry.of(p)
    >>> g.in_size, g.filter, g.out_size, g.stride, (g.N, g.C, g.K)
    ((1, 1, 11), (1, 1, 3), (1, 1, 5), (1, 1, 2), (2, 4, 8))
    """

    x: TensorDescriptor
    w: TensorDescriptor
    y: TensorDescriptor
    N: int
    C: int
    K: int
    G: int
    in_size: tuple[int, int, int]
    filter: tuple[int, int, int]
    out_size: tuple[int, int, int]
    stride: tuple[int, int, int]
    pad: tuple[int, int, int]
    pad_after: tuple[int, int, int]
    dilation: tuple[int, int, int]
    padding_mode: str
    flip: bool
    x_strides: tuple[int, ...]
    w_strides: tuple[int, ...]
    y_strides: tuple[int, ...]

    @classmethod
    def of(cls, problem: Problem) -> Geometry:
        op = problem.op
        if not isinstance(op, Convolution):
            raise TypeError(f"{op.name} has no convolution geometry")
        x, w, y = (problem[role] for role in (op.x_role, op.w_role, op.y_role))
        before, after = zip(*op.padding, strict=True)
        return cls(
            x, w, y, x.shape[0], x.shape[1], w.shape[0], op.groups,
            three(x.shape[2:], 1), three(w.shape[2:], 1), three(y.shape[2:], 1),
            three(op.stride, 1), three(before, 0), three(after, 0), three(op.dilation, 1),
            op.padding_mode, op.flip,
            *map(five_strides, (x, w, y)),
        )  # fmt: skip
