"""Compiles what a GPU suite will need before its first test, on all processors at once.

A Triton kernel takes the better part of a second, and one thread at a time holds the interpreter. Other processes
build the plans, see no GPU, and leave the binaries in Triton's disk cache, where the tests then find them.
"""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
from collections.abc import Iterable
from contextlib import contextmanager
from pathlib import Path

Task = tuple[str, int, str]
"""Engine's name, number of its configuration, problem line."""


def compile_one(task: Task) -> str:
    """Build one plan; gives what went wrong, which the test itself will meet and report."""
    from lucidnn.core import registry
    from lucidnn.core.problem import Problem

    name, number, text = task
    try:
        problem, engine = Problem.parse(text), registry.get(name)
        engine.build(problem, engine.configs(problem)[number])
    except Exception as error:
        return f"{task}: {type(error).__name__}: {error}"
    return ""


def compile_all(tasks: Iterable[Task], processes: int | None = None) -> list[str]:
    """Build all; gives what went wrong."""
    count = processes or min(32, os.cpu_count() or 1)
    with no_gpu(), concurrent.futures.ProcessPoolExecutor(count, multiprocessing.get_context("spawn")) as pool:
        return [fault for fault in pool.map(compile_one, sorted(tasks), chunksize=4) if fault]


@contextmanager
def no_gpu():
    """Children started inside the block see no GPU: they need none, and a context on it costs seconds and memory."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    try:
        yield
    finally:
        if hidden is None:
            del os.environ["CUDA_VISIBLE_DEVICES"]
        else:
            os.environ["CUDA_VISIBLE_DEVICES"] = hidden


@contextmanager
def one_at_a_time(path: Path):
    """Of pytest-xdist's workers the first compiles and the others wait, then find everything done."""
    import fcntl

    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
