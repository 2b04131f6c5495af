"""Loops over channels and their values, in blocks of values of any type and stride: for normalizations on a CPU.

A block is at most `BLOCK` values of one run of memory. Where they already have the type that is computed in, and lie
side by side, a kernel works on them where they are; otherwise they are converted to or from a buffer in the first-level
cache. The type goes by number, so that one kernel for float32 and one for float64 serve every mix of types.

A problem is a table of integers: its loops, how they are shared out, and where the tensors' values lie. Tensors go by
slot; the meaning of a slot is the kernel's.
"""

from __future__ import annotations

import functools

import numpy as np
from numba.core import types
from numba.extending import overload

from . import vector as nv
from . import vector_math as vm
from .epilogue import activate as activate_one
from .epilogue import activate_grad as activate_grad_one
from .jit import jitable, separate
from .memory import cast, load, pointer, size_of, store

BLOCK = 512  # values of one run that are looked at together
TYPES = {"f64": 0, "f32": 1, "f16": 2, "bf16": 3}

# What the table of 64-bit integers holds, and where. At `SLOT` three numbers for each tensor: its type, the step to the
# next value of a channel and the step to the next channel. Then come the offsets of all slots at the start of each
# outer loop over channels and, at `ROW_AT`, of each outer loop over values.
(
    OUTER, INNER, ROWS, LANES, REPEAT, R_PARTS, C_PARTS, BLOCKS, CHANNELS, LAST, CODE, NATIVE, SLOTS, VALUES,
    MEANS, SQUARES, SHIFT, FACTOR, BIAS, LEVEL, SLOPE, ROW_AT, CHANNEL_AT, SLOT,
) = range(24)  # fmt: skip


@jitable
def channel(t, slot, co, ci):
    """Offset of a channel's values."""
    return t[t[CHANNEL_AT] + co * t[SLOTS] + slot] + ci * t[SLOT + 3 * slot + 2]


@jitable
def along(t, slot, row, lane):
    """Offset of a value in its channel."""
    return t[t[ROW_AT] + row * t[SLOTS] + slot] + lane * t[SLOT + 3 * slot + 1]


@jitable
def block_of(t, block):
    """The first channel of a block, outer and inner number, and how many there are."""
    width = t[INNER] * t[REPEAT]
    each = (width + BLOCK - 1) // BLOCK
    ci = block % each * BLOCK
    return block // each, ci, min(width - ci, BLOCK)


@jitable
def prepared(t, ws):
    """Where the means, factors and terms of all channels are kept."""
    return pointer(ws + t[SHIFT], 0.0), pointer(ws + t[FACTOR], 0.0), pointer(ws + t[BIAS], 0.0)


# ---- single values ---------------------------------------------------------------------------------------------


@separate
def get(kind, address, at):
    """One value of a tensor, as float64; the type by number."""
    if kind == 0:
        return pointer(address, np.float64(0))[at]
    if kind == 1:
        return np.float64(pointer(address, np.float32(0))[at])
    if kind == 2:
        return np.float64(load(pointer(address, np.uint16(0)), at))
    return np.float64(load(pointer(address, np.int16(0)), at))


@jitable
def _set(p, at, value):
    # A function of its own: a store to a pointer that is not looked at again is taken for dead where it is inlined.
    store(p, at, value)


@separate
def put(kind, address, at, value):
    """tensor[at] = value, rounded."""
    if kind == 0:
        _set(pointer(address, np.float64(0)), at, value)
    elif kind == 1:
        _set(pointer(address, np.float32(0)), at, np.float32(value))
    elif kind == 2:
        _set(pointer(address, np.uint16(0)), at, np.float32(value))
    else:
        _set(pointer(address, np.int16(0)), at, np.float32(value))


# ---- blocks ----------------------------------------------------------------------------------------------------


@jitable
def _load(p, at, step, count, v):
    if step == 1:
        for i in range(count):
            v[i] = cast(load(p, at + i), v[0])
    else:
        for i in range(count):
            v[i] = cast(load(p, at + i * step), v[0])


@jitable
def _store(p, at, step, count, v):
    if step == 1:
        for i in range(count):
            store(p, at + i, v[i])
    else:
        for i in range(count):
            store(p, at + i * step, v[i])


