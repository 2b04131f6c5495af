"""Resampling on tensors: the operators, their gradients, and `interpolate`."""

from __future__ import annotations

import math
from typing import Any

import torch

from ..core.errors import InvalidArgument
from ..ops.resampling import ResampleBwd, ResampleFwd
from ._library import Described, Op, Planned, dense, last, new_empty

_ATTRIBUTES = "float[] scale, str mode, bool align_corners, bool antialias"


def _attributes(size, scale, mode, align_corners, antialias) -> dict[str, Any]:
    return {
        "size": tuple(size),
        "scale": tuple(scale),
        "mode": mode,
        "align_corners": align_corners,
        "antialias": antialias,
    }


def _fwd(tensors: Any, attributes: Any) -> Described:
    return ResampleFwd(**_attributes(*attributes)), {"tensors": {"x": tensors[0]}}


def _bwd(tensors: Any, attributes: Any) -> Described:
    size, channels_last, *rest = attributes
    (dy,) = tensors
    given = {"dy": dy, "dx": dense(dy, (*dy.shape[:2], *size), channels_last)}
    return ResampleBwd(**_attributes(size, *rest)), {"tensors": given}


def _fwd_backward(needs, args, outputs, grads):
    x, _, *rest = args
    return (resample_bwd(grads[0], x.shape[2:], last(x), *rest),)


def _bwd_backward(needs, args, outputs, grads):
    """The map is linear: its gradient's gradient is the map itself."""
    dy, _, _, *rest = args
    return (resample_fwd(grads[0], dy.shape[2:], *rest),)


resample_fwd = Op(
    f"resample_fwd(Tensor x, SymInt[] size, {_ATTRIBUTES}) -> Tensor",
    1,
    Planned(_fwd),
    lambda x, size, *attributes: new_empty(x, (*x.shape[:2], *size), last(x)),
    _fwd_backward,
)
resample_bwd = Op(
    f"resample_bwd(Tensor dy, SymInt[] size, bool channels_last, {_ATTRIBUTES}) -> Tensor",
    1,
    Planned(_bwd),
    lambda dy, size, channels_last, *attributes: new_empty(dy, (*dy.shape[:2], *size), channels_last),
    _bwd_backward,
)

_LINEAR = {1: "linear", 2: "bilinear", 3: "trilinear"}
_KERNELS = {**dict.fromkeys(_LINEAR.values(), "linear"), "bicubic": "cubic"}
_MODES = ("nearest", "nearest-exact", *_LINEAR.values(), "bicubic", "area")


def _numbers(name: str, value: Any, ndim: int, kinds: tuple[type, ...], least: float) -> tuple:
    """One number of these kinds for each spatial axis, none of them at or below `least`."""
    values = tuple(value) if isinstance(value, (tuple, list)) else (value,) * ndim
    sound = all(isinstance(v, kinds) and not isinstance(v, bool) for v in values)
    if not sound or len(values) != ndim or not all(v > least and v < math.inf for v in values):
        what = "whole number above 0" if int in kinds and float not in kinds else "number above 0"
        raise InvalidArgument(name, repr(value), f"a {what}, or {ndim} of them")
    return values


def interpolate(
    input,
    size=None,
    scale_factor=None,
    mode="nearest",
    align_corners=None,
    recompute_scale_factor=None,
    antialias=False,
):
    """The images at another size.

    Parameters
    ----------
    input : torch.Tensor
        (N, C, W), (N, C, H, W) or (N, C, D, H, W); any strides. float64, float32, float16 or bfloat16.
    size : int or tuple of int, optional
        Spatial size of the result, or
    scale_factor : float or tuple of float, optional
        how many times the input's; the size is rounded down.
    mode : str
        ``nearest``, ``nearest-exact``, ``linear`` (W), ``bilinear`` (H, W), ``trilinear`` (D, H, W), ``bicubic``
        (H, W), or ``area``.
    align_corners : bool, optional
        For the linear modes and bicubic: whether the centres of the corner pixels are kept, instead of the corners.
    recompute_scale_factor : bool, optional
        Forget the scale factor once the size is known; the ratio of the sizes then gives the places.
    antialias : bool
        For bilinear and bicubic: average over as much of the input as an output pixel stands for.

    Returns
    -------
    torch.Tensor
        Channels-last where the input is.

    Raises
    ------
    InvalidArgument
        Names the argument that does not fit, and what would.

    Notes
    -----
    The definition is in `lucidnn.ops.resampling`.

    Examples
    --------
    >>> interpolate(torch.tensor([[[0.0, 4.0]]]), scale_factor=2, mode="linear")
    tensor([[[0., 1., 3., 4.]]])
    """
    if not isinstance(input, torch.Tensor):
        raise InvalidArgument("input", type(input).__name__, "a torch tensor")
    ndim = input.ndim - 2
    if ndim not in _LINEAR:
        raise InvalidArgument("input", f"shape {list(input.shape)}", "3, 4 or 5 axes: batch, channels, 1 to 3 spatial")
    if mode not in _MODES:
        raise InvalidArgument("mode", repr(mode), ", ".join(_MODES))
    if (mode in _LINEAR.values() and mode != _LINEAR[ndim]) or (mode == "bicubic" and ndim != 2):
        raise InvalidArgument("mode", repr(mode), f"{_LINEAR[ndim]} for an input of {ndim + 2} axes")
    if align_corners is not None and mode not in _KERNELS:
        raise InvalidArgument("align_corners", align_corners, f"None with mode {mode}")
    if antialias and mode not in ("bilinear", "bicubic"):
        raise InvalidArgument("antialias", antialias, f"False with mode {mode}; bilinear and bicubic have it")
    if (size is None) == (scale_factor is None):
        raise InvalidArgument("size", repr(size), "either a size or a scale_factor")
    scales: tuple[float, ...] = ()
    if size is not None:
        if recompute_scale_factor:
            raise InvalidArgument("recompute_scale_factor", True, "None or False where a size is given")
        sizes = _numbers("size", size, ndim, (int, torch.SymInt), 0)
    else:
        scales = tuple(map(float, _numbers("scale_factor", scale_factor, ndim, (int, float), 0)))
        sizes = tuple(_floor(n, s) for n, s in zip(input.shape[2:], scales, strict=True))
        if recompute_scale_factor or mode == "area":
            scales = ()
    kernel = _KERNELS.get(mode, mode)
    return resample_fwd(input, sizes, scales, kernel, bool(align_corners), bool(antialias))


def _floor(n: Any, scale: float) -> Any:
    return math.floor(n * scale) if isinstance(n, int) else torch.sym_int(n * scale)


def upsample(input, size=None, scale_factor=None, mode="nearest", align_corners=None):
    """`interpolate` under its older name.

    Examples
    --------
    >>> upsample(torch.tensor([[[0.0, 4.0]]]), 4)
    tensor([[[0., 0., 4., 4.]]])
    """
    return interpolate(input, size, scale_factor, mode, align_corners)
