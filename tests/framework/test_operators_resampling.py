"""Resampling, sampling by a grid, unfold, fold and shuffles of the framework's operator database under lucidnn."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from operator_database import Case, check, parameters

import lucidnn.torch


def _both(*names):
    return Case(tuple(part for name in names for part in (name, f"{name}_backward")))


CASES = {
    "nn.functional.interpolate.nearest": _both(*(f"upsample_nearest{n}d" for n in (1, 2, 3))),
    "nn.functional.interpolate.nearest-exact": _both(*(f"_upsample_nearest_exact{n}d" for n in (1, 2, 3))),
    "nn.functional.interpolate.linear": _both("upsample_linear1d"),
    "nn.functional.interpolate.bilinear": _both("upsample_bilinear2d"),
    "nn.functional.interpolate.trilinear": _both("upsample_trilinear3d"),
    "nn.functional.interpolate.bicubic": _both("upsample_bicubic2d"),
    "nn.functional.upsample_bilinear": _both("upsample_bilinear2d"),
    "nn.functional.upsample_nearest": _both("upsample_nearest2d"),
    "_upsample_bilinear2d_aa": _both("_upsample_bilinear2d_aa"),
    "grid_sampler_2d": _both("grid_sampler_2d"),
    "grid_sampler_3d": _both("grid_sampler_3d"),
    "nn.functional.grid_sample": _both("grid_sampler_2d"),
    "nn.functional.unfold": Case(("im2col", "col2im")),
    "nn.functional.pixel_shuffle": Case(("pixel_shuffle", "pixel_unshuffle")),
    "nn.functional.pixel_unshuffle": Case(("pixel_shuffle", "pixel_unshuffle")),
    "nn.functional.channel_shuffle": Case(("channel_shuffle",)),
}


@parameters(CASES)
def test_as_native(name, dtype, whole):
    large = whole and name == "nn.functional.grid_sample" and dtype == torch.bfloat16
    if large or ("grid_sample" in name and dtype == torch.float16):
        pytest.skip("the framework's own kernels write past their tensors: 'free(): invalid size'")
    check(name, dtype, whole, CASES[name])


FORMS = {
    "first": lambda x: x,
    "last": lambda x: x.to(memory_format=torch.channels_last),
    "slice of last": lambda x: x.to(memory_format=torch.channels_last)[..., ::2],
    "turned": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
    "expanded": lambda x: x[:, :1].expand(x.shape),
}
CALLS = {
    "bilinear": lambda x: F.interpolate(x, (9, 7), mode="bilinear"),
    "bicubic": lambda x: F.interpolate(x, (9, 7), mode="bicubic"),
    "grid": lambda x: F.grid_sample(x, torch.linspace(-1, 1, 18 * len(x)).reshape(-1, 3, 3, 2), align_corners=False),
    "unfold": lambda x: F.unfold(x, 2),
    "pixel_shuffle": lambda x: F.pixel_shuffle(x, 2),
    "channel_shuffle": lambda x: F.channel_shuffle(x, 4),
}


@pytest.mark.parametrize("name", CALLS)
def test_layouts(name):
    """Results and gradients are laid out as natively."""
    for form, make in FORMS.items():
        found = []
        for on in (False, True):
            x = make(torch.randn(2, 8, 6, 8, generator=torch.Generator().manual_seed(0))).requires_grad_()
            with lucidnn.torch.enable(*() if on else ("convolution",)):
                y = CALLS[name](x)
                (dx,) = torch.autograd.grad(y.square().sum(), x)
            found.append((y, dx))
        for native, ours in zip(*found, strict=True):
            assert native.stride() == ours.stride(), form
            torch.testing.assert_close(ours, native, rtol=1e-4, atol=1e-4)
