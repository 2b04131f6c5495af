"""The choice: which engine solves a problem, why that one, and the plan that launches it.

`select` goes this way, first answer wins: (1) the engine the caller named, or its refusals as an error; (2) the user's
tuned row; (3) the row shipped for this device; (4) by policy: the cost model, a timing now, or an error. Plans are
remembered by the faces under a flat key of what the call looks like (`memo`), so that a hot call builds no Problem.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib
import importlib.metadata
import json
import os
import platform
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from . import registry, timing
from . import settings as settings_module
from .descriptor import DTYPES, TensorDescriptor
from .engine import Config, Engine
from .errors import EngineFailure, InvalidArgument, NotSupported
from .problem import Problem
from .settings import Settings, log
from .store import Row, Store

FIND_CANDIDATES = 8  # timed once each
FIND_FINALISTS = 3  # timed again, against one another


@dataclasses.dataclass(frozen=True)
class Candidate:
    """What one engine says of a problem: refusals, or its cheapest acceptable configuration."""

    engine: Engine
    refusals: tuple[str, ...] = ()
    config: Config = dataclasses.field(default_factory=dict)
    workspace_size: int = 0
    cost: float = float("inf")


@dataclasses.dataclass(frozen=True)
class Choice:
    """A candidate and the reason why it was taken."""

    candidate: Candidate
    reason: str


class Plan:
    """An engine built for a problem. Call it on the inputs, or `execute` it on buffers of your own.

    Attributes
    ----------
    problem : Problem
    engine : Engine
    config : mapping
    workspace_size : int
        Bytes of scratch memory one call takes.
    reason : str
        Why this engine was chosen.

    Examples
    --------
    >>> import torch
    >>> plan = select(Problem.parse("pointwise_fwd x=f32[4] act=relu"))
    >>> plan(torch.tensor([-1.0, 2.0, -3.0, 4.0]))
    tensor([0., 2., 0., 4.])
    """

    def __init__(self, problem: Problem, choice: Choice):
        import torch

        self.problem, self.engine, self.config = problem, choice.candidate.engine, choice.candidate.config
        self.workspace_size, self.cost, self.reason = (
            choice.candidate.workspace_size,
            choice.candidate.cost,
            choice.reason,
        )
        outputs = [problem[role] for role in problem.outputs]
        self._outputs = [(t.shape, t.strides, getattr(torch, DTYPES[t.dtype][0])) for t in outputs]
        self._idle = all(t.numel == 0 for t in outputs)
        self._empty, self._allocate, self._uint8 = torch.empty, torch.empty_strided, torch.uint8
        try:
            self._run = self.engine.build(problem, self.config)
        except (NotSupported, InvalidArgument):
            raise
        except Exception as error:
            raise EngineFailure(
                f"{self.engine.name} accepted {problem} and failed to build: {type(error).__name__}: {error}"
            ) from error

    def __repr__(self) -> str:
        return f"<Plan {self.engine.name} for {self.problem}: {self.reason}>"

    def outputs(self, device: Any) -> list[Any]:
        """Fresh output tensors."""
        return [self._allocate(shape, strides, dtype=dtype, device=device) for shape, strides, dtype in self._outputs]

    def __call__(self, *inputs: Any) -> Any:
        """Run on inputs that look as the problem says (not checked): gives the output, or a tuple of several."""
        device = inputs[0].device
        outputs = [
            self._allocate(shape, strides, dtype=dtype, device=device) for shape, strides, dtype in self._outputs
        ]
        self.launch((*inputs, *outputs), device)
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def launch(self, tensors: tuple[Any, ...], device: Any, workspace: Any = None) -> None:
        """Run on inputs and outputs in the order of ``problem.inputs + problem.outputs`` (not checked)."""
        if _observers:
            for seen in _observers:
                seen.append(self)
        if self._idle:
            return
        if workspace is None and self.workspace_size:
            # From the framework's caching allocator: ordered by stream, and safe under graph capture.
            workspace = self._empty(self.workspace_size, dtype=self._uint8, device=device)
        self._run(tensors, workspace)

    def execute(self, pack: Mapping[str, Any], workspace: Any = None) -> None:
        """Run on a tensor for every role, outputs included, checked against the problem.

        Raises
        ------
        InvalidArgument
            A role is missing or a tensor does not look as the plan's problem says, or the workspace is too small.
        """
        tensors = tuple(pack.get(role) for role in self.problem.tensors)
        device = getattr(tensors[0], "device", None)
        for (role, expected), tensor in zip(self.problem.items, tensors, strict=True):
            found = None if tensor is None else TensorDescriptor.of(tensor)
            aligned = found and found.alignment >= expected.alignment
            if not aligned or dataclasses.replace(found, alignment=expected.alignment) != expected:
                raise InvalidArgument(role, found or "nothing", str(expected))
            if tensor.device != device:
                raise InvalidArgument(role, f"a tensor on {tensor.device}", f"{device}, as the others")
        if workspace is not None:
            workspace = workspace.view(self._uint8)
            if workspace.numel() < self.workspace_size:
                raise InvalidArgument("workspace", f"{workspace.numel()} bytes", f"{self.workspace_size} bytes")
        self.launch(tensors, device, workspace)


_observers: list[list[Plan]] = []


@contextlib.contextmanager
def observe() -> Iterator[list[Plan]]:
    """Collect every plan launched inside the block, by any thread (a backward pass runs on others), in order."""
    seen: list[Plan] = []
    _observers.append(seen)
    try:
        yield seen
    finally:
        _observers[:] = [other for other in _observers if other is not seen]


def _consider(problem: Problem, engine: Engine, settings: Settings) -> Candidate:
    if problem.target.kind not in engine.targets:
        return Candidate(engine, (f"needs a target of kind {' or '.join(engine.targets)}, found {problem.target}",))
    if not settings.allows(engine.name):
        return Candidate(engine, ("disabled by the setting disable_engines",))
    unwanted = engine.notes & {*settings.exclude_notes, *(("nondeterministic",) if settings.deterministic else ())}
    if unwanted:
        return Candidate(engine, (f"has the excluded note {', '.join(sorted(unwanted))}",))
    if refusals := tuple(engine.refusals(problem)):
        return Candidate(engine, refusals)
    limit = settings.workspace_limit
    costed = [
        (engine.cost(problem, c), i, c, engine.workspace_size(problem, c))
        for i, c in enumerate(engine.configs(problem))
    ]
    fitting = [entry for entry in costed if limit is None or entry[3] <= limit]
    if not fitting:
        return Candidate(engine, (f"needs a workspace of {min(e[3] for e in costed)} bytes, found a limit of {limit}",))
    cost, _, config, size = min(fitting)
    return Candidate(engine, (), config, size, cost)


def candidates(problem: Problem, settings: Settings | None = None) -> list[Candidate]:
    """Every engine of the operation: those that accept, cheapest first, then those that refuse."""
    settings = settings or settings_module.current()
    found = [_consider(problem, engine, settings) for engine in registry.for_operation(problem.op.name)]
    # A reference engine is the last resort whatever its estimate.
    return sorted(found, key=lambda c: (bool(c.refusals), "reference" in c.engine.notes, c.cost))


def _named(problem: Problem, settings: Settings) -> Choice | None:
    """The engine the caller named; operations it takes no part in are chosen freely."""
    engine = registry.get(settings.engine or "")
    if problem.op.name not in engine.operations:
        return None
    candidate = _consider(problem, engine, settings)
    if candidate.refusals:
        raise NotSupported(f"engine {engine.name} does not take {problem}", {engine.name: candidate.refusals})
    return Choice(candidate, "named by the caller")


def _tuned(problem: Problem, settings: Settings, rows: list[Row], origin: str) -> Choice | None:
    for row in rows:
        engine = registry.engines().get(row.engine)
        if row.status != "ok" or engine is None or row.source != source_hash(engine):
            continue
        candidate = _consider(problem, engine, settings)
        if candidate.refusals or row.config not in [dict(c) for c in engine.configs(problem)]:
            continue
        size = engine.workspace_size(problem, row.config)
        if settings.workspace_limit is None or size <= settings.workspace_limit:
            chosen = Candidate(engine, (), row.config, size, engine.cost(problem, row.config))
            return Choice(chosen, f"fastest of the {origin} timings ({row.seconds or 0:.2e} s)")
    return None


def choose(problem: Problem, settings: Settings | None = None, device: Any = None) -> Choice:
    """The engine and configuration for a problem, and why; see the module's text for the order.

    Raises
    ------
    NotSupported
        The named engine refuses, no engine accepts, or policy ``error`` finds no tuned row. Lists all refusals.
    """
    settings = settings or settings_module.current()
    if settings.engine and (choice := _named(problem, settings)):
        return choice
    here = environment(problem, device)
    mine = _store(settings.directory()).rows(problem.tuning_key, here)
    mine += _session.get((problem.tuning_key, here), [])
    for rows, origin in ((mine, "user's"), (_shipped(problem, here), "shipped")):
        if choice := _tuned(problem, settings, rows, origin):
            return choice
    everyone = candidates(problem, settings)
    accepting = _remaining(problem, settings, everyone, mine)
    if settings.policy == "error":
        raise NotSupported(f"policy 'error' and no tuned row for {problem} on {here}; time it with policy 'find'")
    timeable = not settings.deterministic and not problem.is_empty and not _capturing()
    if settings.policy == "find" and timeable and len(accepting) > 1:
        rows = find(problem, settings, device)
        if choice := _tuned(problem, settings, rows, "user's"):
            return choice
        accepting = _remaining(problem, settings, everyone, rows)
    if len(accepting) == 1:
        return Choice(accepting[0], "the only engine that takes it")
    return Choice(accepting[0], f"cheapest of {len(accepting)} by estimate ({accepting[0].cost:.2e} s)")


def _remaining(problem: Problem, settings: Settings, everyone: list[Candidate], rows: list[Row]) -> list[Candidate]:
    """Who accepts and has not been seen to fail at this problem; an error where that is nobody."""
    seen = {row.engine: row for row in sorted(rows, key=lambda row: row.status == "ok")}
    reasons = {c.engine.name: c.refusals for c in everyone if c.refusals}
    accepting = []
    for c in everyone:
        row = seen.get(c.engine.name)
        if row and row.status != "ok" and row.source == source_hash(c.engine):
            reasons[c.engine.name] = (*c.refusals, f"was {row.status} when it was timed: {row.reason}")
        elif not c.refusals:
            accepting.append(c)
    if not accepting or (settings.no_fallback and "reference" in accepting[0].engine.notes):
        raise NotSupported(f"no engine takes {problem}", reasons)
    return accepting


_lock = threading.RLock()  # one build and one timing at a time: compilers and devices are shared
_plans: dict[tuple[Problem, Settings], Plan] = {}
_warned: set[str] = set()


def _renew_locks() -> None:
    """A forked child has none of the threads that may hold a lock."""
    global _lock
    _lock = registry._lock = threading.RLock()
    _store.cache_clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_locks)
MEMO_LIMIT = 8192


def select(problem: Problem, settings: Settings | None = None, device: Any = None) -> Plan:
    """Choose and build, or give the plan built before under the same settings."""
    settings = settings or settings_module.current()
    plan = _plans.get((problem, settings))
    if plan is None:
        with _lock:
            if (plan := _plans.get((problem, settings))) is None:
                plan = Plan(problem, choose(problem, settings, device))
                log.info("%s -> %s (%s)", problem, plan.engine.name, plan.reason)
                if (
                    "reference" in plan.engine.notes
                    and plan.reason != "named by the caller"
                    and problem.text not in _warned
                ):
                    _warned.add(problem.text)
                    log.warning("%s is slow and was the last resort for %s", plan.engine.name, problem)
                remember(_plans, (problem, settings), plan)
    return plan


def remember(memo: dict, key: Any, plan: Any) -> None:
    """Keep a plan under a key; a memo that has grown past its limit starts anew (shapes that never repeat)."""
    if len(memo) >= MEMO_LIMIT:
        memo.clear()
    memo[key] = plan


def forget() -> None:
    """Drop all that this module remembers (tuned rows changed, say)."""
    with _lock:
        _plans.clear()
        _session.clear()


@dataclasses.dataclass(frozen=True)
class Explanation:
    """Every engine's answer to a problem, and the choice (or why there is none)."""

    problem: Problem
    candidates: tuple[Candidate, ...]
    choice: Choice | None
    failure: str = ""


