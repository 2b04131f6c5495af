"""``batch_norm.empty``: batches without a value, on any device: sums are 0, and so are the statistics' mean and spread.

Method: fills of a few small tensors; running statistics are copied, for there is nothing to learn. Cost: launches.
Limits: takes problems with an empty tensor, and no others.
"""

from __future__ import annotations

import torch

from ...core.engine import Config, Engine, Refusals, Run
from ...core.heuristics import LAUNCH
from ...core.problem import Problem

COPIED = {"next_mean": "running_mean", "next_variance": "running_variance"}


class BatchNormEmpty(Engine):
    """All operations where some tensor has no element."""

    name = "batch_norm.empty"
    operations = (
        "batch_norm_train_fwd", "batch_norm_infer_fwd", "batch_norm_bwd", "batch_norm_bwd_sums", "batch_norm_bwd_apply",
        "batch_norm_stats", "batch_norm_combine",
    )  # fmt: skip
    targets = ("cpu", "cuda", "hip")

    def refusals(self, problem: Problem) -> list[str]:
        r = Refusals()
        r.require(problem.is_empty, "a tensor without elements", "none")
        return r

    def cost(self, problem: Problem, config: Config) -> float:
        return LAUNCH[problem.target.kind] * len(problem.outputs)

    def build(self, problem: Problem, config: Config) -> Run:
        epsilon = getattr(problem.op, "epsilon", 1.0)
        inverse = epsilon**-0.5 if epsilon else float("inf")
        names = tuple(problem.tensors)
        sources = [(names.index(role), names.index(COPIED[role])) for role in problem.outputs if role in COPIED]
        values = [(names.index(role), inverse if role == "inv_variance" else 0.0) for role in problem.outputs]
        values = [(at, value) for at, value in values if names[at] not in COPIED]

        def run(tensors: tuple[torch.Tensor, ...], workspace: torch.Tensor | None) -> None:
            for at, value in values:
                tensors[at].fill_(value)
            for at, source in sources:
                tensors[at].copy_(tensors[source])

        return run
