"""Sixteen rows of sixteen elements turned into columns, in registers of the CPU."""

from __future__ import annotations

from numba.core import types
from numba.extending import intrinsic

from .._numba import vector as nv

_LOWER = [i // 2 + nv.LANES * (i % 2) for i in range(nv.LANES)]
_UPPER = [(nv.LANES + i) // 2 + nv.LANES * (i % 2) for i in range(nv.LANES)]


@intrinsic
def turn(typingctx, p, at, step, q, to, by):
    """q[to + i * by + j] = p[at + j * step + i] for i and j below 16; float32, bfloat16 and float16 mix. Kernels only.

    Merging vector k with vector k + 8, lane by lane, moves the highest bit of an element's vector number to the lowest
    of its lane number, and all others up by one: four such rounds exchange the two numbers.
    """

    def codegen(context, builder, signature, values):
        source, at, step, target, to, by = values
        rows = []
        place = at
        for _ in range(nv.LANES):
            spot, _, size = nv._spot(context, builder, p, source, place)
            row = builder.load(spot, align=size)
            rows.append(row if p.dtype == q.dtype else nv._widen(builder, p.dtype, row))
            place = builder.add(place, step)
        half = nv.LANES // 2
        for _ in range(4):
            rows = [
                builder.shuffle_vector(rows[k], rows[k + half], nv._numbers(order))
                for k in range(half)
                for order in (_LOWER, _UPPER)
            ]
        place = to
        for row in rows:
            spot, _, size = nv._spot(context, builder, q, target, place)
            builder.store(row if p.dtype == q.dtype else nv._narrow(builder, q.dtype, row), spot, align=size)
            place = builder.add(place, by)
        return context.get_dummy_value()

    return types.void(p, types.int64, types.int64, q, types.int64, types.int64), codegen
