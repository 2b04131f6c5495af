"""Tiles of channels by values, for kernels that need statistics of channels: where they lie, and types of any mix.

A tile is some channels by some neighbouring values of each (lanes) in one row, a row being a place along the other axes
that are summed over. Tiles are numbered lane block by lane block, rows innermost, so that the one block of lanes that
hangs over is the last of its part, and every place in a tile has seen the same number of values but for that.
"""

import triton
import triton.language as tl

from .epilogue import convert


@triton.jit
def split_index(i, S0, S1, S2, AXES: tl.constexpr):
    """Indices along up to four axes, the innermost first; `S0` is the innermost size."""
    i0 = i
    i1 = i * 0
    i2 = i * 0
    i3 = i * 0
    if AXES > 1:
        i1 = i // S0
        i0 = i - i1 * S0
    if AXES > 2:
        i2 = i1 // S1
        i1 = i1 - i2 * S1
    if AXES > 3:
        i3 = i2 // S2
        i2 = i2 - i3 * S2
    return i0, i1, i2, i3


@triton.jit
def inverse_root(inverse, variance, at, ok, epsilon, TYPE: tl.constexpr):
    """1 / sqrt(variance + epsilon) of some channels, from whichever of the two tensors is there."""
    if inverse is not None:
        r = convert(tl.load(inverse + at, mask=ok, other=0.0), TYPE)
    else:
        r = 1.0 / tl.sqrt(convert(tl.load(variance + at, mask=ok, other=1.0), TYPE) + epsilon)
    return r.to(TYPE)
