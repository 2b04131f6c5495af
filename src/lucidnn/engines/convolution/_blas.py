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


def rounds_parts(problem: Problem, depth: int, elements: int) -> bool:
    """Whether BLAS might split a reduction of 16-bit numbers and round the parts: few tiles, a long sum."""
    few_tiles = elements <= 4 * 128 * 128 * problem.target.processors
    return problem.target.is_gpu and problem.items[0][1].dtype in ("f16", "bf16") and depth > 512 and few_tiles


def multiply(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    """``out = a b``, matrices or stacks of them; 16-bit operands may have a float32 product."""
    if a.dtype == out.dtype:
        (torch.bmm if a.ndim == 3 else torch.mm)(a, b, out=out)
    elif a.is_cuda:
        product = _FLOAT32[a.ndim == 3]
        product(a, b, out.dtype, out=out)
    else:  # BLAS on a CPU wants operands of the result's type
        (torch.bmm if a.ndim == 3 else torch.mm)(a.to(out.dtype), b.to(out.dtype), out=out)