def explain(problem: Problem, settings: Settings | None = None, device: Any = None) -> Explanation:
    """What `select` would do and why, without building anything."""
    everyone = tuple(candidates(problem, settings))
    try:
        return Explanation(problem, everyone, choose(problem, settings, device))
    except NotSupported as error:
        return Explanation(problem, everyone, None, str(error))


def find(problem: Problem, settings: Settings | None = None, device: Any = None) -> list[Row]:
    """Time the best candidates now, check the winner against the reference, and keep the rows.

    Returns
    -------
    list of Row
        Fastest first; engines that failed or were wrong last, with the reason.
    """
    import torch

    settings = settings or settings_module.current()
    device = torch.device(device or ("cpu" if problem.target.kind == "cpu" else "cuda"))
    entries: list[tuple[Engine, Config]] = []
    for c in candidates(problem, settings):
        if not c.refusals and "reference" not in c.engine.notes:
            entries += [(c.engine, config) for config in c.engine.configs(problem)]
    limit = settings.workspace_limit
    entries = [e for e in entries if limit is None or e[0].workspace_size(problem, e[1]) <= limit]
    entries = sorted(entries, key=lambda e: e[0].cost(problem, e[1]))[:FIND_CANDIDATES]
    with _lock:
        sets = [_buffers(problem, device, seed) for seed in range(timing.rotation(int(problem.bytes), device, most=16))]
        rows, calls = [], {}

        def row(i: int, seconds: float | None, status: str = "ok", reason: str = "") -> Row:
            engine, config = entries[i]
            size = engine.workspace_size(problem, config)
            key = (problem.tuning_key, environment(problem, device), engine.name, source_hash(engine))
            return Row(*key, dict(config), seconds, size, status, reason)

        times: dict[str, timing.Timing] = {}
        for i, (engine, config) in enumerate(entries):
            try:
                plan = Plan(
                    problem,
                    Choice(Candidate(engine, (), config, engine.workspace_size(problem, config)), "to be timed"),
                )
                calls[str(i)] = lambda s, plan=plan: plan.launch(sets[s], device)
                times |= timing.measure({str(i): calls[str(i)]}, device, sets=len(sets), rounds=3, most_seconds=0.3)
            except Exception as error:  # any failure of an engine is a row, not the end of the search
                calls.pop(str(i), None)
                rows.append(row(i, None, "failed", f"{type(error).__name__}: {error}"))
        best = sorted(times, key=lambda name: times[name].median)[:FIND_FINALISTS]
        times |= timing.measure(
            {name: calls[name] for name in best}, device, sets=len(sets), rounds=7, most_seconds=1.0
        )
        trusted = False
        for name in sorted(times, key=lambda name: times[name].median):
            fault = "" if trusted else _fault(problem, calls[name], sets[0], device)
            trusted = trusted or not fault
            rows.append(row(int(name), None if fault else times[name].median, "wrong" if fault else "ok", fault))
        rows.sort(key=lambda r: r.seconds if r.seconds is not None else float("inf"))
        if not _store(settings.directory()).put(rows):
            remember(_session, (problem.tuning_key, environment(problem, device)), rows)
    return rows


