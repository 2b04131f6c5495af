"""First and second derivatives against finite differences, and what autograd promises around them."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from lucidnn import functional as F
from lucidnn.core.plan import observe
from lucidnn.core.settings import using
from lucidnn.functional._convolution import PLAIN
from lucidnn.functional._second_derivatives import second_derivative


def leaf(*shape, seed=0, channels_last=False):
    t = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (t.contiguous(memory_format=torch.channels_last) if channels_last else t).requires_grad_()


CONVOLUTIONS = {
    "1-D": (F.conv1d, (2, 3, 7), (4, 3, 3), {"stride": 2, "padding": 1}),
    "1-D dilated": (F.conv1d, (1, 2, 9), (2, 2, 3), {"dilation": 3, "padding": ((2, 1),)}),
    "2-D": (F.conv2d, (2, 2, 4, 5), (3, 2, 3, 2), {"padding": 1}),
    "2-D stride over filter": (F.conv2d, (1, 2, 6, 7), (2, 2, 2, 2), {"stride": 3, "padding": (1, 0)}),
    "2-D groups": (F.conv2d, (1, 4, 4, 4), (6, 2, 2, 2), {"groups": 2, "padding": (0, 1)}),
    "2-D depthwise": (F.conv2d, (1, 3, 4, 4), (6, 1, 3, 3), {"groups": 3, "padding": 1, "dilation": (1, 2)}),
    "2-D 1x1": (F.conv2d, (2, 3, 3, 3), (2, 3, 1, 1), {"stride": 2}),
    "2-D pairs": (F.conv2d, (1, 2, 4, 4), (2, 2, 3, 3), {"padding": ((0, 2), (1, 0)), "stride": (2, 1)}),
    "2-D unbatched": (F.conv2d, (2, 4, 4), (2, 2, 3, 3), {"padding": "same"}),
    "3-D": (F.conv3d, (1, 2, 3, 3, 4), (2, 2, 2, 2, 3), {"padding": (1, 0, 1), "stride": (1, 2, 1)}),
    "2-D reflect": (F.conv2d, (1, 2, 4, 5), (3, 2, 3, 3), {"padding": (2, 1), "padding_mode": "reflect"}),
    "2-D circular flipped": (
        F.conv2d,
        (1, 2, 3, 4),
        (3, 2, 3, 2),
        {"padding": (1, 2), "padding_mode": "circular", "flip": True},
    ),
    "1-D replicate": (F.conv1d, (2, 2, 4), (2, 2, 3), {"padding": ((5, 1),), "padding_mode": "replicate", "stride": 2}),
    "1-D causal": (F.conv1d, (2, 2, 6), (3, 2, 3), {"padding": "causal", "dilation": 2}),
    "2-D same with stride": (F.conv2d, (1, 2, 5, 6), (3, 2, 3, 2), {"padding": "same", "stride": 2}),
    "transposed 1-D": (F.conv_transpose1d, (2, 3, 4), (3, 4, 3), {"stride": 2, "padding": 1, "output_padding": 1}),
    "transposed 2-D": (F.conv_transpose2d, (1, 4, 3, 2), (4, 2, 3, 2), {"stride": (2, 1), "groups": 2}),
    "transposed 2-D relu": (
        F.conv_transpose2d,
        (1, 2, 3, 3),
        (2, 3, 3, 3),
        {"padding": 1, "activation": "relu", "flip": True},
    ),
    "transposed 3-D": (F.conv_transpose3d, (1, 2, 2, 2, 3), (2, 2, 2, 2, 2), {"stride": (1, 2, 2), "dilation": 2}),
    "relu": (F.conv2d, (1, 2, 4, 4), (2, 2, 3, 3), {"activation": "relu"}),
    "leaky_relu": (F.conv2d, (1, 2, 4, 4), (2, 2, 3, 3), {"activation": "leaky_relu", "parameter": 0.2}),
    "leaky_relu, falling": (F.conv2d, (1, 2, 4, 4), (2, 2, 3, 3), {"activation": "leaky_relu", "parameter": -0.2}),
    "clipped_relu": (F.conv2d, (1, 2, 4, 4), (2, 2, 3, 3), {"activation": "clipped_relu", "parameter": 2.0}),
}


FORMATS = [(n, last) for n, case in CONVOLUTIONS.items() for last in (False, True) if not last or len(case[1]) == 4]


@pytest.mark.parametrize("name, channels_last", FORMATS)
def test_convolution_twice(name, channels_last):
    function, x_shape, w_shape, kwargs = CONVOLUTIONS[name]
    x, w = leaf(*x_shape, seed=1, channels_last=channels_last), leaf(*w_shape, seed=2, channels_last=channels_last)
    transposed = function in (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)
    b = leaf(w_shape[1] * kwargs.get("groups", 1) if transposed else w_shape[0], seed=3)

    def call(x, w, b):
        return function(x, w, b, **kwargs)

    assert gradcheck(call, (x, w, b), fast_mode=False)
    assert gradgradcheck(call, (x, w, b), fast_mode=True)


SMOOTH = ["elu", "sigmoid", "tanh", "silu", "gelu", "gelu_tanh", "softplus", "hardswish", "hardsigmoid", "mish"]


@pytest.mark.parametrize("activation", SMOOTH)
def test_smooth_activations_twice(activation):
    """Alone, with all that stands beside them, and fused behind a convolution."""
    ops, p = torch.ops.lucidnn, 0.7 if activation == "elu" else 0.0
    x, b, z, dy = leaf(2, 3, 4), leaf(3, seed=1), leaf(2, 3, 4, seed=2), leaf(2, 3, 4, seed=3)
    for call, args in (
        (lambda x, b, z: ops.pointwise_fwd(x, b, z, 2.0, 0.5, activation, p), (x, b, z)),
        (lambda dy, x: ops.pointwise_bwd(dy, x, -1.5, activation, p), (dy, x)),
        (lambda *a: F.conv2d(*a, activation=activation), (leaf(1, 2, 4, 4), leaf(2, 2, 3, 3, seed=1), leaf(2, seed=2))),
    ):
        assert gradcheck(call, args, fast_mode=True) and gradgradcheck(call, args, fast_mode=True)


@pytest.mark.parametrize("activation", SMOOTH)
def test_second_derivatives_far_out_are_the_limits(activation):
    x = torch.tensor([-torch.inf, -1e30, -90.0, 90.0, 1e30, torch.inf], dtype=torch.float32)
    found = second_derivative(activation, 1.0, x)
    assert found is None or float(found.abs().max()) < 1e-30
    assert (
        found is None
        or activation == "hardswish"
        or bool(second_derivative(activation, 1.0, x * torch.nan).isnan().all())
    )


def distinct(*shape):
    """Values without near ties: a maximum stays where it is under a small step."""
    n = torch.Size(shape).numel()
    order = torch.randperm(n, generator=torch.Generator().manual_seed(7)).double()
    return (order / 10 + 0.05 - n / 20).reshape(shape).requires_grad_()


POOLS = {
    "1-D": (F.max_pool1d, (2, 2, 7), {"kernel_size": 3, "stride": 2, "padding": 1}),
    "2-D": (F.max_pool2d, (1, 2, 6, 5), {"kernel_size": 2}),
    "2-D overlapping": (F.max_pool2d, (1, 2, 6, 5), {"kernel_size": 3, "stride": 1, "padding": 1}),
    "2-D dilated": (F.max_pool2d, (1, 1, 7, 7), {"kernel_size": 2, "dilation": 3, "stride": 2}),
    "2-D ceil": (F.max_pool2d, (1, 2, 5, 5), {"kernel_size": 2, "ceil_mode": True}),
    "2-D wide": (F.max_pool2d, (1, 1, 18, 18), {"kernel_size": 17, "stride": 1}),
    "3-D": (F.max_pool3d, (1, 2, 4, 3, 4), {"kernel_size": 2, "stride": (1, 1, 2)}),
}


@pytest.mark.parametrize("indices", [False, True])
@pytest.mark.parametrize("name", POOLS)
def test_max_pool_twice(name, indices):
    function, shape, kwargs = POOLS[name]

    def call(x):
        return function(x, return_indices=True, **kwargs)[0] if indices else function(x, **kwargs)

    assert gradcheck(call, (distinct(*shape),), fast_mode=True)
    assert gradgradcheck(call, (distinct(*shape),), fast_mode=True)


def test_relu_and_linear_twice():
    assert gradcheck(F.relu, (distinct(3, 4),)) and gradgradcheck(F.relu, (distinct(3, 4),))
    x, w, b = leaf(2, 3, 4), leaf(5, 4, seed=1), leaf(5, seed=2)
    assert gradcheck(F.linear, (x, w, b)) and gradgradcheck(F.linear, (x, w, b))


def test_the_operators_gradients_too():
    """Also the ones that the functions reach only through a second derivative, with alpha and z."""
    ops = torch.ops.lucidnn
    x, w, z = leaf(1, 2, 5, 5), leaf(3, 2, 2, 2, seed=1), leaf(1, 3, 4, 4, seed=2)
    b, dy = leaf(3, seed=3), leaf(1, 3, 4, 4, seed=4)
    geometry = ([1, 1], [0, 0, 0, 0], [1, 1], 1, "zeros", False)

    def fprop(x, w, b, z):
        return ops.conv_fprop(x, w, b, z, None, *geometry, 0.5, -2.0, "relu", 0.0, None, None)

    assert gradcheck(fprop, (x, w, b, z)) and gradgradcheck(fprop, (x, w, b, z), fast_mode=True)
    for call, args in {
        lambda dy, w: ops.conv_dgrad(dy, w, None, None, None, [1, 2, 5, 5], False, *geometry, 0.5, *PLAIN[1:]): (dy, w),
        lambda x, dy: ops.conv_wgrad(x, dy, [3, 2, 2, 2], True, *geometry, -1.5): (x, dy),
        ops.conv_bgrad: (dy,),
        lambda x, b, z: ops.pointwise_fwd(x, b, z, 2.0, 0.5, "relu", 0.0): (dy, b, z),
        lambda dy, x: ops.pointwise_bwd(dy, x, 2.0, "relu", 0.0): (dy, z),
    }.items():
        assert gradcheck(call, args, fast_mode=True) and gradgradcheck(call, args, fast_mode=True)


@pytest.mark.parametrize("needs", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 0), (0, 1, 1), (1, 0, 1)], ids=str)
def test_only_what_is_asked_for_is_computed(needs):
    tensors = [leaf(2, 3, 5, 5), leaf(4, 3, 3, 3, seed=1), leaf(4, seed=2)]
    full = torch.autograd.grad(F.conv2d(*tensors, padding=1).sum(), tensors)
    for t, need in zip(tensors, needs, strict=True):
        t.requires_grad_(bool(need))
    y = F.conv2d(*tensors, padding=1)
    with observe() as plans:
        y.sum().backward()
    expected = [name for name, need in zip(("conv_dgrad", "conv_wgrad", "conv_bgrad"), needs, strict=True) if need]
    assert [p.problem.op.name for p in plans] == expected
    for t, need, want in zip(tensors, needs, full, strict=True):
        assert torch.equal(t.grad, want) if need else t.grad is None


def test_no_grad_gives_the_same_values():
    x, w, b = leaf(2, 3, 8, 8), leaf(4, 3, 3, 3, seed=1), leaf(4, seed=2)

    def net():
        return F.linear(F.max_pool2d(F.conv2d(x, w, b, activation="relu"), 2).flatten(1), torch.ones(5, 36).double())

    with_graph = net()
    assert with_graph.requires_grad
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            y = net()
        assert torch.equal(y, with_graph) and not y.requires_grad
    plain = F.conv2d(x.detach(), w.detach(), b.detach())
    assert not plain.requires_grad and torch.equal(plain, F.conv2d(x, w, b))
    assert torch.equal(torch.ops.lucidnn.pointwise_fwd(x, None, None, 1.0, 0.0, "relu", 0.0), F.relu(x))


def test_a_saved_tensor_changed_in_place_is_noticed():
    x, w = leaf(2, 3, 5, 5), leaf(4, 3, 3, 3, seed=1)
    for changed in (x, w):
        y = F.conv2d(x, w)
        with torch.no_grad():
            changed.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()
    y = F.relu(x)
    with torch.no_grad():
        y.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_backward_twice_needs_the_graph_kept():
    x, w = leaf(1, 2, 4, 4), leaf(2, 2, 3, 3, seed=1)
    y = F.conv2d(x, w).sum()
    y.backward(retain_graph=True)
    first = w.grad.clone()
    y.backward()
    assert torch.equal(w.grad, 2 * first)
    with pytest.raises(RuntimeError, match="second time"):
        y.backward()


def test_an_output_that_nobody_uses():
    x = leaf(1, 2, 4, 4)
    y, index = F.max_pool2d(x, 2, return_indices=True)
    assert not index.requires_grad
    assert torch.autograd.grad(index.double().sum() + 0 * x.sum(), x)[0].abs().sum() == 0
    y.sum().backward()
    assert x.grad.sum() == 8


def test_gradients_that_are_views():
    """A loss's gradient is often expanded, transposed or sliced: the backward pass takes it as it comes."""
    x, w = leaf(2, 3, 6, 6), leaf(4, 3, 3, 3, seed=1)
    y = F.conv2d(x, w, padding=1)
    wide = torch.randn(2, 6, 6, 9, dtype=torch.float64)
    for dy in (
        torch.ones((), dtype=torch.float64).expand(y.shape),
        wide[..., 1:5].permute(0, 3, 1, 2),
        torch.randn(2, 4, 6, 6, dtype=torch.float64).transpose(2, 3),
        torch.randn(2, 4, 6, 1, dtype=torch.float64).expand(y.shape),
    ):
        found = torch.autograd.grad(y, (x, w), dy, retain_graph=True)
        expected = torch.autograd.grad(y, (x, w), dy.contiguous(), retain_graph=True)
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-13)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 4, 3, padding=1, dtype=torch.float64)
        self.head = torch.nn.Linear(4 * 4 * 4, 5, dtype=torch.float64)

    def forward(self, x):
        y = F.max_pool2d(F.relu(F.conv2d(x, self.conv.weight, self.conv.bias, padding=1)), 2)
        return F.linear(y.flatten(1), self.head.weight, self.head.bias)


