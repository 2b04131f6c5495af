"""Windows as columns, and shuffles: `unfold`, `fold`, `pixel_shuffle`, `pixel_unshuffle`, `channel_shuffle`."""

from __future__ import annotations

import math
from typing import Any

import torch

from ..core.errors import InvalidArgument
from ..ops.folding import INVERSE, Shuffle, UnfoldBwd, UnfoldFwd
from ._library import Described, Op, Planned, last, new_empty, tuple_of

_ATTRIBUTES = "int[] window, int[] stride, int[] padding, int[] dilation"
_NAMES = ("window", "stride", "padding", "dilation")


def _attributes(values: Any) -> dict[str, Any]:
    return {name: tuple(value) for name, value in zip(_NAMES, values, strict=True)}


def _unfold(tensors: Any, attributes: Any) -> Described:
    return UnfoldFwd(**_attributes(attributes)), {"tensors": {"x": tensors[0]}}


def _fold(tensors: Any, attributes: Any) -> Described:
    size, *rest = attributes
    return UnfoldBwd(size=tuple(size), **_attributes(rest)), {"tensors": {"dy": tensors[0]}}


def _shuffle(tensors: Any, attributes: Any) -> Described:
    return Shuffle(*attributes), {"tensors": {"x": tensors[0]}}


def _unfold_fake(x, window, stride, padding, dilation):
    blocks = [
        (n + 2 * p - d * (r - 1) - 1) // u + 1
        for n, r, u, p, d in zip(x.shape[2:], window, stride, padding, dilation, strict=True)
    ]
    return x.new_empty((x.shape[0], x.shape[1] * math.prod(window), math.prod(blocks)))


def _unfold_backward(needs, args, outputs, grads):
    x, *rest = args
    return (unfold_bwd(grads[0], x.shape[2:], *rest),)


def _fold_backward(needs, args, outputs, grads):
    return (unfold_fwd(grads[0], *args[2:]),)


def _shuffle_fake(x, kind, factor):
    shape = Shuffle(kind, factor).shape(x.shape)
    return new_empty(x, shape, last(x))


