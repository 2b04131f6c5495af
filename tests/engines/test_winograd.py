"""Winograd convolution on a CPU: its matrices, refusals, the errors that it states, odd sizes, every activation."""

from __future__ import annotations

import itertools
import math
import random
from fractions import Fraction

import pytest
import torch

from lucidnn.core import registry
from lucidnn.core.problem import Problem
from lucidnn.core.target import Target
from lucidnn.engines._winograd import POINTS, amplification, relative_error, transforms
from lucidnn.engines.convolution import winograd_wgrad
from lucidnn.ops.activation import ACTIVATIONS
from lucidnn.ops.convolution import Geometry
from lucidnn.testing import tolerance, verify

CPU = torch.device("cpu")
SIDES = [(m, n - m + 1) for n in POINTS for m in range(1, n)]


def engines(problem: Problem) -> list:
    found = [e for e in registry.for_operation(problem.op.name) if "winograd" in e.notes and "cpu" in e.targets]
    assert found
    return found


def reasons(line: str) -> list[str]:
    problem = Problem.parse(line)
    return [reason for engine in engines(problem) for reason in engine.reasons(problem)]


@pytest.mark.parametrize("m, r", SIDES)
def test_the_matrices_give_a_correlation_exactly(m, r):
    """In rational numbers, from the floating-point matrices: only what 1/n rounds away may be missing."""
    draw = random.Random(m * 100 + r)
    t = transforms(m, r)
    d, g = ([Fraction(draw.randint(-9, 9)) for _ in range(count)] for count in (t.n, r))

    def times(matrix, v):
        return [sum((Fraction(a) * b for a, b in zip(row, v, strict=True)), Fraction(0)) for row in matrix]

    products = [a * b for a, b in zip(times(t.B, d), times(t.G, g), strict=True)]
    expected = [sum(d[i + k] * g[k] for k in range(r)) for i in range(m)]
    assert [float(y) for y in times(t.A, products)] == pytest.approx([float(y) for y in expected], abs=1e-12)


def test_the_gradient_of_a_filter_has_the_same_input_transform():
    for m, r in SIDES:
        assert transforms(m, r).B == transforms(r, m).B
        assert amplification(m, r) == pytest.approx(amplification(r, m))


@pytest.mark.parametrize(
    "line",
    [
        "conv_fprop x=f32[2,64,20,20] w=f32[64,64,3,3] padding=1",
        "conv_fprop x=f32[2,256,14,14]@nhwc w=f32[32,256,3,3]@nhwc padding=1",
        "conv_fprop x=f64[1,64,14,14] w=f64[32,64,3,3]",
        "conv_fprop x=f32[2,64,16,16] w=f32[32,64,5,5] padding=2",
        "conv_fprop x=f32[2,96,15,15] w=f32[32,96,1,7] padding=0,3",
        "conv_dgrad dy=f32[2,48,18,18] w=f32[48,48,3,3] padding=1",
        "conv_wgrad x=f32[4,32,24,24] dy=f32[4,32,24,24] padding=1",
        "conv_wgrad x=f64[2,32,24,24] dy=f64[2,32,24,24] padding=1",
    ],
)
def test_errors_are_of_the_class_that_is_stated(line):
    """Not above the estimate, nor so far below it that the estimate refuses what it need not."""
    problem = Problem.parse(line)
    (engine,) = engines(problem)
    role, unit = problem.outputs[0], 2.0**-53 if "f64" in line else 2.0**-24
    g = Geometry.of(problem)
    filter_sizes = [n for n in g.filter if n > 1]
    for config in engine.configs(problem):
        m = config["tile"]
        tiles = g.N * math.prod(math.ceil(n / m) for n in g.out_size[1:])
        gradient = problem.op.name == "conv_wgrad"
        terms = tiles if gradient else problem.items[0][1].shape[1]
        stated = relative_error(tuple((r, m) if gradient else (m, r) for r in filter_sizes), terms, unit)
        check = verify(problem, engine, config, CPU)
        assert not check.fault
        assert 0.25 * stated < check.errors[role] < 1.1 * stated + unit
        assert stated < tolerance(problem, role)


@pytest.mark.parametrize(
    "line, reason",
    [
        ("conv_fprop x=f32[1,8,9,9] w=f32[8,8,3,3] stride=2", "needs stride = 1, found [2, 2]"),
        ("conv_fprop x=f32[1,8,9,9] w=f32[8,8,3,3] dilation=2", "needs dilation = 1, found [2, 2]"),
        ("conv_wgrad x=f32[1,8,9,9] dy=f32[1,8,9,9]", "found (1, 1)"),
        ("conv_dgrad dy=f32[1,8,9,9] w=f32[8,8,2,2]", "found (2, 2)"),
        ("conv_fprop x=f32[1,8,19,19] w=f32[8,8,7,7]", "found (7, 7)"),
        ("conv_fprop x=f32[1,8,5,9,9] w=f32[8,8,3,3,3]", "a first of three axes without filter"),
        ("conv_fprop x=f32[0,8,9,9] w=f32[8,8,3,3]", "needs elements in x"),
    ],
)
def test_refusals(line, reason):
    assert any(reason in found for found in reasons(line))


