"""Normalization on tensors against the framework's own: values, types, strides, gradients, compilation, bad input."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as T
from torch.autograd import gradcheck, gradgradcheck

from lucidnn import functional as F
from lucidnn.core.errors import InvalidArgument

ops = torch.ops.lucidnn
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
BOUND = {torch.float64: 1e-12, torch.float32: 4e-6, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}


def leaf(*shape, seed=0, dtype=torch.float64, last=False, device="cpu"):
    t = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(device, dtype)
    return (t.contiguous(memory_format=torch.channels_last) if last and t.ndim == 4 else t).requires_grad_()


def operator_calls(last: bool, device: str) -> dict:
    def t(*shape, seed=0):
        return leaf(*shape, seed=seed, last=last, device=device, dtype=torch.float32)

    x, dy, scale, bias = t(2, 4, 3, 5), t(2, 4, 3, 5, seed=1), t(5, seed=2), t(5, seed=3)
    _, mean, inverse = (v.detach() for v in ops.layer_norm_fwd(x, None, None, 1, 1e-5))
    root = ops.rms_norm_fwd(x, None, 1, 1e-5)[1].detach()
    _, center, spread = (v.detach() for v in ops.group_norm_fwd(x, None, None, 2, 1e-5, "identity", 0.0))
    w, b, every = t(4, seed=4), t(4, seed=5), [True, True, True]
    return {
        "layer_norm_fwd": (ops.layer_norm_fwd, (x, scale, bias, 1, 1e-5)),
        "layer_norm_fwd plain": (ops.layer_norm_fwd, (x, None, None, 2, 1e-5)),
        "layer_norm_bwd": (ops.layer_norm_bwd, (dy, x, mean, inverse, scale, 1, 1e-5, every)),
        "layer_norm_bwd dx": (ops.layer_norm_bwd, (dy, x, mean, inverse, None, 1, 1e-5, [True, False, False])),
        "rms_norm_fwd": (ops.rms_norm_fwd, (x, scale, 1, 1e-5)),
        "rms_norm_bwd": (ops.rms_norm_bwd, (dy, x, root, scale, 1, 1e-5, every[:2])),
        "group_norm_fwd": (ops.group_norm_fwd, (x, w, b, 2, 1e-5, "silu", 0.0)),
        "group_norm_bwd": (ops.group_norm_bwd, (dy, x, center, spread, w, b, 2, 1e-5, "silu", 0.0, every)),
        "group_norm_bwd dx": (
            ops.group_norm_bwd,
            (dy, x, center, spread, None, None, 2, 1e-5, "identity", 0.0, [True, False, False]),
        ),
    }


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("last", [False, True], ids=["nchw", "nhwc"])
@pytest.mark.parametrize("name", operator_calls(False, "cpu"))
def test_operator(name, last, device):
    operator, args = operator_calls(last, device)[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.library.opcheck(operator.default, args)


def close(found, expected, dtype, what):
    scale = float(expected.detach().abs().max()) or 1.0
    off = float((found.detach().double() - expected.detach().double()).abs().max())
    assert found.dtype == expected.dtype and off <= 4 * BOUND[dtype] * scale, f"{what}: off by {off:.1e} of {scale:.1e}"


# name: (ours, the framework's), the shape of x and of the parameters
CASES = {
    "layer": (
        lambda x, w, b: F.layer_norm(x, (5,), w, b), lambda x, w, b: T.layer_norm(x, (5,), w, b), (4, 3, 5), (5,),
    ),
    "layer of two axes": (
        lambda x, w, b: F.layer_norm(x, (3, 5), w, b), lambda x, w, b: T.layer_norm(x, (3, 5), w, b), (4, 3, 5), (3, 5),
    ),
    "rms": (lambda x, w, b: F.rms_norm(x, 5, w), lambda x, w, b: T.rms_norm(x, (5,), w), (4, 3, 5), (5,)),
    "group": (lambda x, w, b: F.group_norm(x, 2, w, b), lambda x, w, b: T.group_norm(x, 2, w, b), (2, 6, 5, 4), (6,)),
    "group and silu": (
        lambda x, w, b: F.group_norm(x, 3, w, b, activation="silu"),
        lambda x, w, b: T.silu(T.group_norm(x, 3, w, b)),
        (2, 6, 5, 4),
        (6,),
    ),
    "instance": (
        lambda x, w, b: F.instance_norm(x, weight=w, bias=b),
        lambda x, w, b: T.instance_norm(x, weight=w, bias=b),
        (2, 6, 5, 4),
        (6,),
    ),
}  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("last", [False, True], ids=["first", "last"])
@pytest.mark.parametrize("dtype", BOUND, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_as_the_framework(name, dtype, last, device):
    ours, theirs, shape, parameters = CASES[name]
    if last and len(shape) < 4:
        x = leaf(shape[0], shape[2], shape[1], dtype=dtype, device=device).detach().mT.requires_grad_()
    else:
        x = leaf(*shape, dtype=dtype, last=last, device=device)
    w, b = leaf(*parameters, seed=1, dtype=dtype, device=device), leaf(*parameters, seed=2, dtype=dtype, device=device)
    for given in ((w, b), (w, None), (None, b), (None, None)):
        used = [t for t in (x, *given) if t is not None and not (name == "rms" and t is b)]
        # The framework's group normalization fails in its gradient where only the bias is given.
        y, z = (
            ours(x, *given),
            theirs(x, torch.ones_like(b) if given[0] is None and given[1] is b else given[0], given[1]),
        )
        close(y, z, dtype, "y")
        if device == "cpu" and name.startswith(("layer", "group")):
            assert y.stride() == z.stride()
        dy = leaf(*shape, seed=3, dtype=dtype, device=device).detach()
        found, expected = torch.autograd.grad(y, used, dy), torch.autograd.grad(z, used, dy)
        for a, e in zip(found, expected, strict=True):
            close(a, e, dtype, "a gradient")


@pytest.mark.parametrize("name", CASES)
def test_first_and_second_derivatives(name):
    ours, _, _, parameters = CASES[name]
    shape = {"layer": (2, 2, 5), "layer of two axes": (2, 3, 5), "rms": (2, 5)}.get(name, (2, 6, 2))
    x, w, b = leaf(*shape), leaf(*parameters, seed=1), leaf(*parameters, seed=2)
    assert gradcheck(ours, (x, w, b))
    assert gradgradcheck(ours, (x, w, b))
    assert gradgradcheck(lambda x: ours(x, None, None), (x,))


def test_a_large_mean_does_not_drown_the_variance():
    x = leaf(64, 2048).detach() + 1e4
    expected = T.layer_norm(x.float().double(), (2048,))
    found = F.layer_norm(x.float(), 2048)
    assert float((found - expected).abs().max()) < 2e-3
    grouped = F.group_norm(x.float().reshape(64, 32, 64), 2)
    expected = T.group_norm(x.float().double().reshape(64, 32, 64), 2)
    assert float((grouped - expected).abs().max()) < 2e-3


def test_running_statistics():
    x, w, b = leaf(3, 4, 5, 6, dtype=torch.float32).detach(), leaf(4, seed=1).float(), leaf(4, seed=2).float()
    ours = [torch.zeros(4), torch.ones(4)]
    theirs = [t.clone() for t in ours]
    for seed in (0, 1):
        y = F.instance_norm(x * (seed + 1), *ours, w, b, True, 0.3)
        z = T.instance_norm(x * (seed + 1), *theirs, w, b, True, 0.3)
        torch.testing.assert_close(y, z)
    torch.testing.assert_close(ours, theirs)
    found, expected = F.instance_norm(x, *ours, w, b, False), T.instance_norm(x, *theirs, w, b, False)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("device", DEVICES)
def test_compiled_whole_and_for_any_size(device):
    def net(x, w, b):
        y = F.group_norm(x, 2, w, b, activation="silu")
        y = F.layer_norm(y, y.shape[-1:])
        return F.rms_norm(F.instance_norm(y), y.shape[-2:])

    torch._dynamo.reset()
    compiled = torch.compile(net, fullgraph=True, dynamic=True, backend="aot_eager")
    w, b = (leaf(4, seed=s, dtype=torch.float32, device=device) for s in (1, 2))
    for n, size, last in ((2, 5, False), (3, 6, False), (2, 7, True)):
        x = leaf(n, 4, size, size + 1, dtype=torch.float32, last=last, device=device)
        expected, found = net(x, w, b), compiled(x, w, b)
        torch.testing.assert_close(found, expected)
        assert found.stride() == expected.stride()
        dy = torch.randn_like(found)
        torch.testing.assert_close(
            torch.autograd.grad(found, (x, w, b), dy),
            torch.autograd.grad(expected, (x, w, b), dy),
            rtol=1e-4,
            atol=1e-4,
        )


BAD = {
    "no tensor": (lambda x: F.layer_norm(3.0, 5), "input"),
    "other sizes": (lambda x: F.layer_norm(x, (4,)), "normalized_shape"),
    "no axis": (lambda x: F.layer_norm(x, ()), "normalized_shape"),
    "a weight of another shape": (lambda x: F.layer_norm(x, 5, torch.ones(4)), "scale"),
    "a negative eps": (lambda x: F.layer_norm(x, 5, eps=-1.0), "epsilon"),
    "an infinite eps": (lambda x: F.rms_norm(x, 5, eps=float("inf")), "epsilon"),
    "groups that do not divide": (lambda x: F.group_norm(x, 3), "groups"),
    "no groups": (lambda x: F.group_norm(x, 0), "groups"),
    "half a group": (lambda x: F.group_norm(x, 0.5), "num_groups"),
    "an unknown activation": (lambda x: F.group_norm(x, 2, activation="rleu"), "activation"),
    "one point": (lambda x: F.instance_norm(x[:, :, :1]), "input"),
    "no spatial axis": (lambda x: F.instance_norm(x[:, :, 0]), "input"),
    "no statistics": (lambda x: F.instance_norm(x, use_input_stats=False), "running_mean"),
    "whole numbers": (lambda x: F.layer_norm(x.long(), 5), "x"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name):
    call, argument = BAD[name]
    with pytest.raises(InvalidArgument) as caught:
        call(torch.randn(2, 4, 5))
    assert caught.value.argument == argument


def test_empty():
    for x, w in ((torch.randn(0, 3), torch.randn(3)), (torch.randn(2, 0), torch.randn(0))):
        x, w = x.requires_grad_(), w.requires_grad_()
        y = F.layer_norm(x, w.shape, w)
        dx, dw = torch.autograd.grad(y.sum(), (x, w))
        assert y.shape == dx.shape == x.shape and torch.equal(dw, torch.zeros_like(w))
