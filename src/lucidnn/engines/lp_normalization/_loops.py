"""A problem's sets as two nests of loops: what both devices' engines go over."""

from __future__ import annotations

from ...core.problem import Problem
from .._row_loops import RowLoops, row_loops


def set_loops(problem: Problem) -> RowLoops:
    """The loops, by the memory of x; what has one element for a set does not move along it. The result is `out`."""
    x, axes = problem["x"], problem.op.axes  # type: ignore[attr-defined]
    tensors = {"x": x} | {"out" if role in ("y", "dx") else role: t for role, t in problem.items}
    strides = {
        role: [0 if t.shape != x.shape and axis in axes else s for axis, s in enumerate(t.strides)]
        for role, t in tensors.items()
    }
    return row_loops(x.shape, strides, axes)
