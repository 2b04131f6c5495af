"""Convolution on tensors: the operators, their gradients, and `conv1d`, `conv2d`, `conv3d`, `linear`.

The three directions are the three derivatives of one trilinear form in x, w and dy, so each one's gradient is made of
the other two: differentiation never leaves the library, to any order.
"""

from __future__ import annotations

from typing import Any

import torch

from ..core.errors import InvalidArgument
from ..core.operation import Epilogue
from ..core.plan import remember
from ..core.settings import current
from ..ops.activation import ACTIVATIONS
from ..ops.convolution import ConvBgrad, ConvDgrad, ConvFprop, ConvWgrad, output_size
from ._library import Described, Op, dense, last, new_empty, run, tuple_of
from .pointwise import from_output_suffices, pointwise_bwd

_ATTRIBUTES = "int[] stride, int[] padding, int[] dilation, int groups, float alpha"


def _pairs(padding: Any) -> tuple[tuple[int, int], ...]:
    """Flat (before, after, before, after, ...) as pairs."""
    return tuple(zip(padding[::2], padding[1::2], strict=True))


def _math(t: torch.Tensor) -> str:
    """Whether float32 may be rounded to TF32: the framework's own flag for convolutions, unless a setting says."""
    if not t.is_cuda or t.dtype != torch.float32:
        return "ieee"
    allowed = current().allow_tf32
    if allowed is None:
        # Right whichever of the framework's two interfaces was used, and ten times as fast as the public one.
        allowed = torch._C._get_fp32_precision_getter("cuda", "conv") == "tf32"
    return "tf32" if allowed else "ieee"


def _named(stride: Any, padding: Any, dilation: Any, groups: int) -> dict[str, Any]:
    return {"stride": tuple(stride), "padding": _pairs(padding), "dilation": tuple(dilation), "groups": groups}


def _fprop(tensors: Any, attributes: Any) -> Described:
    *geometry, alpha, beta, activation, parameter, engine = attributes
    given = dict(zip(("x", "w", "bias", "z"), tensors, strict=True))
    epilogue = Epilogue(alpha, beta, activation, parameter)
    return ConvFprop(**_named(*geometry)), {"tensors": given, "epilogue": epilogue, "engine": engine}


def _dgrad(tensors: Any, attributes: Any) -> Described:
    shape, channels_last, *geometry, alpha = attributes
    dy, w = tensors
    given = {"dy": dy, "w": w, "dx": dense(dy, shape, channels_last)}
    return ConvDgrad(**_named(*geometry)), {"tensors": given, "epilogue": Epilogue(alpha)}


def _wgrad(tensors: Any, attributes: Any) -> Described:
    shape, channels_last, *geometry, alpha = attributes
    x, dy = tensors
    given = {"x": x, "dy": dy, "dw": dense(x, shape, channels_last)}
    return ConvWgrad(**_named(*geometry)), {"tensors": given, "epilogue": Epilogue(alpha)}


def _bgrad(tensors: Any, attributes: Any) -> Described:
    return ConvBgrad(), {"tensors": {"dy": tensors[0]}}


def _fprop_fake(x, w, bias, z, stride, padding, dilation, groups, alpha, beta, activation, parameter, engine):
    sizes = [
        output_size(*axis) for axis in zip(x.shape[2:], w.shape[2:], stride, _pairs(padding), dilation, strict=True)
    ]
    return new_empty(x, (x.shape[0], w.shape[0], *sizes), last(x) or last(w))


def _fprop_backward(needs, args, outputs, grads):
    x, w, bias, z, stride, padding, dilation, groups, alpha, beta, activation, parameter, _ = args
    (dy,) = grads
    if activation != "identity":
        # The activation's input is computed again where its output does not tell the slope.
        source = outputs[0] if outputs else conv_fprop(*args[:-3], "identity", 0.0, None)
        dy = pointwise_bwd(dy, source, 1.0, activation, parameter)
    channels_last = last(x) or last(w)
    attributes = (stride, padding, dilation, groups, alpha)
    dx = conv_dgrad(dy, w, x.shape, channels_last, *attributes) if needs[0] else None
    dw = conv_wgrad(x, dy, w.shape, channels_last, *attributes) if needs[1] else None
    db = conv_bgrad(dy).to(bias.dtype) if needs[2] else None
    dz = (beta * dy).to(z.dtype) if needs[3] else None
    return dx, dw, db, dz


def _dgrad_backward(needs, args, outputs, grads):
    dy, w, _, _, stride, padding, dilation, groups, alpha = args
    (ddx,) = grads
    rest = (stride, padding, dilation, groups, alpha)
    ddy = conv_fprop(ddx, w, None, None, *rest, 0.0, "identity", 0.0, None) if needs[0] else None
    dw = conv_wgrad(ddx, dy, w.shape, last(w), *rest) if needs[1] else None
    return ddy, dw


