"""Compiles the GPU kernels of many problems at once, in processes of their own, before anything is timed.

Compiling is most of a run's time and goes one kernel at a time in a process. The workers see no GPU and need none:
they compile ahead of time for the problem's target, and Triton's cache on disk hands the result to the process that
measures. On a CPU nothing is done: there the first call compiles, and no first call is timed.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor

import click

from lucidnn import backends
from lucidnn.core.problem import Problem

Task = tuple[str, str, dict]


def compile_ahead(problems: Iterable[Problem], policies: Sequence[str], workers: int | None = None) -> int:
    """Compile what the policies may come to choose for these problems; gives the number of kernels asked for."""
    tasks = [task for problem in dict.fromkeys(problems) for task in _tasks(problem, policies)]
    if not tasks:
        return 0
    start = time.perf_counter()
    workers = min(workers or os.cpu_count() or 1, len(tasks))
    # Fresh processes: a fork of one that holds a GPU context cannot be used.
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), initializer=_without_gpu) as pool:
        failures = [text for text in pool.map(_compile, tasks, chunksize=1) if text]
    click.echo(
        f"-- {len(tasks)} kernels compiled by {workers} processes in {time.perf_counter() - start:.0f} s"
        + "".join(f"\n   {text}" for text in failures)
    )
    return len(tasks)


def _tasks(problem: Problem, policies: Sequence[str]) -> list[Task]:
    """Engine and configuration of what the cost model would take, and of all that a search would time."""
    from lucidnn.core.plan import candidates

    if not problem.target.is_gpu:
        return []
    entries = []
    for c in candidates(problem):
        if c.refusals or "runtime_compilation" not in c.engine.notes:
            continue
        configs = c.engine.configs(problem) if "find" in policies else [c.config]
        entries += [(c.engine.cost(problem, config), c.engine.name, dict(config)) for config in configs]
    entries.sort(key=lambda entry: entry[0])
    wanted = (backends.limit() or None) if "find" in policies else 1
    return [(str(problem), name, config) for _, name, config in entries[:wanted]]


def _without_gpu() -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


def _compile(task: Task) -> str:
    """Build one engine in a worker; a failure will be met again by the search, which keeps its reason."""
    from lucidnn.core import registry

    text, name, config = task
    try:
        registry.get(name).build(Problem.parse(text), config)
    except Exception as error:
        return f"{name} {config} for {text}: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    return ""
