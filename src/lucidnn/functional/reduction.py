"""Reductions on tensors: the operators, their gradients, and the functions with the framework's names.

Some of the names are also Python's (`sum`, `max`, `min`): this module uses none of those itself. The definitions and
what becomes of NaN and ties are in `lucidnn.ops.reduction`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ..core.descriptor import TensorDescriptor, short_dtype
from ..core.errors import InvalidArgument, NotSupported
from ..core.operation import Epilogue
from ..ops.pointwise import like
from ..ops.reduction import EXTREMES, ReduceBwd, ReduceFwd, reduced_shape
from ._library import Described, Op, Planned, axes_of

_FWD = "Tensor x, Tensor? z, str mode, int[] axes, bool keep, float alpha, float beta"


def _describe(tensors: Any, mode, axes, keep, alpha, beta, dtype, index_type) -> Described:
    op = ReduceFwd(mode=mode, axes=tuple(axes), keep=keep, index_type=index_type)
    given: dict[str, Any] = dict(zip(("x", "z"), tensors, strict=True))
    if dtype is not None:
        x = TensorDescriptor.of(tensors[0])
        shape = op.with_axes(x).infer({"x": x})["y"].shape
        given["y"] = TensorDescriptor(short_dtype(dtype), shape)
    return op, {"tensors": given, "epilogue": Epilogue(alpha, beta)}


def _fwd(tensors: Any, attributes: Any) -> Described:
    mode, axes, keep, alpha, beta, dtype = attributes
    return _describe(tensors, mode, axes, keep, alpha, beta, dtype, "none")


def _fwd_index(tensors: Any, attributes: Any) -> Described:
    mode, axes, keep, alpha, beta, index_dtype = attributes
    return _describe(tensors, mode, axes, keep, alpha, beta, None, short_dtype(index_dtype))


def _bwd(tensors: Any, attributes: Any) -> Described:
    shape, mode, axes, keep, alpha = attributes
    given: dict[str, Any] = dict(zip(("dy", "x", "y", "index"), tensors, strict=True))
    dy, x = tensors[:2]
    given["dx"] = TensorDescriptor(short_dtype(dy.dtype), shape) if x is None else like(TensorDescriptor.of(x))
    return ReduceBwd(mode, tuple(axes), keep), {"tensors": given, "epilogue": Epilogue(alpha)}


def _shape(x: torch.Tensor, axes: Any, keep: bool) -> tuple[Any, ...]:
    chosen = tuple(axis % x.ndim for axis in axes) if axes else tuple(range(x.ndim))
    return reduced_shape(tuple(x.shape), chosen, keep)


def _fwd_fake(x, z, mode, axes, keep, alpha, beta, dtype):
    return x.new_empty(_shape(x, axes, keep), dtype=dtype)


def _fwd_index_fake(x, z, mode, axes, keep, alpha, beta, index_dtype):
    shape = _shape(x, axes, keep)
    return x.new_empty(shape), x.new_empty(shape, dtype=index_dtype)


def _restored(t: torch.Tensor, shape: Sequence[int], axes: Any, keep: bool) -> torch.Tensor:
    """A tensor of y's shape with the reduced axes back, spread out over them."""
    if not keep and t.ndim < len(shape):
        for axis in sorted(a % len(shape) for a in axes) if axes else range(len(shape)):
            t = t.unsqueeze(axis)
    return t.expand(tuple(shape))


def _plain(args: Any, outputs: Any) -> torch.Tensor:
    """The result without factors, which the gradient reads: the output, or computed again."""
    x, _, mode, axes, keep = args[:5]
    return outputs[0] if outputs else reduce_fwd(x, None, mode, axes, keep, 1.0, 0.0, None)


