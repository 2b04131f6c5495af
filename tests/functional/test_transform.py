"""Tensors in another layout, type or size against the framework: values, strides, gradients, bad arguments."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as TF
from torch.autograd import gradcheck, gradgradcheck

from lucidnn import functional as F
from lucidnn.core.errors import InvalidArgument

LAST = torch.channels_last


def values(*shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("to", [torch.contiguous_format, LAST])
@pytest.mark.parametrize("from_", [torch.contiguous_format, LAST])
@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float32), (torch.bfloat16, torch.float32)])
def test_layouts_and_types(dtypes, from_, to):
    x = values(2, 20, 5, 17, dtype=dtypes[0]).contiguous(memory_format=from_)
    got = F.transform_tensor(x, dtype=dtypes[1], memory_format=to)
    want = x.to(dtypes[1]).contiguous(memory_format=to)
    assert got.dtype == want.dtype and got.stride() == want.stride() and torch.equal(got, want)


def test_strides_stay_where_nothing_is_asked():
    for x in (
        values(3, 4, 5).permute(2, 0, 1),
        values(2, 3, 4, 5).contiguous(memory_format=LAST),
        values(3, 8)[:, ::2],
    ):
        got = F.transform_tensor(x, alpha=2.0)
        assert got.stride() == torch.empty_like(x).stride() and torch.equal(got, 2 * x)
    deep = values(1, 2, 1, 2, 1, 3).transpose(1, 5)
    assert torch.equal(F.transform_tensor(deep, memory_format=torch.contiguous_format), deep)


def test_padding_is_the_frameworks():
    x = values(2, 3, 5, 6)
    padding = ((1, 0), 0, (-2, 3), (0, -1))
    want = TF.pad(x, (0, -1, -2, 3, 0, 0, 1, 0), value=1.5)
    assert torch.equal(F.transform_tensor(x, padding=padding, value=1.5), want)
    got = F.transform_tensor(x.contiguous(memory_format=LAST), padding=padding, value=1.5)
    assert torch.equal(got, want) and got.is_contiguous(memory_format=LAST)
    y = values(3, 3, 6, 5)
    got = F.transform_tensor(x, alpha=3.0, beta=-1.0, y=y, padding=padding)
    torch.testing.assert_close(got, 3 * TF.pad(x, (0, -1, -2, 3, 0, 0, 1, 0)) - y)
    whole = torch.arange(6).reshape(2, 3)
    assert F.transform_tensor(whole, padding=(0, 1), value=-1).tolist() == [[-1, 0, 1, 2, -1], [-1, 3, 4, 5, -1]]


def test_folds_are_the_frameworks_shuffles_and_undo_each_other():
    x = values(2, 3, 6, 8)
    folded = F.transform_tensor(x, fold=(2, 2))
    assert torch.equal(folded, TF.pixel_unshuffle(x, 2))
    assert torch.equal(F.transform_tensor(folded, fold=(2, 2), unfold=True), TF.pixel_shuffle(folded, 2))
    x = values(2, 3, 3, 5, 7).contiguous(memory_format=torch.channels_last_3d)
    padding = ((0, 0), (0, 1), (1, 0), (0, 1), (1, 1))
    folded = F.transform_tensor(x, padding=padding, fold=(2, 3, 1))
    want = TF.pad(x, (1, 1, 0, 1, 1, 0, 0, 1)).reshape(2, 4, 2, 2, 2, 3, 9).permute(0, 1, 3, 5, 2, 4, 6)
    assert torch.equal(folded, want.reshape(2, 24, 2, 2, 9))
    assert folded.is_contiguous(memory_format=torch.channels_last_3d)
    opposite = tuple((-a, -b) for a, b in padding)
    assert torch.equal(F.transform_tensor(folded, padding=opposite, fold=(2, 3, 1), unfold=True), x)


ATTRIBUTES = {
    "a layout": {"memory_format": LAST},
    "padding": {"padding": ((0, 1), 0, (1, -1), 2), "value": 3.0},
    "a fold": {"padding": (0, 0, (0, 1), 1), "fold": (2, 3)},
    "an unfolding": {"padding": (0, (1, 0), (-1, 0), (0, -1)), "fold": (1, 2), "unfold": True},
}


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_gradients_twice(name):
    x = values(2, 4, 3, 4, dtype=torch.float64).contiguous(memory_format=LAST).requires_grad_()
    y = torch.randn_like(F.transform_tensor(x, **ATTRIBUTES[name])).requires_grad_()

    def call(x, y):
        return F.transform_tensor(x, alpha=0.5, beta=2.0, y=y, **ATTRIBUTES[name])

    assert gradcheck(call, (x, y)) and gradgradcheck(call, (x, y))


def test_the_operator_passes_the_frameworks_checks_and_compiles():
    x = values(2, 3, 4, 6, dtype=torch.float64).contiguous(memory_format=LAST).requires_grad_()
    attributes = (1.0, 0.0, [0, 1, 0, 0, 1, 1, 0, 0], 2.0, [2, 3], False, None, "last")
    torch.library.opcheck(torch.ops.lucidnn.transform_tensor.default, (x, None, *attributes))

    @torch.compile(fullgraph=True, backend="aot_eager", dynamic=True)
    def f(x):
        return F.transform_tensor(x * 2, padding=(0, 0, 1, (0, 2)), fold=(2, 1), dtype=torch.float32)

    assert torch.equal(
        f(x), TF.pad(2 * x, (0, 2, 1, 1)).reshape(2, 3, 3, 2, 8).transpose(2, 3).reshape(2, 6, 3, 8).float()
    )


BAD = {
    "padding": (lambda x: F.transform_tensor(x, padding=(1, 2)), r"padding: found \(1, 2\); accepted: a number or a p"),
    "too much taken": (lambda x: F.transform_tensor(x, padding=(0, 0, 0, -3)), "padding: .*at least as much left"),
    "a fold": (
        lambda x: F.transform_tensor(x, fold=(2, 2)),
        r"fold: found \[2, 2\]; .*divide the padded sizes \[4, 5\]",
    ),
    "an unfolding": (lambda x: F.transform_tensor(x, fold=(2, 2), unfold=True), "fold: .*divides the 3 channels"),
    "factors": (lambda x: F.transform_tensor(x, fold=(2,)), r"fold: found \[2\]; accepted: 2 factors"),
    "a factor": (lambda x: F.transform_tensor(x, fold=(0, 1)), r"fold: .*factors >= 1"),
    "a format": (lambda x: F.transform_tensor(x[0], memory_format=LAST), "memory_format: .*tensors of 3 axes"),
    "whole numbers": (lambda x: F.transform_tensor(x.int(), alpha=0.5), "alpha: found 0.5; accepted: a whole number"),
    "a second tensor": (lambda x: F.transform_tensor(x, beta=1.0, y=x[:1]), r"z: .*shape \[2, 3, 4, 5\]"),
    "no tensor": (lambda x: F.transform_tensor(1.0), "x: found float"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_named(name):
    call, message = BAD[name]
    with pytest.raises(InvalidArgument, match=message):
        call(values(2, 3, 4, 5))
