"""``pool.reference``: the definition of max pooling in float64, on any device, slow on purpose.

Method: one pass over whole tensors for each point of the window, in window order (D, H, W), over an input
that is really padded, with a mask of what is input and what is padding. Forward keeps the largest value so far
and where it was: a later point takes over only where it is larger, or the first NaN. Backward adds dy to the
shifted places that the index names. Every other engine is tested against this one, and this one against the
framework in the tests. Cost: a few float64 passes a window point.

What the formulas leave open is fixed here for all engines: a window without any point of the input (wide
dilation can do that) gives minus infinity and the index -1 (0 where the index is u8), and the backward pass
drops an index that is not a point of its own window.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

from ...core.descriptor import FLOATING
from ...core.engine import Config, Engine, Refusals, Run
from ...core.heuristics import roofline
from ...core.problem import Problem
from ...ops.pooling import PoolGeometry


class PoolReference(Engine):
    """Both directions, straight from the formulas."""

    name = "pool.reference"
    operations = ("max_pool_fwd", "max_pool_bwd")
    targets = ("cpu", "cuda", "hip")
    notes = frozenset({"reference"})

    def refusals(self, problem: Problem) -> list[str]:
        r = Refusals()
        for role, t in problem.items:
            if role != "index":
                r.require(t.dtype in FLOATING, f"{role} of a floating-point type", t.dtype)
        return r

    def cost(self, problem: Problem, config: Config) -> float:
        points = len(list(_taps(PoolGeometry.of(problem))))
        moved = (20 + 60 * points) * problem[problem.op.y_role].numel  # type: ignore[attr-defined]
        return roofline(problem, bytes=20 * problem.bytes + moved, compute_efficiency=0.02, launches=10 * points)

    def build(self, problem: Problem, config: Config) -> Run:
        g = PoolGeometry.of(problem)
        kind = problem.op.index_type  # type: ignore[attr-defined]

        def forward(tensors: tuple[torch.Tensor, ...], workspace: torch.Tensor | None) -> None:
            largest, where = _forward(g, tensors[0].detach().double().reshape(g.N, g.C, *g.in_size), kind)
            tensors[1].copy_(largest.reshape(g.y.shape))
            if kind != "none":
                tensors[2].copy_(where.reshape(g.y.shape))

        def backward(tensors: tuple[torch.Tensor, ...], workspace: torch.Tensor | None) -> None:
            dy, index = (t.detach().reshape(g.N, g.C, *g.out_size) for t in tensors[:2])
            tensors[2].copy_(_backward(g, dy.double(), index.long(), kind).reshape(g.x.shape))

        return forward if problem.op.name == "max_pool_fwd" else backward


def _taps(g: PoolGeometry) -> Iterator[tuple[int, tuple[slice, ...]]]:
    """Every window point in order: its number, and the places of the padded input that it meets."""
    for number, tap in enumerate(itertools.product(*map(range, g.window))):
        starts = [t * d for t, d in zip(tap, g.dilation, strict=True)]
        axes = zip(starts, g.out_size, g.stride, strict=True)
        yield number, tuple(slice(a, a + (q - 1) * s + 1, s) for a, q, s in axes)


def _padded_sizes(g: PoolGeometry) -> tuple[int, ...]:
    """Long enough for the padding before, the input, and the last window."""
    axes = zip(g.pad, g.in_size, g.out_size, g.stride, g.window, g.dilation, strict=True)
    return tuple(max(p + n, (q - 1) * s + d * (r - 1) + 1) for p, n, q, s, r, d in axes)


def _inside(g: PoolGeometry) -> tuple[slice, ...]:
    return tuple(slice(p, p + n) for p, n in zip(g.pad, g.in_size, strict=True))


def _positions(g: PoolGeometry, device: torch.device) -> torch.Tensor:
    """Flat position in the input's plane for every point of the padded plane; -1 in the padding."""
    d, h, w = g.in_size
    positions = torch.full(_padded_sizes(g), -1, dtype=torch.int64, device=device)
    positions[_inside(g)] = torch.arange(d * h * w, device=device).reshape(d, h, w)
    return positions


def _forward(g: PoolGeometry, x: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    positions = _positions(g, x.device)
    padded = torch.full((g.N, g.C, *positions.shape), -torch.inf, dtype=x.dtype, device=x.device)
    padded[(..., *_inside(g))] = x
    largest = torch.full((g.N, g.C, *g.out_size), -torch.inf, dtype=x.dtype, device=x.device)
    where = torch.full(largest.shape, -1, dtype=torch.int64, device=x.device)
    for number, places in _taps(g):
        value, position = padded[(..., *places)], positions[places]
        larger = (value > largest) | (value.isnan() & ~largest.isnan())
        take = (position >= 0) & (larger | (where < 0))
        largest = torch.where(take, value, largest)
        where = torch.where(take, number if kind == "u8" else position, where)
    return largest, where.clamp(min=0) if kind == "u8" else where


def _backward(g: PoolGeometry, dy: torch.Tensor, index: torch.Tensor, kind: str) -> torch.Tensor:
    positions = _positions(g, dy.device)
    dx = torch.zeros((g.N, g.C, *positions.shape), dtype=dy.dtype, device=dy.device)
    for number, places in _taps(g):
        position = positions[places]
        here = (position >= 0) & (index == (number if kind == "u8" else position))
        dx[(..., *places)] += torch.where(here, dy, 0.0)
    return dx[(..., *_inside(g))]
