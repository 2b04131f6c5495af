"""``lucidnn train``: the report, the errors before any work, and an interruption that leaves nothing behind."""

from __future__ import annotations

import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time

import pytest
import torch

from lucidnn import functional
from lucidnn.cli.data import load
from lucidnn.cli.layers import layers
from lucidnn.cli.network import Network, layer_of
from lucidnn.cli.training import Images, Recipe, Trainer, dtype_of
from lucidnn.core import plan
from lucidnn.core.errors import InvalidArgument

CPU = torch.device("cpu")
LAYERS = ["conv1", "pool1", "conv2", "pool2", "linear"]


# ---- the network and its training --------------------------------------------------------------------------


def pair(**changes) -> tuple[Trainer, Trainer]:
    recipe = Recipe(CPU, **{"batch_size": 8, **changes})
    return Trainer(functional, True, recipe), Trainer(torch.nn.functional, False, recipe)


def gradients(trainer: Trainer, x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    trainer.network.zero_grad()
    trainer.loss(x, y).backward()
    return [p.grad.double() for p in trainer.network.parameters()]


@pytest.mark.parametrize(
    "dtype", ["f32", "bf16", pytest.param("f64", marks=pytest.mark.slow), pytest.param("f16", marks=pytest.mark.slow)]
)
def test_both_libraries_give_one_gradient(dtype):
    bound = {"f64": 1e-12, "f32": 1e-5, "bf16": 5e-2, "f16": 1e-2}[dtype]
    ours, theirs = pair(dtype=dtype)
    errors = []
    for _ in range(5):
        x, y = torch.randn(8, 3, 32, 32, dtype=ours.recipe.torch_dtype), torch.arange(8) % 10
        found, expected = gradients(ours, x, y), gradients(theirs, x, y)
        errors.append(max(float((a - b).norm()) / float(b.norm()) for a, b in zip(found, expected, strict=True)))
    # The median, since a network's gradient jumps: where two elements of a pooling window (or an activation and zero)
    # are equal but for their rounding, as in one draw of fifty, each library may rightly follow another of them.
    assert statistics.median(errors) <= bound, errors


@pytest.mark.parametrize("fused", [True, False])
def test_everything_but_the_loss_runs_on_lucidnn(fused):
    trainer = Trainer(functional, fused, Recipe(CPU, batch_size=4))
    with plan.observe() as seen:
        trainer.step(torch.randn(4, 3, 32, 32), torch.arange(4))
    ran = [(layer_of(one.problem), one.problem.op.name) for one in seen]
    relu = [] if fused else ["pointwise_fwd"]
    for number in ("1", "2"):
        names = [op for layer, op in ran if layer in (f"conv{number}", f"relu{number}", f"pool{number}")]
        assert sorted(names) == sorted(
            ["conv_fprop", *relu, "max_pool_fwd", "max_pool_bwd", "pointwise_bwd", "conv_wgrad", "conv_bgrad"]
            + (["conv_dgrad"] if number == "2" else [])
        )
    assert [op for layer, op in ran if layer == "linear"] == ["conv_fprop", "conv_dgrad", "conv_wgrad", "conv_bgrad"]
    assert len(ran) == 17 + 2 * (not fused)


def test_one_seed_gives_the_same_weights_and_batches_and_leaves_the_generator_alone(mnist):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    (ours, theirs), data = pair(seed=3), load(mnist)
    for p, q in zip(ours.network.parameters(), theirs.network.parameters(), strict=True):
        assert torch.equal(p, q)
    images = Images(data, ours.recipe)
    first, again, later = (list(images.batches(e)) for e in (0, 0, 1))
    assert len(first) == images.steps == 5
    assert all(torch.equal(a[0], b[0]) and torch.equal(a[1], b[1]) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0][0], later[0][0])
    assert torch.equal(torch.get_rng_state(), before)
    other = next(Images(data, Recipe(CPU, batch_size=8, seed=4)).batches(0))
    assert not torch.equal(other[0], first[0][0])


def test_the_same_training_twice_is_the_same_to_the_last_bit(mnist):
    data, found = load(mnist), []
    for _ in range(2):
        trainer = pair(epochs=2)[0]
        epochs = trainer.train(Images(data, trainer.recipe))
        found.append([epoch.loss for epoch in epochs])
    assert found[0] == found[1]


