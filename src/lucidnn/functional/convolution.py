"""Convolution on tensors, with the framework's names and arguments and some more: `conv1d`, `conv2d`, `conv3d`, their
transposed forms, and `linear`.
"""

from __future__ import annotations

import math
import numbers
from typing import Any, TypedDict, Unpack

import torch

from ..core.errors import InvalidArgument
from ..core.plan import remember
from ..ops.activation import ACTIVATIONS
from ._convolution import conv_dgrad, conv_fprop
from ._library import last, tuple_of


class Options(TypedDict, total=False):
    """What the functions take beside the framework's own arguments; `conv2d` explains them."""

    padding_mode: str
    flip: bool
    activation: str | None
    parameter: float | None
    alpha: float
    beta: float | None
    z: torch.Tensor | None
    scale: torch.Tensor | None
    dtype: torch.dtype | None
    engine: str | None


def _padding(
    padding: Any, ndim: int, stride: tuple[int, ...], dilation: tuple[int, ...], filter_size: Any, size: Any
) -> tuple[int, ...]:
    """Flat (before, after) for each axis, from a number, a sequence, pairs, 'valid', 'same' or 'causal'."""
    if padding == "valid":
        return (0, 0) * ndim
    if padding in ("same", "causal"):
        flat = []
        for axis, (s, d, r, n) in enumerate(zip(stride, dilation, filter_size, size, strict=True)):
            total = max((math.ceil(n / s) - 1) * s + d * (r - 1) + 1 - n, 0) if s > 1 else d * (r - 1)
            causal = padding == "causal" and axis == 0
            flat += [d * (r - 1), 0] if causal else [total // 2, total - total // 2]
        return tuple(flat)
    if isinstance(padding, str):
        accepted = "'same', 'valid', 'causal', a number, one a spatial axis, or (before, after) pairs"
        raise InvalidArgument("padding", repr(padding), accepted)
    paired = isinstance(padding, (tuple, list)) and padding
    if paired and all(isinstance(p, (tuple, list)) and len(p) == 2 for p in padding):
        flat = tuple(n for pair in padding for n in tuple_of(pair, 2, "padding"))
        if len(padding) != ndim:
            raise InvalidArgument("padding", padding, f"{ndim} (before, after) pairs")
        return flat
    return tuple(n for p in tuple_of(padding, ndim, "padding") for n in (p, p))


def _cast(t: Any, dtype: torch.dtype) -> Any:
    """As autocast does it: float64 and whole numbers are left alone."""
    return t if t is None or t.dtype == torch.float64 or not t.is_floating_point() else t.to(dtype)


def _autocast(input: torch.Tensor, weight: torch.Tensor, bias: Any) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """The tensors in the type that autocast asks for, where it is on."""
    device = input.device.type
    if device not in ("cpu", "cuda") or not torch.is_autocast_enabled(device):
        return input, weight, bias
    lower = torch.get_autocast_dtype(device)
    # A bias beside whole numbers is of float32, which is not to be lowered.
    bias = _cast(bias, lower) if input.is_floating_point() else bias
    return _cast(input, lower), _cast(weight, lower), bias


def _checked(ndim: int, input: Any, weight: Any, filters: str) -> bool:
    """Whether there is a batch axis; an error where the tensors have no such form."""
    for name, t in (("input", input), ("weight", weight)):
        if not isinstance(t, torch.Tensor):
            raise InvalidArgument(name, type(t).__name__, "a torch tensor")
    if weight.ndim != ndim + 2:
        raise InvalidArgument("weight", f"shape {list(weight.shape)}", f"{ndim + 2} axes: {filters}, {ndim} spatial")
    if input.ndim not in (ndim + 1, ndim + 2):
        accepted = f"{ndim + 2} axes (batch, channels, {ndim} spatial), or no batch axis"
        raise InvalidArgument("input", f"shape {list(input.shape)}", accepted)
    return input.ndim == ndim + 2


def _number(value: Any, name: str) -> float:
    # A tensor is no number here: its value could change under the memo that remembers what was written out.
    if not isinstance(value, (numbers.Real, torch.SymFloat, torch.SymInt)):
        raise InvalidArgument(name, type(value).__name__, "a number")
    return float(value)


def _kinds(groups: Any, dtype: Any, engine: Any) -> None:
    """An error where one of these is of a kind that has no meaning."""
    if not isinstance(groups, (int, torch.SymInt)):
        raise InvalidArgument("groups", repr(groups), "a whole number >= 1")
    if not isinstance(dtype, (torch.dtype, type(None))):
        raise InvalidArgument("dtype", repr(dtype), "a torch.dtype")
    if not isinstance(engine, (str, type(None))):
        raise InvalidArgument("engine", repr(engine), "the name of one")


def _as_batch(z: Any) -> Any:
    return z.unsqueeze(0) if isinstance(z, torch.Tensor) else z


def _epilogue(activation: Any, parameter: Any, alpha: float, beta: Any, z: Any, dtype: Any, engine: Any) -> tuple:
    """The operator's epilogue arguments, defaults written out."""
    name = activation or "identity"
    if parameter is None:
        parameter = (ACTIVATIONS[name].parameter if name in ACTIVATIONS else None) or 0.0
    factor = (0.0 if z is None else 1.0) if beta is None else _number(beta, "beta")
    return _number(alpha, "alpha"), factor, name, _number(parameter, "parameter"), dtype, engine


def _convolution(
    ndim, input, weight, bias, stride, padding, dilation, groups, *, padding_mode="zeros", flip=False, activation=None,
    parameter=None, alpha=1.0, beta=None, z=None, scale=None, dtype=None, engine=None,
):  # fmt: skip
    batched = _checked(ndim, input, weight, "filters, channels / groups")
    if not batched:
        input, z = input.unsqueeze(0), _as_batch(z)
    input, weight, bias = _autocast(input, weight, bias)
    given = (ndim, stride, padding, dilation, groups, padding_mode, flip, activation, parameter, alpha, beta,
             z is None, dtype, engine)  # fmt: skip
    attributes = None
    if padding not in ("same", "causal") and not torch.compiler.is_compiling():
        try:
            attributes = _written_out.get(given)
        except TypeError:  # a list somewhere: right, only slower
            pass
        else:
            if attributes is None:
                attributes = _write_out(*given, weight.shape[2:], input.shape[2:])
                remember(_written_out, given, attributes)
    if attributes is None:
        attributes = _write_out(*given, weight.shape[2:], input.shape[2:])
    y = conv_fprop(input, weight, bias, z, scale, *attributes)
    return y if batched else y.squeeze(0)


_written_out: dict[Any, tuple] = {}


def _write_out(
    ndim, stride, padding, dilation, groups, padding_mode, flip, activation, parameter, alpha, beta, without_z, dtype,
    engine, filter_size, size,
) -> tuple:  # fmt: skip
    """The operator's attributes from the caller's short forms."""
    _kinds(groups, dtype, engine)
    stride, dilation = tuple_of(stride, ndim, "stride"), tuple_of(dilation, ndim, "dilation")
    pads = _padding(padding, ndim, stride, dilation, filter_size, size)
    z = None if without_z else True
    epilogue = _epilogue(activation, parameter, alpha, beta, z, dtype, engine)
    return stride, pads, dilation, groups, padding_mode, bool(flip), *epilogue


def conv1d(
    input, weight, bias=None, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups=1, **options: Unpack[Options]
) -> torch.Tensor:
    """One-dimensional convolution of (N, C, W) with (K, C / groups, S); otherwise as `conv2d`.

    Examples
    --------
    >>> import torch
    >>> conv1d(torch.ones(1, 1, 4), torch.ones(1, 1, 3), padding="causal")
    tensor([[[1., 2., 3., 3.]]])
    """
    return _convolution(1, input, weight, bias, stride, padding, dilation, groups, **options)


def conv2d(
    input, weight, bias=None, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups=1, **options: Unpack[Options]
) -> torch.Tensor:
    """Two-dimensional convolution (cross-correlation), with whatever follows it in the same kernel.

    Parameters
    ----------
    input : torch.Tensor
        (N, C, H, W), or (C, H, W); any strides. float64, float32, float16, bfloat16, float8 or int8.
    weight : torch.Tensor
        (K, C / groups, R, S), of the input's type.
    bias : torch.Tensor, optional
        (K,), of the input's type or float32; int32 where the result is int32.
    stride, dilation : int or tuple of int
        One number, or one for each of H and W.
    padding : int, tuple of int, tuple of (int, int), 'same', 'valid' or 'causal'
        Points around the input; pairs are (before, after), one a spatial axis. 'same' gives ceil(size / stride) points,
        the odd one of the padding after; 'causal' is 'same' but for the first spatial axis, along which no output sees
        a later input.
    groups : int
        Divides C and K.
    padding_mode : {'zeros', 'reflect', 'replicate', 'circular'}, optional
        What stands in the padding.
    flip : bool, optional
        Turn the filter around: convolution as mathematics means it.
    activation : str, optional
        Name from `lucidnn.ops.activation.ACTIVATIONS`, applied in the same kernel.
    parameter : float, optional
        The activation's parameter, where it has one; its default if left out.
    alpha, beta : float, optional
        Factors of the sum and of `z`; 1 if left out.
    z : torch.Tensor, optional
        Of the result's shape, added before the activation.
    scale : torch.Tensor, optional
        (1,) or (K,), float32: multiplied with the sum. Not differentiated.
    dtype : torch.dtype, optional
        Of the result; the input's if left out, int32 for int8. An int8 or float8 result is rounded and cut off.
    engine : str, optional
        Run this engine, or raise with its reasons.

    Returns
    -------
    torch.Tensor
        (N, K, P, Q): ``activation(alpha * scale * conv(input, weight) + beta * z + bias)``; channels-last where input
        or weight is.

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

    Engines with the note ``spreads`` (those that transform tiles or images among them, Winograd being chosen by default
    where it is fastest) let a NaN or an infinity of the input reach results near it that do not depend on it; those
    with ``winograd`` or ``fft`` also round more. ``lucidnn.using(exclude_notes=("spreads",))`` keeps them out.

    Examples
    --------
    >>> import torch
    >>> x, w = torch.ones(1, 1, 3, 3), torch.ones(1, 1, 3, 3)
    >>> conv2d(x, w, padding=1)
    tensor([[[[4., 6., 4.],
              [6., 9., 6.],
              [4., 6., 4.]]]])
    >>> conv2d(x, w, padding=1, padding_mode="replicate", activation="clipped_relu", parameter=7.5)[0, 0, 0]
    tensor([7.5000, 7.5000, 7.5000])
    """
    return _convolution(2, input, weight, bias, stride, padding, dilation, groups, **options)


def conv3d(
    input, weight, bias=None, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups=1, **options: Unpack[Options]
) -> torch.Tensor:
    """Three-dimensional convolution of (N, C, D, H, W) with (K, C / groups, T, R, S); otherwise as `conv2d`.

    Examples
    --------
    >>> import torch
    >>> conv3d(torch.ones(1, 2, 3, 3, 3), torch.ones(1, 2, 3, 3, 3)).item()
    54.0
    """
    return _convolution(3, input, weight, bias, stride, padding, dilation, groups, **options)


def _transposed(
    ndim, input, weight, bias, stride, padding, output_padding, groups, dilation, *, padding_mode="zeros", flip=False,
    activation=None, parameter=None, alpha=1.0, beta=None, z=None, scale=None, dtype=None, engine=None,
):  # fmt: skip
    batched = _checked(ndim, input, weight, "input channels, output channels / groups")
    _kinds(groups, dtype, engine)
    if padding_mode != "zeros":
        raise InvalidArgument("padding_mode", repr(padding_mode), "'zeros' where the convolution is transposed")
    if isinstance(padding, str):
        accepted = "a number, one a spatial axis, or (before, after) pairs"
        raise InvalidArgument("padding", repr(padding), f"{accepted} where the convolution is transposed")
    if not batched:
        input, z = input.unsqueeze(0), _as_batch(z)
    input, weight, bias = _autocast(input, weight, bias)
    stride, dilation = tuple_of(stride, ndim, "stride"), tuple_of(dilation, ndim, "dilation")
    for name, values in (("stride", stride), ("dilation", dilation), ("groups", (groups,))):
        if min(values) < 1:
            raise InvalidArgument(name, groups if name == "groups" else list(values), "numbers >= 1")
    pads = list(_padding(padding, ndim, stride, dilation, weight.shape[2:], input.shape[2:]))
    more = tuple_of(output_padding, ndim, "output_padding")
    sizes, rows = [], []
    for axis in range(ndim):
        s, d, n, r = stride[axis], dilation[axis], input.shape[2 + axis], weight.shape[2 + axis]
        if not 0 <= more[axis] < max(s, d):
            raise InvalidArgument("output_padding", list(more), "numbers >= 0, less than the stride or the dilation")
        size = (n - 1) * s - pads[2 * axis] - pads[2 * axis + 1] + d * (r - 1) + 1 + more[axis]
        if size < 1:
            raise InvalidArgument("padding", padding, f"less, so that the output has a point (it would have {size})")
        sizes.append(size)
        # Output beyond the last point less the padding is padding not taken off; what is left of it is more output
        # points of the last stride; and whole strides are what zeros after the input would lead to.
        kept = max(pads[2 * axis + 1] - more[axis], 0)
        left = more[axis] - (pads[2 * axis + 1] - kept)
        pads[2 * axis + 1] = kept
        rows += [left // s, 0]
    if any(rows):
        input = torch.nn.functional.pad(input, rows[::-1])
    shape = (input.shape[0], weight.shape[1] * groups, *sizes)
    epilogue = _epilogue(activation, parameter, alpha, beta, z, dtype, engine)
    geometry = (stride, tuple(pads), dilation, groups, "zeros", bool(flip))
    y = conv_dgrad(input, weight, bias, z, scale, shape, last(input) or last(weight), *geometry, *epilogue)
    return y if batched else y.squeeze(0)


def conv_transpose1d(
    input, weight, bias=None, stride: Any = 1, padding: Any = 0, output_padding: Any = 0, groups=1, dilation: Any = 1,
    **options: Unpack[Options],
) -> torch.Tensor:  # fmt: skip
    """Transposed convolution of (N, C, W) with (C, K / groups, S); otherwise as `conv_transpose2d`.

    Examples
    --------
    >>> import torch
    >>> conv_transpose1d(torch.tensor([[[1.0, 2.0]]]), torch.ones(1, 1, 2), stride=2)
    tensor([[[1., 1., 2., 2.]]])
    """
    return _transposed(1, input, weight, bias, stride, padding, output_padding, groups, dilation, **options)


def conv_transpose2d(
    input, weight, bias=None, stride: Any = 1, padding: Any = 0, output_padding: Any = 0, groups=1, dilation: Any = 1,
    **options: Unpack[Options],
) -> torch.Tensor:  # fmt: skip
    """Two-dimensional transposed convolution: the data gradient of the convolution with these attributes.

    Parameters
    ----------
    input : torch.Tensor
        (N, C, H, W), or (C, H, W); any strides.
    weight : torch.Tensor
        (C, K / groups, R, S), of the input's type.
    bias : torch.Tensor, optional
        (K,).
    stride, dilation, groups
        Of the convolution whose gradient this is.
    padding : int, tuple of int or tuple of (int, int)
        Points taken off the output, on both sides or (before, after).
    output_padding : int or tuple of int
        Points added after the output: less than the stride or the dilation.
    **options
        As for `conv2d`, but for `padding_mode`.

    Returns
    -------
    torch.Tensor
        (N, K, P, Q) with ``P = (H - 1) * stride - padding + dilation * (R - 1) + 1 + output_padding``, where `padding`
        counts both sides.

    Examples
    --------
    >>> import torch
    >>> x, w = torch.ones(1, 1, 2, 2), torch.ones(1, 1, 3, 3)
    >>> conv_transpose2d(x, w, stride=2, padding=1, output_padding=1)
    tensor([[[[1., 2., 1., 1.],
              [2., 4., 2., 2.],
              [1., 2., 1., 1.],
              [1., 2., 1., 1.]]]])
    """
    return _transposed(2, input, weight, bias, stride, padding, output_padding, groups, dilation, **options)


def conv_transpose3d(
    input, weight, bias=None, stride: Any = 1, padding: Any = 0, output_padding: Any = 0, groups=1, dilation: Any = 1,
    **options: Unpack[Options],
) -> torch.Tensor:  # fmt: skip
    """Transposed convolution of (N, C, D, H, W) with (C, K / groups, T, R, S); otherwise as `conv_transpose2d`.

    Examples
    --------
    >>> import torch
    >>> conv_transpose3d(torch.ones(1, 2, 2, 2, 2), torch.ones(2, 3, 2, 2, 2), stride=2).shape
    torch.Size([1, 3, 4, 4, 4])
    """
    return _transposed(3, input, weight, bias, stride, padding, output_padding, groups, dilation, **options)


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
            found = list(t.shape) if isinstance(t, torch.Tensor) else type(t).__name__
            raise InvalidArgument(name, found, "(..., features in)" if name == "input" else "(out, features in)")
    if input.shape[-1] != weight.shape[1]:
        raise InvalidArgument("weight", list(weight.shape), f"(out, {input.shape[-1]}): input has so many features")
    flat = input.reshape(math.prod(input.shape[:-1]), input.shape[-1]) if input.ndim != 2 else input
    y = _convolution(1, flat.unsqueeze(2), weight.unsqueeze(2), bias, 1, 0, 1, 1, engine=engine).squeeze(2)
    return y if input.ndim == 2 else y.reshape(*input.shape[:-1], weight.shape[0])
