"""Index arithmetic shared by Triton kernels, and the choices about it that are made on the host.

``divide`` replaces division by a number that is only known at run time by a multiplication with its
reciprocal, scaled to 32 bits and rounded up (Granlund and Montgomery, "Division by invariant integers using
multiplication", 1994): three instructions instead of twenty.  It is exact for numerators below 2^31.
"""

import triton
import triton.language as tl

INT32 = 2**31 - 1


def reciprocal(divisor: int) -> tuple[int, int]:
    """Multiplier (as a signed 32-bit number) and shift that `divide` wants for this divisor, 1 to 2^31 - 1.

    Examples -------- >>> reciprocal(7) (613566757, 3) >>> all((n * m >> 32) + n >> s == n // d for d in (1,
    2, 7, 641) for m, s in [reciprocal(d)] for n in (0, d - 1, d)) True
    """
    shift = (divisor - 1).bit_length()
    if divisor == 1 << shift:
        return 0, shift  # a shift is enough
    multiplier = (((1 << shift) - divisor) << 32) // divisor + 1
    return multiplier - (1 << 32 if multiplier > INT32 else 0), shift


@triton.jit
def divide(n, multiplier, shift):
    """Quotient of `n` (int32, 0 <= n < 2^31) by the divisor of ``reciprocal``."""
    high = tl.umulhi(n.to(tl.uint32, bitcast=True), multiplier.to(tl.uint32, bitcast=True))
    return ((high + n.to(tl.uint32, bitcast=True)) >> shift).to(tl.int32, bitcast=True)


@triton.jit
def split(n, SIZE, multiplier, shift, WIDE: tl.constexpr):
    """Quotient and remainder; by division where `n` may pass 31 bits."""
    if WIDE:
        quotient = n // SIZE
    else:
        quotient = divide(n, multiplier, shift)
    return quotient, n - quotient * SIZE


@triton.jit
def rows(v, TURNED: tl.constexpr):
    """A vector along a tile's rows; `TURNED` tiles lie on their side, so that their rows are neighbours in
    memory.
    """
    return v[None, :] if TURNED else v[:, None]


@triton.jit
def columns(v, TURNED: tl.constexpr):
    return v[:, None] if TURNED else v[None, :]


def pixels_first(strides: tuple[int, ...], channels: int) -> bool:
    """Whether neighbouring pixels, not channels, are (nearer to) neighbours in memory; strides are (N, C, D,
    H, W).
    """
    return channels == 1 or (strides[1] != 1 and strides[4] < strides[1])
