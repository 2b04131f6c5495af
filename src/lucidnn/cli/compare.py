"""Plans of a problem timed against one another and against the framework's own kernel, and checked in the same run.

All take part in one `lucidnn.core.timing.measure`: interleaved, rotated past the cache, the median of several samples.
A call is what a user pays for: fresh outputs from the framework's allocator, the kernels, the workspace. Before the
clock runs, every contestant's outputs, lucidnn's filled with NaN beforehand, are compared with the float64 reference;
one that is over its bound is not timed. The peer's own error stands beside, since it is what "right" means to a user
who comes from the framework. On a CPU, memory is `settle`d first.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from .. import testing
from ..core import settings as settings_module
from ..core import timing
from ..core.engine import Config, Engine
from ..core.errors import LucidnnError, NotSupported
from ..core.plan import Candidate, Choice, Plan, candidates
from ..core.problem import Problem
from .peer import Peer, flags, peer

MOST_SETS = 16
KEPT_BYTES = (32 << 20) - (64 << 10)  # just under the largest block that glibc ever keeps, its header included


@dataclasses.dataclass(frozen=True)
class Contestant:
    """An engine with a configuration, to be timed on a problem."""

    engine: Engine
    config: Config
    reason: str = ""


def contestants(problem: Problem, names: Sequence[str] = (), every_config: bool = False) -> list[Contestant]:
    """Engines that take the problem, cheapest by estimate first; with their best configuration, or with all.

    The reference engines, which are slow on purpose, take part where they are named or nothing else accepts.

    Raises
    ------
    NotSupported
        Nothing takes it, with every reason.
    """
    everyone = [c for c in candidates(problem) if not names or c.engine.name in names]
    accepting = [c for c in everyone if not c.refusals]
    if not accepting:
        raise NotSupported(f"no engine takes {problem}", {c.engine.name: c.refusals for c in everyone})
    quick = [c for c in accepting if "reference" not in c.engine.notes]
    chosen = accepting if names else quick or accepting
    if not every_config:
        return [Contestant(c.engine, c.config) for c in chosen]
    limit = settings_module.current().workspace_limit
    return [
        Contestant(c.engine, config)
        for c in chosen
        for config in c.engine.configs(problem)
        if limit is None or c.engine.workspace_size(problem, config) <= limit
    ]


def build(problem: Problem, engine: Engine, config: Config, reason: str = "named by the caller") -> Plan:
    """A plan of this engine and configuration."""
    candidate = Candidate(engine, (), config, engine.workspace_size(problem, config), engine.cost(problem, config))
    return Plan(problem, Choice(candidate, reason))


def buffers(problem: Problem, device: Any, most: int = MOST_SETS) -> list[dict[str, torch.Tensor]]:
    """Sets of random inputs and room for outputs, enough of them to pass the cache."""
    count = timing.rotation(int(problem.bytes), device, most=most)
    return [testing.buffers(problem, device, seed) for seed in range(count)]


def settle(device: Any) -> None:
    """Bring a CPU's memory into the state of a program that has run for a while.

    glibc takes blocks over a threshold from the system at every call and gives them back, and the system clears each
    page at its first touch: as long as moving it. The threshold starts at 128 KB and rises to the size of any such
    block up to 32 MB that is freed. Until then a call's time depends on which calls came before it, not the least on
    the other contestants'; one block allocated and freed settles it for all of them. Larger blocks come anew always.
    """
    if device.type == "cpu":
        torch.empty(KEPT_BYTES, dtype=torch.uint8)


def compare(
    problem: Problem,
    device: Any,
    entries: Sequence[Contestant | Plan],
    *,
    graph: bool = True,
    rounds: int = 9,
    against: Peer | None = None,
    most_sets: int = MOST_SETS,
) -> list[dict[str, Any]]:
    """Check and time plans on a problem, with the framework's kernel among them.

    Parameters
    ----------
    problem : Problem
        For `device`'s target.
    entries : sequence of Contestant or Plan
        A contestant is built here; where that fails, its row says so.
    graph : bool
        On a GPU, time replays of a captured graph; eager calls where a reference engine or the peer's autograd takes
        part.
    against : Peer, optional
        Another peer than `peer(problem)`.

    Returns
    -------
    list of dict
        One row an entry, plain values ready for JSON: ``problem engine config reason workspace error fault``, then
        ``seconds spread tflops tbs error fault`` of the peer with ``peer_`` before the name and of the engine
        without, ``peer`` (what was called), ``ratio`` (the peer's time over the engine's: above 1 is faster) and
        ``graph``. Times are None where there was a fault.
    """
    # A reference engine may ask the device questions on the way, which a capture does not allow.
    graph = graph and device.type == "cuda" and not any("reference" in e.engine.notes for e in entries)
    settle(device)
    sets = buffers(problem, device, most_sets)
    expected = testing.reference(problem, sets[0], device)
    rows, calls = [], {}
    with flags(problem), torch.no_grad():
        rival = _Rival(problem, against, sets, expected)
        graph = graph and rival.graph
        for number, entry in enumerate(entries):
            row: dict[str, Any] = {
                "problem": str(problem),
                "engine": entry.engine.name,
                "config": dict(entry.config),
                "reason": entry.reason,
                "workspace": entry.engine.workspace_size(problem, entry.config),
                "error": {},
                "fault": "",
            }
            rows.append(row)
            with _faults(row):
                plan = entry if isinstance(entry, Plan) else build(problem, entry.engine, entry.config, entry.reason)
                row["error"], row["fault"] = _checked(problem, plan, sets[0], expected, device)
                if not row["fault"]:
                    inputs = [tuple(s[role] for role in problem.inputs) for s in sets]
                    calls[str(number)] = lambda s, plan=plan, inputs=inputs: plan(*inputs[s])
        if rival.calls:
            calls["peer"] = lambda s: rival.calls[s]()
        times = timing.measure(calls, device, sets=len(sets), rounds=rounds, graph=graph) if calls else {}
    for number, row in enumerate(rows):
        _complete(row, problem, times.get(str(number)), times.get("peer"), rival, graph)
    return rows


class _Rival:
    """The peer on every set of buffers, checked; `calls` is empty where it cannot take part, and `fault` says why."""

    def __init__(self, problem: Problem, against: Peer | None, sets: list[dict[str, Any]], expected: Mapping[str, Any]):
        self.name, self.fault = "", ""
        self.error: dict[str, float] = {}
        self.calls: list[Any] = []
        self.graph = True
        try:
            found = against or peer(problem)
            self.name, self.graph = found.name, found.graph
            calls = [found.prepare(tensors) for tensors in sets]
            results = found.results(calls[0]())
            self.error = {role: testing.relative_error(out, expected[role]) for role, out in results.items()}
            self.calls = calls
        except (NotSupported, RuntimeError, NotImplementedError) as error:
            self.fault = _first_line(error)


@contextlib.contextmanager
def _faults(row: dict[str, Any]) -> Iterator[None]:
    """An engine's failure is its row's fault, and the others go on."""
    try:
        yield
    except torch.cuda.OutOfMemoryError as error:
        row["fault"] = f"out of memory: {_first_line(error)}"
    except LucidnnError as error:
        row["fault"] = _first_line(error)
    except Exception as error:
        row["fault"] = f"{type(error).__name__}: {_first_line(error)}"


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _checked(
    problem: Problem, plan: Plan, tensors: Mapping[str, Any], expected: Mapping[str, Any], device: Any
) -> tuple[dict[str, float], str]:
    for role in problem.outputs:
        tensors[role].fill_(float("nan") if tensors[role].dtype.is_floating_point else 1)
    plan.launch(tuple(tensors[role] for role in problem.tensors), device)
    return testing.disagreement(problem, tensors, expected)


def _complete(
    row: dict[str, Any],
    problem: Problem,
    ours: timing.Timing | None,
    theirs: timing.Timing | None,
    rival: _Rival,
    graph: bool,
) -> None:
    for prefix, time in (("", ours), ("peer_", theirs)):
        row[f"{prefix}seconds"] = time.median if time else None
        row[f"{prefix}spread"] = round(time.spread, 4) if time else None
        row[f"{prefix}tflops"] = problem.flops / time.median / 1e12 if time else None
        row[f"{prefix}tbs"] = problem.bytes / time.median / 1e12 if time else None
    row["peer"], row["peer_fault"], row["peer_error"] = rival.name, rival.fault, rival.error
    row["ratio"] = theirs.median / ours.median if ours and theirs else None
    row["graph"] = graph


def worst(errors: Mapping[str, float]) -> str:
    """The largest of an output's errors, for a table.

    Examples
    --------
    >>> worst({"y": 1.5e-7, "index": 0.0}), worst({})
    ('1.5e-07', '-')
    """
    return f"{max(errors.values()):.1e}" if errors else "-"
