"""Engines that solve a problem through another engine on a plainer one: how that one is found, weighed and accounted.

Such an engine copies around the inner problem; its configurations are the other engines' names and configurations, so
that cost model, timing and tuned rows choose among them as they do elsewhere. Settings reach the inside: what they keep
out takes no part there either.
"""

from __future__ import annotations

import abc
import functools
from typing import Any

from ..core import plan, registry
from ..core.engine import Config, Engine, Refusals, Run
from ..core.problem import Problem
from ..core.settings import current

ALIGN = 64  # bytes to which the copies' pieces of the workspace are rounded up
CONFIGS = 3  # of each inner engine


class OuterEngine(Engine):
    """Base of these engines; `inner` and `own_workspace` say what is left to the other one, and what comes before it.

    The inner engine's scratch memory follows the engine's own in the workspace.
    """

    @abc.abstractmethod
    def inner(self, problem: Problem) -> Problem:
        """The plainer problem."""

    @abc.abstractmethod
    def own_workspace(self, problem: Problem) -> int:
        """Bytes of the copies."""

    @abc.abstractmethod
    def unfit(self, problem: Problem) -> frozenset[str]:
        """Notes of engines that may not be inside."""

    def require_inner(self, refusals: Refusals, problem: Problem) -> None:
        """Some engine has to take the inner problem; asked only where there is one."""
        if not refusals:
            found = _offers(self, problem, current())
            refusals.require(bool(found), f"an engine that takes {self.inner(problem)}", "none")

    def configs(self, problem: Problem) -> list[Config]:
        return [{"engine": c.engine.name, "config": dict(c.config)} for c in _offers(self, problem, current())]

    def workspace_size(self, problem: Problem, config: Config) -> int:
        inside = registry.get(config["engine"]).workspace_size(self.inner(problem), config["config"])
        return self.own_workspace(problem) + inside

    def inner_cost(self, problem: Problem, config: Config) -> float:
        """Seconds of the inner engine."""
        return registry.get(config["engine"]).cost(self.inner(problem), config["config"])

    def build_inner(self, problem: Problem, config: Config) -> Run:
        """The inner engine's function; it takes the whole workspace and finds its own part."""
        run = registry.get(config["engine"]).build(self.inner(problem), config["config"])
        start = self.own_workspace(problem)

        def inside(tensors: tuple[Any, ...], workspace: Any) -> None:
            run(tensors, None if workspace is None or workspace.numel() == start else workspace[start:])

        return inside

    def source(self) -> bytes:
        """All engines' files: any of them may be inside."""
        others = [e for name in self.operations for e in registry.for_operation(name) if e is not self]
        sources = (Engine.source(e) if isinstance(e, OuterEngine) else e.source() for e in others)
        return super().source() + b"".join(dict.fromkeys(sources))


@functools.lru_cache(maxsize=512)
def _offers(outer: OuterEngine, problem: Problem, settings: Any) -> tuple[plan.Candidate, ...]:
    """What the other engines have for the inner problem, cheapest first."""
    inner, unfit, found = outer.inner(problem), outer.unfit(problem), []
    for engine in registry.for_operation(inner.op.name):
        if engine is not outer and not unfit & engine.notes:
            found += [c for c in plan.offers(inner, engine, settings)[:CONFIGS] if not c.refusals]
    return tuple(sorted(found, key=lambda c: c.cost))