def _wgrad_backward(needs, args, outputs, grads):
    x, dy, _, _, stride, padding, dilation, groups, alpha = args
    (ddw,) = grads
    rest = (stride, padding, dilation, groups, alpha)
    dx = conv_dgrad(dy, ddw, x.shape, last(x), *rest) if needs[0] else None
    ddy = conv_fprop(x, ddw, None, None, *rest, 0.0, "identity", 0.0, None) if needs[1] else None
    return dx, ddy


def _gradient_fake(a, b, shape, channels_last, stride, padding, dilation, groups, alpha):
    return new_empty(a, shape, channels_last)


conv_fprop = Op(
    "conv_fprop(Tensor x, Tensor w, Tensor? bias, Tensor? z, int[] stride, int[] padding, int[] dilation, int groups, "
    "float alpha, float beta, str activation, float parameter, str? engine) -> Tensor",
    4,
    lambda x, w, bias, z, *attributes: run(_fprop, (x, w, bias, z), attributes, _math(x)),
    _fprop_fake,
    _fprop_backward,
    saves_output=lambda args: args[10] != "identity" and from_output_suffices(args[10], args[11]),
)
conv_dgrad = Op(
    f"conv_dgrad(Tensor dy, Tensor w, SymInt[] x_shape, bool channels_last, {_ATTRIBUTES}) -> Tensor",
    2,
    lambda dy, w, *attributes: run(_dgrad, (dy, w), attributes, _math(dy)),
    _gradient_fake,
    _dgrad_backward,
)
conv_wgrad = Op(
    f"conv_wgrad(Tensor x, Tensor dy, SymInt[] w_shape, bool channels_last, {_ATTRIBUTES}) -> Tensor",
    2,
    lambda x, dy, *attributes: run(_wgrad, (x, dy), attributes, _math(x)),
    _gradient_fake,
    _wgrad_backward,
)
conv_bgrad = Op(
    "conv_bgrad(Tensor dy) -> Tensor",
    1,
    lambda dy: run(_bgrad, (dy,)),
    lambda dy: dy.new_empty((dy.shape[1],)),
    # db is a sum over everything but axis 1: its gradient is db spread out again
    lambda needs, args, outputs, grads: (grads[0].reshape(1, -1, *[1] * (args[0].ndim - 2)).expand(args[0].shape),),
)


