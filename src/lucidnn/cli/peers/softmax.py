"""The framework's softmax and log-softmax, for one axis; a mask is filled in beforehand, as its users do."""

from __future__ import annotations

import functools

import torch

from ...core.descriptor import DTYPES
from ...core.errors import NotSupported
from ...core.problem import Problem
from ..peer import Call, Peer, Tensors

aten = torch.ops.aten


def _axis(problem: Problem) -> int:
    axes = problem.op.axes  # type: ignore[attr-defined]
    if len(axes) > 1:
        raise NotSupported(f"the framework's softmax is over one axis, found {list(axes)}")
    if problem.op.empty_zero or "mask" in problem.tensors:  # type: ignore[attr-defined]
        raise NotSupported("the framework's softmax has no mask and no empty_zero")
    return axes[0]


def forward(problem: Problem) -> Peer:
    """``torch.softmax`` or ``torch.log_softmax``."""
    axis, log = _axis(problem), problem.op.log  # type: ignore[attr-defined]
    function = torch.log_softmax if log else torch.softmax
    dtype = getattr(torch, DTYPES[problem["y"].dtype][0])
    dtype = None if problem["x"].dtype == problem["y"].dtype else dtype

    def prepare(t: Tensors) -> Call:
        return functools.partial(function, t["x"], axis, dtype)

    return Peer("torch.log_softmax" if log else "torch.softmax", ("y",), prepare)


def backward(problem: Problem) -> Peer:
    """The gradient that the framework's autograd calls."""
    axis, log = _axis(problem), problem.op.log  # type: ignore[attr-defined]
    name = "_log_softmax_backward_data" if log else "_softmax_backward_data"
    dtype = getattr(torch, DTYPES[problem["dx"].dtype][0])

    def prepare(t: Tensors) -> Call:
        return functools.partial(getattr(aten, name), t["dy"], t["y"], axis, dtype)

    return Peer(f"aten.{name}", ("dx",), prepare)


PEERS = {"softmax_fwd": forward, "softmax_bwd": backward}
