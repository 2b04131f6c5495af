"""The functions against the framework's own: values, gradients, strides, in every argument form and type."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as T

import peer
from lucidnn import functional as F
from lucidnn.ops.activation import ACTIVATIONS

# Rounding of a result, and of sums whose order differs; relative to the largest value.
BOUND = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
# Every type and shape is another kernel to compile on a GPU: two types there, and the rest in the engines' own tests.
ON = [
    pytest.param(dtype, device, id=f"{device} {str(dtype).removeprefix('torch.')}", marks=marks)
    for device, dtypes, marks in (("cpu", DTYPES, ()), ("cuda", DTYPES[1:3], pytest.mark.gpu))
    for dtype in dtypes
]
FORMATS = {3: None, 4: torch.channels_last, 5: torch.channels_last_3d}

# name: (input, weight, bias?, arguments, the framework's arguments where they differ)
CONVOLUTIONS = {
    "plain": ((2, 3, 9, 8), (4, 3, 3, 3), True, {}, None),
    "padding": ((2, 3, 9, 8), (4, 3, 3, 3), True, {"padding": 1}, None),
    "stride": ((2, 3, 9, 8), (4, 3, 3, 3), False, {"stride": 2, "padding": (1, 0)}, None),
    "stride over the filter": ((2, 3, 11, 13), (4, 3, 2, 2), True, {"stride": (3, 4)}, None),
    "dilation": ((2, 3, 9, 8), (4, 3, 3, 2), True, {"dilation": (2, 3), "padding": 2}, None),
    "groups": ((2, 4, 7, 7), (6, 2, 3, 3), True, {"groups": 2}, None),
    "depthwise": ((2, 4, 7, 7), (8, 1, 3, 3), True, {"groups": 4, "padding": 1}, None),
    "1x1": ((2, 5, 6, 6), (4, 5, 1, 1), True, {}, None),
    "1x1 stride 2": ((2, 5, 6, 7), (4, 5, 1, 1), True, {"stride": 2}, None),
    "one output": ((2, 5, 3, 4), (4, 5, 3, 4), True, {}, None),
    "'same'": ((2, 3, 9, 8), (4, 3, 3, 3), True, {"padding": "same"}, None),
    "'same', even filter": ((2, 3, 9, 8), (4, 3, 2, 4), True, {"padding": "same", "dilation": (1, 3)}, None),
    "'valid'": ((2, 3, 9, 8), (4, 3, 3, 3), True, {"padding": "valid"}, None),
    "lists": ((2, 3, 9, 8), (4, 3, 3, 3), True, {"stride": [1, 2], "padding": [1], "dilation": [1, 1]}, None),
    "pairs": ((2, 3, 9, 8), (4, 3, 3, 3), True, {"padding": ((1, 0), (0, 2))}, (0, 2, 1, 0)),
    "unbatched": ((3, 9, 8), (4, 3, 3, 3), True, {"padding": 1}, None),
    "no image": ((0, 3, 9, 8), (4, 3, 3, 3), True, {"padding": 1}, None),
    "one pixel": ((2, 3, 1, 1), (4, 3, 3, 3), True, {"padding": 1}, None),
    "1-D": ((2, 3, 19), (4, 3, 5), True, {"stride": 2, "padding": 3}, None),
    "1-D causal": ((2, 3, 19), (4, 3, 5), True, {"padding": ((4, 0),)}, (4, 0)),
    "1-D 'same'": ((2, 3, 19), (4, 3, 4), False, {"padding": "same"}, None),
    "1-D unbatched": ((3, 19), (4, 3, 5), True, {}, None),
    "3-D": ((2, 2, 4, 5, 6), (3, 2, 2, 3, 2), True, {"stride": (1, 2, 1), "padding": (1, 0, 1)}, None),
    "3-D groups": ((1, 4, 4, 4, 4), (4, 1, 3, 3, 3), False, {"groups": 4, "padding": 1, "dilation": 1}, None),
    "3-D pairs": ((1, 2, 4, 4, 4), (3, 2, 3, 3, 3), True, {"padding": ((0, 1), (2, 0), (1, 1))}, (1, 1, 2, 0, 0, 1)),
    "3-D unbatched": ((2, 4, 5, 6), (3, 2, 2, 2, 2), True, {}, None),
}  # fmt: skip


def ours(weight, *args, **kwargs):
    return (F.conv1d, F.conv2d, F.conv3d)[weight.ndim - 3](*args, **kwargs)


def theirs(weight, x, w, b, pads, kwargs):
    if pads is not None:
        x, kwargs = T.pad(x, pads), {k: v for k, v in kwargs.items() if k != "padding"}
    return (T.conv1d, T.conv2d, T.conv3d)[weight.ndim - 3](x, w, b, **kwargs)


def leaf(shape, dtype, device, channels_last=False, seed=0):
    t = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(device, dtype)
    if channels_last and FORMATS.get(t.ndim):
        t = t.contiguous(memory_format=FORMATS[t.ndim])
    return t.requires_grad_()


def same(found, expected, dtype, what):
    assert found.dtype == expected.dtype and found.shape == expected.shape, what
    if expected.numel():
        scale = float(expected.detach().abs().max()) or 1.0
        off = float((found.detach().double() - expected.detach().double()).abs().max())
        assert off <= BOUND[dtype] * scale * 4, f"{what}: off by {off:.2e} at scale {scale:.2e}"


@pytest.fixture
def ieee():
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = before


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("dtype, device", ON)
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolution(name, dtype, device, ieee):
    """Against the framework in float64 on the same rounded inputs: its own rounding is not in the way."""
    x_shape, w_shape, has_bias, kwargs, pads = CONVOLUTIONS[name]
    x, w = leaf(x_shape, dtype, device, seed=1), leaf(w_shape, dtype, device, seed=2)
    b = leaf(w_shape[:1], dtype, device, seed=3) if has_bias else None
    precise = [None if t is None else t.detach().double().requires_grad_() for t in (x, w, b)]
    y, expected = ours(w, x, w, b, **kwargs), theirs(w, *precise, pads, kwargs)
    same(y.to(torch.float64), expected, dtype, "y")
    assert y.dtype == dtype
    dy = leaf(y.shape, dtype, device, seed=4).detach()
    y.backward(dy)
    expected.backward(dy.double())
    for what, found, want in zip(("x", "w", "b"), (x, w, b), precise, strict=True):
        if found is not None:
            assert found.grad.dtype == dtype
            same(found.grad.double(), want.grad, dtype, f"gradient of {what}")


@pytest.mark.parametrize("w_last", [False, True], ids=["w nchw", "w nhwc"])
@pytest.mark.parametrize("x_last", [False, True], ids=["x nchw", "x nhwc"])
@pytest.mark.parametrize(
    "name, device",
    # Padding by pairs is two calls there; one image in 3-D goes a way that knows no formats.
    [
        *(
            (name, "cpu")
            for name, case in CONVOLUTIONS.items()
            if len(case[0]) > 3 and case[4] is None and name not in ("no image", "3-D unbatched")
        ),
        *(pytest.param(name, "cuda", marks=pytest.mark.gpu) for name in ("padding", "groups", "1x1 stride 2")),
    ],
)
def test_strides_are_the_frameworks(name, x_last, w_last, device, ieee):
    """Output and gradients come in the memory format that the framework's would."""
    x_shape, w_shape, has_bias, kwargs, _ = CONVOLUTIONS[name]
    results = []
    for function in (lambda *a: ours(a[1], *a, **kwargs), lambda *a: theirs(a[1], *a, None, kwargs)):
        x, w = leaf(x_shape, torch.float32, device, x_last, 1), leaf(w_shape, torch.float32, device, w_last, 2)
        b = leaf(w_shape[:1], torch.float32, device, seed=3) if has_bias else None
        y = function(x, w, b)
        y.backward(torch.ones_like(y))
        results.append((y, x.grad, w.grad))
    for what, found, expected in zip(("y", "dx", "dw"), *results, strict=True):
        assert meant(found) == meant(expected), what


