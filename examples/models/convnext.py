"""ConvNeXt; Liu et al., "A ConvNet for the 2020s", 2022. Layer normalization over channels, 7x7 depthwise filters."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn


class ChannelNorm(nn.LayerNorm):
    """Layer normalization over axis 1 of (N, C, H, W)."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Of the input's shape."""
        return super().forward(input.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class Block(nn.Module):
    """Depthwise 7x7, normalization, two linear layers with GELU between, a scale, and around it the input."""

    def __init__(self, width: int):
        super().__init__()
        self.mix = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.up, self.act, self.down = nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        self.scale = nn.Parameter(torch.full((width,), 1e-6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of the input's shape."""
        y = self.norm(self.mix(x).permute(0, 2, 3, 1))
        return x + (self.scale * self.down(self.act(self.up(y)))).permute(0, 3, 1, 2)


class ConvNeXt(nn.Module):
    """Four stages with a 2x2 patch convolution between; `width` is that of the first."""

    def __init__(self, classes: int = 1000, depths: Sequence[int] = (3, 3, 9, 3), width: int = 96):
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3, width, 4, 4), ChannelNorm(width, eps=1e-6)]
        for stage, depth in enumerate(depths):
            if stage:
                layers += [ChannelNorm(width, eps=1e-6), nn.Conv2d(width, 2 * width, 2, 2)]
                width *= 2
            layers += [Block(width) for _ in range(depth)]
        self.features = nn.Sequential(*layers)
        self.norm, self.head = nn.LayerNorm(width, eps=1e-6), nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(N, 3, H, W), a multiple of 32, to (N, classes)."""
        return self.head(self.norm(self.features(x).mean((2, 3))))


def convnext_t(classes: int = 1000) -> ConvNeXt:
    """The tiny one of the paper: 28 million weights."""
    return ConvNeXt(classes)
