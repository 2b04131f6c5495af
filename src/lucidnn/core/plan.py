"""The choice: which engine solves a problem, why that one, and the plan that launches it.

`choose` goes this way, first answer wins: (1) the engine the caller named, or its refusals as an error; (2) the user's
tuned row; (3) the row shipped for this device; (4) by policy: the cost model, a timing now, or an error. Plans are
remembered by the faces under a flat key of what the call looks like (`remember`), so that a hot call builds no Problem.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from . import registry
from .descriptor import DTYPES, TensorDescriptor
from .engine import Config, Engine
from .errors import EngineFailure, InvalidArgument, NotSupported
from .problem import Problem
from .settings import Settings, current, log, using
from .store import Row

MEMO_LIMIT = 8192  # plans kept under one memo
_plans: dict[tuple[Problem, Settings], Plan] = {}
_warned: set[str] = set()
_observers: list[list[Plan]] = []


class Candidate(NamedTuple):
    """What one engine says of a problem: its refusals, or a configuration and what it takes."""

    engine: Engine
    refusals: tuple[str, ...] = ()
    config: Config = MappingProxyType({})
    workspace_size: int = 0
    cost: float = float("inf")


class Choice(NamedTuple):
    """A candidate and the reason why it was taken."""

    candidate: Candidate
    reason: str


class Explanation(NamedTuple):
    """Every engine's answer to a problem, and the choice (or why there is none)."""

    problem: Problem
    candidates: tuple[Candidate, ...]
    choice: Choice | None
    failure: str = ""


class Plan:
    """An engine built for a problem. Call it on the inputs, or `execute` it on buffers of your own.

    >>> import torch
    >>> plan = select(Problem.parse("pointwise_fwd x=f32[4] act=relu"))
    >>> plan(torch.tensor([-1.0, 2.0, -3.0, 4.0]))
    tensor([0., 2., 0., 4.])
    """

    def __init__(self, problem: Problem, choice: Choice):
        import torch

        from .. import memory

        c = choice.candidate
        self.problem, self.engine, self.config, self.reason = problem, c.engine, c.config, choice.reason
        self.workspace_size, self.cost = c.workspace_size, c.cost
        outputs = [problem[role] for role in problem.outputs]
        self._outputs = [(t.shape, t.strides, getattr(torch, DTYPES[t.dtype][0])) for t in outputs]
        self._single, self._idle = len(outputs) == 1, all(t.numel == 0 for t in outputs)
        self._memory, self._quick = memory, None if problem.target.is_gpu else memory.quick_cpu
        try:
            self._run = self.engine.build(problem, self.config)
        except (NotSupported, InvalidArgument):
            raise
        except Exception as error:
            said = f"{self.engine.name} accepted {problem} and failed to build: {type(error).__name__}: {error}"
            raise EngineFailure(said) from error

    def __repr__(self) -> str:
        return f"<Plan {self.engine.name} for {self.problem}: {self.reason}>"

    def __call__(self, *inputs: Any) -> Any:
        """Run on inputs that look as the problem says (not checked): gives the output, or a tuple of several."""
        if self._quick and self._single:
            outputs = [self._quick(*self._outputs[0])]
        else:
            outputs = self._memory.empties(self._outputs, inputs[0].device)
        if _observers or self._idle or self.workspace_size:
            self.launch((*inputs, *outputs))
        else:
            self._run((*inputs, *outputs), None)
        return outputs[0] if self._single else tuple(outputs)

    def launch(self, tensors: tuple[Any, ...], device: Any = None, workspace: Any = None) -> None:
        """Run on inputs and outputs in the order of ``problem.inputs + problem.outputs`` (not checked)."""
        for seen in _observers:
            seen.append(self)
        if self._idle:
            return
        if workspace is None and self.workspace_size:
            self._memory.lend(self.workspace_size, device or tensors[0].device, self._run, tensors)
        else:
            self._run(tensors, workspace)

    def execute(self, pack: Mapping[str, Any], workspace: Any = None) -> None:
        """Run on a tensor for every role, outputs included; `InvalidArgument` names what does not fit the problem."""
        tensors = tuple(pack.get(role) for role in self.problem.tensors)
        device = getattr(tensors[0], "device", None)
        for (role, expected), tensor in zip(self.problem.items, tensors, strict=True):
            if tensor is None:
                raise InvalidArgument(role, "nothing", str(expected))
            found = TensorDescriptor.of(tensor)
            same = dataclasses.replace(found, alignment=expected.alignment) == expected
            if not same or found.alignment < expected.alignment:
                raise InvalidArgument(role, found, str(expected))
            if tensor.device != device:
                raise InvalidArgument(role, f"a tensor on {tensor.device}", f"{device}, as the others")
        if workspace is not None and workspace.nbytes < self.workspace_size:
            raise InvalidArgument("workspace", f"{workspace.nbytes} bytes", f"{self.workspace_size} bytes")
        self.launch(tensors, device, workspace if workspace is None else workspace.view(self._memory.BYTES))


@contextlib.contextmanager
def observe() -> Iterator[list[Plan]]:
    """Collect every plan launched inside the block, by any thread (a backward pass runs on others), in order."""
    seen: list[Plan] = []
    _observers.append(seen)
    try:
        yield seen
    finally:
        _observers[:] = [other for other in _observers if other is not seen]


