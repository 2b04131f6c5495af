"""Operations that move memory and compute little: pooling, normalization, softmax, dropout, reductions, resampling.

The lines of every ``problems/bench_*.txt`` that no other suite reads: those whose first tensor has 16 bits belong to a
GPU, those in float32 to a CPU. Each is the plan that the heuristics take, beside the framework's kernel, in one
interleaved run. A row's ``share`` is the rate at which the bytes that the operation must move (each tensor once, unless
the operation says otherwise) went, over the rate of a plain copy measured in the same run. At the end stand the
geometric mean of the ratios and the smallest ones, by family of operations.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.compile import compile_ahead
from benchmarks.context import PROBLEMS, Context
from benchmarks.suite_conv import CPU, GPU
from lucidnn.cli.compare import compare
from lucidnn.core import plan, settings, timing
from lucidnn.core.errors import LucidnnError
from lucidnn.core.problem import Problem
from lucidnn.core.target import Target
from lucidnn.testing import read_problems

COPIED = 1 << 29  # bytes read, and as many written: far past the cache


def results(context: Context) -> Iterator[dict[str, Any]]:
    target = Target.of(context.device)
    taken = {*GPU, *CPU}
    files = context.problems or sorted(f for f in PROBLEMS.glob("bench_*.txt") if f.name not in taken)
    kinds = ("bf16", "f16") if target.is_gpu else ("f32",)
    problems = [p for f in files for p in read_problems(f, target) if p.items[0][1].dtype in kinds]
    compile_ahead(problems, ["heuristic"])
    copy = copy_rate(context.device, COPIED // 8 if context.quick else COPIED)
    yield {"name": "copy", "seconds": None, "bytes_per_second": copy}
    ratios: dict[str, list[tuple[float, str]]] = {}
    for problem in problems:
        row = _row(problem, context)
        if row.get("seconds"):
            row["share"] = problem.bytes / row["seconds"] / copy
        if row.get("ratio"):
            ratios.setdefault(problem.op.name, []).append((row["ratio"], row["name"]))
        yield row
    for name, found in sorted(ratios.items()):
        mean = math.exp(sum(math.log(ratio) for ratio, _ in found) / len(found))
        yield {"name": f"{name}: all {len(found)}", "seconds": None, "ratio": mean, "worst": sorted(found)[:3]}


def _row(problem: Problem, context: Context) -> dict[str, Any]:
    line = {"name": problem.text.partition(" on=")[0]}
    try:
        with settings.using(policy="heuristic"):
            chosen = plan.select(problem, device=context.device)
        (row,) = compare(problem, context.device, [chosen], rounds=context.rounds)
        return line | row
    except LucidnnError as error:
        return {**line, "seconds": None, "fault": str(error).splitlines()[0]}
    except Exception as error:  # one problem's end is not the run's
        return {**line, "seconds": None, "fault": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"}


def copy_rate(device: torch.device, size: int) -> float:
    """Bytes a second, read and written, of the framework's copy of `size` bytes.

    Examples
    --------
    >>> copy_rate(torch.device("cpu"), 1 << 20) > 1e8
    True
    """
    source = torch.ones(size // 4, device=device)  # float32: of single bytes the framework's copy is slower on a GPU
    target = torch.empty_like(source)
    found = timing.measure({"copy": lambda s: target.copy_(source)}, device, graph=device.type == "cuda")
    return 2 * size / found["copy"].median
