"""Pooling on tensors: the operators, their gradients, and `max_pool1d`, `max_pool2d`, `max_pool3d`."""

from __future__ import annotations

import math
from typing import Any

import torch

from ..core.errors import InvalidArgument
from ..ops.pooling import MaxPoolBwd, MaxPoolFwd, pooled_size
from ._library import Described, Op, Planned, dense, last, new_empty, remembered, tuple_of

_ATTRIBUTES = "int[] window, int[] stride, int[] padding, int[] dilation, bool ceil_mode, str index_type"
_TORCH_INDEX = {"u8": torch.uint8, "i32": torch.int32, "i64": torch.int64}


def _attributes(window, stride, padding, dilation, ceil_mode, index_type) -> dict[str, Any]:
    return {
        "window": tuple(window),
        "stride": tuple(stride),
        "padding": tuple((p, p) for p in padding),
        "dilation": tuple(dilation),
        "ceil_mode": ceil_mode,
        "index_type": index_type,
    }


def _fwd(tensors: Any, attributes: Any) -> Described:
    return MaxPoolFwd(**_attributes(*attributes)), {"tensors": {"x": tensors[0]}}


def _bwd(tensors: Any, attributes: Any) -> Described:
    shape, channels_last, *rest = attributes
    dy, index = tensors
    given = {"dy": dy, "index": index, "dx": dense(dy, shape, channels_last)}
    return MaxPoolBwd(**_attributes(*rest)), {"tensors": given}


def _fwd_fake(x, window, stride, padding, dilation, ceil_mode, index_type):
    axes = zip(x.shape[2:], window, stride, [(p, p) for p in padding], dilation, strict=True)
    shape = (*x.shape[:2], *(pooled_size(*axis, ceil_mode) for axis in axes))
    return new_empty(x, shape, last(x)), new_empty(x, shape, last(x), _TORCH_INDEX[index_type])


def _fwd_backward(needs, args, outputs, grads):
    x, *attributes = args
    if not needs[0]:
        return (None,)
    return (max_pool_bwd(grads[0], outputs[1], x.shape, last(x), *attributes),)


def _bwd_backward(needs, args, outputs, grads):
    """The gradient of "spread dy to the maxima" is "pick from the maxima": a gather by the same index."""
    dy, index, x_shape, _, window, stride, padding, dilation, _, index_type = args
    (ddx,) = grads
    place = index.long()
    if index_type == "u8":
        place = _in_plane(place, x_shape[2:], window, stride, padding, dilation)
    picked = ddx.flatten(2).gather(2, place.flatten(2))
    return picked.reshape(dy.shape), None


def _in_plane(tap: torch.Tensor, sizes: Any, window: Any, stride: Any, padding: Any, dilation: Any) -> torch.Tensor:
    """Positions in the input's plane, from positions inside the windows."""
    place = torch.zeros_like(tap)
    remaining = math.prod(window)
    for axis, (n, r, s, p, d) in enumerate(zip(sizes, window, stride, padding, dilation, strict=True)):
        remaining //= r
        t = tap // remaining % r
        start = torch.arange(tap.shape[2 + axis], device=tap.device) * s - p
        place = place * n + t * d + start.reshape(-1, *[1] * (len(window) - 1 - axis))
    return place


max_pool_fwd = Op(
    f"max_pool_fwd(Tensor x, {_ATTRIBUTES}) -> (Tensor, Tensor)",
    1,
    Planned(_fwd),
    _fwd_fake,
    _fwd_backward,
    saves_output=lambda args: True,
)
max_pool_bwd = Op(
    f"max_pool_bwd(Tensor dy, Tensor index, SymInt[] x_shape, bool channels_last, {_ATTRIBUTES}) -> Tensor",
    2,
    Planned(_bwd),
    lambda dy, index, x_shape, channels_last, *attributes: new_empty(dy, x_shape, channels_last),
    _bwd_backward,
)


def _max_pool(ndim, input, kernel_size, stride, padding, dilation, ceil_mode, return_indices):
    if not isinstance(input, torch.Tensor):
        raise InvalidArgument("input", type(input).__name__, "a torch tensor")
    if input.ndim == ndim + 1:
        out = _max_pool(ndim, input.unsqueeze(0), kernel_size, stride, padding, dilation, ceil_mode, return_indices)
        return tuple(t.squeeze(0) for t in out) if return_indices else out.squeeze(0)
    if input.ndim != ndim + 2:
        raise InvalidArgument(
            "input",
            f"shape {list(input.shape)}",
            f"{ndim + 2} axes (batch, channels, {ndim} spatial), or no batch axis",
        )
    attributes = _written_out(ndim, kernel_size, stride, padding, dilation, ceil_mode)
    # The framework's indices are 64-bit positions; without a reader of them a byte a window does.
    if return_indices:
        return max_pool_fwd(input, *attributes, "i64")
    small = "u8" if math.prod(attributes[0]) <= 256 else "i32" if math.prod(input.shape[2:]) < 2**31 else "i64"
    return max_pool_fwd(input, *attributes, small)[0]


@remembered
def _written_out(ndim, kernel_size, stride, padding, dilation, ceil_mode):
    window = tuple_of(kernel_size, ndim, "kernel_size")
    stride = window if stride is None or stride == () or stride == [] else tuple_of(stride, ndim, "stride")
    padding, dilation = tuple_of(padding, ndim, "padding"), tuple_of(dilation, ndim, "dilation")
    return window, stride, padding, dilation, bool(ceil_mode)


def max_pool1d(input, kernel_size, stride=None, padding=0, dilation=1, ceil_mode=False, return_indices=False):
    """Largest value of each window of (N, C, W); otherwise as `max_pool2d`.

    Examples
    --------
    >>> max_pool1d(torch.tensor([[[1.0, 3.0, 2.0, 5.0]]]), 2)
    tensor([[[3., 5.]]])
    """
    return _max_pool(1, input, kernel_size, stride, padding, dilation, ceil_mode, return_indices)


def max_pool2d(input, kernel_size, stride=None, padding=0, dilation=1, ceil_mode=False, return_indices=False):
    """Largest value of each window.

    Parameters
    ----------
    input : torch.Tensor
        (N, C, H, W), or (C, H, W); any strides. float64, float32, float16 or bfloat16.
    kernel_size, stride, padding, dilation : int or tuple of int
        One number, or one for each of H and W; the stride is the window's size if left out, the padding at most half.
    ceil_mode : bool
        Round the output size up; a window never starts in the padding behind the input.
    return_indices : bool
        Also give each maximum's position in the input's plane (int64).

    Returns
    -------
    torch.Tensor, or (torch.Tensor, torch.Tensor)

    Notes
    -----
    The definition is in `lucidnn.ops.pooling`; NaN counts as the largest value, the first of equal values wins.

    Examples
    --------
    >>> max_pool2d(torch.arange(16.0).reshape(1, 1, 4, 4), 2)
    tensor([[[[ 5.,  7.],
              [13., 15.]]]])
    """
    return _max_pool(2, input, kernel_size, stride, padding, dilation, ceil_mode, return_indices)


def max_pool3d(input, kernel_size, stride=None, padding=0, dilation=1, ceil_mode=False, return_indices=False):
    """Largest value of each window of (N, C, D, H, W); otherwise as `max_pool2d`.

    Examples
    --------
    >>> max_pool3d(torch.arange(8.0).reshape(1, 1, 2, 2, 2), 2).item()
    7.0
    """
    return _max_pool(3, input, kernel_size, stride, padding, dilation, ceil_mode, return_indices)
