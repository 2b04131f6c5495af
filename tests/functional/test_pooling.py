"""Average, power, adaptive pooling and unpooling: the framework's values, strides, gradients, second gradients."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
import torch.nn.functional as T

from lucidnn import functional as F
from lucidnn.core.errors import InvalidArgument
from lucidnn.core.plan import observe

ops = torch.ops.lucidnn
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def leaf(*shape, seed=0, dtype=torch.float32, last=False, device="cpu"):
    t = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(device, dtype)
    return (t.contiguous(memory_format=torch.channels_last) if last and t.ndim == 4 else t).requires_grad_()


# Function, shape, arguments. Sizes that divide and that do not, one to three axes, with and without a batch.
CASES = {
    "avg": ("avg_pool2d", (2, 5, 9, 11), (3, 2, 1), {}),
    "avg padding not counted": ("avg_pool2d", (2, 5, 9, 11), (3, 2, 1), {"count_include_pad": False}),
    "avg ceil": ("avg_pool2d", (2, 5, 8, 10), ((3, 2), (2, 3), (1, 0)), {"ceil_mode": True}),
    "avg ceil, not counted": ("avg_pool2d", (2, 5, 8, 10), (3, 2, 1), {"ceil_mode": True, "count_include_pad": False}),
    "avg ceil, last left out": ("avg_pool2d", (1, 2, 5, 8), (2, 3, 1), {"ceil_mode": True}),
    "avg divisor": ("avg_pool2d", (2, 5, 8, 10), (3,), {"divisor_override": 7}),
    "avg 1": ("avg_pool1d", (2, 3, 17), (4, 2, 2), {}),
    "avg 3": ("avg_pool3d", (1, 3, 5, 6, 7), (3, 2, 1), {"count_include_pad": False}),
    "avg unbatched": ("avg_pool2d", (5, 9, 11), (2,), {}),
    "lp 2": ("lp_pool2d", (2, 5, 9, 11), (2.0, 3, 2), {}),
    "lp 2 ceil": ("lp_pool2d", (2, 5, 8, 10), (2, 3, 2, True), {}),
    "lp 1": ("lp_pool1d", (2, 3, 17), (1.0, 4), {}),
    "lp 3": ("lp_pool3d", (1, 3, 5, 6, 7), (2.0, 2), {}),
    "adaptive avg": ("adaptive_avg_pool2d", (2, 5, 9, 11), ((4, 3),), {}),
    "adaptive avg divides": ("adaptive_avg_pool2d", (2, 5, 8, 9), ((4, 3),), {}),
    "adaptive avg None": ("adaptive_avg_pool2d", (2, 5, 9, 11), ((None, 5),), {}),
    "adaptive avg larger": ("adaptive_avg_pool2d", (2, 5, 4, 5), ((7, 9),), {}),
    "global avg": ("adaptive_avg_pool2d", (2, 5, 9, 11), (1,), {}),
    "adaptive avg 1": ("adaptive_avg_pool1d", (2, 3, 17), (5,), {}),
    "adaptive avg 3": ("adaptive_avg_pool3d", (1, 3, 5, 6, 7), ((2, 1, 7),), {}),
    "adaptive max": ("adaptive_max_pool2d", (2, 5, 9, 11), ((4, 3),), {}),
    "adaptive max divides": ("adaptive_max_pool2d", (2, 5, 8, 9), ((4, None),), {}),
    "adaptive max larger": ("adaptive_max_pool2d", (2, 5, 4, 5), ((7, 9),), {}),
    "global max": ("adaptive_max_pool2d", (2, 5, 9, 11), (1,), {}),
    "adaptive max 1": ("adaptive_max_pool1d", (2, 3, 17), (5,), {}),
    "adaptive max 3": ("adaptive_max_pool3d", (1, 3, 5, 6, 7), ((2, 1, 7),), {}),
    "adaptive max unbatched": ("adaptive_max_pool2d", (5, 9, 11), ((4, 3),), {}),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("last", [False, True], ids=["nchw", "nhwc"])
@pytest.mark.parametrize("name", CASES)
def test_values_strides_and_gradients(name, last, device):
    function, shape, args, kwargs = CASES[name]
    x = leaf(*shape, last=last, device=device)
    y, expected = getattr(F, function)(x, *args, **kwargs), getattr(T, function)(x.contiguous(), *args, **kwargs)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-6)
    if last and x.ndim == 4:
        assert y.is_contiguous(memory_format=torch.channels_last)
    else:
        assert y.is_contiguous()
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(3)).to(device)
    (found,), (dx,) = (torch.autograd.grad(t, x, dy) for t in (y, expected))
    torch.testing.assert_close(found, dx, rtol=1e-4, atol=1e-5)
    assert found.stride() == x.stride()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("last", [False, True], ids=["nchw", "nhwc"])
@pytest.mark.parametrize("name", [name for name in CASES if "max" in name])
def test_indices_are_the_frameworks(name, last, device):
    function, shape, args, _ = CASES[name]
    x = torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(1)).float().to(device)
    x = x.contiguous(memory_format=torch.channels_last) if last and x.ndim == 4 else x
    found = getattr(F, function)(x, *args, return_indices=True)
    expected = getattr(T, function)(x.contiguous(), *args, return_indices=True)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1]) and found[1].dtype == torch.int64


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("last", [False, True], ids=["nchw", "nhwc"])
def test_unpooling_puts_back_what_pooling_kept(last, device):
    for ndim, shape in ((1, (2, 3, 16)), (2, (2, 5, 8, 10)), (3, (1, 2, 4, 6, 4)), (2, (5, 8, 10))):
        pool, unpool = getattr(T, f"max_pool{ndim}d"), getattr(T, f"max_unpool{ndim}d")
        x = leaf(*shape, last=last, device=device).detach()
        y, index = pool(x, 2, return_indices=True)
        y.requires_grad_()
        ours, theirs = getattr(F, f"max_unpool{ndim}d")(y, index, 2), unpool(y, index, 2)
        assert torch.equal(ours, theirs)
        dy = torch.randn_like(ours)
        (found,), (expected,) = (torch.autograd.grad(t, y, dy) for t in (ours, theirs))
        assert torch.equal(found, expected)
    y, index = F.max_pool2d(leaf(1, 2, 9, 9, device=device), 2, return_indices=True)
    assert F.max_unpool2d(y, index, 2, output_size=(1, 2, 9, 9)).shape == (1, 2, 9, 9)
    twice = F.max_unpool1d(torch.tensor([[[1.0, 2.0, 3.0]]]), torch.tensor([[[4, 4, 2]]]), 2)
    assert twice.flatten().tolist() == [0, 0, 3, 0, 2, 0]


@pytest.mark.parametrize("name", CASES)
def test_second_gradients(name):
    """In float64, on few elements; powers of what is not negative, maxima of values that differ."""
    function, shape, args, kwargs = CASES[name]
    shape = (*(min(n, 2) for n in shape[: -len(shape) + 2]), *shape[2:]) if len(shape) > 3 else shape
    x = leaf(*shape, dtype=torch.float64).detach()
    x = (x.abs() + 0.5 if "lp" in name else x)[..., :7].requires_grad_()
    assert torch.autograd.gradcheck(lambda t: getattr(F, function)(t, *args, **kwargs), x, fast_mode=True)
    assert torch.autograd.gradgradcheck(lambda t: getattr(F, function)(t, *args, **kwargs), x, fast_mode=True)


def test_second_gradients_of_other_powers_and_of_unpooling():
    x = leaf(1, 2, 5, 6, dtype=torch.float64).detach().abs().add(0.5).requires_grad_()
    for norm in (1.0, 2.5, 3.0):
        assert torch.autograd.gradgradcheck(lambda t, p=norm: F.lp_pool2d(t, p, 3, 2, True), x, fast_mode=True)
        ours, theirs = (m.lp_pool2d(x, norm, 3, 2, True) for m in (F, T))
        torch.testing.assert_close(ours, theirs)
        torch.testing.assert_close(*(torch.autograd.grad(t.square().sum(), x)[0] for t in (ours, theirs)))
    index = torch.tensor([[[[1, 5], [5, 15]]]])
    y = leaf(1, 1, 2, 2, dtype=torch.float64)
    assert torch.autograd.gradgradcheck(lambda t: F.max_unpool2d(t.square(), index, 2), y, fast_mode=True) is True


def test_an_infinite_power_is_the_largest_or_smallest_magnitude():
    x = leaf(2, 3, 7, 8)
    for norm, reduce in ((math.inf, torch.amax), (-math.inf, torch.amin)):
        y = F.lp_pool2d(x, norm, 3, 2, True)
        assert y.shape == (2, 3, 3, 4)
        assert torch.equal(y[0, 0, 1, 1], reduce(x[0, 0, 2:5, 2:5].abs()))
        assert torch.equal(y[1, 2, 2, 3], reduce(x[1, 2, 4:, 6:].abs()))
        (dx,) = torch.autograd.grad(y.sum(), x)
        assert int((dx != 0).sum()) <= y.numel() and dx.abs().sum() == y.numel()


def test_a_window_of_zeros_sends_no_gradient_back():
    x = torch.zeros(1, 1, 4, 4).index_fill(3, torch.tensor([3]), 2.0).requires_grad_()
    for norm in (1.0, 2.0, 3.0):
        ours, theirs = (torch.autograd.grad(m.lp_pool2d(x, norm, 2).sum(), x)[0] for m in (F, T))
        torch.testing.assert_close(ours, theirs)


# ---- inside the framework ----------------------------------------------------------------------------------

AVERAGE = ([3, 2], [2, 1], [1, 0], True, False, 0)


def operator_calls(last: bool, device: str) -> dict:
    def t(*shape, seed=0):
        return leaf(*shape, seed=seed, last=last, device=device)

    x, y = t(2, 4, 6, 6), t(2, 4, 3, 3, seed=1)
    index = F.adaptive_max_pool2d(x.detach(), 3, return_indices=True)[1]
    norm = (2.0, [2, 2], [2, 2], False)
    return {
        "avg_pool_fwd": (ops.avg_pool_fwd, (x, *AVERAGE)),
        "avg_pool_bwd": (ops.avg_pool_bwd, (t(2, 4, 4, 5, seed=2), [2, 4, 6, 6], last, *AVERAGE)),
        "lp_pool_fwd": (ops.lp_pool_fwd, (x, *norm)),
        "lp_pool_bwd": (ops.lp_pool_bwd, (y, x, t(2, 4, 3, 3, seed=3), *norm)),
        "adaptive_avg_pool_fwd": (ops.adaptive_avg_pool_fwd, (x, [4, 1])),
        "adaptive_avg_pool_bwd": (ops.adaptive_avg_pool_bwd, (y, [2, 4, 5, 6], last)),
        "adaptive_max_pool_fwd": (ops.adaptive_max_pool_fwd, (x, [4, 1], "i64")),
        "adaptive_max_pool_bwd": (ops.adaptive_max_pool_bwd, (y, index, [2, 4, 6, 6], last)),
        "max_unpool_fwd": (ops.max_unpool_fwd, (y, index, [6, 6])),
        "max_unpool_bwd": (ops.max_unpool_bwd, (x, index)),
    }


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("last", [False, True], ids=["nchw", "nhwc"])
@pytest.mark.parametrize("name", operator_calls(False, "cpu"))
def test_operator(name, last, device):
    """Schema, registration, the fake function's shapes and strides, and tracing with symbolic shapes."""
    operator, args = operator_calls(last, device)[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.library.opcheck(operator.default, args)


def net(x):
    y = F.avg_pool2d(F.lp_pool2d(x, 2.0, 2), 3, 2, 1)
    top, index = F.adaptive_max_pool2d(y, (2, None), return_indices=True)
    y = F.max_unpool2d(top, index, (2, 1), output_size=(4, y.shape[3]))
    return F.adaptive_avg_pool2d(y, 1) + F.adaptive_avg_pool2d(y, (2, 3)).sum((2, 3), keepdim=True)


@pytest.mark.parametrize("last", [False, True], ids=["nchw", "nhwc"])
def test_compiled_whole_and_for_any_size(last):
    torch._dynamo.reset()
    compiled = torch.compile(net, fullgraph=True, dynamic=True, backend="aot_eager")
    for n, size in ((2, 16), (3, 16), (5, 14)):
        x = leaf(n, 3, 16, size, last=last)
        found, expected = compiled(x), net(x)
        torch.testing.assert_close(found, expected)
        (a,), (b,) = (torch.autograd.grad(t.square().sum(), x) for t in (found, expected))
        torch.testing.assert_close(a, b)
    torch._dynamo.reset()


@pytest.mark.parametrize("last", [False, True], ids=["nchw", "nhwc"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_types(dtype, last):
    x = leaf(2, 3, 9, 8, dtype=dtype, last=last)
    for function, args in (("avg_pool2d", (3, 2, 1)), ("adaptive_avg_pool2d", (1,)), ("lp_pool2d", (2.0, 3))):
        y = getattr(F, function)(x, *args)
        assert y.dtype == dtype
        rough = {"rtol": 2e-2, "atol": 2e-2} if dtype != torch.float64 else {}
        expected = getattr(T, function)(x.double(), *args)
        torch.testing.assert_close(y.double(), expected, **rough)


def test_one_plan_a_call_and_meta_tensors():
    x = leaf(2, 3, 8, 8)
    with observe() as plans:
        F.avg_pool2d(x, 2).sum().backward()
    assert [plan.problem.op.name for plan in plans] == ["avg_pool_fwd", "avg_pool_bwd"]
    meta = torch.empty(2, 3, 8, 8, device="meta")
    assert F.adaptive_max_pool2d(meta, 3, return_indices=True)[1].shape == (2, 3, 3, 3)
    assert F.lp_pool2d(meta, 2, 2).shape == F.avg_pool2d(meta, 2).shape == (2, 3, 4, 4)


X = torch.ones(1, 2, 6, 6)
BAD = {
    "input: found list": lambda: F.avg_pool2d([1.0], 2),
    "input: found shape": lambda: F.avg_pool2d(X[0, 0], 2),
    "kernel_size": lambda: F.avg_pool2d(X, (2, 2, 2)),
    "window: found": lambda: F.avg_pool2d(X, 0),
    "padding: found": lambda: F.avg_pool2d(X, 2, 1, 2),
    "x: found .*room for the window": lambda: F.avg_pool2d(X, 9),
    "divisor_override: found 0": lambda: F.avg_pool2d(X, 2, divisor_override=0),
    "x: found .*floating": lambda: F.avg_pool2d(X.long(), 2),
    "norm: found 0.0": lambda: F.lp_pool2d(X, 0, 2),
    "norm: found nan": lambda: F.lp_pool2d(X, math.nan, 2),
    "norm_type": lambda: F.lp_pool2d(X, "2", 2),
    "output_size: found .*-1": lambda: F.adaptive_avg_pool2d(X, -1),
    r"output_size: found \(1, 2, 3\)": lambda: F.adaptive_avg_pool2d(X, (1, 2, 3)),
    "x: found .*spatial sizes": lambda: F.adaptive_avg_pool2d(X[:, :, :0], 1),
    "index: found .*type i32 or i64": lambda: F.max_unpool2d(X, X.byte(), 2),
    "index: found .*the shape of x": lambda: F.max_unpool2d(X, X[..., :3].long(), 2),
    "indices: found shape": lambda: F.max_unpool2d(X, X[0].long(), 2),
    "output_size: found .*11 to 13": lambda: F.max_unpool2d(X, X.long(), 2, output_size=(12, 14)),
}


@pytest.mark.parametrize("text", BAD)
def test_bad_input_is_named(text):
    with pytest.raises(InvalidArgument, match=text):
        BAD[text]()


def test_nothing_in_nothing_out():
    for x in (torch.ones(0, 2, 6, 6), torch.ones(2, 0, 6, 6)):
        for y in (F.avg_pool2d(x, 2), F.lp_pool2d(x, 2, 2), F.adaptive_avg_pool2d(x, 3), F.adaptive_max_pool2d(x, 3)):
            assert y.shape == (*x.shape[:2], 3, 3)
    assert F.adaptive_avg_pool2d(X, (0, 2)).shape == (1, 2, 0, 2)
