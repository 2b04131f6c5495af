"""ResNet, He, Zhang, Ren, Sun, "Deep residual learning for image recognition", 2015; the stride is in the 3x3 layer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn


class Basic(nn.Module):
    """Two 3x3 convolutions around which the input goes."""

    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = _shortcut(inputs, width, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(N, inputs, H, W) to (N, width, H / stride, W / stride)."""
        y = self.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        y += self.shortcut(x)
        return self.relu(y)


class Bottleneck(nn.Module):
    """1x1 down, 3x3, 1x1 up to four times the width."""

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int):
        super().__init__()
        outputs = width * self.expansion
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, outputs, 1, bias=False)
        self.norm3 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = _shortcut(inputs, outputs, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(N, inputs, H, W) to (N, 4 width, H / stride, W / stride)."""
        y = self.relu(self.norm1(self.conv1(x)))
        y = self.relu(self.norm2(self.conv2(y)))
        return self.relu(self.norm3(self.conv3(y)) + self.shortcut(x))


def _shortcut(inputs: int, outputs: int, stride: int) -> nn.Module:
    if inputs == outputs and stride == 1:
        return nn.Identity()
    return nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))


class ResNet(nn.Module):
    """The whole network; `width` is that of the first stage, 64 in the paper.

    ``stem="small"`` is the paper's for small images: one 3x3 convolution, no pooling.
    """

    def __init__(
        self, block: type[Basic] | type[Bottleneck], depths: Sequence[int], classes: int = 1000, width: int = 64,
        channels: int = 3, stem: str = "large",
    ):  # fmt: skip
        super().__init__()
        if stem == "large":
            first = [nn.Conv2d(channels, width, 7, 2, 3, bias=False)]
            pool = [nn.MaxPool2d(3, 2, 1)]
        else:
            first, pool = [nn.Conv2d(channels, width, 3, 1, 1, bias=False)], []
        self.stem = nn.Sequential(*first, nn.BatchNorm2d(width), nn.ReLU(inplace=True), *pool)
        stages, inputs = [], width
        for stage, depth in enumerate(depths):
            blocks = []
            for at in range(depth):
                blocks.append(block(inputs, width << stage, 2 if stage and not at else 1))
                inputs = (width << stage) * block.expansion
            stages.append(nn.Sequential(*blocks))
        self.stages = nn.Sequential(*stages)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(inputs, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(N, channels, H, W) to (N, classes)."""
        return self.head(torch.flatten(self.pool(self.stages(self.stem(x))), 1))


def resnet18(classes: int = 1000, width: int = 64) -> ResNet:
    """Eight basic blocks."""
    return ResNet(Basic, (2, 2, 2, 2), classes, width)


def resnet50(classes: int = 1000, width: int = 64) -> ResNet:
    """Sixteen bottlenecks."""
    return ResNet(Bottleneck, (3, 4, 6, 3), classes, width)
