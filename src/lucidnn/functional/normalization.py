"""Normalization on tensors: `layer_norm`, `rms_norm`, `group_norm`, `instance_norm`."""

from __future__ import annotations

import math
from typing import Any

import torch

from ..core.errors import InvalidArgument
from ..ops.activation import ACTIVATIONS
from ._library import axes_of
from ._normalization import group_norm_fwd, layer_norm_fwd, rms_norm_fwd, statistics_type


def _tensor(name: str, t: Any) -> torch.Tensor:
    if not isinstance(t, torch.Tensor):
        raise InvalidArgument(name, type(t).__name__, "a torch tensor")
    return t


def _autocast(*tensors: Any) -> tuple[Any, ...]:
    """Under autocast on a GPU the framework normalizes in float32."""
    first = tensors[0]
    if first.is_cuda and torch.is_autocast_enabled("cuda"):
        low = (torch.float16, torch.bfloat16)
        return tuple(t.float() if t is not None and t.dtype in low else t for t in tensors)
    return tensors


def _normalized(input: torch.Tensor, normalized_shape: Any) -> int:
    shape = axes_of(normalized_shape, "normalized_shape")
    count = len(shape)
    if not 1 <= count <= input.ndim or input.shape[-count:] != shape:
        found = f"{list(shape)} for an input of shape {list(input.shape)}"
        raise InvalidArgument("normalized_shape", found, "the sizes of the input's last axes, one or more")
    return count


def layer_norm(input, normalized_shape, weight=None, bias=None, eps=1e-5):
    """Normalize over the last axes.

    Parameters
    ----------
    input : torch.Tensor
        Any shape and strides; float64, float32, float16 or bfloat16.
    normalized_shape : int or sequence of int
        Sizes of the last axes, those that are normalized over.
    weight, bias : torch.Tensor, optional
        Of that shape; either may be left out.
    eps : float
        Added to the variance.

    Returns
    -------
    torch.Tensor
        Row-major.

    Notes
    -----
    The definition is in `lucidnn.ops.normalization`. ``torch.ops.lucidnn.layer_norm_fwd`` gives the statistics too.

    Examples
    --------
    >>> layer_norm(torch.tensor([[1.0, 3.0], [-2.0, 2.0]]), 2, eps=0.0)
    tensor([[-1.,  1.],
            [-1.,  1.]])
    """
    axes = _normalized(_tensor("input", input), normalized_shape)
    return layer_norm_fwd(*_autocast(input, weight, bias), axes, float(eps))[0]


def rms_norm(input, normalized_shape, weight=None, eps=None):
    """Divide by the root of the mean square over the last axes; otherwise as `layer_norm`.

    Without `eps` it is the smallest step above 1 of the type that is computed in: float64's or float32's.

    Examples
    --------
    >>> rms_norm(torch.tensor([[3.0, -3.0], [5.0, 5.0]]), 2, eps=0.0)
    tensor([[ 1., -1.],
            [ 1.,  1.]])
    """
    axes = _normalized(_tensor("input", input), normalized_shape)
    input, weight = _autocast(input, weight)
    if eps is None:
        eps = torch.finfo(statistics_type(input)).eps
    return rms_norm_fwd(input, weight, axes, float(eps))[0]


def group_norm(input, num_groups, weight=None, bias=None, eps=1e-5, *, activation=None, parameter=None):
    """Normalize over groups of channels of each image, and apply an activation to the result.

    Parameters
    ----------
    input : torch.Tensor
        (N, C, ...), any strides; float64, float32, float16 or bfloat16.
    num_groups : int
        A divisor of C.
    weight, bias : torch.Tensor, optional
        (C,); either may be left out.
    eps : float
        Added to the variance.
    activation : str, optional
        A name of `lucidnn.ops.activation.ACTIVATIONS`, such as "silu"; done in the same kernel.
    parameter : float, optional
        The activation's; its usual value if left out.

    Returns
    -------
    torch.Tensor
        In the input's layout: channels-last stays so, on a GPU too.

    Examples
    --------
    >>> x = torch.tensor([[[1.0, 3.0], [5.0, 7.0]]])
    >>> group_norm(x, 2, eps=0.0)
    tensor([[[-1.,  1.],
             [-1.,  1.]]])
    >>> group_norm(x, 2, eps=0.0, activation="relu")
    tensor([[[0., 1.],
             [0., 1.]]])
    """
    _tensor("input", input)
    if not isinstance(num_groups, (int, torch.SymInt)):
        raise InvalidArgument("num_groups", repr(num_groups), "a whole number >= 1")
    name = activation or "identity"
    if parameter is None:
        parameter = (ACTIVATIONS[name].parameter if name in ACTIVATIONS else None) or 0.0
    tensors = _autocast(input, weight, bias)
    return group_norm_fwd(*tensors, num_groups, float(eps), name, float(parameter))[0]


def instance_norm(
    input, running_mean=None, running_var=None, weight=None, bias=None, use_input_stats=True, momentum=0.1, eps=1e-5
):
    """Normalize every channel of every image by itself.

    Parameters
    ----------
    input : torch.Tensor
        (N, C, spatial...), any strides.
    running_mean, running_var : torch.Tensor, optional
        (C,); brought up to date in place with the mean over the images of their means and unbiased variances. Without
        `use_input_stats` they are what is normalized by.
    weight, bias : torch.Tensor, optional
        (C,)
    use_input_stats : bool
    momentum : float
        Weight of the new values.
    eps : float
        Added to the variance.

    Examples
    --------
    >>> instance_norm(torch.tensor([[[1.0, 3.0], [-2.0, 2.0]]]), eps=0.0)
    tensor([[[-1.,  1.],
             [-1.,  1.]]])
    """
    _tensor("input", input)
    if input.ndim < 3:
        found = f"shape {list(input.shape)}"
        raise InvalidArgument("input", found, "3 or more axes: batch, channels, spatial")
    shape = (1, -1, *[1] * (input.ndim - 2))
    if not use_input_stats:
        if running_mean is None or running_var is None:
            raise InvalidArgument("running_mean", "nothing", "running_mean and running_var without use_input_stats")
        inverse = (running_var + eps) ** -0.5
        scale = inverse if weight is None else inverse * weight
        shift = -running_mean * scale if bias is None else bias - running_mean * scale
        return (input * scale.reshape(shape) + shift.reshape(shape)).to(input.dtype)
    points = math.prod(input.shape[2:])
    if points == 1:
        raise InvalidArgument("input", f"shape {list(input.shape)}", "more than one point a channel to normalize")
    tensors = _autocast(input, weight, bias)
    y, mean, inverse = group_norm_fwd(*tensors, input.shape[1], float(eps), "identity", 0.0)
    with torch.no_grad():
        if running_mean is not None:
            running_mean.lerp_(mean.mean(0).to(running_mean.dtype), momentum)
        if running_var is not None:
            variance = (inverse.double() ** -2 - eps).clamp(min=0.0).mean(0) * (points / (points - 1))
            running_var.lerp_(variance.to(running_var.dtype), momentum)
    return y
