"""Unfold, fold and shuffles against the framework: values, strides, gradients, compilation, and bad arguments."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as T
from torch.autograd import gradcheck, gradgradcheck

from lucidnn import functional as F
from lucidnn.core.errors import InvalidArgument
from lucidnn.core.settings import using

WINDOWS = [
    {"kernel_size": 3},
    {"kernel_size": (3, 2), "stride": (2, 1), "padding": (1, 0)},
    {"kernel_size": 2, "dilation": (3, 2), "padding": 4, "stride": (3, 2)},
]
SHUFFLES = [
    (F.pixel_shuffle, T.pixel_shuffle, (2, 12, 3, 5), 2),
    (F.pixel_shuffle, T.pixel_shuffle, (9, 3, 5), 3),
    (F.pixel_shuffle, T.pixel_shuffle, (2, 3, 4, 2, 2), 2),
    (F.pixel_unshuffle, T.pixel_unshuffle, (2, 3, 6, 10), 2),
    (F.channel_shuffle, torch.channel_shuffle, (2, 6, 3, 5), 3),
    (F.channel_shuffle, torch.channel_shuffle, (2, 8, 7), 2),
]


def values(*shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("engine", ["fold.reference", "fold.windows"])
@pytest.mark.parametrize("request_", WINDOWS)
def test_columns_as_the_framework_has_them(request_, engine):
    x = values(2, 3, 9, 8).requires_grad_()
    expected = T.unfold(x, **request_)
    columns = values(*expected.shape).requires_grad_()
    folded = T.fold(columns, (9, 8), **request_)
    with using(engine=engine):
        found, again = F.unfold(x, **request_), F.fold(columns, (9, 8), **request_)
        grads = torch.autograd.grad([found, again], [x, columns], [columns, x])
    assert torch.equal(found, expected) and found.stride() == expected.stride()
    torch.testing.assert_close(again, folded)
    wanted = torch.autograd.grad([expected, folded], [x, columns], [columns, x])
    torch.testing.assert_close(grads[0], wanted[0])
    torch.testing.assert_close(grads[1], wanted[1])
    one = F.unfold(x[0], **request_)
    assert torch.equal(one, expected[0])
    torch.testing.assert_close(F.fold(columns[0], (9, 8), **request_), folded[0])


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("function, peer, shape, factor", SHUFFLES)
def test_shuffles_as_the_framework_has_them(function, peer, shape, factor, last):
    x = values(*shape)
    if last and len(shape) == 4:
        x = x.contiguous(memory_format=torch.channels_last)
    x.requires_grad_()
    found, expected = function(x, factor), peer(x, factor)
    grad = values(*expected.shape)
    assert torch.equal(found, expected)
    assert torch.equal(torch.autograd.grad(found, x, grad)[0], torch.autograd.grad(expected, x, grad)[0])
    assert found.is_contiguous(memory_format=torch.channels_last) or not last or len(shape) != 4


def test_gradients_twice():
    x = values(1, 4, 4, 3, dtype=torch.float64).requires_grad_()
    columns = values(1, 8, 6, dtype=torch.float64).requires_grad_()
    for function, t in (
        (lambda t: F.unfold(t, 2, padding=1, stride=2), x),
        (lambda t: F.fold(t, (4, 3), 2), columns),
        (lambda t: F.pixel_shuffle(t, 2), x),
        (lambda t: F.channel_shuffle(t, 2), x),
    ):
        assert gradcheck(function, (t,), fast_mode=True) and gradgradcheck(function, (t,), fast_mode=True)


def test_operators_keep_the_frameworks_rules():
    x = values(2, 4, 4, 6).requires_grad_()
    window = ([2, 3], [1, 2], [1, 0], [1, 1])
    torch.library.opcheck(torch.ops.lucidnn.unfold_fwd, (x, *window))
    columns = F.unfold(x, (2, 3), 1, (1, 0), (1, 2)).detach().requires_grad_()
    torch.library.opcheck(torch.ops.lucidnn.unfold_bwd, (columns, [4, 6], *window))
    for kind in ("pixel_shuffle", "pixel_unshuffle", "channel_shuffle"):
        torch.library.opcheck(torch.ops.lucidnn.shuffle, (x, kind, 2))


def test_compiled_whole():
    def f(x):
        return F.pixel_unshuffle(F.pixel_shuffle(x, 2), 2) + F.fold(F.unfold(x, 1), x.shape[2:], 1)

    x = values(2, 4, 4, 6)
    torch.testing.assert_close(torch.compile(f, fullgraph=True, backend="aot_eager")(x), 2 * x)


@pytest.mark.parametrize(
    "call, argument",
    [
        (lambda x: F.unfold(x, 9), "window"),
        (lambda x: F.unfold(x, 0), "window"),
        (lambda x: F.unfold(x, 2, stride=0), "stride"),
        (lambda x: F.unfold(x, 2, padding=-1), "padding"),
        (lambda x: F.unfold(x, (1, 2, 3)), "kernel_size"),
        (lambda x: F.unfold(x[0, 0], 2), "input"),
        (lambda x: F.fold(x[0], (4, 4), 5), "dy"),
        (lambda x: F.fold(x[0], (4, 4), 1), "dy"),
        (lambda x: F.pixel_shuffle(x, 3), "factor"),
        (lambda x: F.pixel_shuffle(x, 0), "upscale_factor"),
        (lambda x: F.pixel_unshuffle(x, 4), "factor"),
        (lambda x: F.channel_shuffle(x, 3), "factor"),
        (lambda x: F.channel_shuffle("x", 3), "input"),
    ],
)
def test_bad_requests_name_the_argument(call, argument):
    with pytest.raises(InvalidArgument, match=f"^{argument}"):
        call(torch.zeros(2, 4, 5, 6))
