"""Philox-4x32-10 for CPU kernels: four random words of 32 bits from a counter of four and a key of two.

J. Salmon, M. Moraes, R. Dror and D. Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011. A loop that calls it
for neighbouring counters is vectorised by the compiler: the products of 32-bit words are one instruction for a vector.
"""

from __future__ import annotations

import numpy as np

from .jit import jitable

_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_KEYS_0 = tuple(np.uint32(0x9E3779B9 * number & 0xFFFFFFFF) for number in range(10))  # what each round adds to the key
_KEYS_1 = tuple(np.uint32(0xBB67AE85 * number & 0xFFFFFFFF) for number in range(10))
_32 = np.uint64(32)


@jitable
def _round(c0, c1, c2, c3, k0, k1):
    first = np.uint64(c0) * _M0
    second = np.uint64(c2) * _M1
    return (np.uint32(second >> _32) ^ c1 ^ k0, np.uint32(second), np.uint32(first >> _32) ^ c3 ^ k1, np.uint32(first))


@jitable
def philox(c0, c1, c2, c3, k0, k1):
    """Four words for the counter (c0, c1, c2, c3) and the key (k0, k1), all uint32."""
    # Written out: a loop in here would keep the loop around it from being vectorised.
    c0, c1, c2, c3 = _round(c0, c1, c2, c3, k0, k1)
    c0, c1, c2, c3 = _round(c0, c1, c2, c3, np.uint32(k0 + _KEYS_0[1]), np.uint32(k1 + _KEYS_1[1]))
    c0, c1, c2, c3 = _round(c0, c1, c2, c3, np.uint32(k0 + _KEYS_0[2]), np.uint32(k1 + _KEYS_1[2]))
    c0, c1, c2, c3 = _round(c0, c1, c2, c3, np.uint32(k0 + _KEYS_0[3]), np.uint32(k1 + _KEYS_1[3]))
    c0, c1, c2, c3 = _round(c0, c1, c2, c3, np.uint32(k0 + _KEYS_0[4]), np.uint32(k1 + _KEYS_1[4]))
    c0, c1, c2, c3 = _round(c0, c1, c2, c3, np.uint32(k0 + _KEYS_0[5]), np.uint32(k1 + _KEYS_1[5]))
    c0, c1, c2, c3 = _round(c0, c1, c2, c3, np.uint32(k0 + _KEYS_0[6]), np.uint32(k1 + _KEYS_1[6]))
    c0, c1, c2, c3 = _round(c0, c1, c2, c3, np.uint32(k0 + _KEYS_0[7]), np.uint32(k1 + _KEYS_1[7]))
    c0, c1, c2, c3 = _round(c0, c1, c2, c3, np.uint32(k0 + _KEYS_0[8]), np.uint32(k1 + _KEYS_1[8]))
    c0, c1, c2, c3 = _round(c0, c1, c2, c3, np.uint32(k0 + _KEYS_0[9]), np.uint32(k1 + _KEYS_1[9]))
    return c0, c1, c2, c3