def meant(t):
    """Strides of the axes that are stepped along."""
    return [stride for size, stride in zip(t.shape, t.stride(), strict=True) if size > 1]


POOLS = {
    "2": ((2, 3, 8, 8), {"kernel_size": 2}),
    "3, stride 2, padding 1": ((2, 3, 9, 8), {"kernel_size": 3, "stride": 2, "padding": 1}),
    "pairs": ((2, 3, 9, 8), {"kernel_size": (3, 2), "stride": (1, 2), "padding": (1, 0), "dilation": (2, 1)}),
    "ceil": ((2, 3, 9, 8), {"kernel_size": 3, "stride": 2, "ceil_mode": True}),
    "ceil, padding": ((2, 3, 5, 6), {"kernel_size": 2, "stride": 3, "padding": 1, "ceil_mode": True}),
    "overlap": ((1, 2, 7, 7), {"kernel_size": 3, "stride": 1, "padding": 1}),
    "gaps": ((1, 2, 9, 9), {"kernel_size": 2, "stride": 3}),
    "unbatched": ((3, 8, 8), {"kernel_size": 2}),
    "no image": ((0, 3, 8, 8), {"kernel_size": 2}),
    "large": ((1, 2, 20, 20), {"kernel_size": 17, "stride": 1}),
    "1-D": ((2, 3, 11), {"kernel_size": 3, "stride": 2, "padding": 1}),
    "3-D": ((1, 2, 4, 5, 6), {"kernel_size": (2, 3, 2), "stride": (1, 2, 3), "padding": (0, 1, 1)}),
}


