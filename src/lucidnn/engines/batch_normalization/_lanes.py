"""What batch normalization on a CPU does with vectors (``_numba/vector.py``) beyond adding and writing them."""

from __future__ import annotations

from llvmlite import ir
from numba.extending import intrinsic

from .. import _numba as nb
from .._numba import vector as nv

_FUSED = ("contract",)
STRETCH = 256  # neighbouring channels whose code has no loop


@nb.jitable
def read(p, at, many):
    """Neighbours in the first lanes, all of them mostly."""
    if many == nv.LANES:
        return nv.read_all(p, at)
    return nv.read_some(p, at, 0, many)


@intrinsic
def less(typingctx, v, w):
    """The difference of two vectors."""
    return nv._operation(v, [v, v], lambda b, v, w: b.fsub(v, w))


@intrinsic
def times(typingctx, v, w):
    """Two vectors multiplied, lane by lane."""
    return nv._operation(v, [v, v], lambda b, v, w: b.fmul(v, w))


@intrinsic
def scaled(typingctx, v, factor, term):
    """``v * factor + term``, rounded once where the processor can."""

    def emit(b, v, factor, term):
        return b.fadd(b.fmul(v, factor, flags=_FUSED), term, flags=_FUSED)

    return nv._operation(v, [v, v, v], emit)


@intrinsic
def without(typingctx, v, w, factor):
    """``v - w * factor``, rounded once where the processor can."""

    def emit(b, v, w, factor):
        return b.fsub(v, b.fmul(w, factor, flags=_FUSED), flags=_FUSED)

    return nv._operation(v, [v, v, v], emit)


@intrinsic
def rectified(typingctx, v):
    """The ReLU; NaN stays."""

    def emit(b, v):
        zero = ir.Constant(v.type, None)
        return b.select(b.fcmp_ordered("<=", v, zero), zero, v)

    return nv._operation(v, [v], emit)


@intrinsic
def let_through(typingctx, y, dy):
    """The ReLU's gradient: `dy` but where y is not above zero; NaN counts as above."""

    def emit(b, y, dy):
        zero = ir.Constant(y.type, None)
        return b.select(b.fcmp_ordered("<=", y, zero), zero, dy)

    return nv._operation(y, [y, y], emit)


@nb.jitable
def _end(v, z, at, many, y, to, added, relu):
    """What is left to do with a vector of normalized values."""
    if added:
        v = nv.add(v, read(z, at, many))
    if relu:
        v = rectified(v)
    nv.write(y, to, 1, v, many)


@nb.jitable
def normalize_run(x, z, y, x_at, z_at, y_at, count, m, f, b, added, relu):
    """Neighbours of one channel: the parameters are vectors of one number."""
    for i in range(0, count, nv.LANES):
        many = min(count - i, nv.LANES)
        v = scaled(less(read(x, x_at + i, many), m), f, b)
        _end(v, z, z_at + i, many, y, y_at + i, added, relu)


@nb.jitable
def normalize_pixel(x, z, y, x_at, z_at, y_at, count, m, f, b, added, relu):
    """Neighbouring channels, each with its own parameters; there is memory for whole vectors of these."""
    # Straight code for a run of so many reads and writes at a fifth more of the memory's rate than any shorter loop.
    straight = 0 if added or relu else count // STRETCH * STRETCH
    for i in range(0, straight, STRETCH):
        for j in range(0, STRETCH, nv.LANES):
            v = less(nv.read_all(x, x_at + i + j), nv.read_all(m, i + j))
            nv.write(y, y_at + i + j, 1, scaled(v, nv.read_all(f, i + j), nv.read_all(b, i + j)), nv.LANES)
    with_relu = count // STRETCH * STRETCH if relu and not added else 0
    for i in range(0, with_relu, STRETCH):
        for j in range(0, STRETCH, nv.LANES):
            v = less(nv.read_all(x, x_at + i + j), nv.read_all(m, i + j))
            v = rectified(scaled(v, nv.read_all(f, i + j), nv.read_all(b, i + j)))
            nv.write(y, y_at + i + j, 1, v, nv.LANES)
    for i in range(straight + with_relu, count, nv.LANES):
        many = min(count - i, nv.LANES)
        v = less(read(x, x_at + i, many), nv.read_all(m, i))
        v = scaled(v, nv.read_all(f, i), nv.read_all(b, i))
        _end(v, z, z_at + i, many, y, y_at + i, added, relu)
