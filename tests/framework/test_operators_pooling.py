"""Poolings of the framework's operator database under lucidnn, and the layouts of their results."""

from __future__ import annotations

from operator_database import Case, check, parameters

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
