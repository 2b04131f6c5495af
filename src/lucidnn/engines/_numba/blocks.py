"""How the direct CPU convolutions cut their work: groups, even parts, and what fits where."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

from ...core.heuristics import roofline
from ...core.problem import Problem
from ...ops.convolution import Geometry, five_strides

ALIGN = 64
TYPES = ("f64", "f32", "f16", "bf16")
SLAB_BYTES = 384 << 10  # leaves room in a 1 MB second-level cache for filters and results
# More memory than that in one piece a C library asks of the system anew for every call, which clears it page by page:
# measured 0.27 ns a byte, as long as moving so many bytes takes.
KEPT, CLEARED = 32 << 20, 5.4


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


def cleared(nbytes: int) -> float:
    """Bytes of traffic that stand for the time until a piece of scratch memory can be used."""
    return CLEARED * nbytes if nbytes > KEPT else 0.0


def seconds(problem: Problem, plan: Any, moved: float) -> float:
    """Estimate of a direct convolution: the product, padded to whole panels, then `moved` bytes of memory traffic.

    They follow one another: a task packs, multiplies, stores. Fitted with the engines' weights of bytes to 970 layers
    of known models on two AVX-512 cores: eight estimates in ten are within 20 % of the time.
    """
    flops = problem.flops * plan.panels * plan.width / plan.filters
    if plan.each:  # reads twice for a product; channels-first pixels are turned there and back besides
        flops *= 2 if problem.items[0][1].is_channels_last else 4
    # Slabs that the second-level cache cannot hold (many channels, dilated filters) are read from further away, by
    # every panel of filters; the filter gradient reads them once for every few channels.
    slab = math.prod(plan.spans) * plan.pitch * plan.itemsize
    flops *= 1 + 0.1 * max(0.0, math.log2(slab / (1 << 20)))
    product = roofline(problem, flops=flops, bytes=0.0, compute_efficiency=1.1, launches=2, dtype=plan.acc)
    return product + roofline(problem, flops=0.0, bytes=moved, memory_efficiency=1.0, launches=0)


@dataclasses.dataclass(frozen=True)
class Axis:
    """One spatial axis: for each class of output positions, its number of points and its taps (index, offset)."""

    size: int  # of the source
    step: int  # source points from one output point of a class to the next
    low: int  # points before the source that the first output reads
    spread: int  # output points from one point of a class to the next
    phases: tuple[tuple[int, int, tuple[tuple[int, int], ...]], ...]  # first output point, points, taps

    @property
    def points(self) -> int:
        return max(count for _, count, _ in self.phases)

    @property
    def reach(self) -> int:
        """Source points that one output point reads, first to last."""
        return 1 + max((offset for _, _, taps in self.phases for _, offset in taps), default=0)

    def runs(self, phase: int) -> list[tuple[int, tuple[int, ...], int]]:
        """The taps of a class of outputs, in runs along which outputs that are `gap` points apart share sources.

        Gives (gap, the run's taps, offset of the first): tap i of a run lies ``i * gap * step`` source points on.
        """
        taps = sorted(self.phases[phase][2], key=lambda tap: tap[1])
        apart = {b[1] - a[1] for a, b in itertools.pairwise(taps)}
        between = apart.pop() if len(apart) == 1 else 0
        if between and between % self.step == 0:
            return [(between // self.step, tuple(r for r, _ in taps), taps[0][1])]
        if between and self.step % between == 0:
            classes = [[tap for tap in taps if tap[1] % self.step == rest] for rest in range(self.step)]
            return [(1, tuple(r for r, _ in run), run[0][1]) for run in classes if run]
        return [(1, (r,), offset) for r, offset in taps]

    @classmethod
    def forward(cls, size, points, taps, stride, pad, dilation, every: bool = False) -> Axis:
        """Taps that meet nothing but padding, for every output, are left out unless `every` tap is wanted.

        Only before the first and after the last that meets something: where strides pass over a small image such a tap
        may lie between two others, and kernels count on taps that lie evenly.
        """
        met = [r for r in range(taps) if any(0 <= q * stride + r * dilation - pad < size for q in range(points))]
        kept = range(taps) if every else range(met[0], met[-1] + 1) if met else ()
        found = [(r, r * dilation) for r in kept]
        return cls(size, stride, pad, 1, ((0, points, tuple(found)),))

    @classmethod
    def backward(cls, size, points, taps, stride, pad, dilation) -> Axis:
        """Point h of dx (`size` points) gets tap r from point (h + pad - r dilation) / stride of dy, if whole."""
        found = []
        for first in range(min(stride, size)):
            count = -(-(size - first) // stride)
            reached = [divmod(first + pad - r * dilation, stride) for r in range(taps)]
            hits = sorted((q, r) for r, (q, remainder) in enumerate(reached) if remainder == 0)
            hits = [(q, r) for q, r in hits if -count < q < points]
            found.append((first, count, hits))
        low = max([0, *(-q for _, _, hits in found for q, _ in hits)])
        phases = tuple((first, count, tuple((r, q + low) for q, r in hits)) for first, count, hits in found)
        return cls(points, 1, low, stride, phases)