def test_loss_scaling_changes_no_update():
    plain, scaled = (pair(dtype="f64")[1] for _ in range(2))
    scaled.scale = 1024.0
    for group in scaled.optimizer.param_groups:
        group["lr"] /= 1024.0
    for seed in range(3):
        torch.manual_seed(seed)
        x, y = torch.randn(8, 3, 32, 32, dtype=torch.float64), torch.arange(8)
        plain.step(x, y)
        scaled.step(x, y)
    for p, q in zip(plain.network.parameters(), scaled.network.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-14)


def test_float16_keeps_gradients_that_would_vanish():
    trainer = pair(dtype="f16")[0]
    assert trainer.scale == 1024.0 and all(p.dtype == torch.float32 for p in trainer.network.parameters())


def test_a_batch_larger_than_the_data_is_refused(mnist):
    with pytest.raises(InvalidArgument, match="batch-size: found 41; accepted: 1 to 40"):
        Images(load(mnist), Recipe(CPU, batch_size=41))


@pytest.mark.parametrize("text", ["f32", "float32", "bf16", "bfloat16", "f16", "float64"])
def test_types_to_train_in(text):
    assert dtype_of(text) in ("f32", "bf16", "f16", "f64")


@pytest.mark.parametrize("text", ["int8", "f8e4m3", "double", ""])
def test_types_not_to_train_in(text):
    with pytest.raises(InvalidArgument, match="dtype: found .*; accepted: float32"):
        dtype_of(text)


def test_layers_times_every_plan_beside_its_peer(quick):
    trainer = pair()[0]
    rows = layers(trainer, (torch.randn(8, 3, 32, 32), torch.arange(8)), rounds=3)
    assert (
        len(rows) == 17
        and list(dict.fromkeys(row["layer"] for row in rows if row["what"].split()[0].endswith(("fprop", "fwd"))))
        == LAYERS
    )
    assert all(row["seconds"] > 0 and row["peer_seconds"] > 0 and not row["fault"] for row in rows), rows
    peers = {(row["layer"], row["what"]): row["peer"] for row in rows}
    assert peers["conv1", "conv_fprop + bias + relu"] == "F.conv2d + relu_"
    assert peers["linear", "conv_fprop + bias"] == "F.linear" and peers["linear", "conv_wgrad"] == "mm(dy.t(), x)"


# ---- accuracy ----------------------------------------------------------------------------------------------


def accuracy(seed: int) -> float:
    trainer = Trainer(functional, True, Recipe(CPU, seed=seed))
    images = Images(load(seed=seed), trainer.recipe)
    trainer.train(images)
    return trainer.accuracy(images)


def test_the_digits_are_learnt_to_97_percent():
    assert accuracy(0) >= 0.97


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_digits_are_learnt_whatever_the_seed(seed):
    assert accuracy(seed) >= 0.97


# ---- the command -------------------------------------------------------------------------------------------


