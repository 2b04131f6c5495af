"""``pool.adaptive_max_even``: adaptive max pooling whose output sizes divide the input's, as max pooling.

Method: such windows all have one size and do not overlap, so the problem is a max pooling with the stride of the window
and the same index, and any engine for that solves it: configurations are those engines' names and configurations.
Cost: the inner engine's. Limits: sizes that divide.
"""

from __future__ import annotations

from typing import Any

from ...core import registry
from ...core.engine import Config, Refusals, Run
from ...core.problem import Problem
from ...ops.pooling import MaxPoolBwd, MaxPoolFwd, window_axes
from .._inner import OuterEngine

TYPES = ("f64", "f32", "f16", "bf16")


class AdaptiveMaxEven(OuterEngine):
    name = "pool.adaptive_max_even"
    operations = ("adaptive_max_pool_fwd", "adaptive_max_pool_bwd")
    targets = ("cpu", "cuda", "hip")
    notes = frozenset({"runtime_compilation"})

    def refusals(self, problem: Problem) -> list[str]:
        r = Refusals()
        r.require_tensors(((role, t) for role, t in problem.items if role != "index"), TYPES, elements=True)
        sizes = [(a.size, a.count) for a in window_axes(problem)]
        r.require(all(m and n % m == 0 for n, m in sizes), "sizes of x that those of y divide", sizes)
        self.require_inner(r, problem)
        return r

    def inner(self, problem: Problem) -> Problem:
        op: Any = problem.op
        window = tuple(a.window for a in op.axes(problem.tensors))
        index_type = problem["index"].dtype if "index" in problem.tensors else "none"
        kind = MaxPoolFwd if op.name == "adaptive_max_pool_fwd" else MaxPoolBwd
        return Problem.create(kind(window, index_type=index_type), problem.tensors, problem.target)

    def own_workspace(self, problem: Problem) -> int:
        return 0

    def unfit(self, problem: Problem) -> frozenset[str]:
        return frozenset({"reference", "nondeterministic"})

    def cost(self, problem: Problem, config: Config) -> float:
        return self.inner_cost(problem, config)

    def build(self, problem: Problem, config: Config) -> Run:
        return self.build_inner(problem, config)

    def source(self) -> bytes:
        inner = (e for name in ("max_pool_fwd", "max_pool_bwd") for e in registry.for_operation(name))
        return super().source() + b"".join(dict.fromkeys(e.source() for e in inner))