@separate
def read(kind, address, at, step, count, v):
    """v[i] = tensor[at + i * step]; the type by number."""
    if kind == 0:
        _load(pointer(address, np.float64(0)), at, step, count, v)
    elif kind == 1:
        _load(pointer(address, np.float32(0)), at, step, count, v)
    elif kind == 2:
        _load(pointer(address, np.uint16(0)), at, step, count, v)
    else:
        _load(pointer(address, np.int16(0)), at, step, count, v)


@separate
def write(kind, address, at, step, count, v):
    """tensor[at + i * step] = v[i], rounded."""
    if kind == 0:
        _store(pointer(address, np.float64(0)), at, step, count, v)
    elif kind == 1:
        _store(pointer(address, np.float32(0)), at, step, count, v)
    elif kind == 2:
        _store(pointer(address, np.uint16(0)), at, step, count, v)
    else:
        _store(pointer(address, np.int16(0)), at, step, count, v)


@jitable
def opened(kind, native, address, at, step, count, buffer, like):
    """Where the values of a block can be read in the type that is computed in: in place, or in the buffer."""
    if kind == native and step == 1:
        return pointer(address + at * size_of(like), like)
    read(kind, address, at, step, count, buffer)
    return buffer


@jitable
def target(kind, native, address, at, step, buffer, like):
    """Where the values of a block are to be made: in place, or in a buffer for `write`."""
    if kind == native and step == 1:
        return pointer(address + at * size_of(like), like)
    return buffer


# ---- activations -----------------------------------------------------------------------------------------------


@jitable
def _map(code, p, count, v):
    for i in range(count):
        v[i] = activate_one(code, p, v[i])


@jitable
def _map_grad(code, p, count, v, dy):
    for i in range(count):
        v[i] = activate_grad_one(code, p, v[i], dy[i])


def _map_any(code, p, count, v):
    """Activations with an exponential: on vectors where there are such, else one value at a time."""
    raise NotImplementedError("works inside a kernel only")


def _map_any_grad(code, p, count, v, dy):
    """Their gradients."""
    raise NotImplementedError("works inside a kernel only")


@overload(_map_any)
def _map_any_impl(code, p, count, v):
    if v.dtype != types.float32:
        return _map

    def impl(code, p, count, v):
        for i in range(0, count, nv.LANES):
            many = min(count - i, nv.LANES)
            nv.write(v, i, 1, vm.activate(code, p, nv.read_some(v, i, 0, many)), many)

    return impl


@overload(_map_any_grad)
def _map_any_grad_impl(code, p, count, v, dy):
    if v.dtype != types.float32:
        return _map_grad

    def impl(code, p, count, v, dy):
        for i in range(0, count, nv.LANES):
            many = min(count - i, nv.LANES)
            slope = vm.activate_grad(code, p, nv.read_some(v, i, 0, many), nv.read_some(dy, i, 0, many))
            nv.write(v, i, 1, slope, many)

    return impl


@functools.partial(separate, exact=True)
def activate(code, p, count, v):
    """The activation of a block, in place. The cheap ones have a loop each, so that the choice is made outside."""
    if code == 1:
        _map(1, p, count, v)
    elif code == 2:
        _map(2, p, count, v)
    elif code == 3:
        _map(3, p, count, v)
    elif code == 11:
        _map(11, p, count, v)
    elif code == 12:
        _map(12, p, count, v)
    elif code != 0:
        _map_any(code, p, count, v)


@functools.partial(separate, exact=True)
def activate_grad(code, p, count, v, dy):
    """The activation's slope at v times dy, in place of v."""
    if code == 1:
        _map_grad(1, p, count, v, dy)
    elif code == 2:
        _map_grad(2, p, count, v, dy)
    elif code == 3:
        _map_grad(3, p, count, v, dy)
    elif code == 11:
        _map_grad(11, p, count, v, dy)
    elif code == 12:
        _map_grad(12, p, count, v, dy)
    elif code == 0:
        _map_grad(0, p, count, v, dy)
    else:
        _map_any_grad(code, p, count, v, dy)
