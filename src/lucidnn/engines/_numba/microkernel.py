"""The register tile under the CPU convolutions, and a square transpose, as LLVM IR.

``multiply_tile`` computes a tile of a matrix product with all its accumulators in vector registers::

    c[m, n] (+)= sum over taps t, steps i of  a[m * a_m + taps[t] + i * a_k] * b[(t * steps + i) * width + n]

for ``m < rows`` and ``n < width``. Sums start from zero or from one row of values for all m (the bias), and what `c`
holds is added if wished; a ReLU can be applied before they are stored. One element of `a` is broadcast and multiplied
with vectors of `b`.
The two strides and the table of tap offsets make the three directions of a convolution one kernel: forward and data
gradient let m run over pixels and the steps over channels (and over filter columns, where those are neighbours in
memory), the filter gradient lets m run over channels and the steps over pixels.

``multiply_each`` is the same for depthwise convolutions: a vector of `a` where the others broadcast one element, so
that lane n of `c` sums products of lane n alone.

`width` is two vectors (``multiply_wide``) or one. The number of rows is at most ``rows_limit()``: as many as
leave registers for `b` and one broadcast (14 with 32 registers, 6 with 16). Each number of rows is its own piece of
straight code; a switch picks it. In the first-level cache all of them with at least eight accumulators reach 98 % of
the fused multiply-add rate of an AVX-512 core, measured.

Numba cannot promise this from a loop nest: it would have to keep a local array in registers. Emitting the IR does, and
LLVM still chooses instructions, addresses and order. After Goto and van de Geijn, "Anatomy of high-performance matrix
multiplication", 2008, whose inner kernel this is, and Georganas et al., "Anatomy of high-performance deep learning
convolutions on SIMD architectures", 2018, who run it on images without unfolding them.
"""

from __future__ import annotations

import functools

from llvmlite import ir
from numba.core import types
from numba.core.registry import cpu_target
from numba.extending import intrinsic

ADD, RELU = 1, 2  # flags of a tile: add what is in c; clamp the result at zero
_I64 = ir.IntType(64)
_I32 = ir.IntType(32)


@functools.cache
def _registers() -> tuple[int, int]:
    """Bytes of a vector register and their number, for the processor that Numba compiles for."""
    triple, _, features = cpu_target.target_context.codegen().magic_tuple()
    present = {name[1:] for name in features.split(",") if name.startswith("+")}
    if "avx512f" in present:
        return 64, 32
    if "avx2" in present:
        return 32, 16
    return 16, 32 if triple.startswith(("aarch64", "arm64")) else 16


def lanes(itemsize: int) -> int:
    """Elements of a vector register: the unit in which filters are packed."""
    return _registers()[0] // itemsize


def registers() -> int:
    """How many vector registers there are."""
    return _registers()[1]


def rows_limit() -> int:
    """The most rows of a tile."""
    return (_registers()[1] - 4) // 2


def float_type(element) -> ir.Type:
    """LLVM's type of a Numba float."""
    return ir.DoubleType() if element == types.float64 else ir.FloatType()


def _suffix(vectors: int, lane_count: int, element) -> str:
    return f"{vectors}x{lane_count}{'d' if element == types.float64 else 's'}"


