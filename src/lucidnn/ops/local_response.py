r"""Local response normalization across channels, and divisive normalization over space: each value by its neighbours.

With a window :math:`W(i)` around element i, of n elements, whether they lie in the tensor or not (zeros outside), and
:math:`u = x - \mathrm{means}` (``x`` alone where there are no means):

.. math::
    d_i = k + \frac{\alpha}{n} \sum_{j \in W(i)} u_j^2 \qquad y_i = u_i\, d_i^{-\beta}

.. math::
    dx_j = dy_j\, d_j^{-\beta} - \frac{2 \alpha \beta}{n}\, u_j \sum_{i:\, j \in W(i)} dy_i\, u_i\, d_i^{-\beta - 1}

* ``lrn``: the window is `size` neighbouring channels, ``size // 2`` before and ``(size - 1) // 2`` after (Krizhevsky,
  Sutskever, Hinton, "ImageNet classification with deep convolutional neural networks", 2012; cuDNN's cross-channel
  mode, which also divides alpha by the window).
* ``divisive_norm``: the window is `size` points along every spatial axis, inside one channel (the local contrast
  normalization of Jarrett et al., "What is the best multi-stage architecture for object recognition?", 2009, as
  ``u / max(c, sigma)`` made smooth; cuDNN's divisive normalization with precomputed means, oneDNN's "within channel").
  The means are any tensor of x's shape; their gradient is the negated dx, since they are subtracted.

The sums are of squares and only added to: nothing cancels. They are float64 for float64, float32 for all others.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

from ..core.descriptor import FLOATING, TensorDescriptor
from ..core.errors import InvalidArgument
from ..core.operation import FLOAT, INT, Epilogue, Operation, Tensors, attribute
from .pointwise import like


@dataclasses.dataclass(frozen=True)
class _LocalResponse(Operation):
    """Attributes that all share.

    Parameters
    ----------
    size : int
        Elements of a window along each of its axes; at least 1.
    lrn_alpha, lrn_beta, lrn_k : float
        Finite numbers; cuDNN's names, since an epilogue has an alpha and a beta of its own.
    """

    size: int = attribute(INT, 5)
    lrn_alpha: float = attribute(FLOAT, 1e-4)
    lrn_beta: float = attribute(FLOAT, 0.75)
    lrn_k: float = attribute(FLOAT, 1.0)

    across: ClassVar[bool]  # whether windows go across channels, else over space

    def window_axes(self, ndim: int) -> tuple[int, ...]:
        """The axes along which a window reaches.

        Examples
        --------
        >>> LrnFwd().window_axes(4), DivisiveNormFwd().window_axes(4)
        ((1,), (2, 3))
        """
        return (1,) if self.across else tuple(range(2, ndim))

    @property
    def reach(self) -> tuple[int, int]:
        """How many neighbours before and after belong to a window."""
        return self.size // 2, (self.size - 1) // 2

    def factor(self, ndim: int) -> float:
        """Alpha over the elements of a window."""
        return self.lrn_alpha / self.size ** len(self.window_axes(ndim))

    def check(self, tensors: Tensors, epilogue: Epilogue) -> None:
        x = tensors["x"]
        least = 2 if self.across else 3
        if x.ndim < least:
            accepted = "batch, channels" if self.across else "batch, channels, one or more of space"
            raise InvalidArgument("x", str(x), f"at least {least} axes: {accepted}")
        if self.size < 1:
            raise InvalidArgument("size", self.size, "a whole number >= 1")
        for name in ("lrn_alpha", "lrn_beta", "lrn_k"):
            if not math.isfinite(getattr(self, name)):
                raise InvalidArgument(name, getattr(self, name), "a finite number")
        for role, t in tensors.items():
            if t.dtype not in FLOATING[:4]:
                raise InvalidArgument(role, str(t), f"a floating-point type: {', '.join(FLOATING[:4])}")
            if t.shape != x.shape or t.dtype != x.dtype:
                raise InvalidArgument(role, str(t), f"{x.dtype} of shape {list(x.shape)} as x")

    def flops(self, tensors: Tensors) -> float:
        x = tensors["x"]
        window = self.size ** len(self.window_axes(x.ndim))
        return (2.0 * window + 6) * (1 if "y" in tensors else 2) * x.numel

    def infer(self, tensors: Tensors) -> dict[str, TensorDescriptor]:
        return {self.outputs[0]: like(tensors["x"])}


@dataclasses.dataclass(frozen=True)
class LrnFwd(_LocalResponse):
    """``y = x / (k + alpha / size * sum of squares)^beta`` across `size` channels."""

    name = "lrn_fwd"
    inputs, outputs = ("x",), ("y",)
    batched = ("x", "y")
    across = True


@dataclasses.dataclass(frozen=True)
class LrnBwd(_LocalResponse):
    """``dx`` from the gradient dy and the input x of the forward pass."""

    name = "lrn_bwd"
    inputs, outputs = ("dy", "x"), ("dx",)
    batched = ("dy", "x", "dx")
    across = True


@dataclasses.dataclass(frozen=True)
class _Divisive(_LocalResponse):
    optional: ClassVar[tuple[str, ...]] = ("means",)
    across = False

    def sample(self, role: str, tensors: Tensors, shape: tuple[int, ...], generator: Any) -> Any:
        """Means are smaller than values are."""
        values = super().sample(role, tensors, shape, generator)
        return values / 4 if role == "means" else values


@dataclasses.dataclass(frozen=True)
class DivisiveNormFwd(_Divisive):
    """``y = u / (k + alpha / size^d * sum of squares)^beta`` with ``u = x - means``, over `size` points an axis."""

    name = "divisive_norm_fwd"
    inputs, outputs = ("x",), ("y",)
    batched = ("x", "means", "y")


@dataclasses.dataclass(frozen=True)
class DivisiveNormBwd(_Divisive):
    """``dx`` from the gradient dy, the input x and the means of the forward pass."""

    name = "divisive_norm_bwd"
    inputs, outputs = ("dy", "x"), ("dx",)
    batched = ("dy", "x", "means", "dx")
