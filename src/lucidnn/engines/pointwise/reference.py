"""``pointwise.reference``: the elementwise formulas in float64, on any device, slow on purpose.

Method: the definitions of `lucidnn.ops.pointwise` as written, one whole-tensor operation a term; the
activations are those of ``engines/_reference.py``. Cost: a handful of float64 passes over the data.
"""

from __future__ import annotations

import torch

from ...core.descriptor import FLOATING
from ...core.engine import Config, Engine, Refusals, Run
from ...core.heuristics import roofline
from ...core.problem import Problem
from .._reference import activate, activate_grad


class PointwiseReference(Engine):
    """Both directions, straight from the formulas."""

    name = "pointwise.reference"
    operations = ("pointwise_fwd", "pointwise_bwd")
    targets = ("cpu", "cuda", "hip")
    notes = frozenset({"reference"})

    def refusals(self, problem: Problem) -> list[str]:
        r = Refusals()
        for role, t in problem.items:
            r.require(t.dtype in FLOATING, f"{role} of a floating-point type", t.dtype)
        return r

    def cost(self, problem: Problem, config: Config) -> float:
        return roofline(problem, bytes=100.0 * problem.items[0][1].numel, dtype="f64", launches=20)

    def build(self, problem: Problem, config: Config) -> Run:
        names = tuple(problem.tensors)
        e = problem.epilogue

        def forward(tensors: tuple[torch.Tensor, ...], workspace: torch.Tensor | None) -> None:
            pack = dict(zip(names, tensors, strict=True))
            v = e.alpha * pack["x"].detach().double()
            if "z" in pack:
                v = v + e.beta * pack["z"].detach().double()
            if "bias" in pack:
                v = v + pack["bias"].detach().double().reshape(1, -1, *[1] * (v.ndim - 2))
            pack["y"].copy_(activate(e.activation, e.parameter, v))

        def backward(tensors: tuple[torch.Tensor, ...], workspace: torch.Tensor | None) -> None:
            dy, x = (t.detach().double() for t in tensors[:2])
            if problem.op.from_output and e.activation in ("sigmoid", "tanh", "elu"):
                slopes = {"sigmoid": x * (1 - x), "tanh": 1 - x * x, "elu": torch.where(x > 0, 1.0, x + e.parameter)}
                tensors[2].copy_(e.alpha * dy * slopes[e.activation])
            else:
                tensors[2].copy_(e.alpha * activate_grad(e.activation, e.parameter, x, dy))

        return forward if problem.op.name == "pointwise_fwd" else backward
