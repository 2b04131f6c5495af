"""``elementwise.blocked``: every mode on a CPU, any types, broadcasting and strides, in Numba.

Method: a block of `BLOCK` neighbouring points is read into buffers in the first-level cache, scaled, taken through the
mode's own short loop, added to and written. The mode and the types are looked at once a block, so that three kernels
(float32, float64 and 64-bit whole numbers) serve every mix. The axes are merged first (``_loops.py``). As a block is
read before it is written, y may be a tensor that is read with the same strides.

A large result of the type that is computed in is written past the caches (``_streams.py``).

Cost: the memory traffic. Exponential, logarithm, power and the like have vectors for float32 (``_functions.py``); for
float64 they are the C library's, at some nanoseconds a value.
"""

from typing import Any

import numpy as np

from ...core.engine import Config, Engine, Refusals, Run
from ...core.heuristics import roofline
from ...core.problem import Problem
from ...ops.elementwise import MODES, TYPES
from .. import _numba as nb
from .._numba.stack import stack
from ._access import KINDS, read, write
from ._functions import BINARY, COMPARISONS, UNARY
from ._loops import INDEX, Loops
from ._neighbours import binary, compare, functions, functions_of_two, unary
from ._streams import LEAST, settle, write_out

BLOCK = 512
DIRECT_SPAN = 4096  # without buffers
GRAIN = 16384  # points that are worth a thread
PARTS = 64
SLOTS = ("x", "b", "t", "z", "y", INDEX)
OUTER, UNITS, CHUNKS, LANES, CODE = range(5)
TYPE, DIRECT, PAST, SPAN, STEP, LOOPS = 5, 10, 11, 12, 13, 19  # five types, six steps of the innermost loop, then a row
ROW = 7  # for each outer loop: its size and steps
CODES = {name: mode.code for name, mode in MODES.items()}
DIRECT_MODES = {*UNARY, *BINARY, *COMPARISONS}


@nb.exact_kernel
def _binary(code, count, v, w, t, lower, upper, slope):
    """Modes that read two tensors or three."""
    one, zero = nb.cast(1, v[0]), nb.cast(0, v[0])
    if code == ADD:
        for i in range(count):
            v[i] += w[i]
    elif code == ADD_SQUARE:
        for i in range(count):
            v[i] += w[i] * w[i]
    elif code == SUB:
        for i in range(count):
            v[i] -= w[i]
    elif code == MUL:
        for i in range(count):
            v[i] *= w[i]
    elif code == DIV:
        for i in range(count):
            v[i] = nb.cast(v[i] / w[i], v[0])
    elif code == MIN:
        for i in range(count):
            v[i] = v[i] if (v[i] < w[i]) | (v[i] != v[i]) else w[i]
    elif code == MAX:
        for i in range(count):
            v[i] = v[i] if (v[i] > w[i]) | (v[i] != v[i]) else w[i]
    elif (code == MOD) | (code == POW):
        functions_of_two(code, count, v, w)
    elif code == AND:
        for i in range(count):
            v[i] = one if (v[i] != 0) & (w[i] != 0) else zero
    elif code == OR:
        for i in range(count):
            v[i] = one if (v[i] != 0) | (w[i] != 0) else zero
    elif code == EQ:
        for i in range(count):
            v[i] = one if v[i] == w[i] else zero
    elif code == NEQ:
        for i in range(count):
            v[i] = one if v[i] != w[i] else zero
    elif code == GT:
        for i in range(count):
            v[i] = one if v[i] > w[i] else zero
    elif code == GE:
        for i in range(count):
            v[i] = one if v[i] >= w[i] else zero
    elif code == LT:
        for i in range(count):
            v[i] = one if v[i] < w[i] else zero
    elif code == LE:
        for i in range(count):
            v[i] = one if v[i] <= w[i] else zero
    elif code == RELU_BWD:
        for i in range(count):
            below = zero if slope == 0 else slope * v[i]
            u = below if w[i] <= lower else v[i]
            v[i] = zero if w[i] >= upper else u
    else:
        for i in range(count):
            v[i] = v[i] if t[i] != 0 else w[i]


