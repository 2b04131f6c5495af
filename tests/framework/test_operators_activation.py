"""Activations of the framework's operator database under lucidnn, in place, and in any memory order."""

from __future__ import annotations

import pytest
import torch
from operator_database import Case, check, parameters

import lucidnn.torch

FALLS = ("floating-point type", "scale", "hardtanh from", "softplus with", "axes")
CASES = {
    "nn.functional.relu": Case(("relu", "threshold_backward"), FALLS),
    "nn.functional.relu6": Case(("hardtanh", "hardtanh_backward"), FALLS),
    "nn.functional.leaky_relu": Case(("leaky_relu", "leaky_relu_backward"), FALLS),
    "nn.functional.elu": Case(("elu", "elu_backward"), FALLS),
    "nn.functional.celu": Case((), FALLS),
    "nn.functional.selu": Case((), FALLS),
    "nn.functional.hardtanh": Case((), FALLS),
    "nn.functional.silu": Case(("silu", "silu_backward"), FALLS),
    "nn.functional.gelu": Case(("gelu", "gelu_backward"), FALLS),
    "nn.functional.softplus": Case((), FALLS),
    "nn.functional.hardswish": Case(("hardswish", "hardswish_backward"), FALLS),
    # natively multiplied by a sixth that is rounded to float32
    "nn.functional.hardsigmoid": Case(("hardsigmoid", "hardsigmoid_backward"), FALLS, double=1e-7),
    "nn.functional.mish": Case(("mish", "mish_backward"), FALLS),
    "sigmoid": Case(("sigmoid", "sigmoid_backward"), FALLS),
    "tanh": Case(("tanh", "tanh_backward"), FALLS),
}


@parameters(CASES)
def test_as_native(name, dtype, whole):
    check(name, dtype, whole, CASES[name])


ORDERS = {
    "channels last": lambda t: t.to(memory_format=torch.channels_last),
    "transposed": lambda t: t.transpose(1, 3),
    "sliced": lambda t: t[:, ::2, 1:, :-1],
    "expanded": lambda t: t[:1].expand(3, -1, -1, -1),
    "sliced and transposed": lambda t: t.permute(3, 0, 2, 1)[1:, :, ::2],
}


@pytest.mark.parametrize("order", ORDERS)
def test_strides_are_the_frameworks(order):
    base = torch.randn(4, 6, 5, 8)
    x = ORDERS[order](base)
    grads = [ORDERS[order](torch.randn(4, 6, 5, 8)), torch.randn(x.shape), torch.ones(()).expand(x.shape)]
    silu, backward = torch.ops.aten.silu, torch.ops.aten.silu_backward
    native = [silu(x), *(backward(g, x) for g in grads)]
    lucidnn.torch.reset_calls()
    with lucidnn.torch.enable():
        found = [silu(x), *(backward(g, x) for g in grads)]
    assert not any(calls["fallen"] for calls in lucidnn.torch.calls().values())
    for a, b in zip(native, found, strict=True):
        assert a.stride() == b.stride()
        torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-6)


IN_PLACE = {
    "contiguous": lambda: torch.randn(3, 4, 5),
    "channels last": lambda: torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
    "sliced": lambda: torch.randn(4, 6)[:, ::2],
}


@pytest.mark.parametrize("layout", IN_PLACE)
@pytest.mark.parametrize("name", ["relu_", "silu_", "hardswish_", "hardtanh_", "leaky_relu_", "sigmoid_", "elu_"])
def test_in_place(name, layout):
    operator, extra = getattr(torch.ops.aten, name), (0.0, 6.0) if name == "hardtanh_" else ()
    found = IN_PLACE[layout]()
    native, version = found.clone(), found._version
    operator(native, *extra)
    with lucidnn.torch.enable():
        assert operator(found, *extra) is found and found._version == version + 1
    torch.testing.assert_close(found, native, rtol=1e-5, atol=1e-6)


def test_the_gradient_of_an_activation_in_place():
    gradients = []
    for on in (False, True):
        torch.manual_seed(0)
        x = torch.randn(2, 3, 4, 4, requires_grad=True)
        with lucidnn.torch.enable() if on else torch.enable_grad():
            y = torch.nn.functional.relu(x * 2, inplace=True)
            y = torch.nn.functional.elu(torch.nn.functional.hardswish(y * 3 - 1, inplace=True) - 1, inplace=True)
            y.square().sum().backward()
        gradients.append(x.grad)
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-4)
