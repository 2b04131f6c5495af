"""Softmax, log-softmax and cross-entropy against the framework: values, types, strides, gradients, errors."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as T

from lucidnn import functional as F
from lucidnn.core.errors import InvalidArgument, NotSupported

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
BOUND = {torch.float64: 1e-14, torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}
INF = float("inf")


def close(ours: torch.Tensor, theirs: torch.Tensor, bound: float | None = None) -> None:
    assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
    bound = bound or BOUND[theirs.dtype]
    torch.testing.assert_close(ours, theirs, rtol=bound, atol=bound, equal_nan=True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_as_the_framework(name, dtype, device):
    ours, theirs = getattr(F, name), getattr(T, name)
    generator = torch.Generator().manual_seed(1)
    for shape, dim in (((4, 37), 1), ((2, 5, 6, 7), 1), ((3, 20, 4), -1), ((5, 6), 0), ((), 0)):
        x = (8 * torch.randn(shape, generator=generator)).to(device, dtype)
        x = x.to(memory_format=torch.channels_last) if x.ndim == 4 else x
        a, b = (x.clone(memory_format=torch.preserve_format).requires_grad_() for _ in "ab")
        y, expected = ours(a, dim), theirs(b, dim)
        close(y, expected)
        assert y.stride() == x.stride()
        g = torch.randn(shape, generator=generator).to(device, dtype)
        y.backward(g)
        expected.backward(g)
        close(a.grad, b.grad, None if dtype != torch.bfloat16 else 2e-2)


@pytest.mark.parametrize("device", DEVICES)
def test_infinities_and_nan(device):
    nan = float("nan")
    rows = [[1.0, -INF, 2.0], [-INF, -INF, -INF], [INF, 0.0, 1.0], [INF, INF, 0.0], [nan, 0.0, 1.0], [-3e38, 3e38, 0.0]]
    x = torch.tensor(rows, device=device)
    for ours, theirs in ((F.softmax, T.softmax), (F.log_softmax, T.log_softmax)):
        close(ours(x, 1), theirs(x, 1))
        close(ours(x.t().contiguous(), 0), theirs(x.t(), 0).contiguous())
    assert F.softmax(x, 1, empty_zero=True)[1].tolist() == [0.0, 0.0, 0.0]
    assert F.log_softmax(x, 1, empty_zero=True)[1].tolist() == [-INF, -INF, -INF]


def test_masks():
    torch.manual_seed(2)
    mask = torch.rand(6) < 0.5
    mask[0] = True
    for ours, theirs in ((F.softmax, T.softmax), (F.log_softmax, T.log_softmax)):
        a = torch.randn(4, 6, requires_grad=True)
        b = a.detach().clone().requires_grad_()
        y, expected = ours(a, 1, mask=mask), theirs(b.masked_fill(~mask, -INF), 1)
        close(y, expected)
        g = torch.randn(4, 6)
        close(torch.autograd.grad(y, a, g)[0], torch.autograd.grad(expected, b, g)[0])
    hidden = F.softmax(torch.randn(3, 4), 1, mask=torch.tensor([[True], [False], [True]]), empty_zero=True)
    assert hidden[1].tolist() == [0.0] * 4 and torch.allclose(hidden.sum(1), torch.tensor([1.0, 0.0, 1.0]))


def test_several_axes_other_types_and_softmin():
    x = torch.randn(2, 3, 4, 5)
    close(F.softmax(x, (1, 3)), x.exp() / x.exp().sum((1, 3), keepdim=True))
    half = torch.randn(3, 40).bfloat16()
    close(F.softmax(half, 1, dtype=torch.float32), T.softmax(half, 1, dtype=torch.float32))
    close(F.softmax(x, 1, dtype=torch.bfloat16), T.softmax(x, 1, dtype=torch.bfloat16))
    close(F.softmin(x, 1), T.softmin(x, 1))
    a = half.clone().requires_grad_()
    F.softmax(a, 1, dtype=torch.float32).square().sum().backward()
    b = half.clone().requires_grad_()
    T.softmax(b, 1, dtype=torch.float32).square().sum().backward()
    close(a.grad, b.grad)
    with pytest.warns(DeprecationWarning, match="axis is guessed"):
        close(F.softmax(x), x.softmax(1))


def test_derivatives_of_softmax():
    x = torch.randn(3, 4, 2, dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([True, False, True, True]).reshape(1, 4, 1)
    for function in (
        lambda v: F.softmax(v, 1),
        lambda v: F.log_softmax(v, (1, 2)),
        lambda v: F.softmax(v, 1, mask=mask),
    ):
        assert torch.autograd.gradcheck(function, (x,)) and torch.autograd.gradgradcheck(function, (x,))


def test_operators_and_compilation():
    x = torch.randn(3, 5, requires_grad=True)
    y = F.softmax(x, 1).detach()
    torch.library.opcheck(torch.ops.lucidnn.softmax_fwd, (x, None, [1], False, False, torch.float32))
    torch.library.opcheck(torch.ops.lucidnn.softmax_bwd, (y, y, None, [1], False, False, torch.float32))
    target = torch.tensor([0, 4, -100])
    attributes = ("mean", 0.0, -100, False)
    torch.library.opcheck(torch.ops.lucidnn.cross_entropy_fwd, (x, target, None, *attributes))
    loss, stats, total = (t.detach() for t in torch.ops.lucidnn.cross_entropy_fwd(x, target, None, *attributes))
    given = (torch.ones_like(loss), x.detach(), target, stats, None, total, *attributes)
    torch.library.opcheck(torch.ops.lucidnn.cross_entropy_bwd, given)

    def step(v):
        return F.cross_entropy(F.log_softmax(v, 1), target)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    expected = torch.autograd.grad(step(x), x)[0]
    close(torch.autograd.grad(compiled(x), x)[0], expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("shape", [(9, 17), (2, 6, 3, 5)])
def test_cross_entropy_as_the_framework(shape, reduction, device):
    torch.manual_seed(3)
    rows = (shape[0], *shape[2:])
    target = torch.randint(0, shape[1], rows)
    target.view(-1)[1] = -100
    weight = torch.rand(shape[1])
    chances = torch.rand(shape).softmax(1)
    for t, w, smoothing in ((target, None, 0.0), (target, weight, 0.2), (chances, None, 0.0), (chances, weight, 0.1)):
        a, b = (torch.randn(shape, generator=torch.Generator().manual_seed(4)).to(device) for _ in "ab")
        a, b = a.requires_grad_(), b.requires_grad_()
        args = {"weight": None if w is None else w.to(device), "reduction": reduction, "label_smoothing": smoothing}
        y, expected = F.cross_entropy(a, t.to(device), **args), T.cross_entropy(b, t.to(device), **args)
        close(y, expected, 4e-6)
        g = torch.rand(y.shape).to(device)
        y.backward(g)
        expected.backward(g)
        close(a.grad, b.grad)
    logs = torch.randn(shape).log_softmax(1).to(device).requires_grad_()
    y = F.nll_loss(logs, target.to(device), weight.to(device), reduction=reduction)
    expected = T.nll_loss(logs, target.to(device), weight.to(device), reduction=reduction)
    close(y, expected)
    close(torch.autograd.grad(y.sum(), logs)[0], torch.autograd.grad(expected.sum(), logs)[0])


def test_derivatives_of_cross_entropy():
    torch.manual_seed(5)
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    target, weight = torch.tensor([0, -100, 4]), torch.rand(5, dtype=torch.float64)
    chances = torch.rand(3, 5, dtype=torch.float64, requires_grad=True)
    cases = (
        (lambda v: F.cross_entropy(v, target, weight, label_smoothing=0.1), (x,)),
        (lambda v: F.nll_loss(v, target, weight, reduction="none"), (x,)),
        (lambda v, t: F.cross_entropy(v, t, weight, label_smoothing=0.1, reduction="sum"), (x, chances)),
    )
    for function, inputs in cases:
        assert torch.autograd.gradcheck(function, inputs) and torch.autograd.gradgradcheck(function, inputs)


def test_odd_cross_entropies():
    x, none = torch.randn(5), torch.full((3,), -100)
    close(F.cross_entropy(x, torch.tensor(2)), T.cross_entropy(x, torch.tensor(2)))
    close(F.cross_entropy(x, torch.tensor(2), reduction="none"), T.cross_entropy(x, torch.tensor(2), reduction="none"))
    assert F.cross_entropy(torch.randn(3, 5), none).isnan()
    assert F.cross_entropy(torch.randn(0, 5), none[:0]).isnan()
    assert F.cross_entropy(torch.randn(0, 5), none[:0], reduction="sum") == 0
    far = torch.tensor([[1e4, 1e4 + 1.0]])
    close(F.cross_entropy(far, torch.tensor([0])), T.cross_entropy(far, torch.tensor([0])))
    lost = torch.tensor([[0.0, -INF], [-INF, 0.0]])
    close(F.cross_entropy(lost, torch.tensor([0, 1])), torch.tensor(0.0))
    half = torch.randn(4, 9).bfloat16()
    close(F.cross_entropy(half, torch.arange(4)), T.cross_entropy(half, torch.arange(4)))


def test_a_class_that_does_not_exist():
    for bad in (5, -1):
        with pytest.raises(InvalidArgument, match=f"target: found {bad}; accepted: class numbers from 0 to 4"):
            F.cross_entropy(torch.randn(2, 5), torch.tensor([0, bad]))


@pytest.mark.gpu
def test_a_class_that_does_not_exist_is_nan_on_a_gpu():
    x = torch.randn(2, 5, device="cuda", requires_grad=True)
    loss = F.cross_entropy(x, torch.tensor([0, 5], device="cuda"), reduction="none")
    loss.sum().backward()
    assert loss.isnan().tolist() == [False, True] and x.grad[1].isnan().all() and x.grad[0].isfinite().all()


@pytest.mark.parametrize("wrong", [1.5, "a", [1, "b"], {"a": 1}, object()])
def test_axes_that_are_no_whole_numbers_are_named(wrong):
    x = torch.ones(2, 3)
    for function, name in ((F.softmax, "dim"), (F.sum, "dim"), (F.max, "dim"), (F.layer_norm, "normalized_shape")):
        with pytest.raises(InvalidArgument, match=f"^{name}: found .*a whole number or a sequence of them"):
            function(x, wrong)


def test_bad_input():
    x = torch.randn(2, 3)
    with pytest.raises(InvalidArgument, match="axes"):
        F.softmax(x, 2)
    with pytest.raises(InvalidArgument, match=r"axes: found \[1, -1\]"):
        F.softmax(x, (1, -1))
    with pytest.raises(InvalidArgument, match="mask"):
        F.softmax(x, 1, mask=torch.ones(2, 3))
    with pytest.raises(InvalidArgument, match="mask"):
        F.softmax(x, 1, mask=torch.ones(4, dtype=torch.bool))
    with pytest.raises(InvalidArgument, match="x"):
        F.softmax(torch.ones(2, 3, dtype=torch.int32), 1)
    target = torch.tensor([0, 1])
    with pytest.raises(InvalidArgument, match="target"):
        F.cross_entropy(x, torch.tensor([0, 1, 2]))
    with pytest.raises(InvalidArgument, match="target"):
        F.cross_entropy(x, target.int())
    with pytest.raises(InvalidArgument, match="reduction"):
        F.cross_entropy(x, target, reduction="median")
    with pytest.raises(InvalidArgument, match="smoothing"):
        F.cross_entropy(x, target, label_smoothing=1.5)
    with pytest.raises(InvalidArgument, match="weight"):
        F.cross_entropy(x, target, torch.ones(4))
    with pytest.raises(NotSupported, match="by weight"):
        F.cross_entropy(x.requires_grad_(), target, torch.ones(3, requires_grad=True)).backward()
