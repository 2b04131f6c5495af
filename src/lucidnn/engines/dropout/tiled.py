"""``dropout.tiled``: dropout and its gradient on a GPU, any layout and types, in Triton.

Method: tiles of rows by lanes, lanes along the run of the output's memory. A call of Philox gives the words of four
elements that follow each other in logical order. Where these are neighbours in memory too, a tile makes a quarter as
many calls as it has lanes and deals their words out; where they lie along another axis (W of channels-last images), a
program takes four rows at once, one word of each lane's call for each. Elsewhere every element makes a call and uses
one word of four, and with `feature` a row makes one for all its lanes. Arithmetic in float32, or float64 where a tensor
has that type.

Cost: the memory traffic; some 25 integer instructions an element (100 in the third case) hide behind it. Limit: at most
five loops after merging.
"""

import math

import triton
import triton.language as tl

from ...core.engine import Config, Refusals
from ...core.heuristics import roofline
from ...core.problem import Problem
from ...ops.dropout import scale, threshold
from .._triton.epilogue import convert
from .._triton.index import INT32
from .._triton.launch import Argument, Launch, Real, TritonEngine
from .._triton.philox import philox
from ._loops import NUMBER, Loops, dropout_loops

TYPES = ("f64", "f32", "f16", "bf16")
ROWS = 4  # most loops beside the lanes


@triton.jit
def _place(i0, i1, i2, i3, s0, s1, s2, s3, OUTER: tl.constexpr):
    """Where the rows of a tensor start: `OUTER` indices times their steps, the innermost first."""
    at = i0 * 0
    if OUTER > 0:
        at += i0 * s0
    if OUTER > 1:
        at += i1 * s1
    if OUTER > 2:
        at += i2 * s2
    if OUTER > 3:
        at += i3 * s3
    return at


@triton.jit
def _words(number, state, WIDE: tl.constexpr):
    """Philox's four words for quad `number`."""
    seed = tl.load(state)
    offset = tl.load(state + 1)
    c0 = number.to(tl.uint32)
    c1 = c0 * 0
    if WIDE:
        c1 = (number >> 32).to(tl.uint32)
    c2 = c0 * 0 + offset.to(tl.uint32)
    c3 = c0 * 0 + (offset >> 32).to(tl.uint32)
    return philox(c0, c1, c2, c3, seed.to(tl.uint32), (seed >> 32).to(tl.uint32))


@triton.jit
def _apply(x, z, y, mask, at_x, at_z, at_y, at_q, keep, ok, factor, beta, FLOAT: tl.constexpr):
    """One tile: read, drop and scale, add, write."""
    v = convert(tl.load(x + at_x, mask=ok, other=0.0), FLOAT)
    s = tl.where(keep, factor, 0.0).to(FLOAT)
    if z is not None:
        add = convert(tl.load(z + at_z, mask=ok, other=0.0), FLOAT)
        if beta is not None:
            add = add * beta
        r = tl.fma(v, s + tl.zeros(v.shape, FLOAT), add)
    else:
        r = v * s
    tl.store(y + at_y, convert(r, y.dtype.element_ty), mask=ok)
    if mask is not None:
        tl.store(mask + at_q, keep & ok, mask=ok)


