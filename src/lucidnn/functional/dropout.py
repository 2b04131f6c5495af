"""Dropout on tensors: the operators, their gradients, and the framework's dropout functions."""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch

from ..core.errors import InvalidArgument
from ..core.operation import Epilogue
from ..ops.dropout import DropoutBwd, DropoutFwd
from ._library import Described, Op, Planned
from ._random import DropoutGenerator, next_state

_ALPHA = 1.7580993408473766  # of SELU: scale times alpha


def _given(tensors: Any) -> dict[str, Any]:
    x, state, z = tensors
    return {"tensors": {"x": x, "state": state, "z": z}, "epilogue": Epilogue(beta=0.0 if z is None else 1.0)}


def _fwd(tensors: Any, attributes: Any) -> Described:
    return DropoutFwd(*attributes), _given(tensors)


def _fwd_mask(tensors: Any, attributes: Any) -> Described:
    return DropoutFwd(*attributes, keep_mask=True), _given(tensors)


def _bwd(tensors: Any, attributes: Any) -> Described:
    dy, state = tensors
    return DropoutBwd(*attributes), {"tensors": {"dy": dy, "state": state}}


def _fwd_backward(needs, args, outputs, grads):
    _, state, _, *attributes = args
    dx = dropout_bwd(grads[0], state, *attributes) if needs[0] else None
    return dx, None, grads[0] if needs[2] else None


def _bwd_backward(needs, args, outputs, grads):
    _, state, *attributes = args
    return dropout_bwd(grads[0], state, *attributes) if needs[0] else None, None


dropout_fwd = Op(
    "dropout_fwd(Tensor x, Tensor state, Tensor? z, float p, bool feature) -> Tensor",
    3,
    Planned(_fwd),
    lambda x, state, z, p, feature: torch.empty_like(x),
    _fwd_backward,
    unread=lambda args: (0, 2),
)
dropout_fwd_mask = Op(
    "dropout_fwd_mask(Tensor x, Tensor state, Tensor? z, float p, bool feature) -> (Tensor, Tensor)",
    3,
    Planned(_fwd_mask),
    lambda x, state, z, p, feature: (torch.empty_like(x), torch.empty_like(x, dtype=torch.bool)),
    _fwd_backward,
    unread=lambda args: (0, 2),
)
dropout_bwd = Op(
    "dropout_bwd(Tensor dy, Tensor state, float p, bool feature) -> Tensor",
    2,
    Planned(_bwd),
    lambda dy, state, p, feature: torch.empty_like(dy),
    _bwd_backward,
    unread=lambda args: (0,),
)


def _checked(input: Any, p: float) -> None:
    if not isinstance(input, torch.Tensor):
        raise InvalidArgument("input", type(input).__name__, "a torch tensor")
    if not 0.0 <= p <= 1.0:
        raise InvalidArgument("p", p, "a probability from 0 to 1")


def _dropout(input, p, training, inplace, z, generator, feature):
    _checked(input, p)
    if not training or p == 0.0 or input.numel() == 0:
        result = input if z is None else input + z
    else:
        result = dropout_fwd(input, next_state(input.device, generator), z, float(p), feature)
    return input.copy_(result) if inplace and result is not input else result


def dropout(input, p=0.5, training=True, inplace=False, *, z=None, generator=None):
    """Zero each element with probability p and scale the others by ``1 / (1 - p)``.

    Parameters
    ----------
    input : torch.Tensor
        Any shape and strides; float64, float32, float16 or bfloat16.
    p : float
    training : bool
        Without it the input is given back.
    inplace : bool
        Write the result into the input.
    z : torch.Tensor, optional
        Of the input's shape, added to the result in the same pass.
    generator : DropoutGenerator, optional
        Where the random bits come from: by default the framework's generator, see ``torch.manual_seed``.

    Returns
    -------
    torch.Tensor

    Raises
    ------
    InvalidArgument
        p outside 0 to 1.

    Notes
    -----
    The definition is in `lucidnn.ops.dropout`. No mask is kept: the backward pass makes the bits anew.

    Examples
    --------
    >>> y = dropout(torch.ones(10000), 0.25)
    >>> sorted({round(v, 4) for v in y.tolist()}), 0.2 < (y == 0).float().mean().item() < 0.3
    ([0.0, 1.3333], True)
    """
    return _dropout(input, p, training, inplace, z, generator, False)


