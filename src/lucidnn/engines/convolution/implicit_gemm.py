"""Convolution forward and data gradient as one gathered matrix product (implicit GEMM), in Triton.

Both operands are read where they are: each tile's rows are gathered from the source through pointers, tap by
tap, and nothing is stored in between. The kernel, and what it does about strides, phases and edges, is in
`lucidnn.engines._triton.conv_gather`.

Float32 operands under ``math=tf32`` are rounded to TF32 on their way from shared memory to the matrix units;
that way leads through registers, and ``conv.implicit_gemm_packed`` saves it.  On few channels the vector units
are as fast, so they are tried too.

int8 operands give exact int32 sums, float8 operands (of both kinds, also mixed) float32 sums of short chains.

Any strides (also 0), asymmetric padding, dilation and groups, 1 to 3 dimensions; every edge is masked.
Cost: the operations of the definition plus what partly filled tiles waste; no workspace.
"""

from ...core.engine import Config, Refusals
from ...core.problem import Problem
from .._triton.conv_gather import ORDER, View, gather, unfit
from .._triton.index import INT32
from .._triton.launch import Launch, TritonEngine
from .._triton.tiles import ranked, shapes, start


class ImplicitGemm(TritonEngine):
    """Forward and data gradient."""

    name = "conv.implicit_gemm"
    operations = ("conv_fprop", "conv_dgrad")
    notes = frozenset({"tensor_core", "tf32", "runtime_compilation"})
    takes = frozenset({"scale"})

    def refusals(self, problem: Problem) -> list[str]:
        refusals = Refusals()
        unfit(problem, refusals)
        if not refusals:
            blocks = max(map(View.of(problem).blocks, self.configs(problem)))
            refusals.require(blocks <= INT32, "at most 2^31 - 1 tiles", blocks)
        return refusals

    def configs(self, problem: Problem) -> list[Config]:
        v, target = View.of(problem), problem.target
        found: list[Config] = []
        for precision in ("tf32", "ieee") if problem.math == "tf32" else ("ieee",):
            gemm = v.gemm(precision)
            tiles = ranked(gemm, shapes(gemm, target), target, 8 if precision == problem.math else 3)
            for tile in tiles:
                # All taps of one block of channels first, where the loop has nothing to mask: a tenth faster then.
                smooth = v.phases == 1 and v.dtype in ("f16", "bf16") and v.red % tile["BLOCK_K"] == 0
                found.append({**tile, **ORDER, "TAPS_INNER": smooth, "PRECISION": precision})
        return sorted(found, key=lambda config: self.cost(problem, config))

    def cost(self, problem: Problem, config: Config) -> float:
        target, v = problem.target, View.of(problem)
        traffic = problem.bytes / (0.75 * target.bandwidth)
        return max(v.seconds(config["PRECISION"], config, target), traffic) + start(target, 1)

    def launches(self, problem: Problem, config: Config) -> list[Launch]:
        precision = config["PRECISION"]
        return [gather(problem, View.of(problem), config, precision=precision, rounding=precision == "tf32")]
