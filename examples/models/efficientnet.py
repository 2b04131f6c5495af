"""EfficientNet-B0; Tan, Le, "Rethinking model scaling for convolutional neural networks", 2019."""

from __future__ import annotations

import torch
from torch import nn

from .mobilenet import rounded

STAGES = (
    (1, 3, 1, 16, 1), (6, 3, 2, 24, 2), (6, 5, 2, 40, 2), (6, 3, 2, 80, 3), (6, 5, 1, 112, 3), (6, 5, 2, 192, 4),
    (6, 3, 1, 320, 1),
)  # fmt: skip
"""Expansion, filter size, stride of the first, channels, repetitions: table 1 of the paper."""


def step(inputs: int, outputs: int, size: int = 1, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    """Convolution, normalization, SiLU."""
    conv = nn.Conv2d(inputs, outputs, size, stride, size // 2, groups=groups, bias=False)
    return [conv, nn.BatchNorm2d(outputs, eps=1e-3), nn.SiLU()]


class SqueezeExcite(nn.Module):
    """Channels weighted by what is in the whole image."""

    def __init__(self, channels: int, squeezed: int):
        super().__init__()
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.reduce, self.act = nn.Conv2d(channels, squeezed, 1), nn.SiLU()
        self.expand, self.gate = nn.Conv2d(squeezed, channels, 1), nn.Sigmoid()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of the input's shape."""
        return x * self.gate(self.expand(self.act(self.reduce(self.pool(x)))))


class MBConv(nn.Module):
    """Inverted residual with squeeze and excitation; in training it is left out at random (stochastic depth)."""

    def __init__(self, inputs: int, outputs: int, size: int, stride: int, expansion: int, survive: float):
        super().__init__()
        hidden = inputs * expansion
        layers = step(inputs, hidden) if expansion > 1 else []
        layers += step(hidden, hidden, size, stride, groups=hidden)
        layers += [SqueezeExcite(hidden, max(1, inputs // 4))]
        layers += [nn.Conv2d(hidden, outputs, 1, bias=False), nn.BatchNorm2d(outputs, eps=1e-3)]
        self.layers = nn.Sequential(*layers)
        self.around = stride == 1 and inputs == outputs
        self.drop = nn.Dropout2d(1 - survive) if survive < 1 else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(N, inputs, H, W) to (N, outputs, H / stride, W / stride)."""
        return x + self.drop(self.layers(x)) if self.around else self.layers(x)


class EfficientNet(nn.Module):
    """B0 at `width` 1; `survive` is the chance of the last block to be kept in training."""

    def __init__(self, classes: int = 1000, width: float = 1.0, drop: float = 0.2, survive: float = 0.8):
        super().__init__()
        inputs = rounded(32 * width)
        layers = step(3, inputs, 3, 2)
        total, at = sum(count for *_, count in STAGES), 0
        for expansion, size, stride, channels, count in STAGES:
            outputs = rounded(channels * width)
            for repeat in range(count):
                kept = 1 - (1 - survive) * at / total
                layers.append(MBConv(inputs, outputs, size, 1 if repeat else stride, expansion, kept))
                inputs, at = outputs, at + 1
        last = rounded(1280 * width)
        self.features = nn.Sequential(*layers, *step(inputs, last))
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Sequential(nn.Dropout(drop), nn.Linear(last, classes))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(N, 3, H, W) to (N, classes)."""
        return self.head(torch.flatten(self.pool(self.features(x)), 1))


def efficientnet_b0(classes: int = 1000) -> EfficientNet:
    """The full size."""
    return EfficientNet(classes)