@triton.jit
def dropout(
    x, state, z, y, mask, THRESHOLD, factor, beta, ROWS, LANES, S0, S1, S2,
    x_stride, x_0_stride, x_1_stride, x_2_stride, x_3_stride,
    z_stride, z_0_stride, z_1_stride, z_2_stride, z_3_stride,
    y_stride, y_0_stride, y_1_stride, y_2_stride, y_3_stride,
    q_stride, q_0_stride, q_1_stride, q_2_stride, q_3_stride,
    e_stride, e_0_stride, e_1_stride, e_2_stride, e_3_stride,
    QUADS: tl.constexpr, NONE: tl.constexpr, FEATURE: tl.constexpr, OUTER: tl.constexpr, FLOAT64: tl.constexpr,
    WIDE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_L: tl.constexpr,
):  # fmt: skip
    FLOAT: tl.constexpr = tl.float64 if FLOAT64 else tl.float32
    grid_lanes = tl.cdiv(LANES, BLOCK_L)
    row_block = tl.program_id(0) // grid_lanes
    lane_block = tl.program_id(0) % grid_lanes
    row = row_block * BLOCK_R + tl.arange(0, BLOCK_R)
    lane = lane_block * BLOCK_L + tl.arange(0, BLOCK_L)
    quad = lane_block * (BLOCK_L // 4) + tl.arange(0, BLOCK_L // 4)
    if WIDE:
        row = row.to(tl.int64)
        lane = lane.to(tl.int64)
        quad = quad.to(tl.int64)
    limit = (tl.zeros((1, 1), tl.int32) + THRESHOLD).to(tl.uint32, bitcast=True)
    # ---- where each row is
    i0 = row
    i1 = row * 0
    i2 = row * 0
    i3 = row * 0
    if OUTER > 1:
        i1 = row // S0
        i0 = row - i1 * S0
    if OUTER > 2:
        i2 = i1 // S1
        i1 = i1 - i2 * S1
    if OUTER > 3:
        i3 = i2 // S2
        i2 = i2 - i3 * S2
    if QUADS == 2:
        i0 = i0 * 4  # rows go by fours
    at_x = _place(i0, i1, i2, i3, x_0_stride, x_1_stride, x_2_stride, x_3_stride, OUTER)[:, None]
    at_x += (lane * x_stride)[None, :]
    at_y = _place(i0, i1, i2, i3, y_0_stride, y_1_stride, y_2_stride, y_3_stride, OUTER)[:, None]
    at_y += (lane * y_stride)[None, :]
    at_z = at_x
    if z is not None:
        at_z = _place(i0, i1, i2, i3, z_0_stride, z_1_stride, z_2_stride, z_3_stride, OUTER)[:, None]
        at_z += (lane * z_stride)[None, :]
    at_q = at_x
    if mask is not None:
        at_q = _place(i0, i1, i2, i3, q_0_stride, q_1_stride, q_2_stride, q_3_stride, OUTER)[:, None]
        at_q += (lane * q_stride)[None, :]
    number = _place(i0, i1, i2, i3, e_0_stride, e_1_stride, e_2_stride, e_3_stride, OUTER)[:, None]
    ok = (row < ROWS)[:, None] & (lane < LANES)[None, :]
    # ---- four words a call
    if QUADS == 1:
        w0, w1, w2, w3 = _words((number >> 2) + quad[None, :], state, WIDE)
        word = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (BLOCK_R, BLOCK_L))
        keep = word >= limit
        if NONE:
            keep = word != word
        _apply(x, z, y, mask, at_x, at_z, at_y, at_q, keep, ok, factor, beta, FLOAT)
    elif QUADS == 2:
        w0, w1, w2, w3 = _words((number + (lane * e_stride)[None, :]) >> 2, state, WIDE)
        for part in tl.static_range(4):
            if part == 0:
                word = w0
            elif part == 1:
                word = w1
            elif part == 2:
                word = w2
            else:
                word = w3
            keep = word >= limit
            if NONE:
                keep = word != word
            _apply(x, z, y, mask, at_x, at_z, at_y, at_q, keep, ok, factor, beta, FLOAT)
            at_x += x_0_stride
            at_y += y_0_stride
            if z is not None:
                at_z += z_0_stride
            if mask is not None:
                at_q += q_0_stride
    else:
        if not FEATURE:
            number = number + (lane * e_stride)[None, :]
        w0, w1, w2, w3 = _words(number >> 2, state, WIDE)
        which = number & 3
        word = tl.where(which < 2, tl.where(which == 0, w0, w1), tl.where(which == 2, w2, w3))
        keep = word >= limit
        if NONE:
            keep = word != word
        _apply(x, z, y, mask, at_x, at_z, at_y, at_q, keep, ok, factor, beta, FLOAT)


