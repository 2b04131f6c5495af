"""How the direct CPU convolutions cut their work: groups, even parts, and what fits where."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from ...core.heuristics import roofline
from ...core.problem import Problem
from ...ops.convolution import Geometry, five_strides

ALIGN = 64
TYPES = ("f64", "f32", "f16", "bf16")
SLAB_BYTES = 384 << 10  # leaves room in a 1 MB second-level cache for filters and results
IN_CACHE = 0.35  # cost of moving a byte between a tensor and the cache's blocks, in bytes of memory traffic


def even_parts(total: int, limit: int, unit: int = 1) -> int:
    """Size of the parts when `total` is cut evenly into the fewest parts of at most `limit`; a multiple of `unit`."""
    pieces = -(-total // max(min(limit, total), 1))
    part = -(-total // pieces)
    return min(total, -(-part // unit) * unit)


def flattened(problem: Problem) -> tuple[Geometry, tuple[int, ...]]:
    """Geometry, and five strides of z (zeros without one); where every tap is a point, images are one long row each.

    A row of seven pixels would fill half a register tile, and is read in pieces of less than a vector.
    """
    g = Geometry.of(problem)
    z = problem.tensors.get("z") if problem.op.name != "conv_wgrad" else None
    add = five_strides(z) if z else (0,) * 5
    tables = [g.x_strides, g.y_strides, *([add] if z else [])]
    depth, rows, columns = g.in_size
    dense = all((rows == 1 or t[3] == columns * t[4]) and (depth == 1 or t[2] == rows * columns * t[4]) for t in tables)
    still = g.filter == g.stride == (1, 1, 1) and not any(g.pad) and not any(g.pad_after)
    if not (still and dense):
        return g, add
    size = (1, 1, math.prod(g.in_size))
    x, y, add = ((*t[:2], 0, 0, t[4]) for t in (g.x_strides, g.y_strides, add))
    return dataclasses.replace(g, in_size=size, out_size=size, x_strides=x, y_strides=y), add


def grouping(g: Geometry, lane: int, forward: bool = True) -> tuple[int, int, int, int]:
    """Groups, channels and filters of each, and channels of one filter, as the kernels see them.

    A depthwise convolution (one channel and one filter a group) becomes groups of some vectors of channels.
    """
    channels, filters = g.C // g.G, g.K // g.G
    if g.G > 1 and channels == filters == 1:
        most = max([n for n in range(lane, 4 * lane + 1, lane) if g.C % n == 0], default=g.C)
        return g.C // most, most, most, 1
    return (g.G, channels, filters, channels) if forward else (g.G, filters, channels, filters)


def pixel_pitch(channels: int, itemsize: int) -> int:
    """Elements from pixel to pixel in a slab, where nothing needs them side by side.

    Pixels a multiple of 2 KB apart share two sets of a first-level cache: a vector more spreads them over all sets.
    """
    return channels + ALIGN // itemsize if channels * itemsize % 2048 == 0 else channels


def aligned(elements: int, itemsize: int) -> int:
    """`elements` rounded up so that what follows them starts on a cache line."""
    unit = ALIGN // itemsize
    return -(-elements // unit) * unit


def seconds(problem: Problem, plan: Any, packed: float) -> float:
    """Estimate of a direct convolution: the product, padded to whole panels, then `packed` elements moved beside it."""
    flops = problem.flops * plan.panels * plan.width / plan.filters * (2 if plan.each else 1)
    product = roofline(problem, flops=flops, launches=2, dtype=plan.acc)
    return product + roofline(problem, flops=0.0, bytes=packed * plan.itemsize, memory_efficiency=1.0, launches=0)
