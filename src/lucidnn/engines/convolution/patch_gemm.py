"""``conv.patch_gemm``: patches that do not overlap (stride = filter, a vision transformer's first layer) as a GEMM.

Method: with no overlap and no padding every input is used once, so that the matrix of patches (pixels by channels and
taps) is the image with its axes in another order. It is one copy, or none where the axes lie right already (1-D,
channels last), and the convolution is a plain product: ``patches W^T`` forward, ``dy W`` for the patches' gradient,
which the same copy leads back, ``dy^T patches`` for the filter's. The order of the matrix' columns is the filter's, so
that the filter is a matrix as it lies; products are BLAS (cuBLAS on a GPU), and a channels-first y is one product an
image. Inputs that no patch covers get zero gradients.

Cost: the product's, and reading and writing x once. Long 16-bit sums on a GPU, and a z that is added with beta = 1, go
through a float32 product in the workspace, because BLAS may round before it has summed. Limits: one group, one data
type, dense tensors (x may lie anyhow); the epilogue is what a BLAS call can do: alpha, and one of bias or beta * z, no
z for the data gradient.
"""

from __future__ import annotations

import math

import torch

from ...core.descriptor import TensorDescriptor
from ...core.engine import Config, Engine, Refusals, Run
from ...core.heuristics import roofline
from ...core.problem import Problem
from ...ops.convolution import Geometry
from .._triton.tiles import start
from ._blas import multiply, require_same_math, rounds_early

TYPES = ("f64", "f32", "f16", "bf16")


