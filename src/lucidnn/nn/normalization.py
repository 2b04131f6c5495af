"""Normalizations with what follows them, an addition and an activation, in the same kernel."""

from __future__ import annotations

import functools
from typing import Any

import torch

from .. import functional
from .activation import activation_of
from .residual import with_residual


def batch_normalize(norm: Any, x: torch.Tensor, z: Any = None, name: str = "identity", parameter: float = 0.0) -> Any:
    """What a batch-norm module of the framework does, with an addition and an activation in the same kernel.

    The module's running statistics and its count of batches move as the framework moves them.
    """
    momentum = 0.0 if norm.momentum is None else norm.momentum
    if norm.training and norm.track_running_stats and norm.num_batches_tracked is not None:
        norm.num_batches_tracked.add_(1)
        if norm.momentum is None:  # a cumulative average: a tensor, because numbers are compiled for
            momentum = 1.0 / norm.num_batches_tracked.to(torch.float32)
    by_batch = norm.training or (norm.running_mean is None and norm.running_var is None)
    known = not norm.training or norm.track_running_stats
    normalized = functools.partial(
        functional.batch_norm,
        x,
        norm.running_mean if known else None,
        norm.running_var if known else None,
        norm.weight,
        norm.bias,
        by_batch,
        momentum,
        norm.eps,
    )
    return with_residual(normalized, x.dtype, z, name, parameter)


def _batch_norm_act(base: Any) -> Any:
    class BatchNormAct(base):
        """``act(batch_norm(x) + z)`` in one kernel, forward and backward.

        Parameters
        ----------
        *args, **kwargs
            Those of the framework's batch normalization of the same rank.
        activation : str, torch.nn.Module or None
            As `lucidnn.nn.activation_of` takes it.

        Notes
        -----
        Parameters and buffers are named as the plain normalization's. ``forward(x, z=None)``; a z that is broadcast, or
        of another type, is added after the kernel.
        """

        def __init__(self, *args: Any, activation: Any = "relu", **kwargs: Any):
            super().__init__(*args, **kwargs)
            self.name, self.parameter = activation_of(activation)

        def forward(self, x: torch.Tensor, z: torch.Tensor | None = None) -> torch.Tensor:
            self._check_input_dim(x)
            return batch_normalize(self, x, z, self.name, self.parameter)

        def extra_repr(self) -> str:
            return f"{super().extra_repr()}, activation={self.name}"

    BatchNormAct.__name__ = BatchNormAct.__qualname__ = f"BatchNormAct{base.__name__[-2:]}"
    BatchNormAct.__module__ = __name__
    return BatchNormAct


BatchNormAct1d, BatchNormAct2d, BatchNormAct3d = (
    _batch_norm_act(norm) for norm in (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d)
)


class GroupNormAct(torch.nn.Sequential):
    """A group normalization and its activation (SiLU, as diffusion models have it) in one kernel.

    Parameters
    ----------
    num_groups, num_channels, eps, affine, device, dtype
        As those of ``torch.nn.GroupNorm``.
    activation : str, torch.nn.Module or None
        As `lucidnn.nn.activation_of` takes it.

    Notes
    -----
    Parameters are named as those of ``Sequential(GroupNorm(...), SiLU())``: ``0.weight``, ``0.bias``.

    Examples
    --------
    >>> norm = GroupNormAct(2, 4)
    >>> sorted(norm.state_dict()), norm(torch.zeros(1, 4, 2, 2)).shape
    (['0.bias', '0.weight'], torch.Size([1, 4, 2, 2]))
    """

    def __init__(
        self, num_groups: int, num_channels: int, eps: float = 1e-5, affine: bool = True, *, activation: Any = "silu",
        device: Any = None, dtype: Any = None,
    ):  # fmt: skip
        super().__init__(torch.nn.GroupNorm(num_groups, num_channels, eps, affine, device=device, dtype=dtype))
        self.name, self.parameter = activation_of(activation)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalize and activate (N, C, ...)."""
        norm: Any = self[0]
        return functional.group_norm(
            input, norm.num_groups, norm.weight, norm.bias, norm.eps, activation=self.name, parameter=self.parameter
        )

    def extra_repr(self) -> str:
        """The activation's name."""
        return f"activation={self.name}"
