"""Poolings of the framework's operator database under lucidnn, and the layouts of their results."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from operator_database import Case, check, check_errors, parameters

import lucidnn.torch

CASES = {
    "nn.functional.max_pool1d": Case(("max_pool2d_with_indices",)),
    "nn.functional.max_pool2d": Case(("max_pool2d_with_indices", "max_pool2d_with_indices_backward")),
    "nn.functional.max_pool3d": Case(("max_pool3d_with_indices", "max_pool3d_with_indices_backward")),
    "max_pool2d_with_indices_backward": Case(("max_pool2d_with_indices_backward",)),
    **{
        f"nn.functional.avg_pool{n}d": Case((f"avg_pool{max(n, 2)}d", f"avg_pool{max(n, 2)}d_backward"))
        for n in (1, 2, 3)
    },
    "nn.functional.local_response_norm": Case(("avg_pool2d", "avg_pool2d_backward")),
    **{
        f"nn.functional.adaptive_{kind}_pool{n}d": Case((f"{name}{max(n, 2)}d", f"{name}{max(n, 2)}d_backward"))
        for kind, name in (("avg", "_adaptive_avg_pool"), ("max", "adaptive_max_pool"))
        for n in (1, 2, 3)
    },
    "nn.functional.interpolate.area": Case(("_adaptive_avg_pool2d", "_adaptive_avg_pool2d_backward")),
    **{
        f"nn.functional.max_unpool{n}d{variant}": Case((f"max_unpool{max(n, 2)}d",))
        for n in (1, 2, 3)
        for variant in ("", ".grad")
    },
}


@parameters(CASES)
def test_as_native(name, dtype, whole):
    check(name, dtype, whole, CASES[name])


@pytest.mark.parametrize(
    "name", [name for name in CASES if "_pool" in name and name.startswith("nn") and "unpool" not in name]
)
def test_errors(name):
    check_errors(name)


def _forms(ndim):
    last = (torch.channels_last, torch.channels_last_3d)[ndim - 2]
    x = torch.randn(2, 4, *(8, 6, 4)[:ndim], generator=torch.Generator().manual_seed(0))
    turned = x.transpose(2, 3).contiguous().transpose(2, 3)
    x_last = x.to(memory_format=last)
    return x, x_last, x_last[..., ::2], turned, x[:, :1].expand(x.shape), x[0], x_last[0]


CALLS = {
    "max2": (2, lambda x: F.max_pool2d(x, 2)),
    "max3": (3, lambda x: F.max_pool3d(x, 2)),
    "avg2": (2, lambda x: F.avg_pool2d(x, 2)),
    "avg3": (3, lambda x: F.avg_pool3d(x, 2)),
    "adaptive avg2": (2, lambda x: F.adaptive_avg_pool2d(x, 2)),
    "adaptive avg3": (3, lambda x: F.adaptive_avg_pool3d(x, 2)),
    "adaptive max2": (2, lambda x: F.adaptive_max_pool2d(x, 2)),
    "adaptive max3": (3, lambda x: F.adaptive_max_pool3d(x, 2)),
    "unpool2": (2, lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2, output_size=x.shape[-2:])),
    "unpool3": (3, lambda x: F.max_unpool3d(*F.max_pool3d(x, 2, return_indices=True), 2, output_size=x.shape[-3:])),
}


@pytest.mark.parametrize("name", CALLS)
def test_layouts(name):
    """Results and gradients are laid out as natively."""
    ndim, call = CALLS[name]
    for number, form in enumerate(_forms(ndim)):
        found = []
        for on in (False, True):
            x = form.detach().requires_grad_()
            with lucidnn.torch.enable(*() if on else ("convolution",)):
                y = call(x)
                (dx,) = torch.autograd.grad(y.square().sum(), x)
            found.append((y, dx))
        for native, ours in zip(*found, strict=True):
            assert native.stride() == ours.stride(), number
            torch.testing.assert_close(ours, native, rtol=1e-4, atol=1e-4)


def test_an_index_outside_is_an_error_as_natively():
    x, index = torch.ones(1, 1, 2, 2), torch.full((1, 1, 2, 2), 16)
    said = []
    for names in (("convolution",), ()):
        with lucidnn.torch.enable(*names), pytest.raises(RuntimeError) as error:
            F.max_unpool2d(x, index, 2)
        said.append(str(error.value))
    assert said[0] == said[1]
