"""What Triton kernels of pooling share: windows that hold a place, the largest value of a window, counts, powers."""

import triton
import triton.language as tl

NOWHERE = tl.constexpr(2**31 - 1)  # the place of a value that there is not


@triton.jit
def visit(v, inside, best, place, number):
    """One window point for all outputs of the tile: it takes over where it is larger than all before it."""
    v = v.to(best.dtype)
    # NaN counts as the largest, the first of equals stays, and the first point inside is always taken.
    take = inside & ((place < 0) | ((best == best) & ~(v <= best)))
    return tl.where(take, v, best), tl.where(take, number, place)


@triton.jit
def first_largest(best, place, axis: tl.constexpr):
    """Along an axis the largest value, or NaN where there is one, and the first place that has it."""
    strange = best != best
    any_strange = tl.max(strange.to(tl.int32), axis) > 0
    value = tl.max(tl.where(strange, float("-inf"), best), axis)
    if axis == 1:
        wanted = tl.where(any_strange[:, None], strange, best == value[:, None])
    else:
        wanted = tl.where(any_strange[None, :], strange, best == value[None, :])
    found = tl.min(tl.where(wanted, place, NOWHERE), axis)
    return tl.where(any_strange, float("nan"), value), found


@triton.jit
def window(place, back, PAD: tl.constexpr, STRIDE: tl.constexpr, DILATION: tl.constexpr, WINDOW: tl.constexpr, SIZE):
    """The window `back` before the last one that starts at or before `place`: which, which of its points lies on
    `place`, and whether there is such a one.
    """
    number = (place + PAD) // STRIDE - back
    reach = place + PAD - number * STRIDE
    point = reach // DILATION
    exists = (number >= 0) & (number < SIZE) & (point < WINDOW)
    if DILATION > 1:
        exists = exists & (reach % DILATION == 0)
    return number, point, exists


@triton.jit
def holder(
    place, turn, SIZE, COUNT, PAD: tl.constexpr, STRIDE: tl.constexpr, DILATION: tl.constexpr, WINDOW: tl.constexpr,
    ADAPTIVE: tl.constexpr,
):  # fmt: skip
    """The `turn`-th of the windows that may hold `place`, and whether it does. `SIZE` points make `COUNT` windows."""
    if ADAPTIVE:
        number = place * COUNT // SIZE + turn
        exists = number * SIZE < (place + 1) * COUNT  # starts at or before the place; the first one always does
    else:
        number, _, exists = window(place, turn, PAD, STRIDE, DILATION, WINDOW, COUNT)
    return number, exists


@triton.jit
def counted(
    q, SIZE, COUNT, PAD: tl.constexpr, AFTER: tl.constexpr, STRIDE: tl.constexpr, DILATION: tl.constexpr,
    WINDOW: tl.constexpr, PADDED: tl.constexpr, ADAPTIVE: tl.constexpr,
):  # fmt: skip
    """Points of window q in x or, if `PADDED`, in x and its padding; at least 1."""
    if ADAPTIVE:
        found = ((q + 1) * SIZE + COUNT - 1) // COUNT - q * SIZE // COUNT
    else:
        start = q * STRIDE - PAD
        found = tl.minimum((SIZE + (AFTER if PADDED else 0) - start + DILATION - 1) // DILATION, WINDOW)
        if not PADDED:
            found -= (tl.maximum(-start, 0) + DILATION - 1) // DILATION
    return tl.maximum(found, 1)


@triton.jit
def power(v, exponent, SIGN: tl.constexpr):
    """V to a power. For v < 0: NaN, or with `SIGN` 1 an even, with -1 an odd whole power."""
    if SIGN == 0:
        result = tl.exp2(exponent * tl.log2(v))
    else:
        result = tl.exp2(exponent * tl.log2(tl.abs(v)))
        if SIGN < 0:
            result = tl.where(v < 0, -result, result)
    return result


@triton.jit
def quotient(v, divisor, NARROW: tl.constexpr):
    """V / divisor to the last bit, or nearly where the result is a 16-bit number."""
    if NARROW:
        result = v * (1.0 / divisor)
    elif v.dtype == tl.float64:
        result = v / divisor
    else:
        result = tl.div_rn(v, divisor)
    return result