def _fwd_backward(needs, args, outputs, grads):
    x, z, mode, axes, keep, alpha, beta = args[:7]
    dy = grads[0]
    dz = (beta * dy).to(z.dtype) if needs[1] else None
    if not needs[0]:
        return None, dz
    count = _count(x.shape, axes)
    if mode in ("add", "avg"):
        factor = alpha / count if mode == "avg" and count else alpha
        return _restored((dy if factor == 1.0 else factor * dy).to(x.dtype), x.shape, axes, keep), dz
    if mode == "mul" and torch.is_grad_enabled():  # it will be differentiated again
        return (_restored(alpha * dy, x.shape, axes, keep) * _others(x, axes)).to(x.dtype), dz
    y = None if mode in ("norm1", "mul") else _plain(args, outputs).to(x.dtype)
    return reduce_bwd(dy, x, y, None, x.shape, mode, axes, keep, alpha), dz


def _fwd_index_backward(needs, args, outputs, grads):
    x, z, mode, axes, keep, alpha, beta, _ = args
    dy = grads[0]
    dz = (beta * dy).to(z.dtype) if needs[1] else None
    if not needs[0]:
        return None, dz
    source = x if mode == "amax" else None
    return reduce_bwd(dy, source, None, outputs[1], x.shape, mode, axes, keep, alpha).to(x.dtype), dz


def _count(shape: Sequence[int], axes: Any) -> int:
    return math.prod(shape[axis] for axis in axes) if axes else math.prod(shape)


def _others(x: torch.Tensor, axes: Any) -> torch.Tensor:
    """For every point the product of the other points that are reduced with it, zeros among them or not."""
    chosen = sorted(axis % x.ndim for axis in axes) if axes else [*range(x.ndim)]
    order = [axis for axis in range(x.ndim) if axis not in chosen] + chosen
    moved = x.permute(order)
    line = moved.reshape(*moved.shape[: x.ndim - len(chosen)], _count(x.shape, axes))
    one = torch.ones_like(line[..., :1])
    before = torch.cat([one, line[..., :-1]], -1).cumprod(-1)
    after = torch.cat([one, line.flip(-1)[..., :-1]], -1).cumprod(-1).flip(-1)
    return (before * after).reshape(moved.shape).permute([order.index(axis) for axis in range(x.ndim)])


def _bwd_backward(needs, args, outputs, grads):
    """In plain tensor arithmetic: dx is linear in dy, with a factor that only norms and products take from x and y."""
    dy, x, y, index, shape, mode, axes, keep, alpha = args
    (ddx,) = grads
    ddy = dx = d_y = None
    if needs[0] and mode in ("add", "avg"):
        ddy = reduce_fwd(ddx, None, mode, axes, keep, alpha, 0.0, dy.dtype)
    elif needs[0]:
        factor = reduce_bwd(torch.ones_like(dy), x, y, index, shape, mode, axes, keep, alpha)
        ddy = reduce_fwd(ddx * factor, None, "add", axes, keep, 1.0, 0.0, dy.dtype)
    if needs[1] and mode == "mul":
        with torch.enable_grad():
            again = x.detach().requires_grad_()
            through = _others(again, axes) * (alpha * ddx * _restored(dy, shape, axes, keep)).detach()
            (dx,) = torch.autograd.grad(through.sum(), again)
    elif mode in ("norm2", "mul_no_zeros") and (needs[1] or needs[2]):
        weight, wide = alpha * ddx * _restored(dy, shape, axes, keep), _restored(y, shape, axes, keep)
        divisor = wide if mode == "norm2" else x
        weight = torch.where(divisor == 0, torch.zeros_like(weight), weight)
        safe = torch.where(divisor == 0, torch.ones_like(divisor), divisor)
        by_x = weight / safe if mode == "norm2" else -weight * wide / safe**2
        by_y = -weight * x / safe**2 if mode == "norm2" else weight / safe
        dx = by_x.to(x.dtype) if needs[1] else None
        d_y = reduce_fwd(by_y, None, "add", axes, keep, 1.0, 0.0, y.dtype) if needs[2] else None
    else:  # straight lines between kinks
        dx = torch.zeros_like(x) if needs[1] else None
        d_y = torch.zeros_like(y) if needs[2] else None
    return ddy, dx, d_y, None


