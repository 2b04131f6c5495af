"""The framework's pooling by maxima and averages, over fixed and adaptive windows, and max unpooling.

Pooling in one dimension comes here as pooling in two, lp_pool and local_response_norm as averages; pooling to one
point is a mean in the framework and stays one. Indices are the framework's, int64 positions in the input's plane.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from ...core.errors import InvalidArgument, NotSupported
from ...functional import adaptive_pooling as adaptive
from ...functional import average_pooling as average
from ...functional import pooling as maximum
from ...functional import unpooling
from ...functional._library import last, run
from .._override import override
from ._layout import following, suggests_last

_max_fwd = following(maximum._fwd)
_average_fwd = following(average._avg_fwd)
_adaptive_average_fwd = following(adaptive._avg_fwd)
_adaptive_max_fwd = following(adaptive._max_fwd)
_unpool_fwd = following(unpooling._fwd)


def _each(values: Sequence[int], ndim: int) -> tuple[int, ...]:
    return tuple(values) if len(values) != 1 else tuple(values) * ndim


def _rule(x: torch.Tensor, ndim: int, follows: bool = True) -> tuple[torch.Tensor, str, bool]:
    """The input with a batch axis, how the result is laid out, and whether it had that axis."""
    if x.ndim == ndim + 1:
        return x.unsqueeze(0), "first", False
    return x, "suggested" if follows else "first", True


def _alike(grad: torch.Tensor, x: torch.Tensor) -> None:
    """A gradient has the input's type and device; the gradients' plans do not see the input."""
    if grad.dtype != x.dtype or grad.device != x.device or grad.ndim != x.ndim:
        raise InvalidArgument("grad_output", f"{grad.dtype} on {grad.device}", f"{x.dtype} on {x.device}, as the input")
    if 0 in x.shape[1:]:
        raise NotSupported("a tensor without elements")


# ---- maxima ----------------------------------------------------------------------------------------------------


def _max(ndim: int, x: torch.Tensor, window: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: bool) -> Any:
    window = _each(window, ndim)
    geometry = window, _each(stride, ndim) or window, _each(padding, ndim), _each(dilation, ndim), ceil_mode, "i64"
    x, rule, batched = _rule(x, ndim)
    if batched:
        return run(_max_fwd, (x,), (rule, *geometry))
    y, index = run(_max_fwd, (x,), ("dense" if ndim == 3 else rule, *geometry))  # so the framework
    return y.squeeze(0), index.squeeze(0)


def _max_backward(ndim, grad, x, window, stride, padding, dilation, ceil_mode, index):
    _alike(grad, x)
    window = _each(window, ndim)
    geometry = window, _each(stride, ndim) or window, _each(padding, ndim), _each(dilation, ndim), ceil_mode, "i64"
    if x.ndim != ndim + 1:
        return run(maximum._bwd, (grad, index), (x.shape, suggests_last(x), *geometry))
    grad, index = grad.unsqueeze(0), index.unsqueeze(0)
    dense = ndim == 3 and all(last(t) for t in (grad, index, x.unsqueeze(0)))  # so the framework
    return run(maximum._bwd, (grad, index), ((1, *x.shape), dense, *geometry)).squeeze(0)


@override("max_pool2d_with_indices")
def max_pool2d_with_indices(input, kernel_size, stride=(), padding=(0,), dilation=(1,), ceil_mode=False):
    """Maxima and where they were."""
    return _max(2, input, kernel_size, stride, padding, dilation, ceil_mode)


@override("max_pool3d_with_indices")
def max_pool3d_with_indices(input, kernel_size, stride=(), padding=(0,), dilation=(1,), ceil_mode=False):
    """Maxima and where they were."""
    return _max(3, input, kernel_size, stride, padding, dilation, ceil_mode)


@override("max_pool2d_with_indices_backward")
def max_pool2d_with_indices_backward(
    grad_output, input, kernel_size, stride, padding, dilation, ceil_mode, indices
):  # fmt: skip
    """The gradient goes to where the maxima were."""
    return _max_backward(2, grad_output, input, kernel_size, stride, padding, dilation, ceil_mode, indices)


@override("max_pool3d_with_indices_backward")
def max_pool3d_with_indices_backward(
    grad_output, input, kernel_size, stride, padding, dilation, ceil_mode, indices
):  # fmt: skip
    """The gradient goes to where the maxima were."""
    return _max_backward(3, grad_output, input, kernel_size, stride, padding, dilation, ceil_mode, indices)


# ---- averages --------------------------------------------------------------------------------------------------


def _divisor(given: int | None) -> int:
    if given == 0:
        raise InvalidArgument("divisor_override", 0, "None or a whole number other than 0")
    return given or 0


def _average(ndim, x, window, stride, padding, ceil_mode, count_include_pad, divisor):
    window = _each(window, ndim)
    geometry = (window, _each(stride, ndim) or window, _each(padding, ndim), ceil_mode)
    x, rule, batched = _rule(x, ndim, ndim == 2)
    y = run(_average_fwd, (x,), (rule, *geometry, count_include_pad, _divisor(divisor)))
    return y if batched else y.squeeze(0)


def _average_backward(ndim, grad, x, window, stride, padding, ceil_mode, count_include_pad, divisor):
    _alike(grad, x)
    window = _each(window, ndim)
    geometry = (window, _each(stride, ndim) or window, _each(padding, ndim), ceil_mode)
    rest = (*geometry, count_include_pad, _divisor(divisor))
    if x.ndim != ndim + 1:
        return run(average._avg_bwd, (grad,), (x.shape, ndim == 2 and suggests_last(x), *rest))
    return run(average._avg_bwd, (grad.unsqueeze(0),), ((1, *x.shape), False, *rest)).squeeze(0)


@override("avg_pool2d")
def avg_pool2d(
    input, kernel_size, stride=(), padding=(0,), ceil_mode=False, count_include_pad=True, divisor_override=None
):
    """Means."""
    return _average(2, input, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override)


@override("avg_pool3d")
def avg_pool3d(
    input, kernel_size, stride=(), padding=(0,), ceil_mode=False, count_include_pad=True, divisor_override=None
):
    """Means; the framework's are never channels-last."""
    return _average(3, input, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override)


