"""Batch normalization on tensors against the framework's own: values, gradients, running statistics, pieces."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as T
from torch.autograd import gradcheck, gradgradcheck

from lucidnn import functional as F
from lucidnn.core.errors import InvalidArgument
from lucidnn.functional import batch_normalization as B

ops = torch.ops.lucidnn
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
BOUND = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
SPATIAL = (1e-5, "spatial")


def leaf(*shape, seed=0, dtype=torch.float64, last=False, device="cpu"):
    t = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(device, dtype)
    return (t.contiguous(memory_format=torch.channels_last) if last and t.ndim == 4 else t).requires_grad_()


def close(found, expected, dtype, what=""):
    scale = float(expected.detach().abs().max()) or 1.0
    off = float((found.detach().double() - expected.detach().double()).abs().max())
    assert found.dtype == expected.dtype and off <= BOUND[dtype] * scale, f"{what}: off by {off:.1e} of {scale:.1e}"


def running(c, device="cpu", dtype=torch.float32):
    return torch.linspace(-1, 1, c, device=device, dtype=dtype), torch.linspace(0.5, 2, c, device=device, dtype=dtype)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("shape", [(7, 5), (4, 5, 9), (3, 5, 4, 6), (2, 5, 3, 4, 2)], ids=len)
@pytest.mark.parametrize("dtype", BOUND, ids=str)
def test_values_and_gradients(dtype, shape, training, device):
    parameters = torch.float64 if dtype == torch.float64 else torch.float32
    x, dy = leaf(*shape, dtype=dtype, device=device), leaf(*shape, seed=1, dtype=dtype, device=device).detach()
    w, b = (leaf(5, seed=seed, dtype=parameters, device=device) for seed in (2, 3))
    ours, theirs = (running(5, device, parameters) for _ in range(2))
    y = F.batch_norm(x, *ours, w, b, training, 0.3, 1e-3)
    expected = T.batch_norm(x, *theirs, w, b, training, 0.3, 1e-3)
    close(y, expected, dtype, "y")
    for a, e, name in zip(ours, theirs, ("mean", "variance"), strict=True):
        close(a, e, dtype, f"running {name}")
    found, wanted = (torch.autograd.grad(t, (x, w, b), dy) for t in (y, expected))
    for a, e, name in zip(found, wanted, ("dx", "dw", "db"), strict=True):
        close(a, e, dtype, name)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("activation", ["relu", "silu", "clipped_relu"])
def test_residual_and_activation_are_those_of_a_chain(activation, training, device):
    after = {"relu": torch.relu, "silu": T.silu, "clipped_relu": T.relu6}[activation]
    x, z = (leaf(4, 6, 5, 5, seed=s, dtype=torch.float32, last=True, device=device) for s in (0, 1))
    w, b = (leaf(6, seed=seed, dtype=torch.float32, device=device) for seed in (2, 3))
    y = F.batch_norm(x, *running(6, device), w, b, training, z=z, activation=activation)
    expected = after(T.batch_norm(x, *running(6, device), w, b, training) + z)
    assert y.is_contiguous(memory_format=torch.channels_last)
    close(y, expected, torch.float32)
    dy = leaf(4, 6, 5, 5, seed=4, dtype=torch.float32, device=device).detach()
    found, wanted = (torch.autograd.grad(t, (x, w, b, z), dy) for t in (y, expected))
    for a, e, name in zip(found, wanted, ("dx", "dw", "db", "dz"), strict=True):
        close(a, e, torch.float32, name)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("activation", [None, "relu", "silu"])
def test_first_and_second_derivative(activation, training):
    x, z = leaf(4, 3, 2), leaf(4, 3, 2, seed=1)
    w, b = leaf(3, seed=2), leaf(3, seed=3)

    def function(x, w, b, z):
        return F.batch_norm(x, *running(3, dtype=x.dtype), w, b, training, z=z, activation=activation)

    assert gradcheck(function, (x, w, b, z)) and gradgradcheck(function, (x, w, b, z))


def test_the_second_derivative_is_the_frameworks():
    x, w, b = leaf(3, 4, 5), leaf(4, seed=1), leaf(4, seed=2)
    results = []
    for function in (F.batch_norm, T.batch_norm):
        (dx,) = torch.autograd.grad(function(x, None, None, w, b, True).pow(4).sum(), x, create_graph=True)
        results.append(torch.autograd.grad(dx.square().sum(), (x, w, b), allow_unused=True))
    for a, e in zip(*results, strict=True):
        close(a, e, torch.float64)


def test_only_what_backward_reads_is_kept():
    kept = []
    x, z = leaf(4, 3, 5, 5), leaf(4, 3, 5, 5, seed=1)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.data_ptr()) or t, lambda t: t):
        y = F.batch_norm(x, None, None, training=True, z=z, activation="relu")
        plain = F.batch_norm(x, None, None, training=True)
    assert y.data_ptr() in kept and z.data_ptr() not in kept and plain.data_ptr() not in kept
    plain.relu_()  # may be overwritten: its gradient does not read it
    plain.sum().backward()


def test_running_statistics_are_updated_in_place_in_the_same_kernel():
    x = leaf(8, 3, 4, 4, dtype=torch.float32).detach()
    store = torch.zeros(6), torch.ones(6)
    mean, variance = store[0][::2], store[1][::2]
    version = mean._version
    F.batch_norm(x, mean, variance, training=True, momentum=torch.tensor(0.25))
    expected = torch.zeros(3), torch.ones(3)
    T.batch_norm(x, *expected, training=True, momentum=0.25)
    torch.testing.assert_close((mean, variance), expected)
    assert store[0][1::2].eq(0).all() and store[1][1::2].eq(1).all() and mean._version > version
    with torch.inference_mode():
        F.batch_norm(x, torch.zeros(3), torch.ones(3), training=True)


def test_a_cumulative_average_builds_one_plan():
    from lucidnn.core.plan import observe

    x = leaf(8, 3, 4, dtype=torch.float32).detach()
    mean, variance, batches = torch.zeros(3), torch.ones(3), []
    with observe() as plans:
        for step in range(1, 4):
            batches.append(x * step)
            F.batch_norm(batches[-1], mean, variance, training=True, momentum=torch.tensor([1.0 / step]))
    assert len({id(plan) for plan in plans}) == 1
    torch.testing.assert_close(mean, torch.stack([t.mean((0, 2)) for t in batches]).mean(0))
    torch.testing.assert_close(variance, torch.stack([t.var((0, 2)) for t in batches]).mean(0))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("last", [False, True], ids=["nchw", "nhwc"])
def test_a_large_mean_costs_no_digits(last, device):
    x = leaf(16, 8, 20, 20, dtype=torch.float32, last=last, device=device).detach() + 1e4
    _, mean, inverse = B.batch_norm_train_fwd(
        x, None, None, None, None, None, None, 0.0, 0.0, "spatial", "identity", 0.0
    )
    wide = x.double()
    variance = wide.var((0, 2, 3), correction=0)
    assert float((inverse.double() ** -2 / variance - 1).abs().max()) < 2e-6
    assert float((mean.double() - wide.mean((0, 2, 3))).abs().max()) < 1.5e-3  # a step of float32 at 1e4


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("activation", ["identity", "relu"])
def test_two_devices_make_one_batch(activation, device):
    """What a synchronised batch normalization does: an all-reduce is the only thing between the pieces."""
    x, dy = (leaf(6, 4, 5, 3, seed=s, dtype=torch.float32, device=device).detach() for s in (0, 1))
    w, b = (leaf(4, seed=s, dtype=torch.float32, device=device).detach() for s in (2, 3))
    whole, parts = running(4, device), running(4, device)
    y, mean, inverse = B.batch_norm_train_fwd(x, w, b, None, *whole, None, 1e-5, 0.1, "spatial", activation, 0.0)
    halves = [slice(0, 2), slice(2, 6)]
    stats = [B.batch_norm_stats(x[h], "spatial") for h in halves]
    counts = torch.tensor([2.0 * 15, 4.0 * 15], device=device)
    means, m2s = (torch.stack(found) for found in zip(*stats, strict=True))
    mean2, inverse2 = B.batch_norm_combine(counts, means, m2s, *parts, None, 1e-5, 0.1)
    torch.testing.assert_close((mean2, inverse2, *parts), (mean, inverse, *whole))
    given = (mean2, None, inverse2, w, b, None)
    pieces = [B.batch_norm_infer_fwd(x[h], *given, *SPATIAL, activation, 0.0) for h in halves]
    torch.testing.assert_close(torch.cat(pieces), y)
    sums = [B.batch_norm_bwd_sums(dy[h], x[h], *given, None, *SPATIAL, activation, 0.0) for h in halves]
    dscale, dbias = (sum(found) for found in zip(*sums, strict=True))
    total = counts.sum().reshape(1)
    made = [
        B.batch_norm_bwd_apply(
            dy[h], x[h], *given, None, dscale, dbias, total, *SPATIAL, True, activation, 0.0
        )
        for h in halves
    ]  # fmt: skip
    expected = B.batch_norm_bwd(dy, x, mean, None, inverse, w, b, None, None, *SPATIAL, False, True, activation, 0.0)
    found = (torch.cat([dx for dx, _ in made]), dscale, dbias, torch.cat([dz for _, dz in made]))
    torch.testing.assert_close(found, expected)


def test_statistics_per_activation():
    x, w = leaf(6, 3, 2, 2), leaf(3, 2, 2, seed=1)
    flat = T.batch_norm(x.flatten(1), None, None, w.flatten(), None, True).reshape(x.shape)
    y, mean, _ = B.batch_norm_train_fwd(
        x, w, None, None, None, None, None, 1e-5, 0.0, "per_activation", "identity", 0.0
    )
    torch.testing.assert_close((y, mean), (flat, x.mean(0)))
    found, wanted = (torch.autograd.grad(t.square().sum(), (x, w)) for t in (y, flat))
    torch.testing.assert_close(found, wanted)
    assert gradgradcheck(
        lambda x, w: B.batch_norm_train_fwd(
            x, w, None, None, None, None, None, 1e-5, 0.0, "per_activation", "identity", 0.0
        )[0],
        (x, w),
    )


def test_given_statistics_have_gradients():
    x, mean, spread, w = leaf(4, 3, 2), leaf(3, seed=1), leaf(3, seed=2), leaf(3, seed=3)
    rest = (w, None, None, *SPATIAL, "identity", 0.0)
    assert gradcheck(lambda x, m, v: B.batch_norm_infer_fwd(x, m, v.exp(), None, *rest), (x, mean, spread))
    assert gradcheck(lambda x, m, v: B.batch_norm_infer_fwd(x, m, None, v.exp(), *rest), (x, mean, spread))


def test_a_batch_of_nothing():
    x = torch.empty(0, 3, 4, requires_grad=True)
    mean, variance = torch.zeros(3), torch.ones(3)
    y = F.batch_norm(x, mean, variance, training=True)
    y.sum().backward()
    assert y.shape == x.grad.shape == (0, 3, 4) and mean.eq(0).all() and variance.eq(1).all()


def operator_calls(last: bool, device: str) -> dict:
    def t(*shape, seed=0):
        return leaf(*shape, seed=seed, last=last, device=device, dtype=torch.float32)

    x, dy, z, w, b = t(2, 4, 3, 5), t(2, 4, 3, 5, seed=1), t(2, 4, 3, 5, seed=2), t(4, seed=3), t(4, seed=4)
    mean, variance = running(4, device)
    half = torch.tensor([0.5], device=device)
    plain = (*SPATIAL, "identity", 0.0)
    return {
        "batch_norm_train_fwd": (
            ops.batch_norm_train_fwd,
            (x, w, b, z, mean, variance, half, 1e-5, 0.0, "spatial", "relu", 0.0),
        ),
        "batch_norm_train_fwd plain": (
            ops.batch_norm_train_fwd,
            (x, None, None, None, None, None, None, 1e-5, 0.0, "spatial", "identity", 0.0),
        ),
        "batch_norm_infer_fwd": (ops.batch_norm_infer_fwd, (x, mean, variance, None, w, b, z, *SPATIAL, "relu", 0.0)),
        "batch_norm_bwd": (
            ops.batch_norm_bwd,
            (dy, x, mean, None, variance, w, b, z, None, *SPATIAL, False, True, "relu", 0.0),
        ),
        "batch_norm_bwd frozen": (
            ops.batch_norm_bwd,
            (dy, x, mean, variance, None, None, None, None, None, *SPATIAL, True, False, "identity", 0.0),
        ),
        "batch_norm_stats": (ops.batch_norm_stats, (x.detach(), "per_activation")),
        "batch_norm_combine": (
            ops.batch_norm_combine,
            (torch.tensor([3.0], device=device), mean[None], variance[None], mean, variance, None, 1e-5, 0.1),
        ),
        "batch_norm_bwd_sums": (
            ops.batch_norm_bwd_sums,
            (dy.detach(), x.detach(), mean, None, variance, None, None, None, None, *plain),
        ),
        "batch_norm_bwd_apply": (
            ops.batch_norm_bwd_apply,
            (dy.detach(), x.detach(), mean, None, variance, None, None, None, None, mean, mean, half, *SPATIAL, False,
             "identity", 0.0),
        ),
    }  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("last", [False, True], ids=["nchw", "nhwc"])
@pytest.mark.parametrize("name", operator_calls(False, "cpu"))
def test_operator(name, last, device):
    operator, args = operator_calls(last, device)[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.library.opcheck(operator.default, args)


@pytest.mark.parametrize("device", DEVICES)
def test_compiles_whole(device):
    x, w = leaf(3, 4, 5, 5, dtype=torch.float32, device=device), leaf(4, seed=1, dtype=torch.float32, device=device)
    eager, compiled = (running(4, device) for _ in range(2))

    def step(x, w, mean, variance):
        return F.batch_norm(x * 2, mean, variance, w, None, True, activation="relu") + 1

    torch._dynamo.reset()
    made = torch.compile(step, fullgraph=True, backend="aot_eager")
    results = [(f(x, w, *r), r) for f, r in ((step, eager), (made, compiled))]
    (y, _), (y2, _) = results
    torch.testing.assert_close((y2, *compiled), (y, *eager))
    for a, e in zip(*(torch.autograd.grad(t.square().sum(), (x, w)) for t in (y2, y)), strict=True):
        torch.testing.assert_close(a, e)


X = torch.randn(4, 3, 5)
BAD = {
    "input": (lambda: F.batch_norm([1.0], None, None, training=True), "input: found list"),
    "one value": (lambda: F.batch_norm(X[:1, :, :1], None, None, training=True), "x: .*more than one value"),
    "weight": (lambda: F.batch_norm(X, None, None, torch.ones(2), training=True), r"scale: .*shape \[3\]"),
    "type": (lambda: F.batch_norm(X.long(), None, None, training=True), "x: .*floating-point"),
    "parameter": (lambda: F.batch_norm(X, None, None, torch.ones(3).long(), training=True), "scale: .*floating"),
    "rank": (lambda: F.batch_norm(X[0, 0], None, None, training=True), "x: .*2 to 5 axes"),
    "epsilon": (lambda: F.batch_norm(X, None, None, training=True, eps=-1.0), "epsilon: found -1.0"),
    "momentum": (lambda: F.batch_norm(X, *running(3), training=True, momentum=1.5), "momentum: found 1.5"),
    "pair": (lambda: F.batch_norm(X, torch.ones(3), None, training=True), "running_var: found None"),
    "nothing": (lambda: F.batch_norm(X, None, None), "running_mean: found None"),
    "z": (lambda: F.batch_norm(X, None, None, training=True, z=X[:2]), r"z: .*shape \[4, 3, 5\]"),
    "activation": (lambda: F.batch_norm(X, None, None, training=True, activation="rleu"), "activation: found 'rleu'"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_named(case):
    call, said = BAD[case]
    with pytest.raises(InvalidArgument, match=said):
        call()
