"""What an engine is: one way to solve a family of problems. Stateless; it answers five questions about a problem.

To add one, write a file under ``lucidnn/engines/<family>/`` with a subclass of `Engine`; there is no list to edit.
`CONTRIBUTING.md` walks through an example.
"""

from __future__ import annotations

import abc
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from .problem import Problem

Config = Mapping[str, Any]
"""Knobs of an engine, as plain values that can be stored as JSON (``BLOCK_M``, ``num_warps``, ...)."""

Run = Callable[[tuple[Any, ...], Any], None]
"""``run(tensors, workspace)``: tensors in the order of ``problem.inputs + problem.outputs``; workspace is a flat
``uint8`` tensor of at least ``workspace_size`` bytes, or None where that is 0."""

NOTES = {
    "tensor_core": "computes on matrix units",
    "tf32": "may round float32 operands to TF32",
    "fft": "transforms to the frequency domain; error grows with the whole image",
    "winograd": "transforms tiles; larger error for large tiles",
    "reduced_precision": "accumulates or stores intermediates in less than float32",
    "nondeterministic": "two runs may differ in the last bits",
    "runtime_compilation": "compiles on first use; cached on disk",
    "reference": "written to be read, not to be fast",
}


class Refusals(list[str]):
    """Collects reasons: each states the requirement and what was found.

    Examples
    --------
    >>> r = Refusals()
    >>> r.require(False, "groups = 1", 4)
    >>> r
    ['needs groups = 1, found 4']
    """

    def require(self, fulfilled: bool, requirement: str, found: object) -> None:
        if not fulfilled:
            self.append(f"needs {requirement}, found {found}")


class Engine(abc.ABC):
    """One algorithm on one kind of hardware.

    `name` is ``family.algorithm[_arch]`` and unique; `operations` are the names of those it takes part in; `targets`
    the kinds of hardware (``cpu``, ``cuda``, ``hip``); `notes` facts that a user can filter by, from `NOTES`.
    """

    name: ClassVar[str]
    operations: ClassVar[tuple[str, ...]]
    targets: ClassVar[tuple[str, ...]]
    notes: ClassVar[frozenset[str]] = frozenset()

    @abc.abstractmethod
    def refusals(self, problem: Problem) -> list[str]:
        """Every reason why this engine does not take the problem; empty where it does."""

    def configs(self, problem: Problem) -> list[Config]:
        """Knob settings worth trying; the first is the best guess and always valid."""
        return [{}]

    def workspace_size(self, problem: Problem, config: Config) -> int:
        """Bytes of scratch memory."""
        return 0

    @abc.abstractmethod
    def cost(self, problem: Problem, config: Config) -> float:
        """Estimated seconds of one call; see `lucidnn.core.heuristics`."""

    @abc.abstractmethod
    def build(self, problem: Problem, config: Config) -> Run:
        """Everything that can be done once: returns the function that launches.

        It must write every element of every output, stay inside the workspace it asked for, be callable from several
        threads at once and under stream capture, and do as little per call as it can.
        """

    def source(self) -> bytes:
        """This engine's own file: its hash is part of the tuned rows' key, so that an edit makes them stale."""
        return Path(sys.modules[type(self).__module__].__file__ or "").read_bytes()
