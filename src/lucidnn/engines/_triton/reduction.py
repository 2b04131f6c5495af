"""The reduction kernel for GPUs: any axes, any strides, one pass over a part of the reduced points.

A tile has three sides: A over the kept loops, B over the reduced ones, C (the lanes) over the one loop that is
innermost in memory, whichever kind it is. Each element of the tile keeps a result of its own while the reduced points
pass by, so that nothing is exchanged between threads until the end; then the tile is combined along B, and along C
where the lanes are reduced. A program takes one part of the reduced points: where several do, each leaves its result in
the workspace, and a second launch of the same kernel combines those in a fixed order.

What is done to a value before (`BEFORE`), how two are combined (`COMBINE`) and whether a root follows are constants.
With an index the place goes along with the value; of equal values the lower place wins, so the order does not matter.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .epilogue import convert
from .loops import indices, offset

# BEFORE: nothing, the magnitude, the square, 1 in place of 0, whether it or its magnitude is a given value, whether 0
PLAIN, MAGNITUDE, SQUARE, ZERO_AS_ONE, EQUAL, IS_ZERO, EQUAL_MAGNITUDE = range(7)
ADD, MUL, MIN, MAX = range(4)  # COMBINE
NOTHING = (0.0, 1.0, float("inf"), float("-inf"))  # that leaves a value as it is, by COMBINE


def absent(before: int, combine: int) -> float:
    """What a point that is not there reads as: it leaves a value as it is, once it has been through BEFORE.

    Examples
    --------
    >>> absent(PLAIN, MIN), absent(ZERO_AS_ONE, MUL), absent(MAGNITUDE, MAX)
    (inf, 1.0, 0.0)
    """
    return NOTHING[combine] if before == PLAIN else 1.0 if before in (ZERO_AS_ONE, IS_ZERO) else 0.0


@triton.jit
def _add(a, b):
    return a + b


@triton.jit
def _mul(a, b):
    return a * b


@triton.jit
def _min(a, b):
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _max(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _visit(v, number, best, where, LAST: tl.constexpr, COMBINE: tl.constexpr, ORDERED: tl.constexpr):
    """Each element's best value so far, and its place: NaN is the best, of equals the lowest place.

    With `ORDERED` places come in rising order, so that what is there already stays.
    """
    if COMBINE == 2:
        better = (v < best) | (v != v)
    else:
        better = (v > best) | (v != v)
    take = (better & (best == best)) | (where == LAST)
    if not ORDERED:
        equal = (v == best) | ((v != v) & (best != best))
        take = take | (equal & (number < where))
    return tl.where(take, v, best), tl.where(take, number, where)


@triton.jit
def _combined(v, AXIS: tl.constexpr, COMBINE: tl.constexpr):
    if COMBINE == 0:
        r = tl.reduce(v, AXIS, _add)
    elif COMBINE == 1:
        r = tl.reduce(v, AXIS, _mul)
    elif COMBINE == 2:
        r = tl.reduce(v, AXIS, _min)
    else:
        r = tl.reduce(v, AXIS, _max)
    return r


@triton.jit
def reduce_axes(
    x, places, ref, z, out, index, scale, beta, KEPT, REDUCED, LANES, STEPS, SPLITS, SHARE,
    K0, K1, K2, k0_mul, k0_shift, k1_mul, k1_shift, k2_mul, k2_shift,
    R0, R1, R2, r0_mul, r0_shift, r1_mul, r1_shift, r2_mul, r2_shift,
    x_lane_stride, xk0_stride, xk1_stride, xk2_stride, xk3_stride, xr0_stride, xr1_stride, xr2_stride, xr3_stride,
    n_lane_stride, nr0_stride, nr1_stride, nr2_stride, nr3_stride,
    ref_lane_stride, ref0_stride, ref1_stride, ref2_stride, ref3_stride,
    z_lane_stride, z0_stride, z1_stride, z2_stride, z3_stride,
    out_lane_stride, out0_stride, out1_stride, out2_stride, out3_stride, out_split_stride,
    index_lane_stride, index0_stride, index1_stride, index2_stride, index3_stride,
    KEPT_LOOPS: tl.constexpr, REDUCED_LOOPS: tl.constexpr, LANES_KEPT: tl.constexpr,
    BEFORE: tl.constexpr, COMBINE: tl.constexpr, ROOT: tl.constexpr, FLOAT64: tl.constexpr, WIDE: tl.constexpr,
    NOTHING: tl.constexpr, ABSENT: tl.constexpr, ONCE: tl.constexpr, ORDERED: tl.constexpr, STAGES: tl.constexpr,
    BLOCK_A: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    FLOAT: tl.constexpr = tl.float64 if FLOAT64 else tl.float32
    lane_blocks = tl.cdiv(LANES, BLOCK_C)
    split = tl.program_id(0) % SPLITS
    block = tl.program_id(0) // SPLITS
    if LANES_KEPT:
        first_lane = block % lane_blocks * BLOCK_C
        block = block // lane_blocks
    else:
        first_lane = block * 0
    if WIDE:
        block = block.to(tl.int64)
        first_lane = first_lane.to(tl.int64)
    kept = block * BLOCK_A + tl.arange(0, BLOCK_A)
    ok_kept = kept < KEPT
    k0, k1, k2, k3 = indices(kept, K0, K1, K2, k0_mul, k0_shift, k1_mul, k1_shift, k2_mul, k2_shift, KEPT_LOOPS, WIDE)
    x_kept = offset(k0, k1, k2, k3, xk0_stride, xk1_stride, xk2_stride, xk3_stride, KEPT_LOOPS)
    lane = first_lane + tl.arange(0, BLOCK_C)
    if ref is not None:
        sought_at = offset(k0, k1, k2, k3, ref0_stride, ref1_stride, ref2_stride, ref3_stride, KEPT_LOOPS)[:, None]
        if LANES_KEPT:
            sought_at = sought_at + (lane * ref_lane_stride)[None, :]
            sought = tl.load(ref + sought_at, mask=ok_kept[:, None] & (lane < LANES)[None, :], other=0.0)
        else:
            sought = tl.load(ref + sought_at, mask=ok_kept[:, None], other=0.0)
        sought = convert(sought, FLOAT)[:, None, :]
    best = tl.full((BLOCK_A, BLOCK_B, BLOCK_C), NOTHING, FLOAT)
    if index is not None:
        LAST: tl.constexpr = 9223372036854775807 if WIDE else 2147483647
        where = tl.full((BLOCK_A, BLOCK_B, BLOCK_C), LAST, tl.int64 if WIDE else tl.int32)
    begin = split * SHARE
    for step in tl.range(begin, tl.minimum(begin + SHARE, STEPS), num_stages=STAGES):
        rows = step
        if not LANES_KEPT:
            rows = step // lane_blocks
            lane = (step - rows * lane_blocks) * BLOCK_C + tl.arange(0, BLOCK_C)
        if WIDE:
            rows = rows.to(tl.int64)
            lane = lane.to(tl.int64)
        r = rows * BLOCK_B + tl.arange(0, BLOCK_B)
        r0, r1, r2, r3 = indices(
            r, R0, R1, R2, r0_mul, r0_shift, r1_mul, r1_shift, r2_mul, r2_shift, REDUCED_LOOPS, WIDE
        )
        x_reduced = offset(r0, r1, r2, r3, xr0_stride, xr1_stride, xr2_stride, xr3_stride, REDUCED_LOOPS)
        ok = ok_kept[:, None, None] & (r < REDUCED)[None, :, None] & (lane < LANES)[None, None, :]
        at = (x_kept[:, None] + x_reduced[None, :])[:, :, None] + (lane * x_lane_stride)[None, None, :]
        v = convert(tl.load(x + at, mask=ok, other=ABSENT), FLOAT)
        if BEFORE == 1:
            v = tl.abs(v)
        elif BEFORE == 2:
            v = v * v
        elif BEFORE == 3:
            v = tl.where(v == 0, 1.0, v)
        elif BEFORE == 4:
            v = tl.where(ok & (v == sought), 1.0, 0.0)
        elif BEFORE == 5:
            v = tl.where(ok & (v == 0), 1.0, 0.0)
        elif BEFORE == 6:
            v = tl.where(ok & (tl.abs(v) == sought), 1.0, 0.0)
        if index is not None:
            if places is not None:
                number = tl.load(places + at, mask=ok, other=LAST)
            else:
                number = offset(r0, r1, r2, r3, nr0_stride, nr1_stride, nr2_stride, nr3_stride, REDUCED_LOOPS)[:, None]
                if not LANES_KEPT:
                    number = number + (lane * n_lane_stride)[None, :]
                number = tl.where(ok, number[None, :, :], LAST)
            number = number.to(tl.int64 if WIDE else tl.int32)
            if ONCE:
                best, where = v, number
            else:
                best, where = _visit(v, number, best, where, LAST, COMBINE, ORDERED)
        elif COMBINE == 0:
            best += v
        elif COMBINE == 1:
            best = best * v
        elif COMBINE == 2:
            best = _min(v, best)
        else:
            best = _max(v, best)
    result = _combined(best, 1, COMBINE)
    if not LANES_KEPT:
        result = _combined(result, 1, COMBINE)[:, None]
    if index is not None:
        # The value first, then the lowest place that has it: fewer instructions than pairs that are compared as such.
        place = tl.min(tl.where((best == result[:, None, :]) | (best != best), where, LAST), axis=1)
        if not LANES_KEPT:
            place = tl.min(place, axis=1, keep_dims=True)
    if LANES_KEPT:
        lane = first_lane + tl.arange(0, BLOCK_C)
        ok = ok_kept[:, None] & (lane < LANES)[None, :]
    else:
        ok = ok_kept[:, None]
    if ROOT:
        result = tl.sqrt(result)
    if scale is not None:
        result = result * scale
    if z is not None:
        at = offset(k0, k1, k2, k3, z0_stride, z1_stride, z2_stride, z3_stride, KEPT_LOOPS)[:, None]
        if LANES_KEPT:
            at = at + (lane * z_lane_stride)[None, :]
        more = convert(tl.load(z + at, mask=ok, other=0.0), FLOAT)
        result = result + (more if beta is None else more * beta)
    at = offset(k0, k1, k2, k3, out0_stride, out1_stride, out2_stride, out3_stride, KEPT_LOOPS)[:, None]
    if LANES_KEPT:
        at = at + (lane * out_lane_stride)[None, :]
    if WIDE:
        split = split.to(tl.int64)
    if out_split_stride is not None:
        at = at + split * out_split_stride
    tl.store(out + at, convert(result, out.dtype.element_ty), mask=ok)
    if index is not None:
        at = offset(k0, k1, k2, k3, index0_stride, index1_stride, index2_stride, index3_stride, KEPT_LOOPS)[:, None]
        if LANES_KEPT:
            at = at + (lane * index_lane_stride)[None, :]
        if out_split_stride is not None:
            at = at + split * out_split_stride
        tl.store(index + at, place.to(index.dtype.element_ty), mask=ok)
