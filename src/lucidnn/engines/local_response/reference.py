"""``lrn.reference``: local response and divisive normalization in float64, on any device, slow on purpose.

Method: the formulas of `lucidnn.ops.local_response` on whole tensors; a sum over windows is, axis after axis, a sum of
shifted copies of a tensor with zeros around it. Cost: some ten float64 passes, and two a neighbour.
"""

from __future__ import annotations

from typing import Any

import torch

from ...core.descriptor import FLOATING
from ...core.engine import Config, Engine, Refusals, Run
from ...core.heuristics import roofline
from ...core.problem import Problem


def _window_sum(v: torch.Tensor, axes: tuple[int, ...], before: int, after: int) -> torch.Tensor:
    """The sum over each element's neighbours, from `before` in front of it to `after` behind it along every axis."""
    for axis in axes:
        n, shape = v.shape[axis], list(v.shape)
        shape[axis] = n + before + after
        padded = v.new_zeros(shape)
        padded.narrow(axis, before, n).copy_(v)
        v = torch.zeros_like(v)
        for shift in range(before + after + 1):
            v = v + padded.narrow(axis, shift, n)
    return v


class LocalResponseReference(Engine):
    """Both directions of both, straight from the formulas."""

    name = "lrn.reference"
    operations = ("lrn_fwd", "lrn_bwd", "divisive_norm_fwd", "divisive_norm_bwd")
    targets = ("cpu", "cuda", "hip")
    notes = frozenset({"reference"})

    def refusals(self, problem: Problem) -> list[str]:
        r = Refusals()
        r.require_tensors(problem.items, FLOATING)
        return r

    def cost(self, problem: Problem, config: Config) -> float:
        op: Any = problem.op
        taps = op.size * len(op.window_axes(problem["x"].ndim))
        moved = (160.0 + 24 * taps) * problem["x"].numel + 1
        return roofline(problem, flops=0.0, bytes=moved, launches=20 + 2 * taps)

    def build(self, problem: Problem, config: Config) -> Run:
        names, op = tuple(problem.tensors), problem.op
        ndim = problem["x"].ndim
        axes, factor = op.window_axes(ndim), op.factor(ndim)  # type: ignore[attr-defined]
        (before, after), beta, k = op.reach, op.lrn_beta, op.lrn_k  # type: ignore[attr-defined]

        def run(tensors: tuple[torch.Tensor, ...], workspace: torch.Tensor | None) -> None:
            pack = dict(zip(names, tensors, strict=True))
            u = pack["x"].detach().double()
            if "means" in pack:
                u = u - pack["means"].detach().double()
            d = k + factor * _window_sum(u * u, axes, before, after)
            if "dy" not in pack:
                pack["y"].copy_(u * d**-beta)
                return
            g = pack["dy"].detach().double()
            through = _window_sum(g * u * d ** (-beta - 1), axes, after, before)
            pack["dx"].copy_(g * d**-beta - 2 * factor * beta * u * through)

        return run
