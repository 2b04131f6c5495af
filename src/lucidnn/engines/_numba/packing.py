"""Moves images and filters between tensors of any layout and the dense blocks that the register tile reads and writes.

A **slab** is a box of one image's pixels, padding included, with the channels of a pixel side by side: ``slab[depth,
row, column, channel]`` in the accumulation type. ``pack_slab`` fills it from a tensor with any strides; outside the
image it writes zeros, so that nothing after it tests for an edge. A **panel** is the result for some pixels and one
register tile's width of filters, ``panel[pixel, filter]``; ``finish_panel`` applies the epilogue in place and
``store_panel`` writes it to a tensor with any strides. **Packed filters** are ``[filter /
width][tap][channel][width]``.

Where the channels are not innermost in the tensor, squares of one vector's length a side are transposed in registers
(18 ns for 16 x 16 floats, measured), through a small staging buffer where the type has to be converted too.
"""

from __future__ import annotations

import functools

from numba.core import types
from numba.extending import overload

from . import vector, vector_math
from .epilogue import activate
from .jit import jitable, separate
from .memory import address, cast, load, pointer, same_type, size_of, store
from .microkernel import lanes, transpose
from .stack import stack

COLUMNS = 64  # pixels that are staged at once; the staging buffer has one row of them for each lane
_LANES_32, _LANES_64 = lanes(4), lanes(8)
_MOST_TAPS = 27  # of a filter that is turned in a piece of stack: 3 x 3 x 3
_ROWS = 2 * lanes(4) ** 2 * _MOST_TAPS


def staging_elements() -> int:
    """Elements of the staging buffer that `pack_slab` and `store_panel` need: rows of pixels and one square."""
    return _LANES_32 * (COLUMNS + _LANES_32)


@jitable
def _zero(dst, start, stop, like):
    for i in range(start, stop):
        dst[i] = cast(0, like)


@separate
def pack_row(src, base, sc, sw, channels, count, dst_address, pitch, stage_address, like, acc):
    """Write `count` pixels of `channels` channels: ``dst[w * pitch + c] = src[base + c * sc + w * sw]``."""
    dst, stage = pointer(dst_address, acc), pointer(stage_address, acc)
    size = size_of(acc)
    side = _LANES_32 if size == 4 else _LANES_64
    x = pointer(src, like)
    if sc == 1 or channels == 1:
        if sw == channels and pitch == channels:
            for i in range(count * channels):
                dst[i] = cast(load(x, base + i), acc)
        else:
            for w in range(count):
                for c in range(channels):
                    dst[w * pitch + c] = cast(load(x, base + w * sw + c), acc)
        return
    whole = channels // side * side if count >= 4 else 0
    square = stage_address + side * COLUMNS * size
    direct = sw == 1 and same_type(like, acc)
    for c0 in range(0, whole, side):
        for w0 in range(0, count, COLUMNS):
            width = min(COLUMNS, count - w0)
            if not direct:
                for i in range(side):
                    at = base + (c0 + i) * sc + w0 * sw
                    if sw == 1:
                        for w in range(width):
                            stage[i * COLUMNS + w] = cast(load(x, at + w), acc)
                    else:
                        for w in range(width):
                            stage[i * COLUMNS + w] = cast(load(x, at + w * sw), acc)
            for j in range(0, width, side):
                to = dst_address + ((w0 + j) * pitch + c0) * size
                valid = min(side, width - j)
                if direct and valid < side:
                    # A vector read of the last columns would pass the row's end, perhaps the tensor's.
                    own = pointer(src, acc)
                    for i in range(side):
                        v = vector.read_some(own, base + (c0 + i) * sc + w0 + j, 0, valid)
                        vector.write(stage, i * COLUMNS + j, 1, v, valid)
                at, row = stage_address + j * size, COLUMNS
                if direct and valid == side:
                    at, row = src + (base + c0 * sc + w0 + j) * size, sc
                if valid == side:
                    transpose(acc, at, row, to, pitch)
                else:
                    transpose(acc, at, row, square, side)
                    part = pointer(square, acc)
                    for w in range(valid):
                        for i in range(side):
                            dst[(w0 + j + w) * pitch + c0 + i] = part[w * side + i]
    if channels == 3:
        for w in range(count):
            at = base + w * sw
            dst[w * pitch] = cast(load(x, at), acc)
            dst[w * pitch + 1] = cast(load(x, at + sc), acc)
            dst[w * pitch + 2] = cast(load(x, at + 2 * sc), acc)
    elif sw == 1:
        for c in range(whole, channels):
            at = base + c * sc
            for w in range(count):
                dst[w * pitch + c] = cast(load(x, at + w), acc)
    else:
        for c in range(whole, channels):
            at = base + c * sc
            for w in range(count):
                dst[w * pitch + c] = cast(load(x, at + w * sw), acc)


