"""The convolutional part of wav2vec 2.0; Baevski et al., 2020: waveform to features, and positions by a convolution."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as T
from torch import nn

LAYERS = ((10, 5), (3, 2), (3, 2), (3, 2), (3, 2), (2, 2), (2, 2))
"""Filter size and stride of the seven layers: 20 ms a step at 16 kHz."""


class Wav2VecEncoder(nn.Module):
    """`width` features (512 in the paper); a group normalization after the first layer only, GELU after each."""

    def __init__(self, width: int = 512, layers: Sequence[tuple[int, int]] = LAYERS, reach: int = 8, groups: int = 4):
        super().__init__()
        self.convs = nn.ModuleList(
            nn.Conv1d(width if at else 1, width, size, stride, bias=False) for at, (size, stride) in enumerate(layers)
        )
        self.first_norm = nn.GroupNorm(width, width)
        self.norm = nn.LayerNorm(width)
        self.positions = nn.Conv1d(width, width, reach, padding=reach // 2, groups=groups)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(N, 1, samples) to (N, width, steps)."""
        for at, conv in enumerate(self.convs):
            x = conv(x)
            x = T.gelu(x if at else self.first_norm(x))
        x = self.norm(x.transpose(1, 2)).transpose(1, 2)
        place = self.positions(x)[..., : x.shape[-1]]  # an even filter makes one step too many
        return x + T.gelu(place)