@pytest.mark.parametrize("last", [False, True], ids=["first", "last"])
@pytest.mark.parametrize("dtype, device", ON)
@pytest.mark.parametrize("name", POOLS)
def test_max_pool(name, dtype, last, device):
    """Bit for bit: values, positions, gradients and strides."""
    shape, kwargs = POOLS[name]
    ndim = len(shape) - (1 if name == "unbatched" else 2)
    x = leaf(shape, dtype, device, last, 5)
    x.data.mul_(2).round_()  # many equal values: the first must win
    twin = x.detach().clone().requires_grad_()
    y, index = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[ndim - 1](x, return_indices=True, **kwargs)
    expected, place = (T.max_pool1d, T.max_pool2d, T.max_pool3d)[ndim - 1](twin, return_indices=True, **kwargs)
    assert torch.equal(y, expected) and torch.equal(index, place)
    assert index.dtype == torch.int64 and not index.requires_grad
    alone = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[ndim - 1](x, **kwargs)
    assert torch.equal(alone, y) and alone.stride() == y.stride()
    if ndim == 2:
        assert y.stride() == expected.stride()
    dy = leaf(y.shape, dtype, device, seed=6).detach().mul_(4).round_()  # sums of whole numbers have no rounding
    for out, source in ((y, x), (alone, x)):
        (dx,) = torch.autograd.grad(out, source, dy)
        (want,) = torch.autograd.grad(expected, twin, dy, retain_graph=True)
        assert torch.equal(dx, want) and (ndim != 2 or name == "no image" or dx.stride() == want.stride())


@pytest.mark.parametrize("dtype, device", ON)
def test_relu(dtype, device):
    special = [float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e-7, -1e-7, 3.0, -3.0]
    base = torch.tensor(special * 12, dtype=dtype, device=device)
    views = [
        base, base.reshape(9, 12).T, base.reshape(3, 4, 3, 3)[:, ::2], base[3].reshape(()), base[:0], base[5:],
        base[3].expand(4, 5), base.reshape(3, 4, 3, 3).contiguous(memory_format=torch.channels_last),
    ]  # fmt: skip
    for view in views:
        x, twin = (view.detach().clone(memory_format=torch.preserve_format).requires_grad_() for _ in "ab")
        y, expected = F.relu(x), T.relu(twin)
        torch.testing.assert_close(y, expected, rtol=0, atol=0, equal_nan=True)
        assert y.stride() == expected.stride()
        dy = torch.randn_like(y)
        y.backward(dy)
        expected.backward(dy)
        finite = ~twin.isnan()  # at NaN the framework passes the gradient on, and so do we or NaN itself
        torch.testing.assert_close(x.grad[finite], twin.grad[finite], rtol=0, atol=0)


@pytest.mark.parametrize("dtype, device", ON)
@pytest.mark.parametrize("shape", [(5, 7), (7,), (2, 3, 7), (0, 7), (2, 0, 3, 7), (1, 1, 7)], ids=str)
def test_linear(shape, dtype, device, ieee):
    x, w, b = leaf(shape, dtype, device), leaf((4, 7), dtype, device, seed=1), leaf((4,), dtype, device, seed=2)
    precise = [t.detach().double().requires_grad_() for t in (x, w, b)]
    y, expected = F.linear(x, w, b), T.linear(*precise)
    assert y.shape == expected.shape and y.is_contiguous()
    same(y.double(), expected, dtype, "y")
    y.sum().backward()
    expected.sum().backward()
    for what, found, want in zip("xwb", (x, w, b), precise, strict=True):
        same(found.grad.double(), want.grad, dtype, what)
    assert torch.equal(F.linear(x, w), F.linear(x, w, torch.zeros_like(b)))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "activation, parameter", [*((name, None) for name in ACTIVATIONS if name != "identity"), ("leaky_relu", 0.3)]
)
def test_activation_in_the_same_kernel(activation, parameter, device):
    p = ACTIVATIONS[activation].parameter if parameter is None else parameter
    x, w, b = (leaf(s, torch.float64, device, seed=i) for i, s in enumerate(((2, 3, 6, 6), (4, 3, 3, 3), (4,))))
    # the framework's hardswish divides by a float32 six on a GPU, whatever the type: it is asked on the CPU
    twins = [t.detach().cpu().clone().requires_grad_() for t in (x, w, b)]
    y = F.conv2d(x, w, b, padding=1, activation=activation, parameter=parameter)
    expected = peer.ACTIVATIONS[activation](T.conv2d(*twins, padding=1), p)
    torch.testing.assert_close(y.cpu(), expected, rtol=1e-12, atol=1e-12)
    dy = torch.randn_like(expected)
    y.backward(dy.to(device))
    expected.backward(dy)
    for found, want in zip((x, w, b), twins, strict=True):
        torch.testing.assert_close(found.grad.cpu(), want.grad, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("device", DEVICES)
def test_bias_of_type_float32(device):
    x, w = leaf((2, 3, 6, 6), torch.bfloat16, device), leaf((4, 3, 3, 3), torch.bfloat16, device, seed=1)
    b = leaf((4,), torch.float32, device, seed=2)
    y = F.conv2d(x, w, b)
    expected = T.conv2d(x.double(), w.double(), b.double())
    same(y.double(), expected, torch.bfloat16, "y")
    y.sum().backward()
    assert b.grad.dtype == torch.float32 and b.grad.tolist() == [32.0] * 4