@separate
def pack_spaced_slab(src, base, sizes, strides, origin, counts, channels, pitch, slab, stage, like, acc):
    """Fill a slab with pixels ``origin .. origin + counts`` of an image; zeros where that is outside.

    Parameters
    ----------
    src, slab, stage : int
        Addresses of the tensor, the slab and the staging buffer.
    base : int
        Element offset of the image's (and group's) first pixel.
    sizes, origin, counts : (int, int, int)
        D, H, W of the image; of the slab's first pixel in it, which may be negative; of the slab.
    channels, pitch : int
        Channels to copy, and the slab's elements from pixel to pixel, at least as many.
    strides : (int, int, int, int)
        C, D, H, W of the tensor, in elements.
    like, acc
        Tokens of the tensor's type and of the accumulation type.
    """
    size = size_of(acc)
    out = pointer(slab, acc)
    first = min(max(0, -origin[2]), counts[2])
    last = max(min(counts[2], sizes[2] - origin[2]), first)
    row = 0
    for i in range(counts[0]):
        d = origin[0] + i
        for j in range(counts[1]):
            h = origin[1] + j
            start = row * pitch
            if d < 0 or d >= sizes[0] or h < 0 or h >= sizes[1]:
                _zero(out, start, start + counts[2] * pitch, acc)
            else:
                _zero(out, start, start + first * pitch, acc)
                _zero(out, start + last * pitch, start + counts[2] * pitch, acc)
                at = base + d * strides[1] + h * strides[2] + (origin[2] + first) * strides[3]
                to = slab + (start + first * pitch) * size
                pack_row(src, at, strides[0], strides[3], channels, last - first, to, pitch, stage, like, acc)
            row += counts[2]


@separate
def pack_slab(src, base, sizes, strides, origin, counts, channels, slab, stage, like, acc):
    """`pack_spaced_slab` with the pixels side by side."""
    pack_spaced_slab(src, base, sizes, strides, origin, counts, channels, channels, slab, stage, like, acc)


