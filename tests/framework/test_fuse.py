"""Chains of layers made one kernel: the same numbers, the same state, and a reason for what is left alone."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as T
from torch import nn

from lucidnn import NotSupported
from lucidnn.torch import FusedModule, fuse


def settled(model):
    """The same model with statistics and scales that are not those of a new one, for inference."""
    torch.manual_seed(1)
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.running_mean.normal_(0, 0.5)
            module.running_var.uniform_(0.5, 2)
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias)
    return model.eval()


def step(*more, inputs=3):
    return nn.Sequential(nn.Conv2d(inputs, 4, 3, padding=1), nn.BatchNorm2d(4), *more)


class Forms(nn.Module):
    """Every way to write the same block, with what must not be touched between."""

    def __init__(self):
        super().__init__()
        self.first, self.a, self.b, self.c, self.d = (step(inputs=3 if at == 0 else 4) for at in range(5))
        self.relu = nn.ReLU(inplace=True)
        self.plain = nn.Conv2d(4, 4, 1)
        self.up = nn.Sequential(nn.ConvTranspose2d(4, 4, 2, 2, groups=2), nn.BatchNorm2d(4), nn.LeakyReLU(0.1))
        self.weight = nn.Parameter(torch.randn(2, 4, 3, 3))

    def forward(self, x):
        x = self.relu(self.first(x))
        y = self.a(x)
        y += x
        x = self.relu(y)
        x = T.silu(torch.add(self.b(x), x), inplace=True)
        x = (x + self.c(x)).sigmoid()
        x = self.d(x) + 0.5
        x = self.up(T.gelu(self.plain(x), approximate="tanh"))
        return T.conv2d(x, self.weight, stride=2).relu()


def compared(model, fused, x, tolerance=2e-5):
    results = []
    for one in (model, fused):
        given = x.clone().requires_grad_()
        y = one(given)
        y.square().sum().backward()
        results.append((y, given.grad))
    torch.testing.assert_close(
        results[1], results[0], rtol=tolerance, atol=tolerance * float(results[0][1].abs().max())
    )


def test_inference_folds_and_joins_every_form():
    model = settled(Forms())
    fused = fuse(model)
    compared(model, fused, torch.randn(2, 3, 6, 6))
    told = {entry["name"]: entry for entry in fused.fusion.fused}
    assert told["a.0"]["operation"] == "conv + batch_norm (folded) + add + relu"
    assert told["a.0"]["layers"] == ["a.0", "a.1", "iadd", "relu"]
    operations = [told[name]["operation"].split(" + ")[1:] for name in ("b.0", "c.0", "d.0", "plain", "up.0")]
    folded = "batch_norm (folded)"
    assert operations == [
        [folded, "add", "silu"], [folded, "add", "sigmoid"], [folded], ["gelu_tanh"], [folded, "leaky_relu"]
    ]  # fmt: skip
    assert told["d.0"]["end"] == "add_2 adds a number" and told["conv2d"]["operation"] == "conv + relu"
    assert not any(isinstance(m, nn.BatchNorm2d) for m in fused.modules()) and fused.fusion.left == ()
    assert str(fused.fusion).splitlines()[0].startswith("for inference: 24 layers in 8 kernels")
    assert not fused.training and isinstance(model.a[1], nn.BatchNorm2d)


def test_training_keeps_names_gradients_and_statistics():
    model = Forms()
    twin = copy.deepcopy(model)
    fused = fuse(model)
    assert fused.training and set(fused.state_dict()) == set(model.state_dict())
    assert {e["name"] for e in fused.fusion.fused} >= {"first.1", "a.1", "b.1", "c.1", "up.1", "plain", "conv2d"}
    assert fused.get_submodule("a.0").weight is model.a[0].weight and "is trained" in str(fused.fusion)
    for _ in range(2):
        x = torch.randn(2, 3, 6, 6)
        compared(twin, fused, x, 1e-4)
    least = 1e-4 * max(float(p.grad.abs().max()) for p in twin.parameters())
    for name, p in twin.named_parameters():
        torch.testing.assert_close(fused.get_parameter(name).grad, p.grad, rtol=1e-3, atol=least)
    for name, b in twin.named_buffers():
        torch.testing.assert_close(fused.get_buffer(name), b, rtol=1e-4, atol=1e-5)
    twin.load_state_dict(fused.state_dict())
    fused.eval()
    compared(twin.eval(), fused, torch.randn(2, 3, 6, 6))


def test_the_mode_asked_for_is_the_results_alone():
    model = Forms()
    assert fuse(model, training=False).fusion.training is False and model.training and model.a[1].training
    fused = fuse(model.eval(), training=True)
    assert fused.training and fused.get_submodule("a.1").training and not model.a[1].training


def test_copies_and_pickles():
    model = settled(Forms())
    fused, x = fuse(model), torch.randn(2, 3, 6, 6)
    for twin in (
        copy.deepcopy(fused),
        pickle.loads(pickle.dumps(fused)),
        copy.deepcopy(pickle.loads(pickle.dumps(fused))),
    ):
        assert isinstance(twin, FusedModule) and twin.fusion == fused.fusion and not twin.training
        torch.testing.assert_close(twin(x), fused(x), rtol=0, atol=0)
        twin.load_state_dict(fused.state_dict())
    fused.load_state_dict({k: 2 * v for k, v in fused.state_dict().items()})
    assert not torch.equal(fused.weight, twin.weight)


class Awkward(nn.Module):
    """What must stay as it is."""

    def __init__(self):
        super().__init__()
        self.twice = nn.Conv2d(3, 3, 1)
        self.norm = nn.BatchNorm2d(3)
        self.seen, self.seen_norm = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)
        self.hooked, self.hooked_norm = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)
        self.moved, self.into, self.own = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1)
        self.softmin = nn.Softmin(1)

    def forward(self, x):
        x = self.twice(self.twice(x))
        y = self.seen(x)
        x = self.seen_norm(y) + y
        x = self.hooked_norm(self.hooked(x))
        y = x * 2
        moved = self.moved(y)  # reads y before, not after the line below
        z = T.relu_(y)
        x = moved + z
        y = x * 3
        y += self.into(x)  # the other way round: this changes y
        y = self.own(y) + self.own.bias.reshape(1, -1, 1, 1)  # a z that is broadcast
        return self.softmin(y)


def test_what_is_left_alone_is_right_and_has_its_reason():
    model = settled(Awkward())
    model.hooked_norm.register_forward_hook(lambda module, args, y: y + 1)
    fused = fuse(model)
    x = torch.randn(2, 3, 4, 4)
    with torch.no_grad():
        torch.testing.assert_close(fused(x), model(x), rtol=1e-5, atol=1e-6)
    reasons = {entry["name"]: entry["reason"] for entry in fused.fusion.left}
    assert reasons["twice"] == "the module is called 2 times"
    assert reasons["seen"] == "its result is used 2 times"
    assert reasons["hooked"].endswith("hooked_norm: it has hooks") and reasons["hooked_norm"] == "it has hooks"
    assert "changed in place before add" in reasons["moved"] and "its other operand in place" in reasons["into"]
    assert [e["name"] for e in fused.fusion.fused] == ["seen_norm", "own"]


def test_a_model_that_cannot_be_traced_says_where():
    class Deciding(nn.Module):
        def forward(self, x):
            return x if x.sum() > 0 else -x

    model = nn.Sequential(step(), nn.Sequential(Deciding()))
    with pytest.raises(NotSupported, match=r"'1\.0' \(Deciding\).*test_fuse\.py:\d+.*fuse the submodules"):
        fuse(model)
    settled(model)
    model[0], x = fuse(model[0]), torch.randn(1, 3, 4, 4)
    assert model(x).shape == (1, 4, 4, 4)
    with pytest.raises(ValueError, match="Module"):
        fuse(lambda x: x)
