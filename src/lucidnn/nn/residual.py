"""An addition before the activation, in the kernel where it can be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..core.errors import InvalidArgument
from ..functional.pointwise import pointwise_fwd


def with_residual(compute: Callable[..., torch.Tensor], dtype: torch.dtype, z: Any, name: str, parameter: float) -> Any:
    """``act(y + z)``, where ``compute(z=, activation=, parameter=)`` is it in one kernel for a z of y's shape and type.

    Any other z, one that is broadcast or whose type is wider, is added as the framework adds it, after the kernel.
    """
    if z is None:
        return compute(activation=name, parameter=parameter)
    if isinstance(z, torch.Tensor) and z.dtype == dtype:
        try:
            return compute(z=z, activation=name, parameter=parameter)
        except InvalidArgument as error:
            if error.argument != "z":
                raise
    y = compute() + z
    return y if name == "identity" else pointwise_fwd(y, None, None, 1.0, 0.0, name, parameter)


def computed_type(x: torch.Tensor) -> torch.dtype:
    """The type of what a convolution of x gives: autocast's where that is on."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
