"""``elementwise.reference``: the modes' formulas in float64 or in 64-bit whole numbers, on any device.

Method: whole-tensor operations as `lucidnn.ops.elementwise` writes them. Cost: a handful of passes of eight bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...core.engine import Config, Engine, Refusals, Run
from ...core.heuristics import roofline
from ...core.problem import Problem
from ...ops.elementwise import TYPES
from ._definition import store, widened


def _smaller(x: Any, b: Any) -> Any:
    return torch.where((x < b) | (x != x), x, b)


def _larger(x: Any, b: Any) -> Any:
    return torch.where((x > b) | (x != x), x, b)


def _relu(v: Any, lower: float, upper: float, slope: float) -> Any:
    below = torch.full_like(v, lower) if slope == 0.0 else lower + slope * (v - lower)
    return torch.where(v >= upper, torch.full_like(v, upper), torch.where(v <= lower, below, v))


def _relu_bwd(dy: Any, v: Any, lower: float, upper: float, slope: float) -> Any:
    below = torch.zeros_like(dy) if slope == 0.0 else slope * dy
    return torch.where(v >= upper, torch.zeros_like(dy), torch.where(v <= lower, below, dy))


FORMULAS: dict[str, Callable[..., Any]] = {
    "identity": lambda x: x,
    "add": lambda x, b: x + b,
    "add_square": lambda x, b: x + b * b,
    "sub": lambda x, b: x - b,
    "mul": lambda x, b: x * b,
    "div": lambda x, b: x / b,
    "min": _smaller,
    "max": _larger,
    "mod": torch.fmod,
    "pow": torch.pow,
    "abs": torch.abs,
    "ceil": torch.ceil,
    "floor": torch.floor,
    "rsqrt": lambda x: 1.0 / torch.sqrt(x),
    "sqrt": torch.sqrt,
    "exp": torch.exp,
    "log": torch.log,
    "neg": torch.neg,
    "sin": torch.sin,
    "cos": torch.cos,
    "tan": torch.tan,
    "erf": torch.erf,
    "reciprocal": lambda x: 1.0 / x,
    "not": lambda x: 1 - x,
    "logical_not": lambda x: x == 0,
    "logical_and": lambda x, b: (x != 0) & (b != 0),
    "logical_or": lambda x, b: (x != 0) | (b != 0),
    "cmp_eq": lambda x, b: x == b,
    "cmp_neq": lambda x, b: x != b,
    "cmp_gt": lambda x, b: x > b,
    "cmp_ge": lambda x, b: x >= b,
    "cmp_lt": lambda x, b: x < b,
    "cmp_le": lambda x, b: x <= b,
    "binary_select": lambda x, b, t: torch.where(t != 0, x, b),
}


class ElementwiseReference(Engine):
    """Every mode, straight from the formulas."""

    name = "elementwise.reference"
    operations = ("elementwise_fwd",)
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
        names, beta = tuple(problem.tensors), problem.epilogue.beta
        whole = op.is_whole(problem.tensors)
        shape = problem["y"].shape

        def run(tensors: tuple[torch.Tensor, ...], workspace: torch.Tensor | None) -> None:
            given = dict(zip(names, tensors, strict=True))
            y = given["y"]
            x, b, t, z = (widened(given.get(role), whole) for role in ("x", "b", "t", "z"))
            factors = [int(a) if whole else a for a in (op.alpha1, op.alpha2, beta)]
            if op.mode == "gen_index":
                line = torch.arange(shape[op.axis], device=y.device)
                value = line.reshape(-1, *[1] * (len(shape) - 1 - op.axis)).expand(shape)
            elif op.mode == "clip":
                value = _larger(_smaller(factors[0] * x, torch.full_like(x, op.upper)), torch.full_like(x, op.lower))
            elif op.mode == "relu":
                value = _relu(factors[0] * x, op.lower, op.upper, op.slope)
            elif op.mode == "relu_bwd":
                value = _relu_bwd(factors[0] * x, factors[1] * b, op.lower, op.upper, op.slope)
            else:
                scaled = [v if a == 1 else a * v for v, a in ((x, factors[0]), (b, factors[1])) if v is not None]
                value = FORMULAS[op.mode](*scaled, *([] if t is None else [t]))
            if z is not None:
                value = value + factors[2] * z
            store(y, problem["y"].dtype, value)

        return run
