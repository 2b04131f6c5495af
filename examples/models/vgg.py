"""VGG with batch normalization; Simonyan, Zisserman, "Very deep convolutional networks", 2014, configuration D."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn


class VGG(nn.Module):
    """Runs of 3x3 convolutions, each run ended by a pooling, and three linear layers.

    `width` is that of the first run (64 in the paper), `pooled` the size of the map that the linear layers see.
    """

    def __init__(
        self, depths: Sequence[int], classes: int = 1000, width: int = 64, hidden: int = 4096, pooled: int = 7
    ):
        super().__init__()
        layers: list[nn.Module] = []
        inputs = 3
        for run, depth in enumerate(depths):
            outputs = min(width << run, 8 * width)
            for _ in range(depth):
                layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]
                inputs = outputs
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.pool = nn.AdaptiveAvgPool2d(pooled)
        self.head = nn.Sequential(
            nn.Linear(inputs * pooled**2, hidden), nn.ReLU(inplace=True), nn.Linear(hidden, hidden),
            nn.ReLU(inplace=True), nn.Linear(hidden, classes),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(N, 3, H, W), at least 32 x 32, to (N, classes)."""
        return self.head(torch.flatten(self.pool(self.features(x)), 1))


def vgg16_bn(classes: int = 1000, width: int = 64, hidden: int = 4096, pooled: int = 7) -> VGG:
    """Thirteen convolutions; the paper's dropout is left out."""
    return VGG((2, 2, 3, 3, 3), classes, width, hidden, pooled)
