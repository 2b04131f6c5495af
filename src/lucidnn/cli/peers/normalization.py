"""The framework's own layer, RMS and group normalization.

RMS normalization has no backward kernel that can be called by itself: the framework's gradient is taken through its
autograd. A group normalization's activation and its gradient are calls of their own.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from ...core.errors import NotSupported
from ...core.problem import Problem
from ..peer import _ACTIVATIONS, Call, Peer, Tensors

aten = torch.ops.aten


def _as(t: Any, like: torch.Tensor) -> Any:
    return None if t is None else t.to(like.dtype)


def _one_type(problem: Problem) -> None:
    found = {t.dtype for role, t in problem.items if role in ("x", "scale", "bias")}
    if len(found) > 1 and problem.target.is_gpu:
        raise NotSupported("the framework wants parameters of the input's type")


def _layer_fwd(problem: Problem) -> Peer:
    _one_type(problem)
    op: Any = problem.op
    shape = list(op.parameter_shape(problem["x"]))

    def prepare(t: Tensors) -> Call:
        scale, bias = _as(t.get("scale"), t["x"]), _as(t.get("bias"), t["x"])
        return lambda: torch.native_layer_norm(t["x"], shape, scale, bias, op.epsilon)

    return Peer("native_layer_norm", problem.outputs, prepare)


def _layer_bwd(problem: Problem) -> Peer:
    op: Any = problem.op
    shape = list(op.parameter_shape(problem["x"]))
    mask = [role in op.gradients for role in ("dx", "dscale", "dbias")]

    def prepare(t: Tensors) -> Call:
        kind = t["x"].dtype if not problem.target.is_gpu else torch.float32
        kind = torch.float64 if t["x"].dtype == torch.float64 else kind
        mean, inverse = (t[role].to(kind).contiguous() for role in op.statistics)
        scale = _as(t.get("scale"), t["x"])
        scale = torch.ones(shape, dtype=t["x"].dtype, device=t["x"].device) if scale is None else scale

        def call() -> Any:
            found = aten.native_layer_norm_backward(t["dy"], t["x"], shape, mean, inverse, scale, scale, mask)
            return tuple(g for g, wanted in zip(found, mask, strict=True) if wanted)

        return call

    return Peer("native_layer_norm_backward", problem.outputs, prepare)


def _rms_fwd(problem: Problem) -> Peer:
    _one_type(problem)
    op: Any = problem.op
    shape = list(op.parameter_shape(problem["x"]))

    def prepare(t: Tensors) -> Call:
        scale = _as(t.get("scale"), t["x"])
        return lambda: (F.rms_norm(t["x"], shape, scale, op.epsilon), None)

    return Peer("F.rms_norm", ("y", None), prepare)


def _rms_bwd(problem: Problem) -> Peer:
    op: Any = problem.op
    shape = list(op.parameter_shape(problem["x"]))

    def prepare(t: Tensors) -> Call:
        x = t["x"].detach().requires_grad_("dx" in op.gradients)
        scale = _as(t.get("scale"), x)
        scale = torch.ones(shape, dtype=x.dtype, device=x.device) if scale is None else scale
        scale = scale.detach().requires_grad_("dscale" in op.gradients)
        y = F.rms_norm(x, shape, scale, 1e-5)
        wanted = [t for t in (x, scale) if t.requires_grad]
        return lambda: torch.autograd.grad(y, wanted, t["dy"], retain_graph=True)

    return Peer("autograd of F.rms_norm", (None,) * len(problem.outputs), prepare, graph=False)


def _group_fwd(problem: Problem) -> Peer:
    _one_type(problem)
    op: Any = problem.op
    e = problem.epilogue
    name, activate = _ACTIVATIONS.get(e.activation, ("", None))

    def prepare(t: Tensors) -> Call:
        scale, bias = _as(t.get("scale"), t["x"]), _as(t.get("bias"), t["x"])

        def call() -> Any:
            y = F.group_norm(t["x"], op.groups, scale, bias, op.epsilon)
            return (activate(y, e.parameter) if activate else y), None, None

        return call

    return Peer("F.group_norm" + (f" + {name}" if name else ""), ("y", None, None), prepare)


def _group_bwd(problem: Problem) -> Peer:
    op: Any = problem.op
    e = problem.epilogue
    activate = _ACTIVATIONS.get(e.activation, ("", None))[1]

    def prepare(t: Tensors) -> Call:
        x, leaves = t["x"].detach().requires_grad_("dx" in op.gradients), []
        for role, gradient in (("scale", "dscale"), ("bias", "dbias")):
            p = _as(t.get(role), x)
            if p is None:
                p = (torch.ones if role == "scale" else torch.zeros)(x.shape[1], dtype=x.dtype, device=x.device)
            leaves.append(p.detach().requires_grad_(gradient in op.gradients))
        y = F.group_norm(x, op.groups, *leaves)
        if activate:
            y = activate(y, e.parameter)
        wanted = [t for t in (x, *leaves) if t.requires_grad]
        return lambda: torch.autograd.grad(y, wanted, t["dy"], retain_graph=True)

    return Peer("autograd of F.group_norm", (None,) * len(problem.outputs), prepare, graph=False)


PEERS = {
    "layer_norm_fwd": _layer_fwd,
    "layer_norm_bwd": _layer_bwd,
    "rms_norm_fwd": _rms_fwd,
    "rms_norm_bwd": _rms_bwd,
    "group_norm_fwd": _group_fwd,
    "group_norm_bwd": _group_bwd,
}
