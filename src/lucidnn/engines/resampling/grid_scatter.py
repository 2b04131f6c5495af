"""``resample.grid_scatter``: the gradients of sampling by a grid on a GPU, that of x by atomic sums, in Triton.

Method: several points may take from one element of x, and which ones only the grid knows: their shares are added to a
float32 (float64) image in the workspace in whatever order they come, so two runs may differ in the last bits. A first
pass clears it, a last one rounds it into dx. The gradient of the grid is made on the way, as in
``resample.grid_tiled``. On a CPU ``resample.grid_gathered`` has one order.
Cost: an atomic sum a tap, channel and point.
"""

from typing import Any

import triton
import triton.language as tl

from ...core.engine import Config, Refusals
from ...core.heuristics import roofline
from ...core.problem import Problem
from ...ops.convolution import five_strides, three
from .._triton.index import INT32
from .._triton.launch import Argument, Launch, Slice, TritonEngine
from ._grid import TYPES, configs, grid_sample, has_points, sample_arguments, tiles, turned
from ._grid_last import tap_traffic

BLOCK = 1024


@triton.jit
def clear(sums, TOTAL, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if WIDE:
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(sums + at, tl.zeros((BLOCK,), sums.dtype.element_ty), mask=at < TOTAL)


@triton.jit
def round_sums(
    sums, dx, TOTAL, C, D, H, W, n_stride, c_stride, d_stride, h_stride, w_stride,
    PIXELS: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write dx from the sums, which are (image, channel, pixel) with `PIXELS`, else (image, pixel, channel)."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if WIDE:
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    ok = at < TOTAL
    if PIXELS:
        w = at % W
        h = at // W % H
        d = at // W // H % D
        c = at // W // H // D % C
        n = at // W // H // D // C
    else:
        c = at % C
        w = at // C % W
        h = at // C // W % H
        d = at // C // W // H % D
        n = at // C // W // H // D
    to = n * n_stride + c * c_stride + d * d_stride + h * h_stride + w * w_stride
    tl.store(dx + to, tl.load(sums + at, mask=ok, other=0.0).to(dx.dtype.element_ty), mask=ok)


class GridScatter(TritonEngine):
    name = "resample.grid_scatter"
    operations = ("grid_sample_bwd",)
    notes = frozenset({"runtime_compilation", "nondeterministic"})

    def refusals(self, problem: Problem) -> list[str]:
        r = Refusals()
        r.require_tensors(problem.items, TYPES)
        r.require(
            has_points(problem) or not tiles(problem, self.configs(problem)[0]), "points in x", problem["x"].shape
        )
        op: Any = problem.op
        r.require("dx" in problem.tensors, "gradients = both or x", op.gradients)
        if not r:
            blocks = min(tiles(problem, c) for c in self.configs(problem))
            r.require(blocks <= INT32, f"at most {INT32} tiles", blocks)
        return r

    def configs(self, problem: Problem) -> list[Config]:
        return configs(problem)

    def workspace_size(self, problem: Problem, config: Config) -> int:
        return problem["x"].numel * (8 if problem["x"].dtype == "f64" else 4)

    def cost(self, problem: Problem, config: Config) -> float:
        moved = problem.bytes + 3 * self.workspace_size(problem, config)
        moved += tap_traffic(problem, channels_last=not turned(problem))
        return roofline(problem, flops=0.0, bytes=moved, memory_efficiency=0.6, launches=3)

    def launches(self, problem: Problem, config: Config) -> list[Launch]:
        x, dx = problem["x"], problem["dx"]
        sums = Slice(0, "f64" if x.dtype == "f64" else "f32") if x.numel else None
        blocks = -(-x.numel // BLOCK)
        each = {"WIDE": max(x.numel + BLOCK, dx.span) > INT32, "BLOCK": BLOCK}
        args, constexprs = sample_arguments(problem, config, sums)
        grid = (tiles(problem, config),)
        ending: dict[str, Argument] = {"sums": sums, "dx": "dx", "TOTAL": x.numel, "C": x.shape[1]}
        ending |= dict(zip("DHW", three(x.shape[2:], 1), strict=True))
        ending |= {f"{axis}_stride": s for axis, s in zip("ncdhw", five_strides(dx), strict=True)}
        clearing = Launch(clear, (blocks,), {"sums": sums, "TOTAL": x.numel}, each) if blocks else None
        rounding = Launch(round_sums, (blocks,), ending, {**each, "PIXELS": turned(problem)}) if blocks else None
        sampling = None
        if grid[0]:
            sampling = Launch(grid_sample, grid, args, constexprs, config["num_warps"], config["num_stages"])
        return [launch for launch in (clearing, sampling, rounding) if launch]
