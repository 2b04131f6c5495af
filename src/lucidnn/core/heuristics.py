"""The cost model: a roofline with an efficiency, and the cost of a launch.

It only has to rank engines. An engine states how much arithmetic and traffic its method really does (a padded tile and
a workspace count) and which part of the machine's rate it is known to reach; the rest is the same for all.
"""

from __future__ import annotations

from .problem import Problem

LAUNCH = {"cpu": 8e-6, "cuda": 4e-6, "hip": 6e-6}  # seconds until a kernel's or parallel loop's work starts


def roofline(
    problem: Problem,
    *,
    flops: float | None = None,
    bytes: float | None = None,
    compute_efficiency: float = 1.0,
    memory_efficiency: float = 0.8,
    launches: int = 1,
    dtype: str | None = None,
) -> float:
    """Seconds: the larger of arithmetic and traffic, plus launches (kernels or parallel loops one after another).

    `flops` and `bytes` are what the method does (if left out, the problem's own minimum), `dtype` what it computes in
    (the first input's), the efficiencies the parts of the target's rates that it reaches.

    >>> p = Problem.parse("conv_fprop x=bf16[64,256,56,56]@nhwc w=bf16[256,256,3,3]@nhwc padding=1 on=cuda:sm_90")
    >>> 2e-4 < roofline(p, compute_efficiency=0.7) < 1e-3
    True
    """
    target = problem.target
    rate = target.flops(dtype or problem.items[0][1].dtype, problem.math)
    arithmetic = (problem.flops if flops is None else flops) / (rate * compute_efficiency)
    traffic = (problem.bytes if bytes is None else bytes) / (target.bandwidth * memory_efficiency)
    return max(arithmetic, traffic) + launches * LAUNCH[target.kind]
