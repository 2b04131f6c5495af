"""``fold.reference``: windows as columns and back, and shuffles, in float64 on any device, slow on purpose.

Method: one pass over a really padded image for each point of the window; a shuffle is a view with the axes taken apart,
permuted and put together again. Every other engine is tested against this one, and this one against the framework in
the tests. Cost: a few float64 passes a window point.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch

from ...core.engine import Config, Engine, Refusals, Run
from ...core.heuristics import roofline
from ...core.problem import Problem


class FoldReference(Engine):
    name = "fold.reference"
    operations = ("unfold_fwd", "unfold_bwd", "shuffle")
    targets = ("cpu", "cuda", "hip")
    notes = frozenset({"reference"})

    def refusals(self, problem: Problem) -> list[str]:
        return Refusals()

    def cost(self, problem: Problem, config: Config) -> float:
        points = 1 if problem.op.name == "shuffle" else math.prod(problem.op.window)  # type: ignore[attr-defined]
        return roofline(problem, flops=0.0, bytes=60.0 * problem.bytes, launches=6 * points)

    def build(self, problem: Problem, config: Config) -> Run:
        op: Any = problem.op
        if op.name == "shuffle":
            return lambda tensors, workspace: tensors[1].copy_(_shuffled(op.kind, op.factor, tensors[0].detach()))
        image = problem["x" if op.name == "unfold_fwd" else "dx"].shape
        blocks = op.blocks(image[2:])
        padded = [n + 2 * p for n, p in zip(image[2:], op.padding, strict=True)]
        inside = tuple(slice(p, p + n) for n, p in zip(image[2:], op.padding, strict=True))
        places = []
        for point in itertools.product(*map(range, op.window)):
            starts = [t * d for t, d in zip(point, op.dilation, strict=True)]
            places.append([slice(a, a + (n - 1) * u + 1, u) for a, n, u in zip(starts, blocks, op.stride, strict=True)])

        def forward(tensors: tuple[torch.Tensor, ...], workspace: torch.Tensor | None) -> None:
            x = tensors[0].detach().double()
            wide = x.new_zeros((*image[:2], *padded))
            wide[(..., *inside)] = x
            columns = torch.stack([wide[(..., *place)] for place in places], 2)
            tensors[1].copy_(columns.reshape(tensors[1].shape))

        def backward(tensors: tuple[torch.Tensor, ...], workspace: torch.Tensor | None) -> None:
            columns = tensors[0].detach().double().reshape(*image[:2], len(places), *blocks)
            wide = columns.new_zeros((*image[:2], *padded))
            for number, place in enumerate(places):
                wide[(..., *place)] += columns[:, :, number]
            tensors[1].copy_(wide[(..., *inside)])

        return forward if op.name == "unfold_fwd" else backward


def _shuffled(kind: str, f: int, x: torch.Tensor) -> torch.Tensor:
    n, c, *spatial = x.shape
    if kind == "channel_shuffle":
        return x.reshape(n, f, c // f, *spatial).transpose(1, 2).reshape(x.shape)
    h, w = spatial
    if kind == "pixel_shuffle":
        parts = x.reshape(n, c // (f * f), f, f, h, w).permute(0, 1, 4, 2, 5, 3)
        return parts.reshape(n, c // (f * f), h * f, w * f)
    parts = x.reshape(n, c, h // f, f, w // f, f).permute(0, 1, 3, 5, 2, 4)
    return parts.reshape(n, c * f * f, h // f, w // f)
