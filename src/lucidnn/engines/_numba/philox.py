"""Philox-4x32-10 for CPU kernels: four random words of 32 bits from a counter of four and a key of two.

J. Salmon, M. Moraes, R. Dror and D. Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011. A loop that calls it
for neighbouring counters is vectorised by the compiler: the products of 32-bit words are one instruction for a vector.
"""

from __future__ import annotations

import numpy as np

from .jit import jitable

_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_W0, _W1 = np.uint32(0x9E3779B9), np.uint32(0xBB67AE85)
_32 = np.uint64(32)


@jitable
def _round(c0, c1, c2, c3, k0, k1):
    first = np.uint64(c0) * _M0
    second = np.uint64(c2) * _M1
    return (np.uint32(second >> _32) ^ c1 ^ k0, np.uint32(second), np.uint32(first >> _32) ^ c3 ^ k1, np.uint32(first))


@jitable
def philox(c0, c1, c2, c3, k0, k1):
    """Four words for the counter (c0, c1, c2, c3) and the key (k0, k1), all uint32."""
    c0, c1, c2, c3 = _round(c0, c1, c2, c3, k0, k1)
    for _ in range(9):
        k0 = np.uint32(k0 + _W0)
        k1 = np.uint32(k1 + _W1)
        c0, c1, c2, c3 = _round(c0, c1, c2, c3, k0, k1)
    return c0, c1, c2, c3
