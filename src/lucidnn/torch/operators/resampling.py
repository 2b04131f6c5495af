"""The framework's resampling (interpolate), sampling by a grid, unfold and fold, and shuffles of channels and pixels.

What a scale factor means is settled above: the framework works out the size, and gives the factors beside it. The mode
``area`` is an adaptive pooling.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...core.errors import InvalidArgument, NotSupported
from ...functional import folding, resampling
from ...functional._library import Described, dense, run
from ...functional.grid_sample import _BWD, _fwd
from ...ops.grid_sample import MODES, PADDING_MODES
from .._override import override
from ._layout import RULES, following, laid_out, suggests_last

# ---- to another size -------------------------------------------------------------------------------------------

_resample_fwd = following(resampling._fwd)


def _resample_bwd(tensors: Sequence[Any], attributes: Any) -> Described:
    rule, output_size, input_size, *rest = attributes
    (dy,) = tensors
    if tuple(dy.shape) != (*input_size[:2], *output_size):
        raise InvalidArgument("grad_output", f"shape {list(dy.shape)}", f"shape {[*input_size[:2], *output_size]}")
    if 0 in dy.shape[1:]:
        raise NotSupported("a tensor without elements")
    return resampling._bwd(tensors, (input_size[2:], RULES[rule](dy), *rest))


def _factors(ndim: int, given: Sequence[float | None]) -> tuple[float | None, ...]:
    """The scale factor of each axis, or nothing where the sizes tell."""
    named = tuple(s for s in given if s is not None)
    if len(named) not in (0, ndim):
        raise NotSupported("a scale factor for some of the axes")
    return named


def _resample(name: str, ndim: int, mode: str, forward: str, backward: str, antialias: bool = False) -> None:
    """Take over one of the framework's operators and its gradient.

    Parameters
    ----------
    name : str
    ndim : int
        Number of spatial axes.
    mode : str
        As in `lucidnn.ops.resampling`.
    forward, backward : str
        How the framework lays out the results: keys of `RULES`.
    antialias : bool
    """
    aligns = not mode.startswith("nearest")  # otherwise there is no such argument

    def resample(input: torch.Tensor, output_size: list[int], *rest: Any) -> torch.Tensor:
        factors = _factors(ndim, rest[aligns:])
        _check(ndim, input, output_size)
        corners = aligns and rest[0]
        return run(_resample_fwd, (input,), (forward, tuple(output_size), factors, mode, corners, antialias))

    def resample_backward(
        grad_output: torch.Tensor, output_size: list[int], input_size: list[int], *rest: Any
    ) -> torch.Tensor:
        factors = _factors(ndim, rest[aligns:])
        sizes = tuple(output_size), tuple(input_size)
        return run(_resample_bwd, (grad_output,), (backward, *sizes, factors, mode, aligns and rest[0], antialias))

    override(name)(resample)
    override(f"{name}_backward")(resample_backward)


def _check(ndim: int, input: torch.Tensor, size: list[int]) -> None:
    if input.ndim != ndim + 2 or len(size) != ndim:
        raise InvalidArgument("input", f"{input.ndim} axes", f"{ndim + 2} axes")


for mode, name in (("nearest", "upsample_nearest"), ("nearest-exact", "_upsample_nearest_exact")):
    _resample(f"{name}1d", 1, mode, "first", "first")
    _resample(f"{name}2d", 2, mode, "suggested", "suggested")
    _resample(f"{name}3d", 3, mode, "suggested", "first")
_resample("upsample_linear1d", 1, "linear", "first", "first")
_resample("upsample_bilinear2d", 2, "linear", "suggested", "suggested")
_resample("_upsample_bilinear2d_aa", 2, "linear", "suggested", "suggested", antialias=True)
_resample("upsample_bicubic2d", 2, "cubic", "suggested", "first")
_resample("_upsample_bicubic2d_aa", 2, "cubic", "suggested", "first", antialias=True)
_resample("upsample_trilinear3d", 3, "linear", "suggested", "suggested")


# ---- by a grid -------------------------------------------------------------------------------------------------


def _grid_fwd(tensors: Sequence[Any], attributes: Any) -> Described:
    return laid_out(_fwd(tensors, attributes), "first", filled=False)


def _grid_bwd(gradients: str) -> Callable[[Sequence[Any], Any], Described]:
    def describe(tensors: Sequence[Any], attributes: Any) -> Described:
        op, given = _BWD[gradients](tensors, attributes)
        if "dx" in given["tensors"]:
            given["tensors"]["dx"] = dense(tensors[1], tensors[1].shape, False)
        return op, given

    return describe


_GRID_BWD = {gradients: _grid_bwd(gradients) for gradients in ("both", "x", "grid")}


def _named(mode: int, padding_mode: int) -> tuple[str, str]:
    if mode not in range(3) or padding_mode not in range(3):
        raise InvalidArgument("interpolation_mode", (mode, padding_mode), "numbers from 0 to 2")
    return MODES[mode], PADDING_MODES[padding_mode]


def _grid(ndim: int, x: torch.Tensor, grid: torch.Tensor, mode: int, padding: int, corners: bool) -> torch.Tensor:
    if x.ndim != ndim + 2:
        raise InvalidArgument("input", f"{x.ndim} axes", f"{ndim + 2} axes")
    return run(_grid_fwd, (x, grid), (*_named(mode, padding), corners))


def _grid_backward(ndim, grad, x, grid, mode, padding, corners, mask):
    if x.ndim != ndim + 2:
        raise InvalidArgument("input", f"{x.ndim} axes", f"{ndim + 2} axes")
    attributes = (*_named(mode, padding), corners)
    if mask[0] and mask[1]:
        return run(_GRID_BWD["both"], (grad, x, grid), attributes)
    if mask[0]:
        return run(_GRID_BWD["x"], (grad, x, grid), attributes), None
    return None, run(_GRID_BWD["grid"], (grad, x, grid), attributes)


@override("grid_sampler_2d")
def grid_sampler_2d(input, grid, interpolation_mode, padding_mode, align_corners):
    """Images at the places of a grid."""
    return _grid(2, input, grid, interpolation_mode, padding_mode, align_corners)


@override("grid_sampler_3d")
def grid_sampler_3d(input, grid, interpolation_mode, padding_mode, align_corners):
    """Volumes at the places of a grid."""
    return _grid(3, input, grid, interpolation_mode, padding_mode, align_corners)


@override("grid_sampler_2d_backward")
def grid_sampler_2d_backward(grad_output, input, grid, interpolation_mode, padding_mode, align_corners, output_mask):
    """Gradients of the images and of the places, those that the mask asks for."""
    return _grid_backward(
        2, grad_output, input, grid, interpolation_mode, padding_mode, align_corners, output_mask
    )  # fmt: skip


@override("grid_sampler_3d_backward")
def grid_sampler_3d_backward(grad_output, input, grid, interpolation_mode, padding_mode, align_corners, output_mask):
    """Gradients of the volumes and of the places, those that the mask asks for."""
    return _grid_backward(
        3, grad_output, input, grid, interpolation_mode, padding_mode, align_corners, output_mask
    )  # fmt: skip


@override("cudnn_grid_sampler", devices=("CUDA",))
def cudnn_grid_sampler(input, grid):
    """What the framework gives to cuDNN: bilinear, zeros beyond the image, corners aligned."""
    return _grid(2, input, grid, 0, 0, True)


@override("cudnn_grid_sampler_backward", devices=("CUDA",))
def cudnn_grid_sampler_backward(input, grid, grad_output):
    """Gradients of the images and of the places."""
    return _grid_backward(2, grad_output, input, grid, 0, 0, True, (True, True))


# ---- windows as columns, and shuffles --------------------------------------------------------------------------


def _unfold(tensors: Sequence[Any], attributes: Any) -> Described:
    if 0 in tensors[0].shape[1:]:
        raise NotSupported("a tensor without elements")
    return folding._unfold(tensors, attributes)


def _fold(tensors: Sequence[Any], attributes: Any) -> Described:
    if 0 in tensors[0].shape[1:]:
        raise NotSupported("a tensor without elements")
    return folding._fold(tensors, attributes)


def _shuffle(tensors: Sequence[Any], attributes: Any) -> Described:
    rule, *rest = attributes
    return laid_out(folding._shuffle(tensors, rest), rule, filled=False)


@override("im2col")
def im2col(input, kernel_size, dilation, padding, stride):
    """Windows as columns."""
    attributes = (tuple(kernel_size), tuple(stride), tuple(padding), tuple(dilation))
    if input.ndim == 3:
        return run(_unfold, (input.unsqueeze(0),), attributes).squeeze(0)
    return run(_unfold, (input,), attributes)


@override("col2im")
def col2im(input, output_size, kernel_size, dilation, padding, stride):
    """Columns added up where they came from."""
    attributes = (tuple(output_size), tuple(kernel_size), tuple(stride), tuple(padding), tuple(dilation))
    if input.ndim == 2:
        return run(_fold, (input.unsqueeze(0),), attributes).squeeze(0)
    return run(_fold, (input,), attributes)


def _shuffled(x: torch.Tensor, kind: str, factor: int) -> torch.Tensor:
    if x.ndim == 4:
        return run(_shuffle, (x,), ("suggested on a CPU", kind, factor))
    if x.ndim < 3 or suggests_last(x):
        raise InvalidArgument("input", f"{x.ndim} axes with strides {x.stride()}", "3 axes or more, channels first")
    y = run(_shuffle, (x.reshape(-1, *x.shape[-3:]),), ("first", kind, factor))
    return y.view(*x.shape[:-3], *y.shape[1:])


@override("pixel_shuffle")
def pixel_shuffle(input, upscale_factor):
    """Channels become pixels."""
    return _shuffled(input, "pixel_shuffle", upscale_factor)


@override("pixel_unshuffle")
def pixel_unshuffle(input, downscale_factor):
    """Pixels become channels."""
    return _shuffled(input, "pixel_unshuffle", downscale_factor)


@override("channel_shuffle")
def channel_shuffle(input, groups):
    """Channels dealt out anew."""
    return run(_shuffle, (input,), ("suggested on a CPU", "channel_shuffle", groups))
