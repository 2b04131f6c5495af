r"""Layer, RMS and group normalization, forward with the statistics of each set, and backward by them.

A tensor is cut into sets, and each is brought to mean 0 and variance 1, then scaled and shifted:

.. math::
    \mu = \frac1m \sum_i x_i \qquad r = \Big(\frac1m \sum_i (x_i - \mu)^2 + \epsilon\Big)^{-1/2} \qquad
    \hat x_i = (x_i - \mu)\, r \qquad y_i = \mathrm{act}(s_i \hat x_i + b_i)

with the gradient, where :math:`g_i = dy_i\, \mathrm{act}'(s_i \hat x_i + b_i)` and the means are over a set,

.. math::
    dx_i = r\,\big(s_i g_i - \overline{s g} - \hat x_i\, \overline{s g \hat x}\big) \qquad
    ds = \sum g \hat x \qquad db = \sum g

where the sums run over all elements that a scale or bias belongs to. ``mean`` is :math:`\mu` and ``inv_variance`` is
:math:`r` (cuDNN's word for the inverse standard deviation). RMS normalization leaves out the mean: :math:`\mu = 0`, and
:math:`\overline{s g}` falls away.

* Layer and RMS: a set is the last `axes` axes; scale and bias have their shape, the statistics the other axes' sizes
  and 1 for each of the last.
* Group: a set is C / `groups` neighbouring channels of one image; scale and bias have one value a channel, the
  statistics are (N, groups). One group a channel is instance normalization. Only this one has an activation.

Variances are sums of squared distances from the mean, never differences of large squares (Welford, "Note on a method
for calculating corrected sums of squares and products", 1962; Chan, Golub, LeVeque, "Updating formulae", 1979).
Statistics are float64 for float64 and float32 for all others.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

from ..core.descriptor import FLOATING, TensorDescriptor
from ..core.errors import InvalidArgument
from ..core.operation import FLOAT, INT, Codec, Epilogue, Operation, Tensors, attribute
from .activation import check_activation
from .convolution import output_layout

NAMES = Codec(",".join, lambda text: tuple(text.split(",")), "names of gradients such as dx,dscale")


def statistics_dtype(dtype: str) -> str:
    """Type of the statistics of a tensor.

    Examples
    --------
    >>> statistics_dtype("bf16"), statistics_dtype("f64")
    ('f32', 'f64')
    """
    return "f64" if dtype == "f64" else "f32"


@dataclasses.dataclass(frozen=True)
class _Normalization(Operation):
    """What all have in common. `x_role` and `y_role` are the tensors whose shape is normalized."""

    x_role: ClassVar[str] = "x"
    y_role: ClassVar[str] = "y"
    statistics: ClassVar[tuple[str, ...]] = ("mean", "inv_variance")

    def parameter_shape(self, x: TensorDescriptor) -> tuple[int, ...]:
        """Shape of scale and bias."""
        raise NotImplementedError

    def statistics_shape(self, x: TensorDescriptor) -> tuple[int, ...]:
        raise NotImplementedError

    def set_size(self, x: TensorDescriptor) -> int:
        """Elements of one set."""
        raise NotImplementedError

    def like(self, x: TensorDescriptor) -> TensorDescriptor:
        """A dense result of x's shape and type."""
        raise NotImplementedError

    def check(self, tensors: Tensors, epilogue: Epilogue) -> None:
        check_activation(epilogue.activation, epilogue.parameter)
        x = tensors["x"]
        for role, t in tensors.items():
            if t.dtype not in FLOATING:
                raise InvalidArgument(role, str(t), f"a floating-point type: {', '.join(FLOATING)}")
        epsilon = getattr(self, "epsilon", 0.0)
        if not (epsilon >= 0.0 and math.isfinite(epsilon)):
            raise InvalidArgument("epsilon", epsilon, "a finite number >= 0")
        for role in ("y", "dy", "dx"):
            if role in tensors and (tensors[role].shape != x.shape or tensors[role].dtype != x.dtype):
                raise InvalidArgument(role, str(tensors[role]), f"{x.dtype} of shape {list(x.shape)} as x")
        expected = self.parameter_shape(x)
        for role in ("scale", "bias", "dscale", "dbias"):
            if role in tensors and tensors[role].shape != expected:
                raise InvalidArgument(role, str(tensors[role]), f"shape {list(expected)}")
        shape, dtype = self.statistics_shape(x), statistics_dtype(x.dtype)
        for role in self.statistics:
            t = tensors[role]
            if t.shape != shape or t.dtype != dtype:
                raise InvalidArgument(role, str(t), f"{dtype} of shape {list(shape)}")

    def flops(self, tensors: Tensors) -> float:
        return 6.0 * tensors["x"].numel

    def sample(self, role: str, tensors: Tensors, shape: tuple[int, ...], generator: Any) -> Any:
        """Statistics are near those of such an x: a small mean, an inverse deviation around 1."""
        values = super().sample(role, tensors, shape, generator)
        if role == "mean":
            return values / 8
        return 1 + values.clamp(-4, 4) / 8 if role == "inv_variance" else values


