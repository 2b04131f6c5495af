"""``fold.copies``: shuffles of channels and pixels on a CPU, any strides and types, in Numba.

Method: axes that are one run of memory in both tensors are one loop (`lucidnn.ops.folding.loops`). The two innermost
loops are those with a step of 1 in one of the tensors, so that what is read a line of the cache at a time is written
soon: two or four streams are merged or split in registers (see ``_numba/vector.py``), others go element by element.
Cost: the memory traffic.
"""

import math

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic, register_jitable

from ...core.engine import Config, Engine, Refusals, Run
from ...core.heuristics import roofline
from ...core.problem import Problem
from ...ops.folding import Loop, loops
from .. import _numba as nb
from .._numba import vector as nv

TYPES = ("f64", "f32", "f16", "bf16")
PARTS = 64
GRAIN = 32768  # elements that are worth a thread
UNIT = 4096  # elements to which a unit's places, some divisions, are worked out once

# What the table of 64-bit integers holds: how many outer loops, units of work, how many turns of the next loop are one
# unit, how many such units it has; three numbers of that loop and of the two inner ones, then of each outer one.
OUTER, UNITS, TURNS, CHUNKS, NEXT, A, B, LOOPS = 0, 1, 2, 3, 4, 7, 10, 13


@intrinsic
def _read_fours(typingctx, p, at):
    """p[at + 4 * lane], all lanes; reads nothing past the last."""

    def codegen(context, builder, signature, values):
        size = signature.args[0].dtype.bitwidth // 8
        vector = ir.VectorType(context.get_value_type(signature.args[0].dtype), nv.LANES)
        rows = []
        for first in (0, 16, 32, 45):  # the last starts early, to end with the last lane
            spot = builder.gep(values[0], [builder.add(values[1], ir.Constant(values[1].type, first))])
            rows.append(builder.load(builder.bitcast(spot, vector.as_pointer()), align=size))
        wide = ir.VectorType(ir.IntType(32), 2 * nv.LANES)
        joined = [
            builder.shuffle_vector(*rows[i : i + 2], ir.Constant(wide, list(range(2 * nv.LANES)))) for i in (0, 2)
        ]
        order = [4 * i for i in range(12)] + [2 * nv.LANES + 16 + 4 * i - 45 for i in range(12, 16)]
        found = builder.shuffle_vector(*joined, ir.Constant(ir.VectorType(ir.IntType(32), nv.LANES), order))
        return nv._widen(builder, signature.args[0].dtype, found)

    return nv._reading(p)(p, types.int64), codegen


@register_jitable
def _tile(x, at, y, to, many, xa, ya, count, xb, yb):
    """The two inner loops; what is left of the inner one by vectors goes element by element."""
    done = 0
    if xb == 1 and yb == 1:
        for a in range(many):
            for i in range(0, count - nv.LANES + 1, nv.LANES):
                nv._write_all(y, to + a * ya + i, nv.read_all(x, at + a * xa + i))
        done = count // nv.LANES * nv.LANES
    elif many == 2 and ya == 1 and yb == 2 and xb == 1:
        for i in range(0, count - nv.LANES + 1, nv.LANES):
            first, second = nv.read_all(x, at + i), nv.read_all(x, at + xa + i)
            nv._write_all(y, to + 2 * i, nv.lower_half(first, second))
            nv._write_all(y, to + 2 * i + nv.LANES, nv.upper_half(first, second))
        done = count // nv.LANES * nv.LANES
    elif many == 4 and ya == 1 and yb == 4 and xb == 1:
        for i in range(0, count - nv.LANES + 1, nv.LANES):
            v0, v1 = nv.read_all(x, at + i), nv.read_all(x, at + xa + i)
            v2, v3 = nv.read_all(x, at + 2 * xa + i), nv.read_all(x, at + 3 * xa + i)
            even, odd = nv.lower_half(v0, v2), nv.lower_half(v1, v3)
            nv._write_all(y, to + 4 * i, nv.lower_half(even, odd))
            nv._write_all(y, to + 4 * i + nv.LANES, nv.upper_half(even, odd))
            even, odd = nv.upper_half(v0, v2), nv.upper_half(v1, v3)
            nv._write_all(y, to + 4 * i + 2 * nv.LANES, nv.lower_half(even, odd))
            nv._write_all(y, to + 4 * i + 3 * nv.LANES, nv.upper_half(even, odd))
        done = count // nv.LANES * nv.LANES
    elif many == 2 and xa == 1 and xb == 2 and yb == 1:
        for a in range(2):
            for i in range(0, count - nv.LANES + 1, nv.LANES):
                nv._write_all(y, to + a * ya + i, nv.read_pairs(x, at + a + 2 * i))
        done = count // nv.LANES * nv.LANES
    elif xb == 4 and yb == 1:
        for a in range(many):
            for i in range(0, count - nv.LANES + 1, nv.LANES):
                nv._write_all(y, to + a * ya + i, _read_fours(x, at + a * xa + 4 * i))
        done = count // nv.LANES * nv.LANES
    for a in range(many):
        for i in range(done, count):
            y[to + a * ya + i * yb] = x[at + a * xa + i * xb]


