"""Vectors for resampling and sampling by a grid on a CPU: weighted sums, pairs of neighbours, blocks turned.

They go with the vectors of sixteen lanes in ``_numba/vector.py``.

``read_neighbours`` fetches eight pairs ``p[place], p[place + 1]`` into the lanes 2 i and 2 i + 1. A pair is one access
of twice the width, so that two taps of bilinear sampling cost one, and no instruction that gathers is needed: on the
processors at hand those are slower than loads put together.
"""

from __future__ import annotations

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from .._numba import vector as nv

_I32 = ir.IntType(32)
_HALF = nv.LANES // 2


def _fused(builder, v, w, total):
    kind = "f64" if isinstance(v.type.element, ir.DoubleType) else "f32"
    signature = ir.FunctionType(v.type, [v.type] * 3)
    name = f"llvm.fmuladd.v{nv.LANES}{kind}"
    return builder.call(cgutils.get_or_insert_function(builder.module, signature, name), [v, w, total])


@intrinsic
def times(typingctx, v, factor):
    """A vector times one number."""

    def codegen(context, builder, signature, values):
        return builder.fmul(values[0], nv._splat(builder, values[1]), flags=("contract",))

    return v(v, factor), codegen


@intrinsic
def plus_times(typingctx, total, v, factor):
    """Add v times one number."""

    def codegen(context, builder, signature, values):
        return _fused(builder, values[1], nv._splat(builder, values[2]), values[0])

    return total(total, v, factor), codegen


@intrinsic
def plus_product(typingctx, total, v, w):
    """Add v w, lane by lane."""

    def codegen(context, builder, signature, values):
        return _fused(builder, values[1], values[2], values[0])

    return total(total, v, v), codegen


@intrinsic
def only(typingctx, v, bits):
    """Lanes of v whose `bits`, whole numbers of the same width, are all ones; 0 where they are 0, whatever is there."""

    def codegen(context, builder, signature, values):
        masked = builder.and_(builder.bitcast(values[0], values[1].type), values[1])
        return builder.bitcast(masked, values[0].type)

    return v(v, bits), codegen


@intrinsic
def total(typingctx, v):
    """The sum of all lanes, in a fixed order."""

    def codegen(context, builder, signature, values):
        v, width = values[0], nv.LANES
        while width > 1:
            width //= 2
            low = ir.Constant(ir.VectorType(_I32, width), list(range(width)))
            high = ir.Constant(ir.VectorType(_I32, width), list(range(width, 2 * width)))
            v = builder.fadd(builder.shuffle_vector(v, v, low), builder.shuffle_vector(v, v, high))
        return builder.extract_element(v, ir.Constant(_I32, 0))

    return v.element(v), codegen


@intrinsic
def sums_of_pairs(typingctx, v, w):
    """Lane 2 i plus lane 2 i + 1 of v, then those of w."""

    def codegen(context, builder, signature, values):
        even, odd = (ir.Constant(ir.VectorType(_I32, nv.LANES), list(range(k, 2 * nv.LANES, 2))) for k in (0, 1))
        return builder.fadd(builder.shuffle_vector(*values, even), builder.shuffle_vector(*values, odd))

    return v(v, v), codegen


@intrinsic
def read_neighbours(typingctx, p, start, places, first):
    """p[start + place] and p[start + place + 1] for the eight `places` (a pointer to int64) from `first` on."""
    element = p.dtype

    def codegen(context, builder, signature, values):
        pointer, start, places, first = values
        bits = element.bitwidth
        memory = context.get_value_type(element)
        wide = {16: _I32, 32: ir.DoubleType()}.get(bits)
        single = ir.VectorType(wide, _HALF) if wide else ir.VectorType(memory, nv.LANES)
        found = ir.Constant(single, ir.Undefined)
        origin = builder.gep(pointer, [start])
        for i in range(_HALF):
            place = builder.load(builder.gep(places, [builder.add(first, ir.Constant(first.type, i))]))
            spot = builder.gep(origin, [place])
            if wide:
                value = builder.load(builder.bitcast(spot, wide.as_pointer()), align=bits // 8)
                found = builder.insert_element(found, value, ir.Constant(_I32, i))
                continue
            for k in range(2):
                value = builder.load(builder.gep(spot, [ir.Constant(first.type, k)]))
                found = builder.insert_element(found, value, ir.Constant(_I32, 2 * i + k))
        return nv._widen(builder, element, builder.bitcast(found, ir.VectorType(memory, nv.LANES)))

    return nv._reading(p)(p, types.int64, types.CPointer(types.int64), types.int64), codegen


@intrinsic
def read_places(typingctx, p, start, places, first):
    """p[start + place] for the sixteen `places` (a pointer to int64) from `first` on."""

    def codegen(context, builder, signature, values):
        pointer, start, places, first = values
        origin = builder.gep(pointer, [start])
        found = ir.Constant(ir.VectorType(context.get_value_type(p.dtype), nv.LANES), ir.Undefined)
        for i in range(nv.LANES):
            place = builder.load(builder.gep(places, [builder.add(first, ir.Constant(first.type, i))]))
            found = builder.insert_element(found, builder.load(builder.gep(origin, [place])), ir.Constant(_I32, i))
        return nv._widen(builder, p.dtype, found)

    return nv._reading(p)(p, types.int64, types.CPointer(types.int64), types.int64), codegen


@intrinsic
def turn(typingctx, p, at):
    """Transpose the sixteen by sixteen numbers from p[at] on where they are."""

    def codegen(context, builder, signature, values):
        pointer, at = values
        lanes, size = nv.LANES, p.dtype.bitwidth // 8
        vector = ir.VectorType(context.get_value_type(p.dtype), lanes)
        spots = [
            builder.bitcast(
                builder.gep(pointer, [builder.add(at, ir.Constant(at.type, i * lanes))]), vector.as_pointer()
            )
            for i in range(lanes)
        ]
        rows = [builder.load(spot, align=size) for spot in spots]
        step = lanes // 2
        while step:
            upper = [i if i & step == 0 else lanes + i - step for i in range(lanes)]
            lower = [i + step if i & step == 0 else lanes + i for i in range(lanes)]
            for i in range(lanes):
                if i & step == 0:
                    pair = rows[i], rows[i + step]
                    rows[i] = builder.shuffle_vector(*pair, ir.Constant(ir.VectorType(_I32, lanes), upper))
                    rows[i + step] = builder.shuffle_vector(*pair, ir.Constant(ir.VectorType(_I32, lanes), lower))
            step //= 2
        for spot, row in zip(spots, rows, strict=True):
            builder.store(row, spot, align=size)
        return context.get_dummy_value()

    return types.void(p, types.int64), codegen