def _padding(
    padding: Any, ndim: int, stride: tuple[int, ...], dilation: tuple[int, ...], filter_size: Any
) -> tuple[int, ...]:
    """Flat (before, after) for each axis, from a number, a sequence, pairs, 'valid' or 'same'."""
    if padding == "valid":
        return (0, 0) * ndim
    if padding == "same":
        if any(s != 1 for s in stride):
            raise InvalidArgument("padding", f"'same' with stride {list(stride)}", "'same' with stride 1")
        totals = [d * (r - 1) for d, r in zip(dilation, filter_size, strict=True)]
        return tuple(n for total in totals for n in (total // 2, total - total // 2))
    if isinstance(padding, str):
        raise InvalidArgument(
            "padding", repr(padding), "'same', 'valid', a number, one a spatial axis, or (before, after) pairs"
        )
    if (
        isinstance(padding, (tuple, list))
        and padding
        and all(isinstance(p, (tuple, list)) and len(p) == 2 for p in padding)
    ):
        flat = tuple(n for pair in padding for n in tuple_of(pair, 2, "padding"))
        if len(padding) != ndim:
            raise InvalidArgument("padding", padding, f"{ndim} (before, after) pairs")
        return flat
    return tuple(n for p in tuple_of(padding, ndim, "padding") for n in (p, p))


def _cast(t: Any, dtype: torch.dtype) -> Any:
    """As autocast does it: float64 is left alone."""
    return t if t is None or t.dtype == torch.float64 else t.to(dtype)


def _convolution(ndim, input, weight, bias, stride, padding, dilation, groups, activation, parameter, engine):
    for name, t in (("input", input), ("weight", weight)):
        if not isinstance(t, torch.Tensor):
            raise InvalidArgument(name, type(t).__name__, "a torch tensor")
    if weight.ndim != ndim + 2:
        raise InvalidArgument(
            "weight", f"shape {list(weight.shape)}", f"{ndim + 2} axes: filters, channels / groups, {ndim} spatial"
        )
    if input.ndim == ndim + 1:
        out = _convolution(
            ndim, input.unsqueeze(0), weight, bias, stride, padding, dilation, groups, activation, parameter, engine
        )
        return out.squeeze(0)
    if input.ndim != ndim + 2:
        raise InvalidArgument(
            "input",
            f"shape {list(input.shape)}",
            f"{ndim + 2} axes (batch, channels, {ndim} spatial), or no batch axis",
        )
    device = input.device.type
    if device in ("cpu", "cuda") and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        input, weight, bias = (_cast(t, dtype) for t in (input, weight, bias))
    given = (ndim, stride, padding, dilation, groups, activation, parameter, engine)
    attributes = None
    if padding != "same" and not torch.compiler.is_compiling():
        try:
            attributes = _written_out.get(given)
        except TypeError:  # a list somewhere: right, only slower
            pass
        else:
            if attributes is None:
                attributes = _write_out(*given, weight.shape[2:])
                remember(_written_out, given, attributes)
    if attributes is None:
        attributes = _write_out(*given, weight.shape[2:])
    return conv_fprop(input, weight, bias, None, *attributes)


_written_out: dict[Any, tuple] = {}


def _write_out(ndim, stride, padding, dilation, groups, activation, parameter, engine, filter_size) -> tuple:
    """The operator's attributes from the caller's short forms."""
    stride, dilation = tuple_of(stride, ndim, "stride"), tuple_of(dilation, ndim, "dilation")
    pads = _padding(padding, ndim, stride, dilation, filter_size)
    name = activation or "identity"
    if parameter is None:
        parameter = (ACTIVATIONS[name].parameter if name in ACTIVATIONS else None) or 0.0
    return stride, pads, dilation, groups, 1.0, 0.0, name, float(parameter), engine


def conv1d(
    input, weight, bias=None, stride=1, padding=0, dilation=1, groups=1, *, activation=None, parameter=None, engine=None
):
    """One-dimensional convolution of (N, C, W) with (K, C / groups, S); otherwise as `conv2d`.

    Examples
    --------
    >>> import torch
    >>> conv1d(torch.ones(1, 1, 4), torch.ones(1, 1, 3), padding=((2, 0),))  # causal
    tensor([[[1., 2., 3., 3.]]])
    """
    return _convolution(1, input, weight, bias, stride, padding, dilation, groups, activation, parameter, engine)


def conv2d(
    input, weight, bias=None, stride=1, padding=0, dilation=1, groups=1, *, activation=None, parameter=None, engine=None
):
    """Two-dimensional convolution (cross-correlation), optionally with an activation in the same kernel.

    Parameters
    ----------
    input : torch.Tensor
        (N, C, H, W), or (C, H, W); any strides. float64, float32, float16 or bfloat16.
    weight : torch.Tensor
        (K, C / groups, R, S), of the input's type.
    bias : torch.Tensor, optional
        (K,), of the input's type or float32.
    stride, dilation : int or tuple of int
        One number, or one for each of H and W.
    padding : int, tuple of int, tuple of (int, int), 'same' or 'valid'
        Zeros around the input; pairs are (before, after), one a spatial axis.
    groups : int
        Divides C and K.
    activation : str, optional
        Name from `lucidnn.ops.activation.ACTIVATIONS`, applied in the same kernel.
    parameter : float, optional
        The activation's parameter, where it has one; its default if left out.
    engine : str, optional
        Run this engine, or raise with its reasons.

    Returns
    -------
    torch.Tensor
        (N, K, P, Q), channels-last where input or weight is.

    Raises
    ------
    InvalidArgument
        Names the argument, the value found and what is accepted.
    NotSupported
        The named engine, or every engine, refuses; lists the reasons.

    Notes
    -----
    The definition is in `lucidnn.ops.convolution`. Differentiable to any order with the activations that are
    piecewise linear, once with the others.

    Examples
    --------
    >>> import torch
    >>> x, w = torch.ones(1, 1, 3, 3), torch.ones(1, 1, 3, 3)
    >>> conv2d(x, w, padding=1)
    tensor([[[[4., 6., 4.],
              [6., 9., 6.],
              [4., 6., 4.]]]])
    """
    return _convolution(2, input, weight, bias, stride, padding, dilation, groups, activation, parameter, engine)


def conv3d(
    input, weight, bias=None, stride=1, padding=0, dilation=1, groups=1, *, activation=None, parameter=None, engine=None
):
    """Three-dimensional convolution of (N, C, D, H, W) with (K, C / groups, T, R, S); otherwise as `conv2d`.

    Examples
    --------
    >>> import torch
    >>> conv3d(torch.ones(1, 2, 3, 3, 3), torch.ones(1, 2, 3, 3, 3)).item()
    54.0
    """
    return _convolution(3, input, weight, bias, stride, padding, dilation, groups, activation, parameter, engine)


def linear(input, weight, bias=None, *, engine=None):
    """``input @ weight.T + bias``: a convolution over one point, and it takes that road.

    Parameters
    ----------
    input : torch.Tensor
        (..., features in).
    weight : torch.Tensor
        (features out, features in).
    bias : torch.Tensor, optional
        (features out,).

    Examples
    --------
    >>> import torch
    >>> linear(torch.ones(2, 3), torch.ones(4, 3)).shape
    torch.Size([2, 4])
    """
    for name, t, least in (("input", input, 1), ("weight", weight, 2)):
        if not isinstance(t, torch.Tensor) or t.ndim < least or (name == "weight" and t.ndim != 2):
            raise InvalidArgument(
                name,
                list(t.shape) if isinstance(t, torch.Tensor) else type(t).__name__,
                "(..., features in) and (out, in)",
            )
    flat = input.reshape(-1, input.shape[-1]) if input.ndim != 2 else input
    y = _convolution(1, flat.unsqueeze(2), weight.unsqueeze(2), bias, 1, 0, 1, 1, None, None, engine).squeeze(2)
    return y if input.ndim == 2 else y.reshape(*input.shape[:-1], weight.shape[0])
