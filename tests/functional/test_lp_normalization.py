"""Normalization by an L_p norm and weight normalization against the framework: values, strides, gradients, errors."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as T

from lucidnn import functional as F
from lucidnn.core.errors import InvalidArgument

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def agree(ours, theirs, inputs, bound):
    """Values, strides and the gradients of all inputs."""
    a, b = ([t.detach().clone().requires_grad_() for t in inputs] for _ in "ab")
    y, expected = ours(*a), theirs(*b)
    torch.testing.assert_close(y, expected, rtol=bound, atol=bound)
    assert y.stride() == inputs[0].stride()
    g = torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(y)
    found, wanted = torch.autograd.grad(y, a, g), torch.autograd.grad(expected, b, g)
    for f, w in zip(found, wanted, strict=True):
        torch.testing.assert_close(f, w, rtol=4 * bound, atol=4 * bound)


@pytest.mark.parametrize("device", DEVICES)
def test_normalize(device):
    generator = torch.Generator().manual_seed(1)
    for shape, dim in (((5, 37), 1), ((3, 4, 70), 1), ((2, 3, 4, 5), (-1, 0)), ((40,), 0), ((), 0)):
        x = torch.randn(shape, generator=generator).to(device)
        x = x.to(memory_format=torch.channels_last) if x.ndim == 4 else x
        for p in (1.0, 1.5, 2.0, math.inf) if shape == (5, 37) else (2.0,):
            agree(partial(F.normalize, p=p, dim=dim), partial(T.normalize, p=p, dim=dim), [x], 2e-6)
    x = torch.randn(3, 100, generator=generator).to(device, torch.bfloat16)
    agree(F.normalize, lambda v: T.normalize(v.float()).to(v.dtype), [x], 1e-2)


@pytest.mark.parametrize("device", DEVICES)
def test_weight_norm(device):
    generator = torch.Generator().manual_seed(3)
    for shape, dim, g_shape in (
        ((7, 5, 3, 3), 0, (7, 1, 1, 1)), ((5, 70), 1, (1, 70)), ((6, 8), None, ()), ((9,), 0, (9,)),
    ):  # fmt: skip
        v, g = (torch.randn(s, generator=generator).to(device) for s in (shape, g_shape))
        theirs = lambda v, g: torch._weight_norm(v, g, -1 if dim is None else dim)  # noqa: B023, E731
        agree(lambda v, g: F.weight_norm(v, g, dim), theirs, [v, g], 4e-6)  # noqa: B023


def test_short_norms_and_strange_numbers():
    x = torch.tensor([[3.0, 4.0], [0.0, 0.0], [3e-13, 4e-13], [math.nan, 1.0], [math.inf, 1.0]])
    for p in (2.0, math.inf):
        torch.testing.assert_close(F.normalize(x, p), T.normalize(x, p), equal_nan=True)
    a, b = x[:2].clone().requires_grad_(), x[:2].clone().requires_grad_()
    F.normalize(a).sum().backward()
    T.normalize(b).sum().backward()
    torch.testing.assert_close(a.grad, b.grad)
    assert F.normalize(torch.empty(2, 0)).shape == (2, 0)
    ties = torch.tensor([[2.0, -2.0, 1.0]], requires_grad=True)
    found = torch.autograd.grad(F.normalize(ties, math.inf), ties, torch.tensor([[1.0, 2.0, 3.0]]))[0]
    wanted = torch.autograd.grad(T.normalize(ties, math.inf), ties, torch.tensor([[1.0, 2.0, 3.0]]))[0]
    torch.testing.assert_close(found, wanted)


def test_derivatives():
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    g = torch.randn(3, 1, dtype=torch.float64, requires_grad=True)
    for function, given in ((lambda v: F.normalize(v, 3.0), (x,)), (F.weight_norm, (x, g))):
        assert torch.autograd.gradcheck(function, given) and torch.autograd.gradgradcheck(function, given)


def test_operators_and_compilation():
    x, g = torch.randn(4, 20, requires_grad=True), torch.randn(4, 1, requires_grad=True)
    plain, attributes = x.detach(), ([1], 2.0, 0.0)
    norm = plain.norm(dim=1, keepdim=True)
    torch.library.opcheck(torch.ops.lucidnn.lp_normalize_fwd, (x, g, *attributes))
    torch.library.opcheck(
        torch.ops.lucidnn.lp_normalize_bwd, (plain, plain, norm, g.detach(), *attributes, [True, True])
    )

    def step(v, g):
        return F.weight_norm(F.normalize(v), g)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    weights = torch.randn(4, 20)
    expected = torch.autograd.grad(step(x, g), (x, g), weights)
    for f, w in zip(torch.autograd.grad(compiled(x, g), (x, g), weights), expected, strict=True):
        torch.testing.assert_close(f, w)


def test_bad_input():
    x, g = torch.randn(3, 4), torch.randn(3, 1)
    for call, name in (
        (lambda: F.normalize([1.0]), "input"),
        (lambda: F.normalize(x.int()), "input"),
        (lambda: F.normalize(x, 0.0), "p"),
        (lambda: F.normalize(x, -1.0), "p"),
        (lambda: F.normalize(x, math.nan), "p"),
        (lambda: F.normalize(x, eps=-1.0), "eps"),
        (lambda: F.normalize(x, dim=2), "dim"),
        (lambda: F.normalize(x, dim=(1, 1)), "dim"),
        (lambda: F.normalize(x[0, 0], dim=1), "dim"),
        (lambda: F.weight_norm(x[0, 0], g), "v"),
        (lambda: F.weight_norm(x.int(), g), "v"),
        (lambda: F.weight_norm(x, g, 2), "dim"),
        (lambda: F.weight_norm(x, g[:2]), "g"),
        (lambda: F.weight_norm(x, g.double()), "g"),
    ):
        with pytest.raises(InvalidArgument, match=f"^{name}: found"):
            call()
