"""Filter gradient of a convolution as implicit GEMM, the parts of its long sum added atomically, in Triton.

As ``conv.implicit_gemm_wgrad``, with the kernel of `lucidnn.engines._triton.conv_wgrad`: `SPLIT_K` blocks sum a part
of the pixels each. Here they all add to one sum in the workspace, as they finish, instead of each leaving its own: the
workspace is the filter's size whatever the split, and nothing has to be read again. The order of the additions, and
with it the last bits of the result, differs from run to run. A first kernel clears the sum, a last one applies alpha
and beta * z and writes dw.

Any strides, asymmetric padding, dilation, groups, 1 to 3 dimensions. Cost: the operations of the definition, and
`SPLIT_K` atomic additions for every element of dw, which the L2 cache works off.
"""

import triton
import triton.language as tl

from ...core.engine import Config
from ...core.problem import Problem
from .._triton.conv_wgrad import GatheredWgrad, View, product, product_seconds
from .._triton.launch import Launch, Slice
from .._triton.split import add_parts
from .._triton.tiles import start

BLOCK = 1024


@triton.jit
def clear(out, ELEMENTS, BLOCK: tl.constexpr):
    e = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + e, tl.zeros((BLOCK,), dtype=out.dtype.element_ty), mask=e < ELEMENTS)


class ImplicitGemmWgradAtomic(GatheredWgrad):
    """Filter gradient."""

    name = "conv.implicit_gemm_wgrad_atomic"
    notes = GatheredWgrad.notes | {"nondeterministic"}

    def workspace_size(self, problem: Problem, config: Config) -> int:
        split = View.of(problem).split
        return split.elements * (8 if split.part_type == "f64" else 4)

    def cost(self, problem: Problem, config: Config) -> float:
        v, target = View.of(problem), problem.target
        split = v.split
        # an atomic addition is a round trip to the L2 cache: four times a plain store of 4 bytes
        adding = 16.0 * split.parts(config) * split.elements / target.bandwidth
        return product_seconds(problem, split, config, v.packed) + adding + start(target, 3)

    def launches(self, problem: Problem, config: Config) -> list[Launch]:
        v = View.of(problem)
        total = Slice(0, v.split.part_type)
        blocks = -(-v.split.elements // BLOCK)
        first = Launch(clear, (blocks,), {"out": total, "ELEMENTS": v.split.elements}, {"BLOCK": BLOCK}, 4, 1)
        shared = {**v.split.share(problem, 0), "out_part_stride": 0}
        return [first, product(problem, v, config, shared, atomic=True), add_parts(problem, v.geometry, 1, total)]
