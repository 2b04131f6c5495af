"""``cross_entropy.reference``: the definition of the loss in float64, on any device, slow on purpose.

Method: the formulas of `lucidnn.ops.cross_entropy` on whole tensors, q written out. Cost: some twenty float64 passes.
A class that does not exist is an error on a CPU and NaN on a GPU, as in every engine.
"""

from __future__ import annotations

import math

import torch

from ...core.descriptor import FLOATING
from ...core.engine import Config, Engine, Refusals, Run
from ...core.errors import InvalidArgument
from ...core.heuristics import roofline
from ...core.problem import Problem
from ...ops.cross_entropy import by_class


class CrossEntropyReference(Engine):
    """Both directions, straight from the formulas."""

    name = "cross_entropy.reference"
    operations = ("cross_entropy_fwd", "cross_entropy_bwd")
    targets = ("cpu", "cuda", "hip")
    notes = frozenset({"reference"})

    def refusals(self, problem: Problem) -> list[str]:
        r = Refusals()
        for role, t in problem.items:
            if role != "target":
                r.require(t.dtype in FLOATING, f"{role} of a floating-point type", t.dtype)
        return r

    def cost(self, problem: Problem, config: Config) -> float:
        return roofline(problem, flops=0.0, bytes=300.0 * problem["x"].numel + 1, launches=30)

    def build(self, problem: Problem, config: Config) -> Run:
        names = tuple(problem.tensors)
        op = problem.op
        reduction = op.reduction  # type: ignore[attr-defined]

        def forward(tensors: tuple[torch.Tensor, ...], workspace: torch.Tensor | None) -> None:
            pack = dict(zip(names, tensors, strict=True))
            x = pack["x"].detach().double()
            q, counted = _targets(problem, pack)
            stats = torch.zeros_like(x[:, 0]) if op.from_log else _log_sum_exp(x)  # type: ignore[attr-defined]
            # 0 log 0 has no meaning here: a class that is no target does not read its logit
            terms = q * (x - stats.unsqueeze(1))
            if by_class(problem["target"]) and not op.smoothing:  # type: ignore[attr-defined]
                terms = torch.where(_chosen(problem, pack) | q.isnan(), terms, 0.0)
            losses = torch.where(counted, -terms.sum(1), 0.0)
            if "stats" in pack:
                pack["stats"].copy_(stats)
            if "total" in pack:
                total = torch.where(counted, _class_weight(problem, pack), 0.0).sum()
                pack["total"].copy_(total)
            elif reduction == "mean":
                total = math.prod(losses.shape)
            if reduction != "none":
                losses = losses.sum()
            pack["y"].copy_(losses / total if reduction == "mean" else losses)

        def backward(tensors: tuple[torch.Tensor, ...], workspace: torch.Tensor | None) -> None:
            pack = dict(zip(names, tensors, strict=True))
            x, dy = pack["x"].detach().double(), pack["dy"].detach().double()
            q, counted = _targets(problem, pack)
            if reduction == "mean":
                dy = dy / (pack["total"].double() if "total" in pack else counted.numel())
            if reduction != "none":
                dy = dy.expand(counted.shape)
            dx = -q
            if not op.from_log:  # type: ignore[attr-defined]
                dx = torch.exp(x - pack["stats"].double().unsqueeze(1)) * q.sum(1, keepdim=True) - q
            pack["dx"].copy_(torch.where(counted.unsqueeze(1), dx * dy.unsqueeze(1), 0.0))

        return forward if op.name == "cross_entropy_fwd" else backward


def _log_sum_exp(x: torch.Tensor) -> torch.Tensor:
    largest = x.amax(1) if x.shape[1] else torch.full_like(x.sum(1), -torch.inf)
    return largest + torch.log(torch.exp(x - largest.unsqueeze(1)).sum(1))


def _chosen(problem: Problem, pack: dict[str, torch.Tensor]) -> torch.Tensor:
    """Where the class axis is at the row's class."""
    x, target = pack["x"], pack["target"]
    classes = torch.arange(x.shape[1], device=x.device).reshape(1, -1, *[1] * (x.ndim - 2))
    return target.unsqueeze(1) == classes


def _class_weight(problem: Problem, pack: dict[str, torch.Tensor]) -> torch.Tensor:
    """The weight of each row's class; NaN where there is no such class."""
    target, classes = pack["target"], pack["x"].shape[1]
    exists = (target >= 0) & (target < classes)
    if not classes:
        return torch.full(target.shape, torch.nan, dtype=torch.float64, device=target.device)
    if "weight" in pack:
        weight = pack["weight"].double()[target.clamp(0, classes - 1)]
    else:
        weight = torch.ones_like(target, dtype=torch.float64)
    return torch.where(exists, weight, torch.nan)


def _targets(problem: Problem, pack: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """The q of the formulas, of the shape of x, and which rows count."""
    op, target, x = problem.op, pack["target"].detach(), pack["x"]
    classes = x.shape[1]
    weight = torch.ones(classes, dtype=torch.float64, device=x.device)
    if "weight" in pack:
        weight = pack["weight"].detach().double()
    weight = weight.reshape(1, -1, *[1] * (x.ndim - 2))
    smoothing: float = op.smoothing  # type: ignore[attr-defined]
    if not by_class(problem["target"]):
        q = weight * ((1.0 - smoothing) * target.double() + smoothing / max(classes, 1))
        return q, torch.ones_like(target[:, :1].sum(1), dtype=torch.bool)
    counted = target != op.ignore_index  # type: ignore[attr-defined]
    strange = counted & ((target < 0) | (target >= classes))
    if x.device.type == "cpu" and bool(strange.any()):
        accepted = f"class numbers from 0 to {classes - 1}, or ignore_index"
        raise InvalidArgument("target", int(target[strange][0]), accepted)
    q = weight * ((1.0 - smoothing) * _chosen(problem, pack).double() + smoothing / max(classes, 1))
    return torch.where(strange.unsqueeze(1), torch.nan, q), counted
