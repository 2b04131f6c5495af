"""Matrix products through the framework's BLAS as convolution engines use them on a GPU."""

from __future__ import annotations

import torch

from ...core.engine import Refusals
from ...core.problem import Problem

_FLOAT32 = {False: torch.ops.aten.mm.dtype_out, True: torch.ops.aten.bmm.dtype_out}


def require_same_math(refusals: Refusals, problem: Problem) -> None:
    """BLAS on a GPU follows a flag of its own for float32; asked for here so that the problem's mode is kept."""
    if problem.target.is_gpu and problem.items[0][1].dtype == "f32":
        allowed = "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"
        refusals.require(
            allowed == problem.math, f"the framework's matrix products in {problem.math} arithmetic", allowed
        )


def rounds_early(problem: Problem, depth: int, elements: int) -> bool:
    """Whether BLAS on a GPU might round a 16-bit result before all is summed: then a float32 product has to do.

    It may split a long reduction over blocks where there are few tiles, and round the parts. And it was seen to round
    the product before it adds a matrix times ``beta = 1``: the framework has that done in the library's last step, in
    the type of the operands. Any other beta is added in float32, as is a bias that is a dense vector (not one spread
    over a matrix, nor of a single channel, nor after a product of depth 1, which take the way of the matrix).
    """
    if not problem.target.is_gpu or problem.items[0][1].dtype not in ("f16", "bf16"):
        return False
    bias = problem.tensors.get("bias")
    matrix = "z" in problem.inputs and problem.epilogue.beta == 1.0
    spread = bias is not None and (bias.strides[0] != 1 or bias.numel == 1 or depth == 1)
    return matrix or spread or (depth > 512 and elements <= 4 * 128 * 128 * problem.target.processors)


def multiply(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    """``out = a b``, matrices or stacks of them; 16-bit operands may have a float32 product."""
    if a.dtype == out.dtype:
        (torch.bmm if a.ndim == 3 else torch.mm)(a, b, out=out)
    elif a.is_cuda:
        product = _FLOAT32[a.ndim == 3]
        product(a, b, out.dtype, out=out)
    else:  # BLAS on a CPU wants operands of the result's type
        (torch.bmm if a.ndim == 3 else torch.mm)(a.to(out.dtype), b.to(out.dtype), out=out)
