"""Powers of the divisor on the lanes of a vector: roots where the exponent allows, else by logarithm."""

from __future__ import annotations

from llvmlite import ir
from numba.core import cgutils
from numba.extending import intrinsic

from .. import _numba as nb
from .._numba import exponential as ne
from .._numba import vector as nv

GENERAL, ONE, HALF, THREE_QUARTERS = range(4)
KINDS = {1.0: ONE, 0.5: HALF, 0.75: THREE_QUARTERS}  # exponents that need no logarithm


@intrinsic
def root(typingctx, v):
    """The square root of every lane."""

    def codegen(context, builder, signature, values):
        given = values[0]
        name = f"llvm.sqrt.v{nv.LANES}{'f32' if given.type.element == ir.FloatType() else 'f64'}"
        kind = ir.FunctionType(given.type, [given.type])
        return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [given])

    return v(v), codegen


@nb.jitable
def inverse_power(d, kind, beta, one):
    """d^-beta, `kind` being beta's in `KINDS`, else `GENERAL`; d is at least 0 or NaN."""
    if kind == THREE_QUARTERS:
        r = ne.divide(one, root(d))
        return ne.multiply(r, root(r))
    if kind == HALF:
        return ne.divide(one, root(d))
    if kind == ONE:
        return ne.divide(one, d)
    return ne.exp(ne.multiply(ne.log(d), ne.subtract(ne.subtract(one, one), beta)))