def test_a_module_copies_and_trains_like_its_copy():
    torch.manual_seed(0)
    net = Net()
    net(leaf(2, 3, 8, 8)).sum().backward()
    twin = copy.deepcopy(net)
    for model in (net, twin):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            model(leaf(2, 3, 8, 8, seed=step)).square().mean().backward()
            optimizer.step()
    for a, b in zip(net.parameters(), twin.parameters(), strict=True):
        assert torch.equal(a, b)


def test_replicas_in_threads():
    """As DataParallel runs them: one module, a share of the batch in each thread, gradients added up."""
    torch.manual_seed(0)
    net, x = Net(), torch.randn(8, 3, 8, 8, dtype=torch.float64)
    net(x).square().sum().backward()
    expected = [p.grad.clone() for p in net.parameters()]
    net.zero_grad()
    outputs: dict[int, torch.Tensor] = {}

    def replica(i):
        outputs[i] = net(x[2 * i : 2 * i + 2])

    threads = [threading.Thread(target=replica, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    torch.cat([outputs[i] for i in range(4)]).square().sum().backward()
    for p, want in zip(net.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, want, rtol=1e-12, atol=1e-12)


def test_backward_uses_the_settings_of_its_forward():
    """Also when it runs outside the block, or on another thread."""
    x, w = leaf(1, 2, 5, 5), leaf(2, 2, 3, 3, seed=1)
    with using(engine="conv.reference"):
        y = F.conv2d(x, w)
    with observe() as plans:
        y.sum().backward()
    assert [p.engine.name for p in plans] == ["conv.reference"] * 2
    with using(engine="conv.reference"):
        y = F.conv2d(x, w)
    with observe() as plans:
        thread = threading.Thread(target=lambda: y.sum().backward())
        thread.start()
        thread.join(60)
    assert [p.engine.name for p in plans] == ["conv.reference"] * 2


def test_checkpointing_recomputes_the_same():
    from torch.utils.checkpoint import checkpoint

    x, w = leaf(2, 3, 6, 6), leaf(4, 3, 3, 3, seed=1)
    plain = torch.autograd.grad(F.relu(F.conv2d(x, w)).sum(), (x, w))
    again = torch.autograd.grad(
        checkpoint(lambda x, w: F.relu(F.conv2d(x, w)), x, w, use_reentrant=False).sum(), (x, w)
    )
    for a, b in zip(plain, again, strict=True):
        assert torch.equal(a, b)
