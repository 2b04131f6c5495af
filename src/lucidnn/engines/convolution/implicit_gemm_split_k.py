"""Forward and data gradient with few results and a long reduction: implicit GEMM, its reduction dealt over blocks.

A late layer at a small batch has fewer tiles than the GPU has processors and thousands of terms in each sum. Here
`SPLIT_K` blocks share a tile's sum: the gathered product of `lucidnn.engines._triton.conv_gather` leaves their parts
in the workspace in float32 (float64 for float64), and a second kernel adds them in a fixed order and applies the
epilogue, so the result is the same from run to run.

Any padding, dilation and groups, 1 to 3 dimensions, any forward stride. Cost: the operations of the definition over all
processors, and 8 bytes times `SPLIT_K` for every result. Limits: data gradients of stride 1 only (with more there are
phases of different lengths, and more tiles anyhow), and a reduction of two steps or more.
"""

from ...core.engine import Config, Refusals
from ...core.problem import Problem
from .._triton.conv_gather import DTYPES, ORDER, View, gather
from .._triton.index import INT32
from .._triton.launch import Launch, Slice, TritonEngine
from .._triton.tiles import ranked, shapes, start
from .._triton.unfold import finish_pixels

MOST_PARTS = 64
LEAST = 32  # terms of a sum


class ImplicitGemmSplitK(TritonEngine):
    """Forward and data gradient."""

    name = "conv.implicit_gemm_split_k"
    operations = ("conv_fprop", "conv_dgrad")
    notes = frozenset({"tensor_core", "tf32", "runtime_compilation"})

    def refusals(self, problem: Problem) -> list[str]:
        refusals = Refusals()
        refusals.require_tensors(problem.items, DTYPES, elements=True)
        if not refusals:
            v = View.of(problem)
            refusals.require(v.phases == 1, "a data gradient of stride 1", v.geometry.stride)
            refusals.require(v.taps * v.red >= LEAST, f"a reduction of at least {LEAST} terms", v.taps * v.red)
        if not refusals:
            configs = self.configs(problem)
            refusals.require(bool(configs), "a reduction of at least two steps", "one")
            blocks = max((v.blocks(c) * c["SPLIT_K"] for c in configs), default=0)
            refusals.require(blocks <= INT32, "at most 2^31 - 1 tiles", blocks)
        return refusals

    def configs(self, problem: Problem) -> list[Config]:
        v, target = View.of(problem), problem.target
        gemm, found = v.gemm(problem.math), []
        for tile in shapes(gemm, target):
            blocks, trips = v.blocks(tile), v.trips(tile)
            for waves in (1, 2):
                wanted = max(2, min(waves * target.processors // blocks, trips // 2, MOST_PARTS))
                share = -(-trips // wanted)
                parts = -(-trips // share)  # as many as have something to do
                config = {**tile, **ORDER, "SPLIT_K": parts}
                if parts > 1 and config not in found:
                    found.append(config)
        return [*ranked(gemm, found, target)]

    def workspace_size(self, problem: Problem, config: Config) -> int:
        out = problem[problem.outputs[0]]
        return config["SPLIT_K"] * out.numel * (8 if problem.items[0][1].dtype == "f64" else 4)

    def cost(self, problem: Problem, config: Config) -> float:
        target, v = problem.target, View.of(problem)
        traffic = (problem.bytes + 2 * self.workspace_size(problem, config)) / (0.8 * target.bandwidth)
        return max(v.seconds(problem.math, config, target), traffic) + start(target, 2)

    def launches(self, problem: Problem, config: Config) -> list[Launch]:
        v, parts = View.of(problem), config["SPLIT_K"]
        into = Slice(0, "f64" if v.dtype == "f64" else "f32")
        rounding = problem.math == "tf32"
        product = gather(problem, v, config, precision=problem.math, rounding=rounding, parts=parts, into=into)
        d, h, w = v.dst_size
        return [product, finish_pixels(problem, 0, v.geometry.N, (d, h, w), into, parts)]
