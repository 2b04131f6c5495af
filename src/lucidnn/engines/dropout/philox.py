"""``dropout.philox``: dropout and its gradient on a CPU, any layout and types, in Numba.

Method: the work goes by runs of elements that follow each other in logical order, a thousand at a time. Their random
words are made first, those of sixteen counters together (`lucidnn.engines._numba.philox`); then the run is read,
multiplied and written. Where such a run steps far in memory while another axis is dense (channels-last images),
a tile of runs is taken together, the words made with neighbouring runs as lanes, and memory is read along the dense
axis. With `feature` one word serves a run of one map. The bits are those of every other engine.

Cost: the memory traffic, or one cycle an element for the words. Nothing is added up, so that nothing depends on
the number of threads. Limit: six loops after merging.
"""

import math

import numpy as np

from ...core.engine import Config, Engine, Refusals, Run
from ...core.heuristics import roofline
from ...core.problem import Problem
from ...ops.dropout import scale, threshold
from .. import _numba as nb
from .._numba.philox import COUNTERS, philox, words_by_planes, words_in_order
from ._loops import NUMBER, Loops, dropout_loops

TYPES = ("f64", "f32", "f16", "bf16")
CHUNK = 1024  # elements of a run whose words are made together
TILE_RUN, TILE_LANES = 32, 128  # of a tile of runs
GRAIN = 16384  # elements that are worth a thread
LOOPS = 5  # most loops beside the run

# Table: counts and flags; then for the run, the lanes of a tile, and every other loop its size and five steps.
UNITS, CHUNKS, LANE_CHUNKS, LIMIT, NONE, HAS_Z, HAS_MASK, SAME, LOOP_TABLE = range(9)
SIZE, X, Z, Y, MASK, E = range(6)
RUN_AT, LANES_AT, OUTER_AT = LOOP_TABLE, LOOP_TABLE + 6, LOOP_TABLE + 12


@nb.jitable
def _outer(unit, t, at):
    """Places of the five tensors (numbers among them) for point `unit` of the loops beside run and lanes."""
    for tensor in range(X, E + 1):
        at[tensor] = 0
    for loop in range(LOOPS):
        base = OUTER_AT + 6 * loop
        if t[base + SIZE] > 1:
            i = unit % t[base + SIZE]
            unit //= t[base + SIZE]
            for tensor in range(X, E + 1):
                at[tensor] += i * t[base + tensor]


