"""``conv.empty``: convolutions in which some tensor has no element; the sum in the formula is then zero.

A batch of 0 gives an empty y and a zero dw; 0 channels give a y that is the epilogue of zero. All other engines may
count on tensors with elements. Cost: writing the output.
"""

from __future__ import annotations

import torch

from ...core.engine import Config, Engine, Refusals, Run
from ...core.heuristics import roofline
from ...core.problem import Problem
from .._reference import finish, store


class ConvEmpty(Engine):
    """All directions, where nothing is to be summed."""

    name = "conv.empty"
    operations = ("conv_fprop", "conv_dgrad", "conv_wgrad", "conv_bgrad")
    targets = ("cpu", "cuda", "hip")
    takes = frozenset({"padding_mode", "flip", "scale"})

    def refusals(self, problem: Problem) -> list[str]:
        r = Refusals()
        r.require(problem.is_empty, "a tensor without elements", "none")
        return r

    def cost(self, problem: Problem, config: Config) -> float:
        return roofline(problem, flops=0.0)

    def build(self, problem: Problem, config: Config) -> Run:
        names = tuple(problem.tensors)
        (out,) = problem.outputs
        plain = not {"z", "bias"} & set(problem.inputs)

        def run(tensors: tuple[torch.Tensor, ...], workspace: torch.Tensor | None) -> None:
            pack = dict(zip(names, tensors, strict=True))
            if plain and problem.epilogue.activation == "identity":
                pack[out].zero_()
                return
            inputs = {role: pack[role].detach().double() for role in ("z", "bias") if role in pack}
            zero = torch.zeros(pack[out].shape, dtype=torch.float64, device=pack[out].device)
            store(pack[out], finish(problem, zero, inputs))

        return run
