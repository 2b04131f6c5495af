"""``reduce.tiled``: every reduction and its gradient on a GPU, any axes, types and strides, in Triton.

Method, forward: the axes become few loops (``_axes.py``); the one that is innermost in memory lies along the lanes of a
tile, kept or reduced, so that no access is strided where a unit stride exists. What one or two tiles hold is read by
blocks that live no longer than that; where there is more to go over, the next tiles are fetched ahead into shared
memory. Where the result is too small to keep the GPU busy, tiles become narrower, down to one line of memory; where
that is not enough, the reduced points are cut into as many parts as there can be blocks at a time, whose results a
second launch combines in a fixed order: see ``_triton/reduction.py``. Sums are in float32, or float64 where a tensor
has that type.

Backward: one pass over dx. What it needs of y's shape is read once for a row or a column of the tile. For the extremes
without an index the forward kernel first counts who is equal to y, for products it multiplies what is not 0 and counts
the zeros.

Cost: the memory traffic, x once (twice where x is counted first). Limits: four loops beside the lanes on each side
after merging, which all tensors of up to five axes keep to.
"""

import math
from typing import Any

import triton
import triton.language as tl

from ...core.engine import Config, Refusals
from ...core.heuristics import roofline
from ...core.problem import Problem
from .._triton import reduction as tr
from .._triton.epilogue import convert
from .._triton.index import INT32
from .._triton.launch import Argument, Launch, Real, Slice, TritonEngine
from .._triton.loops import NEST, indices, nest_arguments, offset, stride_arguments
from ._axes import NUMBER, Axes, Loop

TYPES = ("f64", "f32", "f16", "bf16")
# mode: what is done to a value, how two are combined, whether a root follows
STEPS = {
    "add": (tr.PLAIN, tr.ADD, False),
    "avg": (tr.PLAIN, tr.ADD, False),
    "mul": (tr.PLAIN, tr.MUL, False),
    "min": (tr.PLAIN, tr.MIN, False),
    "max": (tr.PLAIN, tr.MAX, False),
    "amax": (tr.MAGNITUDE, tr.MAX, False),
    "norm1": (tr.MAGNITUDE, tr.ADD, False),
    "norm2": (tr.SQUARE, tr.ADD, True),
    "mul_no_zeros": (tr.ZERO_AS_ONE, tr.MUL, False),
}
# Bytes of a tile, warps, stages and blocks a processor, best guess first: where two tiles hold all, and where not.
_SHORT = ((8192, 4, 1, 2), (16384, 8, 1, 2), (4096, 4, 1, 2), (16384, 4, 1, 2))
_LONG = ((8192, 8, 4, 2), (8192, 4, 4, 4), (16384, 8, 3, 2), (8192, 4, 1, 8))
SPREAD = ("add", "norm1", "norm2", "equal", "magnitude", "index", "index_sign", "mul", "mul_no_zeros")  # GRAD, by place


@triton.jit
def _sign(v):
    return tl.where(v > 0, 1.0, tl.where(v < 0, -1.0, 0.0)).to(v.dtype)


@triton.jit
def _read(tensor, at, lane, lane_stride, in_rows, in_lanes, other, FLOAT: tl.constexpr):
    """What each element of a tile is given; once a row where it is the same along the lanes (a stride of None)."""
    if lane_stride is None:
        v = tl.load(tensor + at[:, None], mask=in_rows, other=other)
    else:
        v = tl.load(tensor + (at[:, None] + lane * lane_stride), mask=in_rows & in_lanes, other=other)
    return v if FLOAT is None else convert(v, FLOAT)


