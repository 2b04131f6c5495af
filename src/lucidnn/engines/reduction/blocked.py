"""``reduce.blocked``: every reduction and its gradient on a CPU, any axes, types and strides, in Numba.

Method, forward, where neighbours in memory are kept: a block of up to `BLOCK` lanes keeps a result each, in the
first-level cache, while the reduced points pass by; every step is one short loop over neighbours that LLVM turns into
vectors. Few kept channels that are innermost (a picture of three colours) go into the lanes together with the reduced
points behind them, and the lanes are combined in steps of that period. Where neighbours are reduced, a lane is a run of
them, combined in registers and in float64 beyond 1024 values, four far runs side by side (``_rows.py``). 16-bit values
and strided ones pass through a buffer of float32.

Where the result is small, or a lane would sum thousands of values one after another, the reduced points are cut into
parts, fixed by the problem; each leaves its block in the workspace, and a second loop combines them in order.

Backward: blocks of dx, each read, computed and written by loops over a buffer. The extremes without an index first
count who is equal to y, products first multiply what is not 0 and count the zeros. The kernels are in ``_blocks.py``
and ``_rows.py``.

Cost: the memory traffic of x, once (two or three times where it is counted first). No limits beside the four types.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from ...core.engine import Config, Engine, Refusals, Run
from ...core.heuristics import roofline
from ...core.problem import Problem
from .. import _numba as nb
from . import _blocks as b
from . import _rows
from ._axes import NUMBER, Axes, Loop
from ._rows import PIECE

GRAIN = 65536  # points that are worth a thread
PARTS = 64
UNITS = 32  # blocks of runs
DEEP = 2048  # values that a lane combines one after another
SHORT = 20  # runs that are so short that reading across them is faster


@dataclasses.dataclass(frozen=True)
class _Lanes:
    """Which loop the lanes lie along, and what is left; `period` is 0 where they are kept."""

    axes: Axes
    kept: tuple[Loop, ...]
    reduced: tuple[Loop, ...]
    lane: Loop
    size: int
    step: int
    period: int
    number: int
    run: Loop | None  # of values that are neighbours and are reduced: lanes are then runs, each taken by itself

    @classmethod
    def of(cls, axes: Axes) -> _Lanes:
        one = Loop(1, {"x": 1})
        innermost = min([*axes.kept, *axes.reduced], key=lambda loop: loop.strides["x"], default=one)
        across = min(axes.kept, key=lambda loop: loop.strides["x"], default=one)
        if innermost in axes.reduced and innermost.size < SHORT and across.size >= 64:
            innermost = across
        kept = tuple(loop for loop in axes.kept if loop is not innermost)
        reduced = tuple(loop for loop in axes.reduced if loop is not innermost)
        size, step = innermost.size, innermost.strides["x"]
        if innermost not in axes.kept:
            lane = kept[-1] if kept else one
            return cls(axes, kept[:-1], reduced, lane, lane.size, lane.strides["x"], 0, 0, innermost)
        behind = reduced[-1] if reduced else one
        if 2 * size <= b.BLOCK // 4 and behind.size > 1 and behind.strides["x"] == size * step:
            number = behind.strides[NUMBER]
            return cls(axes, kept, reduced[:-1], innermost, size * behind.size, step, size, number, None)
        return cls(axes, kept, reduced, innermost, size, step, 0, 0, None)

    @property
    def chunk(self) -> int:
        """Lanes of a block: whole periods; of runs as many as keep all threads busy."""
        if self.run is not None:
            # Where each run has parts all over x, blocks of many runs read x in its order; the parts are shared out.
            wanted = self.size if self.points >= 16 else max(4, self.axes.count // UNITS)
            return max(min(b.BLOCK, self.size, wanted), 1)
        whole = b.BLOCK // self.period * self.period if self.period else b.BLOCK
        return max(min(whole, self.size), 1)

    @property
    def blocks(self) -> int:
        return -(-self.size // self.chunk)

    @property
    def units(self) -> int:
        return math.prod(loop.size for loop in self.kept) * (1 if self.period else self.blocks)

    @property
    def points(self) -> int:
        """Points of the reduced loops outside."""
        return math.prod(loop.size for loop in self.reduced)

    @property
    def pieces(self) -> int:
        """Of a run."""
        return -(-self.run.size // PIECE) if self.run is not None else 1

    @property
    def steps(self) -> int:
        return self.points * (self.blocks if self.period else self.pieces)

    @property
    def splits(self) -> int:
        """Parts of the reduced points: enough for the threads, and for sums that are not too long."""
        if not self.units or self.steps < 2:
            return 1
        points = self.axes.count * self.axes.points
        wanted = -(-min(PARTS, points // GRAIN) // self.units) if self.units < 16 else 1
        deep = 1 if self.run is not None else -(-self.steps // DEEP)  # runs are summed in float64
        return max(1, min(self.steps, PARTS, max(wanted, deep)))


def _empty_fill(problem: Problem) -> float:
    """What is left of y where nothing is reduced."""
    mode: str = problem.op.mode  # type: ignore[attr-defined]
    return 1.0 if mode in ("mul", "mul_no_zeros") else math.nan if mode == "avg" else 0.0


class ReduceBlocked(Engine):
    name = "reduce.blocked"
    operations = ("reduce_fwd", "reduce_bwd")
    targets = ("cpu",)
    notes = frozenset({"runtime_compilation"})

    def refusals(self, problem: Problem) -> list[str]:
        r = Refusals()
        r.require_tensors(((role, t) for role, t in problem.items if role != "index"), b.TYPES)
        return r

    def _first(self, problem: Problem) -> list[str]:
        """Reductions that a gradient starts with, by their step."""
        op: Any = problem.op
        if op.name == "reduce_fwd":
            return []
        if op.mode == "mul":
            return ["mul_no_zeros", "zeros"]
        equal = {"min": "equal", "max": "equal", "amax": "equal_magnitude"}.get(op.mode)
        return [equal] if equal and "index" not in problem.inputs else []

    def _space(self, problem: Problem) -> int:
        """Bytes of the parts' results."""
        if problem.op.name == "reduce_bwd" and not self._first(problem):
            return 0
        lanes = _Lanes.of(Axes.of(problem))
        if lanes.splits == 1:
            return 0
        indexed = "index" in problem.outputs
        return lanes.units * lanes.splits * b.BLOCK * ((8 if _wide(problem) else 4) + 8 * indexed)

    def workspace_size(self, problem: Problem, config: Config) -> int:
        own = len(self._first(problem)) * Axes.of(problem).count * (8 if _wide(problem) else 4)
        return -(-own // 64) * 64 + self._space(problem)

    def cost(self, problem: Problem, config: Config) -> float:
        op: Any = problem.op
        main = problem["x" if op.name == "reduce_fwd" else "dx"]
        passes = len(self._first(problem)) + (op.name == "reduce_bwd")
        lanes = _Lanes.of(Axes.of(problem)) if "x" in problem.tensors else None
        steps = lanes.units * lanes.steps if lanes else main.numel / b.BLOCK
        slow = lanes is not None and (lanes.step != 1 or main.dtype in ("f16", "bf16"))
        each = (3e-10 if slow else 1e-10) * (4 if "index" in problem.outputs else 1)
        seconds = max(passes, 1) * (steps * 25e-9 + main.numel * each)
        return roofline(problem, flops=0.0) + seconds / problem.target.processors

    def build(self, problem: Problem, config: Config) -> Run:
        op: Any = problem.op
        like = nb.token("f64" if _wide(problem) else "f32")
        axes = Axes.of(problem)
        roles = problem.inputs + problem.outputs
        places = {role: i for i, role in enumerate(roles)}
        if op.name == "reduce_fwd":
            scale = problem.epilogue.alpha / (max(axes.points, 1) if op.mode == "avg" else 1)
            start = _empty_fill(problem) if not axes.points else b.START[b.CODES[op.mode]]
            own = {role: _kind(problem, role) for role in ("y", "z", "index") if role in roles}
            call = _reduction(problem, axes, op.mode, own, (scale, problem.epilogue.beta, start), like, {})
            x, y, z, index = (places.get(role) for role in ("x", "y", "z", "index"))

            def run(tensors: tuple[Any, ...], workspace: Any) -> None:
                at = [0 if i is None else tensors[i].data_ptr() for i in (x, z, y, index)]
                call(at[0], 0, *at[1:], 0 if workspace is None else workspace.data_ptr())

            return run
        first = self._first(problem)
        dense = {}
        step = 1
        for loop in reversed(axes.kept):
            dense[id(loop)], step = step, step * loop.size
        calls = []
        for name in first:
            own = {"y": b.TYPES["f64" if _wide(problem) else "f32"]}
            if name.startswith("equal"):
                own["ref"] = _kind(problem, "y")
            calls.append(_reduction(problem, axes, name, own, (1.0, 0.0, b.START[b.CODES[name]]), like, dense))
        spread = _spreading(problem, axes, dense if first else {}, like)
        size = axes.count * (8 if _wide(problem) else 4)
        behind = -(-len(first) * size // 64) * 64
        order = [places.get(role) for role in ("dy", "x", "y", "index")]
        last = places["dx"]

        def run_backward(tensors: tuple[Any, ...], workspace: Any) -> None:
            dy, x, y, index = [0 if i is None else tensors[i].data_ptr() for i in order]
            space = 0 if workspace is None else workspace.data_ptr()
            for number, call in enumerate(calls):
                call(x, y, 0, space + number * size, 0, space + behind)
            spread(dy, x, y, index, space if calls else 0, tensors[last].data_ptr())

        return run_backward


def _wide(problem: Problem) -> bool:
    return any(t.dtype == "f64" for _, t in problem.items)


def _kind(problem: Problem, role: str) -> int:
    if role == "index":
        return ("i32", "i64").index(problem[role].dtype)
    return b.TYPES[problem[role].dtype]


def _reduction(
    problem: Problem, axes: Axes, step: str, kinds: dict[str, int], numbers: tuple[float, float, float], like: Any,
    dense: dict[int, int],
) -> Any:  # fmt: skip
    """A function of the addresses of x, reference, z, result, index and workspace that reduces x.

    `kinds` has the types of what there is: y (the result), z, index, ref. `dense` has the result's steps where it is
    no tensor of the problem.
    """
    lanes = _Lanes.of(axes)

    def steps(loop: Loop) -> tuple[int, ...]:
        own = dense.get(id(loop), 0) if dense else loop.strides.get("y", 0)
        reference = loop.strides.get("y", 0) if "ref" in kinds else 0
        return own, loop.strides.get("z", 0), loop.strides.get("index", 0), reference

    head = [0] * b.HEAD
    head[b.CODE], head[b.KIND], head[b.ROOT] = b.CODES[step], _kind(problem, "x"), step == "norm2"
    for place, role in ((b.OUT_KIND, "y"), (b.Z_KIND, "z"), (b.REF_KIND, "ref"), (b.INDEX_KIND, "index")):
        head[place] = kinds.get(role, -1)
    head[b.UNITS], head[b.SPLITS], head[b.STEPS] = lanes.units, lanes.splits, lanes.steps
    head[b.KEPT], head[b.REDUCED] = len(lanes.kept), len(lanes.reduced)
    head[b.LANES], head[b.CHUNK], head[b.LANE_BLOCKS], head[b.PERIOD] = (
        lanes.size,
        lanes.chunk,
        lanes.blocks,
        lanes.period,
    )
    head[b.X_LANE], head[b.NUMBER_LANE] = lanes.step, lanes.number
    head[b.OUT_LANE], head[b.Z_LANE], head[b.INDEX_LANE], head[b.REF_LANE] = steps(lanes.lane)
    if lanes.run is not None:
        own = (lanes.run.size, lanes.run.strides["x"], lanes.run.strides.get(NUMBER, 0), lanes.pieces)
        head[b.RUN], head[b.RUN_STEP], head[b.RUN_NUMBER], head[b.PIECES] = own
    for loop in lanes.kept:
        head += [loop.size, loop.strides["x"], *steps(loop), 0]
    for loop in lanes.reduced:
        head += [loop.size, loop.strides["x"], loop.strides[NUMBER], 0, 0, 0, 0]
    table, reals = np.array(head, dtype=np.int64), np.array(numbers, dtype=like.dtype)
    points = axes.count * axes.points
    parts = max(1, min(lanes.units * lanes.splits, points // GRAIN, PARTS)) if lanes.units else 0
    threads = nb.threads if parts > 1 else lambda: 1
    kernel = b.reduce_blocks if lanes.run is None else _rows.reduce_rows
    kernel(0, 1, 0, 0, 0, 0, 0, 0, table.ctypes.data, reals.ctypes.data, like)  # compiles, or loads from disk
    address, reals_address = table.ctypes.data, reals.ctypes.data

    def call(x: int, ref: int, z: int, out: int, index: int, space: int, _keep: Any = (table, reals)) -> None:
        kernel(parts, threads(), x, ref, z, out, index, space, address, reals_address, like)

    return call


def _spreading(problem: Problem, axes: Axes, dense: dict[int, int], like: Any) -> Any:
    """A function of the addresses of dy, x, y, index, the first reductions' results and dx that writes dx."""
    op: Any = problem.op
    kind = {"avg": "add", "min": "equal", "max": "equal", "amax": "magnitude"}.get(op.mode, op.mode)
    if "index" in problem.inputs:
        kind = "index_sign" if op.mode == "amax" else "index"
    loops = sorted([*axes.kept, *axes.reduced], key=lambda loop: -loop.strides["dx"])
    lane = loops.pop() if loops else Loop(1, {})

    def steps(loop: Loop) -> list[int]:
        s = loop.strides
        own = [s.get(role, 0) for role in ("dy", "x", "y", "index")]
        return [*own, dense.get(id(loop), 0), s.get("dx", 0), s.get(NUMBER, 0)]

    rows = math.prod(loop.size for loop in loops)
    chunks = -(-lane.size // b.BLOCK)
    kinds = [_kind(problem, role) if role in problem.tensors else -1 for role in ("dy", "x", "y", "index")]
    kinds += [b.TYPES["f64" if _wide(problem) else "f32"], _kind(problem, "dx")]
    head = [b.GRADS[kind], rows * chunks, len(loops), lane.size, chunks, axes.count, *kinds, *steps(lane)]
    for loop in loops:
        head += [loop.size, *steps(loop)]
    table = np.array(head, dtype=np.int64)
    points = axes.points if op.mode == "avg" else 1
    numbers = np.array([problem.epilogue.alpha / max(points, 1)], dtype=like.dtype)
    parts = max(1, min(rows * chunks, problem["dx"].numel // (GRAIN // 4), PARTS)) if rows * chunks else 0
    threads = nb.threads if parts > 1 else lambda: 1
    address, reals = table.ctypes.data, numbers.ctypes.data
    b.spread_blocks(0, 1, 0, 0, 0, 0, 0, 0, address, reals, like)

    def call(dy: int, x: int, y: int, index: int, aux: int, dx: int, _keep: Any = (table, numbers)) -> None:
        b.spread_blocks(parts, threads(), dy, x, y, index, aux, dx, address, reals, like)

    return call