class PatchGemm(Engine):
    """All three directions."""

    name = "conv.patch_gemm"
    operations = ("conv_fprop", "conv_dgrad", "conv_wgrad")
    targets = ("cpu", "cuda", "hip")
    notes = frozenset({"tensor_core", "tf32"})

    def refusals(self, problem: Problem) -> list[str]:
        r = Refusals()
        r.require_tensors(problem.items, TYPES, elements=True)
        if r:
            return r
        g, inputs = Geometry.of(problem), set(problem.inputs)
        kinds = sorted({t.dtype for _, t in problem.items})
        r.require(len(kinds) == 1, "one data type", ", ".join(kinds))
        r.require(math.prod(g.filter) > 1, "a filter of more than one point", g.filter)
        apart = all(s == f for s, f, n in zip(g.stride, g.filter, g.out_size) if n > 1)
        r.require(apart, "a stride as long as the filter", f"stride {g.stride}, filter {g.filter}")
        r.require(all(f == 1 or d == 1 for f, d in zip(g.filter, g.dilation)), "dilation 1", g.dilation)
        r.require(not any(g.pad) and not any(g.pad_after), "no padding", (g.pad, g.pad_after))
        r.require(g.G == 1, "groups = 1", g.G)
        r.require(problem.epilogue.activation == "identity", "no activation", problem.epilogue.activation)
        r.require(not {"bias", "z"} <= inputs, "bias or z, not both", "both")
        r.require("z" not in inputs or problem.op.name != "conv_dgrad", "no z for the data gradient", "z")
        # There the bias is added to what the product has rounded.
        wide = problem.op.name != "conv_dgrad" or kinds[0] in ("f32", "f64")
        r.require("bias" not in inputs or wide, "no bias for the data gradient of 16-bit types", kinds[0])
        for role, t in problem.items:
            r.require(role in ("x", "dx", "bias") or bool(_layout(t)), f"a dense {role}", str(t))
        if z := problem.tensors.get("z"):
            out = problem[problem.outputs[0]]
            r.require(z.strides == out.strides, f"z that lies as {problem.outputs[0]} does", str(z))
        require_same_math(r, problem)
        return r

    def workspace_size(self, problem: Problem, config: Config) -> int:
        return _Layout(problem).size

    def cost(self, problem: Problem, config: Config) -> float:
        layout, g = _Layout(problem), Geometry.of(problem)
        # Thin products starve the units, and the copies come before or after them. One that scatters is slowest.
        fill = min(g.K, 64) * min(layout.depth, 64) * min(layout.rows, 64) / 64**3
        efficiency, launches = 0.8 * max(fill, 1 / 64), 1 + (layout.copied > 0) + 3 * layout.precise
        if problem.target.is_gpu:
            # Runs are as long as the filter is wide where the channels are not innermost: a sixteenth of the rate.
            slow = 4 if g.x_strides[1] == 1 else 16
            sums = 12 * problem[problem.outputs[0]].numel if layout.precise else 0
            moved = (2 * slow * layout.copied + sums) / problem.target.bandwidth
            product = roofline(problem, compute_efficiency=efficiency, launches=0)
            return product + moved + start(problem.target, launches)
        slow = 16 if problem.op.name == "conv_dgrad" else 4
        copies = roofline(problem, flops=0.0, bytes=2 * slow * layout.copied, launches=0)
        return copies + roofline(problem, compute_efficiency=efficiency, launches=launches)

    def build(self, problem: Problem, config: Config) -> Run:
        v, g, e = _Layout(problem), Geometry.of(problem), problem.epilogue
        order, direction = list(problem.tensors), problem.op.name
        x_at, y_at, w_at = (order.index(r) for r in (problem.op.x_role, problem.op.y_role, problem.op.w_role))
        dtype = getattr(torch, _NAMES[g.x.dtype])
        x_size, x_step, flat, y_size, y_step = v.x_size, v.x_step, v.flat, v.y_size, v.y_step
        patches = (*y_size[:-1], v.depth)
        w_size = (g.K, v.depth)
        added, beta, third_size, third_step = -1, 0.0, (), ()
        if "z" in order:
            added, beta = order.index("z"), e.beta
            third_size, third_step = (y_size, y_step) if direction == "conv_fprop" else (w_size, (v.depth, 1))
        elif "bias" in order and direction == "conv_fprop":
            stride = problem["bias"].strides[0]
            added, beta = order.index("bias"), 1.0
            # A vector where it can be: of a matrix of 16-bit numbers the sum is rounded twice (`rounds_early`).
            third_size, third_step = ((g.K,), (stride,)) if len(y_size) == 2 else (y_size, (0, 0, stride))
        # The data gradient's bias, one a channel of dx, joins when the patches are put in their places.
        shift = order.index("bias") if "bias" in order and direction == "conv_dgrad" else None
        steps = [0] * len(x_size)
        if shift is not None:
            steps[v.channel_axis] = problem["bias"].strides[0]
            across = (0, problem["bias"].strides[0], *[0] * (g.x.ndim - 2))
        uncovered = [
            (axis + 2, n * f, size - n * f)
            for axis, (n, f, size) in enumerate(zip(g.y.shape[2:], g.w.shape[2:], g.x.shape[2:]))
            if direction == "conv_dgrad" and size > n * f
        ]

        def run(t: tuple[torch.Tensor, ...], workspace: torch.Tensor | None) -> None:
            def piece(name: str, type_: torch.dtype = dtype) -> torch.Tensor:
                assert workspace is not None
                begin, end = v.at[name]
                return workspace[begin:end].view(type_)

            spread = t[x_at].as_strided(x_size, x_step)
            y = t[y_at].as_strided(y_size, y_step)
            w = t[w_at].as_strided(w_size, (v.depth, 1))
            if flat is not None:
                rows = t[x_at].as_strided(*flat)
            elif "patches" in v.at:
                rows = piece("patches").view(patches)
            else:
                rows = spread  # a float32 product is copied there
            if direction != "conv_dgrad" and flat is None:
                rows.view(x_size).copy_(spread)
            if direction == "conv_fprop":
                a, b, out = rows, w.t(), y
            elif direction == "conv_dgrad":
                a, b, out = y, w, rows
            else:
                if "dy" in v.at:
                    y = piece("dy").view(y_size).copy_(y).view(-1, g.K)
                a, b, out = y.t(), rows.view(-1, v.depth) if flat is None else rows, w
            if a.ndim == 3:
                b = b.expand(a.shape[0], *b.shape)
            third = t[added].as_strided(third_size, third_step) if beta else None
            if v.precise:
                product = piece("product", torch.float32).view(*a.shape[:-1], b.shape[-1])
                multiply(a, b, product)
                if e.alpha != 1.0:
                    product.mul_(e.alpha)
                if third is not None:
                    product.add_(third, alpha=beta)
                out.copy_(product.view(out.shape))
            elif third is None and e.alpha == 1.0:
                multiply(a, b, out)
            else:
                add = torch.baddbmm if a.ndim == 3 else torch.addmm
                add(out if third is None else third, a, b, beta=beta, alpha=e.alpha, out=out)
            if direction == "conv_dgrad":
                apart = out is not spread and flat is None
                if shift is not None:
                    torch.add(rows.view(x_size) if apart else spread, t[shift].as_strided(x_size, steps), out=spread)
                elif apart:
                    spread.copy_(rows.view(x_size))
                for axis, start, length in uncovered:
                    rest = t[x_at].narrow(axis, start, length)
                    if shift is None:
                        rest.zero_()
                    else:
                        rest.copy_(t[shift].as_strided(rest.shape, across))

        return run


