"""A long reduction split over blocks: how it is dealt out, and the kernel that adds the parts of a filter gradient.

Every part of the pixels is summed by a block of its own into the workspace, and `conv_wgrad_sum` adds the parts in a
fixed order, so the result is the same from run to run.  With one part there is no workspace and no second kernel.
"""

import dataclasses
import math

import triton
import triton.language as tl

from ...core.engine import Config
from ...core.problem import Problem
from ...core.target import Target
from ...ops.convolution import Geometry
from .epilogue import finish
from .index import INT32
from .launch import Argument, Launch, Slice, blend
from .tiles import Gemm, ranked, shapes

MOST_PARTS = 512


@triton.jit
def conv_wgrad_sum(
    parts, z, dw, alpha, beta, PARTS, ELEMENTS, C,
    z_k_stride, z_c_stride, z_t_stride, z_r_stride, z_s_stride,
    dw_k_stride, dw_c_stride, dw_t_stride, dw_r_stride, dw_s_stride,
    T: tl.constexpr, R: tl.constexpr, S: tl.constexpr, WIDE: tl.constexpr,
    BUNDLE: tl.constexpr, FILTERS: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Alpha * (sum over the parts, each laid out as K, T, R, S, C) + beta * z.

    Where groups of `FILTERS` filters were taken `BUNDLE` at a time, as if each saw the others' channels too, the
    parts have C * BUNDLE channels, of which a filter's own count.
    """
    pid = tl.program_id(0)
    if WIDE:
        pid = pid.to(tl.int64)
    e = pid * BLOCK + tl.arange(0, BLOCK)
    ok = e < ELEMENTS
    pixel = e // C
    c = e - pixel * C
    s = pixel % S
    line = pixel // S
    r = line % R
    plane = line // R
    t = plane % T
    k = plane // T
    own = e
    if BUNDLE > 1:
        own = (pixel * BUNDLE + (k // FILTERS) % BUNDLE) * C + c
    acc = tl.zeros((BLOCK_S, BLOCK), dtype=parts.dtype.element_ty)
    for first in range(0, PARTS, BLOCK_S):
        part = first + tl.arange(0, BLOCK_S)
        places = parts + part.to(tl.int64)[:, None] * (ELEMENTS * BUNDLE) + own[None, :]
        acc += tl.load(places, mask=(part < PARTS)[:, None] & ok[None, :], other=0.0)
    total = tl.sum(acc, axis=0)
    z_tile = None
    if z is not None:
        z_place = k * z_k_stride + t * z_t_stride + r * z_r_stride + s * z_s_stride + c * z_c_stride
        z_tile = tl.load(z + z_place, mask=ok, other=0.0)
    result = finish(total, z_tile, None, alpha, beta, None, 0)
    place = k * dw_k_stride + t * dw_t_stride + r * dw_r_stride + s * dw_s_stride + c * dw_c_stride
    tl.store(dw + place, result.to(dw.dtype.element_ty), mask=ok)


@dataclasses.dataclass(frozen=True)
class Split:
    """How a filter gradient's product is cut into tiles and parts.

    Parameters
    ----------
    geometry : Geometry
    gemm : Gemm
        Its `depth` is the number of pixels.
    """

    geometry: Geometry
    gemm: Gemm

    @property
    def elements(self) -> int:
        """Of dw."""
        g = self.geometry
        return g.K * math.prod(g.filter) * (g.C // g.G)

    @property
    def part_type(self) -> str:
        return "f64" if self.gemm.dtype == "f64" else "f32"

    def tiles(self, config: Config) -> int:
        """Blocks of one part."""
        return -(-self.gemm.m // config["BLOCK_M"]) * -(-self.gemm.n // config["BLOCK_N"]) * self.gemm.batch

    def trips(self, config: Config) -> int:
        """Turns of the loop of each part; the last part may have fewer."""
        return -(-self._steps(config) // config["SPLIT_K"])

    def parts(self, config: Config) -> int:
        """Parts that have something to do: at most SPLIT_K."""
        return -(-self._steps(config) // self.trips(config))

    def _steps(self, config: Config) -> int:
        return -(-self.gemm.depth // config["BLOCK_K"])

    def configs(self, target: Target) -> list[Config]:
        found = []
        for config in shapes(self.gemm, target):
            tiles, steps = self.tiles(config), self._steps(config)
            splits = {max(1, min(waves * target.processors // tiles, steps, MOST_PARTS)) for waves in (1, 2, 4)}
            found += [{**config, "SPLIT_K": split} for split in sorted(splits | {1})]
        return [*ranked(self.gemm, found, target)]

    def size(self, config: Config) -> int:
        """Bytes of workspace for the parts."""
        parts = self.parts(config)
        return 0 if parts == 1 else parts * self.elements * (8 if self.part_type == "f64" else 4)

    def result(self, problem: Problem, config: Config, at: int) -> dict[str, Argument]:
        """Arguments of the product's kernel that say where it writes: dw itself, or parts from byte `at` on."""
        if self.parts(config) > 1:
            return self.share(problem, at)
        return {
            "out": "dw", **named("out", "kctrs", self.geometry.w_strides), "out_part_stride": 0, **last_step(problem)
        }  # fmt: skip

    def share(self, problem: Problem, at: int) -> dict[str, Argument]:
        """The same where it writes parts, however many."""
        g = self.geometry
        strides = packed_strides(g.C // g.G, *g.filter)
        where = {"out": Slice(at, self.part_type), **named("out", "kctrs", strides), "out_part_stride": self.elements}
        return where | dict.fromkeys(last_step(problem))

    def addition(self, problem: Problem, config: Config, at: int) -> list[Launch]:
        """The launch that adds the parts, if there are several."""
        parts, g = self.parts(config), self.geometry
        if parts == 1:
            return []
        return [add_parts(problem, g, parts, Slice(at, self.part_type))]


def add_parts(problem: Problem, g: Geometry, parts: int, source: Slice, bundle: int = 1) -> Launch:
    """The launch that adds `parts` filter gradients, each laid out as K, T, R, S, C, and writes dw.

    With `bundle` > 1 each has that many groups' channels, and a filter's own are taken.
    """
    elements = g.K * math.prod(g.filter) * (g.C // g.G)
    block_s = min(triton.next_power_of_2(parts), 32)
    block = min(1024, 2048 // block_s)
    args: dict[str, Argument] = {
        **last_step(problem), "parts": source, "dw": "dw",
        "PARTS": parts, "ELEMENTS": elements, "C": g.C // g.G, **named("dw", "kctrs", g.w_strides),
    }  # fmt: skip
    wide = (elements + 4096) * bundle > INT32 or any(t.span > INT32 for _, t in problem.items)
    constexprs = {
        **dict(zip("TRS", g.filter)), "WIDE": wide, "BUNDLE": bundle, "FILTERS": g.K // g.G if bundle > 1 else 1,
        "BLOCK_S": block_s, "BLOCK": block,
    }  # fmt: skip
    return Launch(conv_wgrad_sum, (-(-elements // block),), args, constexprs, 4, 2)


def last_step(problem: Problem) -> dict[str, Argument]:
    """Arguments of ``alpha * sum + beta * z``."""
    z = problem.tensors.get("z")
    strides = (*z.strides[:2], *(0,) * (5 - z.ndim), *z.strides[2:]) if z else (None,) * 5
    found = {**blend(problem), "z": "z", **named("z", "kctrs", strides)}
    del found["parameter"]
    return found


def named(name: str, axes: str, values: tuple) -> dict[str, Argument]:
    return {f"{name}_{axis}_stride": value for axis, value in zip(axes, values)}


def packed_strides(c: int, t: int, r: int, s: int) -> tuple[int, int, int, int, int]:
    """Strides of K, C, T, R and S in a dense K, T, R, S, C array."""
    return t * r * s * c, 1, r * s * c, s * c, c
