"""Copies of a tensor on a GPU that pad, turn around, fold, convert and finish: one kernel of five axes.

A position of the result sums the positions of the source that stand for it, on each spatial axis on its own: one for a
padded or a turned copy, up to `TERMS` for the gradient of padding, found by arithmetic. The sum passes through the
epilogue ``act(alpha * scale * sum + beta * z + bias)`` and is stored in the result's type.

Cost: one read of the source (of the padded gradient: each element once) and one write of the result, coalesced along
the result's innermost axis. The modes are those of `lucidnn.engines._rewrite.MODES`.
"""

import triton
import triton.language as tl

from .epilogue import finish, stored


@triton.jit
def _position(i, term, size, before, total, MODE: tl.constexpr, ADJOINT: tl.constexpr):
    """The source position that is number `term` for position `i` of the result, and whether there is one.

    `size` is the length of the axis without padding, `total` with it, `before` the padding in front.
    """
    if MODE == 0:  # as it is
        place = i
        there = term == 0
    elif MODE == 1:  # turned around
        place = size - 1 - i
        there = term == 0
    elif not ADJOINT:
        place = i - before
        there = term == 0
        if MODE == 2:  # reflect
            place = tl.where(place < 0, -place, place)
            place = tl.where(place >= size, 2 * (size - 1) - place, place)
        elif MODE == 3:  # replicate
            place = tl.minimum(tl.maximum(place, 0), size - 1)
        else:  # circular
            place = tl.where(place < 0, place + size, tl.where(place >= size, place - size, place))
    elif MODE == 3:  # replicate: the first and the last point stand for all that lies outside
        place = tl.where(i == 0, 0, before + i) + term
        there = place < tl.where(i == size - 1, total, before + i + 1)
    else:
        if MODE == 2:
            left = before - i
            right = before + 2 * (size - 1) - i
            ok_left = (i >= 1) & (left >= 0)
            ok_right = (i <= size - 2) & (right < total)
        else:
            left = before + i - size
            right = before + i + size
            ok_left = left >= 0
            ok_right = right < total
        place = tl.where(term == 0, before + i, tl.where(term == 1, left, right))
        there = (term == 0) | ((term == 1) & ok_left) | ((term == 2) & ok_right)
    # of one shape on every road: `there` may be the same for all positions
    return place, there & (i >= 0)


@triton.jit
def rewrite(
    src, scale, bias, z, dst, alpha, beta, parameter, count, N, C, D, H, W,
    size_d, size_h, size_w, before_d, before_h, before_w, total_d, total_h, total_w,
    src_n, src_c, src_d, src_h, src_w, z_n, z_c, z_d, z_h, z_w, dst_n, dst_c, dst_d, dst_h, dst_w,
    scale_step, bias_step,
    TERMS_D: tl.constexpr, TERMS_H: tl.constexpr, TERMS_W: tl.constexpr,
    MODE_D: tl.constexpr, MODE_H: tl.constexpr, MODE_W: tl.constexpr,
    ADJOINT: tl.constexpr, BY_PIXEL: tl.constexpr, ACT: tl.constexpr, DOUBLE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    ok = i < count
    if BY_PIXEL:
        c = i % C
        rest = i // C
        w = rest % W
        rest = rest // W
        h = rest % H
        rest = rest // H
        d = rest % D
        n = rest // D
    else:
        w = i % W
        rest = i // W
        h = rest % H
        rest = rest // H
        d = rest % D
        rest = rest // D
        c = rest % C
        n = rest // C
    from_ = src + n * src_n + c * src_c
    total = tl.zeros((BLOCK,), dtype=tl.float64 if DOUBLE else tl.float32)
    for t in range(TERMS_D * TERMS_H * TERMS_W):
        at_w, ok_w = _position(w, t % TERMS_W, size_w, before_w, total_w, MODE_W, ADJOINT)
        at_h, ok_h = _position(h, t // TERMS_W % TERMS_H, size_h, before_h, total_h, MODE_H, ADJOINT)
        at_d, ok_d = _position(d, t // (TERMS_W * TERMS_H), size_d, before_d, total_d, MODE_D, ADJOINT)
        inside = ok & ok_w & ok_h & ok_d
        value = tl.load(from_ + at_d * src_d + at_h * src_h + at_w * src_w, mask=inside, other=0.0)
        total += value.to(total.dtype)
    if scale is not None:
        total = total * tl.load(scale + c * scale_step, mask=ok, other=0.0).to(total.dtype)
    z_tile = None
    if z is not None:
        z_tile = tl.load(z + n * z_n + c * z_c + d * z_d + h * z_h + w * z_w, mask=ok, other=0.0)
    bias_tile = None
    if bias is not None:
        bias_tile = tl.load(bias + c * bias_step, mask=ok, other=0.0)
    result = finish(total, z_tile, bias_tile, alpha, beta, parameter, ACT)
    places = dst + n * dst_n + c * dst_c + d * dst_d + h * dst_h + w * dst_w
    tl.store(places, stored(result, dst.dtype.element_ty), mask=ok)
