"""Unfolding images into matrices and back, and the pass that finishes a matrix product, for any strides and types.

A convolution becomes a matrix product when every output pixel's inputs are written out. Two arrangements of that
matrix:

* **channel-major**, ``columns[image][channel, tap][pixel]``: rows are copies of image rows; for channels-first tensors;
* **pixel-major**, ``columns[image, pixel][tap, channel]``: runs are pixels' channels; for channels-last tensors.

``fold`` (the gradient of unfolding) gathers instead of scattering: each row of the image collects what belongs to it,
in a fixed order, so parts never write to one element and the result does not depend on the number of threads.
All functions share one table of integers, made by `table`.
"""

from __future__ import annotations

import torch

from .epilogue import activate
from .jit import kernel
from .memory import cast, load, pointer, store
from .pool import launch

_FIELDS = (
    ("C", "IN_D", "IN_H", "IN_W", "T", "R", "S", "OUT_D", "OUT_H", "OUT_W")
    + ("STEP_D", "STEP_H", "STEP_W", "PAD_D", "PAD_H", "PAD_W", "DIL_D", "DIL_H", "DIL_W")
    + ("X_N", "X_C", "X_D", "X_H", "X_W", "Z_N", "Z_C", "Z_D", "Z_H", "Z_W", "HAS_Z")
)
(
    C, IN_D, IN_H, IN_W, T, R, S, OUT_D, OUT_H, OUT_W,
    STEP_D, STEP_H, STEP_W, PAD_D, PAD_H, PAD_W, DIL_D, DIL_H, DIL_W,
    X_N, X_C, X_D, X_H, X_W, Z_N, Z_C, Z_D, Z_H, Z_W, HAS_Z,
) = range(len(_FIELDS))  # fmt: skip


def table(geometry, z_strides=None) -> torch.Tensor:
    """The integers that the functions below read, from a `lucidnn.ops.convolution.Geometry`."""
    g = geometry
    return torch.tensor(
        [
            g.C, *g.in_size, *g.filter, *g.out_size, *g.stride, *g.pad, *g.dilation,
            *g.x_strides, *(z_strides or (0,) * 5), int(z_strides is not None),
        ],
        dtype=torch.int64,
    )  # fmt: skip


