"""The classic first convolutional network, as an ordinary module: two convolutions, two poolings, one linear layer.

::

    N x 3 x 32 x 32 -> conv 3x3 to 32, relu, max-pool 2 -> conv 3x3 to 64, relu, max-pool 2 -> linear 64*8*8 to 10

Which library computes it is an argument: `lucidnn.functional` and `torch.nn.functional` have the same functions with
the same names. Parameters are made by the framework's modules, so both start from the same weights for one seed.
"""

from __future__ import annotations

from typing import Any

import torch

from ..core.problem import Problem

CHANNELS, SIDE, CLASSES = 3, 32, 10
WIDTHS = (32, 64)


class Network(torch.nn.Module):
    """The network on one library's functions.

    Parameters
    ----------
    functions : module
        Has ``conv2d``, ``relu``, ``max_pool2d`` and ``linear``.
    fused : bool
        Whether ``conv2d`` takes ``activation="relu"``, so that it and the convolution are one kernel.

    Examples
    --------
    >>> import lucidnn.functional
    >>> network = Network(lucidnn.functional, fused=True)
    >>> network(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    """

    def __init__(self, functions: Any, fused: bool = False):
        super().__init__()
        self.functions, self.fused = functions, fused
        self.conv1 = torch.nn.Conv2d(CHANNELS, WIDTHS[0], 3, padding=1)
        self.conv2 = torch.nn.Conv2d(WIDTHS[0], WIDTHS[1], 3, padding=1)
        self.linear = torch.nn.Linear(WIDTHS[1] * (SIDE // 4) ** 2, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Class scores (N, 10) of images (N, 3, 32, 32)."""
        f = self.functions
        x = f.max_pool2d(self._conv_relu(self.conv1, x), 2)
        x = f.max_pool2d(self._conv_relu(self.conv2, x), 2)
        return f.linear(x.flatten(1), self.linear.weight, self.linear.bias)

    def _conv_relu(self, layer: torch.nn.Conv2d, x: torch.Tensor) -> torch.Tensor:
        f = self.functions
        if self.fused:
            return f.conv2d(x, layer.weight, layer.bias, padding=1, activation="relu")
        return f.relu(f.conv2d(x, layer.weight, layer.bias, padding=1))


def layer_of(problem: Problem) -> str:
    """The layer of the network that a problem belongs to; its number of output channels tells.

    Examples
    --------
    >>> layer_of(Problem.parse("conv_wgrad x=f32[8,32,16,16] dy=f32[8,64,16,16] dw=f32[64,32,3,3] padding=1"))
    'conv2'
    >>> layer_of(Problem.parse("conv_bgrad dy=f32[8,10,1]"))
    'linear'
    """
    kind = problem.op.name.partition("_")[0]
    if kind == "conv":
        if problem.items[0][1].ndim == 3:
            return "linear"
        weight = problem.tensors.get("w") or problem.tensors.get("dw")
        channels = weight.shape[0] if weight else problem["db"].shape[0]
    else:
        channels = problem.items[0][1].shape[1]
    name = {"conv": "conv", "max": "pool", "pointwise": "relu"}[kind]
    return f"{name}{WIDTHS.index(channels) + 1}"
