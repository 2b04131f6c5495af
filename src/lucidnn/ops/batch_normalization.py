r"""Batch normalization: with the batch's own statistics or given ones, backward, and the pieces of a synchronised one.

.. math::
    \mu_c = \frac1M \sum_m x_{cm} \qquad \sigma^2_c = \frac1M \sum_m (x_{cm} - \mu_c)^2 \qquad
    r_c = 1 / \sqrt{\sigma^2_c + \epsilon} \qquad \hat x = (x - \mu_c) r_c

    y = \mathrm{act}(\gamma_c \hat x + \beta_c + z) \qquad g = dy \; \mathrm{act}'(\gamma_c \hat x + \beta_c + z)

    d\beta_c = \sum_m g \qquad d\gamma_c = \sum_m g \hat x \qquad dz = g \qquad
    dx = \gamma_c r_c \left(g - \frac{d\beta_c}M - \hat x \frac{d\gamma_c}M\right)

gamma is the role ``scale``, beta ``bias``. With mode ``spatial`` c is a channel (axis 1) and m runs over the batch and
all points of space; with ``per_activation`` c is a channel at a point and m runs over the batch. With frozen statistics
dx is gamma r g. Running statistics move by ``(1 - f) running + f new`` where f is the momentum, or the tensor
``factor`` where that changes from call to call, and the new variance is the unbiased one, over M - 1.

A channel that holds a NaN or an infinity has NaN for both statistics. Of no values at all the mean and the sum of
squares are 0. Statistics and gradients of parameters are float32, for float64 tensors float64.

Batches that are spread over devices are normalised in pieces: `BatchNormStats` on each, `BatchNormCombine` on what all
devices found (Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances",
1979), `BatchNormInferFwd` with the combined statistics; backward `BatchNormBwdSums`, a sum over the devices, and
`BatchNormBwdApply`.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from ..core.descriptor import TensorDescriptor
from ..core.errors import InvalidArgument
from ..core.operation import BOOL, FLOAT, NAME, Epilogue, Operation, Tensors, attribute
from .activation import check_activation
from .pointwise import like

TYPES = ("f64", "f32", "f16", "bf16")
MODES = ("spatial", "per_activation")
LARGE = ("x", "y", "z", "dy", "dx", "dz")  # roles of x's shape and type


def statistics_type(dtype: str) -> str:
    """Type of statistics and of sums: float64 for float64 tensors, else float32.

    Examples
    --------
    >>> statistics_type("bf16"), statistics_type("f64")
    ('f32', 'f64')
    """
    return "f64" if dtype == "f64" else "f32"


def from_output_suffices(activation: str, parameter: float) -> bool:
    """Whether the activation's slope can be told from its output.

    Examples
    --------
    >>> from_output_suffices("relu", 0.0), from_output_suffices("gelu", 0.0)
    (True, False)
    """
    return activation in ("identity", "relu", "clipped_relu") or (activation == "leaky_relu" and parameter > 0)


def parameter_shape(shape: tuple[int, ...], mode: str) -> tuple[int, ...]:
    """Shape of scale, bias and statistics for an x of this shape.

    Examples
    --------
    >>> parameter_shape((8, 32, 7, 7), "spatial"), parameter_shape((8, 32, 7, 7), "per_activation")
    ((32,), (32, 7, 7))
    """
    return shape[1:] if mode == "per_activation" else shape[1:2]


@dataclasses.dataclass(frozen=True)
class _Running(Operation):
    """Running statistics and their update; `epsilon` is added to variances.

    Parameters
    ----------
    epsilon : float
        Not negative.
    momentum : float
        Weight of the new statistics in the running ones, 0 to 1; not looked at where the tensor ``factor`` is given.
    """

    epsilon: float = attribute(FLOAT, 1e-5)
    momentum: float = attribute(FLOAT, 0.1)

    def check_running(self, tensors: Tensors, shape: tuple[int, ...]) -> None:
        _check_epsilon(self.epsilon)
        if not 0.0 <= self.momentum <= 1.0:
            raise InvalidArgument("momentum", self.momentum, "a number from 0 to 1")
        given = [role for role in ("running_mean", "running_variance") if role in tensors]
        if len(given) == 1:
            other = ({"running_mean", "running_variance"} - {*given}).pop()
            raise InvalidArgument(other, "nothing", f"a tensor where {given[0]} is given")
        for role in ("factor", "next_mean", "next_variance"):
            if role in tensors and not given:
                raise InvalidArgument(role, str(tensors[role]), "no such tensor without running statistics")
        for role in ("running_mean", "running_variance", "next_mean", "next_variance"):
            _check_parameter(role, tensors, shape)
        _check_parameter("factor", tensors, (1,))

    def infer_running(self, tensors: Tensors) -> dict[str, TensorDescriptor]:
        pairs = (("next_mean", "running_mean"), ("next_variance", "running_variance"))
        return {role: like(tensors[source]) for role, source in pairs if source in tensors}


def _check_epsilon(epsilon: float) -> None:
    if not 0.0 <= epsilon < float("inf"):
        raise InvalidArgument("epsilon", epsilon, "a number >= 0")


def _check_parameter(role: str, tensors: Tensors, shape: tuple[int, ...]) -> None:
    if role in tensors:
        t = tensors[role]
        if t.dtype not in TYPES:
            raise InvalidArgument(role, str(t), f"a floating-point type: {', '.join(TYPES)}")
        if t.shape != shape:
            raise InvalidArgument(role, str(t), f"shape {list(shape)}")


def _check_large(op: Any, tensors: Tensors, epilogue: Epilogue) -> None:
    """What all operations on x ask: types, shapes, attributes, the epilogue."""
    x = tensors["x"]
    if op.mode not in MODES:
        raise InvalidArgument("mode", op.mode, " or ".join(MODES))
    if x.dtype not in TYPES:
        raise InvalidArgument("x", str(x), f"a floating-point type: {', '.join(TYPES)}")
    if not 2 <= x.ndim <= 5:
        raise InvalidArgument("x", str(x), "2 to 5 axes: batch, channels, up to 3 spatial")
    for role in LARGE:
        if role in tensors and (tensors[role].shape != x.shape or tensors[role].dtype != x.dtype):
            raise InvalidArgument(role, str(tensors[role]), f"{x.dtype} of shape {list(x.shape)} as x")
    check_activation(epilogue.activation, epilogue.parameter)
    if "z" in tensors and epilogue.beta != 1.0:
        raise InvalidArgument("beta", epilogue.beta, "1.0: z is added as it is")
    for role in op.inputs + op.optional + op.outputs:
        if role not in LARGE and role not in ("factor", "count"):
            _check_parameter(role, tensors, parameter_shape(x.shape, op.mode))


def _outputs(tensors: Tensors, mode: str, roles: tuple[str, ...]) -> dict[str, TensorDescriptor]:
    """Tensors of statistics for an x."""
    x = tensors["x"]
    dtype = statistics_type(x.dtype)
    if mode != "per_activation" or x.ndim < 3:
        return dict.fromkeys(roles, TensorDescriptor(dtype, parameter_shape(x.shape, mode)))
    one = TensorDescriptor(dtype, x.shape[1:], x.strides[1:])  # channels innermost where x has them so
    return dict.fromkeys(roles, like(one))


def values_per_channel(x: TensorDescriptor, mode: str) -> int:
    """M of the formulas."""
    count = x.shape[0]
    if mode == "spatial":
        for n in x.shape[2:]:
            count *= n
    return count


@dataclasses.dataclass(frozen=True)
class BatchNormTrainFwd(_Running):
    """``y`` by the batch's own statistics, which are given too: ``mean`` and ``inv_variance``, r in the formulas.

    Where running statistics are given, ``next_mean`` and ``next_variance`` are what they become; these outputs may be
    the running tensors themselves.
    """

    mode: str = attribute(NAME, "spatial")

    name = "batch_norm_train_fwd"
    inputs = ("x",)
    optional = ("scale", "bias", "z", "running_mean", "running_variance", "factor")
    outputs = ("y", "mean", "inv_variance", "next_mean", "next_variance")
    batched = ("x", "z", "y")
    epilogue = frozenset({"beta", "activation", "parameter"})

    def infer(self, tensors: Tensors) -> dict[str, TensorDescriptor]:
        statistics = _outputs(tensors, self.mode, ("mean", "inv_variance"))
        return {"y": like(tensors["x"]), **statistics, **self.infer_running(tensors)}

    def check(self, tensors: Tensors, epilogue: Epilogue) -> None:
        _check_large(self, tensors, epilogue)
        x = tensors["x"]
        self.check_running(tensors, parameter_shape(x.shape, self.mode))
        if values_per_channel(x, self.mode) == 1:
            raise InvalidArgument("x", str(x), "more than one value per channel when training")

    def flops(self, tensors: Tensors) -> float:
        return 8.0 * tensors["x"].numel

    def bytes(self, tensors: Tensors) -> float:
        """The statistics need x once, and what depends on them needs it again."""
        return super().bytes(tensors) + tensors["x"].nbytes

    def sample(self, role: str, tensors: Tensors, shape: tuple[int, ...], generator: Any) -> Any:
        return _sample(self, role, tensors, shape, generator)


@dataclasses.dataclass(frozen=True)
class _Given(Operation):
    """Operations that are given statistics: a mean, and one of variance and inv_variance."""

    epsilon: float = attribute(FLOAT, 1e-5)
    mode: str = attribute(NAME, "spatial")

    epilogue = frozenset({"beta", "activation", "parameter"})
    statistics: ClassVar = ("variance", "inv_variance")

    def __init_subclass__(cls, **kwargs: Any):
        if "name" in cls.__dict__:
            cls.batched = tuple(role for role in LARGE if role in (*cls.inputs, *cls.optional, *cls.outputs))
        super().__init_subclass__(**kwargs)

    def check(self, tensors: Tensors, epilogue: Epilogue) -> None:
        _check_large(self, tensors, epilogue)
        _check_epsilon(self.epsilon)
        given = [role for role in self.statistics if role in tensors]
        if len(given) != 1:
            raise InvalidArgument("inv_variance", " and ".join(given) or "nothing", "one of variance and inv_variance")

    def sample(self, role: str, tensors: Tensors, shape: tuple[int, ...], generator: Any) -> Any:
        return _sample(self, role, tensors, shape, generator)


def _sample(op: Operation, role: str, tensors: Tensors, shape: tuple[int, ...], generator: Any) -> Any:
    """Variances are positive, weights of an average lie between 0 and 1, counts are whole numbers."""
    import torch

    if role in ("variance", "inv_variance", "running_variance", "m2s"):
        return 0.5 + torch.rand(shape, generator=generator, dtype=torch.float64)
    if role == "factor":
        return torch.rand(shape, generator=generator, dtype=torch.float64)
    if role in ("counts", "count"):
        return torch.randint(2, 50, shape, generator=generator).double()
    return Operation.sample(op, role, tensors, shape, generator)


@dataclasses.dataclass(frozen=True)
class BatchNormInferFwd(_Given):
    """``y`` by given statistics: running ones, or those of a batch that is spread over devices."""

    name = "batch_norm_infer_fwd"
    inputs, outputs = ("x", "mean"), ("y",)
    optional = ("variance", "inv_variance", "scale", "bias", "z")

    def infer(self, tensors: Tensors) -> dict[str, TensorDescriptor]:
        return {"y": like(tensors["x"])}

    def flops(self, tensors: Tensors) -> float:
        return 4.0 * tensors["x"].numel


@dataclasses.dataclass(frozen=True)
class _Backward(_Given):
    """What the slope of the activation is told from: its output y where that is given, else x, scale, bias and z.

    Only activations whose slope shows in their output may be given y: identity, relu, clipped_relu, and leaky_relu with
    a positive slope.
    """

    def check(self, tensors: Tensors, epilogue: Epilogue) -> None:
        super().check(tensors, epilogue)
        if "y" in tensors:
            if not from_output_suffices(epilogue.activation, epilogue.parameter):
                raise InvalidArgument(
                    "y", str(tensors["y"]), f"no y: it does not tell the slope of {epilogue.activation}"
                )
            if "z" in tensors:
                raise InvalidArgument("z", str(tensors["z"]), "one of y and z")

    def flops(self, tensors: Tensors) -> float:
        return 10.0 * tensors["x"].numel


@dataclasses.dataclass(frozen=True)
class BatchNormBwd(_Backward):
    """``dx``, ``dscale`` and ``dbias``, and ``dz`` with `residual`.

    Parameters
    ----------
    frozen : bool
        The statistics did not depend on x: running ones.
    residual : bool
        There was a z, whose gradient is wanted.
    """

    frozen: bool = attribute(BOOL, False)
    residual: bool = attribute(BOOL, False)

    name = "batch_norm_bwd"
    inputs = ("dy", "x", "mean")
    optional = ("variance", "inv_variance", "scale", "bias", "z", "y")
    outputs = ("dx", "dscale", "dbias", "dz")

    def infer(self, tensors: Tensors) -> dict[str, TensorDescriptor]:
        sums = _outputs(tensors, self.mode, ("dscale", "dbias"))
        for role, source in (("dscale", "scale"), ("dbias", "bias")):
            if source in tensors:
                sums[role] = dataclasses.replace(sums[role], dtype=tensors[source].dtype)
        found = {"dx": like(tensors["x"]), **sums}
        return found | {"dz": like(tensors["x"])} if self.residual else found

    def check(self, tensors: Tensors, epilogue: Epilogue) -> None:
        super().check(tensors, epilogue)
        if "dz" in tensors and not self.residual:
            raise InvalidArgument("dz", str(tensors["dz"]), "no dz without residual")

    def bytes(self, tensors: Tensors) -> float:
        """What the sums are made of is needed twice, but where the statistics are frozen."""
        again = ("dy", "x", "z", "y") if not self.frozen else ()
        return super().bytes(tensors) + sum(tensors[role].nbytes for role in again if role in tensors)


@dataclasses.dataclass(frozen=True)
class BatchNormBwdSums(_Backward):
    """``dscale`` and ``dbias`` of this device's part of the batch, in the type of statistics."""

    name = "batch_norm_bwd_sums"
    inputs = ("dy", "x", "mean")
    optional = ("variance", "inv_variance", "scale", "bias", "z", "y")
    outputs = ("dscale", "dbias")

    def infer(self, tensors: Tensors) -> dict[str, TensorDescriptor]:
        return _outputs(tensors, self.mode, self.outputs)


