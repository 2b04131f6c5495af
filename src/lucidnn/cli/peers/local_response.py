"""The framework's local response normalization: its own composite, and autograd through it.

Divisive normalization is written the same way as the framework's function is: squares, average pooling, a power.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as T

from ...core.errors import NotSupported
from ...core.problem import Problem
from ..peer import Call, Peer, Tensors


def _lrn(problem: Problem) -> Callable[..., torch.Tensor]:
    op: Any = problem.op
    if problem["x"].ndim < 3:
        raise NotSupported("the framework's local_response_norm takes 3 axes or more")
    return functools.partial(T.local_response_norm, size=op.size, alpha=op.lrn_alpha, beta=op.lrn_beta, k=op.lrn_k)


def _divisive(problem: Problem) -> Callable[..., torch.Tensor]:
    op: Any = problem.op
    space = problem["x"].ndim - 2
    if not 1 <= space <= 3:
        raise NotSupported(f"the framework pools over 1 to 3 axes, found {space}")
    pool, (before, after) = (T.avg_pool1d, T.avg_pool2d, T.avg_pool3d)[space - 1], op.reach

    def composite(x: torch.Tensor, means: torch.Tensor | None = None) -> torch.Tensor:
        u = x if means is None else x - means
        if before == after:
            mean = pool(u * u, op.size, 1, before)
        else:
            mean = pool(T.pad(u * u, [before, after] * space), op.size, 1)
        return u / (mean * op.lrn_alpha + op.lrn_k) ** op.lrn_beta

    return composite


def _peer(name: str, make: Callable[[Problem], Callable[..., torch.Tensor]], problem: Problem) -> Peer:
    function = make(problem)

    def forward(t: Tensors) -> Call:
        return functools.partial(function, *[t[role] for role in ("x", "means") if role in t])

    def backward(t: Tensors) -> Call:
        """Autograd through it, the graph kept."""
        with torch.enable_grad():
            x = t["x"].detach().requires_grad_()
            y = function(x, *[t[role] for role in ("means",) if role in t])
        return lambda: torch.autograd.grad(y, x, t["dy"], retain_graph=True)[0]

    if problem.op.name.endswith("fwd"):
        return Peer(name, ("y",), forward)
    return Peer(f"{name}, autograd", ("dx",), backward, graph=False)


def local_response(problem: Problem) -> Peer:
    """``torch.nn.functional.local_response_norm``."""
    return _peer("torch.nn.functional.local_response_norm", _lrn, problem)


def divisive(problem: Problem) -> Peer:
    """Average pooling of squares."""
    return _peer("average pooling of squares", _divisive, problem)


PEERS = {
    "lrn_fwd": local_response,
    "lrn_bwd": local_response,
    "divisive_norm_fwd": divisive,
    "divisive_norm_bwd": divisive,
}
