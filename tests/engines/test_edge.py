"""Every engine on every line of ``problems/edge*.txt`` that it does not refuse: right to the last element, or at fault.

`lucidnn.testing.verify` fills outputs and workspace with NaN, puts guard bands around everything, compares with the
float64 reference, and runs twice. A test's name is the engine, the number of its configuration, and the problem line.

Each line runs the engine's first configuration and one other, a different one from line to line; on a CPU the remaining
ones belong to the longer profile (``pytest -m slow``). On a GPU a variant is a second of compilation: all are compiled
before the first test, in parallel.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

import precompile
from lucidnn.core import registry
from lucidnn.core.engine import NOTES
from lucidnn.core.problem import Problem
from lucidnn.core.target import Target
from lucidnn.testing import allocate, read_problems, repeats, run_guarded, verify

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
            if problem.op.name not in engine.operations or engine.reasons(problem):
                continue
            configs = len(engine.configs(problem))
            first = {0, number % configs}
            for i in range(configs) if kind == "cpu" else sorted(first):
                marks = [] if i in first else [pytest.mark.slow]
                found.append(pytest.param(engine, i, problem, id=f"{engine.name}#{i} {short(problem)}", marks=marks))
    return found


def check(engine, number: int, problem: Problem, device: str) -> None:
    config = engine.configs(problem)[number]
    assert 0 < engine.cost(problem, config) < float("inf")
    found = verify(problem, engine, config, torch.device(device))
    assert not found.fault, f"{engine.name} {config}: {found.fault}"


@pytest.mark.parametrize("engine, number, problem", cases("cpu"))
def test_cpu(engine, number, problem):
    check(engine, number, problem, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("engine, number, problem", cases("cuda"))
def test_cuda(engine, number, problem, compiled):
    check(engine, number, problem, "cuda")


@pytest.fixture(scope="session")
def compiled(request, tmp_path_factory) -> None:
    """What the selected GPU tests need, compiled by all processors at once."""
    wanted = [i.callspec.params for i in request.session.items if i.name.startswith("test_cuda[")]
    tasks = {(p["engine"].name, p["number"], p["problem"].text) for p in wanted}
    shared = tmp_path_factory.getbasetemp()
    if hasattr(request.config, "workerinput"):
        shared = shared.parent
    with precompile.one_at_a_time(shared / "compiled.lock"):
        if not (shared / "compiled").exists():
            precompile.compile_all(tasks)
            (shared / "compiled").touch()


@pytest.mark.parametrize("engine, kind", ENGINES, ids=[f"{e.name} {k}" for e, k in ENGINES])
def test_no_engine_goes_untested(engine, kind):
    """Each engine takes a line for each of its targets and operations, and refuses others in full sentences."""
    taken = set()
    for problem in LINES[kind]:
        if problem.op.name not in engine.operations:
            continue
        reasons = engine.reasons(problem)
        for reason in reasons:
            assert re.fullmatch(r"needs \S.*, found \S.*", reason), f"{reason!r} on {problem}"
        if not reasons:
            taken.add(problem.op.name)
    assert taken == set(engine.operations)


@pytest.mark.parametrize("engine, kind", ENGINES, ids=[f"{e.name} {k}" for e, k in ENGINES])
def test_answers_are_repeatable_plain_values(engine, kind):
    """The same question gets the same answer; knobs survive JSON, where tuned rows keep them; notes are known words."""
    assert re.fullmatch(r"[a-z_]+(\.[a-z0-9_]+)+", engine.name) and engine.notes <= NOTES.keys()
    for problem in LINES[kind]:
        if problem.op.name in engine.operations and not engine.reasons(problem):
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
    out = problem.outputs[0]
    config = engine.configs(problem)[0]
    run, size = engine.build(problem, config), engine.workspace_size(problem, config)
    inputs = {role: allocate(problem[role], device)[0] for role in problem.inputs}
    generator = torch.Generator().manual_seed(5)
    for tensor in inputs.values():
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    expected, fault = run_guarded(problem, run, size, inputs, device)
    workspace = torch.full((size,), 255, dtype=torch.uint8, device=device)
    others = [allocate(problem[role], device)[0] for role in problem.outputs[1:]]
    run((*(inputs[r] for r in problem.inputs), inputs["z"], *others), workspace if size else None)
    assert not fault and repeats(problem, engine, expected, {out: inputs["z"]}, out)


def in_place_cases(kind: str) -> list:
    return [
        pytest.param(engine, problem, id=f"{engine.name} {short(problem)}")
        for engine in (e for e, k in ENGINES if k == kind)
        for problem in LINES[kind]
        if problem.op.name in engine.operations
        if "z" in problem.tensors and problem["z"] == problem[problem.outputs[0]]
        if not engine.reasons(problem)
    ]


@pytest.mark.parametrize("engine, problem", in_place_cases("cpu"))
def test_accumulates_in_place_cpu(engine, problem):
    accumulates(engine, problem, torch.device("cpu"))


@pytest.mark.gpu
@pytest.mark.parametrize("engine, problem", in_place_cases("cuda"))
def test_accumulates_in_place_cuda(engine, problem):
    accumulates(engine, problem, torch.device("cuda"))


ONES = """
conv_fprop x=f32[1,1,1,1] w=f32[1,1,1,1]
conv_fprop x=bf16[1,16,1,1] w=bf16[16,16,3,3]@nhwc padding=1
conv_dgrad dy=f32[1,1,1,1] w=f32[1,1,3,3] padding=1
conv_wgrad x=f32[1,1,1,1] dy=f32[1,1,1,1]
conv_wgrad x=bf16[1,16,1,1] dy=bf16[1,16,1,1] dw=bf16[16,16,3,3]@nhwc padding=1
conv_bgrad dy=f32[1,1,1,1]
max_pool_fwd x=f32[1,1,1,1] window=1
max_pool_bwd dy=f32[1,1,1,1] index=i64[1,1,1,1] window=1
pointwise_fwd x=f32[1] act=relu
pointwise_bwd dy=f32[1] x=f32[1] act=relu
batch_norm_train_fwd x=f32[2,1,1,1] scale=f32[1] bias=f32[1] running_mean=f32[1] running_variance=f32[1] factor=f32[1]
batch_norm_bwd dy=bf16[1,1,1,1] x=bf16[1,1,1,1] mean=f32[1] variance=f32[1] scale=f32[1] frozen=1 residual=1 act=relu
batch_norm_stats x=f32[1,1]
batch_norm_combine counts=f32[1] means=f32[1,1] m2s=f32[1,1]
batch_norm_bwd_apply dy=f32[1,1] x=f32[1,1] mean=f32[1] dscale=f32[1] dbias=f32[1] count=f32[1] inv_variance=f32[1]
layer_norm_fwd x=f32[1] scale=f32[1] bias=f32[1]
layer_norm_bwd dy=f32[1] x=f32[1] mean=f32[1] inv_variance=f32[1] scale=f32[1]
rms_norm_fwd x=bf16[1,1] scale=f32[1]
rms_norm_bwd dy=f32[1,1] x=f32[1,1] inv_variance=f32[1,1] scale=f32[1]
group_norm_fwd x=f32[1,1,1] scale=f32[1] bias=f32[1] act=silu
group_norm_bwd dy=f32[1,1] x=f32[1,1] mean=f32[1,1] inv_variance=f32[1,1] scale=f32[1] bias=f32[1] act=silu
lrn_fwd x=f32[1,1]
lrn_bwd dy=f32[1,1] x=f32[1,1]
divisive_norm_fwd x=f32[1,1,1] means=f32[1,1,1]
divisive_norm_bwd dy=f32[1,1,1] x=f32[1,1,1] means=f32[1,1,1]
lp_normalize_fwd x=f32[1,1] scale=f32[1,1]
lp_normalize_bwd dy=f32[1,1] x=f32[1,1] norm=f32[1,1] scale=f32[1,1]
softmax_fwd x=f32[1,1]
softmax_bwd y=f32[1] dy=f32[1] axes=0
cross_entropy_fwd x=f32[1,1] target=i64[1] ignore_index=1
cross_entropy_bwd dy=f32[] x=f32[1,1] target=i64[1] stats=f32[1] total=f32[]
dropout_fwd x=f32[1] state=i64[2]
dropout_bwd dy=f32[1,1,1,1] state=i64[2] feature=1
transform_tensor x=f32[1,1,1,1]
transform_tensor x=i32[1,1,1,1] z=i32[1,2,1,1] y=i8[1,2,1,1] alpha=2.0 beta=1.0 padding=0,0,0:1,0 value=1.0 fold=2,1
transform_tensor x=i32[1,2,1,1] y=i8[1,1,1,1] padding=0,0,0:-1,0 fold=2,1 unfold=1
""".strip().splitlines()


@pytest.mark.parametrize("line", ONES)
def test_sizes_of_one_compile(line):
    """A compiler for GPUs takes an integer 1 for a constant of another type: each use of it has to stand that."""
    problem = Problem.parse(line, Target.parse("cuda:sm_90"))
    for engine in registry.for_operation(problem.op.name):
        if "cuda" in engine.targets and not engine.reasons(problem):
            assert precompile.compile_one((engine.name, 0, str(problem))) == ""
