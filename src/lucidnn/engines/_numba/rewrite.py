"""Copies of a tensor on a CPU that pad, turn around, fold, convert and finish: one kernel of five axes.

Every spatial position of the result lists the positions of the source that it sums, axis by axis: one for a padded or a
turned copy, several for the gradient of padding. The tables of these lists come from `lucidnn.engines._rewrite`. What
is summed then passes through the epilogue ``act(alpha * scale * sum + beta * z + bias)`` and is stored in the result's
type. Where positions list one source each, rows are copied in runs.
"""

from __future__ import annotations

import numpy as np

from .epilogue import activate
from .jit import kernel
from .memory import cast, load, pointer, store
from .pool import launch

# The integers at the head of the table: sizes of the result, then strides of result, source and z, each (N, C, D, H,
# W); then these, and for each spatial axis where its starts and its list lie in the table.
(
    SCALE_STEP, BIAS_STEP, HAS_Z, BY_PIXEL, BARE, SINGLE, RUN_FIRST, RUN_LAST, RUN_SHIFT,
    START_D, LIST_D, START_H, LIST_H, START_W, LIST_W,
) = range(20, 35)  # fmt: skip
HEAD = 35


@kernel
def _rewrite_part(
    part, parts, table, scalars, src, scale, bias, z, dst, code, like, acc, bias_like, z_like, out
):  # fmt: skip
    """Lines (n, d, h, w) with all channels side by side, or (n, c, d, h) with a row of pixels."""
    t, f = pointer(table, 0), pointer(scalars, 0.0)
    x, y, add, b = pointer(src, like), pointer(dst, out), pointer(z, z_like), pointer(bias, bias_like)
    factors = pointer(scale, np.float32(0))
    alpha, beta = cast(f[0], acc), cast(f[1], acc)
    by_pixel = t[BY_PIXEL]
    count = t[1] if by_pixel else t[4]
    outer = t[4] if by_pixel else t[1]
    lines = t[0] * t[2] * t[3] * outer
    x_step, y_step = t[11 if by_pixel else 14], t[6 if by_pixel else 9]
    for line in range(lines * part // parts, lines * (part + 1) // parts):
        if by_pixel:
            w, rest = line % t[4], line // t[4]
            h, rest = rest % t[3], rest // t[3]
            d, n, c = rest % t[2], rest // t[2], 0
        else:
            h, rest = line % t[3], line // t[3]
            d, rest = rest % t[2], rest // t[2]
            c, n, w = rest % t[1], rest // t[1], 0
        y_at = n * t[5] + c * t[6] + d * t[7] + h * t[8] + w * t[9]
        z_at = n * t[15] + c * t[16] + d * t[17] + h * t[18] + w * t[19]
        x_at = n * t[10] + c * t[11]
        first, last = 0, 0
        if t[SINGLE] and t[BARE]:
            from_ = x_at + t[t[LIST_D] + d] * t[12] + t[t[LIST_H] + h] * t[13]
            if by_pixel:
                from_ += t[t[LIST_W] + w] * t[14]
                last = count
            else:
                first, last = t[RUN_FIRST], t[RUN_LAST]
                from_ += t[RUN_SHIFT] * t[14]
            if x_step == 1 and y_step == 1:
                for i in range(first, last):
                    store(y, y_at + i, cast(load(x, from_ + i), acc))
            else:
                for i in range(first, last):
                    store(y, y_at + i * y_step, cast(load(x, from_ + i * x_step), acc))
        for i in range(count):
            if first <= i < last:
                continue
            at = w if by_pixel else i
            total = cast(0, acc)
            for j in range(t[t[START_D] + d], t[t[START_D] + d + 1]):
                for k in range(t[t[START_H] + h], t[t[START_H] + h + 1]):
                    from_ = x_at + t[t[LIST_D] + j] * t[12] + t[t[LIST_H] + k] * t[13]
                    if by_pixel:
                        from_ += i * t[11]
                    for m in range(t[t[START_W] + at], t[t[START_W] + at + 1]):
                        total += cast(load(x, from_ + t[t[LIST_W] + m] * t[14]), acc)
            channel = i if by_pixel else c
            if not t[BARE]:
                total *= alpha
                if scale != 0:
                    total *= cast(factors[channel * t[SCALE_STEP]], acc)
                if t[HAS_Z]:
                    total += beta * cast(load(add, z_at + i * (t[16] if by_pixel else t[19])), acc)
                if bias != 0:
                    total += cast(load(b, channel * t[BIAS_STEP]), acc)
                total = activate(code, f[2], total)
            store(y, y_at + i * y_step, total)


@kernel
def rewrite(threads, table, scalars, src, scale, bias, z, dst, code, like, acc, bias_like, z_like, out):
    """Fill `dst`; `scalars` are alpha, beta and the activation's parameter; scale, bias and z are 0 where absent."""
    t = pointer(table, 0)
    lines = t[0] * t[2] * t[3] * (t[4] if t[BY_PIXEL] else t[1])
    arguments = (table, scalars, src, scale, bias, z, dst, code, like, acc, bias_like, z_like, out)
    launch(_rewrite_part, min(lines, 4 * threads), threads, arguments)