reduce_fwd = Op(
    f"reduce_fwd({_FWD}, ScalarType? dtype) -> Tensor",
    2,
    Planned(_fwd),
    _fwd_fake,
    _fwd_backward,
    saves_output=lambda args: (
        args[2] in ("norm2", "mul_no_zeros", *EXTREMES) and args[5:7] == (1.0, 0.0) and args[7] in (None, args[0].dtype)
    ),
)
reduce_fwd_index = Op(
    f"reduce_fwd_index({_FWD}, ScalarType index_dtype) -> (Tensor, Tensor)",
    2,
    Planned(_fwd_index),
    _fwd_index_fake,
    _fwd_index_backward,
    saves_output=lambda args: True,
)
reduce_bwd = Op(
    "reduce_bwd(Tensor dy, Tensor? x, Tensor? y, Tensor? index, SymInt[] x_shape, str mode, int[] axes, bool keep, "
    "float alpha) -> Tensor",
    4,
    Planned(_bwd),
    lambda dy, x, y, index, x_shape, *rest: dy.new_empty(x_shape) if x is None else torch.empty_like(x),
    _bwd_backward,
)


class ValueIndex(NamedTuple):
    """What `max` and `min` along an axis give, as the framework does."""

    values: torch.Tensor
    indices: torch.Tensor


def _axes(input: torch.Tensor, dim: Any, name: str = "dim") -> tuple[int, ...]:
    if not isinstance(input, torch.Tensor):
        raise InvalidArgument("input", type(input).__name__, "a torch tensor")
    if dim is None:
        return ()
    axes = axes_of(dim, name)
    limit = input.ndim or 1
    for axis in axes:
        if not isinstance(axis, int) or not -limit <= axis < limit:
            raise InvalidArgument(name, repr(dim), f"axes from {-limit} to {limit - 1}")
    if len({axis % limit for axis in axes}) < len(axes):
        raise InvalidArgument(name, repr(dim), "every axis once")
    return axes if input.ndim else ()


def _reduced(input: Any, mode: str, dim: Any, keepdim: bool, dtype: torch.dtype | None) -> torch.Tensor:
    axes = _axes(input, dim)
    if dtype is not None and dtype != input.dtype and not (input.itemsize < dtype.itemsize):
        input = input.to(dtype)  # the framework converts first; into a wider type the result is the same
    return reduce_fwd(input, None, mode, axes, bool(keepdim), 1.0, 0.0, None if dtype == input.dtype else dtype)


def sum(input, dim=None, keepdim=False, *, dtype=None):
    """Sum over some axes, or all.

    Parameters
    ----------
    input : torch.Tensor
        Any shape and strides; float64, float32, float16 or bfloat16 (summed in float32).
    dim : int or tuple of int, optional
        The axes that go; all if left out or empty.
    keepdim : bool
        Whether they stay, with size 1.
    dtype : torch.dtype, optional
        Of the result.

    Returns
    -------
    torch.Tensor

    Raises
    ------
    InvalidArgument
        An axis that is not there or is named twice, a type that is no floating-point type.

    Examples
    --------
    >>> sum(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), 0)
    tensor([4., 6.])
    """
    return _reduced(input, "add", dim, keepdim, dtype)


def mean(input, dim=None, keepdim=False, *, dtype=None):
    """Mean over some axes, or all; NaN over no point. Arguments as for `sum`.

    Examples
    --------
    >>> mean(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), 1, keepdim=True)
    tensor([[1.5000],
            [3.5000]])
    """
    return _reduced(input, "avg", dim, keepdim, dtype)


def prod(input, dim=None, keepdim=False, *, dtype=None):
    """Product over some axes, or all. Arguments as for `sum`.

    Examples
    --------
    >>> prod(torch.tensor([[1.0, 2.0], [3.0, 4.0]])).item()
    24.0
    """
    return _reduced(input, "mul", dim, keepdim, dtype)


def amax(input, dim=(), keepdim=False):
    """Largest value over some axes, or all; the gradient is shared evenly by those equal to it. NaN counts as largest.

    Arguments as for `sum`; an axis that is reduced has at least one point.

    Examples
    --------
    >>> amax(torch.tensor([[1.0, 5.0], [3.0, 4.0]]), 1)
    tensor([5., 4.])
    """
    return _reduced(input, "max", dim, keepdim, None)


