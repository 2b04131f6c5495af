"""The framework's unfold, fold and shuffles."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from ...core.problem import Problem
from ..peer import Peer


def _unfold(problem: Problem) -> Peer:
    op: Any = problem.op
    where = (op.window, op.dilation, op.padding, op.stride)
    return Peer("F.unfold", problem.outputs, lambda t: lambda: F.unfold(t["x"], *where))


def _fold(problem: Problem) -> Peer:
    op: Any = problem.op
    where = (op.size, op.window, op.dilation, op.padding, op.stride)
    return Peer("F.fold", problem.outputs, lambda t: lambda: F.fold(t["dy"], *where))


def _shuffle(problem: Problem) -> Peer:
    op: Any = problem.op
    if op.kind == "channel_shuffle":
        return Peer(
            "torch.channel_shuffle", problem.outputs, lambda t: lambda: torch.channel_shuffle(t["x"], op.factor)
        )
    function = F.pixel_shuffle if op.kind == "pixel_shuffle" else F.pixel_unshuffle
    return Peer(f"F.{op.kind}", problem.outputs, lambda t: lambda: function(t["x"], op.factor))


PEERS = {"unfold_fwd": _unfold, "unfold_bwd": _fold, "shuffle": _shuffle}
