"""The rarer forms of a convolution against the framework's: padding modes, flips, transposition, 8-bit types."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as T

from lucidnn import functional as F
from lucidnn.core.errors import InvalidArgument, NotSupported
from lucidnn.core.plan import select
from lucidnn.core.problem import Problem

MODES = {"zeros": "constant", "reflect": "reflect", "replicate": "replicate", "circular": "circular"}
CONV = (F.conv1d, F.conv2d, F.conv3d)
TRANSPOSED = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)
THEIRS = (T.conv1d, T.conv2d, T.conv3d)
THEIRS_TRANSPOSED = (T.conv_transpose1d, T.conv_transpose2d, T.conv_transpose3d)


def rand(*shape, dtype=torch.float64):
    return torch.randn(shape, dtype=dtype)


def near(a, b, bound=1e-12):
    assert a.shape == b.shape and float((a - b).norm()) <= bound * float(b.norm())


@pytest.mark.parametrize("ndim, mode, flip", list(itertools.product((1, 2, 3), MODES, (False, True))))
def test_padding_modes_and_flips(ndim, mode, flip):
    x, w, b = rand(2, 3, *(6, 5, 7)[:ndim]), rand(4, 3, *(3, 2, 3)[:ndim]), rand(4)
    pads = ((2, 1), (0, 2), (1, 1))[:ndim]
    stride = (2, 1, 1)[:ndim]
    flat = [n for pair in reversed(pads) for n in pair]
    turned = w.flip(*range(2, ndim + 2)) if flip else w
    expected = THEIRS[ndim - 1](T.pad(x, flat, MODES[mode]), turned, b, stride=stride)
    near(CONV[ndim - 1](x, w, b, stride, pads, padding_mode=mode, flip=flip), expected)


@pytest.mark.parametrize("ndim", [1, 2, 3])
@pytest.mark.parametrize("stride, dilation, groups", [(1, 1, 1), (2, 1, 2), (3, 2, 1), (1, 2, 2), (2, 3, 4)])
def test_transposed(ndim, stride, dilation, groups):
    x, w, b = rand(2, 4, *(3, 4, 2)[:ndim]), rand(4, 2, *(3, 2, 3)[:ndim]), rand(2 * groups)
    for padding, more in itertools.product((0, 1), range(max(stride, dilation))):
        expected = THEIRS_TRANSPOSED[ndim - 1](x, w, b, stride, padding, more, groups, dilation)
        near(TRANSPOSED[ndim - 1](x, w, b, stride, padding, more, groups, dilation), expected)
        last = x.to(memory_format=torch.channels_last) if ndim == 2 else x
        near(TRANSPOSED[ndim - 1](last, w, b, stride, padding, more, groups, dilation), expected)


def test_transposed_refuses_what_has_no_meaning():
    x, w = rand(1, 2, 3, 3), rand(2, 2, 3, 3)
    with pytest.raises(InvalidArgument, match="output_padding.*less than the stride"):
        F.conv_transpose2d(x, w, stride=2, output_padding=2)
    with pytest.raises(InvalidArgument, match="padding_mode"):
        F.conv_transpose2d(x, w, padding=1, padding_mode="reflect")
    with pytest.raises(InvalidArgument, match="padding: found 'same'"):
        F.conv_transpose2d(x, w, padding="same")
    with pytest.raises(InvalidArgument, match="has a point"):
        F.conv_transpose2d(x, w, padding=9)


@pytest.mark.parametrize(
    "size, filter_size, stride, dilation", list(itertools.product((5, 6, 9), (1, 2, 3, 4), (1, 2, 3), (1, 2)))
)
def test_same_gives_size_over_stride(size, filter_size, stride, dilation):
    y = F.conv1d(rand(1, 1, size), rand(1, 1, filter_size), padding="same", stride=stride, dilation=dilation)
    assert y.shape[2] == -(-size // stride)


def test_causal_sees_nothing_later():
    x, w = rand(1, 2, 8, 4), rand(3, 2, 3, 3)
    y = F.conv2d(x, w, padding="causal", dilation=(2, 1))
    near(y, T.conv2d(T.pad(x, (1, 1, 4, 0)), w, dilation=(2, 1)))
    x[:, :, 5:] = torch.nan
    assert not F.conv2d(x, w, padding="causal", dilation=(2, 1))[:, :, :5].isnan().any()


@pytest.mark.parametrize("mode, least", [("reflect", 4), ("circular", 3)])
def test_padding_that_there_is_nothing_for(mode, least):
    with pytest.raises(InvalidArgument, match=f"padding: .*{mode}"):
        F.conv1d(rand(1, 1, least - 1), rand(1, 1, 3), padding=3, padding_mode=mode)
    F.conv1d(rand(1, 1, least), rand(1, 1, 3), padding=3, padding_mode=mode)


def test_blend_scale_and_type():
    x, w, b, z = rand(2, 3, 5, 5), rand(4, 3, 3, 3), rand(4), rand(2, 4, 5, 5)
    scale = torch.rand(4) + 0.5
    plain = T.conv2d(x, w, padding=1)
    expected = T.silu(0.5 * plain * scale.double().view(1, -1, 1, 1) - 2.0 * z + b.view(1, -1, 1, 1))
    near(F.conv2d(x, w, b, padding=1, alpha=0.5, beta=-2.0, z=z, scale=scale, activation="silu"), expected)
    near(F.conv2d(x, w, padding=1, z=z), plain + z)
    assert F.conv2d(x, w, dtype=torch.float32).dtype == torch.float32
    with pytest.raises(InvalidArgument, match="scale"):
        F.conv2d(x.requires_grad_(), w, scale=scale.requires_grad_()).sum().backward()


def test_scale_and_other_types_have_gradients():
    x, w, scale = rand(2, 3, 5, 5).requires_grad_(), rand(4, 3, 3, 3).requires_grad_(), torch.rand(4) + 0.5
    assert torch.autograd.gradcheck(lambda x, w: F.conv2d(x, w, padding=1, scale=scale, alpha=2.0), (x, w))
    low = [t.detach().bfloat16().requires_grad_() for t in (x, w)]
    y = F.conv2d(*low, padding=1, dtype=torch.float32)
    y.square().sum().backward()
    assert y.dtype == torch.float32
    assert all(t.grad is not None and t.grad.dtype == torch.bfloat16 for t in low)


@pytest.mark.parametrize("shape", [(2, 3, 9), (2, 16, 6, 7), (1, 4, 5, 4, 6), (1, 1200, 3, 3)])
def test_int8(shape):
    x = torch.randint(-128, 128, shape, dtype=torch.int8)
    w = torch.randint(-128, 128, (5, shape[1], *[3] * (len(shape) - 2)), dtype=torch.int8)
    function, theirs = CONV[len(shape) - 3], THEIRS[len(shape) - 3]
    exact = theirs(x.double(), w.double(), padding=1)
    y = function(x, w, padding=1)
    assert y.dtype == torch.int32 and torch.equal(y.double(), exact)
    scale, b = torch.rand(5) * 2e-3 / shape[1] ** 0.5, torch.randn(5)
    out = function(x, w, b, padding=1, scale=scale, dtype=torch.int8, activation="relu")
    view = (1, -1, *[1] * (len(shape) - 2))
    wanted = (exact * scale.double().view(view) + b.double().view(view)).relu()
    assert out.dtype == torch.int8
    assert float((out.double() - wanted.clamp(-128, 127)).abs().max()) <= 0.5 + 1e-4


@pytest.mark.parametrize("x_type, w_type", list(itertools.product((torch.float8_e4m3fn, torch.float8_e5m2), repeat=2)))
def test_float8(x_type, w_type):
    x, w = torch.randn(2, 8, 6, 6).to(x_type), torch.randn(4, 8, 3, 3).to(w_type)
    expected = T.conv2d(x.double(), w.double(), padding=1)
    near(F.conv2d(x, w, padding=1, dtype=torch.float32).double(), expected, 1e-3)
    out = F.conv2d(x, w, padding=1, alpha=1e4)
    assert out.dtype == x_type and float(out.double().abs().max()) == torch.finfo(x_type).max, "cut off, not infinite"


def test_types_that_do_not_go_together():
    i8 = torch.zeros(1, 2, 3, 3, dtype=torch.int8)
    with pytest.raises(InvalidArgument, match="w: found f32"):
        F.conv2d(i8, torch.zeros(1, 2, 3, 3))
    with pytest.raises(InvalidArgument, match="bare sums"):
        F.conv2d(i8, i8, activation="relu")
    with pytest.raises(InvalidArgument, match="y: found i8"):
        F.conv2d(torch.zeros(1, 2, 3, 3), torch.zeros(1, 2, 3, 3), dtype=torch.int8)


X, W = torch.zeros(1, 2, 5, 5), torch.zeros(4, 2, 3, 3)


@pytest.mark.parametrize(
    "function", [F.conv2d, lambda x, w, *a, **k: F.conv_transpose2d(x, w.mT.transpose(0, 1), *a, **k)]
)
@pytest.mark.parametrize(
    "options, said",
    [
        ({"bias": 1.0}, "bias: found float; accepted: a torch tensor"),
        ({"bias": [1.0] * 4}, "bias: found list; accepted: a torch tensor"),
        ({"z": 1.0}, "z: found float; accepted: a torch tensor"),
        ({"scale": 2.0}, "scale: found float; accepted: a torch tensor"),
        ({"groups": 1.5}, "groups: found 1.5; accepted: a whole number"),
        ({"groups": "1"}, "groups: found '1'; accepted: a whole number"),
        ({"groups": None}, "groups: found None; accepted: a whole number"),
        ({"groups": -1}, "groups: found -1; accepted: "),
        ({"stride": 0}, "stride: found .*; accepted: numbers >= 1"),
        ({"dilation": (1, 0)}, "dilation: found .*; accepted: numbers >= 1"),
        ({"alpha": "2"}, "alpha: found str; accepted: a number"),
        ({"alpha": torch.tensor(2.0)}, "alpha: found Tensor; accepted: a number"),
        ({"beta": None, "z": 1}, "z: found int; accepted: a torch tensor"),
        ({"beta": "1"}, "beta: found str; accepted: a number"),
        ({"activation": "elu", "parameter": "a"}, "parameter: found str; accepted: a number"),
        ({"dtype": "float32"}, "dtype: found 'float32'; accepted: a torch.dtype"),
        ({"engine": 3}, "engine: found 3; accepted: the name"),
    ],
)
def test_an_argument_of_the_wrong_kind_is_named(function, options, said):
    for x in (X, X[0]):
        with pytest.raises(InvalidArgument, match=f"^{said}"):
            function(x, W, **options)


def test_an_attribute_that_could_change_is_not_remembered():
    x, w = torch.ones(1, 1, 3, 3), torch.ones(1, 1, 1, 1)
    assert F.conv2d(x, w, alpha=3).unique().item() == 3.0
    assert F.conv2d(x, w, alpha=True, groups=True).unique().item() == 1.0
    with pytest.raises(InvalidArgument, match="groups"):
        F.conv2d(x, w, alpha=True, groups=1.5)  # type: ignore[arg-type]


def test_nothing_stands_in_the_padding_of_nothing():
    x = torch.zeros(1, 2, 0, 5)
    assert F.conv2d(x, W, padding=2).shape == (1, 4, 2, 7)
    for mode in ("reflect", "replicate", "circular"):
        with pytest.raises(InvalidArgument, match=f"padding: .*at most 0 along H in mode {mode}"):
            F.conv2d(x, W, padding=2, padding_mode=mode)


@pytest.mark.parametrize("shape", [(5,), (0, 5), (2, 0, 5), (0,), (3, 0), (2, 3, 0), (2, 1, 3, 5)])
def test_linear_of_every_rank_and_of_nothing(shape):
    x, w, b = rand(*shape).requires_grad_(), rand(4, shape[-1]).requires_grad_(), rand(4).requires_grad_()
    ours, theirs = (f(x, w, b) for f in (F.linear, T.linear))
    assert ours.shape == theirs.shape and torch.allclose(ours, theirs)
    for a, t in zip(*(torch.autograd.grad(y.square().sum(), (x, w, b)) for y in (ours, theirs)), strict=True):
        assert torch.allclose(a, t)
    with pytest.raises(InvalidArgument, match="weight: found"):
        F.linear(x, rand(4, shape[-1] + 1))


def test_whole_results_have_no_gradient():
    i8 = torch.ones(1, 2, 3, 3, dtype=torch.int8)
    b = torch.ones(1, requires_grad=True)
    with pytest.raises(InvalidArgument, match="bias: found a tensor that requires a gradient.*int8 has no gradient"):
        F.conv2d(i8, i8, b, dtype=torch.int8)
    with torch.no_grad():
        assert F.conv2d(i8, i8, b, dtype=torch.int8).item() == 19
    F.conv2d(i8, i8, b, dtype=torch.float32, activation="silu").backward()
    assert b.grad is not None and abs(float(b.grad) - 1.0) < 1e-3


def test_autocast_lowers_no_bias_beside_whole_numbers():
    i8, b = torch.ones(1, 2, 3, 3, dtype=torch.int8), torch.full((1,), 0.3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert abs(F.conv2d(i8, i8, b, dtype=torch.float32).item() - 18.3) < 1e-5
        assert F.conv2d(i8.float(), i8.float(), b).dtype == torch.bfloat16


def test_int8_sums_meet_their_bias_exactly():
    i8 = torch.ones(1, 1, 1, 1, dtype=torch.int8)
    for bias in (2**30 + 1, -(2**31), 2**31 - 2, 2**24 + 1):
        assert F.conv2d(i8, i8, torch.tensor([bias], dtype=torch.int32)).item() == bias + 1


def test_gradients_through_a_scale_are_rounded_once():
    x, w = rand(2, 8, 6, 6).bfloat16(), rand(4, 8, 1, 1).bfloat16().requires_grad_()
    scale, dy = torch.full((4,), 1 + 3 * 2.0**-9), torch.ones(2, 4, 6, 6)
    (dw,) = torch.autograd.grad(F.conv2d(x, w, scale=scale, dtype=torch.float32), w, dy * 2 / (1 + 3 * 2.0**-9))
    near(dw.double(), 2 * x.double().sum((0, 2, 3)).expand(4, 8).reshape(4, 8, 1, 1), 2.0**-8)


def test_an_engine_asked_for_by_name_gives_all_its_reasons():
    with pytest.raises(NotSupported) as caught:
        F.conv2d(rand(1, 3, 5, 5), rand(4, 3, 3, 3), stride=2, activation="relu", engine="conv.pointwise_gemm")
    reasons = caught.value.refusals["conv.pointwise_gemm"]
    assert len(reasons) >= 3 and any("one point" in r for r in reasons) and any("activation" in r for r in reasons)


def test_a_plan_of_nothing_records_no_gradient():
    plan = select(Problem.parse("conv_fprop x=f32[1,0,6,6] w=f32[4,0,3,3] bias=f32[4]"))
    y = plan(torch.zeros(1, 0, 6, 6), torch.zeros(4, 0, 3, 3), torch.ones(4, requires_grad=True))
    assert not y.requires_grad and y.unique().item() == 1.0