def _emit_tile(module, rows: int, vectors: int, element, each: bool) -> ir.Function:
    """One function for one number of rows: ``void(a, a_m, a_k, taps, count, steps, b, c, first, flags)``."""
    scalar = float_type(element)
    size = 8 if element == types.float64 else 4
    lane_count = lanes(size)
    vector = ir.VectorType(scalar, lane_count)
    name = f"tile_{rows}_{_suffix(vectors, lane_count, element)}{'_each' * each}"
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [_I64] * 10), name)
    function.linkage = "internal"
    function.attributes.add("noinline")
    a, a_m, a_k, taps, count, steps, b, c, first, flags = function.args
    entry, tap, step, tap_end, ended, previous, summed, clamp, finish = (
        function.append_basic_block(n)
        for n in ("entry", "tap", "step", "tap_end", "ended", "previous", "summed", "clamp", "finish")
    )
    fma_name = f"llvm.fmuladd.v{lane_count}{'f64' if size == 8 else 'f32'}"
    fma = module.globals.get(fma_name) or ir.Function(module, ir.FunctionType(vector, [vector] * 3), fma_name)
    number = rows * vectors

    def word(value: int) -> ir.Constant:
        return ir.Constant(_I64, value)

    build = ir.IRBuilder(entry)
    row_step, depth_step = build.mul(a_m, word(size)), build.mul(a_k, word(size))
    result = build.inttoptr(c, vector.as_pointer())
    zero = ir.Constant(vector, None)

    # Every row starts from the same values: those at `first`, or zero.
    start = build.inttoptr(build.select(build.icmp_signed("==", first, word(0)), c, first), vector.as_pointer())
    has_first = build.icmp_signed("!=", first, word(0))
    values = [build.load(build.gep(start, [word(j)]), align=size) for j in range(vectors)]
    values = [build.select(has_first, value, zero) for value in values]
    build.branch(tap)

    # One tap: a run of steps along which both operands advance by constant strides.
    build.position_at_end(tap)

    def carried(type_, *incoming):
        phi = build.phi(type_)
        for value, block in incoming:
            phi.add_incoming(value, block)
        return phi

    index = carried(_I64, (word(0), entry))
    tap_b = carried(_I64, (b, entry))
    tap_sums = [carried(vector, (values[i % vectors], entry)) for i in range(number)]
    offset = build.load(build.gep(build.inttoptr(taps, _I64.as_pointer()), [index]))
    tap_a = build.add(a, build.mul(offset, word(size)))
    build.branch(step)

    build.position_at_end(step)
    left = carried(_I64, (steps, tap))
    here_a = carried(_I64, (tap_a, tap))
    here_b = carried(_I64, (tap_b, tap))
    sums = [carried(vector, (value, tap)) for value in tap_sums]
    columns = [
        build.load(build.inttoptr(build.add(here_b, word(j * lane_count * size)), vector.as_pointer()), align=size)
        for j in range(vectors)
    ]
    undefined = ir.Constant(vector, ir.Undefined)
    everywhere = ir.Constant(ir.VectorType(_I32, lane_count), [0] * lane_count)
    following = list(sums)
    for m in range(rows):
        address = build.add(here_a, build.mul(row_step, word(m)))
        if each:
            spread = build.load(build.inttoptr(address, vector.as_pointer()), align=size)
        else:
            value = build.load(build.inttoptr(address, scalar.as_pointer()), align=size)
            spread = build.insert_element(undefined, value, ir.Constant(_I32, 0))
            spread = build.shuffle_vector(spread, undefined, everywhere)
        for j in range(vectors):
            i = m * vectors + j
            following[i] = build.call(fma, [spread, columns[j], sums[i]])
    next_a = build.add(here_a, depth_step)
    next_b = build.add(here_b, word(vectors * lane_count * size))
    remaining = build.sub(left, word(1))
    for phi, value in zip([left, here_a, here_b, *sums], [remaining, next_a, next_b, *following], strict=True):
        phi.add_incoming(value, step)
    build.cbranch(build.icmp_signed(">", remaining, word(0)), step, tap_end)

    build.position_at_end(tap_end)
    next_index = build.add(index, word(1))
    for phi, value in zip([index, tap_b, *tap_sums], [next_index, next_b, *following], strict=True):
        phi.add_incoming(value, tap_end)
    build.cbranch(build.icmp_signed("<", next_index, count), tap, ended)

    # What `c` holds is added at the end, not summed onto: one long chain of additions loses more digits than a few
    # short ones, and the framework's kernels keep theirs short.
    build.position_at_end(ended)
    build.cbranch(build.icmp_signed("!=", build.and_(flags, word(ADD)), word(0)), previous, summed)

    build.position_at_end(previous)
    held = [build.load(build.gep(result, [word(i)]), align=size) for i in range(number)]
    totals = [build.fadd(value, before) for value, before in zip(following, held, strict=True)]
    build.branch(summed)

    build.position_at_end(summed)
    whole = [carried(vector, (following[i], ended), (totals[i], previous)) for i in range(number)]
    build.cbranch(build.icmp_signed("!=", build.and_(flags, word(RELU)), word(0)), clamp, finish)

    build.position_at_end(clamp)
    clamped = [build.select(build.fcmp_ordered("<=", value, zero), zero, value) for value in whole]
    build.branch(finish)

    build.position_at_end(finish)
    final = [carried(vector, (whole[i], summed), (clamped[i], clamp)) for i in range(number)]
    for i, value in enumerate(final):
        build.store(value, build.gep(result, [word(i)]), align=size)
    build.ret_void()
    return function


