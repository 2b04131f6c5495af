"""Arithmetic point by point on tensors, with cuDNN's modes, scaling and addition, and its tensor utilities.

The modes are in `lucidnn.ops.elementwise.MODES`. Gradients are written in plain tensor arithmetic, so that they are
differentiable again to any order.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from ..core.descriptor import TensorDescriptor, short_dtype
from ..core.errors import InvalidArgument
from ..core.operation import Epilogue
from ..ops.elementwise import TRUTHS, ElementwiseFwd, promoted
from ..ops.pointwise import like
from ._library import Described, Op, Planned

_TWO_OVER_SQRT_PI = 2.0 / math.sqrt(math.pi)


def _describe(tensors: Any, attributes: Any) -> Described:
    mode, alpha1, alpha2, beta, axis, lower, upper, slope, dtype = attributes
    named = {"alpha1": alpha1, "alpha2": alpha2, "axis": axis, "lower": lower, "upper": upper, "slope": slope}
    op = ElementwiseFwd(mode=mode, **named)
    given: dict[str, Any] = dict(zip(("x", "b", "t", "z"), tensors, strict=True))
    if dtype is not None:
        described = {role: TensorDescriptor.of(t) for role, t in given.items() if t is not None}
        shape, x = op.shape(described), described["x"]
        short = short_dtype(dtype)
        given["y"] = like(x, short) if x.shape == shape else TensorDescriptor(short, shape)
    return op, {"tensors": given, "epilogue": Epilogue(beta=beta)}


def _fake(x, b, t, z, mode, alpha1, alpha2, beta, axis, lower, upper, slope, dtype):
    shape = torch.broadcast_shapes(*(v.shape for v in (x, b, t, z) if v is not None))
    if dtype is None:
        kinds = promoted([short_dtype(v.dtype) for v in (x, b) if v is not None])
        names = {short_dtype(d): d for d in _DTYPES}
        dtype = torch.bool if mode in TRUTHS else torch.int64 if mode == "gen_index" else names[kinds]
    if tuple(x.shape) == tuple(shape):
        return torch.empty_like(x, dtype=dtype)
    return x.new_empty(shape, dtype=dtype)


_DTYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8, torch.uint8,
    torch.bool,
)  # fmt: skip


def _half_at_ties(first: Callable[..., Any]) -> Callable[..., Any]:
    """Slopes of an extreme: all to the one that is it, a half each where both are, as the framework has it."""

    def slopes(v: Any, w: Any) -> tuple[Any, Any]:
        take = first(v, w).to(v.dtype) + 0.5 * (v == w).to(v.dtype)
        return take, 1.0 - take

    return slopes


# The slopes of a mode in its scaled inputs v and w.
_SLOPES: dict[str, Callable[..., tuple[Any, ...]]] = {
    "identity": lambda v: (1.0,),
    "add": lambda v, w: (1.0, 1.0),
    "add_square": lambda v, w: (1.0, 2.0 * w),
    "sub": lambda v, w: (1.0, -1.0),
    "mul": lambda v, w: (w, v),
    "div": lambda v, w: (1.0 / w, -v / (w * w)),
    "min": _half_at_ties(lambda v, w: v < w),
    "max": _half_at_ties(lambda v, w: v > w),
    "mod": lambda v, w: (1.0, -torch.trunc(v / w)),
    "pow": lambda v, w: (
        torch.where(w == 0, torch.zeros_like(v * w), w * v ** (w - 1.0)),
        torch.where((v == 0) & (w >= 0), torch.zeros_like(v * w), v**w * torch.log(v)),
    ),
    "abs": lambda v: (torch.sgn(v),),
    "ceil": lambda v: (0.0,),
    "floor": lambda v: (0.0,),
    "rsqrt": lambda v: (-0.5 * v**-1.5,),
    "sqrt": lambda v: (0.5 * v**-0.5,),
    "exp": lambda v: (torch.exp(v),),
    "log": lambda v: (1.0 / v,),
    "neg": lambda v: (-1.0,),
    "sin": lambda v: (torch.cos(v),),
    "cos": lambda v: (-torch.sin(v),),
    "tan": lambda v: (1.0 + torch.tan(v) ** 2,),
    "erf": lambda v: (_TWO_OVER_SQRT_PI * torch.exp(-v * v),),
    "reciprocal": lambda v: (-1.0 / (v * v),),
    "not": lambda v: (-1.0,),
}


def _summed(grad: torch.Tensor, t: Any) -> torch.Tensor:
    """A gradient of the result's shape, summed over where the tensor was repeated."""
    return grad.sum_to_size(t.shape).to(t.dtype)


def _backward(needs, args, outputs, grads):
    x, b, t, z, mode, alpha1, alpha2, beta, _, lower, upper, slope, _ = args
    (dy,) = grads
    dz = _summed(beta * dy, z) if needs[3] else None
    if not (needs[0] or needs[1]):
        return None, None, None, dz
    if mode == "relu":  # one pass; it can be differentiated again
        limits = (lower, upper, slope)
        dx = elementwise_fwd(dy, x, None, None, "relu_bwd", alpha1, alpha1, 0.0, 0, *limits, None)
        return _summed(dx, x), None, None, dz
    wide = torch.float64 if torch.float64 in [v.dtype for v in (x, b) if v is not None] else torch.float32
    v = x.to(wide) * alpha1
    given = (v,) if b is None else (v, b.to(wide) * alpha2)
    slopes: Any
    if mode == "clip":
        slopes = (((v > lower) & (v < upper)).to(wide),)
    elif mode == "relu_bwd":
        edge = given[-1]
        slopes = (
            torch.where(edge >= upper, 0.0, torch.where(edge <= lower, slope, 1.0).to(wide)),
            torch.zeros_like(edge),
        )
    elif mode == "binary_select":
        first = (t != 0).to(wide)
        slopes = (first, 1.0 - first)
    else:
        slopes = _SLOPES[mode](*given)
    dx = _summed((dy * slopes[0] * alpha1).expand(dy.shape), x) if needs[0] else None
    db = _summed((dy * slopes[1] * alpha2).expand(dy.shape), b) if needs[1] else None
    return dx, db, None, dz


