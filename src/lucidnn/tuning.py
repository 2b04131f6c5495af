"""Measured choices: the timings that hold on this machine, and the search that makes them.

A row of `lucidnn.core.store` is known here by the problem's tuning key, by the environment (device, processors,
versions) and by the hash of its engine's file. `search` times the candidates that look best by estimate, those that
agree with the reference, against one another, and keeps a row for each, failures included. This stands above the
machine because it needs `lucidnn.testing`; `lucidnn.core.plan` finds it by name.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import platform
from pathlib import Path
from typing import Any

from . import backends, testing
from .core import registry, timing
from .core.engine import Engine
from .core.plan import Choice, Plan, offers, remember
from .core.problem import Problem
from .core.settings import Settings
from .core.store import Row, Store
from .core.target import cpuinfo

FIND_FINALISTS = 3  # of those that were timed once, timed again, against one another
_session: dict[tuple[str, str], list[Row]] = {}  # rows of this process, for when the store cannot be written


def consult(
    problem: Problem, settings: Settings, device: Any = None
) -> tuple[Choice | None, dict[str, tuple[str, ...]]]:
    """The fastest timing that is still on offer, the user's first; or else engines seen to fail, and how."""
    rows = _known(problem, settings, device)
    for origin, row in rows:
        for c in offers(problem, registry.get(row.engine), settings) if row.status == "ok" else ():
            if not c.refusals and dict(c.config) == row.config:
                return Choice(c, f"fastest of the {origin} timings ({row.seconds or 0:.2e} s)"), {}
    passed = {row.engine for _, row in rows if row.status == "ok"}
    failed = {row.engine: row for _, row in rows if row.engine not in passed}
    return None, {name: (f"was {row.status} when it was timed: {row.reason}",) for name, row in failed.items()}


def _known(problem: Problem, settings: Settings, device: Any) -> list[tuple[str, Row]]:
    """Rows of a problem that hold here, with their origin: the user's first, then those shipped, each fastest first."""
    here, key = environment(problem, device), problem.tuning_key
    rows = [("user's", row) for row in _store(settings.directory()).rows(key, here) + _session.get((key, here), [])]
    shipped = _shipped(device_name(problem.target.kind, device))
    rows += [("shipped", row) for row in shipped if row.problem == key]
    engines = registry.engines()
    return [(o, r) for o, r in rows if r.engine in engines and r.source == source_hash(engines[r.engine])]


def can_time(problem: Problem, settings: Settings) -> bool:
    """Whether a search may run now: not where results must repeat, nor while launches are captured into a graph."""
    import torch

    capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    return not (settings.deterministic or problem.is_empty or capturing)


def search(problem: Problem, settings: Settings, device: Any = None) -> list[Row]:
    """Time the best candidates now; gives and keeps their rows, fastest first, failures last."""
    import torch

    device = torch.device(device or ("cpu" if problem.target.kind == "cpu" else "cuda"))
    engines = [e for e in registry.for_operation(problem.op.name) if "reference" not in e.notes]
    found = [c for engine in engines for c in offers(problem, engine, settings) if not c.refusals]
    found = sorted(found, key=lambda c: c.cost)[: backends.limit() or None]
    count = timing.rotation(int(problem.bytes), device, most=16)
    sets = [testing.buffers(problem, device, seed) for seed in range(count)]
    expected = testing.reference(problem, sets[0], device)
    calls: dict[int, timing.Call] = {}
    times: dict[int, timing.Timing] = {}
    outcome: dict[int, tuple[str, str]] = dict.fromkeys(range(len(found)), ("ok", ""))
    for i, candidate in enumerate(found):
        try:
            plan = Plan(problem, Choice(candidate, "to be timed"))
            calls[i] = lambda s, plan=plan: plan.launch(tuple(sets[s].values()), device)
            if fault := _fault(problem, calls[i], sets[0], expected):
                outcome[i] = ("wrong", fault)
            else:
                times |= timing.measure({i: calls[i]}, device, sets=count, rounds=3, most_seconds=0.3)
        except Exception as error:  # any failure of an engine is a row, not the end of the search
            outcome[i] = ("failed", f"{type(error).__name__}: {error}")
    finalists = sorted(times, key=lambda i: times[i].median)[:FIND_FINALISTS]
    again = {i: calls[i] for i in finalists}
    times |= timing.measure(again, device, sets=count, rounds=7, most_seconds=1.0)
    key, here, rows = problem.tuning_key, environment(problem, device), []
    for i, c in enumerate(found):
        seconds = times[i].median if i in times else None
        source = source_hash(c.engine)
        rows.append(Row(key, here, c.engine.name, source, dict(c.config), seconds, c.workspace_size, *outcome[i]))
    rows.sort(key=lambda row: (row.seconds is None, row.seconds or 0.0))
    if not _store(settings.directory()).put(rows):
        remember(_session, (key, here), rows)
    return rows


def forget() -> None:
    """Drop the rows that last for this process only."""
    _session.clear()


def environment(problem: Problem, device: Any = None) -> str:
    """What a timing depends on beside problem and engine: device name, processors, versions."""
    return f"{device_name(problem.target.kind, device)}; {problem.target}; {_versions()}"


@functools.cache
def source_hash(engine: Engine) -> str:
    """Short hash of the engine's own file."""
    return hashlib.sha256(engine.source()).hexdigest()[:12]


@functools.cache
def device_name(kind: str, device: Any = None) -> str:
    """Name of the device as its driver or the operating system gives it."""
    if kind == "cpu":
        return cpuinfo("model name") or platform.processor() or platform.machine()
    import torch

    return torch.cuda.get_device_name(device) if torch.cuda.is_available() else "no GPU"


def _fault(problem: Problem, call: timing.Call, tensors: dict[str, Any], expected: dict[str, Any]) -> str:
    """Run once on poisoned outputs; a sentence on how they differ from the reference, or ''."""
    for role in problem.outputs:
        tensors[role].fill_(float("nan") if tensors[role].is_floating_point() else 1)
    call(0)
    return testing.disagreement(problem, tensors, expected)[1]


@functools.cache
def _store(directory: Path) -> Store:
    return Store(directory)


@functools.cache
def _shipped(device: str) -> list[Row]:
    """Rows that came with the package for the device of this name, fastest first."""
    path = Path(__file__).parent / "tuned" / f"{device.replace(' ', '_')}.json"
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else []
    return sorted((Row(**row) for row in rows), key=lambda row: (row.seconds is None, row.seconds or 0.0))


@functools.cache
def _versions() -> str:
    found = []
    for name in ("lucidnn", "torch", "triton", "numba"):
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"{name} none")
    return ", ".join(found)
