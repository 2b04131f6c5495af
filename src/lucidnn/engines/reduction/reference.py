"""``reduce.reference``: reductions and their gradients in float64, on any device, slow on purpose.

Method: the reduced axes go last and become one; then its two halves are combined, element by element, until one point
is left. Gradients are the formulas of `lucidnn.ops.reduction` on whole tensors. Nothing of the framework's own
reductions is called. Cost: some twenty float64 passes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...core.descriptor import FLOATING
from ...core.engine import Config, Engine, Refusals, Run
from ...core.heuristics import roofline
from ...core.problem import Problem
from ...ops.reduction import reduced_shape

Combine = Callable[[Any, Any], Any]


def _better(mode: str, a: Any, b: Any) -> Any:
    """Where a is further out than b, or a NaN; b not being one."""
    further = a < b if mode == "min" else a > b
    return (further | a.isnan()) & ~b.isnan()


def _extreme(mode: str, a: tuple[Any, Any], b: tuple[Any, Any]) -> tuple[Any, Any]:
    (v, i), (w, k) = a, b
    same = (v == w) | (v.isnan() & w.isnan())
    take = _better(mode, v, w) | (same & (i < k))
    return torch.where(take, v, w), torch.where(take, i, k)


def _halved(parts: tuple[torch.Tensor, ...], combine: Combine, nothing: float) -> tuple[torch.Tensor, ...]:
    """The last axis combined to one point."""
    if not parts[0].shape[-1]:
        return (torch.full_like(parts[0].new_empty(parts[0].shape[:-1]), nothing),)
    while (n := parts[0].shape[-1]) > 1:
        half = n // 2
        rest = tuple(p[..., 2 * half :] for p in parts)
        joined = combine(tuple(p[..., :half] for p in parts), tuple(p[..., half : 2 * half] for p in parts))
        parts = tuple(torch.cat(pair, -1) for pair in zip(joined, rest, strict=True))
    return tuple(p[..., 0] for p in parts)


def _sum(v: torch.Tensor) -> torch.Tensor:
    return _halved((v,), lambda a, b: (a[0] + b[0],), 0.0)[0]


def _product(v: torch.Tensor) -> torch.Tensor:
    return _halved((v,), lambda a, b: (a[0] * b[0],), 1.0)[0]


def _sign(v: torch.Tensor) -> torch.Tensor:
    return (v > 0).to(v.dtype) - (v < 0).to(v.dtype)


class ReduceReference(Engine):
    """Both directions, straight from the formulas."""

    name = "reduce.reference"
    operations = ("reduce_fwd", "reduce_bwd")
    targets = ("cpu", "cuda", "hip")
    notes = frozenset({"reference"})

    def refusals(self, problem: Problem) -> list[str]:
        r = Refusals()
        r.require_tensors(((role, t) for role, t in problem.items if role != "index"), FLOATING)
        return r

    def cost(self, problem: Problem, config: Config) -> float:
        moved = 200.0 * problem.items[0][1].numel + 20 * problem.bytes
        return roofline(problem, bytes=moved, dtype="f64", launches=60)

    def build(self, problem: Problem, config: Config) -> Run:
        op: Any = problem.op
        names, alpha, beta = tuple(problem.tensors), problem.epilogue.alpha, problem.epilogue.beta
        forward = problem.op.name == "reduce_fwd"
        x_shape = problem["x" if forward else "dx"].shape
        kept = [axis for axis in range(len(x_shape)) if axis not in op.axes]
        order = [*kept, *op.axes]
        count = op.points(problem["x" if forward else "dx"])
        shape = [x_shape[axis] for axis in kept]

        def lines(t: torch.Tensor) -> torch.Tensor:
            """Kept axes first, the reduced ones as one."""
            return t.detach().double().permute(order).reshape(*shape, count)

        def run_forward(tensors: tuple[torch.Tensor, ...], workspace: torch.Tensor | None) -> None:
            given = dict(zip(names, tensors, strict=True))
            value, place = _forward(op.mode, lines(given["x"]))
            value = alpha * value.reshape(given["y"].shape)
            if "z" in given:
                value = value + beta * given["z"].detach().double()
            given["y"].copy_(value)
            if "index" in given:
                given["index"].copy_(place.reshape(given["index"].shape))  # type: ignore[union-attr]

        def run_backward(tensors: tuple[torch.Tensor, ...], workspace: torch.Tensor | None) -> None:
            given = dict(zip(names, tensors, strict=True))
            wide = {role: given[role].reshape(*shape, 1) for role in ("dy", "y", "index") if role in given}
            x = lines(given["x"]) if "x" in given else None
            dx = _backward(op.mode, x, wide, count)
            back = [order.index(axis) for axis in range(len(order))]
            full = dx.expand(*shape, count).reshape([x_shape[axis] for axis in order]).permute(back)
            given["dx"].copy_(alpha * full)

        assert reduced_shape(x_shape, op.axes, False) == tuple(shape)
        return run_forward if forward else run_backward


def _forward(mode: str, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    if mode in ("min", "max", "amax"):
        place = torch.arange(v.shape[-1], device=v.device).expand(v.shape)
        if not v.numel():
            return v.new_empty(v.shape[:-1]), place.new_empty(v.shape[:-1])
        value, where = _halved((v.abs() if mode == "amax" else v, place), lambda a, b: _extreme(mode, a, b), 0.0)
        return value, where
    if mode in ("mul", "mul_no_zeros"):
        return _product(torch.where(v == 0, 1.0, v) if mode == "mul_no_zeros" else v), None
    if mode == "norm1":
        return _sum(v.abs()), None
    if mode == "norm2":
        return _sum(v * v).sqrt(), None
    return (_sum(v) / v.shape[-1] if mode == "avg" else _sum(v)), None


def _backward(mode: str, x: Any, given: dict[str, torch.Tensor], count: int) -> torch.Tensor:
    """The gradient over (kept..., reduced); y, dy and index have a last axis of one point."""
    dy = given["dy"].detach().double()
    if mode in ("add", "avg"):
        return dy if mode == "add" else dy / count
    if "index" in given:
        place = torch.arange(count, device=dy.device)
        dy = torch.where(place == given["index"], dy, 0.0)
        return dy * _sign(x) if mode == "amax" else dy
    if mode == "norm1":
        return dy * _sign(x)
    if mode == "mul":
        zero = x == 0
        others, zeros = _product(torch.where(zero, 1.0, x))[..., None], _sum(zero.double())[..., None]
        alone = torch.where(zero & (zeros == 1), dy * others, 0.0)
        return torch.where(zeros == 0, dy * others / x, alone)
    y = given["y"].detach().double()
    if mode == "mul_no_zeros":
        return torch.where(x == 0, 0.0, dy * y / x)
    if mode == "norm2":
        return torch.where(y == 0, 0.0, dy * x / y)
    here = (x.abs() if mode == "amax" else x) == y
    share = _sum(here.double())[..., None]
    dx = torch.where(here, dy / share, 0.0 * share / share)  # NaN where none is equal: y is a NaN
    return dx * _sign(x) if mode == "amax" else dx
