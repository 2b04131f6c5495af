r"""Normalization by an L_p norm over any axes, with an optional scale: what `normalize` and `weight_norm` are.

.. math::
    n = \Bigl(\sum_j |x_j|^p\Bigr)^{1/p} \qquad m = \max(n, \epsilon) \qquad y_i = \frac{g}{m}\, x_i

(the largest :math:`|x_j|` for p = inf), where the sum goes over `axes`: what shares the other indices is a set, with
its own norm n and scale g. With :math:`t = \sum_j dy_j x_j`

.. math::
    dx_i = \frac{g}{m} \Bigl(dy_i - \frac{t}{m} \frac{\partial n}{\partial x_i}\Bigr) \qquad dg = \frac{t}{m} \qquad
    \frac{\partial n}{\partial x_i} = \mathrm{sign}(x_i) \Bigl(\frac{|x_i|}{n}\Bigr)^{p - 1}

where the middle term is left out for n < epsilon, and the derivative of a norm of 0 is 0. For p = inf it is the sign
of those that are largest, over their number. `eps` = 0 clamps nothing: a set of zeros gives NaN.

The norm is stored for the backward pass, float64 for float64 and float32 for all others, with the size 1 along `axes`.
Salimans, Kingma, "Weight normalization", 2016.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

from ..core.descriptor import FLOATING, TensorDescriptor
from ..core.errors import InvalidArgument
from ..core.operation import FLOAT, INTS, Epilogue, Operation, Tensors, attribute
from .normalization import NAMES, statistics_dtype
from .pointwise import like
from .softmax import resolved_axes


@dataclasses.dataclass(frozen=True)
class _LpNormalize(Operation):
    """Attributes that both directions share.

    Parameters
    ----------
    axes : tuple of int
        What a norm goes over; negative ones count from the end.
    p : float
        Above 0; inf for the largest magnitude.
    eps : float
        The least that is divided by; at least 0.
    """

    axes: tuple[int, ...] = attribute(INTS, (1,))
    p: float = attribute(FLOAT, 2.0)
    eps: float = attribute(FLOAT, 1e-12)

    optional: ClassVar[tuple[str, ...]] = ("scale",)

    def resolved(self, tensors: Tensors) -> Operation:
        return dataclasses.replace(self, axes=resolved_axes(self.axes, tensors["x"], "x"))

    def norm_shape(self, x: TensorDescriptor) -> tuple[int, ...]:
        """Shape of norm and scale.

        Examples
        --------
        >>> LpNormalizeFwd((0, 2)).norm_shape(TensorDescriptor("f32", (4, 3, 5)))
        (1, 3, 1)
        """
        return tuple(1 if axis in self.axes else n for axis, n in enumerate(x.shape))

    def check(self, tensors: Tensors, epilogue: Epilogue) -> None:
        x = tensors["x"]
        if not self.p > 0.0:
            raise InvalidArgument("p", self.p, "a number above 0, or inf")
        if not (self.eps >= 0.0 and math.isfinite(self.eps)):
            raise InvalidArgument("eps", self.eps, "a finite number >= 0")
        for role, t in tensors.items():
            if t.dtype not in FLOATING[:4]:
                raise InvalidArgument(role, str(t), f"a floating-point type: {', '.join(FLOATING[:4])}")
        shape = self.norm_shape(x)
        expected = dict.fromkeys(("y", "dy", "dx"), (x.shape, x.dtype))
        expected |= {"norm": (shape, statistics_dtype(x.dtype)), "scale": (shape, x.dtype), "dscale": (shape, x.dtype)}
        for role, (wanted, kind) in expected.items():
            if role in tensors and (tensors[role].shape != wanted or tensors[role].dtype != kind):
                raise InvalidArgument(role, str(tensors[role]), f"{kind} of shape {list(wanted)}")

    def flops(self, tensors: Tensors) -> float:
        return (3.0 if "y" in tensors else 6.0) * tensors["x"].numel


@dataclasses.dataclass(frozen=True)
class LpNormalizeFwd(_LpNormalize):
    """``y = scale * x / max(norm, eps)``, and the norm."""

    name = "lp_normalize_fwd"
    inputs, outputs = ("x",), ("y", "norm")

    def infer(self, tensors: Tensors) -> dict[str, TensorDescriptor]:
        x = tensors["x"]
        return {"y": like(x), "norm": TensorDescriptor(statistics_dtype(x.dtype), self.norm_shape(x))}


@dataclasses.dataclass(frozen=True)
class LpNormalizeBwd(_LpNormalize):
    """``dx`` and, with a scale, ``dscale``; those of them that `gradients` names.

    Parameters
    ----------
    axes, p, eps
        As in the forward pass.
    gradients : tuple of str
        All that there are if left out.
    """

    gradients: tuple[str, ...] = attribute(NAMES, ())

    name = "lp_normalize_bwd"
    inputs, outputs = ("dy", "x", "norm"), ("dx", "dscale")

    def resolved(self, tensors: Tensors) -> Operation:
        possible = ("dx", "dscale") if "scale" in tensors else ("dx",)
        wanted = self.gradients or possible
        if set(wanted) - set(possible) or len(set(wanted)) != len(wanted):
            raise InvalidArgument("gradients", ",".join(wanted), f"some of {','.join(possible)}, each once")
        op = dataclasses.replace(self, gradients=tuple(g for g in possible if g in wanted))
        return _LpNormalize.resolved(op, tensors)

    def is_default(self, name: str) -> bool:
        """Both gradients, or the only one, are what a line without the attribute means."""
        if name == "gradients":
            return self.gradients == () or self.gradients == ("dx", "dscale")
        return super().is_default(name)

    def infer(self, tensors: Tensors) -> dict[str, TensorDescriptor]:
        x = tensors["x"]
        found = {"dx": like(x), "dscale": TensorDescriptor(x.dtype, self.norm_shape(x))}
        return {role: found[role] for role in self.gradients}

    def check(self, tensors: Tensors, epilogue: Epilogue) -> None:
        super().check(tensors, epilogue)
        for role in self.outputs:
            if role in tensors and role not in self.gradients:
                raise InvalidArgument(role, str(tensors[role]), f"only what gradients={','.join(self.gradients)} names")

    def sample(self, role: str, tensors: Tensors, shape: tuple[int, ...], generator: Any) -> Any:
        """Norms are about as large as those of normal numbers are; for p = inf some elements are as large as those."""
        values = super().sample(role, tensors, shape, generator)
        if math.isinf(self.p) and role in ("x", "norm"):
            return (2 * values).round() / 2 if role == "x" else 1 + values.abs().round().clamp(max=2) / 2
        if role != "norm":
            return values
        x = tensors["x"]
        count = max(math.prod(x.shape[axis] for axis in self.axes), 1)
        return count ** (1 / self.p) * (1 + values.clamp(-4, 4) / 8)