elementwise_fwd = Op(
    "elementwise_fwd(Tensor x, Tensor? b, Tensor? t, Tensor? z, str mode, float alpha1, float alpha2, float beta, "
    "int axis, float lower, float upper, float slope, ScalarType? dtype) -> Tensor",
    4,
    Planned(_describe),
    _fake,
    _backward,
)


def _same_kind(x: torch.Tensor, other: Any) -> torch.Tensor | None:
    """A number as a tensor of x's type."""
    if other is None or isinstance(other, torch.Tensor):
        return other
    return torch.full((), other, dtype=x.dtype, device=x.device)


def pointwise_tensor(
    mode, x, b=None, t=None, *, alpha1=1.0, alpha2=1.0, beta=0.0, z=None, axis=0, lower=0.0, upper=0.0, slope=0.0,
    dtype=None,
):  # fmt: skip
    """One of cuDNN's pointwise modes: ``f(alpha1 * x, alpha2 * b, t) + beta * z``, broadcasting.

    Parameters
    ----------
    mode : str
        A name of `lucidnn.ops.elementwise.MODES`.
    x : torch.Tensor
        Any shape and strides; floating-point, whole numbers or bool.
    b : torch.Tensor or number, optional
        The second tensor, of floating-point or whole numbers as x.
    t : torch.Tensor, optional
        For binary_select: where it is not 0, x is taken.
    alpha1, alpha2, beta : float
    z : torch.Tensor, optional
        Where `beta` is not 0.
    axis : int
        For gen_index.
    lower, upper : float
        For clip, relu and relu_bwd.
    slope : float
        For relu and relu_bwd.
    dtype : torch.dtype, optional
        Of the result; what the inputs promote to, or bool, if left out.

    Returns
    -------
    torch.Tensor

    Raises
    ------
    InvalidArgument
        Shapes that do not broadcast, a tensor missing or too many, types that the mode has not.

    Examples
    --------
    >>> pointwise_tensor("add_square", torch.tensor([1.0, 2.0]), torch.tensor([[3.0], [4.0]]))
    tensor([[10., 11.],
            [17., 18.]])
    >>> pointwise_tensor("cmp_gt", torch.tensor([1, 5]), 3)
    tensor([False,  True])
    """
    if not isinstance(x, torch.Tensor):
        raise InvalidArgument("x", type(x).__name__, "a torch tensor")
    b = _same_kind(x, b)
    if mode in TRUTHS or mode == "gen_index" or (dtype is not None and not dtype.is_floating_point):
        x, b, z = (None if v is None else v.detach() for v in (x, b, z))  # such a result has no gradient
    return elementwise_fwd(
        x, b, t, z, mode, float(alpha1), float(alpha2), float(beta), axis, float(lower), float(upper), float(slope),
        dtype,
    )  # fmt: skip


def op_tensor(op, a, b=None, *, alpha1=1.0, alpha2=1.0, beta=0.0, c=None):
    """Op-tensor as in cuDNN: ``op(alpha1 * a, alpha2 * b) + beta * c``, b and c broadcasting.

    Parameters
    ----------
    op : {'add', 'mul', 'min', 'max', 'sqrt', 'not'}
        The last two read a only; not is ``1 - alpha1 * a``.
    a, b, c : torch.Tensor
    alpha1, alpha2, beta : float

    Examples
    --------
    >>> op_tensor("mul", torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0]), alpha1=0.5)
    tensor([1.5000, 4.0000])
    """
    if op not in ("add", "mul", "min", "max", "sqrt", "not"):
        raise InvalidArgument("op", repr(op), "add, mul, min, max, sqrt, not")
    return pointwise_tensor(op, a, b, alpha1=alpha1, alpha2=alpha2, beta=beta, z=c)


def add_tensor(a, c, *, alpha=1.0, beta=1.0):
    """``alpha * a + beta * c``, a broadcasting to c's shape.

    Examples
    --------
    >>> add_tensor(torch.tensor([1.0, 2.0]), torch.zeros(2, 2), alpha=3.0)
    tensor([[3., 6.],
            [3., 6.]])
    """
    return pointwise_tensor("add", c, a, alpha1=beta, alpha2=alpha)


def scale_tensor(y, alpha):
    """``alpha * y``.

    Examples
    --------
    >>> scale_tensor(torch.tensor([1.0, 2.0]), 0.5)
    tensor([0.5000, 1.0000])
    """
    return pointwise_tensor("identity", y, alpha1=alpha)


def set_tensor(y, value):
    """A tensor like `y`, every element `value`.

    Examples
    --------
    >>> set_tensor(torch.zeros(2), 7.0)
    tensor([7., 7.])
    """
    if not isinstance(y, torch.Tensor):
        raise InvalidArgument("y", type(y).__name__, "a torch tensor")
    source = torch.full((), value, dtype=y.dtype, device=y.device)
    return pointwise_tensor("identity", source.expand(y.shape)).contiguous()
