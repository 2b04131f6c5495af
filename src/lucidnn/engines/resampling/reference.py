"""``resample.reference``: resampling in float64, on any device, slow on purpose.

Method: one axis after another; along each, a weighted sum of the whole tensor's slices, tap by tap, as
`lucidnn.ops._axis_map` has the weights. A weight of 0 takes no part, so that a NaN stays where it belongs. Every
other engine is tested against this one, and this one against the framework in the tests.
Cost: a few float64 passes for each tap of each axis.
"""

from __future__ import annotations

import torch

from ...core.engine import Config, Engine, Refusals, Run
from ...core.heuristics import roofline
from ...core.problem import Problem
from ...ops.resampling import Resampling


class ResampleReference(Engine):
    """Both directions, straight from the maps."""

    name = "resample.reference"
    operations = ("resample_fwd", "resample_bwd")
    targets = ("cpu", "cuda", "hip")
    notes = frozenset({"reference"})

    def refusals(self, problem: Problem) -> list[str]:
        return Refusals()

    def cost(self, problem: Problem, config: Config) -> float:
        taps = sum(m.taps for m in Resampling.of(problem).maps)
        moved = 60.0 * taps * max(t.numel for _, t in problem.items)
        return roofline(problem, flops=0.0, bytes=20 * problem.bytes + moved, launches=8 * taps)

    def build(self, problem: Problem, config: Config) -> Run:
        r = Resampling.of(problem)

        def run(tensors: tuple[torch.Tensor, ...], workspace: torch.Tensor | None) -> None:
            v = tensors[0].detach().double().reshape(r.N, r.C, *r.in_size)
            for axis, m in enumerate(r.maps, 2):
                shape = (-1, *[1] * (4 - axis))
                first = torch.from_numpy(m.first).to(v.device)
                total = None
                for t in range(m.taps):
                    weight = torch.from_numpy(m.weights[:, t].copy()).to(v.device).reshape(shape)
                    term = v.index_select(axis, (first + t).clamp(max=m.size - 1)) * weight
                    term = torch.where(weight == 0, 0.0, term)
                    total = term if total is None else total + term
                v = total
            tensors[1].copy_(v.reshape(r.result.shape))

        return run
