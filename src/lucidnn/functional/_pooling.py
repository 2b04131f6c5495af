"""What the pooling functions share: inputs with or without a batch axis, the stride's default, given output sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..core.errors import InvalidArgument
from ._library import tuple_of


def with_batch(ndim: int, tensors: dict[str, Any], call: Callable[..., Any]) -> Any:
    """``call(*tensors)`` on (N, C, spatial); where the batch axis is missing it is added, and taken away again.

    Parameters
    ----------
    ndim : int
        Number of spatial axes.
    tensors : dict
        By the name of the function's argument; all with or all without a batch axis.
    call : callable
        Gives a tensor or a tuple of them.
    """
    if len(tensors) == 1:  # the hot case
        (t,) = tensors.values()
        if isinstance(t, torch.Tensor) and t.ndim == ndim + 2:
            return call(t)
    axes, first = 0, ""
    for name, t in tensors.items():
        if not isinstance(t, torch.Tensor):
            raise InvalidArgument(name, type(t).__name__, "a torch tensor")
        if t.ndim not in (ndim + 1, ndim + 2):
            accepted = f"{ndim + 2} axes (batch, channels, {ndim} spatial), or no batch axis"
            raise InvalidArgument(name, f"shape {list(t.shape)}", accepted)
        if axes not in (0, t.ndim):
            raise InvalidArgument(name, f"shape {list(t.shape)}", f"{axes} axes, as {first} has")
        axes, first = t.ndim, name
    if axes == ndim + 2:
        return call(*tensors.values())
    out = call(*(t.unsqueeze(0) for t in tensors.values()))
    return tuple(t.squeeze(0) for t in out) if isinstance(out, tuple) else out.squeeze(0)


def windows(kernel_size: Any, stride: Any, ndim: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Window and stride of each axis; the stride is the window where it is left out.

    Examples
    --------
    >>> windows(2, None, 2), windows((3, 2), 1, 2)
    (((2, 2), (2, 2)), ((3, 2), (1, 1)))
    """
    window = tuple_of(kernel_size, ndim, "kernel_size")
    left_out = stride is None or (isinstance(stride, (tuple, list)) and not stride)
    return window, window if left_out else tuple_of(stride, ndim, "stride")


def output_sizes(value: Any, sizes: Any) -> tuple[int, ...]:
    """Output size of each axis; None stands for the input's own.

    Examples
    --------
    >>> output_sizes((None, 3), (7, 9)), output_sizes(1, (7, 9))
    ((7, 3), (1, 1))
    """
    ndim = len(sizes)
    given = value if isinstance(value, (tuple, list)) else (value,)
    if len(given) in (1, ndim) and all(v is None or isinstance(v, (int, torch.SymInt)) for v in given):
        given = tuple(given) * (ndim // len(given))
        return tuple(n if v is None else v for v, n in zip(given, sizes, strict=True))
    raise InvalidArgument("output_size", repr(value), f"a whole number or None, or {ndim} of them")
