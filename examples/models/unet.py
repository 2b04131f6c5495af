"""U-Net; Ronneberger, Fischer, Brox, 2015, with padding, so that the result is of the input's size, and batch norm."""

from __future__ import annotations

import torch
from torch import nn


def double(inputs: int, outputs: int) -> nn.Sequential:
    """Two 3x3 convolutions with normalization and ReLU."""
    layers: list[nn.Module] = []
    for channels in (inputs, outputs):
        layers += [nn.Conv2d(channels, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """Down `levels` times by pooling and up again; what was seen on the way down is joined on the way up."""

    def __init__(self, channels: int = 3, classes: int = 2, width: int = 64, levels: int = 4, smooth: bool = False):
        super().__init__()
        widths = [width << level for level in range(levels + 1)]
        self.down = nn.ModuleList([double(a, b) for a, b in zip([channels, *widths], widths, strict=False)])
        self.pool = nn.MaxPool2d(2)
        self.widen = nn.ModuleList(
            nn.Sequential(nn.Upsample(scale_factor=2, mode="bilinear"), nn.Conv2d(2 * w, w, 1))
            if smooth
            else nn.ConvTranspose2d(2 * w, w, 2, 2)
            for w in widths[-2::-1]
        )
        self.up = nn.ModuleList([double(2 * w, w) for w in widths[-2::-1]])
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(N, channels, H, W), a multiple of 2^levels, to (N, classes, H, W)."""
        seen = []
        for step in self.down[:-1]:  # type: ignore[union-attr]
            x = step(x)
            seen.append(x)
            x = self.pool(x)
        x = self.down[-1](x)
        for widen, step in zip(self.widen, self.up, strict=True):
            x = step(torch.cat([seen.pop(), widen(x)], 1))
        return self.head(x)
