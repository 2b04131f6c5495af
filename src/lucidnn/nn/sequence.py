"""Convolution, batch normalization and activation, the step that most convolutional networks repeat."""

from __future__ import annotations

import functools
from typing import Any

import torch

from .activation import activation_of
from .convolution import convolve
from .normalization import batch_normalize
from .residual import computed_type, with_residual


def fold(conv: Any, norm: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Weight and bias of a convolution that does what this one and the normalization after it do in inference.

    Computed in float32 at least; in the weight's type.
    """
    kind = torch.float64 if conv.weight.dtype == torch.float64 else torch.float32
    scale = torch.rsqrt(norm.running_var.to(kind) + norm.eps)
    if norm.weight is not None:
        scale = scale * norm.weight.to(kind)
    shift = -norm.running_mean.to(kind) * scale
    if norm.bias is not None:
        shift = shift + norm.bias.to(kind)
    if conv.bias is not None:
        shift = shift + conv.bias.to(kind) * scale
    weight = conv.weight.to(kind)
    ones = [1] * (weight.ndim - 2)
    if conv.transposed:  # (input channels, output channels of a group, ...)
        groups = conv.groups
        parts = weight.unflatten(0, (groups, -1)) * scale.reshape(groups, 1, -1, *ones)
        weight = parts.flatten(0, 1)
    else:
        weight = weight * scale.reshape(-1, 1, *ones)
    if conv.weight.ndim == 4 and conv.weight.is_contiguous(memory_format=torch.channels_last):
        weight = weight.contiguous(memory_format=torch.channels_last)
    return weight.to(conv.weight.dtype), shift.to(conv.weight.dtype)


class _ConvNormAct(torch.nn.Sequential):
    """Common to the three ranks."""

    name: str
    parameter: float

    def forward(self, input: torch.Tensor, z: torch.Tensor | None = None) -> torch.Tensor:
        """``act(norm(conv(input)) + z)``; z, a residual connection, has the output's shape."""
        conv: Any = self[0]
        norm: Any = self[1]
        if norm.training or norm.running_mean is None or torch.is_grad_enabled():
            y = convolve(conv, input, conv.weight, conv.bias)
            return batch_normalize(norm, y, z, self.name, self.parameter)
        folded = functools.partial(convolve, conv, input, *fold(conv, norm))
        return with_residual(folded, computed_type(input), z, self.name, self.parameter)


def _conv_norm_act(conv: Any, norm: Any) -> Any:
    class ConvNormAct(_ConvNormAct):
        """A convolution, a batch normalization and an activation.

        In training the normalization, the addition of `z` and the activation are one kernel, and one in the backward
        pass; in inference (evaluation mode and no gradients) the normalization is folded into the filters, and all is
        one kernel.

        Parameters
        ----------
        in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, padding_mode
            As those of the framework's convolution; `padding` keeps the size if left out, and there is no bias, which
            the normalization would take away again.
        activation : str, torch.nn.Module or None
            As `lucidnn.nn.activation_of` takes it.
        eps, momentum
            As those of the framework's batch normalization.

        Notes
        -----
        Parameters are named as those of ``Sequential(Conv, BatchNorm, activation)``. ``forward(input, z=None)``.
        """

        def __init__(
            self, in_channels: int, out_channels: int, kernel_size: Any, stride: Any = 1, padding: Any = None,
            dilation: Any = 1, groups: int = 1, bias: bool = False, padding_mode: str = "zeros", *,
            activation: Any = "relu", eps: float = 1e-5, momentum: float | None = 0.1, device: Any = None,
            dtype: Any = None,
        ):  # fmt: skip
            if padding is None:
                sizes, steps = (v if isinstance(v, (tuple, list)) else (v,) for v in (kernel_size, dilation))
                count = max(len(sizes), len(steps))
                sizes, steps = (tuple(v) * (count // len(v)) for v in (sizes, steps))
                padding = tuple((r - 1) * d // 2 for r, d in zip(sizes, steps, strict=True))
                padding = padding[0] if count == 1 else padding
            kind = {"device": device, "dtype": dtype}
            geometry = (kernel_size, stride, padding, dilation, groups, bias, padding_mode)
            super().__init__(
                conv(in_channels, out_channels, *geometry, **kind), norm(out_channels, eps, momentum, **kind)
            )
            self.name, self.parameter = activation_of(activation)

    ConvNormAct.__name__ = ConvNormAct.__qualname__ = f"ConvNormAct{conv.__name__[-2:]}"
    ConvNormAct.__module__ = __name__
    return ConvNormAct


ConvNormAct1d = _conv_norm_act(torch.nn.Conv1d, torch.nn.BatchNorm1d)
ConvNormAct2d = _conv_norm_act(torch.nn.Conv2d, torch.nn.BatchNorm2d)
ConvNormAct3d = _conv_norm_act(torch.nn.Conv3d, torch.nn.BatchNorm3d)
