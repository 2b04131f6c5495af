"""The framework's `normalize`, and `weight_norm` where one axis keeps a scale; autograd for their gradients.

Autograd takes the norm of x itself, not the one that a backward problem gives: its results mean something else.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as T

from ...core.problem import Problem
from ..peer import Call, Peer, Tensors


def _function(problem: Problem) -> tuple[str, Callable[..., torch.Tensor]]:
    op: Any = problem.op
    x = problem["x"]
    kept = [axis for axis in range(x.ndim) if axis not in op.axes]
    if "scale" not in problem.tensors:
        dim = op.axes[0] if len(op.axes) == 1 else op.axes
        return "torch.nn.functional.normalize", functools.partial(T.normalize, p=op.p, dim=dim, eps=op.eps)
    if len(kept) == 1 and op.p == 2.0 and op.eps == 0.0:
        return "torch._weight_norm", functools.partial(torch._weight_norm, dim=kept[0])  # type: ignore[attr-defined]

    def composite(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        norm = torch.linalg.vector_norm(x, op.p, op.axes, keepdim=True)
        return x * (scale / norm.clamp_min(op.eps))

    return "norm, division, product", composite


def peer(problem: Problem) -> Peer:
    """The framework's function, and its autograd with the graph kept."""
    name, function = _function(problem)

    def forward(t: Tensors) -> Call:
        return functools.partial(function, *[t[role] for role in ("x", "scale") if role in t])

    def backward(t: Tensors) -> Call:
        with torch.enable_grad():
            given = {role: t[role].detach().requires_grad_() for role in ("x", "scale") if role in t}
            y = function(*given.values())
        wanted = [given["x" if role == "dx" else "scale"] for role in problem.outputs]

        def call() -> Any:
            found = torch.autograd.grad(y, wanted, t["dy"], retain_graph=True)
            return found[0] if len(found) == 1 else found

        return call

    if problem.op.name.endswith("fwd"):
        return Peer(name, ("y",), forward)
    return Peer(f"{name}, autograd", (None,) * len(problem.outputs), backward, graph=False)


PEERS = {"lp_normalize_fwd": peer, "lp_normalize_bwd": peer}