@triton.jit
def spread(
    dy, x, y, index, shares, zeros, dx, scale, ROWS, LANES,
    S0, S1, S2, s0_mul, s0_shift, s1_mul, s1_shift, s2_mul, s2_shift,
    dy_lane_stride, dy0_stride, dy1_stride, dy2_stride, dy3_stride,
    x_lane_stride, x0_stride, x1_stride, x2_stride, x3_stride,
    y_lane_stride, y0_stride, y1_stride, y2_stride, y3_stride,
    index_lane_stride, index0_stride, index1_stride, index2_stride, index3_stride,
    n_lane_stride, n0_stride, n1_stride, n2_stride, n3_stride,
    part_lane_stride, part0_stride, part1_stride, part2_stride, part3_stride,
    dx_lane_stride, dx0_stride, dx1_stride, dx2_stride, dx3_stride,
    LOOPS: tl.constexpr, GRAD: tl.constexpr, FLOAT64: tl.constexpr, WIDE: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_L: tl.constexpr,
):  # fmt: skip
    FLOAT: tl.constexpr = tl.float64 if FLOAT64 else tl.float32
    lane_blocks = tl.cdiv(LANES, BLOCK_L)
    row_block = tl.program_id(0) // lane_blocks
    lane_block = tl.program_id(0) % lane_blocks
    if WIDE:
        row_block = row_block.to(tl.int64)
        lane_block = lane_block.to(tl.int64)
    row = row_block * BLOCK_R + tl.arange(0, BLOCK_R)
    lane = (lane_block * BLOCK_L + tl.arange(0, BLOCK_L))[None, :]
    in_rows, in_lanes = (row < ROWS)[:, None], lane < LANES
    i0, i1, i2, i3 = indices(row, S0, S1, S2, s0_mul, s0_shift, s1_mul, s1_shift, s2_mul, s2_shift, LOOPS, WIDE)
    at = offset(i0, i1, i2, i3, dy0_stride, dy1_stride, dy2_stride, dy3_stride, LOOPS)
    g = _read(dy, at, lane, dy_lane_stride, in_rows, in_lanes, 0.0, FLOAT)
    if x is not None:
        at = offset(i0, i1, i2, i3, x0_stride, x1_stride, x2_stride, x3_stride, LOOPS)
        v = _read(x, at, lane, x_lane_stride, in_rows, in_lanes, 0.0, FLOAT)
    if y is not None:
        at = offset(i0, i1, i2, i3, y0_stride, y1_stride, y2_stride, y3_stride, LOOPS)
        w = _read(y, at, lane, y_lane_stride, in_rows, in_lanes, 0.0, FLOAT)
    if shares is not None:
        at = offset(i0, i1, i2, i3, part0_stride, part1_stride, part2_stride, part3_stride, LOOPS)
        share = _read(shares, at, lane, part_lane_stride, in_rows, in_lanes, 1.0, FLOAT)
        if zeros is not None:
            zero = _read(zeros, at, lane, part_lane_stride, in_rows, in_lanes, 0.0, FLOAT)
    if index is not None:
        at = offset(i0, i1, i2, i3, index0_stride, index1_stride, index2_stride, index3_stride, LOOPS)
        place = _read(index, at, lane, index_lane_stride, in_rows, in_lanes, -1, None)
        number = offset(i0, i1, i2, i3, n0_stride, n1_stride, n2_stride, n3_stride, LOOPS)[:, None]
        g = tl.where(place == number + lane * n_lane_stride, g, 0.0)
    if GRAD == 1 or GRAD == 6:
        r = g * _sign(v)
    elif GRAD == 2:
        r = tl.where(w == 0, 0.0, g * (v / w))
    elif GRAD == 3:
        r = tl.where(v == w, g / share, 0.0 / share)
    elif GRAD == 4:
        r = tl.where(tl.abs(v) == w, g / share, 0.0 / share) * _sign(v)
    elif GRAD == 7:
        alone = tl.where((v == 0) & (zero == 1), g * share, 0.0)
        r = tl.where(zero == 0, g * (share / tl.where(v == 0, 1.0, v)), alone)
    elif GRAD == 8:
        r = tl.where(v == 0, 0.0, g * (w / tl.where(v == 0, 1.0, v)))
    else:
        r = g
    if scale is not None:
        r = r * scale
    at = offset(i0, i1, i2, i3, dx0_stride, dx1_stride, dx2_stride, dx3_stride, LOOPS)[:, None] + lane * dx_lane_stride
    r = tl.broadcast_to(convert(r, dx.dtype.element_ty), (BLOCK_R, BLOCK_L))
    tl.store(dx + at, r, mask=in_rows & in_lanes)


def _power(n: int) -> int:
    return int(triton.next_power_of_2(max(n, 1)))


