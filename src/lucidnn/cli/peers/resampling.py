"""The framework's resampling kernels."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from ...core.errors import NotSupported
from ...core.problem import Problem
from ..peer import Call, Peer, Tensors, aten

_LINEAR = {1: "linear", 2: "bilinear", 3: "trilinear"}


def _mode(problem: Problem) -> str:
    op: Any = problem.op
    if op.mode == "linear":
        return _LINEAR[len(op.size)]
    return "bicubic" if op.mode == "cubic" else op.mode


def _fwd(problem: Problem) -> Peer:
    op: Any = problem.op
    mode, sizes, scales = _mode(problem), list(op.size), list(op.scale) or None
    given: dict[str, Any] = {"size": sizes} if scales is None else {"scale_factor": scales}
    if op.mode in ("linear", "cubic"):
        given |= {"align_corners": op.align_corners, "antialias": op.antialias}
    call = f"F.interpolate({mode}{', antialias' if op.antialias else ''})"
    return Peer(call, problem.outputs, lambda t: lambda: F.interpolate(t["x"], mode=mode, **given))


def _bwd(problem: Problem) -> Peer:
    op: Any = problem.op
    dx, mode = problem["dx"], _mode(problem)
    shape, ndim = list(dx.shape), len(op.size)
    dy_size, scales = list(problem["dy"].shape[2:]), [s or None for s in op.scale or (0.0,) * ndim]
    if op.mode == "area":
        if ndim == 1:
            raise NotSupported("the framework's gradient of area in one dimension is not known")
        kernel = {2: aten._adaptive_avg_pool2d_backward, 3: aten._adaptive_avg_pool3d_backward}[ndim]

        def prepare(t: Tensors) -> Call:
            x = torch.empty_like(t["dx"])
            return lambda: kernel(t["dy"], x)

        return Peer(f"aten._adaptive_avg_pool{ndim}d_backward", problem.outputs, prepare)
    name = {
        "nearest": f"upsample_nearest{ndim}d_backward",
        "nearest-exact": f"_upsample_nearest_exact{ndim}d_backward",
        "bicubic": "upsample_bicubic2d_backward",
    }.get(mode, f"upsample_{mode}{ndim}d_backward")
    if op.antialias:
        name = f"_upsample_{mode}2d_aa_backward"
    kernel = getattr(aten, name)
    corners = [op.align_corners] if op.mode in ("linear", "cubic") else []
    return Peer(f"aten.{name}", problem.outputs, lambda t: lambda: kernel(t["dy"], dy_size, shape, *corners, *scales))


PEERS = {"resample_fwd": _fwd, "resample_bwd": _bwd}