@nb.kernel
def _runs_part(
    part, parts, x_address, state_address, z_address, y_address, mask_address, factor, beta, table, x_like, z_like,
    y_like,
):  # fmt: skip
    x, z, y = nb.pointer(x_address, x_like), nb.pointer(z_address, z_like), nb.pointer(y_address, y_like)
    mask = nb.pointer(mask_address, np.uint8(0))
    state, t = nb.pointer(state_address, np.int64(0)), nb.pointer(table, np.int64(0))
    seed, offset = np.uint64(state[0]), np.uint64(state[1])
    k0, k1 = np.uint32(seed), np.uint32(seed >> np.uint64(32))
    c2, c3 = np.uint32(offset), np.uint32(offset >> np.uint64(32))
    memory = np.empty(CHUNK + 8 * COUNTERS, np.uint32)
    words = nb.pointer(memory.ctypes.data, np.uint32(0))  # an array would look at the sign of every index
    at = np.empty(6, np.int64)
    limit, none, none_dropped = np.uint32(t[LIMIT]), t[NONE] != 0, t[LIMIT] == 0
    x_step, z_step, y_step, mask_step = t[RUN_AT + X], t[RUN_AT + Z], t[RUN_AT + Y], t[RUN_AT + MASK]
    zero = factor * nb.cast(0, factor)
    plain, same = x_step == 1 and y_step == 1 and t[HAS_Z] == 0, t[SAME] != 0
    for unit in range(t[UNITS] * part // parts, t[UNITS] * (part + 1) // parts):
        _outer(unit // t[CHUNKS], t, at)
        start = unit % t[CHUNKS] * CHUNK
        count = min(CHUNK, t[RUN_AT + SIZE] - start)
        number = at[E] + start * t[RUN_AT + E]
        before = number & 3
        if same:
            c = np.uint64(number >> 2)
            words[0], words[1], words[2], words[3] = philox(np.uint32(c), np.uint32(c >> np.uint64(32)), c2, c3, k0, k1)
            word, before = words[before], 0
            words[0] = word
            if not plain or t[HAS_MASK] != 0:
                for i in range(count):
                    words[i] = word
        else:
            for i in range(0, (before + count + 3) >> 2, COUNTERS):
                words_in_order(words, 4 * i, np.uint64((number >> 2) + i), c2, c3, k0, k1)
        x_at, y_at = at[X] + start * x_step, at[Y] + start * y_step
        z_at, mask_at = at[Z] + start * z_step, at[MASK] + start * mask_step
        if plain and same:
            kept = factor if words[0] >= limit else zero
            for i in range(count):
                nb.store(y, y_at + i, nb.cast(nb.load(x, x_at + i), factor) * kept)
        elif plain:
            for i in range(count):
                kept = factor if words[before + i] >= limit else zero
                nb.store(y, y_at + i, nb.cast(nb.load(x, x_at + i), factor) * kept)
        elif x_step == 1 and y_step == 1 and z_step == 1:
            for i in range(count):
                kept = factor if words[before + i] >= limit else zero
                add = beta * nb.cast(nb.load(z, z_at + i), factor)
                nb.store(y, y_at + i, nb.cast(nb.load(x, x_at + i), factor) * kept + add)
        else:
            for i in range(count):
                kept = factor if words[before + i] >= limit else zero
                v = nb.cast(nb.load(x, x_at + i * x_step), factor) * kept
                if t[HAS_Z] != 0:
                    v += beta * nb.cast(nb.load(z, z_at + i * z_step), factor)
                nb.store(y, y_at + i * y_step, v)
        if t[HAS_MASK] != 0:
            for i in range(count):
                kept = (words[before + i] >= limit or none_dropped) and not none
                mask[mask_at + i * mask_step] = np.uint8(1) if kept else np.uint8(0)
    memory[0] = 0  # it lives until here


@nb.kernel
def _tiles_part(
    part, parts, x_address, state_address, z_address, y_address, mask_address, factor, beta, table, x_like, z_like,
    y_like,
):  # fmt: skip
    x, z, y = nb.pointer(x_address, x_like), nb.pointer(z_address, z_like), nb.pointer(y_address, y_like)
    mask = nb.pointer(mask_address, np.uint8(0))
    state, t = nb.pointer(state_address, np.int64(0)), nb.pointer(table, np.int64(0))
    seed, offset = np.uint64(state[0]), np.uint64(state[1])
    k0, k1 = np.uint32(seed), np.uint32(seed >> np.uint64(32))
    c2, c3 = np.uint32(offset), np.uint32(offset >> np.uint64(32))
    memory = np.empty((TILE_RUN + 8) * TILE_LANES, np.uint32)
    words = nb.pointer(memory.ctypes.data, np.uint32(0))
    at = np.empty(6, np.int64)
    limit, none = np.uint32(t[LIMIT]), t[NONE] != 0
    zero = factor * nb.cast(0, factor)
    quad_step = t[LANES_AT + E] >> 2
    y_dense = t[LANES_AT + X] == 1 and t[LANES_AT + Y] == 1
    for unit in range(t[UNITS] * part // parts, t[UNITS] * (part + 1) // parts):
        lane = unit % t[LANE_CHUNKS] * TILE_LANES
        rest = unit // t[LANE_CHUNKS]
        start = rest % t[CHUNKS] * TILE_RUN
        _outer(rest // t[CHUNKS], t, at)
        wide = min(TILE_LANES, t[LANES_AT + SIZE] - lane)
        count = min(TILE_RUN, t[RUN_AT + SIZE] - start)
        number = at[E] + start + lane * t[LANES_AT + E]
        before = number & 3
        for i in range((before + count + 3) >> 2):
            first = (number >> 2) + i
            row = 4 * i * TILE_LANES
            for j in range(0, wide, COUNTERS):
                c = np.uint64(first + j * quad_step)
                words_by_planes(words, row + j, TILE_LANES, c, np.uint64(quad_step), c2, c3, k0, k1)
        for i in range(count):
            row = (before + i) * TILE_LANES
            x_at = at[X] + (start + i) * t[RUN_AT + X] + lane * t[LANES_AT + X]
            y_at = at[Y] + (start + i) * t[RUN_AT + Y] + lane * t[LANES_AT + Y]
            if y_dense and t[HAS_Z] == 0:
                for j in range(wide):
                    kept = factor if words[row + j] >= limit else zero
                    nb.store(y, y_at + j, nb.cast(nb.load(x, x_at + j), factor) * kept)
            else:
                z_at = at[Z] + (start + i) * t[RUN_AT + Z] + lane * t[LANES_AT + Z]
                for j in range(wide):
                    kept = factor if words[row + j] >= limit else zero
                    v = nb.cast(nb.load(x, x_at + j * t[LANES_AT + X]), factor) * kept
                    if t[HAS_Z] != 0:
                        v += beta * nb.cast(nb.load(z, z_at + j * t[LANES_AT + Z]), factor)
                    nb.store(y, y_at + j * t[LANES_AT + Y], v)
            if t[HAS_MASK] != 0:
                mask_at = at[MASK] + (start + i) * t[RUN_AT + MASK] + lane * t[LANES_AT + MASK]
                for j in range(wide):
                    kept = words[row + j] >= limit and not none
                    mask[mask_at + j * t[LANES_AT + MASK]] = np.uint8(1) if kept else np.uint8(0)
    memory[0] = 0  # it lives until here


@nb.kernel
def _runs(parts, threads, x, state, z, y, mask, factor, beta, table, x_like, z_like, y_like):
    nb.launch(_runs_part, parts, threads, (x, state, z, y, mask, factor, beta, table, x_like, z_like, y_like))


@nb.kernel
def _tiles(parts, threads, x, state, z, y, mask, factor, beta, table, x_like, z_like, y_like):
    nb.launch(_tiles_part, parts, threads, (x, state, z, y, mask, factor, beta, table, x_like, z_like, y_like))


def _run_loop(loops: Loops) -> int:
    """The loop that runs go along: the dense one where its elements share a word or number each other."""
    numbers = loops.strides[NUMBER]
    if numbers[loops.lanes] in (0, 1) or 1 not in numbers:
        return loops.lanes
    return numbers.index(1)


def _in_tiles(loops: Loops, run: int) -> bool:
    """Whether the lanes of a tile lie along another loop than the run."""
    return run != loops.lanes and loops.strides[NUMBER][loops.lanes] % 4 == 0 and loops.sizes[loops.lanes] >= 4


class Philox(Engine):
    name = "dropout.philox"
    operations = ("dropout_fwd", "dropout_bwd")
    targets = ("cpu",)
    notes = frozenset({"runtime_compilation"})

    def refusals(self, problem: Problem) -> list[str]:
        r = Refusals()
        for role, t in problem.items:
            if role not in ("state", "mask"):
                r.require(t.dtype in TYPES, f"{role} of type {', '.join(TYPES)}", t.dtype)
            r.require(t.numel > 0, f"elements in {role}", str(t))
        if not r:
            loops = len(dropout_loops(problem).sizes)
            r.require(loops <= LOOPS + 1, f"at most {LOOPS + 1} axes after merging", loops)
            feature = problem.op.feature  # type: ignore[attr-defined]
            numbers = dropout_loops(problem).strides[NUMBER]
            r.require(max(numbers) == 0 or 1 in numbers or feature, "elements numbered one by one", numbers)
        return r

    def cost(self, problem: Problem, config: Config) -> float:
        loops = dropout_loops(problem)
        run = _run_loop(loops)
        strided = run != loops.lanes and not _in_tiles(loops, run)
        words = 30.0 * problem[problem.outputs[0]].numel
        return roofline(problem, flops=words, dtype="f32", memory_efficiency=0.2 if strided else 0.8)

    def build(self, problem: Problem, config: Config) -> Run:
        loops, op = dropout_loops(problem), problem.op
        run = _run_loop(loops)
        tiles = _in_tiles(loops, run)
        limit = threshold(op.p)  # type: ignore[attr-defined]
        first, out = problem.inputs[0], problem.outputs[0]
        order = (first, "z", out, "mask", NUMBER)
        outer = [i for i in reversed(range(len(loops.sizes))) if i != run and not (tiles and i == loops.lanes)]
        chunks = -(-loops.sizes[run] // (TILE_RUN if tiles else CHUNK))
        lane_chunks = -(-loops.sizes[loops.lanes] // TILE_LANES) if tiles else 1
        units = math.prod(loops.sizes[i] for i in outer) * chunks * lane_chunks
        numbers: list[int] = [
            units, chunks, lane_chunks, min(limit, 2**32 - 1), limit == 2**32, "z" in problem.tensors,
            "mask" in problem.tensors, loops.strides[NUMBER][run] == 0,
        ]  # fmt: skip

        def loop(i: int | None) -> list[int]:
            if i is None:
                return [1, 0, 0, 0, 0, 0]
            return [loops.sizes[i], *(loops.strides[role][i] if role in loops.strides else 0 for role in order)]

        for i in (run, loops.lanes if tiles else None, *outer, *[None] * (LOOPS - len(outer))):
            numbers += loop(i)
        table = np.array(numbers, np.int64)
        address = table.ctypes.data
        types = [problem[role].dtype for role in (first, "z" if "z" in problem.tensors else first, out)]
        likes = tuple(nb.token(kind) for kind in types)
        real = np.float64 if "f64" in types else np.float32
        factor, beta = real(scale(op.p)), real(problem.epilogue.beta)  # type: ignore[attr-defined]
        numel = problem[out].numel
        parts = max(1, min(units, numel // GRAIN, 16 * problem.target.processors))
        threads = nb.threads if parts > 1 else lambda: 1
        kernel = _tiles if tiles else _runs
        kernel(0, 1, 0, 0, 0, 0, 0, factor, beta, address, *likes)  # compiles, or loads from disk; no part is run
        has_z, has_mask = "z" in problem.tensors, "mask" in problem.tensors

        def call(tensors, workspace, table=table):
            x, state = tensors[0].data_ptr(), tensors[1].data_ptr()
            z = tensors[2].data_ptr() if has_z else 0
            y = tensors[2 + has_z].data_ptr()
            mask = tensors[3 + has_z].data_ptr() if has_mask else 0
            kernel(parts, threads(), x, state, z, y, mask, factor, beta, address, *likes)

        return call
