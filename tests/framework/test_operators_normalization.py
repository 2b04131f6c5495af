"""Normalizations of the framework's operator database under lucidnn."""

from __future__ import annotations

import pytest
import torch
from operator_database import Case, check, check_errors, parameters

import lucidnn.torch

BATCH, BOTH = ("native_batch_norm",), ("native_batch_norm", "native_batch_norm_backward")
FALLS = ("epsilon: found -", "momentum: found -")  # the framework takes what no one can mean
CASES = {
    "nn.functional.batch_norm": Case(BOTH, FALLS),
    "nn.functional.instance_norm": Case(BOTH, FALLS),
    "native_batch_norm": Case(BATCH, FALLS),
    "_native_batch_norm_legit": Case(
        ("_native_batch_norm_legit", "_native_batch_norm_legit.no_stats"), FALLS, samples=16
    ),
    "_batch_norm_with_update": Case(("_batch_norm_with_update",), FALLS),
    "native_layer_norm": Case(("native_layer_norm", "native_layer_norm_backward"), FALLS),
    "nn.functional.layer_norm": Case(("native_layer_norm", "native_layer_norm_backward"), FALLS),
    "native_group_norm": Case(("native_group_norm",), FALLS),
    "nn.functional.group_norm": Case(("native_group_norm", "native_group_norm_backward"), FALLS),
    "nn.functional.rms_norm": Case(("rms_norm",), FALLS),
}


@parameters(CASES)
def test_as_native(name, dtype, whole):
    check(name, dtype, whole, CASES[name])


@pytest.mark.parametrize("name", ["native_layer_norm", "nn.functional.group_norm", "nn.functional.rms_norm"])
def test_errors(name):
    check_errors(name)


@pytest.mark.parametrize("training", [True, False])
def test_running_statistics_move_as_natively(training):
    x = torch.randn(4, 3, 5, 5)
    states = []
    for on in (False, True):
        torch.manual_seed(0)
        layer = torch.nn.BatchNorm2d(3, momentum=None).train(training)
        with lucidnn.torch.enable("native_batch_norm") if on else torch.no_grad():
            for _ in range(3):
                layer(x)
        states.append(layer.state_dict())
    for name, value in states[0].items():
        torch.testing.assert_close(states[1][name], value)
