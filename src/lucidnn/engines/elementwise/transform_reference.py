"""``transform.reference``: the tensor transformation as `lucidnn.ops.transform` writes it, on any device.

Method: a padded tensor is really made, its axes taken apart, permuted and put together again, in float64 or 64-bit
whole numbers. Cost: a handful of passes of eight bytes.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from ...core.engine import Config, Engine, Refusals, Run
from ...core.heuristics import roofline
from ...core.problem import Problem
from ...ops.elementwise import TYPES, WHOLE
from ._definition import store, widened


class TransformReference(Engine):
    name = "transform.reference"
    operations = ("transform_tensor",)
    targets = ("cpu", "cuda", "hip")
    notes = frozenset({"reference"})

    def refusals(self, problem: Problem) -> list[str]:
        r = Refusals()
        r.require_tensors(problem.items, TYPES)
        return r

    def cost(self, problem: Problem, config: Config) -> float:
        return roofline(problem, bytes=100.0 * problem["y"].numel, dtype="f64", launches=10)

    def build(self, problem: Problem, config: Config) -> Run:
        op: Any = problem.op
        whole = problem["x"].dtype in WHOLE
        number = int if whole else float
        alpha, beta = number(problem.epilogue.alpha), number(problem.epilogue.beta)
        names = tuple(problem.tensors)

        def run(tensors: tuple[torch.Tensor, ...], workspace: torch.Tensor | None) -> None:
            given = dict(zip(names, tensors, strict=True))
            value = alpha * widened(given["x"], whole)
            if op.fold and op.unfold:
                value = _unfolded(value, op.fold)
            if op.padding:
                value = _padded(value, op.padding, number(op.value))
            if op.fold and not op.unfold:
                value = _folded(value, op.fold)
            if "z" in given:
                value = value + beta * widened(given["z"], whole)
            store(given["y"], problem["y"].dtype, value)

        return run


def _padded(x: torch.Tensor, padding: tuple[tuple[int, int], ...], value: float) -> torch.Tensor:
    sizes = [n + a + b for n, (a, b) in zip(x.shape, padding, strict=True)]
    found = x.new_full(sizes, value)
    inside, source = [], []
    for n, (a, b) in zip(x.shape, padding, strict=True):
        source.append(slice(max(-a, 0), n - max(-b, 0)))
        inside.append(slice(max(a, 0), max(a, 0) + max(source[-1].stop - source[-1].start, 0)))
    if all(s.stop > s.start for s in source):
        found[tuple(inside)] = x[tuple(source)]
    return found


def _folded(x: torch.Tensor, fold: tuple[int, ...]) -> torch.Tensor:
    n, c, *sizes = x.shape
    count = len(fold)
    apart = [m for size, f in zip(sizes, fold, strict=True) for m in (size // f, f)]
    order = [0, 1, *(3 + 2 * i for i in range(count)), *(2 + 2 * i for i in range(count))]
    shape = (n, c * math.prod(fold), *(size // f for size, f in zip(sizes, fold, strict=True)))
    return x.reshape(n, c, *apart).permute(order).reshape(shape)


def _unfolded(x: torch.Tensor, fold: tuple[int, ...]) -> torch.Tensor:
    n, c, *sizes = x.shape
    count = len(fold)
    order = [0, 1, *(axis for i in range(count) for axis in (2 + count + i, 2 + i))]
    shape = (n, c // math.prod(fold), *(size * f for size, f in zip(sizes, fold, strict=True)))
    return x.reshape(n, shape[1], *fold, *sizes).permute(order).reshape(shape)
