"""What norms are made of, on the lanes of a vector: terms, sums or maxima of them, and the root of a sum."""

from __future__ import annotations

import math

from llvmlite import ir
from numba.core import cgutils
from numba.extending import intrinsic

from .. import _numba as nb
from .._numba import exponential as ne
from .._numba import vector as nv

GENERAL, ONE, TWO, INF = range(4)
KINDS = {1.0: ONE, 2.0: TWO, math.inf: INF}  # exponents that need no logarithm


def _lanewise(name: str, v, count: int):
    """A signature and code for an instruction of LLVM on every lane of `count` vectors of v's type."""

    def codegen(context, builder, signature, values):
        kind = values[0].type
        full = f"llvm.{name}.v{nv.LANES}{'f32' if kind.element == ir.FloatType() else 'f64'}"
        function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(kind, [kind] * count), full)
        return builder.call(function, values)

    return v(*[v] * count), codegen


@intrinsic
def magnitude(typingctx, v):
    return _lanewise("fabs", v, 1)


@intrinsic
def _root(typingctx, v):
    return _lanewise("sqrt", v, 1)


@intrinsic
def with_sign(typingctx, v, w):
    """The magnitudes of v, the signs of w."""
    return _lanewise("copysign", v, 2)


@nb.jitable
def term(v, kind, p):
    """What is summed or, for p = inf, compared."""
    if kind == TWO:
        return ne.multiply(v, v)
    if kind == GENERAL:
        return ne.exp(ne.multiply(p, ne.log(magnitude(v))))
    return magnitude(v)


@nb.jitable
def taken(total, terms, kind):
    """The sum or the larger, lane by lane; NaN is the largest."""
    if kind == INF:
        return nv.select(nv.exceeds(terms, total), terms, total)
    return nv.add(total, terms)


@nb.jitable
def folded(total, kind):
    """All lanes of a sum or of maxima as one: in every lane."""
    one = ne.total(total)
    if kind == INF and one == one:
        one = ne.largest(total)
    return nv.fill(one)


@nb.jitable
def norm_of(total, kind, inverse):
    """The root of a sum; `inverse` is 1 / p."""
    if kind == TWO:
        return _root(total)
    if kind == GENERAL:
        return ne.exp(ne.multiply(ne.log(total), inverse))
    return total


@nb.jitable
def slope(v, kind, norm, inverse, share, less, zero, one):
    """The derivative of a norm by its elements v: `inverse` is 1 / norm, `share` 1 / those largest, `less` p - 1."""
    if kind == TWO:
        return ne.multiply(v, inverse)
    sign = nv.select(ne.is_value(v, zero), zero, with_sign(one, v))
    if kind == INF:
        return nv.select(ne.is_value(magnitude(v), norm), ne.multiply(sign, share), zero)
    if kind == GENERAL:
        power = ne.exp(ne.multiply(less, ne.log(ne.multiply(magnitude(v), inverse))))
        return nv.select(ne.is_value(v, zero), zero, ne.multiply(sign, power))
    return sign
