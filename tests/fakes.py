"""Engines made up for tests of the choice: they multiply by two (`LINE`) in whatever way a test needs."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from lucidnn.core.engine import Config, Engine, Run
from lucidnn.core.problem import Problem

LINE = "pointwise_fwd x=f32[4,3] alpha=2.0"


class Fake(Engine):
    """One engine of a made-up registry; everything it says can be set."""

    name = ""
    operations = ("pointwise_fwd",)
    targets = ("cpu",)

    def __init__(
        self,
        name: str,
        cost: float = 1.0,
        *,
        refuses: tuple[str, ...] = (),
        notes: tuple[str, ...] = (),
        configs: list[Config] | None = None,
        workspace: int | Callable[[Config], int] = 0,
        factor: float = 2.0,
        seconds: float = 0.0,
        build_error: Exception | None = None,
        run_error: Exception | None = None,
        source: bytes = b"1",
    ):
        self.name = name
        self.notes = frozenset(notes)
        self._cost, self._refuses, self._configs = cost, list(refuses), configs or [{}]
        self._workspace, self._factor, self._seconds = workspace, factor, seconds
        self._build_error, self._run_error, self._source = build_error, run_error, source
        self.built: list[Config] = []
        self.runs = 0

    def refusals(self, problem: Problem) -> list[str]:
        return self._refuses

    def configs(self, problem: Problem) -> list[Config]:
        return self._configs

    def cost(self, problem: Problem, config: Config) -> float:
        return config.get("cost", self._cost)

    def workspace_size(self, problem: Problem, config: Config) -> int:
        return self._workspace(config) if callable(self._workspace) else self._workspace

    def source(self) -> bytes:
        return self._source

    def build(self, problem: Problem, config: Config) -> Run:
        self.built.append(config)
        if self._build_error:
            raise self._build_error

        def run(tensors: tuple[Any, ...], workspace: Any) -> None:
            self.runs += 1
            if self._run_error:
                raise self._run_error
            needed = self.workspace_size(problem, config)
            assert (workspace is None) == (needed == 0)
            assert workspace is None or workspace.numel() >= needed
            time.sleep(config.get("seconds", self._seconds))
            tensors[1].copy_(tensors[0] * self._factor)

        return run


def reference() -> Fake:
    """Stands for the last resort, and gives `find` its right answers."""
    return Fake("toy.reference", 1e3, notes=("reference",))
