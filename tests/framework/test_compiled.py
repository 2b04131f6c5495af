"""``torch.compile`` over overridden operators: whole graphs, batches of any size, no break that there was not."""

from __future__ import annotations

import pytest
import torch

import lucidnn.torch


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.BatchNorm2d(8)
        self.last = torch.nn.Linear(8, 4)

    def forward(self, x):
        x = torch.nn.functional.max_pool2d(torch.relu(self.norm(self.conv(x))), 2)
        return torch.nn.functional.log_softmax(self.last(x.mean((2, 3))), 1)


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    lucidnn.torch.reset_calls()
    yield
    torch._dynamo.reset()


def _step(call, net, x):
    net.zero_grad()
    y = call(x)
    y.square().sum().backward()
    return [y.detach(), *(p.grad.clone() for p in net.parameters())]


def _same(found, native):
    for a, b in zip(found, native, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_training_step_in_one_graph(backend):
    torch.manual_seed(0)
    net = Net()
    batches = [torch.randn(n, 3, 8, 8) for n in (2, 3, 5)]
    native = [_step(net, net, x) for x in batches]
    with lucidnn.torch.enable():
        call = torch.compile(net, backend=backend, fullgraph=True, dynamic=True)
        for x, expected in zip(batches, native, strict=True):
            _same(_step(call, net, x), expected)
    seen = lucidnn.torch.calls()
    assert seen["convolution"]["taken"] >= 3 and seen["convolution_backward"]["taken"] >= 3


def test_no_more_graph_breaks_than_natively():
    net, x = Net().eval(), torch.randn(2, 3, 8, 8)
    counts = []
    for context in (torch.no_grad, lucidnn.torch.enable):
        torch._dynamo.reset()
        with context():
            counts.append(torch._dynamo.explain(net)(x).graph_break_count)
    assert counts[0] == counts[1] == 0
