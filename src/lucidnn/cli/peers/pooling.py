"""The framework's average, power and adaptive pooling and its unpooling, as peers of the problems."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from ...core.errors import NotSupported
from ...core.problem import Problem
from ..peer import Call, Peer, Tensors, aten


def _windows(problem: Problem) -> tuple[int, list[int], list[int], list[int]]:
    """Number of axes, window, stride and padding."""
    op: Any = problem.op
    if any(a != b for a, b in op.padding):
        raise NotSupported("the framework pads both sides of a pooled axis alike")
    if max(op.dilation) > 1:
        raise NotSupported("the framework's average pooling has no dilation")
    return len(op.window), list(op.window), list(op.stride), [a for a, _ in op.padding]


def _avg_fwd(problem: Problem) -> Peer:
    op: Any = problem.op
    ndim, *windows = _windows(problem)
    pool: Any = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)[ndim - 1]
    rest = [op.ceil_mode, op.count_padding, *([op.divisor or None] if ndim > 1 else [])]
    if ndim == 1 and op.divisor:
        raise NotSupported("the framework's one-dimensional average pooling has no divisor")
    return Peer(f"F.avg_pool{ndim}d", problem.outputs, lambda t: lambda: pool(t["x"], *windows, *rest))


def _avg_bwd(problem: Problem) -> Peer:
    op: Any = problem.op
    ndim, *windows = _windows(problem)
    if ndim == 1:  # the framework's one-dimensional gradient is its two-dimensional one
        windows = [[fill, *values] for fill, values in zip((1, 1, 0), windows, strict=True)]
    backward = aten.avg_pool3d_backward if ndim == 3 else aten.avg_pool2d_backward

    def prepare(t: Tensors) -> Call:
        x, dy = torch.empty_like(t["dx"]), t["dy"]
        if ndim == 1:
            x, dy = x.unsqueeze(2), dy.unsqueeze(2)
        return lambda: backward(dy, x, *windows, op.ceil_mode, op.count_padding, op.divisor or None).view(
            problem["dx"].shape
        )

    return Peer(f"aten.avg_pool{max(ndim, 2)}d_backward", problem.outputs, prepare)


def _lp_fwd(problem: Problem) -> Peer:
    op: Any = problem.op
    ndim, window, stride, padding = _windows(problem)
    if any(padding):
        raise NotSupported("the framework's power pooling has no padding")
    pool: Any = (F.lp_pool1d, F.lp_pool2d, F.lp_pool3d)[ndim - 1]
    last = [window, stride] if ndim > 1 else [window[0], stride[0]]
    return Peer(f"F.lp_pool{ndim}d", problem.outputs, lambda t: lambda: pool(t["x"], op.norm, *last, op.ceil_mode))


def _gradient(name: str, problem: Problem, forward: Callable[[torch.Tensor], torch.Tensor]) -> Peer:
    """The framework's gradient through its own graph, built before the clock runs."""

    def prepare(t: Tensors) -> Call:
        x = (t["x"] if "x" in t else torch.empty_like(t["dx"])).detach().requires_grad_()
        with torch.enable_grad():
            y = forward(x)
        return lambda: torch.autograd.grad(y, x, t["dy"], retain_graph=True)[0]

    return Peer(name, problem.outputs, prepare, graph=False)


def _lp_bwd(problem: Problem) -> Peer:
    op: Any = problem.op
    ndim, window, stride, padding = _windows(problem)
    if any(padding):
        raise NotSupported("the framework's power pooling has no padding")
    pool: Any = (F.lp_pool1d, F.lp_pool2d, F.lp_pool3d)[ndim - 1]
    last = [window, stride] if ndim > 1 else [window[0], stride[0]]
    return _gradient(f"grad(F.lp_pool{ndim}d)", problem, lambda x: pool(x, op.norm, *last, op.ceil_mode))


