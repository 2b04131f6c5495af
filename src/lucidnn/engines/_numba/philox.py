"""Philox-4x32-10 for CPU kernels: four random words of 32 bits from a counter of four and a key of two.

J. Salmon, M. Moraes, R. Dror and D. Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.

``philox`` makes the four words of one counter. ``words_in_order`` and ``words_by_planes`` take sixteen counters at a
time, each word in a lane of 64 bits: the upper halves may hold anything, since the product of the lower halves of two
lanes is one instruction, and what it leaves is the round's low word below and its high word above. So a round of eight
counters is two products, two shifts and two exclusive ors of three; a lane of 32 bits would need both halves of every
product apart.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

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


COUNTERS = 16  # whose words are made together
_HALF = 8  # of them in one vector of 64-bit lanes
_LANES = ir.VectorType(ir.IntType(64), _HALF)
_WORDS = ir.VectorType(ir.IntType(32), 2 * _HALF)


def _lanes(values) -> ir.Constant:
    return ir.Constant(_LANES, list(values))


def _splat(builder, value):
    """The same number, of 32 or 64 bits, in every lane."""
    if value.type.width < 64:
        value = builder.zext(value, ir.IntType(64))
    undefined = ir.Constant(_LANES, ir.Undefined)
    single = builder.insert_element(undefined, value, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(single, undefined, ir.Constant(ir.VectorType(ir.IntType(32), _HALF), [0] * _HALF))


def _rounds(builder, first, step, c2, c3, k0, k1, half):
    """The four words of counters first + lane step, lanes from 8 `half` on, as lanes whose upper halves are void."""
    low, up = _lanes([0xFFFFFFFF] * _HALF), _lanes([32] * _HALF)
    steps = builder.mul(_lanes(range(half * _HALF, (half + 1) * _HALF)), _splat(builder, step))
    c0 = builder.add(_splat(builder, first), steps)
    c1, c2, c3 = builder.lshr(c0, up), _splat(builder, c2), _splat(builder, c3)
    for key_0, key_1 in zip(_KEYS_0, _KEYS_1, strict=True):
        first_product = builder.mul(builder.and_(c0, low), _lanes([int(_M0)] * _HALF))
        second_product = builder.mul(builder.and_(c2, low), _lanes([int(_M1)] * _HALF))
        here_0 = _splat(builder, builder.add(k0, ir.Constant(k0.type, int(key_0))))
        here_1 = _splat(builder, builder.add(k1, ir.Constant(k1.type, int(key_1))))
        c0 = builder.xor(builder.xor(builder.lshr(second_product, up), c1), here_0)
        c2 = builder.xor(builder.xor(builder.lshr(first_product, up), c3), here_1)
        c1, c3 = second_product, first_product
    return c0, c1, c2, c3


def _store(builder, value, pointer, at):
    spot = builder.bitcast(builder.gep(pointer, [at]), value.type.as_pointer())
    builder.store(value, spot, align=4)


def _at(builder, at, shift):
    return builder.add(at, ir.Constant(at.type, shift))


@intrinsic
def words_in_order(typingctx, words, at, first, c2, c3, k0, k1):
    """words[at + 4 i + j] = word j of counter first + i, for sixteen of them."""

    def codegen(context, builder, signature, values):
        pointer, at, first, *rest = values
        low, up = _lanes([0xFFFFFFFF] * _HALF), _lanes([32] * _HALF)
        for half in range(2):
            found = _rounds(builder, first, ir.Constant(first.type, 1), *rest, half)
            pairs = [builder.or_(builder.and_(found[i], low), builder.shl(found[i + 1], up)) for i in (0, 2)]
            for part in range(2):
                order = [i // 2 + part * _HALF // 2 + _HALF * (i % 2) for i in range(_HALF)]
                mask = ir.Constant(ir.VectorType(ir.IntType(32), _HALF), order)
                mixed = builder.bitcast(builder.shuffle_vector(*pairs, mask), _WORDS)
                _store(builder, mixed, pointer, _at(builder, at, (2 * half + part) * 2 * _HALF))
        return context.get_dummy_value()

    return types.void(words, types.int64, types.uint64, *[types.uint32] * 4), codegen


@intrinsic
def words_by_planes(typingctx, words, at, plane, first, step, c2, c3, k0, k1):
    """words[at + j plane + i] = word j of counter first + i step, for sixteen of them."""

    def codegen(context, builder, signature, values):
        pointer, at, plane, *rest = values
        halves = [_rounds(builder, *rest, half) for half in range(2)]
        short = ir.VectorType(ir.IntType(32), _HALF)
        order = ir.Constant(ir.VectorType(ir.IntType(32), 2 * _HALF), list(range(2 * _HALF)))
        for left, right in zip(*halves, strict=True):
            value = builder.shuffle_vector(builder.trunc(left, short), builder.trunc(right, short), order)
            _store(builder, value, pointer, at)
            at = builder.add(at, plane)
        return context.get_dummy_value()

    return types.void(words, types.int64, types.int64, *[types.uint64] * 2, *[types.uint32] * 4), codegen