def test_a_tile_is_left_out_where_its_error_is_too_large():
    """Tiles of 4 with filters of 5 err 19 times as much as a direct sum: one term is no cover for that."""
    few, many = (Problem.parse(f"conv_fprop x=f32[1,{c},20,20] w=f32[8,{c},5,5]") for c in (1, 64))
    (engine,) = engines(few)
    assert {"tile": 4} not in engine.configs(few) and {"tile": 4} in engine.configs(many)
    assert {"tile": 2} in engine.configs(few)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_every_activation_with_and_without_z(name):
    for z in ("", " z=f32[1,20,6,7] beta=0.5"):
        line = f"conv_fprop x=f32[1,10,6,7] w=f32[20,10,3,3] bias=f32[20] padding=1 alpha=0.5 act={name}{z}"
        problem = Problem.parse(line)
        (engine,) = engines(problem)
        assert not verify(problem, engine, engine.configs(problem)[0], CPU).fault


@pytest.mark.parametrize("h, w", [*itertools.product(range(1, 6), (1, 4, 5)), (9, 2), (2, 130)])
def test_outputs_of_any_size(h, w):
    for line in (
        f"conv_fprop x=f32[2,9,{h},{w}] w=f32[18,9,3,3] padding=1",
        f"conv_dgrad dy=f32[2,9,{h},{w}]@nhwc w=f32[9,18,3,3]@nhwc dx=f32[2,18,{h + 2},{w + 2}]@nhwc",
        f"conv_wgrad x=f32[2,9,{h},{w}] dy=f32[2,18,{h},{w}] padding=1 dw=f32[18,9,3,3]",
    ):
        problem = Problem.parse(line)
        (engine,) = engines(problem)
        for config in engine.configs(problem):
            assert not verify(problem, engine, config, CPU).fault, (line, config)


@pytest.mark.parametrize(
    "line",
    [
        "conv_fprop x=f32[2,288,15,14] w=f32[200,288,3,3] bias=f32[200] padding=1 act=relu",
        "conv_fprop x=f32[1,640,6,120] w=f32[280,320,3,3] z=f32[1,280,6,120] groups=2 padding=1 beta=1 act=silu",
        "conv_dgrad dy=f32[2,300,15,14]@nhwc w=f32[300,200,3,3]@nhwc padding=1",
        "conv_wgrad x=f32[2,288,9,9] dy=f32[2,200,9,9] padding=1",
    ],
)
@pytest.mark.parametrize("processors", [1, 3, 16])
def test_many_filters_on_any_number_of_threads(line, processors):
    """Where transformed filters are not kept: chunks of tiles for all threads, a panel of filters for each."""
    problem = Problem.parse(line, Target("cpu", Target.parse("cpu").arch, processors))
    (engine,) = engines(problem)
    for config in engine.configs(problem):
        assert not verify(problem, engine, config, CPU).fault


@pytest.mark.parametrize("room", [1, 20_000, 200_000])
@pytest.mark.parametrize(
    "line",
    [
        "conv_wgrad x=f32[2,40,13,12] dy=f32[2,150,13,12] dw=f32[150,40,3,3] padding=1",
        "conv_wgrad x=f32[3,24,11,9]@nhwc dy=f32[3,99,11,9]@nhwc z=f32[99,8,3,3] dw=f32[99,8,3,3] padding=1 groups=3"
        " beta=0.5",
    ],
)
def test_the_filter_gradient_takes_filters_in_passes(line, room, monkeypatch):
    """Real layers need several passes above 24 MB of sums; here there is room for few panels or groups of filters."""
    monkeypatch.setattr(winograd_wgrad, "SUM_BYTES", room)
    monkeypatch.setattr(winograd_wgrad.nb, "worthwhile", lambda operations, limit: limit)
    problem = Problem.parse(f"{line} on=cpu")
    winograd_wgrad._plan.cache_clear()
    try:
        engine = registry.get("conv.winograd_wgrad")
        for config in engine.configs(problem):
            assert winograd_wgrad._plan(problem, config["tile"]).passes > 1 or room > 100_000
            assert not verify(problem, engine, config, CPU).fault, (line, config)
    finally:
        winograd_wgrad._plan.cache_clear()
