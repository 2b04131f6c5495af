"""Images written out as a matrix, and back: what a convolution by a BLAS product does around the product.

The matrix has a row for every output pixel and (group, tap, channel) along the columns. `unfold_images` writes it,
`fold_columns` sums it back into images in a fixed order, `finish_product` applies the epilogue to a product of it.
"""

import math

import triton
import triton.language as tl

from ...core.problem import Problem
from ...ops.convolution import Geometry
from .index import INT32
from .launch import Argument, Launch, Slice
from .result import places, store_pixels
from .split import named

TILE = 2048  # elements


@triton.jit
def unfold_images(
    x, columns, M, O, P, Q, x_d, x_h, x_w, x_start, pad_d, pad_h, pad_w,
    x_n_stride, x_c_stride, x_d_stride, x_h_stride, x_w_stride,
    C: tl.constexpr, GROUPS: tl.constexpr, T: tl.constexpr, R: tl.constexpr, S: tl.constexpr,
    STRIDE_D: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    DILATION_D: tl.constexpr, DILATION_H: tl.constexpr, DILATION_W: tl.constexpr,
    HAS_D: tl.constexpr, WIDE: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Rows are output pixels, columns (group, tap, channel)."""
    WIDTH: tl.constexpr = GROUPS * T * R * S * C
    BLOCKS: tl.constexpr = (WIDTH + BLOCK_C - 1) // BLOCK_C
    m = (tl.program_id(0) // BLOCKS) * BLOCK_P + tl.arange(0, BLOCK_P)
    column = (tl.program_id(0) % BLOCKS) * BLOCK_C + tl.arange(0, BLOCK_C)
    if WIDE:
        m = m.to(tl.int64)
    line = m // Q
    q = m % Q
    p = line % P
    n = line // P
    h = p * STRIDE_H - pad_h
    w = q * STRIDE_W - pad_w
    tap = column // C
    channel = (tap // (T * R * S)) * C + column % C
    s = tap % S
    r = (tap // S) % R
    dh = r * DILATION_H
    dw = s * DILATION_W
    shift = channel * x_c_stride + dh * x_h_stride + dw * x_w_stride
    row = h * x_h_stride + w * x_w_stride + x_start
    ok = (m < M)[:, None] & (column < WIDTH)[None, :]
    inside_h = h[:, None] + dh[None, :]
    inside_w = w[:, None] + dw[None, :]
    ok_x = ok & (inside_h >= 0) & (inside_h < x_h) & (inside_w >= 0) & (inside_w < x_w)
    if HAS_D:
        d = (n % O) * STRIDE_D - pad_d
        n = n // O
        dd = ((tap // (S * R)) % T) * DILATION_D
        inside_d = d[:, None] + dd[None, :]
        ok_x = ok_x & (inside_d >= 0) & (inside_d < x_d)
        row += d * x_d_stride
        shift += dd * x_d_stride
    v = tl.load((x + row + n * x_n_stride)[:, None] + shift[None, :], mask=ok_x, other=0.0)
    tl.store((columns + m.to(tl.int64) * WIDTH)[:, None] + column[None, :], v, mask=ok)


@triton.jit
def fold_columns(
    columns, bias, z, dst, alpha, beta, parameter, M, D, H, W, O, P, Q, first, pad_d, pad_h, pad_w,
    bias_stride, z_n_stride, z_c_stride, z_d_stride, z_h_stride, z_w_stride,
    dst_n_stride, dst_c_stride, dst_d_stride, dst_h_stride, dst_w_stride,
    C: tl.constexpr, GROUPS: tl.constexpr, T: tl.constexpr, R: tl.constexpr, S: tl.constexpr,
    STRIDE_D: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    DILATION_D: tl.constexpr, DILATION_H: tl.constexpr, DILATION_W: tl.constexpr,
    HAS_D: tl.constexpr, ACT: tl.constexpr, WIDE: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Every pixel of dx adds, tap by tap, the columns of the output pixels that the tap leads to it from."""
    WIDTH: tl.constexpr = GROUPS * T * R * S * C
    BLOCKS: tl.constexpr = (GROUPS * C + BLOCK_C - 1) // BLOCK_C
    m = (tl.program_id(0) // BLOCKS) * BLOCK_P + tl.arange(0, BLOCK_P)
    channel = (tl.program_id(0) % BLOCKS) * BLOCK_C + tl.arange(0, BLOCK_C)
    if WIDE:
        m = m.to(tl.int64)
        channel = channel.to(tl.int64)
    line = m // W
    w = m % W
    h = line % H
    n = line // H
    d = 0
    if HAS_D:
        d = n % D
        n = n // D
    ok_m = m < M
    ok_c = channel < GROUPS * C
    column = (channel // C) * (T * R * S * C) + channel % C
    acc = tl.zeros((BLOCK_P, BLOCK_C), dtype=columns.dtype.element_ty)
    for tap in range(T * R * S):
        from_h = h + pad_h - ((tap // S) % R) * DILATION_H
        from_w = w + pad_w - (tap % S) * DILATION_W
        p = from_h // STRIDE_H
        q = from_w // STRIDE_W
        ok = ok_m & (from_h >= 0) & (p * STRIDE_H == from_h) & (p < P)
        ok = ok & (from_w >= 0) & (q * STRIDE_W == from_w) & (q < Q)
        pixel = n
        if HAS_D:
            from_d = d + pad_d - (tap // (S * R)) * DILATION_D
            o = from_d // STRIDE_D
            ok = ok & (from_d >= 0) & (o * STRIDE_D == from_d) & (o < O)
            pixel = n * O + o
        pixel = ((pixel * P + p) * Q + q).to(tl.int64)
        at = (columns + pixel * WIDTH + tap * C)[:, None] + column[None, :]
        acc += tl.load(at, mask=ok[:, None] & ok_c[None, :], other=0.0)
    store_pixels(
        acc, z, bias, dst, alpha, beta, parameter, n + first, d, h, w, ok_m, channel, ok_c,
        bias_stride, z_n_stride, z_c_stride, z_d_stride, z_h_stride, z_w_stride,
        dst_n_stride, dst_c_stride, dst_d_stride, dst_h_stride, dst_w_stride, HAS_D, ACT,
    )  # fmt: skip


@triton.jit
def finish_product(
    product, bias, z, dst, alpha, beta, parameter, M, O, P, Q, K, PARTS, first,
    bias_stride, z_n_stride, z_c_stride, z_d_stride, z_h_stride, z_w_stride,
    dst_n_stride, dst_c_stride, dst_d_stride, dst_h_stride, dst_w_stride,
    HAS_D: tl.constexpr, ACT: tl.constexpr, WIDE: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """The epilogue on a matrix of pixels by channels, or on the sum of several, added in their order."""
    blocks = tl.cdiv(K, BLOCK_C)
    m = (tl.program_id(0) // blocks) * BLOCK_P + tl.arange(0, BLOCK_P)
    k = (tl.program_id(0) % blocks) * BLOCK_C + tl.arange(0, BLOCK_C)
    if WIDE:
        m = m.to(tl.int64)
        k = k.to(tl.int64)
    ok = (m < M)[:, None] & (k < K)[None, :]
    places = (product + m.to(tl.int64) * K)[:, None] + k[None, :]
    acc = tl.load(places, mask=ok, other=0.0)
    size = tl.cast(M, tl.int64) * K
    for part in range(1, PARTS):
        acc += tl.load(places + part * size, mask=ok, other=0.0)
    line = m // Q
    n = line // P
    o = 0
    if HAS_D:
        o = n % O
        n = n // O
    store_pixels(
        acc, z, bias, dst, alpha, beta, parameter, n + first, o, line % P, m % Q, m < M, k, k < K,
        bias_stride, z_n_stride, z_c_stride, z_d_stride, z_h_stride, z_w_stride,
        dst_n_stride, dst_c_stride, dst_d_stride, dst_h_stride, dst_w_stride, HAS_D, ACT,
    )  # fmt: skip


def _tile(rows: int, width: int) -> tuple[int, int]:
    """Pixels and columns of a tile: a smaller one where there are few elements, so that all processors have one."""
    columns = min(128, 1 << (width - 1).bit_length())
    return (TILE if rows * width > 512 * TILE else TILE // 4) // columns, columns


def _geometry(problem: Problem, g: Geometry) -> dict[str, int]:
    found = {**dict(zip("TRS", g.filter)), "C": g.C // g.G, "GROUPS": g.G, "HAS_D": len(problem.op.stride) == 3}
    for name, values in (("STRIDE", g.stride), ("DILATION", g.dilation)):
        found.update({f"{name}_{axis}": value for axis, value in zip("DHW", values)})
    return found


def unfold(problem: Problem, g: Geometry, first: int, images: int, to: Slice) -> Launch:
    """The launch that writes the matrix of `images` images from `first` on."""
    pixels, width = images * math.prod(g.out_size), g.C * math.prod(g.filter)
    block_p, block_c = _tile(pixels, width)
    args: dict[str, Argument] = {
        "x": "x", "columns": to, "M": pixels, **dict(zip("OPQ", g.out_size)), "x_start": first * g.x_strides[0],
        **{f"x_{axis}": size for axis, size in zip("dhw", g.in_size)},
        **{f"pad_{axis}": size for axis, size in zip("dhw", g.pad)}, **named("x", "ncdhw", g.x_strides),
    }  # fmt: skip
    wide = max(problem["x"].span, pixels + TILE) > INT32
    constexprs = {**_geometry(problem, g), "WIDE": wide, "BLOCK_P": block_p, "BLOCK_C": block_c}
    return Launch(unfold_images, (-(-pixels // block_p) * -(-width // block_c),), args, constexprs, 4, 1)


def _ending(problem: Problem, pixels: int, channels: int) -> tuple[dict[str, Argument], dict, tuple[int]]:
    """Arguments, constexprs and grid that kernels with an epilogue share."""
    block_p, block_c = _tile(pixels, channels)
    args, constexprs = places(problem)
    spans = [problem[role].span for role in (problem.outputs[0], "z") if role in problem.tensors]
    constexprs |= {"WIDE": max(*spans, pixels + TILE) > INT32, "BLOCK_P": block_p, "BLOCK_C": block_c}
    return args | {"M": pixels}, constexprs, (-(-pixels // block_p) * -(-channels // block_c),)


def fold(problem: Problem, g: Geometry, first: int, images: int, columns: Slice) -> Launch:
    """The launch that sums the matrix into `images` images of dx from `first` on."""
    args, constexprs, grid = _ending(problem, images * math.prod(g.in_size), g.C)
    args |= {
        "columns": columns, "first": first, **dict(zip("DHW", g.in_size)), **dict(zip("OPQ", g.out_size)),
        **{f"pad_{axis}": size for axis, size in zip("dhw", g.pad)},
    }  # fmt: skip
    return Launch(fold_columns, grid, args, constexprs | _geometry(problem, g), 4, 1)


def finish_pixels(
    problem: Problem, first: int, images: int, size: tuple[int, int, int], product: Slice, parts: int = 1
) -> Launch:
    """The launch that applies the epilogue to the product of `images` images from `first` on, in `parts` to be added.

    The result is an image of `size`; a part is (pixels, all channels).
    """
    channels = problem[problem.outputs[0]].shape[1]
    args, constexprs, grid = _ending(problem, images * math.prod(size), channels)
    args |= {"product": product, "PARTS": parts, "first": first, "K": channels, **dict(zip("OPQ", size))}
    return Launch(finish_product, grid, args, constexprs, 4, 1)