def _features(name: str, input: Any, p: float, batched: int, unbatched: tuple[int, ...]) -> bool:
    """Check the rank; gives whether the batch axis is missing."""
    _checked(input, p)
    if input.ndim != batched and input.ndim not in unbatched:
        accepted = " or ".join(str(n) for n in (*unbatched, batched))
        warnings.warn(f"{name}: an input of {input.ndim} axes; {accepted} are meant", stacklevel=3)
        if input.ndim < 2:
            raise InvalidArgument("input", f"{input.ndim} axes", "at least two: batch, channels")
    return input.ndim in unbatched


def _feature_dropout(input, p, training, inplace, generator, unbatched):
    if not unbatched:
        return _dropout(input, p, training, inplace, None, generator, True)
    return _dropout(input.unsqueeze(0), p, training, inplace, None, generator, True).squeeze(0)


def dropout1d(input, p=0.5, training=True, inplace=False, *, generator=None):
    """`dropout` of whole channels of (N, C, L) or (C, L): all elements of one live and die together.

    Examples
    --------
    >>> y = dropout1d(torch.ones(2, 50, 3), 0.5)
    >>> bool(((y == 0).all(2) | (y == 2).all(2)).all())
    True
    """
    return _feature_dropout(input, p, training, inplace, generator, _features("dropout1d", input, p, 3, (2,)))


def dropout2d(input, p=0.5, training=True, inplace=False, *, generator=None):
    """`dropout` of whole channels of (N, C, H, W); as in the framework, three axes are (N, C, L).

    Examples
    --------
    >>> dropout2d(torch.ones(1, 2, 2, 2), 1.0).sum().item()
    0.0
    """
    _features("dropout2d", input, p, 4, ())
    return _feature_dropout(input, p, training, inplace, generator, False)


def dropout3d(input, p=0.5, training=True, inplace=False, *, generator=None):
    """`dropout` of whole channels of (N, C, D, H, W) or (C, D, H, W).

    Examples
    --------
    >>> dropout3d(torch.ones(1, 2, 2, 2, 2), training=False).sum().item()
    16.0
    """
    return _feature_dropout(input, p, training, inplace, generator, _features("dropout3d", input, p, 5, (4,)))


def _alpha(input, p, training, inplace, generator, feature):
    _checked(input, p)
    if not training or p == 0.0 or input.numel() == 0:
        return input
    _, mask = dropout_fwd_mask(input.detach(), next_state(input.device, generator), None, float(p), feature)
    if p == 1.0:
        result = input * 0.0
    else:
        a = 1.0 / math.sqrt((_ALPHA * _ALPHA * p + 1.0) * (1.0 - p))
        shift = _ALPHA * a * p
        # kept: a x + shift; dropped: SELU's limit instead of x
        result = input * (mask * a).to(input.dtype) + torch.where(mask, shift, shift - _ALPHA * a).to(input.dtype)
    return input.copy_(result) if inplace else result


def alpha_dropout(input, p=0.5, training=False, inplace=False, *, generator=None):
    """Dropout that keeps mean and variance of SELU's outputs: dropped elements take its lower limit, and all are
    scaled and shifted.

    Examples
    --------
    >>> y = alpha_dropout(torch.randn(100000), 0.3, training=True)
    >>> abs(y.mean().item()) < 0.05, abs(y.std().item() - 1) < 0.05
    (True, True)
    """
    return _alpha(input, p, training, inplace, generator, False)


def feature_alpha_dropout(input, p=0.5, training=False, inplace=False, *, generator=None):
    """`alpha_dropout` of whole channels.

    Examples
    --------
    >>> feature_alpha_dropout(torch.ones(1, 4, 3), 0.5, training=True).unique(dim=2).shape
    torch.Size([1, 4, 1])
    """
    return _alpha(input, p, training, inplace, generator, True)


__all__ = [
    "DropoutGenerator",
    "alpha_dropout",
    "dropout",
    "dropout1d",
    "dropout2d",
    "dropout3d",
    "feature_alpha_dropout",
]
