"""Softmax on tensors: the operators, their gradients, and `softmax`, `log_softmax`, `softmin`."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from ..core.descriptor import TensorDescriptor, short_dtype
from ..core.errors import InvalidArgument
from ..ops.pointwise import like
from ..ops.softmax import SoftmaxBwd, SoftmaxFwd
from ._library import Described, Op, Planned, axes_of

_ATTRIBUTES = "int[] axes, bool log, bool empty_zero, ScalarType dtype"


def _output(t: torch.Tensor, dtype: torch.dtype) -> TensorDescriptor:
    return like(TensorDescriptor.of(t), short_dtype(dtype))


def _fwd(tensors: Any, attributes: Any) -> Described:
    x, mask = tensors
    axes, log, empty_zero, dtype = attributes
    return SoftmaxFwd(tuple(axes), log, empty_zero), {"tensors": {"x": x, "mask": mask, "y": _output(x, dtype)}}


def _bwd(tensors: Any, attributes: Any) -> Described:
    y, dy, mask = tensors
    axes, log, empty_zero, dtype = attributes
    given = {"y": y, "dy": dy, "mask": mask, "dx": _output(y, dtype)}
    return SoftmaxBwd(tuple(axes), log, empty_zero), {"tensors": given}


def _fwd_backward(needs, args, outputs, grads):
    x, mask, axes, log, empty_zero, dtype = args
    dtype = dtype if x is None else x.dtype
    return softmax_bwd(outputs[0], grads[0], mask, axes, log, empty_zero, dtype) if needs[0] else None, None


def _bwd_backward(needs, args, outputs, grads):
    """The gradients of dx, a function of y and dy: plain arithmetic, for the rare second derivative."""
    y, dy, mask, axes, log, empty_zero, _ = args
    g = grads[0].to(y.dtype)
    if mask is not None:
        g = torch.where(mask, g, 0.0)
    if log:
        if empty_zero:
            g = torch.where(y == -torch.inf, 0.0, g)
        p = y.exp()
        d_y = -g * p * dy.sum(axes, keepdim=True) if needs[0] else None
        d_dy = g - (g * p).sum(axes, keepdim=True) if needs[1] else None
    else:
        gy = (g * y).sum(axes, keepdim=True)
        d_y = g * (dy - (y * dy).sum(axes, keepdim=True)) - dy * gy if needs[0] else None
        d_dy = y * (g - gy) if needs[1] else None
    return d_y, d_dy, None


softmax_fwd = Op(
    f"softmax_fwd(Tensor x, Tensor? mask, {_ATTRIBUTES}) -> Tensor",
    2,
    Planned(_fwd),
    lambda x, mask, axes, log, empty_zero, dtype: torch.empty_like(x, dtype=dtype),
    _fwd_backward,
    saves_output=lambda args: True,
    unread=lambda args: (0,) if args[0].dtype == args[-1] else (),  # of another x the type is asked
)
softmax_bwd = Op(
    f"softmax_bwd(Tensor y, Tensor dy, Tensor? mask, {_ATTRIBUTES}) -> Tensor",
    3,
    Planned(_bwd),
    lambda y, dy, mask, axes, log, empty_zero, dtype: torch.empty_like(y, dtype=dtype),
    _bwd_backward,
)


def _implicit(ndim: int) -> int:
    warnings.warn("without dim the axis is guessed from the rank; name it", DeprecationWarning, stacklevel=4)
    return 0 if ndim in (0, 1, 3) else 1


def _softmax(input, dim, dtype, log, mask, empty_zero):
    if not isinstance(input, torch.Tensor):
        raise InvalidArgument("input", type(input).__name__, "a torch tensor")
    if dim is None:
        dim = _implicit(input.ndim)
    axes = axes_of(dim, "dim")
    if dtype is None:
        dtype = input.dtype
    elif dtype != input.dtype and (dtype == torch.float64 or dtype.itemsize <= input.dtype.itemsize):
        input = input.to(dtype)  # only widening to float32 is the kernel's: elsewhere the conversion comes first
    if input.ndim == 0:
        if any(axis not in (0, -1) for axis in axes):
            raise InvalidArgument("dim", list(axes), "0 or -1 for a tensor without axes")
        return _softmax(input.reshape(1), 0, dtype, log, mask, empty_zero).reshape(())
    if mask is not None:
        if not isinstance(mask, torch.Tensor) or mask.dtype != torch.bool:
            raise InvalidArgument("mask", getattr(mask, "dtype", type(mask).__name__), "a torch tensor of type bool")
        if mask.shape != input.shape:
            try:
                mask = mask.expand(input.shape)
            except RuntimeError:
                accepted = f"a shape that broadcasts to {list(input.shape)}"
                raise InvalidArgument("mask", f"shape {list(mask.shape)}", accepted) from None
    return softmax_fwd(input, mask, axes, log, empty_zero, dtype)


def softmax(input, dim=None, _stacklevel=3, dtype=None, *, mask=None, empty_zero=False):
    """``exp(input) / sum(exp(input))`` over an axis or several.

    Parameters
    ----------
    input : torch.Tensor
        Any shape and strides; float64, float32, float16 or bfloat16.
    dim : int or tuple of int
        What the sums go over. Without it an axis is guessed from the rank, as the framework does.
    dtype : torch.dtype, optional
        The result's type; the input is converted first where that is no widening to float32.
    mask : torch.Tensor, optional
        Truth values, broadcast to the input's shape; false leaves an element out.
    empty_zero : bool
        Zeros where all elements are minus infinity or left out, instead of NaN.

    Returns
    -------
    torch.Tensor
        Dense, its axes in the input's order in memory.

    Raises
    ------
    InvalidArgument
        An axis that the input does not have; a mask of another type or shape.

    Examples
    --------
    >>> softmax(torch.tensor([[0.0, 0.0], [0.0, float("-inf")]]), dim=1)
    tensor([[0.5000, 0.5000],
            [1.0000, 0.0000]])
    """
    return _softmax(input, dim, dtype, False, mask, empty_zero)


def log_softmax(input, dim=None, _stacklevel=3, dtype=None, *, mask=None, empty_zero=False):
    """The logarithm of `softmax`, without its rounding; arguments as there.

    Examples
    --------
    >>> log_softmax(torch.tensor([0.0, -1000.0]), dim=0)
    tensor([    0., -1000.])
    """
    return _softmax(input, dim, dtype, True, mask, empty_zero)


def softmin(input, dim=None, _stacklevel=3, dtype=None):
    """`softmax` of the negated input.

    Examples
    --------
    >>> softmin(torch.tensor([0.0, float("inf")]), dim=0)
    tensor([1., 0.])
    """
    if not isinstance(input, torch.Tensor):
        raise InvalidArgument("input", type(input).__name__, "a torch tensor")
    return _softmax(-input, dim, dtype, False, None, False)
