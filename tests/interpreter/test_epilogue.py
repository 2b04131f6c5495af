"""The activations and their gradients as Triton device functions, interpreted, against the framework in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as functional
import triton
import triton.language as tl

from lucidnn.engines._triton.epilogue import activate, activate_grad, finish
from lucidnn.ops.activation import ACTIVATIONS

SIZE = 2048
PARAMETERS = {"clipped_relu": 1.5, "leaky_relu": 0.0625, "elu": 0.75}
DEFINITIONS = {
    "identity": lambda v, p: v,
    "relu": lambda v, p: functional.relu(v),
    "clipped_relu": lambda v, p: functional.hardtanh(v, 0.0, p),
    "leaky_relu": functional.leaky_relu,
    "elu": functional.elu,
    "sigmoid": lambda v, p: torch.sigmoid(v),
    "tanh": lambda v, p: torch.tanh(v),
    "silu": lambda v, p: functional.silu(v),
    "gelu": lambda v, p: functional.gelu(v),
    "gelu_tanh": lambda v, p: functional.gelu(v, approximate="tanh"),
    "softplus": lambda v, p: functional.softplus(v, threshold=1e9),
    "hardswish": lambda v, p: functional.hardswish(v),
    "hardsigmoid": lambda v, p: (v + 3).clamp(0, 6) / 6,  # the framework's own gradient is 1/6 in float32
    "mish": lambda v, p: functional.mish(v),
}
# where a value is small because two larger ones cancel, only the absolute error can be asked for
RELATIVE = {"elu", "sigmoid", "tanh", "silu", "softplus", "mish"}


@triton.jit
def both(x, dy, y, dx, p, ACT: tl.constexpr, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    v = tl.load(x + i)
    tl.store(y + i, activate(v, ACT, p))
    tl.store(dx + i, activate_grad(v, tl.load(dy + i), ACT, p))


@triton.jit
def blended(acc, z, bias, out, alpha, beta, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    tl.store(out + i, finish(tl.load(acc + i), tl.load(z + i), tl.load(bias + i), alpha, beta, None, 1))


def points(dtype: torch.dtype) -> torch.Tensor:
    tiny = torch.logspace(-30, 0.5, SIZE // 4, dtype=torch.float64)
    wide = torch.linspace(-30, 30, SIZE // 2, dtype=torch.float64)
    return torch.cat([wide, tiny, -tiny]).to(dtype)


@pytest.mark.parametrize("dtype,accuracy", [(torch.float32, 1e-6), (torch.float64, 2e-15)])
@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the branch that is not taken overflows
def test_values_and_gradients(name: str, dtype: torch.dtype, accuracy: float) -> None:
    x, p = points(dtype), PARAMETERS.get(name, 0.0)
    dy = torch.randn(SIZE, dtype=dtype, generator=torch.Generator().manual_seed(0))
    y, dx = torch.full_like(x, torch.nan), torch.full_like(x, torch.nan)
    both[(1,)](x, dy, y, dx, p, ACTIVATIONS[name].code, SIZE)
    exact = x.double().requires_grad_()
    want = DEFINITIONS[name](exact, p)
    want.backward(dy.double())
    if name in RELATIVE:
        assert ((y - want).abs() <= 3 * accuracy * want.abs() + 1e-37).all()
    assert ((y - want).abs() <= accuracy * (1 + want.abs())).all()
    assert exact.grad is not None
    kink = (x.double().abs() - 3).abs() < 1e-6 if name.startswith("hard") else torch.zeros(SIZE, dtype=torch.bool)
    assert (((dx - exact.grad).abs() <= 10 * accuracy * (1 + exact.grad.abs())) | kink).all()


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_extremes(name: str) -> None:
    """NaN stays NaN; infinities and huge values give the limit, as the framework does."""
    x = points(torch.float32)
    x[:6] = torch.tensor([torch.nan, torch.inf, -torch.inf, 3e38, -3e38, 0.0])
    y, dx, p = torch.zeros(SIZE), torch.zeros(SIZE), PARAMETERS.get(name, 0.0)
    both[(1,)](x, torch.ones(SIZE), y, dx, p, ACTIVATIONS[name].code, SIZE)
    assert y[0].isnan()
    want = DEFINITIONS[name](x[1:6].double(), p).float()
    limits = {"silu": (1,), "gelu": (1,), "gelu_tanh": (1,), "mish": (1,), "hardswish": (1,)}.get(name, ())
    for place, (got, expected) in enumerate(zip(y[1:6], want)):
        if place in limits and expected.isnan():  # x * 0 at minus infinity: NaN or the limit 0 are both used
            assert got.isnan() or got == 0
        else:
            torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-37, equal_nan=True)


def test_finish_blends_before_it_activates() -> None:
    acc, z, bias, out = *torch.randn(3, SIZE, generator=torch.Generator().manual_seed(0)), torch.empty(SIZE)
    blended[(1,)](acc, z, bias, out, 0.5, -2.0, SIZE)
    torch.testing.assert_close(out, (0.5 * acc - 2.0 * z + bias).relu())
    blended[(1,)](acc, z, bias, out, None, None, SIZE)
    torch.testing.assert_close(out, (acc + z + bias).relu())
