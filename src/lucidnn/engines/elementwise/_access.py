"""Blocks of a tensor of any type into a buffer of one type and back, for CPU kernels that serve every mix of types.

The type is a number, looked at once a block, so that a kernel is compiled for what it computes in and not for what its
tensors hold. What is stored as a whole number is the nearest one, cut off at the type's limits; NaN becomes 0.
"""

import numpy as np
from numba.core import types
from numba.extending import overload, register_jitable

from .. import _numba as nb

KINDS = {"f64": 0, "f32": 1, "f16": 2, "bf16": 3, "bool": 4, "u8": 5, "i8": 6, "i32": 7, "i64": 8}


@register_jitable
def _load(p, at, step, count, v, to):
    if step == 1:
        for i in range(count):
            v[to + i] = nb.cast(nb.load(p, at + i), v[0])
    else:
        for i in range(count):
            v[to + i] = nb.cast(nb.load(p, at + i * step), v[0])


@nb.separate
def read(kind, address, at, step, count, v, to):
    """v[to + i] = tensor[at + i * step]; the type by number."""
    if kind == 0:
        _load(nb.pointer(address, np.float64(0)), at, step, count, v, to)
    elif kind == 1:
        _load(nb.pointer(address, np.float32(0)), at, step, count, v, to)
    elif kind == 2:
        _load(nb.pointer(address, np.uint16(0)), at, step, count, v, to)
    elif kind == 3:
        _load(nb.pointer(address, np.int16(0)), at, step, count, v, to)
    elif kind <= 5:
        _load(nb.pointer(address, np.uint8(0)), at, step, count, v, to)
    elif kind == 6:
        _load(nb.pointer(address, np.int8(0)), at, step, count, v, to)
    elif kind == 7:
        _load(nb.pointer(address, np.int32(0)), at, step, count, v, to)
    else:
        _load(nb.pointer(address, np.int64(0)), at, step, count, v, to)


@register_jitable
def _store(p, at, step, count, v):
    if step == 1:
        for i in range(count):
            nb.store(p, at + i, v[i])
    else:
        for i in range(count):
            nb.store(p, at + i * step, v[i])


@register_jitable
def _within(value, low, high):
    """The nearest whole number within limits; 0 for NaN. What is beyond 2^63 is cut off there."""
    near = np.rint(value)
    if near >= high:
        return np.int64(high)
    if near <= low:
        return np.int64(low)
    return np.int64(near) if near == near else np.int64(0)


def _whole(value, low, high):
    """A value as a whole number within limits."""
    raise NotImplementedError("works inside a kernel only")


@overload(_whole)
def _whole_impl(value, low, high):
    if isinstance(value, types.Integer):
        return lambda value, low, high: min(max(value, low), high)
    return lambda value, low, high: _within(np.float64(value), low, high)


@register_jitable
def _store_whole(p, at, step, count, v, low, high):
    for i in range(count):
        p[at + i * step] = nb.cast(_whole(v[i], low, high), p[0])


@nb.separate
def write(kind, address, at, step, count, v):
    """tensor[at + i * step] = v[i], rounded, or cut off at the type's limits."""
    if kind == 0:
        _store(nb.pointer(address, np.float64(0)), at, step, count, v)
    elif kind == 1:
        _store(nb.pointer(address, np.float32(0)), at, step, count, v)
    elif kind == 2:
        _store(nb.pointer(address, np.uint16(0)), at, step, count, v)
    elif kind == 3:
        _store(nb.pointer(address, np.int16(0)), at, step, count, v)
    elif kind == 4:
        truth = nb.pointer(address, np.uint8(0))
        for i in range(count):
            truth[at + i * step] = 1 if v[i] != 0 else 0
    elif kind == 5:
        _store_whole(nb.pointer(address, np.uint8(0)), at, step, count, v, 0, 255)
    elif kind == 6:
        _store_whole(nb.pointer(address, np.int8(0)), at, step, count, v, -128, 127)
    elif kind == 7:
        _store_whole(nb.pointer(address, np.int32(0)), at, step, count, v, -2147483648, 2147483647)
    else:
        low, high = -9223372036854775808, 9223372036854775807
        _store_whole(nb.pointer(address, np.int64(0)), at, step, count, v, low, high)
