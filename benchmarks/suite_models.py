"""Every convolution of ``problems/models.txt`` in all three directions, beside the framework's own kernel.

The batch is cut so that one call takes about `Context.call_seconds` by estimate. On a CPU the 2-D lines run in float32
with channels first, the framework's default; on a GPU all lines in bfloat16 with channels last. Both results are
compared with one another before they are timed: a float64 reference of a thousand layers would take an hour. On a CPU
a block of 32 MB is allocated and freed beforehand, so that the C library keeps blocks up to that size from call to
call, for both sides alike (`lucidnn.cli.compare.settle`): else one layer's ratio was 0.6 or 3 by what ran before it.
At the end stand the geometric means by direction and by class of layer, with the slowest lines; `summary` makes them
from any rows, so that a list that was run in slices is put together by ``python -m benchmarks.suite_models FILE...``.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.compile import compile_ahead
from benchmarks.context import PROBLEMS, Context
from lucidnn import testing
from lucidnn.cli.compare import buffers, settle
from lucidnn.cli.peer import flags, peer
from lucidnn.core import plan, settings, timing
from lucidnn.core.descriptor import TensorDescriptor
from lucidnn.core.errors import NotSupported
from lucidnn.core.heuristics import roofline
from lucidnn.core.problem import Problem
from lucidnn.core.target import Target
from lucidnn.ops.convolution import ConvDgrad, ConvFprop, ConvWgrad, Geometry
from lucidnn.testing import read_problems

DIRECTIONS: dict[str, Any] = {"fprop": ConvFprop, "dgrad": ConvDgrad, "wgrad": ConvWgrad}
LAYOUTS = {"first": ("ncw", "nchw", "ncdhw"), "last": ("nwc", "nhwc", "ndhwc")}
FILE = PROBLEMS / "models.txt"


def derive(line: Problem, direction: str, target: Target, dtype: str, layout: str, images: int = 0) -> Problem:
    """The problem of a forward line in another direction, type, layout (first, last) and, if given, batch size.

    Examples
    --------
    >>> line = Problem.parse("conv_fprop x=f32[8,3,9,9] w=f32[4,3,3,3] stride=2 padding=1")
    >>> print(derive(line, "dgrad", Target.parse("cuda:sm_90"), "bf16", "last", 2))  # doctest: +NORMALIZE_WHITESPACE
    conv_dgrad dy=bf16[2,4,5,5]@nhwc w=bf16[4,3,3,3]@nhwc dx=bf16[2,3,9,9]@nhwc stride=2,2 padding=1,1
        on=cuda:sm_90:132
    """
    kind = DIRECTIONS[direction]
    tensors = {}
    for role, source in ((kind.x_role, "x"), (kind.w_role, "w"), (kind.y_role, "y")):
        shape = line[source].shape
        if source != "w" and images:
            shape = (images, *shape[1:])
        tensors[role] = TensorDescriptor.make(dtype, shape, LAYOUTS[layout][len(shape) - 3])
    attributes = {field.name: getattr(line.op, field.name) for field in dataclasses.fields(line.op)}
    return Problem.create(kind(**attributes), tensors, target)


def cut(line: Problem, direction: str, target: Target, dtype: str, layout: str, seconds: float) -> Problem:
    """`derive` with the largest batch of which a call takes at most so long, at half the device's rates."""
    problem = derive(line, direction, target, dtype, layout)
    estimate = 2 * roofline(problem, memory_efficiency=1.0, launches=0)
    images = max(1, min(line["x"].shape[0], int(line["x"].shape[0] * seconds / estimate)))
    return derive(line, direction, target, dtype, layout, images)


def category(problem: Problem) -> str:
    """The class of layer, as far as algorithms tell them apart.

    Examples
    --------
    >>> category(Problem.parse("conv_fprop x=f32[1,3,32,32] w=f32[8,3,8,8] stride=8"))
    'patch'
    """
    g = Geometry.of(problem)
    size = "x".join(map(str, problem[problem.op.w_role].shape[2:]))  # type: ignore[attr-defined]
    strided = "" if set(g.stride) == {1} else " strided"
    if g.G == g.C and g.G > 1:
        large = " large" if math.prod(g.filter) > 100 else ""
        return f"depthwise{large}{strided}"
    if g.G > 1:
        return f"grouped{strided}"
    if math.prod(g.filter) == 1:
        return f"pointwise{strided}"
    if set(g.dilation) != {1}:
        return "dilated"
    if g.stride == g.filter:
        return "patch"
    if min(g.C, g.K) <= 4:
        return f"few channels{strided}"
    return f"{size if size == '3x3' else 'other'}{strided}"