def test_the_report(cli, mnist, tmp_path, quick):
    file = tmp_path / "report.json"
    words = (
        "--data",
        mnist,
        "--device",
        "cpu",
        "--epochs",
        2,
        "--batch-size",
        8,
        "--seed",
        1,
        "--lr",
        0.02,
        "--json",
        file,
    )
    answer = cli("train", *words)
    assert answer.exit_code == 0, answer.output
    report = json.loads(file.read_text())
    assert report["data"] == {"name": "MNIST", "train": 40, "test": 20}
    recipe = {"dtype": "f32", "epochs": 2, "batch_size": 8, "lr": 0.02, "seed": 1, "device": "cpu"}
    assert recipe.items() <= report["recipe"].items() and report["policy"] == "heuristic"
    assert report["environment"]["torch"] == torch.__version__
    for name in ("lucidnn", "framework"):
        assert len(report[name]["epochs"]) == 2 and 0 <= report[name]["accuracy"] <= 1
    losses = [[e["loss"] for e in report[name]["epochs"]] for name in ("lucidnn", "framework")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    assert len(report["layers"]) == 17
    (step,) = report["steps"]
    assert step["how"] == "eager" and step["ratio"] == pytest.approx(step["peer_seconds"] / step["seconds"])
    shown = answer.stdout
    for row in report["layers"]:
        assert any(
            line.startswith(row["layer"]) and row["what"] in line and row["engine"] in line and row["reason"] in line
            for line in shown.splitlines()
        ), row
    assert re.search(r"Held-out accuracy: [\d.]+% on lucidnn, [\d.]+% on framework", shown)
    assert shown.count("epoch 2/2  loss") == 2  # lines for a log, since this is no terminal
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_the_policy_reaches_the_choice(cli, mnist):
    answer = cli("train", "--data", mnist, "--device", "cpu", "--epochs", 1, "--batch-size", 8, "--policy", "error")
    assert answer.exit_code == 2 and "policy 'error' and no tuned row" in answer.stderr


def test_a_loss_that_is_no_number_ends_the_training(cli, mnist):
    answer = cli("train", "--data", mnist, "--device", "cpu", "--epochs", 9, "--batch-size", 8, "--lr", 1e9)
    assert answer.exit_code == 1 and "a smaller --lr would help" in answer.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--policy", "best"), "policy: found 'best'; accepted: heuristic, find, error"),
        (("--dtype", "int8"), "dtype: found 'int8'; accepted: float32, bfloat16, float16, float64"),
        (("--device", "gpu"), "device: found 'gpu'; accepted: auto, cpu, cuda or cuda:N"),
        (("--data", "/no/such"), "/no/such: found nothing of that name; expected a folder with CIFAR-10's"),
        (("--batch-size", "2000"), "batch-size: found 2000; accepted: 1 to 1438, the images of UCI digits"),
        (("--lr", "0"), "invalid value for '--lr'"),
        (("--seed", "-1"), "invalid value for '--seed'"),
        (("--json", "/no/such/x.json"), "json: found /no/such/x.json, in a folder that does not exist"),
    ],
)
def test_a_wrong_option_is_one_line_before_any_work(cli, words, said):
    answer = cli("train", "--device", "cpu", *words)
    assert answer.exit_code == 2 and answer.stdout == ""
    (line,) = answer.stderr.splitlines()
    assert line.startswith("lucidnn: ") and said in line


def test_no_gpu_is_one_line(cli):
    if torch.cuda.is_available():
        pytest.skip("there is one")
    answer = cli("train", "--device", "cuda")
    (line,) = answer.stderr.splitlines()
    assert answer.exit_code == 2 and line.startswith("lucidnn: device 'cuda'") and line.endswith("use device 'cpu'")


def test_a_corrupt_file_is_one_line_that_names_it(cli, mnist):
    file = mnist / "t10k-images-idx3-ubyte.gz"
    file.write_bytes(file.read_bytes()[:-20])
    answer = cli("train", "--data", mnist)
    (line,) = answer.stderr.splitlines()
    assert answer.exit_code == 2 and str(file) in line and "truncated or corrupt" in line


def test_an_interruption_is_one_line_and_leaves_nothing(mnist, tmp_path):
    file = tmp_path / "report.json"
    words = [
        "train",
        "--data",
        str(mnist),
        "--device",
        "cpu",
        "--epochs",
        "100000",
        "--batch-size",
        "8",
        "--json",
        str(file),
    ]
    started = subprocess.Popen(
        [sys.executable, "-m", "lucidnn", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    try:
        assert started.stdout is not None
        for line in started.stdout:
            if " epoch 1/" in line:
                break
        else:
            pytest.fail(started.communicate()[1])
        time.sleep(0.05)
        started.send_signal(signal.SIGINT)
        _, said = started.communicate(timeout=60)
    finally:
        started.kill()
    assert started.returncode == 130
    assert said.splitlines() == ["lucidnn: interrupted; nothing was left half-written"]
    assert [path.name for path in tmp_path.iterdir()] == ["mnist"]


def test_the_network_is_an_ordinary_module():
    network = Network(functional, fused=True)
    assert [name for name, _ in network.named_parameters()] == [
        f"{layer}.{part}" for layer in ("conv1", "conv2", "linear") for part in ("weight", "bias")
    ]
    copy = Network(torch.nn.functional)
    copy.load_state_dict(network.state_dict())
    x = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(network(x), copy(x), rtol=1e-4, atol=1e-5)
