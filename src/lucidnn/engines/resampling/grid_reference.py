"""``resample.grid_reference``: sampling by a grid in float64, on any device, slow on purpose.

Method: every axis has one, two or four neighbours of a place, each with a weight and the weight's slope
(`lucidnn.ops.grid_sample`); a point is the sum over all combinations, its gradients follow by the product rule. dx is
added up by an indexed sum in the points' order. Every other engine is tested against this one, and this one against
the framework in the tests. Cost: some ten float64 passes a combination.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch

from ...core.engine import Config, Engine, Refusals, Run
from ...core.heuristics import roofline
from ...core.problem import Problem
from ...ops.grid_sample import TAPS

CUBIC = -0.75


def _cubic(d: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys' kernel and its slope at a signed distance of less than 2."""
    a, e = CUBIC, d.abs()
    near = e <= 1
    value = torch.where(near, ((a + 2) * e - (a + 3)) * e * e + 1, ((e - 5) * e + 8) * e * a - 4 * a)
    slope = torch.where(near, (3 * (a + 2) * e - 2 * (a + 3)) * e, a * ((3 * e - 10) * e + 8))
    return value, slope * d.sign()


def _moved(at: torch.Tensor, size: int, padding: str, corners: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Places inside the image, and how fast they move with the given ones: 1, -1 or 0."""
    speed = torch.ones_like(at)
    if padding == "reflection":
        low, span = (0.0, size - 1.0) if corners else (-0.5, float(size))
        if span == 0:
            return torch.zeros_like(at), torch.zeros_like(at)
        speed = torch.where(at < low, -1.0, 1.0)
        far = (at - low).abs()
        flips, rest = (far / span).floor(), torch.remainder(far, span)
        odd = flips.remainder(2) == 1
        at, speed = torch.where(odd, span - rest, rest) + low, torch.where(odd, -speed, speed)
    if padding != "zeros":
        outside = (at <= 0) | (at >= size - 1)
        at, speed = at.clamp(0, size - 1), torch.where(outside, 0.0, speed)
    return at, speed


def _axis(g: torch.Tensor, size: int, op: Any) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Neighbours of the places along an axis: where (-1 where there is none), weight, slope by g."""
    corners = op.align_corners
    at = (g + 1) / 2 * (size - 1) if corners else ((g + 1) * size - 1) / 2
    pace = torch.full_like(g, (size - 1) / 2 if corners else size / 2)
    if op.mode != "bicubic":
        at, speed = _moved(at, size, op.padding_mode, corners)
        pace = pace * speed
    elif op.padding_mode == "border":  # all neighbours of a place as far as that are the edge
        at = at.clamp(-4, size + 4)
    known = at.abs() < (1e9 if op.padding_mode == "zeros" else math.inf)  # false where it is no number
    at = torch.where(known, at, -100.0)
    first, found = at.floor(), []
    if op.mode == "nearest":
        found.append((at.round(), torch.ones_like(at), torch.zeros_like(at)))
    elif op.mode == "bilinear":
        t = at - first
        found += [(first, 1 - t, -pace), (first + 1, t, pace)]
    else:
        for k in range(4):
            weight, slope = _cubic(at - first - (k - 1))
            place = _moved(first + (k - 1), size, op.padding_mode, corners)[0]
            found.append((place, weight, slope * pace))
    return [(torch.where(known & (p >= 0) & (p < size), p, -1.0).long(), w, s) for p, w, s in found]


class GridReference(Engine):
    name = "resample.grid_reference"
    operations = ("grid_sample_fwd", "grid_sample_bwd")
    targets = ("cpu", "cuda", "hip")
    notes = frozenset({"reference"})

    def refusals(self, problem: Problem) -> list[str]:
        return Refusals()

    def cost(self, problem: Problem, config: Config) -> float:
        op: Any = problem.op
        taps = TAPS[op.mode] ** (problem["x"].ndim - 2)
        moved = 100.0 * taps * problem["y" if "y" in problem.tensors else "dy"].numel
        return roofline(problem, flops=0.0, bytes=20 * problem.bytes + moved, launches=20 * taps)

    def build(self, problem: Problem, config: Config) -> Run:
        op: Any = problem.op
        shape, ndim = problem["x"].shape, problem["x"].ndim - 2
        n, c, *sizes = shape
        pixels, points = math.prod(sizes), math.prod(problem["grid"].shape[1:-1])

        def taps(grid: torch.Tensor) -> Any:
            """For every combination of neighbours: flat place (N, points), whether it exists, weight, slopes."""
            g = grid.detach().double().reshape(n, points, ndim)
            axes = [_axis(g[..., ndim - 1 - axis], size, op) for axis, size in enumerate(sizes)]
            for chosen in itertools.product(*axes):
                flat, exists, weight = 0, True, 1.0
                for (place, w, _), size in zip(chosen, sizes, strict=True):
                    flat, exists, weight = flat * size + place, exists & (place >= 0), weight * w
                slopes = []
                for axis in range(ndim):
                    slope = chosen[axis][2]
                    for other in range(ndim):
                        slope = slope * chosen[other][1] if other != axis else slope
                    slopes.append(slope)
                yield torch.where(exists, flat, 0), exists, weight, slopes

        def read(x: torch.Tensor, flat: torch.Tensor) -> torch.Tensor:
            return x.gather(2, flat[:, None].expand(n, c, flat.shape[1]))

        def forward(tensors: tuple[torch.Tensor, ...], workspace: torch.Tensor | None) -> None:
            x = tensors[0].detach().double().reshape(n, c, pixels)
            total: Any = 0.0
            for flat, exists, weight, _ in taps(tensors[1]):
                total = total + torch.where(exists[:, None], read(x, flat) * weight[:, None], 0.0)
            tensors[2].copy_(total.reshape(tensors[2].shape))

        def backward(tensors: tuple[torch.Tensor, ...], workspace: torch.Tensor | None) -> None:
            given = dict(zip(problem.tensors, tensors, strict=True))
            dy = given["dy"].detach().double().reshape(n, c, points)
            x = given["x"].detach().double().reshape(n, c, pixels)
            dx, dgrid = torch.zeros_like(x).flatten(), x.new_zeros(ndim, n, dy.shape[2])
            planes = torch.arange(n * c, device=x.device).reshape(n, c, 1) * x.shape[2]
            for flat, exists, weight, slopes in taps(given["grid"]):
                part = torch.where(exists[:, None], dy * weight[:, None], 0.0)
                if "dx" in given:
                    dx.index_put_(((planes + flat[:, None]).flatten(),), part.flatten(), accumulate=True)
                if "dgrid" in given:
                    along = torch.where(exists, (dy * read(x, flat)).sum(1), 0.0)
                    for axis in range(ndim):
                        dgrid[ndim - 1 - axis] += along * slopes[axis]
            if "dx" in given:
                given["dx"].copy_(dx.reshape(shape))
            if "dgrid" in given:
                given["dgrid"].copy_(dgrid.permute(1, 2, 0).reshape(given["dgrid"].shape))

        return forward if op.name == "grid_sample_fwd" else backward
