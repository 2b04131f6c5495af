"""MobileNetV2; Sandler et al., "Inverted residuals and linear bottlenecks", 2018."""

from __future__ import annotations

import torch
from torch import nn

STAGES = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
"""Expansion, channels, repetitions, stride of the first: table 2 of the paper."""


def rounded(channels: float) -> int:
    """To a multiple of 8, not more than a tenth below."""
    near = max(8, int(channels + 4) // 8 * 8)
    return near + 8 if near < 0.9 * channels else near


def step(inputs: int, outputs: int, size: int = 1, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    """Convolution, normalization, activation."""
    conv = nn.Conv2d(inputs, outputs, size, stride, size // 2, groups=groups, bias=False)
    return [conv, nn.BatchNorm2d(outputs), nn.ReLU6(inplace=True)]


class InvertedResidual(nn.Module):
    """1x1 up, depthwise 3x3, 1x1 down without an activation."""

    def __init__(self, inputs: int, outputs: int, stride: int, expansion: int):
        super().__init__()
        hidden = inputs * expansion
        layers = step(inputs, hidden) if expansion > 1 else []
        layers += step(hidden, hidden, 3, stride, groups=hidden)
        layers += [nn.Conv2d(hidden, outputs, 1, bias=False), nn.BatchNorm2d(outputs)]
        self.layers = nn.Sequential(*layers)
        self.around = stride == 1 and inputs == outputs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(N, inputs, H, W) to (N, outputs, H / stride, W / stride)."""
        return x + self.layers(x) if self.around else self.layers(x)


class MobileNetV2(nn.Module):
    """The whole network; `multiplier` scales all widths."""

    def __init__(self, classes: int = 1000, multiplier: float = 1.0):
        super().__init__()
        inputs = rounded(32 * multiplier)
        layers = step(3, inputs, 3, 2)
        for expansion, channels, count, stride in STAGES:
            outputs = rounded(channels * multiplier)
            for at in range(count):
                layers.append(InvertedResidual(inputs, outputs, 1 if at else stride, expansion))
                inputs = outputs
        last = rounded(1280 * max(1.0, multiplier)) if multiplier >= 1 else rounded(1280 * multiplier)
        self.features = nn.Sequential(*layers, *step(inputs, last))
        self.head = nn.Linear(last, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(N, 3, H, W) to (N, classes)."""
        return self.head(self.features(x).mean((2, 3)))
