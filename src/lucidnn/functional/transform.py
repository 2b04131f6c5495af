"""Tensors in another layout, type or size: `transform_tensor`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..core.descriptor import TensorDescriptor, short_dtype
from ..core.errors import InvalidArgument
from ..core.operation import Epilogue
from ..ops.pointwise import like
from ..ops.transform import TransformTensor
from ._library import Described, Op, Planned, dense, last, new_empty
from .elementwise import pointwise_tensor

_FORMATS = {
    torch.contiguous_format: ("first", None),
    torch.channels_last: ("last", 4),
    torch.channels_last_3d: ("last", 5),
}


def _operation(padding: Sequence[int], value: float, fold: Sequence[int], unfold: bool) -> TransformTensor:
    return TransformTensor(tuple(zip(padding[::2], padding[1::2], strict=True)), value, tuple(fold), unfold)


def _describe(tensors: Any, attributes: Any) -> Described:
    alpha, beta, *what, dtype, layout = attributes
    x, z = tensors
    op = _operation(*what)
    described = TensorDescriptor.of(x)
    op.resolved({"x": described})  # which says what is wrong before a shape is worked out
    kind = short_dtype(dtype or x.dtype)
    y = like(described, kind) if layout == "same" else dense(x, op.shape(described.shape), layout == "last", dtype)
    return op, {"tensors": {"x": x, "z": z, "y": y}, "epilogue": Epilogue(alpha=alpha, beta=beta)}


def _fake(x, z, alpha, beta, padding, value, fold, unfold, dtype, layout):
    if layout == "same":
        return torch.empty_like(x, dtype=dtype or x.dtype)
    shape = _operation(padding, value, fold, unfold).shape(tuple(x.shape))
    return new_empty(x, shape, layout == "last", dtype or x.dtype)


def _backward(needs, args, outputs, grads):
    x, z, alpha, beta, padding, value, fold, unfold, _, layout = args
    (dy,) = grads
    dx = dz = None
    if needs[0]:
        if layout != "same":
            layout = "last" if last(x) else "first"
        opposite = [-n for n in padding]
        dx = transform_fwd(dy, None, alpha, 0.0, opposite, 0.0, fold, bool(fold) and not unfold, x.dtype, layout)
    if needs[1]:
        dz = (beta * dy).to(z.dtype)
    return dx, dz


transform_fwd = Op(
    "transform_tensor(Tensor x, Tensor? z, float alpha, float beta, int[] padding, float value, int[] fold, "
    "bool unfold, ScalarType? dtype, str layout) -> Tensor",
    2,
    Planned(_describe),
    _fake,
    _backward,
)


def _pairs(padding: Any, ndim: int) -> list[int]:
    """One number or (before, after) for each axis, as one list."""
    if padding is None:
        return []
    found: list[int] = []
    for one in padding if isinstance(padding, (tuple, list)) else [padding]:
        pair = tuple(one) if isinstance(one, (tuple, list)) else (one, one)
        if len(pair) != 2 or not all(isinstance(n, int) for n in pair):
            raise InvalidArgument("padding", repr(padding), f"a number or a pair of numbers for each of {ndim} axes")
        found += pair
    if len(found) != 2 * ndim:
        raise InvalidArgument("padding", repr(padding), f"a number or a pair of numbers for each of {ndim} axes")
    return found


def transform_tensor(
    x, *, alpha=1.0, dtype=None, memory_format=None, beta=0.0, y=None, padding=None, value=0.0, fold=None, unfold=False
):
    """``alpha * T(x) + beta * y`` in another type, layout or size: cuDNN's transform-tensor, in one pass.

    Parameters
    ----------
    x : torch.Tensor
        Any shape and strides, up to 5 axes where it is padded or folded; floating-point, whole numbers or bool.
    alpha, beta : float
    dtype : torch.dtype, optional
        Floating-point values become the nearest whole number, cut off at the type's limits.
    memory_format : {None, torch.contiguous_format, torch.channels_last, torch.channels_last_3d}
        Of the result; as x if left out.
    y : torch.Tensor, optional
        Of the result's shape, where `beta` is not 0.
    padding : sequence of int or of (int, int), optional
        Elements before and after, for each axis; negative numbers take elements away. Added before folding, after
        unfolding.
    value : float
        What padding is made of; `alpha` does not scale it.
    fold : sequence of int, optional
        For each axis from the third on, how many neighbours become channels: channel ``(c, i, j)`` holds pixel
        ``(h * f + i, w * g + j)`` of channel c.
    unfold : bool
        From channels to pixels, the inverse.

    Returns
    -------
    torch.Tensor

    Raises
    ------
    InvalidArgument
        Names the argument that does not fit, and what would.

    Notes
    -----
    Differentiable any number of times, where the types are floating-point ones.

    Examples
    --------
    >>> transform_tensor(torch.tensor([1.5, -300.0]), dtype=torch.int8)
    tensor([   2, -128], dtype=torch.int8)
    >>> transform_tensor(torch.tensor([[1.0, 2.0]]), padding=(0, (1, 2)), value=9.0)
    tensor([[9., 1., 2., 9., 9.]])
    >>> pixels = torch.arange(8.0).reshape(1, 1, 2, 4)
    >>> folded = transform_tensor(pixels, fold=(2, 2))
    >>> folded
    tensor([[[[0., 2.]],
    <BLANKLINE>
             [[1., 3.]],
    <BLANKLINE>
             [[4., 6.]],
    <BLANKLINE>
             [[5., 7.]]]])
    >>> torch.equal(transform_tensor(folded, fold=(2, 2), unfold=True), pixels)
    True
    """
    if not isinstance(x, torch.Tensor):
        raise InvalidArgument("x", type(x).__name__, "a torch tensor")
    pads, factors = _pairs(padding, x.ndim), list(fold) if fold is not None else []
    plain = not any(pads) and all(f == 1 for f in factors)
    layout = "same" if plain else "last" if last(x) else "first"
    if memory_format not in (None, torch.preserve_format):
        layout, ndim = _FORMATS.get(memory_format, ("", None))
        if not layout or ndim not in (None, x.ndim):
            raise InvalidArgument("memory_format", memory_format, f"one that tensors of {x.ndim} axes have")
    if plain and not 1 <= x.ndim <= 5:
        found = pointwise_tensor("identity", x, alpha1=alpha, beta=beta, z=y, dtype=dtype)
        return found.contiguous() if layout == "first" else found
    if dtype is not None and not dtype.is_floating_point:
        x, y = x.detach(), None if y is None else y.detach()  # such a result has no gradient
    attributes = (float(alpha), float(beta), tuple(pads), float(value), tuple(factors), bool(unfold))
    return transform_fwd(x, y, *attributes, dtype, layout)