def amin(input, dim=(), keepdim=False):
    """Smallest value; otherwise as `amax`.

    Examples
    --------
    >>> amin(torch.tensor([[1.0, 5.0], [3.0, 4.0]]), (0, 1)).item()
    1.0
    """
    return _reduced(input, "min", dim, keepdim, None)


def _extreme(input: Any, mode: str, dim: int | None, keepdim: bool) -> Any:
    if dim is None:
        return _reduced(input, mode, None, False, None)
    axes = _axes(input, dim)
    return ValueIndex(*reduce_fwd_index(input, None, mode, axes, bool(keepdim), 1.0, 0.0, torch.int64))


def max(input, dim=None, keepdim=False):
    """Largest value along an axis and its place there; without an axis the largest value of all.

    Parameters
    ----------
    input : torch.Tensor
        As for `sum`.
    dim : int, optional
    keepdim : bool

    Returns
    -------
    ValueIndex of (values, indices), or torch.Tensor
        Of equal values the first; NaN counts as the largest. The gradient goes to the place that the index names.

    Examples
    --------
    >>> max(torch.tensor([[1.0, 5.0, 5.0]]), 1)
    ValueIndex(values=tensor([5.]), indices=tensor([1]))
    """
    return _extreme(input, "max", dim, keepdim)


def min(input, dim=None, keepdim=False):
    """Smallest value along an axis and its place there; otherwise as `max`.

    Examples
    --------
    >>> min(torch.tensor([[1.0, 5.0, 5.0]])).item()
    1.0
    """
    return _extreme(input, "min", dim, keepdim)


def vector_norm(x, ord: Any = 2, dim=None, keepdim=False, *, dtype=None):
    """Norm over some axes, or all, as of one long vector.

    Parameters
    ----------
    x : torch.Tensor
        As `sum`'s input.
    ord : {1, 2, inf}
        Sum of magnitudes, root of the sum of squares, largest magnitude.
    dim, keepdim, dtype
        As for `sum`.

    Examples
    --------
    >>> vector_norm(torch.tensor([3.0, -4.0])).item(), vector_norm(torch.tensor([3.0, -4.0]), 1).item()
    (5.0, 7.0)
    """
    mode = {1: "norm1", 2: "norm2", math.inf: "amax"}.get(ord)
    if mode is None:
        raise NotSupported(f"the norm of order {ord}; accepted: 1, 2, inf")
    return _reduced(x, mode, dim, keepdim, dtype)


def norm(input, p="fro", dim=None, keepdim=False, dtype=None):
    """As `vector_norm`, with the framework's older name and arguments.

    Examples
    --------
    >>> norm(torch.tensor([[3.0, -4.0]]), dim=1)
    tensor([5.])
    """
    return vector_norm(input, 2 if p == "fro" else p, dim, keepdim, dtype=dtype)


def reduce_tensor(
    input, mode, dim=None, keepdim=True, *, alpha=1.0, beta=0.0, z=None, return_indices=False, index_dtype=torch.int64
):
    """``alpha * reduction + beta * z``: cuDNN's reduction with all that it can do.

    Parameters
    ----------
    input : torch.Tensor
        As for `sum`.
    mode : {'add', 'mul', 'min', 'max', 'amax', 'avg', 'norm1', 'norm2', 'mul_no_zeros'}
        `amax` is the largest magnitude here, as in cuDNN.
    dim, keepdim
        As for `sum`.
    alpha, beta : float
    z : torch.Tensor, optional
        Of the result's shape; where `beta` is not 0.
    return_indices : bool
        For min, max and amax: also the place among the reduced points, in logical order.
    index_dtype : {torch.int64, torch.int32}

    Returns
    -------
    torch.Tensor, or ValueIndex

    Examples
    --------
    >>> reduce_tensor(torch.tensor([[1.0, 0.0, 4.0]]), "mul_no_zeros", 1, alpha=0.5)
    tensor([[2.]])
    """
    axes = _axes(input, dim)
    if return_indices:
        given = (mode, axes, bool(keepdim), float(alpha), float(beta), index_dtype)
        return ValueIndex(*reduce_fwd_index(input, z, *given))
    return reduce_fwd(input, z, mode, axes, bool(keepdim), float(alpha), float(beta), None)
