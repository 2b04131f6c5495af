"""Batch normalization on tensors: the operators, their gradients, and `batch_norm`.

The operators ``batch_norm_stats``, ``batch_norm_combine``, ``batch_norm_bwd_sums`` and ``batch_norm_bwd_apply`` are the
pieces of one over a batch that is spread over devices; `lucidnn.ops.batch_normalization` says how they fit together.
They have no derivative: they are what one is made of.
"""

from __future__ import annotations

from typing import Any

import torch

from ..core.errors import InvalidArgument, NotSupported
from ..core.operation import Epilogue
from ..ops.activation import ACTIVATIONS
from ..ops.batch_normalization import (
    BatchNormBwd,
    BatchNormBwdApply,
    BatchNormBwdSums,
    BatchNormCombine,
    BatchNormInferFwd,
    BatchNormStats,
    BatchNormTrainFwd,
    from_output_suffices,
)
from ._library import Described, Op, Planned, run
from ._second_derivatives import second_derivative
from .pointwise import pointwise_bwd

# The framework's functionalization has an argument called mode of its own.
_GIVEN = "Tensor mean, Tensor? variance, Tensor? inv_variance, Tensor? scale, Tensor? bias, Tensor? z"
_ACTIVATION = "str activation, float parameter"
_RUNNING = "Tensor(a!)? running_mean, Tensor(b!)? running_variance, Tensor? factor"


def _described(op: Any, roles: str, tensors: Any, activation: str = "identity", parameter: float = 0.0) -> Described:
    given = dict(zip(roles.split(), tensors, strict=True))
    beta = 1.0 if given.get("z") is not None else 0.0
    return op, {"tensors": given, "epilogue": Epilogue(1.0, beta, activation, parameter)}


def _with_next(described: Described) -> Described:
    """Running statistics are updated where they are."""
    op, given = described
    tensors = given["tensors"]
    for role, source in (("next_mean", "running_mean"), ("next_variance", "running_variance")):
        tensors[role] = tensors.get(source)
    return op, given


def _train(tensors: Any, attributes: Any) -> Described:
    epsilon, momentum, mode, *activation = attributes
    roles = "x scale bias z running_mean running_variance factor"
    return _with_next(_described(BatchNormTrainFwd(epsilon, momentum, mode), roles, tensors, *activation))


def _combine(tensors: Any, attributes: Any) -> Described:
    roles = "counts means m2s running_mean running_variance factor"
    return _with_next(_described(BatchNormCombine(*attributes), roles, tensors))


def _infer(tensors: Any, attributes: Any) -> Described:
    epsilon, mode, *activation = attributes
    roles = "x mean variance inv_variance scale bias z"
    return _described(BatchNormInferFwd(epsilon, mode), roles, tensors, *activation)


def _bwd(tensors: Any, attributes: Any) -> Described:
    epsilon, mode, frozen, residual, *activation = attributes
    op = BatchNormBwd(epsilon, mode, frozen, residual)
    return _described(op, "dy x mean variance inv_variance scale bias z y", tensors, *activation)


def _sums(tensors: Any, attributes: Any) -> Described:
    epsilon, mode, *activation = attributes
    op = BatchNormBwdSums(epsilon, mode)
    return _described(op, "dy x mean variance inv_variance scale bias z y", tensors, *activation)


def _apply(tensors: Any, attributes: Any) -> Described:
    epsilon, mode, residual, *activation = attributes
    op = BatchNormBwdApply(epsilon, mode, residual)
    return _described(op, "dy x mean dscale dbias count variance inv_variance scale bias z y", tensors, *activation)


def _stats(tensors: Any, attributes: Any) -> Described:
    return BatchNormStats(*attributes), {"tensors": {"x": tensors[0]}}


def _updating(describe: Any, tensors: tuple, attributes: tuple, running: tuple) -> Any:
    """Run what moves running statistics, and let the framework know that they changed."""
    into = tuple(t for t in running if t is not None)
    result = run(describe, tensors, attributes, into=into)
    if into and not into[0].is_inference():
        torch.autograd.graph.increment_version(into)
    return result


def _statistics(x: torch.Tensor, mode: str) -> torch.Tensor:
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    if mode == "per_activation":
        return torch.empty_like(x[0], dtype=dtype)
    return x.new_empty((x.shape[1],), dtype=dtype)


