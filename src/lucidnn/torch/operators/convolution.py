"""The framework's `convolution`, which every conv1d to conv3d, transposed or not, comes to, and its backward."""

from __future__ import annotations

from typing import Any

import torch

from ...core.errors import InvalidArgument, NotSupported
from ...functional import _convolution as conv
from ...functional._library import last, run
from .._override import override

_PLAIN = (1.0, 0.0, "identity", 0.0, None, None)
"""The epilogue's arguments: alpha, beta, activation and its parameter, result type, engine."""


def _check(groups: int, *tensors: torch.Tensor | None) -> None:
    """Refuse what lucidnn takes and the framework does not: operands of several types."""
    first = tensors[0].dtype  # type: ignore[union-attr]
    for t in tensors:
        if t is not None and t.dtype != first:
            raise NotSupported(f"operands of several types, {first} and {t.dtype}")
    if first in (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2):
        raise NotSupported(f"the framework's convolution has no {first}")
    if groups < 1:
        raise InvalidArgument("groups", groups, "a whole number >= 1")


def _each(values: list[int], ndim: int) -> tuple[int, ...]:
    return tuple(values) if len(values) == ndim else tuple(values) * ndim


def _geometry(
    weight: torch.Tensor, stride: list[int], padding: list[int], dilation: list[int], groups: int
) -> tuple[Any, ...]:
    ndim = weight.ndim - 2
    both = tuple(p for p in _each(padding, ndim) for _ in range(2))
    return _each(stride, ndim), both, _each(dilation, ndim), groups, "zeros", False


def _transposed_shape(input: torch.Tensor, weight: torch.Tensor, geometry: Any, output_padding: list[int]) -> tuple:
    stride, padding, dilation, groups, *_ = geometry
    sizes = [
        (n - 1) * s - 2 * p + d * (r - 1) + more + 1
        for n, r, s, p, d, more in zip(
            input.shape[2:], weight.shape[2:], stride, padding[::2], dilation,
            _each(output_padding, weight.ndim - 2), strict=True,
        )
    ]  # fmt: skip
    return (input.shape[0], weight.shape[1] * groups, *sizes)


def _whole(input: torch.Tensor, shape: tuple[int, ...], weight: torch.Tensor, geometry: Any) -> torch.Tensor:
    """A transposed convolution's input, with zeros behind it where its output is so long that more of it would fit.

    That is so where the output padding reaches the stride, which a dilation allows.
    """
    stride, padding, dilation, *_ = geometry
    sizes = [
        (n + 2 * p - d * (r - 1) - 1) // s + 1
        for n, r, s, p, d in zip(shape[2:], weight.shape[2:], stride, padding[::2], dilation, strict=True)
    ]
    more = [size - n for size, n in zip(sizes, input.shape[2:], strict=True)]
    if not any(more):
        return input
    return torch.constant_pad_nd(input, [n for size in reversed(more) for n in (0, size)])


@override("convolution")
def convolution(input, weight, bias, stride, padding, dilation, transposed, output_padding, groups):
    """One operator for all forms: a transposed one is the data gradient of the other."""
    _check(groups, input, weight, bias)
    if input.ndim != weight.ndim or input.ndim < 3:
        raise InvalidArgument("input", f"{input.ndim} axes", f"{weight.ndim} axes, as the weight has")
    geometry = _geometry(weight, stride, padding, dilation, groups)
    if not transposed:
        return run(conv._fprop, (input, weight, bias, None, None), (*geometry, *_PLAIN), conv._math(input))
    shape = _transposed_shape(input, weight, geometry, output_padding)
    attributes = (shape, last(input) or last(weight), *geometry, *_PLAIN)
    input = _whole(input, shape, weight, geometry)
    return run(conv._dgrad, (input, weight, bias, None, None), attributes, conv._math(input))


@override("convolution_backward")
def convolution_backward(
    grad_output, input, weight, bias_sizes, stride, padding, dilation, transposed, output_padding, groups, output_mask
):
    """Gradients of the input, the weight and the bias, those that the mask asks for."""
    _check(groups, grad_output, input, weight)
    geometry = _geometry(weight, stride, padding, dilation, groups)
    math, channels_last = conv._math(input), last(input) or last(weight)
    dx = dw = db = None
    if transposed:
        if output_mask[0]:
            dx = run(conv._fprop, (grad_output, weight, None, None, None), (*geometry, *_PLAIN), math)
            if dx.shape != input.shape:
                dx = dx[tuple(slice(n) for n in input.shape)].contiguous()
        if output_mask[1]:
            input = _whole(input, grad_output.shape, weight, geometry)
            dw = run(conv._wgrad, (grad_output, input), (weight.shape, channels_last, *geometry, 1.0), math)
    else:
        if output_mask[0]:
            attributes = (input.shape, channels_last, *geometry, *_PLAIN)
            dx = run(conv._dgrad, (grad_output, weight, None, None, None), attributes, math)
        if output_mask[1]:
            dw = run(conv._wgrad, (input, grad_output), (weight.shape, channels_last, *geometry, 1.0), math)
    if output_mask[2]:
        db = run(conv._bgrad, (grad_output,))
    return dx, dw, db
