"""Register tiles for depthwise convolutions on rows of pixels: forward and filter gradient, as LLVM IR.

A depthwise filter meets one channel, so no product of matrices hides in it. Where pixels of a row are neighbours in
memory, a vector holds neighbouring outputs of one row, and a tile is some rows by some vectors of them.

``correlate`` computes, with all sums in registers, ::

    c[p, q] (+)= sum over columns s, rows r of  x[p + r, q + offset[s]] * w[s, r]

A vector of x, read once, serves every row p that it reaches (r = h - p): a filter of R rows on a tile of P rows reads
P + R - 1 vectors for P * R products. Few filter rows (`FILTER_ROWS`) are straight code with the filter's column in
registers. For any other number (`ANY`), not below `ROWS[-1]`, those rows of x that meet all rows of the tile are a
loop, of which a caller may leave out rows of padding.

``accumulate`` is the filter gradient: ``sums[a, b] (+)= sum over h, q of dy[h - a, q] * x[h, q + offset[b]]``, a vector
each that is summed over its lanes at the end; a vector of x serves A filter rows, a vector of dy B filter columns.

What a tile finds in `c` is added last, so that a long sum is one of short ones. Numbers of rows beyond those that exist
here are rounded up: the memory after the last row must be there.
"""

from __future__ import annotations

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from .microkernel import float_type, lanes, registers

_I64, _I32 = ir.IntType(64), ir.IntType(32)
_MANY = registers() >= 32
ROWS = (1, 2, 4, 7) if _MANY else (1, 2, 4)
VECTORS = 3 if _MANY else 2  # the most of a tile
FILTER_ROWS = (1, 2, 3, 5, 7)
ANY = len(FILTER_ROWS)  # the code of any other number
GRADIENT_ROWS = (1, 2, 3, 5, 7) if _MANY else (1, 2, 3)
GRADIENT_COLUMNS = 3


class _Emitter:
    """Typed loads, stores and sums of one function under construction; addresses are 64-bit integers."""

    def __init__(self, function: ir.Function, element, half: bool = False):
        self.module = function.module
        self.build = ir.IRBuilder(function.append_basic_block("entry"))
        self.function = function
        self.size = 8 if element == types.float64 else 4
        self.lanes = lanes(self.size) // 2 if half else lanes(self.size)
        self.scalar = float_type(element)
        self.vector = ir.VectorType(self.scalar, self.lanes)
        self.zero = ir.Constant(self.vector, None)
        suffix = f"v{self.lanes}{'f64' if self.size == 8 else 'f32'}"
        name = f"llvm.fmuladd.{suffix}"
        kind = ir.FunctionType(self.vector, [self.vector] * 3)
        self._fma = self.module.globals.get(name) or ir.Function(self.module, kind, name)

    def word(self, value: int) -> ir.Constant:
        return ir.Constant(_I64, value)

    def at(self, base, step, number: int):
        return self.build.add(base, self.build.mul(step, self.word(number)))

    def load(self, address, number: int = 0):
        address = self.build.add(address, self.word(number * self.lanes * self.size))
        return self.build.load(self.build.inttoptr(address, self.vector.as_pointer()), align=self.size)

    def store(self, value, address, number: int = 0):
        address = self.build.add(address, self.word(number * self.lanes * self.size))
        self.build.store(value, self.build.inttoptr(address, self.vector.as_pointer()), align=self.size)

    def everywhere(self, address, number: int = 0):
        """One element in every lane."""
        address = self.build.add(address, self.word(number * self.size))
        value = self.build.load(self.build.inttoptr(address, self.scalar.as_pointer()), align=self.size)
        undefined = ir.Constant(self.vector, ir.Undefined)
        single = self.build.insert_element(undefined, value, ir.Constant(_I32, 0))
        mask = ir.Constant(ir.VectorType(_I32, self.lanes), [0] * self.lanes)
        return self.build.shuffle_vector(single, undefined, mask)

    def integer(self, address):
        return self.build.load(self.build.inttoptr(address, _I64.as_pointer()), align=8)

    def fma(self, a, b, c):
        return self.build.call(self._fma, [a, b, c])

    def loop(self, first, last, carried, body):
        """``for i in first .. last: carried = body(i, carried)``; gives what is carried out."""
        build, function = self.build, self.function
        before = build.block
        head, inside, after = (function.append_basic_block(n) for n in ("head", "inside", "after"))
        build.branch(head)
        build.position_at_end(head)
        index = build.phi(_I64)
        values = [build.phi(value.type) for value in carried]
        build.cbranch(build.icmp_signed("<", index, last), inside, after)
        build.position_at_end(inside)
        following = body(index, values)
        step = build.add(index, self.word(1))
        end = build.block
        build.branch(head)
        for phi, start, end_value in zip([index, *values], [first, *carried], [step, *following], strict=True):
            phi.add_incoming(start, before)
            phi.add_incoming(end_value, end)
        build.position_at_end(after)
        return values


