"""``pool.indexed_reference``: adaptive max pooling and max unpooling in float64, on any device, slow on purpose.

Method: a maximum and its place are found axis by axis, W first: among equal rows the first one stays, so the first in
reading order wins. The backward pass asks every window that holds a place whether its index names it. Unpooling
finds, for every place, the last value that names it (a maximum over their numbers, which has one result in any
order) and fetches that value. Every other engine is tested against this one, and this one against the framework in
the tests. Cost: a few float64 passes for each point of the longest window along each axis.
"""

from __future__ import annotations

import itertools
import math

import torch

from ...core.descriptor import FLOATING
from ...core.engine import Config, Engine, Refusals, Run
from ...core.heuristics import roofline
from ...core.problem import Problem
from ...ops.pooling import WindowAxis, window_axes


class IndexedReference(Engine):
    """All four operations, straight from the formulas."""

    name = "pool.indexed_reference"
    operations = ("adaptive_max_pool_fwd", "adaptive_max_pool_bwd", "max_unpool_fwd", "max_unpool_bwd")
    targets = ("cpu", "cuda", "hip")
    notes = frozenset({"reference"})

    def refusals(self, problem: Problem) -> list[str]:
        r = Refusals()
        for role, t in problem.items:
            if role != "index":
                r.require(t.dtype in FLOATING, f"{role} of a floating-point type", t.dtype)
        return r

    def cost(self, problem: Problem, config: Config) -> float:
        steps = 4
        if problem.op.name == "adaptive_max_pool_fwd":
            steps = sum(axis.longest for axis in window_axes(problem))
        elif problem.op.name == "adaptive_max_pool_bwd":
            steps = math.prod(-(-a.count // a.size) + 1 for a in window_axes(problem))
        moved = 20 * (1 + steps) * problem.bytes
        return roofline(problem, bytes=moved, compute_efficiency=0.02, launches=8 * (1 + steps))

    def build(self, problem: Problem, config: Config) -> Run:
        name = problem.op.name
        if name.startswith("max_unpool"):
            return _unpool_forward if name == "max_unpool_fwd" else _unpool_backward
        axes = window_axes(problem)
        sizes, counts = [a.size for a in axes], [a.count for a in axes]
        x_shape = problem[problem.op.x_role].shape  # type: ignore[attr-defined]
        y_shape = problem[problem.op.y_role].shape  # type: ignore[attr-defined]

        def forward(tensors: tuple[torch.Tensor, ...], workspace: torch.Tensor | None) -> None:
            value = tensors[0].detach().double().reshape(*x_shape[:2], *sizes)
            place = torch.arange(math.prod(sizes), device=value.device).reshape(sizes).expand(value.shape)
            for dim, axis in ((4, axes[2]), (3, axes[1]), (2, axes[0])):
                value, place = _largest(value, place, dim, axis)
            for t, result in zip(tensors[1:], (value, place), strict=False):
                t.copy_(result.reshape(y_shape))

        def backward(tensors: tuple[torch.Tensor, ...], workspace: torch.Tensor | None) -> None:
            dy, index = (t.detach().reshape(*y_shape[:2], *counts) for t in tensors[:2])
            tensors[2].copy_(_gathered(dy.double(), index.long(), axes).reshape(x_shape))

        return forward if name == "adaptive_max_pool_fwd" else backward


def _largest(value: torch.Tensor, place: torch.Tensor, dim: int, axis: WindowAxis) -> tuple[torch.Tensor, torch.Tensor]:
    ends = [axis.inside(q) for q in range(axis.count)]
    index = torch.tensor([first for first, _ in ends], dtype=torch.int64, device=value.device)
    best, where = value.index_select(dim, index), place.index_select(dim, index)
    for k in range(1, max((points for _, points in ends), default=0)):
        # A window that has no such point asks its last one again, which changes nothing.
        last = [first + min(k, points - 1) for first, points in ends]
        index = torch.tensor(last, dtype=torch.int64, device=value.device)
        v, p = value.index_select(dim, index), place.index_select(dim, index)
        take = (v > best) | (v.isnan() & ~best.isnan())
        best, where = torch.where(take, v, best), torch.where(take, p, where)
    return best, where


def _gathered(dy: torch.Tensor, index: torch.Tensor, axes: tuple[WindowAxis, ...]) -> torch.Tensor:
    sizes = [a.size for a in axes]
    positions = torch.arange(math.prod(sizes), device=dy.device).reshape(sizes)
    dx = torch.zeros((*dy.shape[:2], *sizes), dtype=dy.dtype, device=dy.device)
    holders = [a.holders() for a in axes]
    for turn in itertools.product(*(range(max(map(len, held), default=0)) for held in holders)):
        v, found, there = dy, index, torch.ones((1, 1, 1), dtype=torch.bool, device=dy.device)
        for number, (held, k) in enumerate(zip(holders, turn, strict=True)):
            ok = torch.tensor([k < len(h) for h in held], device=dy.device)
            window = torch.tensor([h[k] if k < len(h) else 0 for h in held], dtype=torch.int64, device=dy.device)
            v, found = v.index_select(2 + number, window), found.index_select(2 + number, window)
            there = there & ok.reshape(-1, *[1] * (2 - number))
        dx += torch.where(there & (found == positions), v, 0.0)
    return dx


def _unpool_forward(tensors: tuple[torch.Tensor, ...], workspace: torch.Tensor | None) -> None:
    x, index, y = tensors[0].detach().double().flatten(2), tensors[1].flatten(2).long(), tensors[2]
    points = math.prod(y.shape[2:])
    slot = torch.where((index >= 0) & (index < points), index, points)  # one more place for what is dropped
    number = torch.arange(x.shape[2], device=x.device).expand(x.shape)
    last = torch.full((*x.shape[:2], points + 1), -1, dtype=torch.int64, device=x.device)
    last = last.scatter_reduce(2, slot, number, "amax")[..., :points]
    if x.shape[2] == 0:
        y.zero_()
        return
    y.copy_(torch.where(last >= 0, x.gather(2, last.clamp(min=0)), 0.0).reshape(y.shape))


def _unpool_backward(tensors: tuple[torch.Tensor, ...], workspace: torch.Tensor | None) -> None:
    dy, index, dx = tensors[0].detach().double().flatten(2), tensors[1].flatten(2).long(), tensors[2]
    points = dy.shape[2]
    if points == 0:
        dx.zero_()
        return
    inside = (index >= 0) & (index < points)
    dx.copy_(torch.where(inside, dy.gather(2, torch.where(inside, index, 0)), 0.0).reshape(dx.shape))
