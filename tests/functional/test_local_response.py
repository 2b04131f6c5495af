"""Local response and divisive normalization against the framework: values, strides, gradients, errors."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as T

from lucidnn import functional as F
from lucidnn.core.errors import InvalidArgument

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SETTINGS = (0.5, 0.75, 1.5)


def divisive(x, size, alpha, beta, k, means=None):
    """The definition, by average pooling."""
    u = x if means is None else x - means
    space = x.ndim - 2
    pool = (T.avg_pool1d, T.avg_pool2d, T.avg_pool3d)[space - 1]
    square = T.pad(u * u, [size // 2, (size - 1) // 2] * space)
    return u / (k + alpha * pool(square, size, 1)) ** beta


def agree(ours, theirs, x, bound, *others):
    """Values, strides and gradients."""
    a, b = (x.clone(memory_format=torch.preserve_format).requires_grad_() for _ in "ab")
    y, expected = ours(a, *others), theirs(b, *others)
    torch.testing.assert_close(y, expected, rtol=bound, atol=bound)
    assert y.stride() == x.stride()
    g = torch.randn(x.shape, generator=torch.Generator().manual_seed(2)).to(x)
    found, wanted = torch.autograd.grad(y, a, g)[0], torch.autograd.grad(expected, b, g)[0]
    torch.testing.assert_close(found, wanted, rtol=2 * bound, atol=2 * bound)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_as_the_framework(dtype, device):
    generator = torch.Generator().manual_seed(1)
    bound = 2e-6 if dtype == torch.float32 else 2e-2
    for shape, size in (((2, 7, 5), 1), ((2, 6, 3, 5), 4), ((1, 9, 2, 3, 4), 20)):
        x = torch.randn(shape, generator=generator).to(device, dtype)
        x = x.to(memory_format=torch.channels_last) if x.ndim == 4 else x
        agree(
            lambda v, size=size: F.local_response_norm(v, size, *SETTINGS),
            lambda v, size=size: T.local_response_norm(v.float(), size, *SETTINGS).to(v.dtype),  # no 16 bits on a CPU
            x,
            bound,
        )


@pytest.mark.parametrize("device", DEVICES)
def test_divisive(device):
    for shape, size in (((2, 3, 17), 5), ((2, 3, 5, 7), 4), ((1, 2, 3, 4, 5), 3)):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(device)
        means = torch.full_like(x, 0.25)
        for others in ((), (means,)):
            agree(
                lambda v, m=None, size=size: F.divisive_normalization(v, size, *SETTINGS, means=m),
                lambda v, m=None, size=size: divisive(v, size, *SETTINGS, means=m),
                x,
                4e-6,
                *others,
            )


def test_nan_stays_in_its_window():
    x = torch.randn(1, 9, 4)
    x[0, 4, 1] = torch.nan
    y = F.local_response_norm(x, 3)
    torch.testing.assert_close(y, T.local_response_norm(x, 3), equal_nan=True)
    assert int(y.isnan().sum()) == 3


def test_derivatives():
    x, m = (torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True) for _ in "xm")
    for function, given in (
        (lambda v: F.local_response_norm(v, 2, *SETTINGS), (x,)),
        (lambda v, m: F.divisive_normalization(v, 3, *SETTINGS, means=m), (x, m)),
    ):
        assert torch.autograd.gradcheck(function, given) and torch.autograd.gradgradcheck(function, given)


def test_operators_and_compilation():
    x = torch.randn(2, 5, 4, requires_grad=True)
    plain, attributes = x.detach(), (3, *SETTINGS)
    torch.library.opcheck(torch.ops.lucidnn.lrn_fwd, (x, *attributes))
    torch.library.opcheck(torch.ops.lucidnn.lrn_bwd, (plain, plain, *attributes))
    torch.library.opcheck(torch.ops.lucidnn.divisive_norm_fwd, (x, plain, *attributes))
    torch.library.opcheck(torch.ops.lucidnn.divisive_norm_bwd, (plain, plain, None, *attributes))

    def step(v):
        return F.divisive_normalization(F.local_response_norm(v, 3), 3)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    expected = torch.autograd.grad(step(x).sum(), x)[0]
    torch.testing.assert_close(torch.autograd.grad(compiled(x).sum(), x)[0], expected)


def test_bad_input():
    x = torch.randn(2, 3, 4)
    for call, name in (
        (lambda: F.local_response_norm(x[0], 3), "input"),
        (lambda: F.local_response_norm(x, 0), "size"),
        (lambda: F.local_response_norm(x, 3, beta=float("nan")), "beta"),
        (lambda: F.local_response_norm(x.int(), 3), "input"),
        (lambda: F.divisive_normalization(x[0], 3, k=math.inf), "input"),
        (lambda: F.divisive_normalization(x, 3, k=math.inf), "k"),
        (lambda: F.divisive_normalization(x, 3, means=x[:1]), "means"),
    ):
        with pytest.raises(InvalidArgument, match=f"^{name}: found"):
            call()