@dataclasses.dataclass(frozen=True)
class BatchNormBwdApply(_Backward):
    """``dx``, and ``dz`` with `residual`, from dscale and dbias of the whole batch and its ``count`` M, a tensor."""

    residual: bool = attribute(BOOL, False)

    name = "batch_norm_bwd_apply"
    inputs = ("dy", "x", "mean", "dscale", "dbias", "count")
    optional = ("variance", "inv_variance", "scale", "bias", "z", "y")
    outputs = ("dx", "dz")

    def infer(self, tensors: Tensors) -> dict[str, TensorDescriptor]:
        found = {"dx": like(tensors["x"])}
        return found | {"dz": like(tensors["x"])} if self.residual else found

    def check(self, tensors: Tensors, epilogue: Epilogue) -> None:
        super().check(tensors, epilogue)
        _check_parameter("count", tensors, (1,))
        if "dz" in tensors and not self.residual:
            raise InvalidArgument("dz", str(tensors["dz"]), "no dz without residual")


@dataclasses.dataclass(frozen=True)
class BatchNormStats(Operation):
    """``mean`` of this device's part of the batch and ``m2``, the sum of squared differences from it."""

    mode: str = attribute(NAME, "spatial")

    name = "batch_norm_stats"
    inputs, outputs = ("x",), ("mean", "m2")
    batched = ("x",)

    def infer(self, tensors: Tensors) -> dict[str, TensorDescriptor]:
        return _outputs(tensors, self.mode, self.outputs)

    def check(self, tensors: Tensors, epilogue: Epilogue) -> None:
        _check_large(self, tensors, epilogue)

    def flops(self, tensors: Tensors) -> float:
        return 4.0 * tensors["x"].numel


