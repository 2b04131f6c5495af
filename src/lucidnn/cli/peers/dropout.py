"""The framework's dropout. It draws other bits, so that only times, not values, can be compared."""

from __future__ import annotations

import functools

import torch

from ...core.problem import Problem
from ..peer import Call, Peer, Tensors

aten = torch.ops.aten


def forward(problem: Problem) -> Peer:
    """``native_dropout``, or ``feature_dropout``; and an addition where there is a residual."""
    op, beta = problem.op, problem.epilogue.beta
    feature = op.feature  # type: ignore[attr-defined]
    name = "aten.feature_dropout" if feature else "aten.native_dropout"

    def prepare(t: Tensors) -> Call:
        x, z, p = t["x"], t.get("z"), op.p  # type: ignore[attr-defined]
        if feature:
            drop = functools.partial(aten.feature_dropout, x, p, True)
        else:
            drop = functools.partial(aten.native_dropout, x, p, True)
        if z is None:
            return drop if feature else lambda: drop()[0]
        return lambda: torch.add(drop() if feature else drop()[0], z, alpha=beta)

    return Peer(name + (" + add" if "z" in problem.tensors else ""), (None,), prepare)


def backward(problem: Problem) -> Peer:
    """``native_dropout_backward``: it reads the mask that the forward pass left."""
    p = problem.op.p  # type: ignore[attr-defined]

    def prepare(t: Tensors) -> Call:
        mask = torch.rand_like(t["dy"], dtype=torch.float32) >= p
        return functools.partial(aten.native_dropout_backward, t["dy"], mask, 0.0 if p == 1.0 else 1.0 / (1.0 - p))

    return Peer("aten.native_dropout_backward", (None,), prepare)


PEERS = {"dropout_fwd": forward, "dropout_bwd": backward}
