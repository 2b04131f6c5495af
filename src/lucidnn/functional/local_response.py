"""Normalization of values by their neighbours: `local_response_norm` and `divisive_normalization`.

Second derivatives are those of the plain formula, taken by the framework: right, and no faster than that.
"""

from __future__ import annotations

from typing import Any

import torch

from ..core.errors import InvalidArgument
from ..ops.local_response import DivisiveNormBwd, DivisiveNormFwd, LrnBwd, LrnFwd
from ._library import Described, Op, Planned
from ._names import renamed
from ._normalization import differentiated_twice

_ATTRIBUTES = "int size, float alpha, float beta, float k"
_NAMES = {"x": "input", "lrn_alpha": "alpha", "lrn_beta": "beta", "lrn_k": "k"}


def _plain(u: torch.Tensor, op: Any) -> torch.Tensor:
    """The formula in differentiable tensor arithmetic."""
    v = u if u.dtype == torch.float64 else u.float()
    square, (before, after) = v * v, op.reach
    for axis in op.window_axes(u.ndim):
        zeros = [0, 0] * (u.ndim - 1 - axis) + [before, after]
        square = torch.nn.functional.pad(square, zeros).unfold(axis, op.size, 1).sum(-1)
    return (v * (op.lrn_k + op.factor(u.ndim) * square) ** -op.lrn_beta).to(u.dtype)


def _lrn_fwd(tensors: Any, attributes: Any) -> Described:
    return LrnFwd(*attributes), {"tensors": {"x": tensors[0]}}


def _lrn_bwd(tensors: Any, attributes: Any) -> Described:
    return LrnBwd(*attributes), {"tensors": {"dy": tensors[0], "x": tensors[1]}}


def _divisive_fwd(tensors: Any, attributes: Any) -> Described:
    return DivisiveNormFwd(*attributes), {"tensors": {"x": tensors[0], "means": tensors[1]}}


def _divisive_bwd(tensors: Any, attributes: Any) -> Described:
    dy, x, means = tensors
    return DivisiveNormBwd(*attributes), {"tensors": {"dy": dy, "x": x, "means": means}}


def _lrn_fwd_backward(needs, args, outputs, grads):
    x, *attributes = args
    return (lrn_bwd(grads[0], x, *attributes) if needs[0] else None,)


def _lrn_bwd_backward(needs, args, outputs, grads):
    dy, x, *attributes = args
    return tuple(differentiated_twice(lambda v: _plain(v, LrnBwd(*attributes)), dy, (x,), grads, needs))


def _divisive_fwd_backward(needs, args, outputs, grads):
    x, means, *attributes = args
    if not any(needs):
        return None, None
    dx = divisive_norm_bwd(grads[0], x, means, *attributes)
    return dx if needs[0] else None, -dx if needs[1] else None


def _divisive_bwd_backward(needs, args, outputs, grads):
    dy, x, means, *attributes = args
    u = x if means is None else x - means
    d_dy, d_u = differentiated_twice(
        lambda v: _plain(v, DivisiveNormBwd(*attributes)), dy, (u,), grads, (needs[0], needs[1] or needs[2])
    )
    return d_dy, d_u if needs[1] else None, -d_u if needs[2] and d_u is not None else None


lrn_fwd = Op(
    f"lrn_fwd(Tensor x, {_ATTRIBUTES}) -> Tensor",
    1,
    Planned(_lrn_fwd),
    lambda x, *attributes: torch.empty_like(x),
    _lrn_fwd_backward,
)
lrn_bwd = Op(
    f"lrn_bwd(Tensor dy, Tensor x, {_ATTRIBUTES}) -> Tensor",
    2,
    Planned(_lrn_bwd),
    lambda dy, x, *attributes: torch.empty_like(x),
    _lrn_bwd_backward,
)
divisive_norm_fwd = Op(
    f"divisive_norm_fwd(Tensor x, Tensor? means, {_ATTRIBUTES}) -> Tensor",
    2,
    Planned(_divisive_fwd),
    lambda x, means, *attributes: torch.empty_like(x),
    _divisive_fwd_backward,
)
divisive_norm_bwd = Op(
    f"divisive_norm_bwd(Tensor dy, Tensor x, Tensor? means, {_ATTRIBUTES}) -> Tensor",
    3,
    Planned(_divisive_bwd),
    lambda dy, x, means, *attributes: torch.empty_like(x),
    _divisive_bwd_backward,
)


def _checked(name: str, t: Any) -> torch.Tensor:
    if not isinstance(t, torch.Tensor):
        raise InvalidArgument(name, type(t).__name__, "a torch tensor")
    return t


def local_response_norm(input, size, alpha=1e-4, beta=0.75, k=1.0):
    """Divide every value by a power of the mean square of its neighbours across channels.

    ``input / (k + alpha * mean(squares of size channels))**beta``, channels outside counting as zeros.

    Parameters
    ----------
    input : torch.Tensor
        (batch, channels, one or more of space), any strides; float64, float32, float16 or bfloat16.
    size : int
        Channels of a window: ``size // 2`` before each, ``(size - 1) // 2`` after it.
    alpha, beta, k : float

    Returns
    -------
    torch.Tensor
        Dense, its axes in the input's order in memory.

    Raises
    ------
    InvalidArgument
        Fewer than three axes, a size below 1, a number that is not finite.

    Notes
    -----
    The definition is in `lucidnn.ops.local_response`.

    Examples
    --------
    >>> x = torch.tensor([[[1.0], [2.0], [0.0]]])
    >>> local_response_norm(x, 3, alpha=3.0, beta=1.0, k=0.0).flatten()
    tensor([0.2000, 0.4000, 0.0000])
    """
    if _checked("input", input).ndim < 3:
        raise InvalidArgument("input", f"shape {list(input.shape)}", "at least 3 axes: batch, channels, space")
    try:
        return lrn_fwd(input, size, float(alpha), float(beta), float(k))
    except InvalidArgument as error:
        raise renamed(error, _NAMES) from None


def divisive_normalization(input, size, alpha=1e-4, beta=0.75, k=1.0, means=None):
    """Divide every value by a power of the mean square around it in space: cuDNN's divisive normalization.

    ``u / (k + alpha * mean(squares of u, size points along every axis of space))**beta`` with ``u = input - means``.

    Parameters
    ----------
    input : torch.Tensor
        (batch, channels, one to three axes of space), any strides; float64, float32, float16 or bfloat16.
    size : int
        Points of a window along every axis of space.
    alpha, beta, k : float
    means : torch.Tensor, optional
        What is subtracted first: of the input's shape and type, such as the means of the neighbourhoods. With it this
        is the local contrast normalization of Jarrett et al.

    Returns
    -------
    torch.Tensor
        Dense, its axes in the input's order in memory.

    Raises
    ------
    InvalidArgument
        Fewer than three axes, a size below 1, means of another shape or type, a number that is not finite.

    Notes
    -----
    The definition is in `lucidnn.ops.local_response`.

    Examples
    --------
    >>> x = torch.tensor([[[1.0, 2.0, 0.0]]])
    >>> divisive_normalization(x, 3, alpha=3.0, beta=1.0, k=0.0).flatten()
    tensor([0.2000, 0.4000, 0.0000])
    """
    _checked("input", input)
    if means is not None:
        _checked("means", means)
    try:
        return divisive_norm_fwd(input, means, size, float(alpha), float(beta), float(k))
    except InvalidArgument as error:
        raise renamed(error, _NAMES) from None