@dataclasses.dataclass(frozen=True)
class BatchNormCombine(_Running):
    """``mean`` and ``inv_variance`` of a batch from its parts': ``counts`` (P,), ``means`` and ``m2s`` (P, C, ...).

    A part may be empty. Running statistics are moved as in `BatchNormTrainFwd`.
    """

    name = "batch_norm_combine"
    inputs = ("counts", "means", "m2s")
    optional = ("running_mean", "running_variance", "factor")
    outputs = ("mean", "inv_variance", "next_mean", "next_variance")

    def infer(self, tensors: Tensors) -> dict[str, TensorDescriptor]:
        means = tensors["means"]
        made = TensorDescriptor(statistics_type(means.dtype), means.shape[1:])
        return {"mean": made, "inv_variance": made, **self.infer_running(tensors)}

    def check(self, tensors: Tensors, epilogue: Epilogue) -> None:
        means = tensors["means"]
        if means.ndim < 2:
            raise InvalidArgument("means", str(means), "2 axes or more: parts, channels")
        for role, shape in (("counts", means.shape[:1]), ("means", means.shape), ("m2s", means.shape)):
            _check_parameter(role, tensors, shape)
        for role in ("mean", "inv_variance"):
            _check_parameter(role, tensors, means.shape[1:])
        self.check_running(tensors, means.shape[1:])

    def flops(self, tensors: Tensors) -> float:
        return 8.0 * tensors["means"].numel

    def sample(self, role: str, tensors: Tensors, shape: tuple[int, ...], generator: Any) -> Any:
        return _sample(self, role, tensors, shape, generator)