_NAMES = {"f64": "float64", "f32": "float32", "f16": "float16", "bf16": "bfloat16"}


class _Layout:
    """How a problem's tensors are matrices, and what the workspace holds.

    Sizes and strides: of x as patches (image, pixel, column axes), of y as (pixels, K) or, channels first, a stack of
    one such matrix an image. `flat` are those of the patches where x is a matrix of them in place, else None; `at`
    names the workspace's pieces (first byte, last), `copied` the bytes that go through them.
    """

    def __init__(self, problem: Problem):
        g, direction = Geometry.of(problem), problem.op.name
        n, pixels, taps = g.N, math.prod(g.out_size), math.prod(g.filter)
        self.rows, self.depth = n * pixels, taps * g.C
        by_image = _layout(g.y) == "first" and pixels > 1
        self.y_size: tuple[int, ...] = (n, pixels, g.K) if by_image else (n * pixels, g.K)
        self.y_step: tuple[int, ...] = (g.K * pixels, 1, pixels) if by_image else (g.K, 1)
        stacked = by_image and direction != "conv_wgrad"
        x_n, x_c, *space = g.x_strides
        down = [step * size for step, size in zip(space, g.filter)]
        columns = [(g.C, x_c), *zip(g.filter, space)]
        if _layout(g.w) == "last":
            columns = [*columns[1:], columns[0]]
        self.x_size, self.x_step = zip((n, x_n), *zip(g.out_size, down), *columns)
        self.channel_axis = 7 if _layout(g.w) == "last" else 4
        images, rows, depth = [(n, x_n)], list(zip(g.out_size, down)), _joined(columns)
        joined = [_joined(images), _joined(rows)] if stacked else [_joined(images + rows)]
        self.flat = None
        if depth is not None and depth[1] == 1 and all(joined):
            self.flat = tuple(zip(*joined, depth))
        out = problem[problem.outputs[0]]
        long = {"conv_fprop": self.depth, "conv_dgrad": g.K, "conv_wgrad": self.rows}[direction]
        self.precise = rounds_early(problem, long, out.numel)
        item, patches = g.x.itemsize, self.rows * self.depth
        pieces, self.copied = {}, 0
        if self.flat is None and not (direction == "conv_dgrad" and self.precise):
            pieces["patches"] = patches * item
        if self.flat is None:
            self.copied += patches * item
        if direction == "conv_wgrad" and by_image:
            pieces["dy"] = g.y.numel * item
            self.copied += pieces["dy"]
        if self.precise:
            pieces["product"] = (patches if direction == "conv_dgrad" else out.numel) * 4
        self.at, self.size = {}, 0
        for name, bytes_ in pieces.items():
            self.at[name] = (self.size, self.size + bytes_)
            self.size += -(-bytes_ // 64) * 64


def _joined(axes: list[tuple[int, int]]) -> tuple[int, int] | None:
    """Axes (size, stride) as one, None where they do not lie so.

    >>> _joined([(4, 30), (5, 6)]), _joined([(4, 30), (1, 7), (5, 7)])
    ((20, 6), None)
    """
    axes = [(n, s) for n, s in axes if n > 1] or [(1, 1)]
    for (_, outer), (n, inner) in zip(axes, axes[1:]):
        if outer != n * inner:
            return None
    return math.prod(n for n, _ in axes), axes[-1][1]


def _layout(t: TensorDescriptor) -> str:
    """Where the channels lie: last or first; '' where the tensor is not dense."""
    return "first" if t.is_contiguous else "last" if t.is_channels_last else ""
