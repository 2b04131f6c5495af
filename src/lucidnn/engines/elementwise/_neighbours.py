"""Elementwise modes on float32 neighbours, vector by vector and past the buffers of ``blocked.py``, for CPU kernels.

    unary(code, p, at, q, to, count, past)           q[to + i] = f(p[at + i]), the code of `MODES`; q may be p
    binary(code, p, at, r, by, q, to, count, past)   q[to + i] = f(p[at + i], r[by + i]); q may be p or r
    compare(code, p, at, r, by, q, to, count)        q[to + i] = 1 where the comparison holds, else 0

With `past` whole lines are written past the caches (``_streams.py``). The code is looked at once a vector, which the
processor foresees. `functions` and `functions_of_two` are for buffers of any type.
"""

import functools
import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic, overload

from ...ops.elementwise import MODES
from .. import _numba as nb
from .._numba import vector as nv
from .._numba.vector_math import _FLOATS, _Lanes
from ._functions import BINARY, COMPARISONS, FAR, QUOTIENT, UNARY
from ._streams import begins_line, write_past

EXP, LOG, SIN, COS, TAN, POW, MOD = (MODES[name].code for name in ("exp", "log", "sin", "cos", "tan", "pow", "mod"))


def _switch(builder: Any, code: Any, formulas: dict[str, Any], result: Any, values: Any) -> Any:
    """The formula of a mode whose code is known at run time only."""
    done = builder.append_basic_block("done")
    nothing = builder.append_basic_block("nothing")
    choice = builder.switch(code, nothing)
    results = []
    for name, formula in formulas.items():
        block = builder.append_basic_block(name)
        choice.add_case(ir.Constant(code.type, MODES[name].code), block)
        builder.position_at_end(block)
        results.append((formula(*(_Lanes(builder, value) for value in values)), builder.block))
        builder.branch(done)
    builder.position_at_end(nothing)
    builder.unreachable()
    builder.position_at_end(done)
    merged = builder.phi(result)
    for value, block in results:
        merged.add_incoming(getattr(value, "value", value), block)
    return merged


@intrinsic
def _of_one(typingctx, code, v):
    """The function of a code of `UNARY`, lane by lane."""

    def codegen(context, builder, signature, values):
        return _switch(builder, values[0], UNARY, _FLOATS, values[1:])

    return v(types.int64, v), codegen


@intrinsic
def _of_two(typingctx, code, v, w):
    """The function of a code of `BINARY`, lane by lane."""

    def codegen(context, builder, signature, values):
        return _switch(builder, values[0], BINARY, _FLOATS, values[1:])

    return v(types.int64, v, v), codegen


def _comparison(sign: str, with_nan: bool) -> Any:
    def formula(v: _Lanes, w: _Lanes) -> Any:
        compare = v.builder.fcmp_unordered if with_nan else v.builder.fcmp_ordered
        return v.builder.zext(compare(sign, v.value, w.value), ir.VectorType(ir.IntType(32), nv.LANES))

    return formula


@intrinsic
def _compared(typingctx, code, v, w):
    """1 in the lanes where the comparison of a code of `COMPARISONS` holds, else 0."""

    def codegen(context, builder, signature, values):
        formulas = {name: _comparison(*row) for name, row in COMPARISONS.items()}
        return _switch(builder, values[0], formulas, ir.VectorType(ir.IntType(32), nv.LANES), values[1:])

    return nv.Vector(types.int32)(types.int64, v, v), codegen


def _any(builder, mask):
    return builder.icmp_unsigned("!=", builder.bitcast(mask, ir.IntType(nv.LANES)), ir.IntType(nv.LANES)(0))


@intrinsic
def _beyond(typingctx, v, limit):
    """Whether a lane is finite and its absolute value as large as the limit or larger."""

    def codegen(context, builder, signature, values):
        size = abs(_Lanes(builder, values[0])).value
        large = builder.fcmp_ordered(">=", size, nv._splat(builder, values[1]))
        finite = builder.fcmp_ordered("<", size, ir.Constant(_FLOATS, [math.inf] * nv.LANES))
        return _any(builder, builder.and_(large, finite))

    return types.boolean(v, types.float32), codegen