class _Order:
    """The loops as rows and lanes: rows innermost first, counted in fours where the quads run along them."""

    def __init__(self, loops: Loops):
        self.loops, self.lanes = loops, loops.lanes
        rows = [i for i in reversed(range(len(loops.sizes))) if i != self.lanes]
        self.kind = 0 if loops.quads < 0 else 1 if loops.quads == self.lanes else 2
        sizes = list(loops.sizes)
        if self.kind == 2:
            rows.remove(loops.quads)
            rows.insert(0, loops.quads)
            sizes[loops.quads] //= 4
        self.rows, self.sizes = rows, [sizes[i] for i in rows]
        self.count, self.length = math.prod(self.sizes), loops.sizes[self.lanes]

    def grid(self, config: Config) -> int:
        return -(-self.count // config["BLOCK_R"]) * -(-self.length // config["BLOCK_L"])


class Tiled(TritonEngine):
    name = "dropout.tiled"
    operations = ("dropout_fwd", "dropout_bwd")

    def refusals(self, problem: Problem) -> list[str]:
        r = Refusals()
        for role, t in problem.items:
            if role not in ("state", "mask"):
                r.require(t.dtype in TYPES, f"{role} of type {', '.join(TYPES)}", t.dtype)
            r.require(t.numel > 0, f"elements in {role}", str(t))
        if not r:
            order = _Order(dropout_loops(problem))
            r.require(len(order.rows) <= ROWS, f"at most {ROWS + 1} axes after merging", len(order.rows) + 1)
            tiles = min(order.grid(config) for config in self.configs(problem))
            r.require(tiles <= INT32, f"at most {INT32} tiles", tiles)
        return r

    def configs(self, problem: Problem) -> list[Config]:
        order = _Order(dropout_loops(problem))
        itemsize = problem[problem.outputs[0]].itemsize
        found = []
        for elements, warps in ((4096 // itemsize, 4), (8192 // itemsize, 4), (8192 // itemsize, 8)):
            if order.kind == 2:
                elements //= 4
            widest = min(triton.next_power_of_2(order.length), elements)
            blocks = [n for n in (32, 64, 128, 256, 512, 1024, 2048, 4096) if n <= widest]
            # The block of lanes that wastes least; of equals the widest. A quad is four lanes.
            block = min(blocks, default=max(widest, 4), key=lambda n: (-(-order.length // n) * n, -n))
            if order.length >= 4 * elements:
                block = elements
            height = max(1, min(elements // block, triton.next_power_of_2(order.count)))
            config = {"BLOCK_R": height, "BLOCK_L": block, "num_warps": warps, "num_stages": 1}
            if config not in found:
                found.append(config)
        return found

    def cost(self, problem: Problem, config: Config) -> float:
        order = _Order(dropout_loops(problem))
        tiles = order.grid(config)
        waste = tiles * config["BLOCK_R"] * config["BLOCK_L"] / (order.count * order.length)
        lanes = {role: s[order.lanes] for role, s in order.loops.strides.items()}
        moved = sum(t.nbytes * (1 if lanes.get(r, 0) <= 1 else 32 // t.itemsize) for r, t in problem.items)
        calls = 1.0 if order.kind == 0 and not problem.op.feature else 0.25  # type: ignore[attr-defined]
        efficiency = 0.85 * min(1.0, tiles / problem.target.processors) / max(1.0, waste**0.5)
        return roofline(
            problem, flops=100.0 * calls * order.count * order.length, bytes=moved, dtype="f32",
            memory_efficiency=efficiency,
        )  # fmt: skip

    def launches(self, problem: Problem, config: Config) -> list[Launch]:
        loops = dropout_loops(problem)
        order, op = _Order(loops), problem.op
        real = "f64" if any(t.dtype == "f64" for _, t in problem.items) else "f32"
        limit = threshold(op.p)  # type: ignore[attr-defined]
        beta = problem.epilogue.beta
        args: dict[str, Argument] = {
            "x": problem.inputs[0], "state": "state", "z": "z", "y": problem.outputs[0], "mask": "mask",
            "THRESHOLD": (limit + 2**31) % 2**32 - 2**31,  # as 32 bits with a sign
            "factor": Real(scale(op.p), real),  # type: ignore[attr-defined]
            "beta": None if beta in (0.0, 1.0) else Real(beta, real),
            "ROWS": order.count, "LANES": order.length,
        }  # fmt: skip
        args |= {f"S{i}": order.sizes[i] if i + 1 < len(order.sizes) else None for i in range(ROWS - 1)}
        roles = {"x": problem.inputs[0], "z": "z", "y": problem.outputs[0], "q": "mask", "e": NUMBER}
        for prefix, role in roles.items():
            strides = loops.strides.get(role)
            args[f"{prefix}_stride"] = strides[order.lanes] if strides else None
            for i in range(ROWS):
                args[f"{prefix}_{i}_stride"] = strides[order.rows[i]] if strides and i < len(order.rows) else None
        edge = 4 * (config["BLOCK_R"] + config["BLOCK_L"])
        spans = [t.span for _, t in problem.items]
        numel = problem[problem.outputs[0]].numel
        constexprs = {
            "QUADS": order.kind, "NONE": limit == 2**32, "OUTER": len(order.rows), "FLOAT64": real == "f64",
            "FEATURE": loops.strides[NUMBER][order.lanes] == 0, "WIDE": max(numel + edge, *spans) > INT32,
            "BLOCK_R": config["BLOCK_R"], "BLOCK_L": config["BLOCK_L"],
        }  # fmt: skip
        return [Launch(dropout, (order.grid(config),), args, constexprs, config["num_warps"], config["num_stages"])]
