"""``norm.empty``: layer, RMS and group normalization where x has no element.

There is nothing to normalize: sums over nothing are zero, the mean of nothing is NaN. All other engines may count on
tensors with elements. Cost: writing parameter gradients or statistics.
"""

from __future__ import annotations

import math

import torch

from ...core.engine import Config, Engine, Refusals, Run
from ...core.heuristics import roofline
from ...core.problem import Problem


class NormEmpty(Engine):
    """All directions, where x is empty."""

    name = "norm.empty"
    operations = (
        "layer_norm_fwd", "layer_norm_bwd", "rms_norm_fwd", "rms_norm_bwd", "group_norm_fwd", "group_norm_bwd",
    )  # fmt: skip
    targets = ("cpu", "cuda", "hip")

    def refusals(self, problem: Problem) -> list[str]:
        r = Refusals()
        r.require(problem["x"].numel == 0, "x without elements", problem["x"])
        return r

    def cost(self, problem: Problem, config: Config) -> float:
        return roofline(problem, flops=0.0)

    def build(self, problem: Problem, config: Config) -> Run:
        first = len(problem.inputs)
        values = [0.0 if role in ("dscale", "dbias") else math.nan for role in problem.outputs]

        def run(tensors: tuple[torch.Tensor, ...], workspace: torch.Tensor | None) -> None:
            for t, value in zip(tensors[first:], values, strict=True):
                t.fill_(value)

        return run
