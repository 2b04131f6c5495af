"""DCGAN; Radford, Metz, Chintala, 2015: a generator of transposed convolutions and its discriminator."""

from __future__ import annotations

import torch
from torch import nn


class Generator(nn.Module):
    """Noise to images of `size` points, a power of 2 from 8; `width` is that of the last hidden layer."""

    def __init__(self, latent: int = 100, width: int = 64, channels: int = 3, size: int = 64):
        super().__init__()
        doublings = size.bit_length() - 4  # from 4 to half the size
        outputs = width << doublings
        layers = [nn.ConvTranspose2d(latent, outputs, 4, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(True)]
        for _ in range(doublings):
            inputs, outputs = outputs, outputs // 2
            conv = nn.ConvTranspose2d(inputs, outputs, 4, 2, 1, bias=False)
            layers += [conv, nn.BatchNorm2d(outputs), nn.ReLU(True)]
        self.layers = nn.Sequential(*layers, nn.ConvTranspose2d(outputs, channels, 4, 2, 1, bias=False), nn.Tanh())

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        """(N, latent, 1, 1) to (N, channels, size, size), from -1 to 1."""
        return self.layers(z)


class Discriminator(nn.Module):
    """Images to one number each, a logit."""

    def __init__(self, width: int = 64, channels: int = 3, size: int = 64):
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(channels, width, 4, 2, 1, bias=False), nn.LeakyReLU(0.2, True)]
        for _ in range(size.bit_length() - 4):
            layers += [nn.Conv2d(width, 2 * width, 4, 2, 1, bias=False), nn.BatchNorm2d(2 * width)]
            layers += [nn.LeakyReLU(0.2, True)]
            width *= 2
        self.layers = nn.Sequential(*layers, nn.Conv2d(width, 1, 4, bias=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(N, channels, size, size) to (N,)."""
        return torch.flatten(self.layers(x))
