"""Average and adaptive pooling engines: what the lists of problems cannot show (NaN, ties, wrong indices, threads)."""

from __future__ import annotations

import math

import pytest
import torch

from lucidnn.core import registry
from lucidnn.core.problem import Problem
from lucidnn.testing import reference, run_guarded

CPU = torch.device("cpu")


def takers(problem: Problem) -> list:
    """The CPU engines that take a problem, without the reference."""
    found = [e for e in registry.for_operation(problem.op.name) if "cpu" in e.targets and not e.reasons(problem)]
    return [e for e in found if "reference" not in e.notes]


def agree(problem: Problem, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Every engine's outputs are the reference's, NaN in its places; gives these."""
    expected = reference(problem, inputs, CPU)
    assert takers(problem)
    for engine in takers(problem):
        config = engine.configs(problem)[0]
        call, size = engine.build(problem, config), engine.workspace_size(problem, config)
        found, fault = run_guarded(problem, call, size, inputs, CPU)
        assert not fault, f"{engine.name}: {fault}"
        for role, t in found.items():
            wanted = expected[role].to(t.dtype)
            torch.testing.assert_close(t, wanted, rtol=1e-5, atol=1e-6, equal_nan=True, msg=f"{engine.name} {role}")
    return expected


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("text", ["window=3 stride=2 padding=1", "window=3 stride=1", "window=2", "window=7,20"])
def test_a_nan_or_infinity_reaches_its_windows_only(text, layout):
    problem = Problem.parse(f"avg_pool_fwd x=f32[2,20,7,20]@{layout} {text}")
    generator = torch.Generator().manual_seed(1)
    x = torch.empty_strided(problem["x"].shape, problem["x"].strides).normal_(generator=generator)
    x[0, 3, 2, 5], x[1, 17, 5, 19], x[1, 0, 0, 0] = math.nan, math.inf, -math.inf
    y = agree(problem, {"x": x})["y"]
    assert y[0, 4].isfinite().all() and y[0, 3].isnan().any() and y[1, 17].isinf().any()


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("size", ["1", "3,4", "7,10"])
def test_first_of_equals_and_nan_as_the_largest(size, layout):
    problem = Problem.parse(f"adaptive_max_pool_fwd x=f32[4,20,7,20]@{layout} output_size={size}")
    generator = torch.Generator().manual_seed(2)
    values = torch.tensor([-2.0, 0.0, 1.0, math.nan, math.inf, -math.inf, -math.inf, -math.inf])
    chosen = values[torch.randint(0, 8, problem["x"].shape, generator=generator)]
    chosen[0] = -math.inf
    chosen[1] = chosen[1].nan_to_num(0.0)
    x = torch.empty_strided(problem["x"].shape, problem["x"].strides).copy_(chosen)
    agree(problem, {"x": x})


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_wrong_indices_are_dropped(layout):
    problem = Problem.parse(f"adaptive_max_pool_bwd dy=f32[2,5,3,3] index=i64[2,5,3,3] dx=f32[2,5,7,8]@{layout}")
    index = torch.randint(-70, 130, (2, 5, 3, 3), generator=torch.Generator().manual_seed(3))
    dx = agree(problem, {"dy": torch.ones(2, 5, 3, 3), "index": index})["dx"]
    assert 0 < dx.sum() < index.numel()
    for kind in ("i64", "i32"):
        problem = Problem.parse(f"max_unpool_fwd x=f32[2,5,3,3] index={kind}[2,5,3,3] output_size=7,8")
        types = {"i64": torch.int64, "i32": torch.int32}
        agree(problem, {"x": torch.randn(2, 5, 3, 3), "index": index.to(types[kind])})
        problem = Problem.parse(f"max_unpool_bwd dy=f32[2,5,7,8]@{layout} index={kind}[2,5,3,3]")
        dy = torch.empty_strided(problem["dy"].shape, problem["dy"].strides).normal_()
        agree(problem, {"dy": dy, "index": index.to(types[kind])})


def test_means_of_ones_are_ones():
    for window in (3, 7, 41):
        for layout in ("nchw", "nhwc"):
            problem = Problem.parse(f"avg_pool_fwd x=f32[1,3,41,41]@{layout} window={window} stride=2")
            x = torch.empty_strided(problem["x"].shape, problem["x"].strides).fill_(1.0)
            for engine in takers(problem):
                config = engine.configs(problem)[0]
                size = engine.workspace_size(problem, config)
                y = run_guarded(problem, engine.build(problem, config), size, {"x": x}, CPU)[0]["y"]
                assert bool((y == 1).all()), engine.name


def test_sizes_of_all_axes_that_divide_are_max_pooling():
    problem = Problem.parse("adaptive_max_pool_fwd x=f32[2,3,8,9] output_size=4,3")
    (even,) = (e for e in takers(problem) if e.name == "pool.adaptive_max_even")
    assert str(even.inner(problem)).startswith("max_pool_fwd") and even.inner(problem).op.window == (2, 3)
    uneven = Problem.parse("adaptive_max_pool_fwd x=f32[2,3,8,9] output_size=4,4")
    assert "that those of y divide" in even.reasons(uneven)[0]
