"""Pooling to an output size: the operators, their gradients, `adaptive_avg_pool1d` to `3d`, `adaptive_max_pool1d` to
`3d`.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from ..ops.adaptive_pooling import AdaptiveAvgPoolBwd, AdaptiveAvgPoolFwd, AdaptiveMaxPoolBwd, AdaptiveMaxPoolFwd
from ._library import Described, Op, Planned, dense, last, new_empty
from ._pooling import output_sizes, with_batch

_TORCH_INDEX = {"i32": torch.int32, "i64": torch.int64}


def _avg_fwd(tensors: Any, attributes: Any) -> Described:
    return AdaptiveAvgPoolFwd(output_size=tuple(attributes[0])), {"tensors": {"x": tensors[0]}}


def _avg_bwd(tensors: Any, attributes: Any) -> Described:
    return AdaptiveAvgPoolBwd(), {"tensors": {"dy": tensors[0], "dx": dense(tensors[0], *attributes)}}


def _max_fwd(tensors: Any, attributes: Any) -> Described:
    size, index_type = attributes
    return AdaptiveMaxPoolFwd(output_size=tuple(size), index_type=index_type), {"tensors": {"x": tensors[0]}}


def _max_bwd(tensors: Any, attributes: Any) -> Described:
    dy, index = tensors
    return AdaptiveMaxPoolBwd(), {"tensors": {"dy": dy, "index": index, "dx": dense(dy, *attributes)}}


def _avg_fwd_backward(needs, args, outputs, grads):
    x, _ = args
    return (adaptive_avg_pool_bwd(grads[0], x.shape, last(x)),)


def _avg_bwd_backward(needs, args, outputs, grads):
    """The forward pass is linear: the gradient of its gradient is the forward pass."""
    return (adaptive_avg_pool_fwd(grads[0], args[0].shape[2:]),)


def _max_fwd_backward(needs, args, outputs, grads):
    x, *_ = args
    return (adaptive_max_pool_bwd(grads[0], outputs[1], x.shape, last(x)),)


def _max_bwd_backward(needs, args, outputs, grads):
    """The gradient of "spread dy to the maxima" is "pick from the maxima": a gather by the same index."""
    dy, index, *_ = args
    return grads[0].flatten(2).gather(2, index.long().flatten(2)).reshape(dy.shape), None


def _max_fwd_fake(x, output_size, index_type):
    shape = (*x.shape[:2], *output_size)
    return new_empty(x, shape, last(x)), new_empty(x, shape, last(x), _TORCH_INDEX[index_type])


adaptive_avg_pool_fwd = Op(
    "adaptive_avg_pool_fwd(Tensor x, SymInt[] output_size) -> Tensor",
    1,
    Planned(_avg_fwd),
    lambda x, output_size: new_empty(x, (*x.shape[:2], *output_size), last(x)),
    _avg_fwd_backward,
)
adaptive_avg_pool_bwd = Op(
    "adaptive_avg_pool_bwd(Tensor dy, SymInt[] x_shape, bool channels_last) -> Tensor",
    1,
    Planned(_avg_bwd),
    new_empty,
    _avg_bwd_backward,
)
adaptive_max_pool_fwd = Op(
    "adaptive_max_pool_fwd(Tensor x, SymInt[] output_size, str index_type) -> (Tensor, Tensor)",
    1,
    Planned(_max_fwd),
    _max_fwd_fake,
    _max_fwd_backward,
    saves_output=lambda args: True,
)
adaptive_max_pool_bwd = Op(
    "adaptive_max_pool_bwd(Tensor dy, Tensor index, SymInt[] x_shape, bool channels_last) -> Tensor",
    2,
    Planned(_max_bwd),
    lambda dy, index, x_shape, channels_last: new_empty(dy, x_shape, channels_last),
    _max_bwd_backward,
)


def _adaptive_avg_pool(ndim, input, output_size):
    def call(x):
        return adaptive_avg_pool_fwd(x, output_sizes(output_size, x.shape[2:]))

    return with_batch(ndim, {"input": input}, call)


def _adaptive_max_pool(ndim, input, output_size, return_indices):
    def call(x):
        # The framework's indices are 64-bit; without a reader of them half of that does.
        small = "i32" if not return_indices and math.prod(x.shape[2:]) < 2**31 else "i64"
        found = adaptive_max_pool_fwd(x, output_sizes(output_size, x.shape[2:]), small)
        return found if return_indices else found[0]

    return with_batch(ndim, {"input": input}, call)


def adaptive_avg_pool1d(input, output_size):
    """Means of `output_size` windows of (N, C, W); otherwise as `adaptive_avg_pool2d`.

    Examples
    --------
    >>> adaptive_avg_pool1d(torch.tensor([[[1.0, 3.0, 2.0, 6.0]]]), 2)
    tensor([[[2., 4.]]])
    """
    return _adaptive_avg_pool(1, input, output_size)


def adaptive_avg_pool2d(input, output_size):
    """Means of windows that divide the input as evenly as whole numbers allow; 1 is global pooling.

    Parameters
    ----------
    input : torch.Tensor
        (N, C, H, W), or (C, H, W); any strides. float64, float32, float16 or bfloat16.
    output_size : int, None, or tuple of them
        One number, or one for each of H and W; None keeps the input's size.

    Returns
    -------
    torch.Tensor

    Raises
    ------
    InvalidArgument
        Names the argument, its value and what is accepted.

    Notes
    -----
    The definition is in `lucidnn.ops.adaptive_pooling`.

    Examples
    --------
    >>> adaptive_avg_pool2d(torch.arange(12.0).reshape(1, 1, 3, 4), (None, 1)).flatten()
    tensor([1.5000, 5.5000, 9.5000])
    """
    return _adaptive_avg_pool(2, input, output_size)


def adaptive_avg_pool3d(input, output_size):
    """Means of windows of (N, C, D, H, W); otherwise as `adaptive_avg_pool2d`.

    Examples
    --------
    >>> adaptive_avg_pool3d(torch.arange(8.0).reshape(1, 1, 2, 2, 2), 1).item()
    3.5
    """
    return _adaptive_avg_pool(3, input, output_size)


def adaptive_max_pool1d(input, output_size, return_indices=False):
    """Largest values of `output_size` windows of (N, C, W); otherwise as `adaptive_max_pool2d`.

    Examples
    --------
    >>> adaptive_max_pool1d(torch.tensor([[[1.0, 3.0, 2.0, 6.0]]]), 2)
    tensor([[[3., 6.]]])
    """
    return _adaptive_max_pool(1, input, output_size, return_indices)


def adaptive_max_pool2d(input, output_size, return_indices=False):
    """Largest values of windows that divide the input as evenly as whole numbers allow; 1 is global pooling.

    Parameters
    ----------
    input : torch.Tensor
        (N, C, H, W), or (C, H, W); any strides. float64, float32, float16 or bfloat16.
    output_size : int, None, or tuple of them
        One number, or one for each of H and W; None keeps the input's size.
    return_indices : bool
        Also give each maximum's position in the input's plane (int64).

    Returns
    -------
    torch.Tensor, or (torch.Tensor, torch.Tensor)

    Raises
    ------
    InvalidArgument
        Names the argument, its value and what is accepted.

    Notes
    -----
    The definition is in `lucidnn.ops.adaptive_pooling`; NaN counts as the largest value, the first of equal values
    wins.

    Examples
    --------
    >>> adaptive_max_pool2d(torch.arange(12.0).reshape(1, 1, 3, 4), (1, 2), return_indices=True)
    (tensor([[[[ 9., 11.]]]]), tensor([[[[ 9, 11]]]]))
    """
    return _adaptive_max_pool(2, input, output_size, return_indices)


def adaptive_max_pool3d(input, output_size, return_indices=False):
    """Largest values of windows of (N, C, D, H, W); otherwise as `adaptive_max_pool2d`.

    Examples
    --------
    >>> adaptive_max_pool3d(torch.arange(8.0).reshape(1, 1, 2, 2, 2), 1).item()
    7.0
    """
    return _adaptive_max_pool(3, input, output_size, return_indices)
