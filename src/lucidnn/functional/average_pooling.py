"""Average and power pooling on tensors: the operators, their gradients, `avg_pool1d` to `3d`, `lp_pool1d` to `3d`."""

from __future__ import annotations

import math
from typing import Any

import torch

from ..core.errors import InvalidArgument
from ..ops.average_pooling import AvgPoolBwd, AvgPoolFwd, LpPoolBwd, LpPoolFwd
from ..ops.pooling import pooled_size
from ._library import Described, Op, Planned, dense, last, new_empty, remembered, tuple_of
from ._pooling import windows, with_batch
from .pooling import max_pool1d, max_pool2d, max_pool3d

_WINDOWS = "int[] window, int[] stride, int[] padding, bool ceil_mode"
_AVERAGE = f"{_WINDOWS}, bool count_padding, int divisor"
_POWER = "float norm, int[] window, int[] stride, bool ceil_mode"


def _average(window, stride, padding, ceil_mode, count_padding, divisor) -> dict[str, Any]:
    given = {"window": tuple(window), "stride": tuple(stride), "padding": tuple((p, p) for p in padding)}
    return given | {"ceil_mode": ceil_mode, "count_padding": count_padding, "divisor": divisor}


def _power(norm, window, stride, ceil_mode) -> dict[str, Any]:
    return {"norm": float(norm), "window": tuple(window), "stride": tuple(stride), "ceil_mode": ceil_mode}


def _avg_fwd(tensors: Any, attributes: Any) -> Described:
    return AvgPoolFwd(**_average(*attributes)), {"tensors": {"x": tensors[0]}}


def _avg_bwd(tensors: Any, attributes: Any) -> Described:
    shape, channels_last, *rest = attributes
    given = {"dy": tensors[0], "dx": dense(tensors[0], shape, channels_last)}
    return AvgPoolBwd(**_average(*rest)), {"tensors": given}


def _lp_fwd(tensors: Any, attributes: Any) -> Described:
    return LpPoolFwd(**_power(*attributes)), {"tensors": {"x": tensors[0]}}


def _lp_bwd(tensors: Any, attributes: Any) -> Described:
    return LpPoolBwd(**_power(*attributes)), {"tensors": dict(zip(("dy", "x", "y"), tensors, strict=True))}


def _pooled(x, window, stride, padding, ceil_mode):
    axes = zip(x.shape[2:], window, stride, padding, strict=True)
    sizes = (pooled_size(n, r, s, (p, p), 1, ceil_mode) for n, r, s, p in axes)
    return new_empty(x, (*x.shape[:2], *sizes), last(x))


def _avg_fwd_backward(needs, args, outputs, grads):
    x, *attributes = args
    return (avg_pool_bwd(grads[0], x.shape, last(x), *attributes),)


def _avg_bwd_backward(needs, args, outputs, grads):
    """The forward pass is linear: the gradient of its gradient is the forward pass."""
    _, _, _, *attributes = args
    return (avg_pool_fwd(grads[0], *attributes),)


def _lp_fwd_backward(needs, args, outputs, grads):
    x, *attributes = args
    return (lp_pool_bwd(grads[0], x, outputs[0], *attributes),)


def _lp_bwd_backward(needs, args, outputs, grads):
    """The formula of the gradient differentiated once more, with sums over windows as averages times their points."""
    dy, x, y, norm, window, stride, ceil_mode = args
    (ddx,) = grads
    average = (window, stride, (0,) * len(window), ceil_mode, True, 0)
    points = math.prod(window)
    share = torch.where(y == 0, 0.0, y ** (1.0 - norm))
    power = x ** (norm - 1.0)
    spread = points * avg_pool_bwd(dy * share, x.shape, last(x), *average) if needs[1] else None
    summed = points * avg_pool_fwd(ddx * power, *average) if needs[0] or needs[2] else None
    return (
        summed * share if summed is not None and needs[0] else None,
        ddx * spread * (norm - 1.0) * x ** (norm - 2.0) if spread is not None and norm != 1.0 else None,
        summed * dy * (1.0 - norm) * torch.where(y == 0, 0.0, y**-norm) if summed is not None and needs[2] else None,
    )


avg_pool_fwd = Op(
    f"avg_pool_fwd(Tensor x, {_AVERAGE}) -> Tensor",
    1,
    Planned(_avg_fwd),
    lambda x, window, stride, padding, ceil_mode, *rest: _pooled(x, window, stride, padding, ceil_mode),
    _avg_fwd_backward,
)
avg_pool_bwd = Op(
    f"avg_pool_bwd(Tensor dy, SymInt[] x_shape, bool channels_last, {_AVERAGE}) -> Tensor",
    1,
    Planned(_avg_bwd),
    lambda dy, x_shape, channels_last, *attributes: new_empty(dy, x_shape, channels_last),
    _avg_bwd_backward,
)
lp_pool_fwd = Op(
    f"lp_pool_fwd(Tensor x, {_POWER}) -> Tensor",
    1,
    Planned(_lp_fwd),
    lambda x, norm, window, stride, ceil_mode: _pooled(x, window, stride, (0,) * len(window), ceil_mode),
    _lp_fwd_backward,
    saves_output=lambda args: True,
)
lp_pool_bwd = Op(
    f"lp_pool_bwd(Tensor dy, Tensor x, Tensor y, {_POWER}) -> Tensor",
    3,
    Planned(_lp_bwd),
    lambda dy, x, y, *attributes: new_empty(x, x.shape, last(x)),
    _lp_bwd_backward,
)


def _avg_pool(ndim, input, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override=None):
    attributes = _written_out(ndim, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override)
    return with_batch(ndim, {"input": input}, lambda x: avg_pool_fwd(x, *attributes))


