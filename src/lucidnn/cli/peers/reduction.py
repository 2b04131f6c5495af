"""The framework's own reductions, and their gradients as its backward pass computes them."""

from __future__ import annotations

from typing import Any

import torch

from ...core.descriptor import DTYPES
from ...core.errors import NotSupported
from ...core.problem import Problem
from ..peer import Call, Peer, Tensors


def _fwd(problem: Problem) -> Peer:
    op: Any = problem.op
    axes, keep = list(op.axes), op.keep
    out = getattr(torch, DTYPES[problem["y"].dtype][0])
    wide = {} if problem["y"].dtype == problem["x"].dtype else {"dtype": out}
    if "z" in problem.inputs or problem.epilogue.alpha != 1.0:
        raise NotSupported("the framework's reductions have no factors")
    if "index" in problem.outputs:
        if len(axes) > 1 or op.mode == "amax":
            raise NotSupported(f"the framework has no index of {op.mode} over the axes {axes}")
        find = getattr(torch, op.mode)
        role = "index" if op.index_type == "i64" else None
        return Peer(f"torch.{op.mode}", ("y", role), lambda t: lambda: tuple(find(t["x"], axes[0], keep)))
    norms = {"norm1": 1, "norm2": 2, "amax": torch.inf}
    if op.mode in norms:
        norm, order = torch.linalg.vector_norm, norms[op.mode]
        return Peer("torch.linalg.vector_norm", ("y",), lambda t: lambda: norm(t["x"], order, axes, keep, **wide))
    if op.mode == "mul" and len(axes) == 1:
        return Peer("torch.prod", ("y",), lambda t: lambda: torch.prod(t["x"], axes[0], keep, **wide))
    names = {"add": "sum", "avg": "mean", "min": "amin", "max": "amax"}
    if op.mode not in names or (wide and op.mode in ("min", "max")):
        raise NotSupported(f"the framework has no {op.mode} over the axes {axes}")
    name = names[op.mode]
    call: Any = getattr(torch, name)
    return Peer(f"torch.{name}", ("y",), lambda t: lambda: call(t["x"], axes, keep, **wide))


def _bwd(problem: Problem) -> Peer:
    op: Any = problem.op
    if op.mode == "mul_no_zeros" or "x" not in problem.inputs or (op.mode == "mul" and len(op.axes) > 1):
        raise NotSupported(f"the framework has no kernel for the gradient of {op.mode} as the problem has it")
    functions: dict[str, Any] = {"min": torch.amin, "max": torch.amax, "mul": torch.prod}
    axes: Any = op.axes[0] if op.mode == "mul" else list(op.axes)
    order = {"norm1": 1, "norm2": 2, "amax": torch.inf}.get(op.mode, 0)

    def prepare(t: Tensors) -> Call:
        x = t["x"].detach().clone().requires_grad_()
        if order:
            y = torch.linalg.vector_norm(x, order, axes, op.keep)
        else:
            y = functions[op.mode](x, axes, op.keep)
        dy = t["dy"].to(y.dtype)
        return lambda: torch.autograd.grad(y, x, dy, retain_graph=True)[0]

    # The framework's y is that of x; the problem's may be another one.
    return Peer("autograd.grad", (None,) if "y" in problem.inputs else ("dx",), prepare, graph=False)


PEERS = {"reduce_fwd": _fwd, "reduce_bwd": _bwd}
