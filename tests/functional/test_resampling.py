"""Resampling against the framework: values, strides, gradients once and twice, compilation, and bad arguments."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as T
from torch.autograd import gradcheck, gradgradcheck

from lucidnn import functional as F
from lucidnn.core.errors import InvalidArgument
from lucidnn.core.plan import observe
from lucidnn.core.settings import using

SHAPES = {1: (2, 3, 9), 2: (2, 3, 7, 9), 3: (1, 2, 4, 5, 6)}
SIZES = {1: [20, 4], 2: [(14, 18), (4, 5), (7, 9), (1, 13)], 3: [(6, 10, 3)]}
FACTORS = {1: [2, 0.37], 2: [2, (1.7, 0.6)], 3: [1.3]}
MODES = {1: ["linear"], 2: ["bilinear", "bicubic"], 3: ["trilinear"]}


def values(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def requests():
    """All modes and conventions that the framework has, each with a few sizes."""
    for ndim, shape in SHAPES.items():
        for mode in ["nearest", "nearest-exact", "area", *MODES[ndim]]:
            for corners in (False, True) if mode in MODES[ndim] else (None,):
                for antialias in (False, True) if ndim == 2 and mode in MODES[ndim] else (False,):
                    how = {"mode": mode, "align_corners": corners, "antialias": antialias}
                    for size in SIZES[ndim]:
                        yield shape, {"size": size, **how}
                    for factor in FACTORS[ndim]:
                        yield shape, {"scale_factor": factor, **how}
                        yield shape, {"scale_factor": factor, "recompute_scale_factor": True, **how}


@pytest.mark.parametrize("engine", ["resample.reference", "resample.separable"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_as_the_framework_does(dtype, engine):
    for number, (shape, request) in enumerate(requests()):
        x = values(*shape, seed=number, dtype=dtype).requires_grad_()
        expected = T.interpolate(x, **request)
        grad = torch.randn_like(expected)
        (dx,) = torch.autograd.grad(expected, x, grad)
        with using(engine=engine):
            found = F.interpolate(x, **request)
            (found_dx,) = torch.autograd.grad(found, x, grad)
        close = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1e-9, "atol": 1e-9}
        assert found.stride() == expected.stride() and found_dx.stride() == dx.stride()
        torch.testing.assert_close(found, expected, **close, msg=f"{request}")
        torch.testing.assert_close(found_dx, dx, **close, msg=f"gradient, {request}")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bits_and_channels_last(dtype):
    for channels in (3, 24):
        x = values(2, channels, 6, 7, dtype=dtype).contiguous(memory_format=torch.channels_last)
        y = F.interpolate(x, scale_factor=2, mode="bilinear")
        expected = T.interpolate(x.double(), scale_factor=2, mode="bilinear")
        assert y.dtype == dtype and y.is_contiguous(memory_format=torch.channels_last)
        torch.testing.assert_close(y.double(), expected, rtol=1e-2, atol=1e-2)


def test_any_strides():
    x = values(2, 3, 20, 30)[:, :, ::2, 1::3].transpose(2, 3)
    torch.testing.assert_close(F.interpolate(x, (5, 23), mode="bilinear"), T.interpolate(x, (5, 23), mode="bilinear"))
    y = F.interpolate(values(1, 1, 4, 4).expand(3, 5, 4, 4), (8, 8), mode="bicubic")
    assert torch.equal(y[0, 0], y[2, 4])


def test_the_given_factor_counts_not_the_ratio():
    x = values(1, 1, 10)
    given = F.interpolate(x, scale_factor=0.45, mode="linear")
    ratio = F.interpolate(x, scale_factor=0.45, mode="linear", recompute_scale_factor=True)
    torch.testing.assert_close(given, T.interpolate(x, scale_factor=0.45, mode="linear"))
    assert given.shape == ratio.shape == (1, 1, 4) and not torch.allclose(given, ratio)


def test_nan_stays_where_it_belongs():
    x = torch.zeros(1, 1, 4, 40)
    x[0, 0, 1, 20] = float("nan")
    for engine in ("resample.reference", "resample.separable"):
        with using(engine=engine):
            assert F.interpolate(x, scale_factor=2, mode="bilinear").isnan().sum() == 16
            assert F.interpolate(x, (4, 40), mode="bilinear").isnan().sum() == 1
            assert F.interpolate(x, scale_factor=2).isnan().sum() == 4


def test_empty_batch():
    x = torch.zeros(0, 3, 4, 5, requires_grad=True)
    y = F.interpolate(x, scale_factor=2, mode="bilinear")
    y.sum().backward()
    assert y.shape == (0, 3, 8, 10) and x.grad.shape == x.shape


@pytest.mark.parametrize(
    "mode, shape, size",
    [
        ("nearest", (1, 2, 3, 4), (5, 3)),
        ("bilinear", (2, 2, 3, 4), (5, 7)),
        ("bicubic", (1, 1, 4, 3), (3, 5)),
        ("area", (1, 2, 5), 3),
        ("trilinear", (1, 1, 2, 3, 2), (3, 2, 4)),
    ],
)
def test_gradients_twice(mode, shape, size):
    x = values(*shape, dtype=torch.float64).requires_grad_()
    assert gradcheck(lambda x: F.interpolate(x, size, mode=mode), (x,), fast_mode=True)
    assert gradgradcheck(lambda x: F.interpolate(x, size, mode=mode), (x,), fast_mode=True)


def test_what_is_asked():
    x = values(2, 3, 4, 5).requires_grad_()
    with observe() as plans:
        F.interpolate(x, scale_factor=2.5, mode="bilinear").sum().backward()
    lines = [plan.problem.text.rpartition(" on=")[0] for plan in plans]
    assert lines == [
        "resample_fwd x=f32[2,3,4,5]@nchw y=f32[2,3,10,12]@nchw size=10,12 mode=linear scale=2.5,2.5",
        "resample_bwd dy=f32[2,3,10,12]@(0,0,0,0) dx=f32[2,3,4,5]@nchw size=4,5 mode=linear scale=2.5,2.5",
    ]


def test_operators_keep_the_frameworks_rules():
    x = values(2, 3, 4, 5).requires_grad_()
    last = values(2, 3, 4, 5).contiguous(memory_format=torch.channels_last).requires_grad_()
    for t in (x, last):
        torch.library.opcheck(torch.ops.lucidnn.resample_fwd, (t, [6, 7], [], "linear", False, False))
    torch.library.opcheck(torch.ops.lucidnn.resample_bwd, (x, [2, 9], False, [1.0, 1.5], "linear", True, False))


def test_compiled_whole():
    def f(x):
        return F.interpolate(x, scale_factor=2, mode="bilinear") + F.upsample(x, (8, 10))

    x = values(2, 3, 4, 5)
    torch.testing.assert_close(torch.compile(f, fullgraph=True, backend="aot_eager")(x), f(x))


@pytest.mark.parametrize(
    "request_, argument",
    [
        ({"size": (2, 3), "scale_factor": 2}, "size"),
        ({}, "size"),
        ({"size": (0, 3)}, "size"),
        ({"size": (2, 3, 4)}, "size"),
        ({"scale_factor": -1.0}, "scale_factor"),
        ({"scale_factor": 0.01}, "size"),
        ({"size": 4, "mode": "linear"}, "mode"),
        ({"size": 4, "mode": "lanczos3"}, "mode"),
        ({"size": 4, "mode": "nearest", "align_corners": True}, "align_corners"),
        ({"size": 4, "mode": "area", "antialias": True}, "antialias"),
        ({"size": 4, "recompute_scale_factor": True}, "recompute_scale_factor"),
    ],
)
def test_bad_requests_name_the_argument(request_, argument):
    with pytest.raises(InvalidArgument, match=f"^{argument}"):
        F.interpolate(torch.zeros(1, 1, 5, 5), **request_)


def test_bad_inputs():
    for x in (torch.zeros(3, 4), torch.zeros(1, 1, 0, 4), torch.zeros(1, 1, 4, 4, dtype=torch.int64), "image"):
        with pytest.raises(InvalidArgument):
            F.interpolate(x, 4)
