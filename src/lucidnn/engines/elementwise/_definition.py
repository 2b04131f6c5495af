"""What the reference engines of this family share: what is computed in, and how a result is stored."""

from __future__ import annotations

from typing import Any

import torch

from ...ops.elementwise import WHOLE


def widened(t: torch.Tensor | None, whole: bool) -> Any:
    """A tensor in float64 or in 64-bit whole numbers."""
    return None if t is None else t.detach().long() if whole else t.detach().double()


def store(y: torch.Tensor, dtype: str, value: torch.Tensor) -> None:
    """Write a result, a whole number where `dtype`, y's type, is one: the nearest, cut off at the limits."""
    if dtype in WHOLE[1:]:
        if value.is_floating_point():
            value = value.round()
            value = value.nan_to_num(0.0, torch.inf, -torch.inf)
        if y.dtype != value.dtype and value.dtype != torch.bool:
            limits = torch.iinfo(y.dtype)
            value = value.clamp(limits.min, limits.max)
    y.copy_(value != 0 if y.dtype == torch.bool else value)