def offers(problem: Problem, engine: Engine, settings: Settings) -> list[Candidate]:
    """What an engine has for a problem: a candidate for every configuration, cheapest first, or one that refuses."""
    with using(settings):  # an engine that has others inside it chooses by them, too
        unwanted = {*settings.exclude_notes, *["nondeterministic"] * settings.deterministic} & engine.notes
        refusals: list[str] = []
        if problem.target.kind not in engine.targets:
            refusals = [f"needs a target of kind {' or '.join(engine.targets)}, found {problem.target}"]
        elif not settings.allows(engine.name):
            refusals = ["disabled by the setting disable_engines"]
        elif unwanted:
            refusals = [f"has the excluded note {', '.join(sorted(unwanted))}"]
        if refusals := refusals or engine.reasons(problem):
            return [Candidate(engine, tuple(refusals))]
        sized = [(config, engine.workspace_size(problem, config)) for config in engine.configs(problem)]
        limit = settings.workspace_limit
        fitting = [(c, size) for c, size in sized if limit is None or size <= limit]
        if not fitting:
            least = min(size for _, size in sized)
            return [Candidate(engine, (f"needs a workspace of {least} bytes, found a limit of {limit}",))]
        found = [Candidate(engine, (), config, size, engine.cost(problem, config)) for config, size in fitting]
        return sorted(found, key=lambda c: c.cost)


def candidates(problem: Problem, settings: Settings | None = None) -> list[Candidate]:
    """Every engine of the operation: those that accept, cheapest first but a reference last, then those that refuse."""
    found = [offers(problem, e, settings or current())[0] for e in registry.for_operation(problem.op.name)]
    return sorted(found, key=lambda c: (bool(c.refusals), "reference" in c.engine.notes, c.cost))


def choose(problem: Problem, settings: Settings | None = None, device: Any = None) -> Choice:
    """The engine and configuration for a problem, and why, in the order above; `NotSupported` where there is none."""
    settings = settings or current()
    named = registry.get(settings.engine) if settings.engine else None
    if named and problem.op.name in named.operations:  # other operations are chosen for freely
        best = offers(problem, named, settings)[0]
        if best.refusals:
            near = importlib.import_module("lucidnn.nearest").hint(problem, named)  # by name: it stands above
            raise NotSupported(f"engine {named.name} does not take {problem}{near}", {named.name: best.refusals})
        return Choice(best, "named by the caller")
    choice, accepting = _weigh(problem, settings, device)
    if not choice and settings.policy == "error":
        here = _tuning().environment(problem, device)
        raise NotSupported(f"policy 'error' and no tuned row for {problem} on {here}; time it with policy 'find'")
    if len(accepting) > 1 and settings.policy == "find" and _tuning().can_time(problem, settings):
        find(problem, settings, device)
        choice, accepting = _weigh(problem, settings, device)
    one = f"cheapest of {len(accepting)} by estimate ({accepting[0].cost:.2e} s)" if len(accepting) > 1 else ""
    return choice or Choice(accepting[0], one or "the only engine that takes it")


def _weigh(problem: Problem, settings: Settings, device: Any) -> tuple[Choice | None, list[Candidate]]:
    """The fastest that was timed; or else who accepts and has not been seen to fail, an error where that is nobody."""
    choice, failed = _tuning().consult(problem, settings, device)
    if choice:
        return choice, []
    everyone = candidates(problem, settings)
    reasons = failed | {c.engine.name: c.refusals for c in everyone if c.refusals}
    accepting = [c for c in everyone if c.engine.name not in reasons]
    slow = accepting and "reference" in accepting[0].engine.notes and any(problem[y].numel for y in problem.outputs)
    if not accepting or (settings.no_fallback and slow):
        raise NotSupported(f"no engine takes {problem}", reasons)
    return None, accepting


def explain(problem: Problem, settings: Settings | None = None, device: Any = None) -> Explanation:
    """What `select` would do and why, without building anything."""
    everyone = tuple(candidates(problem, settings))
    try:
        return Explanation(problem, everyone, choose(problem, settings, device))
    except NotSupported as error:
        return Explanation(problem, everyone, None, str(error))


def find(problem: Problem, settings: Settings | None = None, device: Any = None) -> list[Row]:
    """Time the best candidates now and keep the rows, fastest first, failures last: `lucidnn.tuning` says how."""
    with registry.lock:
        return _tuning().search(problem, settings or current(), device)


def select(problem: Problem, settings: Settings | None = None, device: Any = None) -> Plan:
    """Choose and build, or give the plan built before under the same settings."""
    key = (problem, settings or current())
    if plan := _plans.get(key):
        return plan
    with registry.lock:
        if key not in _plans:
            plan = Plan(problem, choose(*key, device))
            log.info("%s -> %s (%s)", problem, plan.engine.name, plan.reason)
            last_resort = "reference" in plan.engine.notes and plan.reason != "named by the caller" and not plan._idle
            if last_resort and problem.text not in _warned:
                _warned.add(problem.text)
                log.warning("%s is slow and was the last resort for %s", plan.engine.name, problem)
            remember(_plans, key, plan)
        return _plans[key]


def remember(memo: dict, key: Any, plan: Any) -> None:
    """Keep a plan under a key; a memo that has grown past its limit starts anew (shapes that never repeat)."""
    if len(memo) >= MEMO_LIMIT:
        memo.clear()
    memo[key] = plan


def forget() -> None:
    """Drop all that is remembered here and of timings that could not be stored (tuned rows changed, say)."""
    with registry.lock:
        _plans.clear()
        _tuning().forget()


def _tuning() -> Any:
    # By name, because it stands above core: it times engines and holds them to the reference.
    return importlib.import_module("lucidnn.tuning")
