"""Modules for what the framework has no module for: several layers in one kernel, and padding on one side.

Each keeps its parameters under the names that the plain sequence of the framework's layers has, so that weights go
from one to the other by ``load_state_dict``.

>>> import torch
>>> plain = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3, bias=False), torch.nn.BatchNorm2d(8), torch.nn.ReLU())
>>> fused = ConvNormAct2d(3, 8, 3, padding=0)
>>> _ = fused.load_state_dict(plain.state_dict())
>>> x = torch.randn(2, 3, 8, 8)
>>> torch.allclose(fused.eval()(x), plain.eval()(x), atol=1e-5)
True
"""

from .activation import activation_of
from .convolution import (
    CausalConv1d,
    CausalConv2d,
    CausalConv3d,
    ConvAct1d,
    ConvAct2d,
    ConvAct3d,
    ConvTransposeAct1d,
    ConvTransposeAct2d,
    ConvTransposeAct3d,
)
from .normalization import BatchNormAct1d, BatchNormAct2d, BatchNormAct3d, GroupNormAct
from .sequence import ConvNormAct1d, ConvNormAct2d, ConvNormAct3d

__all__ = [
    "BatchNormAct1d",
    "BatchNormAct2d",
    "BatchNormAct3d",
    "CausalConv1d",
    "CausalConv2d",
    "CausalConv3d",
    "ConvAct1d",
    "ConvAct2d",
    "ConvAct3d",
    "ConvNormAct1d",
    "ConvNormAct2d",
    "ConvNormAct3d",
    "ConvTransposeAct1d",
    "ConvTransposeAct2d",
    "ConvTransposeAct3d",
    "GroupNormAct",
    "activation_of",
]
