"""``conv.kn2row``: a dilated convolution on a CPU as one matrix product for each filter tap.

Method. A filter tap meets a rectangle of the input and adds to a rectangle of the output; where padding is as wide as
the image, as in the far-reaching branches of segmentation networks, these are small: of a 3x3 filter with dilation 36
on 64x64 pixels a corner tap meets a fifth of the image. Forward, the input's rectangle is copied to a dense matrix of
(channels, pixels), multiplied by the tap's filters, and the product added to the output's rectangle; the data gradient
exchanges input and output. In the filter gradient, a tap's part of dw is the product of two such matrices. A rectangle
of whole rows is a matrix already and is not copied. Channels are taken in blocks whose matrices stay in the cache.

Cost. The products of those pixels that meet no padding, at BLAS speed, and a copy of the source and a sum over the
result for every tap. Workspace: the filters in the order of taps, and two blocks of at most 8 MB each; the filter
gradient's second one holds a rectangle of all channels of dy. Limits: dense channels-first tensors of float32 or
float64, one group, a dilation over 1, no epilogue: elsewhere other engines do better. A tap is never multiplied by
padding: a NaN in a filter shows only in results for which it meets a pixel.

After Anderson, Vasudevan, Keane and Gregg, "Low-memory GEMM-based convolution algorithms for deep neural networks",
2017 (there for whole images, without dilation).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math

import torch

from ...core.descriptor import DTYPES
from ...core.engine import Config, Engine, Refusals, Run
from ...core.heuristics import roofline
from ...core.problem import Problem
from ...ops.convolution import Geometry

ALIGN = 64
BLOCK_BYTES = 8 << 20  # of a block's matrix: it is in the last-level cache when BLAS reads it
_ALL = slice(None)


@dataclasses.dataclass(frozen=True)
class _Tap:
    """Where a tap meets pixels: the rectangles in x and in y, as slices of their three spatial axes."""

    number: int  # in the filter
    x: tuple[slice, ...]
    y: tuple[slice, ...]
    pixels: int


@dataclasses.dataclass(frozen=True)
class _Plan:
    g: Geometry
    direction: str
    taps: tuple[_Tap, ...]  # that meet any pixel, the widest first
    source_block: int  # channels of the copied side that are multiplied at once; filter gradient: of x
    result_block: int  # channels of the result that are summed at once; filter gradient: of dy, all
    parts: dict[str, int]  # workspace: name -> elements
    itemsize: int

    @property
    def workspace(self) -> int:
        return ALIGN + sum(-(-n * self.itemsize // ALIGN) * ALIGN for n in self.parts.values())


def _met(size: int, out: int, taps: int, stride: int, pad: int, dilation: int) -> list[tuple[slice, slice, int]]:
    """For each tap of an axis the points of x and of y where it meets a pixel, and their number.

    >>> _met(5, 5, 3, 1, 4, 4)[0]
    (slice(0, 1, 1), slice(4, 5, 1), 1)
    """
    found = []
    for r in range(taps):
        shift = r * dilation - pad
        first = max(0, -(shift // stride))  # the first output whose pixel is not before the image
        count = max(0, min(out, (size - 1 - shift) // stride + 1) - first)
        start = first * stride + shift
        stop = start + (count - 1) * stride + 1
        found.append((slice(start, stop, stride), slice(first, first + count, 1), count))
    return found


@functools.lru_cache(maxsize=256)
def _plan(problem: Problem) -> _Plan:
    g = Geometry.of(problem)
    direction = problem.op.name.removeprefix("conv_")
    axes = [_met(*n) for n in zip(g.in_size, g.out_size, g.filter, g.stride, g.pad, g.dilation, strict=True)]
    taps = []
    for number, met in enumerate(itertools.product(*axes)):
        pixels = math.prod(count for *_, count in met)
        if pixels:
            taps.append(_Tap(number, tuple(m[0] for m in met), tuple(m[1] for m in met), pixels))
    taps.sort(key=lambda tap: (-tap.pixels, tap.number))
    most = taps[0].pixels if taps else 1
    itemsize = 8 if g.x.dtype == "f64" else 4
    limit = max(1, BLOCK_BYTES // (most * itemsize))
    source, result = {"fprop": (g.C, g.K), "dgrad": (g.K, g.C), "wgrad": (g.C, g.K)}[direction]
    source_block = min(source, limit)
    result_block = result if direction == "wgrad" else min(result, limit)
    parts = {"filters": math.prod(g.filter) * g.K * g.C, "source": source_block * most, "result": result_block * most}
    return _Plan(g, direction, tuple(taps), source_block, result_block, parts, itemsize)


class Kn2row(Engine):
    """Tap by tap through BLAS, padding left out."""

    name = "conv.kn2row"
    operations = ("conv_fprop", "conv_dgrad", "conv_wgrad")
    targets = ("cpu",)

    def refusals(self, problem: Problem) -> list[str]:
        r = Refusals()
        r.require(not problem.is_empty, "tensors with elements", "an empty one")
        kinds = sorted({t.dtype for _, t in problem.items})
        r.require(len(kinds) == 1 and kinds[0] in ("f32", "f64"), "one type of f64, f32", ", ".join(kinds))
        g = Geometry.of(problem)
        r.require(max(g.dilation) > 1, "a dilation over 1", g.dilation)
        r.require(g.G == 1, "groups = 1", g.G)
        dense = all(t.is_contiguous for _, t in problem.items)
        r.require(dense, "dense channels-first tensors", ", ".join(f"{role} {t.layout}" for role, t in problem.items))
        e = problem.epilogue
        bare = e.alpha == 1 and e.activation == "identity" and not {"z", "bias"} & set(problem.inputs)
        r.require(bare, "no epilogue", "one")
        return r

    def workspace_size(self, problem: Problem, config: Config) -> int:
        return _plan(problem).workspace

    def cost(self, problem: Problem, config: Config) -> float:
        p = _plan(problem)
        g = p.g
        pixels = g.N * sum(tap.pixels for tap in p.taps)
        # Thin matrices keep BLAS from its rate.
        short = sum(max(0.0, 64 / n - 1) for n in (g.C, g.K)) + max(0.0, 96 * len(p.taps) * g.N / max(pixels, 1) - 1)
        calls = 3 * g.N * len(p.taps) * -(-(g.C if p.direction != "dgrad" else g.K) // p.source_block)
        product = roofline(
            problem, flops=2.0 * pixels * g.C * g.K * (1 + short), bytes=0.0, compute_efficiency=0.95, launches=calls
        )
        # Copies of the source and sums over the result, tap by tap; filters whose taps are dealt out or put together.
        moved = 4 * pixels * (g.C + g.K) + 6 * p.parts["filters"]
        return product + roofline(problem, flops=0.0, bytes=moved * p.itemsize, memory_efficiency=1.0, launches=0)

    def build(self, problem: Problem, config: Config) -> Run:
        p = _plan(problem)
        g, dtype = p.g, getattr(torch, DTYPES[problem.items[0][1].dtype][0])
        step = _filter_gradient if p.direction == "wgrad" else _images
        x_shape, y_shape = (g.N, g.C, *g.in_size), (g.N, g.K, *g.out_size)

        def carve(workspace: torch.Tensor) -> list[torch.Tensor]:
            at, found = -workspace.data_ptr() % ALIGN, []
            for elements in p.parts.values():
                found.append(workspace[at : at + elements * p.itemsize].view(dtype))
                at += -(-elements * p.itemsize // ALIGN) * ALIGN
            return found

        shapes = {"x": x_shape, "dx": x_shape, "y": y_shape, "dy": y_shape}
        shapes["w"] = shapes["dw"] = (g.K, g.C, math.prod(g.filter))
        sizes = [shapes[role] for role in problem.tensors]

        def run(tensors: tuple[torch.Tensor, ...], workspace: torch.Tensor) -> None:
            with torch.no_grad():
                step(p, [t.view(size) for t, size in zip(tensors, sizes, strict=True)], *carve(workspace))

        return run


def _rectangle(image: torch.Tensor, where: tuple[slice, ...], room: torch.Tensor) -> torch.Tensor:
    """The pixels of a rectangle of some channels as a matrix (channels, pixels): in place where they are neighbours."""
    part = image[(_ALL, *where)]
    channels, *size = part.shape
    _, deep, high, wide = part.stride()
    if (wide == 1 or size[2] == 1) and (high == size[2] or size[1] == 1) and (deep == size[1] * high or size[0] == 1):
        # Whole rows: one run of pixels a channel.
        return part.as_strided((channels, math.prod(size)), (part.stride(0), 1))
    dense = room[: part.numel()].view(part.shape)
    dense.copy_(part)
    return dense.view(channels, -1)


def _images(p: _Plan, tensors: list[torch.Tensor], filters: torch.Tensor, source: torch.Tensor, result: torch.Tensor):
    """Forward and data gradient: of each image some channels of the result, tap by tap."""
    images, w, out = tensors
    forward = p.direction == "fprop"
    k, c, taps = w.shape
    packed = filters.view((taps, k, c) if forward else (taps, c, k))
    packed.copy_(w.permute((2, 0, 1) if forward else (2, 1, 0)))
    whole = bool(p.taps) and p.taps[0].pixels == math.prod(out.shape[2:])
    if not whole:
        out.zero_()
    for n, first in itertools.product(range(out.shape[0]), range(0, out.shape[1], p.result_block)):
        block = out[n, first : first + p.result_block]
        rows = block.shape[0]
        for number, tap in enumerate(p.taps):
            from_, to = (tap.x, tap.y) if forward else (tap.y, tap.x)
            # The first tap's product, where it meets every pixel, is the result so far; else there are zeros.
            direct = whole and number == 0
            product = block.view(rows, -1) if direct else result[: rows * tap.pixels].view(rows, -1)
            for c0 in range(0, images.shape[1], p.source_block):
                c1 = min(c0 + p.source_block, images.shape[1])
                left, right = (
                    packed[tap.number, first : first + rows, c0:c1],
                    _rectangle(images[n, c0:c1], from_, source),
                )
                if c0:
                    torch.addmm(product, left, right, out=product)
                else:
                    torch.mm(left, right, out=product)
            if not direct:
                part = block[(_ALL, *to)]
                part.add_(product.view(part.shape))


def _filter_gradient(
    p: _Plan, tensors: list[torch.Tensor], sums: torch.Tensor, source: torch.Tensor, result: torch.Tensor
):
    """Filter gradient: tap by tap the product of two rectangles, summed over the images in order."""
    x, dy, dw = tensors
    k, c, taps = dw.shape
    by_tap = sums.view(taps, k, c)
    for number in set(range(taps)) - {tap.number for tap in p.taps}:
        by_tap[number].zero_()
    for n, tap in itertools.product(range(x.shape[0]), p.taps):
        left = _rectangle(dy[n], tap.y, result)
        for c0 in range(0, c, p.source_block):
            right = _rectangle(x[n, c0 : c0 + p.source_block], tap.x, source).t()
            to = by_tap[tap.number, :, c0 : c0 + p.source_block]
            if n:
                torch.addmm(to, left, right, out=to)
            else:
                torch.mm(left, right, out=to)
    dw.copy_(by_tap.permute(1, 2, 0))