def _emit_switch(module, vectors: int, element, each: bool) -> ir.Function:
    """``void(rows, a, a_m, ...)``: jumps to the tile with that many rows."""
    size = 8 if element == types.float64 else 4
    name = f"tile_{_suffix(vectors, lanes(size), element)}{'_each' * each}"
    if name in module.globals:
        return module.globals[name]
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [_I64] * 11), name)
    function.linkage = "internal"
    build = ir.IRBuilder(function.append_basic_block("entry"))
    nothing = function.append_basic_block("nothing")
    ir.IRBuilder(nothing).ret_void()
    choice = build.switch(function.args[0], nothing)
    for rows in range(1, rows_limit() + 1):
        block = function.append_basic_block(f"rows_{rows}")
        case = ir.IRBuilder(block)
        case.call(_emit_tile(module, rows, vectors, element, each), function.args[1:], tail=True)
        case.ret_void()
        choice.add_case(ir.Constant(_I64, rows), block)
    return function


def _tile_intrinsic(vectors: int, each: bool = False):
    @intrinsic
    def multiply(typingctx, like, rows, a, a_m, a_k, taps, count, steps, b, c, first, flags):
        element = types.unliteral(like)
        if element not in (types.float32, types.float64):
            return None

        def codegen(context, builder, signature, values):
            function = _emit_switch(builder.module, vectors, element, each)
            builder.call(function, values[1:])
            return context.get_dummy_value()

        return types.void(element, *[types.int64] * 11), codegen

    return multiply


multiply_wide = _tile_intrinsic(2)
multiply_narrow = _tile_intrinsic(1)
multiply_each = _tile_intrinsic(1, each=True)


@intrinsic
def transpose(typingctx, like, source, source_row, target, target_row):
    """``target[j, i] = source[i, j]`` for a square of ``lanes`` elements a side; rows `*_row` elements apart.

    Addresses and distances are 64-bit integers. ``log2(lanes)`` rounds of two-vector shuffles, in registers.
    """
    element = types.unliteral(like)
    if element not in (types.float32, types.float64):
        return None

    def codegen(context, builder, signature, values):
        size = 8 if element == types.float64 else 4
        side = lanes(size)
        module = builder.module
        name = f"transpose_{_suffix(1, side, element)}"
        function = module.globals.get(name)
        if function is None:
            vector = ir.VectorType(float_type(element), side)
            function = ir.Function(module, ir.FunctionType(ir.VoidType(), [_I64] * 4), name)
            function.linkage = "internal"
            function.attributes.add("noinline")
            src, src_row, dst, dst_row = function.args
            build = ir.IRBuilder(function.append_basic_block("entry"))

            def row(base, distance, i):
                step = build.mul(distance, ir.Constant(_I64, i * size))
                return build.inttoptr(build.add(base, step), vector.as_pointer())

            block = [build.load(row(src, src_row, i), align=size) for i in range(side)]
            # Swap the off-diagonal quarters of blocks of 2h x 2h, for h = side/2, ..., 1.
            half = side // 2
            while half:
                low = [j if not j & half else side + j - half for j in range(side)]
                high = [j + half if not j & half else side + j for j in range(side)]
                for i in range(side):
                    if not i & half:
                        first, second = block[i], block[i + half]
                        for mask, place in ((low, i), (high, i + half)):
                            picks = ir.Constant(ir.VectorType(_I32, side), mask)
                            block[place] = build.shuffle_vector(first, second, picks)
                half //= 2
            for i in range(side):
                build.store(block[i], row(dst, dst_row, i), align=size)
            build.ret_void()
        builder.call(function, values[1:])
        return context.get_dummy_value()

    return types.void(element, *[types.int64] * 4), codegen
