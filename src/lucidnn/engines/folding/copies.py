"""``fold.copies``: shuffles of channels and pixels on a CPU, any strides and types, in Numba.

Method: axes that are one run of memory in both tensors are one loop (`lucidnn.ops.folding.loops`). The two innermost
loops are those with a step of 1 in one of the tensors, so that what is read a line of the cache at a time is written
soon: two streams are merged or split in registers where the factor is 2 (see ``_numba/vector.py``), other factors go
element by element. Cost: the memory traffic.
"""

import numpy as np
from numba.extending import register_jitable

from ...core.engine import Config, Engine, Refusals, Run
from ...core.heuristics import roofline
from ...core.problem import Problem
from ...ops.folding import Loop, loops
from .. import _numba as nb
from .._numba import vector as nv

TYPES = ("f64", "f32", "f16", "bf16")
PARTS = 64
GRAIN = 32768  # elements that are worth a thread

# What the table of 64-bit integers holds: how many outer loops, their turns in all, three numbers of the two inner
# loops, then of each outer one.
OUTER, UNITS, A, B, LOOPS = 0, 1, 2, 5, 8


@register_jitable
def _tile(x, at, y, to, t):
    """The two inner loops."""
    many, xa, ya, count, xb, yb = t[A], t[A + 1], t[A + 2], t[B], t[B + 1], t[B + 2]
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
    elif many == 2 and xa == 1 and xb == 2 and yb == 1:
        for a in range(2):
            for i in range(0, count - nv.LANES + 1, nv.LANES):
                nv._write_all(y, to + a * ya + i, nv.read_pairs(x, at + a + 2 * i))
        done = count // nv.LANES * nv.LANES
    for a in range(many):
        for i in range(done, count):
            y[to + a * ya + i * yb] = x[at + a * xa + i * xb]


@nb.kernel
def _copy_part(part, parts, x_address, y_address, table, like):
    t, x, y = nb.pointer(table, np.int64(0)), nb.pointer(x_address, like), nb.pointer(y_address, like)
    for unit in range(t[UNITS] * part // parts, t[UNITS] * (part + 1) // parts):
        rest, at, to = unit, 0, 0
        for loop in range(t[OUTER] - 1, -1, -1):
            row = LOOPS + 3 * loop
            turn, rest = rest % t[row], rest // t[row]
            at += turn * t[row + 1]
            to += turn * t[row + 2]
        _tile(x, at, y, to, t)


@nb.kernel
def _copy(parts, threads, x, y, table, like):
    nb.launch(_copy_part, parts, threads, (x, y, table, like))


def _ordered(found: list[Loop]) -> list[Loop]:
    """The loops with the two innermost last: a long one with a step of 1 somewhere, around it another such."""

    def worth(one: Loop) -> tuple[bool, int]:
        return min(one.x, one.y) <= 1, one.size

    inner = sorted(found, key=worth)[-2:]
    outer = [one for one in found if one not in inner]
    if len(inner) < 2:
        inner = [Loop(1, 0, 0), *inner]
    return [*outer, *inner]


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
        ordered = _ordered(loops(problem))
        units = int(np.prod([one.size for one in ordered[:-2]], dtype=np.int64))
        if problem.is_empty:
            units = 0
        head = (len(ordered) - 2, units, *ordered[-2], *ordered[-1])
        table = np.array([*head, *(n for one in ordered[:-2] for n in one)], dtype=np.int64)
        address, like = table.ctypes.data, nb.token(problem["x"].dtype)
        parts = max(1, min(units, problem["x"].numel // GRAIN, PARTS))
        threads = nb.threads if parts > 1 else lambda: 1
        _copy(0, 1, 0, 0, address, like)  # compiles, or loads from disk; no part is run

        def run(tensors, workspace, _keep=table):
            _copy(parts, threads(), tensors[0].data_ptr(), tensors[1].data_ptr(), address, like)

        return run
