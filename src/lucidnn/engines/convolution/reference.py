"""``conv.reference``: the definition of convolution in float64, on any device, slow on purpose.

Method: one matrix product for each filter tap, between the filters at that tap and the input shifted to it; the
padding around the input is really there. Nothing is clever, so that it can be checked by eye against the formulas in
`lucidnn.ops.convolution`. Cost: float64 arithmetic and a padded float64 copy of the input, many times the time of any
other engine. Every other engine is tested against this one, and this one against the framework in the tests.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import torch

from ...core.descriptor import FLOATING
from ...core.engine import Config, Engine, Refusals, Run
from ...core.heuristics import roofline
from ...core.problem import Problem
from ...ops.convolution import INTEGER_RESULTS, Geometry
from .._reference import finish, store


class ConvReference(Engine):
    """All three directions and the bias gradient, straight from the formulas."""

    name = "conv.reference"
    operations = ("conv_fprop", "conv_dgrad", "conv_wgrad", "conv_bgrad")
    targets = ("cpu", "cuda", "hip")
    notes = frozenset({"reference"})
    takes = frozenset({"padding_mode", "flip", "scale"})

    def refusals(self, problem: Problem) -> list[str]:
        r = Refusals()
        r.require_tensors(problem.items, (*FLOATING, *INTEGER_RESULTS))
        return r

    def cost(self, problem: Problem, config: Config) -> float:
        return roofline(problem, bytes=20 * problem.bytes, compute_efficiency=0.02, dtype="f64", launches=50)

    def build(self, problem: Problem, config: Config) -> Run:
        names = tuple(problem.tensors)

        def run(tensors: tuple[torch.Tensor, ...], workspace: torch.Tensor | None) -> None:
            pack = dict(zip(names, tensors, strict=True))
            inputs = {role: pack[role].detach().double() for role in problem.inputs}
            (out,) = problem.outputs
            store(pack[out], finish(problem, _sum(problem, inputs), inputs))

        return run


def _sum(problem: Problem, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """What stands in the formulas before the epilogue, in float64 and logical order."""
    if problem.op.name == "conv_bgrad":
        dy = inputs["dy"]
        return dy.sum(dim=[d for d in range(dy.ndim) if d != 1])
    g = Geometry.of(problem)
    ndim = g.x.ndim - 2
    device = next(iter(inputs.values())).device

    def points(axis: int) -> torch.Tensor:
        """For every point of the padded axis the point of x that stands there, or -1."""
        size, before, after = g.in_size[axis], g.pad[axis], g.pad_after[axis]
        at = torch.arange(-before, size + after, device=device)
        outside = (at < 0) | (at >= size)
        if g.padding_mode == "reflect":
            return torch.where(at < 0, -at, torch.where(outside, 2 * (size - 1) - at, at))
        if g.padding_mode == "replicate":
            return at.clamp(0, size - 1)
        if g.padding_mode == "circular":
            return at % size
        return torch.where(outside, -1, at)

    def padded(x: torch.Tensor) -> torch.Tensor:
        for axis in range(3):
            at = points(axis)
            if not x.shape[2 + axis]:
                x = x.new_zeros([*x.shape[: 2 + axis], len(at), *x.shape[3 + axis :]])
            x = x.index_select(2 + axis, at.clamp(min=0))
            x = torch.where((at >= 0).reshape(-1, *[1] * (2 - axis)), x, 0.0)
        return x

    def folded(x: torch.Tensor) -> torch.Tensor:
        """The gradient of `padded`: every point of the padding counts for the point that stands there."""
        for axis in range(3):
            before, size = g.pad[axis], g.in_size[axis]
            whole, x = x, x.narrow(2 + axis, before, size).clone()
            for position, place in enumerate(points(axis).tolist()):  # in order: an indexed sum on a GPU has none
                if place >= 0 and not before <= position < before + size:
                    x.select(2 + axis, place).add_(whole.select(2 + axis, position))
        return x

    def turned(w: torch.Tensor) -> torch.Tensor:
        return w.flip(2, 3, 4) if g.flip else w

    def in_three(t: torch.Tensor) -> torch.Tensor:
        return t.reshape(*t.shape[:2], *[1] * (3 - ndim), *t.shape[2:])

    def grouped(t: torch.Tensor) -> torch.Tensor:  # (N, channels, D, H, W) to (N, groups, channels, points)
        return t.reshape(t.shape[0], g.G, t.shape[1] // g.G, math.prod(t.shape[2:]))

    def taps() -> Iterator[tuple[tuple[int, ...], tuple[slice, ...]]]:
        """Every filter tap, and the points of the padded input that it meets."""
        for tap in itertools.product(*map(range, g.filter)):
            starts = [t * d for t, d in zip(tap, g.dilation, strict=True)]
            axes = zip(starts, g.out_size, g.stride, strict=True)
            yield tap, tuple(slice(a, a + (q - 1) * s + 1, s) for a, q, s in axes)

    if problem.op.name == "conv_fprop":
        x, w = padded(in_three(inputs["x"])), turned(in_three(inputs["w"]))
        y = torch.zeros(g.N, g.G, g.K // g.G, math.prod(g.out_size), dtype=torch.float64, device=device)
        for tap, where in taps():
            y += w[(..., *tap)].reshape(g.G, g.K // g.G, g.C // g.G) @ grouped(x[(..., *where)])
        return y.reshape(g.y.shape)
    dy = grouped(in_three(inputs["dy"]))
    if problem.op.name == "conv_dgrad":
        w = turned(in_three(inputs["w"]))
        sizes = [n + a + b for n, a, b in zip(g.in_size, g.pad, g.pad_after, strict=True)]
        dx = torch.zeros(g.N, g.C, *sizes, dtype=torch.float64, device=device)
        for tap, where in taps():
            part = w[(..., *tap)].reshape(g.G, g.K // g.G, g.C // g.G).transpose(1, 2) @ dy
            dx[(..., *where)] += part.reshape(g.N, g.C, *g.out_size)
        return folded(dx).reshape(g.x.shape)
    x = padded(in_three(inputs["x"]))
    dw = torch.zeros(g.K, g.C // g.G, *g.filter, dtype=torch.float64, device=device)
    for tap, where in taps():
        product = (dy @ grouped(x[(..., *where)]).transpose(2, 3)).sum(0)
        dw[(..., *tap)] = product.reshape(g.K, g.C // g.G)
    return turned(dw).reshape(g.w.shape)
