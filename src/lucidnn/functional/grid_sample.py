"""Sampling by a grid on tensors: the operators, their gradients, `grid_sample` and `affine_grid`."""

from __future__ import annotations

from typing import Any

import torch

from ..core.errors import InvalidArgument, NotSupported
from ..ops.grid_sample import MODES, PADDING_MODES, GridSampleBwd, GridSampleFwd
from ._library import Described, Op, Planned, dense, last, new_empty

_ATTRIBUTES = "str mode, str padding_mode, bool align_corners"


def _fwd(tensors: Any, attributes: Any) -> Described:
    return GridSampleFwd(*attributes), {"tensors": {"x": tensors[0], "grid": tensors[1]}}


def _bwd(gradients: str) -> Any:
    def describe(tensors: Any, attributes: Any) -> Described:
        dy, x, grid = tensors
        given = {"dy": dy, "x": x, "grid": grid}
        if gradients != "grid":
            given["dx"] = dense(x, x.shape, last(x))
        if gradients != "x":
            given["dgrid"] = dense(grid, grid.shape, False)
        mode, padding_mode, align_corners = attributes
        return GridSampleBwd(mode, padding_mode, align_corners, gradients), {"tensors": given}

    return describe


_BWD = {gradients: _bwd(gradients) for gradients in ("both", "x", "grid")}


def _fwd_fake(x, grid, mode, padding_mode, align_corners):
    return new_empty(x, (*x.shape[:2], *grid.shape[1:-1]), last(x))


def _fwd_backward(needs, args, outputs, grads):
    x, grid, *rest = args
    if needs[0] and needs[1]:
        return grid_sample_bwd(grads[0], x, grid, *rest)
    if needs[0]:
        return grid_sample_bwd_x(grads[0], x, grid, *rest), None
    return None, grid_sample_bwd_grid(grads[0], x, grid, *rest)


def _bwd_backward(needs, args, outputs, grads):
    raise NotSupported("the second derivative of grid_sample; accepted: the first")


grid_sample_fwd = Op(
    f"grid_sample_fwd(Tensor x, Tensor grid, {_ATTRIBUTES}) -> Tensor", 2, Planned(_fwd), _fwd_fake, _fwd_backward
)
grid_sample_bwd = Op(
    f"grid_sample_bwd(Tensor dy, Tensor x, Tensor grid, {_ATTRIBUTES}) -> (Tensor, Tensor)",
    3,
    Planned(_BWD["both"]),
    lambda dy, x, grid, *attributes: (new_empty(x, x.shape, last(x)), grid.new_empty(grid.shape)),
    _bwd_backward,
)
grid_sample_bwd_x = Op(
    f"grid_sample_bwd_x(Tensor dy, Tensor x, Tensor grid, {_ATTRIBUTES}) -> Tensor",
    3,
    Planned(_BWD["x"]),
    lambda dy, x, grid, *attributes: new_empty(x, x.shape, last(x)),
    _bwd_backward,
)
grid_sample_bwd_grid = Op(
    f"grid_sample_bwd_grid(Tensor dy, Tensor x, Tensor grid, {_ATTRIBUTES}) -> Tensor",
    3,
    Planned(_BWD["grid"]),
    lambda dy, x, grid, *attributes: grid.new_empty(grid.shape),
    _bwd_backward,
)


def grid_sample(input, grid, mode="bilinear", padding_mode="zeros", align_corners=None):
    """The images at the places that the grid names.

    Parameters
    ----------
    input : torch.Tensor
        (N, C, H, W) or (N, C, D, H, W); any strides. float64, float32, float16 or bfloat16.
    grid : torch.Tensor
        (N, output H, output W, 2) or (N, output D, output H, output W, 3), of the input's type: for each output point
        a place along W, H (and D), -1 to 1 across the image.
    mode : {'bilinear', 'nearest', 'bicubic'}
        Bicubic in two dimensions only.
    padding_mode : {'zeros', 'border', 'reflection'}
        What is beyond the image.
    align_corners : bool, optional
        Whether -1 and 1 are the centres of the corner pixels, instead of their outer edges.

    Returns
    -------
    torch.Tensor
        (N, C, output sizes), channels-last where the input is.

    Raises
    ------
    InvalidArgument
        Names the argument that does not fit, and what would.

    Notes
    -----
    The definition is in `lucidnn.ops.grid_sample`. There is no second derivative, as in the framework.

    Examples
    --------
    >>> x = torch.tensor([[[[0.0, 4.0]]]])
    >>> grid_sample(x, torch.tensor([[[[-0.5, 0.0], [0.0, 0.0]]]]), align_corners=False)
    tensor([[[[0., 2.]]]])
    """
    for name, t in (("input", input), ("grid", grid)):
        if not isinstance(t, torch.Tensor):
            raise InvalidArgument(name, type(t).__name__, "a torch tensor")
    if mode not in MODES:
        raise InvalidArgument("mode", repr(mode), ", ".join(MODES))
    if padding_mode not in PADDING_MODES:
        raise InvalidArgument("padding_mode", repr(padding_mode), ", ".join(PADDING_MODES))
    return grid_sample_fwd(input, grid, mode, padding_mode, bool(align_corners))


def affine_grid(theta, size, align_corners=None):
    """The grid of an affine map, for `grid_sample`: a product of small matrices, differentiable as such.

    Parameters
    ----------
    theta : torch.Tensor
        (N, 2, 3) or (N, 3, 4).
    size : sequence of int
        (N, C, H, W) or (N, C, D, H, W) of the images to come.
    align_corners : bool, optional
        As in `grid_sample`.

    Returns
    -------
    torch.Tensor
        (N, H, W, 2) or (N, D, H, W, 3).

    Raises
    ------
    InvalidArgument
        Names the argument that does not fit, and what would.

    Examples
    --------
    >>> affine_grid(torch.tensor([[[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]]), (1, 1, 1, 2), align_corners=True)
    tensor([[[[-1.,  0.],
              [ 1.,  0.]]]])
    """
    if not isinstance(theta, torch.Tensor) or not theta.is_floating_point():
        found = theta.dtype if isinstance(theta, torch.Tensor) else type(theta).__name__
        raise InvalidArgument("theta", found, "a tensor of floating point")
    n, _, *spatial = size if len(size) in (4, 5) else (0, 0)
    if len(size) not in (4, 5) or min(size) < 1:
        raise InvalidArgument("size", list(size), "4 or 5 sizes >= 1: batch, channels, 2 or 3 spatial")
    ndim = len(spatial)
    if theta.shape != (n, ndim, ndim + 1):
        raise InvalidArgument("theta", f"shape {list(theta.shape)}", f"shape {[n, ndim, ndim + 1]}")
    places = []
    for axis in reversed(range(ndim)):
        count = spatial[axis]
        step = torch.arange(count, device=theta.device, dtype=theta.dtype)
        if align_corners:
            along = step * (2 / (count - 1)) - 1 if count > 1 else step
        else:
            along = (2 * step + 1) / count - 1
        places.append(along.reshape([-1 if other == axis else 1 for other in range(ndim)]).expand(spatial))
    base = torch.stack([*places, torch.ones_like(places[0])], -1).reshape(1, -1, ndim + 1)
    return (base.expand(n, -1, -1) @ theta.transpose(1, 2)).reshape(n, *spatial, ndim)
