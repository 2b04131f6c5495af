"""Pooling and elementwise engines: what the lists of problems cannot show.

The reference against the framework; ties, NaN and infinities; indices that are wrong; every 16-bit number through the
conversions; activations to the last places; in place; any number of threads.
"""

from __future__ import annotations

import math
import time

import pytest
import torch
import torch.nn.functional as functional

from lucidnn.core import registry
from lucidnn.core.descriptor import DTYPES, TensorDescriptor
from lucidnn.core.problem import Problem
from lucidnn.engines._reference import activate, activate_grad
from lucidnn.engines.pointwise._loops import merged
from lucidnn.ops.activation import ACTIVATIONS
from lucidnn.testing import allocate, buffers, reference, run_guarded

CPU = torch.device("cpu")
POOLS = {1: functional.max_pool1d, 2: functional.max_pool2d, 3: functional.max_pool3d}
TYPES = {short: getattr(torch, DTYPES[short][0]) for short in ("f32", "f64", "f16", "bf16", "u8", "i32", "i64")}


def takers(problem: Problem, reference_too: bool = False) -> list:
    """The CPU engines that take a problem."""
    found = [e for e in registry.for_operation(problem.op.name) if "cpu" in e.targets and not e.reasons(problem)]
    return [e for e in found if reference_too or "reference" not in e.notes]