@separate
def pack_filters(part, parts, w, out, sizes, strides, panels, width, taps, like, acc):
    """Pack one group's filters into `panels` panels of `width` filters, zero beyond the last filter.

    `sizes` is (filters, channels, channels of a block, taps) and `strides` those of filters and channels in `w`. Within
    a panel the channels come in blocks; within a block tap by tap, channel by channel. `taps` is the address of the
    taps' element offsets in `w`. Part `part` does every `parts`-th panel.
    """
    k_count, c_count, block, count = sizes
    k_stride, c_stride = strides
    src, dst, offsets = pointer(w, like), pointer(out, acc), pointer(taps, 0)
    size, side = size_of(acc), _LANES_32 if size_of(acc) == 4 else _LANES_64
    rows = stack(_ROWS, acc)
    in_order = c_stride == count and count <= _MOST_TAPS
    for t in range(count):
        in_order = in_order and offsets[t] == t
    for panel in range(part, panels, parts):
        at = panel * count * c_count * width
        k0 = panel * width
        valid = min(width, k_count - k0)
        direct = same_type(like, acc) and valid == width and k_stride != 1
        for c0 in range(0, c_count, block):
            run = min(block, c_count - c0)
            done = 0
            if direct and c_stride == 1:
                # Channels are neighbours: squares of filters by channels, turned in registers.
                done = run // side * side
                for t in range(count):
                    for c in range(0, done, side):
                        for k in range(0, width, side):
                            from_ = w + ((k0 + k) * k_stride + c0 + c + offsets[t]) * size
                            transpose(acc, from_, k_stride, out + (at + (t * run + c) * width + k) * size, width)
            elif direct and in_order:
                # Taps are neighbours, then channels: squares of filters by (channel, tap), then dealt out.
                done = run // side * side
                for c in range(0, done, side):
                    for i in range(0, side * count, side):
                        from_ = w + (k0 * k_stride + (c0 + c) * count + i) * size
                        for k in range(0, width, side):
                            to = address(rows) + (i * width + k) * size
                            transpose(acc, from_ + k * k_stride * size, k_stride, to, width)
                    for t in range(count):
                        to = at + (t * run + c) * width
                        for i in range(side):
                            for j in range(width):
                                dst[to + i * width + j] = rows[(i * count + t) * width + j]
            # Taps within channels: the filters' cache lines are read once, whichever order they are written in.
            for c in range(done, run):
                for t in range(count):
                    from_ = k0 * k_stride + (c0 + c) * c_stride + offsets[t]
                    to = at + (t * run + c) * width
                    if k_stride == 1:
                        for j in range(valid):
                            dst[to + j] = cast(load(src, from_ + j), acc)
                    else:
                        for j in range(valid):
                            dst[to + j] = cast(load(src, from_ + j * k_stride), acc)
                    for j in range(valid, width):
                        dst[to + j] = cast(0, acc)
            at += run * count * width


@separate
def unpack_filters(sums, channels, c0, count, width, w, base, strides, taps, tap_count, acc):
    """Write `count` channels of one whole panel ``sums[tap, channel, width]`` to filters of the same type.

    `strides` is (filter, channel) and `taps` the address of the taps' offsets. Gives False, and writes nothing, where
    neither channels nor (channel, tap) are neighbours in `w`, or `count` is no multiple of a vector's length.
    """
    size, side = size_of(acc), _LANES_32 if size_of(acc) == 4 else _LANES_64
    offsets, src = pointer(taps, 0), pointer(sums, acc)
    k_stride, c_stride = strides
    in_order = c_stride == tap_count and tap_count <= _MOST_TAPS
    for t in range(tap_count):
        in_order = in_order and offsets[t] == t
    if count % side != 0 or not (in_order or c_stride == 1):
        return False
    rows = stack(_ROWS, acc)
    for c in range(c0, c0 + count, side):
        if in_order:
            for i in range(side):
                for t in range(tap_count):
                    for j in range(width):
                        rows[(i * tap_count + t) * width + j] = src[(t * channels + c + i) * width + j]
            for i in range(0, side * tap_count, side):
                for k in range(0, width, side):
                    to = w + (base + k * k_stride + c * tap_count + i) * size
                    transpose(acc, address(rows) + (i * width + k) * size, width, to, k_stride)
        else:
            for t in range(tap_count):
                for k in range(0, width, side):
                    to = w + (base + k * k_stride + c + offsets[t]) * size
                    transpose(acc, sums + ((t * channels + c) * width + k) * size, width, to, k_stride)
    return True


@separate
def zero_panel(panel, count, acc):
    """Zero `count` values."""
    _zero(pointer(panel, acc), 0, count, acc)


