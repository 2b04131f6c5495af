"""What only a GPU can show: graph capture and replay, streams, and threads that share a device."""

from __future__ import annotations

import threading

import pytest
import torch

from lucidnn import functional as F
from lucidnn.core import registry
from lucidnn.core.plan import select
from lucidnn.core.problem import Problem
from lucidnn.core.settings import using
from lucidnn.core.target import Target
from lucidnn.testing import allocate, fill, repeats

pytestmark = pytest.mark.gpu
TARGET = Target.of("cuda") if torch.cuda.is_available() else Target.parse("cuda:sm_90")
LINES = """
conv_fprop x=bf16[4,32,14,14]@nhwc w=bf16[32,32,3,3]@nhwc bias=bf16[32] padding=1 act=relu
conv_fprop x=f32[4,3,16,16] w=f32[16,3,3,3] padding=1
conv_dgrad dy=bf16[4,32,14,14]@nhwc w=bf16[32,32,3,3]@nhwc padding=1
conv_dgrad dy=f32[4,16,8,8] w=f32[16,8,3,3] dx=f32[4,8,16,16] padding=1 stride=2
conv_wgrad x=bf16[16,32,14,14]@nhwc dy=bf16[16,32,14,14]@nhwc padding=1
conv_wgrad x=f32[16,3,16,16] dy=f32[16,16,16,16] padding=1
conv_bgrad dy=bf16[16,32,14,14]@nhwc
conv_bgrad dy=f32[16,32,14,14]
max_pool_fwd x=bf16[4,32,14,14]@nhwc window=2 index_type=u8
max_pool_bwd dy=f32[4,8,7,7] index=i64[4,8,7,7] dx=f32[4,8,14,14] window=2
pointwise_fwd x=bf16[4,32,14,14]@nhwc bias=bf16[32] act=silu
pointwise_bwd dy=f32[4,8,14,14] x=f32[4,8,14,14] act=relu
""".strip().splitlines()
CASES = [
    pytest.param(engine, problem, id=f"{engine.name} {problem.text.rpartition(' on=')[0]}")
    for problem in (Problem.parse(line, TARGET) for line in LINES)
    for engine in registry.for_operation(problem.op.name)
    if TARGET.kind in engine.targets and "reference" not in engine.notes and not engine.reasons(problem)
]


def bits(tensors) -> list[bytes]:
    return [t.contiguous().view(torch.uint8).cpu().numpy().tobytes() for t in tensors]


@pytest.mark.parametrize("engine, problem", CASES)
def test_captured_once_and_replayed(engine, problem):
    """The first call of a plan may be under capture; a replay reads the inputs as they are then."""
    device = torch.device("cuda")
    with using(engine=engine.name):
        plan = select(problem)
    tensors = {role: allocate(t, device)[0] for role, t in problem.items}
    inputs = {role: tensors[role] for role in problem.inputs}
    outputs = [tensors[role] for role in problem.outputs]
    fill(problem, inputs, seed=1)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan.launch(tuple(tensors.values()), device)
    seen = []
    for seed in (1, 2, 2):
        fill(problem, inputs, seed=seed)
        for t in outputs:
            t.zero_()
        graph.replay()
        torch.cuda.synchronize()
        seen.append({role: tensors[role].clone() for role in problem.outputs})
        plan.launch(tuple(tensors.values()), device)
        torch.cuda.synchronize()
        assert all(repeats(problem, engine, seen[-1], tensors, role) for role in problem.outputs)
    for role in problem.outputs:
        assert not torch.equal(seen[0][role], seen[1][role]) and repeats(problem, engine, seen[1], seen[2], role)


@pytest.mark.parametrize("engine, problem", CASES)
def test_on_a_stream_of_its_own(engine, problem):
    """Work is queued on the current stream and on no other: behind a long wait there, the result is still right."""
    device = torch.device("cuda")
    with using(engine=engine.name):
        plan = select(problem)
    inputs = {role: allocate(problem[role], device)[0] for role in problem.inputs}
    fill(problem, inputs, seed=1)
    expected = plan(*inputs.values())
    source = {role: t.clone() for role, t in inputs.items()}
    for t in inputs.values():
        t.zero_()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        for role, t in inputs.items():
            t.copy_(source[role])
        found = plan(*inputs.values())
    stream.synchronize()
    found, expected = (dict(zip(problem.outputs, t if isinstance(t, tuple) else (t,))) for t in (found, expected))
    assert all(repeats(problem, engine, expected, found, role) for role in problem.outputs)


def test_threads_share_a_device():
    x = torch.randn(4, 16, 12, 12, device="cuda")
    w = torch.randn(16, 16, 3, 3, device="cuda")

    def both():
        v = w.clone().requires_grad_()
        y = F.max_pool2d(F.conv2d(x, v, padding=1, activation="relu"), 2)
        y.square().sum().backward()
        torch.cuda.current_stream().synchronize()
        return bits([y.detach(), v.grad])

    expected, errors = both(), []

    def work():
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(20):
                if both() != expected:
                    errors.append("another answer")

    torch.cuda.synchronize()
    threads = [threading.Thread(target=work) for _ in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(120)
    assert errors == []


def test_a_training_step_in_a_graph():
    """The whole step, forward and backward, captured as the framework's users do; losses fall as they do eagerly."""
    torch.manual_seed(0)
    x, target = torch.randn(32, 3, 16, 16, device="cuda"), torch.randint(0, 10, (32,), device="cuda")
    weights = [torch.randn(s, device="cuda") * 0.1 for s in ((16, 3, 3, 3), (32, 16, 3, 3), (10, 512))]

    def loss(ws):
        y = F.max_pool2d(F.relu(F.conv2d(x, ws[0], padding=1)), 2)
        y = F.max_pool2d(F.relu(F.conv2d(y, ws[1], padding=1)), 2)
        return torch.nn.functional.cross_entropy(F.linear(y.flatten(1), ws[2]), target)

    def step(ws):
        value = loss(ws)
        grads = torch.autograd.grad(value, ws)
        with torch.no_grad():
            for w, g in zip(ws, grads, strict=True):
                w.sub_(g, alpha=0.1)
        return value.detach()

    eager = [w.clone().requires_grad_() for w in weights]
    losses = [float(step(eager)) for _ in range(8)]
    captured = [w.clone().requires_grad_() for w in weights]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        replayed = [float(step(captured)) for _ in range(3)]
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step(captured)
    for _ in range(5):
        graph.replay()
        replayed.append(float(out))
    torch.testing.assert_close(torch.tensor(replayed), torch.tensor(losses), rtol=1e-4, atol=1e-4)
    assert losses[-1] < losses[0]
