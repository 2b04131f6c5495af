"""Resampling, sampling by a grid, unfold, fold and shuffles of the framework's operator database under lucidnn."""

from __future__ import annotations

from operator_database import Case, check, parameters


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
    "nn.functional.grid_sample": _both("grid_sampler_2d", "grid_sampler_3d"),
    "nn.functional.unfold": Case(("im2col", "col2im")),
    "nn.functional.pixel_shuffle": Case(("pixel_shuffle", "pixel_unshuffle")),
    "nn.functional.pixel_unshuffle": Case(("pixel_shuffle", "pixel_unshuffle")),
    "nn.functional.channel_shuffle": Case(("channel_shuffle",)),
}


@parameters(CASES)
def test_as_native(name, dtype, whole):
    check(name, dtype, whole, CASES[name])
