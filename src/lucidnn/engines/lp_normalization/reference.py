"""``lp_norm.reference``: normalization by an L_p norm in float64, on any device, slow on purpose.

Method: the formulas of `lucidnn.ops.lp_normalization` on whole tensors, by plain sums. Cost: some ten float64 passes.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from ...core.descriptor import FLOATING
from ...core.engine import Config, Engine, Refusals, Run
from ...core.heuristics import roofline
from ...core.problem import Problem


class LpNormReference(Engine):
    """Both directions, straight from the formulas."""

    name = "lp_norm.reference"
    operations = ("lp_normalize_fwd", "lp_normalize_bwd")
    targets = ("cpu", "cuda", "hip")
    notes = frozenset({"reference"})

    def refusals(self, problem: Problem) -> list[str]:
        r = Refusals()
        r.require_tensors(problem.items, FLOATING)
        return r

    def cost(self, problem: Problem, config: Config) -> float:
        return roofline(problem, flops=0.0, bytes=200.0 * problem["x"].numel + 1, launches=20)

    def build(self, problem: Problem, config: Config) -> Run:
        names, op = tuple(problem.tensors), problem.op
        axes, p, eps = op.axes, op.p, op.eps  # type: ignore[attr-defined]
        nothing = any(problem["x"].shape[axis] == 0 for axis in axes)

        def forward(pack: dict[str, Any], x: torch.Tensor, scale: Any) -> None:
            if nothing:
                norm = pack["norm"].new_zeros(pack["norm"].shape, dtype=torch.float64)
            elif math.isinf(p):
                norm = x.abs().amax(axes, keepdim=True)
            else:
                norm = (x.abs() ** p).sum(axes, keepdim=True) ** (1 / p)
            pack["norm"].copy_(norm)
            pack["y"].copy_(x * (scale / norm.clamp(min=eps)))

        def backward(pack: dict[str, Any], x: torch.Tensor, scale: Any) -> None:
            g, norm = pack["dy"].detach().double(), pack["norm"].detach().double()
            least = norm.clamp(min=eps)
            t = (g * x).sum(axes, keepdim=True) / least
            if "dscale" in pack:
                pack["dscale"].copy_(t)
            if "dx" not in pack:
                return
            sign = (x > 0).double() - (x < 0).double()
            if math.isinf(p):
                largest = (x.abs() == norm).double()
                slope = sign * largest / largest.sum(axes, keepdim=True).clamp(min=1)
            else:
                slope = sign * (x.abs() / norm) ** (p - 1)
                slope = torch.where(x == 0, 0.0, slope) if p != 2 else x / norm
            through = torch.where((norm == 0) | (norm < eps), 0.0, t * slope)
            pack["dx"].copy_(scale / least * (g - through))

        direction = forward if op.name.endswith("fwd") else backward

        def run(tensors: tuple[torch.Tensor, ...], workspace: torch.Tensor | None) -> None:
            pack = dict(zip(names, tensors, strict=True))
            direction(pack, pack["x"].detach().double(), pack["scale"].detach().double() if "scale" in pack else 1.0)

        return run
