"""Whole models: outputs and gradients on lucidnn as natively, nothing that lucidnn does fell through; fused, too.

Natively a model runs in float32 and in float64. On lucidnn it has to be as near to float64 as the framework's float32
is, within a factor: models with few points under their normalizations spread an error by themselves.
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import pytest
import torch

import lucidnn.torch

sys.path.insert(0, str(Path(__file__).parents[2]))
from examples import training_curve
from examples.models import MODELS, example

FACTOR = 4.0
QUICK = ("resnet18", "convnext_t", "wav2vec", "dcgan_generator")  # the longer profile has the others, too
EACH = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in MODELS]
FUSED = ("resnet18", "dcgan_generator")
WITH_NORM = [
    name if name in FUSED else pytest.param(name, marks=pytest.mark.slow)
    for name in MODELS
    if name not in ("convnext_t", "video_vae", "wav2vec")
]


def run(model, x):
    """Outputs and gradients by name."""
    x = x.clone().requires_grad_()
    found = model(x)
    found = found if isinstance(found, tuple) else (found,)
    torch.manual_seed(7)  # the same weights of the outputs each time
    loss = sum((y * torch.randn(y.shape, dtype=torch.float64).to(y.dtype)).sum() for y in found)
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {**{f"output {at}": y.detach() for at, y in enumerate(found)}, "input": x.grad, **gradients}


def distances(found, exact):
    """Each tensor's error as a part of its norm, or of a small part of the largest gradient's where it is near 0."""
    floor = 1e-4 * max(float(value.norm()) for value in exact.values())
    return {name: float((found[name].double() - exact[name]).norm() / max(exact[name].norm(), floor)) for name in exact}


def judge(found, native, exact):
    """No tensor is further from float64 than the framework's float32 is anywhere, times a factor."""
    assert set(found) == set(native) == set(exact)
    noise = max(distances(native, exact).values())
    assert noise < 1e-2, "the test tells nothing"
    worst = max(distances(found, exact).items(), key=lambda item: item[1])
    assert worst[1] <= FACTOR * max(noise, 1e-6), worst


@pytest.mark.parametrize("name", EACH)
def test_a_model_is_as_natively(name):
    model, x = example(name)
    native, exact = run(copy.deepcopy(model), x), run(copy.deepcopy(model).double(), x.double())
    lucidnn.torch.reset_calls()
    with lucidnn.torch.enable():
        found = run(model, x)
    judge(found, native, exact)
    calls = lucidnn.torch.calls()
    assert calls and not {n: c["fallen"] for n, c in calls.items() if c["fallen"]}


@pytest.mark.parametrize("name", WITH_NORM)
def test_a_fused_model_is_as_natively(name):
    model, x = example(name)
    native, exact = run(copy.deepcopy(model), x), run(copy.deepcopy(model).double(), x.double())
    fused = lucidnn.torch.fuse(copy.deepcopy(model))
    judge(run(fused, x), native, exact)
    model.load_state_dict(fused.state_dict())  # statistics that have moved
    model.eval()
    fused = lucidnn.torch.fuse(model)
    kinds = {entry["kind"] for entry in fused.fusion.left}
    assert not kinds & {"BatchNorm2d"} and not any("BatchNorm" in type(m).__name__ for m in fused.modules())
    with torch.no_grad():
        judge({"y": fused(x)}, {"y": model(x)}, {"y": copy.deepcopy(model).double()(x.double())})


def test_a_training_run_lies_on_the_native_one():
    native, ours = (training_curve.losses(on, steps=10, width=8) for on in (False, True))
    assert max(abs(a - b) for a, b in zip(native, ours, strict=True)) < 1e-3 and ours[-1] < ours[0]
