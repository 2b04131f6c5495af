"""Functions of float32 on vectors, on a CPU: within a unit in the last place, at ordinary points and at hard ones.

The hard ones are signed zeros, subnormals, infinities, NaN, what lies beside a pole, a zero or 1, and angles so large
that one multiple of pi in float32 is lost; vectors with and without them, and some that are not full.
"""

import itertools
import math

import pytest
import torch

from lucidnn import functional

HARD = torch.tensor(
    [0.0, -0.0, 1e-45, -1e-45, 1e-40, 2.0**-126, -(2.0**-126), math.inf, -math.inf, math.nan, 1, -1, 2, 3, -3, 0.5,
     -2.5, 3.4e38, -3.4e38, 1e6, -1e6, 999999.9, 123456.7, 16777216, 16777218, 1 - 2.0**-24, 1 + 2.0**-23, math.pi,
     math.pi / 2, -math.pi / 2, math.pi / 4, 3.95, 3.9, 2.0**-0.5, 2.0**0.5],
)  # fmt: skip
FUNCTIONS = {"exp": torch.exp, "log": torch.log, "sin": torch.sin, "cos": torch.cos, "tan": torch.tan, "erf": torch.erf}


def at_random(count: int) -> torch.Tensor:
    """Ordinary values, values near 1, large ones, and any bits at all."""
    generator = torch.Generator().manual_seed(7)
    normal = torch.randn(count, generator=generator)
    bits = torch.randint(-(2**31), 2**31, (count,), generator=generator).int().view(torch.float32)
    return torch.cat([normal, 1 + 0.01 * normal, 3e4 * normal, bits])


def check(found: torch.Tensor, exact: torch.Tensor) -> None:
    rounded = exact.float()
    assert torch.equal(found.isnan(), exact.isnan())
    plain = exact.isfinite() & rounded.isfinite() & (rounded != 0)
    same = (found == rounded) & (found.signbit() == rounded.signbit()) | exact.isnan()
    next_ = torch.nextafter(rounded.abs(), torch.tensor(math.inf)).double()
    unit = (next_ - rounded.abs().double()).clamp(min=2.0**-149)
    near = (found.double() - exact).abs() <= unit
    wrong = ~torch.where(plain, near, same | (near & found.isfinite() & exact.isfinite()))
    assert not wrong.any(), (found[wrong][:4], exact[wrong][:4], int(wrong.sum()))


@pytest.mark.parametrize("mode", FUNCTIONS)
def test_of_one(mode):
    x = torch.cat([HARD, at_random(50_001)])
    found = functional.pointwise_tensor(mode, x)
    check(found, FUNCTIONS[mode](x.double()))


@pytest.mark.parametrize("mode", ["pow", "mod"])
def test_of_two(mode):
    exact = {"pow": torch.pow, "mod": torch.fmod}[mode]
    x, y = (torch.tensor(values) for values in zip(*itertools.product(HARD.tolist(), repeat=2), strict=True))
    many = at_random(50_001)
    x = torch.cat([x, many, many, many])
    y = torch.cat([y, many.flip(0), many.roll(5), (3 * many).round()])
    check(functional.pointwise_tensor(mode, x, y), exact(x.double(), y.double()))


def test_where_the_buffers_are_used():
    x, y = at_random(300).reshape(30, 40), at_random(10)
    for mode in ("sin", "log"):
        found = functional.pointwise_tensor(mode, x.T)
        assert torch.equal(found.nan_to_num(), functional.pointwise_tensor(mode, x).T.nan_to_num())
    found = functional.pointwise_tensor("pow", x, y[:40], alpha1=0.5)
    check(found, torch.pow(0.5 * x.double(), y[:40].double()))