@separate
def finish_panel(panel, pixels, width, alpha, bias, acc):
    """In place: ``alpha * panel + bias``; `bias` is the address of `width` values or 0."""
    t, scale = pointer(panel, acc), cast(alpha, acc)
    if bias != 0:
        b = pointer(bias, acc)
        for i in range(pixels):
            for j in range(width):
                t[i * width + j] = scale * t[i * width + j] + b[j]
    elif alpha != 1:
        for i in range(pixels * width):
            t[i] *= scale


def _activate_any(code, parameter, t, count):
    """Any activation, in place: by vectors for float32, value by value for float64. Kernels only."""
    raise NotImplementedError("_activate_any works inside a kernel only")


@overload(_activate_any)
def _activate_any_impl(code, parameter, t, count):
    if t.dtype == types.float32:

        def impl(code, parameter, t, count):
            if code in vector_math.CODES:
                for i in range(0, count, vector.LANES):  # the panel goes on past its last pixel
                    v = vector_math.activate(code, parameter, vector.read_all(t, i))
                    vector.write(t, i, 1, v, vector.LANES)
            else:
                for i in range(count):
                    t[i] = activate(code, parameter, t[i])
    else:

        def impl(code, parameter, t, count):
            for i in range(count):
                t[i] = activate(code, parameter, t[i])

    return impl


@functools.partial(separate, exact=True)
def activate_panel(panel, count, code, parameter, acc):
    """In place: the activation of the first `count` values of a panel."""
    t = pointer(panel, acc)
    if code == 1:
        for i in range(count):
            t[i] = cast(0, acc) if t[i] <= 0 else t[i]
    elif code != 0:
        _activate_any(code, parameter, t, count)


@separate
def add_panel(panel, width, rows, columns, z, base, strides, valid, beta, like, acc):
    """``panel += beta * z`` for the pixels and filters of `store_panel`."""
    t, src, scale = pointer(panel, acc), pointer(z, like), cast(beta, acc)
    sk, sp, sq = strides
    for p in range(rows):
        for q in range(columns):
            i = (p * columns + q) * width
            at = base + p * sp + q * sq
            for k in range(valid):
                t[i + k] += scale * cast(load(src, at + k * sk), acc)


@separate
def store_panel(panel, width, rows, columns, y, base, strides, valid, stage_address, like, acc):
    """``y[base + k * sk + p * sp + q * sq] = panel[p * columns + q, k]`` for `valid` filters.

    `strides` is (sk, sp, sq). The panel must have one vector's length of readable pixels after its last.
    """
    sk, sp, sq = strides
    t, dst, stage = pointer(panel, acc), pointer(y, like), pointer(stage_address, acc)
    size = size_of(acc)
    side = _LANES_32 if size == 4 else _LANES_64
    if sq == 1 and sp == columns:
        rows, columns = 1, rows * columns  # the rows follow each other in y as they do in the panel
    if sk == 1:
        for p in range(rows):
            for q in range(columns):
                i, at = (p * columns + q) * width, base + p * sp + q * sq
                for k in range(valid):
                    store(dst, at + k, t[i + k])
        return
    direct = sq == 1 and same_type(like, acc)
    for p in range(rows):
        for k0 in range(0, valid, side):
            ks = min(side, valid - k0)
            for q0 in range(0, columns, COLUMNS):
                qs = min(COLUMNS, columns - q0)
                at = base + k0 * sk + p * sp + q0 * sq
                done = 0
                from_ = panel + ((p * columns + q0) * width + k0) * size
                if direct and ks == side:
                    done = qs // side * side
                    for j in range(0, done, side):
                        transpose(acc, from_ + j * width * size, width, y + (at + j) * size, sk)
                for j in range(done, qs, side):
                    transpose(acc, from_ + j * width * size, width, stage_address + j * size, COLUMNS)
                if sq == 1:
                    for k in range(ks):
                        for q in range(done, qs):
                            store(dst, at + k * sk + q, stage[k * COLUMNS + q])
                else:
                    for k in range(ks):
                        for q in range(done, qs):
                            store(dst, at + k * sk + q * sq, stage[k * COLUMNS + q])