@override("avg_pool2d_backward")
def avg_pool2d_backward(grad_output, input, *geometry):
    """Every point gets its share."""
    return _average_backward(2, grad_output, input, *geometry)


@override("avg_pool3d_backward")
def avg_pool3d_backward(grad_output, input, *geometry):
    """Every point gets its share."""
    return _average_backward(3, grad_output, input, *geometry)


# ---- adaptive windows ------------------------------------------------------------------------------------------


def _adaptive(ndim: int, describe: Any, x: torch.Tensor, *attributes: Any) -> Any:
    x, rule, batched = _rule(x, ndim, ndim == 2)
    found = run(describe, (x,), (rule, *attributes))
    if batched:
        return found
    return tuple(t.squeeze(0) for t in found) if isinstance(found, tuple) else found.squeeze(0)


def _adaptive_backward(ndim: int, describe: Any, x: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
    _alike(tensors[0], x)
    if x.ndim != ndim + 1:
        return run(describe, tensors, (x.shape, ndim == 2 and suggests_last(x)))
    return run(describe, [t.unsqueeze(0) for t in tensors], ((1, *x.shape), False)).squeeze(0)


@override("_adaptive_avg_pool2d")
def adaptive_avg_pool2d(input, output_size):
    """Means."""
    return _adaptive(2, _adaptive_average_fwd, input, tuple(output_size))


@override("_adaptive_avg_pool3d")
def adaptive_avg_pool3d(input, output_size):
    """Means."""
    return _adaptive(3, _adaptive_average_fwd, input, tuple(output_size))


@override("_adaptive_avg_pool2d_backward")
def adaptive_avg_pool2d_backward(grad_output, input):
    """Every point gets its share."""
    return _adaptive_backward(2, adaptive._avg_bwd, input, grad_output)


@override("_adaptive_avg_pool3d_backward")
def adaptive_avg_pool3d_backward(grad_output, input):
    """Every point gets its share."""
    return _adaptive_backward(3, adaptive._avg_bwd, input, grad_output)


@override("adaptive_max_pool2d")
def adaptive_max_pool2d(input, output_size):
    """Maxima and where they were."""
    return _adaptive(2, _adaptive_max_fwd, input, tuple(output_size), "i64")


@override("adaptive_max_pool3d")
def adaptive_max_pool3d(input, output_size):
    """Maxima and where they were."""
    return _adaptive(3, _adaptive_max_fwd, input, tuple(output_size), "i64")


@override("adaptive_max_pool2d_backward")
def adaptive_max_pool2d_backward(grad_output, input, indices):
    """The gradient goes to where the maxima were."""
    return _adaptive_backward(2, adaptive._max_bwd, input, grad_output, indices)


@override("adaptive_max_pool3d_backward")
def adaptive_max_pool3d_backward(grad_output, input, indices):
    """The gradient goes to where the maxima were."""
    return _adaptive_backward(3, adaptive._max_bwd, input, grad_output, indices)


# ---- unpooling -------------------------------------------------------------------------------------------------


def _unpool(ndim: int, x: torch.Tensor, index: torch.Tensor, size: Sequence[int]) -> torch.Tensor:
    if index.dtype != torch.int64 or index.shape != x.shape or len(size) != ndim:
        raise InvalidArgument("indices", f"{index.dtype} of shape {list(index.shape)}", f"int64 of {list(x.shape)}")
    if not x.is_cuda and x.numel():  # where the framework looks before it writes; lucidnn drops what is outside
        low, high = torch.aminmax(index)
        if low.item() < 0 or high.item() >= math.prod(size):
            raise InvalidArgument("indices", f"from {low.item()} to {high.item()}", f"places in {list(size)}")
    if x.ndim == ndim + 2:
        return run(_unpool_fwd, (x, index), ("suggested on a CPU" if ndim == 2 else "first", tuple(size)))
    return run(_unpool_fwd, (x.unsqueeze(0), index.unsqueeze(0)), ("first", tuple(size))).squeeze(0)


@override("max_unpool2d")
def max_unpool2d(input, indices, output_size):
    """Values at the places that their indices name."""
    return _unpool(2, input, indices, output_size)


@override("max_unpool3d")
def max_unpool3d(input, indices, output_size, stride, padding):
    """Values at the places that their indices name."""
    if len(stride) != 3 or len(padding) != 3 or min(stride) < 1:
        raise InvalidArgument("stride", list(stride), "3 numbers above 0")
    return _unpool(3, input, indices, output_size)
