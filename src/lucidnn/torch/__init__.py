"""PyTorch on lucidnn without a change to the model: switch it on, and the framework's operators run here.

>>> import torch, lucidnn.torch
>>> layer = torch.nn.Conv2d(3, 8, 3)
>>> with lucidnn.torch.enable():
...     y = layer(torch.randn(1, 3, 8, 8))
>>> lucidnn.torch.calls()["convolution"]["taken"]
1
"""

from __future__ import annotations

from ._switch import calls, disable, enable, enabled, report, reset_calls
from .fuse import FusedModule, Fusion, fuse

__all__ = ["FusedModule", "Fusion", "calls", "disable", "enable", "enabled", "fuse", "report", "reset_calls"]