@dataclasses.dataclass(frozen=True)
class _Backward(_Normalization):
    """The backward directions: which gradients are wanted is an attribute."""

    gradients: tuple[str, ...] = attribute(NAMES, ())
    possible: ClassVar[tuple[str, ...]] = ("dx", "dscale", "dbias")

    def resolved(self, tensors: Tensors) -> Operation:
        wanted = self.gradients or self.possible
        unknown = set(wanted) - set(self.possible)
        if unknown or len(set(wanted)) != len(wanted):
            raise InvalidArgument("gradients", ",".join(wanted), f"some of {','.join(self.possible)}, each once")
        return dataclasses.replace(self, gradients=tuple(g for g in self.possible if g in wanted))

    def is_default(self, name: str) -> bool:
        return self.gradients == self.possible if name == "gradients" else super().is_default(name)

    def check(self, tensors: Tensors, epilogue: Epilogue) -> None:
        super().check(tensors, epilogue)
        for role in self.outputs:
            if role in tensors and role not in self.gradients:
                raise InvalidArgument(role, str(tensors[role]), f"only what gradients={','.join(self.gradients)} names")

    def infer(self, tensors: Tensors) -> dict[str, TensorDescriptor]:
        x = tensors["x"]
        kind = tensors["scale"].dtype if "scale" in tensors else x.dtype
        shape = self.parameter_shape(x)
        found = {"dx": self.like(x), "dscale": TensorDescriptor(kind, shape), "dbias": TensorDescriptor(kind, shape)}
        return {role: found[role] for role in self.gradients}

    def flops(self, tensors: Tensors) -> float:
        return 10.0 * tensors["x"].numel


# ---- layer and RMS -----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Last(_Normalization):
    """Sets along the last axes; dense results are row-major, as the framework's are."""

    axes: int = attribute(INT, 1)

    def resolved(self, tensors: Tensors) -> Operation:
        x = tensors["x"]
        if not 1 <= self.axes <= x.ndim:
            raise InvalidArgument("axes", self.axes, f"1 to {x.ndim}, the axes of x")
        return super().resolved(tensors)

    def parameter_shape(self, x: TensorDescriptor) -> tuple[int, ...]:
        return x.shape[x.ndim - self.axes :]

    def statistics_shape(self, x: TensorDescriptor) -> tuple[int, ...]:
        return x.shape[: x.ndim - self.axes] + (1,) * self.axes

    def set_size(self, x: TensorDescriptor) -> int:
        return math.prod(self.parameter_shape(x))

    def like(self, x: TensorDescriptor) -> TensorDescriptor:
        return TensorDescriptor(x.dtype, x.shape)


@dataclasses.dataclass(frozen=True)
class _LastFwd(_Last):
    """Forward over the last axes.

    Parameters
    ----------
    axes : int
        How many of the last axes make a set.
    epsilon : float
        Added to the variance; at least 0.
    """

    epsilon: float = attribute(FLOAT, 1e-5)

    def infer(self, tensors: Tensors) -> dict[str, TensorDescriptor]:
        x = tensors["x"]
        known = TensorDescriptor(statistics_dtype(x.dtype), self.statistics_shape(x))
        return {"y": self.like(x), **dict.fromkeys(self.statistics, known)}


@dataclasses.dataclass(frozen=True)
class LayerNormFwd(_LastFwd):
    """``y = scale * (x - mean) * inv_variance + bias`` over the last `axes` axes; scale and bias each if given."""

    name = "layer_norm_fwd"
    inputs, optional, outputs = ("x",), ("scale", "bias"), ("y", "mean", "inv_variance")