@nb.kernel
def _copy_part(part, parts, x_address, y_address, table, like):
    t, x, y = nb.pointer(table, np.int64(0)), nb.pointer(x_address, like), nb.pointer(y_address, like)
    many, xa, ya, count, xb, yb = t[A], t[A + 1], t[A + 2], t[B], t[B + 1], t[B + 2]
    turns, chunks, size, x_step, y_step = t[TURNS], t[CHUNKS], t[NEXT], t[NEXT + 1], t[NEXT + 2]
    for unit in range(t[UNITS] * part // parts, t[UNITS] * (part + 1) // parts):
        first, rest = unit % chunks * turns, unit // chunks
        at, to = first * x_step, first * y_step
        for loop in range(t[OUTER] - 1, -1, -1):
            row = LOOPS + 3 * loop
            turn, rest = rest % t[row], rest // t[row]
            at += turn * t[row + 1]
            to += turn * t[row + 2]
        for _ in range(min(turns, size - first)):
            _tile(x, at, y, to, many, xa, ya, count, xb, yb)
            at += x_step
            to += y_step


@nb.kernel
def _copy(parts, threads, x, y, table, like):
    nb.launch(_copy_part, parts, threads, (x, y, table, like))


def _ordered(found: list[Loop]) -> list[Loop]:
    """The loops with the two innermost last: a long one with a step of 1 somewhere, around it another such."""

    def worth(one: Loop) -> tuple[bool, int]:
        return min(one.x, one.y) <= 1, one.size

    inner = sorted(found, key=worth)[-2:]
    outer = [one for one in found if one not in inner]
    missing = max(0, 3 - len(found))
    return [*[Loop(1, 0, 0)] * missing, *outer, *inner]


class Copies(Engine):
    name = "fold.copies"
    operations = ("shuffle",)
    targets = ("cpu",)
    notes = frozenset({"runtime_compilation"})

    def refusals(self, problem: Problem) -> list[str]:
        r = Refusals()
        r.require_tensors(problem.items, TYPES)
        return r

    def cost(self, problem: Problem, config: Config) -> float:
        return roofline(problem, flops=0.0) + problem["x"].numel * 0.5e-9 / problem.target.processors

    def build(self, problem: Problem, config: Config) -> Run:
        *outer, following, first, second = _ordered(loops(problem))
        turns = max(1, min(following.size, UNIT // max(1, first.size * second.size)))
        chunks = -(-following.size // turns)
        units = 0 if problem.is_empty else math.prod(one.size for one in outer) * chunks
        head = (len(outer), units, turns, chunks, *following, *first, *second)
        table = np.array([*head, *(n for one in outer for n in one)], dtype=np.int64)
        address, like = table.ctypes.data, nb.token(problem["x"].dtype)
        parts = max(1, min(units, problem["x"].numel // GRAIN, PARTS))
        threads = nb.threads if parts > 1 else lambda: 1
        _copy(0, 1, 0, 0, address, like)  # compiles, or loads from disk; no part is run

        def run(tensors, workspace, _keep=table):
            _copy(parts, threads(), tensors[0].data_ptr(), tensors[1].data_ptr(), address, like)

        return run