def run(engine, problem: Problem, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Outputs of an engine, on poisoned memory with guard bands."""
    config = engine.configs(problem)[0]
    call, size = engine.build(problem, config), engine.workspace_size(problem, config)
    outputs, fault = run_guarded(problem, call, size, inputs, CPU)
    assert not fault, f"{engine.name}: {fault}"
    return outputs


# ---- pooling ---------------------------------------------------------------------------------------------------------

GEOMETRIES = """
x=f32[2,3,9,11] window=3,2 stride=2,3 padding=1,0
x=f32[2,3,9,11] window=2 ceil_mode=1
x=f32[2,3,10,10] window=3 stride=1 padding=1
x=f32[1,2,13,17] window=5,3 stride=1,4 padding=2,1 dilation=1,3
x=f32[2,3,7] window=3 stride=2 padding=1 ceil_mode=1
x=f32[1,2,5,6,7] window=3,2,2 stride=2 padding=1,0,1 dilation=1,2,1
x=f32[2,4,40,34]@nhwc window=2
x=f32[1,2,4,66] window=2
x=f32[1,1,9] window=9 stride=1 padding=4
""".strip().splitlines()


def backward_of(forward: Problem, index_type: str, indexed: TensorDescriptor | None = None) -> Problem:
    x, y = forward["x"], forward["y"]
    index = indexed or TensorDescriptor(index_type, y.shape, y.strides)
    attributes = [a for a in forward.op.attributes_text() if not a.startswith("index_type")]
    return Problem.parse(f"max_pool_bwd dy={y} index={index} dx={x} index_type={index_type} {' '.join(attributes)}")


@pytest.mark.parametrize("text", GEOMETRIES)
def test_the_reference_is_the_frameworks_pooling(text: str):
    problem = Problem.parse("max_pool_fwd " + text)
    op = problem.op
    generator = torch.Generator().manual_seed(3)
    x = torch.randint(-3, 4, problem["x"].shape, generator=generator).float().requires_grad_()
    pads = [before for before, _ in op.padding]
    pool = POOLS[x.ndim - 2]
    args = (list(op.window), list(op.stride), pads, list(op.dilation), op.ceil_mode)
    expected, place = pool(x, *args, return_indices=True)
    found = reference(problem, {"x": x.detach()}, CPU)
    assert torch.equal(found["y"], expected.detach().double())
    assert torch.equal(found["index"], place)
    dy = torch.randn(expected.shape, generator=generator)
    (dx,) = torch.autograd.grad(pool(x, *args), x, dy)
    numbers = reference(Problem.parse(f"max_pool_fwd {text} index_type=u8"), {"x": x.detach()}, CPU)["index"]
    for kind, index in (("i64", place), ("i32", place.int()), ("u8", numbers)):
        gathered = reference(backward_of(problem, kind), {"dy": dy, "index": index}, CPU)["dx"]
        torch.testing.assert_close(gathered, dx.double(), rtol=1e-5, atol=1e-6)


def strange(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Few different values, so many ties, with NaN and infinities among them."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.tensor([-2.0, -1.0, 0.0, 1.0, math.nan, math.inf, -math.inf, -math.inf], dtype=torch.float64)
    chosen = values[torch.randint(0, 8, shape, generator=generator)]
    chosen[: (shape[0] + 1) // 2] = -math.inf  # whole windows without anything larger
    return chosen[torch.randperm(shape[0], generator=generator)].to(dtype)


@pytest.mark.parametrize("dtype", ["f32", "f64", "f16", "bf16"])
@pytest.mark.parametrize("text", GEOMETRIES)
def test_first_of_equals_and_nan_as_the_largest(text: str, dtype: str):
    for kind in ("i64", "i32", "u8", "none"):
        problem = Problem.parse(f"max_pool_fwd {text.replace('f32', dtype)} index_type={kind}")
        x = strange(problem["x"].shape, TYPES[dtype], 5)
        x = x.contiguous(memory_format=torch.channels_last) if problem["x"].is_channels_last else x
        expected = reference(problem, {"x": x}, CPU)
        assert takers(problem)
        for engine in takers(problem):
            outputs = run(engine, problem, {"x": x})
            torch.testing.assert_close(outputs["y"].double(), expected["y"], rtol=0, atol=0, equal_nan=True)
            if kind != "none":
                assert torch.equal(outputs["index"], expected["index"]), engine.name


def test_the_rule_for_ties_and_nan():
    """By hand: the first NaN, else the first of the largest, in reading order."""
    nan, inf = math.nan, math.inf
    x = torch.tensor([[1.0, 5.0, 5.0, 5.0], [nan, nan, -inf, -inf], [-inf, -inf, 0.0, -0.0]]).reshape(1, 3, 2, 2)
    problem = Problem.parse("max_pool_fwd x=f32[1,3,2,2] window=2 index_type=u8")
    for engine in takers(problem, reference_too=True):
        outputs = run(engine, problem, {"x": x})
        assert outputs["index"].flatten().tolist() == [1, 0, 2]
        assert outputs["y"].flatten()[0] == 5 and outputs["y"].flatten()[1].isnan() and outputs["y"].flatten()[2] == 0
    row = torch.tensor([-inf, -inf, nan, 7.0, 7.0, nan]).reshape(1, 1, 6)
    problem = Problem.parse("max_pool_fwd x=f32[1,1,6] window=3 stride=1 padding=1")
    for engine in takers(problem, reference_too=True):
        outputs = run(engine, problem, {"x": row})
        assert outputs["index"].flatten().tolist() == [0, 2, 2, 2, 5, 5], engine.name


def test_a_window_without_a_point():
    """Wide dilation steps over the whole input: minus infinity, at no place."""
    x = torch.zeros(1, 1, 2)
    for kind, place in (("i64", -1), ("i32", -1), ("u8", 0)):
        problem = Problem.parse(f"max_pool_fwd x=f32[1,1,2] window=2 stride=1 padding=1 dilation=3 index_type={kind}")
        for engine in takers(problem, reference_too=True):
            outputs = run(engine, problem, {"x": x})
            assert outputs["y"].tolist() == [[[-math.inf]]]
            assert outputs["index"].tolist() == [[[place]]], engine.name


@pytest.mark.parametrize("kind", ["u8", "i32", "i64"])
@pytest.mark.parametrize("text", [*GEOMETRIES, "x=bf16[2,3,10,10] window=3 stride=1 padding=1"])
def test_an_index_that_is_not_of_its_window_is_dropped(text: str, kind: str):
    """Whatever stands in the index, nothing outside dx is written, and what is written follows one rule."""
    problem = backward_of(Problem.parse("max_pool_fwd " + text), kind)
    generator = torch.Generator().manual_seed(1)
    shape = problem["index"].shape
    places = math.prod(problem["dx"].shape[2:])
    low, high = (0, 256) if kind == "u8" else (-places, 2 * places)
    index = torch.randint(low, high, shape, generator=generator, dtype=TYPES[kind])
    if kind != "u8":
        index.view(-1)[::7] = torch.iinfo(TYPES[kind]).max
        index.view(-1)[::11] = torch.iinfo(TYPES[kind]).min
    inputs = {role: allocate(problem[role], CPU)[0] for role in ("dy", "index")}
    inputs["dy"].copy_(torch.randn(shape, generator=generator))
    inputs["index"].copy_(index)
    expected = reference(problem, inputs, CPU)["dx"]
    for engine in takers(problem):
        found = run(engine, problem, inputs)["dx"]
        torch.testing.assert_close(found.double(), expected, rtol=1e-2 if "bf16" in text else 1e-6, atol=1e-6)


def test_overlapping_windows_sum_in_float32():
    """Thousands of windows name one element: a sum in bfloat16 would stop growing at 256."""
    problem = Problem.parse(
        "max_pool_bwd dy=bf16[1,1,2000] index=i64[1,1,2000] dx=bf16[1,1,2000] window=1001 stride=1 padding=500"
    )
    inputs = {"dy": torch.ones(1, 1, 2000, dtype=torch.bfloat16), "index": torch.full((1, 1, 2000), 1000)}
    for engine in takers(problem):
        assert run(engine, problem, inputs)["dx"][0, 0, 1000] == 1000, engine.name  # 1001, rounded


@pytest.mark.parametrize(
    "text",
    [
        "max_pool_fwd x=f32[8,16,32,32] window=2",
        "max_pool_fwd x=bf16[8,16,33,35]@nhwc window=3 stride=2 padding=1",
        "max_pool_bwd dy=f32[8,16,32,32] index=i64[8,16,32,32] dx=f32[8,16,32,32] window=3 stride=1 padding=1",
        "max_pool_bwd dy=bf16[8,16,32,32] index=u8[8,16,32,32] dx=bf16[8,16,32,32] window=3 stride=1 padding=1 "
        "index_type=u8",
        "pointwise_fwd x=f32[8,16,33,35] bias=f32[16] act=gelu",
        "pointwise_bwd dy=f32[8,16,33,35] x=f32[8,16,33,35] act=relu",
    ],
)
def test_any_number_of_threads_gives_the_same_bits(text: str):
    problem = Problem.parse(text)
    inputs = {role: t for role, t in buffers(problem, CPU).items() if role in problem.inputs}
    before = torch.get_num_threads()
    try:
        for engine in takers(problem):
            results = []
            for threads in (1, 2, 7):
                torch.set_num_threads(threads)
                results.append(run(engine, problem, inputs))
            for other in results[1:]:
                assert all(torch.equal(results[0][role], other[role]) for role in other), engine.name
    finally:
        torch.set_num_threads(before)


# ---- 16-bit numbers --------------------------------------------------------------------------------------------------

EVERY_PATTERN = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
@pytest.mark.parametrize("text", ["max_pool_fwd x={t}[1,4,16384] window=1", "pointwise_fwd x={t}[1,4,16384] act=relu"])
def test_every_16_bit_number_passes_unchanged(text: str, dtype: str):
    """Widened and rounded back, a number is itself; a NaN stays a NaN."""
    problem = Problem.parse(text.format(t=dtype))
    x = EVERY_PATTERN.view(TYPES[dtype]).reshape(1, 4, 16384)
    expected = functional.relu(x) if "relu" in text else x
    for engine in takers(problem):
        y = run(engine, problem, {"x": x})["y"]
        nan = expected.isnan()
        assert torch.equal(y.isnan(), nan), engine.name
        assert torch.equal(y[~nan].float(), expected[~nan].float()), engine.name


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_rounding_is_to_nearest_even(dtype: str):
    """The points halfway between two neighbours, their float32 neighbours, and numbers too large or too small."""
    numbers = EVERY_PATTERN.view(TYPES[dtype])
    numbers = numbers[numbers.isfinite()].float().sort().values
    halfway = (numbers[1:].double() + numbers[:-1].double()).div(2).float()
    near = [
        halfway,
        torch.nextafter(halfway, torch.tensor(math.inf)),
        torch.nextafter(halfway, torch.tensor(-math.inf)),
    ]
    x = torch.cat([*near, torch.tensor([3e38, -3e38, 65520.0, 65519.0, 1e-45, -1e-45, 2e-8, 3e-8, math.inf, math.nan])])
    problem = Problem.parse(f"pointwise_fwd x=f32[{x.numel()}] y={dtype}[{x.numel()}]")
    expected = x.to(TYPES[dtype])
    for engine in takers(problem):
        y = run(engine, problem, {"x": x})["y"]
        assert torch.equal(y.isnan(), expected.isnan())
        assert torch.equal(y.nan_to_num().float(), expected.nan_to_num().float()), engine.name


# ---- elementwise -----------------------------------------------------------------------------------------------------


def act(name: str) -> str:
    parameter = ACTIVATIONS[name].parameter
    return "" if name == "identity" else f" act={name}" + ("" if parameter is None else f":{parameter}")


HARD = [0.0, -0.0, 3.0, -3.0, 6.0, 1e-30, -1e-30, 1e-40, 20.0, -20.0, 88.0, -88.0, 200.0, -200.0, 1e30, -1e30, math.nan]


@pytest.mark.parametrize("dtype, eps", [("f32", 2.0**-23), ("f64", 2.0**-52)])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_are_right_to_a_few_last_places(name: str, dtype: str, eps: float):
    """On their whole range, at the kinks, far out and for NaN. A few last places of 1 + |value|."""
    x = torch.cat([torch.linspace(-30, 30, 20001, dtype=torch.float64), torch.tensor(HARD, dtype=torch.float64)])
    x = x.to(TYPES[dtype])
    dy = torch.linspace(-2, 2, x.numel(), dtype=torch.float64).to(TYPES[dtype])
    p = ACTIVATIONS[name].parameter or 0.0
    size = f"{dtype}[{x.numel()}]"
    forward = Problem.parse(f"pointwise_fwd x={size}{act(name)}")
    backward = Problem.parse(f"pointwise_bwd dy={size} x={size}{act(name)}")
    for problem, inputs, expected in (
        (forward, {"x": x}, activate(name, p, x.double())),
        (backward, {"dy": dy, "x": x}, activate_grad(name, p, x.double(), dy.double())),
    ):
        for engine in takers(problem):
            found = run(engine, problem, inputs)[problem.outputs[0]].double()
            assert torch.equal(found.isnan(), expected.isnan()), engine.name
            ok = ~expected.isnan()
            off = (found[ok] - expected[ok]).abs() / (1 + expected[ok].abs())
            worst = int(off.argmax())
            most = 4 if dtype == "f32" else 16  # the definition is in float64 itself
            assert off[worst] <= most * eps, f"{engine.name} at {x[ok][worst]}: {off[worst] / eps} eps"


def test_infinities_go_where_the_limits_are():
    for name, below, above in (
        ("relu", 0.0, math.inf), ("clipped_relu", 0.0, 6.0), ("leaky_relu", -math.inf, math.inf),
        ("elu", -1.0, math.inf), ("sigmoid", 0.0, 1.0), ("tanh", -1.0, 1.0), ("softplus", 0.0, math.inf),
        ("hardsigmoid", 0.0, 1.0),
    ):  # fmt: skip
        problem = Problem.parse(f"pointwise_fwd x=f32[2]{act(name)}")
        for engine in takers(problem, reference_too=True):
            y = run(engine, problem, {"x": torch.tensor([-math.inf, math.inf])})["y"]
            assert y.tolist() == [below, above], (engine.name, name)


@pytest.mark.parametrize(
    "text",
    [
        "pointwise_fwd x=f32[5,7,300] act=relu",
        "pointwise_fwd x=bf16[5,7,300] bias=f32[7] alpha=0.5 act=gelu",
        "pointwise_fwd x=f32[5,7,30]@(500,1,11) y=f32[5,7,30]@(500,1,11) alpha=2.0",
        "pointwise_bwd dy=f32[5,7,300] x=f32[5,7,300] act=relu",
        "pointwise_bwd dy=f16[5,7,300] x=f16[5,7,300] act=silu",
    ],
)
def test_the_output_may_be_an_input(text: str):
    problem = Problem.parse(text)
    (out,) = problem.outputs
    for engine in takers(problem):
        for role in {"x", "dy"} & set(problem.inputs):
            inputs = {r: t for r, t in buffers(problem, CPU, seed=2).items() if r in problem.inputs}
            expected = run(engine, problem, inputs)[out]
            engine.build(problem, {})((*inputs.values(), inputs[role]), None)
            assert torch.equal(inputs[role], expected), (engine.name, role)


def test_loops_are_merged():
    def loops(text: str) -> tuple:
        found = merged(Problem.parse("pointwise_fwd " + text))
        return found.sizes, found.strides["x"]

    assert loops("x=f32[2,3,4,5]") == ((120,), (1,))
    assert loops("x=f32[2,3,4,5]@nhwc") == ((120,), (1,))
    assert loops("x=f32[2,3,4,5]@nhwc y=f32[2,3,4,5]") == ((2, 3, 20), (60, 1, 3))
    assert loops("x=f32[2,3,4,5] bias=f32[3]") == ((2, 3, 20), (60, 20, 1))
    assert loops("x=f32[2,3,4,5]@nhwc bias=f32[3]") == ((40, 3), (3, 1))
    assert loops("x=f32[2,1,1,5]@(7,1,1,1)") == ((2, 5), (7, 1))
    assert loops("x=f32[]") == ((1,), (0,))
    assert loops("x=f32[0,3]") == ((0,), (0,))
    assert loops("x=f32[4,6]@(0,0) y=f32[4,6]") == ((24,), (0,))


def test_relu_says_why_not():
    engine = registry.get("pointwise.relu")
    for text, word in (
        ("x=f32[2,3,4] act=tanh", "activation"),
        ("x=f32[2,3,4] bias=f32[3] act=relu", "bias"),
        ("x=f32[2,3,4] y=bf16[2,3,4] act=relu", "type"),
        ("x=f32[2,3,4]@(30,10,2) act=relu", "layout"),
        ("x=f32[2,3,4] act=relu alpha=2.0", "alpha"),
        ("x=f32[2,3]@(0,0) act=relu", "layout"),
    ):
        (reason,) = engine.reasons(Problem.parse("pointwise_fwd " + text))
        assert word in reason


@pytest.mark.parametrize(
    "text",
    [
        "max_pool_fwd x=f32[1,2,4,4] window=2",
        "pointwise_fwd x=f32[1,2,4,4] act=relu",
        "pointwise_fwd x=f32[8] alpha=2.0",
    ],
)
def test_a_call_costs_little_beside_the_work(text: str):
    """Processor time of a call on next to nothing: the least of several samples, since others use the machine too."""
    problem = Problem.parse(text)
    tensors = tuple(buffers(problem, CPU).values())
    for engine in takers(problem):
        call = engine.build(problem, engine.configs(problem)[0])
        samples = []
        for _ in range(10):
            start = time.thread_time()
            for _ in range(200):
                call(tensors, None)
            samples.append((time.thread_time() - start) / 200)
        assert min(samples) < 10e-6, engine.name
