"""Every engine on every line of ``problems/edge*.txt`` that it does not refuse: right to the last element, or at fault.

`lucidnn.testing.verify` fills outputs and workspace with NaN, puts guard bands around everything, compares with the
float64 reference, and runs twice. A test's name is the engine, the number of its configuration, and the problem line.

On a CPU every configuration runs. On a GPU a variant is seconds of compilation, so each line runs the engine's first
configuration and one other, a different one from line to line; all are compiled before the first test, in parallel.
"""

from __future__ import annotations

import concurrent.futures
import json
import multiprocessing
import os
import re
from pathlib import Path

import pytest
import torch

from lucidnn.core import registry
from lucidnn.core.engine import NOTES
from lucidnn.core.problem import Problem
from lucidnn.core.target import Target
from lucidnn.testing import allocate, read_problems, run_guarded, verify

PROBLEMS = Path(__file__).resolve().parents[2] / "problems"
FILES = sorted(PROBLEMS.glob("edge*.txt"))
# Without a GPU the GPU suite is collected, for its size and its refusals, but not run.
TARGETS = {
    "cpu": Target.parse("cpu"),
    "cuda": Target.of("cuda") if torch.cuda.is_available() else Target.parse("cuda:sm_90"),
}
LINES = {kind: [p for f in FILES for p in read_problems(f, target)] for kind, target in TARGETS.items()}
ENGINES = [(engine, kind) for engine in registry.engines().values() for kind in TARGETS if kind in engine.targets]


def short(problem: Problem) -> str:
    return problem.text.rpartition(" on=")[0]


def cases(kind: str) -> list:
    """(engine, its configuration's number, problem) for all that is accepted."""
    found = []
    for engine in (e for e, k in ENGINES if k == kind):
        for number, problem in enumerate(LINES[kind]):
            if problem.op.name not in engine.operations or engine.refusals(problem):
                continue
            configs = len(engine.configs(problem))
            every = range(configs) if kind == "cpu" else {0, number % configs}
            found += [pytest.param(engine, i, problem, id=f"{engine.name}#{i} {short(problem)}") for i in sorted(every)]
    return found


def check(engine, number: int, problem: Problem, device: str) -> None:
    config = engine.configs(problem)[number]
    assert engine.cost(problem, config) > 0
    found = verify(problem, engine, config, torch.device(device))
    assert not found.fault, f"{engine.name} {config}: {found.fault}"


@pytest.mark.parametrize("engine, number, problem", cases("cpu"))
def test_cpu(engine, number, problem):
    check(engine, number, problem, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("engine, number, problem", cases("cuda"))
def test_cuda(engine, number, problem, compiled):
    check(engine, number, problem, "cuda")


def _compile(task: tuple[str, int, str]) -> str:
    """In a process of its own that sees no GPU: leaves the binaries in the compilers' disk caches."""
    name, number, text = task
    try:
        problem, engine = Problem.parse(text), registry.get(name)
        engine.build(problem, engine.configs(problem)[number])
    except Exception as error:  # the test itself will meet it and report it
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.fixture(scope="session")
def compiled(request) -> None:
    """What the selected GPU tests need, compiled by all processors at once."""
    tasks = {
        (item.callspec.params["engine"].name, item.callspec.params["number"], item.callspec.params["problem"].text)
        for item in request.session.items
        if item.path == Path(__file__) and item.originalname == "test_cuda"
    }
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    try:
        context = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(min(16, os.cpu_count() or 1), context) as pool:
            list(pool.map(_compile, sorted(tasks), chunksize=4))
    finally:
        if hidden is None:
            del os.environ["CUDA_VISIBLE_DEVICES"]
        else:
            os.environ["CUDA_VISIBLE_DEVICES"] = hidden


@pytest.mark.parametrize("engine, kind", ENGINES, ids=[f"{e.name} {k}" for e, k in ENGINES])
def test_no_engine_goes_untested(engine, kind):
    """Each engine takes a line for each of its targets and operations, and refuses others in full sentences."""
    taken = set()
    for problem in LINES[kind]:
        if problem.op.name not in engine.operations:
            continue
        reasons = engine.refusals(problem)
        for reason in reasons:
            assert re.fullmatch(r"needs \S.*, found \S.*", reason), f"{reason!r} on {problem}"
        if not reasons:
            taken.add(problem.op.name)
    assert taken == set(engine.operations)


@pytest.mark.parametrize("engine, kind", ENGINES, ids=[f"{e.name} {k}" for e, k in ENGINES])
def test_answers_are_repeatable_plain_values(engine, kind):
    """The same question gets the same answer; knobs survive JSON, where tuned rows keep them; notes are known words."""
    assert re.fullmatch(r"[a-z]+(\.[a-z0-9_]+)+", engine.name) and engine.notes <= NOTES.keys()
    for problem in LINES[kind]:
        if problem.op.name in engine.operations and not engine.refusals(problem):
            configs = engine.configs(problem)
            assert configs and configs == engine.configs(problem)
            assert [json.loads(json.dumps(dict(c))) for c in configs] == [dict(c) for c in configs]
            assert len({json.dumps(dict(c), sort_keys=True) for c in configs}) == len(configs)
            for config in configs:
                size = engine.workspace_size(problem, config)
                assert isinstance(size, int) and size >= 0
                assert size == engine.workspace_size(problem, config)


def accumulates(engine, problem: Problem, device: torch.device) -> None:
    """z may be the output itself: the result is added to what is there."""
    (out,) = problem.outputs
    config = engine.configs(problem)[0]
    run, size = engine.build(problem, config), engine.workspace_size(problem, config)
    inputs = {role: allocate(problem[role], device)[0] for role in problem.inputs}
    generator = torch.Generator().manual_seed(5)
    for tensor in inputs.values():
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    expected, fault = run_guarded(problem, run, size, inputs, device)
    workspace = torch.full((size,), 255, dtype=torch.uint8, device=device)
    run((*(inputs[r] for r in problem.inputs), inputs["z"]), workspace if size else None)
    assert not fault and torch.equal(inputs["z"], expected[out])


def in_place_cases(kind: str) -> list:
    return [
        pytest.param(engine, problem, id=f"{engine.name} {short(problem)}")
        for engine in (e for e, k in ENGINES if k == kind)
        for problem in LINES[kind]
        if problem.op.name in engine.operations
        if "z" in problem.tensors and problem["z"] == problem[problem.outputs[0]]
        if not engine.refusals(problem)
    ]


@pytest.mark.parametrize("engine, problem", in_place_cases("cpu"))
def test_accumulates_in_place_cpu(engine, problem):
    accumulates(engine, problem, torch.device("cpu"))


@pytest.mark.gpu
@pytest.mark.parametrize("engine, problem", in_place_cases("cuda"))
def test_accumulates_in_place_cuda(engine, problem):
    accumulates(engine, problem, torch.device("cuda"))
