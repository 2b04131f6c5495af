"""Planes of one channel in scratch memory, for the depthwise convolutions: copied in with padding, by residue classes.

A **plane** holds the pixels of one channel of one image, padding included, in the accumulation type. Where a
convolution steps by more than one pixel, rows and columns are dealt into residue classes, a plane of its own each, so
that the pixels which neighbouring outputs read are neighbours again. The padding is zeroed once for a task; every copy
writes the same pixels over those of the channel before.
"""

from __future__ import annotations

from . import vector
from .jit import kernel
from .memory import cast, load, pointer

(STEP_H, STEP_W, ROWS, ROW_CLASS, ROW_START, PITCH, PLANE, FIRST) = range(8)


def head(axes, slack_rows: int) -> list[int]:
    """The integers that `copy_plane` reads, for the last two axes of a `lucidnn.engines._numba.blocks.Axis` list.

    Steps; rows to copy, class and place of the first; elements of a row and of a plane; then for every class of columns
    its first column, that one's place, and how many there are. Divisions are slow: the kernel makes none for a row.
    """
    h, w = axes[-2:]
    spans = [(a.points - 1) * a.step + a.reach for a in (h, w)]
    rows, pitch = (-(-span // a.step) for span, a in zip(spans, (h, w), strict=True))
    classes = []
    for c in range(w.step):
        first = (c - w.low) % w.step
        start = (first + w.low) // w.step
        classes += [first, start, max(0, min(-(-(w.size - first) // w.step), pitch - start))]
    copied = max(0, min(h.size, rows * h.step - h.low))
    return [h.step, w.step, copied, h.low % h.step, h.low // h.step, pitch, (rows + slack_rows) * pitch, *classes]


@kernel
def zero(start, count, like):
    """Zero `count` elements."""
    p = pointer(start, like)
    for i in range(count):
        p[i] = cast(0, like)


@kernel
def copy_plane(t, src, base, row_stride, planes, like, acc):
    """Copy one channel's image into its planes; `t` points to `head`, and columns are neighbours in `src`."""
    x, out = pointer(src, like), pointer(planes, acc)
    pitch, step, plane = t[PITCH], t[STEP_W], t[PLANE]
    for c in range(step):
        first, start, count = t[FIRST + 3 * c], t[FIRST + 3 * c + 1], t[FIRST + 3 * c + 2]
        from_ = base + first
        part, to = t[ROW_CLASS], t[ROW_START] * pitch + start
        for _ in range(t[ROWS]):
            place = (part * step + c) * plane + to
            if step == 1:
                for q in range(0, count - vector.LANES + 1, vector.LANES):
                    vector.write(out, place + q, 1, vector.read_all(x, from_ + q), vector.LANES)
                left = count % vector.LANES
                if left:
                    q = count - left
                    vector.write(out, place + q, 1, vector.read_some(x, from_ + q, 0, left), left)
            elif step == 2:
                for q in range(0, count, vector.LANES):
                    left = min(count - q, vector.LANES)
                    v = vector.read_some_pairs(x, from_ + 2 * q, 0, left)
                    vector.write(out, place + q, 1, v, left)
            else:
                for q in range(count):
                    out[place + q] = cast(load(x, from_ + q * step), acc)
            from_ += row_stride
            part += 1
            if part == t[STEP_H]:
                part = 0
                to += pitch
