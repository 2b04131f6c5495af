"""What the CPU normalizations share: values between memory of any type and stride and dense rows in the type of sums.

Every pass over the data works on dense rows of float32 (float64 where a tensor has that type): those of x itself where
they are dense already, copies in scratch memory elsewhere. So one kernel for each of the two types serves all types of
tensors and all strides. The functions here are compiled once and called by the engines' kernels (`separate`); tensors
come as addresses, with the number of their type in `TYPES`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba.core import types
from numba.extending import overload, register_jitable

from ...core.descriptor import TensorDescriptor
from .. import _numba as nb
from .._numba import vector as nv
from .._numba import vector_math as vm
from .._numba.memory import size_of

TYPES = {"f64": 0, "f32": 1, "f16": 2, "bf16": 3}


@register_jitable
def _copy_in(p, at, step, count, v):
    if step == 1:
        for i in range(count):
            v[i] = nb.cast(nb.load(p, at + i), v[0])
    else:
        for i in range(count):
            v[i] = nb.cast(nb.load(p, at + i * step), v[0])


@register_jitable
def _copy_out(p, at, step, count, v):
    if step == 1:
        for i in range(count):
            nb.store(p, at + i, v[i])
    else:
        for i in range(count):
            nb.store(p, at + i * step, v[i])


@nb.separate
def read_row(kind, address, at, step, count, row, like):
    """row[i] = tensor[at + i * step]."""
    v = nb.pointer(row, like)
    if kind == 0:
        _copy_in(nb.pointer(address, np.float64(0)), at, step, count, v)
    elif kind == 1:
        _copy_in(nb.pointer(address, np.float32(0)), at, step, count, v)
    elif kind == 2:
        _copy_in(nb.pointer(address, np.uint16(0)), at, step, count, v)
    else:
        _copy_in(nb.pointer(address, np.int16(0)), at, step, count, v)


@nb.separate
def write_row(kind, address, at, step, count, row, like):
    """tensor[at + i * step] = row[i], rounded."""
    v = nb.pointer(row, like)
    if kind == 0:
        _copy_out(nb.pointer(address, np.float64(0)), at, step, count, v)
    elif kind == 1:
        _copy_out(nb.pointer(address, np.float32(0)), at, step, count, v)
    elif kind == 2:
        _copy_out(nb.pointer(address, np.uint16(0)), at, step, count, v)
    else:
        _copy_out(nb.pointer(address, np.int16(0)), at, step, count, v)


@nb.separate
def gather_parameter(kind, address, offsets, count, default, row, like):
    """A scale or bias as a dense row; `default` throughout where there is none (address 0)."""
    v, places = nb.pointer(row, like), nb.pointer(offsets, np.int64(0))
    if address == 0:
        for i in range(count):
            v[i] = nb.cast(default, like)
    elif offsets == 0:
        read_row(kind, address, 0, 1, count, row, like)
    else:
        for i in range(count):
            read_row(kind, address, places[i], 1, 1, row + i * size_of(like), like)


@nb.separate
def scatter_parameter(kind, address, offsets, count, row, like):
    """The way back, for a gradient."""
    places = nb.pointer(offsets, np.int64(0))
    if offsets == 0:
        write_row(kind, address, 0, 1, count, row, like)
    else:
        for i in range(count):
            write_row(kind, address, places[i], 1, 1, row + i * size_of(like), like)


@nb.separate
def add_rows(rows, count, first, like):
    """Add to a row of `count` values the `rows - 1` that follow it, in order."""
    v = nb.pointer(first, like)
    for r in range(1, rows):
        for i in range(count):
            v[i] += v[r * count + i]


def _map(code, p, count, v):
    """The activation on a row, in place."""
    raise NotImplementedError("works inside a kernel only")


def _map_grad(code, p, count, v, dy, out):
    """Its gradient: out[i] = dy[i] act'(v[i])."""
    raise NotImplementedError("works inside a kernel only")


@overload(_map)
def _map_impl(code, p, count, v):
    if v.dtype != types.float32:

        def each(code, p, count, v):
            for i in range(count):
                v[i] = nb.activate(code, p, v[i])

        return each

    def vectors(code, p, count, v):
        for i in range(0, count, nv.LANES):
            many = min(nv.LANES, count - i)
            nv.write(v, i, 1, vm.activate(code, p, nv.read(v, i, 1, 0, many)), many)

    return vectors


@overload(_map_grad)
def _map_grad_impl(code, p, count, v, dy, out):
    if v.dtype != types.float32:

        def each(code, p, count, v, dy, out):
            for i in range(count):
                out[i] = nb.activate_grad(code, p, v[i], dy[i])

        return each

    def vectors(code, p, count, v, dy, out):
        for i in range(0, count, nv.LANES):
            many = min(nv.LANES, count - i)
            found = vm.activate_grad(code, p, nv.read(v, i, 1, 0, many), nv.read(dy, i, 1, 0, many))
            nv.write(out, i, 1, found, many)

    return vectors


@register_jitable
def _map_simple(code, p, count, v):
    for i in range(count):
        v[i] = nb.activate(code, p, v[i])


@register_jitable
def _map_simple_grad(code, p, count, v, dy, out):
    for i in range(count):
        out[i] = nb.activate_grad(code, p, v[i], dy[i])


def activate_row(code, p, count, row, like):
    """Apply the activation, in place. A loop for each of those without an exponential, which LLVM makes vectors of."""
    v, p = nb.pointer(row, like), nb.cast(p, like)
    if code == 1:
        _map_simple(1, p, count, v)
    elif code == 2:
        _map_simple(2, p, count, v)
    elif code == 3:
        _map_simple(3, p, count, v)
    elif code == 11:
        _map_simple(11, p, count, v)
    elif code == 12:
        _map_simple(12, p, count, v)
    else:
        _map(code, p, count, v)


def activate_row_grad(code, p, count, row, dy, out, like):
    """out[i] = dy[i] act'(row[i])."""
    v, g, o, p = nb.pointer(row, like), nb.pointer(dy, like), nb.pointer(out, like), nb.cast(p, like)
    if code == 1:
        _map_simple_grad(1, p, count, v, g, o)
    elif code == 2:
        _map_simple_grad(2, p, count, v, g, o)
    elif code == 3:
        _map_simple_grad(3, p, count, v, g, o)
    elif code == 11:
        _map_simple_grad(11, p, count, v, g, o)
    elif code == 12:
        _map_simple_grad(12, p, count, v, g, o)
    else:
        _map_grad(code, p, count, v, g, o)


activate_row, activate_row_grad = nb.separate(activate_row, exact=True), nb.separate(activate_row_grad, exact=True)


def offsets_of(t: TensorDescriptor | None) -> Any:
    """Where the elements of a parameter lie, in logical order; None where that is one after another (or nowhere)."""
    if t is None or t.is_contiguous:
        return None
    places = np.zeros(t.shape, dtype=np.int64)
    for axis, (size, step) in enumerate(zip(t.shape, t.strides, strict=True)):
        places += (np.arange(size, dtype=np.int64) * step).reshape(-1, *[1] * (t.ndim - 1 - axis))
    return places.reshape(-1)
