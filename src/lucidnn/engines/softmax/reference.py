"""``softmax.reference``: the definition of softmax in float64, on any device, slow on purpose.

Method: whole-tensor operations in the order of the formulas of `lucidnn.ops.softmax`; the largest value of a row is
taken from it first, so that no exponential overflows. Cost: a dozen float64 passes.
"""

from __future__ import annotations

import torch

from ...core.descriptor import FLOATING
from ...core.engine import Config, Engine, Refusals, Run
from ...core.heuristics import roofline
from ...core.problem import Problem


class SoftmaxReference(Engine):
    """Both directions, straight from the formulas."""

    name = "softmax.reference"
    operations = ("softmax_fwd", "softmax_bwd")
    targets = ("cpu", "cuda", "hip")
    notes = frozenset({"reference"})

    def refusals(self, problem: Problem) -> list[str]:
        r = Refusals()
        for role, t in problem.items:
            if role != "mask":
                r.require(t.dtype in FLOATING, f"{role} of a floating-point type", t.dtype)
        return r

    def cost(self, problem: Problem, config: Config) -> float:
        return roofline(problem, flops=0.0, bytes=200.0 * problem.items[0][1].numel + 1, launches=20)

    def build(self, problem: Problem, config: Config) -> Run:
        names = tuple(problem.tensors)
        op = problem.op
        axes, log, empty_zero = op.axes, op.log, op.empty_zero  # type: ignore[attr-defined]

        def forward(tensors: tuple[torch.Tensor, ...], workspace: torch.Tensor | None) -> None:
            pack = dict(zip(names, tensors, strict=True))
            x = pack["x"].detach().double()
            if x.numel() == 0:
                return
            if "mask" in pack:
                x = torch.where(pack["mask"], x, -torch.inf)
            shifted = x - x.amax(axes, keepdim=True)
            e = torch.exp(shifted)
            total = e.sum(axes, keepdim=True)
            y = shifted - torch.log(total) if log else e / total
            if empty_zero:
                empty = (x == -torch.inf).all(dim=axes[0], keepdim=True)
                for axis in axes[1:]:
                    empty = empty.all(dim=axis, keepdim=True)
                y = torch.where(empty, -torch.inf if log else 0.0, y)
            pack["y"].copy_(y)

        def backward(tensors: tuple[torch.Tensor, ...], workspace: torch.Tensor | None) -> None:
            pack = dict(zip(names, tensors, strict=True))
            y, dy = pack["y"].detach().double(), pack["dy"].detach().double()
            if log:
                dx = dy - torch.exp(y) * dy.sum(axes, keepdim=True)
                if empty_zero:
                    dx = torch.where(y == -torch.inf, 0.0, dx)
            else:
                dx = y * (dy - (y * dy).sum(axes, keepdim=True))
            if "mask" in pack:
                dx = torch.where(pack["mask"], dx, 0.0)
            pack["dx"].copy_(dx)

        return forward if op.name == "softmax_fwd" else backward
