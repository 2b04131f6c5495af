"""Filter gradient of a convolution as one gathered matrix product (implicit GEMM) with a split reduction, in Triton.

Both operands are read where they are, gathered through pointers tap by tap. The kernel is in
`lucidnn.engines._triton.conv_wgrad`; `SPLIT_K` blocks sum a part of the pixels each into float32 (float64 for
float64) in the workspace, and a second kernel adds the parts in a fixed order and applies alpha and beta * z: the
result is the same from run to run.

Any strides (also 0), asymmetric padding, dilation, groups, 1 to 3 dimensions; every edge is masked; offsets
are 64-bit where a tensor reaches past 2^31 elements.  Cost: the operations of the definition plus what partly
filled tiles waste, and 8 bytes times `SPLIT_K` for every element of dw.
"""

from ...core.engine import Config
from ...core.problem import Problem
from .._triton.conv_wgrad import GatheredWgrad, View, product_seconds, wgrad
from .._triton.launch import Launch
from .._triton.tiles import start


class ImplicitGemmWgrad(GatheredWgrad):
    """Filter gradient."""

    name = "conv.implicit_gemm_wgrad"

    def workspace_size(self, problem: Problem, config: Config) -> int:
        return View.of(problem).split.size(config)

    def cost(self, problem: Problem, config: Config) -> float:
        v = View.of(problem)
        split = v.split
        launches = 1 if split.parts(config) == 1 else 2
        return product_seconds(problem, split, config, v.packed) + start(problem.target, launches)

    def launches(self, problem: Problem, config: Config) -> list[Launch]:
        return wgrad(problem, View.of(problem), config, 0)
