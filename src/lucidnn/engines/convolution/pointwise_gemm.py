"""``conv.pointwise_gemm``: a 1x1 convolution, or a linear layer, as the plain matrix product that it is.

Method: with one tap, no stride and no padding, a convolution of dense tensors is ``y = x w^T`` over (points, channels)
matrices where channels are innermost or there is one point, and ``y[n] = w x[n]`` image by image where points are
innermost. A filter as large as the image is the same, with every pixel of every channel a channel of its own. No data
is moved or copied; the product is BLAS (cuBLAS on a GPU). Cost: the product's; long 16-bit sums on a GPU, and a z that
is added with beta = 1, go through a float32 product in the workspace, because BLAS may round before it has summed.
Limits: the epilogue is what a BLAS call can do (alpha, and one of bias or beta * z); the filter gradient needs a matrix
form of x and dy.
"""

from __future__ import annotations

import dataclasses
import math

import torch

from ...core.descriptor import TensorDescriptor
from ...core.engine import Config, Engine, Refusals, Run
from ...core.heuristics import roofline
from ...core.problem import Problem
from ...ops.convolution import Geometry
from .._triton.tiles import FILL, start
from ._blas import require_same_math, rounds_early


class PointwiseGemm(Engine):
    """One BLAS call in each direction."""

    name = "conv.pointwise_gemm"
    operations = ("conv_fprop", "conv_dgrad", "conv_wgrad")
    targets = ("cpu", "cuda", "hip")
    notes = frozenset({"tensor_core"})

    def refusals(self, problem: Problem) -> list[str]:
        r = Refusals()
        g = Geometry.of(problem)
        tensors = [t for _, t in problem.items]
        r.require(not problem.is_empty, "tensors with elements", "an empty one")
        kinds = ("f64", "f32", "bf16", "f16")
        r.require(len({t.dtype for t in tensors}) == 1 and tensors[0].dtype in kinds, f"one type of {', '.join(kinds)}",
                  ", ".join(sorted({t.dtype for t in tensors})))  # fmt: skip
        whole = _covers(g)
        r.require(whole or g.filter == (1, 1, 1), "a filter of one point or of the image's size",
                  "x".join(map(str, g.filter)))  # fmt: skip
        r.require(whole or g.stride == (1, 1, 1), "stride 1", g.stride)
        r.require(g.pad == g.pad_after == (0, 0, 0), "no padding", (g.pad, g.pad_after))
        r.require(g.G == 1, "groups = 1", g.G)
        r.require(problem.epilogue.activation == "identity", "no activation", problem.epilogue.activation)
        r.require(not {"bias", "z"} <= set(problem.inputs), "bias or z, not both", "both")
        spread = whole and problem.op.name == "conv_dgrad" and math.prod(g.filter) > 1
        r.require("bias" not in problem.inputs or not spread, "no bias that several points of dx share", "one")
        layouts = {_layout(t) for role, t in problem.items if role != "bias"} - {"either"}
        r.require(len(layouts) <= 1 and "strided" not in layouts, "dense tensors in one layout",
                  ", ".join(f"{role} {t.layout}" for role, t in problem.items if role != "bias"))  # fmt: skip
        if problem.op.name == "conv_wgrad":
            r.require(whole or "first" not in layouts, "channels-last tensors or a single point", g.x.layout)
        require_same_math(r, problem)
        return r

    def workspace_size(self, problem: Problem, config: Config) -> int:
        return 4 * problem[problem.outputs[0]].numel if _long(problem, _points(problem)) else 0

    def cost(self, problem: Problem, config: Config) -> float:
        g = _points(problem)
        points = math.prod(g.in_size) * g.N
        if not problem.target.is_gpu:
            # BLAS packs, multiplies and stores in turn; image by image it meets one image's points at a time. The
            # factors are fitted to 200 layers of known models.
            if g.in_size != (1, 1, 1) and any(_layout(t) == "first" for t in problem.tensors.values()):
                points //= g.N
            short = 0.5 * max(0.0, 96 / points - 1) + max(0.0, 16 / min(g.C, g.K) - 1)
            if problem.op.name == "conv_wgrad":  # a small matrix of long sums
                short += 0.7 * max(0.0, 1 - g.C * g.K / 2**17)
            product = roofline(problem, flops=problem.flops * (1 + short), bytes=0.0)
            return product + roofline(problem, flops=0.0, memory_efficiency=1.0, launches=0)
        # Thin products starve the units: a side shorter than a tile fills it in part only.
        fill = min(g.C, 64) * min(g.K, 64) * min(points, 64) / 64**3
        efficiency = 0.8 * max(fill, 1 / 64)
        long = _long(problem, g)  # the product is written, read and converted
        moved = 12 * problem[problem.outputs[0]].numel / problem.target.bandwidth if long else 0.0
        product = FILL + roofline(problem, compute_efficiency=efficiency, launches=0)
        return product + moved + start(problem.target, 3 if long else 1)

    def build(self, problem: Problem, config: Config) -> Run:
        g = _points(problem)
        e = problem.epilogue
        order = list(problem.tensors)
        by_image = g.in_size != (1, 1, 1) and any(_layout(t) == "first" for t in problem.tensors.values())
        left, turn_left, right, turn_right = _PRODUCTS[problem.op.name, by_image]
        a, b, out = order.index(left), order.index(right), len(order) - 1
        (sa, ta), (sb, tb) = _matrix(left, g, by_image, turn_left), _matrix(right, g, by_image, turn_right)
        so, to = _matrix(order[out], g, by_image)
        if not {"z", "bias"} & set(order) and e.alpha == 1.0 and not _long(problem, g):
            multiply = torch.bmm if by_image else torch.mm

            def run(t: tuple[torch.Tensor, ...], workspace: torch.Tensor | None) -> None:
                multiply(t[a].as_strided(sa, ta), t[b].as_strided(sb, tb), out=t[out].as_strided(so, to))

            return run
        # BLAS adds one more matrix: z, the bias spread over the points, or (times zero) the output itself.
        added, beta, (sx, tx) = out, 0.0, (so, to)
        if "z" in order:
            added, beta = order.index("z"), e.beta
        elif "bias" in order:
            step = problem["bias"].strides[0]
            added, beta = order.index("bias"), 1.0
            # A vector where it can be: of a matrix of 16-bit numbers the sum is rounded twice (`rounds_early`).
            sx, tx = (so, (0, step, 0)) if by_image else (so[-1:], (step,))
        multiply_add = torch.baddbmm if by_image else torch.addmm

        def run_added(t: tuple[torch.Tensor, ...], workspace: torch.Tensor | None) -> None:
            third = t[added].as_strided(sx, tx)
            operands = t[a].as_strided(sa, ta), t[b].as_strided(sb, tb)
            multiply_add(third, *operands, beta=beta, alpha=e.alpha, out=t[out].as_strided(so, to))

        if not _long(problem, g):
            return run_added
        multiply_into = torch.ops.aten.bmm.dtype_out if by_image else torch.ops.aten.mm.dtype_out
        numel = math.prod(so)

        def run_precise(t: tuple[torch.Tensor, ...], workspace: torch.Tensor | None) -> None:
            assert workspace is not None
            product = workspace[: 4 * numel].view(torch.float32).view(so)
            multiply_into(t[a].as_strided(sa, ta), t[b].as_strided(sb, tb), torch.float32, out=product)
            if e.alpha != 1.0:
                product.mul_(e.alpha)
            if beta:
                product.add_(t[added].as_strided(sx, tx), alpha=beta)
            t[out].as_strided(so, to).copy_(product)

        return run_precise


