"""Stores that go past the caches (non-temporal), for results that the caches would not keep anyway, in CPU kernels.

An ordinary store of a line that is in no cache first reads it from memory: a sum of two large tensors moves four
tensors instead of three. A store of a whole line past the caches does not read. Other threads may see such stores late:
`settle` must come before a kernel's part ends.
"""

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from .. import _numba as nb
from .._numba import vector as nv
from .._numba.memory import address

LEAST = 24 << 20  # bytes of a problem's tensors from which its result is not expected to stay in a cache
LINE = 64


@intrinsic
def write_past(typingctx, p, at, v):
    """Sixteen lanes of p's own type; `at` must begin a line of the caches."""
    if p.dtype != v.element:
        return None

    def codegen(context, builder, signature, values):
        spot, _, _ = nv._spot(context, builder, p, *values[:2])
        store = builder.store(values[2], spot, align=LINE)
        store.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)]))
        return context.get_dummy_value()

    return types.void(p, types.int64, v), codegen


@intrinsic
def settle(typingctx):
    """Wait for this thread's stores."""

    def codegen(context, builder, signature, values):
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), codegen


@nb.jitable
def begins_line(p, at, size):
    """Whether element `at`, of `size` bytes as all, begins a line of the caches."""
    return (address(p) + at * size) % LINE == 0


@nb.separate
def write_out(target, at, v, count, size):
    """target[at + i] = v[i], of v's own type and `size` bytes each, past the caches."""
    p = nb.pointer(target, v[0])
    whole = count // nv.LANES * nv.LANES if begins_line(p, at, size) else np.int64(0)
    for i in range(0, whole, nv.LANES):
        write_past(p, at + i, nv.read_all(v, i))
    for i in range(whole, count):
        p[at + i] = v[i]
