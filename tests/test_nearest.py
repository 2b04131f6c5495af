"""An engine asked for by name that cannot take a problem says all its reasons and the nearest problem that it takes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lucidnn import functional as F
from lucidnn.core import registry
from lucidnn.core.errors import NotSupported
from lucidnn.core.problem import Problem
from lucidnn.core.target import Target
from lucidnn.nearest import hint, nearest
from lucidnn.testing import read_problems

FILES = sorted((Path(__file__).parents[1] / "problems").glob("edge*.txt"))


@pytest.mark.parametrize("on", ["cpu", "cuda:sm_90"])
def test_every_engine_has_one_to_name(on):
    """Of a sample of all lines: what is named is taken, and hardly any engine is left without."""
    problems = [p for f in FILES for p in read_problems(f, Target.parse(on)) if p.op.name.startswith("conv_")][::37]
    asked, without = 0, []
    for problem in problems:
        for engine in registry.for_operation(problem.op.name):
            if problem.target.kind in engine.targets and engine.reasons(problem):
                found = nearest(problem, engine)
                asked += 1
                if found is None:
                    without.append((engine.name, problem.text))
                else:
                    assert not engine.reasons(found) and found.op.name == problem.op.name and found != problem
    assert asked > 50 and len(without) <= asked // 20, without


def test_the_error_names_it():
    x, w = torch.zeros(1, 3, 5, 5), torch.zeros(4, 3, 1, 1)
    with pytest.raises(NotSupported) as caught:
        F.conv2d(x, w, stride=2, activation="relu", engine="conv.pointwise_gemm")
    first, *reasons = str(caught.value).splitlines()
    text = first.partition("; the nearest that it takes: ")[2]
    assert not registry.get("conv.pointwise_gemm").reasons(Problem.parse(text)) and len(reasons) == 2
    assert all(reason.startswith("  conv.pointwise_gemm: needs ") for reason in reasons)


def test_nothing_is_named_for_other_hardware():
    problem = Problem.parse("conv_fprop x=f32[1,3,5,5] w=f32[4,3,3,3] on=cuda:sm_90")
    assert hint(problem, registry.get("conv.direct")) == ""


def test_the_search_ends():
    engine = registry.get("conv.depthwise_triton")
    problem = Problem.parse("conv_bgrad dy=f32[2,3] on=cuda:sm_90")
    never = type("Never", (type(engine),), {"refusals": lambda self, p: ["needs more, found less"]})()
    assert nearest(problem, never) is None and hint(problem, never) == ""