def _covers(g: Geometry) -> bool:
    """Whether the filter meets the whole image in one place, dense in the same order in both."""
    return g.filter == g.in_size and g.out_size == (1, 1, 1) and not any(g.pad) and set(g.dilation) == {1}


def _points(problem: Problem) -> Geometry:
    """The geometry, where a filter as large as the image has one point and as many channels as both have elements."""
    g = Geometry.of(problem)
    if not _covers(g):
        return g
    channels = g.C * math.prod(g.filter)
    return dataclasses.replace(g, C=channels, in_size=(1, 1, 1), filter=(1, 1, 1))


def _long(problem: Problem, g: Geometry) -> bool:
    """Whether BLAS might round before all is summed: then the product is a float32 one beside the output."""
    rows = g.N * math.prod(g.in_size)
    depth = {"conv_fprop": g.C, "conv_dgrad": g.K, "conv_wgrad": rows}[problem.op.name]
    out = problem[problem.outputs[0]]
    return rounds_early(problem, depth, out.numel)


# (direction, image by image) -> left operand, transposed?, right operand, transposed?
_PRODUCTS = {
    ("conv_fprop", False): ("x", False, "w", True),
    ("conv_dgrad", False): ("dy", False, "w", False),
    ("conv_wgrad", False): ("dy", True, "x", False),
    ("conv_fprop", True): ("w", False, "x", False),
    ("conv_dgrad", True): ("w", True, "dy", False),
}


def _layout(t: TensorDescriptor) -> str:
    if t.layout != "strided" and math.prod(t.shape[2:]) == 1:
        return "either"
    return "last" if t.is_channels_last else "first" if t.is_contiguous else "strided"


def _matrix(role: str, g: Geometry, by_image: bool, turned: bool = False) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Sizes and strides of a tensor as the matrix, or the stack of one matrix an image, that the product sees."""
    points = math.prod(g.in_size)
    if role in ("w", "dw"):
        size, step = (g.K, g.C), (g.C, 1)
        if by_image:
            size, step = (g.N, *size), (0, *step)
    else:
        channels = g.C if role in ("x", "dx") else g.K
        if by_image:
            size, step = (g.N, channels, points), (channels * points, points, 1)
        else:
            size, step = (g.N * points, channels), (channels, 1)
    if turned:
        size, step = (*size[:-2], size[-1], size[-2]), (*step[:-2], step[-1], step[-2])
    return size, step
