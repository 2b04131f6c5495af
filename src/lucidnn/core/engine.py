"""What an engine is: one way to solve a family of problems. Stateless; it answers five questions about a problem.

To add one, write a file under ``lucidnn/engines/<family>/`` with a subclass of `Engine`; there is no list to edit.
`CONTRIBUTING.md` walks through an example.
"""

from __future__ import annotations

import abc
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from .descriptor import TensorDescriptor
from .problem import Problem

Config = Mapping[str, Any]  # knobs of an engine, as plain values that JSON can hold
# run(tensors, workspace): tensors as problem.inputs + problem.outputs; a flat uint8 tensor, or None for a size of 0
Run = Callable[[tuple[Any, ...], Any], None]

NOTES = {
    "tensor_core": "computes on matrix units",
    "tf32": "may round float32 operands to TF32",
    "fft": "transforms to the frequency domain; error grows with the whole image",
    "winograd": "transforms tiles; larger error for large tiles",
    "spreads": "a NaN or infinity may reach results that do not depend on it",
    "reduced_precision": "accumulates or stores intermediates in less than float32",
    "nondeterministic": "two runs may differ in the last bits",
    "runtime_compilation": "compiles on first use; cached on disk",
    "reference": "written to be read, not to be fast",
}


class Refusals(list[str]):
    """Collects reasons: each states the requirement and what was found.

    >>> r = Refusals()
    >>> r.require(False, "groups = 1", 4)
    >>> r
    ['needs groups = 1, found 4']
    """

    def require(self, fulfilled: bool, requirement: str, found: object) -> None:
        """Add a reason unless the requirement is fulfilled."""
        if not fulfilled:
            self.append(f"needs {requirement}, found {found}")

    def require_tensors(self, items: Iterable[tuple[str, TensorDescriptor]], types: Sequence[str], elements=False):
        """Every tensor, given with its role, is of one of the types and, where that matters, has `elements`."""
        for role, t in items:
            self.require(t.dtype in types, f"{role} of type {', '.join(types)}", t.dtype)
            self.require(t.numel > 0 or not elements, f"elements in {role}", str(t))


class Engine(abc.ABC):
    """One algorithm on one kind of hardware."""

    name: ClassVar[str]  # family.algorithm[_arch], unique
    operations: ClassVar[tuple[str, ...]]  # names of those it takes part in
    targets: ClassVar[tuple[str, ...]]  # kinds of hardware: cpu, cuda, hip
    notes: ClassVar[frozenset[str]] = frozenset()  # facts that a user can filter by, from `NOTES`
    takes: ClassVar[frozenset[str]] = frozenset()  # which of the operation's `rare` attributes and roles

    @abc.abstractmethod
    def refusals(self, problem: Problem) -> list[str]:
        """Every reason why this engine does not take the problem; empty where it does."""

    def reasons(self, problem: Problem) -> list[str]:
        """What callers ask: the rare parts of the problem that the engine knows nothing of, then its refusals."""
        unknown = {name: found for name, found in problem.rare.items() if name not in self.takes}
        return [f"needs no {name}, found {found}" for name, found in unknown.items()] + self.refusals(problem)

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