def _width(lanes: int, widest: int) -> int:
    """Lanes of a tile: few wasted, but not so few that every one costs as much as eight."""
    found = [n for n in (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192) if n <= min(widest, _power(lanes))]
    return min(found, default=_power(lanes), key=lambda n: (-(-lanes // n) * n * (1 + 64 / n), -n))


class _Nest:
    """A reduction's loops with the lanes taken out: what a tile's three sides stand for."""

    def __init__(self, axes: Axes, role: str):
        one = Loop(1, {})
        kept, reduced = [*axes.kept], [*axes.reduced]
        innermost = min([*kept, *reduced], key=lambda loop: loop.strides[role], default=one)
        self.lanes_kept = innermost in kept
        for loops in (kept, reduced):
            if innermost in loops:
                loops.remove(innermost)
        self.lane, self.kept, self.reduced = innermost, kept[::-1], reduced[::-1]  # the innermost first
        self.kept_points = math.prod(loop.size for loop in kept)
        self.reduced_points = math.prod(loop.size for loop in reduced)
        self.axes = axes

    def tile(self, elements: int, lanes: int) -> tuple[int, int, int]:
        """Sides A, B and C of a tile of so many elements, with at most `lanes` along C where they are kept."""
        c = _width(self.lane.size, lanes if self.lanes_kept else elements)
        b = min(elements // c, _power(self.reduced_points))
        return min(elements // c // b, _power(self.kept_points)), b, c

    def blocks(self, tile: tuple[int, int, int]) -> tuple[int, int]:
        """Tiles of the result, and steps that each takes."""
        a, b, c = tile
        lanes = -(-self.lane.size // c)
        rows = -(-self.kept_points // a)
        steps = -(-self.reduced_points // b)
        return (rows * lanes, steps) if self.lanes_kept else (rows, steps * lanes)


def _dense(axes: Axes) -> dict[int, int]:
    """Where a kept loop leads in a dense array over all of them, by its identity."""
    strides, step = {}, 1
    for loop in reversed(axes.kept):
        strides[id(loop)], step = step, step * loop.size
    return strides


def _tile(config: Config) -> tuple[int, int, int]:
    return config["BLOCK_A"], config["BLOCK_B"], config["BLOCK_C"]


def _wide_float(problem: Problem) -> bool:
    return any(t.dtype == "f64" for _, t in problem.items)


def _is_far(problem: Problem) -> bool:
    """Whether 32 bits do not reach: elements, points of an expanded tensor, or a tile beyond them."""
    return max(*(max(t.span, t.numel) for _, t in problem.items), 0) + (1 << 16) > INT32


class ReduceTiled(TritonEngine):
    name = "reduce.tiled"
    operations = ("reduce_fwd", "reduce_bwd")

    def refusals(self, problem: Problem) -> list[str]:
        r = Refusals()
        r.require_tensors(((role, t) for role, t in problem.items if role != "index"), TYPES)
        r.require(not problem.is_empty, "at least one element in every tensor", "an empty one")
        if not r:
            axes = Axes.of(problem)
            nest = _Nest(axes, self._main(problem))
            loops = max(len(nest.kept), len(nest.reduced))
            if problem.op.name == "reduce_bwd":
                loops = len(nest.kept) + len(nest.reduced)
            r.require(loops <= NEST, f"at most {NEST} loops beside the lanes after merging", loops)
        return r

    def _main(self, problem: Problem) -> str:
        return "x" if problem.op.name == "reduce_fwd" else "dx"

    def configs(self, problem: Problem) -> list[Config]:
        axes = Axes.of(problem)
        nest = _Nest(axes, self._main(problem))
        size = problem[self._main(problem)].itemsize
        found: list[Config] = []
        if problem.op.name == "reduce_bwd" and not self._first(problem):
            for elements in (8192 // size, 16384 // size):
                a, b, c = nest.tile(elements, elements)
                found.append({"BLOCK_A": a, "BLOCK_B": b, "BLOCK_C": c, "num_warps": 4, "splits": 1, "STAGES": 1})
        else:
            tiles, steps = nest.blocks(nest.tile(8192 // size, 512 // size))
            short = steps <= 2 and tiles >= 2 * problem.target.processors
            found = [self._config(problem, nest, *shape) for shape in (_SHORT if short else _LONG)]
        return [config for i, config in enumerate(found) if config not in found[:i]]

    def _config(self, problem: Problem, nest: _Nest, bytes: int, warps: int, stages: int, blocks: int) -> Config:
        """Tiles of so many bytes, and as many of them or parts that there are so many blocks a processor."""
        size = problem[self._main(problem)].itemsize
        wanted = problem.target.processors * blocks
        elements = bytes // size
        if "index" in problem.outputs and stages > 1:  # places take registers, too
            elements = min(elements, 512 * warps)
        widths = [lanes // size for lanes in (512, 256, 128)] if nest.lanes_kept else [elements]
        for width in widths:
            tile = nest.tile(elements, width)
            tiles, steps = nest.blocks(tile)
            if tiles > 0.75 * wanted:
                break
        splits = 1
        if tiles <= 0.75 * wanted:
            tile = nest.tile(elements, widths[0])
            tiles, steps = nest.blocks(tile)
            splits = max(1, min(wanted // tiles, steps // 4))  # four steps or more: combining then costs little
            splits = -(-steps // -(-steps // splits))
        a, b, c = tile
        config = {"BLOCK_A": a, "BLOCK_B": b, "BLOCK_C": c, "num_warps": warps, "splits": splits}
        return {**config, "STAGES": stages if -(-steps // splits) > 2 else 1}

    def _first(self, problem: Problem) -> list[tuple[int, int]]:
        """Reductions that a gradient starts with: (BEFORE, COMBINE)."""
        op: Any = problem.op
        if op.name == "reduce_fwd":
            return []
        if op.mode == "mul":
            return [(tr.ZERO_AS_ONE, tr.MUL), (tr.IS_ZERO, tr.ADD)]
        equal = {"min": tr.EQUAL, "max": tr.EQUAL, "amax": tr.EQUAL_MAGNITUDE}.get(op.mode)
        return [(equal, tr.ADD)] if equal and "index" not in problem.inputs else []

    def _sizes(self, problem: Problem, config: Config) -> tuple[int, int, int]:
        """Bytes of a gradient's own results, of the parts' values, and of their places; each a multiple of 16."""
        count = Axes.of(problem).count
        real = 8 if _wide_float(problem) else 4
        own = len(self._first(problem)) * (-(-count * real // 16) * 16)
        if config["splits"] == 1:
            return own, 0, 0
        parts = count * config["splits"]
        places = parts * (8 if _is_far(problem) else 4) if "index" in problem.outputs else 0
        return own, -(-parts * real // 16) * 16, -(-places // 16) * 16

    def workspace_size(self, problem: Problem, config: Config) -> int:
        return sum(self._sizes(problem, config))

    def cost(self, problem: Problem, config: Config) -> float:
        nest = _Nest(Axes.of(problem), self._main(problem))
        tiles, steps = nest.blocks(_tile(config))
        main = problem[self._main(problem)]
        waste = tiles * steps * math.prod(_tile(config)) / max(main.numel, 1)
        # A step other than 1 between lanes moves a whole sector of 32 bytes an element.
        strided = 1 if nest.lane.strides.get(self._main(problem), 1) <= 1 else 32 // main.itemsize
        programs, processors = tiles * config["splits"], problem.target.processors
        busy = programs / (-(-programs // processors) * processors)
        share = -(-steps // config["splits"])
        fetching = 0.9 if share == 1 or config["STAGES"] > 1 else 0.85 if share == 2 else 0.7
        efficiency = fetching * busy / max(1.0, waste**0.5)
        passes = 1 + len(self._first(problem)) * (1 if config["splits"] == 1 else 2)
        passes += problem.op.name == "reduce_fwd" and config["splits"] > 1
        moved = problem.bytes * strided + 2 * self.workspace_size(problem, config)
        return roofline(problem, flops=0.0, bytes=moved, memory_efficiency=efficiency, launches=passes)

    def launches(self, problem: Problem, config: Config) -> list[Launch]:
        op: Any = problem.op
        own, values, _ = self._sizes(problem, config)
        real = "f64" if _wide_float(problem) else "f32"
        if op.name == "reduce_fwd":
            before, combine, root = STEPS[op.mode]
            scale = problem.epilogue.alpha / (op.points(problem["x"]) if op.mode == "avg" else 1)
            index = "index" if "index" in problem.outputs else None
            return self._reduction(problem, config, before, combine, root, scale, "y", index, 0, values)
        axes = Axes.of(problem)
        steps, results = [], [Slice(i * own // max(len(self._first(problem)), 1), real) for i in range(2)]
        for (before, combine), result in zip(self._first(problem), results, strict=False):
            steps += self._reduction(problem, config, before, combine, False, 1.0, result, None, own, values)
        return [*steps, self._spread(problem, config, axes, results)]

    def _reduction(
        self, problem: Problem, config: Config, before: int, combine: int, root: bool, scale: float,
        out: str | Slice, index: str | None, offset: int, values: int,
    ) -> list[Launch]:  # fmt: skip
        """One or two launches that reduce x; the parts' values lie in the workspace from `offset` on."""
        axes = Axes.of(problem)
        nest = _Nest(axes, self._main(problem))
        real = "f64" if _wide_float(problem) else "f32"
        far = _is_far(problem)
        splits = config["splits"]
        dense = _dense(axes)
        common = {"problem": problem, "combine": combine, "real": real, "far": far}
        finish = {"root": root, "scale": scale, "out": out, "index": index, "dense": dense}
        sides = {"tile": _tile(config), "warps": config["num_warps"], "stages": config["STAGES"]}
        reference = "y" if before in (tr.EQUAL, tr.EQUAL_MAGNITUDE) else None
        if splits == 1:
            return [_launch(**common, **finish, **sides, nest=nest, source="x", before=before, reference=reference)]
        parts = Slice(offset, real)
        places = Slice(offset + values, "i64" if far else "i32") if index else None
        first = _launch(
            **common, **sides, nest=nest, source="x", before=before, reference=reference, root=False, scale=1.0,
            out=parts, index=places, dense=dense, splits=splits, apart=axes.count,
        )  # fmt: skip
        # The second reduces over the parts: the kept loops as they are, one reduced loop over a dense array.
        part = Loop(splits, {"parts": axes.count})
        kept = tuple(Loop(loop.size, {**loop.strides, "parts": dense[id(loop)]}) for loop in axes.kept)
        again = _Nest(Axes(kept, (part,)), "parts")
        tile = again.tile(2048, 32)  # one step for what is usual
        finish["dense"] = {id(loop): dense[id(old)] for loop, old in zip(kept, axes.kept, strict=True)}
        second = _launch(
            **common, **finish, nest=again, source=parts, places=places, role="parts", before=tr.PLAIN, reference=None,
            tile=tile, warps=4, stages=1,
        )  # fmt: skip
        return [first, second]

    def _spread(self, problem: Problem, config: Config, axes: Axes, results: list[Slice]) -> Launch:
        op: Any = problem.op
        nest = _Nest(axes, "dx")
        dense = _dense(axes)
        rows = sorted([*nest.kept, *nest.reduced], key=lambda loop: loop.strides["dx"])
        kind = {"avg": "add", "min": "equal", "max": "equal", "amax": "magnitude"}.get(op.mode, op.mode)
        if "index" in problem.inputs:
            kind = "index_sign" if op.mode == "amax" else "index"
        scale = problem.epilogue.alpha / (op.points(problem["dx"]) if op.mode == "avg" else 1)
        first = self._first(problem)
        lanes = nest.lane.size
        count = math.prod(loop.size for loop in rows)
        a, b, c = _tile(config)
        height = a * b
        args: dict[str, Argument] = {
            "dy": "dy", "x": "x", "y": "y" if kind != "mul" else None, "index": "index", "dx": "dx",
            "shares": results[0] if first else None, "zeros": results[1] if len(first) > 1 else None,
            "scale": None if scale == 1.0 else Real(scale, "f64" if _wide_float(problem) else "f32"),
            "ROWS": count, "LANES": lanes, **nest_arguments("s", [loop.size for loop in rows]),
        }  # fmt: skip
        for name, role in (("dy", "dy"), ("x", "x"), ("y", "y"), ("index", "index"), ("n", NUMBER), ("dx", "dx")):
            args |= _strides(name, role, nest.lane, rows, lambda loop, role: loop.strides.get(role))
        args |= _strides("part", "", nest.lane, rows, lambda loop, role: dense.get(id(loop), 0) if first else None)
        for name in ("dy", "x", "y", "index", "part"):  # nothing new along the lanes: read once a row
            args[f"{name}_lane_stride"] = args[f"{name}_lane_stride"] or None
        constexprs = {
            "LOOPS": len(rows), "GRAD": SPREAD.index(kind), "FLOAT64": _wide_float(problem), "WIDE": _is_far(problem),
            "BLOCK_R": height, "BLOCK_L": c,
        }  # fmt: skip
        grid = (-(-count // height) * -(-lanes // c),)
        return Launch(spread, grid, args, constexprs, config["num_warps"], 1)


def _strides(name: str, role: str, lane: Loop, rows: list[Loop], stride: Any) -> dict[str, Argument]:
    return {
        f"{name}_lane_stride": stride(lane, role) if stride(lane, role) is not None or not rows else None,
        **stride_arguments(name, [s for loop in rows if (s := stride(loop, role)) is not None]),
    }


def _launch(
    *, problem: Problem, nest: _Nest, source: str | Slice, role: str = "x", places: Slice | None = None, before: int,
    combine: int, root: bool, scale: float, real: str, far: bool, out: str | Slice, index: str | Slice | None,
    dense: dict[int, int], reference: str | None, tile: tuple[int, int, int], warps: int, stages: int,
    splits: int = 1, apart: int | None = None,
) -> Launch:  # fmt: skip
    tiles, steps = nest.blocks(tile)
    a, b, c = tile
    final = apart is None
    beta = problem.epilogue.beta
    z = "z" if final and "z" in problem.inputs else None

    def place(target: str | Slice | None) -> Any:
        """Strides of something of y's shape: its own, or those of a dense array."""
        if target is None:
            return lambda loop, role: None
        if isinstance(target, Slice):
            return lambda loop, role: dense.get(id(loop), 0)
        return lambda loop, role: loop.strides.get(target, 0)

    def own(loop: Loop, role: str) -> int | None:
        return loop.strides.get(role, 0)

    # Whether a place is the larger, the later it is visited.
    places_in_turn = [loop.strides.get(NUMBER, 0) for loop in ([] if nest.lanes_kept else [nest.lane]) + nest.reduced]
    share = -(-steps // splits)
    args: dict[str, Argument] = {
        "x": source, "places": places, "ref": reference, "z": z, "out": out, "index": index,
        "scale": None if scale == 1.0 else Real(scale, real),
        "beta": None if z is None or beta == 1.0 else Real(beta, real),
        "KEPT": nest.kept_points, "REDUCED": nest.reduced_points, "LANES": nest.lane.size, "STEPS": steps,
        "SPLITS": splits, "SHARE": share, "out_split_stride": apart,
        **nest_arguments("k", [loop.size for loop in nest.kept]),
        **nest_arguments("r", [loop.size for loop in nest.reduced]),
        "x_lane_stride": nest.lane.strides.get(role, 0), "n_lane_stride": nest.lane.strides.get(NUMBER, 0),
        **stride_arguments("xk", [loop.strides[role] for loop in nest.kept]),
        **stride_arguments("xr", [loop.strides[role] for loop in nest.reduced]),
        **stride_arguments("nr", [loop.strides.get(NUMBER, 0) for loop in nest.reduced]),
        **_strides("ref", "y", nest.lane, nest.kept, own if reference else place(None)),
        **_strides("z", "z", nest.lane, nest.kept, own if z else place(None)),
        **_strides("out", "", nest.lane, nest.kept, place(out)),
        **_strides("index", "", nest.lane, nest.kept, place(index)),
    }  # fmt: skip
    constexprs = {
        "KEPT_LOOPS": len(nest.kept), "REDUCED_LOOPS": len(nest.reduced), "LANES_KEPT": nest.lanes_kept,
        "BEFORE": before, "COMBINE": combine, "ROOT": root, "FLOAT64": real == "f64", "WIDE": far,
        "NOTHING": tr.NOTHING[combine], "ABSENT": tr.absent(before, combine),
        "ONCE": share == 1, "ORDERED": places is not None or places_in_turn == sorted(places_in_turn),
        "STAGES": stages, "BLOCK_A": a, "BLOCK_B": b, "BLOCK_C": c,
    }  # fmt: skip
    return Launch(tr.reduce_axes, (tiles * splits,), args, constexprs, warps, 1)