@nb.exact_kernel
def _unary(code, count, v, lower, upper, slope):
    one, zero = nb.cast(1, v[0]), nb.cast(0, v[0])
    if code == ABS:
        for i in range(count):
            v[i] = abs(v[i])
    elif code == CEIL:
        for i in range(count):
            v[i] = nb.cast(np.ceil(v[i]), v[0])
    elif code == FLOOR:
        for i in range(count):
            v[i] = nb.cast(np.floor(v[i]), v[0])
    elif code == RSQRT:
        for i in range(count):
            v[i] = nb.cast(one / np.sqrt(v[i]), v[0])
    elif code == SQRT:
        for i in range(count):
            v[i] = nb.cast(np.sqrt(v[i]), v[0])
    elif (code == EXP) | (code == LOG) | (code == SIN) | (code == COS) | (code == TAN) | (code == ERF):
        functions(code, count, v)
    elif code == NEG:
        for i in range(count):
            v[i] = -v[i]
    elif code == RECIPROCAL:
        for i in range(count):
            v[i] = nb.cast(one / v[i], v[0])
    elif code == NOT:
        for i in range(count):
            v[i] = one - v[i]
    elif code == CLIP:
        for i in range(count):
            u = upper if v[i] > upper else v[i]
            v[i] = lower if u < lower else u
    elif code == RELU:
        for i in range(count):
            below = lower if slope == 0 else lower + slope * (v[i] - lower)
            u = below if v[i] <= lower else v[i]
            v[i] = upper if v[i] >= upper else u
    elif code == LOGICAL_NOT:
        for i in range(count):
            v[i] = one if v[i] == 0 else zero


# The codes, as constants that the kernels above are compiled with.
(
    _, ADD, ADD_SQUARE, SUB, MUL, DIV, MIN, MAX, MOD, POW, ABS, CEIL, FLOOR, RSQRT, SQRT, EXP, LOG, NEG, SIN, COS, TAN,
    ERF, RECIPROCAL, NOT, CLIP, LOGICAL_NOT, AND, OR, EQ, NEQ, GT, GE, LT, LE, SELECT, GEN_INDEX, RELU, RELU_BWD,
) = range(len(MODES))  # fmt: skip


@nb.jitable
def _direct(code, x, x_at, b, b_at, y, y_at, count, past):
    """Modes of `DIRECT_MODES` on float32 neighbours, past the buffers."""
    p, q, r = nb.pointer(x, np.float32(0)), nb.pointer(b, np.float32(0)), nb.pointer(y, np.float32(0))
    if (code >= EQ) & (code <= LE):
        compare(code, p, x_at, q, b_at, nb.pointer(y, np.uint8(0)), y_at, count)
    elif b == 0:
        unary(code, p, x_at, r, y_at, count, past)
    else:
        binary(code, p, x_at, q, b_at, r, y_at, count, past)


