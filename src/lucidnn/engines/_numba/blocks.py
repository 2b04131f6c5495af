"""How the direct CPU convolutions cut their work: groups, even parts, and what fits where."""

from __future__ import annotations

from typing import Any

from ...core.heuristics import roofline
from ...core.problem import Problem
from ...ops.convolution import Geometry

ALIGN = 64
TYPES = ("f64", "f32", "f16", "bf16")
SLAB_BYTES = 384 << 10  # leaves room in a 1 MB second-level cache for filters and results
IN_CACHE = 0.35  # cost of moving a byte between a tensor and the cache's blocks, in bytes of memory traffic


def even_parts(total: int, limit: int, unit: int = 1) -> int:
    """Size of the parts when `total` is cut evenly into the fewest parts of at most `limit`; a multiple of `unit`."""
    pieces = -(-total // max(min(limit, total), 1))
    part = -(-total // pieces)
    return min(total, -(-part // unit) * unit)


def grouping(g: Geometry, lane: int, forward: bool = True) -> tuple[int, int, int, int]:
    """Groups, channels and filters of each, and channels of one filter, as the kernels see them.

    A depthwise convolution (one channel and one filter a group) becomes groups of some vectors of channels.
    """
    channels, filters = g.C // g.G, g.K // g.G
    if g.G > 1 and channels == filters == 1:
        most = max([n for n in range(lane, 4 * lane + 1, lane) if g.C % n == 0], default=g.C)
        return g.C // most, most, most, 1
    return (g.G, channels, filters, channels) if forward else (g.G, filters, channels, filters)


def aligned(elements: int, itemsize: int) -> int:
    """`elements` rounded up so that what follows them starts on a cache line."""
    unit = ALIGN // itemsize
    return -(-elements // unit) * unit


def seconds(problem: Problem, plan: Any, packed: float) -> float:
    """Estimate of a direct convolution: the product, padded to whole panels, then `packed` elements moved beside it."""
    flops = problem.flops * plan.panels * plan.width / plan.filters * (2 if plan.each else 1)
    product = roofline(problem, flops=flops, launches=2, dtype=plan.acc)
    return product + roofline(problem, flops=0.0, bytes=packed * plan.itemsize, memory_efficiency=1.0, launches=0)
