"""Max unpooling on tensors: the operators, their gradients, and `max_unpool1d`, `max_unpool2d`, `max_unpool3d`."""

from __future__ import annotations

from typing import Any

import torch

from ..core.errors import InvalidArgument
from ..ops.unpooling import MaxUnpoolBwd, MaxUnpoolFwd
from ._library import Described, Op, Planned, last, new_empty, tuple_of
from ._pooling import windows, with_batch


def _fwd(tensors: Any, attributes: Any) -> Described:
    x, index = tensors
    return MaxUnpoolFwd(output_size=tuple(attributes[0])), {"tensors": {"x": x, "index": index}}


def _bwd(tensors: Any, attributes: Any) -> Described:
    dy, index = tensors
    return MaxUnpoolBwd(), {"tensors": {"dy": dy, "index": index}}


def _fwd_backward(needs, args, outputs, grads):
    return max_unpool_bwd(grads[0], args[1]), None


def _bwd_backward(needs, args, outputs, grads):
    """The gradient of a gather: values that were fetched several times get all the gradients."""
    dy, index = args
    points = dy.shape[2:].numel()
    place = index.long().flatten(2)
    inside = (place >= 0) & (place < points)
    share = torch.where(inside, grads[0].flatten(2), 0.0)
    total = torch.zeros_like(dy.flatten(2)).scatter_add(2, torch.where(inside, place, 0), share)
    return total.reshape(dy.shape), None


max_unpool_fwd = Op(
    "max_unpool_fwd(Tensor x, Tensor index, SymInt[] output_size) -> Tensor",
    2,
    Planned(_fwd),
    lambda x, index, output_size: new_empty(x, (*x.shape[:2], *output_size), last(x)),
    _fwd_backward,
    unread=lambda args: (0,),
)
max_unpool_bwd = Op(
    "max_unpool_bwd(Tensor dy, Tensor index) -> Tensor",
    2,
    Planned(_bwd),
    lambda dy, index: new_empty(dy, index.shape, last(index)),
    _bwd_backward,
)


def _max_unpool(ndim, input, indices, kernel_size, stride, padding, output_size):
    window, stride = windows(kernel_size, stride, ndim)
    padding = tuple_of(padding, ndim, "padding")

    def call(x, index):
        each = zip(x.shape[2:], window, stride, padding, strict=True)
        usual = tuple((n - 1) * s + r - 2 * p for n, r, s, p in each)
        return max_unpool_fwd(x, index, _size(output_size, usual, stride))

    return with_batch(ndim, {"input": input, "indices": indices}, call)


def _size(output_size, usual, stride):
    """The asked-for size, which a stride may lie around the usual one."""
    if output_size is None:
        return usual
    size = tuple(output_size) if isinstance(output_size, (tuple, list)) else (output_size,)
    size = size[-len(usual) :] if len(size) in (len(usual) + 1, len(usual) + 2) else size
    fits = len(size) == len(usual)
    if not fits or not all(abs(n - m) < s for n, m, s in zip(size, usual, stride, strict=True)):
        ranges = ", ".join(f"{max(m - s + 1, 0)} to {m + s - 1}" for m, s in zip(usual, stride, strict=True))
        raise InvalidArgument("output_size", list(size), f"{len(usual)} sizes: {ranges}")
    return size


def max_unpool1d(input, indices, kernel_size, stride=None, padding=0, output_size=None):
    """Each value of (N, C, W) at the place its index names; otherwise as `max_unpool2d`.

    Examples
    --------
    >>> max_unpool1d(torch.tensor([[[3.0, 5.0]]]), torch.tensor([[[1, 3]]]), 2)
    tensor([[[0., 3., 0., 5.]]])
    """
    return _max_unpool(1, input, indices, kernel_size, stride, padding, output_size)


def max_unpool2d(input, indices, kernel_size, stride=None, padding=0, output_size=None):
    """Each value at the place its index names, 0 elsewhere: what max pooling keeps, put back.

    Parameters
    ----------
    input : torch.Tensor
        (N, C, H, W), or (C, H, W); any strides. float64, float32, float16 or bfloat16.
    indices : torch.Tensor
        Of the input's shape, int64 or int32: flat positions in the output's plane, as max pooling returns them.
    kernel_size, stride, padding : int or tuple of int
        Of the max pooling; they give the output's size where that is left out.
    output_size : tuple of int, optional
        Spatial sizes, or the whole shape; less than a stride from those that the windows give.

    Returns
    -------
    torch.Tensor

    Raises
    ------
    InvalidArgument
        Names the argument, its value and what is accepted.

    Notes
    -----
    The definition is in `lucidnn.ops.unpooling`: of several values for one place the last in reading order stays, and
    an index outside the plane is dropped.

    Examples
    --------
    >>> max_unpool2d(torch.ones(1, 1, 1, 2), torch.tensor([[[[0, 7]]]]), 2)
    tensor([[[[1., 0., 0., 0.],
              [0., 0., 0., 1.]]]])
    """
    return _max_unpool(2, input, indices, kernel_size, stride, padding, output_size)


def max_unpool3d(input, indices, kernel_size, stride=None, padding=0, output_size=None):
    """Each value of (N, C, D, H, W) at the place its index names; otherwise as `max_unpool2d`.

    Examples
    --------
    >>> max_unpool3d(torch.ones(1, 1, 1, 1, 1), torch.tensor([[[[[7]]]]]), 2).flatten()
    tensor([0., 0., 0., 0., 0., 0., 0., 1.])
    """
    return _max_unpool(3, input, indices, kernel_size, stride, padding, output_size)