def _like_parameter(x: torch.Tensor, mode: str, parameter: torch.Tensor | None) -> torch.Tensor:
    made = _statistics(x, mode)
    return made if parameter is None else torch.empty_like(made, dtype=parameter.dtype)


def _spread(p: torch.Tensor, x: torch.Tensor, mode: str) -> torch.Tensor:
    """A parameter in a shape that broadcasts against x."""
    return p.unsqueeze(0) if mode == "per_activation" else p.reshape(1, -1, *[1] * (x.ndim - 2))


# ---- gradients -------------------------------------------------------------------------------------------------


def _train_backward(needs, args, outputs, grads):
    x, scale, bias, z, _, _, _, epsilon, _, mode, activation, parameter = args
    mean, inverse, y = (*outputs, None)[:3]
    dx, dscale, dbias, dz = batch_norm_bwd(
        grads[0], x, mean, None, inverse, scale, None if y is not None else bias, z, y,
        epsilon, mode, False, needs[3], activation, parameter,
    )  # fmt: skip
    return dx, dscale if needs[1] else None, dbias.to(bias.dtype) if needs[2] else None, dz if needs[3] else None


def _infer_backward(needs, args, outputs, grads):
    x, mean, variance, inverse, scale, bias, z, epsilon, mode, activation, parameter = args
    y = outputs[0] if outputs else None
    dx, dscale, dbias, dz = batch_norm_bwd(
        grads[0], x, mean, variance, inverse, scale, None if y is not None else bias, z, y,
        epsilon, mode, True, needs[6], activation, parameter,
    )  # fmt: skip
    dmean = dvariance = dinverse = None
    if needs[1] or needs[2] or needs[3]:
        r = inverse if inverse is not None else (variance + epsilon).rsqrt()
        factor = 1.0 if scale is None else scale
        dmean = (-factor * r * dbias).to(mean.dtype)
        if inverse is None:
            dvariance = (-0.5 * factor * r * r * dscale).to(variance.dtype)
        else:
            dinverse = (factor * dscale / r).to(inverse.dtype)
    return (
        dx,
        dmean if needs[1] else None,
        dvariance if needs[2] else None,
        dinverse if needs[3] else None,
        dscale if needs[4] else None,
        dbias.to(bias.dtype) if needs[5] else None,
        dz if needs[6] else None,
    )


def _bwd_backward(needs, args, outputs, grads):
    """The derivative of the gradient, with what x does to the statistics where they are the batch's own.

    With P(g) = g - mean(g) - xh mean(g xh), which is its own transpose, dx = scale r P(g); and where something depends
    on xh alone with gradient c there, its gradient for x is r P(c).
    """
    dy, x, mean, variance, inverse, scale, bias, z, y, epsilon, mode, frozen, residual, activation, parameter = args
    if frozen and (needs[2] or needs[3] or needs[4]):
        raise NotSupported("the second derivative by statistics that are given; accepted: statistics without gradient")
    axes = [0] if mode == "per_activation" else [0, *range(2, x.ndim)]
    kind = torch.float64 if x.dtype == torch.float64 else torch.float32

    def spread(p: torch.Tensor) -> torch.Tensor:
        return _spread(p.to(kind), x, mode)

    def average(t: torch.Tensor) -> torch.Tensor:
        return t.mean(axes, keepdim=True)

    def project(t: torch.Tensor) -> torch.Tensor:
        return t if frozen else t - average(t) - hat * average(t * hat)

    r = spread(inverse if inverse is not None else (variance.to(kind) + epsilon).rsqrt())
    w = torch.ones_like(r) if scale is None else spread(scale)
    hat = (x.to(kind) - spread(mean)) * r
    dy_wide = dy.to(kind)
    slope, curvature = torch.ones_like(hat), None
    if activation != "identity":
        source = y
        if source is None:
            source = hat * w if bias is None else hat * w + spread(bias)
            source = source if z is None else source + z
        slope = pointwise_bwd(slope, source.to(kind), 1.0, activation, parameter)
        curvature = second_derivative(activation, parameter, source.to(kind))
    g = dy_wide * slope
    ddx, ddscale, ddbias, ddz = (None if t is None else t.to(kind) for t in grads)
    dg, dhat, dx, dw = torch.zeros_like(hat), torch.zeros_like(hat), torch.zeros_like(hat), torch.zeros_like(r)
    if ddx is not None:
        dg = dg + w * r * project(ddx)
        dw = (ddx * r * project(g)).sum(axes, keepdim=True)
        if not frozen:
            a, b = average(ddx * hat), average(g * hat)
            dhat = -w * r * (ddx * b + g * a)
            dx = -w * r * r * hat * (average(ddx * g) - average(ddx) * average(g) - a * b)
    if ddscale is not None:
        dg, dhat = dg + spread(ddscale) * hat, dhat + spread(ddscale) * g
    if ddbias is not None:
        dg = dg + spread(ddbias)
    if ddz is not None and residual:
        dg = dg + ddz
    before = torch.zeros_like(hat) if curvature is None else dg * dy_wide * curvature  # by the activation's input
    dx = dx + r * project(dhat + w * before)
    shape = x.shape[1:] if mode == "per_activation" else x.shape[1:2]
    dw = dw + (before * hat).sum(axes, keepdim=True)
    return (
        (dg * slope).to(dy.dtype) if needs[0] else None,
        dx.to(x.dtype) if needs[1] else None,
        None,
        None,
        None,
        dw.reshape(shape).to(scale.dtype) if scale is not None and needs[5] else None,
        before.sum(axes).to(bias.dtype) if bias is not None and needs[6] else None,
        before.to(z.dtype) if z is not None and needs[7] else None,
        None,
    )


