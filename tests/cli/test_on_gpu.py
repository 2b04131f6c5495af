"""The command line on a GPU: graph replays and eager calls, every type to train in, whole steps under capture."""

from __future__ import annotations

import json

import pytest
import torch

from lucidnn import functional
from lucidnn.cli.data import load
from lucidnn.cli.layers import steps
from lucidnn.cli.training import Images, Recipe, Trainer
from lucidnn.core import settings

pytestmark = pytest.mark.gpu
CONV = "conv_fprop x=bf16[4,32,14,14]@nhwc w=bf16[64,32,3,3]@nhwc padding=1"


@pytest.mark.parametrize("graph", [True, False])
def test_bench(cli, tmp_path, quick, graph):
    file = tmp_path / "out.json"
    answer = cli("bench", CONV, "--device", "cuda", "--json", file, "--graph" if graph else "--no-graph")
    assert answer.exit_code == 0, answer.output
    report = json.loads(file.read_text())
    assert report["environments"]["cuda"]["driver"] and report["environments"]["cuda"]["cudnn"]
    for row in report["rows"]:
        assert row["graph"] is graph and row["ratio"] > 0 and row["error"]["y"] < 1e-2 and row["peer_error"]["y"] < 1e-2
        assert "on=cuda:sm_" in row["problem"] or "on=hip:" in row["problem"]


def test_verify_and_find(cli):
    assert cli("verify", CONV, "--device", "cuda", "--configs").exit_code == 0
    assert cli("find", CONV, "--device", "cuda").exit_code == 0
    assert "fastest of the user's timings" in cli("explain", CONV).output  # without on= it is for the GPU


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_train(cli, mnist, tmp_path, quick, dtype):
    file = tmp_path / "out.json"
    words = ("--data", mnist, "--device", "cuda", "--epochs", 1, "--batch-size", 8, "--dtype", dtype, "--json", file)
    answer = cli("train", *words)
    assert answer.exit_code == 0, answer.output
    report = json.loads(file.read_text())
    assert report["recipe"]["layout"] == ("channels-last" if dtype in ("bfloat16", "float16") else "channels-first")
    assert [step["how"] for step in report["steps"]] == ["eager", "graph replay"]
    assert len(report["layers"]) == 17 and not any(row["fault"] or row["peer_fault"] for row in report["layers"])
    losses = [report[name]["epochs"][0]["loss"] for name in ("lucidnn", "framework")]
    assert losses[0] == pytest.approx(losses[1], rel=2e-2)


def test_a_replayed_step_trains_as_an_eager_one_does(mnist):
    """The same batch again and again must bring the loss down, under capture as well."""
    recipe = Recipe(torch.device("cuda"), batch_size=8)
    with settings.using(deterministic=True):
        trainer = Trainer(functional, True, recipe)
        batch = next(Images(load(mnist), recipe).batches(0))
        for _ in range(3):
            trainer.step(*batch)
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            loss = trainer.step(*batch)
        graph.replay()
        first = float(loss)
        for _ in range(30):
            graph.replay()
        assert float(loss) < 0.5 * first


def test_steps_of_both_networks_are_timed_eagerly_and_replayed(mnist, quick):
    recipe = Recipe(torch.device("cuda"), dtype="bf16", batch_size=8)
    images = Images(load(mnist), recipe)
    rows = steps(Trainer(functional, True, recipe), Trainer(torch.nn.functional, False, recipe), images, rounds=3)
    assert [row["how"] for row in rows] == ["eager", "graph replay"]
    assert all(row["seconds"] > 0 and row["peer_seconds"] > 0 for row in rows)
