"""A small variational autoencoder for video, of causal 3-D convolutions: no frame depends on a later one.

As the tokenizers of video models are built (Yu et al., "Language model beats diffusion", 2023): padding in time is in
front only, group normalization with SiLU, nearest-neighbour upsampling. The normalization is over each frame by
itself, so that the causality holds.
"""

from __future__ import annotations

import torch
import torch.nn.functional as T
from torch import nn


class CausalConv3d(nn.Conv3d):
    """Zeros before the first frame, none after the last."""

    def __init__(self, inputs: int, outputs: int, size: int = 3, stride: int | tuple[int, int, int] = 1):
        super().__init__(inputs, outputs, size, stride, (0, size // 2, size // 2))
        self.before = size - 1

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """(N, inputs, D, H, W) to (N, outputs, D / stride, H / stride, W / stride)."""
        return super().forward(T.pad(input, (0, 0, 0, 0, self.before, 0)))


class FrameNorm(nn.GroupNorm):
    """Group normalization of each frame."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Of the input's shape, (N, C, D, H, W)."""
        n, c, d, h, w = input.shape
        frames = input.transpose(1, 2).reshape(n * d, c, h, w)
        return super().forward(frames).reshape(n, d, c, h, w).transpose(1, 2)


class Residual(nn.Module):
    """Twice normalization, SiLU, convolution; around it the input."""

    def __init__(self, width: int, groups: int):
        super().__init__()
        self.layers = nn.Sequential(
            FrameNorm(groups, width), nn.SiLU(), CausalConv3d(width, width),
            FrameNorm(groups, width), nn.SiLU(), CausalConv3d(width, width),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of the input's shape."""
        return x + self.layers(x)


class VideoVAE(nn.Module):
    """Half the size in space and time, and back; gives the reconstruction and the latent's mean and log variance.

    In evaluation the mean is decoded; in training a sample around it, unless `sample` is false.
    """

    def __init__(self, width: int = 64, latent: int = 8, groups: int = 4, sample: bool = False):
        super().__init__()
        self.encoder = nn.Sequential(
            CausalConv3d(3, width), Residual(width, groups), CausalConv3d(width, 2 * width, stride=2),
            Residual(2 * width, groups), nn.SiLU(), CausalConv3d(2 * width, 2 * latent, 1),
        )  # fmt: skip
        self.decoder = nn.Sequential(
            CausalConv3d(latent, 2 * width), Residual(2 * width, groups), nn.Upsample(scale_factor=2),
            CausalConv3d(2 * width, width), Residual(width, groups), nn.SiLU(), CausalConv3d(width, 3),
        )  # fmt: skip
        self.sample = sample

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(N, 3, D, H, W), even sizes, to the same and two of (N, latent, D / 2, H / 2, W / 2)."""
        mean, log_variance = self.encoder(x).chunk(2, 1)
        z = mean
        if self.training and self.sample:
            z = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        return self.decoder(z), mean, log_variance