def _none_backward(needs, args, outputs, grads):
    raise NotSupported("the derivative of a piece of a batch normalization; accepted: tensors without gradient")


# ---- operators -------------------------------------------------------------------------------------------------


def _train_saves(args):
    """The statistics, and the output where it tells the activation's slope and is cheaper than what else would."""
    *_, activation, parameter = args
    return (1, 2, 0) if activation != "identity" and from_output_suffices(activation, parameter) else (1, 2)


def _infer_saves(args):
    *_, activation, parameter = args
    return activation != "identity" and from_output_suffices(activation, parameter)


def _bwd_finish(tensors, attributes, found):
    return found if attributes[3] else (*found, found[0].new_empty((0,)))


def _bwd_fake(dy, x, mean, variance, inverse, scale, bias, z, y, epsilon, mode, frozen, residual, *activation):
    dz = torch.empty_like(x) if residual else x.new_empty((0,))
    dscale, dbias = _like_parameter(x, mode, scale), _like_parameter(x, mode, bias)
    return torch.empty_like(x), dscale, dbias, dz


def _apply_kernel(*args):
    found = run(_apply, (*args[:3], *args[9:12], *args[3:9]), args[12:])
    return found if args[14] else (found, found.new_empty((0,)))


batch_norm_train_fwd = Op(
    f"batch_norm_train_fwd(Tensor x, Tensor? scale, Tensor? bias, Tensor? z, {_RUNNING}, "
    f"float epsilon, float momentum, str norm_mode, {_ACTIVATION}) -> (Tensor, Tensor, Tensor)",
    4,
    lambda *args: _updating(_train, args[:7], args[7:], args[4:6]),
    lambda x, *args: (torch.empty_like(x), _statistics(x, args[8]), _statistics(x, args[8])),
    _train_backward,
    saves_output=_train_saves,
    differentiable=1,
    unread=lambda args: (3,) if len(_train_saves(args)) == 3 or args[-2] == "identity" else (),
)
batch_norm_infer_fwd = Op(
    f"batch_norm_infer_fwd(Tensor x, {_GIVEN}, float epsilon, str norm_mode, {_ACTIVATION}) -> Tensor",
    7,
    Planned(_infer),
    lambda x, *args: torch.empty_like(x),
    _infer_backward,
    saves_output=_infer_saves,
    unread=lambda args: (6,) if _infer_saves(args) or args[-2] == "identity" else (),
)
batch_norm_bwd = Op(
    f"batch_norm_bwd(Tensor dy, Tensor x, {_GIVEN}, Tensor? y, float epsilon, str norm_mode, bool frozen, "
    f"bool residual, {_ACTIVATION}) -> (Tensor, Tensor, Tensor, Tensor)",
    9,
    Planned(_bwd, finish=_bwd_finish),
    _bwd_fake,
    _bwd_backward,
)
batch_norm_stats = Op(
    "batch_norm_stats(Tensor x, str norm_mode) -> (Tensor, Tensor)",
    1,
    Planned(_stats),
    lambda x, mode: (_statistics(x, mode), _statistics(x, mode)),
    _none_backward,
)
batch_norm_combine = Op(
    f"batch_norm_combine(Tensor counts, Tensor means, Tensor m2s, {_RUNNING}, float epsilon, float momentum) "
    "-> (Tensor, Tensor)",
    3,
    lambda *args: _updating(_combine, args[:6], args[6:], args[3:5]),
    lambda counts, means, *args: (_statistics(means, "per_activation"), _statistics(means, "per_activation")),
    _none_backward,
)
batch_norm_bwd_sums = Op(
    f"batch_norm_bwd_sums(Tensor dy, Tensor x, {_GIVEN}, Tensor? y, float epsilon, str norm_mode, {_ACTIVATION}) "
    "-> (Tensor, Tensor)",
    9,
    Planned(_sums),
    lambda dy, x, *args: (_statistics(x, args[8]), _statistics(x, args[8])),
    _none_backward,
)
batch_norm_bwd_apply = Op(
    f"batch_norm_bwd_apply(Tensor dy, Tensor x, {_GIVEN}, Tensor? y, Tensor dscale, Tensor dbias, Tensor count, "
    f"float epsilon, str norm_mode, bool residual, {_ACTIVATION}) -> (Tensor, Tensor)",
    12,
    _apply_kernel,
    lambda dy, x, *args: (torch.empty_like(x), torch.empty_like(x) if args[12] else x.new_empty((0,))),
    _none_backward,
)