@dataclasses.dataclass(frozen=True)
class LayerNormBwd(_Backward, _Last):
    """``dx``, ``dscale`` and ``dbias``, those of them that `gradients` names.

    Parameters
    ----------
    axes : int
    gradients : tuple of str
        All three if left out.
    """

    name = "layer_norm_bwd"
    inputs, optional, outputs = ("dy", "x", "mean", "inv_variance"), ("scale",), ("dx", "dscale", "dbias")


@dataclasses.dataclass(frozen=True)
class RmsNormFwd(_LastFwd):
    """``y = scale * x * inv_variance`` with ``inv_variance = (mean(x^2) + epsilon)^-1/2``."""

    name = "rms_norm_fwd"
    inputs, optional, outputs = ("x",), ("scale",), ("y", "inv_variance")
    statistics = ("inv_variance",)


@dataclasses.dataclass(frozen=True)
class RmsNormBwd(_Backward, _Last):
    """``dx`` and ``dscale``, those of them that `gradients` names."""

    name = "rms_norm_bwd"
    inputs, optional, outputs = ("dy", "x", "inv_variance"), ("scale",), ("dx", "dscale")
    statistics = ("inv_variance",)
    possible = ("dx", "dscale")


# ---- group -------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Group(_Normalization):
    """Sets of neighbouring channels of an image; dense results keep x's layout."""

    groups: int = attribute(INT, 1)
    epilogue = frozenset({"activation", "parameter"})

    def resolved(self, tensors: Tensors) -> Operation:
        x = tensors["x"]
        if x.ndim < 2:
            raise InvalidArgument("x", str(x), "at least 2 axes: batch, channels")
        if self.groups < 1 or x.shape[1] % self.groups:
            raise InvalidArgument("groups", self.groups, f"a divisor of x's {x.shape[1]} channels")
        return super().resolved(tensors)

    def parameter_shape(self, x: TensorDescriptor) -> tuple[int, ...]:
        return x.shape[1:2]

    def statistics_shape(self, x: TensorDescriptor) -> tuple[int, ...]:
        return (x.shape[0], self.groups)

    def set_size(self, x: TensorDescriptor) -> int:
        return x.shape[1] // self.groups * math.prod(x.shape[2:])

    def like(self, x: TensorDescriptor) -> TensorDescriptor:
        return TensorDescriptor.make(x.dtype, x.shape, output_layout(x.shape, x))


@dataclasses.dataclass(frozen=True)
class GroupNormFwd(_Group):
    """``y = act(scale * (x - mean) * inv_variance + bias)`` over groups of channels.

    Parameters
    ----------
    groups : int
        A divisor of the channels.
    epsilon : float
        Added to the variance; at least 0.
    """

    epsilon: float = attribute(FLOAT, 1e-5)

    name = "group_norm_fwd"
    inputs, optional, outputs = ("x",), ("scale", "bias"), ("y", "mean", "inv_variance")
    batched = ("x", "y", "mean", "inv_variance")

    def infer(self, tensors: Tensors) -> dict[str, TensorDescriptor]:
        x = tensors["x"]
        known = TensorDescriptor(statistics_dtype(x.dtype), self.statistics_shape(x))
        return {"y": self.like(x), **dict.fromkeys(self.statistics, known)}


@dataclasses.dataclass(frozen=True)
class GroupNormBwd(_Backward, _Group):
    """``dx``, ``dscale`` and ``dbias``; the activation's input is computed again, so only its function needs the bias.

    Parameters
    ----------
    groups : int
    gradients : tuple of str
        All three if left out.
    """

    name = "group_norm_bwd"
    inputs, optional, outputs = ("dy", "x", "mean", "inv_variance"), ("scale", "bias"), ("dx", "dscale", "dbias")
    batched = ("dy", "x", "mean", "inv_variance", "dx")

    def check(self, tensors: Tensors, epilogue: Epilogue) -> None:
        super().check(tensors, epilogue)
        if "bias" in tensors and epilogue.activation == "identity":
            raise InvalidArgument("bias", str(tensors["bias"]), "no bias: without an activation it is not read")
