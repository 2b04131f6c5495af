"""What pooling on a CPU does with vectors (``_numba/vector.py``) beyond reading, comparing and adding them."""

from __future__ import annotations

from llvmlite import ir
from numba.extending import intrinsic

from .._numba import vector as nv


@intrinsic
def times(typingctx, v, w):
    """Two vectors of floats multiplied, lane by lane."""
    return nv._operation(v, [v, v], lambda b, v, w: b.fmul(v, w))


@intrinsic
def total(typingctx, v):
    """The sum of a vector's lanes: halves are added until one number is left, so the order is fixed."""

    def codegen(context, builder, signature, values):
        (found,), lanes = values, nv.LANES
        while lanes > 1:
            lanes //= 2
            low, high = (builder.shuffle_vector(found, found, nv._numbers(range(at, at + lanes))) for at in (0, lanes))
            found = builder.fadd(low, high)
        return builder.extract_element(found, ir.Constant(ir.IntType(32), 0))

    return v.element(v), codegen
