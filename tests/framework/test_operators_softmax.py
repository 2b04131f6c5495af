"""Softmax, cross-entropy and dropout under lucidnn: the framework's operator database, and what it cannot compare."""

from __future__ import annotations

import pytest
import torch
from operator_database import Case, check, parameters

import lucidnn.torch

FALLS = ("without axes", "floating-point type", "several", "classes' weights", "conversion", "torch.int64")
CASES = {
    "softmax": Case(("_softmax", "_softmax_backward_data"), FALLS),
    "softmax.with_dtype": Case(("_softmax",), FALLS),
    "log_softmax": Case(("_log_softmax", "_log_softmax_backward_data"), FALLS),
    "_softmax_backward_data": Case(("_softmax_backward_data",), FALLS),
    "nn.functional.softmin": Case(("_softmax",), FALLS),
    "nn.functional.cross_entropy": Case(("cross_entropy_loss",), FALLS, samples=12),
    "nn.functional.nll_loss": Case((), FALLS),
    "masked.softmax": Case(("_softmax",), FALLS),
    "masked.log_softmax": Case(("_log_softmax",), FALLS),
}


@parameters(CASES)
def test_as_native(name, dtype, whole):
    check(name, dtype, whole, CASES[name])


def _taken(name):
    return lucidnn.torch.calls().get(name, {"taken": 0})["taken"]


@pytest.fixture
def enabled():
    lucidnn.torch.reset_calls()
    with lucidnn.torch.enable():
        yield


def test_dropout_follows_the_frameworks_seed(enabled):
    x = torch.ones(100, 100, requires_grad=True)
    torch.manual_seed(3)
    y = torch.nn.functional.dropout(x, 0.25)
    z = torch.nn.functional.dropout(x, 0.25)
    torch.manual_seed(3)
    assert torch.equal(torch.nn.functional.dropout(x, 0.25), y) and not torch.equal(y, z)
    assert 0.2 < (y == 0).float().mean() < 0.3 and torch.allclose(y.unique(), torch.tensor([0.0, 1 / 0.75]))
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(gradient, y.detach()) and _taken("dropout") == 3


def test_dropout_at_its_ends(enabled):
    x = torch.randn(4, 5)
    assert torch.nn.Dropout(0.5).eval()(x) is x or torch.equal(torch.nn.Dropout(0.5).eval()(x), x)
    assert torch.equal(torch.nn.functional.dropout(x, 0.0), x)
    assert not torch.nn.functional.dropout(x, 1.0).any()
    with pytest.raises(ValueError, match="probability"):
        torch.nn.functional.dropout(x, 1.5)


def test_dropout_in_a_checkpoint_draws_the_same_bits_again(enabled):
    from torch.utils.checkpoint import checkpoint

    x = torch.ones(50, 50, requires_grad=True)
    seen = []

    def net(x):
        y = torch.nn.functional.dropout(x * 1, 0.5)
        seen.append(y.detach().clone())
        return y.square()

    checkpoint(net, x, use_reentrant=False).sum().backward()
    assert len(seen) == 2 and torch.equal(*seen) and torch.equal(x.grad != 0, seen[0] != 0)


def test_the_parts_of_a_composite_are_seen_by_a_trace(enabled):
    from torch.fx.experimental.proxy_tensor import make_fx

    x, target = torch.randn(3, 4), torch.tensor([0, 1, 3])
    graph = make_fx(lambda x: torch.nn.functional.cross_entropy(x, target))(x)
    names = {str(node.target) for node in graph.graph.nodes}
    assert any("_log_softmax" in name for name in names) and not any("lucidnn" in name for name in names)
    torch.testing.assert_close(graph(x), torch.nn.functional.cross_entropy(x, target))