def _adaptive_avg_fwd(problem: Problem) -> Peer:
    sizes = list(problem["y"].shape[2:])
    pool: Any = (F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d)[len(sizes) - 1]
    size: Any = sizes if len(sizes) > 1 else sizes[0]
    return Peer(f"F.adaptive_avg_pool{len(sizes)}d", problem.outputs, lambda t: lambda: pool(t["x"], size))


def _adaptive_avg_bwd(problem: Problem) -> Peer:
    sizes = list(problem["dy"].shape[2:])
    pool: Any = (F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d)[len(sizes) - 1]
    size: Any = sizes if len(sizes) > 1 else sizes[0]
    return _gradient(f"grad(F.adaptive_avg_pool{len(sizes)}d)", problem, lambda x: pool(x, size))


def _adaptive_max_fwd(problem: Problem) -> Peer:
    op: Any = problem.op
    sizes = list(problem["y"].shape[2:])
    pool: Any = (F.adaptive_max_pool1d, F.adaptive_max_pool2d, F.adaptive_max_pool3d)[len(sizes) - 1]
    size: Any = sizes if len(sizes) > 1 else sizes[0]
    outputs = {"none": ("y",), "i32": ("y", None), "i64": ("y", "index")}[op.index_type]
    indices = op.index_type != "none"
    return Peer(f"F.adaptive_max_pool{len(sizes)}d", outputs, lambda t: lambda: pool(t["x"], size, indices))


def _adaptive_max_bwd(problem: Problem) -> Peer:
    ndim = problem["dy"].ndim - 2
    flat = ndim == 1
    backward = aten.adaptive_max_pool3d_backward if ndim == 3 else aten.adaptive_max_pool2d_backward

    def prepare(t: Tensors) -> Call:
        x, index, dy = torch.empty_like(t["dx"]), t["index"].long(), t["dy"]
        index = torch.empty_strided(dy.shape, dy.stride(), dtype=index.dtype, device=index.device).copy_(index)
        if flat:
            x, index, dy = x.unsqueeze(2), index.unsqueeze(2), dy.unsqueeze(2)
        return lambda: backward(dy, x, index).view(problem["dx"].shape)

    return Peer(f"aten.adaptive_max_pool{max(ndim, 2)}d_backward", problem.outputs, prepare)


def _unpool_fwd(problem: Problem) -> Peer:
    sizes = list(problem["y"].shape[2:])
    ndim = len(sizes)
    unpool = aten.max_unpool3d if ndim == 3 else aten.max_unpool2d
    if problem.is_empty:
        raise NotSupported("the framework's unpooling takes no tensors without elements")

    def prepare(t: Tensors) -> Call:
        x, index = t["x"], t["index"].long()
        if ndim == 1:
            return lambda: unpool(x.unsqueeze(3), index.unsqueeze(3), [*sizes, 1]).squeeze(3)
        extra = ([1] * ndim, [0] * ndim) if ndim == 3 else ()
        return lambda: unpool(x, index, sizes, *extra)

    return Peer(f"aten.max_unpool{max(ndim, 2)}d", problem.outputs, prepare)


def _unpool_bwd(problem: Problem) -> Peer:
    def prepare(t: Tensors) -> Call:
        dy, index = t["dy"], t["index"].long()
        return lambda: dy.flatten(2).gather(2, index.flatten(2)).view(index.shape)

    return Peer("gather", problem.outputs, prepare)


PEERS: dict[str, Callable[[Problem], Peer]] = {
    "avg_pool_fwd": _avg_fwd,
    "avg_pool_bwd": _avg_bwd,
    "lp_pool_fwd": _lp_fwd,
    "lp_pool_bwd": _lp_bwd,
    "adaptive_avg_pool_fwd": _adaptive_avg_fwd,
    "adaptive_avg_pool_bwd": _adaptive_avg_bwd,
    "adaptive_max_pool_fwd": _adaptive_max_fwd,
    "adaptive_max_pool_bwd": _adaptive_max_bwd,
    "max_unpool_fwd": _unpool_fwd,
    "max_unpool_bwd": _unpool_bwd,
}
