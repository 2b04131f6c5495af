"""``pool.average_reference``: average, power and adaptive average pooling in float64, on any device, slow on purpose.

Method: windows are the same for every row and every column, so sums are taken axis by axis. Forward adds, for each
number a window point can have, the points of all windows with that number; backward adds, for each number in the list
of the windows that hold a place, the gradients of those windows. Points that are not there are left out, not multiplied
by zero: a NaN reaches exactly the windows that hold it. Every other engine is tested against this one, and this one
against the framework in the tests. Cost: a few float64 passes for each point of the longest window along each axis.
"""

from __future__ import annotations

import math

import torch

from ...core.descriptor import FLOATING
from ...core.engine import Config, Engine, Refusals, Run
from ...core.heuristics import roofline
from ...core.problem import Problem
from ...ops.pooling import WindowAxis, window_axes


class AverageReference(Engine):
    """All six operations, straight from the formulas."""

    name = "pool.average_reference"
    operations = (
        "avg_pool_fwd", "avg_pool_bwd", "lp_pool_fwd", "lp_pool_bwd", "adaptive_avg_pool_fwd", "adaptive_avg_pool_bwd",
    )  # fmt: skip
    targets = ("cpu", "cuda", "hip")
    notes = frozenset({"reference"})

    def refusals(self, problem: Problem) -> list[str]:
        r = Refusals()
        for role, t in problem.items:
            r.require(t.dtype in FLOATING, f"{role} of a floating-point type", t.dtype)
        return r

    def cost(self, problem: Problem, config: Config) -> float:
        steps = sum(axis.longest for axis in window_axes(problem))
        moved = 20 * (1 + steps) * problem.bytes
        return roofline(problem, bytes=moved, compute_efficiency=0.02, launches=6 * (1 + steps))

    def build(self, problem: Problem, config: Config) -> Run:
        axes = window_axes(problem)
        sizes, counts = [a.size for a in axes], [a.count for a in axes]
        norm: float | None = getattr(problem.op, "norm", None)
        shape = problem[problem.outputs[0]].shape

        def forward(tensors: tuple[torch.Tensor, ...], workspace: torch.Tensor | None) -> None:
            x = tensors[0].detach().double().reshape(*shape[:2], *sizes)
            total = x if norm is None else x**norm
            for number, axis in enumerate(axes):
                total = _summed(total, 2 + number, axis)
            mean = total * _factors(problem, axes, x.device)
            tensors[-1].copy_((mean if norm is None else mean ** (1.0 / norm)).reshape(shape))

        def backward(tensors: tuple[torch.Tensor, ...], workspace: torch.Tensor | None) -> None:
            dy = tensors[0].detach().double().reshape(*shape[:2], *counts)
            share = dy * _factors(problem, axes, dy.device)
            if norm is not None:
                y = tensors[2].detach().double().reshape(dy.shape)
                share = torch.where(y == 0, 0.0, share * y ** (1.0 - norm))
            for number, axis in enumerate(axes):
                share = _spread(share, 2 + number, axis)
            dx = share.reshape(shape)
            if norm is not None:
                dx = dx * tensors[1].detach().double() ** (norm - 1.0)
            tensors[-1].copy_(dx)

        return forward if problem.op.name.endswith("_fwd") else backward


def _summed(x: torch.Tensor, dim: int, axis: WindowAxis) -> torch.Tensor:
    """Sums over the windows along one axis."""
    ends = [axis.inside(q) for q in range(axis.count)]
    shape = list(x.shape)
    shape[dim] = axis.count
    total = torch.zeros(shape, dtype=x.dtype, device=x.device)
    for k in range(max((points for _, points in ends), default=0)):
        there = [k < points for _, points in ends]
        place = [first + k * axis.dilation if ok else 0 for (first, _), ok in zip(ends, there, strict=True)]
        total += _chosen(x, dim, place, there)
    return total


def _spread(dy: torch.Tensor, dim: int, axis: WindowAxis) -> torch.Tensor:
    """For every place along one axis, the sum over the windows that hold it."""
    holders = axis.holders()
    shape = list(dy.shape)
    shape[dim] = axis.size
    total = torch.zeros(shape, dtype=dy.dtype, device=dy.device)
    for k in range(max(map(len, holders), default=0)):
        there = [k < len(held) for held in holders]
        total += _chosen(dy, dim, [held[k] if ok else 0 for held, ok in zip(holders, there, strict=True)], there)
    return total


def _chosen(x: torch.Tensor, dim: int, place: list[int], there: list[bool]) -> torch.Tensor:
    """The slices of x at these places along an axis, zero for those that are not there."""
    index = torch.tensor(place, dtype=torch.int64, device=x.device)
    mask = torch.tensor(there, device=x.device).reshape(-1, *[1] * (x.ndim - 1 - dim))
    return torch.where(mask, x.index_select(dim, index), 0.0)


def _factors(problem: Problem, axes: tuple[WindowAxis, ...], device: torch.device) -> torch.Tensor:
    """What each window's sum is multiplied by, of shape (O, P, Q)."""
    op = problem.op
    divisor, norm = getattr(op, "divisor", 0), getattr(op, "norm", None)
    padding = norm is not None or getattr(op, "count_padding", False)
    counts = [
        torch.tensor([a.counted(q, padding) for q in range(a.count)], dtype=torch.float64, device=device) for a in axes
    ]
    points = counts[0][:, None, None] * counts[1][:, None] * counts[2]
    if divisor:
        return torch.full_like(points, 1.0 / divisor)
    whole = math.prod(a.window for a in axes) if norm is not None else 1
    return torch.where(points == 0, 0.0, whole / points)
