"""The framework's sampling by a grid."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F

from ...core.problem import Problem
from ...ops.grid_sample import MODES, PADDING_MODES
from ..peer import Peer, aten


def _fwd(problem: Problem) -> Peer:
    op: Any = problem.op
    how = (op.mode, op.padding_mode, op.align_corners)
    return Peer("F.grid_sample", problem.outputs, lambda t: lambda: F.grid_sample(t["x"], t["grid"], *how))


def _bwd(problem: Problem) -> Peer:
    op: Any = problem.op
    ndim = problem["x"].ndim - 2
    kernel = aten.grid_sampler_2d_backward if ndim == 2 else aten.grid_sampler_3d_backward
    how = (MODES.index(op.mode), PADDING_MODES.index(op.padding_mode), op.align_corners)
    mask = [op.gradients != "grid", True]  # the second is always made
    outputs = tuple(role if role in problem.outputs else None for role in ("dx", "dgrid"))
    name = f"aten.grid_sampler_{ndim}d_backward"
    return Peer(name, outputs, lambda t: lambda: kernel(t["dy"], t["x"], t["grid"], *how, mask))


PEERS = {"grid_sample_fwd": _fwd, "grid_sample_bwd": _bwd}
