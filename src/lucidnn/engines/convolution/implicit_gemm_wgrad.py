"""Filter gradient of a convolution as one gathered matrix product (implicit GEMM) with a split reduction, in Triton.

Both operands are read where they are, gathered through pointers tap by tap. The kernel is in
`lucidnn.engines._triton.conv_wgrad`; `SPLIT_K` blocks sum a part of the pixels each into float32 (float64 for
float64) in the workspace, and a second kernel adds the parts in a fixed order and applies alpha and beta * z: the
result is the same from run to run.

Any strides (also 0), asymmetric padding, dilation, groups, 1 to 3 dimensions; every edge is masked; offsets
are 64-bit where a tensor reaches past 2^31 elements.  Cost: the operations of the definition plus what partly
filled tiles waste, and 8 bytes times `SPLIT_K` for every element of dw.
"""

from ...core.engine import Config, Refusals
from ...core.heuristics import LAUNCH
from ...core.problem import Problem
from .._triton.conv_wgrad import DTYPES, View, wgrad
from .._triton.index import INT32
from .._triton.launch import Launch, TritonEngine
from .._triton.tiles import THROUGH_REGISTERS, seconds


class ImplicitGemmWgrad(TritonEngine):
    """Filter gradient."""

    name = "conv.implicit_gemm_wgrad"
    operations = ("conv_wgrad",)
    notes = frozenset({"tensor_core", "tf32", "runtime_compilation"})

    def refusals(self, problem: Problem) -> list[str]:
        refusals = Refusals()
        refusals.require_tensors(problem.items, DTYPES, elements=True)
        if not refusals:
            split = View.of(problem).split
            blocks = max(split.tiles(config) * split.parts(config) for config in self.configs(problem))
            refusals.require(blocks <= INT32, "at most 2^31 - 1 tiles", blocks)
        return refusals

    def configs(self, problem: Problem) -> list[Config]:
        return View.of(problem).split.configs(problem.target)

    def workspace_size(self, problem: Problem, config: Config) -> int:
        return View.of(problem).split.size(config)

    def cost(self, problem: Problem, config: Config) -> float:
        split, target = View.of(problem).split, problem.target
        traffic = problem.bytes / (0.8 * target.bandwidth)
        launches = 1 if split.parts(config) == 1 else 2
        # wgmma wants TF32 operands with the reduction, here the pixels, innermost, and asynchronous copies more than a
        # single 16-bit element; others go through registers.
        last = [t.is_channels_last for _, t in problem.items[:2]]
        turned = any(last) if problem.math == "tf32" else split.gemm.itemsize == 2 and not all(last)
        detour = THROUGH_REGISTERS if turned and target.capability >= 90 else 1.0
        return max(detour * seconds(split.gemm, config, target), traffic) + launches * LAUNCH[target.kind]

    def launches(self, problem: Problem, config: Config) -> list[Launch]:
        return wgrad(problem, View.of(problem), config, 0)
