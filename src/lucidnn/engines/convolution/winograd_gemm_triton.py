"""``conv.winograd_gemm_triton``: Winograd's minimal filtering on a GPU in three steps, all directions.

Method: one kernel transforms windows of n x n pixels into n x n points and another the filters, BLAS multiplies the
channels point by point (one batched product), and a last kernel transforms the sums back and finishes them: those of
`lucidnn.engines._triton.winograd`. Matrices have channels innermost where the tensors have, else tiles, so that every
kernel reads and writes along memory. Points and products are float32 (16-bit tensors too: points rounded to 16 bits
would cost more digits than a direct sum may lose), TF32 where the problem and the framework's flag allow it.

Cost: n^2 / (m r)^2 of the arithmetic (a quarter for 4 x 4 tiles and 3 x 3 filters), and writing and reading the points:
n^2 / m^2 times the input and the result. Pays for float32 with many channels. Workspace: all points.

Limits: filters of 3 x 3, 3 x 1, 1 x 3 or 3, unit stride and dilation, and tiles whose expected error is below what a
sum of so many terms may have. An infinity or NaN spreads over its tiles. Lavin and Gray, "Fast algorithms for
convolutional neural networks", 2016.
"""

from __future__ import annotations

from typing import Any

import torch

from ...core.engine import Config, Run
from ...core.problem import Problem
from .._triton.index import pixels_first
from .._triton.launch import Launch, Program, Slice, TritonEngine
from .._triton.tiles import start
from .._triton.winograd import SIZES, Winograd, require

Stack = tuple[int, tuple[int, ...], bool]
"""Matrices for every point and group: byte in the workspace, (point, group, row, channel) strides, rows innermost."""


class WinogradGemmTriton(TritonEngine):
    """Transform, multiply, transform back."""

    name = "conv.winograd_gemm_triton"
    operations = ("conv_fprop", "conv_dgrad", "conv_wgrad")
    notes = frozenset({"winograd", "tensor_core", "tf32", "runtime_compilation", "spreads"})

    def refusals(self, problem: Problem) -> list[str]:
        r = require(problem)
        if not r:
            flag = _flag()
            told = "the framework's matrix products in ieee arithmetic, or TF32 allowed for float32"
            exempt = problem.items[0][1].dtype == "f64"
            r.require(flag == "ieee" or _math(problem) == "tf32" or exempt, told, flag)
            r.require(bool(self.configs(problem)), "sums long enough to hide what the transforms err", str(problem))
        return r

    def configs(self, problem: Problem) -> list[Config]:
        found = [m for m in (4, 2) if Winograd(problem, m).fits(_math(problem))]
        return sorted(({"TILE": m} for m in found), key=lambda config: self.cost(problem, config))

    def workspace_size(self, problem: Problem, config: Config) -> int:
        return self._stacks(Winograd(problem, config["TILE"]))[-1]

    def _stacks(self, v: Winograd) -> tuple[Stack, Stack, Stack, int]:
        """First operand, second operand and sums, and the bytes of all three."""
        g, (cin, cout), item, points = v.g, v.channels, SIZES[v.dtype], v.points
        weights = (g.K * (g.C // g.G), 0, g.C // g.G, 1)
        x, out = v.problem.items[0][1], v.problem.items[-1][1]

        def stack(at: int, channels: int, tensor: Any) -> Stack:
            turned = pixels_first((*tensor.strides[:2], 0, 0, tensor.strides[-1]), channels)
            inner = (1, v.rows) if turned else (channels, 1)
            return at, (v.rows * channels * g.G, v.rows * channels, *inner), turned

        def after(at: int, strides: tuple[int, ...]) -> int:
            return at + -(-points * strides[0] * item // 64) * 64

        first = stack(0, cin, x)
        at = after(0, first[1])
        if v.direction == "wgrad":
            second = stack(at, cout, v.problem["dy"])
            sums: Stack = (after(at, second[1]), weights, False)
        else:
            second = (at, weights, False)
            sums = stack(after(at, weights), cout, out)
        return first, second, sums, after(sums[0], sums[1])

    def cost(self, problem: Problem, config: Config) -> float:
        v, target = Winograd(problem, config["TILE"]), problem.target
        products = 2.0 * v.points * v.rows * v.g.K * (v.g.C // v.g.G)
        # Each point is written by one kernel and read by another. Thin products starve the matrix product.
        thin = min(1.0, v.channels[0] / 64) * min(1.0, v.channels[1] / 64)
        rate = target.flops(v.dtype, _math(problem)) * 0.55 * max(thin, 1 / 64)
        traffic = problem.bytes + 2.0 * self.workspace_size(problem, config)
        busy = products / rate + traffic / (0.6 * target.bandwidth)
        return busy + start(target, 4)

    def launches(self, problem: Problem, config: Config) -> list[Launch]:
        """The kernels before the product, and the one after it."""
        v = Winograd(problem, config["TILE"])
        g, (cin, cout) = v.g, v.channels
        (at, where, _), (second_at, second_where, _), (sums_at, sums_where, _), _ = self._stacks(v)
        rounding = _math(problem) == "tf32"
        first = problem.inputs[0]
        windows = v.from_tensor(first, Slice(at, v.dtype), "B", (v.rows, cin * g.G, cin), where, rounding)
        to = Slice(second_at, v.dtype)
        if v.direction == "wgrad":
            second = v.from_tensor("dy", to, "G", (v.rows, cout * g.G, cout), second_where, rounding)
        else:
            second = v.from_tensor("w", to, "G", (g.K, g.C // g.G, g.C // g.G), second_where, rounding)
        return [windows, second, v.to_tensor(Slice(sums_at, v.dtype), sums_where)]

    def build(self, problem: Problem, config: Config) -> Run:
        v = Winograd(problem, config["TILE"])
        g, (cin, cout), batch = v.g, v.channels, v.points * v.g.G
        first, second, sums, _ = self._stacks(v)
        launches = self.launches(problem, config)
        before, after = Program(problem, launches[:-1]), Program(problem, launches[-1:])
        kind = torch.float64 if v.dtype == "f64" else torch.float32

        def view(stack: Stack, rows: int, columns: int) -> tuple[slice, tuple[int, int, int], bool]:
            at, _, turned = stack
            size = (batch, columns, rows) if turned else (batch, rows, columns)
            return slice(at, at + batch * rows * columns * SIZES[v.dtype]), size, turned

        weights = (g.K // g.G, g.C // g.G)
        wgrad = v.direction == "wgrad"
        views = (
            view(first, v.rows, cin),
            view(second, v.rows, cout) if wgrad else view(second, *weights),
            view(sums, *weights) if wgrad else view(sums, v.rows, cout),
        )

        def run(tensors: tuple[Any, ...], workspace: Any) -> None:
            before(tensors, workspace)
            left, right, out = (
                part.transpose(1, 2) if turned else part
                for part, turned in ((workspace[where].view(kind).view(size), t) for where, size, t in views)
            )
            if wgrad:
                left, right = right.transpose(1, 2), left
            elif v.direction == "fprop":
                right = right.transpose(1, 2)
            if sums[2]:  # the product's transpose, so that it is written where it lies
                left, right, out = right.transpose(1, 2), left.transpose(1, 2), out.transpose(1, 2)
            torch.bmm(left, right, out=out)
            after(tensors, workspace)

        return run


def _flag() -> str:
    """The arithmetic that the framework's products of float32 matrices are in."""
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


def _math(problem: Problem) -> str:
    return "tf32" if problem.math == _flag() == "tf32" else "ieee"
