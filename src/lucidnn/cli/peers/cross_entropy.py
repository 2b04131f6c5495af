"""The framework's cross-entropy and negative log-likelihood, and their gradients through its autograd."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F

from ...core.problem import Problem
from ..peer import Call, Peer, Tensors


def _loss(problem: Problem, t: Tensors, x: torch.Tensor) -> torch.Tensor:
    op = problem.op
    common = {"weight": t.get("weight"), "reduction": op.reduction, "ignore_index": op.ignore_index}  # type: ignore
    if op.from_log:  # type: ignore[attr-defined]
        return F.nll_loss(x, t["target"], **common)
    return F.cross_entropy(x, t["target"], label_smoothing=op.smoothing, **common)  # type: ignore[attr-defined]


def _name(problem: Problem) -> str:
    return "F.nll_loss" if problem.op.from_log else "F.cross_entropy"  # type: ignore[attr-defined]


def forward(problem: Problem) -> Peer:
    """``F.cross_entropy`` or ``F.nll_loss``; what it keeps for its gradient is not looked at."""

    def prepare(t: Tensors) -> Call:
        return functools.partial(_loss, problem, t, t["x"])

    return Peer(_name(problem), ("y",), prepare)


def backward(problem: Problem) -> Peer:
    """The gradient of the same: the forward pass is done beforehand, its graph is kept."""

    def prepare(t: Tensors) -> Call:
        x = t["x"].detach().requires_grad_()
        with torch.enable_grad():
            loss = _loss(problem, t, x)
        dy = t["dy"].to(loss.dtype).reshape(loss.shape)
        return lambda: torch.autograd.grad(loss, x, dy, retain_graph=True)[0]

    return Peer(f"backward of {_name(problem)}", ("dx",), prepare, graph=False)


PEERS = {"cross_entropy_fwd": forward, "cross_entropy_bwd": backward}
