"""Normalization by an L_p norm: `normalize` and `weight_norm`.

Second derivatives are those of the plain formula, taken by the framework: right, and no faster than that.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from ..core.errors import InvalidArgument
from ..ops.lp_normalization import LpNormalizeBwd, LpNormalizeFwd
from ._library import Described, Op, Planned
from ._names import renamed
from ._normalization import _all_of, _named, _wide, differentiated_twice, statistics_type

_ATTRIBUTES = "int[] axes, float p, float eps"
_NORMALIZE = {"x": "input", "axes": "dim"}
_WEIGHT_NORM = {"x": "v", "scale": "g"}


def _plain(x: torch.Tensor, scale: Any, axes: Any, p: float, eps: float) -> torch.Tensor:
    """The formula in differentiable tensor arithmetic."""
    v = _wide(x)
    norm = torch.linalg.vector_norm(v, p, axes, keepdim=True)
    norm = norm.clamp_min(eps) if eps > 0 else norm
    return (v / norm if scale is None else v * (scale / norm)).to(x.dtype)


def _fwd(tensors: Any, attributes: Any) -> Described:
    axes, p, eps = attributes
    return LpNormalizeFwd(tuple(axes), p, eps), {"tensors": {"x": tensors[0], "scale": tensors[1]}}


def _bwd(tensors: Any, attributes: Any) -> Described:
    axes, p, eps, wanted = attributes
    given = dict(zip(("dy", "x", "norm", "scale"), tensors, strict=True))
    return LpNormalizeBwd(tuple(axes), p, eps, _named(wanted, ("dx", "dscale"))), {"tensors": given}


def _fwd_backward(needs, args, outputs, grads):
    x, scale, *attributes = args
    found = lp_normalize_bwd(grads[0], x, outputs[0], scale, *attributes, [needs[0], needs[1]])
    return tuple(t if need else None for t, need in zip(found, needs, strict=True))


def _bwd_backward(needs, args, outputs, grads):
    dy, x, _, scale, axes, p, eps, wanted = args
    grads = [grad if flag else None for grad, flag in zip(grads, wanted, strict=True)]
    d_dy, dx, dscale = differentiated_twice(
        lambda v, s: _plain(v, s, axes, p, eps), dy, (x, scale), grads, (needs[0], needs[1], needs[3])
    )
    return d_dy, dx, None, dscale


def _norm_shape(x: torch.Tensor, axes: Any) -> list[Any]:
    over = {axis % max(x.ndim, 1) for axis in axes}
    return [1 if axis in over else n for axis, n in enumerate(x.shape)]


def _fwd_fake(x, scale, axes, p, eps):
    return torch.empty_like(x), x.new_empty(_norm_shape(x, axes), dtype=statistics_type(x))


def _bwd_fake(dy, x, norm, scale, axes, p, eps, wanted):
    dx = torch.empty_like(x) if wanted[0] else x.new_empty(0)
    return dx, x.new_empty(_norm_shape(x, axes)) if wanted[1] else x.new_empty(0)


lp_normalize_fwd = Op(
    f"lp_normalize_fwd(Tensor x, Tensor? scale, {_ATTRIBUTES}) -> (Tensor, Tensor)",
    2,
    Planned(_fwd),
    _fwd_fake,
    _fwd_backward,
    saves_output=lambda args: (1,),
    differentiable=1,
)
lp_normalize_bwd = Op(
    f"lp_normalize_bwd(Tensor dy, Tensor x, Tensor norm, Tensor? scale, {_ATTRIBUTES}, bool[2] wanted)"
    " -> (Tensor, Tensor)",
    4,
    Planned(_bwd, finish=_all_of),
    _bwd_fake,
    _bwd_backward,
)


def normalize(input, p=2.0, dim=1, eps=1e-12):
    """Divide by the L_p norm over an axis or several: ``input / max(norm, eps)``.

    Parameters
    ----------
    input : torch.Tensor
        Any shape and strides; float64, float32, float16 or bfloat16.
    p : float
        Above 0; inf for the largest magnitude.
    dim : int or tuple of int
        What a norm goes over.
    eps : float
        The least that is divided by.

    Returns
    -------
    torch.Tensor
        Dense, its axes in the input's order in memory.

    Raises
    ------
    InvalidArgument
        An axis that the input does not have, p that is not above 0, eps below 0.

    Notes
    -----
    The definition is in `lucidnn.ops.lp_normalization`; ``torch.ops.lucidnn.lp_normalize_fwd`` gives the norms too.

    Examples
    --------
    >>> normalize(torch.tensor([[3.0, 4.0], [0.0, 0.0]]))
    tensor([[0.6000, 0.8000],
            [0.0000, 0.0000]])
    >>> normalize(torch.tensor([[1.0, -4.0]]), p=math.inf)
    tensor([[ 0.2500, -1.0000]])
    """
    if not isinstance(input, torch.Tensor):
        raise InvalidArgument("input", type(input).__name__, "a torch tensor")
    axes = (dim,) if isinstance(dim, int) else tuple(dim)
    if input.ndim == 0:
        if any(axis not in (0, -1) for axis in axes):
            raise InvalidArgument("dim", list(axes), "0 or -1 for a tensor without axes")
        return normalize(input.reshape(1), p, 0, eps).reshape(())
    try:
        return lp_normalize_fwd(input, None, axes, float(p), float(eps))[0]
    except InvalidArgument as error:
        raise renamed(error, _NORMALIZE) from None


def weight_norm(v, g, dim=0):
    """A weight from its direction and its length: ``g * v / norm(v)``, a norm for every index along `dim`.

    Parameters
    ----------
    v : torch.Tensor
        Any shape and strides, at least one axis; float64, float32, float16 or bfloat16.
    g : torch.Tensor
        The lengths, of v's type: as many as v has indices along `dim`, their shape v's with 1 elsewhere.
    dim : int or None
        The axis that has a length for each index; None or -1, as in the framework, for one length in all.

    Returns
    -------
    torch.Tensor
        Dense, its axes in v's order in memory. NaN where the norm is 0.

    Raises
    ------
    InvalidArgument
        An axis that v does not have; lengths of another number or type.

    Examples
    --------
    >>> weight_norm(torch.tensor([[3.0, 4.0], [0.0, 2.0]]), torch.tensor([[10.0], [1.0]]))
    tensor([[6., 8.],
            [0., 1.]])
    """
    for name, t in (("v", v), ("g", g)):
        if not isinstance(t, torch.Tensor):
            raise InvalidArgument(name, type(t).__name__, "a torch tensor")
    if v.ndim == 0:
        raise InvalidArgument("v", "a tensor without axes", "at least one axis")
    if dim is None or dim == -1:
        shape, kept = [1] * v.ndim, -1
    elif 0 <= dim < v.ndim:
        shape, kept = [n if axis == dim else 1 for axis, n in enumerate(v.shape)], dim
    else:
        raise InvalidArgument("dim", dim, f"0 to {v.ndim - 1}, None or -1")
    if g.numel() != math.prod(shape):
        raise InvalidArgument("g", f"shape {list(g.shape)}", f"shape {shape}")
    if tuple(g.shape) != tuple(shape):
        g = g.reshape(shape)
    axes = tuple(axis for axis in range(v.ndim) if axis != kept)
    if not axes:  # one axis, and a norm for each of its elements: as a column
        return weight_norm(v[:, None], g[:, None], 0)[:, 0]
    try:
        return lp_normalize_fwd(v, g, axes, 2.0, 0.0)[0]
    except InvalidArgument as error:
        raise renamed(error, _WEIGHT_NORM) from None
