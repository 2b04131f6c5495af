"""``batch_norm.reference``: the definitions of `lucidnn.ops.batch_normalization` in float64, on any device.

Method: the formulas as written, whole tensors at a time; the variance by two passes, from the finished mean. Nothing of
the framework's normalization is called. Cost: some twenty float64 passes over the data.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from ...core.engine import Config, Engine, Refusals, Run
from ...core.heuristics import roofline
from ...core.problem import Problem
from ...ops.batch_normalization import TYPES
from .._reference import activate, activate_grad, store

Given = dict[str, torch.Tensor]


def _axes(op: Any, x: torch.Tensor) -> list[int]:
    """The axes that m of the formulas runs over."""
    return [0] if op.mode == "per_activation" else [0, *range(2, x.ndim)]


def _spread(p: torch.Tensor, op: Any, x: torch.Tensor) -> torch.Tensor:
    """A parameter in a shape that broadcasts against x."""
    return p[None] if op.mode == "per_activation" else p.reshape(1, -1, *[1] * (x.ndim - 2))


def _mean_and_m2(op: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
    axes = _axes(op, x)
    count = math.prod(x.shape[axis] for axis in axes)
    mean = x.sum(axes) / max(count, 1)
    m2 = (x - _spread(mean, op, x)).square().sum(axes)
    return torch.where(m2.isnan(), torch.nan, mean), m2, count


def _normalized(op: Any, t: Given) -> tuple[torch.Tensor, torch.Tensor]:
    """X hat, and 1 / sqrt(variance + epsilon) in a shape that broadcasts."""
    inverse = t["inv_variance"] if "inv_variance" in t else (t["variance"] + op.epsilon).rsqrt()
    inverse = _spread(inverse, op, t["x"])
    return (t["x"] - _spread(t["mean"], op, t["x"])) * inverse, inverse


def _before_activation(op: Any, t: Given, hat: torch.Tensor) -> torch.Tensor:
    v = hat
    if "scale" in t:
        v = v * _spread(t["scale"], op, hat)
    if "bias" in t:
        v = v + _spread(t["bias"], op, hat)
    return v + t["z"] if "z" in t else v


def _moved(op: Any, t: Given, mean: torch.Tensor, m2: torch.Tensor, count: Any) -> Given:
    """Running statistics after the update; unchanged where there was nothing to learn from."""
    if "running_mean" not in t:
        return {}
    f = t["factor"] if "factor" in t else torch.full_like(t["running_mean"].flatten()[:1], op.momentum)
    f = torch.where(torch.as_tensor(count == 0, device=f.device), 0.0, f)
    unbiased = m2 / (torch.as_tensor(count, device=f.device) - 1).clamp(min=1)
    return {
        "next_mean": t["running_mean"] + f * (mean - t["running_mean"]),
        "next_variance": t["running_variance"] + f * (unbiased - t["running_variance"]),
    }


def _train(problem: Problem, t: Given) -> Given:
    op, e = problem.op, problem.epilogue
    mean, m2, count = _mean_and_m2(op, t["x"])
    inverse = (m2 / max(count, 1) + op.epsilon).rsqrt()  # type: ignore[attr-defined]
    hat = (t["x"] - _spread(mean, op, t["x"])) * _spread(inverse, op, t["x"])
    y = activate(e.activation, e.parameter, _before_activation(op, t, hat))
    return {"y": y, "mean": mean, "inv_variance": inverse, **_moved(op, t, mean, m2, count)}


def _infer(problem: Problem, t: Given) -> Given:
    e = problem.epilogue
    hat, _ = _normalized(problem.op, t)
    return {"y": activate(e.activation, e.parameter, _before_activation(problem.op, t, hat))}


def _gradient(problem: Problem, t: Given) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradient before the activation, x hat, and the factor of dx."""
    op, e = problem.op, problem.epilogue
    hat, inverse = _normalized(op, t)
    source = t["y"] if "y" in t else _before_activation(op, t, hat)
    g = activate_grad(e.activation, e.parameter, source, t["dy"])
    return g, hat, inverse * _spread(t["scale"], op, hat) if "scale" in t else inverse.expand_as(hat)


def _sums(problem: Problem, t: Given) -> Given:
    g, hat, _ = _gradient(problem, t)
    axes = _axes(problem.op, hat)
    return {"dscale": (g * hat).sum(axes), "dbias": g.sum(axes)}


def _dx(problem: Problem, t: Given, count: Any) -> Given:
    """The gradients of large tensors from the sums, in `t` too."""
    g, hat, factor = _gradient(problem, t)
    op = problem.op
    if getattr(op, "frozen", False):
        return {"dx": factor * g, "dz": g}
    return {
        "dx": factor * (g - _spread(t["dbias"], op, g) / count - hat * (_spread(t["dscale"], op, g) / count)),
        "dz": g,
    }


def _bwd(problem: Problem, t: Given) -> Given:
    sums = _sums(problem, t)
    count = max(math.prod(t["x"].shape[axis] for axis in _axes(problem.op, t["x"])), 1)
    return sums | _dx(problem, t | sums, count)


def _stats(problem: Problem, t: Given) -> Given:
    mean, m2, _ = _mean_and_m2(problem.op, t["x"])
    return {"mean": mean, "m2": m2}


def _combine(problem: Problem, t: Given) -> Given:
    op, total = problem.op, t["counts"].sum()
    shares = t["counts"].reshape(-1, *[1] * (t["means"].ndim - 1))
    divisor = torch.where(total == 0, 1.0, total)
    mean = (shares * t["means"]).sum(0) / divisor
    m2 = (t["m2s"] + shares * (t["means"] - mean).square()).sum(0)
    mean = torch.where(m2.isnan(), torch.nan, mean)
    inverse = (m2 / divisor + op.epsilon).rsqrt()  # type: ignore[attr-defined]
    return {"mean": mean, "inv_variance": inverse, **_moved(op, t, mean, m2, total)}


_METHODS: dict[str, Callable[[Problem, Given], Given]] = {
    "batch_norm_train_fwd": _train,
    "batch_norm_infer_fwd": _infer,
    "batch_norm_bwd": _bwd,
    "batch_norm_bwd_sums": _sums,
    "batch_norm_bwd_apply": lambda problem, t: _dx(problem, t, t["count"]),
    "batch_norm_stats": _stats,
    "batch_norm_combine": _combine,
}


class BatchNormReference(Engine):
    """All operations, straight from the formulas."""

    name = "batch_norm.reference"
    operations = tuple(_METHODS)
    targets = ("cpu", "cuda", "hip")
    notes = frozenset({"reference"})

    def refusals(self, problem: Problem) -> list[str]:
        r = Refusals()
        r.require_tensors(problem.items, TYPES)
        return r

    def cost(self, problem: Problem, config: Config) -> float:
        elements = sum(t.numel for _, t in problem.items)
        return roofline(problem, bytes=40.0 * elements, dtype="f64", launches=30)

    def build(self, problem: Problem, config: Config) -> Run:
        method = _METHODS[problem.op.name]
        inputs, outputs = problem.inputs, problem.outputs

        def run(tensors: tuple[torch.Tensor, ...], workspace: torch.Tensor | None) -> None:
            given = {role: t.detach().double() for role, t in zip(inputs, tensors, strict=False)}
            found = method(problem, given)
            for role, out in zip(outputs, tensors[len(inputs) :], strict=True):
                store(out, found[role])

        return run