@kernel
def _unfold_channels_part(part, parts, table, x, columns, n0, images, j0, rows, like, acc):
    t, src, dst = pointer(table, 0), pointer(x, like), pointer(columns, acc)
    pixels = t[OUT_D] * t[OUT_H] * t[OUT_W]
    width, step = t[OUT_W], t[STEP_W]
    for item in range(images * rows * part // parts, images * rows * (part + 1) // parts):
        i, j = item // rows, j0 + item % rows
        s, rest = j % t[S], j // t[S]
        r, rest = rest % t[R], rest // t[R]
        tap, c = rest % t[T], rest // t[T]
        base = (n0 + i) * t[X_N] + c * t[X_C]
        at = item * pixels
        # Columns of the output whose input column lies inside.
        shift = s * t[DIL_W] - t[PAD_W]
        first = min(max(-(shift // step), 0), width)
        last = max(min((t[IN_W] - 1 - shift) // step + 1, width), first)
        for o in range(t[OUT_D]):
            d = o * t[STEP_D] - t[PAD_D] + tap * t[DIL_D]
            for p in range(t[OUT_H]):
                h = p * t[STEP_H] - t[PAD_H] + r * t[DIL_H]
                if d < 0 or d >= t[IN_D] or h < 0 or h >= t[IN_H]:
                    for q in range(width):
                        dst[at + q] = cast(0, acc)
                else:
                    for q in range(first):
                        dst[at + q] = cast(0, acc)
                    from_ = base + d * t[X_D] + h * t[X_H] + shift * t[X_W]
                    jump = step * t[X_W]
                    if jump == 1:
                        for q in range(first, last):
                            dst[at + q] = cast(load(src, from_ + q), acc)
                    else:
                        for q in range(first, last):
                            dst[at + q] = cast(load(src, from_ + q * jump), acc)
                    for q in range(last, width):
                        dst[at + q] = cast(0, acc)
                at += width


@kernel
def unfold_channels(threads, table, x, columns, n0, images, j0, rows, like, acc):
    """Rows ``j0 .. j0 + rows`` of the channel-major columns of images ``n0 .. n0 + images``."""
    parts = min(images * rows, 4 * threads)
    launch(_unfold_channels_part, parts, threads, (table, x, columns, n0, images, j0, rows, like, acc))


@kernel
def _unfold_pixels_part(part, parts, table, x, columns, n0, images, like, acc):
    t, src, dst = pointer(table, 0), pointer(x, like), pointer(columns, acc)
    channels, taps = t[C], t[T] * t[R] * t[S]
    lines = images * t[OUT_D] * t[OUT_H]
    for line in range(lines * part // parts, lines * (part + 1) // parts):
        p, rest = line % t[OUT_H], line // t[OUT_H]
        o, i = rest % t[OUT_D], rest // t[OUT_D]
        base = (n0 + i) * t[X_N]
        at = line * t[OUT_W] * taps * channels
        for q in range(t[OUT_W]):
            for tap in range(t[T]):
                d = o * t[STEP_D] - t[PAD_D] + tap * t[DIL_D]
                for r in range(t[R]):
                    h = p * t[STEP_H] - t[PAD_H] + r * t[DIL_H]
                    for s in range(t[S]):
                        w = q * t[STEP_W] - t[PAD_W] + s * t[DIL_W]
                        if d < 0 or d >= t[IN_D] or h < 0 or h >= t[IN_H] or w < 0 or w >= t[IN_W]:
                            for c in range(channels):
                                dst[at + c] = cast(0, acc)
                        else:
                            from_ = base + d * t[X_D] + h * t[X_H] + w * t[X_W]
                            if t[X_C] == 1:
                                for c in range(channels):
                                    dst[at + c] = cast(load(src, from_ + c), acc)
                            else:
                                for c in range(channels):
                                    dst[at + c] = cast(load(src, from_ + c * t[X_C]), acc)
                        at += channels


@kernel
def unfold_pixels(threads, table, x, columns, n0, images, like, acc):
    """The pixel-major columns of images ``n0 .. n0 + images``."""
    t = pointer(table, 0)
    parts = min(images * t[OUT_D] * t[OUT_H], 4 * threads)
    launch(_unfold_pixels_part, parts, threads, (table, x, columns, n0, images, like, acc))


@kernel
def _fold_part(
    part, parts, table, scalars, columns, bias, z, dx, rows, n0, images, c0, channels, by_pixel, code, acc, bias_like,
    z_like, out,
):  # fmt: skip
    """Rows (n, c, d, h) of dx, channel-major; or (n, d, h) with all channels, pixel-major. One row of sums a part."""
    t, f = pointer(table, 0), pointer(scalars, 0.0)
    src, dst, add = pointer(columns, acc), pointer(dx, out), pointer(z, z_like)
    b, bias_step, parameter = pointer(bias, bias_like), int(f[3]), f[2]
    width = t[IN_W]
    inner = t[C] if by_pixel else 1
    row = pointer(rows, acc)
    row_at = part * width * inner
    outer = 1 if by_pixel else channels
    out_pixels = t[OUT_D] * t[OUT_H] * t[OUT_W]
    taps = t[T] * t[R] * t[S]
    alpha, beta = cast(f[0], acc), cast(f[1], acc)
    lines = images * outer * t[IN_D] * t[IN_H]
    for line in range(lines * part // parts, lines * (part + 1) // parts):
        h, rest = line % t[IN_H], line // t[IN_H]
        d, rest = rest % t[IN_D], rest // t[IN_D]
        c, i = rest % outer, rest // outer
        for k in range(row_at, row_at + width * inner):
            row[k] = cast(0, acc)
        for tap in range(t[T]):
            od = d + t[PAD_D] - tap * t[DIL_D]
            if od < 0 or od % t[STEP_D] != 0 or od // t[STEP_D] >= t[OUT_D]:
                continue
            for r in range(t[R]):
                oh = h + t[PAD_H] - r * t[DIL_H]
                if oh < 0 or oh % t[STEP_H] != 0 or oh // t[STEP_H] >= t[OUT_H]:
                    continue
                pixel = (od // t[STEP_D] * t[OUT_H] + oh // t[STEP_H]) * t[OUT_W]
                for s in range(t[S]):
                    step = t[STEP_W]
                    shift = s * t[DIL_W] - t[PAD_W]
                    first = min(max(-(shift // step), 0), t[OUT_W])
                    last = max(min((width - 1 - shift) // step + 1, t[OUT_W]), first)
                    j = (tap * t[R] + r) * t[S] + s
                    if by_pixel:
                        for q in range(first, last):
                            from_ = ((i * out_pixels + pixel + q) * taps + j) * inner
                            to = row_at + (q * step + shift) * inner
                            for k in range(inner):
                                row[to + k] += src[from_ + k]
                    else:
                        from_ = ((i * channels + c) * taps + j) * out_pixels + pixel
                        to = row_at + shift
                        if step == 1:
                            for q in range(first, last):
                                row[to + q] += src[from_ + q]
                        else:
                            for q in range(first, last):
                                row[to + q * step] += src[from_ + q]
        at = (n0 + i) * t[X_N] + (c0 + c) * t[X_C] + d * t[X_D] + h * t[X_H]
        z_at = (n0 + i) * t[Z_N] + (c0 + c) * t[Z_C] + d * t[Z_D] + h * t[Z_H]
        for w in range(width):
            for k in range(inner):
                value = alpha * row[row_at + w * inner + k]
                if t[HAS_Z]:
                    value += beta * cast(load(add, z_at + w * t[Z_W] + k * t[Z_C]), acc)
                if bias != 0:
                    value += cast(load(b, (c0 + c + k) * bias_step), acc)
                if code != 0:
                    value = activate(code, parameter, value)
                store(dst, at + w * t[X_W] + k * t[X_C], value)


@kernel
def fold(
    threads, table, scalars, columns, bias, z, dx, rows, n0, images, c0, channels, by_pixel, code, acc, bias_like,
    z_like, out,
):  # fmt: skip
    """``dx = act(alpha * folded columns + beta * z + bias)`` for some images and channels.

    `scalars` are alpha, beta, the activation's parameter and the bias's stride; `rows` is scratch, see `fold_rows`.
    """
    t = pointer(table, 0)
    lines = images * t[IN_D] * t[IN_H] * (1 if by_pixel else channels)
    arguments = (
        table, scalars, columns, bias, z, dx, rows, n0, images, c0, channels, by_pixel, code, acc, bias_like, z_like,
        out,
    )  # fmt: skip
    launch(_fold_part, min(lines, 4 * threads), threads, arguments)


def fold_rows(geometry, threads: int, by_pixel: bool) -> int:
    """Elements of the scratch rows that `fold` needs."""
    return 4 * threads * geometry.in_size[2] * (geometry.C if by_pixel else 1)


@kernel
def _finish_part(part, parts, table, scalars, source, bias, z, y, code, like, bias_like, z_like, out):
    """The table holds five sizes, the last one innermost, then five strides each of source, bias, z and y; then 1 if z
    is there.
    """
    t, f = pointer(table, 0), pointer(scalars, 0.0)
    src, b, add, dst = pointer(source, like), pointer(bias, bias_like), pointer(z, z_like), pointer(y, out)
    alpha, beta, parameter = cast(f[0], like), cast(f[1], like), f[2]
    lines = t[0] * t[1] * t[2] * t[3]
    count, js, jb, jz, jy = t[4], t[9], t[14], t[19], t[24]
    plain = js == 1 and jy == 1 and jb == 0 and code <= 1 and t[25] == 0
    for line in range(lines * part // parts, lines * (part + 1) // parts):
        s_at, b_at, z_at, y_at, rest = 0, 0, 0, 0, line
        for axis in range(3, -1, -1):
            i, rest = rest % t[axis], rest // t[axis]
            s_at += i * t[5 + axis]
            b_at += i * t[10 + axis]
            z_at += i * t[15 + axis]
            y_at += i * t[20 + axis]
        if plain:
            shift = cast(load(b, b_at), like) if bias != 0 else cast(0, like)
            if code == 1:
                for j in range(count):
                    value = alpha * src[s_at + j] + shift
                    store(dst, y_at + j, cast(0, like) if value <= 0 else value)
            else:
                for j in range(count):
                    store(dst, y_at + j, alpha * src[s_at + j] + shift)
            continue
        for j in range(count):
            value = alpha * src[s_at + j * js]
            if t[25]:
                value += beta * cast(load(add, z_at + j * jz), like)
            if bias != 0:
                value += cast(load(b, b_at + j * jb), like)
            store(dst, y_at + j * jy, activate(code, parameter, value))


@kernel
def finish(threads, table, scalars, source, bias, z, y, code, like, bias_like, z_like, out):
    """``y = act(alpha * source + beta * z + bias)`` for arrays of five axes with any strides."""
    t = pointer(table, 0)
    lines = t[0] * t[1] * t[2] * t[3]
    arguments = (table, scalars, source, bias, z, y, code, like, bias_like, z_like, out)
    launch(_finish_part, min(lines, 4 * threads), threads, arguments)
