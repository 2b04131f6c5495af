"""Grouped convolution with narrow groups, several of them in one tile of the matrix units, in Triton.

A group of 4 channels fills a matrix unit's operand to an eighth, and its rows are too short for wide loads. Here
`BUNDLE` neighbouring groups are taken for one: its filter is block-diagonal, zero where a filter would meet another
group's channels, and is written so into the workspace first (`BUNDLE` times the filter, a few kilobytes). The gathered
product of `lucidnn.engines._triton.conv_gather` then runs on fewer, wider groups, with contiguous loads and full
tiles; the filter gradient runs `lucidnn.engines._triton.conv_wgrad` in the same way, and of its sums only the blocks
on the diagonal are added up, part by part in a fixed order.

Any strides, asymmetric padding, dilation, 1 to 3 dimensions; 16-bit types and float32 under ``math=tf32``, where matrix
units have operations to spare. Cost: `BUNDLE` times the definition's operations, at the rate of full tiles. Limits: two
groups or more that fit into 64 channels and filters together; an infinity or NaN in one group's input becomes NaN in
its bundle's other results too, because zero times infinity is.
"""

import dataclasses

import triton
import triton.language as tl

from ...core.engine import Config, Refusals
from ...core.problem import Problem
from ...ops.convolution import Geometry
from .._triton import conv_wgrad
from .._triton.conv_gather import ORDER, View, gather
from .._triton.index import INT32
from .._triton.launch import Launch, Slice, TritonEngine
from .._triton.split import add_parts
from .._triton.tf32 import rounded
from .._triton.tiles import ranked, shapes, start

DTYPES = ("f32", "f16", "bf16")
WIDEST = 64  # channels or filters of a bundle
BLOCK = 512