def _shuffle_backward(needs, args, outputs, grads):
    x, kind, factor = args
    if kind == "channel_shuffle":
        return (shuffle(grads[0], kind, x.shape[1] // factor),)
    return (shuffle(grads[0], INVERSE[kind], factor),)


unfold_fwd = Op(f"unfold_fwd(Tensor x, {_ATTRIBUTES}) -> Tensor", 1, Planned(_unfold), _unfold_fake, _unfold_backward)
unfold_bwd = Op(
    f"unfold_bwd(Tensor dy, SymInt[] size, {_ATTRIBUTES}) -> Tensor",
    1,
    Planned(_fold),
    lambda dy, size, window, *rest: dy.new_empty((dy.shape[0], dy.shape[1] // math.prod(window), *size)),
    _fold_backward,
)
shuffle = Op(
    "shuffle(Tensor x, str kind, int factor) -> Tensor", 1, Planned(_shuffle), _shuffle_fake, _shuffle_backward
)


def _batched(input: Any, ndim: int, what: str) -> bool:
    """Whether there is a batch axis: without one there are `ndim` axes."""
    if not isinstance(input, torch.Tensor):
        raise InvalidArgument("input", type(input).__name__, "a torch tensor")
    if input.ndim not in (ndim, ndim + 1):
        raise InvalidArgument("input", f"shape {list(input.shape)}", f"{ndim + 1} axes ({what}), or no batch axis")
    return input.ndim == ndim + 1


def unfold(input, kernel_size, dilation=1, padding=0, stride=1):
    """The windows of the images, each as a column.

    Parameters
    ----------
    input : torch.Tensor
        (N, C, H, W), or (C, H, W); any strides. float64, float32, float16 or bfloat16.
    kernel_size, dilation, padding, stride : int or tuple of int
        One number, or one for each of H and W.

    Returns
    -------
    torch.Tensor
        (N, C times the window's points, number of windows); zeros where a window reaches over the edge.

    Raises
    ------
    InvalidArgument
        Names the argument that does not fit, and what would.

    Examples
    --------
    >>> unfold(torch.arange(6.0).reshape(1, 1, 2, 3), 2)
    tensor([[[0., 1.],
             [1., 2.],
             [3., 4.],
             [4., 5.]]])
    """
    if not _batched(input, 3, "batch, channels, H, W"):
        return unfold(input.unsqueeze(0), kernel_size, dilation, padding, stride).squeeze(0)
    return unfold_fwd(input, *_windows(kernel_size, dilation, padding, stride))


def fold(input, output_size, kernel_size, dilation=1, padding=0, stride=1):
    """Columns added up where `unfold` takes them from.

    Parameters
    ----------
    input : torch.Tensor
        (N, C times the window's points, number of windows), or without N.
    output_size : int or tuple of int
        Of the images.
    kernel_size, dilation, padding, stride : int or tuple of int
        As in `unfold`.

    Returns
    -------
    torch.Tensor
        (N, C, H, W).

    Examples
    --------
    >>> fold(torch.ones(1, 4, 2), (2, 3), 2)
    tensor([[[[1., 2., 1.],
              [1., 2., 1.]]]])
    """
    if not _batched(input, 2, "batch, channels times window, windows"):
        return fold(input.unsqueeze(0), output_size, kernel_size, dilation, padding, stride).squeeze(0)
    size = tuple_of(output_size, 2, "output_size")
    return unfold_bwd(input, size, *_windows(kernel_size, dilation, padding, stride))


def _windows(kernel_size: Any, dilation: Any, padding: Any, stride: Any) -> list[tuple[int, ...]]:
    given = {"kernel_size": kernel_size, "stride": stride, "padding": padding, "dilation": dilation}
    return [tuple_of(value, 2, name) for name, value in given.items()]


def _shuffled(input: Any, kind: str, factor: Any, name: str) -> torch.Tensor:
    if not isinstance(input, torch.Tensor):
        raise InvalidArgument("input", type(input).__name__, "a torch tensor")
    if not isinstance(factor, int) or factor < 1:
        raise InvalidArgument(name, repr(factor), "a whole number above 0")
    if kind == "channel_shuffle":
        return shuffle(input, kind, factor)
    if input.ndim < 3:
        raise InvalidArgument("input", f"shape {list(input.shape)}", "3 axes or more, the last ones channels, H, W")
    if input.ndim == 4:
        return shuffle(input, kind, factor)
    y = shuffle(input.reshape(-1, *input.shape[-3:]), kind, factor)
    return y.reshape(*input.shape[:-3], *y.shape[1:])


def pixel_shuffle(input, upscale_factor):
    """Groups of f * f channels become images f times as high and wide.

    Parameters
    ----------
    input : torch.Tensor
        (..., C f f, H, W); any strides. float64, float32, float16 or bfloat16.
    upscale_factor : int

    Returns
    -------
    torch.Tensor
        (..., C, H f, W f).

    Examples
    --------
    >>> pixel_shuffle(torch.arange(4.0).reshape(1, 4, 1, 1), 2)
    tensor([[[[0., 1.],
              [2., 3.]]]])
    """
    return _shuffled(input, "pixel_shuffle", upscale_factor, "upscale_factor")


def pixel_unshuffle(input, downscale_factor):
    """`pixel_shuffle` undone: (..., C, H f, W f) becomes (..., C f f, H, W).

    Examples
    --------
    >>> pixel_unshuffle(torch.arange(4.0).reshape(1, 1, 2, 2), 2).flatten()
    tensor([0., 1., 2., 3.])
    """
    return _shuffled(input, "pixel_unshuffle", downscale_factor, "downscale_factor")


def channel_shuffle(input, groups):
    """Channels of (N, C, ...) dealt out anew: the first of each group, then the second of each, and so on.

    Examples
    --------
    >>> channel_shuffle(torch.arange(6.0).reshape(1, 6, 1), 2).flatten()
    tensor([0., 3., 1., 4., 2., 5.])
    """
    return _shuffled(input, "channel_shuffle", groups, "groups")
