"""Sampling by a grid against the framework: values, gradients, compilation, and bad arguments."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as T
from torch.autograd import gradcheck

from lucidnn import functional as F
from lucidnn.core.errors import InvalidArgument, NotSupported
from lucidnn.core.settings import using

SHAPES = {2: ((2, 3, 5, 7), (2, 4, 6, 2)), 3: ((2, 3, 3, 4, 5), (2, 2, 3, 4, 3))}


def values(*shape, seed=0, dtype=torch.float64, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(dtype)


@pytest.mark.parametrize("engine", ["resample.grid_reference", "resample.grid_gathered"])
@pytest.mark.parametrize(
    "mode, ndim", [("bilinear", 2), ("nearest", 2), ("bicubic", 2), ("bilinear", 3), ("nearest", 3)]
)
def test_as_the_framework_does(mode, ndim, engine):
    for padding, corners in itertools.product(("zeros", "border", "reflection"), (False, True)):
        x, grid = values(*SHAPES[ndim][0]).requires_grad_(), values(*SHAPES[ndim][1], seed=1).requires_grad_()
        expected = T.grid_sample(x, grid, mode, padding, corners)
        grad = values(*expected.shape, seed=2)
        wanted = torch.autograd.grad(expected, (x, grid), grad)
        with using(engine=engine):
            found = F.grid_sample(x, grid, mode, padding, corners)
            grads = torch.autograd.grad(found, (x, grid), grad)
        torch.testing.assert_close(found, expected, msg=f"{padding} {corners}")
        torch.testing.assert_close(grads[0], wanted[0], msg=f"dx, {padding} {corners}")
        torch.testing.assert_close(grads[1], wanted[1], msg=f"dgrid, {padding} {corners}")


@pytest.mark.parametrize("engine", ["resample.grid_reference", "resample.grid_gathered"])
def test_places_far_away_and_those_that_are_no_numbers(engine):
    x, far = values(1, 1, 2, 3), torch.tensor([1e10, -1e10]).double()
    for mode, padding in itertools.product(("bilinear", "nearest", "bicubic"), ("zeros", "border", "reflection")):
        with using(engine=engine):
            found = F.grid_sample(x, far.view(1, 1, 2, 1).expand(1, 1, 2, 2), mode, padding)
            nowhere = F.grid_sample(x, torch.full((1, 1, 1, 2), float("nan")).double(), mode, padding)
        assert nowhere.item() == 0, (mode, padding)
        edges = {"zeros": [0, 0], "border": [x[0, 0, 1, 2], x[0, 0, 0, 0]]}
        if padding in edges:
            assert found.flatten().tolist() == edges[padding], (mode, padding)


def test_one_gradient_alone_and_channels_last():
    x = values(2, 9, 5, 7, dtype=torch.float32).contiguous(memory_format=torch.channels_last)
    grid = values(2, 4, 6, 2, seed=1, dtype=torch.float32, scale=0.7)
    for which in (0, 1):
        ours, theirs = ([t.clone().requires_grad_(i == which) for i, t in enumerate((x, grid))] for _ in "ab")
        y, expected = F.grid_sample(*ours), T.grid_sample(*theirs, align_corners=False)
        assert y.is_contiguous(memory_format=torch.channels_last)
        torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)
        y.square().sum().backward()
        expected.square().sum().backward()
        torch.testing.assert_close(ours[which].grad, theirs[which].grad, rtol=1e-4, atol=1e-3)


def test_gradients_once_and_not_twice():
    x, grid = values(1, 2, 3, 4).requires_grad_(), values(1, 2, 2, 2, seed=3, scale=0.4).requires_grad_()
    assert gradcheck(lambda *t: F.grid_sample(*t, align_corners=True), (x, grid))
    (dx,) = torch.autograd.grad(F.grid_sample(x, grid).sum(), x, create_graph=True)
    with pytest.raises(NotSupported, match="second derivative"):
        dx.sum().backward()


@pytest.mark.parametrize("corners", [False, True])
@pytest.mark.parametrize("size", [(2, 3, 4, 5), (2, 3, 2, 3, 4), (2, 3, 1, 5)])
def test_affine_grids(size, corners):
    ndim = len(size) - 2
    theta = values(2, ndim, ndim + 1).requires_grad_()
    found, expected = F.affine_grid(theta, size, corners), T.affine_grid(theta, size, corners)
    torch.testing.assert_close(found, expected)
    grad = values(*expected.shape, seed=2)
    torch.testing.assert_close(torch.autograd.grad(found, theta, grad), torch.autograd.grad(expected, theta, grad))


def test_operators_keep_the_frameworks_rules():
    x, grid = values(2, 3, 4, 5).requires_grad_(), values(2, 3, 3, 2, seed=1).requires_grad_()
    torch.library.opcheck(torch.ops.lucidnn.grid_sample_fwd, (x, grid, "bilinear", "zeros", False))
    given = (values(2, 3, 3, 3, seed=2), x.detach(), grid.detach(), "bilinear", "zeros", False)
    torch.library.opcheck(torch.ops.lucidnn.grid_sample_bwd, given)
    torch.library.opcheck(torch.ops.lucidnn.grid_sample_bwd_x, given)
    torch.library.opcheck(torch.ops.lucidnn.grid_sample_bwd_grid, given)


def test_compiled_whole():
    def f(x, theta):
        return F.grid_sample(x, F.affine_grid(theta, x.shape))

    x, theta = values(2, 3, 4, 5), values(2, 2, 3, seed=1)
    torch.testing.assert_close(torch.compile(f, fullgraph=True, backend="aot_eager")(x, theta), f(x, theta))


@pytest.mark.parametrize(
    "x, grid, how, argument",
    [
        ((2, 3, 4), (2, 4, 4, 2), {}, "x"),
        ((2, 3, 4, 4), (2, 4, 4, 3), {}, "grid"),
        ((2, 3, 4, 4), (1, 4, 4, 2), {}, "grid"),
        ((2, 3, 0, 4), (2, 4, 4, 2), {}, "x"),
        ((2, 3, 4, 4), (2, 4, 4, 2), {"mode": "linear"}, "mode"),
        ((2, 3, 4, 4), (2, 4, 4, 2), {"padding_mode": "reflect"}, "padding_mode"),
        ((2, 3, 4, 4, 4), (2, 4, 4, 4, 3), {"mode": "bicubic"}, "mode"),
    ],
)
def test_bad_requests_name_the_argument(x, grid, how, argument):
    with pytest.raises(InvalidArgument, match=f"^{argument}"):
        F.grid_sample(torch.zeros(x), torch.zeros(grid), **how)


def test_bad_affine_maps():
    with pytest.raises(InvalidArgument, match="^theta"):
        F.affine_grid(torch.zeros(2, 3, 3), (2, 1, 4, 4))
    with pytest.raises(InvalidArgument, match="^size"):
        F.affine_grid(torch.zeros(2, 2, 3), (2, 1, 4))
