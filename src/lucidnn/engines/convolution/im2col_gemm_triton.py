"""Convolution as a BLAS product on a GPU: unfold the images, multiply, and finish or fold, in Triton around BLAS.

Method. With the inputs of every output pixel written out as a matrix `columns` (pixels by taps times channels, channels
innermost), forward is ``columns W^T``, the filter gradient ``dy^T columns``, and the data gradient folds ``dy W`` back:
every input pixel gathers, in a fixed order, what the taps that reach it left. Filters and dy that are not matrices of
this order already are packed first. Images are taken in blocks that keep the matrix below 256 MB.

A plain 16-bit or full-precision result that is a matrix (dense, channels last, no epilogue) is written by BLAS itself;
otherwise BLAS writes float32 (float64) products into the workspace and a pass applies the epilogue. The filter
gradients of the blocks of images are added in order, so the result is the same from run to run.

Any strides, asymmetric padding, dilation and groups, 1 to 3 dimensions. Cost: the definition's arithmetic at BLAS
speed, plus writing and reading the matrix: taps times the input. After Chellapilla, Puri and Simard, "High performance
convolutional neural networks for document processing", 2006.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator

import torch

from ...core.descriptor import DTYPES, TensorDescriptor
from ...core.engine import Config, Refusals, Run
from ...core.heuristics import roofline
from ...core.problem import Problem
from ...ops.convolution import Geometry
from .._triton.index import INT32
from .._triton.launch import Launch, Program, Slice, TritonEngine
from .._triton.pack import Filter, Pixels, pack
from .._triton.split import add_parts
from .._triton.tiles import STEP_LATENCY, start
from .._triton.unfold import finish_pixels, fold, unfold
from ._blas import multiply, require_same_math, rounds_early

TYPES = ("f64", "f32", "f16", "bf16")
MATRIX_BYTES = 256 << 20
TILE = 2e-6  # seconds that BLAS takes for a tile, be it narrow


@dataclasses.dataclass(frozen=True)
class _Plan:
    """What is where: sizes, and the pieces of the workspace (name -> byte offset, None where not needed)."""

    problem: Problem
    g: Geometry
    direction: str
    images: int  # of a block
    direct: bool  # BLAS writes the result
    at: dict[str, int]
    size: int

    @classmethod
    def of(cls, problem: Problem, images: int) -> _Plan:
        g, direction = Geometry.of(problem), problem.op.name.removeprefix("conv_")
        e, dtype = problem.epilogue, g.x.dtype if direction != "dgrad" else g.y.dtype
        pixels, width = math.prod(g.out_size), math.prod(g.filter) * g.C
        item, wide = problem.items[0][1].itemsize, 8 if dtype == "f64" else 4
        bare = e.alpha == 1.0 and e.activation == "identity" and not {"bias", "z"} & set(problem.inputs)
        direct = direction == "fprop" and bare and g.y.dtype == dtype and _is_matrix(g.y)
        direct = direct and not rounds_early(problem, width // g.G, images * pixels * g.K)
        blocks = -(-g.N // images)
        pieces = {"columns": images * pixels * width * (wide if direction == "dgrad" else item)}
        if direction != "wgrad" and not _is_matrix(g.w):
            pieces["w"] = g.w.numel * item
        if direction != "fprop" and not _is_matrix(g.y):
            pieces["dy"] = g.y.numel * item
        if direction == "wgrad":
            pieces["product"] = blocks * g.w.numel * wide
        elif direction == "fprop" and not direct:
            pieces["product"] = images * pixels * g.K * wide
        at, size = {}, 0
        for name, bytes_ in pieces.items():
            at[name] = size
            size += -(-bytes_ // 256) * 256
        return cls(problem, g, direction, images, direct, at, size)

    @property
    def dtype(self) -> str:
        return self.problem.items[0][1].dtype

    @property
    def sums(self) -> str:
        return "f64" if self.dtype == "f64" else "f32"

    @property
    def pixels(self) -> int:
        """Of an image's output."""
        return math.prod(self.g.out_size)

    @property
    def depth(self) -> int:
        """Of a group."""
        return math.prod(self.g.filter) * (self.g.C // self.g.G)

    def slice(self, name: str) -> Slice:
        return Slice(self.at[name], self.sums if self._is_sum(name) else self.dtype)

    def _is_sum(self, name: str) -> bool:
        return name == "product" or (name == "columns" and self.direction == "dgrad")

    @property
    def blocks(self) -> Iterator[tuple[int, int]]:
        """First image and number of images of each block."""
        for first in range(0, self.g.N, self.images):
            yield first, min(self.images, self.g.N - first)

    def matrix(self, name: str, first: int, rows: int, width: int) -> Callable[..., torch.Tensor]:
        """Function of (tensors, workspace) that gives `rows` rows of `width` numbers from row `first` on, or a stack
        of one matrix a group where there are several: the groups' columns lie side by side.
        """
        groups, whole = self.g.G, self.g.G * width
        size, step = ((rows, width), (whole, 1)) if groups == 1 else ((groups, rows, width), (width, whole, 1))
        return self._view(name, first * whole, size, step)

    def stacked(self, name: str, first: int, width: int) -> Callable[..., torch.Tensor]:
        """The same for filters, K rows in all: the groups' rows lie below one another, `first` times them all away."""
        groups, rows = self.g.G, self.g.K // self.g.G
        size, step = ((rows, width), (width, 1))
        if groups > 1:
            size, step = (groups, *size), (rows * width, *step)
        return self._view(name, first * groups * rows * width, size, step)

    def _view(self, name: str, start: int, size: tuple[int, ...], step: tuple[int, ...]) -> Callable[..., torch.Tensor]:
        if name not in self.at:  # the tensor itself
            order = list(self.problem.tensors).index(name)

            def operand(tensors: tuple[torch.Tensor, ...], workspace: torch.Tensor | None) -> torch.Tensor:
                return tensors[order].as_strided(size, step, tensors[order].storage_offset() + start)

            return operand
        dtype, item = DTYPES[self.slice(name).dtype]
        begin = self.at[name] + start * item
        end = begin + (sum((n - 1) * s for n, s in zip(size, step)) + 1) * item
        type_ = getattr(torch, dtype)

        def piece(tensors: tuple[torch.Tensor, ...], workspace: torch.Tensor | None) -> torch.Tensor:
            assert workspace is not None
            return workspace[begin:end].view(type_).as_strided(size, step)

        return piece


class Im2colGemmTriton(TritonEngine):
    """All three directions."""

    name = "conv.im2col_gemm_triton"
    operations = ("conv_fprop", "conv_dgrad", "conv_wgrad")
    notes = frozenset({"tensor_core", "tf32", "runtime_compilation"})

    def refusals(self, problem: Problem) -> list[str]:
        refusals = Refusals()
        refusals.require_tensors(problem.items, TYPES, elements=True)
        require_same_math(refusals, problem)
        if not refusals:
            g = Geometry.of(problem)
            elements = math.prod(g.out_size) * g.C * math.prod(g.filter)
            refusals.require(elements <= INT32, "at most 2^31 - 1 numbers in an image's matrix", elements)
        return refusals

    def configs(self, problem: Problem) -> list[Config]:
        g = Geometry.of(problem)
        one = _Plan.of(problem, 1).size
        most = {max(1, min(g.N, bytes_ // one)) for bytes_ in (MATRIX_BYTES, MATRIX_BYTES // 8)}
        found = {-(-g.N // -(-g.N // images)) for images in most}  # blocks of one size, as far as they go
        return [{"images": images} for images in sorted(found, reverse=True)]

    def workspace_size(self, problem: Problem, config: Config) -> int:
        return _Plan.of(problem, config["images"]).size

    def cost(self, problem: Problem, config: Config) -> float:
        plan = _Plan.of(problem, config["images"])
        g, blocks = plan.g, -(-plan.g.N // config["images"])
        passes = len(plan.at) - ("columns" in plan.at) - ("product" in plan.at)
        columns = g.N * plan.pixels * plan.depth * g.G * (4 if plan.direction == "dgrad" else g.x.itemsize)
        sums = 0 if plan.direct or plan.direction != "fprop" else 2 * g.y.numel * 4
        # Thin products starve the units: a side shorter than a tile of 64 fills it in part only.
        fill = min(g.K // g.G, 64) * min(plan.depth, 64) / 64**2
        traffic = problem.bytes + 2 * columns + sums
        product = roofline(problem, compute_efficiency=0.8 * max(fill, 1 / 64), launches=0)
        product = max(product, blocks * _least(plan))
        # A block's matrix is still in the second-level cache, in part, when the product reads it.
        moving = traffic / (0.9 * problem.target.bandwidth)
        return product + moving + start(problem.target, passes + 3 * blocks)

    def launches(self, problem: Problem, config: Config) -> list[Launch]:
        return [step for step in self._steps(problem, config) if isinstance(step, Launch)]

    def _steps(self, problem: Problem, config: Config) -> Iterator[Launch | tuple[Callable[..., torch.Tensor], ...]]:
        """Launches, and between them products: functions that give the operands and the result."""
        plan = _Plan.of(problem, config["images"])
        g, w_strides = plan.g, plan.g.w_strides
        if "w" in plan.at:
            filters = Filter(1, g.K, g.C // g.G, g.C // g.G, g.filter, (0, *w_strides))
            yield pack(filters, "w", plan.slice("w"), None, None, None, g.w.span, False)
        if "dy" in plan.at:
            pixels = Pixels(1, (g.N, g.K, *g.out_size), g.y_strides, g.K)
            yield pixels.launch("dy", plan.slice("dy"), g.y.span, False)
        for number, (first, images) in enumerate(plan.blocks):
            rows = images * plan.pixels
            columns = plan.matrix("columns", 0, rows, plan.depth)
            if plan.direction != "dgrad":
                yield unfold(problem, g, first, images, plan.slice("columns"))
            if plan.direction == "fprop":
                out, start = ("y", first * plan.pixels) if plan.direct else ("product", 0)
                filters = plan.stacked("w", 0, plan.depth)
                yield columns, _turned(filters), plan.matrix(out, start, rows, g.K // g.G)
                if not plan.direct:
                    yield finish_pixels(problem, first, images, g.out_size, plan.slice("product"))
                continue
            dy = plan.matrix("dy", first * plan.pixels, rows, g.K // g.G)
            if plan.direction == "dgrad":
                yield dy, plan.stacked("w", 0, plan.depth), columns
                yield fold(problem, g, first, images, plan.slice("columns"))
            else:
                yield _turned(dy), columns, plan.stacked("product", number, plan.depth)
        if plan.direction == "wgrad":
            yield add_parts(problem, g, -(-g.N // plan.images), plan.slice("product"))

    def build(self, problem: Problem, config: Config) -> Run:
        steps: list[Callable[..., None]] = []
        for step in self._steps(problem, config):
            steps.append(Program(problem, [step]) if isinstance(step, Launch) else _product(*step))

        def run(tensors: tuple[torch.Tensor, ...], workspace: torch.Tensor | None) -> None:
            for step in steps:
                step(tensors, workspace)

        return run


def _least(plan: _Plan) -> float:
    """Seconds that BLAS takes for one block's product however narrow it is: tiles of 128 x 64, each a loop of its own.

    A long reduction is dealt out over 16 blocks at most.
    """
    rows, filters, processors = plan.images * plan.pixels, plan.g.K // plan.g.G, plan.problem.target.processors
    m, n, depth = {
        "fprop": (rows, filters, plan.depth),
        "dgrad": (rows, plan.depth, filters),
        "wgrad": (filters, plan.depth, rows),
    }[plan.direction]
    tiles = plan.g.G * -(-m // 128) * -(-n // 64)
    parts = max(1, min(16, processors // tiles))
    return -(-tiles // processors) * (TILE + depth / 64 / parts * STEP_LATENCY)


def _is_matrix(t: TensorDescriptor) -> bool:
    return t.is_channels_last or (t.is_contiguous and math.prod(t.shape[2:]) == 1)


def _turned(matrix: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda tensors, workspace: matrix(tensors, workspace).transpose(-1, -2)


def _product(a: Callable, b: Callable, out: Callable) -> Callable[..., None]:
    return lambda tensors, workspace: multiply(a(tensors, workspace), b(tensors, workspace), out(tensors, workspace))