def results(context: Context) -> Iterator[dict[str, Any]]:
    target = Target.of(context.device)
    dtype, layout = ("bf16", "last") if target.is_gpu else ("f32", "first")
    lines = [line for file in context.problems or [FILE] for line in read_problems(file, target)]
    lines = [line for line in lines if line.op.name == "conv_fprop" and (target.is_gpu or line["x"].ndim == 4)]
    part, parts = context.part
    problems = [
        cut(line, direction, target, dtype, layout, context.call_seconds)
        for line in lines[len(lines) * (part - 1) // parts : len(lines) * part // parts]
        for direction in DIRECTIONS
    ]
    compile_ahead(problems, ["heuristic"])
    settle(context.device)
    rows = []
    for problem in problems:
        try:
            row = _measured(problem, context)
        except Exception as error:  # one problem's end is not the run's
            row = {"seconds": None, "fault": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"}
        rows.append({"name": problem.text.partition(" on=")[0], "class": category(problem), **row})
        yield rows[-1]
    yield from summary(rows)


def _measured(problem: Problem, context: Context) -> dict[str, Any]:
    device = context.device
    with settings.using(policy="heuristic"):
        chosen = plan.select(problem, device=device)
    sets = buffers(problem, device, most=4 if context.quick else 16)
    inputs = [tuple(s[role] for role in problem.inputs) for s in sets]
    role = problem.outputs[0]
    row: dict[str, Any] = {"engine": chosen.engine.name, "config": dict(chosen.config), "fault": ""}
    with flags(problem), torch.no_grad():
        calls: dict[str, Any] = {"ours": lambda s: chosen(*inputs[s])}
        try:
            rival = peer(problem)
            theirs = [rival.prepare(s) for s in sets]
            expected = rival.results(theirs[0]())[role]
            row["difference"] = testing.relative_error(chosen(*inputs[0]), expected)
            # Both round: the distance between two right answers is at most the sum of their errors.
            limit = 2 * testing.tolerance(problem, role)
            if not row["difference"] <= limit:
                row["fault"] = f"{role} is {row['difference']:.1e} from the framework's, over {limit:.1e}"
            calls["peer"] = lambda s: theirs[s]()
        except (NotSupported, RuntimeError) as error:
            row["fault"] = f"no peer: {(str(error).splitlines() or [''])[0]}"
        graph = device.type == "cuda"
        times = timing.measure(calls, device, sets=len(sets), rounds=context.rounds, graph=graph)
    ours, other = times["ours"].median, times["peer"].median if "peer" in times else None
    return {**row, "seconds": ours, "peer_seconds": other, "ratio": other / ours if other else None}


def summary(rows: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Rows with the geometric mean of the ratio, by direction and then by class, the slowest lines in each.

    Examples
    --------
    >>> rows = [{"name": f"conv_fprop {i}", "class": "patch", "ratio": r} for i, r in enumerate((1.0, 4.0))]
    >>> [(row["name"], row["ratio"], row["worst"][0][0]) for row in summary(rows)]
    [('fprop: all 2', 2.0, 1.0), ('fprop: patch 2', 2.0, 1.0)]
    """
    groups: dict[tuple[str, str], list[tuple[float, str]]] = {}
    for row in rows:
        if row.get("ratio") and "class" in row:
            direction = row["name"].split()[0].removeprefix("conv_")
            for name in ("all", row["class"]):
                groups.setdefault((direction, name), []).append((row["ratio"], row["name"]))
    for direction, name in sorted(groups, key=lambda key: (list(DIRECTIONS).index(key[0]), key[1] != "all", key[1])):
        found = sorted(groups[direction, name])
        mean = math.exp(sum(math.log(ratio) for ratio, _ in found) / len(found))
        slow = sum(ratio < 0.7 for ratio, _ in found)
        title = f"{direction}: {name} {len(found)}" + (f", {slow} below 0.7" if slow else "")
        yield {"name": title, "seconds": None, "ratio": mean, "worst": found[: max(slow, 3)]}


def _main(files: list[str]) -> None:
    texts = [line for file in files for line in Path(file).read_text(encoding="utf-8").splitlines()]
    for row in summary(json.loads(text) for text in texts):
        print(f"{row['ratio']:6.2f}  {row['name']}")
        if row["name"].split()[1] == "all":
            for ratio, name in row["worst"]:
                print(f"          {ratio:5.2f}  {name}")


if __name__ == "__main__":
    _main(sys.argv[1:])