def _named(module, name: str, arguments: int) -> tuple[ir.Function, bool]:
    """A function of so many integers, and whether it is new."""
    if name in module.globals:
        return module.globals[name], False
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [_I64] * arguments), name)
    function.linkage = "internal"
    function.attributes.add("noinline")
    return function, True


def _emit_correlate(module, rows: int, vectors: int, taps: int, element) -> ir.Function:
    """``void(x, x_pitch, offsets, count, w, w_step, c, c_pitch, add, filter_rows, first, last)``, in bytes."""
    function, _ = _named(module, f"correlate_{rows}_{vectors}_{taps}_{element}", 12)
    # Half a vector: twice as many a cycle where a core has two units of half the width.
    e = _Emitter(function, element, half=vectors == 0)
    vectors = max(vectors, 1)
    x, x_pitch, offsets, count, w, w_step, c, c_pitch, add, filter_rows, first, last = function.args
    vector_bytes = lanes(e.size) * e.size

    def step(sums, h_address, column):
        """The products of one row of x; `column(p)` is the filter's element that row p meets, or None."""
        read = [e.load(h_address, v) for v in range(vectors)]
        for p in range(rows):
            if (value := column(p)) is not None:
                for v in range(vectors):
                    sums[p * vectors + v] = e.fma(read[v], value, sums[p * vectors + v])
        return sums

    def filter_column(s, sums):
        offset = e.integer(e.build.add(offsets, e.build.mul(s, e.word(8))))
        start = e.build.add(x, e.build.mul(offset, e.word(e.size)))
        here = e.build.add(w, e.build.mul(s, w_step))
        sums = list(sums)
        if taps:
            values = [e.everywhere(here, r) for r in range(taps)]
            for h in range(rows + taps - 1):
                column = {p: values[h - p] for p in range(rows) if 0 <= h - p < taps}
                sums = step(sums, e.at(start, x_pitch, h), column.get)
            return sums

        def row(h, sums, column):
            """Row h of x; row p of the tile meets row h - p of the filter, if `column` says so."""
            place = e.build.add(here, e.build.mul(h, e.word(e.size)))
            address = e.build.add(start, e.build.mul(h, x_pitch))
            return step(list(sums), address, lambda p: e.everywhere(place, -p) if column(p) else None)

        for h in range(rows - 1):
            sums = row(e.word(h), sums, lambda p, h=h: p <= h)
        sums = e.loop(first, last, sums, lambda h, sums: row(h, sums, lambda p: True))
        for h in range(rows - 1):
            sums = row(e.build.add(filter_rows, e.word(h)), sums, lambda p, h=h: p > h)
        return sums

    sums = e.loop(e.word(0), count, [e.zero] * (rows * vectors), filter_column)
    adds = e.build.icmp_signed("!=", add, e.word(0))
    for p in range(rows):
        for v in range(vectors):
            place = e.build.add(e.at(c, c_pitch, p), e.word(v * vector_bytes))
            before = e.build.select(adds, e.load(place), e.zero)
            e.store(e.build.fadd(sums[p * vectors + v], before), place)
    e.build.ret_void()
    return function