@triton.jit
def spread_filter(
    w, out, ELEMENTS, w_group_stride, w_out_stride, w_red_stride, w_t_stride, w_r_stride, w_s_stride,
    TAPS: tl.constexpr, R: tl.constexpr, S: tl.constexpr, RED: tl.constexpr, OUT: tl.constexpr,
    BUNDLE: tl.constexpr, ROUND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """(bundle, result channel, tap, source channel), channels of all its groups: zero where the two groups differ."""
    e = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    red = e % (RED * BUNDLE)
    rest = e // (RED * BUNDLE)
    tap = rest % TAPS
    rest = rest // TAPS
    out_channel = rest % (OUT * BUNDLE)
    bundle = rest // (OUT * BUNDLE)
    group = out_channel // OUT
    place = (bundle * BUNDLE + group) * w_group_stride + (out_channel % OUT) * w_out_stride + (red % RED) * w_red_stride
    place += (tap // (S * R)) * w_t_stride + ((tap // S) % R) * w_r_stride + (tap % S) * w_s_stride
    v = tl.load(w + place, mask=(e < ELEMENTS) & (red // RED == group), other=0.0)
    if ROUND:
        v = rounded(v)
    tl.store(out + e, v, mask=e < ELEMENTS)


class GroupedPacked(TritonEngine):
    """All three directions."""

    name = "conv.grouped_packed"
    operations = ("conv_fprop", "conv_dgrad", "conv_wgrad")
    notes = frozenset({"tensor_core", "tf32", "runtime_compilation", "spreads"})

    def refusals(self, problem: Problem) -> list[str]:
        refusals = Refusals()
        refusals.require_tensors(problem.items[:2], DTYPES, elements=True)
        refusals.require_tensors(problem.items[2:], (*DTYPES, "f64"), elements=True)
        types = [t.dtype for _, t in problem.items[:2]]
        if "f32" in types:
            refusals.require(problem.math == "tf32", "float32 with TF32 allowed", problem.math)
        g = Geometry.of(problem)
        wide = max(g.C, g.K) // g.G
        refusals.require(bool(_bundles(g)), "a divisor of the groups that takes 2 or more to 64 channels and filters",
                         f"{g.G} group(s) of {wide}")  # fmt: skip
        if not refusals:
            blocks = max(self._blocks(problem, config) for config in self.configs(problem))
            refusals.require(blocks <= INT32, "at most 2^31 - 1 tiles", blocks)
        return refusals

    def _blocks(self, problem: Problem, config: Config) -> int:
        if problem.op.name == "conv_wgrad":
            split = self._wgrad(problem, config["BUNDLE"]).split
            return split.tiles(config) * split.parts(config)
        return self._gather(problem, config["BUNDLE"]).blocks(config)

    def _gather(self, problem: Problem, bundle: int) -> View:
        """The product of bundles."""
        v = View.of(problem)
        t, r, s = v.geometry.filter
        red, out = v.red * bundle, v.out * bundle
        taps = t * r * s
        return v.over(
            v.geometry.G // bundle * out * taps * red, geometry=_bundled(v.geometry, bundle), red=red, out=out,
            filters=Slice(0, v.dtype),
            w_strides=(out * taps * red, taps * red, 1, r * s * red, s * red, red),
        )  # fmt: skip

    def _wgrad(self, problem: Problem, bundle: int) -> conv_wgrad.View:
        v = conv_wgrad.View.of(problem)
        return dataclasses.replace(v, geometry=_bundled(v.geometry, bundle))

    def configs(self, problem: Problem) -> list[Config]:
        target, found = problem.target, []
        for bundle in _bundles(Geometry.of(problem)):
            if problem.op.name == "conv_wgrad":
                tiles = self._wgrad(problem, bundle).split.configs(target)[:4]
            else:
                gemm = self._gather(problem, bundle).gemm(problem.math)
                tiles = [{**tile, **ORDER} for tile in ranked(gemm, shapes(gemm, target), target, 4)]
            found += [{**tile, "BUNDLE": bundle} for tile in tiles]
        return sorted(found, key=lambda config: self.cost(problem, config))[:8]

    def workspace_size(self, problem: Problem, config: Config) -> int:
        bundle = config["BUNDLE"]
        if problem.op.name == "conv_wgrad":
            split = self._wgrad(problem, bundle).split
            return split.parts(config) * split.elements * 4
        return problem["w"].numel * bundle * problem["w"].itemsize

    def cost(self, problem: Problem, config: Config) -> float:
        target, bundle = problem.target, config["BUNDLE"]
        extra = 2 * self.workspace_size(problem, config) / (0.8 * target.bandwidth) + start(target, 2)
        if problem.op.name == "conv_wgrad":
            v = self._wgrad(problem, bundle)
            return conv_wgrad.product_seconds(problem, v.split, config, v.packed) + extra
        v = self._gather(problem, bundle)
        return max(v.seconds(problem.math, config, target), problem.bytes / (0.8 * target.bandwidth)) + extra

    def launches(self, problem: Problem, config: Config) -> list[Launch]:
        g, bundle = Geometry.of(problem), config["BUNDLE"]
        if problem.op.name == "conv_wgrad":
            v = self._wgrad(problem, bundle)
            product = conv_wgrad.product(problem, v, config, v.split.share(problem, 0))
            return [product, add_parts(problem, g, v.split.parts(config), Slice(0, "f32"), bundle)]
        plain, v, rounding = View.of(problem), self._gather(problem, bundle), problem.math == "tf32"
        elements = problem["w"].numel * bundle
        names = ("w_group_stride", "w_out_stride", "w_red_stride", "w_t_stride", "w_r_stride", "w_s_stride")
        args = {"w": "w", "out": v.filters, "ELEMENTS": elements, **dict(zip(names, plain.w_strides))}
        constexprs = {
            "TAPS": v.taps, "R": g.filter[1], "S": g.filter[2], "RED": plain.red, "OUT": plain.out, "BUNDLE": bundle,
            "ROUND": rounding, "BLOCK": BLOCK,
        }  # fmt: skip
        spread = Launch(spread_filter, (-(-elements // BLOCK),), args, constexprs, 4, 1)
        return [spread, gather(problem, v, config, precision=problem.math, rounding=rounding)]


def _bundles(g: Geometry) -> list[int]:
    """Numbers of groups worth taking together, the one that fills 32 channels best first."""
    wide = max(g.C, g.K) // g.G
    fitting = [n for n in range(2, g.G + 1) if g.G % n == 0 and n * wide <= WIDEST]
    return sorted(fitting, key=lambda n: (abs(n * wide - 32), n))[:4]


def _bundled(g: Geometry, bundle: int) -> Geometry:
    return dataclasses.replace(g, G=g.G // bundle)
