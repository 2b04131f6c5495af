"""Single kernels: the plan that lucidnn takes for a problem, beside the framework's kernel, in one interleaved run.

On a GPU: dense convolutions of well-known networks and every kernel of the small network's step, in bfloat16; on a CPU
the latter in float32. GPU times are replays of a captured graph. Each policy's plan is a row; where two policies take
the same plan they share one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.compile import compile_ahead
from benchmarks.context import PROBLEMS, Context
from lucidnn.cli.compare import compare
from lucidnn.core import plan, settings
from lucidnn.core.errors import LucidnnError
from lucidnn.core.problem import Problem
from lucidnn.core.target import Target
from lucidnn.testing import read_problems

GPU = ("bench_conv.txt", "bench_network_bf16.txt")
CPU = ("bench_network.txt",)


def results(context: Context) -> Iterator[dict[str, Any]]:
    target = Target.of(context.device)
    files = context.problems or [PROBLEMS / name for name in (GPU if target.is_gpu else CPU)]
    problems = [problem for file in files for problem in _read(file, target)]
    compile_ahead(problems, context.policies)
    for problem in problems:
        yield from _rows(problem, context)


def _read(file: Path, target: Target) -> list[Problem]:
    return [dataclasses.replace(problem, target=target) for problem in read_problems(file, target)]


def _rows(problem: Problem, context: Context) -> Iterator[dict[str, Any]]:
    plans: dict[tuple[str, str], tuple[plan.Plan, list[str]]] = {}
    line = {"name": str(problem).partition(" on=")[0], "problem": str(problem)}
    for policy in context.policies:
        try:
            with settings.using(policy=policy):
                # Without a search in this run nothing has been timed, so the order of the policies does not matter.
                chosen = plan.select(problem, device=context.device)
            key = (chosen.engine.name, str(sorted(chosen.config.items())))
            plans.setdefault(key, (chosen, []))[1].append(policy)
        except LucidnnError as error:
            yield {**line, "policies": [policy], "seconds": None, "fault": str(error).splitlines()[0]}
    entries = [chosen for chosen, _ in plans.values()]
    try:
        found = compare(problem, context.device, entries, rounds=context.rounds)
    except Exception as error:  # one problem's end is not the run's
        yield {**line, "seconds": None, "fault": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"}
        return
    for row, (_, policies) in zip(found, plans.values(), strict=True):
        yield {**line, "policies": policies, **row}
