"""``lucidnn verify --accuracy``: every engine and the framework on four kinds of inputs."""

from __future__ import annotations

import json

import torch
from click.testing import CliRunner

from lucidnn import testing
from lucidnn.cli.main import commands
from lucidnn.core.problem import Problem

LINE = "conv_fprop x=f32[1,4,9,9] w=f32[8,4,3,3] padding=1"


def ask(*args: str):
    answer = CliRunner().invoke(commands, ["verify", "--accuracy", *args], prog_name="lucidnn")
    assert answer.exit_code == 0, answer.output
    return answer.output


def test_a_row_for_each_engine_and_the_framework(tmp_path):
    path = tmp_path / "rows.json"
    output = ask(LINE, "--json", str(path))
    rows = json.loads(path.read_text())["rows"]
    assert rows[0]["engine"] == "" and rows[0]["name"] == "F.conv2d"
    assert {"conv.direct", "conv.im2col_gemm", "conv.winograd", "conv.reference"} <= {row["engine"] for row in rows}
    for row in rows:
        assert row["name"] in output and not row["fault"]
        assert set(row["errors"]) == set(testing.KINDS)
        assert all(0 <= row["errors"][kind] <= row["bound"] for kind in testing.KINDS)
        if row["error_class"] == "rounded sums of products":
            assert not any(row["strangers"].values()), "a NaN reaches what it meets and nothing else"
    winograd = next(row for row in rows if row["engine"] == "conv.winograd")
    assert winograd["error_class"] == "transforms tiles" and winograd["strangers"]["NaN and inf"] > 0
    assert "elsewhere" in output


def test_one_engine_and_what_the_framework_cannot(tmp_path):
    path = tmp_path / "rows.json"
    ask("conv_fprop x=i8[1,4,5,5] w=i8[8,4,3,3]", "--engine", "conv.rewritten", "--json", str(path))
    first, second = json.loads(path.read_text())["rows"]
    assert first["fault"] and second["engine"] == "conv.rewritten"
    assert second["errors"] == {"plain": 0.0}, "whole numbers come in one kind, and their sums are exact"


def test_the_kinds_are_what_they_say():
    p = Problem.parse("conv_fprop x=f64[1,8,40,40] w=f64[8,8,3,3]")
    values = {}
    for kind in testing.KINDS:
        inputs = {role: testing.empty(p[role], "cpu") for role in p.inputs}
        testing.fill(p, inputs, 1, kind)
        values[kind] = inputs["x"]
        assert torch.isfinite(inputs["w"]).all()
    assert abs(float(values["large mean"].mean()) - 16) < 0.1
    sizes = values["wide range"].abs()
    assert float(sizes.max()) > 500 and float(sizes.min()) < 1e-4
    assert int((~torch.isfinite(values["NaN and inf"])).sum()) == 3


def test_an_engine_built_on_another_has_its_errors(tmp_path):
    path = tmp_path / "rows.json"
    line = "conv_fprop x=f32[1,16,12,12] w=f32[16,16,3,3] padding=1 padding_mode=circular"
    ask(line, "--engine", "conv.rewritten", "--configs", "--json", str(path))
    rows = [row for row in json.loads(path.read_text())["rows"] if row["engine"]]
    classes = {row["name"].partition("engine=")[2].split()[0].strip(","): row["error_class"] for row in rows}
    assert classes["conv.winograd"] == "transforms tiles" and classes["conv.direct"] == "rounded sums of products"