@remembered
def _written_out(ndim, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override):
    window, stride = windows(kernel_size, stride, ndim)
    padding = tuple_of(padding, ndim, "padding")
    if divisor_override is not None and (not isinstance(divisor_override, int) or divisor_override == 0):
        raise InvalidArgument("divisor_override", divisor_override, "None or a whole number other than 0")
    return window, stride, padding, bool(ceil_mode), bool(count_include_pad), divisor_override or 0


def avg_pool1d(input, kernel_size, stride=None, padding=0, ceil_mode=False, count_include_pad=True):
    """Mean of each window of (N, C, W); otherwise as `avg_pool2d`.

    Examples
    --------
    >>> avg_pool1d(torch.tensor([[[1.0, 3.0, 2.0, 6.0]]]), 2)
    tensor([[[2., 4.]]])
    """
    return _avg_pool(1, input, kernel_size, stride, padding, ceil_mode, count_include_pad)


def avg_pool2d(
    input, kernel_size, stride=None, padding=0, ceil_mode=False, count_include_pad=True, divisor_override=None
):
    """Mean of each window.

    Parameters
    ----------
    input : torch.Tensor
        (N, C, H, W), or (C, H, W); any strides. float64, float32, float16 or bfloat16.
    kernel_size, stride, padding : int or tuple of int
        One number, or one for each of H and W; the stride is the window's size if left out, the padding at most half.
    ceil_mode : bool
        Round the output size up; a window never starts in the padding behind the input.
    count_include_pad : bool
        Whether a window that reaches into the padding divides by those zeros, too.
    divisor_override : int, optional
        What every window divides by instead of its number of points; not 0.

    Returns
    -------
    torch.Tensor

    Raises
    ------
    InvalidArgument
        Names the argument, its value and what is accepted: sizes below 1, a padding of more than half the window, a
        window larger than the padded input, a divisor of 0.

    Notes
    -----
    The definition is in `lucidnn.ops.average_pooling`.

    Examples
    --------
    >>> avg_pool2d(torch.arange(16.0).reshape(1, 1, 4, 4), 2)
    tensor([[[[ 2.5000,  4.5000],
              [10.5000, 12.5000]]]])
    """
    return _avg_pool(2, input, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override)


def avg_pool3d(
    input, kernel_size, stride=None, padding=0, ceil_mode=False, count_include_pad=True, divisor_override=None
):
    """Mean of each window of (N, C, D, H, W); otherwise as `avg_pool2d`.

    Examples
    --------
    >>> avg_pool3d(torch.arange(8.0).reshape(1, 1, 2, 2, 2), 2).item()
    3.5
    """
    return _avg_pool(3, input, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override)


def _lp_pool(ndim, input, norm_type, kernel_size, stride, ceil_mode):
    window, stride = windows(kernel_size, stride, ndim)
    if not isinstance(norm_type, (int, float)):
        raise InvalidArgument("norm_type", repr(norm_type), "a number")
    if math.isinf(norm_type):  # the limits: the largest and the smallest magnitude
        sign = math.copysign(1.0, norm_type)
        pool = (max_pool1d, max_pool2d, max_pool3d)[ndim - 1]
        return with_batch(
            ndim, {"input": input}, lambda x: sign * pool(sign * x.abs(), window, stride, ceil_mode=ceil_mode)
        )
    attributes = (float(norm_type), window, stride, bool(ceil_mode))
    return with_batch(ndim, {"input": input}, lambda x: lp_pool_fwd(x, *attributes))


def lp_pool1d(input, norm_type, kernel_size, stride=None, ceil_mode=False):
    """Root of the sum of powers over each window of (N, C, W); otherwise as `lp_pool2d`.

    Examples
    --------
    >>> lp_pool1d(torch.tensor([[[3.0, 4.0, 6.0, 8.0]]]), 2, 2)
    tensor([[[ 5., 10.]]])
    """
    return _lp_pool(1, input, norm_type, kernel_size, stride, ceil_mode)


def lp_pool2d(input, norm_type, kernel_size, stride=None, ceil_mode=False):
    """Root of the sum of powers over each window: ``(sum x**p) ** (1 / p)``.

    Parameters
    ----------
    input : torch.Tensor
        (N, C, H, W), or (C, H, W); any strides. float64, float32, float16 or bfloat16.
    norm_type : float
        The exponent p, above 0; infinity stands for the largest magnitude of a window, minus infinity for the smallest.
    kernel_size, stride : int or tuple of int
        One number, or one for each of H and W; the stride is the window's size if left out.
    ceil_mode : bool
        Round the output size up; the sum of a window that hangs over is scaled up to that of a whole one.

    Returns
    -------
    torch.Tensor

    Raises
    ------
    InvalidArgument
        Names the argument, its value and what is accepted: a norm of 0 or below, sizes below 1, a window larger than
        the input.

    Notes
    -----
    The definition is in `lucidnn.ops.average_pooling`. As in the framework the power is that of x, not of its
    magnitude: an odd or broken p wants an input that is not negative.

    Examples
    --------
    >>> lp_pool2d(torch.ones(1, 1, 4, 4), 2, 2)
    tensor([[[[2., 2.],
              [2., 2.]]]])
    """
    return _lp_pool(2, input, norm_type, kernel_size, stride, ceil_mode)


def lp_pool3d(input, norm_type, kernel_size, stride=None, ceil_mode=False):
    """Root of the sum of powers over each window of (N, C, D, H, W); otherwise as `lp_pool2d`.

    Examples
    --------
    >>> lp_pool3d(torch.full((1, 1, 2, 2, 2), 2.0), 3, 2).item()
    4.0
    """
    return _lp_pool(3, input, norm_type, kernel_size, stride, ceil_mode)