@nb.kernel
def _part(part, parts, x, b, t_address, z, y, table, numbers, like):
    t, numbers = nb.pointer(table, np.int64(0)), nb.pointer(numbers, like)
    v, w, c, at = stack(BLOCK, like), stack(BLOCK, like), stack(BLOCK, like), stack(6, np.int64(0))
    for unit in range(t[UNITS] * part // parts, t[UNITS] * (part + 1) // parts):
        rest, lane = unit // t[CHUNKS], unit % t[CHUNKS] * t[SPAN]
        count = min(t[LANES] - lane, t[SPAN])
        for slot in range(6):
            at[slot] = lane * t[STEP + slot]
        for loop in range(t[OUTER] - 1, -1, -1):
            row = LOOPS + ROW * loop
            here, rest = rest % t[row], rest // t[row]
            for slot in range(6):
                at[slot] += here * t[row + 1 + slot]
        if t[DIRECT]:
            _direct(t[CODE], x, at[0], b, at[1], y, at[4], count, t[PAST] != 0)
            continue
        if t[CODE] == GEN_INDEX:
            for i in range(count):
                v[i] = nb.cast(at[5] + i * t[STEP + 5], v[0])
        else:
            read(t[TYPE], x, at[0], t[STEP], count, v, 0)
        if numbers[0] != 1:
            for i in range(count):
                v[i] *= numbers[0]
        if b != 0:
            read(t[TYPE + 1], b, at[1], t[STEP + 1], count, w, 0)
            if numbers[1] != 1:
                for i in range(count):
                    w[i] *= numbers[1]
            if t_address != 0:
                read(t[TYPE + 2], t_address, at[2], t[STEP + 2], count, c, 0)
            _binary(t[CODE], count, v, w, c, numbers[3], numbers[4], numbers[5])
        elif t[CODE] > 0:
            _unary(t[CODE], count, v, numbers[3], numbers[4], numbers[5])
        if z != 0:
            read(t[TYPE + 3], z, at[3], t[STEP + 3], count, w, 0)
            for i in range(count):
                v[i] += numbers[2] * w[i]
        if t[PAST]:
            write_out(y, at[4], v, count, t[PAST])
        else:
            write(t[TYPE + 4], y, at[4], t[STEP + 4], count, v)
    if t[PAST]:
        settle()


@nb.kernel
def _run(parts, threads, x, b, t, z, y, table, numbers, like):
    nb.launch(_part, parts, threads, (x, b, t, z, y, table, numbers, like))


class Blocked(Engine):
    name = "elementwise.blocked"
    operations = ("elementwise_fwd",)
    targets = ("cpu",)
    notes = frozenset({"runtime_compilation"})

    def refusals(self, problem: Problem) -> list[str]:
        r = Refusals()
        r.require_tensors(problem.items, TYPES)
        return r

    def cost(self, problem: Problem, config: Config) -> float:
        loops = Loops.of(problem)
        functions = ("mod", "pow", "log", "sin", "cos", "tan", "erf")
        wide = any(t.dtype == "f64" for t in problem.tensors.values())
        slow = wide and problem.op.mode in functions  # type: ignore[attr-defined]
        blocks = loops.rows * -(-loops.sizes[-1] // BLOCK)
        seconds = problem["y"].numel * (5e-9 if slow else 0.3e-9) + blocks * 30e-9
        return roofline(problem, flops=0.0) + seconds / problem.target.processors

    def build(self, problem: Problem, config: Config) -> Run:
        op: Any = problem.op
        loops, tensors = Loops.of(problem), problem.tensors
        wide = any(t.dtype == "f64" for t in tensors.values())
        whole = op.is_whole(tensors) and op.mode != "identity" or all(t.dtype in TYPES[4:] for t in tensors.values())
        form = "i64" if whole else "f64" if wide or op.is_whole(tensors) else "f32"
        like = nb.token(form)
        strides = [loops.strides.get(slot, (0,) * len(loops.sizes)) for slot in SLOTS]
        kinds = [KINDS[tensors[slot].dtype] if slot in tensors else -1 for slot in SLOTS[:5]]
        lanes = loops.sizes[-1]
        plain = op.alpha1 == op.alpha2 == 1.0 and "z" not in tensors
        plain &= all(t.dtype == "f32" for role, t in problem.items if role != "y")
        plain &= tensors["y"].dtype == ("bool" if op.mode in COMPARISONS else "f32")
        near = all(strides[SLOTS.index(role)][-1] == 1 for role in tensors)
        direct = int(op.mode in DIRECT_MODES and plain and near)
        large = problem.bytes >= LEAST and strides[4][-1] == 1 and tensors["y"].dtype == form
        past = tensors["y"].itemsize if large else 0
        span = DIRECT_SPAN if direct else BLOCK
        chunks = -(-lanes // span)
        units = loops.rows * chunks
        outer = [n for i, size in enumerate(loops.sizes[:-1]) for n in (size, *(s[i] for s in strides))]
        head = [len(loops.sizes) - 1, units, chunks, lanes, CODES[op.mode], *kinds, direct, past, span]
        head += [s[-1] for s in strides]
        table = np.array([*head, *outer], dtype=np.int64)
        # Whole numbers have no limits: infinite ones could not be written down.
        limits = [op.lower, op.upper, op.slope] if not whole else [0, 0, 0]
        numbers = np.array([op.alpha1, op.alpha2, problem.epilogue.beta, *limits], dtype=like.dtype)
        address, numbers_address = table.ctypes.data, numbers.ctypes.data
        parts = max(1, min(units, problem["y"].numel // GRAIN, PARTS)) if units else 0
        threads = nb.threads if parts > 1 else lambda: 1
        _run(0, 1, 0, 0, 0, 0, 0, address, numbers_address, like)  # compiles, or loads from disk
        roles = problem.inputs + problem.outputs
        order = [roles.index(slot) if slot in tensors else None for slot in SLOTS[:5]]

        def run(tensors: tuple[Any, ...], workspace: Any, _keep: Any = (table, numbers)) -> None:
            x, b, t, z, y = [0 if i is None else tensors[i].data_ptr() for i in order]
            _run(parts, threads(), x, b, t, z, y, address, numbers_address, like)

        return run
