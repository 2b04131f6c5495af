"""Convolution as a matrix product on a CPU: unfold the images (Numba), multiply (BLAS), fold or finish (Numba).

Method. With the inputs of every output pixel written out as a matrix, forward is ``W columns``, the filter gradient
``dy columns^T``, and the data gradient folds ``W^T dy`` back; the products go to BLAS through ``torch.mm`` and
``torch.bmm``. The matrix is channel-major or pixel-major (`lucidnn.engines._numba.im2col`) to suit the tensors' layout,
so that dense channels-first and channels-last tensors enter and leave the product without a copy. Images are taken in
blocks that keep the matrix below 24 MB; where one image is larger, channels are too. 1x1 filters with stride 1 unfold
nothing.

16-bit tensors are converted on the way into the matrix and out of the product; all sums are float32 (float64 for
float64). The sums over images of the filter gradient run in order, so two runs give the same bits on the same number of
threads.

Cost. The definition's arithmetic at BLAS speed, plus writing and reading the matrix: R x S times the input, which is
what `conv.direct` avoids. Limits: none but the four data types. After Chellapilla, Puri and Simard, "High performance
convolutional neural networks for document processing", 2006.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import torch

from ...core.engine import Engine, Refusals
from ...core.heuristics import roofline
from ...ops.convolution import Geometry
from .. import _numba as nb
from .._numba import im2col
from .._numba.blocks import cleared
from .._numba.finish import Finisher

ALIGN = 64
MATRIX_BYTES = 24 << 20  # with what stands beside it below what a C library keeps from call to call
TYPES = ("f64", "f32", "f16", "bf16")
_TORCH = {"f64": torch.float64, "f32": torch.float32}


@dataclasses.dataclass(frozen=True)
class _Layout:
    """How one problem is laid out: decided once, the same in `workspace_size`, `cost` and `build`."""

    g: Geometry
    acc: str
    by_pixel: bool  # pixel-major columns
    plain: bool  # 1x1, stride 1, no padding: the image is its own matrix
    images: int  # images of a block
    rows: int  # channel-major: rows (channel, tap) of a block
    whole: bool  # all rows fit into one block
    source_is_matrix: bool  # x can be used as the columns in place
    dense: dict[str, bool]  # role -> usable as a matrix in place, in this arrangement
    parts: dict[str, int]  # workspace: name -> elements
    limit: int  # threads that the work outside the product is worth

    @property
    def taps(self) -> int:
        return math.prod(self.g.filter)

    @property
    def depth(self) -> int:
        """Rows of the columns, all groups together."""
        return self.g.C * self.taps

    @property
    def pixels(self) -> int:
        return math.prod(self.g.out_size)

    @property
    def threads(self) -> int:
        """Threads for the passes outside the product, now."""
        return min(nb.threads(), self.limit)

    @property
    def itemsize(self) -> int:
        return 8 if self.acc == "f64" else 4

    @property
    def workspace(self) -> int:
        return ALIGN + sum(-(-n * self.itemsize // ALIGN) * ALIGN for n in self.parts.values())


@functools.lru_cache(maxsize=256)
def _layout(problem) -> _Layout:
    g = Geometry.of(problem)
    direction = problem.op.name.removeprefix("conv_")
    acc = "f64" if any(t.dtype == "f64" for t in (g.x, g.w, g.y)) else "f32"
    itemsize = 8 if acc == "f64" else 4
    pixels, taps = math.prod(g.out_size), math.prod(g.filter)
    depth = g.C * taps
    last = {"fprop": g.x.is_channels_last, "dgrad": g.y.is_channels_last}.get(
        direction, g.x.is_channels_last or g.y.is_channels_last or pixels < 128
    )
    # An image of one pixel has both layouts; pixel-major makes the batch one product instead of one for each image.
    last = last or math.prod(g.in_size) == pixels == 1
    by_pixel = g.G == 1 and last and depth * pixels * itemsize <= MATRIX_BYTES
    plain = taps == 1 and set(g.stride) == {1} and not any(g.pad) and not any(g.pad_after)

    def dense(t) -> bool:
        if by_pixel:
            return t.dtype == acc and (t.is_channels_last or (t.is_contiguous and math.prod(t.shape[2:]) == 1))
        return t.dtype == acc and t.is_contiguous

    source_is_matrix = plain and dense(g.x)
    images = max(1, min(g.N, MATRIX_BYTES // (depth * pixels * itemsize)))
    if source_is_matrix and direction != "dgrad":
        images = g.N
    rows = depth
    if images == 1 and not source_is_matrix:
        unit = taps if direction == "dgrad" or g.G > 1 else 1
        rows = min(depth, max(MATRIX_BYTES // (pixels * itemsize * unit), 1) * unit)
        if g.G > 1:  # whole groups, so that a block's products are a batch
            group = g.C // g.G * taps
            rows = min(depth, max(rows // group, 1) * group)
    usable = {
        "x": dense(g.x),
        "y": dense(g.y),
        "w": g.w.dtype == acc and g.w.is_contiguous and (not by_pixel or taps == 1),
    }
    epilogue = problem.epilogue
    bare = epilogue.alpha == 1 and epilogue.activation == "identity" and not {"z", "bias"} & set(problem.inputs)
    parts: dict[str, int] = {}
    if not usable["w"] or direction == "wgrad" and not bare:
        parts["w"] = g.w.numel
    columns = images * rows * pixels
    # A step over an element costs about as much as twenty operations.
    limit = nb.worthwhile(20 * g.N * pixels * max(depth, g.K), problem.target.processors)
    if direction == "dgrad":
        usable["x"] = plain and usable["x"] and bare
        if not usable["x"]:
            parts["columns"] = columns
            parts["rows"] = im2col.fold_rows(g, limit, by_pixel)
    elif not source_is_matrix:
        parts["columns"] = columns
    usable["y"] = usable["y"] and (direction != "fprop" or bare)
    if not usable["y"]:
        parts["y"] = images * g.K * pixels
    usable["w"] = "w" not in parts
    return _Layout(g, acc, by_pixel, plain, images, rows, rows == depth, source_is_matrix, usable, parts, limit)


def _carve(layout: _Layout, workspace: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """The workspace's parts as flat tensors, each starting on a cache line."""
    found: dict[str, torch.Tensor] = {}
    if workspace is not None:
        at = -workspace.data_ptr() % ALIGN
        for name, elements in layout.parts.items():
            size = elements * layout.itemsize
            found[name] = workspace[at : at + size].view(_TORCH[layout.acc])
            at += -(-size // ALIGN) * ALIGN
    return found


class Im2colGemm(Engine):
    """Unfold, multiply with BLAS, fold; all directions, any strides."""

    name = "conv.im2col_gemm"
    operations = ("conv_fprop", "conv_dgrad", "conv_wgrad")
    targets = ("cpu",)
    notes = frozenset({"runtime_compilation"})

    def refusals(self, problem):
        r = Refusals()
        r.require(not problem.is_empty, "tensors with elements", "an empty one")
        r.require_tensors(problem.items, TYPES)
        return r

    def workspace_size(self, problem, config):
        layout = _layout(problem)
        return layout.workspace if layout.parts else 0

    def cost(self, problem, config):
        layout = _layout(problem)
        g = layout.g
        blocks = -(-g.N // layout.images) * -(-layout.depth // layout.rows)
        products = blocks if g.G == 1 and (layout.by_pixel or problem.op.name != "conv_wgrad") else g.N
        # Thin matrices keep BLAS from its rate.
        columns = layout.pixels * (layout.images if layout.by_pixel else 1)
        thinnest = min(g.K / g.G / 16, g.C / g.G * layout.taps / 16, columns / 96)
        flops = problem.flops * (1 + 0.4 * (1 / min(1.0, thinnest) - 1))
        product = roofline(
            problem, flops=flops, bytes=0.0, compute_efficiency=0.95, launches=3 * blocks + products, dtype=layout.acc
        )
        # The passes follow each other: the images, then writing the columns, packing and reading them.
        images = (1.7 if problem.op.name == "conv_wgrad" else 1.1) * problem.bytes
        columns, result = (layout.itemsize * layout.parts.get(name, 0) * blocks for name in ("columns", "y"))
        moved = images + 5 * columns + 2 * result + cleared(layout.workspace)
        return product + roofline(problem, flops=0.0, bytes=moved, memory_efficiency=1.0, launches=0)

    def build(self, problem, config):
        layout = _layout(problem)
        make = {"conv_fprop": _forward, "conv_dgrad": _backward_data, "conv_wgrad": _backward_filter}
        step = make[problem.op.name](problem, layout)

        def run(tensors, workspace):
            with torch.no_grad():
                step(tensors, _carve(layout, workspace))

        return run


def _matrix(layout: _Layout, tensor: torch.Tensor, channels: int) -> torch.Tensor:
    """A dense tensor as (image, channel, pixel) or, pixel-major, as (image, pixel, channel), in place."""
    images = tensor.shape[0]
    if layout.by_pixel:
        order = (0, *range(2, tensor.ndim), 1)
        return tensor.permute(order).view(images, -1, channels)
    return tensor.view(images, channels, -1)


def _gather(layout: _Layout, tensor: torch.Tensor, into: torch.Tensor, n0: int, n1: int) -> torch.Tensor:
    """Copy some images of y (or dy) into the workspace in the columns' arrangement, converted."""
    part = tensor[n0:n1]
    shape = part.shape
    if layout.by_pixel:
        order = (0, *range(2, part.ndim), 1)
        view = into[: part.numel()].view(shape[0], *shape[2:], shape[1])
        view.copy_(part.permute(order))
        return view.view(shape[0], -1, shape[1])
    view = into[: part.numel()].view(shape)
    view.copy_(part)
    return view.view(shape[0], shape[1], -1)


def _filters(layout: _Layout, w: torch.Tensor, parts: dict[str, torch.Tensor]) -> torch.Tensor:
    """The filters as (K, taps x channels of the columns' order), converted."""
    k = w.shape[0]
    if "w" not in parts:
        return w.view(k, -1)
    if layout.by_pixel:
        order = (0, *range(2, w.ndim), 1)
        packed = parts["w"].view([w.shape[i] for i in order])
        packed.copy_(w.permute(order))
    else:
        packed = parts["w"].view(w.shape)
        packed.copy_(w)
    return packed.view(k, -1)


def _product_strides(layout: _Layout, channels: int, sizes) -> tuple[int, ...]:
    """Five strides of a product in the workspace, whose spatial axes have these sizes."""
    _, h, w = sizes
    pixels = math.prod(sizes)
    if layout.by_pixel:
        return (pixels * channels, 1, h * w * channels, w * channels, channels)
    return (pixels * channels, pixels, h * w, w, 1)


def _unfolding(layout: _Layout):
    """The function that gives the columns of images n0 to n1, of rows j0 to j1 of the reduction.

    They are (images, pixels, rows) where pixels come first in the product, else (images, rows, pixels): x itself where
    that is a matrix already, else unfolded into the workspace.
    """
    g = layout.g
    table = im2col.table(g)
    like, acc = nb.token(g.x.dtype), nb.token(layout.acc)

    def unfold(x: torch.Tensor, parts, n0: int, n1: int, j0: int, j1: int) -> torch.Tensor:
        if layout.source_is_matrix:
            return _matrix(layout, x, g.C)[n0:n1]
        columns, images = parts["columns"], n1 - n0
        at = (table.data_ptr(), x.data_ptr(), columns.data_ptr(), n0, images)
        if layout.by_pixel:
            im2col.unfold_pixels(layout.threads, *at, like, acc)
            return columns[: images * layout.pixels * layout.depth].view(images, layout.pixels, -1)
        im2col.unfold_channels(layout.threads, *at, j0, j1 - j0, like, acc)
        return columns[: images * (j1 - j0) * layout.pixels].view(images, j1 - j0, -1)

    return unfold


def _forward(problem, layout: _Layout):
    g = layout.g
    unfold = _unfolding(layout)
    roles = problem.inputs
    bias_at, z_at = (roles.index(r) if r in roles else None for r in ("bias", "z"))
    shape = (layout.images, g.K, *g.out_size)
    inner = 1 if layout.by_pixel else 4
    finisher = None
    if not layout.dense["y"]:
        source = _product_strides(layout, g.K, g.out_size)
        finisher = Finisher(problem, layout.acc, layout.limit, shape, source, g.y_strides, inner)
    per_group = g.C // g.G * layout.taps

    def step(tensors, parts):
        x, w, y = tensors[0], tensors[1], tensors[-1]
        bias, z = (None if at is None else tensors[at] for at in (bias_at, z_at))
        filters = _filters(layout, w, parts)
        whole_y = _matrix(layout, y, g.K) if finisher is None else None
        for n0 in range(0, g.N, layout.images):
            n1 = min(n0 + layout.images, g.N)
            images = n1 - n0
            if whole_y is not None:
                product = whole_y[n0:n1]
            else:
                middle = (layout.pixels, g.K) if layout.by_pixel else (g.K, layout.pixels)
                product = parts["y"][: images * g.K * layout.pixels].view(images, *middle)
            for j0 in range(0, layout.depth, layout.rows):
                j1 = min(j0 + layout.rows, layout.depth)
                columns = unfold(x, parts, n0, n1, j0, j1)
                if layout.by_pixel:
                    flat = columns.view(images * layout.pixels, -1)
                    torch.mm(flat, filters.t(), out=product.view(images * layout.pixels, g.K))
                elif g.G == 1:
                    _multiply(filters[:, j0:j1], columns, product, add=j0 > 0)
                else:
                    first, count = j0 // per_group, (j1 - j0) // per_group
                    some = filters.view(g.G, g.K // g.G, per_group)[first : first + count]
                    for i in range(images):
                        to = product[i].view(g.G, g.K // g.G, layout.pixels)[first : first + count]
                        torch.bmm(some, columns[i].view(count, per_group, layout.pixels), out=to)
            if finisher is not None:
                finisher(product, bias, z, y, n0, images)

    return step


def _multiply(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, add: bool) -> None:
    """``out[i] (+)= a b[i]``."""
    if b.shape[0] == 1:
        if add:
            torch.addmm(out[0], a, b[0], out=out[0])
        else:
            torch.mm(a, b[0], out=out[0])
    else:
        torch.bmm(a.expand(b.shape[0], -1, -1), b, out=out)


def _backward_data(problem, layout: _Layout):
    g = layout.g
    z = problem.tensors.get("z")
    add = (*z.strides[:2], *(0,) * (5 - z.ndim), *z.strides[2:]) if z else None
    table = im2col.table(g, add)
    epilogue = problem.epilogue
    bias = problem.tensors.get("bias")
    bias_at = problem.inputs.index("bias") if bias else None
    step_of_bias = bias.strides[0] if bias else 0
    scalars = torch.tensor([epilogue.alpha, epilogue.beta, epilogue.parameter, step_of_bias], dtype=torch.float64)
    code, bias_like = nb.ACTIVATIONS[epilogue.activation], nb.token(bias.dtype if bias else g.x.dtype)
    acc, out = nb.token(layout.acc), nb.token(g.x.dtype)
    z_at = problem.inputs.index("z") if z else None
    z_like = nb.token(z.dtype) if z else out
    per_group = g.C // g.G * layout.taps

    def step(tensors, parts):
        dy, w, dx = tensors[0], tensors[1], tensors[-1]
        z = None if z_at is None else tensors[z_at]
        bias = None if bias_at is None else tensors[bias_at]
        filters = _filters(layout, w, parts)
        whole_dy = _matrix(layout, dy, g.K) if layout.dense["y"] else None
        for n0 in range(0, g.N, layout.images):
            n1 = min(n0 + layout.images, g.N)
            images = n1 - n0
            gradient = whole_dy[n0:n1] if whole_dy is not None else _gather(layout, dy, parts["y"], n0, n1)
            for j0 in range(0, layout.depth, layout.rows):
                j1 = min(j0 + layout.rows, layout.depth)
                if layout.dense["x"]:
                    columns = _matrix(layout, dx, g.C)[n0:n1]
                else:
                    middle = (layout.pixels, layout.depth) if layout.by_pixel else (j1 - j0, layout.pixels)
                    columns = parts["columns"][: images * math.prod(middle)].view(images, *middle)
                if layout.by_pixel:
                    torch.mm(gradient.reshape(-1, g.K), filters, out=columns.view(images * layout.pixels, -1))
                elif g.G == 1:
                    _multiply(filters[:, j0:j1].t(), gradient, columns, add=False)
                else:
                    first, count = j0 // per_group, (j1 - j0) // per_group
                    some = filters.view(g.G, g.K // g.G, per_group)[first : first + count].transpose(1, 2)
                    for i in range(images):
                        from_ = gradient[i].view(g.G, g.K // g.G, layout.pixels)[first : first + count]
                        torch.bmm(some, from_, out=columns[i].view(count, per_group, layout.pixels))
                if not layout.dense["x"]:
                    channels = (j1 - j0) // layout.taps
                    im2col.fold(
                        layout.threads, table.data_ptr(), scalars.data_ptr(), columns.data_ptr(),
                        0 if bias is None else bias.data_ptr(), 0 if z is None else z.data_ptr(), dx.data_ptr(),
                        parts["rows"].data_ptr(), n0, images, j0 // layout.taps, channels, layout.by_pixel, code,
                        acc, bias_like, z_like, out,
                    )  # fmt: skip

    return step


def _backward_filter(problem, layout: _Layout):
    g = layout.g
    unfold = _unfolding(layout)
    z_at = problem.inputs.index("z") if "z" in problem.inputs else None
    per_group = g.C // g.G * layout.taps
    finisher = None
    if not layout.dense["w"]:
        c, (t, r, s) = g.C // g.G, g.filter
        row = c * layout.taps
        source = (row, 1, r * s * c, s * c, c) if layout.by_pixel else (row, layout.taps, r * s, s, 1)
        finisher = Finisher(
            problem, layout.acc, layout.limit, (g.K, c, t, r, s), source, g.w_strides, 1 if layout.by_pixel else 4
        )

    def step(tensors, parts):
        x, dy, dw = tensors[0], tensors[1], tensors[-1]
        z = None if z_at is None else tensors[z_at]
        sums = (dw if finisher is None else parts["w"]).view(g.K, per_group)
        whole_dy = _matrix(layout, dy, g.K) if layout.dense["y"] else None
        for n0 in range(0, g.N, layout.images):
            n1 = min(n0 + layout.images, g.N)
            images = n1 - n0
            gradient = whole_dy[n0:n1] if whole_dy is not None else _gather(layout, dy, parts["y"], n0, n1)
            for j0 in range(0, layout.depth, layout.rows):
                j1 = min(j0 + layout.rows, layout.depth)
                columns = unfold(x, parts, n0, n1, j0, j1)
                if layout.by_pixel:
                    flat, right = gradient.reshape(-1, g.K), columns.reshape(images * layout.pixels, -1)
                    _add_product(sums, flat.t(), right, n0 > 0)
                elif g.G == 1:
                    for i in range(images):
                        _add_product(sums[:, j0:j1], gradient[i], columns[i].t(), n0 + i > 0)
                else:
                    first, count = j0 // per_group, (j1 - j0) // per_group
                    to = sums.view(g.G, g.K // g.G, per_group)[first : first + count]
                    for i in range(images):
                        left = gradient[i].view(g.G, g.K // g.G, layout.pixels)[first : first + count]
                        right = columns[i].view(count, per_group, layout.pixels).transpose(1, 2)
                        if n0 + i:
                            torch.baddbmm(to, left, right, out=to)
                        else:
                            torch.bmm(left, right, out=to)
        if finisher is not None:
            finisher(sums, None, z, dw, 0, g.K)

    return step


def _add_product(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, add: bool) -> None:
    """``out (+)= a b``."""
    if add:
        torch.addmm(out, a, b, out=out)
    else:
        torch.mm(a, b, out=out)
