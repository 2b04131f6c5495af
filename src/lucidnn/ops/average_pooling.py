r"""Pooling by averages and by power sums over fixed windows, in 1, 2 and 3 dimensions, forward and backward.

With S(q) the points that window q, ``q s - p + s' d``, has inside x, and n(q) the number that it divides by:

.. math::  avg:\quad y[q] = \frac{1}{n(q)} \sum_{h \in S(q)} x[h] \qquad
           dx[h] = \sum_{q:\, h \in S(q)} \frac{dy[q]}{n(q)}

.. math::  lp:\quad y[q] = \Bigl(\frac{k}{n(q)} \sum_{h \in S(q)} x[h]^{p}\Bigr)^{1/p} \qquad
           dx[h] = x[h]^{p-1} \sum_{q:\, h \in S(q)} \frac{k}{n(q)}\, y[q]^{1-p}\, dy[q]

n(q) is `divisor` where that is not 0, else the number of the window's points that lie in x or, with `count_padding`
(and always for lp), in x and its padding: a last window that hangs over under `ceil_mode` does not count what lies
beyond both. k is the window's full number of points, so that a window inside x has the plain power sum. A window
without any point gives 0. As in the framework, the power is that of x itself, not of its magnitude, a negative sum has
no root other than the first (NaN), and a window whose y is 0 sends no gradient back.

Output sizes are those of `lucidnn.ops.pooling`: a window never starts in the padding behind x.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from ..core.descriptor import TensorDescriptor
from ..core.errors import InvalidArgument
from ..core.operation import BOOL, FLOAT, INT, Operation, Tensors, attribute
from .convolution import output_layout
from .pooling import Pool

POWER_FLOPS = 16  # what a power counts beside an addition


@dataclasses.dataclass(frozen=True)
class _AveragePool(Pool):
    """What both directions of average pooling share.

    Parameters
    ----------
    window, stride, padding, dilation, ceil_mode
        As in `lucidnn.ops.pooling.Pool`.
    count_padding : bool
        Whether a window that reaches into the padding divides by those points, too.
    divisor : int
        What every window divides by instead; 0 for the number of its points.
    """

    count_padding: bool = attribute(BOOL, True)
    divisor: int = attribute(INT, 0)


@dataclasses.dataclass(frozen=True)
class AvgPoolFwd(_AveragePool):
    """``y``: the mean of each window."""

    name = "avg_pool_fwd"
    inputs, outputs = ("x",), ("y",)
    batched = ("x", "y")
    x_role, y_role = "x", "y"

    def infer(self, tensors: Tensors) -> dict[str, TensorDescriptor]:
        return pooled(self, tensors["x"])


@dataclasses.dataclass(frozen=True)
class AvgPoolBwd(_AveragePool):
    """``dx`` from dy. Each dx point gathers from the windows that hold it, so that the sum has one order."""

    name = "avg_pool_bwd"
    inputs, outputs = ("dy",), ("dx",)
    batched = ("dy", "dx")
    x_role, y_role = "dx", "dy"

    def infer(self, tensors: Tensors) -> dict[str, TensorDescriptor]:
        dy = tensors["dy"]
        shape = self.smallest_input(dy)
        return {"dx": TensorDescriptor.make(dy.dtype, shape, output_layout(shape, dy))}


@dataclasses.dataclass(frozen=True)
class _LpPool(Pool):
    """What both directions of power pooling share.

    Parameters
    ----------
    window, stride, padding, dilation, ceil_mode
        As in `lucidnn.ops.pooling.Pool`.
    norm : float
        The exponent p, above 0 and finite.
    """

    norm: float = attribute(FLOAT, 2.0)

    def resolved(self, tensors: Tensors) -> Operation:
        if not 0.0 < self.norm < math.inf:
            raise InvalidArgument("norm", self.norm, "a finite number > 0")
        return super().resolved(tensors)

    def flops(self, tensors: Tensors) -> float:
        return super().flops(tensors) * (3 if self.norm in (1.0, 2.0) else POWER_FLOPS)

    def sample(self, role: str, tensors: Tensors, shape: tuple[int, ...], generator: Any) -> Any:
        """Not negative where that could leave nothing to take the root of, and y not so near 0 that 1/y swamps all."""
        values = super().sample(role, tensors, shape, generator)
        if role == "y":
            return values.abs() + 0.5
        return values if role == "dy" or self.norm in (1.0, 2.0) else values.abs() + 0.125


@dataclasses.dataclass(frozen=True)
class LpPoolFwd(_LpPool):
    """``y``: the root of each window's sum of powers."""

    name = "lp_pool_fwd"
    inputs, outputs = ("x",), ("y",)
    batched = ("x", "y")
    x_role, y_role = "x", "y"

    def infer(self, tensors: Tensors) -> dict[str, TensorDescriptor]:
        return pooled(self, tensors["x"])


@dataclasses.dataclass(frozen=True)
class LpPoolBwd(_LpPool):
    """``dx`` from dy, the input x and the result y of the forward pass."""

    name = "lp_pool_bwd"
    inputs, outputs = ("dy", "x", "y"), ("dx",)
    batched = ("dy", "x", "y", "dx")
    x_role, y_role = "dx", "dy"

    def infer(self, tensors: Tensors) -> dict[str, TensorDescriptor]:
        x = tensors["x"]
        return {"dx": TensorDescriptor.make(x.dtype, x.shape, output_layout(x.shape, x))}

    def check(self, tensors: Tensors, epilogue: Any) -> None:
        super().check(tensors, epilogue)
        for role, like in (("x", "dx"), ("y", "dy")):
            if tensors[role].shape != tensors[like].shape:
                raise InvalidArgument(role, str(tensors[role]), f"the shape of {like}, {list(tensors[like].shape)}")


def pooled(op: Pool, x: TensorDescriptor) -> dict[str, TensorDescriptor]:
    """Y of a forward pass: channels last where x is."""
    shape = (*x.shape[:2], *(max(n, 0) for n in op.output_sizes(x)))
    return {"y": TensorDescriptor.make(x.dtype, shape, output_layout(shape, x))}