@intrinsic
def _exceeds(typingctx, v, w, times):
    """Whether the absolute value of a lane of v is that of w times a number, or larger."""

    def codegen(context, builder, signature, values):
        left, right = (abs(_Lanes(builder, value)).value for value in values[:2])
        right = builder.fmul(right, nv._splat(builder, values[2]))
        return _any(builder, builder.fcmp_ordered(">=", left, right))

    return types.boolean(v, v, types.float32), codegen


@nb.jitable
def _put(q, to, v, count, past):
    if past and count == nv.LANES:
        write_past(q, to, v)
    else:
        nv.write(q, to, 1, v, count)


@functools.partial(nb.separate, exact=True)
def unary(code, p, at, q, to, count, past):
    """q[to + i] = f(p[at + i]) for float32; q may be p."""
    past = past and begins_line(q, to, 4)
    limit = FAR if (code == SIN) | (code == COS) | (code == TAN) else np.float32(np.inf)
    for i in range(0, count, nv.LANES):
        left = min(count - i, nv.LANES)
        v = nv.read_all(p, at + i) if left == nv.LANES else nv.read_some(p, at + i, 0, left)
        if _beyond(v, limit):
            for j in range(i, i + left):
                u = np.float64(p[at + j])
                u = math.sin(u) if code == SIN else math.cos(u) if code == COS else math.tan(u)
                q[to + j] = nb.cast(u, p[at + j])
        else:
            _put(q, to + i, _of_one(code, v), left, past)


@functools.partial(nb.separate, exact=True)
def binary(code, p, at, r, by, q, to, count, past):
    """q[to + i] = f(p[at + i], r[by + i]) for float32; q may be p."""
    past = past and begins_line(q, to, 4)
    for i in range(0, count, nv.LANES):
        left = min(count - i, nv.LANES)
        v = nv.read_all(p, at + i) if left == nv.LANES else nv.read_some(p, at + i, 0, left)
        w = nv.read_all(r, by + i) if left == nv.LANES else nv.read_some(r, by + i, 0, left)
        if code == MOD and _exceeds(v, w, QUOTIENT):
            for j in range(i, i + left):
                rest = np.fmod(np.float64(p[at + j]), np.float64(r[by + j]))
                q[to + j] = nb.cast(rest, p[at + j])
        else:
            _put(q, to + i, _of_two(code, v, w), left, past)


@functools.partial(nb.separate, exact=True)
def compare(code, p, at, r, by, q, to, count):
    """Whether two float32 compare, as bytes."""
    for i in range(0, count, nv.LANES):
        left = min(count - i, nv.LANES)
        v = nv.read_all(p, at + i) if left == nv.LANES else nv.read_some(p, at + i, 0, left)
        w = nv.read_all(r, by + i) if left == nv.LANES else nv.read_some(r, by + i, 0, left)
        nv.write(q, to + i, 1, _compared(code, v, w), left)


def functions(code, count, v):
    """v[i] = f(v[i]) of a buffer of any type, for exp, log, sin, cos, tan and erf. Kernels only."""
    raise NotImplementedError("works inside a kernel only")


@overload(functions)
def _functions(code, count, v):
    if v.dtype == types.float32:
        return lambda code, count, v: unary(code, v, 0, v, 0, count, False)

    def impl(code, count, v):
        for i in range(count):
            u = np.float64(v[i])
            if code == EXP:
                u = math.exp(u)
            elif code == LOG:
                u = np.log(u)
            elif code == SIN:
                u = math.sin(u)
            elif code == COS:
                u = math.cos(u)
            elif code == TAN:
                u = math.tan(u)
            else:
                u = math.erf(u)
            v[i] = nb.cast(u, v[0])

    return impl


def functions_of_two(code, count, v, w):
    """v[i] = f(v[i], w[i]) of buffers of any type, for pow and mod. Kernels only."""
    raise NotImplementedError("works inside a kernel only")


@overload(functions_of_two)
def _functions_of_two(code, count, v, w):
    if v.dtype == types.float32:
        return lambda code, count, v, w: binary(code, v, 0, w, 0, v, 0, count, False)

    def impl(code, count, v, w):
        for i in range(count):
            x, y = np.float64(v[i]), np.float64(w[i])
            v[i] = nb.cast(math.pow(x, y) if code == POW else np.fmod(x, y), v[0])

    return impl
