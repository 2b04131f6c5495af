"""Every module of `lucidnn.nn` against the plain sequence of the framework's layers."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as T
from torch import nn

import lucidnn.nn as layers
from lucidnn import NotSupported
from lucidnn.core.errors import InvalidArgument

RANKS = {1: (nn.Conv1d, nn.ConvTranspose1d, nn.BatchNorm1d), 2: (nn.Conv2d, nn.ConvTranspose2d, nn.BatchNorm2d),
         3: (nn.Conv3d, nn.ConvTranspose3d, nn.BatchNorm3d)}  # fmt: skip


def ours(kind, rank):
    return getattr(layers, f"{kind}{rank}d")


def gradients(call, model, *tensors):
    """Output and gradients of the tensors and the parameters."""
    given = [t.detach().clone().requires_grad_() for t in tensors]
    for p in model.parameters():
        p.grad = None
    y = call(*given)
    (y.float() * torch.linspace(-1, 2, y.numel()).reshape(y.shape)).sum().backward()
    return [y, *(t.grad for t in given), *(p.grad for p in model.parameters())]


def same(found, expected, tolerance=1e-4):
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance * (float(b.detach().abs().max()) + 1e-3))


def state(module):
    return {name: value.clone() for name, value in module.state_dict().items()}


@pytest.mark.parametrize("rank", RANKS)
def test_a_convolution_with_its_activation(rank):
    conv, up, _ = RANKS[rank]
    for kind, base in (("ConvAct", conv), ("ConvTransposeAct", up)):
        plain, fused = base(4, 4, 3, padding=1, groups=2), ours(kind, rank)(4, 4, 3, padding=1, groups=2)
        fused.load_state_dict(plain.state_dict())
        plain.load_state_dict(fused.state_dict())
        x, z = torch.randn(2, 2, 4, *[5] * rank).unbind()
        same(gradients(fused, fused, x), gradients(lambda x, p=plain: p(x).relu(), plain, x))
        expected = gradients(lambda x, z, p=plain: (p(x) + z).relu(), plain, x, z)
        same(gradients(fused, fused, x, z), expected)
        narrow = z[:1, :, :1]  # a z that is broadcast is added after the kernel
        same([fused(x, narrow)], [(plain(x) + narrow).relu()])
        assert repr(fused).startswith(f"{kind}{rank}d(4, 4") and "activation=relu" in repr(fused)


@pytest.mark.parametrize("rank", RANKS)
def test_a_normalization_with_its_activation(rank):
    momentum = None if rank == 2 else 0.1
    plain, fused = RANKS[rank][2](4, momentum=momentum), ours("BatchNormAct", rank)(4, momentum=momentum)
    fused.load_state_dict(plain.state_dict())
    x, z = torch.randn(2, 2, 4, *[5] * rank).unbind()
    for training in (True, True, False):  # the second time the statistics are an average of two
        plain.train(training), fused.train(training)
        expected = gradients(lambda x, z: (plain(x) + z).relu(), plain, x, z)
        same(gradients(fused, fused, x, z), expected)
        same([fused(x), fused(x, z[:1])], [plain(x).relu(), (plain(x) + z[:1]).relu()])
    same(state(fused).values(), state(plain).values())
    assert "activation=relu" in repr(fused)
    with pytest.raises(ValueError, match="expected"):
        fused(torch.ones(4))


@pytest.mark.parametrize("rank", RANKS)
def test_a_convolution_a_normalization_and_an_activation(rank):
    conv, _, norm = RANKS[rank]
    plain = nn.Sequential(conv(3, 4, 3, padding=1, bias=False), norm(4), nn.ReLU())
    fused = ours("ConvNormAct", rank)(3, 4, 3)
    assert list(fused.state_dict()) == list(plain.state_dict())
    plain.load_state_dict(fused.state_dict())
    x, z = torch.randn(2, 3, *[5] * rank), torch.randn(2, 4, *[5] * rank)
    for training in (True, False):
        plain.train(training), fused.train(training)
        same(gradients(fused, fused, x), gradients(plain, plain, x), 1e-3)
    same(state(fused).values(), state(plain).values())
    with torch.no_grad():  # the normalization in the filters
        same([fused(x), fused(x, z)], [plain(x), (plain[1](plain[0](x)) + z).relu()])
    if rank == 2:
        fast = copy.deepcopy(fused).to(memory_format=torch.channels_last)
        with torch.no_grad():
            y = fast(x.to(memory_format=torch.channels_last))
            same([y], [plain(x)])
            assert y.is_contiguous(memory_format=torch.channels_last)
            half = copy.deepcopy(fused).bfloat16()(x.bfloat16())
            assert half.dtype == torch.bfloat16
            same([half.float()], [plain(x)], 3e-2)
    assert f"ConvNormAct{rank}d" in repr(fused)


def test_a_normalization_is_folded_in_its_own_precision():
    from lucidnn.nn.sequence import fold

    for conv in (nn.Conv2d(4, 6, 3, groups=2), nn.ConvTranspose2d(4, 6, 3, groups=2)):
        norm = nn.BatchNorm2d(6).eval()
        norm.running_mean.normal_(), norm.running_var.uniform_(0.5, 2), nn.init.normal_(norm.weight)
        x, twin = torch.randn(2, 4, 5, 5), copy.deepcopy(conv)
        with torch.no_grad():
            weight, bias = fold(conv, norm)
            twin.weight.copy_(weight), twin.bias.copy_(bias)
            same([twin(x)], [norm(conv(x))])


def test_a_group_normalization_with_its_activation():
    plain, fused = nn.Sequential(nn.GroupNorm(2, 4), nn.SiLU()), layers.GroupNormAct(2, 4)
    nn.init.normal_(plain[0].weight)
    fused.load_state_dict(plain.state_dict())
    x = torch.randn(2, 4, 5, 5)
    same(gradients(fused, fused, x), gradients(plain, plain, x))
    plain.load_state_dict(fused.state_dict())
    assert "activation=silu" in repr(fused)


@pytest.mark.parametrize("rank", RANKS)
def test_a_causal_convolution_sees_nothing_later(rank):
    plain, causal = RANKS[rank][0](3, 4, 3, stride=2, dilation=2), ours("CausalConv", rank)(3, 4, 3, 2, 2)
    causal.load_state_dict(plain.state_dict())
    x = torch.randn(2, 3, *[6] * rank, requires_grad=True)
    pads = [1, 2] * (rank - 1) + [4, 0]  # the last axes come first
    same([causal(x)], [plain(T.pad(x, pads))])
    causal(x)[:, :, 1].sum().backward()  # made of the inputs up to 2
    assert x.grad[:, :, 2].abs().sum() > 0 and not x.grad[:, :, 3:].any()
    assert causal(x).shape[2:] == (3,) * rank and repr(causal).startswith(f"CausalConv{rank}d(")


MODULES = (
    None, "tanh", nn.Identity(), nn.ReLU(), nn.ReLU6(), nn.Hardtanh(0, 2), nn.LeakyReLU(0.2), nn.ELU(0.5), nn.GELU(),
    nn.GELU("tanh"), nn.SiLU(), nn.Sigmoid(), nn.Tanh(), nn.Softplus(), nn.Hardswish(), nn.Hardsigmoid(), nn.Mish(),
)  # fmt: skip


def test_activations_are_known_by_their_modules():
    from lucidnn.functional.pointwise import pointwise_fwd

    x = torch.linspace(-4, 9, 57)
    for module in MODULES:
        if module is None or isinstance(module, str):
            assert layers.activation_of(module)[0] == (module or "identity")
            continue
        name, parameter = layers.activation_of(module)
        same([pointwise_fwd(x, None, None, 1.0, 0.0, name, parameter)], [module(x)], 1e-5)
    for unknown in (nn.Softmax(1), nn.Hardtanh(-1, 1), nn.Softplus(beta=2), nn.PReLU()):
        with pytest.raises(NotSupported, match="no fused kernel has the activation"):
            layers.ConvAct2d(3, 4, 3, activation=unknown)
    for wrong in (3, "rleu"):
        with pytest.raises(InvalidArgument, match="activation"):
            layers.activation_of(wrong)