def batch_norm(
    input, running_mean, running_var, weight=None, bias=None, training=False, momentum=0.1, eps=1e-5, *,
    z=None, activation=None, parameter=None,
):  # fmt: skip
    """Each channel brought to mean 0 and variance 1 over batch and space, then scaled and shifted.

    Parameters
    ----------
    input : torch.Tensor
        (N, C) and up to three spatial axes; any strides. float64, float32, float16 or bfloat16.
    running_mean, running_var : torch.Tensor or None
        (C,). Used where `training` is false; else moved towards the batch's statistics, in place, if given.
    weight, bias : torch.Tensor, optional
        (C,), of any of the four types.
    training : bool
        Use the batch's own statistics: more than one value per channel.
    momentum : float or torch.Tensor
        Weight of the new statistics in the running ones. A weight that changes from call to call (a cumulative average)
        is best a tensor of one element: each number is compiled for.
    eps : float
        Added to variances, >= 0.
    z : torch.Tensor, optional
        Of input's shape and type, added before the activation: a residual connection.
    activation : str, optional
        Name from `lucidnn.ops.activation.ACTIVATIONS`, applied in the same kernel.
    parameter : float, optional
        The activation's parameter, where it has one; its default if left out.

    Returns
    -------
    torch.Tensor
        Of input's shape, type and memory format.

    Raises
    ------
    InvalidArgument
        Names the argument, the value found and what is accepted.

    Notes
    -----
    The definition is in `lucidnn.ops.batch_normalization`. Differentiable twice.

    Examples
    --------
    >>> x = torch.tensor([[1.0, 10.0], [3.0, 30.0]])
    >>> mean, var = torch.zeros(2), torch.ones(2)
    >>> batch_norm(x, mean, var, training=True, eps=0.0)
    tensor([[-1., -1.],
            [ 1.,  1.]])
    >>> mean, var
    (tensor([0.2000, 2.0000]), tensor([ 1.1000, 20.9000]))
    >>> batch_norm(x, None, None, training=True, eps=0.0, activation="relu")
    tensor([[0., 0.],
            [1., 1.]])
    """
    if not isinstance(input, torch.Tensor):
        raise InvalidArgument("input", type(input).__name__, "a torch tensor")
    name = activation or "identity"
    if parameter is None:
        parameter = (ACTIVATIONS[name].parameter or 0.0) if name in ACTIVATIONS else 0.0
    if (running_mean is None) != (running_var is None):
        given = "running_var" if running_mean is None else "running_mean"
        raise InvalidArgument("running_mean" if running_mean is None else "running_var", "None", f"a tensor as {given}")
    if training:
        factor = None
        if isinstance(momentum, torch.Tensor):
            factor, momentum = momentum.reshape(-1) if momentum.ndim != 1 else momentum, 0.0
        if running_mean is None:
            factor, momentum = None, 0.0
        return batch_norm_train_fwd(
            input, weight, bias, z, running_mean, running_var, factor, eps, momentum, "spatial", name, parameter
        )[0]
    if running_mean is None:
        raise InvalidArgument("running_mean", "None", "a tensor, unless training")
    return batch_norm_infer_fwd(
        input, running_mean, running_var, None, weight, bias, z, eps, "spatial", name, parameter
    )
