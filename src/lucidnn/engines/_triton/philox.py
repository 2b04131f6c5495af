"""Philox-4x32-10 for Triton kernels: four random words of 32 bits from a counter of four and a key of two.

J. Salmon, M. Moraes, R. Dror and D. Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011. The bits are those of
`lucidnn.engines._numba.philox`.
"""

import triton
import triton.language as tl


@triton.jit
def philox(c0, c1, c2, c3, k0, k1):
    """Four words for the counter (c0, c1, c2, c3) and the key (k0, k1), all uint32 and of shapes that broadcast."""
    for number in tl.static_range(10):
        if number > 0:
            k0 = k0 + 0x9E3779B9
            k1 = k1 + 0xBB67AE85
        first = c0.to(tl.uint64) * 0xD2511F53
        second = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (second >> 32).to(tl.uint32) ^ c1 ^ k0
        c1 = second.to(tl.uint32)
        c2 = (first >> 32).to(tl.uint32) ^ c3 ^ k1
        c3 = first.to(tl.uint32)
    return c0, c1, c2, c3