def _testing() -> Any:
    """By name, because it stands above core: what "agrees with the reference" means is defined there."""
    return importlib.import_module("lucidnn.testing")


def _buffers(problem: Problem, device: Any, seed: int) -> tuple[Any, ...]:
    return tuple(_testing().buffers(problem, device, seed).values())


def _fault(problem: Problem, call: Any, tensors: tuple[Any, ...], device: Any) -> str:
    named = dict(zip(problem.tensors, tensors, strict=True))
    for role in problem.outputs:
        named[role].fill_(float("nan") if named[role].dtype.is_floating_point else 1)
    call(0)
    inputs = {role: named[role] for role in problem.inputs}
    return _testing().disagreement(problem, named, _testing().reference(problem, inputs, device))[1]


_session: dict[tuple[str, str], list[Row]] = {}  # rows of this process, for when the store cannot be written


def _capturing() -> bool:
    import torch

    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


@functools.cache
def _store(directory: Path) -> Store:
    return Store(directory)


@functools.cache
def source_hash(engine: Engine) -> str:
    """Short hash of the engine's own file."""
    return hashlib.sha256(engine.source()).hexdigest()[:12]


@functools.cache
def _versions() -> str:
    found = []
    for name in ("lucidnn", "torch", "triton", "numba"):
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"{name} none")
    return ", ".join(found)


def environment(problem: Problem, device: Any = None) -> str:
    """What a timing depends on beside problem and engine: device name, processors, versions."""
    return f"{device_name(problem.target.kind, device)}; {problem.target}; {_versions()}"


@functools.cache
def device_name(kind: str, device: Any = None) -> str:
    """Name of the device as its driver gives it."""
    import torch

    if kind != "cpu":
        return torch.cuda.get_device_name(device) if torch.cuda.is_available() else "no GPU"
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as file:
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


@functools.cache
def _shipped_rows(name: str) -> tuple[Row, ...]:
    path = Path(__file__).parent.parent / "tuned" / f"{name.replace(' ', '_')}.json"
    if not path.exists():
        return ()
    return tuple(Row(**row) for row in json.loads(path.read_text(encoding="utf-8"))["rows"])


def _shipped(problem: Problem, here: str) -> list[Row]:
    rows = _shipped_rows(here.partition(";")[0])
    return sorted((r for r in rows if r.problem == problem.tuning_key), key=lambda r: r.seconds or float("inf"))
