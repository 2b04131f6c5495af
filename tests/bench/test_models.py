"""The list of real models' convolutions: every line parses, and nothing on it is left to the reference engine."""

from __future__ import annotations

import pytest
from benchmarks import suite_models

from lucidnn.core import registry
from lucidnn.core.target import Target
from lucidnn.testing import read_problems

LINES = read_problems(suite_models.FILE, Target.parse("cpu"))
KINDS = [("cpu", "f32", "first"), ("cuda:sm_90", "bf16", "last"), ("cuda:sm_90", "f32", "first")]


def test_lines_are_forward_problems_and_unique():
    assert len(LINES) > 450 and {line.op.name for line in LINES} == {"conv_fprop"}
    assert len({str(line) for line in LINES}) == len(LINES)


@pytest.mark.parametrize("direction", suite_models.DIRECTIONS)
@pytest.mark.parametrize("target, dtype, layout", KINDS)
def test_an_engine_that_is_no_reference_takes_every_line(target, dtype, layout, direction):
    found = Target.parse(target)
    engines = [e for e in registry.engines().values() if found.kind in e.targets and "reference" not in e.notes]
    for line in LINES:
        problem = suite_models.derive(line, direction, found, dtype, layout)
        takers = (e for e in engines if problem.op.name in e.operations and not e.reasons(problem))
        assert next(takers, None), f"nothing but the reference takes {problem}"


@pytest.mark.parametrize("direction", suite_models.DIRECTIONS)
def test_the_cut_batch_is_the_largest_within_the_limit(direction):
    target = Target.parse("cpu:avx512:2")
    for line in LINES[:40]:
        images = [
            suite_models.cut(line, direction, target, "f32", "first", seconds).items[0][1].shape[0]
            for seconds in (1e-9, 0.03, 1e9)
        ]
        assert images[0] == 1 and images == sorted(images) and images[2] == line["x"].shape[0]


def test_one_line_from_problem_to_summary(tmp_path):
    import torch
    from benchmarks.context import Context

    file = tmp_path / "lines.txt"
    file.write_text("conv_fprop x=f32[4,3,9,9] w=f32[8,3,3,3] stride=2\nconv_fprop x=f32[4,3,9] w=f32[8,3,3]\n")
    rows = list(suite_models.results(Context(torch.device("cpu"), ["heuristic"], [file], True, (1, 1), 0.001)))
    assert [row["fault"] for row in rows[:3]] == [""] * 3
    measured = [row for row in rows if row["seconds"]]
    assert [row["name"].split()[0] for row in measured] == ["conv_fprop", "conv_dgrad", "conv_wgrad"]
    assert all(row["ratio"] > 0 and not row["fault"] and row["class"] == "few channels strided" for row in measured)
    assert [row["name"] for row in rows[3:]] == [
        f"{direction}: {name} 1" + (", 1 below 0.7" if measured[i]["ratio"] < 0.7 else "")
        for i, direction in enumerate(suite_models.DIRECTIONS)
        for name in ("all", "few channels strided")
    ]
