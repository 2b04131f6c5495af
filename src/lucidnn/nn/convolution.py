"""Convolutions, transposed too, with their activation in one kernel, and causal ones: no output sees a later input."""

from __future__ import annotations

import functools
from typing import Any

import torch

from .. import functional
from ..core.errors import InvalidArgument
from .activation import activation_of
from .residual import computed_type, with_residual


def convolve(conv: Any, x: torch.Tensor, weight: Any, bias: Any, **more: Any) -> torch.Tensor:
    """What a convolution module of the framework does, with `more` of what lucidnn's function takes."""
    if conv.transposed:
        function = getattr(functional, f"conv_transpose{weight.ndim - 2}d")
        return function(
            x, weight, bias, conv.stride, conv.padding, conv.output_padding, conv.groups, conv.dilation, **more
        )
    function = getattr(functional, f"conv{weight.ndim - 2}d")
    return function(
        x, weight, bias, conv.stride, conv.padding, conv.dilation, conv.groups, padding_mode=conv.padding_mode, **more
    )


class _ConvAct(torch.nn.Module):
    """Mixed into one of the framework's convolutions."""

    name: str
    parameter: float

    def forward(self, x: torch.Tensor, z: torch.Tensor | None = None) -> torch.Tensor:
        convolved = functools.partial(convolve, self, x, self.weight, self.bias)
        return with_residual(convolved, computed_type(x), z, self.name, self.parameter)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, activation={self.name}"


def _conv_act(base: Any) -> Any:
    class ConvAct(_ConvAct, base):
        """``act(conv(x) + z)`` in one kernel.

        Parameters
        ----------
        *args, **kwargs
            Those of the framework's module of the same rank.
        activation : str, torch.nn.Module or None
            As `lucidnn.nn.activation_of` takes it.

        Notes
        -----
        Parameters are named as the plain convolution's. ``forward(x, z=None)``; a z that is broadcast, or of another
        type, is added after the kernel.
        """

        def __init__(self, *args: Any, activation: Any = "relu", **kwargs: Any):
            super().__init__(*args, **kwargs)
            self.name, self.parameter = activation_of(activation)

    ConvAct.__name__ = ConvAct.__qualname__ = f"{base.__name__[:-2]}Act{base.__name__[-2:]}"
    ConvAct.__module__ = __name__
    return ConvAct


ConvAct1d, ConvAct2d, ConvAct3d = (_conv_act(c) for c in (torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d))
ConvTransposeAct1d, ConvTransposeAct2d, ConvTransposeAct3d = (
    _conv_act(c) for c in (torch.nn.ConvTranspose1d, torch.nn.ConvTranspose2d, torch.nn.ConvTranspose3d)
)


def _causal(base: Any) -> Any:
    class CausalConv(base):
        """A convolution that is padded so that an output never depends on a later input.

        The first spatial axis is the time: it gets all of its padding in front, ``dilation * (kernel_size - 1)``; the
        other axes, in two and three dimensions, get theirs on both sides. The output is as large as the input, divided
        by the stride.

        Parameters
        ----------
        in_channels, out_channels, kernel_size, stride, dilation, groups, bias, device, dtype
            As those of the framework's convolution of the same rank.

        Notes
        -----
        Parameters are named as the plain convolution's.
        """

        def __init__(
            self, in_channels: int, out_channels: int, kernel_size: Any, stride: Any = 1, dilation: Any = 1,
            groups: int = 1, bias: bool = True, device: Any = None, dtype: Any = None,
        ):  # fmt: skip
            super().__init__(
                in_channels, out_channels, kernel_size, stride, 0, dilation, groups, bias, device=device, dtype=dtype
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            function = getattr(functional, f"conv{self.weight.ndim - 2}d")
            return function(x, self.weight, self.bias, self.stride, "causal", self.dilation, self.groups)

    CausalConv.__name__ = CausalConv.__qualname__ = f"CausalConv{base.__name__[-2:]}"
    CausalConv.__module__ = __name__
    return CausalConv


CausalConv1d, CausalConv2d, CausalConv3d = (_causal(c) for c in (torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d))


def convolution_of_rank(rank: int) -> Any:
    """The framework's convolution module of one, two or three spatial axes."""
    if rank not in (1, 2, 3):
        raise InvalidArgument("rank", rank, "1, 2 or 3")
    return (torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d)[rank - 1]
