"""Reductions on tensors against the framework's own: values, types, strides, gradients, NaN and ties, bad arguments."""

from __future__ import annotations

import math

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from lucidnn import functional as F
from lucidnn.core.errors import InvalidArgument, LucidnnError, NotSupported


def values(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


PAIRS = {
    "sum": (F.sum, torch.sum),
    "mean": (F.mean, torch.mean),
    "amax": (F.amax, torch.amax),
    "amin": (F.amin, torch.amin),
    "norm": (lambda x, *a: F.vector_norm(x, 2, *a), lambda x, *a: torch.linalg.vector_norm(x, 2, *a)),
    "norm1": (lambda x, *a: F.vector_norm(x, 1, *a), lambda x, *a: torch.linalg.vector_norm(x, 1, *a)),
    "largest": (lambda x, *a: F.vector_norm(x, math.inf, *a), lambda x, *a: torch.linalg.vector_norm(x, math.inf, *a)),
}
DIMS = [(0,), (-1, 0), (1, 2), (0, 1, 2, 3)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", PAIRS)
def test_as_the_framework(name, dtype):
    ours, theirs = PAIRS[name]
    for layout in (torch.contiguous_format, torch.channels_last):
        x = values(3, 4, 5, 6, dtype=dtype).contiguous(memory_format=layout)
        for dims in DIMS:
            for keep in (False, True):
                got, want = ours(x, dims, keep), theirs(x, dims, keep)
                assert got.stride() == want.stride() and got.dtype == want.dtype
                torch.testing.assert_close(got, want)


def test_the_other_forms():
    x = values(3, 4, 5)
    torch.testing.assert_close(F.sum(x), torch.sum(x))
    torch.testing.assert_close(F.sum(x, 1), torch.sum(x, 1))
    torch.testing.assert_close(
        F.sum(x.bfloat16(), 1, dtype=torch.float32), torch.sum(x.bfloat16(), 1, dtype=torch.float32)
    )
    torch.testing.assert_close(F.mean(x, dtype=torch.bfloat16), torch.mean(x, dtype=torch.bfloat16))
    torch.testing.assert_close(F.prod(x), torch.prod(x))
    torch.testing.assert_close(F.prod(x, 1, True), torch.prod(x, 1, True))
    torch.testing.assert_close(F.norm(x), torch.norm(x))
    torch.testing.assert_close(F.norm(x, 1, 2), torch.norm(x, 1, 2))
    assert F.sum(torch.tensor(3.0), 0).item() == 3.0 and F.max(x).item() == x.max().item() and F.min(x) == x.min()
    z = values(3, 1, 5)
    found = F.reduce_tensor(x, "avg", 1, alpha=2.0, beta=-1.0, z=z)
    torch.testing.assert_close(found, 2 * x.mean(1, True) - z)
    where = F.reduce_tensor(x, "amax", (0, 2), return_indices=True, index_dtype=torch.int32).indices
    assert where.dtype == torch.int32
    assert torch.equal(where.flatten().long(), x.abs().permute(1, 0, 2).reshape(4, 15).argmax(1))
    with_zeros = torch.tensor([[2.0, 0.0, 3.0], [0.0, 0.0, 0.0]])
    assert F.reduce_tensor(with_zeros, "mul_no_zeros", 1, keepdim=False).tolist() == [6.0, 1.0]


@pytest.mark.parametrize("name", ["max", "min"])
def test_nan_and_ties_name_the_first(name):
    nan, inf = math.nan, math.inf
    x = torch.tensor([[1.0, 3.0, 3.0, 1.0], [nan, 9.0, nan, -inf], [-inf, inf, inf, -inf], [2.0, 2.0, nan, nan]])
    x = x[:, torch.arange(160) % 4]
    for t, dim in ((x, 1), (x.t().contiguous(), 0), (x.t(), 0)):
        got, want = getattr(F, name)(t, dim), getattr(torch, name)(t, dim)
        torch.testing.assert_close(got.values, want.values, equal_nan=True)
        places = [
            int((x[i].isnan() if x[i].isnan().any() else x[i] == want.values[i]).int().argmax()) for i in range(4)
        ]
        assert got.indices.tolist() == places
        amax = F.amax(t, dim) if name == "max" else F.amin(t, dim)
        torch.testing.assert_close(amax, want.values, equal_nan=True)
    assert F.vector_norm(x, math.inf, 1).isnan().tolist() == [False, True, False, True]
    assert F.sum(x, 1).isnan().tolist() == [False, True, True, True]


def test_nothing_to_reduce():
    x = torch.empty(0, 3)
    assert F.sum(x, 0).tolist() == [0, 0, 0] and F.prod(x, 0).tolist() == [1, 1, 1]
    assert F.mean(x, 0).isnan().all() and F.vector_norm(x, 2, 0).tolist() == [0, 0, 0]
    assert F.amax(x, 1).shape == (0,) and F.sum(torch.empty(3, 0, 2), 2).shape == (3, 0)
    with pytest.raises(InvalidArgument, match="at least one point along the axes"):
        F.amax(x, 0)


TWICE = {
    "sum": lambda x: F.sum(x, (0, 2)),
    "mean": lambda x: F.mean(x, 1, True),
    "norm": lambda x: F.vector_norm(x, 2, 1),
    "norm of all": F.vector_norm,
    "norm1": lambda x: F.vector_norm(x, 1, (0, 1)),
    "largest": lambda x: F.vector_norm(x, math.inf, 1),
    "amax": lambda x: F.amax(x, (0, 2), True),
    "max": lambda x: F.max(x, 1)[0],
    "min of all": F.min,
    "prod": lambda x: F.prod(x, 1),
    "prod of all": lambda x: F.prod(x[:2, :2, 0]),
    "mul_no_zeros": lambda x: F.reduce_tensor(x, "mul_no_zeros", 1, alpha=0.5),
    "scaled": lambda x: F.reduce_tensor(x, "norm2", 1, alpha=0.5, beta=2.0, z=F.sum(x, 1, True)),
    "amax index": lambda x: F.reduce_tensor(x, "amax", 1, return_indices=True).values,
}


@pytest.mark.parametrize("name", TWICE)
def test_gradients_twice(name):
    order = torch.randperm(24, generator=torch.Generator().manual_seed(7)).double()
    x = (order / 10 - 1.17).reshape(2, 4, 3).requires_grad_()
    assert gradcheck(TWICE[name], (x,)) and gradgradcheck(TWICE[name], (x,))


def test_the_gradient_operator_twice():
    op = torch.ops.lucidnn.reduce_bwd
    x = (
        (torch.randperm(12, generator=torch.Generator().manual_seed(3)).double() / 5 - 1.1)
        .reshape(3, 4)
        .requires_grad_()
    )
    dy, y = (
        values(3, dtype=torch.float64).requires_grad_(),
        (values(3, seed=1, dtype=torch.float64).abs() + 1).requires_grad_(),
    )
    for mode in ("norm2", "mul_no_zeros"):
        call = lambda dy, x, y: op(dy, x, y, None, [3, 4], mode, [1], False, 2.0)  # noqa: B023, E731
        assert gradcheck(call, (dy, x, y)) and gradgradcheck(call, (dy, x, y))
    call = lambda dy, x: op(dy, x, None, None, [3, 4], "mul", [1], False, 2.0)  # noqa: E731
    assert gradcheck(call, (dy, x))
    call = lambda dy: op(dy, None, None, None, [3, 4], "avg", [1], False, 2.0)  # noqa: E731
    assert gradcheck(call, (dy,)) and gradgradcheck(call, (dy,))


@pytest.mark.parametrize("zeros", [0, 1, 2])
def test_gradients_of_products_with_zeros_and_of_ties(zeros):
    x = values(3, 5, dtype=torch.float64)
    x[1, :zeros] = 0
    for ours, theirs in ((F.prod, torch.prod), (F.amax, torch.amax), (F.amin, torch.amin)):
        a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
        (da,), (db,) = (torch.autograd.grad(f(t, 1).cos().sum(), t) for f, t in ((ours, a), (theirs, b)))
        torch.testing.assert_close(da, db)
    x = torch.zeros(3, requires_grad=True)
    assert torch.autograd.grad(F.vector_norm(x), x)[0].tolist() == [0, 0, 0]


def test_operators_pass_the_frameworks_checks_and_compile():
    ops = torch.ops.lucidnn
    x = values(3, 4, 5, dtype=torch.float64).requires_grad_()
    torch.library.opcheck(ops.reduce_fwd.default, (x, None, "norm2", [0, -1], True, 1.0, 0.0, None))
    torch.library.opcheck(ops.reduce_fwd_index.default, (x, None, "max", [1], False, 1.0, 0.0, torch.int64))
    dy = values(4, dtype=torch.float64)
    torch.library.opcheck(ops.reduce_bwd.default, (dy, None, None, None, [3, 4, 5], "avg", [0, 2], False, 1.0))

    @torch.compile(fullgraph=True, backend="aot_eager", dynamic=True)
    def f(x):
        return F.sum(x, 1) * F.amax(x, 1) + F.max(x, 1)[0] - F.vector_norm(x, 2, 1)

    x = values(4, 5).requires_grad_()
    want = x.sum(1) * x.amax(1) + x.max(1)[0] - x.norm(dim=1)
    torch.testing.assert_close(f(x), want)
    torch.testing.assert_close(torch.autograd.grad(f(x).sum(), x), torch.autograd.grad(want.sum(), x))


BAD = {
    "an axis too far": (lambda x: F.sum(x, 2), "dim: found 2; accepted: axes from -2 to 1"),
    "an axis twice": (lambda x: F.mean(x, (0, -2)), "dim: found .*every axis once"),
    "whole numbers": (lambda x: F.sum(x.long()), "x: found i64.*floating-point"),
    "no tensor": (lambda x: F.sum(3.0), "input: found float; accepted: a torch tensor"),
    "a mode": (lambda x: F.reduce_tensor(x, "median"), "mode: found 'median'; accepted: add, mul"),
    "an index of a sum": (
        lambda x: F.reduce_tensor(x, "add", 1, return_indices=True),
        "index_type: found i64; accepted",
    ),
    "a type of index": (
        lambda x: F.reduce_tensor(x, "max", 1, return_indices=True, index_dtype=torch.int8),
        "index_type",
    ),
    "a shape of z": (lambda x: F.reduce_tensor(x, "add", 1, beta=1.0, z=x), r"z: found .*shape \[3, 1\]"),
    "a z without beta": (lambda x: F.reduce_tensor(x, "add", 1, z=x[:, :1]), "beta"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_named(name):
    call, message = BAD[name]
    with pytest.raises(LucidnnError, match=message):
        call(values(3, 4))


def test_a_norm_of_another_order_is_refused():
    with pytest.raises(NotSupported, match="order 3; accepted: 1, 2, inf"):
        F.vector_norm(values(3), 3)