def _emit_accumulate(module, rows: int, columns: int, element) -> ir.Function:
    """``void(dy, dy_pitch, dy_back, x, x_pitch, offsets, lines, vectors, sums, sums_step, add)``; in bytes."""
    function, _ = _named(module, f"accumulate_{rows}_{columns}_{element}", 11)
    e = _Emitter(function, element)
    dy, dy_pitch, dy_back, x, x_pitch, offsets, lines, vectors, sums, sums_step, add = function.args
    vector_bytes = e.word(lanes(e.size) * e.size)
    shifts = [e.build.mul(e.integer(e.build.add(offsets, e.word(8 * b))), e.word(e.size)) for b in range(columns)]

    def line(h, held):
        x_line = e.build.add(x, e.build.mul(h, x_pitch))
        dy_line = e.build.add(dy, e.build.mul(h, dy_pitch))

        def vector(j, held):
            held = list(held)
            along = e.build.mul(j, vector_bytes)
            x_here, dy_here = e.build.add(x_line, along), e.build.add(dy_line, along)
            read = [e.load(e.build.add(x_here, shift)) for shift in shifts]
            for a in range(rows):
                gradient = e.load(e.build.sub(dy_here, e.build.mul(dy_back, e.word(a))))
                for b in range(columns):
                    held[a * columns + b] = e.fma(gradient, read[b], held[a * columns + b])
            return held

        return e.loop(e.word(0), vectors, held, vector)

    held = e.loop(e.word(0), lines, [e.zero] * (rows * columns), line)
    adds = e.build.icmp_signed("!=", add, e.word(0))
    for a in range(rows):
        for b in range(columns):
            place = e.build.add(e.at(sums, sums_step, a), e.build.mul(vector_bytes, e.word(b)))
            before = e.build.select(adds, e.load(place), e.zero)
            e.store(e.build.fadd(held[a * columns + b], before), place)
    e.build.ret_void()
    return function


def _emit_switch(module, name: str, cases, arguments: int) -> ir.Function:
    """``void(code, ...)`` that jumps to the function of that code; `cases` makes them, in order."""
    function, new = _named(module, name, arguments + 1)
    if new:
        build = ir.IRBuilder(function.append_basic_block("entry"))
        nothing = function.append_basic_block("nothing")
        ir.IRBuilder(nothing).ret_void()
        choice = build.switch(function.args[0], nothing)
        for code, make in enumerate(cases):
            block = function.append_basic_block("case")
            case = ir.IRBuilder(block)
            case.call(make(), function.args[1:], tail=True)
            case.ret_void()
            choice.add_case(ir.Constant(_I64, code), block)
    return function


def _codegen(name: str, cases, element):
    made = [lambda module, case=case: case(module, element) for case in cases]

    def codegen(context, builder, signature, values):
        functions = [lambda make=make: make(builder.module) for make in made]
        function = _emit_switch(builder.module, f"{name}_{element}", functions, len(values) - 2)
        builder.call(function, values[1:])
        return context.get_dummy_value()

    return codegen


_CORRELATE = [
    lambda module, element, r=r, p=p, v=v: _emit_correlate(module, p, v, r, element)
    for r in (*FILTER_ROWS, 0)
    for p in ROWS
    for v in range(VECTORS + 1)
]
_ACCUMULATE = [
    lambda module, element, a=a, b=b: _emit_accumulate(module, a, b, element)
    for a in GRADIENT_ROWS
    for b in range(1, GRADIENT_COLUMNS + 1)
]


@intrinsic
def correlate(typingctx, like, code, x, x_pitch, offsets, count, w, w_step, c, c_pitch, add, filter_rows, first, last):
    """The tile of number `code`: ``(place in FILTER_ROWS, place in ROWS, vectors or 0 for half)``, row-major."""
    element = types.unliteral(like)
    return types.void(element, *[types.int64] * 13), _codegen("correlate", _CORRELATE, element)


@intrinsic
def accumulate(typingctx, like, code, dy, dy_pitch, dy_back, x, x_pitch, offsets, lines, vectors, sums, sums_step, add):
    """The tile of number `code`: ``(place in GRADIENT_ROWS, columns - 1)``, row-major."""
    element = types.unliteral(like)
    return types.void(element, *[types.int64] * 12), _codegen("accumulate", _ACCUMULATE, element)
